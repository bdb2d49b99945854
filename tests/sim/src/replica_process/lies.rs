//! The answers of replicas that lie.

use shorthorn_types::RegionsOf;

use super::*;

impl Simulation {
    /// Returns the answer of a process that lies for a while, if it lies in this one.
    pub(super) fn lie(&mut self, at: usize, generation: Generation, ask: &Ask) -> Option<ReplicaAnswer> {
        let replica = &mut self.replicas[at];
        let lies = |lie: LieAt| replica.lies.contains_key(&lie);
        let is_member = replica.state.views().report().committed.members.contains(replica.id);
        match ask {
            Ask::Propose(view, basis) if lies(LieAt::Proposals) => {
                // It may have stored it all the same.
                if replica.rng.bool() {
                    let _ = replica.change(|state, disk| state.propose(disk, generation, *view, basis));
                    self.look_at_failure(at, FaultyOperation::State);
                }
            }
            Ask::Layers if lies(LieAt::Source) && is_member => {
                if replica.rng.bool() {
                    let list = replica.spoiled_layers();
                    self.count("lie: layers that cannot be");
                    return Some(ReplicaAnswer::Layers(list));
                }
            }
            Ask::HeadExtents(_) if lies(LieAt::Source) => {
                let mut page = replica.head_extents(0);
                replica.spoil_extents(&mut page);
                self.count("lie: a source that fails");
                return Some(ReplicaAnswer::Extents(page));
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
        Some(ReplicaAnswer::Error(Errno::IO))
    }
}
