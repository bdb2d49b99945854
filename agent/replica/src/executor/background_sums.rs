//! The work on sums of blocks in the background: the regions that are summed next, when, and how far.
//!
//! A region is summed when the engine has said that it is clean: all members have flushed it since it was
//! last modified. Its blocks are read back, as a reader sees them, in a slot of their own. Then the page with
//! their sums is written, durably. Only then the region leaves the set of unsummed regions, unless something
//! has modified it meanwhile. The set, and the order in which it follows, are pure: see `shorthorn-regions`.

use std::time::{Duration, Instant};

use shorthorn_regions::WriteIntentLog;
use shorthorn_ring::Ring;
use shorthorn_store::{SUM_PAGE_SPAN_BYTES, Store};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, RegionSet};

use super::block::block_ranges;
use super::block_sums::{BlockSums, is_summed};
use super::operation::OperationResult;
use super::request_io::RequestIo;
use super::requests::SUM_SLOT;
use super::sum_job::{SumJob, SumRange, SummingStep};
use super::sum_schedule::SumSchedule;
use crate::limits::{
    SUM_FREE_BYTES_MIN, SUM_LOOK_INTERVAL, SUM_PIECE_BYTES, SUM_SEARCH_PAUSE, SUM_SPACE_INTERVAL,
};

/// See the module.
#[derive(Debug)]
pub(crate) struct BackgroundSums {
    schedule: SumSchedule,
    job: SumJob,
}

/// The time of the work.
impl BackgroundSums {
    /// Creates the work of a process; no part of it has begun.
    pub fn new(schedule: SumSchedule) -> BackgroundSums {
        BackgroundSums { schedule, job: SumJob::new() }
    }

    /// Returns the time until work is due, unless an event comes before.
    pub fn pause(&self) -> Option<Duration> {
        let next_at = self.schedule.next_at().filter(|_| !self.is_running())?;
        Some(next_at.saturating_duration_since(Instant::now()))
    }

    /// Returns true if new work is due now.
    pub fn is_due(&self) -> bool {
        self.schedule.next_at().is_some_and(|at| at <= Instant::now())
    }

    /// Schedules a look at a region that is being modified, unless work is due before. The clock is not read
    /// otherwise.
    pub fn follow(&mut self) {
        self.schedule.wake_at(|| Instant::now() + SUM_LOOK_INTERVAL);
    }

    /// Schedules the sums of regions instead of starting them at once. A repair comes in several requests,
    /// and each needs the pages of sets of regions.
    pub fn sum_soon(&mut self) {
        self.schedule.wait_until(Instant::now() + SUM_LOOK_INTERVAL);
    }

    /// Starts over, with a search of all regions.
    pub fn begin_again(&mut self) {
        self.schedule.begin_again(Instant::now());
    }

    /// Prepares for regions with other numbers: the volume is about to grow.
    pub fn expand(&mut self, intent_log: &mut WriteIntentLog) {
        self.void(intent_log);
        self.schedule.search_again();
    }

    /// Stops, because the replica has failed, or sums are not kept any more.
    pub fn stop(&mut self) {
        if self.job.range().is_some_and(|job| !job.is_in_ring()) {
            self.job.end();
        }
        self.schedule.stop();
    }

    /// Handles a page without valid sums: a crash has torn it, it is damaged, or it was never written. Its
    /// regions are summed again.
    pub fn page_is_unknown(
        &mut self,
        number: u64,
        block_sums: &mut BlockSums,
        intent_log: &mut WriteIntentLog,
    ) {
        let regions = intent_log.regions();
        let start = number * SUM_PAGE_SPAN_BYTES;
        let length = SUM_PAGE_SPAN_BYTES.min(regions.size_bytes().saturating_sub(start));
        let Ok(span) = ByteRange::new(start, length) else { return };
        let mut count = 0;
        for region in regions.touched(span) {
            if intent_log.is_summed(region) {
                intent_log.unsum(region..region + 1);
                count += 1;
            }
        }
        if count > 0 {
            self.schedule.wake_at(Instant::now);
            block_sums.report_unknown_page(count, span);
        }
    }
}

/// The choice of regions.
impl BackgroundSums {
    /// Looks for regions to sum, and begins with them. Returns true if the set of unsummed regions has to be
    /// written. That is so if nothing is left to be summed now, and regions were summed since the last time.
    pub fn begin(&mut self, intent_log: &mut WriteIntentLog, store: &Store, io: &RequestIo) -> bool {
        if store.is_copying() {
            self.sum_soon();
            return false;
        }
        if let Some(from) = self.schedule.search_from() {
            self.search(from, intent_log, store);
            return false;
        }
        let cursor = self.schedule.cursor();
        match intent_log.next_to_sum(cursor).or_else(|| intent_log.next_to_sum(0)) {
            Some(region) => {
                self.begin_range(region, intent_log, store, io);
                false
            }
            None => self.wait_for_regions(intent_log),
        }
    }

