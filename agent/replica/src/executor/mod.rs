//! Executes requests on the replica directory: knows files and buffers, but no connection.
//!
//! A request lives in a slot. The caller [assigns](Executor::assign) the slot, puts the data of a write into
//! its [payload](Executor::payload), [starts](Executor::start) it, passes on the completions that carry
//! [`SOURCE_DISK`], and takes the [finished](Executor::take_finished) ones. The code neither allocates nor
//! logs unless an error occurs.

mod buffers;
mod data;
mod flush;
mod layers;
mod lost;
mod marks;
mod piece;
mod steps;
mod sum_pages;
mod summer;
mod sums;
mod zeroes;
mod zeroing;

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Instant;

use shorthorn_replica_core::{FAILURES_FORGIVEN_AFTER, Failure, ReplicaState, is_final};
use shorthorn_ring::{Completion, IoBuf, Ring, Token};
use shorthorn_store::{AllocatedRuns, CopyLayer, FileIndex, ReadSegment, Store, StoreError};
use shorthorn_types::limits::MAX_VOLUME_BYTES;
use shorthorn_types::{ByteRange, Errno, Generation, Regions};
use shorthorn_wire::{Flags, Header, Opcode};

use self::buffers::Buffers;
use self::flush::{Flush, Flushes};
pub(crate) use self::marks::Marks;
use self::piece::Piece;
use self::steps::Shelf;
use self::summer::SUM_SLOT;
pub(crate) use self::summer::Summer;
use self::sums::{Checked, Sums};
use self::zeroes::ZeroJobs;
use crate::error::ReplicaError;
use crate::limits::{FREE_SPACE_PERIOD, REQUEST_BLOCKS_MAX, SLOTS};
use crate::state::{Owner, holds_data};

/// The source of the tokens of everything that this module asks of the kernel.
pub(crate) const SOURCE_DISK: u8 = 1;

/// The purpose of an operation: the `kind` of its token.
mod kind {
    /// Blocks of a read; the tag is a piece.
    pub const READ: u8 = 0;
    /// A block that a write changes in part; the tag is a piece.
    pub const EDGE: u8 = 1;
    /// Blocks of a write; the tag is a piece.
    pub const WRITE: u8 = 2;
    /// The fdatasync of all flushes.
    pub const SYNC: u8 = 3;
    /// The current step of a discard or write of zeroes; the tag is the job.
    pub const ZERO_STEP: u8 = 4;
    /// The block that such a step changes in part is read; the tag is the job.
    pub const ZERO_EDGE: u8 = 5;
    /// A page of a set of regions; the index is not a slot but the number of the write.
    pub const PAGE: u8 = 6;
    /// Blocks of a layer that is being copied; the tag is a piece.
    pub const LAYER: u8 = 7;
    /// A page of sums of blocks is read; the index is its place in memory.
    pub const SUMS_READ: u8 = 8;
    /// The sums are written.
    pub const SUMS_WRITE: u8 = 9;
}

/// The result of a request.
pub(crate) type Outcome = Result<(), Errno>;

/// See the module.
#[derive(Debug)]
pub(crate) struct Executor {
    store: Store,
    owner: Owner,
    state: ReplicaState,
    buffers: Buffers,
    works: Box<[Work]>,
    segments: Vec<ReadSegment>,
    flushes: Flushes,
    /// Flushes that have just ended.
    covered: Vec<u16>,
    zero_jobs: ZeroJobs,
    marks: Marks,
    sums: Sums,
    summer: Summer,
    finished: Vec<(u16, Outcome)>,
    /// Operations on the layers that the kernel has.
    in_flight: usize,
    /// Failed reads so far; only the first is logged.
    read_failures: u64,
    /// The time at which the process has begun to serve.
    since: Instant,
    /// The time of the last query for the disk's free space, and its result in MiB.
    free: Option<(Instant, u32)>,
}

/// A request in execution.
#[derive(Clone, Copy, Debug)]
struct Work {
    header: Header,
    /// The range of the request, grown to whole blocks.
    blocks: ByteRange,
    /// Operations in the kernel, for reads and writes.
    pending: u16,
    failure: Option<Errno>,
    /// The piece of a layer that is being checked, if the request is a check.
    checked: Option<Checked>,
    /// True if the read data has to be compared with the sums of its blocks.
    wants_check: bool,
}

const NOTHING: Work = Work {
    header: Header::request(Opcode::Ping, 0, 0, 0),
    blocks: match ByteRange::new(0, 0) {
        Ok(range) => range,
        Err(_) => panic!("an empty range is one"),
    },
    pending: 0,
    failure: None,
    checked: None,
    wants_check: false,
};

