//! Sums of the blocks of the volume as a reader sees them, in `shorthorn.block-sums`. Which of them count is
//! kept elsewhere: see the unsummed regions of `shorthorn-regions`.
//!
//! The file is a row of pages without a header of its own. Page n has the sums of [`BLOCKS_PER_SUM_PAGE`]
//! blocks from block n * [`BLOCKS_PER_SUM_PAGE`] on. Pages that were never written are holes. The sums of a
//! page that is torn, damaged, or of another series are not known. `shorthorn.guard` has the current
//! *series*. It is removed when the volume is changed without a record of the regions, or by a version of
//! this program without sums. All pages are invalid afterwards. Sums do not depend on layers: the data that a
//! reader sees stays the same if snapshots are made or removed.
//!
//! All numbers are little-endian.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic, "SHRNBSUM" |
//! | 8 | 4 | format, 1 |
//! | 12 | 4 | blocks per page |
//! | 16 | 8 | number of the page |
//! | 24 | 8 | series |
//! | 32 | 4 | CRC-32C of the page with zeroes in this field |
//! | 36 | 28 | zeroes |
//! | 64 | 4 each | the sums: CRC-32C of the block, 1 if that is 0; 0: not known |
//! | 2112 | 1984 | zeroes |

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};

use nix::fcntl::OFlag;
use shorthorn_types::limits::BLOCK_BYTES;

use crate::epoch_record::EpochRecord;
use crate::error::StoreError;
use crate::former_writes::open_for_writes;
use crate::medium::Medium;
use crate::sums_files::BLOCK_SUMS_FILE;

type Result<T> = std::result::Result<T, StoreError>;

/// Length of a page, and the unit in which sums are read and written.
pub const SUM_PAGE_BYTES: usize = 4096;
/// The number of blocks for which a page has a sum: 2 MiB of the volume, so that regions and pages never
/// overlap in part.
pub const BLOCKS_PER_SUM_PAGE: usize = 512;
/// The bytes of the volume that a page covers.
pub const SUM_PAGE_SPAN_BYTES: u64 = BLOCKS_PER_SUM_PAGE as u64 * BLOCK_BYTES;

const MAGIC: &[u8; 8] = b"SHRNBSUM";
/// The field with [`BLOCKS_PER_SUM_PAGE`].
const BLOCKS_FIELD: u32 = 512;
const _: () = assert!(BLOCKS_FIELD as usize == BLOCKS_PER_SUM_PAGE);
const FORMAT: u32 = 1;
const CHECK_AT: usize = 32;
const SUMS_AT: usize = 64;
const SUM_BYTES: usize = 4;
const _: () = assert!(SUMS_AT + BLOCKS_PER_SUM_PAGE * SUM_BYTES <= SUM_PAGE_BYTES);

/// The entry of a block whose sum is not known.
const SUM_UNKNOWN: u32 = 0;

/// Returns the sum of a block: never 0, which is the entry of an unknown sum.
#[must_use]
pub fn block_sum(crc32c: u32) -> u32 {
    crc32c.max(1)
}

/// The sum of a block with this data.
#[must_use]
pub fn sum_of_data(bytes: &[u8]) -> u32 {
    block_sum(crc32c::crc32c(bytes))
}

/// The sum of a block of zeroes.
#[must_use]
pub fn sum_of_zeroes() -> u32 {
    const ZEROES: [u8; 512] = [0; 512];
    let zeroes = (0..BLOCK_BYTES).step_by(ZEROES.len());
    block_sum(zeroes.fold(0, |sum, _| crc32c::crc32c_append(sum, &ZEROES)))
}

/// The sums of one page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SumPage(Box<[u32; BLOCKS_PER_SUM_PAGE]>);

impl SumPage {
    /// Creates a page without any known sum.
    #[must_use]
    pub fn unknown() -> SumPage {
        SumPage(Box::new([SUM_UNKNOWN; BLOCKS_PER_SUM_PAGE]))
    }

    /// Returns the sum of a block by its number in the page; none if it is unknown.
    #[must_use]
    pub fn sum(&self, block: usize) -> Option<u32> {
        self.0.get(block).copied().filter(|sum| *sum != SUM_UNKNOWN)
    }

    /// Sets the sum of a block. Blocks beyond the page are left out.
    pub fn set(&mut self, block: usize, sum: u32) {
        if let Some(entry) = self.0.get_mut(block) {
            *entry = sum;
        }
    }

