//! Collects the data of Kubernetes: objects, events, and the logs of Shorthorn's pods. Secrets and ConfigMaps
//! are never read.

use std::fs::File;
use std::io;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, DynamicObject, ListParams, LogParams};
use kube::{Api, ResourceExt};
use serde_json::Value;
use shorthorn_csi::DRIVER_NAME;
use shorthorn_kube::{KINDS, kind_name, plural, resource};

use super::archive::Archive;
use crate::reach::ClusterAccess;

/// The most objects of a kind.
const OBJECTS_MAX: usize = 100_000;
const PAGE: u32 = 500;
/// The longest that a page, or a log, may take. An API server under load answers after seconds, and a bundle
/// continues without a part.
const CALL_LIMIT: Duration = Duration::from_secs(30);
/// The most of one log.
const LOG_MAX_BYTES: i64 = 32 << 20;

/// Objects of Kubernetes that matter: group, version, kind, plural, whether they are in our namespace.
const OTHERS: [(&str, &str, &str, &str, bool); 11] = [
    ("", "v1", "Pod", "pods", true),
    ("apps", "v1", "Deployment", "deployments", true),
    ("coordination.k8s.io", "v1", "Lease", "leases", true),
    ("events.k8s.io", "v1", "Event", "events", true),
    ("", "v1", "Node", "nodes", false),
    ("", "v1", "PersistentVolume", "persistentvolumes", false),
    ("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims", false),
    ("storage.k8s.io", "v1", "StorageClass", "storageclasses", false),
    ("storage.k8s.io", "v1", "CSINode", "csinodes", false),
    ("storage.k8s.io", "v1", "CSIDriver", "csidrivers", false),
    ("storage.k8s.io", "v1", "VolumeAttachment", "volumeattachments", false),
];

pub(super) async fn gather(
    archive: &mut Archive<File>,
    cluster: &ClusterAccess,
    log_lines: u32,
) -> io::Result<()> {
    for kind in KINDS {
        let name = format!("kubernetes/shorthorn-{}.json", plural(kind));
        add(archive, cluster, &resource(kind), true, &name).await?;
    }
    for (group, version, kind, plural, is_ours) in OTHERS {
        let api_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
        let resource = ApiResource {
            group: group.to_owned(),
            version: version.to_owned(),
            api_version,
            kind: kind.to_owned(),
            plural: plural.to_owned(),
        };
        add(archive, cluster, &resource, is_ours, &format!("kubernetes/{plural}.json")).await?;
    }
    let kinds: Vec<&str> = KINDS.into_iter().map(kind_name).collect();
    archive.add_json("kubernetes/kinds.json", Value::from(kinds))?;
    if log_lines > 0 { logs(archive, cluster, log_lines).await } else { Ok(()) }
}

async fn add(
    archive: &mut Archive<File>,
    cluster: &ClusterAccess,
    resource: &ApiResource,
    is_ours: bool,
    name: &str,
) -> io::Result<()> {
    let client = cluster.client.clone();
    let api: Api<DynamicObject> = if is_ours {
        Api::namespaced_with(client, &cluster.namespace, resource)
    } else {
        Api::all_with(client, resource)
    };
    let mut found = Vec::new();
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let list = match tokio::time::timeout(CALL_LIMIT, api.list(&page)).await {
            Ok(Ok(list)) => list,
            Ok(Err(error)) => {
                archive.add_missing(name, &error.to_string());
                break;
            }
            Err(_) => {
                archive.add_missing(name, "the API server has not answered in time");
                break;
            }
        };
        let objects = list.items.into_iter().filter(|object| is_wanted(&resource.kind, object));
        found.extend(objects.filter_map(|object| serde_json::to_value(object).ok()).map(without_managers));
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(_) if found.len() >= OBJECTS_MAX => {
                archive.add_missing(name, &format!("the list has more than {OBJECTS_MAX} objects"));
                break;
            }
            Some(token) => page = ListParams::default().limit(PAGE).continue_token(&token),
            None => break,
        }
    }
    archive.add_json(name, Value::Array(found))
}

/// Returns true if an object is related to Shorthorn. Objects of other drivers are left out.
fn is_wanted(kind: &str, object: &DynamicObject) -> bool {
    let spec = &object.data["spec"];
    match kind {
        "PersistentVolume" => spec["csi"]["driver"] == DRIVER_NAME,
        "PersistentVolumeClaim" => {
            let annotations = object.annotations();
            let provisioner = annotations.get("volume.kubernetes.io/storage-provisioner");
            provisioner.is_some_and(|provisioner| provisioner == DRIVER_NAME)
        }
        "StorageClass" => object.data["provisioner"] == DRIVER_NAME,
        "CSIDriver" => object.name_any() == DRIVER_NAME,
        "VolumeAttachment" => spec["attacher"] == DRIVER_NAME,
        _ => true,
    }
}

fn without_managers(mut object: Value) -> Value {
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove("managedFields");
    }
    object
}

async fn logs(archive: &mut Archive<File>, cluster: &ClusterAccess, lines: u32) -> io::Result<()> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let list = match tokio::time::timeout(CALL_LIMIT, pods.list(&ListParams::default().limit(PAGE))).await {
        Ok(Ok(list)) => list.items,
        Ok(Err(error)) => {
            archive.add_missing("logs", &error.to_string());
            return Ok(());
        }
        Err(_) => {
            archive.add_missing("logs", "the API server has not listed the pods in time");
            return Ok(());
        }
    };
    for pod in list {
        let name = pod.name_any();
        let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
        for container in statuses {
            for previous in
                [false, true].into_iter().filter(|previous| !previous || container.restart_count > 0)
            {
                let parameters = LogParams {
                    container: Some(container.name.clone()),
                    previous,
                    tail_lines: Some(lines.into()),
                    limit_bytes: Some(LOG_MAX_BYTES),
                    timestamps: true,
                    ..LogParams::default()
                };
                let before = if previous { ".previous" } else { "" };
                let file = format!("logs/{name}.{}{before}.log", container.name);
                match tokio::time::timeout(CALL_LIMIT, pods.logs(&name, &parameters)).await {
                    Ok(Ok(text)) => archive.add_text(&file, &text)?,
                    Ok(Err(error)) => archive.add_missing(&file, &error.to_string()),
                    Err(_) => archive.add_missing(&file, "the kubelet has not answered in time"),
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_of_others_are_left_out() {
        let object = |data: Value| serde_json::from_value::<DynamicObject>(data).unwrap();
        let volume = |driver: &str| {
            object(json!({ "metadata": { "name": "a" }, "spec": { "csi": { "driver": driver } } }))
        };
        assert!(is_wanted("PersistentVolume", &volume(DRIVER_NAME)));
        assert!(!is_wanted("PersistentVolume", &volume("csi.example.com")));
        let claim = |driver: &str| {
            let annotations = json!({ "volume.kubernetes.io/storage-provisioner": driver });
            object(json!({ "metadata": { "name": "a", "annotations": annotations }, "spec": {} }))
        };
        assert!(is_wanted("PersistentVolumeClaim", &claim(DRIVER_NAME)));
        assert!(!is_wanted("PersistentVolumeClaim", &claim("csi.example.com")));
        assert!(OTHERS.iter().all(|(_, _, kind, ..)| !["Secret", "ConfigMap"].contains(kind)));
    }
}
