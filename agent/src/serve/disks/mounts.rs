//! The mounts below and above a disk, in the files of the host.

use std::fs;
use std::path::Path;

/// Returns the mount point that `path` is below and that is not mounted yet, as far as /etc/fstab says: the
/// directory is another one then.
pub fn missing_mount(path: &Path) -> Option<String> {
    let fstab = fs::read_to_string("/etc/fstab").unwrap_or_default();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    missing_mount_in(&fstab, &mounts, path)
}

/// Returns the mount for `path` that fstab has and the mounts lack. Both files separate fields by spaces, and
/// write \040 for a space in one, which is not decoded: disks have no such paths.
fn missing_mount_in(fstab: &str, mounts: &str, path: &Path) -> Option<String> {
    let entries = fstab.lines().filter(|line| !line.trim_start().starts_with('#'));
    let mut points = entries.filter_map(|line| line.split_whitespace().nth(1));
    let is_mounted = |point: &str| mounts.lines().any(|line| line.split(' ').nth(4) == Some(point));
    let is_above = |point: &str| point.starts_with('/') && path.starts_with(point);
    points
        .find(|point| is_above(point) && !is_mounted(point.trim_end_matches('/')) && *point != "/")
        .map(str::to_owned)
}

/// Looks for the device; where mountinfo shows another number for it (btrfs), for the mount that `path` is
/// under.
pub(super) fn filesystem_in(mounts: &str, number: &str, path: &Path) -> Option<String> {
    let mut under: Option<(usize, &str)> = None;
    for line in mounts.lines() {
        let (mount, source) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(2);
        let (device, point) = (fields.next()?, fields.nth(1)?);
        let kind = source.split(' ').next()?;
        if device == number {
            return Some(kind.to_owned());
        }
        if path.starts_with(point) && under.is_none_or(|(longest, _)| longest <= point.len()) {
            under = Some((point.len(), kind));
        }
    }
    under.map(|(_, kind)| kind.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_whose_file_system_is_not_mounted_yet_is_not_prepared() {
        let fstab = "# /dev/sdx /data ext4\nUUID=1 / ext4 defaults 0 1\nUUID=2\t/data/\text4 nofail 0 2\nswap none swap sw\n";
        let root = "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n";
        let data = "23 22 8:2 / /data rw shared:2 - ext4 /dev/sdb rw\n";
        let missing = |mounts: &str, path: &str| missing_mount_in(fstab, mounts, Path::new(path));
        assert_eq!(missing(root, "/data/longhorn").as_deref(), Some("/data/"));
        assert_eq!(missing(&format!("{root}{data}"), "/data/longhorn"), None);
        assert_eq!(missing(root, "/database"), None);
        assert_eq!(missing(root, "/var/lib/longhorn"), None);
    }

    #[test]
    fn finds_the_file_system() {
        let mounts = "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n\
                      23 22 0:40 /sub /data rw - btrfs /dev/sdb rw\n";
        let find = |number, path: &str| filesystem_in(mounts, number, Path::new(path)).unwrap();
        assert_eq!(find("8:1", "/var/lib/longhorn"), "ext4");
        assert_eq!(find("0:99", "/data/longhorn"), "btrfs");
        assert_eq!(find("0:99", "/database"), "ext4");
    }
}
