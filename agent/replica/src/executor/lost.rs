//! Blocks that were copied as rot, as no member had another copy: they stay known until they get other data.
//!
//! Their sums are of no data at all, so that no data matches them; the summer stores such a sum like any
//! other. The record on the disk is for the time before.

use shorthorn_store::{LOST_BLOCKS_MAX, LostBlocks, Store, block_sum};
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_wire::{Flags, Opcode};

use super::summer::{block_ranges, number_of};
use super::{Executor, Outcome, Summer};
use crate::error::ReplicaError;

/// A sum that data with this sum does not have.
fn sum_of_none(sum: u32) -> u32 {
    block_sum(!sum)
}

impl Summer {
    /// Loads the blocks that the directory records as lost.
    pub fn load_lost(&mut self, store: &mut Store) -> Result<(), ReplicaError> {
        self.lost = store.load_lost_blocks()?;
        if !self.lost.is_empty() {
            let blocks = self.lost.len();
            tracing::warn!(
                blocks,
                "some blocks are lost: no replica had a sound copy when this one was made"
            );
        }
        self.known.keep(self.lost.iter().map(|(block, sum)| (*block, sum_of_none(*sum))));
        Ok(())
    }
}

impl Executor {
    /// A copy begins: blocks of layers that are made anew are not lost.
    pub(super) fn look_at_lost(&mut self, is_anything_kept: bool) -> Result<(), ReplicaError> {
        if is_anything_kept {
            return self.summer.load_lost(&mut self.store);
        }
        self.summer.lost.clear();
        Ok(self.store.save_lost_blocks(&self.summer.lost)?)
    }

    /// Ends the copy of a part of a layer. The engine's statement about it is on the disk before the answer.
    pub(super) fn layer_is_written(&mut self, slot: u16) -> Outcome {
        let header = self.header(slot);
        let blocks = self.work(slot).blocks;
        let is_rotten = header.flags.has(Flags::ROTTEN);
        if !is_rotten && self.summer.lost.is_empty() {
            return Ok(());
        }
        let mut lost = self.summer.lost.clone();
        for block in block_ranges(blocks) {
            let number = number_of(block);
            self.summer.known.forget_block(number);
            lost.remove(&number);
            if is_rotten {
                let sum = block_sum(self.buffers.part(slot, blocks.offset(), block).crc32c());
                lost.insert(number, sum);
                self.summer.known.keep([(number, sum_of_none(sum))]);
            }
        }
        if is_rotten {
            tracing::error!(%blocks, "copied data that no member has a sound copy of: reads of it that are verified fail");
        }
        self.record_lost(lost)
    }

    fn record_lost(&mut self, mut lost: LostBlocks) -> Outcome {
        if lost.len() > LOST_BLOCKS_MAX {
            tracing::error!(
                "more than {LOST_BLOCKS_MAX} blocks are lost: the others are forgotten when this process ends"
            );
            while lost.len() > LOST_BLOCKS_MAX {
                lost.pop_last();
            }
        }
        if lost != self.summer.lost {
            self.store.save_lost_blocks(&lost).map_err(|error| {
                tracing::warn!(%error, "cannot record which blocks are lost");
                error.errno()
            })?;
            self.summer.lost = lost;
        }
        Ok(())
    }

    /// The modification in the slot has succeeded: its blocks are not lost any more, unless they still hold
    /// rot.
    pub(super) fn lost_follow(&mut self, slot: u16) {
        let header = self.header(slot);
        let modifies = matches!(header.opcode, Opcode::Write | Opcode::Discard | Opcode::WriteZeroes);
        if self.summer.lost.is_empty() || !modifies {
            return;
        }
        self.forget_lost(header.range().unwrap_or(ByteRange::EMPTY).grown_to_blocks());
    }

    /// The blocks of `range` of which nothing is known any more are not lost.
    pub(super) fn forget_lost(&mut self, range: ByteRange) {
        let numbers = range.offset() / BLOCK_BYTES..range.end() / BLOCK_BYTES;
        let is_over = |(block, _): &(&u64, &u32)| !self.summer.known.has(**block);
        let over: Vec<u64> =
            self.summer.lost.range(numbers).filter(is_over).map(|(block, _)| *block).collect();
        if over.is_empty() {
            return;
        }
        let mut lost = self.summer.lost.clone();
        lost.retain(|block, _| !over.contains(block));
        // If that fails, only the record says that they are lost, and the next opening looks at the data.
        let _ = self.record_lost(lost);
    }
}
