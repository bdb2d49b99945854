//! Reads the relevant fields of Kubernetes objects.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Node as KubeNode, PersistentVolume, Pod as KubePod, Volume};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt;
use shorthorn_controller_core::lost_node_pods::{AttachedVolume, MachineState, Namespaced, Pod, PodOwner};
use shorthorn_csi::DRIVER_NAME;

use crate::kubernetes::discover::is_ready;

/// The annotation of an object that only shows a pod that a kubelet has from a file.
const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";
/// The prefix of the name of an attached disk whose driver makes attachments.
const CSI_PREFIX: &str = "kubernetes.io/csi/";

/// The claim of a volume.
#[derive(Clone, Debug)]
pub(super) struct Claimed {
    claim: Namespaced,
    /// The name that its driver has for it; none: it is not one of CSI.
    handle: Option<String>,
}

pub(super) fn machine(node: &KubeNode, is_reachable: bool) -> MachineState {
    let mut attached = node.status.iter().flat_map(|status| status.volumes_attached.iter().flatten());
    MachineState {
        is_ready: is_ready(node),
        is_reachable,
        has_nameless_disks: attached.any(|disk| !disk.name.starts_with(CSI_PREFIX)),
    }
}

/// Parses a pod; none for an object without an identity, which no API server gives.
pub(in crate::kubernetes) fn pod(pod: &KubePod) -> Option<Pod> {
    let (metadata, status) = (&pod.metadata, pod.status.as_ref());
    let name = Namespaced { namespace: metadata.namespace.clone()?, name: metadata.name.clone()? };
    let volumes = || pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let phase = status.and_then(|status| status.phase.as_deref());
    Some(Pod {
        uid: metadata.uid.clone()?,
        gone_by: metadata.deletion_timestamp.as_ref().map(|time| time.0),
        is_ended_by_force: metadata.deletion_grace_period_seconds == Some(0),
        finalizers: metadata.finalizers.clone().unwrap_or_default(),
        owner: owner(pod),
        has_controller: pod.owner_references().iter().any(|owner| owner.controller == Some(true)),
        has_ended: matches!(phase, Some("Succeeded" | "Failed")),
        claims: volumes().filter_map(|volume| claim(&name.name, volume)).collect::<BTreeSet<_>>(),
        has_inline_disk: volumes().any(is_disk),
        name,
    })
}

fn owner(pod: &KubePod) -> PodOwner {
    if pod.annotations().contains_key(MIRROR_ANNOTATION) {
        return PodOwner::Kubelet;
    }
    let is = |kind: &str| pod.owner_references().iter().any(|owner| owner.kind == kind);
    if is("DaemonSet") {
        PodOwner::DaemonSet
    } else if is("Node") {
        PodOwner::Kubelet
    } else {
        PodOwner::Any
    }
}

fn claim(pod: &str, volume: &Volume) -> Option<String> {
    match (&volume.persistent_volume_claim, &volume.ephemeral) {
        (Some(claim), _) => Some(claim.claim_name.clone()),
        // Made for this pod, under this name.
        (None, Some(_)) => Some(format!("{pod}-{}", volume.name)),
        (None, None) => None,
    }
}

/// Returns true if it is a disk that Kubernetes itself attaches.
fn is_disk(volume: &Volume) -> bool {
    volume.aws_elastic_block_store.is_some()
        || volume.azure_disk.is_some()
        || volume.cinder.is_some()
        || volume.fc.is_some()
        || volume.flex_volume.is_some()
        || volume.gce_persistent_disk.is_some()
        || volume.iscsi.is_some()
        || volume.photon_persistent_disk.is_some()
        || volume.portworx_volume.is_some()
        || volume.rbd.is_some()
        || volume.scale_io.is_some()
        || volume.storageos.is_some()
        || volume.vsphere_volume.is_some()
}

/// Returns the name of the PersistentVolume that is attached.
pub(super) fn volume_name(attachment: &VolumeAttachment) -> Option<&str> {
    attachment.spec.source.persistent_volume_name.as_deref()
}

pub(super) fn claimed(volume: &PersistentVolume) -> Option<Claimed> {
    let spec = volume.spec.as_ref()?;
    let claim = spec.claim_ref.as_ref()?;
    let handle = spec.csi.as_ref().map(|csi| csi.volume_handle.clone());
    let claim = Namespaced { namespace: claim.namespace.clone()?, name: claim.name.clone()? };
    Some(Claimed { claim, handle })
}

