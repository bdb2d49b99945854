//! Makes sums of blocks in the background while the volume is idle.
//!
//! A region is summed when the engine has said that it is clean: all members have flushed it since it was
//! last modified. Its blocks are read back, as a reader sees them, in a slot of their own. Then the page with
//! their sums is written, durably. Only then the region leaves the set of unsummed regions, unless something
//! has modified it meanwhile. The set, and the order in which it follows, are pure: see `shorthorn-regions`.

use std::time::{Duration, Instant};

use shorthorn_replica_core::is_final;
use shorthorn_ring::Ring;
use shorthorn_store::{SUM_PAGE_BYTES, SUM_PAGE_SPAN_BYTES};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, Errno, RegionSet};
use shorthorn_wire::{Header, Opcode};

use super::Executor;
use super::block::block_ranges;
use super::operation::{OperationResult, is_passing};
use super::requests::SUM_SLOT;
use super::sum_job::{SumRange, SummingStep};
use crate::error::ReplicaError;
use crate::limits::{
    SUM_FREE_BYTES_MIN, SUM_LOOK_INTERVAL, SUM_PIECE_BYTES, SUM_SEARCH_PAUSE, SUM_SPACE_INTERVAL,
};

impl Executor {
    /// Returns the time until [`Executor::sum`] has work, unless an event comes before.
    pub fn sums_pause(&self) -> Option<Duration> {
        let next_at = self.sum_schedule.next_at().filter(|_| !self.is_summing())?;
        Some(next_at.saturating_duration_since(Instant::now()))
    }

    /// Does a step of the sums that does not wait for the disk.
    pub fn sum(&mut self, ring: &mut Ring) {
        if !self.block_sums.is_kept() || self.state.failure().is_some() {
            return self.drop_job();
        }
        while let Some(job) = self.sum_job.range() {
            if job.is_void && !job.is_in_ring() {
                self.end_job(job);
                return;
            }
            let goes_on = match job.step {
                SummingStep::Next => self.read_next(job, ring),
                SummingStep::Read(outcome) => self.take_piece(job, outcome),
                SummingStep::Page { number } => self.write_sums(number, ring),
                SummingStep::Reading | SummingStep::Writing => false,
            };
            if !goes_on {
                return;
            }
        }
        if self.sum_schedule.next_at().is_some_and(|at| at <= Instant::now()) {
            self.begin_sums(ring);
            if self.is_summing() {
                self.sum(ring);
            }
        }
    }

    /// Drops the job, because the replica has failed, or sums are not kept any more.
    fn drop_job(&mut self) {
        if self.sum_job.range().is_some_and(|job| !job.is_in_ring()) {
            self.sum_job.end();
        }
        self.sum_schedule.stop();
    }

    /// Looks for regions to sum, and begins with them.
    fn begin_sums(&mut self, ring: &mut Ring) {
        if self.store.is_copying() {
            return self.sum_schedule.wait_until(Instant::now() + SUM_LOOK_INTERVAL);
        }
        if let Some(from) = self.sum_schedule.search_from() {
            return self.search(from);
        }
        let intent_log = self.state.intent_log();
        let cursor = self.sum_schedule.cursor();
        match intent_log.next_to_sum(cursor).or_else(|| intent_log.next_to_sum(0)) {
            Some(region) => self.begin_range(region),
            None => self.wait_for_regions(ring),
        }
    }

    /// Waits until there are regions to sum.
    fn wait_for_regions(&mut self, ring: &mut Ring) {
        match self.state.intent_log().wants_sums() {
            true => self.sum_schedule.wait_until(Instant::now() + SUM_LOOK_INTERVAL),
            false => self.sum_schedule.stop(),
        }
        if self.sum_schedule.take_new_sums() {
            // Sums made before count after the end of the process too.
            self.write_stale_pages(ring);
        }
    }

