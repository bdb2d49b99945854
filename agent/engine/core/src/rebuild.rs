//! Brings replicas outside the view back: counts the regions that they miss, rebuilds them, and makes them
//! members.

use shorthorn_types::{
    ByteRange, MarkAction, MarkRegions, RUNS_PER_MARK_MAX, RegionSet, RegionsOf, ReplicaId,
};

use crate::engine::EngineCore;
use crate::event::{DropCause, Output, Outputs};
use crate::job::{Copy, Job, Why};
use crate::marks::Marks;
use crate::membership::{PeerConfig, PeerIndex, PeerMask, PeerState};
use crate::ranges::Access;
use crate::slot::SlotId;

/// The progress of the next replica to become a member: it misses no more data. Others wait.
#[derive(Debug, Default)]
pub(crate) struct Rebuilds {
    next: Option<(PeerIndex, RebuildStep)>,
    pub marks: Marks,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RebuildStep {
    WantsFlush,
    Flushing(SlotId),
    /// The rebuilding replica stores the newest stamp, as the members have.
    Stamping,
    /// The rebuilding replica receives the out-of-sync sets of the other absent replicas. First it learns
    /// that each set exists, so that it adds later modifications itself. Then it gets the contents.
    SendingSets {
        absent: PeerIndex,
        from: Option<u32>,
    },
}

impl Rebuilds {
    /// Returns true if a flush has to be sent; it counts as sent in `slot` then.
    pub fn takes_flush(&mut self, slot: SlotId) -> bool {
        let Some((_, step @ RebuildStep::WantsFlush)) = &mut self.next else { return false };
        *step = RebuildStep::Flushing(slot);
        true
    }

    /// Starts over after the members' agreement or the out-of-sync sets of others have changed.
    pub fn start_over(&mut self) {
        self.next = None;
        self.marks.abandon();
    }
}

impl EngineCore {
    /// Tracks a replica outside the view that may come (back).
    pub(crate) fn track(&mut self, peer: PeerIndex, config: PeerConfig) {
        if self.membership.state(peer) != PeerState::Failed || self.membership.in_view().has(peer) {
            return; // it is counted, or will be when it leaves
        }
        let is_known = self.membership.replica(peer) == Some(config.replica);
        if is_known && self.counted.has(peer) {
            return; // all that it misses is counted already
        }
        self.membership.know(peer, config);
        self.stop_counting(peer);
        self.count(peer);
        self.distrust(peer);
        self.rebuilds.start_over();
        self.wake.work();
    }

    fn stop_counting(&mut self, peer: PeerIndex) {
        if let Some(absent) = self.absent.get_mut(usize::from(peer)) {
            *absent = None;
        }
        self.counted = self.counted.without(PeerMask::one(peer));
    }

    /// Begins to rebuild a connected replica outside the view.
    pub(crate) fn rebuild(&mut self, peer: PeerIndex, missing: &RegionSet, out: &mut Outputs) {
        if self.membership.state(peer) != PeerState::Failed {
            return;
        }
        if let Some(reason) = self.cannot_rebuild(peer) {
            return out.push(Output::Drop { peer, reason, cause: DropCause::Unused });
        }
        if let Some(absent) = &mut self.absent[usize::from(peer)] {
            absent.disconnected();
            absent.out_of_sync.insert_all(missing);
        }
        self.trusted = self.trusted.with(PeerMask::one(peer));
        self.closed.reopen(peer);
        self.timeouts.forgive(peer, self.clock.now_ms());
        self.membership.start_rebuild(peer);
        self.rebuilds.start_over();
        self.wake.work();
    }

    fn cannot_rebuild(&self, peer: PeerIndex) -> Option<String> {
        if !self.counted.has(peer) {
            Some("it is not known what it misses".to_owned())
        } else if self.membership.in_view().has(peer) {
            Some("the view without it is not through yet".to_owned())
        } else if self.slots.active().any(|slot| slot.pending.has(peer)) {
            Some("its last connections are not closed yet".to_owned())
        } else {
            None
        }
    }

    /// Forgets a replica outside the view that is given up.
    pub(crate) fn forget(&mut self, peer: PeerIndex, out: &mut Outputs) {
        if self.membership.state(peer) == PeerState::Member {
            return;
        }
        self.lose(peer, "it is given up".to_owned(), out);
        self.stop_counting(peer);
        self.rebuilds.start_over();
        self.wake.work();
    }

    /// Returns true if anything is left to copy to replicas that are being rebuilt.
    pub(crate) fn has_regions_to_rebuild(&self) -> bool {
        let misses = |peer| {
            self.absent[usize::from(peer)].as_ref().is_some_and(|absent| !absent.out_of_sync.is_empty())
        };
        self.membership.rebuilding().iter().any(misses)
    }

    /// Starts to copy the next region that any of them misses, to all that miss it.
    pub(crate) fn start_rebuild_copy(&mut self, id: SlotId, out: &mut Outputs) -> bool {
        let rebuilding = self.membership.rebuilding();
        let Some(region) = rebuilding.iter().find_map(|peer| self.next_out_of_sync_region(peer)) else {
            return false;
        };
        let range = self.regions.range(region);
        if !self.bucket.take(range.length()) {
            return false;
        }
        let misses = |peer: &PeerIndex| {
            self.absent[usize::from(*peer)].as_ref().is_some_and(|absent| absent.out_of_sync.contains(region))
        };
        let targets =
            rebuilding.iter().filter(misses).map(PeerMask::one).fold(PeerMask::NONE, PeerMask::with);
        for peer in targets.iter() {
            if let Some(absent) = &mut self.absent[usize::from(peer)] {
                absent.cursor = region + 1;
            }
        }
        self.take_slot(id, Job::Copy(Copy::new(Why::Rebuild { region }, range, targets)));
        // It repairs members that hold rot there: until that is done, a verified read of them shows the rot,
        // which has no sums any more.
        let access = if self.verify_reads { Access::Modify } else { Access::Rebuild };
        if self.turns.enter(id, range, access) {
            self.advance(id, out);
        }
        true
    }

