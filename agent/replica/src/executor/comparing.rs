//! Compares read data with the sums of its blocks.
//!
//! A check compares whole blocks of regions that have sums, after the data was read. It never makes a sound
//! block look rotten. Blocks without certain sums, because a page of sums is torn or the region was modified
//! meanwhile, are not compared.

use shorthorn_ring::Ring;
use shorthorn_store::{BlockSource, FileIndex};
use shorthorn_types::{ByteRange, Errno};
use shorthorn_wire::{Header, Opcode};

use super::Executor;
use super::block::block_ranges;
use super::block_sums::is_summed;
use super::requests::{Work, layer_of};

impl Executor {
    /// Begins the check of the request in the slot, which begins to read.
    pub(super) fn begin_check(&mut self, slot: u16) {
        if self.block_sums.may_show_rot() {
            self.io.requests_mut().begin_check(slot);
        }
    }

    /// Handles the data of the slot: it finishes, after a comparison if that was requested.
    pub(super) fn data_read(&mut self, slot: u16, ring: &mut Ring) {
        if !self.finish_if_compared(slot) {
            self.load_sums_for(slot, ring);
            self.block_sums.compare_later(slot);
        }
    }

    /// Finishes the request if it is not to be compared, or all its pages of sums are here.
    fn finish_if_compared(&mut self, slot: u16) -> bool {
        let wants_check = self.work(slot).wants_check;
        if wants_check && !self.has_sums_for(slot) {
            return false;
        }
        let rotten = if wants_check { self.rotten_block(slot) } else { None };
        if wants_check && rotten.is_none() {
            let is_confirmed = self.confirms_all(slot);
            self.io.requests_mut().set_confirmed(slot, is_confirmed);
        }
        self.io.requests_mut().end_check(slot);
        if let Some(block) = rotten {
            self.block_sums.know_rot(block, self.state.intent_log());
            self.block_sums.report_rotten(block);
        }
        if wants_check {
            self.answered(slot, rotten);
        }
        self.finish(slot, rotten.map_or(Ok(()), |_| Err(Errno::ROTTEN)));
        true
    }

    /// An engine gets an answer about the blocks in the slot: one of them is rotten, or all are sound. It
    /// decides about the data of the volume by that, and not by the checks of layers.
    fn answered(&mut self, slot: u16, rotten: Option<ByteRange>) {
        let Work { header, blocks, .. } = *self.work(slot);
        if matches!(header.opcode, Opcode::Read | Opcode::Verify) {
            self.block_sums.answered(blocks, rotten);
        }
    }

    /// Returns true if each block of the read data in the slot matches a sum that counts.
    pub fn is_confirmed(&self, slot: u16) -> bool {
        self.work(slot).is_confirmed
    }

    /// Returns true if all pages of sums for the slot are in memory, and marks them as used.
    fn has_sums_for(&mut self, slot: u16) -> bool {
        let blocks = self.work(slot).blocks;
        self.block_sums.has_pages_for(blocks, self.state.intent_log())
    }

    fn load_sums_for(&mut self, slot: u16, ring: &mut Ring) {
        let blocks = self.work(slot).blocks;
        self.block_sums.load_pages_for(blocks, self.state.intent_log(), ring);
    }

    /// Returns the first block in the slot that differs from its sum, if any. Sums describe the data that a
    /// reader sees: a layer's blocks below others have none.
    fn rotten_block(&mut self, slot: u16) -> Option<ByteRange> {
        let Work { header, blocks, checked, .. } = *self.work(slot);
        let layer = match header.opcode {
            Opcode::CheckLayer => Some(checked?.file()),
            Opcode::ReadLayer => Some(self.layer_that_is_read(&header)?),
            _ => None,
        };
        block_ranges(blocks).find(|block| {
            self.is_rotten(slot, *block) && layer.is_none_or(|layer| self.is_seen_in(layer, *block))
        })
    }

    /// Returns true if each block in the slot, none of which is rotten, has a sum that counts. Only answers
    /// that a scrub compares say so.
    fn confirms_all(&mut self, slot: u16) -> bool {
        let Work { header, blocks, .. } = *self.work(slot);
        let layer = match header.opcode {
            Opcode::Verify => None,
            Opcode::ReadLayer => match self.layer_that_is_read(&header) {
                None => return false,
                layer => layer,
            },
            _ => return false,
        };
        block_ranges(blocks).all(|block| {
            // The sum of a hole is that of a later layer, which may have made zeroes of the block.
            let is_in = |executor: &mut Executor, layer| {
                executor.comes_from(block, |source| source == BlockSource::File(layer))
            };
            self.is_block_confirmed(slot, block) && layer.is_none_or(|layer| is_in(self, layer))
        })
    }

    fn layer_that_is_read(&self, header: &Header) -> Option<FileIndex> {
        layer_of(header).ok().and_then(|layer| self.store.chain().layer_file(layer))
    }

    /// Returns true if a sum that counts has decided that the block is not rotten.
    fn is_block_confirmed(&self, slot: u16, block: ByteRange) -> bool {
        let found = || self.io.sum_of(slot, block);
        self.block_sums.confirms(block, found, self.state.intent_log())
    }

    /// Returns true if a reader sees this file's data in the block, or zeroes because no file has it. It may
    /// have vanished from each of them.
    pub(super) fn is_seen_in(&mut self, file: FileIndex, block: ByteRange) -> bool {
        self.comes_from(block, |source| source == BlockSource::Zero || source == BlockSource::File(file))
    }

    /// Returns true if each part of the block comes from such a source.
    fn comes_from(&mut self, block: ByteRange, is_such: impl Fn(BlockSource) -> bool) -> bool {
        let mut segments = std::mem::take(&mut self.segments);
        segments.clear();
        let is_planned = self.store.plan_read(block, &mut segments).is_ok();
        let are_such = segments.iter().all(|segment| is_such(segment.source));
        self.segments = segments;
        is_planned && are_such
    }

    fn is_rotten(&self, slot: u16, block: ByteRange) -> bool {
        let found = || self.io.sum_of(slot, block);
        self.block_sums.is_rotten(block, found, self.state.intent_log())
    }

    /// Returns true if the sum of the block counts.
    pub(super) fn is_summed(&self, block: ByteRange) -> bool {
        is_summed(block, self.state.intent_log())
    }

    /// Continues comparisons after a page was loaded or a place has become free. Complete ones come first,
    /// because others would take the places of their pages.
    pub(super) fn resume_comparing(&mut self, ring: &mut Ring) {
        let mut retried = self.block_sums.take_comparisons();
        retried.retain(|slot| !self.finish_if_compared(*slot));
        for slot in retried.drain(..) {
            self.load_sums_for(slot, ring);
            self.block_sums.compare_later(slot);
        }
        self.block_sums.give_back_comparisons(retried);
    }
}
