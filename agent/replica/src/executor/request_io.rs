//! The requests in execution with their buffers, and the operations on image files that the kernel has.
//!
//! [`RequestIo`] begins operations and moves data between the buffers of a request. It does not know why.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use shorthorn_ring::{IoBuf, Ring};
use shorthorn_store::{EdgeBlock, FileIndex, Store, block_sum};
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_wire::Header;

use super::block::{distance, length_of};
use super::buffers::Buffers;
use super::cached_layer_sums::Checked;
use super::in_flight::InFlight;
use super::operation::{kind, numbered_token, piece_token, zero_token};
use super::piece::Piece;
use super::requests::{Durability, Requests, SUM_SLOT, Work, durability, reads_data};
use crate::limits::EDGE_BLOCKS;

/// The flags with which fallocate makes a hole.
const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

/// See the module.
#[derive(Debug)]
pub(crate) struct RequestIo {
    requests: Requests,
    buffers: Buffers,
    in_flight: InFlight,
}

/// Requests and their data.
impl RequestIo {
    /// Creates the slots of all requests.
    ///
    /// # Errors
    /// No memory is available for the buffers.
    pub fn new() -> io::Result<RequestIo> {
        Ok(RequestIo { requests: Requests::new(), buffers: Buffers::new()?, in_flight: InFlight::default() })
    }

    /// Assigns `slot` to the request of `header`.
    pub fn assign(&mut self, slot: u16, header: Header) {
        let blocks = self.requests.assign(slot, header);
        if reads_data(&header) || header.data_bytes() > 0 {
            self.buffers.touch(slot, blocks);
        }
    }

    /// Makes the request the check of a piece of a layer.
    pub(super) fn check_layer(&mut self, slot: u16, piece: ByteRange, checked: Checked) {
        self.requests.check_layer(slot, piece, checked);
        self.buffers.touch(slot, piece);
    }

    /// Ends the request of the slot: its number and its buffer can be used again.
    pub fn free(&mut self, slot: u16) {
        self.requests.free(slot);
        self.buffers.free(slot);
    }

    /// Releases the memory of all slots of requests after they have been free for a while. The slot for sums
    /// keeps its memory while regions are being summed.
    pub fn release_memory(&mut self, is_summing: bool) {
        self.buffers.release_all();
        if !is_summing {
            self.buffers.release_one(SUM_SLOT);
        }
    }

    /// Returns the request in the slot.
    pub(super) fn work(&self, slot: u16) -> &Work {
        self.requests.get(slot)
    }

    /// Returns the header that the slot was assigned for.
    pub fn header(&self, slot: u16) -> Header {
        self.work(slot).header
    }

    /// Returns true if each block of the read data in the slot matches a sum that counts.
    pub fn is_confirmed(&self, slot: u16) -> bool {
        self.work(slot).is_confirmed
    }

    /// Returns the requests by their slots.
    pub(super) fn requests_mut(&mut self) -> &mut Requests {
        &mut self.requests
    }

    /// Returns true if a request modifies blocks of `range`.
    pub fn is_modified(&self, range: ByteRange) -> bool {
        self.requests.is_modified(range)
    }

    /// Returns the buffer of the request's data, or of the text of a control frame.
    pub fn payload(&self, slot: u16) -> IoBuf {
        let Work { header, blocks, .. } = self.work(slot);
        // Decoded headers have a range, see assign.
        self.data(slot, header.range().unwrap_or(*blocks))
    }

    /// Puts the text of an answer to a control frame into the slot. None if it is too long.
    pub fn put_text(&mut self, slot: u16, text: &[u8]) -> Option<IoBuf> {
        let text_max_bytes = self.header(slot).opcode.text_max_bytes() as usize;
        let range = ByteRange::new(0, text.len() as u64).ok().filter(|_| text.len() <= text_max_bytes)?;
        self.buffers.touch(slot, range.grown_to_blocks());
        let buf = self.buffers.part(slot, 0, range);
        buf.copy_from(text);
        Some(buf)
    }

