//! Logs the errors that reach the user of the device, and limits their rate.
//!
//! A queue thread passes the errors to the main thread, and never writes to the log itself. The log may be on
//! this volume, and the thread would then wait for its own requests.

use std::time::{Duration, Instant};

use shorthorn_core::{Cause, FailedRequest, Operation};
use shorthorn_frontend::RefusedRequest;
use shorthorn_types::Errno;

/// The maximum number of errors that each queue logs in one [`INTERVAL`]: enough to show ranges and causes
/// side by side. With [`MAX_QUEUES`](shorthorn_types::limits::MAX_QUEUES) queues an engine logs about eight
/// lines per second at most.
const REPORTED_MAX: u32 = 10;
/// The interval after which the queue reports the number of errors that it has left out, and reports single
/// errors again. Ten lines in ten seconds do not fill a log.
const INTERVAL: Duration = Duration::from_secs(10);

/// An error that reaches the user of the device, as a queue reports it to the main thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceError {
    /// The volume has failed a request.
    Failed(FailedRequest),
    /// The frontend has refused a request, so that the volume has not seen it.
    Refused(RefusedRequest),
    /// More errors were counted and not logged one by one.
    More {
        /// The number of suppressed errors.
        count: u64,
    },
}

/// Limits the number of errors that a queue reports.
#[derive(Debug, Default)]
pub struct Limiter {
    /// The beginning of the running interval, if any.
    since: Option<Instant>,
    reported: u32,
    unreported: u64,
}

impl Limiter {
    /// Returns true if this error is to be logged. Else it is only counted.
    pub fn admits(&mut self, now: Instant) -> bool {
        self.since.get_or_insert(now);
        if self.reported == REPORTED_MAX {
            self.unreported += 1;
            return false;
        }
        self.reported += 1;
        true
    }

    /// Returns true if an interval is under way: [`Limiter::end_if_over`] is needed.
    pub fn is_active(&self) -> bool {
        self.since.is_some()
    }

    /// Ends the interval if its time is over: returns the number of errors that were left out.
    pub fn end_if_over(&mut self, now: Instant) -> Option<DeviceError> {
        let since = self.since?;
        (now.saturating_duration_since(since) >= INTERVAL).then(|| self.end()).flatten()
    }

    /// Ends the interval: returns the number of errors that were left out.
    pub fn end(&mut self) -> Option<DeviceError> {
        let count = std::mem::take(self).unreported;
        (count > 0).then_some(DeviceError::More { count })
    }
}

/// Returns the operation, for people.
pub fn name(operation: Operation) -> &'static str {
    match operation {
        Operation::Read | Operation::CheckedRead => "read",
        Operation::Write { fua: false } | Operation::WriteRot => "write",
        Operation::Write { fua: true } => "durable write",
        Operation::Flush => "flush",
        Operation::Discard => "discard",
        Operation::WriteZeroes { .. } => "write of zeroes",
        Operation::Verify => "check",
    }
}

/// Returns the cause, for people.
pub fn reason(cause: Cause, errno: Errno) -> &'static str {
    match cause {
        Cause::Replicas(_) if errno == Errno::NO_SPACE => "the disks of these replicas have no space for it",
        Cause::Replicas(_) => "this replica failed, and no other replica is left",
        Cause::Rot(_) => {
            "the disks of these replicas have lost or changed the data, and no other member has it"
        }
        Cause::LostWrites => {
            "acknowledged writes may be gone: every request fails until the volume is attached again"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_is_reported_as_a_few_errors_and_a_number() {
        let mut limiter = Limiter::default();
        let start = Instant::now();
        assert_eq!((limiter.is_active(), limiter.end_if_over(start)), (false, None));
        let storm = |limiter: &mut Limiter, at| (0..1000).filter(|_| limiter.admits(at)).count();
        assert_eq!(storm(&mut limiter, start), 10);
        assert_eq!(
            limiter.end_if_over(start + INTERVAL - Duration::from_millis(1)),
            None,
            "one line per interval"
        );
        assert_eq!(limiter.end_if_over(start + INTERVAL), Some(DeviceError::More { count: 990 }));
        assert!(!limiter.is_active());
        assert_eq!(storm(&mut limiter, start + INTERVAL), 10, "then single errors are reported again");
        assert_eq!(limiter.end(), Some(DeviceError::More { count: 990 }), "nothing is left out at the end");
    }

    #[test]
    fn few_errors_are_reported_one_by_one_and_no_number_follows() {
        let mut limiter = Limiter::default();
        let start = Instant::now();
        assert!((0..REPORTED_MAX).all(|_| limiter.admits(start)));
        assert_eq!((limiter.end_if_over(start + INTERVAL), limiter.end()), (None, None));
    }
}
