use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{ByteRange, ReplicaId};

/// The smallest region in bytes: a first write to a clean part of the volume makes so much dirty.
pub const REGION_BYTES_MIN: u64 = 64 << 10;
/// The most regions of one volume; larger volumes have larger regions. A set of them takes 128 KiB.
///
/// A simulation that is built with `--cfg shorthorn_few_regions` has volumes whose regions become larger when
/// they are expanded. Otherwise none would, because no simulated volume is as large as 64 GiB.
pub const REGIONS_MAX: u64 = if cfg!(shorthorn_few_regions) { 24 } else { 1 << 20 };

/// The most runs that one [`MarkRegions`] or one page of regions carries, so that it fits a control frame.
pub const RUNS_PER_MARK_MAX: usize = 800;

/// The sets of regions that a replica keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RegionsOf {
    /// Write intent: where the members may differ after a crash of any of them. Durable; a replica sets a
    /// region before the first write to it, the engine has it cleared when every member has flushed.
    Intent,
    /// The out-of-sync set of a replica outside the view. Durable; every member adds to it before it writes.
    #[serde(rename = "missed")]
    OutOfSync(ReplicaId),
    /// Regions with data in any layer of the replica. The set is not stored but searched on demand, and read
    /// only.
    Allocated,
}

/// The change of a set of regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MarkAction {
    /// Put the regions in; durable when it is answered. A set of missed regions begins to be kept by this.
    Add,
    /// Take the regions out, lazily: after a crash they may be in again.
    Clear,
    /// Keep the set no longer. For missed regions only.
    Forget,
    /// Keep [`MarkRegions::stamp`] as the replica's own, in place of the one before; durable when it is
    /// answered. For the intent only.
    Stamp,
}

/// An engine changes a set of regions that a replica keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MarkRegions {
    /// The set to change.
    pub of: RegionsOf,
    /// The kind of change.
    pub action: MarkAction,
    /// First region and count of each run, at most [`RUNS_PER_MARK_MAX`].
    pub runs: Vec<(u32, u32)>,
    /// For [`MarkAction::Stamp`]: the stamp to keep. For out-of-sync regions: the newest stamp that their
    /// replica was sent, if it is newer than the one kept with the set.
    #[serde(default)]
    pub stamp: u32,
    /// The size of the volume to which the numbers of the regions refer. While a volume is being expanded the
    /// replica may be ahead of the engine. None, which is 0 in the message: its own; engines that do not say
    /// it expand nothing.
    #[serde(default, with = "crate::optional::number")]
    pub size_bytes: Option<u64>,
}

impl MarkRegions {
    /// Returns the mark that has a replica store `stamp` with its write intents.
    #[must_use]
    pub const fn stamp(stamp: u32) -> MarkRegions {
        let (of, action) = (RegionsOf::Intent, MarkAction::Stamp);
        MarkRegions { of, action, runs: Vec::new(), stamp, size_bytes: None }
    }

    /// Returns the mark that has a replica delete its out-of-sync set of `replica`.
    #[must_use]
    pub const fn forget(replica: ReplicaId) -> MarkRegions {
        let (of, action) = (RegionsOf::OutOfSync(replica), MarkAction::Forget);
        MarkRegions { of, action, runs: Vec::new(), stamp: 0, size_bytes: None }
    }
}

/// Returns true if a replica that keeps the stamp `own` has kept all that it stored while it was sent stamps
/// up to `newest`.
///
/// An engine numbers the stamps that it has its members store. It sends one only when every member has stored
/// the one before, and after each flush that lets it clear write intents it sends three. A member whose disk
/// has kept everything is thus behind by at most one. A member whose disk was restored to a state before such
/// a flush is behind by at least two. `None`: it does not know, because the file of its write intents is lost
/// or of a version without stamps. Then it counts as current.
#[must_use]
pub const fn is_current(own: Option<u32>, newest: u32) -> bool {
    match own {
        Some(own) => own.saturating_add(1) >= newest,
        None => true,
    }
}

/// The division of a volume into regions, in which the write intent and the out-of-sync sets count.
///
/// It follows from the volume's size alone, so that engine and replicas agree without talking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regions {
    size_bytes: u64,
    region_bytes: u64,
}

