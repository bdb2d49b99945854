use std::ops::Range;

use shorthorn_types::{RegionSet, Regions};

use crate::bucket::Bucket;
use crate::copy::CopyReason;
use crate::intent::WriteIntent;
use crate::job::Jobs;
use crate::membership::{PeerIndex, PeerMask};

/// The regions in which the members may differ after an unclean end. Requests read and change none of them
/// before it is equal, and a region that is equal never comes back: so the set only shrinks.
#[derive(Debug)]
pub(crate) struct Resync {
    left: RegionSet,
    /// For each replica: regions that are to be copied from it, or from another one that has them here.
    sources: Vec<RegionSet>,
    /// The region from which the search for the next one continues.
    cursor: u32,
    /// True until the end of the resync is reported.
    is_under_way: bool,
}

impl Resync {
    /// Starts with the regions in `dirty`, of a volume with `regions` regions.
    pub fn new(regions: u32, dirty: &RegionSet, sources: Vec<RegionSet>) -> Resync {
        let mut left = RegionSet::empty(regions);
        left.insert_all(dirty);
        let is_under_way = !left.is_empty();
        // An engine without a resync would keep the sets as long as it runs.
        let sources = if is_under_way { sources } else { Vec::new() };
        Resync { left, sources, cursor: 0, is_under_way }
    }

    /// Returns the regions that are not equal yet.
    pub fn left(&self) -> &RegionSet {
        &self.left
    }

    /// Returns the replicas to copy `region` from, if they are members. Empty: any member will do.
    pub fn sources(&self, region: u32) -> PeerMask {
        let has_it = |(_, sources): &(PeerIndex, &RegionSet)| sources.contains(region);
        let sources = (0..).zip(&self.sources).filter(has_it);
        sources.fold(PeerMask::NONE, |mask, (peer, _)| mask.with(PeerMask::one(peer)))
    }

    /// Returns true until [`Resync::take_end`] has been true.
    pub fn is_under_way(&self) -> bool {
        self.is_under_way
    }

    /// Returns true once, when all regions are equal.
    pub fn take_end(&mut self) -> bool {
        let has_ended = self.is_under_way && self.left.is_empty() && std::mem::take(&mut self.is_under_way);
        if has_ended {
            self.sources = Vec::new();
        }
        has_ended
    }

    /// Returns true if a request for some of `regions` has to wait.
    pub fn holds_up(&self, regions: Range<u32>) -> bool {
        !self.left.is_empty() && self.left.contains_any(regions)
    }

    /// Returns the first region that a waiting request needs, if it is not being copied.
    pub fn needed(&self, mut waiting: impl Iterator<Item = Range<u32>>, jobs: &Jobs) -> Option<u32> {
        waiting.find_map(|touched| {
            let unequal =
                std::iter::successors(self.left.next(touched.start), |region| self.left.next(region + 1));
            unequal
                .take_while(|region| *region < touched.end)
                .find(|region| !jobs.has(CopyReason::Resync { region: *region }))
        })
    }

    /// Returns the next region to copy, unless it is being copied or `bucket` does not permit it.
    pub fn next(&mut self, regions: Regions, jobs: &Jobs, bucket: &mut Bucket) -> Option<u32> {
        let region = self.left.next(self.cursor).or_else(|| self.left.next(0))?;
        let is_free = !jobs.has(CopyReason::Resync { region });
        if is_free && !bucket.take(regions.range(region).length()) {
            return None;
        }
        self.cursor = region + 1;
        is_free.then_some(region)
    }

    /// Records that `region` is equal. It stays dirty as after any write.
    pub fn region_equal(&mut self, region: u32, intent: &mut WriteIntent) {
        self.left.remove(region);
        intent.touch(region..region + 1);
    }

    /// Clears the regions of a single member, which differs from no other one. While a copy to it runs,
    /// requests wait until that has ended, because its writes would overtake them.
    pub fn keep_copied_regions(&mut self, jobs: &Jobs, intent: &mut WriteIntent) {
        intent.touch_all(&self.left);
        let mut copied = RegionSet::empty(self.left.limit());
        for copy in jobs.copies() {
            if let CopyReason::Resync { region } = copy.why() {
                copied.insert(region);
            }
        }
        self.left.keep_all(&copied);
    }

    /// Clears the regions that none of `members` has modified, except those that are being copied.
    pub fn skip_unmodified(&mut self, members: PeerMask, jobs: &Jobs, intent: &mut WriteIntent) {
        let mut equal = self.left.clone();
        for peer in members.iter() {
            match self.sources.get(usize::from(peer)) {
                Some(sources) => equal.keep_all(sources),
                None => return,
            }
        }
        for copy in jobs.copies() {
            if let CopyReason::Resync { region } = copy.why() {
                equal.remove(region);
            }
        }
        intent.touch_all(&equal);
        self.left.remove_all(&equal);
    }

