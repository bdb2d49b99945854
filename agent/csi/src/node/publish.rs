//! Publishing: mounts a staged volume at the path of one workload.

use std::path::{Path, PathBuf};

use shorthorn_csi::{Capability, CsiError, MountSpec, VolumeAccess};
use shorthorn_linux::mounts::{Mount, MountTable};

use crate::mounting::{self, TargetKind};
use crate::node::{NodeOptions, kernel_state, stage};
use crate::volumes::{NodeVolume, VolumeDevice};

/// The requested publication.
pub(super) struct PublishRequest {
    pub target: PathBuf,
    pub staging: PathBuf,
    pub capability: Capability,
    pub read_only: bool,
}

/// Publishes a volume. Stages it first if it is not staged any more, because no other call does that after a
/// reboot.
pub(super) fn publish(
    options: &NodeOptions,
    volume: &NodeVolume,
    wanted: &PublishRequest,
) -> Result<(), CsiError> {
    let device = kernel_state::device(volume)?;
    let read_only = wanted.read_only || wanted.capability.is_read_only();
    if volume.read_only && !read_only {
        let message = "the volume is attached to this node for reading only";
        return Err(CsiError::Precondition(message.into()));
    }
    let missing =
        || CsiError::Precondition(format!("{}: its directory does not exist", wanted.target.display()));
    let target = mounting::resolve(&wanted.target)?.ok_or_else(missing)?;
    let staging = mounting::resolve(&wanted.staging)?.unwrap_or_else(|| wanted.staging.clone());
    let table = mounting::read_table()?;
    if let Some(mount) = table.at(&target) {
        if is_published(options, volume, device, mount, &wanted.capability, read_only)? {
            return Ok(());
        }
        mounting::unmount_all(&target, |mount| {
            if kernel_state::is_stale(mount) { Ok(()) } else { Err(stage::taken(mount)) }
        })?;
    }
    if wanted.capability.has_one_target() {
        only_here(options, &table, device, &target, &staging)?;
    }
    match &wanted.capability.access {
        VolumeAccess::Mount(mount) => publish_mount(options, volume, wanted, mount, &target, read_only),
        VolumeAccess::Block => publish_block(options, volume, device, &table, &target, read_only),
    }
}

/// Returns whether the mount at the target is the requested one. False: it has to be unmounted first.
fn is_published(
    options: &NodeOptions,
    volume: &NodeVolume,
    device: &VolumeDevice,
    mount: &Mount,
    capability: &Capability,
    read_only: bool,
) -> Result<bool, CsiError> {
    let (file_system, node) =
        (mount.is_whole(device.number), kernel_state::is_node_at(&mount.point, device.number));
    match &capability.access {
        VolumeAccess::Mount(wanted) if file_system => {
            stage::check_options(mount, wanted, read_only)?;
            Ok(true)
        }
        VolumeAccess::Block if node => {
            if !volume.read_only && kernel_state::is_read_only(device)? != read_only {
                let message = "is a device of the volume already, and its read-only setting differs";
                return Err(CsiError::Exists(format!("{} {message}", mount.point.display())));
            }
            Ok(true)
        }
        _ if file_system || node => {
            let message = "the volume is published there already, with another access type";
            Err(CsiError::Exists(format!("{}: {message}", mount.point.display())))
        }
        _ if kernel_state::is_callers(options, &mount.point) && kernel_state::is_stale(mount) => Ok(false),
        _ => Err(stage::taken(mount)),
    }
}

/// Checks that a volume for a single writer has a single target.
fn only_here(
    options: &NodeOptions,
    table: &MountTable,
    device: &VolumeDevice,
    target: &Path,
    staging: &Path,
) -> Result<(), CsiError> {
    let everywhere = [kernel_state::mounted(table, device), kernel_state::nodes(table, device)].concat();
    let others = kernel_state::of_caller(options, everywhere, &[target, staging]);
    if others.is_empty() {
        return Ok(());
    }
    let message = format!("a volume for one writer is published already, at {}", kernel_state::show(&others));
    Err(CsiError::Precondition(message))
}

