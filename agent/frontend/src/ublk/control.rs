//! Control commands: what makes, starts, recovers and deletes ublk devices.
//!
//! Every command is run by a worker thread of the kernel while we wait with a limit: on a kernel whose ublk is
//! broken a command never returns, and no signal helps whoever is inside it.

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

use super::abi::{self, ControlCommand, DeviceInfo, Params};
use crate::wait;

/// Where control commands go.
pub(crate) const CONTROL_PATH: &str = "/dev/ublk-control";
/// Commands that may be under way at once: one, beside those that were given up.
const RING_ENTRIES: u32 = 8;

/// `/dev/ublk-control` with a ring of 128-byte submissions, which its commands need.
pub(crate) struct Control {
    file: File,
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    /// Number of the newest command. Completions of older ones are those of commands that were given up.
    newest: u64,
}

impl Control {
    /// Opens the control device.
    pub(crate) fn open() -> io::Result<Control> {
        let file = File::options().read(true).write(true).open(CONTROL_PATH)?;
        let ring = IoUring::<squeue::Entry128, cqueue::Entry>::builder().build(RING_ENTRIES)?;
        Ok(Control { file, ring, newest: 0 })
    }

    /// What the driver can do: bits `F_*`. EOPNOTSUPP or ENODEV before Linux 6.5.
    pub(crate) fn features(&mut self, limit: Duration) -> io::Result<u64> {
        self.run_with(abi::CMD_GET_FEATURES, u32::MAX, 0_u64, limit)
    }

    /// Makes a device as `info` asks; the answer says what was granted.
    pub(crate) fn add(&mut self, info: DeviceInfo, limit: Duration) -> io::Result<DeviceInfo> {
        self.run_with(abi::CMD_ADD_DEV, info.id, info, limit)
    }

    /// What the driver knows about device `id`; None where there is none.
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
        // SAFETY: the command has no memory.
        unsafe { self.submit(command, ControlCommand { id, length_bytes: 0, address: 0, value }, limit) }
    }

    /// Runs a command that reads or writes a `T`.
    fn run_with<T: Plain>(&mut self, command: u32, id: u32, data: T, limit: Duration) -> io::Result<T> {
        let length_bytes = u16::try_from(size_of::<T>()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let data = Box::into_raw(Box::new(data));
        let header = ControlCommand { id, length_bytes, address: data.addr() as u64, value: 0 };
        // SAFETY: the memory is on the heap and is given back only once the command has ended.
        let ended = unsafe { self.submit(command, header, limit) };
        if ended.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::TimedOut) {
            // The kernel may still write there: the memory is lost, for the rest of the process.
            return Err(wait::timed_out(limit));
        }
        // SAFETY: it came from Box::into_raw above, and any bits that the kernel wrote are a valid T.
        let data = unsafe { Box::from_raw(data) };
        ended.map(|()| *data)
    }

    /// Submits a command and waits for its end.
    ///
    /// # Safety
    /// The memory at the command's address stays valid until the command has ended: after
    /// [`io::ErrorKind::TimedOut`] it has not.
    unsafe fn submit(&mut self, command: u32, header: ControlCommand, limit: Duration) -> io::Result<()> {
        self.newest += 1;
        let entry = opcode::UringCmd80::new(Fd(self.file.as_raw_fd()), command)
            .cmd(header.encode())
            .build()
            // On a worker of the kernel from the start, so that submitting never blocks.
            .flags(squeue::Flags::ASYNC)
            .user_data(self.newest);
        // SAFETY: promised by the caller; the descriptor lives as long as the ring.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| io::ErrorKind::ResourceBusy)?;
        let deadline = Instant::now() + limit;
        loop {
            let rest = deadline.saturating_duration_since(Instant::now());
            let timespec = Timespec::new().sec(rest.as_secs()).nsec(rest.subsec_nanos());
            let entered = self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&timespec));
            let newest = self.newest;
            let done = self.ring.completion().find(|completion| completion.user_data() == newest);
            if let Some(completion) = done {
                return match completion.result() {
                    result if result < 0 => Err(io::Error::from_raw_os_error(-result)),
                    _ => Ok(()),
                };
            }
            match entered {
                Err(error) if !matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => {
                    return Err(error);
                }
                _ if rest.is_zero() => return Err(wait::timed_out(limit)),
                _ => {}
            }
        }
    }
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
