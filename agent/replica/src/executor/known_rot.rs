//! Sums that stay known although their region has none any more.
//!
//! Sums count by region, and rot is repaired by block. The first write of a repair takes the sums of the whole region away; what else
//! is rotten there would look sound, and be summed as it is. So what the sums of a page said is kept from when rot was
//! met there, for every block until that block gets other data. The data of a repair is what the sum stands for: the sum stays
//! known, so that a repair that fails, because the disk is full, leaves the rot known. Other data makes the sum count for nothing as soon
//! as it is on its way; if the disk has no space for it, what the block held before counts again.

use shorthorn_store::{BLOCKS_PER_SUM_PAGE, SUM_PAGE_SPAN_BYTES, SUM_UNKNOWN, SumPage};
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;

use super::summer::{block_ranges, number_in_page};
use crate::limits::KNOWN_ROT_PAGES;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct KnownRot {
    pages: Vec<(u64, SumPage)>,
    /// Not more than there are in the pages.
    suspended: Vec<Suspended>,
}

/// A sum that does not count while the request in a slot gives its block other data.
#[derive(Clone, Copy, Debug)]
struct Suspended {
    slot: u16,
    number: u64,
    place: usize,
    sum: u32,
}

impl KnownRot {
    /// Rot was met in a page: keeps the sums of all blocks that `counts`. If too many pages are kept, those of another one are
    /// not.
    pub fn keep(&mut self, number: u64, sums: &SumPage, counts: impl Fn(ByteRange) -> bool) {
        let Some(kept) = self.page_mut(number) else { return };
        for place in 0..BLOCKS_PER_SUM_PAGE {
            let offset_bytes = number * SUM_PAGE_SPAN_BYTES + place as u64 * BLOCK_BYTES;
            let Ok(block) = ByteRange::new(offset_bytes, BLOCK_BYTES) else { continue };
            if kept.sum(place) == SUM_UNKNOWN && sums.sum(place) != SUM_UNKNOWN && counts(block) {
                kept.set(place, sums.sum(place));
            }
        }
    }

    /// The place for the sums of a page, unless too many others are kept.
    fn page_mut(&mut self, number: u64) -> Option<&mut SumPage> {
        let at = self.pages.iter().position(|(of, _)| *of == number);
        if at.is_none() && self.pages.len() == KNOWN_ROT_PAGES {
            self.pages.retain(|(_, sums)| !sums.is_unknown());
            if self.pages.len() == KNOWN_ROT_PAGES {
                return None;
            }
        }
        let at = at.unwrap_or_else(|| {
            self.pages.push((number, SumPage::unknown()));
            self.pages.len() - 1
        });
        Some(&mut self.pages[at].1)
    }

    /// The sum of a block, by the number of its page and its place there.
    pub fn sum(&self, number: u64, place: usize) -> u32 {
        let page = self.pages.iter().find(|(of, _)| *of == number);
        page.map_or(SUM_UNKNOWN, |(_, sums)| sums.sum(place))
    }

    /// The request in the slot is about to modify `blocks`. `sum_after` is the sum of the data that a block gets, if that is known.
    pub fn modified(&mut self, slot: u16, blocks: ByteRange, sum_after: impl Fn(ByteRange) -> Option<u32>) {
        if self.pages.is_empty() {
            return;
        }
        for block in block_ranges(blocks) {
            let number = block.offset() / SUM_PAGE_SPAN_BYTES;
            let place = number_in_page(block);
            // Another request is giving a part of the same block other data: what the block held before is over if either succeeds.
            self.suspended.retain(|other| (other.number, other.place) != (number, place));
            for (_, sums) in self.pages.iter_mut().filter(|(of, _)| *of == number) {
                let sum = sums.sum(place);
                if sum != SUM_UNKNOWN && Some(sum) != sum_after(block) {
                    sums.set(place, SUM_UNKNOWN);
                    self.suspended.push(Suspended { slot, number, place, sum });
                }
            }
        }
    }

