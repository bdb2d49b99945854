//! The block devices of Shorthorn on this node.

use std::fs;
use std::path::Path;

use shorthorn_api::v1;
use shorthorn_frontend::FrontendError;
use shorthorn_frontend::node::{self, DeviceNode, DeviceNumber};
use shorthorn_linux::block_device;
use shorthorn_types::status::DeviceState;

use crate::serve::error::NodeError;

/// Returns all of them. `has_engine` is true for a volume whose engine runs.
///
/// # Errors
/// The error of the file system.
pub fn list(device_dir: &Path, has_engine: impl Fn(&str) -> bool) -> Result<Vec<v1::Device>, NodeError> {
    let nodes = node::scan(device_dir).map_err(|error| NodeError::Unavailable(error.to_string()))?;
    Ok(nodes.iter().map(|node| show(device_dir, node, has_engine(node.volume.as_str()))).collect())
}

fn show(device_dir: &Path, node: &DeviceNode, has_engine: bool) -> v1::Device {
    let state = match (node.live, has_engine) {
        (false, _) => DeviceState::Stale,
        (true, true) => DeviceState::Live,
        (true, false) => DeviceState::Recovering,
    };
    v1::Device {
        volume: node.volume.to_string(),
        path: device_dir.join(node.volume.as_str()).display().to_string(),
        kernel_path: kernel_path(node.device).unwrap_or_default(),
        major: node.device.major,
        minor: node.device.minor,
        size_bytes: block_device::size_by_number(node.device).ok().flatten().unwrap_or_default(),
        ..v1::Device::default()
    }
    .with_state(state)
}

fn kernel_path(device: DeviceNumber) -> Option<String> {
    let folder = fs::canonicalize(format!("/sys/dev/block/{device}")).ok()?;
    Some(format!("/dev/{}", folder.file_name()?.to_str()?))
}

/// Removes the nodes of devices that do not exist any more, after a host or an engine was killed.
pub fn remove_stale(device_dir: &Path) {
    let remove = |node: &DeviceNode| node::remove(device_dir, &node.volume, node.device);
    let report = |node: &DeviceNode, removed: Result<(), FrontendError>| match removed {
        Ok(()) => {
            tracing::info!(volume = %node.volume, device = %node.device, "removed a node without a device")
        }
        Err(error) => tracing::warn!(volume = %node.volume, "{error}"),
    };
    match node::scan(device_dir) {
        Ok(nodes) => nodes.iter().filter(|node| !node.live).for_each(|node| report(node, remove(node))),
        Err(error) => tracing::warn!("{error}"),
    }
}
