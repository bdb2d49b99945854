//! The queue of the FUSE file: reads the kernel's requests and answers them.
//!
//! tgtd is the only user of the file. Its threads each send one request and wait for the answer. Nothing of
//! the file is in a page cache: a fsync of tgtd, which it makes of SYNCHRONIZE CACHE, is a FLUSH of the
//! volume.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use shorthorn_core::{Operation, Request};
use shorthorn_ring::{Completion, SlotPool, Token};
use shorthorn_types::limits::{MAX_IO_BYTES, MAX_ZERO_BYTES, SECTOR_BYTES};
use shorthorn_types::{ByteRange, Errno};

use super::channel::Channel;
use super::protocol::{self, FIXED_BYTES, FuseOperation, FuseRequest, Reply};
use crate::{QueueFrontend, QueueIo, Quiesced, RefusedRequest, SOURCE};

/// The only completion of this frontend: the descriptor is readable.
const READABLE: Token = Token { source: SOURCE, kind: 0, index: 0, tag: 0 };
/// The error of a descriptor whose mount is gone.
const NO_MOUNT: i32 = libc::ENODEV;

/// The state of the file that the control half changes.
#[derive(Debug)]
pub(super) struct FileState {
    /// The size of the volume.
    pub(super) size_bytes: AtomicU64,
    /// True if the mount may be gone, because the device is being removed.
    pub(super) is_closed: AtomicBool,
}

/// A request that the volume works on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Pending {
    unique: u64,
    /// The data of a READ, or the answer to a WRITE.
    length_bytes: u32,
    kind: PendingKind,
    /// The part of a hole that follows.
    rest: Option<ByteRange>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PendingKind {
    #[default]
    Plain,
    Read,
    Write,
}

/// A queue whose requests tgtd sends over FUSE.
#[derive(Debug)]
pub(super) struct FuseQueue {
    channel: Channel,
    file: Arc<FileState>,
    /// The memory for the next request, all of it touched. The kernel fails a request while it copies it if
    /// the reader is killed and a page is missing. So no request is read straight into the arena.
    memory: Box<[u8]>,
    slots: SlotPool,
    pending: Box<[Pending]>,
    /// True if the ring will report that a request can be read.
    is_polling: bool,
    is_quiesced: bool,
}

impl FuseQueue {
    pub(super) fn new(channel: Channel, file: Arc<FileState>, depth: u16) -> FuseQueue {
        FuseQueue {
            channel,
            file,
            memory: vec![u8::MAX; FIXED_BYTES + MAX_IO_BYTES as usize].into(),
            slots: SlotPool::new(depth),
            pending: vec![Pending::default(); usize::from(depth)].into(),
            is_polling: false,
            is_quiesced: false,
        }
    }

    /// Has the ring report the next request, if there is room for it.
    fn poll(&mut self, io: &mut QueueIo<'_>) {
        if !self.is_polling && !self.is_quiesced && self.slots.free() > 0 {
            self.is_polling = true;
            io.ring.readable(self.channel.as_fd().as_raw_fd(), READABLE);
        }
    }

    /// Reads the requests that have arrived, at most as many as there are slots.
    fn receive_all(&mut self, io: &mut QueueIo<'_>) -> io::Result<()> {
        for _ in 0..self.pending.len() {
            let Some(slot) = self.slots.take() else { return Ok(()) };
            match self.channel.receive(&mut self.memory) {
                Ok(length) => match self.parse(io, slot, length) {
                    Ok(request) => self.begin(io, slot, request),
                    Err(protocol::BadRequest) => {
                        self.slots.give(slot);
                        return Err(io::Error::new(io::ErrorKind::InvalidData, "FUSE sends no requests"));
                    }
                },
                Err(error) => {
                    self.slots.give(slot);
                    match error.raw_os_error() {
                        Some(libc::EAGAIN) => return Ok(()),
                        // Its sender was killed before it was read.
                        Some(libc::EINTR | libc::ENOENT) => {}
                        Some(NO_MOUNT) if self.file.is_closed.load(Ordering::Acquire) => {
                            self.is_quiesced = true;
                            return Ok(());
                        }
                        _ => return Err(error),
                    }
                }
            }
        }
        Ok(())
    }

