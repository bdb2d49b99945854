//! The sets of regions that the replica keeps, on the disk: see `shorthorn-regions`.
//!
//! A modification that has to be recorded first waits in its slot. The pages that it needs are written when
//! all requests that came together have been taken up, so that one write serves all of them. Requests that
//! arrive during the write of a page share its next write.

use std::io;

use shorthorn_regions::{GrownSets, PAGE_BYTES, PAGE_WRITES_MAX, PageDamage, SetKey};
use shorthorn_replica_core::{Found, PageEnd, ReplicaState, Started, SumsFound, Waiter, Waiting};
use shorthorn_ring::{Arena, Ring, Token};
use shorthorn_store::{BlockSumsFile, Store, StoreError};
use shorthorn_types::{ByteRange, Errno, MarkRegions, Regions};
use shorthorn_views::ReplicaViews;

use super::steps::{SetFiles, Shelf};
use super::{Executor, SOURCE_DISK, Summer, kind};
use crate::error::ReplicaError;
use crate::limits::SLOTS;
use crate::state::{Owner, holds_data};

/// See the module.
#[derive(Debug)]
pub(crate) struct Marks {
    pub(super) files: SetFiles,
    /// The buffers of running page writes.
    pages: Arena,
    /// The slots of modifications and marks that wait.
    waiting: Waiting<u16, u16>,
    /// Requests that are examined again.
    retried: Vec<u16>,
}

/// The sets of the volume at its future size, whose files exist under other names.
#[derive(Debug)]
pub(super) struct Grown {
    sets: GrownSets,
    files: Vec<(SetKey, Vec<u8>)>,
}

impl Grown {
    /// Discards the grown sets, because the volume does not grow.
    pub fn discard(self, store: &Store) {
        for (key, _) in &self.files {
            store.unstage_regions(*key);
        }
    }
}

impl Marks {
    /// Loads the state that the replica keeps beside the data from its directory: see
    /// [`ReplicaState::start`].
    ///
    /// # Errors
    /// If the files cannot be read or made.
    pub fn load(
        store: &mut Store,
        owner: &Owner,
        views: ReplicaViews,
        sum_bytes_per_s: u64,
    ) -> Result<(ReplicaState, Marks, Summer), ReplicaError> {
        let found = look_at(store, owner, views, sum_bytes_per_s > 0)?;
        let pages = Arena::new(PAGE_WRITES_MAX, PAGE_BYTES)
            .map_err(|source| ReplicaError::system("map memory for pages of regions", source))?;
        let mut files = SetFiles::default();
        let mut shelf = Shelf { store, files: &mut files, owner };
        let Started { mut state, damages } = ReplicaState::start(&mut shelf, found)?;
        // Without it the number is too small, or one of Longhorn's: then Longhorn rebuilds the replica.
        if let Err(error) = shelf.store_revision(state.views()) {
            tracing::warn!(%error, "the revision counter for Longhorn could not be stored");
        }
        damages.iter().for_each(|(key, damages)| report_damages(*key, damages));
        let sums_file = open_sums(store, &mut state)?;
        let mut summer = Summer::new(sums_file, sum_bytes_per_s)
            .map_err(|source| ReplicaError::system("map memory for sums of blocks", source))?;
        summer.load_lost(store)?;
        let unsummed = state.intent_log().keeps_sums().then_some(SetKey::Unsummed);
        let out_of_sync = state.intent_log().tracks();
        for key in out_of_sync.iter().map(SetKey::OutOfSync).chain([SetKey::Intent]).chain(unsummed) {
            if files.find(key).is_none() {
                files.put(key, store.open_regions(key)?);
            }
        }
        if state.intent_log().has_lost_cache() {
            tracing::warn!(
                "the host was restarted while this replica was open, or its disk has failed: until all regions that were \
                 written lately have been copied from another replica, or are known to be equal, others are preferred to it"
            );
        }
        let (waiting, retried) = (Waiting::with_capacity(SLOTS), Vec::with_capacity(SLOTS));
        Ok((state, Marks { files, pages, waiting, retried }, summer))
    }

