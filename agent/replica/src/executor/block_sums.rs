//! The sums of blocks, and the knowledge of rot that they have shown.
//!
//! [`BlockSums`] decides by the sums whether a block is sound. It does not know which requests there are.

mod comparison;
mod known_rot;
mod lost_blocks;

use std::io;

use shorthorn_regions::WriteIntentLog;
use shorthorn_replica_core::KnownRot;
use shorthorn_ring::Ring;
use shorthorn_store::{BLOCKS_PER_SUM_PAGE, BlockSumsFile, LostBlocks, SUM_PAGE_SPAN_BYTES, sum_of_zeroes};
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;

pub(crate) use self::known_rot::Modification;
pub(crate) use self::lost_blocks::{NotRecorded, is_rot_of_head};
use super::block::{block_ranges, number_in_page, number_of};
use super::sum_file::SumFile;
use super::sum_job::SumJob;
use crate::limits::SLOTS;

/// The parts that store and compare the sums of blocks.
#[derive(Debug)]
pub(crate) struct BlockSums {
    pages: SumFile,
    /// Reads that wait for pages of sums, to be compared.
    waiting: WaitingSlots,
    /// Modifications that wait for pages of sums with rot.
    unkept: WaitingSlots,
    /// Sums of blocks beside rot; requests are distinguished by their slots.
    known: KnownRot<u16>,
    /// Blocks without any sound copy, as the directory records them.
    lost: LostBlocks,
    /// The sum of a block of zeroes.
    zero_sum: u32,
    /// The number of times that a request has found rot.
    rotten: u64,
    /// The number of times that a page with rot was not tracked: see [`KnownRot`].
    untracked: u64,
    are_pages_reported: bool,
}

impl BlockSums {
    /// Keeps sums in the file. Without one, no block is summed.
    pub fn new(file: Option<BlockSumsFile>) -> io::Result<BlockSums> {
        Ok(BlockSums {
            pages: SumFile::new(file)?,
            waiting: WaitingSlots::new(),
            unkept: WaitingSlots::new(),
            known: KnownRot::default(),
            lost: LostBlocks::new(),
            zero_sum: sum_of_zeroes(),
            rotten: 0,
            untracked: 0,
            are_pages_reported: false,
        })
    }

    /// Returns true if sums are kept.
    pub fn is_kept(&self) -> bool {
        self.pages.is_kept()
    }

    /// Returns the sum of a block of zeroes.
    pub fn zero_sum(&self) -> u32 {
        self.zero_sum
    }

    /// Returns the sum of the block, if it counts, and its page is in memory.
    pub fn kept_sum(&self, block: ByteRange, intent_log: &WriteIntentLog) -> Option<u32> {
        let page = self.pages.peek(block.offset() / SUM_PAGE_SPAN_BYTES);
        let counts = page.filter(|_| is_summed(block, intent_log));
        counts.and_then(|sums| sums.sum(number_in_page(block)))
    }

    /// Returns the blocks of `range` whose sums count, and these. Their page is in memory.
    fn kept_sums_of(&self, range: ByteRange, intent_log: &WriteIntentLog) -> Vec<(u64, u32)> {
        let sum_of = |block| Some((number_of(block), self.kept_sum(block, intent_log)?));
        block_ranges(range).filter_map(sum_of).collect()
    }

    /// Logs the first page without valid sums.
    pub fn report_unknown_page(&mut self, regions: u32, span: ByteRange) {
        if !std::mem::replace(&mut self.are_pages_reported, true) {
            tracing::warn!(regions, %span, "block checksums are damaged or torn by a crash, and \
             are recomputed; further ones are not logged");
        }
    }

    /// Adds the sums that the job has made to those of page `number`, which is at `at`.
    pub fn adopt(&mut self, at: usize, number: u64, job: &mut SumJob, intent_log: &WriteIntentLog) {
        for place in 0..BLOCKS_PER_SUM_PAGE {
            let block = number * BLOCKS_PER_SUM_PAGE as u64 + place as u64;
            let Some(sum) = job.sum(place) else { continue };
            if self.known.has(block) {
                job.add_known(block, sum);
            } else if !may_have_new_sum(block, intent_log) {
                continue; // the block may have rot that was not found yet
            }
            self.pages.sums_mut(at).set(place, self.known.sum_to_store(block, sum));
        }
    }

    /// Ends the series: its sums do not count any more, and lost blocks stay known. Returns false if no sums
    /// were kept.
    pub fn retire(&mut self) -> bool {
        if self.pages.is_kept() {
            self.known.forget_sums(self.lost.keys().copied());
        }
        let was_kept = self.pages.retire();
        if was_kept {
            self.known.forget_pages();
        }
        was_kept
    }

    /// Begins a series after the last one was retired.
    pub fn begin(&mut self, file: BlockSumsFile) {
        self.pages.begin(file);
    }
}

