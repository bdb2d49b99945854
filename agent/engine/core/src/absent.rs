use std::ops::Range;

use shorthorn_types::{RUNS_PER_MARK_MAX, RegionSet, Regions};

use crate::copy::CopyReason;
use crate::intent::WriteIntent;
use crate::job::Jobs;
use crate::membership::{PeerIndex, PeerMask};

/// The replicas outside the view whose out-of-sync regions the core counts.
///
/// The set of a counted replica has all regions that the replica lacks. Each modification is either sent to
/// the replica or added to the set. A replica that is not counted has no set, and cannot be rebuilt.
#[derive(Debug)]
pub(crate) struct AbsentReplicas {
    replicas: Vec<Option<Absent>>,
    /// The replicas that have an [`Absent`].
    counted: PeerMask,
    /// Replicas whose out-of-sync set is complete, and does not lack the time before the set began.
    trusted: PeerMask,
}

/// The state that the core keeps of a replica outside the view.
#[derive(Debug)]
struct Absent {
    /// Regions that the replica lacks. A modification that is not sent to it adds its regions.
    out_of_sync: RegionSet,
    /// Regions that were copied to the replica but are still in the members' durable out-of-sync set.
    copied: RegionSet,
    /// The part of `copied` that the last internal flush covers: it can be cleared from those sets.
    covered: RegionSet,
    /// The region from which the search for the next region to copy continues.
    cursor: u32,
    /// The newest stamp that the engine sent to it; none if that is not known. If its disk has lost that
    /// stamp, it misses more regions than `out_of_sync`.
    stamp: Option<u32>,
}

impl Absent {
    fn new(regions: u32, stamp: u32) -> Absent {
        let empty = || RegionSet::empty(regions);
        Absent { out_of_sync: empty(), copied: empty(), covered: empty(), cursor: 0, stamp: Some(stamp) }
    }

    /// Grows the sets with the volume. If its regions become larger, one may be copied in part: such a region
    /// is not marked as copied.
    fn grow(&mut self, from: Regions, to: Regions) {
        for set in [&mut self.out_of_sync, &mut self.copied, &mut self.covered] {
            *set = set.converted(from, to);
        }
        if from.region_bytes() != to.region_bytes() {
            self.disconnected();
        }
    }

    /// Discards the copied and covered regions after the connections are lost: the copies may be lost too.
    fn disconnected(&mut self) {
        self.copied.clear();
        self.covered.clear();
        self.cursor = 0;
    }
}

impl AbsentReplicas {
    /// Creates the state for the given number of replicas, none of which is counted.
    pub fn new(replicas: usize) -> AbsentReplicas {
        AbsentReplicas {
            replicas: (0..replicas).map(|_| None).collect(),
            counted: PeerMask::NONE,
            trusted: PeerMask::NONE,
        }
    }

    fn get(&self, peer: PeerIndex) -> Option<&Absent> {
        self.replicas.get(usize::from(peer))?.as_ref()
    }

    fn get_mut(&mut self, peer: PeerIndex) -> Option<&mut Absent> {
        self.replicas.get_mut(usize::from(peer))?.as_mut()
    }

    /// Starts to count the regions that `peer` misses. The replica lacks at most the regions of `may_differ`,
    /// because they include everything in flight.
    pub fn count(&mut self, peer: PeerIndex, may_differ: &RegionSet, stamp: u32) {
        let at = usize::from(peer);
        if self.replicas.len() <= at {
            self.replicas.resize_with(at + 1, || None);
        }
        let absent = self.replicas[at].get_or_insert_with(|| Absent::new(may_differ.limit(), stamp));
        absent.disconnected();
        absent.out_of_sync.insert_all(may_differ);
        self.counted = self.counted.with(PeerMask::one(peer));
        self.trusted = self.trusted.with(PeerMask::one(peer));
    }

    /// Adds the out-of-sync set that the members have kept since an earlier engine for `peer`, which is
    /// counted.
    pub fn take_over(&mut self, peer: PeerIndex, out_of_sync: &RegionSet, stamp: Option<u32>) {
        if let Some(absent) = self.get_mut(peer) {
            absent.out_of_sync.insert_all(out_of_sync);
            absent.stamp = stamp;
        }
    }

    /// Ends the count of `peer`, which has become a member, is given up, or is replaced by another replica.
    pub fn stop_counting(&mut self, peer: PeerIndex) {
        if let Some(absent) = self.replicas.get_mut(usize::from(peer)) {
            *absent = None;
        }
        self.counted = self.counted.without(PeerMask::one(peer));
    }

    /// Returns true if the regions that `peer` misses are counted.
    pub fn is_counted(&self, peer: PeerIndex) -> bool {
        self.counted.has(peer)
    }

