//! Growing a file system, while it is in use, after its device has grown.

use std::num::NonZeroU64;
use std::path::Path;

use shorthorn_csi::{Capability, CsiError, FsKind, VolumeAccess};
use shorthorn_linux::mounts::MountTable;

use crate::filesystem;
use crate::mounting;
use crate::node::kernel_state;
use crate::volumes::{NodeVolume, VolumeDevice};

/// Gives the volume at `path` all of its device; how large that is.
pub(super) fn expand(
    volume: &NodeVolume,
    path: Option<&Path>,
    capability: Option<&Capability>,
    required_bytes: Option<NonZeroU64>,
) -> Result<i64, CsiError> {
    let device = kernel_state::device(volume)?;
    let elsewhere = || CsiError::NotFound("the volume is not at volume_path".into());
    let point = mounting::resolve(path.ok_or_else(elsewhere)?)?.ok_or_else(elsewhere)?;
    let table = mounting::read_table()?;
    let as_device = capability.map(|capability| capability.access == VolumeAccess::Block);
    let has_node = kernel_state::is_node_at(&point, device.number);
    let mount = table.at(&point).filter(|mount| mount.is_whole(device.number));
    if (has_node && as_device == Some(false)) || (mount.is_some() && as_device == Some(true)) {
        let message = "the access type of volume_capability is not that of the mount";
        return Err(CsiError::Invalid(format!("{}: {message}", point.display())));
    }
    // The staging of a device leaves only the directory there.
    let staged = as_device == Some(true) && table.at(&point).is_none() && point.exists();
    if !has_node && mount.is_none() && !staged {
        return Err(elsewhere());
    }
    if let Some(required_bytes) = required_bytes.filter(|bytes| device.size_bytes < bytes.get()) {
        // The controller has answered, so it will not have them while it is in use. Kubelet takes this code
        // for that and asks at the next mount, which is after the next staging.
        let message = format!(
            "the device has {} bytes, and {required_bytes} are required: attach the volume again, or stage \
             it again on this node once nothing uses it",
            device.size_bytes
        );
        return Err(CsiError::Precondition(message));
    }
    if let Some(mount) = mount {
        let unknown = || CsiError::Invalid(format!("a file system {} does not grow", mount.fs_type));
        grow(&table, device, FsKind::of(&mount.fs_type).ok_or_else(unknown)?)?;
    }
    Ok(i64::try_from(device.size_bytes).unwrap_or(i64::MAX))
}

fn grow(table: &MountTable, device: &VolumeDevice, kind: FsKind) -> Result<(), CsiError> {
    let writable = table.iter().find(|mount| mount.is_whole(device.number) && !mount.is_read_only());
    let message = "the file system is mounted read-only: it cannot grow";
    let writable = writable.ok_or_else(|| CsiError::Precondition(message.into()))?;
    if let Some(trouble) = kernel_state::trouble(writable) {
        return Err(CsiError::Precondition(format!("{trouble}: it cannot grow")));
    }
    Ok(filesystem::grow(&device.path, &writable.point, kind)?)
}
