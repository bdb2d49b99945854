//! Blocks of which no replica had a sound copy when this one was made: `shorthorn.lost-blocks`.
//!
//! The rot was copied, so that the replica could be made at all; the record says that it is rot. A recorded
//! block is lost whatever it holds: a part of it may have been merged with new data, and a crash may have
//! torn that. The record also has the sum of each block as it was copied. The sum counts only after another
//! program has had the directory open: a block with another sum has got other data from it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shorthorn_chain::{with_check, without_check};

use crate::block_sums::sum_of_data;
use crate::buffer::AlignedBuffer;
use crate::error::StoreError;
use crate::store::Store;
use shorthorn_types::limits::BLOCK_BYTES;

type Result<T> = std::result::Result<T, StoreError>;

const FILE: &str = "shorthorn.lost-blocks";
const FORMAT: u32 = 1;
/// The maximum number of recorded blocks, which bounds the file.
pub const LOST_BLOCKS_MAX: usize = 4096;

/// Numbers of blocks, and the sum of each as it was copied.
pub type LostBlocks = BTreeMap<u64, u32>;

/// The record as an opening finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FoundLostBlocks {
    /// The lost blocks.
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
    blocks: Vec<(u64, u32)>,
}

impl Record {
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

impl Store {
    /// Returns the blocks that are recorded.
    ///
    /// # Errors
    /// An I/O error: it is not known which blocks are lost.
    pub fn load_lost_blocks(&mut self) -> Result<FoundLostBlocks> {
        let Some(bytes) = self.medium.directory().read(FILE)? else { return Ok(FoundLostBlocks::default()) };
        let Some(record) = Record::parse(&bytes) else { return Ok(FoundLostBlocks::Damaged) };
        let size_bytes = self.size_bytes();
        let is_inside =
            |block: u64| block.checked_mul(BLOCK_BYTES).is_some_and(|offset_bytes| offset_bytes < size_bytes);
        let mut lost: LostBlocks = record.blocks.into_iter().filter(|(block, _)| is_inside(*block)).collect();
        if record.epoch != self.guard.epoch() {
            lost.retain(|block, sum| self.still_has(*block, *sum));
            self.save_lost_blocks(&lost)?;
        }
        Ok(FoundLostBlocks::Known(lost))
    }

    /// Returns true if the block has this sum, or cannot be read.
    fn still_has(&mut self, block: u64, sum: u32) -> bool {
        let mut buffer = AlignedBuffer::new(usize::try_from(BLOCK_BYTES).unwrap_or(0));
        let read = self.read_at(buffer.as_mut_slice(), block * BLOCK_BYTES);
        read.is_err() || sum_of_data(buffer.as_slice()) == sum
    }

    /// Makes this a replica that lacks data: it is not known which blocks are lost, so none counts. The next
    /// copy keeps no layer. That is durable before the damaged record is removed.
    ///
    /// # Errors
    /// [`StoreError`]; the record is still there then.
    pub fn distrust_data(&mut self) -> Result<()> {
        if !self.info().rebuilding {
            self.set_rebuilding(true)?;
        }
        self.forget_done_layers()?;
        self.save_lost_blocks(&LostBlocks::new())
    }

    /// Removes a record that is damaged or cannot be read, because the operator has chosen this replica. From
    /// then on the blocks in the record count as sound. [`Store::accept_unfinished_copy`] follows: no
    /// snapshot is known to be that of other replicas.
    ///
    /// # Errors
    /// The record could not be removed.
    pub fn drop_damaged_lost_blocks(&mut self) -> Result<()> {
        match self.load_lost_blocks() {
            Ok(FoundLostBlocks::Known(_)) => Ok(()),
            // No snapshot is known to be sound any more.
            Ok(FoundLostBlocks::Damaged) | Err(_) => self.distrust_data(),
        }
    }

    /// Records these, durably, in place of those that are recorded.
    ///
    /// # Errors
    /// An I/O error; those from before are then still recorded.
    pub fn save_lost_blocks(&mut self, lost: &LostBlocks) -> Result<()> {
        self.medium.check_writable()?;
        if lost.is_empty() {
            return match self.medium.directory().stat(FILE)? {
                Some(_) => self.medium.directory().unlink(FILE).and_then(|()| self.medium.directory().sync()),
                None => Ok(()),
            };
        }
        let blocks = lost.iter().map(|(block, sum)| (*block, *sum)).take(LOST_BLOCKS_MAX).collect();
        let record = Record { format: FORMAT, epoch: self.guard.epoch(), blocks };
        self.medium.directory().replace(FILE, &record.encode()?)
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
        assert_eq!((again.epoch, again.blocks), (record.epoch, record.blocks));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::options::{CreateOptions, OpenOptions};

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
        store.save_lost_blocks(&LostBlocks::from([(1, sum), (2, sum), (3, sum), (1 << 60, sum)])).unwrap();
        store
    }

    fn known(store: &mut Store) -> Vec<u64> {
        match store.load_lost_blocks().unwrap() {
            FoundLostBlocks::Known(lost) => lost.into_keys().collect(),
            FoundLostBlocks::Damaged => panic!("it is damaged"),
        }
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
        store.save_lost_blocks(&LostBlocks::from([(2, 0)])).unwrap();
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
        let volume_meta = path.join("volume.meta");
        let text = std::fs::read(&volume_meta).unwrap();
        std::fs::remove_file(&volume_meta).unwrap();
        std::fs::write(&volume_meta, text).unwrap();
        let mut store = Store::open(&path, OpenOptions::default()).unwrap();
        assert_eq!(known(&mut store), [1]);
        // From here on nothing but the record counts.
        store.write_at(&[9; 512], 4096, true).unwrap();
        assert_eq!(known(&mut store), [1]);
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
    fn only_a_record_that_says_nothing_is_dropped_for_the_operator() {
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
}