    /// Begins to sum `region`, and those behind it whose sums are on the same page.
    fn begin_range(&mut self, region: u32) {
        let free_bytes = self.store.free_bytes();
        if free_bytes.is_some_and(|free| free < SUM_FREE_BYTES_MIN) {
            return self.sum_schedule.wait_until(Instant::now() + SUM_SPACE_INTERVAL);
        }
        let regions = self.state.intent_log().regions();
        let bytes = regions.range(region);
        // The range has as many regions as share a page, or one that has several pages.
        let page_end = (bytes.offset() / SUM_PAGE_SPAN_BYTES + 1) * SUM_PAGE_SPAN_BYTES;
        let end_bytes = bytes.end().max(page_end.min(regions.size_bytes()));
        let unit = ByteRange::new(bytes.offset(), end_bytes - bytes.offset()).unwrap_or(bytes);
        let summed = regions.touched(unit);
        self.sum_schedule.advance(summed.end);
        // The engine has said that nothing is in flight there; it costs little to look.
        if self.io.is_modified(unit) || !self.state.intent_log_mut().begin_sums(summed) {
            return self.sum_schedule.pause(unit.length(), true, Instant::now());
        }
        self.sum_job.begin(unit);
    }

    /// Searches the regions that hold data, which are unknown at the start.
    fn search(&mut self, from: u32) {
        let regions = self.state.intent_log().regions();
        match self.store.chain().allocated(regions, from, &RegionSet::empty(regions.count())) {
            Ok((runs, next)) => {
                for (first, count) in runs {
                    self.state.intent_log_mut().want_sums(first..first + count);
                }
                self.sum_schedule.searched_to(next);
                self.sum_schedule.wait_until(Instant::now() + SUM_SEARCH_PAUSE);
            }
            Err(error) => {
                tracing::warn!(
                    %error,
                    "cannot determine the regions that hold data: blocks get checksums when they are written"
                );
                self.sum_schedule.searched_to(None);
            }
        }
    }

    /// Reads the next regions of the page, or starts the step after the last one.
    fn read_next(&mut self, job: SumRange, ring: &mut Ring) -> bool {
        let page_end = ((job.at_bytes / SUM_PAGE_SPAN_BYTES + 1) * SUM_PAGE_SPAN_BYTES).min(job.end_bytes);
        let Some(piece) = self.next_sum_piece(job.at_bytes, page_end) else {
            let number = (page_end - 1) / SUM_PAGE_SPAN_BYTES;
            self.sum_job.store(number, page_end);
            return true;
        };
        self.sum_job.read(piece);
        let length_bytes = u32::try_from(piece.length()).unwrap_or(0);
        self.io.assign(SUM_SLOT, Header::request(Opcode::Read, 0, piece.offset(), length_bytes));
        if let Err(errno) = self.start_read(SUM_SLOT, piece, ring) {
            self.sum_read(Err(errno));
        }
        true
    }

    /// Returns the next blocks before `end_bytes` whose sums are wanted. Regions of which no layer has
    /// anything need none.
    fn next_sum_piece(&mut self, from_bytes: u64, end_bytes: u64) -> Option<ByteRange> {
        let regions = self.state.intent_log().regions();
        let mut at = from_bytes;
        while at < end_bytes {
            let range = ByteRange::new(at, end_bytes - at).ok()?;
            let region = regions.touched(range).start;
            let part_end = regions.range(region).end().min(end_bytes).min(at + SUM_PIECE_BYTES);
            let part = ByteRange::new(at, part_end - at).ok()?;
            if self.state.intent_log().is_being_summed(region) {
                let is_whole = part == regions.range(region);
                if !is_whole || self.holds_anything(part) {
                    return Some(part);
                }
                self.state.intent_log_mut().need_no_sums(region..region + 1);
            }
            at = part_end;
        }
        None
    }

    /// Returns true if a layer has any of `range`, or has lost some. The sums of lost blocks have to become
    /// durable too.
    fn holds_anything(&mut self, range: ByteRange) -> bool {
        let blocks = range.offset() / BLOCK_BYTES..range.end().div_ceil(BLOCK_BYTES);
        if self.block_sums.known_in(blocks).next().is_some() {
            return true;
        }
        // If the file system does not say it, the range is read.
        !self.read_planner.is_hole(range, &mut self.store).unwrap_or(false)
    }

