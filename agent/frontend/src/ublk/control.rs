//! Control commands, which make, start, recover and delete ublk devices.
//!
//! A worker thread of the kernel runs every command while this process waits with a limit. On a kernel with a
//! broken ublk driver, a command may never return, and no signal ends the wait inside it.

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

use super::abi::{self, ControlCommand, DeviceInfo, Params};
use crate::modules::CONTROL_PATH;
use crate::wait;

/// The maximum number of commands in flight: one, besides those that were given up.
const RING_ENTRIES: u32 = 8;
/// The interval of checking a command that waits for others.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// `/dev/ublk-control` with a ring of 128-byte submissions, which its commands need.
pub(crate) struct ControlDevice {
    file: File,
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    /// The number of the newest command. Completions of older ones belong to commands that were given up.
    newest: u64,
}

impl ControlDevice {
    pub(crate) fn open() -> io::Result<ControlDevice> {
        let file = File::options().read(true).write(true).open(CONTROL_PATH)?;
        let ring = IoUring::<squeue::Entry128, cqueue::Entry>::builder().build(RING_ENTRIES)?;
        Ok(ControlDevice { file, ring, newest: 0 })
    }

    /// Returns the features of the driver: bits `F_*`. EOPNOTSUPP or ENODEV before Linux 6.5.
    pub(crate) fn features(&mut self, limit: Duration) -> io::Result<u64> {
        self.run_with(abi::CMD_GET_FEATURES, u32::MAX, 0_u64, limit)
    }

    /// Makes a device according to `info`; the answer has the granted parameters.
    pub(crate) fn add(&mut self, info: DeviceInfo, limit: Duration) -> io::Result<DeviceInfo> {
        self.run_with(abi::CMD_ADD_DEV, info.id, info, limit)
    }

    /// Returns the driver's information about device `id`; none if it does not exist.
    pub(crate) fn info(&mut self, id: u32, limit: Duration) -> io::Result<Option<DeviceInfo>> {
        match self.run_with(abi::CMD_GET_DEV_INFO, id, DeviceInfo::default(), limit) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Sets the parameters of a device that was never started.
    pub(crate) fn set_params(&mut self, id: u32, params: Params, limit: Duration) -> io::Result<()> {
        self.run_with(abi::CMD_SET_PARAMS, id, params, limit).map(drop)
    }

    /// Runs a command that needs no more than one number.
    pub(crate) fn run(&mut self, command: u32, id: u32, value: u64, limit: Duration) -> io::Result<()> {
        self.run_unless(command, id, value, limit, || false)
    }

    /// Runs like [`ControlDevice::run`], given up early if `is_hopeless`, with
    /// [`io::ErrorKind::Interrupted`].
    pub(crate) fn run_unless(
        &mut self,
        command: u32,
        id: u32,
        value: u64,
        limit: Duration,
        is_hopeless: impl Fn() -> bool,
    ) -> io::Result<()> {
        let header = ControlCommand { id, length_bytes: 0, address: 0, value };
        // SAFETY: the command has no memory.
        match unsafe { self.submit(command, header, limit, is_hopeless) } {
            CommandProgress::Ended(result) => result,
            CommandProgress::NotQueued(error) | CommandProgress::GivenUp(error) => Err(error),
        }
    }

    /// Runs a command that reads or writes a `T`.
    fn run_with<T: Plain>(&mut self, command: u32, id: u32, data: T, limit: Duration) -> io::Result<T> {
        let length_bytes = u16::try_from(size_of::<T>()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let data = Box::into_raw(Box::new(data));
        let header = ControlCommand { id, length_bytes, address: data.addr() as u64, value: 0 };
        // SAFETY: the memory is on the heap, and take_back leaves it alone unless the kernel is done with it.
        let progress = unsafe { self.submit(command, header, limit, || false) };
        // SAFETY: the pointer came from Box::into_raw above, and any bits that the kernel wrote are a valid
        // T.
        unsafe { take_back(data, progress) }
    }

    /// Submits a command and waits for its end, unless `is_hopeless`.
    ///
    /// # Safety
    /// The memory at the command's address stays valid until the command has ended: for ever after
    /// [`CommandProgress::GivenUp`].
    unsafe fn submit(
        &mut self,
        command: u32,
        header: ControlCommand,
        limit: Duration,
        is_hopeless: impl Fn() -> bool,
    ) -> CommandProgress {
        self.newest += 1;
        let entry = opcode::UringCmd80::new(Fd(self.file.as_raw_fd()), command)
            .cmd(header.encode())
            .build()
            // On a worker of the kernel from the start, so that submitting never blocks.
            .flags(squeue::Flags::ASYNC)
            .user_data(self.newest);
        // SAFETY: promised by the caller; the descriptor lives as long as the ring.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            return CommandProgress::NotQueued(io::ErrorKind::ResourceBusy.into());
        }
        let deadline = Instant::now() + limit;
        loop {
            let rest = deadline.saturating_duration_since(Instant::now());
            let pause = rest.min(LOOK_INTERVAL);
            let timespec = Timespec::new().sec(pause.as_secs()).nsec(pause.subsec_nanos());
            let entered = self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&timespec));
            let newest = self.newest;
            let done = self.ring.completion().find(|completion| completion.user_data() == newest);
            if let Some(completion) = done {
                return CommandProgress::Ended(match completion.result() {
                    result if result < 0 => Err(io::Error::from_raw_os_error(-result)),
                    _ => Ok(()),
                });
            }
            match entered {
                Err(error) if !matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => {
                    return CommandProgress::GivenUp(error);
                }
                _ if is_hopeless() => return CommandProgress::GivenUp(io::ErrorKind::Interrupted.into()),
                _ if rest.is_zero() => return CommandProgress::GivenUp(wait::timed_out(limit)),
                _ => {}
            }
        }
    }
}

