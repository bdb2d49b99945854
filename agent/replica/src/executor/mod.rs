//! Executes requests on the replica directory: knows files and buffers, but no connection.
//!
//! A request lives in a slot. The caller [assigns](Executor::assign) the slot, puts the data of a write into
//! its [payload](RequestIo::payload), and [starts](Executor::start) it. It passes on the completions that
//! carry [`SOURCE_DISK`], and takes the [finished](Executor::take_finished) requests. The code neither
//! allocates nor logs unless an error occurs.

mod background_sums;
mod block;
mod block_sums;
mod buffers;
mod cached_layer_sums;
mod copying;
mod data;
mod durable_state;
mod durable_steps;
mod expansion;
mod flush;
mod free_space;
mod in_flight;
mod layer_check;
mod layer_repair;
mod layers;
mod load;
mod marking;
mod modifying;
mod operation;
mod piece;
mod read_planner;
mod recording_lost;
mod region_sets;
mod repairing;
mod request_check;
mod request_io;
mod requests;
mod sum_file;
mod sum_job;
mod sum_pages;
mod sum_schedule;
mod summing;
mod syncing;
mod zeroes;
mod zeroing;

use std::io;
use std::time::Instant;

use shorthorn_replica_core::{ReplicaState, is_final};
use shorthorn_ring::{Completion, IoBuf, Ring, Token};
use shorthorn_store::Store;
use shorthorn_types::{ByteRange, Errno};
use shorthorn_wire::{Header, Opcode};

use self::background_sums::BackgroundSums;
use self::block_sums::BlockSums;
use self::cached_layer_sums::CachedLayerSums;
use self::durable_state::DurableState;
use self::durable_steps::ReplicaFiles;
use self::flush::Flushes;
use self::free_space::FreeSpace;
pub(crate) use self::load::Loaded;
use self::operation::kind;
pub(crate) use self::operation::{OperationResult, SOURCE_DISK};
use self::piece::Piece;
use self::read_planner::ReadPlanner;
use self::request_io::RequestIo;
use self::requests::SUM_SLOT;
pub(crate) use self::requests::reads_data;
use self::zeroes::ZeroJobs;
use crate::error::ReplicaError;
use crate::limits::SLOTS;
use crate::state::Owner;

/// Executes requests: see the module.
///
/// It is composed of parts. Each has its own state, rules and tests, in a module of its own that does not
/// know the executor. The methods of the executor pass requests, completions and answers between the parts.
/// If a rule needs two parts, the executor passes one to the other. The modules `data`, `zeroing`, `layers`,
/// `syncing`, `marking`, `summing`, `request_check`, `modifying`, `recording_lost`, `layer_check`,
/// `repairing`, `copying` and `expansion` have the methods by topic.
#[derive(Debug)]
pub(crate) struct Executor {
    store: Store,
    state: DurableState,

    io: RequestIo,
    finished: Vec<(u16, OperationResult)>,

    read_planner: ReadPlanner,
    flushes: Flushes,
    zero_jobs: ZeroJobs,
    free_space: FreeSpace,

    layer_sums: CachedLayerSums,
    block_sums: BlockSums,
    background_sums: BackgroundSums,
}

impl Executor {
    /// Executes on `store`, which belongs to `owner`, and keeps the loaded state beside the data.
    ///
    /// # Errors
    /// No memory is available for the buffers.
    pub fn new(store: Store, owner: Owner, loaded: Loaded) -> io::Result<Executor> {
        let Loaded { state, region_sets, block_sums, background_sums } = loaded;
        Ok(Executor {
            store,
            state: DurableState::new(owner, state, region_sets),
            io: RequestIo::new()?,
            finished: Vec::with_capacity(SLOTS),
            read_planner: ReadPlanner::new(),
            flushes: Flushes::new(SLOTS),
            zero_jobs: ZeroJobs::new(),
            free_space: FreeSpace::default(),
            layer_sums: CachedLayerSums::default(),
            block_sums,
            background_sums,
        })
    }