    /// Handles the end of the read of a piece.
    pub(super) fn sum_read(&mut self, outcome: OperationResult) {
        self.sum_job.set_step(SummingStep::Read(outcome));
    }

    /// Makes the sums of a piece that was read.
    fn take_piece(&mut self, job: SumRange, outcome: OperationResult) -> bool {
        if job.is_void {
            self.state.intent_log_mut().end_sums(false);
            self.end_job(job);
            return false;
        }
        let blocks = self.work(SUM_SLOT).blocks;
        if outcome.is_err() {
            // Unreadable blocks have no sums; a scrub finds them.
            let intent_log = self.state.intent_log_mut();
            let regions = intent_log.regions().touched(blocks);
            intent_log.leave_out_of_sums(&regions);
            self.sum_job.skip_unreadable();
            return true;
        }
        for block in block_ranges(blocks) {
            self.sum_job.add(block, self.io.sum_of(SUM_SLOT, block));
        }
        self.sum_job.set_step(SummingStep::Next);
        true
    }

    /// Writes the page, as soon as its sums of other regions are loaded.
    fn write_sums(&mut self, number: u64, ring: &mut Ring) -> bool {
        let Some(at) = self.sum_page(number, ring) else { return false };
        self.block_sums.adopt(at, number, &mut self.sum_job, self.state.intent_log());
        if !self.block_sums.write_page(at, number, ring) {
            return false;
        }
        self.sum_job.clear();
        self.sum_job.set_step(SummingStep::Writing);
        false
    }

    pub(super) fn on_sums_written(&mut self, at: usize, result: Result<usize, Errno>, ring: &mut Ring) {
        let well = result == Ok(SUM_PAGE_BYTES);
        let is_wanted = self.block_sums.page_written(at, well);
        if let Err(errno) = result
            && is_final(errno)
            && !is_passing(errno)
        {
            // The page was to be durable: the reported error may be about other data.
            self.fail(&format!("sums of blocks could not be stored: {errno}"));
        }
        if let Some(job) = self.sum_job.range().filter(|job| job.step == SummingStep::Writing) {
            self.sums_are_stored(job, well, is_wanted);
        }
        // Modifications come first: comparisons would take the entries of their pages.
        self.resume_keeping(ring);
        self.resume_comparing(ring);
    }

    /// Continues the range after a page of its sums was written, well or with an error.
    fn sums_are_stored(&mut self, job: SumRange, well: bool, is_wanted: bool) {
        if !well || !is_wanted || job.is_void {
            self.state.intent_log_mut().end_sums(false);
            self.end_job(job);
            if !well {
                self.sum_schedule.wait_until(Instant::now() + SUM_SPACE_INTERVAL);
            }
        } else if job.at_bytes < job.end_bytes {
            self.sum_job.set_step(SummingStep::Next);
        } else {
            self.state.intent_log_mut().end_sums(true);
            self.free_known();
            self.sum_schedule.record_summed();
            self.end_job(job);
        }
    }

    /// Forgets known blocks that were read back sound: their durable sums count.
    fn free_known(&mut self) {
        let mut read_back = self.sum_job.take_known();
        for (block, found) in read_back.drain(..) {
            let range = ByteRange::new(block * BLOCK_BYTES, BLOCK_BYTES);
            if range.is_ok_and(|range| self.is_summed(range)) {
                self.block_sums.summed(block, found);
            }
        }
        self.sum_job.give_back_known(read_back);
    }

    fn end_job(&mut self, job: SumRange) {
        self.sum_job.end();
        if job.is_unreadable {
            // A disk may need seconds for each block that it cannot read.
            return self.sum_schedule.wait_until(Instant::now() + SUM_SPACE_INTERVAL);
        }
        self.sum_schedule.pause(job.read_bytes, self.io.is_busy(), Instant::now());
    }

