//! Clears regions from the durable sets after every member has flushed. Write intent is cleared when a region
//! was not written for a while. Out-of-sync regions are cleared once they are copied to their replica. Before
//! its end the engine runs a final clearing: it clears all that it can once, without waiting for regions to
//! cool.
//!
//! Between the flush and the clearing every member stores three stamps: see [`shorthorn_types::is_current`].
//! If a disk is restored to a state before the flush, the engine sees that by the stamp. The intent sets do
//! not note the missing regions of such a disk any more.

use shorthorn_types::{MarkAction, MarkRegions, RUNS_PER_MARK_MAX, RegionSet, RegionsOf};

use crate::engine::EngineCore;
use crate::event::{Output, Outputs};
use crate::marks::Marks;
use crate::membership::{PeerIndex, PeerMask};

/// While no more than [`CoreConfig::intent_keep_bytes`](crate::CoreConfig) are dirty, turns are so many times
/// rarer: a region that is in use now and then is not marked dirty again and again.
const CALM_INTERVALS: u64 = 12;

/// The state of clearing.
#[derive(Debug)]
pub(crate) struct Clearing {
    phase: ClearingPhase,
    final_clearing: FinalClearing,
    /// The interval in milliseconds; 0 disables clearing.
    interval_ms: u64,
    keep_bytes: u64,
    turned_at_ms: u64,
    /// Replicas that were sent the flush and have not failed since.
    pub flushed: PeerMask,
    pub marks: Marks,
    /// The replica whose out-of-sync set the outstanding mark clears. None: the write intent.
    of: Option<PeerIndex>,
    /// The newest stamp that any replica was sent.
    stamp: u32,
    /// All members have stored it.
    is_level: bool,
}

/// The number of new stamps after a flush. The first may equal the last one of an earlier engine, which some
/// members have stored and this engine does not know. A member that is restored to a state before the flush
/// is two behind even so. It also is if only members are left that lack the last one.
const STAMPS_PER_TURN: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClearingPhase {
    Resting,
    WantsFlush,
    Flushing,
    /// The number of new stamps to send.
    Stamping(u32),
    Marking,
}

/// The state of the turn that clears all that it can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FinalClearing {
    No,
    /// A turn is wanted and begins when the one before has ended.
    Wanted,
    UnderWay,
}

impl Clearing {
    pub fn new(interval_ms: u64, keep_bytes: u64, stamp: u32) -> Clearing {
        Clearing {
            // All members store the newest stamp at once, so that a member that has lost its own stamp has
            // one again.
            phase: ClearingPhase::Stamping(0),
            final_clearing: FinalClearing::No,
            interval_ms,
            keep_bytes,
            turned_at_ms: 0,
            flushed: PeerMask::NONE,
            marks: Marks::default(),
            of: None,
            stamp,
            is_level: false,
        }
    }

    pub fn stamp(&self) -> u32 {
        self.stamp
    }

    /// Returns a stamp that no replica is current with before the end of the next turn.
    pub fn stamp_of_nobody(&self) -> u32 {
        self.stamp.saturating_add(2)
    }

    /// Returns true if a flush has to be sent; it counts as sent then.
    pub fn takes_flush(&mut self) -> bool {
        let wants = self.phase == ClearingPhase::WantsFlush;
        if wants {
            self.phase = ClearingPhase::Flushing;
        }
        wants
    }

    pub fn flush_answered(&mut self, is_durable: bool) {
        self.phase =
            if is_durable { ClearingPhase::Stamping(STAMPS_PER_TURN) } else { ClearingPhase::Resting };
    }

    /// Returns true if it is time for a turn.
    fn is_due(&self, now_ms: u64, dirty_bytes: u64, is_rebuilding: bool) -> bool {
        // The progress of a rebuilding replica is recorded with a turn too.
        let is_calm = dirty_bytes <= self.keep_bytes && !is_rebuilding;
        let interval_ms = self.interval_ms * if is_calm { CALM_INTERVALS } else { 1 };
        self.interval_ms > 0 && now_ms >= self.turned_at_ms + interval_ms
    }