    /// Returns the buffer of a part of the request's blocks.
    pub fn data(&self, slot: u16, part: ByteRange) -> IoBuf {
        self.buffers.part(slot, self.work(slot).blocks.offset(), part)
    }

    /// Returns the sum of a block of the request's data.
    pub fn sum_of(&self, slot: u16, block: ByteRange) -> u32 {
        block_sum(self.data(slot, block).crc32c())
    }

    /// Fills the blocks of a piece with zeroes that lie behind the first `count` bytes: the file ends there.
    pub(super) fn zero_rest(&self, slot: u16, piece: Piece, count: usize) {
        let buf = self.buffer_of(slot, piece);
        buf.part(count, buf.len() - count).zero();
    }
}

/// Edges: the blocks that a modification changes in part.
impl RequestIo {
    /// Returns the buffer of the former data of an edge.
    pub fn edge(&self, slot: u16, edge: usize) -> IoBuf {
        self.buffers.blocks(slot, edge, 1)
    }

    /// Puts the part of an edge block that the write does not change beside the part that it does. Returns
    /// the block.
    pub fn complete_edge(&self, slot: u16, edge: usize) -> Option<ByteRange> {
        let Work { header, blocks, .. } = self.work(slot);
        let whole = header.range().unwrap_or(*blocks);
        let last_block = (whole.end() - 1) / BLOCK_BYTES * BLOCK_BYTES;
        let start = if edge == 0 { blocks.offset() } else { last_block };
        let end = start + BLOCK_BYTES;
        for (from, to) in [(start, whole.offset().max(start)), (whole.end().min(end), end)] {
            let Ok(part) = ByteRange::new(from, to - from) else { continue };
            let skip = distance(from - start);
            self.data(slot, part).copy_from_buf(self.edge(slot, edge).part(skip, length_of(part)));
        }
        ByteRange::new(start, BLOCK_BYTES).ok()
    }

    /// Returns the sums of an edge block before and after the write, which has completed it.
    pub fn edge_sums(&self, slot: u16, edge: usize, block: ByteRange) -> (u32, u32) {
        (block_sum(self.edge(slot, edge).crc32c()), self.sum_of(slot, block))
    }

    /// Makes zeroes of the part of a block that was read for a discard or write of zeroes. Returns the sums
    /// before and after, if these are wanted.
    pub fn zero_edge(&self, slot: u16, edge: EdgeBlock, wants_sums: bool) -> Option<(u32, u32)> {
        let buf = self.edge(slot, 0);
        let before = wants_sums.then(|| block_sum(buf.crc32c()));
        buf.part(distance(edge.part.offset() - edge.block.offset()), length_of(edge.part)).zero();
        before.map(|before| (before, block_sum(buf.crc32c())))
    }
}