impl Executor {
    /// Executes on `store`, which belongs to `owner`, and keeps `state` beside the data; `marks` has the
    /// files of its sets, and `summer` that of the sums of blocks.
    ///
    /// # Errors
    /// No memory is available for the buffers.
    pub fn new(
        store: Store,
        owner: Owner,
        state: ReplicaState,
        marks: Marks,
        summer: Summer,
    ) -> io::Result<Executor> {
        Ok(Executor {
            store,
            owner,
            state,
            buffers: Buffers::new()?,
            works: vec![NOTHING; SLOTS + 1].into(),
            segments: Vec::with_capacity(REQUEST_BLOCKS_MAX),
            flushes: Flushes::new(SLOTS),
            covered: Vec::with_capacity(SLOTS),
            zero_jobs: ZeroJobs::new(),
            marks,
            sums: Sums::default(),
            summer,
            finished: Vec::with_capacity(SLOTS),
            in_flight: 0,
            read_failures: 0,
            since: Instant::now(),
            free: None,
        })
    }

    /// Assigns `slot` to the request of `header`.
    pub fn assign(&mut self, slot: u16, header: Header) {
        let blocks = header.range().map_or(NOTHING.blocks, ByteRange::grown_to_blocks);
        self.works[usize::from(slot)] = Work { header, blocks, ..NOTHING };
        if reads_data(&header) || header.data_bytes() > 0 {
            self.buffers.touch(slot, blocks);
        }
    }

    /// Returns the header that the slot was assigned for.
    pub fn header(&self, slot: u16) -> Header {
        self.work(slot).header
    }

    /// Returns the buffer of the request's data, or of the text of a control frame.
    pub fn payload(&self, slot: u16) -> IoBuf {
        let Work { header, blocks, .. } = self.work(slot);
        // Decoded headers have a range, see assign.
        let range = header.range().unwrap_or(*blocks);
        self.buffers.part(slot, blocks.offset(), range)
    }

    /// Frees the slot.
    pub fn free(&mut self, slot: u16) {
        self.end_check(slot);
        self.works[usize::from(slot)] = NOTHING;
        self.buffers.free(slot);
    }

    /// Releases memory: no slot is in use, and none was for a while.
    pub fn release_memory(&mut self) {
        self.sums.release();
        self.buffers.release_all();
        if !self.is_summing() {
            self.buffers.release_one(SUM_SLOT);
        }
    }

    /// Begins to execute the request in `slot`. It comes out of [`Executor::take_finished`], maybe at once.
    pub fn start(&mut self, slot: u16, ring: &mut Ring) {
        let started = if self.state.failure().is_some() { Err(Errno::IO) } else { self.begin(slot, ring) };
        if let Err(errno) = started {
            self.finish(slot, Err(errno));
        }
    }

    fn begin(&mut self, slot: u16, ring: &mut Ring) -> Outcome {
        let header = self.work(slot).header;
        match header.opcode {
            Opcode::Flush => self.flush(slot, ring),
            Opcode::Read | Opcode::Verify => {
                let range = self.checked(&header)?;
                self.begin_check(slot);
                self.start_read(slot, range, ring)?;
            }
            Opcode::Write | Opcode::Discard | Opcode::WriteZeroes => {
                let range = self.checked(&header)?;
                self.check_rot_is_kept(range, ring)?;
                // The regions are recorded first: otherwise a crash would leave unknown differences between
                // the replicas.
                if self.admit(slot, range) {
                    // Not before: a request that is not admitted modifies nothing.
                    self.sums_follow(slot, range);
                    self.modify(slot, range, ring)?;
                }
            }
            Opcode::ReadLayer => self.start_read_layer(slot, self.checked(&header)?, ring)?,
            Opcode::WriteLayer => self.start_write_layer(slot, self.checked(&header)?, ring)?,
            Opcode::Ping => self.finish(slot, Ok(())),
            _ => return Err(Errno::INVALID),
        }
        Ok(())
    }

    fn modify(&mut self, slot: u16, range: ByteRange, ring: &mut Ring) -> Outcome {
        if self.work(slot).header.opcode == Opcode::Write {
            return self.start_write(slot, range, ring);
        }
        self.start_zeroing(slot, range, ring);
        Ok(())
    }

    fn checked(&self, header: &Header) -> Result<ByteRange, Errno> {
        let range = header.range().map_err(|_| Errno::INVALID)?;
        range.check(self.store.size_bytes()).map_err(|_| Errno::INVALID)
    }

