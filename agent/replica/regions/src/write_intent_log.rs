mod growth;
mod runs;
mod sums;

use std::ops::Range;

use shorthorn_types::limits::MAX_MEMBERS;
use shorthorn_types::{
    ByteRange, MarkAction, MarkRegions, Members, RUNS_PER_MARK_MAX, RegionSet, Regions, RegionsOf, ReplicaId,
    ReplicaReport, View,
};
use thiserror::Error;

pub use self::growth::GrownSets;
pub use self::runs::RunsPage;
use crate::page::{PAGE_BYTES, PAGE_WORDS, PageBits, PageDamage};
use crate::set::{PagedSet, SetIdentity};
use crate::set_key::SetKey;
use crate::unsummed::Unsummed;

/// Pages that are written at once.
pub const PAGE_WRITES_MAX: usize = 8;

/// The state of the regions that a modification has marked dirty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirtyMark {
    /// The modification may be executed: its regions are durably in every set.
    Durable,
    /// Pages have to be written first: see [`WriteIntentLog::begin_write`]. Ask again when one has been.
    Pending,
}

impl DirtyMark {
    /// The state if these pages, as a mask, have to be written.
    const fn of(lacking: u64) -> DirtyMark {
        if lacking == 0 { DirtyMark::Durable } else { DirtyMark::Pending }
    }
}

/// The reason why the sets do not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum IntentLogError {
    /// The absent replicas are more than a volume has.
    #[error(
        "this replica keeps out-of-sync sets of {MAX_MEMBERS} replicas, the maximum, and replica {0} needs \
         another one. Remove replicas that do not come back from the volume"
    )]
    TooManySets(ReplicaId),
    /// A run of regions that the volume does not have, or too many runs.
    #[error("{count} regions from {first} on are not all within the {limit} of the volume")]
    Runs {
        /// First region of the run.
        first: u32,
        /// The number of regions in the run.
        count: u32,
        /// The number of regions of the volume.
        limit: u32,
    },
    /// The runs are more than one message may have.
    #[error("{0} runs of regions at once, more than {RUNS_PER_MARK_MAX}")]
    TooManyRuns(usize),
    /// The set does not support this change.
    #[error("{action:?} cannot be done to {of:?}")]
    Unsupported {
        /// The set that the mark changes.
        of: RegionsOf,
        /// The requested change.
        action: MarkAction,
    },
}

/// The condition for the answer to a mark.
#[derive(Debug)]
pub enum Marked {
    /// The mark is complete.
    Done,
    /// Pages have to be written: ask [`WriteIntentLog::is_durable`] when one has been.
    Wait(Ticket),
    /// The set begins: make its file, then [`WriteIntentLog::keep`] it.
    Begin(NewSet),
    /// The set ends: remove its file, durably, then [`WriteIntentLog::forget`] it.
    Remove(ReplicaId),
}

/// Stands for regions that become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    serial: u64,
    pages: u64,
    after: u64,
}

/// A set that is about to be kept. It counts from [`WriteIntentLog::keep`] on, and has to be whole and
/// durable on the disk by then. No region may be marked dirty in between.
#[derive(Debug)]
pub struct NewSet {
    replica: ReplicaId,
    set: PagedSet,
}

impl NewSet {
    /// Returns the replica that misses the regions.
    #[must_use]
    pub fn replica(&self) -> ReplicaId {
        self.replica
    }

    /// Returns the content of the set's file.
    #[must_use]
    pub fn file(&self) -> Vec<u8> {
        self.set.file()
    }
}

/// A page that is to be written now.
#[derive(Debug)]
pub struct PageWrite<'a> {
    /// The index of the write, below [`PAGE_WRITES_MAX`]: for [`WriteIntentLog::end_write`].
    pub slot: u8,
    /// The set whose file is written.
    pub key: SetKey,
    /// Number of the page: its place in the file, in units of [`PAGE_BYTES`].
    pub page: u32,
    /// The page with its header.
    pub bytes: &'a [u8; PAGE_BYTES],
}

