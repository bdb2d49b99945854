//! The custom resource definitions, made from the types of the reconcilers.

use serde_json::{Value, json};
use shorthorn_objects::schema::{Defaults, structural};
use shorthorn_objects::{
    EngineSpec, Kind, NodeSpec, NodeStatus, ReplicaSpec, StoredEngineStatus, StoredReplicaStatus, VolumeSpec,
    VolumeStatus,
};
use shorthorn_types::hex;

use super::{GROUP, VERSION, kind_name, plural};

/// The kinds in the order in which people read of them.
pub const ORDER: [Kind; 4] = [Kind::Volume, Kind::Engine, Kind::Replica, Kind::Node];
/// The annotation of a definition with the version of its schema.
pub const HASH_ANNOTATION: &str = "shorthorn.io/schema-hash";
/// The bytes of a schema's digest in its hash.
const HASH_BYTES: usize = 8;
const RULES: &str = "x-kubernetes-validations";

/// The choice of including the CEL rules in a definition. API servers support them since 1.25.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rules {
    /// For API servers since 1.25.
    Included,
    /// For older API servers.
    LeftOut,
}

/// Returns the definition of a kind, as JSON.
#[must_use]
pub fn definition(kind: Kind, rules: Rules) -> Value {
    let (mut spec, status) = parts(kind);
    if let (Kind::Volume, Some(properties)) = (kind, spec.get_mut("properties")) {
        // Optional fields get their defaults, and so does the whole table.
        properties["rebuild"]["default"] = json!({});
    }
    let mut schema = json!({
        "type": "object",
        "description": description(kind),
        "required": ["spec"],
        "properties": { "spec": spec, "status": status },
        RULES: name_rules(kind),
    });
    if rules == Rules::LeftOut {
        leave_out_rules(&mut schema);
    } else if schema[RULES].as_array().is_none_or(Vec::is_empty) {
        schema.as_object_mut().map(|fields| fields.remove(RULES));
    }
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": definition_name(kind),
            "annotations": { HASH_ANNOTATION: hash_of(&schema) },
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind_name(kind),
                "listKind": format!("{}List", kind_name(kind)),
                "plural": plural(kind),
                "singular": kind.as_str(),
                "shortNames": [short_name(kind)],
                "categories": ["shorthorn"],
            },
            "versions": [{
                "name": VERSION,
                "served": true,
                "storage": true,
                "subresources": { "status": {} },
                "additionalPrinterColumns": columns(kind),
                "schema": { "openAPIV3Schema": schema },
            }],
        },
    })
}

/// Returns PLURAL.GROUP, the name of the CustomResourceDefinition of a kind.
#[must_use]
pub fn definition_name(kind: Kind) -> String {
    format!("{}.{GROUP}", plural(kind))
}

/// Returns the hash of a schema, which is in an annotation of its definition. Rules are not hashed, so that a
/// definition without them has the same hash.
fn hash_of(schema: &Value) -> String {
    let mut schema = schema.clone();
    leave_out_rules(&mut schema);
    let digest = ring::digest::digest(&ring::digest::SHA256, schema.to_string().as_bytes());
    hex(&digest.as_ref()[..HASH_BYTES])
}

/// Returns the definition as a YAML document.
///
/// # Errors
/// The YAML library cannot write it.
pub fn yaml(kind: Kind, rules: Rules) -> Result<String, serde_saphyr::ser::Error> {
    let text = serde_saphyr::to_string(&definition(kind, rules))?;
    Ok(format!("# Made by shorthorn-controller crds. Do not edit.\n---\n{text}"))
}

fn parts(kind: Kind) -> (Value, Value) {
    use Defaults::{Absent, Shown};
    match kind {
        Kind::Volume => (structural::<VolumeSpec>(Shown), structural::<VolumeStatus>(Absent)),
        Kind::Engine => (structural::<EngineSpec>(Absent), structural::<StoredEngineStatus>(Absent)),
        Kind::Replica => (structural::<ReplicaSpec>(Absent), structural::<StoredReplicaStatus>(Absent)),
        Kind::Node => (structural::<NodeSpec>(Shown), structural::<NodeStatus>(Absent)),
    }
}

const fn description(kind: Kind) -> &'static str {
    match kind {
        Kind::Volume => "A replicated volume. Deleting it deletes its data.",
        Kind::Engine => "The engine of a volume; made and kept by the controller.",
        Kind::Replica => "A copy of a volume's data; made and kept by the controller.",
        Kind::Node => "A machine with an agent, and its disks.",
    }
}

const fn short_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Volume => "shv",
        Kind::Engine => "she",
        Kind::Replica => "shr",
        Kind::Node => "shn",
    }
}

