use std::ops::Range;

use shorthorn_types::{RegionSet, Regions};

/// Regions in which the members may differ after a crash, and the ones of them that can be cleared.
///
/// A region is *hot* from the moment a modification of it is sent. Clearing cycles follow one another, at
/// least an interval apart. When a cycle starts, hot regions become *warm*. Warm regions that did not become
/// hot again become *cold*: they were not touched for a whole interval. The flush of the cycle covers every
/// modification of a cold region that was answered before. Regions with modifications in flight at the start
/// are left out. When the flush is answered, the cold regions that did not become hot since the start can be
/// *cleared*.
#[derive(Debug)]
pub(crate) struct WriteIntent {
    hot: RegionSet,
    warm: RegionSet,
    cold: RegionSet,
    /// The cold ones that the flush covers and that are not cleared yet.
    covered: RegionSet,
    /// Regions that the members are clearing. No modification of them may be sent.
    clearing: RegionSet,
}

impl WriteIntent {
    pub fn new(regions: u32) -> WriteIntent {
        let empty = || RegionSet::empty(regions);
        WriteIntent { hot: empty(), warm: empty(), cold: empty(), covered: empty(), clearing: empty() }
    }

    /// Grows the set while no region is being cleared. If regions become larger, the regions that could be
    /// cleared are not known any more.
    pub fn grow(&mut self, from: Regions, to: Regions) {
        for set in [&mut self.hot, &mut self.warm, &mut self.cold, &mut self.covered, &mut self.clearing] {
            *set = set.converted(from, to);
        }
        if from.region_bytes() != to.region_bytes() {
            debug_assert!(self.clearing.is_empty(), "regions being cleared have their old numbers");
            self.covered.clear();
        }
    }

    /// Records a modification of `regions` when it is sent.
    pub fn touch(&mut self, regions: Range<u32>) {
        self.hot.insert_run(regions);
    }

    /// Marks all of `regions`, in which the members may differ.
    pub fn touch_all(&mut self, regions: &RegionSet) {
        self.hot.insert_all(regions);
    }

    /// Returns true if modifications of any of `regions` have to wait.
    pub fn is_clearing(&self, regions: Range<u32>) -> bool {
        !self.clearing.is_empty() && self.clearing.contains_any(regions)
    }

    /// Adds all regions in which the members may differ to `all`.
    pub fn add_dirty_to(&self, all: &mut RegionSet) {
        for set in [&self.hot, &self.warm, &self.cold, &self.clearing] {
            if !set.is_empty() {
                all.insert_all(set);
            }
        }
    }

    /// Returns the maximum number of regions that stay dirty until a cycle.
    pub fn left_dirty(&self) -> u32 {
        self.hot.len() + self.warm.len()
    }

    /// Returns true if some region is modified again and again, so that it does not become cold.
    pub fn is_in_use(&self) -> bool {
        self.warm.intersects(&self.hot)
    }

    /// Makes all regions clearable after the next cycle and its flush, without waiting until they are cold.
    pub fn age_all(&mut self) {
        self.warm.insert_all(&self.hot);
        self.hot.clear();
    }

    /// Starts the next cycle while no region is being cleared. `in_flight` has the regions of modifications
    /// that were sent and not yet answered by every replica. Returns true if some regions can be cleared
    /// after a flush.
    pub fn start_cycle(&mut self, in_flight: impl Iterator<Item = Range<u32>>) -> bool {
        self.cold.insert_all(&self.warm);
        self.cold.remove_all(&self.hot);
        std::mem::swap(&mut self.warm, &mut self.hot);
        self.hot.clear();
        self.covered.clear();
        self.covered.insert_all(&self.cold);
        for regions in in_flight {
            self.covered.remove_run(regions);
        }
        !self.covered.is_empty()
    }

    /// Starts to clear some clearable regions of the intent, at most `runs_max` runs.
    pub fn clear_some(&mut self, runs_max: usize) -> Vec<(u32, u32)> {
        self.covered.remove_all(&self.hot);
        take_runs(&mut self.covered, &mut self.clearing, runs_max)
    }

    /// Returns the first region that can be cleared of the intent.
    pub fn first_covered(&mut self) -> Option<u32> {
        self.covered.remove_all(&self.hot);
        self.covered.next(0)
    }

    /// Starts to clear like [`WriteIntent::clear_some`], but only regions in `among`.
    pub fn clear_some_within(&mut self, among: &RegionSet, runs_max: usize) -> Vec<(u32, u32)> {
        let mut part = self.covered.clone();
        part.keep_all(among);
        let runs = take_runs(&mut part, &mut self.clearing, runs_max);
        self.covered.remove_all(&self.clearing);
        runs
    }

    /// Starts to clear some of the regions in `set`, which the flush has covered too.
    pub fn clear_some_of(&mut self, set: &mut RegionSet, runs_max: usize) -> Vec<(u32, u32)> {
        set.remove_all(&self.hot);
        take_runs(set, &mut self.clearing, runs_max)
    }

    /// Ends a clearing of the intent by the members.
    pub fn cleared(&mut self) {
        self.cold.remove_all(&self.clearing);
        self.clearing.clear();
    }

    /// Cancels the clearing: the regions stay in the set.
    pub fn keep(&mut self) {
        self.clearing.clear();
    }

