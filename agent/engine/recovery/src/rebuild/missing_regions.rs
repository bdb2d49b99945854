//! The regions that a rebuild has to copy.

use shorthorn_types::{RegionSet, Regions};

/// The regions that a replica lacks before its rebuild, besides those that the core counts.
#[derive(Debug)]
pub(super) struct MissingRegions {
    pub set: RegionSet,
    /// The division that `set` counts in.
    pub regions: Regions,
    /// True if the replica receives a full copy.
    pub is_copy: bool,
}

impl MissingRegions {
    /// Returns the set for a volume that is divided into `regions`: it may have grown meanwhile.
    pub fn converted(&self, regions: Regions) -> RegionSet {
        self.set.converted(self.regions, regions)
    }
}