    /// Parses the request of `length` bytes in the memory, and copies its data to `slot`.
    fn parse(&self, io: &QueueIo<'_>, slot: u16, length: usize) -> Result<FuseRequest, protocol::BadRequest> {
        let fixed = self.memory.first_chunk::<FIXED_BYTES>().ok_or(protocol::BadRequest)?;
        let request = FuseRequest::parse(fixed, length)?;
        if let FuseOperation::Write { .. } = request.operation {
            let data = self.memory.get(FIXED_BYTES..length).ok_or(protocol::BadRequest)?;
            io.arena.buf(usize::from(slot)).copy_from(data);
        }
        Ok(request)
    }

    /// Answers a request at once, or gives it to the volume.
    fn begin(&mut self, io: &mut QueueIo<'_>, slot: u16, request: FuseRequest) {
        let size_bytes = self.file.size_bytes.load(Ordering::Relaxed);
        match translate(request, size_bytes) {
            RequestStep::Volume(operation, range, pending) => {
                self.pending[usize::from(slot)] = pending;
                io.requests.push(Request { slot, operation, range });
            }
            RequestStep::Answer(reply) => {
                self.send(reply, None);
                self.slots.give(slot);
            }
            RequestStep::Refuse(refusal) => {
                io.refusals.push(refusal);
                self.send(protocol::failed(request.unique, refusal.errno.raw()), None);
                self.slots.give(slot);
            }
            RequestStep::Nothing => self.slots.give(slot),
        }
    }

    /// Sends an answer. A failure needs no handling: its request was killed, or the mount is gone.
    fn send(&self, mut reply: Reply, data: Option<shorthorn_ring::IoBuf>) {
        let data_bytes = data.map_or(0, |data| u32::try_from(data.len()).unwrap_or(0));
        let sent = self.channel.send(reply.bytes(data_bytes), data);
        debug_assert!(
            sent.as_ref().err().and_then(io::Error::raw_os_error) != Some(libc::EINVAL),
            "the kernel does not understand {reply:?}"
        );
    }
}

