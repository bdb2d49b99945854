//! The last steps of a rebuilt replica, before it becomes a member.
//!
//! A replica that misses no more data waits for a flush of all members. It stores the newest stamp, as the
//! members have. Then it gets the out-of-sync sets of the other absent replicas, because as a member it
//! has to know the regions that they miss. It forgets the sets that are incomplete.

use shorthorn_types::{MarkAction, MarkRegions, RUNS_PER_MARK_MAX, RegionsOf, ReplicaId};

use crate::absent::AbsentReplicas;
use crate::membership::{Membership, PeerIndex, PeerMask};
use crate::slot::SlotId;

/// The progress of the next replica to become a member. Others wait.
///
/// The steps start over when a replica is lost or an out-of-sync set changes otherwise. A replica becomes a
/// member only after all steps without such an event in between.
#[derive(Debug, Default)]
pub(crate) struct Rebuilds {
    next: Option<(PeerIndex, RebuildStep)>,
    /// Rebuilding replicas from which no engine could start yet: they do not become members.
    in_copy: PeerMask,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RebuildStep {
    WantsFlush,
    Flushing(SlotId),
    /// The rebuilding replica stores the newest stamp, as the members have.
    Stamping,
    /// The rebuilding replica receives the out-of-sync sets of the other absent replicas. First it learns
    /// that each set exists, so that it adds later modifications itself. Then it gets the contents from the
    /// region `from` on. An incomplete set is forgotten instead.
    SendingSets {
        absent: PeerIndex,
        from: Option<u32>,
    },
}

/// The next of the last steps of a rebuild, which the caller takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FinalStep {
    /// Wait for the flush.
    Wait,
    /// Send this mark to the rebuilding replica.
    Send(PeerIndex, MarkRegions),
    /// Propose the view with the replica, unless a repair may still change out-of-sync sets.
    Propose(PeerIndex),
}

impl Rebuilds {
    /// Keeps `peer` from becoming a member until [`Rebuilds::end_copy`].
    pub fn start_copy(&mut self, peer: PeerIndex) {
        self.in_copy = self.in_copy.with(PeerMask::one(peer));
    }

    pub fn end_copy(&mut self, peer: PeerIndex) {
        self.in_copy = self.in_copy.without(PeerMask::one(peer));
    }

    /// Returns true if some replica is taking the last steps.
    pub fn is_finishing(&self) -> bool {
        self.next.is_some()
    }

    /// Chooses the first of `rebuilding` that may take the last steps.
    pub fn choose(&mut self, rebuilding: PeerMask, absent: &AbsentReplicas) {
        let candidates = rebuilding.without(self.in_copy);
        let chosen = candidates.iter().find(|peer| absent.is_up_to_date(*peer));
        self.next = chosen.map(|peer| (peer, RebuildStep::WantsFlush));
    }

    /// Returns true if a flush has to be sent, and records it as sent in `slot`.
    pub fn take_flush(&mut self, slot: SlotId) -> bool {
        let Some((_, step @ RebuildStep::WantsFlush)) = &mut self.next else { return false };
        *step = RebuildStep::Flushing(slot);
        true
    }

    /// Continues after every replica has answered the flush in `slot`. Returns the replica that cannot
    /// become a member because the flush has failed.
    pub fn flush_answered(&mut self, slot: SlotId, is_durable: bool) -> Option<PeerIndex> {
        let (peer, step) = self.next.as_mut()?;
        if *step != RebuildStep::Flushing(slot) {
            return None; // another one has been sent since
        }
        if !is_durable {
            return Some(*peer);
        }
        *step = RebuildStep::Stamping;
        None
    }

    /// Returns the next step after the flush or the last mark is answered, and records a mark as sent.
    pub fn next_step(
        &mut self,
        membership: &Membership,
        absent: &AbsentReplicas,
        stamp: u32,
        size_bytes: u64,
    ) -> FinalStep {
        match self.next {
            Some((peer, RebuildStep::Stamping)) => {
                self.next = Some((peer, RebuildStep::SendingSets { absent: 0, from: None }));
                FinalStep::Send(peer, MarkRegions::stamp(stamp))
            }
            Some((peer, RebuildStep::SendingSets { absent: first, from })) => {
                let others = absent.counted().without(PeerMask::one(peer)).filter(|other| other >= first);
                match next_set(membership, absent, others, (first, from), size_bytes) {
                    Some((next, change)) => {
                        self.next = Some((peer, next));
                        FinalStep::Send(peer, change)
                    }
                    None => FinalStep::Propose(peer),
                }
            }
            _ => FinalStep::Wait,
        }
    }

    /// Starts over after the members' agreement or the out-of-sync sets of others have changed.
    pub fn start_over(&mut self) {
        self.next = None;
    }
}

