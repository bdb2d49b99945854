//! Makes the members equal in regions in which they may differ after an unclean end. Requests that touch such
//! a region wait for it, so that none is in flight there: these copies need no place in the range table.

use shorthorn_types::RegionSet;

use crate::engine::EngineCore;
use crate::event::{Output, Outputs};
use crate::job::{Copy, Job, Why};
use crate::slot::SlotId;

impl EngineCore {
    /// Starts to copy the region that a request has waited for the longest, or the next one.
    pub(crate) fn start_equalising(&mut self, id: SlotId, out: &mut Outputs) -> bool {
        let region = match self.wanted_region() {
            Some(region) => {
                self.bucket.pay(self.regions.range(region).length());
                Some(region)
            }
            None => self.next_unequal_region(),
        };
        let Some(region) = region else { return false };
        let why = Why::Equalise { region };
        // To all but the source, which is chosen when it is asked.
        let targets = self.membership.answering();
        self.take_slot(id, Job::Copy(Copy::new(why, self.regions.range(region), targets)));
        self.advance(id, out);
        true
    }

    fn wanted_region(&self) -> Option<u32> {
        let requests = self.held.iter().filter(|id| self.slots.copy_index(**id).is_none());
        let of_request = |id: &SlotId| {
            let touched = self.regions.touched(self.slots.at(*id).range);
            let unequal = std::iter::successors(self.equalise.next(touched.start), |region| {
                self.equalise.next(region + 1)
            });
            unequal
                .take_while(|region| *region < touched.end)
                .find(|region| !self.jobs.has(Why::Equalise { region: *region }))
        };
        requests.into_iter().find_map(of_request)
    }

    fn next_unequal_region(&mut self) -> Option<u32> {
        let region = match self.equalise.next(self.equalise_cursor) {
            Some(region) => region,
            None => self.equalise.next(0)?,
        };
        let is_free = !self.jobs.has(Why::Equalise { region });
        if is_free && !self.bucket.take(self.regions.range(region).length()) {
            return None;
        }
        self.equalise_cursor = region + 1;
        is_free.then_some(region)
    }

    /// Lets requests of the region continue. It stays dirty as after any write.
    pub(crate) fn region_is_equal(&mut self, region: u32) {
        self.equalise.remove(region);
        self.intent.touch(region..region + 1);
        (self.wake_held, self.wake) = (true, true);
    }

    /// Settles the regions of a single member, which differs from no other one. While a copy to it runs,
    /// requests wait until that has ended, because its writes would overtake them.
    pub(crate) fn settle_alone(&mut self) {
        if self.membership.view().members.len() != 1 || self.equalise.is_empty() {
            return;
        }
        self.intent.touch_all(&self.equalise);
        let mut copied = RegionSet::empty(self.regions.count());
        for copy in self.jobs.copies() {
            if let Why::Equalise { region } = copy.why {
                copied.insert(region);
            }
        }
        self.equalise.keep_all(&copied);
        (self.wake_held, self.wake) = (true, true);
    }

    pub(crate) fn tell_equalised(&mut self, out: &mut Outputs) {
        if self.is_equalising && self.equalise.is_empty() {
            self.is_equalising = false;
            self.wake |= self.expanding.is_some();
            out.push(Output::Equalised);
        }
    }
}
