//! Carries decisions out: writes to the store and calls to agents.

use std::sync::Arc;

use shorthorn_controller_core::objects::{Key, ResourceVersion};
use shorthorn_controller_core::{Action, AgentCall, Decision, Event};
use tokio::sync::mpsc;

use crate::agents::Fleet;
use crate::kubernetes::events::EventSender;
use crate::queue::RunOutcome;
use crate::store::{ObjectStore, ObjectStoreError};

/// Performs the actions of decisions.
pub(super) struct ActionRunner {
    store: Arc<dyn ObjectStore>,
    fleet: Arc<Fleet>,
    /// The channel for errors of the store that no retry can repair.
    broken: mpsc::Sender<ObjectStoreError>,
    /// The events, which people see besides the log.
    events: Option<EventSender>,
}

impl ActionRunner {
    pub(super) fn new(
        store: Arc<dyn ObjectStore>,
        fleet: Arc<Fleet>,
        broken: mpsc::Sender<ObjectStoreError>,
        events: Option<EventSender>,
    ) -> ActionRunner {
        ActionRunner { store, fleet, broken, events }
    }

    /// Carries the actions out in order, up to the first that fails. `version`: that of the object when it
    /// was decided.
    pub(super) async fn carry_out(
        &self,
        key: &Key,
        version: Option<ResourceVersion>,
        decision: Decision,
    ) -> RunOutcome {
        for action in decision.actions {
            // Calls before it may have taken long: an undeletion may want the data again.
            let deletes = matches!(action, Action::Call(_, AgentCall::DeleteReplica { .. }));
            if deletes && self.store.state().version(key) != version {
                tracing::info!(object = %key, "changed since its deletion was decided: reconciling again");
                return RunOutcome::Failed;
            }
            if !self.act(key, action).await {
                return RunOutcome::Failed;
            }
        }
        RunOutcome::Done(decision.requeue_after)
    }

    async fn act(&self, key: &Key, action: Action) -> bool {
        match action {
            Action::Write(object) => {
                tracing::debug!(object = %object.key(), "write");
                let result = self.store.put(*object).await.map(drop);
                self.stored(result)
            }
            Action::Remove(object, version) => {
                tracing::info!(%object, "remove");
                let result = self.store.remove(&object, version).await;
                self.stored(result)
            }
            Action::Call(node, call) => {
                tracing::info!(%node, instance = %call.instance(), "{}", call.verb());
                match self.fleet.call(&node, &call).await {
                    Ok(()) => true,
                    Err(error) => {
                        tracing::warn!(for_object = %key, %node, %error, "{} failed", call.verb());
                        false
                    }
                }
            }
            Action::Emit(event) => {
                self.record(&event);
                true
            }
        }
    }

    fn record(&self, event: &Event) {
        let Event { about, warning, reason, message } = event;
        if *warning {
            tracing::warn!(%about, reason, "{message}");
        } else {
            tracing::info!(%about, reason, "{message}");
        }
        if let Some(events) = &self.events {
            events.record(event, self.store.state().uid(about));
        }
    }

