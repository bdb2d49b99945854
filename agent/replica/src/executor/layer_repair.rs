//! The repair of a piece of a snapshot's layer: the new content, and the blocks that it changes.

use std::ops::Range;

use shorthorn_store::{ByteRange, FileIndex, SUM_PAGE_SPAN_BYTES, Store, StoreError, sum_of_data};
use shorthorn_types::Regions;
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_wire::LayerPatch;

use super::block::{block_ranges, length_of};
use super::cached_layer_sums::no_layer;
use crate::error::ReplicaError;

/// See the module.
#[derive(Debug)]
pub(super) struct LayerRepair<'a> {
    image: &'a str,
    range: ByteRange,
    /// The blocks that the layer has afterwards; the others of the range are holes.
    runs: Vec<ByteRange>,
    /// The data of these blocks.
    data: &'a [u8],
}

/// A block that a repair brings back to its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Returning {
    pub block: ByteRange,
    /// The sum of its data.
    pub sum: u32,
}

/// A block that may change, with the sum of its new data; none if it becomes a hole.
pub(super) type ChangedBlock = (ByteRange, Option<u32>);

impl<'a> LayerRepair<'a> {
    /// Creates the repair that `patch` demands.
    ///
    /// # Errors
    /// The patch names bytes behind the largest offset.
    pub fn new(patch: &'a LayerPatch, data: &'a [u8]) -> Result<LayerRepair<'a>, StoreError> {
        let LayerPatch { image, offset_bytes, length_bytes, runs } = patch;
        let range = ByteRange::new(*offset_bytes, u64::from(*length_bytes))?;
        let run = |(first, count): &(u32, u32)| {
            let start = offset_bytes + u64::from(*first) * BLOCK_BYTES;
            ByteRange::new(start, u64::from(*count) * BLOCK_BYTES)
        };
        let runs = runs.iter().map(run).collect::<Result<Vec<_>, _>>()?;
        Ok(LayerRepair { image, range, runs, data })
    }

    /// Returns the name of the image file.
    pub fn image(&self) -> &'a str {
        self.image
    }

    /// Returns the piece of the layer.
    pub fn range(&self) -> ByteRange {
        self.range
    }

    /// Returns the pages of sums that the end of the sums of the piece affects. Sums end by region, and a
    /// region may have several pages.
    pub fn pages(&self, regions: Regions) -> Range<u64> {
        let ends = regions.bytes(regions.touched(self.range));
        ends.offset() / SUM_PAGE_SPAN_BYTES..ends.end().div_ceil(SUM_PAGE_SPAN_BYTES)
    }

    /// Returns an error unless the store can perform the repair.
    pub fn check(&self, store: &mut Store) -> Result<(), StoreError> {
        store.check_repair(self.image, self.range, &self.runs)?;
        Ok(())
    }

    /// Performs the repair. Waits for the disk.
    pub fn perform(&self, store: &mut Store) -> Result<(), StoreError> {
        store.repair_layer(self.image, self.range, &self.runs, self.data)
    }

    /// Returns the file of the layer, and the blocks of the piece that it has now.
    fn present(&self, store: &Store) -> Result<(FileIndex, Vec<ByteRange>), ReplicaError> {
        let file = store.snapshot_layers().find(self.image).ok_or_else(|| no_layer(self.image))?;
        Ok((file, store.chain().layer_blocks(file, self.range)?))
    }

    /// Returns the blocks that the layer does not have, and that get other data than zeroes.
    pub fn returning(&self, zero_sum: u32, store: &Store) -> Result<Vec<Returning>, ReplicaError> {
        let ((_, present), mut data) = (self.present(store)?, self.data);
        let mut returning = Vec::new();
        for block in self.runs.iter().flat_map(|run| block_ranges(*run)) {
            let Some((content, rest)) = data.split_at_checked(length_of(block)) else { break };
            data = rest;
            let sum = sum_of_data(content);
            if sum != zero_sum && !is_in(&present, block) {
                returning.push(Returning { block, sum });
            }
        }
        Ok(returning)
    }

    /// Returns the file of the layer, and the blocks that may change in it.
    pub fn changes(&self, store: &Store) -> Result<(FileIndex, Vec<ChangedBlock>), ReplicaError> {
        let ((file, present), mut data) = (self.present(store)?, self.data);
        let mut changes = Vec::new();
        for block in block_ranges(self.range) {
            if is_in(&self.runs, block) {
                let Some((content, rest)) = data.split_at_checked(length_of(block)) else { break };
                data = rest;
                changes.push((block, Some(sum_of_data(content))));
            } else if is_in(&present, block) {
                changes.push((block, None));
            }
        }
        Ok((file, changes))
    }
}

fn is_in(runs: &[ByteRange], block: ByteRange) -> bool {
    runs.iter().any(|run| run.overlaps(block))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use shorthorn_store::sum_of_zeroes;

    use super::*;
    use crate::executor::tests::new_store;

    fn block(number: u64) -> ByteRange {
        ByteRange::new(number * BLOCK_BYTES, BLOCK_BYTES).unwrap()
    }

    #[test]
    fn a_repair_lists_the_blocks_that_it_changes_and_those_that_it_brings_back() {
        let temp = tempfile::tempdir().unwrap();
        let (mut store, ..) = new_store(&temp.path().join("replica"));
        store.write_at(&[7; 8192], 4 * BLOCK_BYTES, true).unwrap();
        store.snapshot("below", true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
        let image = store.chain().copy_layers().unwrap()[0].image.to_string();
        let file = store.snapshot_layers().find(&image).unwrap();
        let (offset_bytes, length_bytes) = (3 * BLOCK_BYTES, 6 * 4096);
        // The layer has 4 and 5. It gets 5, 6 and 7, and 7 is all zeroes.
        let patch = LayerPatch { image, offset_bytes, length_bytes, runs: vec![(2, 3)] };
        let data = [[8_u8; 8192].as_slice(), &[0; 4096]].concat();
        let repair = LayerRepair::new(&patch, &data).unwrap();
        repair.check(&mut store).unwrap();
        let (zeroes, sum) = (sum_of_zeroes(), sum_of_data(&[8; 4096]));
        let expected = vec![
            (block(4), None),
            (block(5), Some(sum)),
            (block(6), Some(sum)),
            (block(7), Some(sum_of_data(&[0; 4096]))),
        ];
        assert_eq!(repair.changes(&store).unwrap(), (file, expected));
        assert_eq!(repair.returning(zeroes, &store).unwrap(), [Returning { block: block(6), sum }]);
        repair.perform(&mut store).unwrap();
        let (_, present) = repair.present(&store).unwrap();
        assert!(!is_in(&present, block(4)) && is_in(&present, block(5)) && is_in(&present, block(6)));
    }

    #[test]
    fn a_repair_covers_all_pages_of_the_regions_that_it_touches() {
        let (offset_bytes, length_bytes) = (9 << 20, 4096);
        let patch = LayerPatch { image: "a".to_owned(), offset_bytes, length_bytes, runs: vec![] };
        let repair = LayerRepair::new(&patch, &[]).unwrap();
        for (size_bytes, pages) in [(1 << 30, 4..5), (2 << 40, 4..5), (3 << 40, 4..6), (5 << 40, 4..8)] {
            assert_eq!(repair.pages(Regions::of(size_bytes)), pages, "{size_bytes}");
        }
    }
}
