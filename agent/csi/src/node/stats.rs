//! Usage and condition of a volume.

use std::path::Path;

use nix::sys::statvfs::statvfs;
use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::volume_usage::Unit;
use shorthorn_csi::CsiError;
use shorthorn_linux::block_device::size_by_number;
use shorthorn_linux::mounts::Mount;

use crate::mounting;
use crate::node::{NodeOptions, kernel_state};
use crate::volumes::{NodeVolume, VolumeDevice, VolumeHealth, VolumesError};

/// The statistics of a volume at a path.
pub(super) struct Stats {
    pub(super) answer: v1::NodeGetVolumeStatsResponse,
    /// True if the mounted device is gone.
    pub(super) is_dead: bool,
}

/// Returns usage and condition of the volume at `path`, the place where it is staged or published.
pub(super) fn stats(
    options: &NodeOptions,
    found: Result<NodeVolume, VolumesError>,
    path: Option<&Path>,
) -> Result<Stats, CsiError> {
    match found {
        Ok(volume) => of_attached(&volume, path),
        Err(error @ VolumesError::NotFound(_)) => of_remains(options, path, error),
        Err(error) => Err(error.into()),
    }
}

/// Handles a volume that has no engine here any more, of which the mount of a dead device is left: its users
/// meet errors. A living device belongs to another volume.
fn of_remains(options: &NodeOptions, path: Option<&Path>, error: VolumesError) -> Result<Stats, CsiError> {
    let point = path.map(mounting::resolve).transpose()?.flatten();
    let Some(point) = point.filter(|point| kernel_state::is_callers(options, point)) else {
        return Err(error.into());
    };
    let table = mounting::read_table()?;
    let Some(mount) = table.at(&point).filter(|mount| kernel_state::is_stale(mount)) else {
        return Err(error.into());
    };
    let message = format!(
        "{error}, and {}: delete the pods that use it, so that the volume is staged \
         again",
        lost_mount(mount)
    );
    let condition = v1::VolumeCondition { abnormal: true, message };
    let answer = v1::NodeGetVolumeStatsResponse { usage: Vec::new(), volume_condition: Some(condition) };
    Ok(Stats { answer, is_dead: true })
}

fn of_attached(volume: &NodeVolume, path: Option<&Path>) -> Result<Stats, CsiError> {
    let elsewhere = || CsiError::NotFound("the volume is not at volume_path".into());
    let point = mounting::resolve(path.ok_or_else(elsewhere)?)?.ok_or_else(elsewhere)?;
    let table = mounting::read_table()?;
    let mount = table.at(&point).ok_or_else(elsewhere)?;
    let is_dead = kernel_state::is_stale(mount);
    let (usage, trouble) = match &volume.device {
        Some(device) if mount.is_whole(device.number) => {
            let gone = is_dead.then(|| gone(device));
            (of_file_system(&point).unwrap_or_default(), gone.or_else(|| kernel_state::trouble(mount)))
        }
        Some(device) if kernel_state::is_node_at(&point, device.number) => {
            (of_device(device).into_iter().collect(), is_dead.then(|| gone(device)))
        }
        _ if is_dead => (Vec::new(), Some(lost_mount(mount))),
        _ => return Err(elsewhere()),
    };
    let condition = condition(&volume.condition, trouble);
    let answer = v1::NodeGetVolumeStatsResponse { usage, volume_condition: Some(condition) };
    Ok(Stats { answer, is_dead })
}

fn gone(device: &VolumeDevice) -> String {
    format!("the device {} is gone", device.number)
}

fn lost_mount(mount: &Mount) -> String {
    format!("the device {} that is mounted here is gone", mount.device)
}

fn condition(reported: &VolumeHealth, trouble: Option<String>) -> v1::VolumeCondition {
    let reported = match reported {
        VolumeHealth::Healthy => None,
        VolumeHealth::Degraded(why) => Some(format!("degraded: {why}")),
        VolumeHealth::Frozen(why) => Some(format!("frozen: {why}")),
    };
    let messages: Vec<String> = trouble.into_iter().chain(reported).collect();
    if messages.is_empty() {
        return v1::VolumeCondition { abnormal: false, message: "healthy".into() };
    }
    v1::VolumeCondition { abnormal: true, message: messages.join("; ") }
}

fn of_device(device: &VolumeDevice) -> Option<v1::VolumeUsage> {
    let total = size_by_number(device.number).ok()??;
    Some(usage(Unit::Bytes, total, 0, 0))
}

fn of_file_system(point: &Path) -> Option<Vec<v1::VolumeUsage>> {
    let found = statvfs(point).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.fragment_size());
    let used = found.blocks().saturating_sub(found.blocks_free());
    let used_inodes = found.files().saturating_sub(found.files_free());
    Some(vec![
        usage(Unit::Bytes, bytes(found.blocks()), bytes(used), bytes(found.blocks_available())),
        usage(Unit::Inodes, found.files(), used_inodes, found.files_available()),
    ])
}

fn usage(unit: Unit, total: u64, used: u64, available: u64) -> v1::VolumeUsage {
    let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    v1::VolumeUsage {
        available: number(available),
        total: number(total),
        used: number(used),
        unit: unit.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_trouble_is_reported() {
        let shown = |reported, trouble: Option<&str>| condition(&reported, trouble.map(str::to_owned));
        assert!(!shown(VolumeHealth::Healthy, None).abnormal);
        assert_eq!(shown(VolumeHealth::Healthy, Some("x")).message, "x");
        let both = shown(VolumeHealth::Degraded("2 of 3".into()), Some("x"));
        assert!(both.abnormal && both.message == "x; degraded: 2 of 3", "{both:?}");
        assert!(shown(VolumeHealth::Frozen("no quorum".into()), None).abnormal);
    }
}
