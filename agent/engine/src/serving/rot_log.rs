//! Limits the lines about rot that is repaired. A disk that has lost a file holds rot in every block of it.

use std::time::{Duration, Instant};

/// The minimum time between two lines about one replica.
const INTERVAL: Duration = Duration::from_secs(1);

/// The lines about rot of one replica.
#[derive(Debug, Default)]
pub(super) struct RotLog {
    logged_at: Option<Instant>,
    unlogged: u64,
}

impl RotLog {
    /// Counts a report of rot. Returns the number of reports without a line before this one, if this one is
    /// to be logged.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.logged_at.is_some_and(|at| now.saturating_duration_since(at) < INTERVAL) {
            self.unlogged += 1;
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_report_of_each_interval_is_logged_with_the_number_of_the_others() {
        let (mut log, now) = (RotLog::default(), Instant::now());
        assert_eq!(log.admit(now), Some(0));
        for after_ms in [0, 500, 999] {
            assert_eq!(log.admit(now + Duration::from_millis(after_ms)), None);
        }
        assert_eq!(log.admit(now + INTERVAL), Some(3));
        assert_eq!(log.admit(now + INTERVAL * 9), Some(0));
    }
}
