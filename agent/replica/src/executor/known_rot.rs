//! Sums that stay known although their region has none any more.
//!
//! Sums count by region, and rot is repaired by block. The first write of a repair removes the sums of the
//! whole region. Other rot there would look sound, and would be summed. So the sums of a page are kept when
//! rot is met there, for every block until that block gets other data. The data of a repair matches the sum:
//! the sum stays known, so that a repair that fails, because the disk is full, leaves the rot known.

use shorthorn_store::{BLOCKS_PER_SUM_PAGE, SUM_PAGE_SPAN_BYTES, SUM_UNKNOWN, SumPage};
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;

use super::summer::{block_ranges, number_in_page};
use crate::limits::KNOWN_ROT_PAGES;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct KnownRot {
    pages: Vec<(u64, SumPage)>,
}

impl KnownRot {
    /// Keeps the sums of all blocks in a page with rot that `counts`. If too many pages are kept, those of
    /// another one are dropped.
    pub fn keep(&mut self, number: u64, sums: &SumPage, counts: impl Fn(ByteRange) -> bool) {
        let at = self.pages.iter().position(|(of, _)| *of == number);
        if at.is_none() && self.pages.len() == KNOWN_ROT_PAGES {
            self.pages.retain(|(_, sums)| !sums.is_unknown());
            if self.pages.len() == KNOWN_ROT_PAGES {
                return;
            }
        }
        let at = at.unwrap_or_else(|| {
            self.pages.push((number, SumPage::unknown()));
            self.pages.len() - 1
        });
        let kept = &mut self.pages[at].1;
        for index in 0..BLOCKS_PER_SUM_PAGE {
            let offset_bytes = number * SUM_PAGE_SPAN_BYTES + index as u64 * BLOCK_BYTES;
            let Ok(block) = ByteRange::new(offset_bytes, BLOCK_BYTES) else { continue };
            if kept.sum(index) == SUM_UNKNOWN && sums.sum(index) != SUM_UNKNOWN && counts(block) {
                kept.set(index, sums.sum(index));
            }
        }
    }

    /// Returns the sum of a block, by the number of its page and its place there.
    pub fn sum(&self, number: u64, index: usize) -> u32 {
        let page = self.pages.iter().find(|(of, _)| *of == number);
        page.map_or(SUM_UNKNOWN, |(_, sums)| sums.sum(index))
    }

    /// Handles the modification of `blocks`, which is about to begin. `sum_after` is the sum of the data that
    /// a block gets, if that is known.
    pub fn modified(&mut self, blocks: ByteRange, sum_after: impl Fn(ByteRange) -> Option<u32>) {
        if self.pages.is_empty() {
            return;
        }
        for block in block_ranges(blocks) {
            let number = block.offset() / SUM_PAGE_SPAN_BYTES;
            let index = number_in_page(block);
            for (_, sums) in self.pages.iter_mut().filter(|(of, _)| *of == number) {
                if sums.sum(index) != SUM_UNKNOWN && Some(sums.sum(index)) != sum_after(block) {
                    sums.set(index, SUM_UNKNOWN);
                }
            }
        }
    }

    /// Forgets all sums.
    pub fn forget(&mut self) {
        self.pages.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(first: u64, count: u64) -> ByteRange {
        ByteRange::new(first * BLOCK_BYTES, count * BLOCK_BYTES).unwrap()
    }

    #[test]
    fn a_sum_is_known_until_its_block_is_modified() {
        let mut known = KnownRot::default();
        let mut sums = SumPage::unknown();
        (3..7).for_each(|index| sums.set(index, 70));
        let first_block = BLOCKS_PER_SUM_PAGE as u64 * 2;
        known.keep(2, &sums, |block| block != blocks(first_block + 6, 1));
        assert_eq!([3, 5, 6, 8].map(|index| known.sum(2, index)), [70, 70, SUM_UNKNOWN, SUM_UNKNOWN]);
        assert_eq!(known.sum(1, 3), SUM_UNKNOWN);
        known.modified(blocks(first_block + 3, 2), |_| None);
        assert_eq!([3, 4, 5].map(|index| known.sum(2, index)), [SUM_UNKNOWN, SUM_UNKNOWN, 70]);
        // A block that was modified since has no sum in a region that counts.
        sums.set(5, 71);
        known.keep(2, &sums, |_| true);
        assert_eq!([4, 5].map(|index| known.sum(2, index)), [70, 70], "what was known stays");
        known.forget();
        assert_eq!(known.sum(2, 5), SUM_UNKNOWN);
    }

    /// A repair may fail, because the disk is full.
    #[test]
    fn a_sum_stays_known_if_its_block_gets_the_data_that_it_stands_for() {
        let mut known = KnownRot::default();
        let mut sums = SumPage::unknown();
        (3..7).for_each(|index| sums.set(index, 70));
        known.keep(0, &sums, |_| true);
        known.modified(blocks(3, 3), |block| Some(if block == blocks(4, 1) { 71 } else { 70 }));
        assert_eq!([3, 4, 5, 6].map(|index| known.sum(0, index)), [70, SUM_UNKNOWN, 70, 70]);
    }

    #[test]
    fn a_page_without_a_known_sum_makes_room_for_another() {
        let mut known = KnownRot::default();
        let mut sums = SumPage::unknown();
        sums.set(0, 1);
        let last = KNOWN_ROT_PAGES as u64;
        (0..last).for_each(|number| known.keep(number, &sums, |_| true));
        known.modified(blocks(0, 1), |_| None);
        known.keep(last, &sums, |_| true);
        assert_eq!([0, 1, last].map(|number| known.sum(number, 0)), [SUM_UNKNOWN, 1, 1]);
    }

    #[test]
    fn only_so_many_pages_are_kept() {
        let mut known = KnownRot::default();
        let mut sums = SumPage::unknown();
        sums.set(0, 1);
        (0..=KNOWN_ROT_PAGES as u64).for_each(|number| known.keep(number, &sums, |_| true));
        let last = KNOWN_ROT_PAGES as u64;
        assert_eq!([0, last - 1, last].map(|number| known.sum(number, 0)), [1, 1, SUM_UNKNOWN]);
    }
}
