//! Objects that are stored and that the controller cannot use: their text cannot be read, or they cannot be
//! held by the finalizer. The store reports them and continues with all others.
//!
//! Such an object is not in the [`ClusterState`](crate::ClusterState), and its absence there proves nothing.
//! Its replica may hold the only copy of the data, and its engine may write. A rule that concludes something
//! from an absence asks here first, and then refuses or waits. An object that was read before and is
//! unreadable now keeps its last known state in the cluster state.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::objects::{Key, Kind};

/// An object that was left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// The reason why the object cannot be used.
    pub why: String,
    /// The steps by which an operator repairs the object.
    pub remedy: String,
    /// The stored version that cannot be used, if the store reports it.
    pub version: Option<u64>,
    /// The nodes that its text names; none if they cannot be read either.
    nodes: Option<BTreeSet<String>>,
    /// The disk that its text names.
    disk_path: Option<String>,
    /// True if the text says that the replica has left its view.
    has_failed: bool,
}

impl LeftOut {
    /// The object of that kind. `raw`: its text as far as it is JSON.
    #[must_use]
    pub fn new(
        kind: Kind,
        raw: Option<&Value>,
        why: impl Into<String>,
        remedy: impl Into<String>,
    ) -> LeftOut {
        let has_failed = raw.is_some_and(|raw| text_at(raw, "/status/failedAt").is_some());
        let (nodes, disk_path) = match raw {
            Some(raw) => (nodes_of(kind, raw), text_at(raw, "/spec/diskPath").map(str::to_owned)),
            None => (None, None),
        };
        LeftOut { why: why.into(), remedy: remedy.into(), version: None, nodes, disk_path, has_failed }
    }

    /// The same, of that stored version, if the store reports it.
    #[must_use]
    pub fn at_version(self, version: Option<u64>) -> LeftOut {
        LeftOut { version, ..self }
    }

    /// Returns true if the object may belong to `node`, as far as its text can be read.
    #[must_use]
    pub fn may_be_on(&self, node: &str) -> bool {
        self.nodes.as_ref().is_none_or(|nodes| nodes.contains(node))
    }

    /// Returns true if the text says that the replica has left its view.
    pub(crate) const fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Returns the nodes that its text names, as far as it can be read.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        self.nodes.iter().flatten().map(String::as_str)
    }

    /// Returns true if the object may belong to that disk, as far as its text can be read.
    pub(crate) fn may_be_on_disk(&self, node: &str, path: &str) -> bool {
        self.may_be_on(node) && self.disk_path.as_deref().is_none_or(|disk| disk == path)
    }
}

fn text_at<'a>(raw: &'a Value, pointer: &str) -> Option<&'a str> {
    raw.pointer(pointer).and_then(Value::as_str)
}

/// The nodes that the text of an object names; none: it should name one, or names something else.
fn nodes_of(kind: Kind, raw: &Value) -> Option<BTreeSet<String>> {
    let pointers: &[&str] = match kind {
        Kind::Volume => &["/spec/nodeID", "/status/currentNodeID"],
        Kind::Engine | Kind::Replica => &["/spec/nodeID"],
        Kind::Node => &[],
    };
    let is_damaged = |part: &str| raw.get(part).is_some_and(|found| !found.is_object());
    if raw.get("spec").is_none() || is_damaged("spec") || is_damaged("status") {
        return None;
    }
    let mut nodes = BTreeSet::new();
    for pointer in pointers {
        match raw.pointer(pointer) {
            None | Some(Value::Null) => {}
            Some(Value::String(node)) => drop(nodes.insert(node.clone())),
            Some(_) => return None,
        }
    }
    // A replica is always somewhere.
    (kind != Kind::Replica || !nodes.is_empty()).then_some(nodes)
}

/// All objects that were left out, by key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftOuts {
    by_key: BTreeMap<Key, LeftOut>,
}

impl LeftOuts {
    /// Returns the objects in the order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = (&Key, &LeftOut)> {
        self.by_key.iter()
    }

    /// The object of that key, if it was left out.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<&LeftOut> {
        self.by_key.get(key)
    }

    pub(crate) fn insert(&mut self, key: Key, left_out: LeftOut) {
        self.by_key.insert(key, left_out);
    }

    pub(crate) fn remove(&mut self, key: &Key) -> bool {
        self.by_key.remove(key).is_some()
    }

    /// The volumes that something belongs to that was left out.
    #[must_use]
    pub fn volumes(&self) -> BTreeSet<&str> {
        self.by_key.keys().filter_map(volume_of).collect()
    }

    /// The volume `name`, its engine and its replicas, as far as they were left out.
    pub fn of_volume<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a Key, &'a LeftOut)> {
        let own = [Kind::Volume, Kind::Engine].map(|kind| Key::new(kind, name));
        let own = own.into_iter().filter_map(|key| self.by_key.get_key_value(&key));
        let first = Key::new(Kind::Replica, format!("{name}-"));
        let replicas = self.by_key.range(first..).take_while(move |(key, _)| {
            key.kind == Kind::Replica && key.name.strip_prefix(name).is_some_and(|id| id.starts_with('-'))
        });
        // Names of other volumes may begin like the names of these replicas.
        own.chain(replicas.filter(move |(key, _)| volume_of(key) == Some(name)))
    }
}

