//! The records of udev: one file for each device, named by its number (`device_update_db` in systemd,
//! sd-device/device-private.c).
//!
//! A number is reused, and a device that exists before its volume (nbd0) has a record from that time. So the
//! existence of a record says nothing about the event that just happened.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::DeviceNumber;

/// The record that udev had of a disk before an event.
#[derive(Debug)]
pub struct UdevBefore {
    /// The time of the event, by the clock of the stamps in records.
    now_us: u64,
    /// The disk, if it existed, and the version of its record.
    disk: Option<(DeviceNumber, Option<Version>)>,
}

/// udev replaces the whole file with each event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    inode: u64,
    changed: (i64, i64),
}

impl UdevBefore {
    pub(super) fn look(records: &Path, disk: Option<DeviceNumber>) -> UdevBefore {
        let disk = disk.map(|device| (device, version(&path(records, device))));
        UdevBefore { now_us: now_us(), disk }
    }

    /// Returns true if the record of `device` that now has `version` and `text` is of the event, or of a
    /// later one.
    fn is_before(&self, device: DeviceNumber, version: Version, text: &str) -> bool {
        match self.disk {
            Some((known, old)) if known == device => old != Some(version),
            // A new disk: udev stamps its record when it sees it for the first time. A record without a stamp
            // has no information.
            _ => initialised_us(text).is_none_or(|stamp| stamp >= self.now_us),
        }
    }
}

/// Returns true if udev has handled an event of `device` since `before`.
pub(super) fn has_handled(records: &Path, device: DeviceNumber, before: Option<&UdevBefore>) -> bool {
    let path = path(records, device);
    let (Some(version), Ok(text)) = (version(&path), fs::read_to_string(&path)) else { return false };
    before.is_none_or(|before| before.is_before(device, version, &text))
}

fn path(records: &Path, device: DeviceNumber) -> PathBuf {
    records.join(format!("b{device}"))
}

fn version(path: &Path) -> Option<Version> {
    let meta = fs::metadata(path).ok()?;
    Some(Version { inode: meta.ino(), changed: (meta.ctime(), meta.ctime_nsec()) })
}

/// Returns the line `I:` of a record: when udev saw the device for the first time, in microseconds of
/// CLOCK_MONOTONIC.
fn initialised_us(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("I:")?.parse().ok())
}

fn now_us() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes the time to `now` and nothing else. Every Linux has the clock; otherwise
    // `now` would stay 0 and every record would count as new.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let (seconds, nanoseconds) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000 + nanoseconds.unwrap_or(0) / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: DeviceNumber = DeviceNumber { major: 259, minor: 3 };

    fn write(records: &Path, stamp_us: u64) {
        let new = records.join(".new");
        fs::write(&new, format!("S:disk/by-diskseq/7\nI:{stamp_us}\nE:ID_X=1\n")).unwrap();
        fs::rename(&new, path(records, DISK)).unwrap();
    }

    #[test]
    fn the_record_of_an_earlier_disk_with_the_number_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), 1);
        let before = UdevBefore::look(dir.path(), None);
        assert!(!has_handled(dir.path(), DISK, Some(&before)), "it was there before the disk");
        assert!(has_handled(dir.path(), DISK, None), "nothing has happened to the disk");
        fs::remove_file(path(dir.path(), DISK)).unwrap();
        assert!(!has_handled(dir.path(), DISK, Some(&before)) && !has_handled(dir.path(), DISK, None));
        write(dir.path(), now_us());
        assert!(has_handled(dir.path(), DISK, Some(&before)));
    }

    #[test]
    fn the_record_of_a_disk_that_was_there_is_believed_once_it_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let before = UdevBefore::look(dir.path(), Some(DISK));
        write(dir.path(), 1);
        assert!(has_handled(dir.path(), DISK, Some(&before)), "udev did not know it");
        let before = UdevBefore::look(dir.path(), Some(DISK));
        assert!(!has_handled(dir.path(), DISK, Some(&before)));
        write(dir.path(), 1);
        assert!(has_handled(dir.path(), DISK, Some(&before)), "the stamp stays, the file is another one");
    }

    #[test]
    fn stamps_of_records() {
        assert_eq!(initialised_us("N:ublkb0\nI:12345\nG:x\n"), Some(12345));
        for text in ["", "E:A=I:5\n", "I:\n", "I:x\n"] {
            assert_eq!(initialised_us(text), None, "{text}");
        }
    }
}