    /// Grows the set with the volume.
    pub fn grow(&mut self, from: Regions, to: Regions) {
        self.left = self.left.converted(from, to);
        if from.region_bytes() == to.region_bytes() {
            self.sources.iter_mut().for_each(|sources| *sources = sources.converted(from, to));
        } else {
            // A member may have modified another part of the larger region.
            self.sources.clear();
            self.cursor = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use shorthorn_types::ByteRange;

    use super::*;
    use crate::copy::Copy;
    use crate::event::CopyLimits;
    use crate::job::Job;
    use crate::slot::Slots;

    const REGIONS: u32 = 8;

    fn resync(dirty: &[u32]) -> Resync {
        let mut set = RegionSet::empty(REGIONS);
        dirty.iter().for_each(|region| assert!(set.insert(*region)));
        Resync::new(REGIONS, &set, Vec::new())
    }

    /// Returns three copy slots, in which these regions are resynced.
    fn jobs(copied: &[u32]) -> Jobs {
        let mut jobs = Jobs::new(Slots::new(1, 1, 3).copies());
        for (at, region) in copied.iter().enumerate() {
            let why = CopyReason::Resync { region: *region };
            *jobs.at(at) = Job::Copy(Copy::new(why, ByteRange::EMPTY, PeerMask::one(1)));
        }
        jobs
    }

    fn bucket(bytes_per_s: u64) -> Bucket {
        Bucket::new(CopyLimits { bytes_per_s: NonZeroU64::new(bytes_per_s), share_percent: 100 })
    }

    fn regions() -> Regions {
        Regions::of(u64::from(REGIONS) << 16)
    }

    #[test]
    fn requests_wait_until_their_region_is_equal() {
        let (mut resync, mut intent) = (resync(&[2, 5]), WriteIntent::new(REGIONS));
        assert!(resync.is_under_way() && resync.holds_up(0..3) && !resync.holds_up(3..5));
        resync.region_equal(2, &mut intent);
        assert!(!resync.holds_up(0..5) && !resync.take_end());
        resync.region_equal(5, &mut intent);
        assert!(resync.is_under_way(), "until the end is reported");
        assert!(resync.take_end() && !resync.take_end() && !resync.is_under_way());
        let mut dirty = RegionSet::empty(REGIONS);
        intent.add_dirty_to(&mut dirty);
        assert_eq!(dirty.iter().collect::<Vec<_>>(), [2, 5], "as after any write");
    }

    #[test]
    fn nothing_to_resync_has_no_end() {
        assert!(!resync(&[]).is_under_way() && !resync(&[]).take_end());
    }

    #[test]
    fn regions_follow_one_another_and_needed_ones_come_first() {
        let mut resync = resync(&[1, 4, 6]);
        let waiting = [3..5, 6..7];
        assert_eq!(resync.needed(waiting.clone().into_iter(), &jobs(&[])), Some(4));
        assert_eq!(resync.needed(waiting.into_iter(), &jobs(&[4])), Some(6));
        let mut next = |copied: &[u32]| resync.next(regions(), &jobs(copied), &mut bucket(0));
        assert_eq!((next(&[]), next(&[1]), next(&[1, 4])), (Some(1), Some(4), Some(6)));
        assert_eq!(next(&[1, 4, 6]), None, "each is being copied");
        assert_eq!(next(&[4, 6]), None, "the search continues behind the one that it found");
    }

    #[test]
    fn the_search_stays_at_a_region_that_the_limit_does_not_permit() {
        let (mut resync, mut bucket) = (resync(&[1, 4]), bucket(1));
        bucket.pay(8 << 20);
        assert_eq!(resync.next(regions(), &jobs(&[]), &mut bucket), None);
        assert_eq!(resync.next(regions(), &jobs(&[]), &mut self::bucket(0)), Some(1));
    }

    #[test]
    fn the_sources_of_a_region_are_known_until_regions_become_larger() {
        let mut set = RegionSet::empty(REGIONS);
        set.insert(2);
        let sources = vec![RegionSet::empty(REGIONS), set.clone(), set.clone()];
        let mut resync = Resync::new(REGIONS, &set, sources);
        let both = PeerMask::one(1).with(PeerMask::one(2));
        assert_eq!((resync.sources(2), resync.sources(3)), (both, PeerMask::NONE));
        let (more, larger) = (Regions::of(u64::from(REGIONS + 1) << 16), Regions::of(2 << 40));
        resync.grow(regions(), more);
        assert_eq!(resync.sources(2), both);
        resync.grow(more, larger);
        assert_eq!(resync.sources(0), PeerMask::NONE);
    }

    #[test]
    fn regions_that_no_member_has_modified_are_skipped_unless_they_are_being_copied() {
        let set = |regions: &[u32]| {
            let mut set = RegionSet::empty(REGIONS);
            regions.iter().for_each(|region| assert!(set.insert(*region)));
            set
        };
        let (all, mut intent) = (set(&[1, 2, 3, 4]), WriteIntent::new(REGIONS));
        let sources = vec![all.clone(), set(&[1]), set(&[2, 3, 4])];
        let mut resync = Resync::new(REGIONS, &all, sources);
        let members = PeerMask::one(0).with(PeerMask::one(2));
        resync.skip_unmodified(members.with(PeerMask::one(1)), &jobs(&[]), &mut intent);
        assert_eq!(resync.left(), &all, "each region was modified by a member");
        resync.skip_unmodified(members, &jobs(&[3]), &mut intent);
        assert_eq!(resync.left(), &set(&[1, 3]));
        let mut dirty = RegionSet::empty(REGIONS);
        intent.add_dirty_to(&mut dirty);
        assert_eq!(dirty, set(&[2, 4]), "as after any write");
        let mut resync = Resync::new(REGIONS, &all, Vec::new());
        resync.skip_unmodified(members, &jobs(&[]), &mut intent);
        assert_eq!(resync.left(), &all, "it is not known which members have modified a region");
    }

    #[test]
    fn a_single_member_differs_only_where_it_is_being_written() {
        let (mut resync, mut intent) = (resync(&[1, 4, 6]), WriteIntent::new(REGIONS));
        resync.keep_copied_regions(&jobs(&[4]), &mut intent);
        assert_eq!(resync.left().iter().collect::<Vec<_>>(), [4]);
        let mut dirty = RegionSet::empty(REGIONS);
        intent.add_dirty_to(&mut dirty);
        assert_eq!(dirty.iter().collect::<Vec<_>>(), [1, 4, 6]);
    }
}