    /// Marks the out-of-sync set of `peer` as incomplete.
    pub fn distrust(&mut self, peer: PeerIndex) {
        self.trusted = self.trusted.without(PeerMask::one(peer));
    }

    /// Returns the counted replicas whose out-of-sync set is complete.
    pub fn trusted(&self) -> PeerMask {
        self.counted.and(self.trusted)
    }

    /// Returns the replicas that have a set, complete or not.
    pub fn counted(&self) -> PeerMask {
        self.counted
    }

    /// Returns the regions that `peer` is known to miss.
    pub fn out_of_sync(&self, peer: PeerIndex) -> Option<&RegionSet> {
        self.get(peer).map(|absent| &absent.out_of_sync)
    }

    /// Returns the newest stamp that was sent to `peer`; none if that is not known.
    pub fn stamp_of(&self, peer: PeerIndex) -> Option<u32> {
        self.get(peer)?.stamp
    }

    /// Records `stamp` as the newest stamp that was sent to the replicas in `peers`.
    pub fn stamped(&mut self, peers: PeerMask, stamp: u32) {
        for peer in peers.iter() {
            if let Some(absent) = self.get_mut(peer) {
                absent.stamp = absent.stamp.max(Some(stamp));
            }
        }
    }

    /// Begins to rebuild `peer`, which lacks `missing` besides the counted regions.
    pub fn start_rebuild(&mut self, peer: PeerIndex, missing: &RegionSet) {
        if let Some(absent) = self.get_mut(peer) {
            absent.disconnected();
            absent.out_of_sync.insert_all(missing);
        }
        self.trusted = self.trusted.with(PeerMask::one(peer));
    }

    /// Counts a modification of `touched`. Returns the replicas in `rebuilding` that have to do it. A replica
    /// that is being rebuilt does it unless a later copy covers all of the modification. It must never merge
    /// the modification with stale data of a block.
    pub fn count_modification(&mut self, touched: &Range<u32>, rebuilding: PeerMask) -> PeerMask {
        let mut to = PeerMask::NONE;
        for peer in self.counted.iter() {
            let Some(absent) = &mut self.replicas[usize::from(peer)] else { continue };
            if rebuilding.has(peer) && !absent.out_of_sync.contains_all(touched.clone()) {
                to = to.with(PeerMask::one(peer));
            } else {
                absent.out_of_sync.insert_run(touched.clone());
            }
        }
        to
    }

    /// Counts a modification of `touched` that no absent replica gets.
    pub fn miss(&mut self, touched: &Range<u32>) {
        for absent in self.replicas.iter_mut().flatten() {
            absent.out_of_sync.insert_run(touched.clone());
        }
    }

    /// Returns true if `peer` is counted and misses nothing.
    pub fn is_up_to_date(&self, peer: PeerIndex) -> bool {
        self.get(peer).is_some_and(|absent| absent.out_of_sync.is_empty())
    }

    /// Returns true if one of `peers` misses some region.
    pub fn any_misses(&self, peers: PeerMask) -> bool {
        let misses = |absent: &Absent| !absent.out_of_sync.is_empty();
        peers.iter().any(|peer| self.get(peer).is_some_and(misses))
    }

    /// Returns the next region that any of `rebuilding` misses and that is not being copied.
    pub fn next_to_copy(&self, rebuilding: PeerMask, jobs: &Jobs) -> Option<u32> {
        rebuilding.iter().find_map(|peer| self.next_of(peer, jobs))
    }

    fn next_of(&self, peer: PeerIndex, jobs: &Jobs) -> Option<u32> {
        let absent = self.get(peer)?;
        let from = |start: u32| {
            std::iter::successors(absent.out_of_sync.next(start), |region| {
                absent.out_of_sync.next(region + 1)
            })
        };
        // The loop is short: at most as many regions are being copied as slots exist for copies.
        from(absent.cursor).chain(from(0)).find(|region| !jobs.has(CopyReason::Rebuild { region: *region }))
    }

    /// Starts to copy `region`. Returns the replicas in `rebuilding` that miss it.
    pub fn start_copy(&mut self, region: u32, rebuilding: PeerMask) -> PeerMask {
        let misses = |absent: &Absent| absent.out_of_sync.contains(region);
        let targets = rebuilding.filter(|peer| self.get(peer).is_some_and(misses));
        for peer in targets.iter() {
            if let Some(absent) = self.get_mut(peer) {
                absent.cursor = region + 1;
            }
        }
        targets
    }

    /// Records that `region` was copied to the replicas in `targets`.
    pub fn copied(&mut self, region: u32, targets: PeerMask) {
        for peer in targets.iter() {
            if let Some(absent) = self.get_mut(peer) {
                absent.out_of_sync.remove(region);
                absent.copied.insert(region);
            }
        }
    }

