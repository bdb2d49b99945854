//! The set of regions in which no sum of a block counts: see [`Unsummed`].

use std::ops::Range;

use shorthorn_types::RegionSet;

use super::{SetKey, WriteIntentLog};
use crate::page::PageDamage;
use crate::unsummed::Unsummed;

impl WriteIntentLog {
    /// Starts to keep the set of regions in which no sum of a block counts: all regions, or those in `file`.
    /// Damaged pages and pages of another epoch count as full and are returned. The file has to be recreated
    /// if pages are returned or it [is outgrown](WriteIntentLog::is_outgrown). The write-intent log must not
    /// have marked any region dirty yet.
    pub fn keep_unsummed(&mut self, file: Option<&[u8]>) -> Vec<PageDamage> {
        let (mut unsummed, damages) = Unsummed::load(self.identity(SetKey::Unsummed), file);
        self.last_serial += 1;
        unsummed.set.serial = self.last_serial;
        self.unsummed = Some(unsummed);
        damages
    }

    /// Stops sums: none counts any more, and none is made.
    pub fn forget_unsummed(&mut self) {
        self.unsummed = None;
    }

    /// Returns true if sums of blocks are kept.
    #[must_use]
    pub fn keeps_sums(&self) -> bool {
        self.unsummed.is_some()
    }

    /// Returns true if any region has to be summed, now or when it is clean.
    #[must_use]
    pub fn wants_sums(&self) -> bool {
        self.unsummed.as_ref().is_some_and(Unsummed::wants)
    }

    /// Returns true if the sums of all blocks of the region count: it was not modified since they were
    /// stored.
    #[must_use]
    pub fn is_summed(&self, region: u32) -> bool {
        self.unsummed.as_ref().is_some_and(|unsummed| unsummed.is_summed(region))
    }

    /// The regions whose sums count. Each held data when it was summed.
    #[must_use]
    pub fn summed(&self) -> RegionSet {
        let count = self.regions.count();
        let Some(unsummed) = &self.unsummed else { return RegionSet::empty(count) };
        let mut summed = RegionSet::full(count);
        unsummed.set.content().runs(0).for_each(|run| summed.remove_run(run));
        summed
    }

    /// Requests sums for the regions of `run` that hold data and have no sums.
    pub fn want_sums(&mut self, run: Range<u32>) {
        if let Some(unsummed) = &mut self.unsummed {
            unsummed.want(run);
        }
    }

    /// Invalidates the sums of these regions, in memory; on the disk as soon as the pages of the set are
    /// written. They are to be summed again.
    pub fn unsum(&mut self, run: Range<u32>) {
        if let Some(unsummed) = &mut self.unsummed {
            unsummed.modify(run);
        }
    }

    /// Returns the first region from `from` on that can be summed: it has to be, and is not in the intent
    /// set. So all members have flushed it since it was last modified, and nothing of it is in flight.
    #[must_use]
    pub fn next_to_sum(&self, from: u32) -> Option<u32> {
        self.unsummed.as_ref()?.next_to_sum(from, &self.intent)
    }

    /// Begins to sum the regions of `run` that can be summed, at most
    /// [`SUMMED_AT_ONCE_MAX`](crate::SUMMED_AT_ONCE_MAX), as they are read from now on. Returns false if it
    /// has none.
    pub fn begin_sums(&mut self, run: Range<u32>) -> bool {
        let WriteIntentLog { unsummed, intent, .. } = self;
        unsummed.as_mut().is_some_and(|unsummed| unsummed.begin(run, intent))
    }

    /// Returns true if the region is being summed, and nothing has modified it since that began.
    #[must_use]
    pub fn is_being_summed(&self, region: u32) -> bool {
        self.unsummed.as_ref().is_some_and(|unsummed| unsummed.is_being_summed(region))
    }

    /// Returns true if the running sum may replace the sums of blocks in the region. A region that was
    /// repaired keeps its sums. A region that a request is about to modify does so too: its sums may count on
    /// the disk until that is recorded.
    #[must_use]
    pub fn may_have_new_sums(&self, region: u32) -> bool {
        self.unsummed.as_ref().is_some_and(|unsummed| unsummed.may_have_new_sums(region))
    }

    /// Ends the sums of the begun regions: they are durable, or (`well`: false) they will not be. From now on
    /// they count, for those regions that nothing has modified meanwhile.
    pub fn end_sums(&mut self, well: bool) {
        if let Some(unsummed) = &mut self.unsummed {
            unsummed.end(well);
        }
    }

    /// Leaves the regions of `run` out of the running sums, because they cannot be read now.
    pub fn leave_out_of_sums(&mut self, run: &Range<u32>) {
        if let Some(unsummed) = &mut self.unsummed {
            unsummed.leave_out(run);
        }
    }

    /// Excludes the regions of `run` from sums, because they hold no data worth a sum.
    pub fn need_no_sums(&mut self, run: Range<u32>) {
        if let Some(unsummed) = &mut self.unsummed {
            unsummed.need_none(run);
        }
    }
}