    /// Returns a page of sums, if it is here; else it is being read, or will be asked for again.
    pub(super) fn sum_page(&mut self, number: u64, ring: &mut Ring) -> Option<usize> {
        self.block_sums.load_page(number, ring)
    }

    pub(super) fn on_sums_read(&mut self, at: usize, result: Result<usize, Errno>, ring: &mut Ring) {
        // The page is not damaged: the rot that it shows would be forgotten.
        if result.is_err_and(is_passing) && self.block_sums.read_page_again(at, ring) {
            return;
        }
        if let Some((number, false)) = self.block_sums.page_loaded(at, result.unwrap_or(0)) {
            self.sums_are_unknown(number);
        }
        // Modifications come first: comparisons would take the entries of their pages.
        self.resume_keeping(ring);
        self.resume_comparing(ring);
    }

    /// Handles a page without valid sums: a crash has torn it, it is damaged, or it was never written. Its
    /// regions are summed again.
    fn sums_are_unknown(&mut self, number: u64) {
        let regions = self.state.intent_log().regions();
        let start = number * SUM_PAGE_SPAN_BYTES;
        let length = SUM_PAGE_SPAN_BYTES.min(regions.size_bytes().saturating_sub(start));
        let Ok(span) = ByteRange::new(start, length) else { return };
        let mut count = 0;
        for region in regions.touched(span) {
            if self.state.intent_log().is_summed(region) {
                self.state.intent_log_mut().unsum(region..region + 1);
                count += 1;
            }
        }
        if count > 0 {
            self.sum_schedule.wake_at(Instant::now);
            self.block_sums.report_unknown_page(count, span);
        }
    }

    /// Invalidates the kept sums: the volume is about to be, or was, changed beside the requests. Then
    /// starts over.
    ///
    /// # Errors
    /// The sums can be neither invalidated nor deleted. The replica then serves nothing any more.
    pub(super) fn renew_sums(&mut self) -> Result<(), ReplicaError> {
        if !self.block_sums.retire() {
            return Ok(());
        }
        self.void_job();
        let regions = self.state.intent_log().regions();
        self.state.intent_log_mut().unsum(0..regions.count());
        match self.store.open_block_sums() {
            Ok(file) => {
                self.block_sums.begin(file);
                self.sum_schedule.begin_again(Instant::now());
                Ok(())
            }
            Err(error) => {
                tracing::warn!(%error, "block checksums are off: rot on the disk is not detected until the \
                 replica restarts");
                self.state.intent_log_mut().forget_unsummed();
                let forgotten = self.store.forget_block_sums();
                if let Err(error) = &forgotten {
                    self.fail(&format!("sums of blocks that do not count could not be forgotten: {error}"));
                }
                Ok(forgotten?)
            }
        }
    }

    /// Returns true if regions are being read and summed.
    pub(super) fn is_summing(&self) -> bool {
        self.sum_job.range().is_some()
    }

    /// Drops the running sum, because its data has changed.
    pub(super) fn void_job(&mut self) {
        self.state.intent_log_mut().end_sums(false);
        self.sum_job.void();
    }

