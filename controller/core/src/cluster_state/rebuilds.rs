//! The rebuilds of all volumes, kept up to date with every change: with thousands of rebuilds, no placement
//! looks at all of them.

use std::collections::{BTreeMap, BTreeSet};

use crate::objects::{Engine, MemberMode, Replica, Volume};
use crate::observed::InstanceKey;
use crate::{ClusterState, Labels, NodeName, Timestamp};

/// A replica that is being rebuilt, or has been made for that and was never a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rebuild {
    /// The time since which the volume waits for a rebuild of this new replica. None: the rebuild runs, or no
    /// run over the replica has stored a time yet.
    pub waits_since: Option<Timestamp>,
    /// The process of the replica.
    pub instance: InstanceKey,
    /// The disk of the replica.
    pub disk_path: String,
    /// The bytes that a complete replica of the volume takes, as stored with the volume.
    pub volume_bytes: u64,
    node: NodeName,
}

/// The tags that a volume asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Selectors {
    /// The tags that a node needs.
    pub node: Labels,
    /// The tags that a disk of the node needs.
    pub disk: Labels,
}

/// The number of members of a volume that may lack one, and its tags.
type Lack = (u32, Selectors);

/// The entry of one volume in the index.
#[derive(Clone, Debug, PartialEq, Eq)]
struct VolumeRebuilds {
    /// None: the volume lacks no member.
    lack: Option<Lack>,
    rebuilds: Vec<Rebuild>,
}

impl VolumeRebuilds {
    fn is_without(&self) -> bool {
        self.rebuilds.iter().all(|rebuild| rebuild.waits_since.is_some())
    }
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RebuildIndex {
    of_volume: BTreeMap<String, VolumeRebuilds>,
    by_node: BTreeMap<NodeName, BTreeMap<InstanceKey, Rebuild>>,
    /// The volumes that may lack a member and are without a rebuild.
    without: BTreeMap<Lack, BTreeSet<String>>,
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
            self.take_out(volume, &before);
        }
        let Some(rebuilds) = rebuilds else { return };
        for rebuild in &rebuilds.rebuilds {
            let there = self.by_node.entry(rebuild.node.clone()).or_default();
            there.insert(rebuild.instance.clone(), rebuild.clone());
        }
        if let Some(lack) = rebuilds.lack.as_ref().filter(|_| rebuilds.is_without()) {
            self.without.entry(lack.clone()).or_default().insert(volume.to_owned());
        }
        self.of_volume.insert(volume.to_owned(), rebuilds);
    }

    fn take_out(&mut self, volume: &str, before: &VolumeRebuilds) {
        for rebuild in &before.rebuilds {
            if let Some(there) = self.by_node.get_mut(&rebuild.node) {
                there.remove(&rebuild.instance);
                if there.is_empty() {
                    self.by_node.remove(&rebuild.node);
                }
            }
        }
        if let Some(lack) = &before.lack
            && let Some(names) = self.without.get_mut(lack)
        {
            names.remove(volume);
            if names.is_empty() {
                self.without.remove(lack);
            }
        }
    }
}

impl ClusterState {
    /// Returns the replicas on the node that are being rebuilt, or have been made for that. The new ones of
    /// which the volume expects nothing any more are among them.
    pub fn rebuilds_on<'a>(&'a self, node: &str) -> impl Iterator<Item = &'a Rebuild> + use<'a> {
        self.rebuilds.by_node.get(node).into_iter().flat_map(BTreeMap::values)
    }

    /// Returns the served volumes with fewer than `most` members that may lack one and rebuild none. They are
    /// grouped by their number of members and the tags that they ask for.
    pub fn volumes_without_rebuild(
        &self,
        most: u32,
    ) -> impl Iterator<Item = (u32, &Selectors, impl Iterator<Item = (&Volume, &Engine)>)> {
        let groups = self.rebuilds.without.range(..(most, Selectors::default()));
        groups.map(|((members, selectors), names)| {
            let volumes =
                names.iter().filter_map(|name| Some((self.volumes.get(name)?, self.engines.get(name)?)));
            (*members, selectors, volumes)
        })
    }

    /// Returns true if the engine of the volume rebuilds a replica, or one has been made for that.
    #[must_use]
    pub fn has_rebuild(&self, volume: &str) -> bool {
        self.rebuilds.of_volume.get(volume).is_some_and(|rebuilds| !rebuilds.is_without())
    }

    /// Follows a change of an object of the volume.
    pub(super) fn follow_rebuilds(&mut self, volume: &str) {
        let found = self.rebuilds_of(volume);
        self.rebuilds.set(volume, found);
    }

    fn rebuilds_of(&self, volume: &str) -> Option<VolumeRebuilds> {
        let engine = self.engines.get(volume).filter(|engine| engine.status.is_serving())?;
        let owner = self.volumes.get(volume)?;
        let rebuilds = coming(self, owner, engine);
        let lack = self.may_lack_member(volume).then(|| {
            let spec = &owner.spec;
            let (node, disk) = (spec.node_selector.clone(), spec.disk_selector.clone());
            (members(engine), Selectors { node, disk })
        });
        // A complete volume may move a replica.
        (lack.is_some() || !rebuilds.is_empty()).then_some(VolumeRebuilds { lack, rebuilds })
    }
}

fn members(engine: &Engine) -> u32 {
    let members = engine.status.replica_mode_map.values();
    u32::try_from(members.filter(|member| member.mode == MemberMode::Member).count()).unwrap_or(u32::MAX)
}

/// Returns the replicas that are being rebuilt, or have been made for that and are not yet.
fn coming(cluster: &ClusterState, volume: &Volume, engine: &Engine) -> Vec<Rebuild> {
    let rebuild = |replica: &Replica| {
        let id = replica.spec.replica_id;
        let is_new = replica.status.healthy_at.is_none() && !volume.status.first_members.contains(&id);
        let waits_since = match engine.status.replica_mode_map.get(&id).map(|member| member.mode) {
            Some(MemberMode::Member) => return None,
            Some(MemberMode::Rebuilding) => None,
            // Its first run stores that time before the engine knows the replica. A failed one is rebuilt
            // again after a pause.
            Some(MemberMode::Failed | MemberMode::Connecting) | None => {
                if !is_new || replica.metadata.is_deleting() {
                    return None;
                }
                replica.status.lost_since
            }
        };
        Some(Rebuild {
            waits_since,
            instance: InstanceKey::replica(&replica.spec.volume_name, id),
            disk_path: replica.spec.disk_path.clone(),
            volume_bytes: volume.status.actual_size.unwrap_or(0),
            node: replica.spec.node_id.clone(),
        })
    };
    cluster.replicas_of(&volume.spec.volume_name).filter_map(rebuild).collect()
}
