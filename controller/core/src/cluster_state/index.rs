//! Sets of names that every change of the objects keeps up to date. An event concerns a few objects: a search
//! among all would take longer with every volume.

use std::collections::{BTreeMap, BTreeSet};

use super::zones::NodesByZone;
use crate::objects::{Engine, Key, Kind, MemberMode, Node, Object, Replica, Robustness, Volume, VolumeState};
use crate::{ClusterState, NodeName};

/// Objects by the nodes that they name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ByNode {
    names: BTreeMap<NodeName, BTreeSet<String>>,
    nodes_of: BTreeMap<String, Vec<NodeName>>,
}

impl ByNode {
    /// Records that the object of that name names exactly these nodes.
    fn set<'a>(&mut self, name: &str, nodes: impl IntoIterator<Item = &'a NodeName>) {
        for node in self.nodes_of.remove(name).unwrap_or_default() {
            if let Some(names) = self.names.get_mut(&node) {
                names.remove(name);
                if names.is_empty() {
                    self.names.remove(&node);
                }
            }
        }
        let nodes: Vec<NodeName> = nodes.into_iter().cloned().collect();
        for node in &nodes {
            self.names.entry(node.clone()).or_default().insert(name.to_owned());
        }
        if !nodes.is_empty() {
            self.nodes_of.insert(name.to_owned(), nodes);
        }
    }

    fn on<'a>(&'a self, node: &str) -> impl Iterator<Item = &'a str> + use<'a> {
        self.names.get(node).into_iter().flatten().map(String::as_str)
    }
}

/// The room on a node that may help a volume which waits for a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsefulRoom {
    /// A replica has to leave its place: any free space may be enough for it.
    Any,
    /// Volumes lack a replica, and the smallest of them has this size.
    Bytes(u64),
}

impl UsefulRoom {
    /// Returns true if a node with `room_bytes` may help.
    #[must_use]
    pub const fn is_in(self, room_bytes: u64) -> bool {
        match self {
            UsefulRoom::Any => true,
            UsefulRoom::Bytes(bytes) => room_bytes >= bytes,
        }
    }
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Index {
    volumes: ByNode,
    engines: ByNode,
    replicas: ByNode,
    /// Volumes that may lack a replica, with their sizes in bytes.
    incomplete: BTreeMap<String, u64>,
    /// The number of these for each size.
    incomplete_by_size: BTreeMap<u64, usize>,
    /// Volumes that have to grow.
    growing: BTreeSet<String>,
    /// Engines that serve with a replica that is not a member.
    rebuilding: BTreeSet<String>,
    /// Replicas that have to leave their places, for any state of their nodes.
    leaving: BTreeSet<String>,
    /// Nodes that a replica has to leave.
    left: BTreeSet<String>,
    pub(super) zones: NodesByZone,
}

fn set(names: &mut BTreeSet<String>, name: &str, is_in: bool) {
    if !is_in {
        names.remove(name);
    } else if !names.contains(name) {
        names.insert(name.to_owned());
    }
}

impl Index {
    /// Replaces the object with the key of `object`.
    pub fn insert(&mut self, object: &Object) {
        let name = object.metadata().name.as_str();
        match object {
            Object::Volume(volume) => self.set_volume(name, Some(volume)),
            Object::Engine(engine) => self.set_engine(name, Some(engine)),
            Object::Replica(replica) => self.set_replica(name, Some(replica)),
            Object::Node(node) => self.set_node(name, Some(node)),
        }
    }

    pub fn remove(&mut self, key: &Key) {
        match key.kind {
            Kind::Volume => self.set_volume(&key.name, None),
            Kind::Engine => self.set_engine(&key.name, None),
            Kind::Replica => self.set_replica(&key.name, None),
            Kind::Node => self.set_node(&key.name, None),
        }
    }

    fn set_volume(&mut self, name: &str, volume: Option<&Volume>) {
        let nodes =
            volume.into_iter().flat_map(|volume| [&volume.spec.node_id, &volume.status.current_node_id]);
        self.volumes.set(name, nodes.flatten());
        let is_incomplete = |volume: &Volume| {
            volume.status.state == VolumeState::Creating || volume.status.robustness == Robustness::Degraded
        };
        self.set_incomplete(
            name,
            volume.filter(|volume| is_incomplete(volume)).map(|volume| volume.spec.size),
        );
        set(&mut self.growing, name, volume.is_some_and(Volume::is_expanding));
    }