    /// Returns true if the page has no known sum.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        self.0.iter().all(|sum| *sum == SUM_UNKNOWN)
    }

    /// Makes the sums of all blocks unknown.
    pub fn clear(&mut self) {
        self.0.fill(SUM_UNKNOWN);
    }

    /// Returns the page in its format on the disk.
    pub fn encode(&self, number: u64, series: u64, out: &mut [u8; SUM_PAGE_BYTES]) {
        out.fill(0);
        out[0..8].copy_from_slice(MAGIC);
        out[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        out[12..16].copy_from_slice(&BLOCKS_FIELD.to_le_bytes());
        out[16..24].copy_from_slice(&number.to_le_bytes());
        out[24..32].copy_from_slice(&series.to_le_bytes());
        for (entry, sum) in out[SUMS_AT..].chunks_exact_mut(SUM_BYTES).zip(self.0.iter()) {
            entry.copy_from_slice(&sum.to_le_bytes());
        }
        let check = crc32c::crc32c(out);
        out[CHECK_AT..CHECK_AT + 4].copy_from_slice(&check.to_le_bytes());
    }

    /// Loads a page from the disk. Returns false, without any known sum, if the page is damaged, not this
    /// one, or of another series.
    pub fn decode(&mut self, number: u64, series: u64, bytes: &[u8]) -> bool {
        self.clear();
        let Some(bytes) = bytes.get(..SUM_PAGE_BYTES) else { return false };
        let head = |at: usize, length: usize| &bytes[at..at + length];
        let is_this = head(0, 8) == MAGIC
            && head(8, 4) == FORMAT.to_le_bytes()
            && head(12, 4) == BLOCKS_FIELD.to_le_bytes()
            && head(16, 8) == number.to_le_bytes()
            && head(24, 8) == series.to_le_bytes();
        if !is_this || head(CHECK_AT, 4) != check_of(bytes).to_le_bytes() {
            return false;
        }
        for (sum, entry) in self.0.iter_mut().zip(bytes[SUMS_AT..].chunks_exact(SUM_BYTES)) {
            *sum = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
        }
        true
    }
}

/// Returns the check of a page, which ignores the field for it.
fn check_of(bytes: &[u8]) -> u32 {
    let check = crc32c::crc32c(&bytes[..CHECK_AT]);
    let check = crc32c::crc32c_append(check, &[0; 4]);
    crc32c::crc32c_append(check, &bytes[CHECK_AT + 4..])
}

/// The open file of the sums. Pages are read and written like those of sets of regions.
#[derive(Debug)]
pub struct BlockSumsFile {
    file: File,
    series: u64,
}

impl BlockSumsFile {
    /// Opens the file. Starts a new series unless the existing one counts. From now on, the record relies on
    /// the set of regions without sums.
    pub(crate) fn open(medium: &Medium, epoch_record: &mut EpochRecord) -> Result<BlockSumsFile> {
        let directory = medium.directory();
        let series = match epoch_record.series() {
            Some(series) => series,
            None => {
                directory.unlink(BLOCK_SUMS_FILE)?;
                epoch_record.begin_series(directory)?
            }
        };
        let is_new = directory.stat(BLOCK_SUMS_FILE)?.is_none();
        let flags = OFlag::O_CREAT | medium.direct_flag();
        let file = directory.with_reserve(|| open_for_writes(directory, BLOCK_SUMS_FILE, flags))?;
        if is_new {
            directory.sync()?;
        }
        epoch_record.set_keeps_sums(true);
        Ok(BlockSumsFile { file, series })
    }

    /// Returns the series of pages that counts.
    #[must_use]
    pub fn series(&self) -> u64 {
        self.series
    }

    /// Returns the descriptor of the file.
    #[must_use]
    pub fn raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded() -> [u8; SUM_PAGE_BYTES] {
        let mut page = SumPage::unknown();
        page.set(0, 0x0403_0201);
        page.set(511, block_sum(0));
        let mut bytes = [0xff; SUM_PAGE_BYTES];
        page.encode(3, 9, &mut bytes);
        bytes
    }

    #[test]
    fn the_format_stays() {
        let bytes = encoded();
        assert_eq!(&bytes[..24], b"SHRNBSUM\x01\0\0\0\0\x02\0\0\x03\0\0\0\0\0\0\0");
        assert_eq!(&bytes[24..32], &[9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!((&bytes[36..68], bytes[2108]), (&[[0; 28].as_slice(), &[1, 2, 3, 4]].concat()[..], 1));
        assert!(bytes[2112..].iter().all(|byte| *byte == 0));
        let mut page = SumPage::unknown();
        assert!(page.decode(3, 9, &bytes));
        assert_eq!((page.sum(0), page.sum(1), page.sum(511)), (Some(0x0403_0201), None, Some(1)));
    }

    #[test]
    fn a_page_that_is_not_as_it_was_written_knows_nothing() {
        let good = encoded();
        let mut page = SumPage::unknown();
        for at in 0..SUM_PAGE_BYTES {
            let mut bad = good;
            bad[at] ^= 0x10;
            assert!(!page.decode(3, 9, &bad), "byte {at}");
            assert_eq!(page, SumPage::unknown());
        }
        let torn = [&good[..512], &[0; SUM_PAGE_BYTES - 512]].concat();
        assert!(!page.decode(3, 9, &torn));
        for (number, series) in [(4, 9), (3, 8)] {
            assert!(!page.decode(number, series, &good), "another page, another series");
        }
        assert!(!page.decode(3, 9, &good[..4095]) && !page.decode(3, 9, &[]));
    }

    #[test]
    fn a_series_continues_until_its_sums_are_forgotten() {
        let temp = tempfile::tempdir().unwrap();
        let medium = Medium::at(temp.path(), false);
        let mut epoch_record = EpochRecord::new();
        let first = BlockSumsFile::open(&medium, &mut epoch_record).unwrap().series();
        assert!(!epoch_record.has_unkept_sums());
        assert_eq!(BlockSumsFile::open(&medium, &mut epoch_record).unwrap().series(), first);
        epoch_record.forget_sums(medium.directory()).unwrap();
        assert!(medium.directory().stat(BLOCK_SUMS_FILE).unwrap().is_none());
        assert!(BlockSumsFile::open(&medium, &mut epoch_record).unwrap().series() > first);
    }
}