    fn stored(&self, result: Result<(), ObjectStoreError>) -> bool {
        match result {
            Ok(()) => true,
            Err(error @ ObjectStoreError::Conflict { .. }) => {
                tracing::debug!(%error, "reconciling again");
                false
            }
            Err(error @ ObjectStoreError::Unavailable { .. }) => {
                tracing::warn!(%error, "trying again");
                false
            }
            Err(error @ ObjectStoreError::Refused { .. }) => {
                tracing::error!(%error, "trying again later");
                false
            }
            Err(error) => {
                tracing::error!(%error, "the store fails");
                // The channel is full: the error was sent already.
                let _ = self.broken.try_send(error);
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use shorthorn_controller_core::Timestamp;
    use shorthorn_controller_core::objects::{Node, Object};
    use shorthorn_controller_core::observed::AgentLink;
    use shorthorn_types::ReplicaId;

    use super::*;
    use crate::counters::Metrics;
    use crate::queue::WorkQueue;
    use crate::store::MemoryStore;
    use crate::store::failing::FailingStore;

    /// Returns an action runner with an agent on `a` that counts as synced and does not answer.
    fn action_runner(
        store: impl ObjectStore,
    ) -> (Arc<dyn ObjectStore>, ActionRunner, mpsc::Receiver<ObjectStoreError>) {
        let store: Arc<dyn ObjectStore> = Arc::new(store);
        let nodes =
            BTreeMap::from([("a".parse().unwrap(), "unix:///nonexistent/agent.sock".parse().unwrap())]);
        let queue = Arc::new(WorkQueue::new());
        let fleet = Fleet::new(&nodes, Arc::clone(&store), queue, Metrics::default()).unwrap();
        fleet.change(&"a".parse().unwrap(), |agent| agent.link = AgentLink::Synced);
        let (broken, errors) = mpsc::channel(1);
        (Arc::clone(&store), ActionRunner::new(store, fleet, broken, None), errors)
    }

    fn node(name: &str) -> Object {
        Node::new(name, Timestamp::UNIX_EPOCH).into()
    }

    fn decision(actions: Vec<Action>) -> Decision {
        Decision { actions, requeue_after: Some(Duration::from_secs(3)) }
    }

    fn write(object: Object) -> Action {
        Action::Write(Box::new(object))
    }

    #[tokio::test]
    async fn actions_are_performed_in_order_up_to_the_first_that_fails() {
        let (store, action_runner, mut errors) = action_runner(MemoryStore::new());
        let key = node("a").key();
        let all = decision(vec![write(node("a")), write(node("b"))]);
        assert_eq!(
            action_runner.carry_out(&key, None, all).await,
            RunOutcome::Done(Some(Duration::from_secs(3)))
        );
        let some = decision(vec![write(node("c")), write(node("a")), write(node("d"))]);
        assert_eq!(
            action_runner.carry_out(&key, None, some).await,
            RunOutcome::Failed,
            "the version of a is old"
        );
        assert_eq!(store.state().nodes.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert!(errors.try_recv().is_err(), "a conflict needs a new decision only");
    }

    #[tokio::test]
    async fn data_is_not_deleted_if_its_object_has_changed_since_the_decision() {
        let (store, action_runner, _errors) = action_runner(MemoryStore::new());
        let stored = store.put(node("a")).await.unwrap();
        let (key, version) = (stored.key(), stored.metadata().resource_version);
        let call = AgentCall::DeleteReplica {
            disk_path: "/disk".to_owned(),
            disk_uuid: None,
            volume: "v".parse().unwrap(),
            replica_id: ReplicaId::from_random(7),
            record: String::new(),
        };
        let delete = || decision(vec![Action::Call("a".parse().unwrap(), call.clone())]);
        let failures = || action_runner.fleet.agents().get(&"a".parse().unwrap()).unwrap().failures.len();
        for (decided_at, calls) in [(None, 0), (version, 1)] {
            assert_eq!(action_runner.carry_out(&key, decided_at, delete()).await, RunOutcome::Failed);
            assert_eq!(failures(), calls, "decided at version {decided_at:?}");
        }
    }

    #[tokio::test]
    async fn an_error_that_no_retry_repairs_is_sent_once() {
        let (_store, action_runner, mut errors) = action_runner(FailingStore::full());
        let key = node("a").key();
        for _ in 0..2 {
            let full = decision(vec![write(node("a")), write(node(FailingStore::FITS))]);
            assert_eq!(action_runner.carry_out(&key, None, full).await, RunOutcome::Failed);
        }
        assert!(matches!(errors.try_recv(), Ok(ObjectStoreError::Write { .. })));
        assert!(errors.try_recv().is_err(), "the second one finds the channel full");
    }
}
