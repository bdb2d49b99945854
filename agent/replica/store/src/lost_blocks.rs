//! Blocks of which no replica had a sound copy when this one was made: `shorthorn.lost-blocks`.
//!
//! The rot was copied, so that the replica could be made at all; the record says that it is rot. A recorded
//! block is lost whatever it holds. A part of it may have been merged with new data, and a crash may have
//! torn that. The record also has the sum of each block as it was copied, and the sums of its last merges
//! with new data. The sums count only after another program has had the directory open. A block with none of
//! its sums has got other data from that program.
//!
//! A merge is recorded before its data is written, so a crash leaves a block with one of its sums, or a torn
//! one. A crash may also tear a block that a request overwrites as a whole. The next opening records the sum
//! of a torn block ([`Store::record_torn_blocks`](crate::Store::record_torn_blocks)). Limits: another program
//! opens the directory right after that crash, or a loss of power restores an older merge than the
//! last [`MERGED_SUMS_MAX`].

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use serde::{Deserialize, Serialize};
use shorthorn_chain::{with_check, without_check};

use crate::error::StoreError;
use crate::medium::Medium;
use shorthorn_types::limits::BLOCK_BYTES;

type Result<T> = std::result::Result<T, StoreError>;

const FILE: &str = "shorthorn.lost-blocks";
const FORMAT: u32 = 1;
/// The maximum number of recorded blocks, which bounds the file. Sums of merges have the places that are
/// left: an older version of this program takes a file with more entries for a damaged one.
pub const LOST_BLOCKS_MAX: usize = 4096;
/// The maximum number of merges of one block whose sums are recorded: the last ones.
pub const MERGED_SUMS_MAX: usize = 3;

/// The lost blocks by their numbers.
pub type LostBlocks = BTreeMap<u64, LostBlock>;

/// The sums of the data that a lost block may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostBlock {
    /// The sum of the rot that was copied.
    copied: u32,
    /// The sums of that rot with new data merged into it, the newest last.
    merged: Vec<u32>,
}

impl LostBlock {
    /// Creates the record of a block whose copied rot has this sum.
    #[must_use]
    pub const fn new(copied: u32) -> LostBlock {
        LostBlock { copied, merged: Vec::new() }
    }

    /// The sum of the rot that was copied.
    #[must_use]
    pub const fn copied(&self) -> u32 {
        self.copied
    }

    /// Adds the sum of a merge. Beyond [`MERGED_SUMS_MAX`], the oldest merge is forgotten.
    pub fn add_merged(&mut self, sum: u32) {
        self.merged.retain(|known| *known != sum);
        self.merged.push(sum);
        let surplus = self.merged.len().saturating_sub(MERGED_SUMS_MAX);
        self.merged.drain(..surplus);
    }

    /// Returns true if the block may hold data with this sum.
    #[must_use]
    pub fn has(&self, sum: u32) -> bool {
        self.copied == sum || self.merged.contains(&sum)
    }
}

/// The record as an opening finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FoundLostBlocks {
    /// The record is whole.
    Known(LostBlocks),
    /// The file is damaged: any block may be lost.
    Damaged,
}

impl Default for FoundLostBlocks {
    fn default() -> FoundLostBlocks {
        FoundLostBlocks::Known(LostBlocks::new())
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    format: u32,
    epoch: u64,
    /// Several entries of one block: the rot that was copied, then the merges, the newest last. An older
    /// version of this program counts the last entry of a block and drops the others when it writes the file.
    blocks: Vec<(u64, u32)>,
}

impl Record {
    /// The record of these blocks. If merges have too few places, older ones are left out first.
    fn new(epoch: u64, lost: &LostBlocks) -> Record {
        let lost: Vec<(u64, &LostBlock)> =
            lost.iter().map(|(number, block)| (*number, block)).take(LOST_BLOCKS_MAX).collect();
        let mut places = LOST_BLOCKS_MAX - lost.len();
        let mut kept = vec![0; lost.len()];
        for age in 0..MERGED_SUMS_MAX {
            for (kept, (_, block)) in kept.iter_mut().zip(&lost) {
                if places > 0 && block.merged.len() > age {
                    (*kept, places) = (*kept + 1, places - 1);
                }
            }
        }
        let mut blocks = Vec::new();
        for ((number, block), kept) in lost.into_iter().zip(kept) {
            let newest = &block.merged[block.merged.len() - kept..];
            blocks.extend([block.copied].iter().chain(newest).map(|sum| (number, *sum)));
        }
        Record { format: FORMAT, epoch, blocks }
    }

