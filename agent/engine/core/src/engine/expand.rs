//! Handles the growth of the volume. Every connected replica has grown before, so that none gets a request
//! beyond its end. The frontend learns the new size after [`Output::Expanded`], so that no request for the
//! new part comes before.
//!
//! Sets that count in regions follow. A large volume has larger regions. While regions become larger, no
//! operation that names one may be under way. Copies of regions and marks end first, new ones wait, and
//! requests continue. Afterwards the sets to copy and of possible differences are not smaller than before.
//! Regions that were about to be cleared are forgotten, because another cycle follows. Regions to resync stay
//! unchanged until they are equal. Requests are admitted to a region once it is equal, and it must not become
//! unequal again.

use shorthorn_types::Regions;

use super::EngineCore;
use crate::copy::CopyReason;
use crate::event::{Output, Outputs};
use crate::marks::MarkFor;

impl EngineCore {
    /// Returns the division of the volume into regions.
    #[must_use]
    pub fn regions(&self) -> Regions {
        self.size.regions()
    }

    /// Grows the volume as soon as possible. It never gets smaller.
    pub(super) fn expand(&mut self, size_bytes: u64) {
        self.size.want(size_bytes);
        self.wake.work();
    }

    /// Grows, unless other work has to end first.
    pub(super) fn grow(&mut self, out: &mut Outputs) {
        if !self.size.is_wanted() || (self.size.is_changing_regions() && self.is_naming_regions()) {
            return;
        }
        if let Some(before) = self.size.grow() {
            self.follow_size(before);
        }
        self.wake.work();
        out.push(Output::Expanded { size_bytes: self.size.regions().size_bytes() });
    }

    fn is_naming_regions(&self) -> bool {
        let names = |why| matches!(why, CopyReason::Resync { .. } | CopyReason::Rebuild { .. });
        self.resync.is_under_way()
            || self.marks.is_outstanding(MarkFor::Clearing)
            || self.jobs.copies().any(|copy| names(copy.why()))
    }

    fn follow_size(&mut self, before: Regions) {
        let regions = self.size.regions();
        self.resync.grow(before, regions);
        self.intent.grow(before, regions);
        self.absent.grow(before, regions);
        // A replica that is about to be a member gets the out-of-sync sets of the others again.
        self.restart_finish();
    }
}