    /// Takes a completion that carries [`SOURCE_DISK`].
    pub fn on_completion(&mut self, completion: Completion, ring: &mut Ring) {
        let Token { kind, index: slot, tag, .. } = completion.token;
        let count = completion.count().map_err(|error| Errno::of(&error));
        if kind == kind::PAGE {
            return self.on_page(slot, count, ring);
        }
        self.in_flight -= 1;
        match kind {
            kind::SUMS_READ => return self.on_sums_read(usize::from(slot), count, ring),
            kind::SUMS_WRITE => return self.on_sums_written(usize::from(slot), count, ring),
            _ => {}
        }
        if slot == SUM_SLOT && kind == kind::READ {
            self.summer.in_flight -= 1;
        }
        match (kind, Piece::unpack(tag)) {
            (kind::READ | kind::EDGE, Some(piece)) => self.on_read(slot, kind, piece, count, ring),
            (kind::WRITE, Some(piece)) => self.on_write(slot, piece, count, ring),
            (kind::LAYER, Some(piece)) => self.on_layer_written(slot, piece, count, ring),
            (kind::SYNC, _) => self.on_synced(count, ring),
            (kind::ZERO_STEP | kind::ZERO_EDGE, _) => {
                self.on_zero_step(u8::try_from(tag).unwrap_or(0), kind, count, ring);
                self.start_waiting(ring);
            }
            _ => debug_assert!(false, "a completion of nothing: {completion:?}"),
        }
    }

    /// Moves the finished requests into `finished`, which is empty, in their order. Returns false if none has
    /// finished.
    pub fn take_finished(&mut self, finished: &mut Vec<(u16, Outcome)>) -> bool {
        debug_assert!(finished.is_empty());
        std::mem::swap(&mut self.finished, finished);
        !finished.is_empty()
    }

    /// Puts the text of an answer to a control frame into the slot. None if it is too long.
    pub fn put_text(&mut self, slot: u16, text: &[u8]) -> Option<IoBuf> {
        let text_max_bytes = self.header(slot).opcode.text_max_bytes() as usize;
        let range = ByteRange::new(0, text.len() as u64).ok().filter(|_| text.len() <= text_max_bytes)?;
        self.buffers.touch(slot, range.grown_to_blocks());
        let buf = self.buffers.part(slot, 0, range);
        buf.copy_from(text);
        Some(buf)
    }

    /// Returns true if the kernel has nothing to do for us.
    pub fn is_idle(&self) -> bool {
        self.in_flight == 0 && self.marks.is_idle()
    }

    /// Returns true if the replica is marked as lacking data.
    pub fn is_rebuilding(&self) -> bool {
        self.store.info().rebuilding
    }

    /// Returns an error unless the replica may be made a copy of another one now: see
    /// [`ReplicaState::may_be_made_anew`].
    ///
    /// # Errors
    /// It may not.
    pub fn check_may_be_made_anew(&self) -> Result<(), ReplicaError> {
        let (holds_data, is_busy) = (holds_data(&self.store)?, self.is_busy());
        Ok(self.state.may_be_made_anew(self.is_rebuilding(), holds_data, is_busy)?)
    }

    /// Returns the regions in which any layer has data, or had it when they were summed: a copy finds a
    /// vanished block only by its sum. See [`Store::allocated`], which bounds the time.
    pub fn allocated(&self, regions: Regions, from: u32) -> Result<AllocatedRuns, StoreError> {
        let intent_log = self.state.intent_log();
        let summed = intent_log.summed().converted(intent_log.regions(), regions);
        self.store.allocated(regions, from, &summed)
    }

    /// Returns the layers: see [`Store::copy_layers`].
    pub fn copy_layers(&self) -> Result<Vec<CopyLayer>, StoreError> {
        self.store.copy_layers()
    }

    /// Returns the extents of a layer: see [`Store::layer_extents`].
    pub fn layer_extents(
        &self,
        layer: usize,
        from_bytes: u64,
        extents_max: usize,
    ) -> Result<(Vec<ByteRange>, Option<u64>), StoreError> {
        self.store.layer_extents(layer, from_bytes, extents_max)
    }

    /// Becomes a copy of a replica with these layers: see [`Store::begin_copy`]. Waits for the disk.
    ///
    /// # Errors
    /// The error of the store. If it fails half-way, nothing is served any more.
    pub fn begin_copy(&mut self, layers: Vec<CopyLayer>) -> Result<Vec<bool>, ReplicaError> {
        debug_assert!(!self.is_busy(), "whoever asks has checked that it may be made anew");
        self.sums.forget();
        let begun = self.store.begin_copy(layers);
        if self.store.is_broken() {
            self.fail("becoming a copy of another replica was interrupted");
        }
        self.look_at_store();
        self.flushes.changed();
        if let Ok(done) = &begun {
            let is_anything_kept = done.iter().any(|done| *done);
            self.renew_sums()?;
            self.look_at_lost(is_anything_kept)?;
        }
        Ok(begun?)
    }