    fn lost_blocks(self) -> LostBlocks {
        let mut lost = LostBlocks::new();
        for (number, sum) in self.blocks {
            match lost.entry(number) {
                Entry::Vacant(entry) => drop(entry.insert(LostBlock::new(sum))),
                Entry::Occupied(mut entry) => entry.get_mut().add_merged(sum),
            }
        }
        lost
    }

    fn parse(bytes: &[u8]) -> Option<Record> {
        let document = without_check(FILE, bytes).ok()?;
        let record: Record = serde_json::from_slice(&document).ok()?;
        (record.format == FORMAT && record.blocks.len() <= LOST_BLOCKS_MAX).then_some(record)
    }

    fn encode(&self) -> Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec(self).map_err(|error| StoreError::io("write", FILE, error))?;
        bytes.push(b'\n');
        Ok(with_check(bytes))
    }
}

/// The file of the record in one directory, in one epoch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LostBlocksFile<'a> {
    medium: &'a Medium,
    epoch: u64,
}

impl<'a> LostBlocksFile<'a> {
    pub(crate) fn new(medium: &'a Medium, epoch: u64) -> LostBlocksFile<'a> {
        LostBlocksFile { medium, epoch }
    }

    /// Returns the blocks that are recorded. After another program, only blocks with one of their sums stay
    /// recorded. `sum_shown` returns the sum of the data that a reader sees in a block, if that can be read.
    pub(crate) fn load(
        &self,
        size_bytes: u64,
        mut sum_shown: impl FnMut(u64) -> Option<u32>,
    ) -> Result<FoundLostBlocks> {
        let Some(bytes) = self.medium.directory().read(FILE)? else { return Ok(FoundLostBlocks::default()) };
        let Some(record) = Record::parse(&bytes) else { return Ok(FoundLostBlocks::Damaged) };
        let is_inside =
            |block: u64| block.checked_mul(BLOCK_BYTES).is_some_and(|offset_bytes| offset_bytes < size_bytes);
        let epoch = record.epoch;
        let mut lost = record.lost_blocks();
        lost.retain(|number, _| is_inside(*number));
        if epoch != self.epoch {
            // A block that cannot be read stays lost.
            lost.retain(|number, block| sum_shown(*number).is_none_or(|sum| block.has(sum)));
            self.save(&lost)?;
        }
        Ok(FoundLostBlocks::Known(lost))
    }

    /// Records the sums of blocks that a crash has torn. `sum_shown` is that of [`LostBlocksFile::load`].
    pub(crate) fn record_torn(
        &self,
        lost: &mut LostBlocks,
        mut sum_shown: impl FnMut(u64) -> Option<u32>,
    ) -> Result<()> {
        let mut has_changed = false;
        for (number, block) in lost.iter_mut() {
            if let Some(sum) = sum_shown(*number).filter(|sum| !block.has(*sum)) {
                block.add_merged(sum);
                has_changed = true;
            }
        }
        if has_changed { self.save(lost) } else { Ok(()) }
    }

    /// Replaces the record, durably.
    pub(crate) fn save(&self, lost: &LostBlocks) -> Result<()> {
        self.medium.check_writable()?;
        let directory = self.medium.directory();
        if lost.is_empty() {
            return match directory.stat(FILE)? {
                Some(_) => directory.unlink(FILE).and_then(|()| directory.sync()),
                None => Ok(()),
            };
        }
        directory.replace(FILE, &Record::new(self.epoch, lost).encode()?)
    }
}

#[cfg(shorthorn_fuzzing)]
pub(crate) mod fuzzing {
    use super::*;