/// Returns the rules between the name of an object and its spec.
fn name_rules(kind: Kind) -> Value {
    match kind {
        Kind::Volume => json!([
            {
                "rule": "self.metadata.name.matches('^[a-z0-9]([a-z0-9-]*[a-z0-9])?$') \
                         && size(self.metadata.name) <= 63",
                "message": "a volume's name has at most 63 lower-case letters, digits and dashes",
            },
            {
                "rule": "!has(self.spec.volumeName) || self.spec.volumeName == self.metadata.name",
                "message": "volumeName must be the name of the object; leave it out",
            },
        ]),
        Kind::Engine | Kind::Replica | Kind::Node => json!([]),
    }
}

/// Returns the fields of this release's schema of a kind that an API server with the given definition would
/// drop or refuse. If empty, it keeps everything. A definition of a later release may have more.
#[must_use]
pub fn lacking(kind: Kind, installed: &Value) -> Vec<String> {
    let ours = definition(kind, Rules::LeftOut);
    let annotation = &installed["metadata"]["annotations"][HASH_ANNOTATION];
    if *annotation == ours["metadata"]["annotations"][HASH_ANNOTATION] {
        return Vec::new();
    }
    let schema = |definition: &Value| {
        let versions = definition["spec"]["versions"].as_array().cloned().unwrap_or_default();
        let ours = versions.into_iter().find(|version| version["name"] == VERSION);
        ours.map_or(Value::Null, |version| version["schema"]["openAPIV3Schema"].clone())
    };
    let mut lacking = Vec::new();
    compare(kind.as_str(), &schema(&ours), &schema(installed), &mut lacking);
    lacking
}

fn compare(at: &str, ours: &Value, installed: &Value, lacking: &mut Vec<String>) {
    if installed["x-kubernetes-preserve-unknown-fields"] == true {
        return;
    }
    for (name, property) in ours["properties"].as_object().into_iter().flatten() {
        let at = format!("{at}.{name}");
        match installed["properties"].get(name) {
            Some(there) => compare(&at, property, there, lacking),
            None => lacking.push(format!("the field {at}")),
        }
    }
    for inner in ["items", "additionalProperties"] {
        if ours[inner].is_object() {
            compare(&format!("{at}[]"), &ours[inner], &installed[inner], lacking);
        }
    }
    if let Some(there) = installed["enum"].as_array() {
        let words = ours["enum"].as_array().into_iter().flatten();
        lacking.extend(
            words.filter(|word| !there.contains(word)).map(|word| format!("the value {word} of {at}")),
        );
    }
}

fn leave_out_rules(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            fields.remove(RULES);
            fields.values_mut().for_each(leave_out_rules);
        }
        Value::Array(items) => items.iter_mut().for_each(leave_out_rules),
        _ => {}
    }
}

/// Returns the columns of kubectl; those with a priority appear only with `-o wide`.
fn columns(kind: Kind) -> Value {
    let column = |name: &str, path: &str, priority: u32| {
        let column = json!({ "name": name, "type": "string", "jsonPath": path });
        if priority == 0 { column } else { with(column, "priority", priority.into()) }
    };
    let condition = |name: &str, kind: &str, priority| {
        column(name, &format!(".status.conditions[?(@.type==\"{kind}\")].status"), priority)
    };
    let age = json!({ "name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp" });
    match kind {
        Kind::Volume => json!([
            column("State", ".status.state", 0),
            column("Robustness", ".status.robustness", 0),
            column("Replicas", ".status.display.replicas", 0),
            column("Size", ".status.display.size", 0),
            column("Actual size", ".status.display.actualSize", 1),
            column("Node", ".status.currentNodeID", 0),
            column("Claim", ".status.claim", 1),
            condition("Scheduled", "Scheduled", 1),
            condition("Engine current", "EngineCurrent", 1),
            column("Reason", ".status.display.reason", 1),
            age,
        ]),
        Kind::Engine => json!([
            column("State", ".status.currentState", 0),
            column("Phase", ".status.phase", 0),
            column("Node", ".spec.nodeID", 0),
            column("Endpoint", ".status.endpoint", 1),
            with(column("Needs upgrade", ".status.needsUpgrade", 1), "type", "boolean".into()),
            age,
        ]),
        Kind::Replica => json!([
            column("Volume", ".spec.volumeName", 0),
            column("State", ".status.currentState", 0),
            column("Data", ".status.data", 1),
            column("Node", ".spec.nodeID", 0),
            column("Disk", ".spec.diskPath", 0),
            column("Message", ".status.message", 1),
            age,
        ]),
        Kind::Node => json!([
            condition("Ready", "Ready", 0),
            with(column("Schedulable", ".spec.allowScheduling", 0), "type", "boolean".into()),
            with(column("Leaving", ".spec.evictionRequested", 1), "type", "boolean".into()),
            column("Free", ".status.freeSpace", 0),
            column("Zone", ".status.zone", 0),
            column("Address", ".spec.address", 1),
            column("Version", ".status.version", 0),
            age,
        ]),
    }
}

fn with(mut column: Value, field: &str, value: Value) -> Value {
    column[field] = value;
    column
}

#[cfg(test)]
mod tests;
