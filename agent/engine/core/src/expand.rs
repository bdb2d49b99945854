//! Handles the growth of the volume. Every connected replica has grown before, so that none gets a request
//! beyond its end. The frontend learns the new size after [`Output::Expanded`], so that no request for the
//! new part comes before.
//!
//! What is counted in regions follows. A large volume has larger regions, and while theirs become larger
//! nothing may be under way that names one: copies of regions and marks end first, new ones wait, requests go
//! on. Then whatever was to be copied or may differ is no less than before, and what was about to be cleared
//! is forgotten: there will be another turn. Regions that are to be made equal stay as they are until they
//! are: requests are let into a region once it is equal, and must not find it taken back.

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

    /// The volume is to grow, as soon as that can be. It never gets smaller.
    pub(crate) fn expand(&mut self, size_bytes: u64) {
        self.expanding = Some(size_bytes).max(self.expanding);
        self.wake = true;
    }

    /// Returns true if nothing may begin that names a region.
    pub(crate) fn is_changing_regions(&self) -> bool {
        let changes = |size| Regions::of(size).region_bytes() != self.regions.region_bytes();
        self.expanding.is_some_and(changes)
    }

    /// Grows, unless something has to end first.
    pub(crate) fn grow(&mut self, out: &mut Outputs) {
        let Some(size_bytes) = self.expanding else { return };
        if self.is_changing_regions() && self.is_naming_regions() {
            return;
        }
        self.expanding = None;
        if size_bytes > self.regions.size_bytes() {
            self.follow_size(Regions::of(size_bytes));
        }
        self.wake = true;
        out.push(Output::Expanded { size_bytes: self.regions.size_bytes() });
    }

    fn is_naming_regions(&self) -> bool {
        let names = |why| matches!(why, Why::Equalise { .. } | Why::Join { .. });
        self.is_equalising
            || self.clearing.marks.is_outstanding()
            || self.jobs.copies().any(|copy| names(copy.why))
    }

    fn follow_size(&mut self, regions: Regions) {
        let before = std::mem::replace(&mut self.regions, regions);
        self.equalise = self.equalise.converted(before, regions);
        self.intent.grow(before, regions);
        for absent in self.absent.iter_mut().flatten() {
            absent.grow(before, regions);
        }
        if before.region_bytes() != regions.region_bytes() {
            self.equalise_cursor = 0;
        }
        // A replica that is about to join is told anew what others have missed.
        self.joins.start_over();
    }
}