    /// Makes the volume larger. The files of the sets of regions come first, under other names, because they
    /// may need space. Then the directory grows, and then these files get their names. If the process ends
    /// before that, the sets are read from the files of the former size. Waits for the disk; requests may be
    /// in flight.
    ///
    /// # Errors
    /// The volume has its size from before then, or nothing is served any more.
    pub fn expand(&mut self, size_bytes: u64, ring: &mut Ring) -> Result<(), ReplicaError> {
        if size_bytes == self.store.size_bytes() {
            return Ok(());
        }
        if size_bytes > MAX_VOLUME_BYTES {
            return Err(ReplicaError::TooLarge(size_bytes));
        }
        self.void_job();
        self.search_again();
        let grown = self.stage_grown(Regions::of(size_bytes))?;
        let expanded = self.store.expand(size_bytes);
        self.look_at_store();
        if let Err(error) = expanded {
            grown.discard(&self.store);
            if self.store.is_broken() {
                self.fail(&format!("an expansion was interrupted: {error}"));
            }
            return Err(error.into());
        }
        if let Err(error) = self.adopt_grown(grown) {
            self.fail(&format!("the sets of regions could not follow an expansion: {error}"));
            return Err(error.into());
        }
        // No other event wakes requests that wait for pages of the former files.
        self.go_on_waiting(ring);
        Ok(())
    }

    /// Completes the copy of a layer: see [`Store::copy_done`]. Waits for the disk.
    pub fn copy_done(&mut self, layer: usize) -> Result<(), ReplicaError> {
        let done = self.store.copy_done(layer);
        self.look_at_store();
        self.look_at_document(&done);
        done?;
        self.settle_lost().map_err(ReplicaError::LostBlocksUnwritten)
    }

    /// Completes the copy: see [`Store::end_copy`]. Waits for the disk.
    pub fn end_copy(&mut self) -> Result<(), ReplicaError> {
        let ended = self.store.end_copy();
        self.look_at_document(&ended);
        ended?;
        self.settle_lost().map_err(ReplicaError::LostBlocksUnwritten)
    }

    /// Returns the failure after which nothing is served, if any.
    pub fn failure(&self) -> Option<&Failure> {
        self.state.failure()
    }

    /// Handles the request of an engine to a failed replica: see [`ReplicaState::asked_by`].
    pub fn asked_by(&mut self, generation: Generation) -> bool {
        self.state.asked_by(generation)
    }

    /// Returns true if the process has served for so long that earlier failures do not count any more.
    pub fn has_served_long(&self) -> bool {
        self.since.elapsed() >= FAILURES_FORGIVEN_AFTER
    }

    /// Repeats writing the record of a failure that could not be stored: see [`ReplicaState::retry_record`].
    /// Waits for the disk.
    pub fn retry_record_of_failure(&mut self) -> bool {
        self.change(|state, disk| state.retry_record(disk))
    }

    /// Returns the size of the volume.
    pub fn size_bytes(&self) -> u64 {
        self.store.size_bytes()
    }

    /// Makes everything durable and leaves the directory clean; after a failure the directory is left alone.
    ///
    /// # Errors
    /// The error of the store; the directory then counts as dirty.
    pub fn close(mut self) -> Result<(), StoreError> {
        debug_assert!(self.is_idle());
        if self.state.failure().is_some() {
            self.retry_record_of_failure();
            return Ok(());
        }
        self.close_marks();
        self.store.close()
    }

    fn work(&self, slot: u16) -> &Work {
        &self.works[usize::from(slot)]
    }

    fn work_mut(&mut self, slot: u16) -> &mut Work {
        &mut self.works[usize::from(slot)]
    }

    fn fd(&self, file: FileIndex) -> RawFd {
        self.store.fd(file).as_raw_fd()
    }

    /// Returns the free space of the disk in MiB; 0 if the file system does not report it. The disk is
    /// queried once a second, or after a request has found no space: a PING must not wait for it.
    pub fn free_mib(&mut self) -> u32 {
        if let Some((_, free_mib)) = self.free.filter(|(at, _)| at.elapsed() < FREE_SPACE_PERIOD) {
            return free_mib;
        }
        let free_bytes = self.store.free_bytes().unwrap_or(0);
        let free_mib = u32::try_from(free_bytes >> 20).unwrap_or(u32::MAX);
        self.free = Some((Instant::now(), free_mib));
        free_mib
    }

