//! The search for places of waiting volumes, a step at a time.

use std::time::Duration;

use shorthorn_controller_core::ClusterState;
use shorthorn_controller_core::objects::Key;
use shorthorn_controller_core::reconcile::waiting_volumes::Search;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

/// The number of waiting volumes that a step adds to the queue.
const SEARCHED_MAX: usize = 64;
/// The time between two steps.
const SEARCH_EVERY: Duration = Duration::from_millis(100);
/// The longest that a step waits for a queue with fewer than [`SEARCHED_MAX`] objects.
const SEARCH_WAIT_MAX: Duration = Duration::from_secs(5);

/// A search, and the time of its last step.
pub(super) struct PlaceSearch {
    search: Search,
    stepped: Instant,
    ticks: Interval,
}

impl PlaceSearch {
    pub(super) fn new() -> PlaceSearch {
        let mut ticks = interval(SEARCH_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        PlaceSearch { search: Search::default(), stepped: Instant::now(), ticks }
    }

    /// Starts a search: a place may have opened.
    pub(super) fn start(&mut self) {
        self.search.start();
    }

    /// Returns true if a step is due. `ready` returns the number of objects that wait in the queue.
    pub(super) fn is_due(&self, ready: impl FnOnce() -> usize) -> bool {
        let may_step = || ready() < SEARCHED_MAX || self.stepped.elapsed() >= SEARCH_WAIT_MAX;
        self.search.is_running() && may_step()
    }

    /// Waits until the time between two steps has passed.
    pub(super) async fn pause(&mut self) {
        self.ticks.tick().await;
    }

    /// Makes a step: returns the volumes to check.
    pub(super) fn step(&mut self, cluster: &ClusterState) -> Vec<Key> {
        self.stepped = Instant::now();
        self.search.next(cluster, SEARCHED_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_step_waits_for_a_short_queue_but_not_for_long() {
        let mut search = PlaceSearch::new();
        assert!(!search.is_due(|| 0), "no place has opened");
        search.start();
        assert!(search.is_due(|| SEARCHED_MAX - 1) && !search.is_due(|| SEARCHED_MAX));
        tokio::time::advance(SEARCH_WAIT_MAX).await;
        assert!(search.is_due(|| SEARCHED_MAX));
        assert!(search.step(&ClusterState::default()).is_empty());
        assert!(!search.is_due(|| 0), "no volume waits");
        search.start();
        assert!(search.is_due(|| 0) && !search.is_due(|| SEARCHED_MAX), "the last step was just now");
    }

    #[tokio::test(start_paused = true)]
    async fn steps_are_apart() {
        let mut search = PlaceSearch::new();
        search.pause().await;
        let begun = Instant::now();
        search.pause().await;
        search.pause().await;
        assert!(begun.elapsed() >= 2 * SEARCH_EVERY);
    }
}
