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
pub(crate) struct Joins {
    next: Option<(PeerIndex, Step)>,
    pub marks: Marks,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    WantsFlush,
    Flushing(SlotId),
    /// The joiner stores the newest stamp, as the members have.
    Stamping,
    /// The joiner receives the out-of-sync sets of the other absent replicas. First it learns that each set
    /// exists, so that it adds later modifications itself. Then it gets the contents.
    Telling {
        absent: PeerIndex,
        from: Option<u32>,
    },
}

impl Joins {
    /// Returns true if a flush has to be sent; it counts as sent in `slot` then.
    pub fn takes_flush(&mut self, slot: SlotId) -> bool {
        let Some((_, step @ Step::WantsFlush)) = &mut self.next else { return false };
        *step = Step::Flushing(slot);
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
        self.joins.start_over();
        self.wake = true;
    }

    fn stop_counting(&mut self, peer: PeerIndex) {
        if let Some(absent) = self.absent.get_mut(usize::from(peer)) {
            *absent = None;
        }
        self.counted = self.counted.without(PeerMask::one(peer));
    }

    /// Begins to rebuild a connected replica outside the view.
    pub(crate) fn join(&mut self, peer: PeerIndex, missing: &RegionSet, out: &mut Outputs) {
        if self.membership.state(peer) != PeerState::Failed {
            return;
        }
        if let Some(reason) = self.cannot_join(peer) {
            return out.push(Output::Drop { peer, reason, cause: DropCause::Unused });
        }
        if let Some(absent) = &mut self.absent[usize::from(peer)] {
            absent.disconnected();
            absent.missed.insert_all(missing);
        }
        self.trusted = self.trusted.with(PeerMask::one(peer));
        for closed in &mut self.closed {
            *closed = closed.without(PeerMask::one(peer));
        }
        self.patience.forgive(peer, self.now_ms);
        self.membership.bring_up(peer);
        self.joins.start_over();
        self.wake = true;
    }

    fn cannot_join(&self, peer: PeerIndex) -> Option<String> {
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
        self.joins.start_over();
        self.wake = true;
    }

    /// Returns true if anything is left to copy to replicas that are being rebuilt.
    pub(crate) fn is_bringing_up(&self) -> bool {
        let misses =
            |peer| self.absent[usize::from(peer)].as_ref().is_some_and(|absent| !absent.missed.is_empty());
        self.membership.joining().iter().any(misses)
    }

    /// Starts to copy the next region that any of them misses, to all that miss it.
    pub(crate) fn start_join_copy(&mut self, id: SlotId, out: &mut Outputs) -> bool {
        let joining = self.membership.joining();
        let Some(region) = joining.iter().find_map(|peer| self.next_missed_region(peer)) else {
            return false;
        };
        let range = self.regions.range(region);
        if !self.bucket.take(range.length()) {
            return false;
        }
        let misses = |peer: &PeerIndex| {
            self.absent[usize::from(*peer)].as_ref().is_some_and(|absent| absent.missed.contains(region))
        };
        let targets = joining.iter().filter(misses).map(PeerMask::one).fold(PeerMask::NONE, PeerMask::with);
        for peer in targets.iter() {
            if let Some(absent) = &mut self.absent[usize::from(peer)] {
                absent.cursor = region + 1;
            }
        }
        self.take_slot(id, Job::Copy(Copy::new(Why::Join { region }, range, targets)));
        // It repairs members that hold rot there: until that is done, a verified read of them shows the rot,
        // which has no sums any more.
        let access = if self.verify_reads { Access::Modify } else { Access::Rebuild };
        if self.ranges.enter(id, range, access) {
            self.advance(id, out);
        }
        true
    }

    fn next_missed_region(&self, peer: PeerIndex) -> Option<u32> {
        let absent = self.absent[usize::from(peer)].as_ref()?;
        let from = |start: u32| {
            std::iter::successors(absent.missed.next(start), |region| absent.missed.next(region + 1))
        };
        // At most as many are being copied as there are slots for it: this ends soon.
        from(absent.cursor).chain(from(0)).find(|region| !self.jobs.has(Why::Join { region: *region }))
    }

