//! Makes sums of blocks in the background while the volume is idle, and compares read data with them.
//!
//! A region is summed when the engine has said that it is clean: all members have flushed it since it was
//! last modified. Its blocks are read back, as a reader sees them, in a slot of their own. Then the page with
//! their sums is written, durably. Only then the region leaves the set of unsummed regions, unless something
//! has modified it meanwhile. The set, and the order in which it follows, are pure: see `shorthorn-regions`.
//!
//! A check compares whole blocks of regions that have sums, after the data was read. It never makes a sound
//! block look rotten. Blocks without certain sums, because a page of sums is torn or the region was modified
//! meanwhile, are not compared.

use std::time::{Duration, Instant};

use shorthorn_replica_core::KnownRot;
use shorthorn_ring::{Ring, Token};
use shorthorn_store::{
    BLOCKS_PER_SUM_PAGE, BlockSource, BlockSumsFile, FileIndex, LostBlocks, SUM_PAGE_BYTES,
    SUM_PAGE_SPAN_BYTES, SUM_UNKNOWN, SumPage, block_sum, sum_of_zeroes,
};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, Errno, RegionSet};
use shorthorn_wire::{Flags, Header, Opcode};

use super::layers::layer_of;
use super::sum_pages::{Found, SumPages};
use super::{Executor, Outcome, SOURCE_DISK, Work, kind};
use crate::error::ReplicaError;
use crate::limits::{
    REPORTED_ROTTEN_MAX, SLOTS, SUM_BUSY_SHARE, SUM_FREE_BYTES_MIN, SUM_LOOK_INTERVAL, SUM_PIECE_BYTES,
    SUM_SEARCH_PAUSE, SUM_SPACE_INTERVAL,
};

/// The slot in which regions are read to be summed. No request has it.
#[allow(clippy::cast_possible_truncation)] // there are a few hundred
pub(super) const SUM_SLOT: u16 = SLOTS as u16;

/// See the module.
#[derive(Debug)]
pub(crate) struct Summer {
    /// None: no sums are kept.
    file: Option<BlockSumsFile>,
    /// Files of series that are over, which the ring may still have.
    retired: Vec<BlockSumsFile>,
    pages: SumPages,
    bytes_per_s: u64,
    /// The region from which the search for regions with data continues.
    search_from: Option<u32>,
    /// The region from which the next region to sum is searched.
    cursor: u32,
    /// The time of the next possible work; none to wait for a modification.
    next_at: Option<Instant>,
    job: Option<Job>,
    /// The sums that the job has made.
    fresh: SumPage,
    /// Sums of blocks beside rot; requests are distinguished by their slots.
    pub(super) known: KnownRot<u16>,
    /// Blocks without any sound copy, as the directory records them.
    pub(super) lost: LostBlocks,
    /// Known blocks that the job has read, and their sums. If these become durable, their places are free.
    read_back: Vec<(u64, u32)>,
    /// The sum of a block of zeroes.
    zero_sum: u32,
    /// The operations in the ring, those of the job and of pages.
    pub(super) in_flight: usize,
    /// Requests whose data is read, and which wait for pages of sums.
    waiting: Vec<u16>,
    /// Waiting checks that are examined again.
    retried: Vec<u16>,
    /// Requests that are to be compared.
    checks: usize,
    /// Times that a request has met blocks that are not as they were stored.
    rotten: u64,
    /// Times that a page with rot has found no place.
    homeless: u64,
    are_pages_reported: bool,
    /// Regions were summed since the set was written last.
    has_news: bool,
}