/// A write that is under way.
#[derive(Debug)]
struct Writing {
    /// The set and page that are being written; none if the slot is free.
    what: Option<(u64, usize)>,
    number: u64,
    bits: PageBits,
    image: [u8; PAGE_BYTES],
}

/// See the crate.
#[derive(Debug)]
pub struct WriteIntentLog {
    regions: Regions,
    epoch: u64,
    intent: PagedSet,
    out_of_sync: Vec<(ReplicaId, PagedSet)>,
    /// The replicas whose out-of-sync sets the engine has sent since [`WriteIntentLog::opened`].
    sent: Members,
    unsummed: Option<Unsummed>,
    writes: Box<[Writing]>,
    /// Numbers the writes.
    last_write: u64,
    last_serial: u64,
    /// Regions in which data may be gone that was written before the host was restarted.
    lost: Option<RegionSet>,
}

impl WriteIntentLog {
    /// Creates the sets of a volume without files on the disk, in the directory's `epoch`. The intent set
    /// begins as the given `intent`: empty if the volume is empty, full if its history is unknown. Its stamp
    /// is unknown then, too. Its file has to be made from [`WriteIntentLog::file`] before any region is
    /// marked dirty.
    #[must_use]
    pub fn new(regions: Regions, epoch: u64, intent: &RegionSet) -> WriteIntentLog {
        let mut set = PagedSet::empty(identity(regions, epoch, SetKey::Intent));
        for run in intent.runs(0) {
            set.add_durable(run);
        }
        if !intent.is_empty() {
            set.forget_stamp();
        }
        WriteIntentLog::with_intent(regions, epoch, set)
    }

    /// Returns the sets of a volume, with the intent set that is in a file.
    ///
    /// Damaged pages, and all pages from another epoch, count as full; their damage is returned too.
    #[must_use]
    pub fn load(regions: Regions, epoch: u64, intent: &[u8]) -> (WriteIntentLog, Vec<PageDamage>) {
        let (mut set, damages) = PagedSet::load(identity(regions, epoch, SetKey::Intent), intent);
        if !set.has_stamp_page {
            set.forget_stamp();
        }
        (WriteIntentLog::with_intent(regions, epoch, set), damages)
    }

    fn with_intent(regions: Regions, epoch: u64, intent: PagedSet) -> WriteIntentLog {
        let free = || Writing { what: None, number: 0, bits: [0; PAGE_WORDS], image: [0; PAGE_BYTES] };
        WriteIntentLog {
            regions,
            epoch,
            intent,
            out_of_sync: Vec::with_capacity(MAX_MEMBERS),
            sent: Members::NONE,
            unsummed: None,
            writes: (0..PAGE_WRITES_MAX).map(|_| free()).collect(),
            last_write: 0,
            last_serial: 0,
            lost: None,
        }
    }

    /// Adds the regions that `replica` misses from a file. Damaged pages count as full and are returned. A
    /// file of another epoch does not count: the function returns false, the set is not kept, and the file
    /// should be removed.
    ///
    /// # Errors
    /// [`IntentLogError::TooManySets`].
    pub fn load_out_of_sync(
        &mut self,
        replica: ReplicaId,
        file: &[u8],
    ) -> Result<(bool, Vec<PageDamage>), IntentLogError> {
        let (set, damages) = PagedSet::load(self.identity(SetKey::OutOfSync(replica)), file);
        if damages.contains(&PageDamage::Outdated) {
            return Ok((false, damages));
        }
        self.check_room(replica, 0)?;
        self.keep(NewSet { replica, set });
        Ok((true, damages))
    }

    fn identity(&self, key: SetKey) -> SetIdentity {
        identity(self.regions, self.epoch, key)
    }

