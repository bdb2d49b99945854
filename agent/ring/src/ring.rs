use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use io_uring::squeue::Entry;
use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode};

use crate::{IoBuf, Token};

/// IORING_ENTER_GETEVENTS, IORING_ENTER_EXT_ARG and IORING_ENTER_NO_IOWAIT of include/uapi/linux/io_uring.h.
const ENTER_GETEVENTS: u32 = 1 << 0;
const ENTER_EXT_ARG: u32 = 1 << 3;
const ENTER_NO_IOWAIT: u32 = 1 << 7;

/// A completion of the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The token of the completed operation.
    pub token: Token,
    /// The result as a system call would give it: negative errno on failure.
    pub result: i32,
}

impl Completion {
    /// Returns the result as a count, or the error.
    ///
    /// # Errors
    /// The errno of the operation.
    pub fn count(&self) -> io::Result<usize> {
        usize::try_from(self.result).map_err(|_| io::Error::from_raw_os_error(-self.result))
    }
}

/// The way in which the thread of a ring runs its part of completions that another thread has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskWork {
    /// Completions run when the thread waits (IORING_SETUP_DEFER_TASKRUN, Linux 6.1): in batches, and without
    /// an interruption.
    Deferred,
    /// At its next system call (IORING_SETUP_COOP_TASKRUN, Linux 5.19).
    Cooperative,
}

/// An io_uring that belongs to the thread that made it.
pub struct Ring {
    ring: IoUring,
    /// True if the kernel has accepted [`TaskWork::Deferred`].
    is_deferred: bool,
    /// Entries that found the submission queue full; they go in before any new one.
    overflow: VecDeque<Entry>,
    /// [`ENTER_NO_IOWAIT`], if the kernel knows it.
    no_iowait: u32,
    /// For the entry of [`Ring::timer`], until the kernel has read it.
    expiration: Box<Timespec>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("fd", &self.ring.as_raw_fd()).finish_non_exhaustive()
    }
}

impl Ring {
    /// Creates a ring with `entries` submissions and four times as many completions.
    ///
    /// # Errors
    /// The error of io_uring_setup: ENOSYS or EPERM if the kernel has none or forbids it.
    pub fn new(entries: u32) -> io::Result<Ring> {
        Ring::with(entries, TaskWork::Deferred)
    }

