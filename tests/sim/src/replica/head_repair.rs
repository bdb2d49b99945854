//! Repairs of rot in the head: the sums of their regions count further, also after a crash.

use shorthorn_types::RegionSet;

use super::sums::content_of;
use super::*;

/// A request that has not changed a block yet. The simulated replica examines each request once.
const UNSTARTED: (ConnId, u64) = (ConnId::MAX, u64::MAX);

impl Replica {
    /// Returns true if the request repairs all that it writes. An engine knows that these blocks hold rot,
    /// and the data has their sums.
    pub fn repairs_rot(&self, ask: &Ask) -> bool {
        let (Ask::Write(range, ..) | Ask::WriteZeroes(range, _)) = ask else { return false };
        let is_repaired = |block: u64| {
            let sum = check(&content_of(ask, *range, block)).max(1);
            self.known_rot.is_repaired_by(block, UNSTARTED, sum)
        };
        *range == range.grown_to_blocks() && block_numbers(*range).all(is_repaired)
    }

    /// Records that a repair modifies regions whose sums count on the disk.
    pub fn expect_sums(&mut self, range: ByteRange) {
        let Some(on_disk) = self.sums_on_disk() else { return };
        let summed = on_disk.regions().touched(range).filter(|region| on_disk.is_summed(*region));
        self.repaired_regions.extend(summed);
    }

    /// Records that the sums of these regions may end on the disk: they are modified by more than repairs.
    pub fn expect_no_sums(&mut self, range: ByteRange) {
        for region in self.state.intent_log().regions().touched(range) {
            self.repaired_regions.remove(&region);
        }
    }

    /// Sets the size of the volume. Its regions may have other numbers by that.
    pub fn grows_to(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes;
        self.repaired_regions.clear();
    }

    /// Returns the sets on the disk, if that of the regions without sums is whole.
    pub(super) fn sums_on_disk(&self) -> Option<WriteIntentLog> {
        let regions = Regions::of(self.size_bytes);
        let file = self.durable.sets.get(&SetKey::Unsummed)?;
        let mut on_disk =
            WriteIntentLog::new(regions, self.durable.epoch, &RegionSet::empty(regions.count()));
        on_disk.keep_unsummed(Some(file)).is_empty().then_some(on_disk)
    }

    /// Looks for rot that a process does not know after its start, although only repairs have modified its
    /// region. A page of sums, or the set, may be torn: then it is not known on purpose.
    pub(super) fn find_ended_sums(&mut self, is_set_whole: bool) {
        let repaired = std::mem::take(&mut self.repaired_regions);
        let regions = self.state.intent_log().regions();
        let is_ended = |block: &u64| {
            regions.touched(block_range(*block)).any(|region| repaired.contains(&region))
                && self.has_stored_sum(*block)
                && !self.is_guarded(*block)
        };
        let ended = self.files.rot.keys().copied().find(is_ended).filter(|_| is_set_whole);
        self.forgotten_rot = self.forgotten_rot.or(ended);
    }
}
