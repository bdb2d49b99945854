//! Comparisons of read data with the sums of its blocks.

use shorthorn_regions::WriteIntentLog;
use shorthorn_ring::Ring;
use shorthorn_store::SUM_PAGE_SPAN_BYTES;
use shorthorn_types::ByteRange;

use super::{BlockSums, is_summed, touches_summed};
use crate::executor::block::number_of;
use crate::limits::REPORTED_ROTTEN_MAX;

impl BlockSums {
    /// Returns true if data may differ from a sum: a read has to be compared.
    pub fn may_show_rot(&self) -> bool {
        self.pages.is_kept() || !self.known.is_empty()
    }

    /// Returns true if the block, whose data has the sum `found`, is rotten.
    pub fn is_rotten(
        &self,
        block: ByteRange,
        found: impl FnOnce() -> u32,
        intent_log: &WriteIntentLog,
    ) -> bool {
        if self.known.has(number_of(block)) {
            return self.known.is_rotten(number_of(block), found()).unwrap_or(false);
        }
        self.kept_sum(block, intent_log).is_some_and(|kept| kept != found())
    }

    /// Returns true if a sum that counts has decided that the block, whose data has the sum `found`, is not
    /// rotten.
    pub fn confirms(
        &self,
        block: ByteRange,
        found: impl FnOnce() -> u32,
        intent_log: &WriteIntentLog,
    ) -> bool {
        if self.known.has(number_of(block)) {
            return self.known.confirms(number_of(block), found());
        }
        self.kept_sum(block, intent_log).is_some()
    }

    /// Returns true if this is the sum of the block, and counts. The page with it may not be in memory.
    pub fn counts_on_disk(&self, block: ByteRange, sum: u32, intent_log: &WriteIntentLog) -> bool {
        let is_known = || self.known.confirms(number_of(block), sum);
        is_summed(block, intent_log) && (self.kept_sum(block, intent_log) == Some(sum) || is_known())
    }

    /// Logs a rotten block that a request has found, unless many were logged.
    pub fn report_rotten(&mut self, block: ByteRange) {
        self.rotten += 1;
        if self.rotten <= REPORTED_ROTTEN_MAX {
            tracing::error!(%block, "a block differs from its checksum: the disk has lost or changed it");
        }
        if self.rotten == REPORTED_ROTTEN_MAX {
            tracing::error!(
                "more blocks differ from their checksums; these errors are answered but not logged"
            );
        }
    }

    /// Returns true if all pages with sums of these blocks that count are in memory, and marks them as used.
    pub fn has_pages_for(&mut self, blocks: ByteRange, intent_log: &WriteIntentLog) -> bool {
        let mut has_all = true;
        for page in pages_for(blocks, intent_log) {
            has_all &= self.pages.touch(page);
        }
        has_all
    }

    /// Loads the pages with sums of these blocks that count, which may take more memory. The request in the
    /// slot, which has read the blocks, waits for them to be compared.
    pub fn compare_when_loaded(
        &mut self,
        slot: u16,
        blocks: ByteRange,
        intent_log: &WriteIntentLog,
        ring: &mut Ring,
    ) {
        for page in pages_for(blocks, intent_log) {
            self.pages.load_for_read(page, ring);
        }
        self.compare_later(slot);
    }
}

/// Returns the pages with sums of these blocks that count: a request touches no more than two.
fn pages_for(blocks: ByteRange, intent_log: &WriteIntentLog) -> impl Iterator<Item = u64> {
    let pages = blocks.offset() / SUM_PAGE_SPAN_BYTES..blocks.end().div_ceil(SUM_PAGE_SPAN_BYTES);
    pages.filter(move |page| {
        let start = (page * SUM_PAGE_SPAN_BYTES).max(blocks.offset());
        let end = ((page + 1) * SUM_PAGE_SPAN_BYTES).min(blocks.end());
        let part = ByteRange::new(start, end - start).unwrap_or(ByteRange::EMPTY);
        touches_summed(part, intent_log)
    })
}

#[cfg(test)]
mod tests {
    use shorthorn_store::SUM_PAGE_BYTES;
    use shorthorn_types::limits::BLOCK_BYTES;

    use super::*;
    use crate::executor::tests::new_store;

    #[test]
    fn a_sum_decides_if_its_region_is_summed_and_a_known_block_decides_before_it() {
        let temp = tempfile::tempdir().unwrap();
        let (mut store, _, mut loaded) = new_store(&temp.path().join("replica"));
        let mut sums = BlockSums::new(Some(store.open_block_sums().unwrap())).unwrap();
        let (mut ring, mut completions) = (Ring::new(16).unwrap(), Vec::new());
        assert_eq!(sums.load_page(0, &mut ring), None);
        ring.wait(None, &mut completions).unwrap();
        let at = usize::from(completions[0].token.index);
        assert_eq!(sums.page_loaded(at, SUM_PAGE_BYTES), Some((0, false)), "it is new");
        sums.pages.sums_mut(at).set(3, 7);
        let [summed, unsummed] =
            [3, 4].map(|block| ByteRange::new(block * BLOCK_BYTES, BLOCK_BYTES).unwrap());
        let intent_log = loaded.state.intent_log_mut();
        intent_log.keep_unsummed(None);
        assert_eq!(sums.kept_sum(summed, intent_log), None, "its region is not summed");
        assert!(!sums.is_rotten(summed, || 8, intent_log) && !sums.confirms(summed, || 7, intent_log));
        intent_log.want_sums(0..1);
        assert!(intent_log.begin_sums(0..1));
        intent_log.end_sums(true);
        assert_eq!([summed, unsummed].map(|block| sums.kept_sum(block, intent_log)), [Some(7), None]);
        assert_eq!([7, 8].map(|sum| sums.is_rotten(summed, || sum, intent_log)), [false, true]);
        assert!(sums.confirms(summed, || 7, intent_log) && !sums.confirms(unsummed, || 7, intent_log));
        assert!(sums.known.keep_some([(3, 9)]));
        assert_eq!([7, 9].map(|sum| sums.is_rotten(summed, || sum, intent_log)), [true, false]);
        assert_eq!([7, 9].map(|sum| sums.confirms(summed, || sum, intent_log)), [false, true]);
    }

    #[test]
    fn only_pages_whose_regions_are_summed_are_needed() {
        let temp = tempfile::tempdir().unwrap();
        let (.., mut loaded) = new_store(&temp.path().join("replica"));
        let intent_log = loaded.state.intent_log_mut();
        let blocks = ByteRange::new(SUM_PAGE_SPAN_BYTES - BLOCK_BYTES, 2 * BLOCK_BYTES).unwrap();
        let pages = |intent_log: &WriteIntentLog| pages_for(blocks, intent_log).collect::<Vec<_>>();
        intent_log.keep_unsummed(None);
        assert!(
            pages(intent_log).is_empty() && BlockSums::new(None).unwrap().has_pages_for(blocks, intent_log)
        );
        let [first, second] = [0, 1].map(|page| {
            let block = ByteRange::new(SUM_PAGE_SPAN_BYTES - BLOCK_BYTES + page * BLOCK_BYTES, BLOCK_BYTES);
            intent_log.regions().touched(block.unwrap())
        });
        for (regions, needed) in [(second, vec![1]), (first, vec![0, 1])] {
            intent_log.want_sums(regions.clone());
            assert!(intent_log.begin_sums(regions));
            intent_log.end_sums(true);
            assert_eq!(pages(intent_log), needed);
        }
    }
}