    /// Assigns `slot` to the request of `header`.
    pub fn assign(&mut self, slot: u16, header: Header) {
        self.io.assign(slot, header);
    }

    pub fn free(&mut self, slot: u16) {
        self.io.free(slot);
    }

    /// Releases memory: no slot is in use, and none was for a while.
    pub fn release_memory(&mut self) {
        self.layer_sums.release();
        self.io.release_memory(self.background_sums.is_running());
    }

    /// Releases memory of verified reads that was not used since the last call.
    pub fn release_unused_sums(&mut self) {
        self.block_sums.release_unused_pages();
    }

    /// Begins to execute the request in `slot`. [`Executor::take_finished`] returns it at its end, maybe at
    /// once.
    pub fn start(&mut self, slot: u16, ring: &mut Ring) {
        let started = if self.state.failure().is_some() { Err(Errno::IO) } else { self.begin(slot, ring) };
        if let Err(errno) = started {
            self.finish(slot, Err(errno));
        }
    }

    fn begin(&mut self, slot: u16, ring: &mut Ring) -> OperationResult {
        let header = self.io.header(slot);
        match header.opcode {
            Opcode::Flush => self.flush(slot, ring),
            Opcode::Read | Opcode::Verify => {
                let range = checked_range(&header, &self.store)?;
                self.begin_check(slot);
                self.start_read(slot, range, ring)?;
            }
            Opcode::Write | Opcode::Discard | Opcode::WriteZeroes => {
                let range = checked_range(&header, &self.store)?;
                // The regions are recorded first: otherwise a crash would leave unknown differences between
                // the replicas.
                if self.is_admitted(slot, range, ring)? {
                    // After the admission, because a request that waits modifies nothing.
                    self.record_rot_of_head(slot)?;
                    self.sums_follow(slot, range);
                    self.modify(slot, range, ring)?;
                }
            }
            Opcode::ReadLayer => self.start_read_layer(slot, checked_range(&header, &self.store)?, ring)?,
            Opcode::WriteLayer => self.start_write_layer(slot, checked_range(&header, &self.store)?, ring)?,
            Opcode::Ping => self.finish(slot, Ok(())),
            _ => return Err(Errno::INVALID),
        }
        Ok(())
    }

    fn modify(&mut self, slot: u16, range: ByteRange, ring: &mut Ring) -> OperationResult {
        if self.io.header(slot).opcode == Opcode::Write {
            return self.start_write(slot, range, ring);
        }
        if let Some(job) = self.zero_jobs.begin(slot, range) {
            self.next_zero_step(job, ring);
        }
        Ok(())
    }

    /// Takes a completion that carries [`SOURCE_DISK`].
    pub fn on_completion(&mut self, completion: Completion, ring: &mut Ring) {
        let Token { kind, index: slot, tag, .. } = completion.token;
        let count = completion.count().map_err(|error| Errno::of(&error));
        if kind == kind::PAGE {
            return self.on_page(slot, count, ring);
        }
        // The file of sums counts its pages.
        if !matches!(kind, kind::SUMS_READ | kind::SUMS_WRITE) {
            self.io.ended(kind, slot);
        }
        match (kind, Piece::unpack(tag)) {
            (kind::READ | kind::EDGE, Some(piece)) => self.on_read(slot, kind, piece, count, ring),
            (kind::WRITE, Some(piece)) => self.on_write(slot, piece, count, ring),
            (kind::LAYER, Some(piece)) => self.on_layer_written(slot, piece, count, ring),
            (kind::SUMS_READ, _) => self.on_sums_read(usize::from(slot), count, ring),
            (kind::SUMS_WRITE, _) => self.on_sums_written(usize::from(slot), count, ring),
            (kind::SYNC, _) => self.on_synced(count, ring),
            (kind::ZERO_STEP | kind::ZERO_EDGE, _) => {
                self.on_zero_step(u8::try_from(tag).unwrap_or(0), kind, count, ring);
                // A job may be free now.
                while let Some(slot) = self.zero_jobs.next_waiting() {
                    self.start(slot, ring);
                }
            }
            _ => debug_assert!(false, "a completion of nothing: {completion:?}"),
        }
    }