    /// Waits until there are regions to sum. Returns true if the set has to be written.
    fn wait_for_regions(&mut self, intent_log: &WriteIntentLog) -> bool {
        match intent_log.wants_sums() {
            true => self.sum_soon(),
            false => self.schedule.stop(),
        }
        self.schedule.take_new_sums()
    }

    /// Begins to sum `region`, and those behind it whose sums are on the same page.
    fn begin_range(&mut self, region: u32, intent_log: &mut WriteIntentLog, store: &Store, io: &RequestIo) {
        let free_bytes = store.free_bytes();
        if free_bytes.is_some_and(|free| free < SUM_FREE_BYTES_MIN) {
            return self.schedule.wait_until(Instant::now() + SUM_SPACE_INTERVAL);
        }
        let regions = intent_log.regions();
        let bytes = regions.range(region);
        // The range has as many regions as share a page, or one that has several pages.
        let page_end = (bytes.offset() / SUM_PAGE_SPAN_BYTES + 1) * SUM_PAGE_SPAN_BYTES;
        let end_bytes = bytes.end().max(page_end.min(regions.size_bytes()));
        let unit = ByteRange::new(bytes.offset(), end_bytes - bytes.offset()).unwrap_or(bytes);
        let summed = regions.touched(unit);
        self.schedule.advance(summed.end);
        // The engine has said that nothing is in flight there; it costs little to look.
        if io.is_modified(unit) || !intent_log.begin_sums(summed) {
            return self.schedule.pause(unit.length(), true, Instant::now());
        }
        self.job.begin(unit);
    }

    /// Searches the regions that hold data, which are unknown at the start.
    fn search(&mut self, from: u32, intent_log: &mut WriteIntentLog, store: &Store) {
        let regions = intent_log.regions();
        match store.chain().allocated(regions, from, &RegionSet::empty(regions.count())) {
            Ok((runs, next)) => {
                for (first, count) in runs {
                    intent_log.want_sums(first..first + count);
                }
                self.schedule.searched_to(next);
                self.schedule.wait_until(Instant::now() + SUM_SEARCH_PAUSE);
            }
            Err(error) => {
                tracing::warn!(
                    %error,
                    "cannot determine the regions that hold data: blocks get checksums when they are written"
                );
                self.schedule.searched_to(None);
            }
        }
    }
}

/// The range that is being summed.
impl BackgroundSums {
    /// Returns true if regions are being read and summed.
    pub fn is_running(&self) -> bool {
        self.job.range().is_some()
    }

    /// Returns the range that is being summed, if any.
    pub fn range(&self) -> Option<SumRange> {
        self.job.range()
    }

    /// Returns true without a range, or if the range is not needed any more.
    pub fn is_void(&self) -> bool {
        self.job.is_void()
    }

    /// Drops the range as soon as its operation has ended, because its data has changed.
    pub fn void(&mut self, intent_log: &mut WriteIntentLog) {
        intent_log.end_sums(false);
        self.job.void();
    }

    /// Returns the next blocks of the range, which are to be read now. None after the last ones of a page:
    /// then its sums are to be written. Regions of which no layer holds anything need no sums.
    pub fn next_piece(
        &mut self,
        job: SumRange,
        intent_log: &mut WriteIntentLog,
        holds_anything: impl FnMut(ByteRange) -> bool,
    ) -> Option<ByteRange> {
        let page_end = ((job.at_bytes / SUM_PAGE_SPAN_BYTES + 1) * SUM_PAGE_SPAN_BYTES).min(job.end_bytes);
        let piece = wanted_piece(job.at_bytes, page_end, intent_log, holds_anything);
        match piece {
            Some(piece) => self.job.read(piece),
            None => self.job.store((page_end - 1) / SUM_PAGE_SPAN_BYTES, page_end),
        }
        piece
    }

    /// Handles the end of the read of a piece.
    pub fn read_ended(&mut self, outcome: OperationResult) {
        self.job.set_step(SummingStep::Read(outcome));
    }

