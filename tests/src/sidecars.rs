//! Small stand-ins for the sidecars beside the controller. They make the calls of external-provisioner,
//! external-attacher and external-resizer with the same arguments, and write the same to the API server. Each
//! method does the work of a sidecar on one object, again and again until it is done.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::controller_client::ControllerClient;
use shorthorn_csi::DRIVER_NAME;

use crate::apiserver::ApiServer;
use crate::claims::{
    Persistent, attachment_path, bytes, claim_path, node_id, read_write_once, set_finalizer, strings, text,
    volume_path,
};
use crate::{Caller, until};

/// The time limit of a call, the default of the sidecars.
const CALL_LIMIT: Duration = Duration::from_secs(15);
/// The time limit for all work on one object. A controller may have to wait for the lease of a killed one.
const LIMIT: Duration = Duration::from_secs(120);
const PROVISIONER_FINALIZER: &str = "external-provisioner.volume.kubernetes.io/finalizer";
const ATTACHER_FINALIZER: &str = "external-attacher/csi-shorthorn-io";
const FS_TYPE: &str = "ext4";

/// The sidecars of one controller.
#[derive(Debug)]
pub struct Sidecars<'a> {
    api: &'a ApiServer,
    csi: Caller,
}

impl<'a> Sidecars<'a> {
    /// Returns the sidecars beside the controller with that CSI socket.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn new(api: &'a ApiServer, socket: &Path) -> Result<Sidecars<'a>> {
        Ok(Sidecars { api, csi: Caller::unix(socket)? })
    }

    /// Repeats an action that may fail while the controller is absent or busy.
    fn until_done<T>(&self, what: &str, act: impl Fn() -> Result<T>) -> Result<T> {
        until(what, LIMIT, || act().map(Some))
    }

    /// Acts as external-provisioner: makes the volume of a claim that was left to this driver, and the
    /// PersistentVolume, whose name it returns.
    ///
    /// # Errors
    /// It does not come about.
    pub fn provision(&self, claim: &str) -> Result<String> {
        let claim = until("claim that was left to the driver", LIMIT, || {
            let claim = self.api.ok("GET", &claim_path(claim), None)?;
            let annotations = &claim["metadata"]["annotations"];
            ensure!(annotations["volume.beta.kubernetes.io/storage-provisioner"] == DRIVER_NAME, "{claim:#}");
            Ok(Some(claim))
        })?;
        let class = text(&claim["spec"]["storageClassName"])?;
        let class = self.api.ok("GET", &format!("/apis/storage.k8s.io/v1/storageclasses/{class}"), None)?;
        let name = format!("pvc-{}", text(&claim["metadata"]["uid"])?);
        let request = self.create_request(&claim, &class, &name)?;
        let volume = self.until_done("volume of the claim", || {
            let made = self.csi.call(request.clone(), CALL_LIMIT, async |channel, request| {
                ControllerClient::new(channel).create_volume(request).await
            });
            made?.volume.context("an answer without a volume")
        })?;
        let volume = persistent_volume(&claim, &class, &name, &volume);
        self.until_done("PersistentVolume", || {
            let answer = self.api.call("POST", "/api/v1/persistentvolumes", Some(&volume))?;
            ensure!([201, 409].contains(&answer.code), "{:#}", answer.body);
            Ok(())
        })?;
        Ok(name)
    }

    fn create_request(&self, claim: &Value, class: &Value, name: &str) -> Result<v1::CreateVolumeRequest> {
        let required_bytes = bytes(&claim["spec"]["resources"]["requests"]["storage"])?;
        let selected = text(&claim["metadata"]["annotations"]["volume.kubernetes.io/selected-node"])?;
        Ok(v1::CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(v1::CapacityRange { required_bytes, limit_bytes: 0 }),
            volume_capabilities: vec![read_write_once(FS_TYPE)],
            parameters: strings(&class["parameters"]),
            accessibility_requirements: Some(self.requirements(&selected)?),
            ..v1::CreateVolumeRequest::default()
        })
    }

    /// Returns all nodes that have the driver, with the scheduler's choice first.
    fn requirements(&self, selected: &str) -> Result<v1::TopologyRequirement> {
        let list = self.api.ok("GET", "/apis/storage.k8s.io/v1/csinodes", None)?;
        let mut requisite = Vec::new();
        let mut first = 0;
        for csi_node in list["items"].as_array().context("no list")? {
            let drivers = csi_node["spec"]["drivers"].as_array().cloned().unwrap_or_default();
            let Some(driver) = drivers.iter().find(|driver| driver["name"] == DRIVER_NAME) else { continue };
            let name = text(&csi_node["metadata"]["name"])?;
            let labels =
                strings(&self.api.ok("GET", &format!("/api/v1/nodes/{name}"), None)?["metadata"]["labels"]);
            let keys = driver["topologyKeys"].as_array().cloned().unwrap_or_default();
            let segments = keys.iter().filter_map(|key| {
                let key = key.as_str()?;
                Some((key.to_owned(), labels.get(key)?.clone()))
            });
            if name == selected {
                first = requisite.len();
            }
            requisite.push(v1::Topology { segments: segments.collect() });
        }
        let mut preferred = requisite.clone();
        preferred.rotate_left(first);
        Ok(v1::TopologyRequirement { requisite, preferred })
    }

    /// Acts as external-provisioner: deletes a volume whose claim is gone, and the PersistentVolume.
    ///
    /// # Errors
    /// It stays.
    pub fn delete(&self, volume: &str) -> Result<()> {
        let path = volume_path(volume);
        until("volume that is released", LIMIT, || {
            let found = self.api.ok("GET", &path, None)?;
            ensure!(found["status"]["phase"] == "Released", "{found:#}");
            Ok(Some(()))
        })?;
        let volume_id = Persistent::read(self.api, volume)?.handle;
        self.until_done("deletion of the volume", || {
            let request = v1::DeleteVolumeRequest { volume_id: volume_id.clone(), ..Default::default() };
            self.csi.call(request, CALL_LIMIT, async |channel, request| {
                ControllerClient::new(channel).delete_volume(request).await
            })
        })?;
        self.api.ok("DELETE", &path, None)?;
        // The attacher removes its finalizer from a volume without an attachment.
        for finalizer in [PROVISIONER_FINALIZER, ATTACHER_FINALIZER] {
            self.until_done("PersistentVolume without a finalizer", || match self.api.find(&path)? {
                Some(_) => set_finalizer(self.api, &path, finalizer, false),
                None => Ok(()),
            })?;
        }
        until("end of the PersistentVolume", LIMIT, || Ok(self.api.find(&path)?.is_none().then_some(())))
    }

    /// Acts as external-attacher: attaches a volume to the node of an attachment.
    ///
    /// # Errors
    /// It does not come there.
    pub fn attach(&self, attachment: &Value) -> Result<()> {
        let path = attachment_path(&text(&attachment["metadata"]["name"])?);
        let volume =
            Persistent::read(self.api, &text(&attachment["spec"]["source"]["persistentVolumeName"])?)?;
        for path in [&path, &volume_path(&volume.name)] {
            self.until_done("finalizer", || set_finalizer(self.api, path, ATTACHER_FINALIZER, true))?;
        }
        let request = v1::ControllerPublishVolumeRequest {
            volume_id: volume.handle.clone(),
            node_id: node_id(self.api, &text(&attachment["spec"]["nodeName"])?)?,
            volume_capability: Some(volume.capability()),
            volume_context: volume.context(),
            ..v1::ControllerPublishVolumeRequest::default()
        };
        let answer = self.until_done("volume that is published", || {
            self.csi.call(request.clone(), CALL_LIMIT, async |channel, request| {
                ControllerClient::new(channel).controller_publish_volume(request).await
            })
        })?;
        let status = json!({ "status": { "attached": true, "attachmentMetadata": answer.publish_context } });
        self.api.ok("PATCH", &format!("{path}/status"), Some(&status)).map(drop)
    }

    /// Acts as external-attacher: detaches a volume from the node of an attachment that is being deleted.
    ///
    /// # Errors
    /// It stays there.
    pub fn detach(&self, attachment: &Value) -> Result<()> {
        let path = attachment_path(&text(&attachment["metadata"]["name"])?);
        until("attachment that is being deleted", LIMIT, || {
            let found = self.api.ok("GET", &path, None)?;
            ensure!(found["metadata"]["deletionTimestamp"].is_string(), "{found:#}");
            Ok(Some(()))
        })?;
        let volume =
            Persistent::read(self.api, &text(&attachment["spec"]["source"]["persistentVolumeName"])?)?;
        let request = v1::ControllerUnpublishVolumeRequest {
            volume_id: volume.handle,
            node_id: node_id(self.api, &text(&attachment["spec"]["nodeName"])?)?,
            ..v1::ControllerUnpublishVolumeRequest::default()
        };
        self.until_done("volume that is away", || {
            self.csi.call(request.clone(), CALL_LIMIT, async |channel, request| {
                ControllerClient::new(channel).controller_unpublish_volume(request).await
            })
        })?;
        let status = json!({ "status": { "attached": false } });
        self.api.ok("PATCH", &format!("{path}/status"), Some(&status))?;
        self.until_done("attachment without a finalizer", || {
            set_finalizer(self.api, &path, ATTACHER_FINALIZER, false)
        })
    }

    /// Makes one attempt of external-resizer to enlarge a volume to the size of its claim. The node's part is
    /// recorded at the claim.
    ///
    /// # Errors
    /// The driver refuses it, or has not done it within `limit`.
    pub fn try_resize(&self, claim: &str, limit: Duration) -> Result<()> {
        let path = claim_path(claim);
        let claim = self.api.ok("GET", &path, None)?;
        let volume = Persistent::read(self.api, &text(&claim["spec"]["volumeName"])?)?;
        let required_bytes = bytes(&claim["spec"]["resources"]["requests"]["storage"])?;
        let record = |kind: &str| {
            let conditions = json!([{ "type": kind, "status": "True", "lastTransitionTime": null }]);
            let status = json!({ "status": { "conditions": conditions } });
            self.api.ok("PATCH", &format!("{path}/status"), Some(&status)).map(drop)
        };
        record("Resizing")?;
        let request = v1::ControllerExpandVolumeRequest {
            volume_id: volume.handle.clone(),
            capacity_range: Some(v1::CapacityRange { required_bytes, limit_bytes: 0 }),
            volume_capability: Some(volume.capability()),
            ..v1::ControllerExpandVolumeRequest::default()
        };
        let answer = self.csi.call(request, limit, async |channel, request| {
            ControllerClient::new(channel).controller_expand_volume(request).await
        })?;
        ensure!(answer.node_expansion_required, "a file system grows on its node");
        let size = json!({ "spec": { "capacity": { "storage": answer.capacity_bytes.to_string() } } });
        self.api.ok("PATCH", &volume_path(&volume.name), Some(&size))?;
        record("FileSystemResizePending")
    }

    /// Acts as external-resizer, until it is done.
    ///
    /// # Errors
    /// It never is.
    pub fn resize(&self, claim: &str) -> Result<()> {
        self.until_done("larger volume", || self.try_resize(claim, CALL_LIMIT))
    }

    /// Returns the nodes of a volume according to the driver, as external-attacher asks now and then.
    ///
    /// # Errors
    /// It says nothing of it.
    pub fn published_on(&self, handle: &str) -> Result<Vec<String>> {
        let request = v1::ListVolumesRequest::default();
        let list = self.csi.call(request, CALL_LIMIT, async |channel, request| {
            ControllerClient::new(channel).list_volumes(request).await
        })?;
        let is_meant = |entry: &v1::list_volumes_response::Entry| {
            entry.volume.as_ref().is_some_and(|volume| volume.volume_id == handle)
        };
        let found = list.entries.into_iter().find(is_meant).context("the volume is not listed")?;
        Ok(found.status.context("an entry without a status")?.published_node_ids)
    }
}

fn persistent_volume(claim: &Value, class: &Value, name: &str, volume: &v1::Volume) -> Value {
    let mut attributes = json!(volume.volume_context);
    attributes["storage.kubernetes.io/csiProvisionerIdentity"] = format!("1-1-{DRIVER_NAME}").into();
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": name,
            "annotations": { "pv.kubernetes.io/provisioned-by": DRIVER_NAME },
            "finalizers": [PROVISIONER_FINALIZER],
        },
        "spec": {
            "accessModes": claim["spec"]["accessModes"],
            "capacity": { "storage": volume.capacity_bytes.to_string() },
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": "default",
                "name": claim["metadata"]["name"],
                "uid": claim["metadata"]["uid"],
                "resourceVersion": claim["metadata"]["resourceVersion"],
            },
            "csi": {
                "driver": DRIVER_NAME,
                "fsType": FS_TYPE,
                "volumeHandle": volume.volume_id,
                "volumeAttributes": attributes,
            },
            "persistentVolumeReclaimPolicy": class["reclaimPolicy"],
            "storageClassName": class["metadata"]["name"],
            "volumeMode": "Filesystem",
        },
    })
}