    /// Moves the finished requests into `finished`, which is empty, in their order. Returns false if none has
    /// finished.
    pub fn take_finished(&mut self, finished: &mut Vec<(u16, OperationResult)>) -> bool {
        debug_assert!(finished.is_empty());
        std::mem::swap(&mut self.finished, finished);
        !finished.is_empty()
    }

    /// Puts the text of an answer to a control frame into the slot. None if it is too long.
    pub fn put_text(&mut self, slot: u16, text: &[u8]) -> Option<IoBuf> {
        self.io.put_text(slot, text)
    }

    /// Returns true if no operation is in flight in the kernel.
    pub fn is_idle(&self) -> bool {
        self.io.is_idle() && self.block_sums.is_idle() && self.state.is_idle()
    }

    /// Returns the requests and their data.
    pub fn io(&self) -> &RequestIo {
        &self.io
    }

    /// Returns the size of the volume.
    pub fn size_bytes(&self) -> u64 {
        self.store.size_bytes()
    }

    /// Returns true if the replica is becoming a copy of another one, and lacks data.
    pub fn is_rebuilding(&self) -> bool {
        self.store.info().rebuilding
    }

    /// Makes everything durable and leaves the directory clean; after a failure the directory is left alone.
    ///
    /// # Errors
    /// The error of the disk; the directory then stays marked as dirty.
    pub fn close(mut self) -> Result<(), ReplicaError> {
        debug_assert!(self.is_idle());
        if self.state.failure().is_some() {
            self.change(|state, disk| state.retry_record(disk));
            return Ok(());
        }
        // Without it regions are copied that need not be.
        if let Err(error) = self.state.write_all_pages() {
            tracing::warn!(%error, "cannot write the cleared regions");
            if is_final(Errno::of(&error)) {
                // The disk reports an error once, and it may be about other data.
                self.fail("the cleared regions could not be written");
                return Err(ReplicaError::system("write the cleared regions", error));
            }
        }
        Ok(self.store.close()?)
    }

    /// Returns the free space of the disk in MiB; none if the file system does not report it. The disk is
    /// queried once a second, or after a request has found no space: a PING must not wait for it.
    pub fn free_mib(&mut self) -> Option<u32> {
        self.free_space.mib(Instant::now(), || self.store.free_bytes())
    }

    fn finish(&mut self, slot: u16, outcome: OperationResult) {
        let outcome = if self.state.failure().is_some() { Err(Errno::IO) } else { outcome };
        if slot == SUM_SLOT {
            return self.background_sums.read_ended(outcome);
        }
        let outcome = outcome.and_then(|()| self.record_cured(slot));
        self.sums_followed(slot, outcome);
        if outcome == Err(Errno::NO_SPACE) {
            self.free_space.forget();
        }
        self.finished.push((slot, outcome));
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

    /// Returns the state that the replica keeps beside the data.
    pub fn state(&self) -> &DurableState {
        &self.state
    }

    /// Changes the state that the replica keeps beside the data. Waits for the disk, so it is for rare
    /// changes only. After a failure, requests that wait are answered with an error.
    ///
    /// # Errors
    /// The errors of the change.
    pub fn change<T>(&mut self, change: impl FnOnce(&mut ReplicaState, &mut ReplicaFiles<'_>) -> T) -> T {
        let was_serving = self.state.failure().is_none();
        let changed = self.state.change(&mut self.store, change);
        if was_serving && self.state.failure().is_some() {
            self.give_up_waiting(Errno::IO);
        }
        changed
    }

    /// Stops serving: see [`ReplicaState::fail`].
    fn fail(&mut self, message: &str) {
        self.change(|state, disk| state.fail(disk, message.to_owned()));
    }
}

/// Returns the range of the request, if the volume has it.
fn checked_range(header: &Header, store: &Store) -> Result<ByteRange, Errno> {
    let range = header.range().map_err(|_| Errno::INVALID)?;
    range.check(store.size_bytes()).map_err(|_| Errno::INVALID)
}

#[cfg(test)]
mod tests;
