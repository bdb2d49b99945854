//! The sets of regions that the replica keeps, on the disk: see `shorthorn-regions`.
//!
//! A modification that has to be noted first waits in its slot. The pages that it needs are written when all
//! requests that came together have been taken up, so that one write serves all of them; what comes while a
//! page is written shares the next write of it.

use std::io;

use shorthorn_regions::{
    Admit, GrownSets, KeepError, Marked, NewSet, PAGE_BYTES, PAGE_WRITES_MAX, RegionKeeper, SetKey, Ticket,
};
use shorthorn_ring::{Arena, Ring, Token};
use shorthorn_store::{RegionFile, Store, StoreError};
use shorthorn_types::{
    ByteRange, Errno, MarkRegions, Members, RegionSet, Regions, ReplicaId, ReplicaReport, View,
};
use shorthorn_views::remembers;

use super::{Executor, SOURCE_DISK, is_final, is_passing, kind};
use crate::error::ReplicaError;
use crate::limits::SLOTS;

/// See the module.
#[derive(Debug)]
pub(crate) struct Marks {
    keeper: RegionKeeper,
    files: Vec<(SetKey, RegionFile)>,
    /// Files of sets that have ended, into which a page may still be written.
    retired: Vec<RegionFile>,
    /// One page for each write at once.
    pages: Arena,
    in_flight: usize,
    /// Modifications that wait.
    waiting: Vec<u16>,
    /// Those that are looked at again.
    retried: Vec<u16>,
    /// Marks that wait.
    tickets: Vec<(u16, Ticket)>,
    /// The last write of a page has failed for lack of space: nothing is tried before it is asked for again.
    stalled: bool,
}

/// The sets of the volume as it is about to be, whose files are there under other names.
#[derive(Debug)]
pub(super) struct Grown {
    sets: GrownSets,
    files: Vec<(SetKey, Vec<u8>)>,
}

impl Grown {
    /// The volume does not grow.
    pub fn discard(self, store: &Store) {
        for (key, _) in &self.files {
            store.unstage_regions(*key);
        }
    }
}

impl Marks {
    /// Writes the files that the sets need once the volume has grown.
    pub(super) fn stage_grown(&self, store: &Store, regions: Regions) -> Result<Grown, StoreError> {
        let sets = self.keeper.grown(regions);
        let grown = Grown { files: sets.files().collect(), sets };
        let staged = grown.files.iter().try_for_each(|(key, bytes)| store.stage_regions(*key, bytes));
        match staged {
            Ok(()) => Ok(grown),
            Err(error) => {
                grown.discard(store);
                Err(error)
            }
        }
    }

    /// The volume has grown.
    pub(super) fn adopt_grown(&mut self, store: &Store, grown: Grown) -> Result<(), StoreError> {
        for (key, bytes) in &grown.files {
            // A repair of the directory may have swept it up.
            let file = store.adopt_regions(*key).or_else(|_| store.make_regions(*key, bytes))?;
            if let Some((_, place)) = self.files.iter_mut().find(|(of, _)| of == key) {
                self.retired.push(std::mem::replace(place, file));
            }
        }
        self.keeper.grow(grown.sets);
        self.stalled = false;
        self.drop_retired();
        Ok(())
    }