    /// Handles the failure of `peer`: a flush that it answers after it has come back belongs to a later turn.
    /// If `peer` is a member, the engine sends no new stamp before all members have stored the newest one.
    pub fn forget(&mut self, peer: PeerIndex, is_member: bool) {
        self.flushed = self.flushed.without(PeerMask::one(peer));
        if is_member {
            self.is_level = false;
            if matches!(self.phase, ClearingPhase::Stamping(_)) {
                self.marks.abandon();
                self.phase = ClearingPhase::Resting;
            }
        }
    }
}

impl EngineCore {
    /// Clears all that can be cleared once, as soon as possible; requests continue. Then
    /// [`Output::ClearedAll`] follows.
    pub(crate) fn clear_all(&mut self) {
        self.clearing.final_clearing = FinalClearing::Wanted;
        self.wake.work();
    }

    /// Takes a turn when it is time and the last one has led to its end.
    pub(crate) fn turn_intent(&mut self) {
        let is_last = self.clearing.final_clearing == FinalClearing::Wanted;
        if self.clearing.phase != ClearingPhase::Resting || self.is_paused() {
            return;
        }
        let dirty_bytes = self.regions.region_bytes() * u64::from(self.intent.kept());
        let is_rebuilding = !self.membership.rebuilding().is_empty();
        let copies_wait = self.has_copies_without_stamps();
        if !is_last && !copies_wait && !self.clearing.is_due(self.clock.now_ms(), dirty_bytes, is_rebuilding) {
            return;
        }
        self.clearing.turned_at_ms = self.clock.now_ms();
        if is_last {
            self.clearing.final_clearing = FinalClearing::UnderWay;
            self.intent.cool_down();
            self.wake.work();
        }
        let regions = self.regions;
        let in_flight = self.slots.modified(regions).chain(self.jobs.touched(regions));
        // The engine sends stamps even if it can clear nothing.
        let is_in_use = self.intent.is_in_use();
        let mut is_worth_it = self.intent.turn(in_flight) || is_in_use || copies_wait;
        for peer in self.membership.rebuilding().iter() {
            let Some(absent) = &mut self.absent[usize::from(peer)] else { continue };
            absent.covered.clear();
            absent.covered.insert_all(&absent.copied);
            self.slots.modified(regions).for_each(|touched| absent.covered.remove_run(touched));
            is_worth_it |= !absent.covered.is_empty();
        }
        if is_worth_it {
            self.clearing.phase = ClearingPhase::WantsFlush;
            self.wake.work();
        }
    }

    /// Returns true if a rebuilding replica was made anew, and would be again if it were lost now: see
    /// [`EngineCore::is_in_copy`].
    fn has_copies_without_stamps(&self) -> bool {
        self.clearing.interval_ms > 0
            && self.membership.rebuilding().iter().any(|peer| self.stamp_of(peer) > self.clearing.stamp)
    }

    /// Sends the next stamp after every member has stored the one before.
    pub(crate) fn stamp_next(&mut self, out: &mut Outputs) {
        let ClearingPhase::Stamping(left) = self.clearing.phase else { return };
        if self.clearing.marks.is_outstanding() {
            return;
        }
        let to = self.membership.answering().with(self.membership.rebuilding());
        self.clearing.phase = match left {
            _ if to.is_empty() => ClearingPhase::Resting,
            left if !self.clearing.is_level => {
                self.clearing.is_level = true;
                ClearingPhase::Stamping(left)
            }
            0 => {
                self.record_stamp_of_rebuilding();
                ClearingPhase::Marking
            }
            left => {
                self.clearing.stamp = self.clearing.stamp.saturating_add(1);
                ClearingPhase::Stamping(left - 1)
            }
        };
        if matches!(self.clearing.phase, ClearingPhase::Stamping(_)) {
            let (number, change) = (self.next_mark(), self.stamp_mark());
            self.clearing.marks.send(number, to, &change, self.clock.now_ms(), out);
        }
    }

    /// Records the stamp of the rebuilding replicas when the members are about to clear regions that
    /// rebuilding replicas do not miss. Rebuilding replicas were sent the writes there, and no out-of-sync
    /// set counts them: if a rebuilding replica comes back without this stamp, it lacks those writes.
    fn record_stamp_of_rebuilding(&mut self) {
        for peer in self.membership.rebuilding().and(self.clearing.flushed).iter() {
            if let Some(absent) = &mut self.absent[usize::from(peer)] {
                absent.stamp = absent.stamp.max(self.clearing.stamp);
            }
        }
    }

