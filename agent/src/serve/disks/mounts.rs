//! The mounts below and above a disk, in the files of the host.

use std::fs;
use std::path::{Path, PathBuf};

use shorthorn_linux::mounts::MountTable;
use shorthorn_types::DeviceNumber;

/// Returns the mount point that `path` is below and that is not mounted yet, as far as /etc/fstab says: the
/// directory is another one then.
pub fn missing_mount(path: &Path) -> Option<String> {
    let fstab = fs::read_to_string("/etc/fstab").unwrap_or_default();
    missing_mount_in(&fstab, &own_mounts(), path)
}

/// Returns the mounts of this process.
pub(super) fn own_mounts() -> MountTable {
    MountTable::readable_in(Path::new("/proc/self/mountinfo"))
}

/// Returns the mount for `path` that fstab has and the mounts lack.
fn missing_mount_in(fstab: &str, mounts: &MountTable, path: &Path) -> Option<String> {
    let entries = fstab.lines().filter(|line| !line.trim_start().starts_with('#'));
    let mut points = entries.filter_map(|line| line.split_whitespace().nth(1));
    let is_missing = |point: &&str| {
        let point = shorthorn_linux::mounts::path(point.as_bytes()).unwrap_or_else(|| PathBuf::from(point));
        let is_above = point.is_absolute() && path.starts_with(&point) && point != Path::new("/");
        is_above && mounts.at(&point).is_none()
    };
    points.find(is_missing).map(str::to_owned)
}

/// Looks for the device; if the table has another number for it (btrfs), for the mount that `path` is under.
pub(super) fn filesystem_in(mounts: &MountTable, number: DeviceNumber, path: &Path) -> Option<String> {
    let same = mounts.iter().find(|mount| mount.device == number);
    same.or_else(|| mounts.above(path)).map(|mount| mount.fs_type.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_whose_file_system_is_not_mounted_yet_is_not_prepared() {
        let fstab = "# /dev/sdx /data ext4\nUUID=1 / ext4 defaults 0 1\nUUID=2\t/data/\text4 nofail 0 2\n\
                     swap none swap sw\n";
        let root = "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n";
        let data = "23 22 8:2 / /data rw shared:2 - ext4 /dev/sdb rw\n";
        let missing = |mounts: &str, path: &str| {
            missing_mount_in(fstab, &MountTable::readable(mounts.as_bytes()), Path::new(path))
        };
        assert_eq!(missing(root, "/data/longhorn").as_deref(), Some("/data/"));
        assert_eq!(missing(&format!("{root}{data}"), "/data/longhorn"), None);
        assert_eq!(missing(root, "/database"), None);
        assert_eq!(missing(root, "/var/lib/longhorn"), None);
        let fstab = "UUID=3 /my\\040data ext4 nofail 0 2\n";
        let blank = "24 22 8:3 / /my\\040data rw shared:3 - ext4 /dev/sdc rw\n";
        let missing = |mounts: &str| {
            missing_mount_in(fstab, &MountTable::readable(mounts.as_bytes()), Path::new("/my data/a"))
        };
        assert_eq!(missing(root).as_deref(), Some("/my\\040data"));
        assert_eq!(missing(&format!("{root}{blank}")), None);
    }

    #[test]
    fn finds_the_file_system() {
        let mounts = "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n\
                      23 22 0:40 /sub /data rw - btrfs /dev/sdb rw\n";
        let mounts = MountTable::readable(mounts.as_bytes());
        let find = |number: &str, path: &str| {
            filesystem_in(&mounts, number.parse().unwrap(), Path::new(path)).unwrap()
        };
        assert_eq!(find("8:1", "/var/lib/longhorn"), "ext4");
        assert_eq!(find("0:99", "/data/longhorn"), "btrfs");
        assert_eq!(find("0:99", "/database"), "ext4");
    }
}