    /// Reads what is in the directory. Where there is no intent set yet, or no trustworthy one, everything counts as
    /// written lately, unless the volume is empty. Sets of replicas that all views have again are removed.
    ///
    /// # Errors
    /// Where the files cannot be read or made.
    pub fn load(store: &mut Store, report: &ReplicaReport, holds_data: bool) -> Result<Marks, ReplicaError> {
        let regions = Regions::of(store.size_bytes());
        let epoch = store.info().epoch;
        let found = store.read_regions(SetKey::Intent)?;
        let (keeper, whole) = match &found {
            Some(bytes) => {
                let (keeper, damages) = RegionKeeper::load(regions, epoch, bytes);
                report_damages(SetKey::Intent, &damages);
                (keeper, damages.is_empty())
            }
            None => {
                let count = regions.count();
                let intent = if holds_data { RegionSet::full(count) } else { RegionSet::empty(count) };
                let mut keeper = RegionKeeper::new(regions, epoch, &intent);
                if remembers(report, None) {
                    keeper.forget_stamp();
                }
                (keeper, false)
            }
        };
        let mut marks = Marks {
            keeper,
            files: Vec::new(),
            retired: Vec::new(),
            pages: Arena::new(PAGE_WRITES_MAX, PAGE_BYTES)
                .map_err(|source| ReplicaError::system("map memory for pages of regions", source))?,
            in_flight: 0,
            waiting: Vec::with_capacity(SLOTS),
            retried: Vec::with_capacity(SLOTS),
            tickets: Vec::with_capacity(SLOTS),
            stalled: false,
        };
        marks.open(store, SetKey::Intent, whole)?;
        for replica in store.missed_files()? {
            marks.load_missed(store, replica)?;
        }
        marks.end_sets(store, report)?;
        marks.judge_cache(store)?;
        Ok(marks)
    }

    fn load_missed(&mut self, store: &Store, replica: ReplicaId) -> Result<(), ReplicaError> {
        let key = SetKey::Missed(replica);
        let bytes = store.read_regions(key)?.unwrap_or_default();
        let (kept, damages) = self.keeper.load_missed(replica, &bytes)?;
        report_damages(key, &damages);
        if kept {
            return Ok(self.open(store, key, damages.is_empty())?);
        }
        Ok(store.remove_regions(key)?)
    }

    /// Opens the file of a set that is kept; makes it anew where it is not `whole`, or where what was read may be in
    /// the page cache alone.
    fn open(&mut self, store: &Store, key: SetKey, whole: bool) -> Result<(), StoreError> {
        let is_current = whole && !self.keeper.is_outgrown(key) && !store.info().lost_cache;
        let file = match self.keeper.file(key) {
            Some(bytes) if !is_current => store.make_regions(key, &bytes)?,
            _ => store.open_regions(key)?,
        };
        self.files.push((key, file));
        Ok(())
    }

    fn judge_cache(&mut self, store: &mut Store) -> Result<(), StoreError> {
        if !store.info().lost_cache {
            return Ok(());
        }
        self.keeper.lost_cache();
        if !self.keeper.has_lost_cache() {
            return store.cache_made_up_for();
        }
        tracing::warn!(
            "the host was restarted while this replica was open, or its disk has failed: until all regions that were \
             written lately have been copied from another replica, or are known to be equal, others are preferred to it"
        );
        Ok(())
    }

    fn file(&self, key: SetKey) -> Option<&RegionFile> {
        self.files.iter().find(|(of, _)| *of == key).map(|(_, file)| file)
    }

    /// Makes the files of new sets, and keeps them. Those that could be made are kept in any case.
    fn begin_sets(&mut self, store: &Store, new: impl IntoIterator<Item = NewSet>) -> Result<(), StoreError> {
        for set in new {
            let key = SetKey::Missed(set.replica());
            let file = store.make_regions(key, &set.file())?;
            tracing::info!(replica = %set.replica(), "its missed regions are kept from now on");
            self.keeper.keep(set);
            self.files.push((key, file));
        }
        Ok(())
    }

    /// Ends a set. Its file goes first: one that is found later must not lack what was written meanwhile.
    fn end_set(&mut self, store: &Store, replica: ReplicaId) -> Result<(), StoreError> {
        let key = SetKey::Missed(replica);
        store.remove_regions(key)?;
        tracing::info!(%replica, "its missed regions are no longer kept");
        self.keeper.forget(replica);
        if let Some(at) = self.files.iter().position(|(of, _)| *of == key) {
            let (_, file) = self.files.swap_remove(at);
            self.retired.push(file);
        }
        self.drop_retired();
        Ok(())
    }

    fn end_sets(&mut self, store: &Store, report: &ReplicaReport) -> Result<(), StoreError> {
        self.keeper.on_commit(report).iter().try_for_each(|replica| self.end_set(store, replica))
    }