    fn check_room(&self, replica: ReplicaId, others: usize) -> Result<(), IntentLogError> {
        let full = self.out_of_sync.len() + others >= MAX_MEMBERS;
        if full { Err(IntentLogError::TooManySets(replica)) } else { Ok(()) }
    }

    /// Returns the division of the volume into regions.
    #[must_use]
    pub fn regions(&self) -> Regions {
        self.regions
    }

    /// Returns the replicas whose out-of-sync sets are kept.
    #[must_use]
    pub fn tracks(&self) -> Members {
        // No more than fit.
        Members::new(self.out_of_sync.iter().map(|(replica, _)| *replica)).unwrap_or_default()
    }

    /// Returns true if a set was read from a file older than the last expansion of the volume, or without a
    /// page for the stamp. Then the file has to be recreated.
    #[must_use]
    pub fn is_outgrown(&self, key: SetKey) -> bool {
        self.find(key).is_some_and(|set| set.is_outgrown || !set.has_stamp_page)
    }

    /// Forgets the stamp that this replica was sent.
    pub fn forget_stamp(&mut self) {
        self.intent.forget_stamp();
    }

    fn sets(&self) -> impl Iterator<Item = (SetKey, &PagedSet)> {
        let out_of_sync = self.out_of_sync.iter().map(|(replica, set)| (SetKey::OutOfSync(*replica), set));
        let unsummed = self.unsummed.iter().map(|unsummed| (SetKey::Unsummed, &unsummed.set));
        std::iter::once((SetKey::Intent, &self.intent)).chain(out_of_sync).chain(unsummed)
    }

    fn sets_mut(&mut self) -> impl Iterator<Item = (SetKey, &mut PagedSet)> {
        let out_of_sync =
            self.out_of_sync.iter_mut().map(|(replica, set)| (SetKey::OutOfSync(*replica), set));
        let unsummed = self.unsummed.iter_mut().map(|unsummed| (SetKey::Unsummed, &mut unsummed.set));
        std::iter::once((SetKey::Intent, &mut self.intent)).chain(out_of_sync).chain(unsummed)
    }

    /// Returns the content of a set, if it is kept.
    #[must_use]
    pub fn content(&self, key: SetKey) -> Option<RegionSet> {
        self.find(key).map(PagedSet::content)
    }

    /// Returns the newest stamp that this replica was sent, unless the file that said so is lost.
    #[must_use]
    pub fn stamp(&self) -> Option<u32> {
        self.intent.stamp()
    }

    /// Returns the content of the file of a set, if it is kept.
    #[must_use]
    pub fn file(&self, key: SetKey) -> Option<Vec<u8>> {
        self.find(key).map(PagedSet::file)
    }

    fn find(&self, key: SetKey) -> Option<&PagedSet> {
        self.sets().find(|(of, _)| *of == key).map(|(_, set)| set)
    }

    fn find_mut(&mut self, key: SetKey) -> Option<&mut PagedSet> {
        self.sets_mut().find(|(of, _)| *of == key).map(|(_, set)| set)
    }

    /// Marks the regions of `range` dirty, which a modification is about to change: puts them into every set.
    /// Returns whether they are durably there, so that the modification may be executed.
    pub fn mark_dirty(&mut self, range: ByteRange) -> DirtyMark {
        let touched = self.regions.touched(range);
        let mut lacking = self.put_dirty(&touched);
        if let Some(unsummed) = &mut self.unsummed {
            lacking |= unsummed.modify(touched);
        }
        DirtyMark::of(lacking)
    }

    /// Marks regions dirty like [`WriteIntentLog::mark_dirty`], for a repair of rot. Its data has the sums
    /// that count, so that they count further. A crash may leave its blocks half written, and other rot in
    /// the region.
    pub fn mark_dirty_for_repair(&mut self, range: ByteRange) -> DirtyMark {
        let touched = self.regions.touched(range);
        let lacking = self.put_dirty(&touched);
        if let Some(unsummed) = &mut self.unsummed {
            unsummed.repair(touched);
        }
        DirtyMark::of(lacking)
    }

