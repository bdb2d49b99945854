//! Makes the members equal in regions in which they may differ after an unclean end. Requests that touch such
//! a region wait for it, so that none is in flight there: these copies need no place in the range table.

use shorthorn_types::RegionSet;

use crate::engine::EngineCore;
use crate::event::{Output, Outputs};
use crate::job::{Copy, Job, Why};
use crate::slot::SlotId;

impl EngineCore {
    /// Starts to copy the region that a request has waited for the longest, or the next one.
    pub(crate) fn start_region_resync(&mut self, id: SlotId, out: &mut Outputs) -> bool {
        let region = match self.wanted_region() {
            Some(region) => {
                self.bucket.pay(self.regions.range(region).length());
                Some(region)
            }
            None => self.next_region_to_resync(),
        };
        let Some(region) = region else { return false };
        let why = Why::Resync { region };
        // To all but the source, which is chosen when it is asked.
        let targets = self.membership.answering();
        self.take_slot(id, Job::Copy(Copy::new(why, self.regions.range(region), targets)));
        self.advance(id, out);
        true
    }

    fn wanted_region(&self) -> Option<u32> {
        let mut requests = self.turns.held().filter(|id| self.slots.copy_index(*id).is_none());
        let of_request = |id: SlotId| {
            let touched = self.regions.touched(self.slots.at(id).range);
            let unequal =
                std::iter::successors(self.resync.next(touched.start), |region| self.resync.next(region + 1));
            unequal
                .take_while(|region| *region < touched.end)
                .find(|region| !self.jobs.has(Why::Resync { region: *region }))
        };
        requests.find_map(of_request)
    }

    fn next_region_to_resync(&mut self) -> Option<u32> {
        let region = match self.resync.next(self.resync_cursor) {
            Some(region) => region,
            None => self.resync.next(0)?,
        };
        let is_free = !self.jobs.has(Why::Resync { region });
        if is_free && !self.bucket.take(self.regions.range(region).length()) {
            return None;
        }
        self.resync_cursor = region + 1;
        is_free.then_some(region)
    }

    /// Lets requests of the region continue. It stays dirty as after any write.
    pub(crate) fn region_is_resynced(&mut self, region: u32) {
        self.resync.remove(region);
        self.intent.touch(region..region + 1);
        self.wake.all();
    }

    /// Settles the regions of a single member, which differs from no other one. While a copy to it runs,
    /// requests wait until that has ended, because its writes would overtake them.
    pub(crate) fn skip_resync_if_alone(&mut self) {
        if self.membership.view().members.len() != 1 || self.resync.is_empty() {
            return;
        }
        self.intent.touch_all(&self.resync);
        let mut copied = RegionSet::empty(self.regions.count());
        for copy in self.jobs.copies() {
            if let Why::Resync { region } = copy.why {
                copied.insert(region);
            }
        }
        self.resync.keep_all(&copied);
        self.wake.all();
    }

    pub(crate) fn report_resynced(&mut self, out: &mut Outputs) {
        if self.is_resyncing && self.resync.is_empty() {
            self.is_resyncing = false;
            self.wake.work_if(self.expanding.is_some());
            out.push(Output::Resynced);
        }
    }
}