    /// A descriptor that a write in the ring names has to stay open until that has ended.
    fn drop_retired(&mut self) {
        if self.in_flight == 0 {
            self.retired.clear();
        }
    }

    /// Whether the kernel has nothing to do for us.
    pub fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Whether the modification in `slot` may be executed. Where not, it is started again when that may be so.
    pub fn admit(&mut self, slot: u16, range: ByteRange) -> bool {
        if self.keeper.admit(range) == Admit::Go {
            return true;
        }
        self.stalled = false;
        self.waiting.push(slot);
        false
    }

    /// Starts the writes of pages that are due; `lazy`: also of those that nobody waits for.
    fn write_pages(&mut self, lazy: bool, ring: &mut Ring) {
        while !self.stalled
            && let Some(write) = self.keeper.begin_write(lazy)
        {
            let buf = self.pages.buf(usize::from(write.slot));
            buf.copy_from(write.bytes);
            let (slot, key, page) = (write.slot, write.key, write.page);
            let Some(file) = self.file(key) else {
                debug_assert!(false, "a set without a file: {key}");
                return;
            };
            let token = Token { source: SOURCE_DISK, kind: kind::PAGE, index: u16::from(slot), tag: 0 };
            ring.write(file.raw_fd(), buf, u64::from(page) * PAGE_BYTES as u64, true, token);
            self.in_flight += 1;
        }
    }

    /// Writes all pages that have changed. Blocks; nothing is under way.
    fn write_all(&mut self) -> io::Result<()> {
        while let Some(write) = self.keeper.begin_write(true) {
            let slot = write.slot;
            let file = self.files.iter().find(|(of, _)| *of == write.key);
            let written = file.map_or(Ok(()), |(_, file)| file.write_page(write.page, write.bytes));
            self.keeper.end_write(slot, written.is_ok());
            written?;
        }
        Ok(())
    }
}

impl Executor {
    /// Starts what has to be written before requests that wait can go on. To be called when all requests that came
    /// together have been started.
    pub fn write_pages(&mut self, ring: &mut Ring) {
        if self.failure.is_none() {
            self.marks.write_pages(false, ring);
        }
    }

    /// Starts to write what nobody waits for.
    pub fn write_stale_pages(&mut self, ring: &mut Ring) {
        if self.failure.is_none() {
            self.marks.write_pages(true, ring);
        }
    }

    pub(super) fn on_page(&mut self, page_slot: u16, result: Result<usize, Errno>, ring: &mut Ring) {
        self.marks.in_flight -= 1;
        let failed = match result {
            Ok(PAGE_BYTES) => None,
            Ok(_) => Some(Errno::IO),
            Err(errno) => Some(errno),
        };
        self.marks.keeper.end_write(u8::try_from(page_slot).unwrap_or(u8::MAX), failed.is_none());
        self.marks.drop_retired();
        match failed {
            None => self.go_on_waiting(ring),
            Some(errno) if is_passing(errno) => {}
            Some(errno) => self.page_failed(errno),
        }
    }

    /// Looks again at everything that waits.
    pub(super) fn go_on_waiting(&mut self, ring: &mut Ring) {
        std::mem::swap(&mut self.marks.waiting, &mut self.marks.retried);
        let mut retried = std::mem::take(&mut self.marks.retried);
        for slot in retried.drain(..) {
            self.start(slot, ring);
        }
        self.marks.retried = retried;
        let Marks { tickets, keeper, .. } = &mut self.marks;
        let finished = &mut self.finished;
        tickets.retain(|(slot, ticket)| {
            let durable = keeper.is_durable(ticket);
            if durable {
                finished.push((*slot, Ok(())));
            }
            !durable
        });
    }

    /// Nothing that waits can be executed. With space it can be tried again; what else it was, nobody can say what is
    /// on the disk, and nothing is served any more.
    fn page_failed(&mut self, errno: Errno) {
        if is_final(errno) {
            return self.fail(&format!("what is about to be written could not be noted: {errno}"));
        }
        self.marks.stalled = true;
        self.give_up_waiting(Errno::NO_SPACE);
    }

