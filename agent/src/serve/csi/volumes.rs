//! The attached volumes as the CSI driver sees them: the engines of this node, and their devices.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shorthorn_api::v1::instance::Detail;
use shorthorn_api::v1::{self, InstanceState};
use shorthorn_control::{EnginePhase, MemberMode};
use shorthorn_csi_node::{DeviceNumber, NodeVolume, NodeVolumes, VolumeDevice, VolumeHealth, VolumesError};
use shorthorn_frontend::is_nbd_of_other_volume;
use shorthorn_types::VolumeName;

use crate::serve::instance::{Hub, InstanceId};

/// The volumes that have an engine here.
pub struct Attached {
    hub: Arc<Hub>,
    device_dir: PathBuf,
}

impl Attached {
    /// Returns the volumes of the engines of `hub`.
    pub fn new(hub: Arc<Hub>, device_dir: PathBuf) -> Attached {
        Attached { hub, device_dir }
    }
}

#[tonic::async_trait]
impl NodeVolumes for Attached {
    async fn find(&self, volume: &VolumeName) -> Result<NodeVolume, VolumesError> {
        let instance = self.hub.table().published(&InstanceId::Engine(volume.clone()));
        let not_found = || VolumesError::NotFound(volume.clone());
        let instance = instance.ok_or_else(not_found)?;
        let Some(Detail::Engine(engine)) = &instance.detail else { return Err(not_found()) };
        // The stat(2) of a node never waits for its device.
        let device = device(&self.device_dir.join(volume.as_str()), &engine.device, engine.size_bytes);
        let device =
            device.map_err(|error| VolumesError::Unavailable(format!("volume {volume}: {error}")))?;
        if let Some(device) = &device
            && is_nbd_of_other_volume(device.number, volume)
        {
            let number = device.number;
            return Err(VolumesError::Unavailable(format!(
                "volume {volume}: its device {number} was disconnected, and belongs to another volume now: \
                 detach it"
            )));
        }
        Ok(NodeVolume { device, read_only: false, condition: condition(&instance, engine) })
    }

    async fn take_size(&self, volume: &VolumeName) {
        if let Err(error) = self.hub.renew_device(volume.clone()).await {
            tracing::warn!(%volume, %error, "the device was not recreated and may keep its size");
        }
    }
}

/// Returns the device that the engine reports, even if the node of its name leads elsewhere. An engine of an
/// earlier version does not report it.
fn device(path: &Path, served: &str, size_bytes: u64) -> io::Result<Option<VolumeDevice>> {
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_block_device() => meta,
        Ok(_) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let number = served.parse().unwrap_or_else(|_| DeviceNumber::of(meta.rdev()));
    Ok(Some(VolumeDevice { path: path.to_owned(), number, size_bytes }))
}

fn condition(instance: &v1::Instance, engine: &v1::EngineStatus) -> VolumeHealth {
    let because = |what: &str| match instance.message.as_str() {
        "" => what.to_owned(),
        message => format!("{what}: {message}"),
    };
    if instance.state() != InstanceState::Running {
        let state = instance.state().as_str_name().trim_start_matches("INSTANCE_STATE_").to_lowercase();
        return VolumeHealth::Frozen(because(&format!("the engine is {state}")));
    }
    if engine.known_phase() == Some(EnginePhase::Frozen) {
        return VolumeHealth::Frozen(because("too few replicas can be reached"));
    }
    if engine.lost_writes {
        return VolumeHealth::Frozen(because("writes may be lost"));
    }
    let is_member = |one: &&v1::EngineMember| one.known_mode() == MemberMode::Member;
    let (members, all) = (engine.members.iter().filter(is_member).count(), engine.members.len());
    if members == all {
        return VolumeHealth::Healthy;
    }
    let others = engine.members.iter().filter(|one| !is_member(one));
    let others: Vec<String> =
        others.map(|one| format!("{} is {}", one.replica_id, one.known_mode().as_str())).collect();
    VolumeHealth::Degraded(format!("{members} of {all} replicas have all data; {}", others.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMBER: MemberMode = MemberMode::Member;

    fn engine(phase: Option<EnginePhase>, modes: &[MemberMode]) -> v1::EngineStatus {
        let member = |mode: &MemberMode| v1::EngineMember::default().with_mode(*mode);
        let members = modes.iter().map(member).collect();
        v1::EngineStatus { members, ..v1::EngineStatus::default() }.with_phase(phase)
    }

    fn of(state: InstanceState, phase: Option<EnginePhase>, modes: &[MemberMode]) -> VolumeHealth {
        let instance = v1::Instance { state: state.into(), message: "why".into(), ..v1::Instance::default() };
        condition(&instance, &engine(phase, modes))
    }

    #[test]
    fn conditions() {
        let serving = Some(EnginePhase::Serving);
        assert_eq!(of(InstanceState::Running, serving, &[MEMBER, MEMBER]), VolumeHealth::Healthy);
        match of(InstanceState::Running, serving, &[MEMBER, MemberMode::Rebuilding]) {
            VolumeHealth::Degraded(text) => assert!(text.starts_with("1 of 2 replicas"), "{text}"),
            other => panic!("{other:?}"),
        }
        for (state, phase) in [
            (InstanceState::Running, Some(EnginePhase::Frozen)),
            (InstanceState::Starting, Some(EnginePhase::Starting)),
            (InstanceState::Error, serving),
            (InstanceState::Stopped, None),
        ] {
            match of(state, phase, &[MEMBER]) {
                VolumeHealth::Frozen(text) => assert!(text.ends_with(": why"), "{text}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_volume_that_has_lost_writes_is_not_healthy() {
        let instance = v1::Instance { state: InstanceState::Running.into(), ..v1::Instance::default() };
        let engine = v1::EngineStatus { lost_writes: true, ..engine(Some(EnginePhase::Serving), &[MEMBER]) };
        assert_eq!(condition(&instance, &engine), VolumeHealth::Frozen("writes may be lost".to_owned()));
    }

    #[test]
    fn nothing_but_a_block_device_is_a_device() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v1");
        assert!(device(&path, "259:3", 1).unwrap().is_none());
        fs::write(&path, "data").unwrap();
        assert!(device(&path, "259:3", 1).unwrap().is_none());
    }

    #[test]
    fn the_device_is_the_one_that_the_engine_serves_and_not_the_one_that_has_its_name() {
        // Any node of a block device will do.
        let found = fs::read_dir("/dev").unwrap().flatten().map(|entry| entry.path());
        let is_block =
            |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_block_device());
        let Some(path) = found.into_iter().find(is_block) else {
            println!("skipped: this host has no block device");
            return;
        };
        let there = DeviceNumber::of(fs::symlink_metadata(&path).unwrap().rdev());
        let served = device(&path, "4095:7", 1).unwrap().unwrap();
        assert_eq!(served.number, DeviceNumber { major: 4095, minor: 7 });
        assert_eq!(device(&path, "", 1).unwrap().unwrap().number, there, "it does not say");
    }
}
