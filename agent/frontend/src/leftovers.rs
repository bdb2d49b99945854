//! Devices of the kernel that an engine has left behind which does not come back.

use std::path::Path;

use shorthorn_types::VolumeName;

use crate::node::DeviceNumber;
use crate::{FrontendError, node, remove_iscsi_leftovers, remove_nbd_leftovers, ublk};

/// Removes every device of `volume`, and their names in `device_dir`. Requests that wait there fail, and
/// their users see errors: otherwise they would wait for ever, and so would an unmount.
///
/// # Errors
/// [`FrontendError::Refused`] where a living process serves one.
pub fn discard(volume: &VolumeName, device_dir: &Path) -> Result<(), FrontendError> {
    ublk::remove_leftovers(volume, device_dir)?;
    remove_nbd_leftovers(volume, device_dir)?;
    remove_iscsi_leftovers(volume, device_dir)?;
    let dead = |node: &node::DeviceNode| node.volume == *volume && !node.live;
    for found in node::scan(device_dir)?.into_iter().filter(dead) {
        node::remove(device_dir, volume, found.device)?;
    }
    Ok(())
}

/// Removes the node of `volume` if it still leads to `device`, and then the device itself with
/// `remove_device`. In this order: the number of a device that is gone may be given to another volume at
/// once, and the node would lead there.
///
/// # Errors
/// The node cannot be removed; the device is left alone then. Or the error of `remove_device`.
pub(crate) fn remove_node_first(
    device_dir: &Path,
    volume: &VolumeName,
    device: Option<DeviceNumber>,
    remove_device: impl FnOnce() -> Result<(), FrontendError>,
) -> Result<(), FrontendError> {
    if let Some(device) = device {
        node::remove(device_dir, volume, device)?;
    }
    remove_device()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nix::sys::stat::{Mode, SFlag, mknod};

    use super::*;

    const OURS: DeviceNumber = DeviceNumber { major: 4095, minor: 1 };
    const ANOTHER: DeviceNumber = DeviceNumber { major: 4095, minor: 2 };

    /// Returns a directory with a node of volume `v`, or None if this user may not make nodes.
    fn directory(device: DeviceNumber) -> Option<tempfile::TempDir> {
        let directory = tempfile::tempdir().unwrap();
        let number = libc::makedev(device.major, device.minor);
        match mknod(&directory.path().join("v"), SFlag::S_IFBLK, Mode::empty(), number) {
            Err(nix::errno::Errno::EPERM) => {
                println!("skipped: this user may not make device nodes");
                None
            }
            made => {
                made.unwrap();
                Some(directory)
            }
        }
    }

    #[test]
    fn the_node_is_gone_before_its_device() {
        let Some(directory) = directory(OURS) else { return };
        let volume = VolumeName::new("v").unwrap();
        let node = directory.path().join("v");
        let mut was_there = None;
        remove_node_first(directory.path(), &volume, Some(OURS), || {
            was_there = Some(fs::symlink_metadata(&node).is_ok());
            Ok(())
        })
        .unwrap();
        assert_eq!(was_there, Some(false));
    }

    #[test]
    fn the_node_of_another_device_stays() {
        let Some(directory) = directory(ANOTHER) else { return };
        let volume = VolumeName::new("v").unwrap();
        let mut removed = 0;
        for device in [Some(OURS), None] {
            remove_node_first(directory.path(), &volume, device, || {
                removed += 1;
                Ok(())
            })
            .unwrap();
        }
        assert_eq!(removed, 2);
        assert_eq!(node::scan(directory.path()).unwrap()[0].device, ANOTHER);
    }
}
