//! Runs over objects, a bounded number at a time.

use std::sync::Arc;
use std::time::Instant;

use shorthorn_controller_core::objects::Key;
use tokio::task::JoinSet;

use super::decider::{Decided, Decider};
use super::execute::ActionRunner;
use crate::counters::Metrics;
use crate::queue::{RunOutcome, WorkQueue};

/// The maximum number of objects in work. Calls to agents can take long, and one must not delay all.
const RUNS_MAX: usize = 64;
/// The number of urgent ones besides them: no call to a slow agent delays a fail-over.
const URGENT_RUNS_MAX: usize = 32;

/// A run: decides about an object, and carries the decision out.
pub(super) struct ReconcileRunner {
    queue: Arc<WorkQueue>,
    metrics: Metrics,
    decider: Decider,
    action_runner: ActionRunner,
}

impl ReconcileRunner {
    pub(super) fn new(
        queue: Arc<WorkQueue>,
        metrics: Metrics,
        decider: Decider,
        action_runner: ActionRunner,
    ) -> ReconcileRunner {
        ReconcileRunner { queue, metrics, decider, action_runner }
    }

    /// Runs over an object that the queue has handed out, and hands it back.
    async fn run(self: Arc<ReconcileRunner>, key: Key) {
        let started = Instant::now();
        let outcome = match self.decider.decide(&key) {
            // The next decision knows why the place is not open any more.
            Ok(None) => RunOutcome::Failed,
            Ok(Some(Decided { decision, version, reserved })) => {
                let outcome = self.action_runner.carry_out(&key, version, decision).await;
                self.decider.release(&reserved);
                outcome
            }
            Err(error) => {
                tracing::error!(%error, "cannot get random numbers");
                RunOutcome::Failed
            }
        };
        self.metrics.reconciled(key.kind, outcome != RunOutcome::Failed, started.elapsed());
        self.queue.done(&key, outcome);
    }
}

/// The runs in progress. Dropping them interrupts each between two actions, or within a call to an agent.
pub(super) struct ReconcileRuns {
    runner: Arc<ReconcileRunner>,
    running: JoinSet<()>,
}

impl ReconcileRuns {
    pub(super) fn new(runner: Arc<ReconcileRunner>) -> ReconcileRuns {
        ReconcileRuns { runner, running: JoinSet::new() }
    }

    /// Returns true if another object may run.
    pub(super) fn have_room(&self) -> bool {
        self.running.len() < RUNS_MAX + URGENT_RUNS_MAX
    }

    /// Returns true if another object may run only if it is urgent.
    pub(super) fn take_only_urgent(&self) -> bool {
        self.running.len() >= RUNS_MAX
    }

    pub(super) fn start(&mut self, key: Key) {
        self.running.spawn(Arc::clone(&self.runner).run(key));
    }

    /// Waits until a run has ended; none if none is in progress.
    pub(super) async fn ended(&mut self) -> Option<()> {
        self.running.join_next().await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use shorthorn_controller_core::objects::Kind;
    use shorthorn_controller_core::reconcile::Settings;
    use tokio::sync::mpsc;

    use super::*;
    use crate::agents::Fleet;
    use crate::queue::Depth;
    use crate::store::{MemoryStore, ObjectStore};

    fn runs() -> (Arc<WorkQueue>, ReconcileRuns) {
        let store: Arc<dyn ObjectStore> = Arc::new(MemoryStore::new());
        let (queue, metrics) = (Arc::new(WorkQueue::new()), Metrics::default());
        let nodes = BTreeMap::new();
        let fleet = Fleet::new(&nodes, Arc::clone(&store), Arc::clone(&queue), metrics.clone()).unwrap();
        let decider = Decider::new(Arc::clone(&store), Arc::clone(&fleet), Settings::default());
        let action_runner = ActionRunner::new(store, fleet, mpsc::channel(1).0, None);
        let runner = ReconcileRunner::new(Arc::clone(&queue), metrics, decider, action_runner);
        (queue, ReconcileRuns::new(Arc::new(runner)))
    }

    fn key(number: usize) -> Key {
        Key::new(Kind::Volume, format!("v{number}"))
    }

    #[tokio::test]
    async fn a_run_hands_its_object_back_and_is_counted() {
        let (queue, mut runs) = runs();
        queue.add([key(0)]);
        runs.start(queue.next(false).await);
        assert_eq!(queue.depth(), Depth { ready: 0, active: 1, timed: 0 });
        assert_eq!(runs.ended().await, Some(()));
        assert_eq!(queue.depth(), Depth::default(), "the volume does not exist: nothing is to be done");
        assert_eq!(runs.runner.metrics.reconciles.get(&[("kind", "volume"), ("result", "ok")]), 1);
        assert_eq!(runs.ended().await, None);
    }

    #[tokio::test]
    async fn urgent_objects_have_room_beyond_the_others() {
        let (_queue, mut runs) = runs();
        for started in 0..RUNS_MAX + URGENT_RUNS_MAX {
            assert_eq!((runs.have_room(), runs.take_only_urgent()), (true, started >= RUNS_MAX));
            runs.start(key(started));
        }
        assert!(!runs.have_room());
        runs.ended().await;
        assert!(runs.have_room() && runs.take_only_urgent());
    }
}