pub(super) fn attachment(
    attachment: &VolumeAttachment,
    claimed: &BTreeMap<String, Claimed>,
) -> AttachedVolume {
    let claimed = volume_name(attachment).and_then(|volume| claimed.get(volume));
    AttachedVolume {
        name: attachment.name_any(),
        uid: attachment.metadata.uid.clone().unwrap_or_default(),
        driver: attachment.spec.attacher.clone(),
        is_ours: attachment.spec.attacher == DRIVER_NAME,
        claim: claimed.map(|claimed| claimed.claim.clone()),
        handle: claimed.and_then(|claimed| claimed.handle.clone()),
        is_deleting: attachment.metadata.deletion_timestamp.is_some(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(spec: Value, metadata: Value) -> Pod {
        let mut object = json!({ "metadata": { "namespace": "n", "name": "p", "uid": "u" }, "spec": spec });
        if let (Some(all), Value::Object(more)) = (object["metadata"].as_object_mut(), metadata) {
            all.extend(more);
        }
        pod(&serde_json::from_value(object).unwrap()).unwrap()
    }

    fn with(volumes: Value) -> Pod {
        read(json!({ "containers": [], "volumes": volumes }), json!({}))
    }

    #[test]
    fn claims_are_those_that_are_named_and_those_made_for_the_pod() {
        let volumes = json!([
            { "name": "a", "persistentVolumeClaim": { "claimName": "data" } },
            { "name": "b", "ephemeral": { "volumeClaimTemplate": { "spec": {} } } },
            { "name": "c", "emptyDir": {} },
            { "name": "d", "nfs": { "server": "s", "path": "/" } },
        ]);
        let found = with(volumes);
        assert_eq!(found.claims.iter().map(String::as_str).collect::<Vec<_>>(), ["data", "p-b"]);
        assert!(!found.has_inline_disk);
        let disk = json!([{ "name": "a", "iscsi": { "targetPortal": "t", "iqn": "i", "lun": 0 } }]);
        assert!(with(disk).has_inline_disk);
    }

    #[test]
    fn owner_and_progress_of_the_deletion_of_a_pod_are_read() {
        let of = |metadata: Value| read(json!({ "containers": [] }), metadata);
        let owned_by = |kind: &str, controls: bool| {
            let owner =
                json!({ "apiVersion": "v1", "kind": kind, "name": "o", "uid": "x", "controller": controls });
            of(json!({ "ownerReferences": [owner] }))
        };
        let owned = |kind: &str| owned_by(kind, true).owner;
        assert!(owned_by("ReplicaSet", true).has_controller);
        assert!(!owned_by("ConfigMap", false).has_controller && !of(json!({})).has_controller);
        assert_eq!(owned("StatefulSet"), PodOwner::Any);
        assert_eq!(owned("DaemonSet"), PodOwner::DaemonSet);
        assert_eq!(owned("Node"), PodOwner::Kubelet);
        assert_eq!(of(json!({ "annotations": { MIRROR_ANNOTATION: "h" } })).owner, PodOwner::Kubelet);
        let living = of(json!({}));
        assert!(living.gone_by.is_none() && !living.is_ended_by_force && !living.has_ended);
        let ended = of(json!({
            "deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 0,
            "finalizers": ["f"] }));
        assert_eq!(ended.gone_by.map(|time| time.as_second()), Some(1_767_225_600));
        assert!(ended.is_ended_by_force && ended.finalizers == ["f"]);
    }

    #[test]
    fn disks_without_attachments_are_those_of_kubernetes_itself() {
        let of = |disks: Value| {
            let node = json!({ "metadata": { "name": "a" }, "status": { "volumesAttached": disks } });
            machine(&serde_json::from_value(node).unwrap(), false).has_nameless_disks
        };
        assert!(!of(json!([])));
        assert!(!of(json!([{ "name": "kubernetes.io/csi/csi.shorthorn.io^v", "devicePath": "" }])));
        assert!(of(json!([{ "name": "kubernetes.io/iscsi/t:i:0", "devicePath": "" }])));
    }
}