fn publish_mount(
    options: &NodeOptions,
    volume: &NodeVolume,
    wanted: &PublishRequest,
    mount: &MountSpec,
    target: &Path,
    read_only: bool,
) -> Result<(), CsiError> {
    let staging =
        stage::stage_mount(options, volume, &wanted.staging, mount, wanted.capability.is_read_only())?;
    let device = kernel_state::device(volume)?;
    let made = mounting::create_target(target, TargetKind::Directory)?;
    let bound = mounting::bind(&staging, target, read_only).and_then(|()| {
        let table = mounting::read_table()?;
        match table.at(target) {
            Some(mount) if mount.is_whole(device.number) && mount.is_read_only() == read_only => Ok(()),
            Some(mount) => Err(stage::taken(mount)),
            None => Err(CsiError::Internal(format!("{} was mounted and is not there", target.display()))),
        }
    });
    bound.map_err(|error| undo(target, made, error))
}

/// Publishes a block device. A mount cannot forbid writes to a device, so a read-only one is made so in the
/// kernel, for all of its users.
fn publish_block(
    options: &NodeOptions,
    volume: &NodeVolume,
    device: &VolumeDevice,
    table: &MountTable,
    target: &Path,
    read_only: bool,
) -> Result<(), CsiError> {
    let mounted = kernel_state::mounted(table, device);
    if !mounted.is_empty() {
        let message = format!("the volume is mounted as a file system at {}", kernel_state::show(&mounted));
        return Err(CsiError::Precondition(message));
    }
    let was_read_only = kernel_state::is_read_only(device)?;
    let change = !volume.read_only && was_read_only != read_only;
    if change {
        let others = kernel_state::of_caller(options, kernel_state::nodes(table, device), &[target]);
        if !others.is_empty() {
            let how = if was_read_only { "read-only" } else { "writable" };
            let message =
                format!("the device is published already, {how}, at {}", kernel_state::show(&others));
            return Err(CsiError::Precondition(message));
        }
        kernel_state::set_read_only(device, read_only)?;
    }
    let published = mounting::create_target(target, TargetKind::File).and_then(|made| {
        let bound =
            mounting::bind(&device.path, target, false).and_then(|()| {
                match kernel_state::is_node_at(target, device.number) {
                    true => Ok(()),
                    false => {
                        Err(CsiError::Internal(format!("{} does not lead to the volume", target.display())))
                    }
                }
            });
        bound.map_err(|error| undo(target, made, error))
    });
    published.inspect_err(|_| {
        // The next publish or stage repairs a failure.
        drop(change.then(|| kernel_state::set_read_only(device, was_read_only)));
    })
}

fn undo(target: &Path, made: bool, error: CsiError) -> CsiError {
    let unmounted = mounting::unmount_all(target, |_| Ok(()));
    match unmounted.and_then(|()| if made { mounting::remove_target(target) } else { Ok(()) }) {
        Ok(()) => error,
        Err(undo) => error.not_undone(&undo),
    }
}

/// Undoes [`publish`], and takes the target away.
pub(super) fn unpublish(
    options: &NodeOptions,
    volume: Option<&NodeVolume>,
    target: &Path,
) -> Result<(), CsiError> {
    let Some(target) = mounting::resolve(target)? else { return Ok(()) };
    mounting::unmount_all(&target, |mount| stage::check_may_unmount(options, volume, mount))?;
    mounting::remove_target(&target)?;
    match volume {
        Some(volume) => release(volume),
        None => Ok(()),
    }
}

/// Makes a device writable again that was published read-only, after its last user is gone.
fn release(volume: &NodeVolume) -> Result<(), CsiError> {
    let Ok(device) = kernel_state::device(volume) else { return Ok(()) };
    if volume.read_only || !kernel_state::is_read_only(device)? {
        return Ok(());
    }
    if kernel_state::nodes(&mounting::read_table()?, device).is_empty() {
        kernel_state::set_read_only(device, false)?;
    }
    Ok(())
}