/// Pages: see [`SumFile`].
impl BlockSums {
    /// Returns the place of a page, if it is in memory; else it is being read, or will be asked for again.
    pub fn load_page(&mut self, number: u64, ring: &mut Ring) -> Option<usize> {
        self.pages.load(number, ring)
    }

    /// Begins an interrupted read of a page again. Returns false if the page is not needed any more.
    pub fn read_page_again(&mut self, at: usize, ring: &mut Ring) -> bool {
        self.pages.read_again(at, ring)
    }

    /// Ends the read of a page after `count` bytes. Returns its number, and whether it has valid sums; none
    /// if the page is not needed any more.
    pub fn page_loaded(&mut self, at: usize, count: usize) -> Option<(u64, bool)> {
        self.pages.loaded(at, count)
    }

    /// Begins the write of a page, durably. False if it is being written already, or is not in memory.
    pub fn write_page(&mut self, at: usize, number: u64, ring: &mut Ring) -> bool {
        self.pages.write(at, number, ring)
    }

    /// Ends the write of a page. After a failure it is read again before it is used. Returns false if it is
    /// not needed any more.
    pub fn page_written(&mut self, at: usize, well: bool) -> bool {
        self.pages.written(at, well)
    }

    /// Returns true if the ring reads and writes no page.
    pub fn is_idle(&self) -> bool {
        self.pages.is_idle()
    }

    /// Frees memory of pages that reads do not use any more.
    pub fn release_unused_pages(&mut self) {
        self.pages.release_unused();
    }
}

/// Requests that wait for pages.
impl BlockSums {
    /// Adds a request whose read data is compared when its pages of sums are here.
    pub fn compare_later(&mut self, slot: u16) {
        self.waiting.add(slot);
    }

    /// Takes the requests that wait to be compared. The list comes back by
    /// [`BlockSums::give_back_comparisons`].
    pub fn take_comparisons(&mut self) -> Vec<u16> {
        self.waiting.take()
    }

    pub fn give_back_comparisons(&mut self, retried: Vec<u16>) {
        self.waiting.give_back(retried);
    }

    /// Adds a modification that is started again when a page of sums is here.
    pub fn modify_later(&mut self, slot: u16) {
        self.unkept.add(slot);
    }

    /// Takes the modifications that wait. The list comes back by [`BlockSums::give_back_modifications`].
    pub fn take_modifications(&mut self) -> Vec<u16> {
        self.unkept.take()
    }

    pub fn give_back_modifications(&mut self, retried: Vec<u16>) {
        self.unkept.give_back(retried);
    }
}

/// Returns true if the sum of the block counts.
pub(super) fn is_summed(block: ByteRange, intent_log: &WriteIntentLog) -> bool {
    let mut regions = intent_log.regions().touched(block);
    !regions.is_empty() && regions.all(|region| intent_log.is_summed(region))
}

/// Returns true if `range` touches a region whose sums count.
pub(super) fn touches_summed(range: ByteRange, intent_log: &WriteIntentLog) -> bool {
    intent_log.regions().touched(range).any(|region| intent_log.is_summed(region))
}

fn may_have_new_sum(block: u64, intent_log: &WriteIntentLog) -> bool {
    let range = ByteRange::new(block * BLOCK_BYTES, BLOCK_BYTES);
    range.is_ok_and(|block| {
        intent_log.regions().touched(block).all(|region| intent_log.may_have_new_sums(region))
    })
}

/// Requests that wait for pages of sums.
#[derive(Debug)]
struct WaitingSlots {
    waiting: Vec<u16>,
    /// Requests that are examined again.
    retried: Vec<u16>,
}

impl WaitingSlots {
    fn new() -> WaitingSlots {
        WaitingSlots { waiting: Vec::with_capacity(SLOTS), retried: Vec::with_capacity(SLOTS) }
    }

    fn add(&mut self, slot: u16) {
        self.waiting.push(slot);
    }

    /// Takes all that wait, to examine them again. The list comes back by [`WaitingSlots::give_back`].
    fn take(&mut self) -> Vec<u16> {
        let empty = std::mem::take(&mut self.retried);
        std::mem::replace(&mut self.waiting, empty)
    }

    fn give_back(&mut self, retried: Vec<u16>) {
        debug_assert!(retried.is_empty());
        self.retried = retried;
    }
}

/// The parts, for tests of the executor that bring about a state.
#[cfg(test)]
impl BlockSums {
    pub fn pages(&mut self) -> &mut SumFile {
        &mut self.pages
    }

    pub fn known(&mut self) -> &mut KnownRot<u16> {
        &mut self.known
    }

    pub fn lost(&mut self) -> &mut LostBlocks {
        &mut self.lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_that_wait_again_are_kept_while_others_are_examined() {
        let mut waiting = WaitingSlots::new();
        waiting.add(3);
        waiting.add(4);
        let taken = waiting.take();
        assert_eq!(taken, [3, 4]);
        waiting.add(4);
        waiting.give_back(Vec::new());
        assert_eq!(waiting.take(), [4]);
    }
}
