//! Reads and writes.

use shorthorn_ring::Ring;
use shorthorn_store::BlockSource;
use shorthorn_types::{ByteRange, Errno};
use shorthorn_wire::Opcode;

use super::Executor;
use super::block::block_count;
use super::block_sums::Modification;
use super::operation::{OperationResult, is_passing, kind, not_rot};
use super::piece::Piece;
use super::requests::{Durability, SUM_SLOT, Work, durability};
use crate::limits::EDGE_BLOCKS;

impl Executor {
    /// Reads the blocks of `range`, of which any part was requested.
    pub(super) fn start_read(&mut self, slot: u16, range: ByteRange, ring: &mut Ring) -> OperationResult {
        let blocks = range.grown_to_blocks();
        let segments = match self.read_planner.plan(blocks, &mut self.store) {
            Ok(segments) => segments,
            Err(error) => return Err(self.read_planner.not_planned(&error)),
        };
        for segment in segments {
            match segment.source {
                BlockSource::Zero => self.io.data(slot, segment.range).zero(),
                BlockSource::File(file) => {
                    let first = EDGE_BLOCKS + block_count(segment.range.offset() - blocks.offset());
                    let piece = Piece::new(first, block_count(segment.range.length()), file);
                    self.io.read(slot, kind::READ, piece, &self.store, ring);
                }
            }
        }
        if self.io.work(slot).pending == 0 {
            self.data_read(slot, ring);
        }
        Ok(())
    }

    /// Starts a write: all of its data is written to the head in one operation. Blocks that it changes in
    /// part are read and completed first.
    pub(super) fn start_write(&mut self, slot: u16, range: ByteRange, ring: &mut Ring) -> OperationResult {
        let plan = self.store.plan_write(range).map_err(|error| self.read_planner.not_planned(&error))?;
        for (edge, found) in [plan.first, plan.last].into_iter().enumerate() {
            match found.map(|found| found.source) {
                None => {}
                Some(BlockSource::Zero) => {
                    self.io.edge(slot, edge).zero();
                    self.complete_edge(slot, edge);
                }
                Some(BlockSource::File(file)) => {
                    self.io.read(slot, kind::EDGE, Piece::new(edge, 1, file), &self.store, ring);
                }
            }
        }
        if self.io.work(slot).pending == 0 {
            self.write_blocks(slot, ring);
        }
        Ok(())
    }

    /// Completes a block that the write changes in part, whose former data is here.
    fn complete_edge(&mut self, slot: u16, edge: usize) {
        let block = self.io.complete_edge(slot, edge);
        if let Some(block) = block.filter(|_| self.block_sums.awaits(slot)) {
            let sums = self.io.edge_sums(slot, edge, block);
            self.block_sums.merged(Modification::new(slot, &self.io), block, sums);
        }
    }

    fn write_blocks(&mut self, slot: u16, ring: &mut Ring) {
        if let Err(errno) = self.record_merged(slot) {
            return self.finish(slot, Err(errno));
        }
        let piece = Piece::blocks_of(self.io.work(slot).blocks.length(), self.store.head());
        self.io.write(slot, piece, &self.store, ring);
    }

    pub(super) fn on_read(
        &mut self,
        slot: u16,
        kind: u8,
        piece: Piece,
        result: Result<usize, Errno>,
        ring: &mut Ring,
    ) {
        if slot == SUM_SLOT && self.background_sums.is_void() {
            // An operation on the directory may have changed the layers meanwhile.
            self.io.requests_mut().fail(slot, Errno::IO);
            return self.continue_request(slot, kind, ring);
        }
        let failed = match result {
            Err(errno) if is_passing(errno) => return self.io.read(slot, kind, piece, &self.store, ring),
            Err(errno) => Some(errno),
            Ok(count) => match piece.after(count) {
                None => None,
                Some(rest) if rest.first > piece.first => {
                    return self.io.read(slot, kind, rest, &self.store, ring);
                }
                // The file has ended. The head never does within the volume; a layer below it may be shorter.
                Some(_) if piece.file == self.store.head() => Some(Errno::IO),
                Some(_) => {
                    self.io.zero_rest(slot, piece, count);
                    None
                }
            },
        };
        if let Some(errno) = failed {
            self.read_planner.read_failed(piece.file, errno);
            self.io.requests_mut().fail(slot, not_rot(errno));
        }
        if kind == kind::EDGE {
            self.complete_edge(slot, usize::from(piece.first));
        }
        self.continue_request(slot, kind, ring);
    }

    /// Starts the next step after the last operation of a read, or of the edges of a write, has ended.
    fn continue_request(&mut self, slot: u16, kind: u8, ring: &mut Ring) {
        if self.io.work(slot).pending == 0 && self.io.requests_mut().take_void(slot) {
            return self.plan_again(slot, ring);
        }
        let work = self.io.work(slot);
        match (work.pending, work.failure) {
            (0, Some(errno)) => self.finish(slot, Err(errno)),
            (0, None) if kind == kind::EDGE => self.write_blocks(slot, ring),
            (0, None) => self.data_read(slot, ring),
            _ => {}
        }
    }

    /// Reads again, because a layer was repaired meanwhile. A block that was removed from it read as zeroes.
    pub(super) fn plan_again(&mut self, slot: u16, ring: &mut Ring) {
        let Work { header, blocks, .. } = *self.io.work(slot);
        let range = header.range().unwrap_or(blocks);
        let planned = match header.opcode {
            Opcode::Write => self.start_write(slot, range, ring),
            _ => self.start_read(slot, range, ring),
        };
        if let Err(errno) = planned {
            self.finish(slot, Err(errno));
        }
    }

    pub(super) fn on_write(
        &mut self,
        slot: u16,
        piece: Piece,
        result: Result<usize, Errno>,
        ring: &mut Ring,
    ) {
        let (header, blocks) = (self.io.header(slot), self.io.work(slot).blocks);
        let failed = match result {
            Err(errno) if is_passing(errno) => return self.io.write(slot, piece, &self.store, ring),
            Err(errno) => Some(errno),
            Ok(count) => match piece.after(count) {
                Some(rest) if rest.first > piece.first => {
                    return self.io.write(slot, rest, &self.store, ring);
                }
                Some(_) => Some(Errno::IO), // not a single block: the request would repeat without an end
                None => None,
            },
        };
        let durability = durability(&header, self.store.direct_io());
        if durability != Durability::WithWrite || failed.is_some() {
            self.flushes.changed();
        }
        let outcome = match failed {
            None => {
                self.store.written(blocks);
                Ok(())
            }
            Some(errno) => Err(self.write_failed(blocks, errno)),
        };
        match outcome {
            Ok(()) if durability == Durability::ByFlush || self.cures_lost(slot) => self.flush(slot, ring),
            outcome => self.finish(slot, outcome),
        }
    }
}