    fn next_out_of_sync_region(&self, peer: PeerIndex) -> Option<u32> {
        let absent = self.absent[usize::from(peer)].as_ref()?;
        let from = |start: u32| {
            std::iter::successors(absent.out_of_sync.next(start), |region| {
                absent.out_of_sync.next(region + 1)
            })
        };
        // At most as many are being copied as there are slots for it: this ends soon.
        from(absent.cursor).chain(from(0)).find(|region| !self.jobs.has(Why::Rebuild { region: *region }))
    }

    /// Handles the end of a region's copy: `range`, which was all of the region when its copy began, was
    /// copied to the remaining ones of `targets`. If the region has grown since, they still miss it, because
    /// they were not sent modifications of the new part.
    pub(crate) fn region_is_rebuilt(&mut self, region: u32, range: ByteRange, targets: PeerMask) {
        if self.regions.range(region) != range {
            return;
        }
        for peer in targets.iter() {
            if let Some(absent) = &mut self.absent[usize::from(peer)] {
                absent.out_of_sync.remove(region);
                absent.copied.insert(region);
            }
        }
    }

    /// Takes the next step of the replica that becomes a member next.
    pub(crate) fn finish_rebuild(&mut self, out: &mut Outputs) {
        if self.is_resyncing {
            return;
        }
        let Some((peer, step)) = self.rebuilds.next else {
            let is_up = |peer: &PeerIndex| {
                self.absent[usize::from(*peer)].as_ref().is_some_and(|absent| absent.out_of_sync.is_empty())
            };
            self.rebuilds.next = self
                .membership
                .rebuilding()
                .without(self.in_copy)
                .iter()
                .find(is_up)
                .map(|peer| (peer, RebuildStep::WantsFlush));
            return;
        };
        if self.rebuilds.marks.is_outstanding() {
            return;
        }
        if step == RebuildStep::Stamping {
            self.rebuilds.next = Some((peer, RebuildStep::SendingSets { absent: 0, from: None }));
            let (number, change) = (self.next_mark(), self.stamp_mark());
            return self.rebuilds.marks.send(number, PeerMask::one(peer), &change, self.clock.now_ms(), out);
        }
        let RebuildStep::SendingSets { absent, from } = step else { return };
        match self.next_set_to_send(peer, absent, from) {
            Some((next, change)) => {
                self.rebuilds.next = Some((peer, next));
                let number = self.next_mark();
                self.rebuilds.marks.send(number, PeerMask::one(peer), &change, self.clock.now_ms(), out);
            }
            // A repair that follows from a check is something that it would miss.
            None if self.jobs.is_checking() => {}
            None => self.propose_rebuilt(peer, out),
        }
    }

    /// Returns the next mark for `peer`, and the position from which to continue after it.
    fn next_set_to_send(
        &self,
        peer: PeerIndex,
        absent: PeerIndex,
        from: Option<u32>,
    ) -> Option<(RebuildStep, MarkRegions)> {
        let mark = |replica: ReplicaId, runs, stamp| MarkRegions {
            of: RegionsOf::OutOfSync(replica),
            action: MarkAction::Add,
            runs,
            stamp,
            size_bytes: self.regions.size_bytes(),
        };
        let mut from = from;
        let absent_peers = self.counted.and(self.trusted).without(PeerMask::one(peer));
        for absent in absent_peers.iter().filter(|other| *other >= absent) {
            let (Some(replica), Some(kept)) =
                (self.membership.replica(absent), &self.absent[usize::from(absent)])
            else {
                continue;
            };
            let Some(start) = from.take() else {
                return Some((
                    RebuildStep::SendingSets { absent, from: Some(0) },
                    mark(replica, Vec::new(), kept.stamp),
                ));
            };
            let runs: Vec<_> = kept.out_of_sync.runs(start).take(RUNS_PER_MARK_MAX).collect();
            if let Some(last) = runs.last() {
                let step = RebuildStep::SendingSets { absent, from: Some(last.end) };
                let runs = runs.iter().map(|run| (run.start, run.end - run.start)).collect();
                return Some((step, mark(replica, runs, kept.stamp)));
            }
        }
        None
    }

    fn propose_rebuilt(&mut self, peer: PeerIndex, out: &mut Outputs) {
        self.rebuilds.start_over();
        let is_up =
            self.absent[usize::from(peer)].as_ref().is_some_and(|absent| absent.out_of_sync.is_empty());
        if is_up {
            let step = self.membership.admit(peer);
            self.follow(step, out);
        } else {
            self.wake.work();
        }
    }

    /// Continues a join after every replica has answered its flush.
    pub(crate) fn rebuild_flushed(&mut self, slot: SlotId, is_durable: bool, out: &mut Outputs) {
        let Some((peer, RebuildStep::Flushing(sent_in))) = self.rebuilds.next else { return };
        if sent_in != slot {
            return; // another one has been sent since
        }
        if is_durable {
            self.rebuilds.next = Some((peer, RebuildStep::Stamping));
        } else {
            self.lose(peer, "the last member cannot flush".to_owned(), out);
        }
    }
}
