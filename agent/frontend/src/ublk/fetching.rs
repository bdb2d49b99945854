//! The progress of the queues of a device towards serving it. START_DEV and END_USER_RECOVERY wait, without a
//! limit, until every queue has fetched all of its tags.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

/// Shared by the queues and the control half of a device.
#[derive(Debug, Default)]
pub(super) struct Fetching {
    queues: AtomicU16,
    failure: OnceLock<String>,
}

impl Fetching {
    /// Records that another queue has asked for requests with all of its tags, or has failed to.
    pub(super) fn record(&self, started: &io::Result<()>) {
        match started {
            Ok(()) => {
                self.queues.fetch_add(1, Ordering::Release);
            }
            Err(error) => self.fail(error),
        }
    }

    /// Records the failure of a queue. The first failure counts: others follow from it.
    pub(super) fn fail(&self, error: &io::Error) {
        self.failure.get_or_init(|| error.to_string());
    }

    /// Returns the reason why a queue has failed, if one has.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Returns the number of queues that have asked for requests with all of their tags.
    pub(super) fn queues(&self) -> u16 {
        self.queues.load(Ordering::Acquire)
    }
}

/// Returns the error of queue `queue`, which cannot map its descriptors. For EINVAL the driver has one reason
/// (`ublk_ch_mmap` before Linux 6.15): the device still belongs to the memory of another process.
pub(super) fn cannot_map(queue: u16, error: &io::Error) -> io::Error {
    let reason = match error.raw_os_error() {
        Some(libc::EINVAL) => {
            ": a process died after it had mapped them and before it had fetched every tag. This kernel lets \
             no other process take the device over then. Detach the volume, which removes the device and \
             fails its waiting requests, or use Linux 6.15 or later"
        }
        _ => "",
    };
    io::Error::new(error.kind(), format!("queue {queue} cannot map its descriptors ({error}){reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_counts() {
        let fetching = Fetching::default();
        fetching.record(&Ok(()));
        assert_eq!((fetching.queues(), fetching.failure()), (1, None));
        fetching.record(&Err(io::Error::other("first")));
        fetching.fail(&io::Error::other("second"));
        assert_eq!((fetching.queues(), fetching.failure()), (1, Some("first")));
    }

    #[test]
    fn a_refused_mapping_names_the_remedy() {
        let of = |errno| cannot_map(3, &io::Error::from_raw_os_error(errno)).to_string();
        let text = of(libc::EINVAL);
        assert!(text.contains("queue 3") && text.contains("Detach the volume"), "{text}");
        assert!(!of(libc::ENOMEM).contains("Detach"), "{}", of(libc::ENOMEM));
    }
}
