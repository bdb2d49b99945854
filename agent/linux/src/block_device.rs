//! Block devices in sysfs. A number or a name is reused, so each answer is about the device of that moment.

use std::fs;
use std::io;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};
use shorthorn_types::DeviceNumber;
use shorthorn_types::limits::SECTOR_BYTES;

/// Returns true if the error says that a device, or its folder in sysfs, does not exist.
#[must_use]
pub fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::ENXIO | libc::ENOTDIR))
}

/// Returns the device that the node at `path` leads to, links followed; none if it is another file. It asks
/// no server: the path may be on a network file system that hangs, and must not hang this process.
#[must_use]
pub fn device_at(path: &Path) -> Option<DeviceNumber> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    let found = statx(CWD, path, flags, StatxFlags::TYPE).ok()?;
    let is_block_device = FileType::from_raw_mode(found.stx_mode.into()) == FileType::BlockDevice;
    is_block_device.then_some(DeviceNumber { major: found.stx_rdev_major, minor: found.stx_rdev_minor })
}

/// Returns the size in bytes of the device with this folder in sysfs; none if it does not exist.
///
/// # Errors
/// The error of sysfs, or a size that is not a number.
pub fn size_in(folder: &Path) -> io::Result<Option<u64>> {
    let text = match fs::read_to_string(folder.join("size")) {
        Err(error) if is_gone(&error) => return Ok(None),
        read => read?,
    };
    let sectors: u64 =
        text.trim_end().parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok(Some(sectors.saturating_mul(SECTOR_BYTES)))
}

/// Returns the size in bytes of the device with this number; none if it does not exist.
///
/// # Errors
/// The same as for [`size_in`].
pub fn size_by_number(device: DeviceNumber) -> io::Result<Option<u64>> {
    size_in(Path::new(&format!("/sys/dev/block/{device}")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};

    use super::*;

    #[test]
    fn sizes_are_counted_in_sectors_of_512_bytes() {
        let disk = tempfile::tempdir().unwrap();
        assert_eq!(size_in(disk.path()).unwrap(), None);
        for (text, size_bytes) in [("0\n", 0), ("16\n", 8192), ("18446744073709551615\n", u64::MAX)] {
            fs::write(disk.path().join("size"), text).unwrap();
            assert_eq!(size_in(disk.path()).unwrap(), Some(size_bytes), "{text}");
        }
        fs::write(disk.path().join("size"), "many\n").unwrap();
        assert_eq!(size_in(disk.path()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn only_the_node_of_a_block_device_leads_to_one() {
        for path in ["/dev/null", "/dev", "/dev/no-such-device"] {
            assert_eq!(device_at(Path::new(path)), None, "{path}");
        }
        let nodes = fs::read_dir("/dev").unwrap().flatten();
        for node in nodes.filter(|node| node.file_type().is_ok_and(|kind| kind.is_block_device())) {
            let expected = DeviceNumber::of(node.metadata().unwrap().rdev());
            assert_eq!(device_at(&node.path()), Some(expected), "{}", node.path().display());
        }
    }

    #[test]
    fn a_device_that_does_not_exist_has_no_size() {
        assert_eq!(size_by_number(DeviceNumber { major: 4095, minor: 1 }).unwrap(), None);
    }
}