enum CommandProgress {
    /// The kernel has never seen it, and will not.
    NotQueued(io::Error),
    /// The kernel is done with it.
    Ended(io::Result<()>),
    /// The kernel works on it, or finds it in the submission queue when the ring is entered again.
    GivenUp(io::Error),
}

/// Frees the memory that a command was given and returns its content, if the command has succeeded. The
/// memory of a command that was given up is leaked on purpose: the kernel may still read and write it.
///
/// # Safety
/// `data` is from [`Box::into_raw`], and the command of `progress` is the only one that was given it.
unsafe fn take_back<T>(data: *mut T, progress: CommandProgress) -> io::Result<T> {
    let ended = match progress {
        CommandProgress::GivenUp(error) => return Err(error),
        CommandProgress::NotQueued(error) => Err(error),
        CommandProgress::Ended(result) => result,
    };
    // SAFETY: from Box::into_raw, as promised by the caller, and the kernel has no pointer to it any more.
    let data = unsafe { Box::from_raw(data) };
    ended.map(|()| *data)
}

/// Integers without gaps between them: every pattern of bits is a valid value.
///
/// # Safety
/// As said.
unsafe trait Plain: Copy {}
// SAFETY: an integer.
unsafe impl Plain for u64 {}
// SAFETY: integers in repr(C); the tests of abi.rs check that the layout has no gaps.
unsafe impl Plain for DeviceInfo {}
// SAFETY: as above.
unsafe impl Plain for Params {}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Returns a ring whose commands go to /dev/null, which answers every one at once.
    fn control(ring: IoUring<squeue::Entry128, cqueue::Entry>) -> ControlDevice {
        ControlDevice { file: File::open("/dev/null").unwrap(), ring, newest: 0 }
    }

    #[test]
    fn memory_that_the_kernel_may_still_use_is_never_freed() {
        let held = |progress| {
            let value = Arc::new(());
            let data = Box::into_raw(Box::new(Arc::clone(&value)));
            // SAFETY: from Box::into_raw, and no command has it.
            let taken = unsafe { take_back(data, progress) };
            let is_ok = taken.is_ok();
            drop(taken);
            (is_ok, Arc::strong_count(&value) > 1)
        };
        let error = || io::Error::from_raw_os_error(libc::EIO);
        assert_eq!(held(CommandProgress::Ended(Ok(()))), (true, false));
        assert_eq!(held(CommandProgress::Ended(Err(error()))), (false, false));
        assert_eq!(held(CommandProgress::NotQueued(error())), (false, false));
        assert_eq!(held(CommandProgress::GivenUp(error())), (false, true));
    }

    #[test]
    fn a_command_that_ended_was_not_given_up() {
        let mut control = control(IoUring::builder().build(RING_ENTRIES).unwrap());
        let header = ControlCommand { id: 0, length_bytes: 0, address: 0, value: 0 };
        // SAFETY: the command has no memory.
        let progress = unsafe { control.submit(abi::CMD_GET_FEATURES, header, LIMIT, || false) };
        assert!(matches!(progress, CommandProgress::Ended(_)));
    }

    #[test]
    fn a_command_in_a_ring_that_cannot_be_entered_was_given_up() {
        // Its submission queue takes entries, and io_uring_enter answers EBADFD.
        let mut control = control(IoUring::builder().setup_r_disabled().build(RING_ENTRIES).unwrap());
        let header = ControlCommand { id: 0, length_bytes: 0, address: 0, value: 0 };
        // SAFETY: the command has no memory.
        let progress = unsafe { control.submit(abi::CMD_GET_FEATURES, header, LIMIT, || false) };
        let CommandProgress::GivenUp(error) = progress else {
            panic!("the entry is in the submission queue")
        };
        assert_eq!(error.raw_os_error(), Some(libc::EBADFD));
        // The kernel would find the next ones behind it, until the queue is full.
        for _ in 1..RING_ENTRIES {
            assert!(control.run(abi::CMD_GET_FEATURES, 0, 0, LIMIT).is_err());
        }
        // SAFETY: the command has no memory.
        let progress = unsafe { control.submit(abi::CMD_GET_FEATURES, header, LIMIT, || false) };
        assert!(matches!(progress, CommandProgress::NotQueued(_)));
    }
}
