//! A queue of a ublk device: fetches requests and answers them.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use io_uring::opcode;
use io_uring::types::Fd;
use shorthorn_core::{Operation, Request};
use shorthorn_ring::{Completion, TaskWork, Token};
use shorthorn_types::limits::{BLOCK_BYTES, MAX_IO_BYTES, MAX_ZERO_BYTES, SECTOR_BYTES};
use shorthorn_types::{ByteRange, Errno};

use super::abi::{self, IoCommand, IoDescriptor};
use super::fetching::{Fetching, cannot_map};
use super::privilege;
use crate::{QueueFrontend, QueueIo, Quiesced, RefusedRequest, SOURCE, kernel_release};

/// A queue: tag N of the driver is slot N.
///
/// A tag is either with the driver, which waits for a request to deliver, or with this process, which works
/// on one. It changes sides with the completion of a command, and with the next command.
#[derive(Debug)]
pub(super) struct UblkQueue {
    queue: u16,
    /// The maximum bytes of one request, from the parameters of the device.
    max_io_bytes: u32,
    /// Size of the volume; changed by a resize.
    size_bytes: Arc<AtomicU64>,
    /// The answer to a request of each tag if it succeeds.
    success: Box<[i32]>,
    /// The rest of a tag's zeroes that must take space.
    zeroes: Box<[Option<ByteRange>]>,
    /// For the ring of its thread.
    task_work: TaskWork,
    /// True if the driver copies data only while the thread waits: see [`UblkQueue::is_idle`].
    is_deferred: bool,
    /// True if requests are left to the next process.
    is_quiesced: bool,
    /// Tags that the driver will give no more requests for.
    ended: usize,
    /// Reports the progress of this queue to the control half.
    fetching: Arc<Fetching>,
    /// The character device. Gone once all tags have ended: a deletion of the device waits for that.
    device: Option<Arc<OwnedFd>>,
    /// Mapped from the start of the queue until all tags have ended.
    descriptors: Option<Descriptors>,
}

impl UblkQueue {
    /// Creates queue number `queue` of the device whose character device is `device`.
    pub(super) fn new(
        device: Arc<OwnedFd>,
        queue: u16,
        depth: u16,
        max_io_bytes: u32,
        size_bytes: Arc<AtomicU64>,
        fetching: Arc<Fetching>,
    ) -> UblkQueue {
        UblkQueue {
            queue,
            max_io_bytes,
            size_bytes,
            success: vec![0; usize::from(depth)].into(),
            zeroes: vec![None; usize::from(depth)].into(),
            task_work: match kernel_release::is_deferral_safe(&kernel_release::release()) {
                true => TaskWork::Deferred,
                false => TaskWork::Cooperative,
            },
            is_deferred: false,
            is_quiesced: false,
            ended: 0,
            fetching,
            device: Some(device),
            descriptors: None,
        }
    }

