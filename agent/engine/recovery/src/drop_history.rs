//! Decides how soon a dropped replica may come back.
//!
//! Each time that a late replica leaves, the requests of the volume have waited for the whole time-out. If a
//! replica that is late now and then came back at once, it would cost that time again and again. So its
//! pauses grow, and after some rounds it stays out. A replica whose connections break has cost no time, but
//! each of its returns makes the other rebuilding replicas restart their last steps. So does a replica
//! whose disk is full, and it holds up the requests that need the data copied to it.

use std::time::Duration;

use shorthorn_core::DropCause;

/// The time without a drop after which earlier drops do not count any more. It is longer than any pause, so
/// that a replica is not forgiven for the time in which it was out.
const LATE_FORGIVEN: Duration = Duration::from_secs(3600);
/// The pauses after each time that a replica was late. The cause of the first time may lie outside the
/// replica, in a storm on a disk or a network.
const LATE_PAUSES: [Duration; 6] = [
    Duration::ZERO,
    Duration::from_secs(10),
    Duration::from_secs(30),
    Duration::from_secs(60),
    Duration::from_secs(120),
    // Less than the ten minutes after which the controller makes another replica in its place.
    Duration::from_secs(300),
];
/// The pauses of a replica whose disk is full. [`LONGEST_FULL_PAUSE`] follows.
const FULL_PAUSES: [Duration; 9] = [
    Duration::from_secs(1),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
    Duration::from_secs(10),
    Duration::from_secs(30),
    Duration::from_secs(60),
    Duration::from_secs(120),
    Duration::from_secs(300),
];
/// The pause after [`FULL_PAUSES`]. It is longer than the ten minutes after which the controller makes
/// another replica in its place, because each return restarts these ten minutes. It is shorter than
/// [`LATE_FORGIVEN`], so that it does not make the replica forgiven.
const LONGEST_FULL_PAUSE: Duration = Duration::from_secs(900);
/// The longest pause of a replica without which too few are left. A further loss would freeze the volume,
/// which costs more than a wait for a late replica.
const LONGEST_PAUSE_OF_NEEDED: Duration = Duration::from_secs(30);
/// The time after which a broken connection is forgiven, like [`LATE_FORGIVEN`]: a replica that is restarted
/// once is not unsteady.
const BREAKS_FORGIVEN: Duration = Duration::from_secs(60);
/// The number of breaks in a row that cost no pause: processes are restarted, upgraded and killed.
const FREE_BREAKS: u32 = 3;
/// The pause after the first break beyond these; doubled with each further one.
const FIRST_BREAK_PAUSE: Duration = Duration::from_millis(500);
/// The longest pause. It is shorter than [`BREAKS_FORGIVEN`], or each pause would be forgiven, and longer
/// than the last steps of a usual rebuild.
const LONGEST_BREAK_PAUSE: Duration = Duration::from_secs(10);

/// The time for which a replica stays out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RebuildDelay {
    /// The rebuild begins after this time.
    For(Duration),
    /// The replica stays out until an operator clears that.
    Out,
}

/// The recent drops of a replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DropHistory {
    late: DropCount,
    full: DropCount,
    broken: DropCount,
}

/// The number of drops in a row, and the time of the last one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct DropCount {
    count: u32,
    last: Duration,
}

impl DropCount {
    /// Counts another drop, and returns the number of drops in a row.
    fn add(&mut self, now: Duration, forgiven_after: Duration) -> u32 {
        let is_forgiven = now.saturating_sub(self.last) >= forgiven_after;
        self.count = if is_forgiven { 1 } else { self.count.saturating_add(1) };
        self.last = now;
        self.count
    }
}

