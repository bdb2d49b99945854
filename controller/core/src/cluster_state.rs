mod index;
mod rebuilds;
mod replicas;
mod unknown;
mod zones;

use std::collections::BTreeMap;

use shorthorn_types::VolumeName;

use crate::left_out_objects::LeftOuts;
use crate::objects::{Engine, Key, Kind, Metadata, Node, Object, Replica, ResourceVersion, Volume};
pub use index::UsefulRoom;
pub use rebuilds::{Rebuild, Selectors};
pub use replicas::{Replicas, ScheduledBytes};

/// All stored objects by name.
#[derive(Clone, Debug, Default)]
pub struct ClusterState {
    /// By volume name.
    pub volumes: BTreeMap<String, Volume>,
    /// By volume name.
    pub engines: BTreeMap<String, Engine>,
    /// By `<volume>-<replica id>`.
    pub replicas: Replicas,
    /// By node name.
    pub nodes: BTreeMap<String, Node>,
    index: index::Index,
    rebuilds: rebuilds::RebuildIndex,
    /// Objects that are stored and cannot be used.
    left_out: LeftOuts,
}

impl ClusterState {
    /// Returns the replicas of `volume`, in the order of their names. Replicas that a deleted volume of the
    /// name has left behind do not count.
    pub fn replicas_of<'a>(&'a self, volume: &'a VolumeName) -> impl Iterator<Item = &'a Replica> {
        self.replicas_named(volume).filter(|replica| !replica.is_left_behind())
    }

    /// Returns the replicas that deleted volumes of that name have left behind.
    pub fn left_behind<'a>(&'a self, volume: &'a VolumeName) -> impl Iterator<Item = &'a Replica> {
        self.replicas_named(volume).filter(|replica| replica.is_left_behind())
    }

    fn replicas_named<'a>(&'a self, volume: &'a VolumeName) -> impl Iterator<Item = &'a Replica> {
        // Other volumes can have names that start like this one's replicas, so the prefix only narrows it.
        let prefix = format!("{volume}-");
        self.replicas
            .range(prefix.clone()..)
            .take_while(move |(name, _)| name.starts_with(&prefix))
            .map(|(_, replica)| replica)
            .filter(move |replica| replica.spec.volume_name == *volume)
    }

    /// Returns the object of that key.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<Object> {
        match key.kind {
            Kind::Volume => self.volumes.get(&key.name).cloned().map(Object::Volume),
            Kind::Engine => self.engines.get(&key.name).cloned().map(Object::Engine),
            Kind::Replica => self.replicas.get(&key.name).cloned().map(Object::Replica),
            Kind::Node => self.nodes.get(&key.name).cloned().map(Object::Node),
        }
    }

    /// Returns true if the store has an object of that key, which is not left out.
    #[must_use]
    pub fn has(&self, key: &Key) -> bool {
        self.version(key).is_some()
    }

    /// Returns the resource version of the stored object; none if no object is stored. A write of that key
    /// expects this version, and none creates the object.
    #[must_use]
    pub fn version(&self, key: &Key) -> Option<ResourceVersion> {
        self.metadata(key)?.resource_version
    }

    /// Returns the uid of the object; none if the store has no uids.
    #[must_use]
    pub fn uid(&self, key: &Key) -> Option<&str> {
        self.metadata(key)?.uid.as_deref()
    }

    fn metadata(&self, key: &Key) -> Option<&Metadata> {
        match key.kind {
            Kind::Volume => self.volumes.get(&key.name).map(|object| &object.metadata),
            Kind::Engine => self.engines.get(&key.name).map(|object| &object.metadata),
            Kind::Replica => self.replicas.get(&key.name).map(|object| &object.metadata),
            Kind::Node => self.nodes.get(&key.name).map(|object| &object.metadata),
        }
    }

    /// Puts `object` in place of the one with its key.
    pub fn insert(&mut self, object: Object) {
        let name = object.metadata().name.clone();
        let (key, version) = (object.key(), object.metadata().resource_version.map(ResourceVersion::get));
        if self.left_out.get(&key).is_some_and(|left_out| left_out.version <= version) {
            self.left_out.remove(&key);
        }
        self.index.insert(&object);
        let volume = match &object {
            Object::Volume(_) | Object::Engine(_) => Some(name.clone()),
            Object::Replica(replica) => Some(replica.spec.volume_name.to_string()),
            Object::Node(_) => None,
        };
        match object {
            Object::Volume(volume) => drop(self.volumes.insert(name, volume)),
            Object::Engine(engine) => drop(self.engines.insert(name, engine)),
            Object::Replica(replica) => self.replicas.insert(replica),
            Object::Node(node) => drop(self.nodes.insert(name, node)),
        }
        if let Some(volume) = volume {
            self.follow_rebuilds(&volume);
        }
    }

    /// Takes out the object of that key.
    pub fn remove(&mut self, key: &Key) {
        self.index.remove(key);
        let volume = match key.kind {
            Kind::Volume | Kind::Engine => Some(key.name.clone()),
            Kind::Replica => self.replicas.get(&key.name).map(|replica| replica.spec.volume_name.to_string()),
            Kind::Node => None,
        };
        match key.kind {
            Kind::Volume => drop(self.volumes.remove(&key.name)),
            Kind::Engine => drop(self.engines.remove(&key.name)),
            Kind::Replica => self.replicas.remove(&key.name),
            Kind::Node => drop(self.nodes.remove(&key.name)),
        }
        if let Some(volume) = volume {
            self.follow_rebuilds(&volume);
        }
    }

    /// Reserves the places of replicas that are about to be stored, if each of them is still open. A disk or
    /// a node may have been cordoned, or removed, since the places were chosen. False: none is reserved.
    #[must_use]
    pub fn reserve(&mut self, replicas: Vec<Replica>) -> bool {
        if !replicas.iter().all(|replica| self.takes(replica)) {
            return false;
        }
        replicas.into_iter().for_each(|replica| self.replicas.reserve(replica));
        true
    }

    /// Returns true if the disk of `replica` takes new replicas.
    fn takes(&self, replica: &Replica) -> bool {
        let node = self.nodes.get(replica.spec.node_id.as_str());
        let is_open = |node: &&Node| {
            node.spec.allow_scheduling && !node.spec.eviction_requested && !node.metadata.is_deleting()
        };
        let node = node.filter(is_open);
        let disk = node.and_then(|node| node.spec.disks.get(&replica.spec.disk_path));
        disk.is_some_and(|disk| disk.allow_scheduling && !disk.eviction_requested)
    }

    /// Drops the reservation of a replica that is stored, or will not be.
    pub fn forget_reservation(&mut self, name: &str) {
        self.replicas.forget_reservation(name);
    }

    /// Returns the keys of all objects.
    pub fn keys(&self) -> impl Iterator<Item = Key> {
        let volumes = self.volumes.keys().map(|name| Key::new(Kind::Volume, name));
        let engines = self.engines.keys().map(|name| Key::new(Kind::Engine, name));
        let replicas = self.replicas.keys().map(|name| Key::new(Kind::Replica, name));
        let nodes = self.nodes.keys().map(|name| Key::new(Kind::Node, name));
        volumes.chain(engines).chain(replicas).chain(nodes)
    }
}