    fn head_fd(&self) -> RawFd {
        self.fd(self.store.head())
    }

    fn finish(&mut self, slot: u16, outcome: Outcome) {
        let outcome = if self.state.failure().is_some() { Err(Errno::IO) } else { outcome };
        if slot == SUM_SLOT {
            return self.sum_read(outcome);
        }
        let outcome = outcome.and_then(|()| self.record_cured(slot));
        self.sums_followed(slot, outcome);
        if outcome == Err(Errno::NO_SPACE) {
            self.free = None;
        }
        self.finished.push((slot, outcome));
    }

    fn flush(&mut self, slot: u16, ring: &mut Ring) {
        match self.flushes.arrive(slot) {
            Flush::Done => self.finish(slot, Ok(())),
            Flush::Start => self.sync(ring),
            Flush::Waits => {}
        }
    }

    fn sync(&mut self, ring: &mut Ring) {
        self.in_flight += 1;
        ring.fdatasync(self.head_fd(), Token { source: SOURCE_DISK, kind: kind::SYNC, index: 0, tag: 0 });
    }

    fn on_synced(&mut self, result: Result<usize, Errno>, ring: &mut Ring) {
        let mut covered = std::mem::take(&mut self.covered);
        match result {
            Ok(_) => {
                if self.flushes.ended(&mut covered) {
                    self.sync(ring);
                }
            }
            // Data that was not durable may be lost, and the kernel reports that only once: a repeated sync
            // would succeed without meaning.
            Err(errno) => {
                self.fail(&format!("the data could not be made durable: {errno}"));
                self.flushes.give_up(&mut covered);
            }
        }
        for slot in covered.drain(..) {
            self.finish(slot, Ok(()));
        }
        self.covered = covered;
    }

    /// Handles a failed write to the head and returns the errno of the answer. Unless only space was missing,
    /// the content of the head is unknown and the replica stops serving.
    fn write_failed(&mut self, range: ByteRange, errno: Errno) -> Errno {
        self.store.write_failed(range);
        if is_final(errno) {
            self.fail(&format!("writing {range} failed: {errno}"));
            return Errno::IO;
        }
        if errno.raw() == libc::EDQUOT { Errno::NO_SPACE } else { errno }
    }

    /// Stops serving if an operation of the store could not make data durable: a repeated request would
    /// wrongly succeed.
    fn look_at_store(&mut self) {
        if self.store.has_lost_cache_now() {
            self.fail("data could not be made durable");
        }
    }

    /// Stops serving if a document could not be written, unless only space was missing.
    fn look_at_document(&mut self, written: &Result<(), StoreError>) {
        if let Err(error @ (StoreError::Io { .. } | StoreError::NotDurable { .. })) = written
            && is_final(error.errno())
        {
            self.fail(&format!("the state of a copy could not be stored: {error}"));
        }
    }

    /// Returns the state that the replica keeps beside the data.
    pub fn state(&self) -> &ReplicaState {
        &self.state
    }

    /// Changes the state that the replica keeps beside the data. Waits for the disk, so it is for rare
    /// changes only.
    ///
    /// # Errors
    /// The errors of the change.
    pub fn change<T>(&mut self, change: impl FnOnce(&mut ReplicaState, &mut Shelf<'_>) -> T) -> T {
        let was_serving = self.state.failure().is_none();
        self.state.served_for(self.since.elapsed());
        let Executor { store, owner, marks, .. } = self;
        let mut shelf = Shelf { store, files: &mut marks.files, owner };
        let changed = change(&mut self.state, &mut shelf);
        if let Some(failure) = self.state.failure().filter(|_| was_serving) {
            tracing::error!("the replica no longer serves: {}", failure.outlook());
            self.give_up_waiting(Errno::IO);
        }
        changed
    }

    /// Stops serving: see [`ReplicaState::fail`].
    fn fail(&mut self, message: &str) {
        self.change(|state, disk| state.fail(disk, message.to_owned()));
    }
}

/// Failures after which the same operation is tried again.
fn is_passing(errno: Errno) -> bool {
    matches!(errno.raw(), libc::EINTR | libc::EAGAIN)
}

/// Returns true if the data of the range is read into the slot.
pub(crate) fn reads_data(header: &Header) -> bool {
    matches!(header.opcode, Opcode::Read | Opcode::ReadLayer | Opcode::Verify)
}

fn is_durable(header: &Header) -> bool {
    header.flags.has(Flags::FUA)
}