impl DropHistory {
    /// Records that the replica is dropped, and returns its stay. `now` counts from any fixed point;
    /// `is_needed`: without it so few are left that it may not stay out.
    pub fn dropped(&mut self, cause: DropCause, now: Duration, is_needed: bool) -> RebuildDelay {
        match cause {
            DropCause::Late => {
                let times = self.late.add(now, LATE_FORGIVEN);
                match LATE_PAUSES.get(times.saturating_sub(1) as usize) {
                    Some(pause) if is_needed => RebuildDelay::For((*pause).min(LONGEST_PAUSE_OF_NEEDED)),
                    Some(pause) => RebuildDelay::For(*pause),
                    None if is_needed => RebuildDelay::For(LONGEST_PAUSE_OF_NEEDED),
                    None => RebuildDelay::Out,
                }
            }
            DropCause::Full => {
                let times = self.full.add(now, LATE_FORGIVEN);
                let pause = FULL_PAUSES.get(times.saturating_sub(1) as usize).copied();
                let longest = if is_needed { LONGEST_PAUSE_OF_NEEDED } else { LONGEST_FULL_PAUSE };
                RebuildDelay::For(pause.unwrap_or(LONGEST_FULL_PAUSE).min(longest))
            }
            DropCause::Unused => RebuildDelay::For(Duration::ZERO),
            DropCause::Broken | DropCause::Failed => {
                let times = self.broken.add(now, BREAKS_FORGIVEN);
                let Some(doublings) = times.checked_sub(FREE_BREAKS + 1) else {
                    return RebuildDelay::For(Duration::ZERO);
                };
                let pause = FIRST_BREAK_PAUSE.saturating_mul(1 << doublings.min(16));
                RebuildDelay::For(pause.min(LONGEST_BREAK_PAUSE))
            }
        }
    }

    /// Returns the number of times in a row that the replica was late.
    #[must_use]
    pub fn times_late(&self) -> u32 {
        self.late.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(stay: RebuildDelay) -> f64 {
        match stay {
            RebuildDelay::For(pause) => pause.as_secs_f64(),
            RebuildDelay::Out => f64::INFINITY,
        }
    }

    /// Returns the pauses of a replica that is dropped every `every_s` seconds.
    fn pauses(cause: DropCause, every_s: u64, is_needed: bool) -> Vec<f64> {
        let mut history = DropHistory::default();
        let drop = |n| seconds(history.dropped(cause, Duration::from_secs(100_000 + n * every_s), is_needed));
        (0..10).map(drop).collect()
    }

    #[test]
    fn a_repeatedly_late_replica_stays_out_longer_and_then_for_good() {
        let out = f64::INFINITY;
        assert_eq!(pauses(DropCause::Late, 1000, false), [0., 10., 30., 60., 120., 300., out, out, out, out]);
    }

    #[test]
    fn a_needed_replica_returns_after_bounded_pauses() {
        assert_eq!(pauses(DropCause::Late, 1000, true), [0., 10., 30., 30., 30., 30., 30., 30., 30., 30.]);
    }

    #[test]
    fn a_replica_without_space_is_tried_again_after_growing_pauses() {
        assert_eq!(pauses(DropCause::Full, 1000, false), [1., 1., 2., 4., 10., 30., 60., 120., 300., 900.]);
        assert_eq!(pauses(DropCause::Full, 1000, true), [1., 1., 2., 4., 10., 30., 30., 30., 30., 30.]);
        assert_eq!(pauses(DropCause::Full, 3600, false), [1.; 10]);
    }

    #[test]
    fn an_hour_without_a_drop_is_forgiven() {
        assert_eq!(pauses(DropCause::Late, 3600, false), [0.; 10]);
    }

    #[test]
    fn connections_that_break_in_a_row_cost_pauses() {
        assert_eq!(pauses(DropCause::Broken, 20, false), [0., 0., 0., 0.5, 1., 2., 4., 8., 10., 10.]);
        assert_eq!(pauses(DropCause::Broken, 60, false), [0.; 10]);
    }

    #[test]
    fn a_drop_without_waiting_requests_does_not_count() {
        assert_eq!(pauses(DropCause::Unused, 1, false), [0.; 10]);
    }

    #[test]
    fn breaks_and_lateness_count_apart() {
        let mut history = DropHistory::default();
        for _ in 0..5 {
            history.dropped(DropCause::Broken, Duration::from_secs(1), false);
        }
        assert_eq!(
            history.dropped(DropCause::Late, Duration::from_secs(2), false),
            RebuildDelay::For(Duration::ZERO)
        );
        assert_eq!(history.times_late(), 1);
    }
}