    /// Answers everything that waits for a page with an error.
    pub(super) fn give_up_waiting(&mut self, errno: Errno) {
        while let Some(slot) = self.marks.waiting.pop() {
            self.finish(slot, Err(errno));
        }
        while let Some((slot, _)) = self.marks.tickets.pop() {
            self.finish(slot, Err(errno));
        }
    }

    /// The sets of regions.
    pub fn keeper(&self) -> &RegionKeeper {
        &self.marks.keeper
    }

    /// The replicas whose missed regions are kept.
    pub fn tracks(&self) -> Members {
        self.marks.keeper.tracks()
    }

    /// Begins the sets of those that `target` lacks, and makes them durable. Before the view is stored: if
    /// everything stops in between, there is a set too many, which does no harm. The other way round there would be
    /// a view without the set that the replica promises with it, and modifications that nobody notes.
    pub fn begin_missed(
        &mut self,
        me: ReplicaId,
        known: &ReplicaReport,
        basis: &ReplicaReport,
        target: &View,
    ) -> Result<(), ReplicaError> {
        let new = self.marks.keeper.on_propose(me, known, basis, target)?;
        self.begin_sets(new)
    }

    /// Where that fails for more than space, a file may be left that nobody keeps up to date: nothing is modified any
    /// more then, so that it lacks nothing.
    fn begin_sets(&mut self, new: impl IntoIterator<Item = NewSet>) -> Result<(), ReplicaError> {
        let begun = self.marks.begin_sets(&self.store, new);
        if let Err(error) = &begun
            && is_final(error.errno())
        {
            self.fail(&format!("a set of missed regions could not be begun: {error}"));
        }
        Ok(begun?)
    }

    /// Ends the sets of those that are members again. After the view is stored: until then they may be needed.
    /// A set that cannot be removed goes on being kept, which does no harm.
    pub fn end_missed(&mut self, report: &ReplicaReport) {
        if let Err(error) = self.marks.end_sets(&self.store, report) {
            tracing::warn!(%error, "missed regions of a member could not be removed, and are kept");
        }
    }

    /// Changes a set. True where that is durable; else the slot finishes when it is.
    ///
    /// # Errors
    /// [`KeepError`] or the store's; the set is as before.
    pub fn mark(&mut self, slot: u16, mark: &MarkRegions) -> Result<bool, ReplicaError> {
        match self.marks.keeper.mark(mark)? {
            Marked::Done => {}
            Marked::Wait(ticket) => {
                self.marks.stalled = false;
                self.marks.tickets.push((slot, ticket));
                return Ok(false);
            }
            Marked::Begin(new) => self.begin_sets([new])?,
            Marked::Remove(replica) => self.marks.end_set(&self.store, replica)?,
        }
        self.note_cache_made_up_for();
        Ok(true)
    }

    fn note_cache_made_up_for(&mut self) {
        if self.marks.keeper.has_lost_cache() || !self.store.info().lost_cache {
            return;
        }
        match self.store.cache_made_up_for() {
            Ok(()) => tracing::info!("what was lost with the page cache is made up for"),
            // It is tried again with the next mark.
            Err(error) => tracing::warn!(%error, "what was lost and made up for could not be noted"),
        }
    }

    /// Writes what has not been written of the sets. At the end, when nothing is under way.
    pub(super) fn close_marks(&mut self) {
        // Without it regions are copied that need not be.
        if let Err(error) = self.marks.write_all() {
            tracing::warn!(%error, "what was cleared from the sets of regions could not be written");
        }
    }
}

impl From<KeepError> for ReplicaError {
    fn from(error: KeepError) -> ReplicaError {
        ReplicaError::Regions(error)
    }
}

fn report_damages(key: SetKey, damages: &[shorthorn_regions::PageDamage]) {
    if let Some(damage) = damages.first() {
        let pages = damages.len();
        tracing::warn!(
            pages,
            "the set of regions '{key}' cannot be trusted, and counts as full there: {damage}"
        );
    }
}
