//! NBD devices of this host in sysfs.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use shorthorn_linux::block_device::is_gone;
use shorthorn_types::limits::SECTOR_BYTES;

use crate::node::DeviceNumber;
use crate::{queue_attribute, wait};

const BLOCK: &str = "/sys/block";
/// The major number of NBD devices (NBD_MAJOR in linux/major.h).
const NBD_MAJOR: u32 = 43;

/// Returns the name of device `index` in /dev and /sys/block.
pub(super) fn name(index: u32) -> String {
    format!("nbd{index}")
}

fn attribute(root: &Path, index: u32, attribute: &str) -> PathBuf {
    root.join(name(index)).join(attribute)
}

/// Returns the identifier with which device `index` was made. None if it is not connected.
pub(super) fn backend(index: u32) -> Option<String> {
    backend_in(Path::new(BLOCK), index)
}

fn backend_in(root: &Path, index: u32) -> Option<String> {
    let text = fs::read_to_string(attribute(root, index, "backend")).ok()?;
    Some(text.trim_end_matches('\n').to_owned())
}

/// Returns the identifier with which the device of that number was made. None if it is no NBD device, or not
/// connected.
pub(super) fn backend_of_number(root: &Path, number: DeviceNumber) -> Option<String> {
    if number.major != NBD_MAJOR {
        return None;
    }
    let text = fs::read_to_string(root.join(number.to_string()).join("backend")).ok()?;
    Some(text.trim_end_matches('\n').to_owned())
}

/// Returns true if device `index` was made with the identifier `backend`, and is still connected.
///
/// # Errors
/// The identifier cannot be read, although the device may be connected.
pub(super) fn has_backend(index: u32, backend: &str) -> io::Result<bool> {
    has_backend_in(Path::new(BLOCK), index, backend)
}

