//! The regions in which no sum of a block counts, and those that are being summed.
//!
//! A region leaves the set when the sums of its blocks are durable, and no request has modified it since they
//! were read. It enters the set durably before it is modified, as it does the others. So a region that is not
//! in the file of the set matches its sums, whatever has stopped at any time.
//!
//! The repair of rot gives a block the data that its sum demands. The region therefore stays out of the set,
//! and is read back later, to see that the repair is complete.

use std::ops::Range;

use shorthorn_types::{RegionSet, Regions};

use crate::page::{PageDamage, made_for};
use crate::set::{PagedSet, SetIdentity};

/// Regions that are summed at once: a mask of them fits a word.
pub const SUMMED_AT_ONCE_MAX: u32 = 64;

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Unsummed {
    pub set: PagedSet,
    /// Regions that have to be summed, because they hold data as far as is known. Those that are not in the
    /// set were repaired, and have to be read back.
    todo: RegionSet,
    summing: Option<Summing>,
}

/// Regions that are read to be summed.
#[derive(Clone, Copy, Debug)]
struct Summing {
    first: u32,
    /// Bit n: the region that is n after the first.
    begun: u64,
    /// Regions being summed that were modified since the sum began.
    spoiled: u64,
}

impl Unsummed {
    /// Returns the set that a file holds; without one all regions are in.
    pub fn load(identity: SetIdentity, file: Option<&[u8]>) -> (Unsummed, Vec<PageDamage>) {
        let count = identity.regions.count();
        let (mut set, damages) = match file {
            Some(file) => PagedSet::load(identity, file),
            None => (PagedSet::empty(identity), vec![PageDamage::Short]),
        };
        match file.and_then(made_for) {
            _ if file.is_none() => set.add_durable(0..count),
            // The regions that the volume has got since.
            Some(before_bytes) => set.add_durable(added_regions(before_bytes, identity.regions)),
            None => {}
        }
        if set.stamp().is_none() {
            // It has none; but the page for one is to be whole when the file is recreated.
            let _ = set.put_stamp(0);
        }
        (Unsummed { set, todo: RegionSet::empty(count), summing: None }, damages)
    }

    /// Returns the set for the volume after it has grown: the new part has no sums.
    pub fn grown(&self, from: Regions, to: Regions) -> PagedSet {
        let mut set = self.set.grown(to);
        set.add_durable(added_regions(from.size_bytes(), to));
        set
    }

    /// Grows the set with the volume. Running sums are dropped, because the numbers of their regions change.
    pub fn grow(&mut self, set: PagedSet, from: Regions, to: Regions) {
        self.set = set;
        self.todo = self.todo.converted(from, to);
        self.summing = None;
    }

    /// Prepares a modification of the regions. Returns the pages to write before as a mask.
    pub fn modify(&mut self, run: Range<u32>) -> u64 {
        if let Some(summing) = &mut self.summing {
            summing.spoiled |= summing.mask(&run);
        }
        self.todo.insert_run(run.clone());
        self.set.put(run)
    }

    /// Prepares a repair of the regions that keeps their sums. Regions without sums stay as they are.
    pub fn repair(&mut self, run: Range<u32>) {
        if let Some(summing) = &mut self.summing {
            summing.spoiled |= summing.mask(&run); // they are read back once more
        }
        self.todo.insert_run(run);
    }

    pub fn is_summed(&self, region: u32) -> bool {
        !self.set.contains(region)
    }

    pub fn want(&mut self, run: Range<u32>) {
        for region in run {
            if self.set.contains(region) {
                self.todo.insert(region);
            }
        }
    }

    pub fn wants(&self) -> bool {
        self.todo.next(0).is_some()
    }

    pub fn need_none(&mut self, run: Range<u32>) {
        self.leave_out(&run);
        self.todo.remove_run(run);
    }

    /// Leaves regions out of the running sum. They still have to be summed.
    pub fn leave_out(&mut self, run: &Range<u32>) {
        if let Some(summing) = &mut self.summing {
            summing.begun &= !summing.mask(run);
        }
    }

    pub fn next_to_sum(&self, from: u32, intent: &PagedSet) -> Option<u32> {
        let todo = std::iter::successors(self.todo.next(from), |region| self.todo.next(region + 1));
        todo.into_iter().find(|region| !intent.contains(*region))
    }

    pub fn begin(&mut self, run: Range<u32>, intent: &PagedSet) -> bool {
        let first = run.start;
        let mut begun = 0;
        for region in run.take(SUMMED_AT_ONCE_MAX as usize) {
            if self.todo.contains(region) && !intent.contains(region) {
                begun |= 1 << (region - first);
            }
        }
        self.summing = (begun != 0).then_some(Summing { first, begun, spoiled: 0 });
        self.summing.is_some()
    }

    pub fn is_being_summed(&self, region: u32) -> bool {
        let one = region..region.saturating_add(1);
        self.summing.is_some_and(|summing| summing.mask(&one) & summing.begun & !summing.spoiled != 0)
    }

    /// Returns true if the running sum may replace the sums of blocks in the region.
    pub fn may_have_new_sums(&self, region: u32) -> bool {
        self.is_being_summed(region) && !self.is_summed(region)
    }

    pub fn end(&mut self, well: bool) {
        let Some(Summing { first, begun, spoiled }) = self.summing.take() else { return };
        let sound = if well { begun & !spoiled } else { 0 };
        for at in (0..SUMMED_AT_ONCE_MAX).filter(|at| sound >> at & 1 == 1) {
            self.set.clear(first + at..first + at + 1);
            self.todo.remove(first + at);
        }
    }
}

impl Summing {
    /// Returns the regions in `run` as a mask.
    fn mask(&self, run: &Range<u32>) -> u64 {
        let start = run.start.max(self.first).saturating_sub(self.first).min(SUMMED_AT_ONCE_MAX);
        let end = run.end.max(self.first).saturating_sub(self.first).min(SUMMED_AT_ONCE_MAX);
        (start..end).fold(0, |mask, at| mask | 1 << at)
    }
}

/// Returns the regions that have got bytes since the volume had `before_bytes`.
fn added_regions(before_bytes: u64, regions: Regions) -> Range<u32> {
    match shorthorn_types::ByteRange::new(before_bytes, regions.size_bytes().saturating_sub(before_bytes)) {
        Ok(range) => regions.touched(range),
        Err(_) => 0..regions.count(),
    }
}