    /// Creates a ring like [`Ring::new`] with a choice; kernels that are too old for it interrupt the thread.
    ///
    /// # Errors
    /// The errors of [`Ring::new`].
    pub fn with(entries: u32, task_work: TaskWork) -> io::Result<Ring> {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(entries * 4);
        match task_work {
            TaskWork::Deferred => builder.setup_single_issuer().setup_defer_taskrun(),
            TaskWork::Cooperative => builder.setup_coop_taskrun(),
        };
        let best = builder.build(entries);
        let (ring, is_deferred) = match best {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                (IoUring::builder().setup_cqsize(entries * 4).build(entries)?, false)
            }
            other => (other?, task_work == TaskWork::Deferred),
        };
        let no_iowait = no_iowait_of(&ring);
        Ok(Ring {
            ring,
            is_deferred,
            overflow: VecDeque::with_capacity(entries as usize),
            no_iowait,
            expiration: Box::default(),
        })
    }

    /// Returns true if a driver touches the memory of its commands only while the thread is in
    /// [`Ring::wait`]. Without [`TaskWork::Deferred`] it may do so at the end of any system call of the
    /// thread.
    #[must_use]
    pub fn is_deferred(&self) -> bool {
        self.is_deferred
    }

    /// Leaves the ring to the kernel, which closes it when the process has ended. A driver that has commands
    /// of this ring learns of the end of the process by that, after the threads that it knows.
    pub fn leave_open(self) {
        std::mem::forget(self);
    }

    /// Queues `entry` for the next [`Ring::wait`].
    ///
    /// # Safety
    /// The memory that the entry points to stays valid until its completion has come.
    pub unsafe fn push(&mut self, entry: Entry, token: Token) {
        let entry = entry.user_data(token.pack());
        // SAFETY: promised by the caller.
        if !self.overflow.is_empty() || unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.overflow.push_back(entry);
        }
    }

    fn drain_overflow(&mut self) {
        while let Some(entry) = self.overflow.front() {
            // SAFETY: promised by the caller of push.
            if unsafe { self.ring.submission().push(entry) }.is_err() {
                return;
            }
            self.overflow.pop_front();
        }
    }

    /// Submits the queued operations, waits for a completion (at most `timeout`), and appends all completions
    /// to `out`.
    ///
    /// # Errors
    /// The error of io_uring_enter, other than interruption and time-out.
    pub fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<Completion>) -> io::Result<()> {
        while !self.overflow.is_empty() {
            match self.ring.submit() {
                // Too many completions wait: they are taken first. The next wait submits the rest.
                Err(error) if is_passing(&error) => break,
                submitted => submitted?,
            };
            self.drain_overflow();
        }
        let ready = !self.ring.completion().is_empty();
        let entered = if ready { self.ring.submitter().submit_and_wait(0) } else { self.enter(timeout) };
        match entered {
            Err(error) if !is_passing(&error) => return Err(error),
            _ => {}
        }
        out.extend(
            self.ring
                .completion()
                .map(|entry| Completion { token: Token::unpack(entry.user_data()), result: entry.result() }),
        );
        Ok(())
    }

    /// Submits the queued operations and waits for a completion. Unlike the functions of the library, it does
    /// not make the host count the wait as one for a disk. Most of these waits are for requests that may
    /// never come, and an idle host would show its processors busy with I/O.
    fn enter(&mut self, timeout: Option<Duration>) -> io::Result<usize> {
        let queued = u32::try_from(self.ring.submission().len()).unwrap_or(u32::MAX);
        let flags = ENTER_GETEVENTS | self.no_iowait;
        let submitter = self.ring.submitter();
        match timeout {
            // SAFETY: no argument.
            None => unsafe { submitter.enter::<SubmitArgs<'_, '_>>(queued, 1, flags, None) },
            Some(timeout) => {
                let timespec = Timespec::new().sec(timeout.as_secs()).nsec(timeout.subsec_nanos());
                let args = SubmitArgs::new().timespec(&timespec);
                // SAFETY: with ENTER_EXT_ARG the kernel takes a struct io_uring_getevents_arg, as which
                // SubmitArgs is laid out. It reads it, and the timespec behind it, during the call only.
                unsafe { submitter.enter(queued, 1, flags | ENTER_EXT_ARG, Some(&args)) }
            }
        }
    }

    /// Reads `buf.len()` bytes at `offset_bytes` of a file.
    pub fn read(&mut self, fd: RawFd, buf: IoBuf, offset_bytes: u64, token: Token) {
        let entry = opcode::Read::new(Fd(fd), buf.as_ptr(), length(buf)).offset(offset_bytes).build();
        // SAFETY: arena memory is never unmapped.
        unsafe { self.push(entry, token) }
    }

    /// Writes `buf` at `offset_bytes` of a file; `durable` waits until the data is on the disk (RWF_DSYNC).
    pub fn write(&mut self, fd: RawFd, buf: IoBuf, offset_bytes: u64, durable: bool, token: Token) {
        let flags = if durable { libc::RWF_DSYNC } else { 0 };
        let entry = opcode::Write::new(Fd(fd), buf.as_ptr(), length(buf))
            .offset(offset_bytes)
            .rw_flags(flags)
            .build();
        // SAFETY: arena memory is never unmapped.
        unsafe { self.push(entry, token) }
    }

    /// Makes the data of a file durable.
    pub fn fdatasync(&mut self, fd: RawFd, token: Token) {
        let entry = opcode::Fsync::new(Fd(fd)).flags(FsyncFlags::DATASYNC).build();
        // SAFETY: no memory involved.
        unsafe { self.push(entry, token) }
    }

    /// Allocates, zeroes or punches a range of a file, as fallocate(2) does with `mode`.
    pub fn fallocate(&mut self, fd: RawFd, mode: i32, offset_bytes: u64, length_bytes: u64, token: Token) {
        let entry = opcode::Fallocate::new(Fd(fd), length_bytes).offset(offset_bytes).mode(mode).build();
        // SAFETY: no memory involved.
        unsafe { self.push(entry, token) }
    }

    /// Takes the next connection of a listening socket; the result is its descriptor.
    pub fn accept(&mut self, fd: RawFd, token: Token) {
        let entry = opcode::Accept::new(Fd(fd), std::ptr::null_mut(), std::ptr::null_mut())
            .flags(libc::SOCK_CLOEXEC)
            .build();
        // SAFETY: no memory involved: the peer's address is not asked for.
        unsafe { self.push(entry, token) }
    }

    /// Completes once when there is something to read from a descriptor, or to accept; at once if there is
    /// already.
    pub fn readable(&mut self, fd: RawFd, token: Token) {
        let entry = opcode::PollAdd::new(Fd(fd), u32::from(libc::POLLIN.cast_unsigned())).build();
        // SAFETY: no memory involved.
        unsafe { self.push(entry, token) }
    }

    /// Completes once, `after` that time. One timer at a time: the time of the newest holds for all that are
    /// not submitted yet.
    pub fn timer(&mut self, after: Duration, token: Token) {
        *self.expiration = Timespec::new().sec(after.as_secs()).nsec(after.subsec_nanos());
        let entry = opcode::Timeout::new(&raw const *self.expiration).build();
        // SAFETY: the kernel reads the time when it takes the entry, which is in this ring; the time lives as
        // long.
        unsafe { self.push(entry, token) }
    }

    /// Has the operation with the token `operation` end soon, unless it ends by itself before that; it
    /// completes in any case. The request to do so completes with `token`.
    pub fn cancel(&mut self, operation: Token, token: Token) {
        let entry = opcode::AsyncCancel::new(operation.pack()).build();
        // SAFETY: no memory involved.
        unsafe { self.push(entry, token) }
    }
}

