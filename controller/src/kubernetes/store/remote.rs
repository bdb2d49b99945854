//! The objects on the API server: reads and conditional writes of one namespace.

use std::collections::BTreeMap;

use kube::Client;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions};
use serde_json::{Value, json};
use shorthorn_controller_core::objects::{Key, Kind};
use shorthorn_kube::{CallError, bounded};

use shorthorn_kube::{FIELD_MANAGER, resource};

/// The namespace of the objects on the API server.
pub(super) struct Remote {
    client: Client,
    namespace: String,
}

/// The part of an object to change.
#[derive(Debug)]
pub(super) enum Part {
    Spec(Value),
    Status(Value),
    /// The finalizers with ours, and the annotations of a volume that its fields do not keep.
    Held {
        finalizers: Vec<String>,
        annotations: Option<BTreeMap<String, String>>,
    },
    Finalizers(Vec<String>),
}

impl Remote {
    pub(super) fn new(client: Client, namespace: &str) -> Remote {
        Remote { client, namespace: namespace.to_owned() }
    }

    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }

    pub(super) fn api(&self, kind: Kind) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, &resource(kind))
    }

    pub(super) async fn send(&self, key: &Key, version: u64, part: Part) -> Result<DynamicObject, CallError> {
        let (api, parameters) =
            (self.api(key.kind), PatchParams { field_manager: manager(), ..PatchParams::default() });
        let metadata = json!({ "resourceVersion": version.to_string() });
        match part {
            Part::Spec(change) => {
                let body = json!({ "metadata": metadata, "spec": change });
                bounded(api.patch(&key.name, &parameters, &Patch::Merge(body))).await
            }
            Part::Status(change) => {
                let body = json!({ "metadata": metadata, "status": change });
                bounded(api.patch_status(&key.name, &parameters, &Patch::Merge(body))).await
            }
            Part::Held { finalizers, annotations } => {
                let mut metadata =
                    json!({ "resourceVersion": version.to_string(), "finalizers": finalizers });
                if let Some(annotations) = annotations {
                    metadata["annotations"] = json!(annotations);
                }
                let body = json!({ "metadata": metadata });
                bounded(api.patch(&key.name, &parameters, &Patch::Merge(body))).await
            }
            Part::Finalizers(finalizers) => {
                let metadata = json!({ "resourceVersion": version.to_string(), "finalizers": finalizers });
                let body = json!({ "metadata": metadata });
                bounded(api.patch(&key.name, &parameters, &Patch::Merge(body))).await
            }
        }
    }

    /// Deletes the object if it still has this version; returns the rest of it while finalizers hold it.
    pub(super) async fn delete(&self, key: &Key, version: u64) -> Result<Option<DynamicObject>, CallError> {
        let precondition = Preconditions { resource_version: Some(version.to_string()), uid: None };
        let parameters = DeleteParams::background().preconditions(precondition);
        let left = bounded(self.api(key.kind).delete(&key.name, &parameters)).await?.left();
        Ok(left.filter(|left| left.metadata.deletion_timestamp.is_some()))
    }

    /// Makes an object, without its status; with `dry_run` only answers how it would be.
    pub(super) async fn create(
        &self,
        kind: Kind,
        new: &DynamicObject,
        dry_run: bool,
    ) -> Result<DynamicObject, CallError> {
        let parameters = PostParams { field_manager: manager(), dry_run };
        bounded(self.api(kind).create(&parameters, new)).await
    }
}

fn manager() -> Option<String> {
    Some(FIELD_MANAGER.to_owned())
}
