//! Sets of a volume that grows.

use shorthorn_types::{RegionSet, Regions, ReplicaId};

use super::{SetKey, WriteIntentLog};
use crate::set::PagedSet;

/// The sets for the volume after it has grown. They count from [`WriteIntentLog::grow`] on, and have to be
/// whole and durable on the disk by then. No region may be marked dirty, and no set changed,
/// in between.
#[derive(Debug)]
pub struct GrownSets {
    regions: Regions,
    intent: PagedSet,
    out_of_sync: Vec<(ReplicaId, PagedSet)>,
    unsummed: Option<PagedSet>,
    lost: Option<RegionSet>,
}

impl GrownSets {
    /// Returns the content of the file of each set.
    pub fn files(&self) -> impl Iterator<Item = (SetKey, Vec<u8>)> + '_ {
        let out_of_sync = self.out_of_sync.iter().map(|(replica, set)| (SetKey::OutOfSync(*replica), set));
        let unsummed = self.unsummed.iter().map(|set| (SetKey::Unsummed, set));
        std::iter::once((SetKey::Intent, &self.intent))
            .chain(out_of_sync)
            .chain(unsummed)
            .map(|(key, set)| (key, set.file()))
    }
}

impl WriteIntentLog {
    /// Returns the sets for the volume after it has grown to `regions`.
    #[must_use]
    pub fn grown(&self, regions: Regions) -> GrownSets {
        GrownSets {
            regions,
            intent: self.intent.grown(regions),
            out_of_sync: self
                .out_of_sync
                .iter()
                .map(|(replica, set)| (*replica, set.grown(regions)))
                .collect(),
            unsummed: self.unsummed.as_ref().map(|unsummed| unsummed.grown(self.regions, regions)),
            lost: self.lost.as_ref().map(|lost| lost.converted(self.regions, regions)),
        }
    }

    /// Grows the sets with the volume, after their files exist. Pages that are being written belong to the
    /// former files and do not count any more. Everything that waits for them is durable in the new ones.
    pub fn grow(&mut self, grown: GrownSets) {
        let GrownSets { regions, intent, out_of_sync, unsummed, lost } = grown;
        if let (Some(kept), Some(grown)) = (&mut self.unsummed, unsummed) {
            kept.grow(grown, self.regions, regions);
        }
        (self.regions, self.intent, self.out_of_sync, self.lost) = (regions, intent, out_of_sync, lost);
        let mut serial = self.last_serial;
        for (_, set) in self.sets_mut() {
            serial += 1;
            set.serial = serial;
        }
        self.last_serial = serial;
    }
}
