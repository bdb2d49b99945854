//! The identity of a disk, which Longhorn shares: `longhorn-disk.cfg`.

use std::path::Path;
use std::{fs, io};

use serde::{Deserialize, Serialize};
use shorthorn_control::store_spec;

use crate::serve::error::NodeError;

/// Longhorn's file: which disk this is.
pub(super) const IDENTITY_FILE: &str = "longhorn-disk.cfg";

/// `longhorn-disk.cfg`, with Longhorn's keys. Keys that a later Longhorn adds are not for us.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DiskIdentity {
    #[serde(default)]
    disk_name: String,
    #[serde(rename = "diskUUID")]
    pub disk_uuid: String,
    #[serde(default)]
    disk_driver: String,
    #[serde(default)]
    state: String,
}

pub(super) fn read_identity(path: &Path) -> Result<Option<DiskIdentity>, String> {
    let file = path.join(IDENTITY_FILE);
    let bytes = match fs::read(&file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(|error| format!("{}: {error}", file.display()))?,
    };
    let identity: DiskIdentity = serde_json::from_slice(&bytes)
        .map_err(|error| format!("{} is damaged: {error}: repair or remove it", file.display()))?;
    if identity.disk_uuid.is_empty() {
        return Err(format!("{} has no diskUUID: repair or remove it", file.display()));
    }
    Ok(Some(identity))
}

/// Returns the disk's UUID; a disk without one gets one.
pub(super) fn identify(path: &Path) -> Result<String, NodeError> {
    if let Some(identity) = read_identity(path).map_err(NodeError::Precondition)? {
        return Ok(identity.disk_uuid);
    }
    let disk_uuid = draw_uuid()?;
    let identity = DiskIdentity { disk_uuid: disk_uuid.clone(), ..DiskIdentity::default() };
    store_spec(&path.join(IDENTITY_FILE), &identity)?;
    Ok(disk_uuid)
}

/// Returns a random UUID, version 4.
fn draw_uuid() -> Result<String, NodeError> {
    let text = fs::read_to_string("/proc/sys/kernel/random/uuid");
    text.map(|text| text.trim().to_owned()).map_err(NodeError::at(Path::new("/proc/sys/kernel/random/uuid")))
}
