//! Copies the regions in which the members may differ: see [`crate::resync`]. Requests that touch such a
//! region wait for it, so that none is in flight there: these copies need no place in the range table.

use super::EngineCore;
use crate::copy::{Copy, CopyReason};
use crate::event::{Output, Outputs};
use crate::job::Job;
use crate::slot::SlotId;

impl EngineCore {
    /// Starts to copy the region that a request has waited for the longest, or the next one.
    pub(super) fn start_region_resync(&mut self, id: SlotId, out: &mut Outputs) -> bool {
        let regions = self.size.regions();
        let region = match self.needed_region() {
            Some(region) => {
                self.bucket.pay(regions.range(region).length());
                Some(region)
            }
            None => self.resync.next(regions, &self.jobs, &mut self.bucket),
        };
        let Some(region) = region else { return false };
        let why = CopyReason::Resync { region };
        // To all but the source, which is chosen when it is asked.
        let targets = self.membership.answering();
        self.take_slot(id, Job::Copy(Copy::new(why, regions.range(region), targets)));
        self.advance(id, out);
        true
    }

    fn needed_region(&self) -> Option<u32> {
        let regions = self.size.regions();
        let requests = self.dispatch.deferred().filter(|id| self.slots.copy_index(*id).is_none());
        let touched = requests.map(|id| regions.touched(self.slots.at(id).range()));
        self.resync.needed(touched, &self.jobs)
    }

    /// Lets requests of the region continue.
    pub(super) fn region_resynced(&mut self, region: u32) {
        self.resync.region_equal(region, &mut self.intent);
        self.wake.all();
    }

    /// Skips the regions in which the members of the view hold the same.
    pub(super) fn skip_equal_regions(&mut self) {
        if self.resync.left().is_empty() {
            return;
        }
        if self.membership.view().members.len() == 1 {
            self.resync.keep_copied_regions(&self.jobs, &mut self.intent);
        } else {
            self.resync.skip_unmodified(self.membership.in_view(), &self.jobs, &mut self.intent);
        }
        self.wake.all();
    }

    pub(super) fn report_resynced(&mut self, out: &mut Outputs) {
        if self.resync.take_end() {
            self.wake.work_if(self.size.is_wanted());
            out.push(Output::Resynced);
        }
    }
}
