//! Compares read data with the sums of its blocks.
//!
//! A check compares whole blocks of regions that have sums, after the data was read. It never makes a sound
//! block look rotten. Blocks without certain sums, because a page of sums is torn or the region was modified
//! meanwhile, are not compared.

use shorthorn_ring::Ring;
use shorthorn_store::{BlockSource, FileIndex, Store};
use shorthorn_types::{ByteRange, Errno};
use shorthorn_wire::{Header, Opcode};

use super::Executor;
use super::block::block_ranges;
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
            let blocks = self.io.work(slot).blocks;
            self.block_sums.compare_when_loaded(slot, blocks, self.state.intent_log(), ring);
        }
    }

    /// Finishes the request if it is not to be compared, or all its pages of sums are here.
    fn finish_if_compared(&mut self, slot: u16) -> bool {
        let Work { header, blocks, wants_check, .. } = *self.io.work(slot);
        if wants_check && !self.block_sums.has_pages_for(blocks, self.state.intent_log()) {
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
        // An engine decides about the data of the volume by the answer, but not by the checks of layers.
        if wants_check && matches!(header.opcode, Opcode::Read | Opcode::Verify) {
            self.block_sums.answered(blocks, rotten);
        }
        self.finish(slot, rotten.map_or(Ok(()), |_| Err(Errno::ROTTEN)));
        true
    }

    /// Returns the first block in the slot that differs from its sum, if any. Sums describe the data that a
    /// reader sees: a layer's blocks below others have none.
    fn rotten_block(&mut self, slot: u16) -> Option<ByteRange> {
        let Work { header, blocks, checked, .. } = *self.io.work(slot);
        let layer = match header.opcode {
            Opcode::CheckLayer => Some(checked?.file()),
            Opcode::ReadLayer => Some(layer_that_is_read(&header, &self.store)?),
            _ => None,
        };
        let Executor { io, block_sums, state, read_planner, store, .. } = self;
        let intent_log = state.intent_log();
        block_ranges(blocks).find(|block| {
            block_sums.is_rotten(*block, || io.sum_of(slot, *block), intent_log)
                && layer.is_none_or(|layer| read_planner.is_seen_in(layer, *block, store))
        })
    }

    /// Returns true if each block in the slot, none of which is rotten, has a sum that counts. Only answers
    /// that a scrub compares say so.
    fn confirms_all(&mut self, slot: u16) -> bool {
        let Work { header, blocks, .. } = *self.io.work(slot);
        let layer = match header.opcode {
            Opcode::Verify => None,
            Opcode::ReadLayer => match layer_that_is_read(&header, &self.store) {
                None => return false,
                layer => layer,
            },
            _ => return false,
        };
        let Executor { io, block_sums, state, read_planner, store, .. } = self;
        let intent_log = state.intent_log();
        // The sum of a hole is that of a later layer, which may have made zeroes of the block.
        let mut is_in =
            |layer, block| read_planner.comes_from(block, |source| source == BlockSource::File(layer), store);
        block_ranges(blocks).all(|block| {
            block_sums.confirms(block, || io.sum_of(slot, block), intent_log)
                && layer.is_none_or(|layer| is_in(layer, block))
        })
    }

    /// Continues comparisons after a page was loaded or a place has become free. Complete ones come first,
    /// because others would take the places of their pages.
    pub(super) fn resume_comparing(&mut self, ring: &mut Ring) {
        let mut retried = self.block_sums.take_comparisons();
        retried.retain(|slot| !self.finish_if_compared(*slot));
        for slot in retried.drain(..) {
            let blocks = self.io.work(slot).blocks;
            self.block_sums.compare_when_loaded(slot, blocks, self.state.intent_log(), ring);
        }
        self.block_sums.give_back_comparisons(retried);
    }
}

fn layer_that_is_read(header: &Header, store: &Store) -> Option<FileIndex> {
    layer_of(header).ok().and_then(|layer| store.chain().layer_file(layer))
}