    /// A record that is accepted has no more blocks than its limit, and is read again as the same.
    pub fn check(bytes: &[u8]) {
        let Some(record) = Record::parse(bytes) else { return };
        assert!(record.blocks.len() <= LOST_BLOCKS_MAX);
        let again = record.encode().ok().and_then(|written| Record::parse(&written));
        let again = again.expect("a written record");
        assert_eq!((again.epoch, &again.blocks), (record.epoch, &record.blocks));
        let lost = record.lost_blocks();
        let written = Record::new(3, &lost);
        assert!(written.blocks.len() <= LOST_BLOCKS_MAX && written.lost_blocks() == lost);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::block_sums::sum_of_data;
    use crate::options::{CreateOptions, OpenOptions};
    use crate::store::Store;

    #[test]
    fn a_record_is_read_as_it_was_written_and_no_other_bytes_are() {
        let record = Record { format: FORMAT, epoch: 3, blocks: vec![(0, 7), (9, u32::MAX)] };
        let bytes = record.encode().unwrap();
        let found = Record::parse(&bytes).unwrap();
        assert_eq!((found.epoch, found.blocks), (3, record.blocks));
        for at in 0..bytes.len() - 1 {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            let same = Record::parse(&bad).is_none_or(|found| found.blocks == [(0, 7), (9, u32::MAX)]);
            assert!(same, "byte {at}");
        }
        assert!(Record::parse(b"{}\n").is_none());
    }

    /// Makes a replica with data in blocks 1 and 2, of which blocks 1 to 3 are recorded as lost.
    fn with_lost_blocks(path: &Path) -> Store {
        let options = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        let mut store = Store::create(path, options).unwrap();
        store.write_at(&[7; 8192], 4096, true).unwrap();
        let sum = sum_of_data(&[7; 4096]);
        store
            .save_lost_blocks(&LostBlocks::from(
                [1, 2, 3, 1 << 60].map(|number| (number, LostBlock::new(sum))),
            ))
            .unwrap();
        store
    }

    fn known(store: &mut Store) -> Vec<u64> {
        found(store).into_keys().collect()
    }

    /// Opens the directory after another program has had it open.
    fn after_another_program(path: &Path) -> Store {
        let volume_meta = path.join("volume.meta");
        let text = std::fs::read(&volume_meta).unwrap();
        std::fs::remove_file(&volume_meta).unwrap();
        std::fs::write(&volume_meta, text).unwrap();
        Store::open(path, OpenOptions::default()).unwrap()
    }

    /// Returns the recorded blocks.
    fn found(store: &mut Store) -> LostBlocks {
        match store.load_lost_blocks().unwrap() {
            FoundLostBlocks::Known(lost) => lost,
            FoundLostBlocks::Damaged => panic!("it is damaged"),
        }
    }

    /// A block that was copied with sum 1, and merged so that it got these sums.
    fn merged(sums: impl IntoIterator<Item = u32>) -> LostBlock {
        let mut block = LostBlock::new(1);
        sums.into_iter().for_each(|sum| block.add_merged(sum));
        block
    }

    #[test]
    fn a_block_is_lost_until_the_record_says_otherwise() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let mut store = with_lost_blocks(&path);
        // As after a crash in the middle of a write that was merged with the rot.
        store.write_at(&[8; 512], 8192, true).unwrap();
        drop(store);
        let mut store = Store::open(&path, OpenOptions::default()).unwrap();
        assert_eq!(known(&mut store), [1, 2, 3]);
        store.save_lost_blocks(&LostBlocks::from([(2, LostBlock::new(0))])).unwrap();
        assert_eq!(known(&mut store), [2]);
        store.save_lost_blocks(&LostBlocks::new()).unwrap();
        assert!(known(&mut store).is_empty() && !path.join(FILE).exists());
        store.save_lost_blocks(&LostBlocks::new()).unwrap();
    }

