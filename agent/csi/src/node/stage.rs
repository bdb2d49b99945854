//! Staging: the file system of a volume mounted once for the node. A volume that is used as a device needs
//! none.

use std::path::Path;

use shorthorn_csi::{Capability, CsiError, FsKind, MountSpec, VolumeAccess};
use shorthorn_linux::mounts::{Mount, MountTable};

use crate::device;
use crate::filesystem::{self, DeviceContent};
use crate::mounting::{self, TargetKind};
use crate::node::{NodeOptions, kernel_state};
use crate::volumes::{NodeVolume, VolumeDevice};

/// Stages a volume at `staging`.
pub(super) fn stage(
    options: &NodeOptions,
    volume: &NodeVolume,
    staging: &Path,
    capability: &Capability,
) -> Result<(), CsiError> {
    let device = kernel_state::device(volume)?;
    match &capability.access {
        VolumeAccess::Mount(wanted) => {
            stage_mount(options, volume, staging, wanted, capability.is_read_only()).map(drop)
        }
        VolumeAccess::Block => match mounting::resolve(staging)? {
            Some(point) => not_mounted_at(&mounting::read_table()?, device, &point),
            None => Err(CsiError::Precondition(format!("{} does not exist", staging.display()))),
        },
    }
}

fn not_mounted_at(table: &MountTable, device: &VolumeDevice, point: &Path) -> Result<(), CsiError> {
    match table.at(point) {
        Some(mount) if mount.device == device.number => {
            Err(CsiError::Exists(format!("{} is staged as a file system", point.display())))
        }
        _ => Ok(()),
    }
}

/// Mounts the file system of a volume at `staging`, unless it is mounted; makes it if the device is empty.
/// Returns the place of the mount.
pub(super) fn stage_mount(
    options: &NodeOptions,
    volume: &NodeVolume,
    staging: &Path,
    wanted: &MountSpec,
    read_only: bool,
) -> Result<std::path::PathBuf, CsiError> {
    let device = kernel_state::device(volume)?;
    let missing = || CsiError::Precondition(format!("{}: its directory does not exist", staging.display()));
    let point = mounting::resolve(staging)?.ok_or_else(missing)?;
    let read_only = read_only || volume.read_only;
    let table = mounting::read_table()?;
    if let Some(mount) = table.at(&point) {
        if is_staged(options, &table, device, mount, wanted, read_only)? {
            return Ok(point);
        }
        mounting::unmount_all(&point, |mount| {
            let ours = mount.is_whole(device.number) || kernel_state::is_stale(mount);
            if ours { Ok(()) } else { Err(taken(mount)) }
        })?;
    }
    let used = kernel_state::nodes(&table, device);
    if !used.is_empty() {
        let message = format!("the volume is in use as a device at {}", kernel_state::show(&used));
        return Err(CsiError::Precondition(message));
    }
    let made = mounting::create_target(&point, TargetKind::Directory)?;
    let mounted = mount_at(volume, device, &point, wanted, read_only);
    mounted.inspect_err(|_| drop(made.then(|| mounting::remove_target(&point))))?;
    Ok(point)
}

/// Returns whether the mount at the staging path is the requested one. False: it has to be unmounted first.
fn is_staged(
    options: &NodeOptions,
    table: &MountTable,
    device: &VolumeDevice,
    mount: &Mount,
    wanted: &MountSpec,
    read_only: bool,
) -> Result<bool, CsiError> {
    if !mount.is_whole(device.number) {
        if kernel_state::is_callers(options, &mount.point) && kernel_state::is_stale(mount) {
            tracing::warn!(path = %mount.point.display(), device = %mount.device, "unmounting a mount whose \
             device is gone");
            return Ok(false);
        }
        return Err(taken(mount));
    }
    check_options(mount, wanted, read_only)?;
    let Some(trouble) = kernel_state::trouble(mount) else { return Ok(true) };
    // A new mount helps, but only when the old one has no user any more.
    let others = kernel_state::of_caller(options, kernel_state::mounted(table, device), &[&mount.point]);
    tracing::warn!(path = %mount.point.display(), mounted_anew = others.is_empty(), "{trouble}");
    Ok(!others.is_empty())
}

/// Returns an error unless a mount of the volume fits the request.
pub(super) fn check_options(mount: &Mount, wanted: &MountSpec, read_only: bool) -> Result<(), CsiError> {
    let differs = |what: &str| {
        let message = format!("the volume is mounted there already, and its {what} differs");
        Err(CsiError::Exists(format!("{}: {message}", mount.point.display())))
    };
    if wanted.kind.is_some_and(|kind| kind.name() != mount.fs_type) {
        return differs("file system");
    }
    if mount.is_read_only() != read_only {
        return differs("read-only setting");
    }
    if !mounting::has_context(mount, &wanted.flags) {
        return differs("SELinux context");
    }
    Ok(())
}

/// Returns the error that the place is taken by something that is not the volume.
pub(super) fn taken(mount: &Mount) -> CsiError {
    let (point, kind, device) = (mount.point.display(), &mount.fs_type, mount.device);
    CsiError::Exists(format!("{point} is not this volume but {kind} of device {device}: it is left alone"))
}

