//! Decides whether a replica ends its own rebuilds, so that another has to take its place.
//!
//! A rebuild restarts the time after which the controller replaces a lost replica. If the replica itself ends
//! each of its rebuilds, that time has to continue. A disk that is full, or reports an error, will do so
//! again. A replica that was late may have recovered: a rebuild that runs for minutes shows that.

use std::time::Duration;

/// The time after which a rebuild shows that a late replica has recovered.
const RECOVERED_AFTER: Duration = Duration::from_secs(300);

/// The cause of the end of a rebuild, if that was the replica itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RebuildFailure {
    /// The replica was late.
    Late,
    /// The disk was full, or the replica answered with an error.
    Disk,
}

/// The rebuilds that one replica has ended since it left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RebuildFailures {
    late: bool,
    disk: bool,
}

impl RebuildFailures {
    /// Records the end of a rebuild by the replica.
    pub fn add(&mut self, failure: RebuildFailure) {
        match failure {
            RebuildFailure::Late => self.late = true,
            RebuildFailure::Disk => self.disk = true,
        }
    }

    /// Records that a rebuild has run for this time.
    pub fn runs_for(&mut self, time: Duration) {
        self.late &= time < RECOVERED_AFTER;
    }

    /// Returns true if the time without the replica continues during a rebuild.
    #[must_use]
    pub fn any(self) -> bool {
        self.late || self.disk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_rebuild_excuses_a_late_replica_and_no_disk() {
        let mut failures = RebuildFailures::default();
        failures.add(RebuildFailure::Late);
        failures.runs_for(RECOVERED_AFTER - Duration::from_millis(1));
        assert!(failures.any());
        failures.runs_for(RECOVERED_AFTER);
        assert!(!failures.any());
        failures.add(RebuildFailure::Disk);
        failures.runs_for(RECOVERED_AFTER);
        assert!(failures.any());
    }
}
