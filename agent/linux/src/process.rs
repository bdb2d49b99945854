//! Processes that are named by a descriptor, a pidfd (pidfd_open(2)). A number may belong to a later process;
//! a descriptor stays with its process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A process that need not be a child of this one. Its descriptor is readable once it has ended.
#[derive(Debug)]
pub struct ProcessFd(OwnedFd);

impl ProcessFd {
    /// Opens the process with this number; none if it does not exist.
    ///
    /// # Errors
    /// The error of the system, or a number that no process has.
    pub fn open(pid: i32) -> io::Result<Option<ProcessFd>> {
        let pid = Some(pid).filter(|pid| *pid > 0).and_then(Pid::from_raw);
        match pidfd_open(pid.ok_or(io::ErrorKind::InvalidInput)?, PidfdFlags::empty()) {
            // The kernel reports EINVAL while the number is still that of a process group.
            Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL) => Ok(None),
            opened => Ok(Some(ProcessFd(opened?))),
        }
    }

    /// Opens a child that nothing has waited for.
    ///
    /// # Errors
    /// The error of the system.
    pub fn of_child(child: &Child) -> io::Result<ProcessFd> {
        Ok(ProcessFd(pidfd_open(Pid::from_child(child), PidfdFlags::empty())?))
    }

    /// Sends SIGTERM. Returns false if the process had ended.
    ///
    /// # Errors
    /// The error of the system.
    pub fn terminate(&self) -> io::Result<bool> {
        self.signal(Signal::TERM)
    }

    /// Sends SIGKILL. Returns false if the process had ended.
    ///
    /// # Errors
    /// The error of the system.
    pub fn kill(&self) -> io::Result<bool> {
        self.signal(Signal::KILL)
    }

    fn signal(&self, signal: Signal) -> io::Result<bool> {
        match pidfd_send_signal(&self.0, signal) {
            Err(rustix::io::Errno::SRCH) => Ok(false),
            sent => Ok(sent.map(|()| true)?),
        }
    }

    /// Waits until the process has ended, at most for `limit`. Returns true if it has ended.
    ///
    /// # Errors
    /// The error of the system.
    pub fn ends_within(&self, limit: Option<Duration>) -> io::Result<bool> {
        let timeout = limit.map(|limit| PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX));
        loop {
            match poll(&mut [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)], timeout) {
                Err(Errno::EINTR) => {}
                ready => return Ok(ready? > 0),
            }
        }
    }

    /// Returns another descriptor of the process.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn try_clone(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }
}

impl AsFd for ProcessFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<ProcessFd> for OwnedFd {
    fn from(process: ProcessFd) -> OwnedFd {
        process.0
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_ends_by_a_signal_and_cannot_be_opened_after_that() {
        for signal in [ProcessFd::terminate, ProcessFd::kill] {
            let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
            let pid = i32::try_from(child.id()).unwrap();
            let process = ProcessFd::open(pid).unwrap().unwrap();
            assert!(!process.ends_within(Some(Duration::ZERO)).unwrap());
            assert!(signal(&process).unwrap());
            assert!(process.ends_within(None).unwrap());
            assert!(child.wait().unwrap().signal().is_some());
            assert!(!signal(&process).unwrap());
            assert!(ProcessFd::open(pid).unwrap().is_none());
        }
    }

    #[test]
    fn a_child_that_ends_is_noticed() {
        let mut child = Command::new("true").spawn().unwrap();
        assert!(ProcessFd::of_child(&child).unwrap().ends_within(Some(Duration::from_secs(60))).unwrap());
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn numbers_that_no_process_has_are_refused() {
        for pid in [0, -1, i32::MIN] {
            assert_eq!(ProcessFd::open(pid).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{pid}");
        }
    }
}
