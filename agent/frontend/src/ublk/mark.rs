//! The mark of a ublk disk for udev: `<device_dir>/.ublkbN`, a file that contains the name of the volume.
//!
//! A ublk disk carries no name that udev could read. The rules of this project (59-shorthorn.rules) apply to
//! the disks that have a mark, and leave those of other programs alone. A mark exists from before the disk
//! appears until after it is gone.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use shorthorn_types::VolumeName;

/// Returns the mark of /dev/ublkbN. The name of a volume has no dot.
pub(super) fn path(device_dir: &Path, id: u32) -> PathBuf {
    device_dir.join(format!(".ublkb{id}"))
}

/// Marks /dev/ublkbN as the disk of `volume`.
pub(super) fn write(device_dir: &Path, id: u32, volume: &VolumeName) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(device_dir)?;
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o644).open(path(device_dir, id))?;
    writeln!(file, "{volume}")
}

/// Removes the mark of /dev/ublkbN, if it exists.
pub(super) fn remove(device_dir: &Path, id: u32) -> io::Result<()> {
    match fs::remove_file(path(device_dir, id)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node;

    #[test]
    fn a_mark_has_the_name_in_the_udev_rules_and_is_not_listed_as_a_volume() {
        let directory = tempfile::tempdir().unwrap();
        let devices = directory.path().join("longhorn");
        write(&devices, 7, &VolumeName::new("v1").unwrap()).unwrap();
        write(&devices, 7, &VolumeName::new("volume-2").unwrap()).unwrap();
        assert_eq!(fs::read_to_string(devices.join(".ublkb7")).unwrap(), "volume-2\n");
        let rules = include_str!("../../../../systemd/udev/rules.d/59-shorthorn.rules");
        assert!(rules.contains(r#"KERNEL=="ublkb*", TEST=="/dev/longhorn/.%k""#), "{rules}");
        assert_eq!(node::scan(&devices).unwrap(), []);
        remove(&devices, 7).unwrap();
        remove(&devices, 7).unwrap();
        assert_eq!(fs::read_dir(&devices).unwrap().count(), 0);
    }
}