fn has_backend_in(root: &Path, index: u32, backend: &str) -> io::Result<bool> {
    match fs::read_to_string(attribute(root, index, "backend")) {
        Ok(text) => Ok(text.trim_end_matches('\n') == backend),
        Err(error) if is_gone(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns true if device `index` is connected, or not yet completely disconnected.
pub(super) fn is_connected(index: u32) -> bool {
    attribute(Path::new(BLOCK), index, "pid").exists()
}

/// Returns the number of device `index`.
///
/// # Errors
/// The error of the file system.
pub(super) fn number(index: u32) -> io::Result<DeviceNumber> {
    let text = fs::read_to_string(attribute(Path::new(BLOCK), index, "dev"))?;
    text.trim().parse().map_err(io::Error::other)
}

/// Has udev examine device `index` again. The kernel may announce a new device before the attribute `backend`
/// exists, by which Shorthorn's rules know it.
///
/// # Errors
/// The error of the file system.
pub(super) fn announce(index: u32) -> io::Result<()> {
    fs::write(attribute(Path::new(BLOCK), index, "uevent"), "change")
}

/// Returns the devices whose identifier is `backend`.
///
/// # Errors
/// The error of the file system.
pub(super) fn find(backend: &str) -> io::Result<Vec<u32>> {
    find_in(Path::new(BLOCK), backend)
}

fn find_in(root: &Path, backend: &str) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root)? {
        let name = entry?.file_name();
        let index = name.to_str().and_then(|name| name.strip_prefix("nbd")?.parse().ok());
        if let Some(index) = index
            && backend_in(root, index).as_deref() == Some(backend)
        {
            found.push(index);
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Asks the kernel to make requests of device `index` of up to `bytes`, and no longer ones. It does so soon.
/// By itself the driver of Linux 6.1 ends them at 128 KiB, and that of Linux 6.12 at 1280 KiB.
pub(super) fn limit_requests(index: u32, bytes: u32) {
    let consequence = "long requests are cut, or take two slots";
    queue_attribute::set(&name(index), "max_sectors_kb", bytes / 1024, consequence);
}

/// Has the timer of the requests of device `index` lowered from `default_ms`, the driver's own one of a
/// device without a request time-out. It happens soon. A device that an earlier version has made has a
/// time-out and keeps its timer. When that one runs out, the driver gives up the connection.
pub(super) fn set_request_timer(index: u32, default_ms: u32, value_ms: u32) {
    let consequence = "requests may wait 30 s after this process has died";
    queue_attribute::lower_from(&name(index), "io_timeout", default_ms, value_ms, consequence);
}

/// Reads the first sector through the block device `path`, past the page cache, within `limit`. The device is
/// one that this process does not serve: for its own, see [`crate::first_read`].
///
/// # Errors
/// The error of the device; [`io::ErrorKind::TimedOut`] if it does not answer.
pub(crate) fn read_once(path: PathBuf, limit: Duration) -> io::Result<()> {
    /// The alignment of direct reads: no device requires more than a memory page.
    const ALIGNMENT: usize = 4096;
    let length = usize::try_from(SECTOR_BYTES).unwrap_or(ALIGNMENT);
    wait::within(limit, move || {
        let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(&path)?;
        let mut memory = vec![0; ALIGNMENT + length];
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        file.read_exact_at(&mut memory[start..start + length], 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_identifier_is_found_by_the_number() {
        let dir = tempfile::tempdir().unwrap();
        for number in ["43:32", "8:0"] {
            fs::create_dir(dir.path().join(number)).unwrap();
            fs::write(dir.path().join(number).join("backend"), "shorthorn:a\n").unwrap();
        }
        let of = |major, minor| backend_of_number(dir.path(), DeviceNumber { major, minor });
        assert_eq!(of(43, 32).as_deref(), Some("shorthorn:a"));
        assert_eq!((of(43, 64), of(8, 0)), (None, None));
    }

    #[test]
    fn devices_are_found_by_their_backend() {
        let dir = tempfile::tempdir().unwrap();
        let device = |name: &str, backend: Option<&str>| {
            let dir = dir.path().join(name);
            fs::create_dir(&dir).unwrap();
            if let Some(backend) = backend {
                fs::write(dir.join("backend"), format!("{backend}\n")).unwrap();
            }
        };
        device("nbd12", Some("shorthorn:a"));
        device("nbd3", Some("shorthorn:a"));
        device("nbd4", Some("shorthorn:ab"));
        device("nbd5", None);
        device("nbd", Some("shorthorn:a"));
        device("nbdx", Some("shorthorn:a"));
        device("sda", Some("shorthorn:a"));
        assert_eq!(find_in(dir.path(), "shorthorn:a").unwrap(), [3, 12]);
        assert_eq!(find_in(dir.path(), "shorthorn:b").unwrap(), [0; 0]);
        assert_eq!(backend_in(dir.path(), 4).as_deref(), Some("shorthorn:ab"));
        assert!(find_in(&dir.path().join("none"), "shorthorn:a").is_err());

        let has_backend = |index, backend| has_backend_in(dir.path(), index, backend);
        assert!(has_backend(12, "shorthorn:a").unwrap());
        assert!(!has_backend(4, "shorthorn:a").unwrap(), "another volume has the number");
        assert!(!has_backend(5, "shorthorn:a").unwrap(), "another program has the number");
        assert!(!has_backend(6, "shorthorn:a").unwrap(), "no device has the number");
        fs::create_dir_all(dir.path().join("nbd7/backend")).unwrap();
        assert!(has_backend(7, "shorthorn:a").is_err(), "the identifier is not known");
    }

    #[test]
    fn a_file_reads_like_a_device() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("device");
        fs::write(&path, [1; 4096]).unwrap();
        read_once(path.clone(), Duration::from_secs(30)).unwrap();
        fs::write(&path, [1; 100]).unwrap();
        assert!(read_once(path, Duration::from_secs(30)).is_err(), "too short");
    }
}