/// Returns [`ENTER_NO_IOWAIT`], if the kernel knows it: from Linux 6.15 on. A kernel refuses flags that it
/// does not know.
fn no_iowait_of(ring: &IoUring) -> u32 {
    // SAFETY: nothing is submitted, and no argument is given.
    let tried = unsafe { ring.submitter().enter::<SubmitArgs<'_, '_>>(0, 0, ENTER_NO_IOWAIT, None) };
    if tried.is_ok() { ENTER_NO_IOWAIT } else { 0 }
}

/// Failures of io_uring_enter after which waiting again is right.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN))
}

fn length(buf: IoBuf) -> u32 {
    u32::try_from(buf.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arena;

    const TOKEN: Token = Token { source: 1, kind: 2, index: 3, tag: 4 };

    #[test]
    fn reads_back_written_data() {
        for task_work in [TaskWork::Deferred, TaskWork::Cooperative] {
            let ring = Ring::with(2, task_work).unwrap();
            assert!(task_work == TaskWork::Deferred || !ring.is_deferred());
            reads_back(ring);
        }
    }

    fn reads_back(mut ring: Ring) {
        let arena = Arena::new(2, 4096).unwrap();
        let file = tempfile();
        arena.buf(0).copy_from(b"shorthorn");
        let mut out = Vec::new();
        ring.write(file.as_raw_fd(), arena.buf(0).part(0, 9), 100, true, TOKEN);
        ring.wait(None, &mut out).unwrap();
        assert_eq!((out[0].token, out[0].count().unwrap()), (TOKEN, 9));
        ring.read(file.as_raw_fd(), arena.buf(1).part(0, 9), 100, TOKEN);
        out.clear();
        ring.wait(None, &mut out).unwrap();
        let mut back = [0; 9];
        arena.buf(1).copy_to(&mut back);
        assert_eq!(&back, b"shorthorn");
    }

    #[test]
    fn more_than_the_queue_holds_gets_through() {
        let mut ring = Ring::new(2).unwrap();
        let file = tempfile();
        for tag in 0..20 {
            ring.fdatasync(file.as_raw_fd(), Token { tag, ..TOKEN });
        }
        let mut out = Vec::new();
        while out.len() < 20 {
            ring.wait(None, &mut out).unwrap();
        }
        let mut tags: Vec<u32> = out.iter().map(|completion| completion.token.tag).collect();
        tags.sort_unstable();
        assert_eq!(tags, (0..20).collect::<Vec<_>>());
    }

    #[test]
    fn a_wait_ends_by_itself() {
        let mut ring = Ring::new(2).unwrap();
        let mut out = Vec::new();
        ring.wait(Some(Duration::from_millis(1)), &mut out).unwrap();
        assert!(out.is_empty());
    }

    #[test]
    fn reports_a_readable_descriptor() {
        let mut ring = Ring::new(2).unwrap();
        let (reader, mut writer) = std::io::pipe().unwrap();
        let mut out = Vec::new();
        ring.readable(reader.as_raw_fd(), TOKEN);
        ring.wait(Some(Duration::from_millis(1)), &mut out).unwrap();
        assert!(out.is_empty(), "no completion yet");
        std::io::Write::write_all(&mut writer, b"x").unwrap();
        ring.wait(None, &mut out).unwrap();
        assert_eq!((out[0].token, out[0].count().is_ok()), (TOKEN, true));
    }

    #[test]
    fn a_timer_runs_out() {
        let mut ring = Ring::new(2).unwrap();
        let mut out = Vec::new();
        ring.timer(Duration::from_millis(1), TOKEN);
        ring.wait(None, &mut out).unwrap();
        assert_eq!((out[0].token, out[0].result), (TOKEN, -libc::ETIME));
    }

    fn tempfile() -> std::fs::File {
        // SAFETY: the name is a valid C string.
        let fd = unsafe { libc::memfd_create(c"ring".as_ptr(), 0) };
        assert!(fd >= 0);
        // SAFETY: the descriptor is new and ours.
        unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }
    }
}
