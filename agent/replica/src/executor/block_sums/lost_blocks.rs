//! The lost blocks and their record on the disk: `shorthorn.lost-blocks`.

use shorthorn_replica_core::{After, is_final};
use shorthorn_store::{
    FoundLostBlocks, LOST_BLOCKS_MAX, LostBlock, LostBlocks, Store, StoreError, sum_of_zeroes,
};
use shorthorn_types::ByteRange;
use shorthorn_wire::{Flags, Header, Opcode};

use super::BlockSums;
use crate::error::ReplicaError;
use crate::executor::block::{block_ranges, number_of};

/// The reason why lost blocks are not recorded.
#[derive(Debug)]
pub(crate) enum NotRecorded {
    /// More blocks than [`LOST_BLOCKS_MAX`] are lost.
    TooMany,
    /// The record could not be written.
    Unwritten(StoreError),
}

/// Returns true if the request writes rot to the head.
pub(crate) fn is_rot_of_head(header: &Header) -> bool {
    header.opcode == Opcode::Write && header.flags.has(Flags::ROTTEN)
}

impl BlockSums {
    /// Loads the blocks that the directory records as lost. If the record is damaged, the replica counts as
    /// one that has to be rebuilt.
    pub fn load_lost(&mut self, store: &mut Store) -> Result<(), ReplicaError> {
        match store.load_lost_blocks().map_err(ReplicaError::LostBlocksUnread)? {
            FoundLostBlocks::Known(lost) => self.lost = lost,
            FoundLostBlocks::Damaged => {
                tracing::error!(
                    "the record of lost blocks (shorthorn.lost-blocks) is damaged, and this replica cannot \
                     distinguish rot from data. Rebuild the replica; if it is the last one, salvage it"
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
        match store.record_torn_blocks(&mut self.lost) {
            Err(error) if is_final(error.errno()) => {
                return Err(ReplicaError::LostBlocksUnwritten(error.errno()));
            }
            // They count as lost in this process. They are forgotten only if another program opens the
            // directory.
            Err(error) => {
                tracing::warn!(%error, "blocks that are lost and torn by a crash could not be recorded")
            }
            Ok(()) => {}
        }
        self.know_lost();
        Ok(())
    }

    /// Knows every block of the record as lost.
    pub fn know_lost(&mut self) {
        self.known.keep_lost(self.lost.keys().copied());
    }

    /// Returns true if any block is lost.
    pub fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// A copy begins. Blocks of layers that are recreated are not lost.
    pub fn begin_copy(&mut self, is_anything_kept: bool, store: &mut Store) -> Result<(), StoreError> {
        if is_anything_kept {
            self.know_lost();
            return Ok(());
        }
        self.forget_lost(store)
    }

    /// Forgets the lost blocks and removes their record: the layers are recreated.
    fn forget_lost(&mut self, store: &mut Store) -> Result<(), StoreError> {
        self.lost.keys().for_each(|block| self.known.forget_block(*block));
        self.lost.clear();
        store.save_lost_blocks(&self.lost)
    }

    /// The data of a block that gets data with the sum `given`. If every member has lost a block, a copy of
    /// its region may write the same rot again. That does not count as other data.
    /// Zeroes always are: a client that clears a block ends its record.
    pub(super) fn after_sum(&self, block: u64, given: u32) -> After {
        let is_same_rot = self.lost.get(&block).is_some_and(|lost| lost.copied() == given);
        if is_same_rot && given != sum_of_zeroes() { After::Rot } else { After::Sum(given) }
    }

    /// Records that these blocks hold the data of lost blocks, whose sums `sum_of` returns.
    pub fn record_rot(
        &mut self,
        blocks: ByteRange,
        sum_of: impl Fn(ByteRange) -> u32,
        store: &mut Store,
    ) -> Result<(), NotRecorded> {
        let mut lost = self.lost.clone();
        for block in block_ranges(blocks) {
            let number = number_of(block);
            lost.insert(number, LostBlock::new(sum_of(block)));
            self.known.keep_lost([number]);
        }
        tracing::error!(
            %blocks,
            "copied rot, because no member has a sound copy: verified reads of this range fail"
        );
        self.record_lost(lost, store)
    }

    /// Records the sums of lost blocks that the request in the slot has merged with new data.
    pub fn record_merged(&mut self, slot: u16, store: &mut Store) -> Result<(), NotRecorded> {
        if self.lost.is_empty() || self.known.merged_by(slot).next().is_none() {
            return Ok(());
        }
        let mut lost = self.lost.clone();
        for (block, sum) in self.known.merged_by(slot) {
            lost.entry(block).and_modify(|lost| lost.add_merged(sum));
        }
        self.record_lost(lost, store)
    }

    /// Returns true if the modification in the slot gives lost blocks other data.
    pub fn cures_lost(&self, slot: u16) -> bool {
        !self.lost.is_empty() && self.known.cured_by(slot).next().is_some()
    }

    /// Ends the records of the blocks that the request in the slot has given other data, which is durable.
    pub fn record_cured(&mut self, slot: u16, store: &mut Store) -> Result<(), NotRecorded> {
        let cured: Vec<u64> = self.known.cured_by(slot).collect();
        self.end_records(&cured, store)
    }

    /// Returns the recorded blocks that have got other data during a copy.
    pub fn cured_by_copy(&self) -> Vec<u64> {
        self.lost.keys().copied().filter(|block| !self.known.is_lost(*block)).collect()
    }

    /// Ends the records of these blocks, whose other data is durable.
    pub fn end_records(&mut self, cured: &[u64], store: &mut Store) -> Result<(), NotRecorded> {
        let mut lost = self.lost.clone();
        lost.retain(|block, _| !cured.contains(block));
        self.record_lost(lost, store)
    }

    fn record_lost(&mut self, lost: LostBlocks, store: &mut Store) -> Result<(), NotRecorded> {
        if lost.len() > LOST_BLOCKS_MAX {
            return Err(NotRecorded::TooMany);
        }
        if lost != self.lost {
            store.save_lost_blocks(&lost).map_err(NotRecorded::Unwritten)?;
            self.lost = lost;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::limits::BLOCK_BYTES;

    use super::*;
    use crate::executor::tests::new_store;

    fn blocks(first: u64, count: u64) -> ByteRange {
        ByteRange::new(first * BLOCK_BYTES, count * BLOCK_BYTES).unwrap()
    }

    #[test]
    fn the_same_rot_is_not_other_data_unless_it_is_zeroes() {
        let mut sums = BlockSums::new(None).unwrap();
        sums.lost = LostBlocks::from([(3, LostBlock::new(9)), (4, LostBlock::new(sum_of_zeroes()))]);
        assert_eq!(sums.after_sum(3, 9), After::Rot);
        for (block, given) in [(3, 10), (4, sum_of_zeroes()), (5, 9)] {
            assert_eq!(sums.after_sum(block, given), After::Sum(given));
        }
    }

    #[test]
    fn the_record_follows_the_lost_blocks() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let (mut store, ..) = new_store(&path);
        let mut sums = BlockSums::new(None).unwrap();
        sums.record_rot(blocks(3, 2), |_| 9, &mut store).unwrap();
        assert!(sums.known.is_lost(3) && sums.known.is_lost(4) && sums.has_lost());
        assert!(sums.cured_by_copy().is_empty());
        sums.forget_blocks(blocks(3, 1));
        assert_eq!(sums.cured_by_copy(), [3]);
        sums.end_records(&[3], &mut store).unwrap();
        let FoundLostBlocks::Known(recorded) = store.load_lost_blocks().unwrap() else { panic!() };
        assert_eq!(recorded.keys().collect::<Vec<_>>(), [&4]);
        sums.begin_copy(true, &mut store).unwrap();
        assert!(sums.has_lost() && sums.knows(4), "their layer may be kept");
        sums.begin_copy(false, &mut store).unwrap();
        assert!(!sums.has_lost() && !sums.knows(4) && !path.join("shorthorn.lost-blocks").exists());
    }

    #[test]
    fn more_blocks_than_the_record_holds_are_lost_and_not_recorded() {
        let temp = tempfile::tempdir().unwrap();
        let (mut store, ..) = new_store(&temp.path().join("replica"));
        let mut sums = BlockSums::new(None).unwrap();
        let recorded = sums.record_rot(blocks(0, LOST_BLOCKS_MAX as u64 + 1), |_| 9, &mut store);
        assert!(matches!(recorded, Err(NotRecorded::TooMany)), "{recorded:?}");
        assert!(!sums.has_lost() && sums.known.is_lost(0));
    }
}