    fn set_incomplete(&mut self, name: &str, size_bytes: Option<u64>) {
        if self.incomplete.get(name).copied() == size_bytes {
            return;
        }
        if let Some(before) = self.incomplete.remove(name)
            && let Some(count) = self.incomplete_by_size.get_mut(&before)
        {
            *count -= 1;
            if *count == 0 {
                self.incomplete_by_size.remove(&before);
            }
        }
        if let Some(size_bytes) = size_bytes {
            self.incomplete.insert(name.to_owned(), size_bytes);
            *self.incomplete_by_size.entry(size_bytes).or_default() += 1;
        }
    }

    fn set_engine(&mut self, name: &str, engine: Option<&Engine>) {
        self.engines.set(name, engine.and_then(|engine| engine.spec.node_id.as_ref()));
        let is_rebuilding = |engine: &Engine| {
            let mut members = engine.status.replica_mode_map.values();
            engine.status.is_serving() && members.any(|member| member.mode != MemberMode::Member)
        };
        set(&mut self.rebuilding, name, engine.is_some_and(is_rebuilding));
    }

    fn set_replica(&mut self, name: &str, replica: Option<&Replica>) {
        self.replicas.set(name, replica.map(|replica| &replica.spec.node_id));
        let leaves = |replica: &Replica| replica.metadata.is_deleting() || replica.spec.eviction_requested;
        set(&mut self.leaving, name, replica.is_some_and(leaves));
    }

    fn set_node(&mut self, name: &str, node: Option<&Node>) {
        let is_left = |node: &Node| {
            node.spec.eviction_requested
                || node.metadata.is_deleting()
                || node.spec.disks.values().any(|disk| disk.eviction_requested)
        };
        set(&mut self.left, name, node.is_some_and(is_left));
        self.zones.set(name, node);
    }
}

impl ClusterState {
    /// Iterates over the replicas whose spec has this node, by the index.
    pub fn replicas_on<'a>(&'a self, node: &str) -> impl Iterator<Item = &'a Replica> + use<'a> {
        self.index.replicas.on(node).filter_map(|name| self.replicas.get(name))
    }