    /// Ends a clearing of the given set by the members.
    pub fn cleared_of(&mut self, set: Option<&mut RegionSet>) {
        if let Some(set) = set {
            set.remove_all(&self.clearing);
        }
        self.clearing.clear();
    }
}

fn take_runs(from: &mut RegionSet, into: &mut RegionSet, runs_max: usize) -> Vec<(u32, u32)> {
    let runs: Vec<(u32, u32)> =
        from.runs(0).take(runs_max).map(|run| (run.start, run.end - run.start)).collect();
    for (start, count) in &runs {
        from.remove_run(*start..start + count);
        into.insert_run(*start..start + count);
    }
    runs
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const REGIONS: u32 = 8;

    #[derive(Clone, Copy, Debug)]
    enum Deed {
        Send(u32),
        Complete(prop::sample::Index),
        StartCycle,
        AgeAll,
        FlushAnswered,
        Clear,
        Cleared,
    }

    fn deed() -> impl Strategy<Value = Deed> {
        prop_oneof![
            4 => (0..REGIONS).prop_map(Deed::Send),
            4 => any::<prop::sample::Index>().prop_map(Deed::Complete),
            1 => Just(Deed::StartCycle),
            1 => Just(Deed::AgeAll),
            2 => Just(Deed::FlushAnswered),
            2 => Just(Deed::Clear),
            2 => Just(Deed::Cleared),
        ]
    }

    proptest! {
        /// The model knows for each region whether it may have unflushed data. That is a modification in
        /// flight, or one that was completed after the last answered flush was sent. Such a region is never
        /// cleared, and always counts as dirty.
        #[test]
        fn never_clears_unflushed_regions(deeds in prop::collection::vec(deed(), 1..200)) {
            let mut intent = WriteIntent::new(REGIONS);
            let mut in_flight: Vec<u32> = Vec::new();
            let mut unflushed: BTreeSet<u32> = BTreeSet::new();
            let mut covered_by_flush: Option<BTreeSet<u32>> = None;
            let (mut may_clear, mut is_clearing) = (false, false);
            for deed in deeds {
                match deed {
                    Deed::Send(region) if intent.is_clearing(region..region + 1) => {}
                    Deed::Send(region) => {
                        intent.touch(region..region + 1);
                        in_flight.push(region);
                    }
                    Deed::Complete(which) if !in_flight.is_empty() => {
                        let region = in_flight.swap_remove(which.index(in_flight.len()));
                        unflushed.insert(region);
                        if let Some(covered) = &mut covered_by_flush {
                            covered.remove(&region);
                        }
                    }
                    Deed::StartCycle | Deed::AgeAll
                        if covered_by_flush.is_none() && !may_clear && !is_clearing =>
                    {
                        if matches!(deed, Deed::AgeAll) {
                            intent.age_all();
                        }
                        let in_flight = in_flight.iter().map(|region| *region..region + 1);
                        let is_flushed = intent.start_cycle(in_flight);
                        covered_by_flush = is_flushed.then(|| unflushed.clone());
                    }
                    Deed::FlushAnswered => {
                        for region in covered_by_flush.take().into_iter().flatten() {
                            unflushed.remove(&region);
                            may_clear = true;
                        }
                    }
                    Deed::Clear if may_clear && !is_clearing => {
                        let runs = intent.clear_some(1);
                        (is_clearing, may_clear) = (!runs.is_empty(), !runs.is_empty());
                        for region in runs.into_iter().flat_map(|(start, count)| start..start + count) {
                            prop_assert!(!unflushed.contains(&region), "{region} is not flushed");
                            prop_assert!(!in_flight.contains(&region), "{region} is in flight");
                        }
                    }
                    Deed::Cleared if is_clearing => {
                        intent.cleared();
                        is_clearing = false;
                    }
                    _ => {}
                }
                let mut dirty = RegionSet::empty(REGIONS);
                intent.add_dirty_to(&mut dirty);
                for region in unflushed.iter().chain(&in_flight) {
                    prop_assert!(dirty.contains(*region), "{region} is not counted");
                }
            }
        }
    }

    #[test]
    fn aged_regions_are_cleared_after_one_cycle() {
        let mut intent = WriteIntent::new(REGIONS);
        intent.touch(1..3);
        intent.touch(5..6);
        intent.age_all();
        assert!(intent.start_cycle(std::iter::once(5..6)));
        intent.touch(2..3);
        assert_eq!(intent.clear_some(9), [(1, 1)], "2 was touched since, 5 is in flight");
    }

    #[test]
    fn untouched_regions_are_cleared_after_two_cycles() {
        let mut intent = WriteIntent::new(REGIONS);
        intent.touch(1..3);
        intent.touch(5..6);
        assert!(!intent.start_cycle(std::iter::empty()));
        intent.touch(2..3);
        assert!(intent.start_cycle(std::iter::once(5..6)));
        assert_eq!(intent.clear_some(9), [(1, 1)], "2 was touched, 5 is in flight");
        assert!(intent.is_clearing(0..8));
        intent.cleared();
        assert!(!intent.is_clearing(0..8));
        assert!(intent.start_cycle(std::iter::empty()));
        assert_eq!(intent.clear_some(9), [(2, 1), (5, 1)]);
    }
}
