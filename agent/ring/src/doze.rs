//! Waits of an idle ring on kernels without IORING_ENTER_NO_IOWAIT, which Linux 6.15 added.
//!
//! Linux counts a thread in io_uring_enter as one that waits for a disk if the ring has requests in flight
//! (`io_cqring_wait` in io_uring/io_uring.c): from 6.5 on, and in stable kernels from 6.1.39 on. An idle ring
//! waits in poll(2) instead. On kernels before these, poll(2) does no harm.
//!
//! The ring's own descriptor cannot be polled for that. From 6.3 on only completions wake its pollers, and
//! with IORING_SETUP_DEFER_TASKRUN these appear only during io_uring_enter. The kernel signals an eventfd of
//! the ring as soon as task work waits (`io_req_local_work_add`). If another eventfd is the cause, the kernel
//! delays this signal by an RCU grace period (`io_eventfd_signal`). So the eventfd of a [`crate::Wake`] is
//! polled beside it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use io_uring::IoUring;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;

/// The time without a completion after which a ring is idle. The think time of a busy guest is shorter, so it
/// does not pay for the additional system calls. The time in which the host counts an idle ring as waiting
/// for a disk is at most this after each event.
pub(crate) const QUIET: Duration = Duration::from_millis(5);

/// The descriptors that end the wait of an idle ring.
#[derive(Debug)]
pub(crate) struct Doze {
    /// The kernel signals this if task work or a completion waits, unless the ring has disabled it.
    bell: EventFd,
    /// The eventfd of the wake that was armed last.
    wake: Option<Arc<OwnedFd>>,
    /// True if the last wait has ended without a completion.
    pub is_quiet: bool,
    /// [`QUIET`], but for tests.
    pub quiet: Duration,
}

impl Doze {
    /// Registers the eventfd with the ring, which does not signal it yet.
    ///
    /// # Errors
    /// The error of eventfd or io_uring_register.
    pub fn new(ring: &mut IoUring) -> io::Result<Doze> {
        let bell = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        ring.completion().disable_eventfd();
        ring.submitter().register_eventfd(bell.as_fd().as_raw_fd())?;
        Ok(Doze { bell, wake: None, is_quiet: false, quiet: QUIET })
    }

    /// Has signals of this wake end the wait too.
    pub fn watch(&mut self, wake: &Arc<OwnedFd>) {
        if !self.wake.as_ref().is_some_and(|known| Arc::ptr_eq(known, wake)) {
            self.wake = Some(Arc::clone(wake));
        }
    }

    /// Has the kernel signal task work from now on. The caller takes the work that waits already, and only
    /// then calls [`Doze::sleep`].
    pub fn begin(&self, ring: &mut IoUring) {
        ring.completion().enable_eventfd();
        // Pairs with the full barrier of the kernel between adding work and reading the flag: either the
        // kernel sees the flag, or the caller's io_uring_enter sees the work.
        fence(Ordering::SeqCst);
        // A signal of earlier work; EAGAIN if none is left.
        let _ = self.bell.read();
    }

    /// Waits until something may have happened; false after `timeout`.
    ///
    /// # Errors
    /// The error of poll.
    pub fn sleep(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let bell = PollFd::new(self.bell.as_fd(), PollFlags::POLLIN);
        let wake = self.wake.as_ref().map(|wake| PollFd::new(wake.as_fd(), PollFlags::POLLIN));
        let mut both = [bell.clone(), wake.clone().unwrap_or(bell)];
        let watched = if wake.is_some() { &mut both[..] } else { &mut both[..1] };
        match ppoll(watched, timeout.map(TimeSpec::from_duration), None) {
            Ok(count) => Ok(count > 0),
            Err(Errno::EINTR) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    /// Ends the signals: a busy ring must not pay for them.
    pub fn end(&self, ring: &mut IoUring) {
        ring.completion().disable_eventfd();
    }
}

#[cfg(test)]
mod tests;