    /// Returns the engines that are on `node`, or that will be started there.
    pub fn engines_on<'a>(&'a self, node: &str) -> impl Iterator<Item = &'a Engine> + use<'a> {
        self.index.engines.on(node).filter_map(|name| self.engines.get(name))
    }

    /// Returns the volumes that are wanted on `node`, or are attached there.
    pub fn volumes_on<'a>(&'a self, node: &str) -> impl Iterator<Item = &'a Volume> + use<'a> {
        self.index.volumes.on(node).filter_map(|name| self.volumes.get(name))
    }

    /// Returns the volumes that have to grow.
    pub fn growing_volumes(&self) -> impl Iterator<Item = &Volume> {
        self.index.growing.iter().filter_map(|name| self.volumes.get(name))
    }

    /// Returns true if the volume may have fewer members than wanted.
    pub(super) fn may_lack_member(&self, volume: &str) -> bool {
        self.index.rebuilding.contains(volume) || self.index.incomplete.contains_key(volume)
    }

    /// Returns the volumes that may lack a replica, or have a replica that has to leave its place.
    pub fn incomplete_or_moving_volumes(&self) -> BTreeSet<&str> {
        let on_left = self.index.left.iter().flat_map(|node| self.replicas_on(node));
        let leaving = self.index.leaving.iter().filter_map(|name| self.replicas.get(name));
        let names = leaving.chain(on_left).map(|replica| replica.spec.volume_name.as_str());
        self.index.incomplete.keys().map(String::as_str).chain(names).collect()
    }

    /// Returns the approximate number of volumes that may lack a replica and rebuild none.
    #[must_use]
    pub fn waiting_volumes(&self) -> usize {
        self.index.incomplete.len().saturating_sub(self.rebuilds.volumes_with_rebuild())
    }

    /// Returns the least room that may help a volume which waits for a place; none if no volume waits.
    #[must_use]
    pub fn least_useful_room(&self) -> Option<UsefulRoom> {
        if !self.index.leaving.is_empty() || !self.index.left.is_empty() {
            return Some(UsefulRoom::Any);
        }
        self.index.incomplete_by_size.keys().next().copied().map(UsefulRoom::Bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shorthorn_types::{ReplicaId, VolumeName};

    use super::super::rebuilds::RebuildIndex;
    use super::*;
    use crate::Timestamp;
    use crate::objects::{
        CurrentState, DesireState, MemberRecord, Metadata, NodeSpec, NodeStatus, ReplicaSpec, Secret,
        StoredReplicaStatus,
    };
    use crate::requests::{Change, CreateVolume};

    fn node(at: u8) -> NodeName {
        NodeName::new(&format!("n{at}")).unwrap()
    }

    fn object(kind: u8, name: u8, place: u8, odd: bool) -> Object {
        let metadata = |name: String| Metadata::new(name, Timestamp::UNIX_EPOCH);
        let size_bytes = if place > 1 { 8192 } else { 4096 };
        let wanted = CreateVolume { name: format!("v{name}"), size_bytes, ..CreateVolume::default() };
        let made = wanted.apply(&ClusterState::default(), Secret::new([1; 32]), Timestamp::UNIX_EPOCH);
        let Ok(Change::Store(mut volume)) = made else { panic!("the volume is refused") };
        volume.spec.node_id = (place > 0).then(|| node(place));
        volume.status.current_node_id = odd.then(|| node(1));
        volume.status.robustness = if odd { Robustness::Degraded } else { Robustness::Healthy };
        match kind {
            0 => volume.into(),
            1 => {
                let mut engine = Engine::of_new(&volume, Timestamp::UNIX_EPOCH);
                engine.spec.node_id = (place > 0).then(|| node(place));
                engine.status.current_state = CurrentState::Running;
                engine.status.phase = Some(crate::objects::EnginePhase::Serving);
                let mode = if odd { MemberMode::Failed } else { MemberMode::Member };
                let id = ReplicaId::from_random(1);
                engine.status.replica_mode_map = BTreeMap::from([(id, MemberRecord::of(mode))]);
                engine.into()
            }
            2 => Replica {
                metadata: metadata(format!("v{name}-1")),
                spec: ReplicaSpec {
                    volume_name: VolumeName::new(&format!("v{name}")).unwrap(),
                    volume_size: 1,
                    replica_id: ReplicaId::from_random(1),
                    node_id: node(place),
                    disk_path: "/d".to_owned(),
                    disk_id: String::new(),
                    desire_state: DesireState::Stopped,
                    eviction_requested: odd,
                },
                status: StoredReplicaStatus::default(),
            }
            .into(),
            _ => {
                let mut node = Node {
                    metadata: metadata(format!("n{place}")),
                    spec: NodeSpec::default(),
                    status: NodeStatus::default(),
                };
                node.spec.eviction_requested = odd;
                node.spec.disks = [("/d".to_owned(), crate::objects::DiskSpec::of_new(0))].into();
                node.spec.zone = (name > 1).then(|| format!("z{name}").parse().unwrap());
                node.into()
            }
        }
    }

    proptest! {
        #[test]
        fn the_index_equals_one_of_the_remaining_objects(
            steps in prop::collection::vec((any::<bool>(), 0u8..4, 0u8..4, 0u8..4, any::<bool>()), 0..60),
        ) {
            let mut cluster = ClusterState::default();
            for (put, kind, name, place, odd) in steps {
                let object = object(kind, name, place, odd);
                if put {
                    cluster.insert(object);
                } else {
                    cluster.remove(&object.key());
                }
                let mut anew = ClusterState::default();
                cluster.keys()
                    .filter_map(|key: Key| cluster.get(&key)).for_each(|object| anew.insert(object));
                prop_assert_eq!(&cluster.index, &anew.index);
                prop_assert_eq!(&cluster.rebuilds, &anew.rebuilds);
            }
            cluster.keys().collect::<Vec<_>>().iter().for_each(|key| cluster.remove(key));
            prop_assert_eq!(&cluster.index, &Index::default());
            prop_assert_eq!(&cluster.rebuilds, &RebuildIndex::default());
            prop_assert!(!cluster.has(&Key::new(Kind::Node, "n1")));
        }
    }
}
