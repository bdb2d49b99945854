//! Objects as the API server has them, and as the reconcilers know them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::DynamicObject;
use kube::core::{ApiResource, TypeMeta};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use shorthorn_controller_core::objects::{
    ConditionType, Conditions, Engine, Finding, Kind, Metadata, Node, Object, Replica, ResourceVersion,
    Volume, VolumeStatus,
};
use shorthorn_controller_core::{Timestamp, requests};
use thiserror::Error;

use super::finalizer::{FINALIZER, has_data};
use super::keys::VolumeKeys;
use shorthorn_kube::{VOLUME_LABEL, resource};

/// Marks a volume whose data is encrypted between nodes. Definitions of earlier releases drop the field of
/// the spec, and no definition drops an annotation.
pub const ENCRYPTION_ANNOTATION: &str = "shorthorn.io/encrypt-in-transit";

/// The word for a volume that cannot be.
pub const INVALID_SPEC: &str = "InvalidSpec";

/// The reason why an object of the API server cannot be used.
#[derive(Debug, Error)]
pub enum ConvertError {
    /// The object lacks a field that every object has.
    #[error("the object has no {0}")]
    Lacks(&'static str),
    /// Versions are compared, so they must be numbers. Kubernetes keeps to that since 1.35 by its word,
    /// before by habit.
    #[error("the resourceVersion {0:?} is not a number: this API server cannot be used as a store")]
    Version(String),
    /// The spec or the status has a value that can never work.
    #[error("the {0} cannot be used: {1}")]
    Part(&'static str, String),
}

/// Parses a resource version.
pub fn version(text: Option<&str>) -> Result<u64, ConvertError> {
    let text = text.ok_or(ConvertError::Lacks("resourceVersion"))?;
    text.parse().ok().filter(|version| *version > 0).ok_or_else(|| ConvertError::Version(text.to_owned()))
}

/// Converts an object for the reconcilers.
pub fn object(kind: Kind, stored: &DynamicObject, keys: &VolumeKeys) -> Result<Object, ConvertError> {
    let metadata = metadata(&stored.metadata)?;
    let mut spec = stored.data.get("spec").cloned().unwrap_or_else(|| json!({}));
    let status = stored.data.get("status").cloned().unwrap_or(Value::Null);
    Ok(match kind {
        Kind::Volume => {
            let uid = stored.metadata.uid.as_deref().ok_or(ConvertError::Lacks("uid"))?;
            complete_volume(&mut spec, &metadata.name, &String::from(keys.secret_of(uid)));
            if has_encryption_annotation(stored) {
                spec["encryptInTransit"] = true.into();
            }
            let volume = Volume { metadata, spec: spec_of(spec)?, status: status_of(status)? };
            requests::check_stored(&volume).map_err(|error| ConvertError::Part("spec", error.to_string()))?;
            volume.into()
        }
        Kind::Engine => Engine { metadata, spec: spec_of(spec)?, status: status_of(status)? }.into(),
        Kind::Replica => Replica { metadata, spec: spec_of(spec)?, status: status_of(status)? }.into(),
        Kind::Node => Node { metadata, spec: spec_of(spec)?, status: status_of(status)? }.into(),
    })
}

/// Returns true if the spec of a volume asks for encryption.
pub fn asks_for_encryption(object: &DynamicObject) -> bool {
    object.data["spec"]["encryptInTransit"] == true
}

/// Returns true if the volume was encrypted when its finalizer was set.
pub fn has_encryption_annotation(object: &DynamicObject) -> bool {
    let annotations = object.metadata.annotations.as_ref();
    annotations.is_some_and(|all| all.contains_key(ENCRYPTION_ANNOTATION))
}

fn metadata(stored: &ObjectMeta) -> Result<Metadata, ConvertError> {
    let time = |time: &Time| time.0;
    Ok(Metadata {
        name: stored.name.clone().ok_or(ConvertError::Lacks("name"))?,
        uid: stored.uid.clone().filter(|uid| !uid.is_empty()),
        resource_version: ResourceVersion::new(version(stored.resource_version.as_deref())?),
        generation: generation(stored),
        creation_timestamp: stored
            .creation_timestamp
            .as_ref()
            .map(time)
            .ok_or(ConvertError::Lacks("creationTimestamp"))?,
        deletion_timestamp: stored.deletion_timestamp.as_ref().map(time),
    })
}

fn generation(stored: &ObjectMeta) -> Option<u64> {
    stored.generation.and_then(|number| u64::try_from(number).ok()).filter(|number| *number > 0)
}

/// Adds the fields of a volume that no client writes: its name, which the metadata has anyway, and its
/// secret, which is derived.
fn complete_volume(spec: &mut Value, name: &str, secret: &str) {
    if let Value::Object(fields) = spec {
        fields.entry("volumeName").or_insert_with(|| name.into());
        fields.insert("secret".to_owned(), secret.into());
    }
}

fn spec_of<T: DeserializeOwned>(spec: Value) -> Result<T, ConvertError> {
    T::deserialize(spec).map_err(|error| ConvertError::Part("spec", error.to_string()))
}

fn status_of<T: DeserializeOwned + Default>(status: Value) -> Result<T, ConvertError> {
    if status.as_object().is_none_or(Map::is_empty) {
        return Ok(T::default());
    }
    T::deserialize(status).map_err(|error| ConvertError::Part("status", error.to_string()))
}

/// Spec and status of an object as the API server gets them.
#[derive(Debug)]
pub struct Parts {
    /// The desired state.
    pub spec: Value,
    /// The current state.
    pub status: Value,
}

/// Takes an object apart. The secret of a volume stays here.
pub fn parts(object: &Object) -> Result<Parts, serde_json::Error> {
    let (mut spec, mut status) = match object {
        Object::Volume(volume) => {
            (serde_json::to_value(&volume.spec)?, serde_json::to_value(&volume.status)?)
        }
        Object::Engine(engine) => {
            (serde_json::to_value(&engine.spec)?, serde_json::to_value(&engine.status)?)
        }
        Object::Replica(replica) => {
            (serde_json::to_value(&replica.spec)?, serde_json::to_value(&replica.status)?)
        }
        Object::Node(node) => (serde_json::to_value(&node.spec)?, serde_json::to_value(&node.status)?),
    };
    if let (Object::Volume(_), Value::Object(fields)) = (object, &mut spec) {
        fields.remove("secret");
    }
    leave_out_empty(&mut status);
    Ok(Parts { spec, status })
}

/// Removes empty texts from a status, as is usual in Kubernetes: they are read as empty again. An API server
/// that was built with a newer Go than its own takes an empty text for null, and refuses it.
fn leave_out_empty(status: &mut Value) {
    match status {
        Value::Object(fields) => {
            fields.retain(|_, value| *value != "");
            fields.values_mut().for_each(leave_out_empty);
        }
        Value::Array(items) => items.iter_mut().for_each(leave_out_empty),
        _ => {}
    }
}

/// Returns the change of the status of an invalid volume; none if it is stored already.
pub fn refused_status(stored: &DynamicObject, why: &str, now: Timestamp) -> Option<Value> {
    let status = stored.data.get("status");
    let known = status.and_then(|status| status.get("conditions")).cloned();
    let known = known.and_then(|conditions| serde_json::from_value::<Conditions>(conditions).ok());
    let known = known.unwrap_or_default();
    let mut conditions = known.clone();
    let message = format!("the controller does not reconcile this volume until its spec is valid: {why}");
    conditions.set(ConditionType::Accepted, Finding::wrong(INVALID_SPEC, message), now);
    conditions.observe_one(ConditionType::Accepted, generation(&stored.metadata));
    if conditions == known {
        return None;
    }
    if status.and_then(Value::as_object).is_none_or(Map::is_empty) {
        // A status has all that it needs, or is none.
        let status = VolumeStatus { conditions, ..VolumeStatus::default() };
        let mut status = serde_json::to_value(status).ok()?;
        leave_out_empty(&mut status);
        return Some(status);
    }
    let mut change = json!({ "conditions": conditions });
    leave_out_empty(&mut change);
    Some(change)
}

/// Makes a new object: its spec, and the labels and finalizers that find and keep it.
pub fn new(object: &Object, spec: Value, namespace: &str) -> DynamicObject {
    let kind = object.kind();
    let resource: ApiResource = resource(kind);
    let volume = match object {
        Object::Engine(engine) => Some(&engine.spec.volume_name),
        Object::Replica(replica) => Some(&replica.spec.volume_name),
        Object::Volume(_) | Object::Node(_) => None,
    };
    DynamicObject {
        types: Some(TypeMeta { api_version: resource.api_version, kind: resource.kind }),
        metadata: ObjectMeta {
            name: Some(object.metadata().name.clone()),
            namespace: Some(namespace.to_owned()),
            finalizers: has_data(kind).then(|| vec![FINALIZER.to_owned()]),
            labels: volume.map(|volume| [(VOLUME_LABEL.to_owned(), volume.to_string())].into()),
            ..ObjectMeta::default()
        },
        data: json!({ "spec": spec }),
    }
}

/// Returns the JSON merge patch (RFC 7386) from `old` to `new`; none if they are equal. No field of
/// Shorthorn's objects is null.
pub fn merge_patch(old: &Value, new: &Value) -> Option<Value> {
    let (Value::Object(before), Value::Object(after)) = (old, new) else {
        return (old != new).then(|| new.clone());
    };
    let mut patch = Map::new();
    for (name, value) in after {
        match before.get(name) {
            None => drop(patch.insert(name.clone(), value.clone())),
            Some(old) => drop(merge_patch(old, value).map(|change| patch.insert(name.clone(), change))),
        }
    }
    for name in before.keys().filter(|name| !after.contains_key(*name)) {
        patch.insert(name.clone(), Value::Null);
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

/// Returns the patch like [`merge_patch`], with all of `new` in it. The stored object may lack defaults, and
/// a status must not be stored incomplete.
pub fn whole_patch(old: &Value, new: &Value) -> Option<Value> {
    (old != new).then(|| with_removals(old, new))
}

fn with_removals(old: &Value, new: &Value) -> Value {
    let (Value::Object(before), Value::Object(after)) = (old, new) else { return new.clone() };
    let kept = after.iter().map(|(name, value)| {
        let old = before.get(name).unwrap_or(&Value::Null);
        (name.clone(), with_removals(old, value))
    });
    let removed = before.keys().filter(|name| !after.contains_key(*name));
    Value::Object(kept.chain(removed.map(|name| (name.clone(), Value::Null))).collect())
}

#[cfg(test)]
mod tests;
