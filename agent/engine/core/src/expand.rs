//! Handles the growth of the volume. Every connected replica has grown before, so that none gets a request
//! beyond its end. The frontend learns the new size after [`Output::Expanded`], so that no request for the
//! new part comes before.
//!
//! Sets that count in regions follow. A large volume has larger regions. While regions become larger, no
//! operation that names one may be under way: copies of regions and marks end first, new ones wait, and
//! requests continue. Afterwards the sets to copy and of possible differences are not smaller than before.
//! Regions that were about to be cleared are forgotten, because another turn follows. Regions to resync stay
//! unchanged until they are equal: requests are admitted to a region once it is equal, and it must not become
//! unequal again.

use shorthorn_types::Regions;

use crate::engine::EngineCore;
use crate::event::{Output, Outputs};
use crate::job::Why;

impl EngineCore {
    /// Returns the division of the volume into regions.
    #[must_use]
    pub fn regions(&self) -> Regions {
        self.regions
    }

    /// Grows the volume as soon as possible. It never gets smaller.
    pub(crate) fn expand(&mut self, size_bytes: u64) {
        self.expanding = Some(size_bytes).max(self.expanding);
        self.wake.work();
    }

    /// Returns true if nothing may begin that names a region.
    pub(crate) fn is_changing_regions(&self) -> bool {
        let changes = |size| Regions::of(size).region_bytes() != self.regions.region_bytes();
        self.expanding.is_some_and(changes)
    }

    /// Grows, unless other work has to end first.
    pub(crate) fn grow(&mut self, out: &mut Outputs) {
        let Some(size_bytes) = self.expanding else { return };
        if self.is_changing_regions() && self.is_naming_regions() {
            return;
        }
        self.expanding = None;
        if size_bytes > self.regions.size_bytes() {
            self.follow_size(Regions::of(size_bytes));
        }
        self.wake.work();
        out.push(Output::Expanded { size_bytes: self.regions.size_bytes() });
    }

    fn is_naming_regions(&self) -> bool {
        let names = |why| matches!(why, Why::Resync { .. } | Why::Rebuild { .. });
        self.is_resyncing
            || self.clearing.marks.is_outstanding()
            || self.jobs.copies().any(|copy| names(copy.why))
    }

    fn follow_size(&mut self, regions: Regions) {
        let before = std::mem::replace(&mut self.regions, regions);
        self.resync = self.resync.converted(before, regions);
        self.intent.grow(before, regions);
        for absent in self.absent.iter_mut().flatten() {
            absent.grow(before, regions);
        }
        if before.region_bytes() != regions.region_bytes() {
            self.resync_cursor = 0;
        }
        // A replica that is about to join gets the out-of-sync sets of the others again.
        self.rebuilds.start_over();
    }
}
