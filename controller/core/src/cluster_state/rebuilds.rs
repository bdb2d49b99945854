//! The rebuilds of all volumes, kept up to date with every change: with thousands of rebuilds, no placement
//! looks at all of them.

use std::collections::{BTreeMap, BTreeSet};

use shorthorn_types::ReplicaId;

use crate::objects::{Engine, MemberMode, Replica, Volume};
use crate::{ClusterState, NodeName};

/// The rebuilds of a volume that may lack a member.
#[derive(Clone, Debug, PartialEq, Eq)]
struct VolumeRebuilds {
    members: u32,
    /// The nodes of the replicas that are being rebuilt, or have been made for that and are not yet.
    nodes: Vec<NodeName>,
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RebuildIndex {
    of_volume: BTreeMap<String, VolumeRebuilds>,
    /// The number of rebuilds on each node.
    by_node: BTreeMap<NodeName, u32>,
    /// The volumes without a rebuild, by number of members.
    without: BTreeMap<u32, BTreeSet<String>>,
}

impl RebuildIndex {
    /// Returns the number of volumes that rebuild a replica, or have one made for that.
    pub(super) fn volumes_with_rebuild(&self) -> usize {
        let without: usize = self.without.values().map(BTreeSet::len).sum();
        self.of_volume.len().saturating_sub(without)
    }

    fn set(&mut self, volume: &str, rebuilds: Option<VolumeRebuilds>) {
        if self.of_volume.get(volume) == rebuilds.as_ref() {
            return;
        }
        if let Some(before) = self.of_volume.remove(volume) {
            for node in &before.nodes {
                if let Some(count) = self.by_node.get_mut(node) {
                    *count -= 1;
                    if *count == 0 {
                        self.by_node.remove(node);
                    }
                }
            }
            if let Some(names) = self.without.get_mut(&before.members) {
                names.remove(volume);
                if names.is_empty() {
                    self.without.remove(&before.members);
                }
            }
        }
        let Some(rebuilds) = rebuilds else { return };
        for node in &rebuilds.nodes {
            *self.by_node.entry(node.clone()).or_default() += 1;
        }
        if rebuilds.nodes.is_empty() {
            self.without.entry(rebuilds.members).or_default().insert(volume.to_owned());
        }
        self.of_volume.insert(volume.to_owned(), rebuilds);
    }
}

impl ClusterState {
    /// Returns the number of replicas that are being rebuilt on each node, or have been made for that.
    #[must_use]
    pub const fn rebuilds_by_node(&self) -> &BTreeMap<NodeName, u32> {
        &self.rebuilds.by_node
    }

    /// Returns the served volumes with fewer than `most` members that may lack one and rebuild none.
    pub fn volumes_without_rebuild(&self, most: u32) -> impl Iterator<Item = (u32, &Volume, &Engine)> {
        let names = self.rebuilds.without.range(..most);
        let names = names.flat_map(|(members, names)| names.iter().map(move |name| (*members, name)));
        names.filter_map(|(members, name)| Some((members, self.volumes.get(name)?, self.engines.get(name)?)))
    }

    /// Returns true if the engine of the volume rebuilds a replica, or one has been made for that.
    #[must_use]
    pub fn has_rebuild(&self, volume: &str) -> bool {
        self.rebuilds.of_volume.get(volume).is_some_and(|rebuilds| !rebuilds.nodes.is_empty())
    }

    /// Follows a change of an object of the volume.
    pub(super) fn follow_rebuilds(&mut self, volume: &str) {
        let found = self.rebuilds_of(volume);
        self.rebuilds.set(volume, found);
    }

    fn rebuilds_of(&self, volume: &str) -> Option<VolumeRebuilds> {
        if !self.may_lack_member(volume) {
            return None;
        }
        let engine = self.engines.get(volume).filter(|engine| engine.status.is_serving())?;
        let owner = self.volumes.get(volume)?;
        let nodes = coming(self, owner, engine).into_iter().map(|replica| replica.spec.node_id.clone());
        Some(VolumeRebuilds { members: members(engine), nodes: nodes.collect() })
    }
}

fn members(engine: &Engine) -> u32 {
    let members = engine.status.replica_mode_map.values();
    u32::try_from(members.filter(|member| member.mode == MemberMode::Member).count()).unwrap_or(u32::MAX)
}

/// Returns the replicas that are being rebuilt, or have been made for that and are not yet.
fn coming<'a>(cluster: &'a ClusterState, volume: &'a Volume, engine: &'a Engine) -> Vec<&'a Replica> {
    let mode = |id: ReplicaId| engine.status.replica_mode_map.get(&id).map(|member| member.mode);
    let is_member = |id: &ReplicaId| mode(*id) == Some(MemberMode::Member);
    let wanted = volume.spec.number_of_replicas as usize;
    // Most volumes have all their members: nothing is looked up for those.
    let modes = &engine.status.replica_mode_map;
    if modes.len() >= wanted && modes.keys().all(is_member) {
        return Vec::new();
    }
    let is_coming = |replica: &&Replica| {
        let id = replica.spec.replica_id;
        let is_new = replica.status.healthy_at.is_none() && !volume.status.first_members.contains(&id);
        match mode(id) {
            Some(MemberMode::Member) => false,
            Some(MemberMode::Rebuilding) => true,
            Some(MemberMode::Failed | MemberMode::Connecting) | None => {
                is_new && !replica.metadata.is_deleting() && replica.status.lost_since.is_none()
            }
        }
    };
    cluster.replicas_of(&volume.spec.volume_name).filter(is_coming).collect()
}