/// The volume that an object belongs to; a node belongs to none.
fn volume_of(key: &Key) -> Option<&str> {
    match key.kind {
        Kind::Volume | Kind::Engine => Some(&key.name),
        Kind::Replica => key.name.rsplit_once('-').map(|(volume, _)| volume),
        Kind::Node => None,
    }
}

/// Returns the sentence about an object that prevents an operation.
#[must_use]
pub fn refusal(key: &Key, left_out: &LeftOut) -> String {
    let LeftOut { why, remedy, .. } = left_out;
    format!("{key} is stored, but the controller cannot use it ({why}): {remedy}")
}

#[cfg(test)]
mod rules;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::objects::{Node, ResourceVersion};
    use crate::{ClusterState, Timestamp};

    fn left(kind: Kind, raw: &Value) -> LeftOut {
        LeftOut::new(kind, Some(raw), "it is damaged", "correct it")
    }

    #[test]
    fn the_text_names_the_nodes_as_far_as_it_can_be_read() {
        let replica = left(Kind::Replica, &json!({ "spec": { "nodeID": "a", "diskPath": "/d" } }));
        assert!(replica.may_be_on("a") && !replica.may_be_on("b"));
        assert!(replica.may_be_on_disk("a", "/d") && !replica.may_be_on_disk("a", "/e"));
        for unclear in [json!({}), json!({ "spec": { "nodeID": 7 } }), json!("text")] {
            assert!(left(Kind::Replica, &unclear).may_be_on("b"), "{unclear}");
            assert!(left(Kind::Engine, &unclear).may_be_on("b"), "{unclear}");
        }
        let unclear = json!({ "spec": { "nodeID": "a" }, "status": "text" });
        assert!(left(Kind::Volume, &unclear).may_be_on("b"), "its current node cannot be read");
        assert!(!left(Kind::Engine, &json!({ "spec": {} })).may_be_on("b"), "it was never started");
        assert!(LeftOut::new(Kind::Volume, None, "", "").may_be_on("b"));
        let volume = left(Kind::Volume, &json!({ "spec": {}, "status": { "currentNodeID": "a" } }));
        assert!(volume.may_be_on("a") && !volume.may_be_on("b"));
        assert!(!left(Kind::Volume, &json!({ "spec": { "nodeID": null } })).may_be_on("a"));
    }

    #[test]
    fn objects_of_a_volume_are_found_by_their_names_and_no_others() {
        let mut cluster = ClusterState::default();
        let keys = [
            Key::new(Kind::Volume, "v"),
            Key::new(Kind::Replica, "v-00000001"),
            Key::new(Kind::Replica, "v-1-00000002"),
            Key::new(Kind::Replica, "v0-00000003"),
            Key::new(Kind::Engine, "v-1"),
            Key::new(Kind::Node, "v"),
        ];
        keys.iter().for_each(|key| cluster.leave_out(key.clone(), LeftOut::default()));
        let of = |volume: &str| -> Vec<Key> {
            cluster.left_out().of_volume(volume).map(|(key, _)| key.clone()).collect()
        };
        assert_eq!(of("v"), keys[..2]);
        assert_eq!(of("v-1"), [keys[4].clone(), keys[2].clone()]);
        assert_eq!(cluster.left_out().volumes().into_iter().collect::<Vec<_>>(), ["v", "v-1", "v0"]);
    }

    #[test]
    fn an_object_is_left_out_until_it_is_taken_in() {
        let mut cluster = ClusterState::default();
        let mut node = Node::new("n", Timestamp::UNIX_EPOCH);
        let key = Key::new(Kind::Node, "n");
        let damaged = LeftOut { version: Some(5), ..left(Kind::Node, &json!({})) };
        cluster.leave_out(key.clone(), damaged);
        let sentence = cluster.unknown(&key).unwrap();
        assert_eq!(
            sentence,
            "node n is stored, but the controller cannot use it (it is damaged): correct it"
        );
        node.metadata.resource_version = ResourceVersion::new(4);
        cluster.insert(node.clone().into());
        assert!(cluster.left_out().get(&key).is_some(), "that is older than the damaged version");
        assert_eq!(cluster.unknown(&key), None, "its last state is known");
        node.metadata.resource_version = ResourceVersion::new(6);
        cluster.insert(node.into());
        assert_eq!(cluster.left_out(), &LeftOuts::default());
    }
}
