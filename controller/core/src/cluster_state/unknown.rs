//! Objects that are stored and that the controller cannot use, beside the others.

use crate::ClusterState;
use crate::left_out_objects::{LeftOut, LeftOuts, refusal};
use crate::objects::{Key, Kind};

impl ClusterState {
    /// The store has an object of that key, and the controller cannot use it.
    pub fn leave_out(&mut self, key: Key, left_out: LeftOut) {
        self.left_out.insert(key, left_out);
    }

    /// The object of that key is gone, or can be used. False: it was not left out.
    pub fn forget_left_out(&mut self, key: &Key) -> bool {
        self.left_out.remove(key)
    }

    /// The objects that the controller cannot use.
    #[must_use]
    pub const fn left_out(&self) -> &LeftOuts {
        &self.left_out
    }

    /// Returns the sentence about the object of that key, if it is absent only because it was left out.
    #[must_use]
    pub fn unknown(&self, key: &Key) -> Option<String> {
        let left_out = self.left_out.get(key)?;
        (!self.has(key)).then(|| refusal(key, left_out))
    }

    /// Returns that sentence about the first such object of a volume: the volume, its engine or one of its
    /// replicas.
    #[must_use]
    pub fn unknown_of(&self, volume: &str) -> Option<String> {
        self.left_out.of_volume(volume).find_map(|(key, _)| self.unknown(key))
    }

    /// Returns that sentence about the first such replica of a volume.
    #[must_use]
    pub fn unknown_replica_of(&self, volume: &str) -> Option<String> {
        let mut replicas = self.left_out.of_volume(volume).filter(|(key, _)| key.kind == Kind::Replica);
        replicas.find_map(|(key, _)| self.unknown(key))
    }

    /// Returns that sentence about each such replica of a volume that may be a member of its view.
    pub fn unknown_members_of<'a>(&'a self, volume: &'a str) -> impl Iterator<Item = String> + use<'a> {
        let replicas = self.left_out.of_volume(volume).filter(|(key, _)| key.kind == Kind::Replica);
        replicas.filter(|(_, left_out)| !left_out.has_failed()).filter_map(|(key, _)| self.unknown(key))
    }

    /// Returns that sentence about the first such volume, engine or replica that may be on `node`.
    #[must_use]
    pub fn unknown_on(&self, node: &str) -> Option<String> {
        let mut there =
            self.left_out.iter().filter(|(key, left)| key.kind != Kind::Node && left.may_be_on(node));
        there.find_map(|(key, _)| self.unknown(key))
    }

    /// The keys of the replicas that may be on `node`, on the disk at `path` if one is given.
    pub fn unknown_replicas_on<'a>(
        &'a self,
        node: &'a str,
        path: Option<&'a str>,
    ) -> impl Iterator<Item = &'a Key> {
        let is_there = move |left: &LeftOut| match path {
            Some(path) => left.may_be_on_disk(node, path),
            None => left.may_be_on(node),
        };
        let replicas = self.left_out.iter().filter(|(key, _)| key.kind == Kind::Replica);
        replicas.filter(move |(key, left)| is_there(left) && !self.has(key)).map(|(key, _)| key)
    }
}