impl QueueFrontend for FuseQueue {
    fn start(&mut self, io: &mut QueueIo<'_>) -> io::Result<()> {
        let (slots, bytes) = (io.arena.slots(), io.arena.slot_bytes());
        if slots < self.pending.len() || bytes < MAX_IO_BYTES as usize {
            let problem = format!("the arena has {slots} slots of {bytes} bytes, too few for the FUSE file");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        self.poll(io);
        Ok(())
    }

    fn on_completion(&mut self, io: &mut QueueIo<'_>, _completion: Completion) -> io::Result<()> {
        self.is_polling = false;
        if self.is_quiesced {
            return Ok(()); // the next process reads it
        }
        self.receive_all(io)?;
        self.poll(io);
        Ok(())
    }

    fn complete(&mut self, io: &mut QueueIo<'_>, slot: u16, outcome: Result<(), Errno>) {
        let pending = &mut self.pending[usize::from(slot)];
        if let (Ok(()), Some(rest)) = (outcome, pending.rest.take()) {
            let (now, later) = first_part(rest);
            pending.rest = later;
            let operation = Operation::WriteZeroes { fua: false };
            io.requests.push(Request { slot, operation, range: now });
            return;
        }
        let Pending { unique, length_bytes, kind, .. } = *pending;
        match (outcome, kind) {
            (Err(errno), _) => self.send(protocol::failed(unique, errno.raw()), None),
            (Ok(()), PendingKind::Plain) => self.send(protocol::done(unique), None),
            (Ok(()), PendingKind::Write) => self.send(protocol::written(unique, length_bytes), None),
            (Ok(()), PendingKind::Read) => {
                let data = io.arena.buf(usize::from(slot)).part(0, length_bytes as usize);
                self.send(protocol::done(unique), Some(data));
            }
        }
        self.slots.give(slot);
    }

    fn flush(&mut self, io: &mut QueueIo<'_>) {
        // Answers are sent already. A slot may be free again.
        self.poll(io);
    }

    fn quiesce(&mut self, _io: &mut QueueIo<'_>) {
        self.is_quiesced = true;
    }

    fn quiesced(&self) -> Quiesced {
        if self.slots.free() < self.pending.len() {
            return Quiesced::NotYet;
        }
        match self.channel.share() {
            Ok(fuse) => Quiesced::At(fuse),
            Err(error) => {
                tracing::warn!(%error, "the FUSE file cannot be handed over: its requests are sent again");
                Quiesced::Done
            }
        }
    }

    fn is_idle(&self) -> bool {
        // The kernel copies while it takes an answer, and before it gives a request.
        true
    }
}

/// The next step for a request.
#[derive(Debug, PartialEq)]
enum RequestStep {
    Volume(Operation, ByteRange, Pending),
    Answer(Reply),
    Refuse(RefusedRequest),
    Nothing,
}

/// Returns the next step for `request` on a volume of `size_bytes`.
fn translate(FuseRequest { unique, operation }: FuseRequest, size_bytes: u64) -> RequestStep {
    let plain = Pending { unique, ..Pending::default() };
    match operation {
        FuseOperation::Init { major, flags } if protocol::is_known(major) => {
            RequestStep::Answer(protocol::initialised(unique, flags, MAX_IO_BYTES))
        }
        FuseOperation::Init { .. } => RequestStep::Answer(protocol::failed(unique, libc::EPROTO)),
        FuseOperation::Attributes => RequestStep::Answer(protocol::attributes(unique, size_bytes)),
        FuseOperation::Open => RequestStep::Answer(protocol::opened(unique)),
        FuseOperation::Close => RequestStep::Answer(protocol::done(unique)),
        FuseOperation::FileSystemStatus => RequestStep::Answer(protocol::file_system_status(unique)),
        FuseOperation::Sync => RequestStep::Volume(Operation::Flush, ByteRange::EMPTY, plain),
        FuseOperation::Read { offset_bytes, length_bytes } => {
            // A file ends: the kernel may ask for bytes behind it, as one that does not end with a page.
            let left_bytes = size_bytes.saturating_sub(offset_bytes);
            let length_bytes = u32::try_from(left_bytes).map_or(length_bytes, |left| left.min(length_bytes));
            if length_bytes == 0 {
                return RequestStep::Answer(protocol::done(unique));
            }
            let pending = Pending { length_bytes, kind: PendingKind::Read, ..plain };
            transfer(Operation::Read, offset_bytes, pending, size_bytes)
        }
        FuseOperation::Write { offset_bytes, length_bytes } => {
            let pending = Pending { length_bytes, kind: PendingKind::Write, ..plain };
            transfer(Operation::Write { fua: false }, offset_bytes, pending, size_bytes)
        }
        FuseOperation::Allocate { offset_bytes, length_bytes, mode } => {
            zeroes(plain, (offset_bytes, length_bytes), mode, size_bytes)
        }
        FuseOperation::Unanswered => RequestStep::Nothing,
        // The kernel does not ask again for most of them.
        FuseOperation::Unknown => RequestStep::Answer(protocol::failed(unique, libc::ENOSYS)),
    }
}

/// Returns the step of a READ or WRITE of `pending.length_bytes`.
fn transfer(operation: Operation, offset_bytes: u64, pending: Pending, size_bytes: u64) -> RequestStep {
    let length_bytes = u64::from(pending.length_bytes);
    if pending.length_bytes > MAX_IO_BYTES {
        return refuse(operation, offset_bytes, length_bytes, Errno::INVALID);
    }
    match checked(offset_bytes, length_bytes, size_bytes) {
        Ok(range) => RequestStep::Volume(operation, range, pending),
        Err(errno) => refuse(operation, offset_bytes, length_bytes, errno),
    }
}

/// Returns the step of a fallocate(2). A hole reads as zeroes, so it is not a discard: a discarded block may
/// have its old content.
fn zeroes(
    pending: Pending,
    (offset_bytes, length_bytes): (u64, u64),
    mode: u32,
    size_bytes: u64,
) -> RequestStep {
    let operation = Operation::WriteZeroes { fua: false };
    let mode = i32::try_from(mode).unwrap_or(i32::MAX);
    let keep = libc::FALLOC_FL_KEEP_SIZE;
    if mode != libc::FALLOC_FL_PUNCH_HOLE | keep && mode != libc::FALLOC_FL_ZERO_RANGE | keep {
        return refuse(operation, offset_bytes, length_bytes, Errno::NOT_SUPPORTED);
    }
    match checked(offset_bytes, length_bytes, size_bytes) {
        Ok(range) => {
            let (now, rest) = first_part(range);
            RequestStep::Volume(operation, now, Pending { rest, ..pending })
        }
        Err(errno) => refuse(operation, offset_bytes, length_bytes, errno),
    }
}

fn refuse(operation: Operation, offset_bytes: u64, length_bytes: u64, errno: Errno) -> RequestStep {
    RequestStep::Refuse(RefusedRequest { operation: Some(operation), offset_bytes, length_bytes, errno })
}

/// Returns the range if it is in the volume and made of sectors.
fn checked(offset_bytes: u64, length_bytes: u64, size_bytes: u64) -> Result<ByteRange, Errno> {
    let is_whole = offset_bytes.is_multiple_of(SECTOR_BYTES) && length_bytes.is_multiple_of(SECTOR_BYTES);
    if length_bytes == 0 || !is_whole {
        return Err(Errno::INVALID);
    }
    ByteRange::new(offset_bytes, length_bytes)
        .and_then(|range| range.check(size_bytes))
        .map_err(|_| Errno::INVALID)
}

/// Splits off the first [`MAX_ZERO_BYTES`] of `range` at most.
fn first_part(range: ByteRange) -> (ByteRange, Option<ByteRange>) {
    let limit_bytes = u64::from(MAX_ZERO_BYTES);
    let end = (range.offset() / limit_bytes + 1) * limit_bytes;
    range.split_at(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1 << 30;

    fn step(operation: FuseOperation) -> RequestStep {
        translate(FuseRequest { unique: 7, operation }, SIZE)
    }

    fn volume(operation: FuseOperation) -> Option<(Operation, u64, u64)> {
        match step(operation) {
            RequestStep::Volume(operation, range, pending) => {
                assert_eq!(pending.unique, 7);
                Some((operation, range.offset(), range.length()))
            }
            _ => None,
        }
    }

    fn errno(operation: FuseOperation) -> Option<Errno> {
        match step(operation) {
            RequestStep::Refuse(refusal) => Some(refusal.errno),
            _ => None,
        }
    }

    #[test]
    fn data_and_flushes_are_of_the_volume() {
        let (offset_bytes, length_bytes) = (4096, 8192);
        assert_eq!(
            volume(FuseOperation::Read { offset_bytes, length_bytes }),
            Some((Operation::Read, 4096, 8192))
        );
        assert_eq!(
            volume(FuseOperation::Write { offset_bytes, length_bytes }),
            Some((Operation::Write { fua: false }, 4096, 8192))
        );
        assert_eq!(volume(FuseOperation::Sync), Some((Operation::Flush, 0, 0)));
    }

    #[test]
    fn a_read_ends_with_the_file() {
        let read = |offset_bytes, length_bytes| FuseOperation::Read { offset_bytes, length_bytes };
        assert_eq!(volume(read(SIZE - 512, 4096)), Some((Operation::Read, SIZE - 512, 512)));
        assert_eq!(step(read(SIZE, 4096)), RequestStep::Answer(protocol::done(7)));
        assert_eq!(step(read(u64::MAX, 4096)), RequestStep::Answer(protocol::done(7)));
    }

    #[test]
    fn requests_that_no_volume_can_do() {
        let write = |offset_bytes, length_bytes| FuseOperation::Write { offset_bytes, length_bytes };
        assert_eq!(errno(write(SIZE - 512, 1024)), Some(Errno::INVALID));
        assert_eq!(errno(write(100, 512)), Some(Errno::INVALID));
        assert_eq!(errno(write(0, 100)), Some(Errno::INVALID));
        assert_eq!(errno(write(0, MAX_IO_BYTES + 512)), Some(Errno::INVALID));
        assert_eq!(errno(write(u64::MAX - 511, 512)), Some(Errno::INVALID));
        let allocate = FuseOperation::Allocate { offset_bytes: 0, length_bytes: 4096, mode: 0 };
        assert_eq!(errno(allocate), Some(Errno::NOT_SUPPORTED));
        assert_eq!(step(FuseOperation::Unknown), RequestStep::Answer(protocol::failed(7, libc::ENOSYS)));
    }

    #[test]
    fn a_hole_is_made_part_by_part_and_reads_as_zeroes() {
        let limit = u64::from(MAX_ZERO_BYTES);
        let hole = FuseOperation::Allocate { offset_bytes: 512, length_bytes: 2 * limit, mode: 3 };
        let RequestStep::Volume(operation, mut range, pending) = step(hole) else { panic!("{hole:?}") };
        assert_eq!(operation, Operation::WriteZeroes { fua: false });
        let (mut end, mut rest) = (512, pending.rest);
        loop {
            assert!(range.offset() == end && range.length() <= limit, "{range:?}");
            end = range.end();
            let Some(next) = rest else { break };
            (range, rest) = first_part(next);
        }
        assert_eq!(end, 512 + 2 * limit);
    }
}