    /// Returns true if the kernel has nothing to do for us.
    pub fn is_idle(&self) -> bool {
        self.files.in_flight == 0
    }
}

/// Returns the file of the sums of blocks, if an account is kept of the regions that have none. Otherwise no
/// sum counts from now on. So it is if the file cannot be had: sums are worth less than a replica that
/// starts.
fn open_sums(store: &mut Store, state: &mut ReplicaState) -> Result<Option<BlockSumsFile>, ReplicaError> {
    if state.intent_log().keeps_sums() {
        match store.open_block_sums() {
            Ok(file) => return Ok(Some(file)),
            Err(error) => {
                tracing::warn!(%error, "sums of blocks are not kept: nothing guards data at rest");
                state.intent_log_mut().forget_unsummed();
            }
        }
    }
    store.forget_block_sums()?;
    Ok(None)
}

/// Reads the files that the directory has beside the data.
fn look_at(
    store: &Store,
    owner: &Owner,
    views: ReplicaViews,
    wants_sums: bool,
) -> Result<Found, ReplicaError> {
    let unsummed = store.read_regions(SetKey::Unsummed)?;
    let sums = match wants_sums {
        true => SumsFound::Wanted(unsummed),
        false => SumsFound::Unwanted { has_file: unsummed.is_some() },
    };
    let mut out_of_sync = Vec::new();
    for replica in store.out_of_sync_files()? {
        out_of_sync.push((replica, store.read_regions(SetKey::OutOfSync(replica))?.unwrap_or_default()));
    }
    let info = store.info();
    Ok(Found {
        me: owner.replica,
        views,
        regions: Regions::of(store.size_bytes()),
        epoch: info.epoch,
        intent: store.read_regions(SetKey::Intent)?,
        out_of_sync,
        sums,
        holds_data: holds_data(store)?,
        lost_cache: info.lost_cache,
        is_left_recorded: info.has_left,
        failures: info.failures,
    })
}

impl Executor {
    /// Writes the files that the sets need once the volume has grown.
    pub(super) fn stage_grown(&self, regions: Regions) -> Result<Grown, StoreError> {
        let sets = self.state.intent_log().grown(regions);
        let grown = Grown { files: sets.files().collect(), sets };
        let staged = grown.files.iter().try_for_each(|(key, bytes)| self.store.stage_regions(*key, bytes));
        match staged {
            Ok(()) => Ok(grown),
            Err(error) => {
                grown.discard(&self.store);
                Err(error)
            }
        }
    }

    /// Replaces the files of the sets after the volume has grown.
    pub(super) fn adopt_grown(&mut self, grown: Grown) -> Result<(), StoreError> {
        for (key, bytes) in &grown.files {
            // A repair of the directory may have swept it up.
            let adopted = self.store.adopt_regions(*key);
            let file = adopted.or_else(|_| self.store.make_regions(*key, bytes))?;
            self.marks.files.put(*key, file);
        }
        self.state.intent_log_mut().grow(grown.sets);
        self.marks.waiting.grown();
        Ok(())
    }

    /// Returns true if the modification in `slot` may be executed. If not, it is started again when that may
    /// be so.
    pub(super) fn admit(&mut self, slot: u16, range: ByteRange) -> bool {
        self.marks.waiting.admit(&mut self.state, range, slot).is_some()
    }

    /// Starts the writes that waiting requests depend on. The caller has started all requests that came
    /// together.
    pub fn write_pages(&mut self, ring: &mut Ring) {
        self.begin_page_writes(false, ring);
    }

    /// Starts the writes of pages that no request waits for.
    pub fn write_stale_pages(&mut self, ring: &mut Ring) {
        self.begin_page_writes(true, ring);
    }

