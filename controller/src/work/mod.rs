//! Runs the reconcilers when something changes, and carries their actions out.

mod decider;
mod execute;
mod place_search;
mod reconcile_runs;

use std::sync::Arc;

use shorthorn_controller_core::objects::Key;
use shorthorn_controller_core::reconcile::{Settings, concerned, waiting_volumes};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;

use crate::agents::Fleet;
use crate::counters::Metrics;
use crate::kubernetes::events::EventSender;
use crate::store::{ObjectStore, ObjectStoreError};

pub use crate::queue::{Depth, RunOutcome, WorkQueue};
use decider::Decider;
use execute::ActionRunner;
use place_search::PlaceSearch;
use reconcile_runs::{ReconcileRunner, ReconcileRuns};

/// Fills the queue with the objects that a change concerns, and starts runs over them.
pub struct Worker {
    store: Arc<dyn ObjectStore>,
    fleet: Arc<Fleet>,
    queue: Arc<WorkQueue>,
    settings: Settings,
    runner: Arc<ReconcileRunner>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("queue", &self.queue).finish_non_exhaustive()
    }
}

impl Worker {
    /// Creates a worker; an error sent to `broken` ends the process.
    #[must_use]
    pub fn new(
        store: Arc<dyn ObjectStore>,
        fleet: Arc<Fleet>,
        queue: Arc<WorkQueue>,
        broken: mpsc::Sender<ObjectStoreError>,
        events: Option<EventSender>,
        settings: Settings,
        metrics: Metrics,
    ) -> Arc<Worker> {
        let decider = Decider::new(Arc::clone(&store), Arc::clone(&fleet), settings);
        let action_runner = ActionRunner::new(Arc::clone(&store), Arc::clone(&fleet), broken, events);
        let runner = Arc::new(ReconcileRunner::new(Arc::clone(&queue), metrics, decider, action_runner));
        Arc::new(Worker { store, fleet, queue, settings, runner })
    }

    /// Works until it is dropped. Running work is interrupted then between two actions, or within a call to
    /// an agent, and continued by the next start.
    pub async fn run(self: Arc<Worker>) {
        let mut changes = self.store.changes();
        self.look_at_everything();
        let (mut runs, mut search) = (ReconcileRuns::new(Arc::clone(&self.runner)), PlaceSearch::new());
        loop {
            let searches = search.is_due(|| self.queue.depth().ready);
            tokio::select! {
                change = changes.recv() => match change {
                    Ok(key) => self.look_at_concerned(&key, &mut search),
                    Err(RecvError::Lagged(_)) => self.look_at_everything(),
                    Err(RecvError::Closed) => return,
                },
                key = self.queue.next(runs.take_only_urgent()), if runs.have_room() => runs.start(key),
                () = self.queue.places_opened() => search.start(),
                () = search.pause(), if searches => {
                    let keys = search.step(&self.store.state());
                    self.queue.add(keys);
                }
                Some(()) = runs.ended() => {}
            }
        }
    }

    fn look_at_concerned(&self, key: &Key, search: &mut PlaceSearch) {
        let cluster = self.store.state();
        let keys = concerned(&cluster, key);
        if waiting_volumes::may_open(&cluster, self.settings.scheduling, key) {
            search.start();
        }
        // The queue reads the cluster state itself.
        drop(cluster);
        self.queue.add(keys);
    }

    fn look_at_everything(&self) {
        let keys: Vec<Key> = self.store.state().keys().chain(self.fleet.node_keys()).collect();
        self.queue.add(keys);
    }
}