impl Regions {
    /// Returns the regions of a volume of `size_bytes`.
    #[must_use]
    pub const fn of(size_bytes: u64) -> Regions {
        let mut region_bytes = REGION_BYTES_MIN;
        while size_bytes.div_ceil(region_bytes) > REGIONS_MAX {
            region_bytes *= 2;
        }
        Regions { size_bytes, region_bytes }
    }

    /// Returns the size of the volume.
    #[must_use]
    pub const fn size_bytes(self) -> u64 {
        self.size_bytes
    }

    /// Returns the bytes of one region, a power of two; the last one may be shorter.
    #[must_use]
    pub const fn region_bytes(self) -> u64 {
        self.region_bytes
    }

    /// Returns the number of regions, at most [`REGIONS_MAX`].
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // at most REGIONS_MAX
    pub const fn count(self) -> u32 {
        self.size_bytes.div_ceil(self.region_bytes) as u32
    }

    /// Returns the regions that `range` touches; a part past the end of the volume has none.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // at most REGIONS_MAX
    pub fn touched(self, range: ByteRange) -> Range<u32> {
        let end = range.end().min(self.size_bytes).div_ceil(self.region_bytes);
        let start = (range.offset() / self.region_bytes).min(end);
        if range.is_empty() { start as u32..start as u32 } else { start as u32..end as u32 }
    }

    /// Returns the regions that lie in `range` with all that the volume has of them.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // at most REGIONS_MAX
    pub fn within(self, range: ByteRange) -> Range<u32> {
        let start = range.offset().div_ceil(self.region_bytes).min(u64::from(self.count()));
        let end = match range.end() >= self.size_bytes {
            true => u64::from(self.count()),
            false => range.end() / self.region_bytes,
        };
        start as u32..end.max(start) as u32
    }

    /// Returns the bytes of a run of regions, as far as the volume has them.
    #[must_use]
    pub fn bytes(self, run: Range<u32>) -> ByteRange {
        let start = (u64::from(run.start) * self.region_bytes).min(self.size_bytes);
        let end = (u64::from(run.end) * self.region_bytes).min(self.size_bytes).max(start);
        ByteRange::new(start, end - start).unwrap_or(ByteRange::EMPTY)
    }

    /// Returns the bytes of `region`; empty past the end of the volume.
    #[must_use]
    pub fn range(self, region: u32) -> ByteRange {
        let start = (u64::from(region) * self.region_bytes).min(self.size_bytes);
        let end = (start + self.region_bytes).min(self.size_bytes);
        ByteRange::new(start, end - start).unwrap_or(ByteRange::EMPTY)
    }
}

/// A set of regions of one volume: a bitmap with a count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionSet {
    words: Box<[u64]>,
    limit: u32,
    len: u32,
}

impl RegionSet {
    /// Returns the empty set for a volume of `regions` regions.
    #[must_use]
    pub fn empty(regions: u32) -> RegionSet {
        RegionSet { words: vec![0; regions.div_ceil(64) as usize].into(), limit: regions, len: 0 }
    }

    /// Returns the set of all regions of a volume of `regions` regions.
    #[must_use]
    pub fn full(regions: u32) -> RegionSet {
        let mut all = RegionSet::empty(regions);
        all.insert_run(0..regions);
        all
    }

    /// Returns the number of regions of the volume.
    #[must_use]
    pub const fn limit(&self) -> u32 {
        self.limit
    }

    /// Converts the set to the same volume at another size, whose regions may be larger or smaller. The
    /// result has every region that touches one of this set. The added part of a grown volume is not in it.
    #[must_use]
    pub fn converted(&self, from: Regions, to: Regions) -> RegionSet {
        let mut converted = RegionSet::empty(to.count());
        for run in self.runs(0) {
            converted.insert_run(to.touched(from.bytes(run)));
        }
        converted
    }

    /// Returns the number of regions in the set.
    #[must_use]
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// Returns true if the set is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns true if `region` is in the set.
    #[must_use]
    pub fn contains(&self, region: u32) -> bool {
        self.words.get(region as usize / 64).is_some_and(|word| word & bit(region) != 0)
    }

    /// Returns true if any of `regions` is in the set.
    #[must_use]
    pub fn contains_any(&self, mut regions: Range<u32>) -> bool {
        regions.any(|region| self.contains(region))
    }

    /// Returns true if any region is in both sets.
    #[must_use]
    pub fn intersects(&self, other: &RegionSet) -> bool {
        self.words.iter().zip(&other.words).any(|(mine, theirs)| mine & theirs != 0)
    }

