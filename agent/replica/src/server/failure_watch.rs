use std::time::Instant;

use shorthorn_replica_core::ReplicaFailure;

/// The failure of the replica, as far as it matters to the end of the process.
#[derive(Debug, Default)]
pub(super) struct FailureWatch {
    /// The time of the failure, or of its record if that came later.
    failed_at: Option<Instant>,
    /// True if earlier failures do not count any more.
    is_forgiven: bool,
}

impl FailureWatch {
    /// Returns true if the replica has failed.
    pub fn has_failed(&self) -> bool {
        self.failed_at.is_some()
    }

    /// Begins the pause before the end: the replica has failed, or its failure is on the disk only now.
    pub fn failed(&mut self, now: Instant) {
        self.failed_at = Some(now);
    }

    /// Records that the process has served for so long that earlier failures do not count any more. Returns
    /// false if that was known, or the replica has failed meanwhile.
    pub fn forgive(&mut self) -> bool {
        self.failed_at.is_none() && !std::mem::replace(&mut self.is_forgiven, true)
    }

    /// Returns true if the process ends now because of `failure`.
    pub fn ends_by(&self, failure: &ReplicaFailure) -> bool {
        let pause = self.failed_at.zip(failure.pause_before_end());
        pause.is_some_and(|(failed_at, pause)| failed_at.elapsed() >= pause)
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_replica_core::RecordOutcome;

    use super::*;

    fn failure(recorded: RecordOutcome) -> ReplicaFailure {
        ReplicaFailure { message: "the disk".to_owned(), in_a_row: 1, recorded, is_asked_for: false }
    }

    #[test]
    fn the_process_ends_only_after_its_own_failure_is_recorded() {
        let mut watch = FailureWatch::default();
        let recorded = failure(RecordOutcome::Counted);
        assert!(!watch.has_failed() && !watch.ends_by(&recorded));
        watch.failed(Instant::now());
        assert!(watch.has_failed() && !watch.ends_by(&failure(RecordOutcome::Not)));
        assert!(!watch.ends_by(&failure(RecordOutcome::Uncounted)), "its pause has just begun");
        assert!(watch.ends_by(&recorded), "the first pause is none");
    }

    #[test]
    fn earlier_failures_are_forgiven_once_unless_the_replica_fails() {
        let mut watch = FailureWatch::default();
        assert!(watch.forgive() && !watch.forgive());
        let mut failed = FailureWatch::default();
        failed.failed(Instant::now());
        assert!(!failed.forgive());
    }
}
