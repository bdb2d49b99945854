//! Blocks of which no replica had a sound copy when this one was made: `shorthorn.lost-blocks`.
//!
//! The rot was copied, so that the replica could be made at all; the record says that it is rot. It has the
//! sum of each block as it was copied. A block with another sum has got other data since, and is not lost any
//! more.

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
/// More are not recorded, which bounds the file and the time that an opening takes.
pub const LOST_BLOCKS_MAX: usize = 4096;

/// Numbers of blocks, and the sum of each as it was copied.
pub type LostBlocks = BTreeMap<u64, u32>;

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
    /// The blocks that are recorded and hold what they held then. A record that is damaged, or from before
    /// another program has had the directory open, says nothing.
    ///
    /// # Errors
    /// An I/O error.
    pub fn load_lost_blocks(&mut self) -> Result<LostBlocks> {
        let Some(bytes) = self.directory.read(FILE)? else { return Ok(LostBlocks::new()) };
        let record = Record::parse(&bytes).filter(|record| record.epoch == self.guard.epoch);
        let Some(record) = record else { return Ok(LostBlocks::new()) };
        let count = record.blocks.len();
        let (mut lost, mut is_read) = (LostBlocks::new(), true);
        let mut buffer = AlignedBuffer::new(usize::try_from(BLOCK_BYTES).unwrap_or(0));
        for (block, sum) in record.blocks {
            let Some(offset_bytes) = block.checked_mul(BLOCK_BYTES).filter(|at| *at < self.size_bytes())
            else {
                continue;
            };
            // One that cannot be read is not served either.
            match self.read_at(buffer.as_mut_slice(), offset_bytes) {
                Ok(()) if sum_of_data(buffer.as_slice()) == sum => drop(lost.insert(block, sum)),
                read => is_read &= read.is_ok(),
            }
        }
        if is_read && lost.len() < count {
            // A later write may give such a block the data that it was copied with, and that is not rot then.
            // If the record cannot be saved, the next opening looks again.
            let _ = self.save_lost_blocks(&lost);
        }
        Ok(lost)
    }

    /// Records these, durably, in place of those that are recorded.
    ///
    /// # Errors
    /// An I/O error; those from before are then still recorded.
    pub fn save_lost_blocks(&mut self, lost: &LostBlocks) -> Result<()> {
        self.check_writable()?;
        if lost.is_empty() {
            return match self.directory.stat(FILE)? {
                Some(_) => self.directory.unlink(FILE).and_then(|()| self.directory.sync()),
                None => Ok(()),
            };
        }
        let blocks = lost.iter().map(|(block, sum)| (*block, *sum)).take(LOST_BLOCKS_MAX).collect();
        let record = Record { format: FORMAT, epoch: self.guard.epoch, blocks };
        self.directory.replace(FILE, &record.encode()?)
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn a_block_is_lost_until_it_has_other_data() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let options = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        let mut store = Store::create(&path, options).unwrap();
        store.write_at(&[7; 8192], 4096, true).unwrap();
        let sum = sum_of_data(&[7; 4096]);
        let lost = LostBlocks::from([(1, sum), (2, sum), (3, sum), (1 << 60, sum)]);
        store.save_lost_blocks(&lost).unwrap();
        store.write_at(&[8; 4096], 8192, true).unwrap();
        drop(store);
        let mut store = Store::open(&path, OpenOptions::default()).unwrap();
        assert_eq!(store.load_lost_blocks().unwrap(), LostBlocks::from([(1, sum)]));
        store.write_at(&[7; 4096], 8192, true).unwrap();
        assert_eq!(store.load_lost_blocks().unwrap(), LostBlocks::from([(1, sum)]), "it was stored as it is");
        store.save_lost_blocks(&LostBlocks::new()).unwrap();
        assert_eq!(store.load_lost_blocks().unwrap(), LostBlocks::new());
        assert!(!path.join(FILE).exists());
        store.save_lost_blocks(&LostBlocks::new()).unwrap();
    }
}
