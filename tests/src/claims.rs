//! The data of claims and volumes in the API server that sidecars and kubelet read.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::volume_capability::{AccessMode, AccessType, MountVolume, access_mode};
use shorthorn_csi::DRIVER_NAME;

use crate::apiserver::ApiServer;

/// The prefix of Kubernetes for the names of a driver's volumes.
const UNIQUE_PREFIX: &str = "kubernetes.io/csi/";

/// Returns the path of a claim of a user.
#[must_use]
pub fn claim_path(name: &str) -> String {
    format!("/api/v1/namespaces/default/persistentvolumeclaims/{name}")
}

/// Returns the path of a PersistentVolume.
#[must_use]
pub fn volume_path(name: &str) -> String {
    format!("/api/v1/persistentvolumes/{name}")
}

/// Returns the path of a VolumeAttachment.
#[must_use]
pub fn attachment_path(name: &str) -> String {
    format!("/apis/storage.k8s.io/v1/volumeattachments/{name}")
}

/// Returns the path of the CSINode object, which lists the drivers of a node.
#[must_use]
pub fn csi_node_path(name: &str) -> String {
    format!("/apis/storage.k8s.io/v1/csinodes/{name}")
}

/// A PersistentVolume of the driver.
#[derive(Clone, Debug)]
pub struct Persistent {
    /// The name in Kubernetes.
    pub name: String,
    /// The name in the driver.
    pub handle: String,
    fs_type: String,
    attributes: Value,
    /// The capacity in bytes.
    pub size_bytes: i64,
}

impl Persistent {
    /// Reads the one of that name.
    ///
    /// # Errors
    /// The object does not exist, or is not of this driver.
    pub fn read(api: &ApiServer, name: &str) -> Result<Persistent> {
        let volume = api.ok("GET", &volume_path(name), None)?;
        let csi = &volume["spec"]["csi"];
        anyhow::ensure!(csi["driver"] == DRIVER_NAME, "{volume:#}");
        Ok(Persistent {
            name: name.to_owned(),
            handle: text(&csi["volumeHandle"])?,
            fs_type: text(&csi["fsType"])?,
            attributes: csi["volumeAttributes"].clone(),
            size_bytes: bytes(&volume["spec"]["capacity"]["storage"])?,
        })
    }

    /// Returns the use of the volume. The driver knows the modes of single writers, so ReadWriteOnce is the
    /// one with several.
    #[must_use]
    pub fn capability(&self) -> v1::VolumeCapability {
        read_write_once(&self.fs_type)
    }

    /// Returns the context that the driver gave at the creation.
    #[must_use]
    pub fn context(&self) -> std::collections::HashMap<String, String> {
        strings(&self.attributes)
    }

    /// Returns the name on nodes.
    #[must_use]
    pub fn unique_name(&self) -> String {
        format!("{UNIQUE_PREFIX}{DRIVER_NAME}^{}", self.handle)
    }
}

/// Returns a file system for one node.
#[must_use]
pub fn read_write_once(fs_type: &str) -> v1::VolumeCapability {
    let mount = MountVolume { fs_type: fs_type.to_owned(), ..MountVolume::default() };
    v1::VolumeCapability {
        access_type: Some(AccessType::Mount(mount)),
        access_mode: Some(AccessMode { mode: access_mode::Mode::SingleNodeMultiWriter.into() }),
    }
}

/// Returns the attachment of a volume to a node, if it exists.
///
/// # Errors
/// The API server does not answer.
pub fn attachment_of(api: &ApiServer, volume: &str, node: &str) -> Result<Option<Value>> {
    let list = api.ok("GET", "/apis/storage.k8s.io/v1/volumeattachments", None)?;
    let attachments = list["items"].as_array().cloned().unwrap_or_default();
    let is_meant = |one: &Value| {
        one["spec"]["source"]["persistentVolumeName"] == volume && one["spec"]["nodeName"] == node
    };
    Ok(attachments.into_iter().find(is_meant))
}

/// Returns the driver's name of a node, as recorded by kubelet.
///
/// # Errors
/// It is not registered there.
pub fn node_id(api: &ApiServer, node: &str) -> Result<String> {
    let found = api.ok("GET", &csi_node_path(node), None)?;
    let drivers = found["spec"]["drivers"].as_array().cloned().unwrap_or_default();
    let ours = drivers.iter().find(|driver| driver["name"] == DRIVER_NAME);
    text(&ours.with_context(|| format!("the driver is not registered on {node}"))?["nodeID"])
}

/// Adds a finalizer to an object, or takes it away.
///
/// # Errors
/// The API server refuses it.
pub fn set_finalizer(api: &ApiServer, path: &str, finalizer: &str, is_there: bool) -> Result<()> {
    let object = api.ok("GET", path, None)?;
    let mut all = object["metadata"]["finalizers"].as_array().cloned().unwrap_or_default();
    if all.iter().any(|one| one == finalizer) == is_there {
        return Ok(());
    }
    all.retain(|one| one != finalizer);
    if is_there {
        all.push(finalizer.into());
    }
    // With the version that was read: another one may have replaced it by now.
    let version = &object["metadata"]["resourceVersion"];
    let patch = json!({ "metadata": { "finalizers": all, "resourceVersion": version } });
    api.ok("PATCH", path, Some(&patch)).map(drop)
}

/// Returns a value that has to be text.
///
/// # Errors
/// It is not.
pub fn text(value: &Value) -> Result<String> {
    Ok(value.as_str().with_context(|| format!("{value} is not text"))?.to_owned())
}

/// Returns a quantity as these tests write it, in bytes.
///
/// # Errors
/// It is another one.
pub fn bytes(value: &Value) -> Result<i64> {
    text(value)?.parse().with_context(|| format!("{value} is not a number of bytes"))
}

/// Returns the text pairs of an object.
#[must_use]
pub fn strings(value: &Value) -> std::collections::HashMap<String, String> {
    let pairs = value.as_object().into_iter().flatten();
    pairs.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect()
}
