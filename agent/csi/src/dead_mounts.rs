//! Mounts of pods whose device is gone, as they were found when kubelet asked how they are.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use shorthorn_types::VolumeName;

/// The most that are remembered; a node has far fewer volumes.
const MOUNTS_MAX: usize = 1024;
/// The parts of a uid in letters and digits, by their lengths.
const UID_PARTS: [usize; 5] = [8, 4, 4, 4, 12];

/// A mount in a pod whose device no longer exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadMount {
    /// The volume whose device was mounted.
    pub volume: VolumeName,
    /// The pod that uses it, by its uid.
    pub pod_uid: String,
}

/// All of them, by the path that kubelet names.
#[derive(Debug, Default)]
pub struct DeadMounts(Mutex<BTreeMap<PathBuf, DeadMount>>);

impl DeadMounts {
    /// Returns the known dead mounts.
    #[must_use]
    pub fn all(&self) -> Vec<DeadMount> {
        self.lock().values().cloned().collect()
    }

    /// Records the state found at `path`.
    pub(crate) fn record(&self, path: &Path, volume: &VolumeName, is_dead: bool) {
        let mut mounts = self.lock();
        match pod_uid(path).filter(|_| is_dead) {
            Some(_) if mounts.len() >= MOUNTS_MAX && !mounts.contains_key(path) => {}
            Some(pod_uid) => {
                let mount = DeadMount { volume: volume.clone(), pod_uid: pod_uid.to_owned() };
                mounts.insert(path.to_owned(), mount);
            }
            None => drop(mounts.remove(path)),
        }
    }

    /// Records that the volume was unpublished at `target`, or published there again. Kubelet publishes a
    /// device at another path than the one in NodeGetVolumeStats: both paths name the pod.
    pub(crate) fn forget(&self, volume: &VolumeName, target: &Path) {
        let uid = pod_uid(target);
        self.lock().retain(|path, mount| {
            let is_of_pod = mount.volume == *volume && Some(mount.pod_uid.as_str()) == uid;
            path != target && !is_of_pod
        });
    }

    /// Does the same for everything of the volume.
    pub(crate) fn forget_volume(&self, volume: &VolumeName) {
        self.lock().retain(|_, mount| mount.volume != *volume);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, DeadMount>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the pod that kubelet asks for. Its mount of a file system is `…/pods/UID/volumes/…`. Its node of a
/// device is `…/volumeDevices/PV/dev/UID`, which is published at `…/volumeDevices/publish/PV/UID`
/// (kubernetes/pkg/volume/csi: `csi_plugin.go`, `csi_block.go`). Kubelets before 1.19 publish at
/// `publish/PV`, which names no pod.
fn pod_uid(path: &Path) -> Option<&str> {
    let names: Vec<&str> = path.iter().filter_map(|name| name.to_str()).collect();
    let of_mount = names.windows(2).find(|pair| pair[0] == "pods").map(|pair| pair[1]);
    let of_device = names.windows(2).last().filter(|pair| pair[0] == "dev").map(|pair| pair[1]);
    let of_target = names.windows(3).last().filter(|last| last[0] == "publish").map(|last| last[2]);
    [of_mount, of_device, of_target].into_iter().flatten().find(|name| is_uid(name))
}

fn is_uid(text: &str) -> bool {
    let parts =
        text.split('-').map(|part| part.bytes().all(|byte| byte.is_ascii_hexdigit()).then_some(part.len()));
    parts.eq(UID_PARTS.map(Some))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0b9f7f3e-1c39-4a4c-8f43-1b0e8d3f6a11";

    #[test]
    fn the_path_names_the_pod_of_a_mount() {
        let csi = "volumes/kubernetes.io~csi/pvc-0b9f7f3e-1c39-4a4c-8f43-1b0e8d3f6a99/mount";
        let found = |path: String| pod_uid(Path::new(&path)).map(str::to_owned);
        assert_eq!(found(format!("/var/lib/kubelet/pods/{UID}/{csi}")).as_deref(), Some(UID));
        let devices = "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/pvc-1/dev";
        assert_eq!(found(format!("{devices}/{UID}")).as_deref(), Some(UID));
        let published = "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pvc-1";
        assert_eq!(found(format!("{published}/{UID}")).as_deref(), Some(UID));
        assert_eq!(found(published.to_owned()), None);
        for other in ["/var/lib/kubelet/plugins/kubernetes.io/csi/x/globalmount", "/pods/a/volumes", "/dev/x"]
        {
            assert_eq!(found(other.to_owned()), None, "{other}");
        }
    }

    #[test]
    fn a_mount_is_dead_until_it_is_well_or_gone() {
        let (mounts, volume) = (DeadMounts::default(), VolumeName::new("v").unwrap());
        let path = PathBuf::from(format!("/k/pods/{UID}/volumes/m"));
        let dead = vec![DeadMount { volume: volume.clone(), pod_uid: UID.to_owned() }];
        let record = |is_dead| {
            mounts.record(&path, &volume, is_dead);
            mounts.all()
        };
        assert_eq!((record(true), record(false)), (dead.clone(), vec![]));
        record(true);
        mounts.forget(&volume, Path::new("/elsewhere"));
        assert_eq!(mounts.all(), dead);
        mounts.forget(&volume, &path);
        assert!(mounts.all().is_empty());
        record(true);
        mounts.forget_volume(&volume);
        assert!(mounts.all().is_empty());
    }

    #[test]
    fn a_device_that_is_not_published_any_more_is_not_dead() {
        let (mounts, volume) = (DeadMounts::default(), VolumeName::new("v").unwrap());
        let devices = "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices";
        mounts.record(Path::new(&format!("{devices}/pvc-1/dev/{UID}")), &volume, true);
        let target = format!("{devices}/publish/pvc-1/{UID}");
        mounts.forget(&VolumeName::new("w").unwrap(), Path::new(&target));
        mounts.forget(&volume, Path::new(&target.replace("6a11", "6a12")));
        assert_eq!(mounts.all().len(), 1, "another volume of the pod, and another pod");
        mounts.forget(&volume, Path::new(&target));
        assert!(mounts.all().is_empty());
    }

    #[test]
    fn a_bound_keeps_memory_small() {
        let (mounts, volume) = (DeadMounts::default(), VolumeName::new("v").unwrap());
        for at in 0..MOUNTS_MAX + 5 {
            mounts.record(Path::new(&format!("/k/pods/{UID}/{at}")), &volume, true);
        }
        assert_eq!(mounts.all().len(), MOUNTS_MAX);
    }
}