/// Returns the next mark about a set of `others`, and the position from which to continue after it. The set
/// of `first` was sent up to the region `from`.
fn next_set(
    membership: &Membership,
    absent: &AbsentReplicas,
    others: PeerMask,
    (first, from): (PeerIndex, Option<u32>),
    size_bytes: u64,
) -> Option<(RebuildStep, MarkRegions)> {
    let mark = |replica: ReplicaId, runs, stamp| MarkRegions {
        of: RegionsOf::OutOfSync(replica),
        action: MarkAction::Add,
        runs,
        stamp,
        size_bytes: Some(size_bytes),
    };
    for peer in others.iter() {
        let (Some(replica), Some(out_of_sync)) = (membership.replica(peer), absent.out_of_sync(peer)) else {
            continue;
        };
        // In a message 0 is an unknown stamp.
        let stamp = absent.stamp_of(peer).unwrap_or(0);
        let is_complete = absent.trusted().has(peer);
        let Some(start) = from.filter(|_| peer == first) else {
            let step = RebuildStep::SendingSets { absent: peer, from: Some(0) };
            let begin = mark(replica, Vec::new(), stamp);
            return Some((step, if is_complete { begin } else { MarkRegions::forget(replica) }));
        };
        if !is_complete {
            continue;
        }
        let runs: Vec<_> = out_of_sync.runs(start).take(RUNS_PER_MARK_MAX).collect();
        if let Some(last) = runs.last() {
            let step = RebuildStep::SendingSets { absent: peer, from: Some(last.end) };
            let runs = runs.iter().map(|run| (run.start, run.end - run.start)).collect();
            return Some((step, mark(replica, runs, stamp)));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use shorthorn_types::{Generation, Members, RegionSet, View, ViewId};

    use super::*;
    use crate::membership::PeerConfig;

    const REGIONS: u32 = 8;
    const SIZE_BYTES: u64 = 8 << 16;
    const SLOT: SlotId = SlotId { queue: 0, slot: 9 };

    /// Returns four replicas, of which the first is a member and the others are absent.
    fn replicas(missing: [&[u32]; 3]) -> (Membership, AbsentReplicas) {
        let peer = |n| PeerConfig { replica: ReplicaId::from_random(n), local: false };
        let peers: Vec<PeerConfig> = (0..4).map(peer).collect();
        let id = ViewId { generation: Generation::new(1, 0), number: 1 };
        let view = View { id, members: Members::new([ReplicaId::from_random(0)]).unwrap() };
        let mut absent = AbsentReplicas::new(4);
        for (peer, missing) in (1..).zip(missing) {
            let mut set = RegionSet::empty(REGIONS);
            missing.iter().for_each(|region| set.insert_run(*region..region + 1));
            absent.count(peer, &set, u32::from(peer) * 10);
        }
        (Membership::new(&peers, view), absent)
    }

    /// Returns the rebuilds in which replica 1 has flushed.
    fn flushed(absent: &AbsentReplicas) -> Rebuilds {
        let mut rebuilds = Rebuilds::default();
        rebuilds.choose(PeerMask::one(1), absent);
        assert!(rebuilds.take_flush(SLOT) && !rebuilds.take_flush(SLOT));
        assert_eq!(rebuilds.flush_answered(SLOT, true), None);
        rebuilds
    }

    fn set_of(replica: u64, runs: &[(u32, u32)]) -> FinalStep {
        let of = RegionsOf::OutOfSync(ReplicaId::from_random(replica));
        let stamp = u32::try_from(replica * 10).unwrap();
        let (action, runs) = (MarkAction::Add, runs.to_vec());
        FinalStep::Send(1, MarkRegions { of, action, runs, stamp, size_bytes: Some(SIZE_BYTES) })
    }

    #[test]
    fn the_stamp_and_every_set_of_the_others_come_before_the_view() {
        let (membership, absent) = replicas([&[], &[2, 3, 6], &[]]);
        let mut rebuilds = flushed(&absent);
        let mut next = || rebuilds.next_step(&membership, &absent, 5, SIZE_BYTES);
        assert_eq!(next(), FinalStep::Send(1, MarkRegions::stamp(5)));
        assert_eq!(next(), set_of(2, &[]), "first it learns that the set exists");
        assert_eq!(next(), set_of(2, &[(2, 2), (6, 1)]));
        assert_eq!(next(), set_of(3, &[]));
        assert_eq!(next(), FinalStep::Propose(1));
        assert_eq!(next(), FinalStep::Propose(1), "until the caller starts over");
    }

    #[test]
    fn incomplete_sets_are_not_sent_but_forgotten() {
        let (membership, mut absent) = replicas([&[], &[2], &[1]]);
        absent.distrust(2);
        let mut rebuilds = flushed(&absent);
        let mut next = || rebuilds.next_step(&membership, &absent, 5, SIZE_BYTES);
        assert_eq!(next(), FinalStep::Send(1, MarkRegions::stamp(5)));
        assert_eq!(next(), FinalStep::Send(1, MarkRegions::forget(ReplicaId::from_random(2))));
        assert_eq!(next(), set_of(3, &[]));
        assert_eq!(next(), set_of(3, &[(1, 1)]));
        assert_eq!(next(), FinalStep::Propose(1));
    }

    #[test]
    fn only_a_replica_that_misses_nothing_and_is_whole_takes_the_last_steps() {
        let (_, absent) = replicas([&[4], &[], &[]]);
        let rebuilding = PeerMask::one(1).with(PeerMask::one(2));
        let mut rebuilds = Rebuilds::default();
        rebuilds.start_copy(2);
        rebuilds.choose(rebuilding, &absent);
        assert!(!rebuilds.is_finishing() && !rebuilds.take_flush(SLOT));
        rebuilds.end_copy(2);
        rebuilds.choose(rebuilding, &absent);
        assert!(rebuilds.is_finishing() && rebuilds.take_flush(SLOT));
        assert_eq!(rebuilds.flush_answered(SLOT, false), Some(2));
    }

    #[test]
    fn an_earlier_flush_counts_for_nothing_after_a_new_start() {
        let (membership, absent) = replicas([&[], &[], &[]]);
        let mut rebuilds = flushed(&absent);
        rebuilds.start_over();
        assert!(!rebuilds.is_finishing());
        rebuilds.choose(PeerMask::one(1), &absent);
        assert!(rebuilds.take_flush(SlotId { slot: 8, ..SLOT }));
        assert_eq!(rebuilds.flush_answered(SLOT, true), None);
        assert_eq!(rebuilds.next_step(&membership, &absent, 5, SIZE_BYTES), FinalStep::Wait);
    }
}