    /// Lets the next flush cover the copied regions of `rebuilding`, except those that are being modified.
    /// Returns true if some regions can be cleared from the members' out-of-sync sets after it.
    pub fn start_cycle<I: Iterator<Item = Range<u32>>>(
        &mut self,
        rebuilding: PeerMask,
        modified: impl Fn() -> I,
    ) -> bool {
        let mut is_worth_it = false;
        for peer in rebuilding.iter() {
            let Some(absent) = self.get_mut(peer) else { continue };
            absent.covered.clear();
            absent.covered.insert_all(&absent.copied);
            modified().for_each(|touched| absent.covered.remove_run(touched));
            is_worth_it |= !absent.covered.is_empty();
        }
        is_worth_it
    }

    /// Starts to clear some regions that were copied to `peer` from the members' out-of-sync sets of it.
    pub fn clear_some(&mut self, peer: PeerIndex, intent: &mut WriteIntent) -> Vec<(u32, u32)> {
        let Some(absent) = self.get_mut(peer) else { return Vec::new() };
        absent.covered.remove_all(&absent.out_of_sync);
        intent.clear_some_of(&mut absent.covered, RUNS_PER_MARK_MAX)
    }

    /// Ends that clearing.
    pub fn cleared(&mut self, peer: PeerIndex, intent: &mut WriteIntent) {
        intent.cleared_of(self.get_mut(peer).map(|absent| &mut absent.copied));
    }

    /// Returns the regions that are like `region` for each of `rebuilding`, and the replicas that do not miss
    /// them. Two regions are alike for a replica that misses both or neither. The volume has
    /// `regions` regions.
    pub fn alike(&self, region: u32, rebuilding: PeerMask, regions: u32) -> (RegionSet, PeerMask) {
        let (mut alike, mut sound) = (RegionSet::full(regions), PeerMask::NONE);
        for peer in rebuilding.iter() {
            let Some(absent) = self.get(peer) else { continue };
            if absent.out_of_sync.contains(region) {
                alike.keep_all(&absent.out_of_sync);
            } else {
                alike.remove_all(&absent.out_of_sync);
                sound = sound.with(PeerMask::one(peer));
            }
        }
        (alike, sound)
    }

