use shorthorn_types::RegionSet;

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
}

impl Absent {
    pub fn new(missed: RegionSet) -> Absent {
        let regions = missed.limit();
        let empty = || RegionSet::empty(regions);
        Absent { missed, copied: empty(), covered: empty(), cursor: 0 }
    }

    /// Its connections are lost: nothing that was copied counts as covered any more.
    pub fn disconnected(&mut self) {
        self.copied.clear();
        self.covered.clear();
        self.cursor = 0;
    }
}