    /// Returns true if all of `regions` are in the set.
    #[must_use]
    pub fn contains_all(&self, mut regions: Range<u32>) -> bool {
        regions.all(|region| self.contains(region))
    }

    /// Puts `region` in, if the volume has it; returns true if it was not in before.
    pub fn insert(&mut self, region: u32) -> bool {
        if region >= self.limit || self.contains(region) {
            return false;
        }
        self.words[region as usize / 64] |= bit(region);
        self.len += 1;
        true
    }

    /// Takes `region` out; returns true if it was in.
    pub fn remove(&mut self, region: u32) -> bool {
        if !self.contains(region) {
            return false;
        }
        self.words[region as usize / 64] &= !bit(region);
        self.len -= 1;
        true
    }

    /// Puts all of `regions` in that the volume has.
    pub fn insert_run(&mut self, regions: Range<u32>) {
        for region in regions.start..regions.end.min(self.limit) {
            self.insert(region);
        }
    }

    /// Takes all of `regions` out.
    pub fn remove_run(&mut self, regions: Range<u32>) {
        for region in regions.start..regions.end.min(self.limit) {
            self.remove(region);
        }
    }

    /// Puts everything in that is in `other`.
    pub fn insert_all(&mut self, other: &RegionSet) {
        self.combine(other, |mine, theirs| mine | theirs);
    }

    /// Takes everything out that is in `other`.
    pub fn remove_all(&mut self, other: &RegionSet) {
        self.combine(other, |mine, theirs| mine & !theirs);
    }

    /// Removes all regions that are not in `other`.
    pub fn keep_all(&mut self, other: &RegionSet) {
        self.combine(other, |mine, theirs| mine & theirs);
    }

    fn combine(&mut self, other: &RegionSet, how: impl Fn(u64, u64) -> u64) {
        debug_assert_eq!(self.limit, other.limit, "sets of different volumes");
        let theirs = other.words.iter().copied().chain(std::iter::repeat(0));
        self.len = 0;
        for (mine, theirs) in self.words.iter_mut().zip(theirs) {
            *mine = how(*mine, theirs);
            self.len += mine.count_ones();
        }
    }

    /// Takes everything out.
    pub fn clear(&mut self) {
        self.words.fill(0);
        self.len = 0;
    }

    /// Returns the first region of the set from `from` on.
    #[must_use]
    pub fn next(&self, from: u32) -> Option<u32> {
        let mut at = from as usize / 64;
        let mut word = self.words.get(at)? & (u64::MAX << (from % 64));
        while word == 0 {
            at += 1;
            word = *self.words.get(at)?;
        }
        let base = u32::try_from(at * 64).unwrap_or(u32::MAX);
        Some(base + word.trailing_zeros())
    }

    /// Returns the regions in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            let region = self.next(from)?;
            from = region + 1;
            Some(region)
        })
    }

    /// Returns the longest runs of regions that are in the set, in order, from `from` on.
    pub fn runs(&self, from: u32) -> impl Iterator<Item = Range<u32>> + '_ {
        let mut from = from;
        std::iter::from_fn(move || {
            let start = self.next(from)?;
            let mut end = start + 1;
            while self.contains(end) {
                end += 1;
            }
            from = end;
            Some(start..end)
        })
    }
}

