//! Runs the reconcilers when something changes, and carries their actions out.

mod decider;
mod execute;

use std::sync::Arc;
use std::time::{Duration, Instant};

use shorthorn_controller_core::objects::Key;
use shorthorn_controller_core::reconcile::waiting_volumes::{self, Search};
use shorthorn_controller_core::reconcile::{Settings, concerned};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::agents::Fleet;
use crate::counts::Metrics;
use crate::kubernetes::events::Events;
use crate::store::{Store, StoreError};

pub use crate::queue::{Depth, Outcome, Queue};
use decider::{Decided, Decider};
use execute::Executor;

/// The maximum number of objects in work. Calls to agents can take long, and one must not delay all.
const RUNS_MAX: usize = 64;
/// The number of urgent ones besides them: no call to a slow agent delays a fail-over.
const URGENT_RUNS_MAX: usize = 32;
/// The number of waiting volumes that a search for places adds to the queue at a time.
const SEARCHED_MAX: usize = 64;
/// The time between two of these steps.
const SEARCH_EVERY: Duration = Duration::from_millis(100);
/// The longest that a step waits for a queue with fewer than [`SEARCHED_MAX`] objects.
const SEARCH_WAIT_MAX: Duration = Duration::from_secs(5);

/// The shared state of all runs.
pub struct Worker {
    store: Arc<dyn Store>,
    fleet: Arc<Fleet>,
    queue: Arc<Queue>,
    settings: Settings,
    metrics: Metrics,
    decider: Decider,
    executor: Executor,
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
        store: Arc<dyn Store>,
        fleet: Arc<Fleet>,
        queue: Arc<Queue>,
        broken: mpsc::Sender<StoreError>,
        events: Option<Events>,
        settings: Settings,
        metrics: Metrics,
    ) -> Arc<Worker> {
        let decider = Decider::new(Arc::clone(&store), Arc::clone(&fleet), settings);
        let executor = Executor::new(Arc::clone(&store), Arc::clone(&fleet), broken, events);
        Arc::new(Worker { store, fleet, queue, settings, metrics, decider, executor })
    }

    /// Works until it is dropped. Running work is interrupted then between two actions, or within a call to
    /// an agent, and continued by the next start.
    pub async fn run(self: Arc<Worker>) {
        let mut changes = self.store.changes();
        self.look_at_everything();
        let (mut runs, mut search, mut stepped) = (JoinSet::new(), Search::default(), Instant::now());
        let mut step = tokio::time::interval(SEARCH_EVERY);
        step.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_due = || self.queue.depth().ready < SEARCHED_MAX || stepped.elapsed() >= SEARCH_WAIT_MAX;
            let searches = search.is_running() && is_due();
            tokio::select! {
                change = changes.recv() => match change {
                    Ok(key) => self.look_at_concerned(&key, &mut search),
                    Err(RecvError::Lagged(_)) => self.look_at_everything(),
                    Err(RecvError::Closed) => return,
                },
                key = self.queue.next(runs.len() >= RUNS_MAX), if runs.len() < RUNS_MAX + URGENT_RUNS_MAX => {
                    runs.spawn(Arc::clone(&self).one(key));
                }
                () = self.queue.places_opened() => search.start(),
                _ = step.tick(), if searches => {
                    stepped = Instant::now();
                    let keys = search.next(&self.store.state(), SEARCHED_MAX);
                    self.queue.add(keys);
                }
                Some(_) = runs.join_next() => {}
            }
        }
    }

    fn look_at_concerned(&self, key: &Key, search: &mut Search) {
        let cluster = self.store.state();
        let keys = concerned(&cluster, key);
        if waiting_volumes::may_open(&cluster, self.settings.scheduling, key) {
            search.start();
        }
        // The queue looks at the cluster state itself.
        drop(cluster);
        self.queue.add(keys);
    }

    fn look_at_everything(&self) {
        let keys: Vec<Key> = self.store.state().keys().chain(self.fleet.node_keys()).collect();
        self.queue.add(keys);
    }

    async fn one(self: Arc<Worker>, key: Key) {
        let started = Instant::now();
        let outcome = match self.decider.decide(&key) {
            // The next decision knows why the place is not open any more.
            Ok(None) => Outcome::Failed,
            Ok(Some(Decided { decision, version, reserved })) => {
                let outcome = self.executor.carry_out(&key, version, decision).await;
                self.decider.release(&reserved);
                outcome
            }
            Err(error) => {
                tracing::error!(%error, "no random numbers");
                Outcome::Failed
            }
        };
        self.metrics.reconciled(key.kind, outcome != Outcome::Failed, started.elapsed());
        self.queue.done(&key, outcome);
    }
}