    /// Handles the end of a region's copy: `range`, which was all of the region when its copy began, was
    /// copied to the remaining ones of `targets`. If the region has grown since, they still miss it, because
    /// they were not sent modifications of the new part.
    pub(crate) fn region_is_brought(&mut self, region: u32, range: ByteRange, targets: PeerMask) {
        if self.regions.range(region) != range {
            return;
        }
        for peer in targets.iter() {
            if let Some(absent) = &mut self.absent[usize::from(peer)] {
                absent.missed.remove(region);
                absent.copied.insert(region);
            }
        }
    }

    /// Takes the next step of the replica that becomes a member next.
    pub(crate) fn finish_join(&mut self, out: &mut Outputs) {
        if self.is_equalising {
            return;
        }
        let Some((peer, step)) = self.joins.next else {
            let is_up = |peer: &PeerIndex| {
                self.absent[usize::from(*peer)].as_ref().is_some_and(|absent| absent.missed.is_empty())
            };
            self.joins.next = self
                .membership
                .joining()
                .without(self.in_copy)
                .iter()
                .find(is_up)
                .map(|peer| (peer, Step::WantsFlush));
            return;
        };
        if self.joins.marks.is_outstanding() {
            return;
        }
        if step == Step::Stamping {
            self.joins.next = Some((peer, Step::Telling { absent: 0, from: None }));
            let (number, change) = (self.next_mark(), self.stamp_mark());
            return self.joins.marks.send(number, PeerMask::one(peer), &change, self.now_ms, out);
        }
        let Step::Telling { absent, from } = step else { return };
        match self.next_to_tell(peer, absent, from) {
            Some((next, change)) => {
                self.joins.next = Some((peer, next));
                let number = self.next_mark();
                self.joins.marks.send(number, PeerMask::one(peer), &change, self.now_ms, out);
            }
            // A repair that follows from a check is something that it would miss.
            None if self.jobs.is_checking() => {}
            None => self.propose_join(peer, out),
        }
    }

    /// Returns the next mark for `peer`, and the position from which to continue after it.
    fn next_to_tell(
        &self,
        peer: PeerIndex,
        absent: PeerIndex,
        from: Option<u32>,
    ) -> Option<(Step, MarkRegions)> {
        let mark = |replica: ReplicaId, runs, stamp| MarkRegions {
            of: RegionsOf::Missed(replica),
            action: MarkAction::Add,
            runs,
            stamp,
            size_bytes: self.regions.size_bytes(),
        };
        let mut from = from;
        let told_of = self.counted.and(self.trusted).without(PeerMask::one(peer));
        for absent in told_of.iter().filter(|other| *other >= absent) {
            let (Some(replica), Some(kept)) =
                (self.membership.replica(absent), &self.absent[usize::from(absent)])
            else {
                continue;
            };
            let Some(start) = from.take() else {
                return Some((
                    Step::Telling { absent, from: Some(0) },
                    mark(replica, Vec::new(), kept.stamp),
                ));
            };
            let runs: Vec<_> = kept.missed.runs(start).take(RUNS_PER_MARK_MAX).collect();
            if let Some(last) = runs.last() {
                let step = Step::Telling { absent, from: Some(last.end) };
                let runs = runs.iter().map(|run| (run.start, run.end - run.start)).collect();
                return Some((step, mark(replica, runs, kept.stamp)));
            }
        }
        None
    }

    fn propose_join(&mut self, peer: PeerIndex, out: &mut Outputs) {
        self.joins.start_over();
        let is_up = self.absent[usize::from(peer)].as_ref().is_some_and(|absent| absent.missed.is_empty());
        if is_up {
            let step = self.membership.admit(peer);
            self.follow(step, out);
        } else {
            self.wake = true;
        }
    }

    /// Continues a join after every replica has answered its flush.
    pub(crate) fn join_flushed(&mut self, slot: SlotId, is_durable: bool, out: &mut Outputs) {
        let Some((peer, Step::Flushing(sent_in))) = self.joins.next else { return };
        if sent_in != slot {
            return; // another one has been sent since
        }
        if is_durable {
            self.joins.next = Some((peer, Step::Stamping));
        } else {
            self.lose(peer, "the last member cannot flush".to_owned(), out);
        }
    }
}
