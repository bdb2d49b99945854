//! Blocks that were copied as rot, as no member had another copy: they stay known until they get other data.
//!
//! Their sums are of no data at all, so that no data matches them; the summer stores such a sum like any
//! other. The record on the disk says it of a block whatever that holds, until the block has got other data.

use shorthorn_replica_core::is_final;
use shorthorn_store::{FoundLostBlocks, LOST_BLOCKS_MAX, LostBlocks, Store, block_sum, sum_of_zeroes};
use shorthorn_types::{ByteRange, Errno};
use shorthorn_wire::{Flags, Opcode};

use super::Executor;
use super::block::{block_ranges, number_of};
use super::operation::Outcome;
use super::requests::Work;
use super::summer::Summer;
use crate::error::ReplicaError;

/// A sum that data with this sum does not have.
fn sum_of_none(sum: u32) -> u32 {
    block_sum(!sum)
}

impl Summer {
    /// Loads the blocks that the directory records as lost. If the record is damaged, the replica counts as
    /// one that has to be rebuilt.
    pub fn load_lost(&mut self, store: &mut Store) -> Result<(), ReplicaError> {
        match store.load_lost_blocks().map_err(ReplicaError::LostBlocksUnread)? {
            FoundLostBlocks::Known(lost) => self.lost = lost,
            FoundLostBlocks::Damaged => {
                tracing::error!(
                    "the record of the blocks that are lost (shorthorn.lost-blocks) is damaged: this replica has to be \
                     rebuilt, because it cannot tell rot from data; if it is the last one, salvage it"
                );
                store.distrust_data()?;
            }
        }
        if !self.lost.is_empty() {
            let blocks = self.lost.len();
            tracing::warn!(
                blocks,
                "some blocks are lost: no replica had a sound copy when this one was made"
            );
        }
        self.know_lost();
        Ok(())
    }

    /// Knows every recorded block as lost.
    pub(super) fn know_lost(&mut self) {
        self.known.keep_lost(self.lost.iter().map(|(block, sum)| (*block, sum_of_none(*sum))));
    }

    /// The sum that counts for a block that gets data with the sum `given`. If every member has lost a block,
    /// a copy of its region writes the same rot once more, which is no other data. Zeroes always are: a
    /// client that clears a block ends its record.
    pub(super) fn sum_given(&self, block: u64, given: u32) -> u32 {
        let is_same_rot = self.lost.get(&block) == Some(&given) && given != sum_of_zeroes();
        if is_same_rot { sum_of_none(given) } else { given }
    }
}

impl Executor {
    /// A copy begins: blocks of layers that are made anew are not lost.
    pub(super) fn look_at_lost(&mut self, is_anything_kept: bool) -> Result<(), ReplicaError> {
        if is_anything_kept {
            self.summer.know_lost();
            return Ok(());
        }
        self.summer.lost.keys().for_each(|block| self.summer.known.forget_block(*block));
        self.summer.lost.clear();
        Ok(self.store.save_lost_blocks(&self.summer.lost)?)
    }

    /// The request in the slot has succeeded. Lost blocks are recorded before the answer: those that a copy has
    /// written to the head because no member has them, and those that have other data now.
    pub(super) fn record_lost_or_cured(&mut self, slot: u16) -> Outcome {
        let Work { header, blocks, .. } = *self.work(slot);
        if header.opcode == Opcode::Write && header.flags.has(Flags::ROTTEN) {
            self.sums_followed(slot, Ok(()));
            return self.record_rot(slot, blocks);
        }
        self.record_cured(slot)
    }

    /// Ends the copy of a part of a layer. The engine's statement about it is on the disk before the answer.
    /// Sound data ends no record before the layer is whole, and its data durable: another attempt makes the
    /// layer anew, and keeps the ones below it.
    pub(super) fn layer_is_written(&mut self, slot: u16) -> Outcome {
        let header = self.header(slot);
        let blocks = self.work(slot).blocks;
        let is_rotten = header.flags.has(Flags::ROTTEN);
        if !is_rotten && self.summer.lost.is_empty() {
            return Ok(());
        }
        for block in block_ranges(blocks) {
            self.summer.known.forget_block(number_of(block));
        }
        if is_rotten { self.record_rot(slot, blocks) } else { Ok(()) }
    }

    /// Records that the data in the slot is that of lost blocks.
    fn record_rot(&mut self, slot: u16, blocks: ByteRange) -> Outcome {
        let mut lost = self.summer.lost.clone();
        for block in block_ranges(blocks) {
            let number = number_of(block);
            let sum = block_sum(self.buffers.part(slot, blocks.offset(), block).crc32c());
            lost.insert(number, sum);
            self.summer.known.keep_lost([(number, sum_of_none(sum))]);
        }
        tracing::error!(%blocks, "copied data that no member has a sound copy of: reads of it that are verified fail");
        self.record_lost(lost)
    }

    fn record_lost(&mut self, lost: LostBlocks) -> Outcome {
        if lost.len() > LOST_BLOCKS_MAX {
            tracing::error!(
                "more than {LOST_BLOCKS_MAX} blocks are lost, which cannot be recorded: this replica cannot be made; restore \
                 the volume from a backup, or overwrite the damaged blocks"
            );
            return Err(Errno::new(libc::EOVERFLOW));
        }
        if lost != self.summer.lost {
            if let Err(error) = self.store.save_lost_blocks(&lost) {
                if is_final(error.errno()) {
                    self.fail(&format!("cannot record which blocks are lost: {error}"));
                } else {
                    tracing::warn!(%error, "cannot record which blocks are lost");
                }
                return Err(error.errno());
            }
            self.summer.lost = lost;
        }
        Ok(())
    }

    /// The modification in the slot has succeeded. If lost blocks have other data by it, that becomes
    /// durable, then the record. While the replica is being copied, the record stays: another attempt drops
    /// the head, and keeps the layers. Waits for the disk.
    pub(super) fn record_cured(&mut self, slot: u16) -> Outcome {
        if self.summer.lost.is_empty() || self.store.is_copying() {
            return Ok(());
        }
        let cured: Vec<u64> = self.summer.known.cured_by(slot).collect();
        self.are_cured(&cured)
    }

    /// The copy, or that of a layer, has ended. Blocks that have got other data meanwhile are not lost any
    /// more.
    pub(super) fn settle_lost(&mut self) -> Outcome {
        let is_over = |block: &u64| !self.summer.known.is_lost(*block);
        let cured: Vec<u64> = self.summer.lost.keys().copied().filter(is_over).collect();
        self.are_cured(&cured)
    }

    fn are_cured(&mut self, cured: &[u64]) -> Outcome {
        if cured.is_empty() {
            return Ok(());
        }
        let mut lost = self.summer.lost.clone();
        lost.retain(|block, _| !cured.contains(block));
        if lost.len() == self.summer.lost.len() {
            return Ok(());
        }
        if let Err(error) = self.store.flush() {
            self.fail(&format!("the data of blocks that were lost could not be made durable: {error}"));
            return Err(Errno::IO);
        }
        self.record_lost(lost)
    }
}