/// Operations.
impl RequestIo {
    /// Returns true if the kernel has no operation.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_idle()
    }

    /// Returns true if requests have operations in flight.
    pub fn is_busy(&self) -> bool {
        self.in_flight.is_busy()
    }

    /// Ends an operation of this kind, which the kernel had.
    pub fn ended(&mut self, kind: u8, slot: u16) {
        if matches!(kind, kind::READ | kind::EDGE | kind::WRITE) {
            self.requests.ended(slot);
        }
        match (kind, slot) {
            (kind::READ, SUM_SLOT) => self.in_flight.ended_for_sums(),
            _ => self.in_flight.ended(),
        }
    }

    /// Begins to read a piece.
    pub(super) fn read(&mut self, slot: u16, kind: u8, piece: Piece, store: &Store, ring: &mut Ring) {
        let (buf, offset) = (self.buffer_of(slot, piece), self.offset_of(slot, kind, piece));
        ring.read(fd(store, piece.file), buf, offset, piece_token(kind, slot, piece));
        self.requests.began(slot);
        match slot {
            SUM_SLOT => self.in_flight.began_for_sums(),
            _ => self.in_flight.began(),
        }
    }

    /// Begins to write a piece, durably if the request demands it and the file has direct I/O.
    pub(super) fn write(&mut self, slot: u16, piece: Piece, store: &Store, ring: &mut Ring) {
        let (buf, offset) = (self.buffer_of(slot, piece), self.offset_of(slot, kind::WRITE, piece));
        let durable = durability(&self.header(slot), store.direct_io()) == Durability::WithWrite;
        ring.write(fd(store, piece.file), buf, offset, durable, piece_token(kind::WRITE, slot, piece));
        self.requests.began(slot);
        self.in_flight.began();
    }

    /// Begins to write a piece of a layer that is being copied.
    pub(super) fn write_layer(&mut self, slot: u16, piece: Piece, store: &Store, ring: &mut Ring) {
        let (buf, offset) = (self.buffer_of(slot, piece), self.offset_of(slot, kind::LAYER, piece));
        ring.write(fd(store, piece.file), buf, offset, false, piece_token(kind::LAYER, slot, piece));
        self.in_flight.began();
    }

    /// Begins to make the head durable.
    pub fn sync(&mut self, store: &Store, ring: &mut Ring) {
        ring.fdatasync(fd(store, store.head()), numbered_token(kind::SYNC, 0));
        self.in_flight.began();
    }

    /// Begins to make a hole in the head.
    pub fn punch(&mut self, job: u8, range: ByteRange, store: &Store, ring: &mut Ring) {
        let token = zero_token(kind::ZERO_STEP, job);
        ring.fallocate(fd(store, store.head()), PUNCH, range.offset(), range.length(), token);
        self.in_flight.began();
    }

    /// Begins to write zeroes to the head.
    pub fn write_zeroes(&mut self, job: u8, range: ByteRange, store: &Store, ring: &mut Ring) {
        let (buf, token) = (self.buffers.zeroes(range.length()), zero_token(kind::ZERO_STEP, job));
        ring.write(fd(store, store.head()), buf, range.offset(), false, token);
        self.in_flight.began();
    }

    /// Begins to read the block that a job changes in part.
    pub fn read_zero_edge(
        &mut self,
        job: u8,
        slot: u16,
        block: ByteRange,
        file: FileIndex,
        store: &Store,
        ring: &mut Ring,
    ) {
        let (buf, token) = (self.edge(slot, 0), zero_token(kind::ZERO_EDGE, job));
        ring.read(fd(store, file), buf, block.offset(), token);
        self.in_flight.began();
    }

    /// Begins to write the block that a job has changed in part.
    pub fn write_zero_edge(&mut self, job: u8, slot: u16, block: ByteRange, store: &Store, ring: &mut Ring) {
        let (buf, token) = (self.edge(slot, 0), zero_token(kind::ZERO_STEP, job));
        ring.write(fd(store, store.head()), buf, block.offset(), false, token);
        self.in_flight.began();
    }

    fn buffer_of(&self, slot: u16, piece: Piece) -> IoBuf {
        self.buffers.blocks(slot, usize::from(piece.first), usize::from(piece.blocks))
    }

    /// Returns the offset of the first block of a piece in the volume.
    fn offset_of(&self, slot: u16, kind: u8, piece: Piece) -> u64 {
        let blocks = self.work(slot).blocks;
        match (kind, piece.first) {
            (kind::EDGE, 0) => blocks.offset(),
            (kind::EDGE, _) => blocks.end() - BLOCK_BYTES,
            (_, first) => blocks.offset() + (u64::from(first) - EDGE_BLOCKS as u64) * BLOCK_BYTES,
        }
    }
}

fn fd(store: &Store, file: FileIndex) -> RawFd {
    store.fd(file).as_raw_fd()
}

#[cfg(test)]
mod tests {
    use shorthorn_wire::Opcode;

    use super::*;
    use crate::executor::tests::new_store;

    fn bytes_of(buf: IoBuf) -> Vec<u8> {
        let mut bytes = vec![0; buf.len()];
        buf.copy_to(&mut bytes);
        bytes
    }

    fn end_operation(io: &mut RequestIo, ring: &mut Ring) {
        let mut completions = Vec::new();
        ring.wait(None, &mut completions).unwrap();
        for completion in completions {
            completion.count().unwrap();
            io.ended(completion.token.kind, completion.token.index);
        }
    }