/// Regions that are being summed.
#[derive(Clone, Copy, Debug)]
struct Job {
    /// The start of the remaining part, in bytes.
    at_bytes: u64,
    end_bytes: u64,
    /// The number of bytes read.
    read_bytes: u64,
    step: SummingStep,
    /// True if the result is not needed any more.
    is_void: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SummingStep {
    /// The next piece is to be read.
    Next,
    /// A piece is being read.
    Reading,
    /// The read has ended, well or with an error.
    Read(Outcome),
    /// The sums of a page are made: that has to be here.
    Page { number: u64 },
    /// The sums are being written.
    Writing,
}

impl Summer {
    /// Creates a summer with this rate per second; 0, or without a file: it does nothing.
    pub fn new(file: Option<BlockSumsFile>, bytes_per_s: u64) -> std::io::Result<Summer> {
        let is_on = file.is_some();
        Ok(Summer {
            file,
            retired: Vec::new(),
            pages: SumPages::new()?,
            bytes_per_s: bytes_per_s.max(1),
            search_from: is_on.then_some(0),
            cursor: 0,
            next_at: is_on.then(Instant::now),
            job: None,
            fresh: SumPage::unknown(),
            known: KnownRot::default(),
            lost: LostBlocks::new(),
            read_back: Vec::new(),
            zero_sum: sum_of_zeroes(),
            in_flight: 0,
            waiting: Vec::with_capacity(SLOTS),
            retried: Vec::with_capacity(SLOTS),
            checks: 0,
            rotten: 0,
            homeless: 0,
            are_pages_reported: false,
            has_news: false,
        })
    }

    fn fd(&self) -> Option<std::os::fd::RawFd> {
        self.file.as_ref().map(BlockSumsFile::raw_fd)
    }

    fn series(&self) -> u64 {
        self.file.as_ref().map_or(0, BlockSumsFile::series)
    }

    /// Pauses after so much was read.
    fn pause(&mut self, bytes: u64, is_busy: bool) {
        let rate = if is_busy { (self.bytes_per_s / SUM_BUSY_SHARE).max(1) } else { self.bytes_per_s };
        let pause = Duration::from_micros(bytes.saturating_mul(1_000_000) / rate);
        self.next_at = Some(Instant::now() + pause.min(SUM_SPACE_INTERVAL));
    }
}

/// Returns true if the request wants its data compared with the sums.
fn asks_for_check(header: &Header) -> bool {
    match header.opcode {
        Opcode::Verify | Opcode::CheckLayer => true,
        Opcode::Read | Opcode::ReadLayer => header.flags.has(Flags::CHECKED),
        _ => false,
    }
}

fn is_modification(opcode: Opcode) -> bool {
    matches!(opcode, Opcode::Write | Opcode::Discard | Opcode::WriteZeroes)
}

impl Executor {
    /// Returns the time until [`Executor::sum`] has work, unless an event comes before.
    pub fn sums_pause(&self) -> Option<Duration> {
        let next_at = self.summer.next_at.filter(|_| self.summer.job.is_none())?;
        Some(next_at.saturating_duration_since(Instant::now()))
    }

