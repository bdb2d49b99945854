//! Decides which version of an object is the newest. Versions come from watches, from lists and as the
//! answers to own writes, in any order. The reconcilers must never see an older state after a newer one.
//!
//! Resource versions of one kind rise with every change. So a known object is replaced by newer versions
//! only. An unknown one is either new, or was removed and arrives late. A watch delivers in order, so all
//! versions up to its last one were received already.

use std::collections::{BTreeMap, BTreeSet};

use shorthorn_controller_core::ClusterState;
use shorthorn_controller_core::left_out_objects::LeftOut;
use shorthorn_controller_core::objects::{Key, Kind, Object, ResourceVersion};

/// The state, besides the objects, that is needed to judge incoming versions.
#[derive(Clone, Debug, Default)]
pub struct VersionOrder {
    /// The version up to which the watch of each kind has come.
    heard: BTreeMap<Kind, u64>,
    /// The versions of objects that this controller has removed, until the watch or a list shows that too. An
    /// older list may still be in flight. The map has as many entries as unconfirmed removals.
    removed: BTreeMap<Key, u64>,
}

/// Returns the place of a version in the order of versions: 0, before all of them, if no object is stored.
pub fn place(version: Option<ResourceVersion>) -> u64 {
    version.map_or(0, ResourceVersion::get)
}

/// All objects of one kind on the API server.
#[derive(Clone, Debug, Default)]
pub struct ObjectList {
    /// The resource version of the list, at which its watch begins.
    pub version: u64,
    /// The valid objects.
    pub objects: Vec<Object>,
    /// The listed objects that have nothing of ours.
    pub unreadable: Vec<Key>,
    /// The listed objects that cannot be used.
    pub left_out: BTreeMap<Key, LeftOut>,
}

impl VersionOrder {
    /// Takes an object from a watch or an answer. Returns true if it is newer than the known one.
    pub fn take(&mut self, state: &mut ClusterState, object: Object) -> bool {
        let key = object.key();
        let version = place(object.metadata().resource_version);
        let known = state.version(&key).map_or_else(|| self.gone_at(&key), ResourceVersion::get);
        if version <= known {
            return false;
        }
        self.removed.remove(&key);
        state.insert(object);
        true
    }

    /// Records an object that cannot be used. Returns true if it is newer than the known version.
    pub fn leave_out(&self, state: &mut ClusterState, key: &Key, left_out: LeftOut) -> bool {
        let removed = self.removed.get(key).copied().unwrap_or(0);
        let known = place(state.version(key)).max(removed);
        let is_newer = left_out.version.is_none_or(|version| version > known);
        if is_newer && state.left_out().get(key) != Some(&left_out) {
            state.leave_out(key.clone(), left_out);
            return true;
        }
        false
    }

    /// Up to which version the absence of `key` is known.
    fn gone_at(&self, key: &Key) -> u64 {
        let heard = self.heard.get(&key.kind).copied().unwrap_or(0);
        heard.max(self.removed.get(key).copied().unwrap_or(0))
    }

    /// Handles the deletion of an object at that version in the watch. Returns true if it existed.
    pub fn take_gone(&mut self, state: &mut ClusterState, key: &Key, version: u64) -> bool {
        let was_stored = state.has(key) && place(state.version(key)) <= version;
        if was_stored {
            state.remove(key);
        }
        if self.removed.get(key).is_some_and(|removed| *removed <= version) {
            self.removed.remove(key);
        }
        let was_left_out =
            state.left_out().get(key).is_some_and(|left_out| left_out.version <= Some(version));
        was_stored | (was_left_out && state.forget_left_out(key))
    }

    /// Handles the removal of that version of an object by this controller. Returns true if it was known.
    pub fn remove(&mut self, state: &mut ClusterState, key: &Key, version: u64) -> bool {
        // If it is not known any more, the watch has reported that already; or it was re-created.
        let is_known = state.has(key) && place(state.version(key)) <= version;
        if is_known {
            state.remove(key);
            self.removed.insert(key.clone(), version);
        }
        is_known
    }

    /// Records the version that the watch of that kind has reached.
    pub fn heard(&mut self, kind: Kind, version: u64) {
        let heard = self.heard.entry(kind).or_default();
        *heard = version.max(*heard);
    }

    /// Takes all objects of a kind as of that version; returns the changed ones. Unreadable ones keep their
    /// last known state.
    pub fn relist(&mut self, state: &mut ClusterState, kind: Kind, list: ObjectList) -> Vec<Key> {
        let ObjectList { version, objects, unreadable, left_out } = list;
        let mut changed = Vec::new();
        if version < self.heard.get(&kind).copied().unwrap_or(0) {
            // Only an API server that was restored from a backup answers so. Its current state counts.
            self.forget(state, kind, &mut changed);
        }
        let readable = objects.iter().map(Object::key).chain(unreadable);
        let listed: BTreeSet<Key> = readable.chain(left_out.keys().cloned()).collect();
        let gone: Vec<Key> = state
            .keys()
            .filter(|key| key.kind == kind && !listed.contains(key) && place(state.version(key)) <= version)
            .collect();
        for key in gone {
            state.remove(&key);
            changed.push(key);
        }
        for object in objects {
            let key = object.key();
            if self.take_listed(state, object) {
                changed.push(key);
            }
        }
        let before = state.left_out().iter().map(|(key, _)| key);
        let before = before.filter(|key| key.kind == kind && !left_out.contains_key(key));
        for key in before.cloned().collect::<Vec<Key>>() {
            state.forget_left_out(&key);
            changed.push(key);
        }
        for (key, left_out) in left_out {
            if self.leave_out(state, &key, left_out) {
                changed.push(key);
            }
        }
        self.removed.retain(|key, removed| key.kind != kind || listed.contains(key) || *removed > version);
        self.heard(kind, version);
        changed
    }

    /// Takes an object of a list. A list is of one version, at which the object existed, whatever came
    /// before.
    fn take_listed(&mut self, state: &mut ClusterState, object: Object) -> bool {
        let key = object.key();
        let version = place(object.metadata().resource_version);
        let removed = self.removed.get(&key).copied().unwrap_or(0);
        if version <= place(state.version(&key)).max(removed) {
            return false;
        }
        self.removed.remove(&key);
        state.insert(object);
        true
    }

    fn forget(&mut self, state: &mut ClusterState, kind: Kind, changed: &mut Vec<Key>) {
        let all: Vec<Key> = state.keys().filter(|key| key.kind == kind).collect();
        all.iter().for_each(|key| state.remove(key));
        changed.extend(all);
        self.heard.remove(&kind);
        self.removed.retain(|key, _| key.kind != kind);
    }
}

#[cfg(test)]
mod tests;