    /// Maps the descriptors and asks for a request with every tag.
    fn fetch_all(&mut self, io: &mut QueueIo<'_>) -> io::Result<()> {
        let (depth, needed) = (self.success.len(), self.max_io_bytes as usize);
        if io.arena.slots() < depth || io.arena.slot_bytes() < needed {
            let problem = format!(
                "the arena of queue {} has {} slots of {} bytes; the device needs {depth} of {needed}",
                self.queue,
                io.arena.slots(),
                io.arena.slot_bytes()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        let Some(device) = &self.device else { return Err(io::ErrorKind::NotConnected.into()) };
        if let Err(error) = privilege::drop_sys_admin() {
            tracing::warn!(
                %error,
                queue = self.queue,
                "the kernel may look for partitions in the volume: CAP_SYS_ADMIN cannot be given up"
            );
        }
        // Not earlier: the driver lets no other process map them any more.
        let mapped = Descriptors::map(device.as_fd(), self.queue, depth);
        self.descriptors = Some(mapped.map_err(|error| cannot_map(self.queue, &error))?);
        for tag in (0..).take(depth) {
            self.submit(io, abi::IO_FETCH_REQ, tag, 0);
        }
        Ok(())
    }

    /// Gives `tag` to the driver.
    fn submit(&self, io: &mut QueueIo<'_>, command: u32, tag: u16, result: i32) {
        // Answers after the end have no recipient.
        let Some(device) = &self.device else { return };
        let address = io.arena.buf(usize::from(tag)).as_ptr().addr() as u64;
        let header = IoCommand { queue: self.queue, tag, result, address };
        let entry = opcode::UringCmd16::new(Fd(device.as_raw_fd()), command).cmd(header.encode()).build();
        let token = Token { source: SOURCE, kind: 0, index: tag, tag: 0 };
        // SAFETY: the address is that of arena memory, which is never unmapped.
        unsafe { io.ring.push(entry, token) }
    }

    /// Writes zeroes as data, as many as a slot can hold; the rest follows after that. Replicas make holes of
    /// zeroes, but store data unchanged, also those of earlier versions.
    fn write_zeroes(&mut self, io: &mut QueueIo<'_>, tag: u16, range: ByteRange, fua: bool) {
        let (now, later) = first_part(range, u64::from(self.max_io_bytes.min(MAX_IO_BYTES)));
        self.zeroes[usize::from(tag)] = later;
        let length = usize::try_from(now.length()).unwrap_or(0);
        io.arena.buf(usize::from(tag)).part(0, length).zero();
        io.requests.push(Request { slot: tag, operation: Operation::Write { fua }, range: now });
    }

    /// Handles a request: the driver has given `tag` to this process, with a request in its descriptor.
    fn accept(&mut self, io: &mut QueueIo<'_>, tag: u16) {
        if self.is_quiesced {
            return; // the driver gives it to the next process: it was never answered
        }
        let Some(descriptors) = &self.descriptors else { return };
        let descriptor = descriptors.get(usize::from(tag));
        let takes_space = descriptor.op_flags & abi::IO_F_NOUNMAP != 0;
        match translate(tag, descriptor, self.max_io_bytes, self.size_bytes.load(Ordering::Relaxed)) {
            Ok((Request { operation: Operation::WriteZeroes { fua }, range, .. }, success))
                if takes_space =>
            {
                self.success[usize::from(tag)] = success;
                self.write_zeroes(io, tag, range, fua);
            }
            Ok((request, success)) => {
                self.success[usize::from(tag)] = success;
                io.requests.push(request);
            }
            Err(errno) => {
                io.refusals.push(refusal(descriptor, errno));
                self.submit(io, abi::IO_COMMIT_AND_FETCH_REQ, tag, -errno.raw());
            }
        }
    }
}

impl QueueFrontend for UblkQueue {
    fn task_work(&self) -> TaskWork {
        self.task_work
    }

    fn start(&mut self, io: &mut QueueIo<'_>) -> io::Result<()> {
        self.is_deferred = io.ring.is_deferred();
        let started = self.fetch_all(io);
        self.fetching.record(&started);
        started
    }

    fn on_completion(&mut self, io: &mut QueueIo<'_>, completion: Completion) -> io::Result<()> {
        let tag = completion.token.index;
        match completion.result {
            abi::IO_RES_OK => self.accept(io, tag),
            abi::IO_RES_ABORT => {
                self.ended += 1;
                if self.ended == self.success.len() {
                    self.descriptors = None;
                    self.device = None;
                }
            }
            result => {
                let source = io::Error::from_raw_os_error(-result);
                let problem = format!("the ublk driver refuses tag {tag} of queue {}: {source}", self.queue);
                let error = io::Error::new(source.kind(), problem);
                self.fetching.fail(&error);
                return Err(error);
            }
        }
        Ok(())
    }

    fn complete(&mut self, io: &mut QueueIo<'_>, slot: u16, outcome: Result<(), Errno>) {
        let rest = self.zeroes[usize::from(slot)].take();
        if let (Ok(()), Some(rest), Some(descriptors)) = (outcome, rest, &self.descriptors) {
            let fua = descriptors.get(usize::from(slot)).op_flags & abi::IO_F_FUA != 0;
            return self.write_zeroes(io, slot, rest, fua);
        }
        let result = match outcome {
            Ok(()) => self.success[usize::from(slot)],
            Err(errno) => -errno.raw(),
        };
        self.submit(io, abi::IO_COMMIT_AND_FETCH_REQ, slot, result);
    }

    fn flush(&mut self, _io: &mut QueueIo<'_>) {
        // Answers are in the ring already; it holds them until the thread waits.
    }

    fn quiesce(&mut self, _io: &mut QueueIo<'_>) {
        self.is_quiesced = true;
    }

    fn quiesced(&self) -> Quiesced {
        Quiesced::Done
    }

    fn is_idle(&self) -> bool {
        // The driver copies the data of a write into its slot before it completes the command. With another
        // ring this happens at the end of any system call of this thread, even of those that release memory.
        self.is_deferred
    }
}

/// Splits off the first `limit_bytes` of `range` at most, up to the end of a block.
fn first_part(range: ByteRange, limit_bytes: u64) -> (ByteRange, Option<ByteRange>) {
    let limit = range.offset() + limit_bytes;
    let last_block = limit / BLOCK_BYTES * BLOCK_BYTES;
    // A limit of less than a block has no end of a block in it.
    let end = if last_block > range.offset() { last_block } else { limit };
    let part = |start: u64, end: u64| ByteRange::new(start, end - start).ok();
    match part(range.offset(), end.min(range.end())) {
        Some(first) if end < range.end() => (first, part(end, range.end())),
        _ => (range, None),
    }
}

/// Returns the request of a descriptor, and its answer on success. The driver keeps to its limits, but they
/// are checked all the same, because later code relies on them.
fn translate(
    slot: u16,
    descriptor: IoDescriptor,
    max_io_bytes: u32,
    size_bytes: u64,
) -> Result<(Request, i32), Errno> {
    let operation = operation_of(descriptor).ok_or(Errno::NOT_SUPPORTED)?;
    let limit_bytes = match operation {
        Operation::Flush => return Ok((Request { slot, operation, range: ByteRange::EMPTY }, 0)),
        Operation::Discard | Operation::WriteZeroes { .. } => MAX_ZERO_BYTES,
        _ => max_io_bytes.min(MAX_IO_BYTES),
    };
    let start = descriptor.start_sector.checked_mul(SECTOR_BYTES).ok_or(Errno::INVALID)?;
    let length = u64::from(descriptor.sectors) * SECTOR_BYTES;
    if length > u64::from(limit_bytes) {
        return Err(Errno::INVALID);
    }
    let range = ByteRange::new(start, length)
        .and_then(|range| range.check(size_bytes))
        .map_err(|_| Errno::INVALID)?;
    let success = match operation {
        // Fewer would make the driver ask for the rest.
        Operation::Read | Operation::Write { .. } => i32::try_from(length).map_err(|_| Errno::INVALID)?,
        _ => 0,
    };
    Ok((Request { slot, operation, range }, success))
}

/// Returns the operation of the descriptor; none if a volume does not have it.
fn operation_of(descriptor: IoDescriptor) -> Option<Operation> {
    let fua = descriptor.op_flags & abi::IO_F_FUA != 0;
    match descriptor.op_flags & abi::IO_OP_MASK {
        abi::IO_OP_READ => Some(Operation::Read),
        abi::IO_OP_WRITE => Some(Operation::Write { fua }),
        abi::IO_OP_FLUSH => Some(Operation::Flush),
        abi::IO_OP_DISCARD => Some(Operation::Discard),
        abi::IO_OP_WRITE_ZEROES => Some(Operation::WriteZeroes { fua }),
        _ => None,
    }
}

fn refusal(descriptor: IoDescriptor, errno: Errno) -> RefusedRequest {
    RefusedRequest {
        operation: operation_of(descriptor),
        offset_bytes: descriptor.start_sector.saturating_mul(SECTOR_BYTES),
        length_bytes: u64::from(descriptor.sectors) * SECTOR_BYTES,
        errno,
    }
}

/// The descriptors of a queue, which the driver writes and we may only read.
#[derive(Debug)]
struct Descriptors {
    base: NonNull<IoDescriptor>,
    count: usize,
    length_bytes: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, until Drop.
unsafe impl Send for Descriptors {}

impl Descriptors {
    fn map(device: BorrowedFd<'_>, queue: u16, count: usize) -> io::Result<Descriptors> {
        let page = page_bytes();
        let length_bytes = abi::descriptor_bytes(count, page);
        let offset = libc::off_t::try_from(abi::descriptor_offset(queue, page)).map_err(io::Error::other)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing of ours.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length_bytes,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                device.as_raw_fd(),
                offset,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Descriptors { base, count, length_bytes })
    }

    fn get(&self, tag: usize) -> IoDescriptor {
        assert!(tag < self.count && self.count * size_of::<IoDescriptor>() <= self.length_bytes);
        // SAFETY: inside the mapping, as just checked. The driver has written it before it completed the
        // command of the tag, and leaves it alone until the next one.
        unsafe { self.base.add(tag).read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing refers to it any more.
        unsafe {
            libc::munmap(self.base.as_ptr().cast(), self.length_bytes);
        }
    }
}

fn page_bytes() -> usize {
    // SAFETY: no memory involved.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE: u64 = 1 << 30;

    fn descriptor(op_flags: u32, start_sector: u64, sectors: u32) -> IoDescriptor {
        IoDescriptor { op_flags, sectors, start_sector, address: 0 }
    }

    fn ask(op_flags: u32, start_sector: u64, sectors: u32) -> Result<(Operation, u64, u64, i32), Errno> {
        let (request, success) = translate(3, descriptor(op_flags, start_sector, sectors), 1 << 20, SIZE)?;
        assert_eq!(request.slot, 3);
        Ok((request.operation, request.range.offset(), request.range.length(), success))
    }

    #[test]
    fn every_operation_has_its_request() {
        let (fua, other_flags) = (abi::IO_F_FUA, 1 << 8 | 1 << 11 | 1 << 15);
        assert_eq!(ask(abi::IO_OP_READ | other_flags, 8, 2), Ok((Operation::Read, 4096, 1024, 1024)));
        assert_eq!(ask(abi::IO_OP_WRITE, 0, 1), Ok((Operation::Write { fua: false }, 0, 512, 512)));
        assert_eq!(ask(abi::IO_OP_WRITE | fua, 0, 1), Ok((Operation::Write { fua: true }, 0, 512, 512)));
        assert_eq!(ask(abi::IO_OP_FLUSH, u64::MAX, 0), Ok((Operation::Flush, 0, 0, 0)));
        assert_eq!(ask(abi::IO_OP_DISCARD, 8, 65536), Ok((Operation::Discard, 4096, 32 << 20, 0)));
        let zeroes = Operation::WriteZeroes { fua: false };
        assert_eq!(ask(abi::IO_OP_WRITE_ZEROES | other_flags, 8, 8), Ok((zeroes, 4096, 4096, 0)));
        assert_eq!(ask(4, 0, 8), Err(Errno::NOT_SUPPORTED), "WRITE_SAME");
        assert_eq!(ask(18, 0, 8), Err(Errno::NOT_SUPPORTED), "REPORT_ZONES");
    }

    /// Memory that is released just when the driver has copied a write into it would lose that write.
    #[test]
    fn without_deferred_task_work_the_memory_of_slots_is_never_released() {
        let arena = shorthorn_ring::Arena::new(1, 4096).unwrap();
        for task_work in [TaskWork::Cooperative, TaskWork::Deferred] {
            let mut ring = shorthorn_ring::Ring::with(8, task_work).unwrap();
            let device = Arc::new(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
            let mut queue =
                UblkQueue::new(device, 0, 1, 4096, Arc::new(AtomicU64::new(SIZE)), Arc::default());
            let (requests, refusals) = (&mut Vec::new(), &mut Vec::new());
            let mut io = QueueIo { ring: &mut ring, arena: &arena, requests, refusals };
            assert!(queue.start(&mut io).is_err(), "it has no descriptors");
            assert_eq!(queue.is_idle(), task_work == TaskWork::Deferred && ring.is_deferred());
        }
    }

    #[test]
    fn a_refusal_reports_the_request() {
        let (operation, errno) = (Some(Operation::Write { fua: true }), Errno::INVALID);
        let too_long = refusal(descriptor(abi::IO_OP_WRITE | abi::IO_F_FUA, 8, 4096), errno);
        assert_eq!(too_long, RefusedRequest { operation, offset_bytes: 4096, length_bytes: 2 << 20, errno });
        let unknown = refusal(descriptor(4, u64::MAX, 1), Errno::NOT_SUPPORTED);
        assert_eq!((unknown.operation, unknown.offset_bytes), (None, u64::MAX));
    }

    #[test]
    fn requests_over_a_limit_are_refused() {
        assert!(ask(abi::IO_OP_WRITE, 0, 2048).is_ok());
        assert_eq!(ask(abi::IO_OP_WRITE, 0, 2049), Err(Errno::INVALID));
        assert_eq!(ask(abi::IO_OP_DISCARD, 0, 65537), Err(Errno::INVALID));
        assert_eq!(ask(abi::IO_OP_READ, 0, 0), Err(Errno::INVALID));
        assert!(ask(abi::IO_OP_READ, SIZE / 512 - 1, 1).is_ok());
        assert_eq!(ask(abi::IO_OP_READ, SIZE / 512, 1), Err(Errno::INVALID));
        assert_eq!(ask(abi::IO_OP_READ, u64::MAX, 1), Err(Errno::INVALID));
    }

    #[test]
    fn parts_cover_a_range_once_and_end_with_blocks() {
        let range = |offset, length| ByteRange::new(offset, length).unwrap();
        for (whole, parts) in [
            (range(512, 1024), vec![range(512, 1024)]),
            (range(0, 1 << 20), vec![range(0, 1 << 20)]),
            (range(512, 1 << 20), vec![range(512, (1 << 20) - 512), range(1 << 20, 512)]),
            (
                range(4096, (2 << 20) + 512),
                vec![range(4096, 1 << 20), range((1 << 20) + 4096, 1 << 20), range((2 << 20) + 4096, 512)],
            ),
        ] {
            let (mut rest, mut found) = (Some(whole), Vec::new());
            while let Some(range) = rest {
                let (part, later) = first_part(range, 1 << 20);
                found.push(part);
                rest = later;
            }
            assert_eq!(found, parts);
        }
        assert_eq!(first_part(range(512, 4096), 1024), (range(512, 1024), Some(range(1536, 3072))));
    }

    proptest! {
        #[test]
        fn no_descriptor_gives_a_request_out_of_bounds(
            op_flags: u32,
            start in prop_oneof![0..SIZE / 256, any::<u64>()],
            sectors in prop_oneof![0u32..1 << 17, any::<u32>()],
            max_io_bytes in prop_oneof![Just(512u32 << 10), Just(1 << 20), Just(4 << 20)],
        ) {
            if let Ok((request, success)) = translate(
                0, descriptor(op_flags, start, sectors), max_io_bytes, SIZE
            ) {
                prop_assert!(request.range.end() <= SIZE);
                let data = matches!(request.operation, Operation::Read | Operation::Write { .. });
                let limit = if data { max_io_bytes.min(MAX_IO_BYTES) } else { MAX_ZERO_BYTES };
                prop_assert!(request.range.length() <= u64::from(limit));
                prop_assert_eq!(
                    u64::try_from(success).unwrap(), if data { request.range.length() } else { 0 }
                );
            }
        }
    }
}
