//! Decides about one object at a time, and reserves the disk space that a decision gives away.

use std::sync::{Arc, Mutex, PoisonError};

use shorthorn_controller_core::objects::{Key, Replica, ResourceVersion};
use shorthorn_controller_core::reconcile::{Context, Settings, gives_space_away, reconcile};
use shorthorn_controller_core::{Decision, Timestamp};
use shorthorn_types::limits::MAX_MEMBERS;

use crate::agents::Fleet;
use crate::store::ObjectStore;

/// The reconcilers with the state that they decide from.
pub(super) struct Decider {
    store: Arc<dyn ObjectStore>,
    fleet: Arc<Fleet>,
    settings: Settings,
    /// Held while a decision that may give disk space away is taken, until its space is reserved.
    placing: Mutex<()>,
}

/// A decision. The space of its new replicas is reserved until [`Decider::release`].
#[derive(Debug)]
pub(super) struct Decided {
    /// The actions, in their order.
    pub(super) decision: Decision,
    /// The version of the object that it is about; none: the object is not stored.
    pub(super) version: Option<ResourceVersion>,
    /// The names of the new replicas.
    pub(super) reserved: Vec<String>,
}

impl Decider {
    pub(super) fn new(store: Arc<dyn ObjectStore>, fleet: Arc<Fleet>, settings: Settings) -> Decider {
        Decider { store, fleet, settings, placing: Mutex::new(()) }
    }

    /// Returns a decision about the object. None: a disk or a node that the decision has chosen takes no
    /// replica any more.
    ///
    /// # Errors
    /// The host has no random numbers.
    pub(super) fn decide(&self, key: &Key) -> Result<Option<Decided>, getrandom::Error> {
        let gives = gives_space_away(&self.store.state(), key);
        let _placing = gives.then(|| self.placing.lock().unwrap_or_else(PoisonError::into_inner));
        let (decision, version) = self.reconcile(key)?;
        Ok(self.reserve(key, decision, version))
    }

    /// Drops the reservations of a decision that was carried out, or will not be.
    pub(super) fn release(&self, reserved: &[String]) {
        if !reserved.is_empty() {
            self.store.forget_reservations(reserved);
        }
    }

    fn reserve(&self, key: &Key, decision: Decision, version: Option<ResourceVersion>) -> Option<Decided> {
        let new: Vec<Replica> = decision.new_replicas(&self.store.state()).cloned().collect();
        let reserved = new.iter().map(|replica| replica.metadata.name.clone()).collect();
        if !new.is_empty() && !self.store.reserve(new) {
            tracing::info!(object = %key, "a chosen place was cordoned meanwhile: choosing again");
            return None;
        }
        Some(Decided { decision, version, reserved })
    }

    fn reconcile(&self, key: &Key) -> Result<(Decision, Option<ResourceVersion>), getrandom::Error> {
        let mut random = [0; MAX_MEMBERS];
        for number in &mut random {
            *number = getrandom::u64()?;
        }
        let cluster = self.store.state();
        let agents = self.fleet.agents();
        let (now, settings) = (Timestamp::now(), self.settings);
        let context = Context { cluster: &cluster, agents: &agents, now, random, settings };
        Ok((reconcile(&context, key), cluster.version(key)))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use shorthorn_controller_core::Action;
    use shorthorn_controller_core::objects::{
        CurrentState, DesireState, DiskSpec, Kind, Metadata, Node, Object, ReplicaSpec, StoredReplicaStatus,
    };
    use shorthorn_types::ReplicaId;

    use super::*;
    use crate::counters::Metrics;
    use crate::queue::WorkQueue;
    use crate::store::MemoryStore;

    const DISK: &str = "/disk";

    async fn decider(allow_scheduling: bool) -> (Arc<dyn ObjectStore>, Decider) {
        let store: Arc<dyn ObjectStore> = Arc::new(MemoryStore::new());
        let mut node = Node::new("a", Timestamp::UNIX_EPOCH);
        let disk = DiskSpec {
            allow_scheduling,
            eviction_requested: false,
            lost: false,
            storage_reserved: 0,
            tags: Default::default(),
        };
        node.spec.disks.insert(DISK.to_owned(), disk);
        store.put(node.into()).await.unwrap();
        let queue = Arc::new(WorkQueue::new());
        let fleet = Fleet::new(&BTreeMap::new(), Arc::clone(&store), queue, Metrics::default()).unwrap();
        (Arc::clone(&store), Decider::new(store, fleet, Settings::default()))
    }

    fn replica() -> Object {
        let spec = ReplicaSpec {
            volume_name: "v".parse().unwrap(),
            volume_size: 1 << 30,
            replica_id: ReplicaId::from_random(7),
            node_id: "a".parse().unwrap(),
            disk_path: DISK.to_owned(),
            disk_id: String::new(),
            desire_state: DesireState::Stopped,
            eviction_requested: false,
        };
        let status =
            StoredReplicaStatus { current_state: CurrentState::Stopped, ..StoredReplicaStatus::default() };
        Replica { metadata: Metadata::new("v-7", Timestamp::UNIX_EPOCH), spec, status }.into()
    }

    fn decision() -> (Key, Decision) {
        let actions = vec![Action::Write(Box::new(replica()))];
        (Key::new(Kind::Volume, "v"), Decision { actions, requeue_after: None })
    }

    #[tokio::test]
    async fn the_space_of_a_new_replica_is_reserved_until_the_release() {
        let (store, decider) = decider(true).await;
        let (key, decision) = decision();
        let version = ResourceVersion::new(3);
        let decided = decider.reserve(&key, decision, version).unwrap();
        assert_eq!((decided.version, &decided.reserved), (version, &vec!["v-7".to_owned()]));
        assert_eq!(store.state().replicas.coming().count(), 1);
        decider.release(&decided.reserved);
        assert_eq!(store.state().replicas.coming().count(), 0);
    }

    #[tokio::test]
    async fn a_decision_for_a_closed_disk_is_dropped_and_reserves_nothing() {
        let (store, decider) = decider(false).await;
        let (key, decision) = decision();
        assert!(decider.reserve(&key, decision, ResourceVersion::new(3)).is_none());
        assert_eq!(store.state().replicas.coming().count(), 0);
    }

    #[tokio::test]
    async fn an_object_that_does_not_exist_needs_no_action() {
        let (_store, decider) = decider(true).await;
        let decided = decider.decide(&Key::new(Kind::Volume, "gone")).unwrap().unwrap();
        assert_eq!((decided.decision, decided.version), (Decision::nothing(), None));
    }
}
