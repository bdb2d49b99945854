//! The order in which a node and its device are removed.

use std::path::Path;

use shorthorn_types::{DeviceNumber, VolumeName};

use super::remove;
use crate::FrontendError;

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
        remove(device_dir, volume, device)?;
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
        match mknod(&directory.path().join("v"), SFlag::S_IFBLK, Mode::empty(), device.raw()) {
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
        assert_eq!(crate::node::scan(directory.path()).unwrap()[0].device, ANOTHER);
    }
}
