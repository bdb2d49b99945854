//! Pages and lists that no replica can have, of one that lies.

use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_wire::{Extent, ExtentsPage, LayerList, RegionsPage};

use super::Replica;

/// More than any file system gives a file.
const TOO_LARGE_BYTES: u64 = 1 << 62;

impl Replica {
    /// Returns layers that no replica can have: one that took them would never open again.
    pub fn spoiled_layers(&mut self) -> LayerList {
        let mut list = self.durable.layers(self.size_bytes);
        let lie = self.rng.u8(0..6);
        if let Some(layer) = list.layers.first_mut() {
            match lie {
                0 => layer.size_bytes = TOO_LARGE_BYTES,
                1 => layer.size_bytes = 0,
                2 => layer.image.insert_str(0, "../"),
                // It passes for the head of a replica that has not grown yet.
                3 => layer.size_bytes -= BLOCK_BYTES.min(layer.size_bytes),
                4 => list.layers.extend(list.layers.clone()),
                _ => list.layers.clear(),
            }
        }
        list
    }

    /// Replaces a page by an impossible one: an engine that used it would not copy some extents.
    pub fn spoil_extents(&mut self, page: &mut ExtentsPage) {
        let extent = |offset_bytes, length_bytes| Extent { offset_bytes, length_bytes };
        (page.extents, page.next_bytes) = match self.rng.u8(0..5) {
            0 => (vec![extent(0, 512)], None),
            1 => (vec![extent(u64::MAX - BLOCK_BYTES + 1, BLOCK_BYTES)], None),
            2 => (vec![extent(BLOCK_BYTES, BLOCK_BYTES), extent(0, BLOCK_BYTES)], None),
            3 => (vec![extent(self.size_bytes, BLOCK_BYTES)], None),
            _ => (Vec::new(), Some(0)),
        };
    }

    /// Replaces a page like [`Replica::spoil_extents`].
    pub fn spoil_regions(&mut self, page: &mut RegionsPage) {
        page.kept = true;
        (page.runs, page.next) = match self.rng.u8(0..4) {
            0 => (vec![(u32::MAX, 1)], None),
            1 => (vec![(0, 0)], None),
            2 => (vec![(1, 1), (0, 1)], None),
            _ => (Vec::new(), Some(0)),
        };
    }
}
