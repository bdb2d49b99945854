//! State of a volume in the kernel.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use shorthorn_csi::CsiError;
use shorthorn_linux::block_device::size_by_number;
use shorthorn_linux::mounts::{Mount, MountTable};
use shorthorn_types::DeviceNumber;

use crate::command::Tool;
use crate::device;
use crate::node::NodeOptions;
use crate::volumes::{NodeVolume, VolumeDevice, VolumeHealth};

/// The time limit of blockdev. Opening a device may wait for a first read, and a degraded volume holds that
/// up for seconds.
const BLOCKDEV_LIMIT: Duration = Duration::from_secs(60);

/// Returns the device of a volume if it is usable and the expected one.
pub(super) fn device(volume: &NodeVolume) -> Result<&VolumeDevice, CsiError> {
    if let VolumeHealth::Frozen(why) = &volume.condition {
        // Any access to the device would hang now.
        return Err(CsiError::Unavailable(format!("the volume is frozen: {why}")));
    }
    let device = volume.device.as_ref();
    let device =
        device.ok_or_else(|| CsiError::Unavailable("the volume has no device at this moment".into()))?;
    let path = device.path.display();
    let number = device::number_at(&device.path).map_err(CsiError::system(&path))?;
    if number != Some(device.number) {
        let number = number.map_or_else(|| "nowhere".into(), |number| number.to_string());
        let message = format!("{path} leads to {number}, and the volume is device {}", device.number);
        return Err(CsiError::Unavailable(message));
    }
    let size_bytes = size_by_number(device.number).map_err(CsiError::system(&path))?.unwrap_or_default();
    if size_bytes != device.size_bytes {
        let message = format!("{path} has {size_bytes} bytes, and the volume has {}", device.size_bytes);
        return Err(CsiError::Unavailable(message));
    }
    Ok(device)
}

/// Returns true if the node of the device itself is mounted at `point`.
pub(super) fn is_node_at(point: &Path, number: DeviceNumber) -> bool {
    device::number_at(point).is_ok_and(|found| found == Some(number))
}

/// Returns the places at which the file system on the device is mounted as a whole.
pub(super) fn mounted(table: &MountTable, device: &VolumeDevice) -> Vec<PathBuf> {
    table.iter().filter(|mount| mount.is_whole(device.number)).map(|mount| mount.point.clone()).collect()
}

/// Returns the places at which the node of the device is mounted on a file.
pub(super) fn nodes(table: &MountTable, device: &VolumeDevice) -> Vec<PathBuf> {
    let Ok(meta) = fs::symlink_metadata(&device.path) else { return Vec::new() };
    let node_fs = DeviceNumber::of(meta.dev());
    // Mounts of other file systems are not queried: a hanging one must not hang the driver.
    let candidates = table.iter().filter(|mount| mount.device == node_fs && mount.root != Path::new("/"));
    let points = candidates.map(|mount| &mount.point);
    points.filter(|point| is_node_at(point, device.number)).cloned().collect()
}

/// Returns the `places` that the caller at `own` must have made too. Mounts of an administrator, and copies
/// made by mount propagation, do not count.
pub(super) fn of_caller(options: &NodeOptions, places: Vec<PathBuf>, own: &[&Path]) -> Vec<PathBuf> {
    let root = own.first().and_then(|own| options.roots.iter().find(|root| own.starts_with(root)));
    let mut places = places;
    places.retain(|place| !own.contains(&place.as_path()) && root.is_none_or(|root| place.starts_with(root)));
    places
}

/// Returns true if `point` is in a directory of the caller.
pub(super) fn is_callers(options: &NodeOptions, point: &Path) -> bool {
    options.roots.iter().any(|root| point.starts_with(root) && point != root)
}

/// Returns true if a mount is the remains of a removed device.
pub(super) fn is_stale(mount: &Mount) -> bool {
    match device::number_at(&mount.point) {
        Ok(Some(node)) => !device::is_live(node),
        _ => mount.device.major != 0 && !device::is_live(mount.device),
    }
}

/// Returns the reason why a mounted file system is not usable as requested.
pub(super) fn trouble(mount: &Mount) -> Option<String> {
    if let Some(trouble) = mount.trouble() {
        return Some(trouble.to_owned());
    }
    // xfs says in no option that it has shut itself down.
    match fs::metadata(&mount.point) {
        Err(error) if error.raw_os_error() == Some(libc::EIO) => {
            Some("the file system has shut itself down after an error".into())
        }
        _ => None,
    }
}

/// Has the kernel refuse writes to the device, or no longer.
pub(super) fn set_read_only(device: &VolumeDevice, read_only: bool) -> Result<(), CsiError> {
    let option = if read_only { "--setro" } else { "--setrw" };
    Ok(Tool::new("blockdev", BLOCKDEV_LIMIT).arg(option).arg(&device.path).succeed().map(drop)?)
}

/// Returns whether the kernel refuses writes to the device.
pub(super) fn is_read_only(device: &VolumeDevice) -> Result<bool, CsiError> {
    device::is_read_only(device.number).map_err(CsiError::system(device.path.display()))
}

/// Paths as a message shows them.
pub(super) fn show(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}
