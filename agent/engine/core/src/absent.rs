use shorthorn_types::{RegionSet, Regions};

/// What the core keeps of a replica that is not in the view.
#[derive(Debug)]
pub(crate) struct Absent {
    /// Where it lacks what the members have. Modifications that it is not sent put their regions in.
    pub missed: RegionSet,
    /// What was copied to it and is still in the members' durable sets of what it has missed.
    pub copied: RegionSet,
    /// The part of `copied` that the last internal flush covers: it can be cleared from those sets.
    pub covered: RegionSet,
    /// Where the search for the next region to copy goes on.
    pub cursor: u32,
    /// The newest stamp that the engine sent to it. If its disk has lost that stamp, it misses more regions than `missed`.
    pub stamp: u32,
}

impl Absent {
    pub fn new(missed: RegionSet, stamp: u32) -> Absent {
        let regions = missed.limit();
        let empty = || RegionSet::empty(regions);
        Absent { missed, copied: empty(), covered: empty(), cursor: 0, stamp }
    }

    /// The volume has grown. Where its regions become larger, one may be copied in part: it does not count as copied.
    pub fn grow(&mut self, from: Regions, to: Regions) {
        for set in [&mut self.missed, &mut self.copied, &mut self.covered] {
            *set = set.converted(from, to);
        }
        if from.region_bytes() != to.region_bytes() {
            self.disconnected();
        }
    }

    /// Its connections are lost: nothing that was copied counts as covered any more.
    pub fn disconnected(&mut self) {
        self.copied.clear();
        self.covered.clear();
        self.cursor = 0;
    }
}