    /// Makes the sums of a piece that was read. Unreadable blocks have no sums; a scrub finds them.
    pub fn take_piece(&mut self, outcome: OperationResult, intent_log: &mut WriteIntentLog, io: &RequestIo) {
        let blocks = io.work(SUM_SLOT).blocks;
        if outcome.is_err() {
            let regions = intent_log.regions().touched(blocks);
            intent_log.leave_out_of_sums(&regions);
            return self.job.skip_unreadable();
        }
        for block in block_ranges(blocks) {
            self.job.add(block, io.sum_of(SUM_SLOT, block));
        }
        self.job.set_step(SummingStep::Next);
    }

    /// Begins to write page `number`, if its sums of other regions are loaded. Otherwise it is tried again.
    pub fn write_page(
        &mut self,
        number: u64,
        block_sums: &mut BlockSums,
        intent_log: &WriteIntentLog,
        ring: &mut Ring,
    ) {
        let Some(at) = block_sums.load_page(number, ring) else { return };
        block_sums.adopt(at, number, &mut self.job, intent_log);
        if block_sums.write_page(at, number, ring) {
            self.job.clear();
            self.job.set_step(SummingStep::Writing);
        }
    }

    /// Continues the range after a page of its sums was written, well or with an error.
    pub fn page_written(
        &mut self,
        well: bool,
        is_wanted: bool,
        block_sums: &mut BlockSums,
        intent_log: &mut WriteIntentLog,
        is_busy: bool,
    ) {
        let Some(job) = self.job.range().filter(|job| job.step == SummingStep::Writing) else { return };
        if !well || !is_wanted || job.is_void {
            intent_log.end_sums(false);
            self.end(job, is_busy);
            if !well {
                self.schedule.wait_until(Instant::now() + SUM_SPACE_INTERVAL);
            }
        } else if job.at_bytes < job.end_bytes {
            self.job.set_step(SummingStep::Next);
        } else {
            intent_log.end_sums(true);
            self.free_known(block_sums, intent_log);
            self.schedule.record_summed();
            self.end(job, is_busy);
        }
    }

    /// Forgets known blocks that were read back sound: their durable sums count.
    fn free_known(&mut self, block_sums: &mut BlockSums, intent_log: &WriteIntentLog) {
        let mut read_back = self.job.take_known();
        for (block, found) in read_back.drain(..) {
            let range = ByteRange::new(block * BLOCK_BYTES, BLOCK_BYTES);
            if range.is_ok_and(|range| is_summed(range, intent_log)) {
                block_sums.summed(block, found);
            }
        }
        self.job.give_back_known(read_back);
    }

    /// Ends the range. The next one follows after a pause, which is longer while requests are in flight.
    pub fn end(&mut self, job: SumRange, is_busy: bool) {
        self.job.end();
        if job.is_unreadable {
            // A disk may need seconds for each block that it cannot read.
            return self.schedule.wait_until(Instant::now() + SUM_SPACE_INTERVAL);
        }
        self.schedule.pause(job.read_bytes, is_busy, Instant::now());
    }
}

/// Returns the next blocks before `end_bytes` whose sums are wanted.
fn wanted_piece(
    from_bytes: u64,
    end_bytes: u64,
    intent_log: &mut WriteIntentLog,
    mut holds_anything: impl FnMut(ByteRange) -> bool,
) -> Option<ByteRange> {
    let regions = intent_log.regions();
    let mut at = from_bytes;
    while at < end_bytes {
        let range = ByteRange::new(at, end_bytes - at).ok()?;
        let region = regions.touched(range).start;
        let part_end = regions.range(region).end().min(end_bytes).min(at + SUM_PIECE_BYTES);
        let part = ByteRange::new(at, part_end - at).ok()?;
        if intent_log.is_being_summed(region) {
            let is_whole = part == regions.range(region);
            if !is_whole || holds_anything(part) {
                return Some(part);
            }
            intent_log.need_no_sums(region..region + 1);
        }
        at = part_end;
    }
    None
}