    #[test]
    fn a_request_writes_its_data_and_reads_it_again() {
        let temp = tempfile::tempdir().unwrap();
        let (store, ..) = new_store(&temp.path().join("replica"));
        let (mut io, mut ring) = (RequestIo::new().unwrap(), Ring::new(16).unwrap());
        let piece = Piece::blocks_of(8192, store.head());
        io.assign(3, Header::request(Opcode::Write, 1, 8192, 8192));
        io.payload(3).copy_from(&[7; 8192]);
        io.write(3, piece, &store, &mut ring);
        assert!(io.is_busy() && io.work(3).pending == 1);
        assert!(io.is_modified(ByteRange::new(12288, 512).unwrap()));
        end_operation(&mut io, &mut ring);
        assert!(io.is_idle() && io.work(3).pending == 0);
        io.free(3);
        io.assign(4, Header::request(Opcode::Read, 1, 8192, 8192));
        io.read(4, kind::READ, piece, &store, &mut ring);
        end_operation(&mut io, &mut ring);
        assert_eq!(bytes_of(io.payload(4)), [7; 8192]);
        io.zero_rest(4, piece, 4096);
        assert_eq!(bytes_of(io.payload(4))[4095..4097], [7, 0]);
    }

    #[test]
    fn reads_for_sums_make_nothing_busy() {
        let temp = tempfile::tempdir().unwrap();
        let (store, ..) = new_store(&temp.path().join("replica"));
        let (mut io, mut ring) = (RequestIo::new().unwrap(), Ring::new(16).unwrap());
        io.assign(SUM_SLOT, Header::request(Opcode::Read, 0, 0, 4096));
        io.read(SUM_SLOT, kind::READ, Piece::blocks_of(4096, store.head()), &store, &mut ring);
        assert!(!io.is_busy() && !io.is_idle());
        end_operation(&mut io, &mut ring);
        assert!(io.is_idle());
    }

    #[test]
    fn a_write_keeps_the_former_data_around_its_own() {
        let mut io = RequestIo::new().unwrap();
        io.assign(0, Header::request(Opcode::Write, 1, 4096 + 3584, 1024));
        io.payload(0).copy_from(&[1; 1024]);
        let blocks = [1, 2].map(|block| ByteRange::new(block * BLOCK_BYTES, BLOCK_BYTES).unwrap());
        for (edge, block) in blocks.into_iter().enumerate() {
            io.edge(0, edge).copy_from(&[7; 4096]);
            assert_eq!(io.complete_edge(0, edge), Some(block));
        }
        assert_eq!(bytes_of(io.data(0, blocks[0])), [[7_u8; 3584].as_slice(), &[1; 512]].concat());
        assert_eq!(bytes_of(io.data(0, blocks[1])), [[1_u8; 512].as_slice(), &[7; 3584]].concat());
        let (before, after) = io.edge_sums(0, 1, blocks[1]);
        assert_eq!((before != after, after), (true, io.sum_of(0, blocks[1])));
    }

    #[test]
    fn a_part_of_a_block_becomes_zeroes() {
        let mut io = RequestIo::new().unwrap();
        io.assign(0, Header::request(Opcode::WriteZeroes, 1, 512, 1024));
        io.edge(0, 0).copy_from(&[7; 4096]);
        let [part, block] = [(512, 1024), (0, 4096)].map(|(at, length)| ByteRange::new(at, length).unwrap());
        let edge = EdgeBlock { part, block, source: shorthorn_store::BlockSource::Zero };
        assert_eq!(io.zero_edge(0, edge, true).map(|(before, after)| before == after), Some(false));
        let found = bytes_of(io.edge(0, 0));
        assert!(found[..512].iter().chain(&found[1536..]).all(|byte| *byte == 7));
        assert!(found[512..1536].iter().all(|byte| *byte == 0));
        assert_eq!(io.zero_edge(0, edge, false), None);
    }
}