    /// Schedules the sums of regions instead of starting them at once. A repair comes in several requests,
    /// and each needs the pages of sets of regions.
    pub(super) fn sum_soon(&mut self) {
        if self.block_sums.is_kept() {
            self.sum_schedule.wait_until(Instant::now() + SUM_LOOK_INTERVAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{MarkAction, MarkRegions, RegionsOf};

    use super::*;
    use crate::executor::kind;
    use crate::executor::sum_schedule::SumSchedule;
    use crate::executor::tests::new_store;

    const KEPT: u32 = 70;
    const FRESH: u32 = 71;
    const PLACE: usize = 3;

    fn end_operation(executor: &mut Executor, ring: &mut Ring) {
        let mut completions = Vec::new();
        ring.wait(None, &mut completions).unwrap();
        completions.drain(..).for_each(|completion| executor.on_completion(completion, ring));
    }

    /// The sum of rot that was not found yet could count after a crash.
    #[test]
    fn a_read_back_stores_no_sum_of_an_unknown_block_also_if_a_write_overtakes_it() {
        for (is_repaired, is_overtaken, stored) in
            [(false, false, FRESH), (false, true, KEPT), (true, false, KEPT), (true, true, KEPT)]
        {
            let temp = tempfile::tempdir().unwrap();
            let (mut store, owner, loaded) = new_store(&temp.path().join("replica"));
            let file = store.open_block_sums().unwrap();
            let mut executor = Executor::new(store, owner, loaded).unwrap();
            executor.block_sums.begin(file);
            let mut ring = Ring::new(16).unwrap();
            assert_eq!(executor.sum_page(0, &mut ring), None);
            end_operation(&mut executor, &mut ring);
            let at = executor.sum_page(0, &mut ring).unwrap();
            executor.block_sums.pages().sums_mut(at).set(PLACE, KEPT);
            let intent_log = executor.state.intent_log_mut();
            let region = intent_log.regions().range(0);
            intent_log.keep_unsummed(None);
            intent_log.want_sums(0..1);
            if is_repaired {
                assert!(intent_log.begin_sums(0..1));
                intent_log.end_sums(true);
                intent_log.mark_dirty_for_repair(region);
                let (of, action) = (RegionsOf::Intent, MarkAction::Clear);
                let clear = MarkRegions { of, action, runs: vec![(0, 1)], stamp: 0, size_bytes: 0 };
                intent_log.mark(&clear).unwrap();
            }
            assert!(intent_log.begin_sums(0..1));
            let block = ByteRange::new(PLACE as u64 * BLOCK_BYTES, BLOCK_BYTES).unwrap();
            executor.sum_job.begin(region);
            executor.sum_job.add(block, FRESH);
            executor.sum_job.store(0, region.end());
            if is_overtaken {
                executor.state.intent_log_mut().mark_dirty(block);
            }
            assert!(!executor.write_sums(0, &mut ring), "the page is being written");
            let found = executor.block_sums.pages().peek(0).unwrap().sum(PLACE);
            assert_eq!(found, Some(stored), "repaired: {is_repaired}, overtaken: {is_overtaken}");
            end_operation(&mut executor, &mut ring);
        }
    }

    /// A disk may need seconds for each attempt.
    #[test]
    fn a_region_that_cannot_be_read_is_tried_again_later_and_others_get_sums() {
        let temp = tempfile::tempdir().unwrap();
        let (mut store, owner, loaded) = new_store(&temp.path().join("replica"));
        store.write_at(&vec![7; 128 << 10], 0, true).unwrap();
        let file = store.open_block_sums().unwrap();
        let mut executor = Executor::new(store, owner, loaded).unwrap();
        executor.block_sums.begin(file);
        executor.sum_schedule = SumSchedule::new(true, 32 << 20, Instant::now());
        executor.sum_schedule.searched_to(None);
        let intent_log = executor.state.intent_log_mut();
        intent_log.keep_unsummed(None);
        intent_log.want_sums(0..2);
        let (mut ring, mut completions, mut reads) = (Ring::new(16).unwrap(), Vec::new(), 0);
        executor.sum(&mut ring);
        while executor.is_summing() {
            ring.wait(None, &mut completions).unwrap();
            for mut completion in completions.drain(..) {
                if completion.token.kind == kind::READ {
                    reads += 1;
                    completion.result = if reads == 1 { -libc::EIO } else { completion.result };
                }
                executor.on_completion(completion, &mut ring);
            }
            executor.sum(&mut ring);
        }
        let intent_log = executor.state.intent_log();
        assert_eq!((reads, [0, 1].map(|region| intent_log.is_summed(region))), (2, [false, true]));
        assert_eq!(intent_log.next_to_sum(0), Some(0));
        assert!(executor.sums_pause().unwrap() > SUM_SPACE_INTERVAL / 2);
    }
}
