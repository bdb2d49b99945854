//! Ends the pods of lost nodes in the place of their kubelets (`controller_core::lost_node_pods` decides
//! which).
//!
//! No watch covers all pods. Each lost machine with a volume has a task for as long, which watches the pods
//! of that machine alone. Events only wake it: every decision is made from the current state of the API
//! server, and every deletion names its object by uid.

mod machine;
pub(super) mod read;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use shorthorn_controller_core::lost_node_pods::{self, LostMachines};
use shorthorn_controller_core::objects::Kind;
use shorthorn_controller_core::{NodeName, Timestamp};
use tokio::sync::Semaphore;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::{AbortHandle, JoinSet};

use super::discover::Machines;
use crate::kubernetes::events::EventSender;
pub(super) use machine::{deleted, exactly};

use crate::agents::Fleet;
use crate::counters::Metrics;
use crate::store::ObjectStore;

/// The time for which changes are gathered before they are examined: many pods are deleted at once.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// The maximum number of machines that are handled at a time; further lost ones wait.
const MACHINES_MAX: usize = 100;
/// The number of these that call the API server at once.
const ROUNDS_MAX: usize = 4;

/// Force-deletes the pods of lost nodes.
pub struct PodForceDeleter {
    client: Client,
    known: Arc<Machines>,
    store: Arc<dyn ObjectStore>,
    fleet: Arc<Fleet>,
    events: EventSender,
    metrics: Metrics,
    rounds: Semaphore,
}

impl std::fmt::Debug for PodForceDeleter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PodForceDeleter").finish_non_exhaustive()
    }
}

impl PodForceDeleter {
    /// Creates one that does nothing before [`PodForceDeleter::run`].
    #[must_use]
    pub fn new(
        client: Client,
        known: Arc<Machines>,
        store: Arc<dyn ObjectStore>,
        fleet: Arc<Fleet>,
        events: EventSender,
        metrics: Metrics,
    ) -> Arc<PodForceDeleter> {
        let rounds = Semaphore::new(ROUNDS_MAX);
        Arc::new(PodForceDeleter { client, known, store, fleet, events, metrics, rounds })
    }

    /// Looks after lost machines until it is dropped.
    pub async fn run(self: Arc<PodForceDeleter>) {
        let (mut changes, mut found) = (self.store.changes(), self.known.changes());
        let mut tasks = JoinSet::new();
        let mut cared: BTreeMap<String, AbortHandle> = BTreeMap::new();
        let mut waiting = 0;
        loop {
            let lost = self.lost();
            self.care(&lost.machines, &mut cared, &mut tasks);
            let waited = std::mem::replace(&mut waiting, lost.machines.len() - cared.len());
            if waiting > waited {
                tracing::warn!(waiting, "more nodes are lost than the controller handles at a time");
            }
            let again = async {
                match lost.requeue_after {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = location_changed(&mut changes) => {}
                () = found.next() => {}
                () = again => {}
                Some(_) = tasks.join_next() => {}
            }
            tokio::time::sleep(DEBOUNCE).await;
        }
    }

    fn lost(&self) -> LostMachines {
        // Nothing is done before Kubernetes has said which machines it has.
        let Some(kubernetes) = self.known.kubernetes() else { return LostMachines::default() };
        let cluster = self.store.state();
        lost_node_pods::lost(&kubernetes, &cluster, &self.fleet.agents(), Timestamp::now())
    }

    /// Has a task for each of these machines, and for no other one.
    fn care(
        self: &Arc<PodForceDeleter>,
        lost: &BTreeMap<String, NodeName>,
        cared: &mut BTreeMap<String, AbortHandle>,
        tasks: &mut JoinSet<()>,
    ) {
        cared.retain(|name, task| {
            let stays = lost.contains_key(name) && !task.is_finished();
            if !stays {
                tracing::info!(node = name, "node is back: its pods are no longer watched");
                task.abort();
            }
            stays
        });
        for (name, node) in lost {
            if cared.len() < MACHINES_MAX && !cared.contains_key(name) {
                tracing::info!(node = name, "node is lost: watching its pods");
                let task = tasks.spawn(Arc::clone(self).look_after(name.clone(), node.clone()));
                cared.insert(name.clone(), task);
            }
        }
    }

    /// Returns true if this controller sees the agent of that node.
    fn sees(&self, node: &NodeName) -> bool {
        lost_node_pods::is_reachable(&self.fleet.agents(), node, Timestamp::now())
    }
}

/// Waits for a change of a volume, which may be somewhere else now, or of a node.
async fn location_changed(changes: &mut Receiver<shorthorn_controller_core::objects::Key>) {
    loop {
        match changes.recv().await {
            Ok(key) if !matches!(key.kind, Kind::Volume | Kind::Node) => {}
            Ok(_) | Err(RecvError::Lagged(_)) => return,
            // The store is gone, and with it the controller.
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}
