//! Runs the clearing cycles: see [`crate::clearing`].

use shorthorn_types::{MarkAction, MarkRegions, RUNS_PER_MARK_MAX, RegionsOf};

use super::EngineCore;
use crate::clearing::{ClearedSet, StampStep};
use crate::event::{Output, Outputs};
use crate::marks::MarkFor;
use crate::membership::{PeerIndex, PeerMask};

impl EngineCore {
    /// Clears all that can be cleared once, as soon as possible; requests continue. Then
    /// [`Output::ClearedAll`] follows.
    pub(super) fn clear_all(&mut self) {
        self.clearing.want_final();
        self.wake.work();
    }

    /// Starts a cycle when it is time and the last one has ended.
    pub(super) fn start_clearing_cycle(&mut self) {
        if !self.clearing.is_resting() || self.is_paused() {
            return;
        }
        let regions = self.size.regions();
        let rebuilding = self.membership.rebuilding();
        let dirty_bytes = regions.region_bytes() * u64::from(self.intent.left_dirty());
        let copies_wait = self.has_copies_without_stamps();
        let now_ms = self.clock.now_ms();
        if !copies_wait && !self.clearing.is_due(now_ms, dirty_bytes, !rebuilding.is_empty()) {
            return;
        }
        if self.clearing.start_cycle(now_ms) {
            self.intent.age_all();
            self.wake.work();
        }
        let in_flight = self.slots.modified(regions).chain(self.jobs.touched(regions));
        // The engine sends stamps even if it can clear nothing.
        let is_in_use = self.intent.is_in_use();
        let may_clear_intent = self.intent.start_cycle(in_flight);
        let may_clear_copied = self.absent.start_cycle(rebuilding, || self.slots.modified(regions));
        if may_clear_intent || may_clear_copied || is_in_use || copies_wait {
            self.clearing.want_flush();
            self.wake.work();
        }
    }

    /// Returns true if a rebuilding replica receives a full copy whose next stamps were not sent yet: see
    /// [`EngineCore::start_full_copy`].
    fn has_copies_without_stamps(&self) -> bool {
        let lacks_stamp = |peer| self.absent.stamp_of(peer) > Some(self.clearing.stamp());
        self.clearing.is_enabled() && self.membership.rebuilding().iter().any(lacks_stamp)
    }

    /// Sends the next stamp after every member has stored the one before.
    pub(super) fn stamp_next(&mut self, out: &mut Outputs) {
        if self.marks.is_outstanding(MarkFor::Clearing) {
            return;
        }
        let to = self.membership.connected();
        match self.clearing.next_stamp(!to.is_empty()) {
            StampStep::Nothing => {}
            StampStep::Send => {
                let change = MarkRegions::stamp(self.clearing.stamp());
                self.marks.send(MarkFor::Clearing, to, &change, self.clock.now_ms(), out);
            }
            // The members are about to clear regions that rebuilding replicas do not miss. Rebuilding
            // replicas were sent the writes there, and no out-of-sync set counts them. If a rebuilding
            // replica comes back without this stamp, it lacks those writes.
            StampStep::AllStored => {
                let stamped = self.membership.rebuilding().and(self.clearing.flushed());
                self.absent.stamped(stamped, self.clearing.stamp());
            }
        }
    }

    /// Sends the next mark when the one before is answered.
    pub(super) fn clear_next(&mut self, out: &mut Outputs) {
        let is_ready = self.clearing.is_marking() && !self.marks.is_outstanding(MarkFor::Clearing);
        if !is_ready || self.size.is_changing_regions() {
            return;
        }
        let flushed = self.clearing.flushed();
        let (runs, to) = self.clear_intent();
        if !runs.is_empty() {
            self.clearing.mark(ClearedSet::Intent);
            return self.send_clear(RegionsOf::Intent, runs, flushed.and(to), out);
        }
        for peer in self.membership.rebuilding().and(flushed).iter() {
            let Some(replica) = self.membership.replica(peer) else { continue };
            let runs = self.absent.clear_some(peer, &mut self.intent);
            if !runs.is_empty() {
                self.clearing.mark(ClearedSet::OutOfSyncOf(peer));
                let to = flushed.and(self.membership.answering());
                return self.send_clear(RegionsOf::OutOfSync(replica), runs, to, out);
            }
        }
        self.clearing.rest();
    }

    /// Returns some regions that can be cleared, and the replicas that clear them. These are the members and
    /// the rebuilding replicas that do not miss the regions. If a rebuilding replica misses a region, only
    /// the rebuilding replica has recorded durably that it may differ there. The rebuilding replica keeps
    /// that record until the region is copied to it, which makes the region hot again.
    fn clear_intent(&mut self) -> (Vec<(u32, u32)>, PeerMask) {
        let members = self.membership.answering();
        let rebuilding = self.membership.rebuilding();
        let Some(first) = self.intent.first_covered().filter(|_| !rebuilding.is_empty()) else {
            return (self.intent.clear_some(RUNS_PER_MARK_MAX), members.with(rebuilding));
        };
        let (alike, sound) = self.absent.alike(first, rebuilding, self.size.regions().count());
        (self.intent.clear_some_within(&alike, RUNS_PER_MARK_MAX), members.with(sound))
    }

    /// Reports the end of the cycle that clears all it can, or its failure.
    pub(super) fn report_cleared_all(&mut self, out: &mut Outputs) {
        if self.clearing.take_final_end() {
            out.push(Output::ClearedAll);
        }
    }

    fn send_clear(&mut self, of: RegionsOf, runs: Vec<(u32, u32)>, to: PeerMask, out: &mut Outputs) {
        if to.is_empty() {
            // All that were flushed have left: another cycle follows.
            self.intent.keep();
            self.clearing.rest();
            self.wake.all();
            return;
        }
        let size_bytes = Some(self.size.regions().size_bytes());
        let change =
            MarkRegions { of, action: MarkAction::Clear, runs, stamp: self.clearing.stamp(), size_bytes };
        self.marks.send(MarkFor::Clearing, to, &change, self.clock.now_ms(), out);
    }

    pub(super) fn marked(&mut self, peer: PeerIndex, mark: u32) {
        match self.marks.answered(peer, mark) {
            Some(MarkFor::Clearing) => self.cleared(),
            Some(MarkFor::Rebuilding) => self.wake.work(),
            None => {}
        }
    }

    /// Ends the mark, which every replica has answered: modifications of its regions continue.
    fn cleared(&mut self) {
        match self.clearing.marked() {
            None => return self.wake.work(),
            Some(ClearedSet::Intent) => self.intent.cleared(),
            Some(ClearedSet::OutOfSyncOf(peer)) => self.absent.cleared(peer, &mut self.intent),
        }
        self.wake.all();
    }

    /// Stops waiting for the answers of `peer` to marks.
    pub(super) fn forget_marks_of(&mut self, peer: PeerIndex) {
        if self.clearing.forget(peer, self.membership.in_view().has(peer)) {
            self.marks.abandon(MarkFor::Clearing);
        }
        if self.marks.forget(MarkFor::Clearing, peer) {
            self.cleared();
        }
        // The out-of-sync sets of the others have grown: a replica that is about to be a member has to get
        // them again.
        self.restart_finish();
    }
}
