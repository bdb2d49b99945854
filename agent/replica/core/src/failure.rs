//! Decides when the process of a failed replica ends, to be started again.
//!
//! Only a new process serves again, because this one does not know the content of its disk. The process must
//! not end before the disk has a durable record that data may be lost. Otherwise the next process would start
//! in the same boot of the host, and would count as one that has kept everything. With each failure of its
//! disk, the replica leaves the volume and comes back, so the pauses grow. But an engine that starts may need
//! the replica: all disks of a volume may have failed together, and work again.

use std::time::Duration;

/// The pauses before the process ends, by the number of failures in a row. After the first failure, which any
/// disk may have, the process does not wait.
const PAUSES: [Duration; 4] =
    [Duration::ZERO, Duration::from_secs(60), Duration::from_secs(600), Duration::from_secs(3600)];
/// The pause if the disk could not store the count: such a disk can hardly be written.
const UNCOUNTED_PAUSE: Duration = Duration::from_secs(600);
/// The maximum pause if an engine that started after the failure connects: its volume may not start without
/// the replica. Even a replica that fails again at once does not reach the start limit of a supervisor.
const ASKED_PAUSE: Duration = Duration::from_secs(10);
/// The time of service after which earlier failures do not count any more.
pub const FAILURES_FORGIVEN_AFTER: Duration = Duration::from_secs(3600);

/// The state of the record on the disk after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordOutcome {
    /// Durable: data may be gone, and the number of failures in a row.
    Counted,
    /// Data may be gone: durable, or for as long as the boot of the host. The count could not be kept.
    Uncounted,
    /// The record may not be durable: the next process in the same boot of the host may not know that data
    /// may be lost.
    Not,
}

/// The reason why the replica serves nothing any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaFailure {
    /// A description of the failure.
    pub message: String,
    /// The number of failures in a row, this one included.
    pub in_a_row: u32,
    /// The state of the record on the disk.
    pub recorded: RecordOutcome,
    /// True if an engine that came later has asked for the replica.
    pub is_asked_for: bool,
}

impl ReplicaFailure {
    /// Returns the time after the failure at which the process ends, or later if engines are still connected
    /// then. None: it must not end.
    #[must_use]
    pub fn pause_before_end(&self) -> Option<Duration> {
        let at = usize::try_from(self.in_a_row.saturating_sub(1)).unwrap_or(usize::MAX);
        let pause = match self.recorded {
            RecordOutcome::Counted => PAUSES[at.min(PAUSES.len() - 1)],
            RecordOutcome::Uncounted => UNCOUNTED_PAUSE,
            RecordOutcome::Not => return None,
        };
        Some(if self.is_asked_for { pause.min(ASKED_PAUSE) } else { pause })
    }

    /// Returns a message about the failure and the future of the process, for people.
    #[must_use]
    pub fn outlook(&self) -> String {
        let ReplicaFailure { message, in_a_row, .. } = self;
        let times = if *in_a_row > 1 { format!(" (failure {in_a_row} in a row)") } else { String::new() };
        match self.pause_before_end() {
            Some(Duration::ZERO) => format!(
                "{message}{times}; the process ends once no engine is connected, and is started again"
            ),
            Some(pause) => format!(
                "{message}{times}; the process ends {} s after the failure, once no engine is connected, and \
                 is started again",
                pause.as_secs()
            ),
            None => format!(
                "{message}{times}; the possible loss of data is not recorded yet, and the process answers \
                 with errors until that is done. If the process is restarted earlier, and the host is not, \
                 rebuild the replica"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pause_s(in_a_row: u32, recorded: RecordOutcome) -> Option<u64> {
        pause_s_of(&ReplicaFailure {
            message: "the disk".to_owned(),
            in_a_row,
            recorded,
            is_asked_for: false,
        })
    }

    fn pause_s_of(failure: &ReplicaFailure) -> Option<u64> {
        failure.pause_before_end().map(|pause| pause.as_secs())
    }

    #[test]
    fn pauses_grow_up_to_an_hour() {
        let pauses = [1, 2, 3, 4, 5, u32::MAX].map(|times| pause_s(times, RecordOutcome::Counted));
        assert_eq!(pauses, [0, 60, 600, 3600, 3600, 3600].map(Some));
    }

    #[test]
    fn without_a_count_no_end_is_at_once() {
        assert_eq!([1, 9].map(|times| pause_s(times, RecordOutcome::Uncounted)), [Some(600), Some(600)]);
    }

    #[test]
    fn a_loss_that_is_not_recorded_keeps_the_process() {
        assert_eq!([1, 2, 9].map(|times| pause_s(times, RecordOutcome::Not)), [None; 3]);
    }
    #[test]
    fn an_engine_that_comes_later_does_not_wait_for_long() {
        let asked = |in_a_row, recorded| {
            pause_s_of(&ReplicaFailure {
                message: "the disk".to_owned(),
                in_a_row,
                recorded,
                is_asked_for: true,
            })
        };
        assert_eq!(
            [1, 2, 9].map(|times| asked(times, RecordOutcome::Counted)),
            [Some(0), Some(10), Some(10)]
        );
        assert_eq!(
            [RecordOutcome::Uncounted, RecordOutcome::Not].map(|recorded| asked(1, recorded)),
            [Some(10), None]
        );
    }
}