    #[test]
    fn after_another_program_only_the_same_rot_is_lost() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let mut store = with_lost_blocks(&path);
        store.write_at(&[8; 4096], 8192, true).unwrap();
        store.close().unwrap();
        let mut store = after_another_program(&path);
        assert_eq!(known(&mut store), [1]);
        // From here on nothing but the record counts.
        store.write_at(&[9; 512], 4096, true).unwrap();
        assert_eq!(known(&mut store), [1]);
    }

    #[test]
    fn the_copied_rot_and_the_last_merges_of_a_block_are_known() {
        let block = merged([2, 3, 2, 4, 5]);
        assert_eq!([1, 2, 3, 4, 5, 6].map(|sum| block.has(sum)), [true, true, false, true, true, false]);
        assert_eq!(block.copied(), 1);
    }

    #[test]
    fn a_record_has_several_sums_of_a_block_and_an_older_one_has_one() {
        let lost = LostBlocks::from([(0, merged([2, 3])), (9, merged([]))]);
        let record = Record::new(3, &lost);
        assert_eq!(record.blocks, [(0, 1), (0, 2), (0, 3), (9, 1)]);
        // A version that knows of one sum for each block counts the last entry.
        let older: BTreeMap<u64, u32> = record.blocks.iter().copied().collect();
        assert_eq!(older, BTreeMap::from([(0, 3), (9, 1)]));
        assert_eq!(record.lost_blocks(), lost);
        let older = Record { format: FORMAT, epoch: 3, blocks: vec![(0, 1), (9, 1)] };
        assert_eq!(older.lost_blocks(), LostBlocks::from([(0, merged([])), (9, merged([]))]));
    }

    /// A version that knows of one sum for each block refuses a longer file.
    #[test]
    fn merges_have_the_places_that_blocks_leave() {
        let count = LOST_BLOCKS_MAX as u64;
        for (blocks, sums) in [(count, 1), (count / 2, 2), (count / 4, 4), (1, 4)] {
            let lost: LostBlocks = (0..blocks).map(|number| (number, merged([2, 3, 4, 5]))).collect();
            let record = Record::new(3, &lost);
            assert_eq!(record.blocks.len() as u64, blocks * sums);
            let found = record.lost_blocks();
            let newest = |block: &LostBlock| block.has(1) && (block.has(5) || sums == 1);
            assert!(found.len() as u64 == blocks && found.values().all(newest));
        }
        let lost: LostBlocks = (0..count - 1).map(|number| (number, merged([2, 3]))).collect();
        assert_eq!(Record::new(3, &lost).blocks[..3], [(0, 1), (0, 3), (1, 1)], "one place is left");
    }