fn mount_at(
    volume: &NodeVolume,
    device: &VolumeDevice,
    point: &Path,
    wanted: &MountSpec,
    read_only: bool,
) -> Result<(), CsiError> {
    if !volume.read_only && kernel_state::is_read_only(device)? {
        // A read-only device keeps that flag if the agent was killed before it could reset it.
        kernel_state::set_read_only(device, false)?;
    }
    let kind = file_system(volume, device, wanted, read_only)?;
    let mounted = mounting::mount(&device.path, point, kind, read_only, &wanted.flags);
    mounted.and_then(|()| check_mounted(device, point)).map_err(|error| undo(device, point, error))?;
    if !read_only && let Err(error) = filesystem::grow(&device.path, point, kind) {
        // The file system is smaller than the device, and works: a caller that expands it gets the reason.
        tracing::warn!(
            device = %device.path.display(),
            "the file system was not grown to the size of its device: {error}"
        );
    }
    Ok(())
}

fn check_mounted(device: &VolumeDevice, point: &Path) -> Result<(), CsiError> {
    match mounting::read_table()?.at(point) {
        Some(mount) if mount.is_whole(device.number) => Ok(()),
        Some(mount) => Err(taken(mount)),
        None => Err(CsiError::Internal(format!("{} was mounted and is not there", point.display()))),
    }
}

fn undo(device: &VolumeDevice, point: &Path, error: CsiError) -> CsiError {
    let ours = |mount: &Mount| if mount.is_whole(device.number) { Ok(()) } else { Err(taken(mount)) };
    match mounting::unmount_all(point, ours) {
        Ok(()) => error,
        Err(undo) => error.not_undone(&undo),
    }
}

/// Returns the file system on the device, ready to be mounted.
fn file_system(
    volume: &NodeVolume,
    device: &VolumeDevice,
    wanted: &MountSpec,
    read_only: bool,
) -> Result<FsKind, CsiError> {
    let path = device.path.display();
    let is_in_use = device::is_open_exclusively(&device.path).map_err(CsiError::system(&path))?;
    let kind = match filesystem::probe(device)? {
        DeviceContent::FileSystem(kind) => kind,
        DeviceContent::Other(what) => {
            let hint = "the device is neither mounted nor formatted; if the data is not needed, wipefs \
             clears it";
            return Err(CsiError::Precondition(format!("{path} holds {what}: {hint}")));
        }
        DeviceContent::Empty | DeviceContent::Unfinished if read_only || is_in_use => {
            let why = if is_in_use { "another process uses the device" } else { "the volume is read-only" };
            return Err(CsiError::Precondition(format!("{path} has no file system, and {why}")));
        }
        DeviceContent::Empty | DeviceContent::Unfinished => {
            let kind = wanted.kind.unwrap_or(FsKind::Ext4);
            tracing::info!(device = %path, kind = kind.name(), "making a file system");
            filesystem::format(device, kind)?;
            return Ok(kind);
        }
    };
    if wanted.kind.is_some_and(|wanted| wanted != kind) {
        let message = format!("{path} has {}, and the request names another file system", kind.name());
        return Err(CsiError::Precondition(message));
    }
    // A device that is mounted already, here or visible only in another namespace, must not be touched.
    if !volume.read_only && !is_in_use {
        filesystem::check(&device.path, kind)?;
    }
    Ok(kind)
}

/// Undoes [`stage`].
pub(super) fn unstage(
    options: &NodeOptions,
    volume: Option<&NodeVolume>,
    staging: &Path,
) -> Result<(), CsiError> {
    let Some(point) = mounting::resolve(staging)? else { return Ok(()) };
    if let Some(device) = volume.and_then(|volume| volume.device.as_ref()) {
        let table = mounting::read_table()?;
        let published = [kernel_state::mounted(&table, device), kernel_state::nodes(&table, device)].concat();
        let published = kernel_state::of_caller(options, published, &[&point]);
        if !published.is_empty() {
            return Err(CsiError::Precondition(format!(
                "still published at {}",
                kernel_state::show(&published)
            )));
        }
    }
    mounting::unmount_all(&point, |mount| check_may_unmount(options, volume, mount))
}

/// Returns an error unless a mount may be removed for a caller that names this volume.
pub(super) fn check_may_unmount(
    options: &NodeOptions,
    volume: Option<&NodeVolume>,
    mount: &Mount,
) -> Result<(), CsiError> {
    let device = volume.and_then(|volume| volume.device.as_ref());
    let ours = device.is_some_and(|device| {
        mount.device == device.number || kernel_state::is_node_at(&mount.point, device.number)
    });
    if ours || kernel_state::is_callers(options, &mount.point) { Ok(()) } else { Err(not_ours(mount)) }
}

fn not_ours(mount: &Mount) -> CsiError {
    let (point, kind, device) = (mount.point.display(), &mount.fs_type, mount.device);
    CsiError::Precondition(format!(
        "{point} is not this volume but {kind} of device {device}: it is left alone"
    ))
}
