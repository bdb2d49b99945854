//! The time limits of requests under faults, and their reasons.

use std::time::Duration;

use super::faults::{FaultKind, Group, Row};

/// The time for which a start of an engine waits for replicas that do not answer, if the others are enough:
/// `MISSING_LIMIT` of the engine.
const MISSING: Duration = Duration::from_secs(5);
/// The time after which a volume without a majority gives up waiting for replicas, or for a change of its
/// view: `LATE_LIMIT_MS` of the engine. Its next start finds all replicas that are back by then.
const LATE: Duration = Duration::from_secs(60);
/// The allowance of one step of the engine's clock, by which each time-out may be noticed later. A second one
/// is for a machine with other load.
const NOTICE: Duration = Duration::from_secs(2);
/// The durable writes of a change of the view, one after the other. They are the set of regions that the
/// dropped replica misses, the proposal, and the commit.
pub const VIEW_WRITES: u32 = 3;
/// The maximum that the delays of the machine itself add.
pub const MACHINE_MAX: Duration = Duration::from_secs(3);

/// The time limit of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The limit without the additional time.
    pub time: Duration,
    /// The additional time.
    pub beyond: Beyond,
    /// The reason for the limit.
    pub why: &'static str,
}

/// The condition that the volume has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beyond {
    /// The volume continues by itself.
    Nothing,
    /// The time without an engine.
    Engine,
    /// The time from the first fault to the end of the last.
    Faults,
}

/// The durations of the faults of an episode.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// From the first one's beginning to the end of the last.
    pub faults: Duration,
    /// The time without an engine, from first to last.
    pub engine: Duration,
    /// The longest delay of a durable write that no fault hindered.
    pub machine: Duration,
}

impl Limit {
    /// Returns the limit of an episode.
    #[must_use]
    pub fn of(self, times: Times) -> Duration {
        self.time
            + (times.machine * VIEW_WRITES).min(MACHINE_MAX)
            + match self.beyond {
                Beyond::Nothing => Duration::ZERO,
                Beyond::Engine => times.engine,
                Beyond::Faults => times.faults,
            }
    }
}

/// Returns the limit of a row, with this `replica_timeout_ms`.
#[must_use]
pub fn limit((group, kind): Row, replica_timeout: Duration) -> Limit {
    let noticed = replica_timeout + NOTICE;
    let limit = |time, beyond, why| Limit { time, beyond, why };
    match (group, kind) {
        (Group::Majority, _) => limit(
            LATE + MISSING,
            Beyond::Faults,
            "no majority: it is waited for; a start finds all that are back",
        ),
        (Group::WithEngine, _) => limit(
            MISSING + replica_timeout + noticed,
            Beyond::Engine,
            "a start waits 5 s for a missing replica, and to the end of its attempt; then replica_timeout_ms",
        ),
        (Group::Alone, FaultKind::EngineKilled) => {
            limit(MISSING + noticed, Beyond::Engine, "a start waits 5 s at most; then replica_timeout_ms")
        }
        (Group::Alone, FaultKind::EnginePaused) => {
            limit(noticed, Beyond::Engine, "a pause makes no replica late by itself")
        }
        (Group::Alone, FaultKind::ReplicaKilled | FaultKind::ConnectionsClosed) => {
            limit(noticed, Beyond::Nothing, "lost at once; the view changes within replica_timeout_ms")
        }
        (Group::Alone, FaultKind::ToReplicaCorrupted | FaultKind::FromReplicaCorrupted) => limit(
            noticed,
            Beyond::Nothing,
            "a bad frame ends its connection; a missing one is late after replica_timeout_ms",
        ),
        (Group::Alone, FaultKind::DiskFull) => limit(
            noticed,
            Beyond::Nothing,
            "the replica leaves at once; the view changes within replica_timeout_ms",
        ),
        (Group::Alone, FaultKind::DiskSlow) => limit(
            replica_timeout + noticed,
            Beyond::Nothing,
            "replica_timeout_ms; while it comes back, once for the copy of a region and once for its answer",
        ),
        (Group::Alone, _) => {
            limit(noticed, Beyond::Nothing, "a majority is prompt: dropped after replica_timeout_ms")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_of_the_machine_counts_and_is_bounded() {
        let limit = limit((Group::Alone, FaultKind::ReplicaPaused), Duration::from_secs(5));
        let of = |ms| limit.of(Times { machine: Duration::from_millis(ms), ..Times::default() });
        assert_eq!([0, 100, 60_000].map(|ms| of(ms).as_millis()), [7000, 7300, 10_000]);
    }
}