    #[test]
    fn after_another_program_a_merge_of_rot_and_data_is_lost_and_other_data_is_not() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let mut store = with_lost_blocks(&path);
        let mut lost = found(&mut store);
        let merge = [&[8; 512][..], &[7; 3584]].concat();
        for number in [1, 2, 3] {
            lost.get_mut(&number).unwrap().add_merged(sum_of_data(&merge));
        }
        store.save_lost_blocks(&lost).unwrap();
        // Block 2 was not written before a crash, and block 3 gets other data from the other program.
        store.write_at(&merge, 4096, true).unwrap();
        store.write_at(&[9; 4096], 3 * 4096, true).unwrap();
        drop(store);
        let mut store = after_another_program(&path);
        lost.remove(&3);
        assert_eq!(found(&mut store), lost);
    }

    #[test]
    fn a_torn_block_is_lost_after_another_program_too() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let mut store = with_lost_blocks(&path);
        let mut lost = found(&mut store);
        lost.get_mut(&1).unwrap().add_merged(5);
        store.save_lost_blocks(&lost).unwrap();
        // A merge was torn in block 1, and in block 3 a write of the whole block. Another program is to
        // change block 2.
        store.write_at(&[8; 512], 4096, true).unwrap();
        store.write_at(&[8; 512], 3 * 4096, true).unwrap();
        store.record_torn_blocks(&mut lost).unwrap();
        store.write_at(&[8; 512], 8192, true).unwrap();
        drop(store);
        assert_eq!(known(&mut after_another_program(&path)), [1, 3]);
    }

    #[test]
    fn a_damaged_record_makes_the_replica_one_to_be_rebuilt() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let mut store = with_lost_blocks(&path);
        std::fs::write(path.join(FILE), "damaged").unwrap();
        assert_eq!(store.load_lost_blocks().unwrap(), FoundLostBlocks::Damaged);
        assert!(!store.info().rebuilding && path.join(FILE).exists());
        store.distrust_data().unwrap();
        assert!(store.info().rebuilding && !path.join(FILE).exists());
        drop(store);
        let options = OpenOptions { accept_rebuilding: true, ..OpenOptions::default() };
        let mut store = Store::open(&path, options).unwrap();
        assert!(store.info().rebuilding && known(&mut store).is_empty());
    }

    #[test]
    fn only_an_unreadable_record_is_dropped_for_the_operator() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let mut store = with_lost_blocks(&path);
        store.drop_damaged_lost_blocks().unwrap();
        assert_eq!(known(&mut store), [1, 2, 3]);
        std::fs::write(path.join(FILE), "damaged").unwrap();
        store.drop_damaged_lost_blocks().unwrap();
        assert!(known(&mut store).is_empty() && !path.join(FILE).exists());
        assert!(store.info().rebuilding, "no snapshot is known to be sound");
    }

    #[test]
    fn blocks_are_compared_with_their_sums_only_in_another_epoch() {
        let temp = tempfile::tempdir().unwrap();
        let medium = Medium::at(temp.path(), false);
        let lost = LostBlocks::from([1, 2, 3, 99].map(|number| (number, LostBlock::new(7))));
        LostBlocksFile::new(&medium, 5).save(&lost).unwrap();
        let load = |epoch, sum_shown: fn(u64) -> Option<u32>| match LostBlocksFile::new(&medium, epoch)
            .load(16 * BLOCK_BYTES, sum_shown)
            .unwrap()
        {
            FoundLostBlocks::Known(lost) => lost.into_keys().collect::<Vec<_>>(),
            FoundLostBlocks::Damaged => panic!("it is damaged"),
        };
        assert_eq!(load(5, |_| Some(8)), [1, 2, 3]);
        // Block 2 has other data, and block 3 cannot be read.
        assert_eq!(load(6, |number| (number < 3).then_some(if number == 1 { 7 } else { 8 })), [1, 3]);
        assert_eq!(load(6, |_| Some(8)), [1, 3], "the record is of this epoch now");
    }

    #[test]
    fn a_torn_block_has_its_sum_recorded_once() {
        let temp = tempfile::tempdir().unwrap();
        let medium = Medium::at(temp.path(), false);
        let file = LostBlocksFile::new(&medium, 5);
        let mut lost = LostBlocks::from([(1, LostBlock::new(7))]);
        file.record_torn(&mut lost, |_| Some(7)).unwrap();
        assert!(medium.directory().stat(FILE).unwrap().is_none(), "nothing has changed");
        file.record_torn(&mut lost, |_| Some(8)).unwrap();
        assert_eq!(file.load(2 * BLOCK_BYTES, |_| None).unwrap(), FoundLostBlocks::Known(lost.clone()));
        assert!(lost[&1].has(7) && lost[&1].has(8));
    }
}
