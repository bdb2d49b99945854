//! Plans of reads: the files from which the blocks of a range come, as a reader sees them.

use shorthorn_store::{BlockSource, FileIndex, ReadSegment, Store, StoreError};
use shorthorn_types::{ByteRange, Errno};

use crate::limits::REQUEST_BLOCKS_MAX;

/// See the module.
#[derive(Debug)]
pub(super) struct ReadPlanner {
    /// The segments of the last plan.
    segments: Vec<ReadSegment>,
    /// Failed plans and reads so far; only the first is logged.
    failures: u64,
}

impl ReadPlanner {
    pub fn new() -> ReadPlanner {
        ReadPlanner { segments: Vec::with_capacity(REQUEST_BLOCKS_MAX), failures: 0 }
    }

    /// Plans a read of whole blocks. Returns its segments.
    ///
    /// # Errors
    /// The file system cannot list the extents of a layer.
    pub fn plan(&mut self, blocks: ByteRange, store: &mut Store) -> Result<&[ReadSegment], StoreError> {
        self.segments.clear();
        store.plan_read(blocks, &mut self.segments)?;
        Ok(&self.segments)
    }

    /// Returns true if each part of the block comes from such a source.
    pub fn comes_from(
        &mut self,
        block: ByteRange,
        is_such: impl Fn(BlockSource) -> bool,
        store: &mut Store,
    ) -> bool {
        let planned = self.plan(block, store);
        planned.is_ok_and(|segments| segments.iter().all(|segment| is_such(segment.source)))
    }

    /// Returns true if a reader sees this file's data in the block, or zeroes because no file has it. It may
    /// have vanished from each of them.
    pub fn is_seen_in(&mut self, file: FileIndex, block: ByteRange, store: &mut Store) -> bool {
        let is_such = |source| source == BlockSource::Zero || source == BlockSource::File(file);
        self.comes_from(block, is_such, store)
    }

    /// Returns true if no layer has any of the blocks.
    ///
    /// # Errors
    /// See [`ReadPlanner::plan`].
    pub fn is_hole(&mut self, blocks: ByteRange, store: &mut Store) -> Result<bool, StoreError> {
        let segments = self.plan(blocks, store)?;
        Ok(segments.iter().all(|segment| segment.source == BlockSource::Zero))
    }

    /// Returns the errno of a request that could not be planned. Logs the first failure.
    pub fn not_planned(&mut self, error: &StoreError) -> Errno {
        if self.failures == 0 {
            tracing::warn!(
                %error,
                "a request could not be planned; later failures are answered but not logged"
            );
        }
        self.failures += 1;
        error.errno()
    }

    /// Handles a failed read of a planned segment. Logs the first failure.
    pub fn read_failed(&mut self, file: FileIndex, errno: Errno) {
        if self.failures == 0 {
            let file = file.slot();
            tracing::warn!(%errno, file, "reading failed; later failures are answered but not logged");
        }
        self.failures += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use shorthorn_types::limits::BLOCK_BYTES;

    use super::*;
    use crate::executor::tests::new_store;

    fn blocks(first: u64, count: u64) -> ByteRange {
        ByteRange::new(first * BLOCK_BYTES, count * BLOCK_BYTES).unwrap()
    }

    #[test]
    fn a_plan_names_the_layer_that_a_reader_sees() {
        let temp = tempfile::tempdir().unwrap();
        let (mut store, ..) = new_store(&temp.path().join("replica"));
        store.write_at(&[7; 8192], BLOCK_BYTES, true).unwrap();
        store.snapshot("below", true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
        store.write_at(&[8; 4096], BLOCK_BYTES, true).unwrap();
        let image = store.chain().copy_layers().unwrap()[0].image.to_string();
        let (below, head) = (store.snapshot_layers().find(&image).unwrap(), store.head());
        let mut planner = ReadPlanner::new();
        let segments = planner.plan(blocks(0, 4), &mut store).unwrap();
        let sources: Vec<_> = segments.iter().map(|segment| segment.source).collect();
        let files = [head, below].map(BlockSource::File);
        assert_eq!(sources, [BlockSource::Zero, files[0], files[1], BlockSource::Zero]);
        for (block, in_head, in_below) in [(0, true, true), (1, true, false), (2, false, true)] {
            let block = blocks(block, 1);
            let seen = [head, below].map(|file| planner.is_seen_in(file, block, &mut store));
            assert_eq!(seen, [in_head, in_below], "{block}");
        }
        let holes = [blocks(0, 1), blocks(0, 2)].map(|range| planner.is_hole(range, &mut store).unwrap());
        assert_eq!(holes, [true, false]);
        assert!(planner.comes_from(blocks(2, 1), |source| source == BlockSource::File(below), &mut store));
        assert!(!planner.comes_from(blocks(2, 2), |source| source == BlockSource::File(below), &mut store));
    }
}
