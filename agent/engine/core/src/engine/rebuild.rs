//! Brings replicas outside the view back: counts the regions that they miss ([`crate::absent`]), rebuilds
//! them, and makes them members ([`crate::rebuild_end`]).

use shorthorn_types::{ByteRange, RegionSet};

use super::EngineCore;
use crate::copy::{Copy, CopyReason};
use crate::event::{DropCause, Output, Outputs};
use crate::job::Job;
use crate::marks::MarkFor;
use crate::membership::{PeerConfig, PeerIndex, PeerMask, PeerState};
use crate::ranges::RangeAccess;
use crate::rebuild_end::FinalStep;
use crate::slot::SlotId;

impl EngineCore {
    /// Starts to count the regions that `peer` misses.
    pub(super) fn count(&mut self, peer: PeerIndex) {
        let mut may_differ = self.resync.left().clone();
        self.intent.add_dirty_to(&mut may_differ);
        self.absent.count(peer, &may_differ, self.clearing.stamp());
    }

    /// Tracks a replica outside the view that may become a member (again).
    pub(super) fn track(&mut self, peer: PeerIndex, config: PeerConfig) {
        if self.membership.state(peer) != PeerState::Failed || self.membership.in_view().has(peer) {
            return; // it is counted, or will be when it leaves
        }
        let is_known = self.membership.replica(peer) == Some(config.replica);
        if is_known && self.absent.is_counted(peer) {
            return; // all that it misses is counted already
        }
        self.membership.know(peer, config);
        if !is_known {
            self.jobs.replaced(peer);
            self.slots.forget(peer);
        }
        self.absent.stop_counting(peer);
        self.count(peer);
        self.distrust(peer);
    }

    /// Begins to rebuild a connected replica outside the view.
    pub(super) fn rebuild(&mut self, peer: PeerIndex, missing: &RegionSet, out: &mut Outputs) {
        if self.membership.state(peer) != PeerState::Failed {
            return;
        }
        if let Some(reason) = self.cannot_rebuild(peer) {
            return out.push(Output::Drop { peer, reason, cause: DropCause::Unused });
        }
        self.absent.start_rebuild(peer, missing);
        self.slots.forget(peer);
        self.closed.reopen(peer);
        self.timeouts.forgive(peer, self.clock.now_ms());
        self.membership.start_rebuild(peer);
        self.restart_finish();
        self.wake.work();
    }

    fn cannot_rebuild(&self, peer: PeerIndex) -> Option<String> {
        if !self.absent.is_counted(peer) {
            Some("the regions that it has missed are not known".to_owned())
        } else if self.membership.in_view().has(peer) {
            Some("the change to the view without the replica is not complete yet".to_owned())
        } else if self.slots.active().any(|slot| slot.pending().has(peer)) {
            Some("the last connections of the replica are not closed yet".to_owned())
        } else {
            None
        }
    }

    /// Forgets a replica outside the view that is given up.
    pub(super) fn forget(&mut self, peer: PeerIndex, out: &mut Outputs) {
        if self.membership.state(peer) == PeerState::Member {
            return;
        }
        self.lose(peer, "given up".to_owned(), out);
        self.membership.forget(peer);
        self.absent.stop_counting(peer);
        self.restart_finish();
        self.wake.work();
    }

    /// Starts to copy the next region that a rebuilding replica misses, to all that miss it.
    pub(super) fn start_rebuild_copy(&mut self, id: SlotId, out: &mut Outputs) -> bool {
        let rebuilding = self.membership.rebuilding();
        let Some(region) = self.absent.next_to_copy(rebuilding, &self.jobs) else { return false };
        let range = self.size.regions().range(region);
        if !self.bucket.take(range.length()) {
            return false;
        }
        let targets = self.absent.start_copy(region, rebuilding);
        self.take_slot(id, Job::Copy(Copy::new(CopyReason::Rebuild { region }, range, targets)));
        // It repairs members that hold rot there: until that is done, a verified read of them shows the rot,
        // which has no sums any more.
        let access = if self.verify_reads { RangeAccess::Modify } else { RangeAccess::Rebuild };
        if self.dispatch.enter(id, range, access) {
            self.advance(id, out);
        }
        true
    }

    /// Handles the end of a region's copy. When the copy began, `range` was all of the region. It was copied
    /// to the remaining ones of `targets`. If the region has grown since, they still miss it, because they
    /// were not sent modifications of the new part.
    pub(super) fn region_rebuilt(&mut self, region: u32, range: ByteRange, targets: PeerMask) {
        if self.size.regions().range(region) == range {
            self.absent.copied(region, targets);
        }
    }

    /// Takes the next step of the replica that becomes a member next.
    pub(super) fn finish_rebuild(&mut self, out: &mut Outputs) {
        if self.resync.is_under_way() {
            return;
        }
        if !self.rebuilds.is_finishing() {
            return self.rebuilds.choose(self.membership.rebuilding(), &self.absent);
        }
        if self.marks.is_outstanding(MarkFor::Rebuilding) {
            return;
        }
        let (stamp, size_bytes) = (self.clearing.stamp(), self.size.regions().size_bytes());
        match self.rebuilds.next_step(&self.membership, &self.absent, stamp, size_bytes) {
            FinalStep::Wait => {}
            FinalStep::Send(peer, change) => {
                let to = PeerMask::one(peer);
                self.marks.send(MarkFor::Rebuilding, to, &change, self.clock.now_ms(), out);
            }
            // A repair that follows from a check is something that it would miss.
            FinalStep::Propose(_) if self.jobs.is_checking() => {}
            FinalStep::Propose(peer) => self.propose_rebuilt(peer, out),
        }
    }

    fn propose_rebuilt(&mut self, peer: PeerIndex, out: &mut Outputs) {
        self.restart_finish();
        if self.absent.is_up_to_date(peer) {
            let step = self.membership.admit(peer);
            self.follow(step, out);
        } else {
            self.wake.work();
        }
    }

    /// Makes the replica that becomes a member next take all steps again.
    pub(super) fn restart_finish(&mut self) {
        self.rebuilds.start_over();
        self.marks.abandon(MarkFor::Rebuilding);
    }

    /// Continues the last steps after every replica has answered the flush.
    pub(super) fn rebuild_flushed(&mut self, slot: SlotId, is_durable: bool, out: &mut Outputs) {
        if let Some(peer) = self.rebuilds.flush_answered(slot, is_durable) {
            self.lose(peer, "the last member cannot flush".to_owned(), out);
        }
    }
}