    /// Puts regions into the intent set and the out-of-sync sets. Returns the pages that have to be written
    /// before these are durable, as a mask.
    fn put_dirty(&mut self, touched: &Range<u32>) -> u64 {
        let mut lacking = self.intent.put(touched.clone());
        for (_, set) in &mut self.out_of_sync {
            lacking |= set.put(touched.clone());
        }
        lacking
    }

    /// Begins the next page write that is due. Returns none if no page is due, or enough writes are under
    /// way. With `lazy`, pages that have only lost regions count as due.
    pub fn begin_write(&mut self, lazy: bool) -> Option<PageWrite<'_>> {
        let slot = self.writes.iter().position(|writing| writing.what.is_none())?;
        let WriteIntentLog { intent, out_of_sync, unsummed, writes, .. } = self;
        let out_of_sync = out_of_sync.iter_mut().map(|(replica, set)| (SetKey::OutOfSync(*replica), set));
        let unsummed = unsummed.iter_mut().map(|unsummed| (SetKey::Unsummed, &mut unsummed.set));
        let mut sets = std::iter::once((SetKey::Intent, intent)).chain(out_of_sync).chain(unsummed);
        let (key, set, number) = sets.find_map(|(key, set)| {
            let number = set.next_page(lazy)?;
            Some((key, set, number))
        })?;
        self.last_write += 1;
        let writing = &mut writes[slot];
        writing.what = Some((set.serial, number));
        writing.number = self.last_write;
        set.begin_write(number, &mut writing.image, &mut writing.bits);
        // There are fewer writes at once, and fewer pages, than these types count.
        #[allow(clippy::cast_possible_truncation)]
        Some(PageWrite { slot: slot as u8, key, page: number as u32, bytes: &writing.image })
    }

    /// Ends a page write: the page is durable, or has to be written again.
    pub fn end_write(&mut self, slot: u8, well: bool) {
        let Some(writing) = self.writes.get_mut(usize::from(slot)) else { return };
        let Some((serial, number)) = writing.what.take() else { return };
        let WriteIntentLog { intent, out_of_sync, unsummed, .. } = self;
        let out_of_sync = out_of_sync.iter_mut().map(|(_, set)| set);
        let unsummed = unsummed.iter_mut().map(|unsummed| &mut unsummed.set);
        let mut sets = std::iter::once(intent).chain(out_of_sync).chain(unsummed);
        // A set may have been forgotten meanwhile.
        if let Some(set) = sets.find(|set| set.serial == serial) {
            set.end_write(number, &writing.bits, writing.number, well);
        }
    }

    /// Returns true if a page is being written.
    #[must_use]
    pub fn is_writing(&self) -> bool {
        self.writes.iter().any(|writing| writing.what.is_some())
    }

    /// Returns true if the change of the ticket is durable.
    #[must_use]
    pub fn is_durable(&self, ticket: &Ticket) -> bool {
        // A set that was forgotten has nothing to be durable.
        let found = self.sets().find(|(_, set)| set.serial == ticket.serial);
        found.is_none_or(|(_, set)| set.written_since(ticket.pages, ticket.after))
    }

    /// Begins the connection of an engine, which has sent no set yet.
    pub fn opened(&mut self) {
        self.sent = Members::NONE;
    }

    /// Changes a set for the engine.
    ///
    /// # Errors
    /// [`IntentLogError`]; nothing has changed then.
    pub fn mark(&mut self, mark: &MarkRegions) -> Result<Marked, IntentLogError> {
        let marked = self.change(mark)?;
        if let (RegionsOf::OutOfSync(replica), MarkAction::Add) = (mark.of, mark.action)
            && !self.sent.contains(replica)
        {
            self.sent = Members::new(self.sent.iter().chain([replica])).unwrap_or(self.sent);
        }
        Ok(marked)
    }

    fn change(&mut self, mark: &MarkRegions) -> Result<Marked, IntentLogError> {
        let MarkRegions { of, action, runs, stamp, size_bytes } = mark;
        let theirs = size_bytes.map_or(self.regions, Regions::of);
        check_runs(runs, theirs.count())?;
        let (ours, is_add) = (self.regions, *action == MarkAction::Add);
        // With another size of the volume, at least the given regions are added, and at most the given ones
        // removed.
        let here = move |run: Range<u32>| match is_add {
            _ if ours == theirs => run,
            true => ours.touched(theirs.bytes(run)),
            false => ours.within(theirs.bytes(run)),
        };
        let runs = || runs.iter().map(|(first, count)| here(*first..first.saturating_add(*count)));
        let after = self.last_write;
        let key = match (of, action) {
            (RegionsOf::OutOfSync(replica), MarkAction::Forget) => {
                let kept = self.find(SetKey::OutOfSync(*replica)).is_some();
                return Ok(if kept { Marked::Remove(*replica) } else { Marked::Done });
            }
            (RegionsOf::Intent, MarkAction::Stamp) => {
                let pages = self.intent.put_stamp(*stamp);
                self.intent.demand(pages);
                return Ok(Marked::Wait(Ticket { serial: self.intent.serial, pages, after }));
            }
            (RegionsOf::OutOfSync(replica), MarkAction::Add | MarkAction::Clear) => {
                SetKey::OutOfSync(*replica)
            }
            (RegionsOf::Intent, MarkAction::Add | MarkAction::Clear) => SetKey::Intent,
            _ => return Err(IntentLogError::Unsupported { of: *of, action: *action }),
        };
        let mut stamp_page = 0;
        if let (Some(set), SetKey::OutOfSync(_)) = (self.find_mut(key), key) {
            stamp_page = set.raise_stamp(*stamp);
        }
        match (self.find_mut(key), action, key) {
            (Some(set), MarkAction::Add, _) => {
                let pages = runs().fold(stamp_page, |pages, run| pages | set.put(run));
                set.demand(pages);
                let ticket = Ticket { serial: set.serial, pages, after };
                Ok(if pages == 0 { Marked::Done } else { Marked::Wait(ticket) })
            }
            (None, MarkAction::Add, SetKey::OutOfSync(replica)) => {
                self.check_room(replica, 0)?;
                let mut set = PagedSet::empty(self.identity(key));
                set.raise_stamp(*stamp);
                runs().for_each(|run| set.add_durable(run));
                // A modification that is being executed has marked its regions dirty before the set counts.
                set.add_all_durable(&self.intent);
                Ok(Marked::Begin(NewSet { replica, set }))
            }
            (Some(set), _, _) => {
                runs().for_each(|run| set.clear(run));
                if key == SetKey::Intent {
                    self.found_again(runs());
                }
                Ok(Marked::Done)
            }
            (None, _, _) => Ok(Marked::Done),
        }
    }

    /// Returns the replicas whose sets end before a proposal that makes `me` a member. It was no member for a
    /// time, so its sets lack the writes of that time, except those that the engine has sent.
    #[must_use]
    pub fn incomplete(&self, me: ReplicaId, basis: &ReplicaReport) -> Members {
        let is_member = was_member(me, basis);
        self.tracks().filter(|replica| !is_member && !self.sent.contains(replica))
    }

    /// Returns the sets that begin with the proposal of `target`. Each is for a replica other than `me` that
    /// is in a known view and not in this one. They begin as the intent set, which has everything that such a
    /// replica may lack. A set that is kept already is at least that large, and stays.
    ///
    /// The views that only this replica knows do not count if it becomes a member. A replica may have left
    /// them while this one was away: the engine has sent its set, or copies everything to it.
    ///
    /// Keep them before the view is stored, else a crash in between leaves a view without the set that it
    /// needs.
    ///
    /// # Errors
    /// [`IntentLogError::TooManySets`].
    pub fn on_propose(
        &self,
        me: ReplicaId,
        known: &ReplicaReport,
        basis: &ReplicaReport,
        target: &View,
    ) -> Result<Vec<NewSet>, IntentLogError> {
        let mut new: Vec<NewSet> = Vec::new();
        let known = known.views().filter(|_| was_member(me, basis));
        for replica in known.chain(basis.views()).flat_map(|view| view.members.iter()) {
            let kept = self.find(SetKey::OutOfSync(replica)).is_some()
                || new.iter().any(|new| new.replica == replica);
            if kept || replica == me || target.members.contains(replica) {
                continue;
            }
            self.check_room(replica, new.len())?;
            let mut set = PagedSet::empty(self.identity(SetKey::OutOfSync(replica)));
            set.raise_stamp(self.intent.stamp().unwrap_or(0));
            set.add_all_durable(&self.intent);
            new.push(NewSet { replica, set });
        }
        Ok(new)
    }

    /// Returns the replicas whose sets end because they are members again according to `report`. They are in
    /// the committed view and in every proposed one after it, because any of these views may count. The
    /// caller removes their files after the views are stored, and forgets the sets afterwards.
    #[must_use]
    pub fn on_commit(&self, report: &ReplicaReport) -> Members {
        self.tracks().filter(|replica| report.views().all(|view| view.members.contains(replica)))
    }

    /// Keeps a set whose file exists.
    pub fn keep(&mut self, new: NewSet) {
        let NewSet { replica, mut set } = new;
        debug_assert!(self.find(SetKey::OutOfSync(replica)).is_none(), "a set is kept once");
        self.last_serial += 1;
        set.serial = self.last_serial;
        self.out_of_sync.push((replica, set));
    }

    /// Keeps the out-of-sync set of `replica` no longer. Its file is gone.
    pub fn forget(&mut self, replica: ReplicaId) {
        self.out_of_sync.retain(|(of, _)| *of != replica);
    }

    /// Records that the host was restarted, or the disk has failed, while data was not durable.
    /// [`WriteIntentLog::has_lost_cache`] is true until every region that is in the intent set now has been
    /// cleared from it.
    pub fn lost_cache(&mut self) {
        self.lost = Some(self.intent.content()).filter(|lost| !lost.is_empty());
    }

    /// Returns true if data may be gone that was written before the host was restarted.
    #[must_use]
    pub fn has_lost_cache(&self) -> bool {
        self.lost.is_some()
    }

    /// Clears these regions of the loss, because all members are equal there.
    fn found_again(&mut self, runs: impl Iterator<Item = Range<u32>>) {
        let Some(lost) = &mut self.lost else { return };
        runs.for_each(|run| lost.remove_run(run));
        if lost.is_empty() {
            self.lost = None;
        }
    }
}

fn identity(regions: Regions, epoch: u64, key: SetKey) -> SetIdentity {
    SetIdentity { name: key.name(), regions, epoch }
}

/// Returns true if the replica has been a member all the time, so that it becomes none by a proposal.
fn was_member(me: ReplicaId, basis: &ReplicaReport) -> bool {
    basis.views().all(|view| view.members.contains(me))
}

fn check_runs(runs: &[(u32, u32)], limit: u32) -> Result<(), IntentLogError> {
    if runs.len() > RUNS_PER_MARK_MAX {
        return Err(IntentLogError::TooManyRuns(runs.len()));
    }
    let bad = runs.iter().find(|(first, count)| first.checked_add(*count).is_none_or(|end| end > limit));
    bad.map_or(Ok(()), |(first, count)| Err(IntentLogError::Runs { first: *first, count: *count, limit }))
}

#[cfg(test)]
mod tests;