    /// Does a step of the sums that does not wait for the disk.
    pub fn sum(&mut self, ring: &mut Ring) {
        if self.summer.file.is_none() || self.state.failure().is_some() {
            return self.drop_job();
        }
        while let Some(job) = self.summer.job {
            if job.is_void && !matches!(job.step, SummingStep::Reading | SummingStep::Writing) {
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
        if self.summer.next_at.is_some_and(|at| at <= Instant::now()) {
            self.begin_sums(ring);
            if self.summer.job.is_some() {
                self.sum(ring);
            }
        }
    }

    /// Drops the job, because the replica has failed, or sums are not kept any more.
    fn drop_job(&mut self) {
        if self.summer.job.is_some_and(|job| !matches!(job.step, SummingStep::Reading | SummingStep::Writing))
        {
            self.summer.job = None;
        }
        self.summer.next_at = None;
    }

    /// Looks for regions to sum, and begins with them.
    fn begin_sums(&mut self, ring: &mut Ring) {
        if self.store.is_copying() {
            return self.summer.next_at = Some(Instant::now() + SUM_LOOK_INTERVAL);
        }
        if let Some(from) = self.summer.search_from {
            return self.search(from);
        }
        let intent_log = self.state.intent_log();
        let next = intent_log.next_to_sum(self.summer.cursor).or_else(|| intent_log.next_to_sum(0));
        let Some(region) = next else {
            self.summer.next_at = intent_log.wants_sums().then(|| Instant::now() + SUM_LOOK_INTERVAL);
            if std::mem::take(&mut self.summer.has_news) {
                // Sums made before count after the end of the process too.
                self.write_stale_pages(ring);
            }
            return;
        };
        let free_bytes = self.store.free_bytes();
        if free_bytes.is_some_and(|free| free < SUM_FREE_BYTES_MIN) {
            return self.summer.next_at = Some(Instant::now() + SUM_SPACE_INTERVAL);
        }
        let regions = self.state.intent_log().regions();
        let bytes = regions.range(region);
        // The run has as many regions as share a page, or one that has several pages.
        let page_end = (bytes.offset() / SUM_PAGE_SPAN_BYTES + 1) * SUM_PAGE_SPAN_BYTES;
        let end_bytes = bytes.end().max(page_end.min(regions.size_bytes()));
        let unit = ByteRange::new(bytes.offset(), end_bytes - bytes.offset()).unwrap_or(bytes);
        let run = regions.touched(unit);
        self.summer.cursor = run.end;
        // The engine has said that nothing is in flight there; it costs little to look.
        let is_modified =
            self.works.iter().any(|work| is_modification(work.header.opcode) && work.blocks.overlaps(unit));
        if is_modified || !self.state.intent_log_mut().begin_sums(run) {
            return self.summer.pause(unit.length(), true);
        }
        self.summer.fresh.clear();
        self.summer.read_back.clear();
        let (at_bytes, end_bytes) = (unit.offset(), unit.end());
        self.summer.job =
            Some(Job { at_bytes, end_bytes, read_bytes: 0, step: SummingStep::Next, is_void: false });
    }

    /// Searches the regions that hold data, which are unknown at the start.
    fn search(&mut self, from: u32) {
        let regions = self.state.intent_log().regions();
        match self.store.allocated(regions, from, &RegionSet::empty(regions.count())) {
            Ok((runs, next)) => {
                for (first, count) in runs {
                    self.state.intent_log_mut().want_sums(first..first + count);
                }
                self.summer.search_from = next;
                self.summer.next_at = Some(Instant::now() + SUM_SEARCH_PAUSE);
            }
            Err(error) => {
                tracing::warn!(%error, "which regions hold data could not be found out: blocks are summed after they are written");
                self.summer.search_from = None;
            }
        }
    }

    pub(super) fn is_busy(&self) -> bool {
        self.in_flight > self.summer.in_flight
    }

    fn set_step(&mut self, step: SummingStep) {
        if let Some(job) = &mut self.summer.job {
            job.step = step;
        }
    }

    /// Reads the next regions of the page, or starts the step after the last one.
    fn read_next(&mut self, job: Job, ring: &mut Ring) -> bool {
        let page_end = ((job.at_bytes / SUM_PAGE_SPAN_BYTES + 1) * SUM_PAGE_SPAN_BYTES).min(job.end_bytes);
        let Some(piece) = self.next_sum_piece(job.at_bytes, page_end) else {
            let number = (page_end - 1) / SUM_PAGE_SPAN_BYTES;
            if let Some(job) = &mut self.summer.job {
                job.at_bytes = page_end;
            }
            self.set_step(SummingStep::Page { number });
            return true;
        };
        if let Some(job) = &mut self.summer.job {
            job.at_bytes = piece.end();
            job.read_bytes += piece.length();
        }
        self.set_step(SummingStep::Reading);
        let length_bytes = u32::try_from(piece.length()).unwrap_or(0);
        self.assign(SUM_SLOT, Header::request(Opcode::Read, 0, piece.offset(), length_bytes));
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

    fn holds_anything(&mut self, range: ByteRange) -> bool {
        let mut segments = std::mem::take(&mut self.segments);
        segments.clear();
        let planned = self.store.plan_read(range, &mut segments);
        let holds = planned.is_err() || segments.iter().any(|segment| segment.source != BlockSource::Zero);
        self.segments = segments;
        holds
    }

    /// Handles the end of the read of a piece.
    pub(super) fn sum_read(&mut self, outcome: Outcome) {
        self.set_step(SummingStep::Read(outcome));
    }

    /// Makes the sums of a piece that was read.
    fn take_piece(&mut self, job: Job, outcome: Outcome) -> bool {
        if job.is_void || outcome.is_err() {
            // Unreadable blocks have no sums; a scrub finds them.
            self.state.intent_log_mut().end_sums(false);
            self.end_job(job);
            return false;
        }
        let blocks = self.work(SUM_SLOT).blocks;
        for block in block_ranges(blocks) {
            let sum = block_sum(self.buffers.part(SUM_SLOT, blocks.offset(), block).crc32c());
            self.summer.fresh.set(number_in_page(block), sum);
        }
        self.set_step(SummingStep::Next);
        true
    }

    /// Writes the page, as soon as its sums of other regions are loaded.
    fn write_sums(&mut self, number: u64, ring: &mut Ring) -> bool {
        let Some(at) = self.sum_page(number, ring) else { return false };
        let series = self.summer.series();
        let Some(fd) = self.summer.fd() else { return false };
        let Summer { pages, fresh, known, read_back, .. } = &mut self.summer;
        for place in 0..BLOCKS_PER_SUM_PAGE {
            let sum = fresh.sum(place);
            if sum != SUM_UNKNOWN {
                let block = number * BLOCKS_PER_SUM_PAGE as u64 + place as u64;
                if known.has(block) {
                    read_back.push((block, sum));
                }
                pages.sums_mut(at).set(place, known.sum_to_store(block, sum));
            }
        }
        if !pages.begin_write(at, series) {
            return false;
        }
        fresh.clear();
        let token = sums_token(kind::SUMS_WRITE, at);
        ring.write(fd, pages.buf(at), number * SUM_PAGE_BYTES as u64, true, token);
        self.summer.in_flight += 1;
        self.in_flight += 1;
        self.set_step(SummingStep::Writing);
        false
    }

    pub(super) fn on_sums_written(&mut self, at: usize, result: Result<usize, Errno>, ring: &mut Ring) {
        self.summer.in_flight -= 1;
        self.drop_retired();
        let well = result == Ok(SUM_PAGE_BYTES);
        let is_wanted = self.summer.pages.written(at, well);
        if let Err(errno) = result
            && shorthorn_replica_core::is_final(errno)
            && !super::is_passing(errno)
        {
            // The page was to be durable: the reported error may be about other data.
            self.fail(&format!("sums of blocks could not be stored: {errno}"));
        }
        if let Some(job) = self.summer.job.filter(|job| job.step == SummingStep::Writing) {
            if !well || !is_wanted || job.is_void {
                self.state.intent_log_mut().end_sums(false);
                self.end_job(job);
                if !well {
                    self.summer.next_at = Some(Instant::now() + SUM_SPACE_INTERVAL);
                }
            } else if job.at_bytes < job.end_bytes {
                self.set_step(SummingStep::Next);
            } else {
                self.state.intent_log_mut().end_sums(true);
                self.free_known();
                self.summer.has_news = true;
                self.end_job(job);
            }
        }
        self.go_on_comparing(ring);
    }

    /// Frees the places of known blocks that were read back sound: their durable sums count.
    fn free_known(&mut self) {
        let mut read_back = std::mem::take(&mut self.summer.read_back);
        for (block, found) in read_back.drain(..) {
            let range = ByteRange::new(block * BLOCK_BYTES, BLOCK_BYTES);
            if range.is_ok_and(|range| self.is_summed(range)) {
                self.summer.known.summed(block, found);
            }
        }
        self.summer.read_back = read_back;
    }

    fn end_job(&mut self, job: Job) {
        self.summer.job = None;
        let is_busy = self.is_busy();
        self.summer.pause(job.read_bytes, is_busy);
    }

    /// Returns a page of sums, if it is here; else it is being read, or will be asked for again.
    fn sum_page(&mut self, number: u64, ring: &mut Ring) -> Option<usize> {
        let fd = self.summer.fd()?;
        match self.summer.pages.find(number) {
            Found::Here(at) => Some(at),
            Found::Loading | Found::Full => None,
            Found::Load(at) => {
                let token = sums_token(kind::SUMS_READ, at);
                ring.read(fd, self.summer.pages.buf(at), number * SUM_PAGE_BYTES as u64, token);
                self.summer.in_flight += 1;
                self.in_flight += 1;
                None
            }
        }
    }

    pub(super) fn on_sums_read(&mut self, at: usize, result: Result<usize, Errno>, ring: &mut Ring) {
        self.summer.in_flight -= 1;
        self.drop_retired();
        let series = self.summer.series();
        if let Some((number, false)) = self.summer.pages.loaded(at, series, result.unwrap_or(0)) {
            self.sums_are_unknown(number);
        }
        self.go_on_comparing(ring);
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
            self.summer.next_at.get_or_insert_with(Instant::now);
            if !std::mem::replace(&mut self.summer.are_pages_reported, true) {
                tracing::warn!(regions = count, %span, "block checksums are damaged or torn by a crash, and \
                 are recomputed; further ones are not logged");
            }
        }
    }

    /// Invalidates the kept sums: the volume is about to be, or was, changed beside the requests. Begins
    /// anew.
    ///
    /// # Errors
    /// They can be neither begun anew nor forgotten: nothing is served any more.
    pub(super) fn renew_sums(&mut self) -> Result<(), ReplicaError> {
        let Some(file) = self.summer.file.take() else { return Ok(()) };
        self.summer.retired.push(file);
        self.drop_retired();
        self.summer.pages.forget();
        self.summer.known.forget();
        self.summer.know_lost();
        self.void_job();
        let regions = self.state.intent_log().regions();
        self.state.intent_log_mut().unsum(0..regions.count());
        match self.store.open_block_sums() {
            Ok(file) => {
                self.summer.file = Some(file);
                (self.summer.search_from, self.summer.next_at) = (Some(0), Some(Instant::now()));
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
        self.summer.job.is_some()
    }

    /// Returns true if the region being summed is not needed any more.
    pub(super) fn is_job_void(&self) -> bool {
        self.summer.job.is_none_or(|job| job.is_void)
    }

    /// Drops the running sum, because its data has changed.
    pub(super) fn void_job(&mut self) {
        self.state.intent_log_mut().end_sums(false);
        if let Some(job) = &mut self.summer.job {
            job.is_void = true;
        }
    }

    /// Schedules the sums of regions instead of starting them at once. A repair comes in several requests,
    /// and each needs the pages of sets of regions.
    pub(super) fn sum_soon(&mut self) {
        if self.summer.file.is_some() {
            self.summer.next_at = Some(Instant::now() + SUM_LOOK_INTERVAL);
        }
    }

    /// Regions are about to have other numbers.
    pub(super) fn search_again(&mut self) {
        self.summer.search_from = self.summer.search_from.map(|_| 0);
    }

    fn drop_retired(&mut self) {
        if self.summer.in_flight == 0 {
            self.summer.retired.clear();
        }
    }

    /// Prepares the modification of `range` by the request in the slot: reads of it are not compared any
    /// more, and it has to be summed again.
    pub(super) fn sums_follow(&mut self, slot: u16, range: ByteRange) {
        if self.summer.file.is_some() && self.summer.next_at.is_none() {
            self.summer.next_at = Some(Instant::now() + SUM_LOOK_INTERVAL);
        }
        let is_discard = self.work(slot).header.opcode == Opcode::Discard;
        // A discard leaves blocks that it covers in part as they are.
        let blocks = if is_discard { range.shrunk_to_blocks() } else { range.grown_to_blocks() };
        let knows_any = !self.summer.known.is_empty();
        for block in block_ranges(blocks).filter(|_| knows_any) {
            if self.summer.known.has(number_of(block)) {
                let after = self.sum_after(slot, range, block);
                self.summer.known.modified(slot, number_of(block), after);
            }
        }
        if self.summer.checks > 0 {
            // A layer is read beside writes: its blocks are compared as a reader sees them at that moment.
            let is_layer = |work: &Work| matches!(work.header.opcode, Opcode::ReadLayer | Opcode::CheckLayer);
            let reads = self
                .works
                .iter_mut()
                .filter(|work| work.wants_check && !is_layer(work) && work.blocks.overlaps(range));
            for work in reads {
                work.wants_check = false;
                self.summer.checks -= 1;
            }
        }
    }

    /// Records that the request in the slot is about to write a block that it has merged with the former
    /// data: the sums before and after.
    pub(super) fn sum_merged(&mut self, slot: u16, block: ByteRange, sums: (u32, u32)) {
        let Ok(range) = self.work(slot).header.range() else { return };
        self.summer.known.merged(slot, range, number_of(block), sums);
    }

    /// Returns true if the request in the slot has to report the data that it merges.
    pub(super) fn sums_await(&self, slot: u16) -> bool {
        self.summer.known.awaits(slot)
    }

    /// The request in the slot has ended.
    pub(super) fn sums_followed(&mut self, slot: u16, outcome: Outcome) {
        self.summer.known.ended(slot, outcome.is_ok());
    }

    /// The sum of the data that `block` gets from the request in the slot, if that covers the whole block. A
    /// repair writes blocks of zeroes as such.
    fn sum_after(&self, slot: u16, range: ByteRange, block: ByteRange) -> Option<u32> {
        let work = self.work(slot);
        let is_whole = block.offset() >= range.offset() && block.end() <= range.end();
        is_whole.then(|| match work.header.opcode {
            Opcode::Write => {
                let sum = block_sum(self.buffers.part(slot, work.blocks.offset(), block).crc32c());
                self.summer.sum_given(number_of(block), sum)
            }
            _ => self.summer.zero_sum,
        })
    }

    /// Begins the check of the request in the slot, which begins to read.
    pub(super) fn begin_check(&mut self, slot: u16) {
        let knows_any = self.summer.file.is_some() || !self.summer.known.is_empty();
        let wants = knows_any && asks_for_check(&self.work(slot).header);
        self.work_mut(slot).wants_check = wants;
        self.summer.checks += usize::from(wants);
    }

    /// Handles the data of the slot: it finishes, after a comparison if that was requested.
    pub(super) fn was_read(&mut self, slot: u16, ring: &mut Ring) {
        if !self.has_compared(slot) {
            self.load_sums_for(slot, ring);
            self.summer.waiting.push(slot);
        }
    }

    /// Finishes the request if it is not to be compared, or all its pages of sums are here.
    fn has_compared(&mut self, slot: u16) -> bool {
        let rotten = match self.work(slot).wants_check {
            true if !self.has_sums_for(slot) => return false,
            true => self.rotten_block(slot),
            false => None,
        };
        self.end_check(slot);
        if let Some(block) = rotten {
            self.know_rot(block);
            self.report_rotten(block);
        }
        self.finish(slot, rotten.map_or(Ok(()), |_| Err(Errno::ROTTEN)));
        true
    }

    /// Ends the check of the slot, if any.
    pub(super) fn end_check(&mut self, slot: u16) {
        if std::mem::take(&mut self.work_mut(slot).wants_check) {
            self.summer.checks -= 1;
        }
    }

    /// Returns the pages with the sums of the blocks in the slot.
    fn pages_for(&self, slot: u16) -> impl Iterator<Item = u64> + use<'_> {
        let blocks = self.work(slot).blocks;
        let intent_log = self.state.intent_log();
        let pages = blocks.offset() / SUM_PAGE_SPAN_BYTES..blocks.end().div_ceil(SUM_PAGE_SPAN_BYTES);
        pages.filter(move |page| {
            let start = (page * SUM_PAGE_SPAN_BYTES).max(blocks.offset());
            let end = ((page + 1) * SUM_PAGE_SPAN_BYTES).min(blocks.end());
            let part = ByteRange::new(start, end - start).unwrap_or(ByteRange::EMPTY);
            intent_log.regions().touched(part).any(|region| intent_log.is_summed(region))
        })
    }

    fn has_sums_for(&self, slot: u16) -> bool {
        self.pages_for(slot).all(|page| self.summer.pages.peek(page).is_some())
    }

    fn load_sums_for(&mut self, slot: u16, ring: &mut Ring) {
        // A request touches no more than two.
        let mut pages = [None; 2];
        pages.iter_mut().zip(self.pages_for(slot)).for_each(|(place, page)| *place = Some(page));
        for page in pages.into_iter().flatten() {
            self.sum_page(page, ring);
        }
    }

    /// Returns the first block in the slot that differs from its sum, if any. Sums describe the data that a
    /// reader sees: a layer's blocks below others have none.
    fn rotten_block(&mut self, slot: u16) -> Option<ByteRange> {
        let Work { header, blocks, checked, .. } = *self.work(slot);
        let layer = match header.opcode {
            Opcode::CheckLayer => Some(checked?.file()),
            Opcode::ReadLayer => Some(layer_of(&header).ok().and_then(|layer| self.store.layer_file(layer))?),
            _ => None,
        };
        block_ranges(blocks).find(|block| {
            self.is_rotten(slot, blocks, *block) && layer.is_none_or(|layer| self.is_seen_in(layer, *block))
        })
    }

    /// Returns true if a reader sees this file's data in the block.
    fn is_seen_in(&mut self, file: FileIndex, block: ByteRange) -> bool {
        let mut segments = std::mem::take(&mut self.segments);
        segments.clear();
        let is_planned = self.store.plan_read(block, &mut segments).is_ok();
        let is_seen = segments.iter().all(|segment| segment.source == BlockSource::File(file));
        self.segments = segments;
        is_planned && is_seen
    }

    fn is_rotten(&self, slot: u16, blocks: ByteRange, block: ByteRange) -> bool {
        let found = || block_sum(self.buffers.part(slot, blocks.offset(), block).crc32c());
        if self.summer.known.has(number_of(block)) {
            return self.summer.known.is_rotten(number_of(block), found()).unwrap_or(false);
        }
        let kept = self.kept_sum(block);
        kept != SUM_UNKNOWN && kept != found()
    }

    fn kept_sum(&self, block: ByteRange) -> u32 {
        let page = self.summer.pages.peek(block.offset() / SUM_PAGE_SPAN_BYTES);
        let counts = page.filter(|_| self.is_summed(block));
        counts.map_or(SUM_UNKNOWN, |sums| sums.sum(number_in_page(block)))
    }

    /// Returns true if the sum of the block counts.
    fn is_summed(&self, block: ByteRange) -> bool {
        let intent_log = self.state.intent_log();
        let mut regions = intent_log.regions().touched(block);
        !regions.is_empty() && regions.all(|region| intent_log.is_summed(region))
    }

    /// Remembers the rot that the sums of a region show. The repair of a block removes all sums of its
    /// region.
    fn know_rot(&mut self, block: ByteRange) {
        let start = block.offset() / SUM_PAGE_SPAN_BYTES * SUM_PAGE_SPAN_BYTES;
        let Ok(page) = ByteRange::new(start, SUM_PAGE_SPAN_BYTES) else { return };
        let (number, sums) = (start / SUM_PAGE_SPAN_BYTES, self.kept_sums_of(page));
        let was_kept = self.summer.known.may_modify(number);
        if !self.summer.known.keep(number, sums) && was_kept {
            self.report_too_much_rot(page);
        }
    }

    /// Returns the blocks of `range` whose sums count, and these. Their page is in memory.
    fn kept_sums_of(&self, range: ByteRange) -> Vec<(u64, u32)> {
        let sums = block_ranges(range).map(|block| (number_of(block), self.kept_sum(block)));
        sums.filter(|(_, sum)| *sum != SUM_UNKNOWN).collect()
    }

    fn report_too_much_rot(&mut self, page: ByteRange) {
        self.summer.homeless += 1;
        if self.summer.homeless <= REPORTED_ROTTEN_MAX {
            tracing::error!(%page, "more blocks hold rot than can be tracked: modifications here fail, because they would make \
                 the rest of the rot look sound; repair the volume by a scrub, or replace this replica");
        }
    }

    /// Returns an error if a modification of `range` would make other rot look sound, because nothing but the
    /// page of sums knows of it. If the sums that it ends find places by now, all is well.
    pub(super) fn check_rot_is_kept(&mut self, range: ByteRange, ring: &mut Ring) -> Outcome {
        if self.summer.homeless == 0 {
            return Ok(());
        }
        let intent_log = self.state.intent_log();
        let regions = intent_log.regions();
        if !regions.touched(range).any(|region| intent_log.is_summed(region)) {
            return Ok(()); // they have ended already
        }
        let ends = regions.bytes(regions.touched(range));
        for number in ends.offset() / SUM_PAGE_SPAN_BYTES..ends.end().div_ceil(SUM_PAGE_SPAN_BYTES) {
            if self.summer.known.may_modify(number) {
                continue;
            }
            // If the page is not in memory, it is by the time of a later attempt.
            if self.sum_page(number, ring).is_none() {
                return Err(Errno::IO);
            }
            let start = ends.offset().max(number * SUM_PAGE_SPAN_BYTES);
            let end = ends.end().min((number + 1) * SUM_PAGE_SPAN_BYTES);
            let part = ByteRange::new(start, end.saturating_sub(start)).unwrap_or(ByteRange::EMPTY);
            let sums = self.kept_sums_of(part);
            if !self.summer.known.keep_some(sums) {
                return Err(Errno::IO);
            }
        }
        Ok(())
    }

    fn report_rotten(&mut self, block: ByteRange) {
        self.summer.rotten += 1;
        if self.summer.rotten <= REPORTED_ROTTEN_MAX {
            tracing::error!(%block, "a block is not as it was stored: the disk has lost or changed it");
        }
        if self.summer.rotten == REPORTED_ROTTEN_MAX {
            tracing::error!("more blocks that are not as they were stored are answered but not logged");
        }
    }

    /// Continues comparisons after a page was loaded or a place has become free. Complete ones come first,
    /// because others would take the places of their pages.
    fn go_on_comparing(&mut self, ring: &mut Ring) {
        let mut retried = std::mem::take(&mut self.summer.retried);
        std::mem::swap(&mut retried, &mut self.summer.waiting);
        retried.retain(|slot| !self.has_compared(*slot));
        for slot in retried.drain(..) {
            self.load_sums_for(slot, ring);
            self.summer.waiting.push(slot);
        }
        self.summer.retried = retried;
    }
}

fn sums_token(kind: u8, at: usize) -> Token {
    Token { source: SOURCE_DISK, kind, index: u16::try_from(at).unwrap_or(u16::MAX), tag: 0 }
}

/// The number of a block in the volume.
pub(super) fn number_of(block: ByteRange) -> u64 {
    block.offset() / BLOCK_BYTES
}

/// The place of a block in its page.
fn number_in_page(block: ByteRange) -> usize {
    let number = block.offset() / BLOCK_BYTES % BLOCKS_PER_SUM_PAGE as u64;
    usize::try_from(number).unwrap_or(usize::MAX)
}

pub(super) fn block_ranges(blocks: ByteRange) -> impl Iterator<Item = ByteRange> {
    (blocks.offset()..blocks.end())
        .step_by(super::buffers::distance(BLOCK_BYTES))
        .filter_map(|at| ByteRange::new(at, BLOCK_BYTES).ok())
}
