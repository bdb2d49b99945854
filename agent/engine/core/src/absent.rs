use shorthorn_types::{RegionSet, Regions};

/// The state that the core keeps of a replica outside the view.
#[derive(Debug)]
pub(crate) struct Absent {
    /// Regions that the replica lacks. A modification that is not sent to it adds its regions.
    pub out_of_sync: RegionSet,
    /// Regions that were copied to the replica but are still in the members' durable out-of-sync set.
    pub copied: RegionSet,
    /// The part of `copied` that the last internal flush covers: it can be cleared from those sets.
    pub covered: RegionSet,
    /// The region from which the search for the next region to copy continues.
    pub cursor: u32,
    /// The newest stamp that the engine sent to it. If its disk has lost that stamp, it misses more regions
    /// than `out_of_sync`.
    pub stamp: u32,
}

impl Absent {
    pub fn new(out_of_sync: RegionSet, stamp: u32) -> Absent {
        let regions = out_of_sync.limit();
        let empty = || RegionSet::empty(regions);
        Absent { out_of_sync, copied: empty(), covered: empty(), cursor: 0, stamp }
    }

    /// Grows the sets with the volume. If its regions become larger, one may be copied in part: it does not
    /// count as copied.
    pub fn grow(&mut self, from: Regions, to: Regions) {
        for set in [&mut self.out_of_sync, &mut self.copied, &mut self.covered] {
            *set = set.converted(from, to);
        }
        if from.region_bytes() != to.region_bytes() {
            self.disconnected();
        }
    }

    /// Discards the covered regions after the connections are lost: a copy no longer counts.
    pub fn disconnected(&mut self) {
        self.copied.clear();
        self.covered.clear();
        self.cursor = 0;
    }
}