    /// Starts the writes of pages that are due. With `lazy`, also of pages that no request waits for.
    fn begin_page_writes(&mut self, lazy: bool, ring: &mut Ring) {
        let Marks { files, pages, waiting, .. } = &mut self.marks;
        while let Some(write) = waiting.next_write(&mut self.state, lazy) {
            let buf = pages.buf(usize::from(write.slot));
            buf.copy_from(write.bytes);
            let (slot, key, page) = (write.slot, write.key, write.page);
            let Some(fd) = files.fd(key) else {
                debug_assert!(false, "a set without a file: {key}");
                return;
            };
            let token = Token { source: SOURCE_DISK, kind: kind::PAGE, index: u16::from(slot), tag: 0 };
            ring.write(fd, buf, u64::from(page) * PAGE_BYTES as u64, true, token);
            files.in_flight += 1;
        }
    }

    pub(super) fn on_page(&mut self, page_slot: u16, result: Result<usize, Errno>, ring: &mut Ring) {
        self.marks.files.in_flight -= 1;
        let outcome = match result {
            Ok(PAGE_BYTES) => Ok(()),
            Ok(_) => Err(Errno::IO),
            Err(errno) => Err(errno),
        };
        self.marks.files.drop_retired();
        let page_slot = u8::try_from(page_slot).unwrap_or(u8::MAX);
        match self.marks.waiting.page_ended(&mut self.state, page_slot, outcome) {
            PageEnd::Written => self.go_on_waiting(ring),
            PageEnd::Again => {}
            PageEnd::NoSpace(errno) => self.give_up_waiting(errno),
            PageEnd::Failed(errno) => {
                self.fail(&format!("cannot mark the region dirty: {errno}"));
            }
        }
    }

    /// Looks again at everything that waits.
    pub(super) fn go_on_waiting(&mut self, ring: &mut Ring) {
        let mut retried = std::mem::take(&mut self.marks.retried);
        self.marks.waiting.take_modifications(&mut retried);
        for slot in retried.drain(..) {
            self.start(slot, ring);
        }
        self.marks.retried = retried;
        while let Some(slot) = self.marks.waiting.next_durable_mark(self.state.intent_log()) {
            self.finish(slot, Ok(()));
        }
    }

    /// Answers everything that waits for a page with an error.
    pub(super) fn give_up_waiting(&mut self, errno: Errno) {
        while let Some(Waiter::Modification(slot) | Waiter::Mark(slot)) = self.marks.waiting.give_up() {
            self.finish(slot, Err(errno));
        }
    }

    /// Changes a set. True if that is durable; else the slot finishes when it is.
    ///
    /// # Errors
    /// See [`ReplicaState::mark`].
    pub fn mark(&mut self, slot: u16, mark: &MarkRegions) -> Result<bool, ReplicaError> {
        let Some(ticket) = self.change(|state, disk| state.mark(disk, mark))? else { return Ok(true) };
        self.marks.waiting.add_mark(slot, ticket);
        Ok(false)
    }

    /// Writes the unwritten pages of the sets at the end, when no write is under way.
    pub(super) fn close_marks(&mut self) {
        // Without it regions are copied that need not be.
        if let Err(error) = self.write_all_pages() {
            tracing::warn!(%error, "cannot write the cleared regions");
        }
    }

    /// Writes all pages that have changed. Blocks; nothing is under way.
    pub(super) fn write_all_pages(&mut self) -> io::Result<()> {
        let (intent_log, files) = (self.state.intent_log_mut(), &self.marks.files);
        while let Some(write) = intent_log.begin_write(true) {
            let slot = write.slot;
            let written =
                files.find(write.key).map_or(Ok(()), |file| file.write_page(write.page, write.bytes));
            intent_log.end_write(slot, written.is_ok());
            written?;
        }
        Ok(())
    }
}

fn report_damages(key: SetKey, damages: &[PageDamage]) {
    if let Some(damage) = damages.first() {
        let pages = damages.len();
        tracing::warn!(
            pages,
            "the set of regions '{key}' cannot be trusted, and counts as full there: {damage}"
        );
    }
}