    /// The modification in the slot has ended: what its blocks held before counts again if there was no space for other data.
    pub fn ended(&mut self, slot: u16, has_no_space: bool) {
        while let Some(at) = self.suspended.iter().position(|suspended| suspended.slot == slot) {
            let Suspended { number, place, sum, .. } = self.suspended.swap_remove(at);
            if has_no_space && let Some(sums) = self.page_mut(number) {
                sums.set(place, sum);
            }
        }
    }

    /// No sum counts any more.
    pub fn forget(&mut self) {
        self.pages.clear();
        self.suspended.clear();
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
        (3..7).for_each(|place| sums.set(place, 70));
        let first_block = BLOCKS_PER_SUM_PAGE as u64 * 2;
        known.keep(2, &sums, |block| block != blocks(first_block + 6, 1));
        assert_eq!([3, 5, 6, 8].map(|place| known.sum(2, place)), [70, 70, SUM_UNKNOWN, SUM_UNKNOWN]);
        assert_eq!(known.sum(1, 3), SUM_UNKNOWN);
        known.modified(7, blocks(first_block + 3, 2), |_| None);
        assert_eq!([3, 4, 5].map(|place| known.sum(2, place)), [SUM_UNKNOWN, SUM_UNKNOWN, 70]);
        // What was modified since has no sum in a region that counts.
        sums.set(5, 71);
        known.keep(2, &sums, |_| true);
        assert_eq!([4, 5].map(|place| known.sum(2, place)), [70, 70], "what was known stays");
        known.forget();
        assert_eq!(known.sum(2, 5), SUM_UNKNOWN);
    }

    /// A repair may fail, because the disk is full.
    #[test]
    fn a_sum_stays_known_if_its_block_gets_the_data_that_it_stands_for() {
        let mut known = KnownRot::default();
        let mut sums = SumPage::unknown();
        (3..7).for_each(|place| sums.set(place, 70));
        known.keep(0, &sums, |_| true);
        known.modified(7, blocks(3, 3), |block| Some(if block == blocks(4, 1) { 71 } else { 70 }));
        assert_eq!([3, 4, 5, 6].map(|place| known.sum(0, place)), [70, SUM_UNKNOWN, 70, 70]);
    }

    fn kept(places: std::ops::Range<usize>) -> KnownRot {
        let (mut known, mut sums) = (KnownRot::default(), SumPage::unknown());
        places.for_each(|place| sums.set(place, 70));
        known.keep(0, &sums, |_| true);
        known
    }

    #[test]
    fn a_sum_is_known_again_if_there_was_no_space_for_other_data() {
        let mut known = kept(3..7);
        known.modified(7, blocks(3, 2), |_| None);
        known.modified(8, blocks(5, 1), |_| None);
        assert_eq!(
            [3, 4, 5, 6].map(|place| known.sum(0, place)),
            [SUM_UNKNOWN, SUM_UNKNOWN, SUM_UNKNOWN, 70]
        );
        known.ended(7, true);
        assert_eq!([3, 4, 5].map(|place| known.sum(0, place)), [70, 70, SUM_UNKNOWN]);
        known.ended(8, false);
        known.ended(8, true);
        assert_eq!(known.sum(0, 5), SUM_UNKNOWN, "the block has other data");
    }

    /// Two requests modify parts of one block.
    #[test]
    fn a_sum_is_not_known_again_if_its_block_was_modified_meanwhile() {
        let mut known = kept(3..4);
        known.modified(7, blocks(3, 1), |_| None);
        known.modified(8, blocks(3, 1), |_| None);
        known.ended(8, false);
        known.ended(7, true);
        assert_eq!(known.sum(0, 3), SUM_UNKNOWN);
    }

    #[test]
    fn a_page_without_a_known_sum_makes_room_for_another() {
        let mut known = KnownRot::default();
        let mut sums = SumPage::unknown();
        sums.set(0, 1);
        let last = KNOWN_ROT_PAGES as u64;
        (0..last).for_each(|number| known.keep(number, &sums, |_| true));
        known.modified(7, blocks(0, 1), |_| None);
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