const fn bit(region: u32) -> u64 {
    1 << (region % 64)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_mark_without_a_size_is_sent_with_zero() {
        let mark = MarkRegions::stamp(3);
        let text = serde_json::to_string(&mark).unwrap();
        assert!(text.ends_with(r#""stamp":3,"size_bytes":0}"#), "{text}");
        assert_eq!(serde_json::from_str::<MarkRegions>(&text).unwrap(), mark);
        let absent = text.replace(r#","size_bytes":0"#, "");
        assert_eq!(serde_json::from_str::<MarkRegions>(&absent).unwrap(), mark);
        let sized = MarkRegions { size_bytes: Some(4096), ..mark };
        let text = serde_json::to_string(&sized).unwrap();
        assert!(text.ends_with(r#""size_bytes":4096}"#), "{text}");
        assert_eq!(serde_json::from_str::<MarkRegions>(&text).unwrap(), sized);
    }

    #[test]
    fn regions_grow_with_the_volume() {
        assert_eq!(Regions::of(1 << 30).region_bytes(), 64 << 10);
        assert_eq!(Regions::of(64 << 30).region_bytes(), 64 << 10);
        assert_eq!(Regions::of((64 << 30) + 4096).region_bytes(), 128 << 10);
        assert_eq!(Regions::of(1 << 40).region_bytes(), 1 << 20);
        assert_eq!(u64::from(Regions::of(1 << 40).count()), REGIONS_MAX);
    }

    #[test]
    fn the_last_region_may_be_short() {
        let regions = Regions::of((128 << 10) + 4096);
        assert_eq!(regions.count(), 3);
        assert_eq!(regions.range(2), ByteRange::new(128 << 10, 4096).unwrap());
        assert!(regions.range(3).is_empty());
        let touched = |offset, length| regions.touched(ByteRange::new(offset, length).unwrap());
        assert_eq!(touched(0, 1), 0..1);
        assert_eq!(touched((64 << 10) - 512, 1024), 0..2);
        assert_eq!(touched(128 << 10, 1 << 40), 2..3);
        assert_eq!(touched(4096, 0).count(), 0);
        assert_eq!(touched(1 << 40, 512).count(), 0);
    }

    #[test]
    fn regions_within_a_range_are_whole() {
        let regions = Regions::of((128 << 10) + 4096);
        let within = |offset, length| regions.within(ByteRange::new(offset, length).unwrap());
        assert_eq!(within(0, 64 << 10), 0..1);
        assert_eq!(within(512, 128 << 10), 1..2);
        assert_eq!(within(128 << 10, 4096), 2..3, "the last one is short");
        assert_eq!(within(128 << 10, 2048).count(), 0);
        assert_eq!(within(512, 1024).count(), 0);
        assert_eq!(within(1 << 40, 512).count(), 0);
        assert_eq!(regions.bytes(1..9), ByteRange::new(64 << 10, (64 << 10) + 4096).unwrap());
    }

    proptest! {
        /// Growing never loses a byte of a set, whether its regions become larger or not. It brings in
        /// nothing that is further away than the larger region is long.
        #[test]
        fn a_set_follows_the_size(
            old_mib in 1u64..200_000,
            more_mib in 0u64..400_000,
            runs in prop::collection::vec((0.0..1.0f64, 1u32..50), 0..20),
        ) {
            let (from, to) = (Regions::of(old_mib << 20), Regions::of((old_mib + more_mib) << 20));
            let mut set = RegionSet::empty(from.count());
            for (at, count) in runs {
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                let start = (f64::from(from.count()) * at) as u32;
                set.insert_run(start..start + count);
            }
            let grown = set.converted(from, to);
            for run in set.runs(0) {
                prop_assert!(grown.contains_all(to.touched(from.bytes(run))));
            }
            for region in grown.iter() {
                prop_assert!(set.contains_any(from.touched(to.range(region))));
            }
            prop_assert_eq!(set.converted(from, from), set);
        }

        #[test]
        fn is_a_set(
            limit in 1u32..300,
            steps in prop::collection::vec((0u8..3, 0u32..320, 0u32..80), 0..60),
        ) {
            let mut set = RegionSet::empty(limit);
            let mut model = BTreeSet::new();
            for (kind, start, count) in steps {
                let run = start..start + count;
                match kind {
                    0 => {
                        set.insert_run(run.clone());
                        model.extend(run.filter(|region| *region < limit));
                    }
                    1 => {
                        set.remove_run(run.clone());
                        model.retain(|region| !run.contains(region));
                    }
                    _ => {
                        let mut other = RegionSet::empty(limit);
                        other.insert_run(run.clone());
                        set.keep_all(&other);
                        model.retain(|region| run.contains(region));
                    }
                }
                prop_assert_eq!(set.len() as usize, model.len());
            }
            for region in 0..limit {
                let mut one = RegionSet::empty(limit);
                one.insert(region);
                prop_assert_eq!(one.intersects(&set), model.contains(&region));
            }
            prop_assert_eq!(set.iter().collect::<Vec<_>>(), model.iter().copied().collect::<Vec<_>>());
            let spread: Vec<u32> = set.runs(0).flatten().collect();
            prop_assert_eq!(spread, model.into_iter().collect::<Vec<_>>());
            let mut full = RegionSet::full(limit);
            full.remove_all(&set);
            full.insert_all(&set);
            prop_assert_eq!(full.len(), limit);
        }
    }
}