    /// Grows the sets with the volume.
    pub fn grow(&mut self, from: Regions, to: Regions) {
        for absent in self.replicas.iter_mut().flatten() {
            absent.grow(from, to);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::slot::Slots;

    const REGIONS: u32 = 8;
    const PEER: PeerIndex = 2;

    fn set(regions: &[u32]) -> RegionSet {
        let mut set = RegionSet::empty(REGIONS);
        regions.iter().for_each(|region| set.insert_run(*region..region + 1));
        set
    }

    fn counted(missing: &[u32]) -> AbsentReplicas {
        let mut absent = AbsentReplicas::new(3);
        absent.count(PEER, &set(missing), 4);
        absent
    }

    fn out_of_sync(absent: &AbsentReplicas) -> Vec<u32> {
        absent.out_of_sync(PEER).unwrap().iter().collect()
    }

    #[test]
    fn a_replica_that_is_not_counted_has_no_set() {
        let mut absent = counted(&[1]);
        assert!(absent.is_counted(PEER) && !absent.is_counted(1));
        assert_eq!((absent.out_of_sync(1), absent.stamp_of(1), absent.stamp_of(PEER)), (None, None, Some(4)));
        assert_eq!(absent.count_modification(&(3..4), PeerMask::one(1)), PeerMask::NONE);
        absent.stop_counting(PEER);
        assert!(!absent.is_counted(PEER) && !absent.is_up_to_date(PEER));
        absent.count(PEER, &set(&[5]), 6);
        assert_eq!(
            (out_of_sync(&absent), absent.stamp_of(PEER)),
            (vec![5], Some(6)),
            "another one, from the start"
        );
    }

    #[test]
    fn trust_restarts_with_each_count_and_rebuild() {
        let mut absent = counted(&[]);
        assert_eq!(absent.trusted(), PeerMask::one(PEER));
        absent.distrust(PEER);
        assert_eq!(absent.trusted(), PeerMask::NONE);
        absent.start_rebuild(PEER, &set(&[3]));
        assert_eq!((absent.trusted(), out_of_sync(&absent)), (PeerMask::one(PEER), vec![3]));
        absent.stop_counting(PEER);
        assert_eq!(absent.trusted(), PeerMask::NONE);
    }

    #[test]
    fn regions_are_copied_in_turn_and_again_after_a_loss() {
        let (mut absent, rebuilding) = (counted(&[1, 4]), PeerMask::one(PEER));
        let jobs = Jobs::new(Slots::new(1, 1, 3).copies());
        assert_eq!(absent.next_to_copy(rebuilding, &jobs), Some(1));
        assert_eq!(absent.start_copy(1, rebuilding.with(PeerMask::one(0))), rebuilding);
        assert_eq!(absent.next_to_copy(rebuilding, &jobs), Some(4), "behind the one that was started");
        absent.copied(1, rebuilding);
        absent.copied(4, rebuilding);
        assert!(absent.is_up_to_date(PEER) && !absent.any_misses(rebuilding));
        assert!(absent.start_cycle(rebuilding, || std::iter::once(4..5)));
        absent.count(PEER, &set(&[]), 4);
        let mut intent = WriteIntent::new(REGIONS);
        assert_eq!(absent.clear_some(PEER, &mut intent), [], "the copies do not count after a loss");
    }

    #[test]
    fn copied_regions_are_cleared_unless_they_were_modified_at_the_start_or_since() {
        let (mut absent, rebuilding) = (counted(&[1, 2, 4]), PeerMask::one(PEER));
        [1, 2, 4].into_iter().for_each(|region| absent.copied(region, rebuilding));
        assert!(absent.start_cycle(rebuilding, || std::iter::once(4..5)));
        let mut intent = WriteIntent::new(REGIONS);
        absent.miss(&(2..3));
        assert_eq!(absent.clear_some(PEER, &mut intent), [(1, 1)]);
        absent.cleared(PEER, &mut intent);
        assert!(absent.start_cycle(rebuilding, std::iter::empty));
        assert_eq!(absent.clear_some(PEER, &mut intent), [(4, 1)], "1 is cleared, and 2 missed again");
    }

    #[test]
    fn regions_are_alike_if_the_same_replicas_miss_them() {
        let mut absent = counted(&[1, 2]);
        absent.count(1, &set(&[2, 3]), 0);
        let rebuilding = PeerMask::one(1).with(PeerMask::one(PEER));
        let alike = |region| {
            let (alike, sound) = absent.alike(region, rebuilding, REGIONS);
            (alike.iter().collect::<Vec<_>>(), sound)
        };
        assert_eq!(alike(1), (vec![1], PeerMask::one(1)));
        assert_eq!(alike(2), (vec![2], PeerMask::NONE));
        assert_eq!(alike(7), (vec![0, 4, 5, 6, 7], rebuilding));
    }

    #[derive(Clone, Debug)]
    enum Deed {
        Modify(Range<u32>),
        Copy,
        Copied,
        Rebuild(u32),
        Lose,
    }

    fn deed() -> impl Strategy<Value = Deed> {
        prop_oneof![
            4 => (0..REGIONS - 1, 1u32..3).prop_map(|(first, count)| Deed::Modify(first..first + count)),
            3 => Just(Deed::Copy),
            3 => Just(Deed::Copied),
            1 => (0..REGIONS).prop_map(Deed::Rebuild),
            1 => Just(Deed::Lose),
        ]
    }

    proptest! {
        /// The model knows the regions that the replica lacks. The counted set has all of them, and a replica
        /// that counts as up to date lacks none.
        #[test]
        fn the_set_is_never_smaller_than_the_lack(deeds in prop::collection::vec(deed(), 1..200)) {
            let (mut absent, jobs) = (counted(&[]), Jobs::new(Slots::new(1, 1, 3).copies()));
            let mut lacks: BTreeSet<u32> = BTreeSet::new();
            let (mut rebuilding, mut copying) = (PeerMask::NONE, None);
            for deed in deeds {
                match deed {
                    // The range table holds back a modification that overlaps a copy.
                    Deed::Modify(touched) if copying.is_some_and(|region| touched.contains(&region)) => {}
                    Deed::Modify(touched) => {
                        if !absent.count_modification(&touched, rebuilding).has(PEER) {
                            lacks.extend(touched);
                        }
                    }
                    Deed::Copy => {
                        let next = absent.next_to_copy(rebuilding, &jobs).filter(|_| copying.is_none());
                        copying = copying.or(next);
                        if let Some(region) = next {
                            prop_assert!(absent.start_copy(region, rebuilding).has(PEER));
                        }
                    }
                    Deed::Copied => if let Some(region) = copying.take() {
                        lacks.remove(&region);
                        absent.copied(region, rebuilding);
                    },
                    Deed::Rebuild(missing) if rebuilding.is_empty() => {
                        rebuilding = PeerMask::one(PEER);
                        lacks.insert(missing);
                        absent.start_rebuild(PEER, &set(&[missing]));
                    }
                    Deed::Lose => {
                        (rebuilding, copying) = (PeerMask::NONE, None);
                        absent.count(PEER, &set(&[]), 0);
                    }
                    Deed::Rebuild(_) => {}
                }
                let counted = out_of_sync(&absent);
                prop_assert!(lacks.iter().all(|region| counted.contains(region)), "{lacks:?} of {counted:?}");
                prop_assert!(!absent.is_up_to_date(PEER) || lacks.is_empty());
            }
        }
    }
}
