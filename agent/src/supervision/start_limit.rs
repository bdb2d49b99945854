//! The limit of starts that the units of engines and replicas have, for supervisors other than systemd.

use std::time::{Duration, Instant};

/// `StartLimitBurst=` of the units.
pub(super) const START_LIMIT_BURST: u32 = 20;
/// `StartLimitIntervalSec=` of the units.
const START_LIMIT_INTERVAL: Duration = Duration::from_secs(60);
/// The time after which the agent starts a process again whose limit is reached. A process without systemd
/// waits for this time too.
pub const AFTER_START_LIMIT: Duration = Duration::from_secs(10);

/// Counts the starts of a process, as systemd does for a unit: in intervals that begin with a start.
///
/// A process that fails waits longer each time, and does not reach the limit. A process that ends cleanly
/// does not wait, so that only this limit bounds its starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StartLimit {
    interval: Option<Interval>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Interval {
    begin: Instant,
    starts: u32,
}

/// Returns true if `time` is in the interval that starts at `begin`.
fn is_within(begin: Instant, time: Instant) -> bool {
    time.saturating_duration_since(begin) <= START_LIMIT_INTERVAL
}

impl StartLimit {
    /// Counts a start at the time `now`.
    pub fn count(&mut self, now: Instant) {
        self.interval = match self.interval {
            Some(Interval { begin, starts }) if is_within(begin, now) => {
                Some(Interval { begin, starts: starts.saturating_add(1) })
            }
            _ => Some(Interval { begin: now, starts: 1 }),
        };
    }

    /// Forgets the counted starts, as `systemctl reset-failed` does.
    pub fn reset(&mut self) {
        self.interval = None;
    }

    /// Returns the wait before the next start: `wait`, or [`AFTER_START_LIMIT`] if the limit is reached. Then
    /// the count begins again.
    pub fn wait(&mut self, wait: Duration, now: Instant) -> Duration {
        let is_reached = |interval: Interval| {
            interval.starts >= START_LIMIT_BURST && is_within(interval.begin, now + wait)
        };
        if !self.interval.is_some_and(is_reached) {
            return wait;
        }
        self.reset();
        wait.max(AFTER_START_LIMIT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENGINE: &str =
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../systemd/system/shorthorn-engine@.service"));
    const REPLICA: &str =
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../systemd/system/shorthorn-replica@.service"));

    /// Counts as many starts as the limit permits, all at this time.
    fn reached(now: Instant) -> StartLimit {
        let mut limit = StartLimit::default();
        for _ in 0..START_LIMIT_BURST {
            assert_eq!(limit.wait(Duration::ZERO, now), Duration::ZERO);
            limit.count(now);
        }
        limit
    }

    #[test]
    fn the_limit_is_that_of_the_units() {
        let interval_s = START_LIMIT_INTERVAL.as_secs();
        for unit in [ENGINE, REPLICA] {
            for line in [
                format!("StartLimitIntervalSec={interval_s}s"),
                format!("StartLimitBurst={START_LIMIT_BURST}"),
                "Restart=always".to_owned(),
            ] {
                assert!(unit.lines().any(|found| found == line), "{line} is not in {unit}");
            }
        }
    }

    #[test]
    fn a_start_above_the_limit_waits_and_begins_a_new_count() {
        let now = Instant::now();
        let mut limit = reached(now);
        assert_eq!(limit.wait(Duration::ZERO, now), AFTER_START_LIMIT);
        assert_eq!(limit, StartLimit::default());
        assert_eq!(limit.wait(Duration::ZERO, now), Duration::ZERO);
    }

    #[test]
    fn a_wait_that_is_longer_or_ends_after_the_interval_is_kept() {
        let now = Instant::now();
        let longer = 2 * AFTER_START_LIMIT;
        assert_eq!(reached(now).wait(longer, now), longer);
        let after = START_LIMIT_INTERVAL + Duration::from_millis(1);
        assert_eq!(reached(now).wait(after, now), after);
        assert_eq!(reached(now).wait(Duration::ZERO, now + after), Duration::ZERO);
    }

    #[test]
    fn the_first_start_after_an_interval_begins_the_next_one() {
        let begin = Instant::now();
        let mut limit = reached(begin);
        let next = begin + START_LIMIT_INTERVAL + Duration::from_millis(1);
        limit.count(next);
        assert_eq!(limit.interval, Some(Interval { begin: next, starts: 1 }));
        assert_eq!(limit.wait(Duration::ZERO, next), Duration::ZERO);
    }

    #[test]
    fn a_reset_permits_as_many_starts_again() {
        let now = Instant::now();
        let mut limit = reached(now);
        limit.reset();
        assert_eq!(limit, StartLimit::default());
    }
}