/// The schedule, for tests of the executor that bring about a state.
#[cfg(test)]
impl BackgroundSums {
    pub fn schedule(&mut self) -> &mut SumSchedule {
        &mut self.schedule
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_store::SUM_PAGE_BYTES;
    use shorthorn_types::{MarkAction, MarkRegions, RegionsOf};

    use super::*;
    use crate::executor::tests::new_store;

    const KEPT: u32 = 70;
    const FRESH: u32 = 71;
    const PLACE: usize = 3;

    fn new_work() -> BackgroundSums {
        let mut schedule = SumSchedule::new(true, Some(32 << 20), Instant::now());
        schedule.searched_to(None);
        BackgroundSums::new(schedule)
    }

    /// Waits for an operation on a page of sums. Returns the place of the page.
    fn wait(ring: &mut Ring) -> usize {
        let mut completions = Vec::new();
        ring.wait(None, &mut completions).unwrap();
        usize::from(completions[0].token.index)
    }

    /// The sum of rot that was not found yet could count after a crash.
    #[test]
    fn a_read_back_stores_no_sum_of_an_unknown_block_also_if_a_write_overtakes_it() {
        for (is_repaired, is_overtaken, stored) in
            [(false, false, FRESH), (false, true, KEPT), (true, false, KEPT), (true, true, KEPT)]
        {
            let temp = tempfile::tempdir().unwrap();
            let (mut store, _, mut loaded) = new_store(&temp.path().join("replica"));
            let mut sums = BlockSums::new(Some(store.open_block_sums().unwrap())).unwrap();
            let (mut work, mut ring) = (new_work(), Ring::new(16).unwrap());
            assert_eq!(sums.load_page(0, &mut ring), None);
            let at = wait(&mut ring);
            sums.page_loaded(at, SUM_PAGE_BYTES);
            sums.pages().sums_mut(at).set(PLACE, KEPT);
            let intent_log = loaded.state.intent_log_mut();
            let region = intent_log.regions().range(0);
            intent_log.keep_unsummed(None);
            intent_log.want_sums(0..1);
            if is_repaired {
                assert!(intent_log.begin_sums(0..1));
                intent_log.end_sums(true);
                intent_log.mark_dirty_for_repair(region);
                let (of, action) = (RegionsOf::Intent, MarkAction::Clear);
                let clear = MarkRegions { of, action, runs: vec![(0, 1)], stamp: 0, size_bytes: None };
                intent_log.mark(&clear).unwrap();
            }
            assert!(intent_log.begin_sums(0..1));
            let block = ByteRange::new(PLACE as u64 * BLOCK_BYTES, BLOCK_BYTES).unwrap();
            work.job.begin(region);
            work.job.add(block, FRESH);
            work.job.store(0, region.end());
            if is_overtaken {
                intent_log.mark_dirty(block);
            }
            work.write_page(0, &mut sums, intent_log, &mut ring);
            assert_eq!(work.range().map(|range| range.step), Some(SummingStep::Writing));
            let found = sums.pages().peek(0).unwrap().sum(PLACE);
            assert_eq!(found, Some(stored), "repaired: {is_repaired}, overtaken: {is_overtaken}");
            let is_wanted = sums.page_written(wait(&mut ring), true);
            work.page_written(true, is_wanted, &mut sums, intent_log, false);
            assert!(is_wanted && !work.is_running());
        }
    }

    #[test]
    fn a_region_without_data_needs_no_sums() {
        let temp = tempfile::tempdir().unwrap();
        let (store, _, mut loaded) = new_store(&temp.path().join("replica"));
        let (mut work, io) = (new_work(), RequestIo::new().unwrap());
        let intent_log = loaded.state.intent_log_mut();
        intent_log.keep_unsummed(None);
        let second = intent_log.regions().range(1);
        intent_log.want_sums(0..2);
        assert!(!work.begin(intent_log, &store, &io), "nothing was summed");
        let job = work.range().unwrap();
        assert_eq!(work.next_piece(job, intent_log, |range| range == second), Some(second));
        assert!(!intent_log.is_being_summed(0) && intent_log.is_being_summed(1));
        work.read_ended(Ok(()));
        let job = work.range().unwrap();
        assert_eq!(work.next_piece(job, intent_log, |_| true), None);
        assert_eq!(work.range().map(|range| range.step), Some(SummingStep::Page { number: 0 }));
    }

    #[test]
    fn a_void_range_ends_and_its_regions_are_summed_later() {
        let temp = tempfile::tempdir().unwrap();
        let (store, _, mut loaded) = new_store(&temp.path().join("replica"));
        let (mut work, io) = (new_work(), RequestIo::new().unwrap());
        let intent_log = loaded.state.intent_log_mut();
        intent_log.keep_unsummed(None);
        intent_log.want_sums(0..1);
        assert!(work.is_due() && work.is_void(), "nothing is begun");
        work.begin(intent_log, &store, &io);
        assert!(work.is_running() && !work.is_void() && work.pause().is_none());
        work.void(intent_log);
        let job = work.range().unwrap();
        assert!(job.is_void && !job.is_in_ring());
        work.end(job, false);
        assert!(!work.is_running() && work.pause().is_some());
        assert_eq!(intent_log.next_to_sum(0), Some(0));
        work.stop();
        assert_eq!(work.pause(), None);
    }
}