    /// Returns the mark that has a replica store the newest stamp.
    pub(crate) fn stamp_mark(&self) -> MarkRegions {
        MarkRegions::stamp(self.clearing.stamp)
    }

    /// Sends the next mark when the one before is answered.
    pub(crate) fn clear_next(&mut self, out: &mut Outputs) {
        let is_ready = self.clearing.phase == ClearingPhase::Marking && !self.clearing.marks.is_outstanding();
        if !is_ready || self.is_changing_regions() {
            return;
        }
        let (runs, to) = self.clear_intent();
        if !runs.is_empty() {
            let to = self.clearing.flushed.and(to);
            self.clearing.of = None;
            return self.send_clear(RegionsOf::Intent, runs, to, out);
        }
        for peer in self.membership.rebuilding().and(self.clearing.flushed).iter() {
            let Some(replica) = self.membership.replica(peer) else { continue };
            let Some(absent) = &mut self.absent[usize::from(peer)] else { continue };
            absent.covered.remove_all(&absent.out_of_sync);
            let runs = self.intent.clear_some_of(&mut absent.covered, RUNS_PER_MARK_MAX);
            if !runs.is_empty() {
                let to = self.clearing.flushed.and(self.membership.answering());
                self.clearing.of = Some(peer);
                return self.send_clear(RegionsOf::OutOfSync(replica), runs, to, out);
            }
        }
        self.clearing.phase = ClearingPhase::Resting;
    }

    /// Returns some regions that can be cleared, and the replicas that clear them. These are the members and
    /// the rebuilding replicas that do not miss the regions. If a rebuilding replica misses a region, only
    /// the rebuilding replica has recorded durably that it may differ there. The rebuilding replica keeps
    /// that note until the region is copied to it, which makes the region hot again.
    fn clear_intent(&mut self) -> (Vec<(u32, u32)>, PeerMask) {
        let mut to = self.membership.answering();
        let rebuilding = self.membership.rebuilding();
        let Some(first) = self.intent.first_covered().filter(|_| !rebuilding.is_empty()) else {
            return (self.intent.clear_some(RUNS_PER_MARK_MAX), to.with(rebuilding));
        };
        let mut alike = RegionSet::empty(self.regions.count());
        alike.insert_run(0..self.regions.count());
        for peer in rebuilding.iter() {
            let Some(absent) = &self.absent[usize::from(peer)] else { continue };
            if absent.out_of_sync.contains(first) {
                alike.keep_all(&absent.out_of_sync);
            } else {
                alike.remove_all(&absent.out_of_sync);
                to = to.with(PeerMask::one(peer));
            }
        }
        (self.intent.clear_some_within(&alike, RUNS_PER_MARK_MAX), to)
    }

    /// Reports the end of the turn that clears all it can, or its failure.
    pub(crate) fn report_cleared_all(&mut self, out: &mut Outputs) {
        if self.clearing.final_clearing == FinalClearing::UnderWay
            && self.clearing.phase == ClearingPhase::Resting
        {
            self.clearing.final_clearing = FinalClearing::No;
            out.push(Output::ClearedAll);
        }
    }

    fn send_clear(&mut self, of: RegionsOf, runs: Vec<(u32, u32)>, to: PeerMask, out: &mut Outputs) {
        if to.is_empty() {
            // All that were flushed have left: there will be another turn.
            self.intent.keep();
            self.clearing.phase = ClearingPhase::Resting;
            self.wake.all();
            return;
        }
        let number = self.next_mark();
        let size_bytes = self.regions.size_bytes();
        let stamp = self.clearing.stamp;
        let change = MarkRegions { of, action: MarkAction::Clear, runs, stamp, size_bytes };
        self.clearing.marks.send(number, to, &change, self.clock.now_ms(), out);
    }

    /// Ends the mark, which every replica has answered: modifications of its regions continue.
    pub(crate) fn cleared(&mut self) {
        if self.clearing.phase != ClearingPhase::Marking {
            self.wake.work();
            return;
        }
        match self.clearing.of.take() {
            None => self.intent.cleared(),
            Some(peer) => {
                let absent = self.absent.get_mut(usize::from(peer)).and_then(Option::as_mut);
                self.intent.cleared_of(absent.map(|absent| &mut absent.copied));
            }
        }
        self.wake.all();
    }
}
