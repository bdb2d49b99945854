//! The answers of replicas that lie.

use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{Errno, Generation, RegionsOf};
use shorthorn_wire::{Extent, ExtentsPage, LayerList, RegionsPage, RegionsQuery};

use super::Replica;
use crate::faults::{Broken, LieAt};
use crate::net::{Answer, Ask};
use crate::simulation::Simulation;

/// More than any file system gives a file.
const TOO_LARGE_BYTES: u64 = 1 << 62;

impl Simulation {
    /// Returns the answer of a process that lies for a while, if it lies in this one.
    pub(super) fn lie(&mut self, at: usize, generation: Generation, ask: &Ask) -> Option<Answer> {
        let replica = &mut self.replicas[at];
        let lies = |lie: LieAt| replica.lies.contains_key(&lie);
        let is_member = replica.state.views().report().committed.members.contains(replica.id);
        match ask {
            Ask::Propose(view, basis) if lies(LieAt::Proposals) => {
                // It may have stored it all the same.
                if replica.rng.bool() {
                    let _ = replica.change(|state, disk| state.propose(disk, generation, *view, basis));
                    self.look_at_failure(at, Broken::State);
                }
            }
            Ask::Layers if lies(LieAt::Source) && is_member => {
                if replica.rng.bool() {
                    let list = replica.spoiled_layers();
                    self.count("lie: layers that cannot be");
                    return Some(Answer::Layers(list));
                }
            }
            Ask::HeadExtents(_) if lies(LieAt::Source) => {
                let mut page = replica.head_extents(0);
                replica.spoil_extents(&mut page);
                self.count("lie: a source that fails");
                return Some(Answer::Extents(page));
            }
            Ask::Regions(RegionsQuery { of: RegionsOf::Allocated, .. }) if lies(LieAt::Source) => {}
            Ask::ReadSnapshot(blocks) if blocks.clone().any(|block| replica.cannot_read(at, block)) => {}
            Ask::ReadSnapshotBlock(block) if replica.cannot_read(at, *block) => {}
            _ => return None,
        }
        self.count(match ask {
            Ask::Propose(..) => "lie: a proposal that fails",
            Ask::ReadSnapshot(_) | Ask::ReadSnapshotBlock(_) => "error: unreadable blocks of a snapshot",
            _ => "lie: a source that fails",
        });
        Some(Answer::Error(Errno::IO))
    }
}

impl Replica {
    /// Returns layers that no replica can have: one that took them would never open again.
    fn spoiled_layers(&mut self) -> LayerList {
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
    pub(super) fn spoil_extents(&mut self, page: &mut ExtentsPage) {
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
    pub(super) fn spoil_regions(&mut self, page: &mut RegionsPage) {
        page.kept = true;
        (page.runs, page.next) = match self.rng.u8(0..4) {
            0 => (vec![(u32::MAX, 1)], None),
            1 => (vec![(0, 0)], None),
            2 => (vec![(1, 1), (0, 1)], None),
            _ => (Vec::new(), Some(0)),
        };
    }
}
