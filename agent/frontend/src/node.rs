//! Device nodes: `/dev/longhorn/<volume>`, and the users of a block device.
//!
//! A node is a name for a device number, and outlives the device. It counts only if sysfs shows that the
//! number still belongs to a device.

mod removal;
mod udev;
mod users;

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt, lchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::stat::{Mode, SFlag, mknod};
use nix::unistd::Group;
use shorthorn_linux::block_device::{is_gone, size_in};
use shorthorn_types::VolumeName;

use crate::{FrontendError, wait};

pub(crate) use removal::remove_node_first;
pub use shorthorn_types::{DeviceNumber, DeviceNumberError};
pub use udev::{DeviceEvents, has_udev, property};
pub use users::{in_use, shared_with};

/// The mode of a device node: root and the group `disk` may open it, as for every disk of the host.
const NODE_MODE: u32 = 0o660;
/// The group of disks on every distribution; if it is missing, root alone may open the device.
const NODE_GROUP: &str = "disk";
/// The time limit for writing the page cache of a device back before the device is stopped. It equals the
/// limit of requests of a working volume: they end by the time-outs of the replicas.
const WRITE_BACK_LIMIT: Duration = Duration::from_secs(30);
const SYSFS: &str = "/sys";

/// A node in the directory of device nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNode {
    /// The volume in whose name the node was made.
    pub volume: VolumeName,
    /// The device number that the node names.
    pub device: DeviceNumber,
    /// True if a device of this number exists. The number of a removed device may since belong to another
    /// one. So a live node need not lead to the volume of its name. A dead one leads nowhere.
    pub live: bool,
}

/// Makes `<device_dir>/<volume>` a node of `device` atomically: a reader sees no node, the former one, or the
/// new one.
///
/// A node whose device is gone is replaced, and so is one whose number now belongs to another volume of
/// `device_dir`. A killed process leaves both behind.
///
/// # Errors
/// [`FrontendError::Refused`] if something else has that name: a node of a live device, or no node at all.
pub fn publish(
    device_dir: &Path,
    volume: &VolumeName,
    device: DeviceNumber,
) -> Result<PathBuf, FrontendError> {
    let path = device_dir.join(volume.as_str());
    let action = || format!("make the device node {} for device {device}", path.display());
    let system = |source| FrontendError::System { action: action(), source };
    fs::DirBuilder::new().recursive(true).mode(0o755).create(device_dir).map_err(system)?;
    let found = read_node_file(&path).map_err(system)?;
    if let Some(reason) = obstacle(Path::new(SYSFS), device_dir, volume, found, device).map_err(system)? {
        return Err(FrontendError::Refused { action: action(), reason });
    }
    // No volume has a name with a dot. A killed process leaves at most this one, for itself to replace.
    let new = device_dir.join(format!(".{volume}.new"));
    make(&new, device).and_then(|()| fs::rename(&new, &path)).map_err(system)?;
    Ok(path)
}

/// Takes the node of `volume` away if it leads to `device`; another one is not ours and stays.
///
/// # Errors
/// The error of the file system.
pub fn remove(device_dir: &Path, volume: &VolumeName, device: DeviceNumber) -> Result<(), FrontendError> {
    let path = device_dir.join(volume.as_str());
    let removed = match read_node_file(&path) {
        Ok(NodeFile::Node(found)) if found == device => fs::remove_file(&path),
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    };
    removed.map_err(|source| FrontendError::System {
        action: format!("remove the device node {}", path.display()),
        source,
    })
}

/// Returns all nodes in `device_dir` that have the name of a volume, in order of their names. A directory
/// that does not exist has none.
///
/// # Errors
/// The error of the file system.
pub fn scan(device_dir: &Path) -> Result<Vec<DeviceNode>, FrontendError> {
    nodes(Path::new(SYSFS), device_dir).map_err(|source| FrontendError::System {
        action: format!("look for device nodes in {}", device_dir.display()),
        source,
    })
}

/// Waits until the kernel shows the disk `name` (as in /sys/block) with `size_bytes`, and until udev, if it
/// runs, has handled it. Before that, udev may still have it open. `events` are from before the event that
/// udev has to handle; without them, any record of udev suffices.
///
/// # Errors
/// [`FrontendError::System`] if the disk does not come up within `limit`. A udev that is slow or stuck is
/// worth a warning only: the device works without its links.
pub fn wait_until_ready(
    name: &str,
    size_bytes: u64,
    events: Option<&DeviceEvents>,
    limit: Duration,
) -> Result<DeviceNumber, FrontendError> {
    let disk = Path::new(SYSFS).join("block").join(name);
    let failed = |source| FrontendError::System {
        action: format!("wait for the disk {name} of {size_bytes} bytes in {}", disk.display()),
        source,
    };
    let deadline = Instant::now() + limit;
    let any_record = events.is_none();
    let own;
    let events = match events {
        Some(events) => events,
        None => {
            own = DeviceEvents::listen();
            &own
        }
    };
    let mut is_heard = false;
    loop {
        // The last look comes after the limit: a thread that did not run for a while finds a late result.
        let rest = deadline.saturating_duration_since(Instant::now());
        let found = disk_of(&disk).map_err(failed)?.filter(|(_, size)| *size == size_bytes);
        if let Some((device, _)) = found {
            let is_handled = is_heard || !events.has_udev() || (any_record && udev::is_recorded(device));
            if !is_handled && rest.is_zero() {
                tracing::warn!(
                    disk = name,
                    "udev has not handled the disk within {limit:?}; continuing without it"
                );
            }
            if is_handled || rest.is_zero() {
                return Ok(device);
            }
        } else if rest.is_zero() {
            return Err(failed(wait::timed_out(limit)));
        }
        let sequence = read(&disk.join("diskseq")).map_err(failed)?;
        is_heard |= events.next(name, sequence.as_deref().map(str::trim_end), rest);
    }
}

/// Writes the page cache of the block device `path` of `volume` back, as far as possible within
/// [`WRITE_BACK_LIMIT`]. The driver discards the rest when the device is removed. A failure is only logged:
/// these writes were never acknowledged as durable, and the device has to be removed.
pub(crate) fn write_back(volume: &VolumeName, path: PathBuf) {
    let written = wait::within(WRITE_BACK_LIMIT, move || match fs::File::open(path) {
        Err(error) if is_gone(&error) => Ok(()),
        opened => opened?.sync_all(),
    });
    if let Err(error) = written {
        tracing::error!(%volume, %error, "writes to the device that are still in the page cache may be lost");
    }
}

/// Returns the number of the disk `name` (as in /sys/block); none if it does not exist.
///
/// # Errors
/// The error of sysfs.
pub(crate) fn disk_number(name: &str) -> io::Result<Option<DeviceNumber>> {
    Ok(disk_of(&Path::new(SYSFS).join("block").join(name))?.map(|(number, _)| number))
}

/// Returns the size of the disk `name` (as in /sys/block) in bytes; none if it does not exist.
///
/// # Errors
/// The error of sysfs.
pub(crate) fn disk_size(name: &str) -> io::Result<Option<u64>> {
    Ok(disk_of(&Path::new(SYSFS).join("block").join(name))?.map(|(_, size)| size))
}

/// Returns number and size of the disk whose folder in sysfs is `disk`; none if it does not exist.
fn disk_of(disk: &Path) -> io::Result<Option<(DeviceNumber, u64)>> {
    let (Some(device), Some(size_bytes)) = (read(&disk.join("dev"))?, size_in(disk)?) else {
        return Ok(None);
    };
    let device = device.parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok(Some((device, size_bytes)))
}

/// Returns the content of a small file; none if it does not exist, or was removed just now.
fn read(path: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

enum NodeFile {
    Nothing,
    Node(DeviceNumber),
    /// The file is not a block device; a description of it.
    Other(&'static str),
}

fn read_node_file(path: &Path) -> io::Result<NodeFile> {
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) if is_gone(&error) => return Ok(NodeFile::Nothing),
        Err(error) => return Err(error),
    };
    let kind = meta.file_type();
    Ok(match () {
        () if kind.is_block_device() => NodeFile::Node(DeviceNumber::of(meta.rdev())),
        () if kind.is_file() => {
            NodeFile::Other("a regular file, perhaps written while the device did not exist")
        }
        () if kind.is_symlink() => NodeFile::Other("a symbolic link"),
        () if kind.is_dir() => NodeFile::Other("a directory"),
        () => NodeFile::Other("no block device"),
    })
}

/// Returns the reason why the found file may not be replaced by a node of `device`; none if it may.
fn obstacle(
    sysfs: &Path,
    device_dir: &Path,
    volume: &VolumeName,
    found: NodeFile,
    device: DeviceNumber,
) -> io::Result<Option<String>> {
    let old = match found {
        NodeFile::Nothing => return Ok(None),
        NodeFile::Other(what) => {
            return Ok(Some(format!("{what} has that name; remove it if it is not needed")));
        }
        NodeFile::Node(old) if old == device || !is_live(sysfs, old) => return Ok(None),
        NodeFile::Node(old) => old,
    };
    let taken = nodes(sysfs, device_dir)?.iter().any(|node| node.device == old && node.volume != *volume);
    Ok((!taken).then(|| {
        format!(
            "the name refers to the live device {old} ({}); stop its server, or remove the node if it is a \
             leftover",
            name_of(sysfs, old).unwrap_or_else(|| "without a name in sysfs".into())
        )
    }))
}

fn make(path: &Path, device: DeviceNumber) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if !is_gone(&error) => return Err(error),
        _ => {}
    }
    mknod(path, SFlag::S_IFBLK, Mode::empty(), device.raw())?;
    if let Some(group) = Group::from_name(NODE_GROUP)? {
        lchown(path, None, Some(group.gid.as_raw()))?;
    }
    // This is the last step, so that the node cannot be opened before it has its group.
    fs::set_permissions(path, fs::Permissions::from_mode(NODE_MODE))
}

fn nodes(sysfs: &Path, device_dir: &Path) -> io::Result<Vec<DeviceNode>> {
    let entries = match fs::read_dir(device_dir) {
        Ok(entries) => entries,
        Err(error) if is_gone(&error) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut nodes = Vec::new();
    for entry in entries {
        let entry = entry?;
        let Some(volume) = entry.file_name().to_str().and_then(|name| VolumeName::new(name).ok()) else {
            continue;
        };
        if let NodeFile::Node(device) = read_node_file(&entry.path())? {
            nodes.push(DeviceNode { volume, device, live: is_live(sysfs, device) });
        }
    }
    nodes.sort_by(|a, b| a.volume.cmp(&b.volume));
    Ok(nodes)
}

fn folder_of(sysfs: &Path, device: DeviceNumber) -> PathBuf {
    sysfs.join("dev/block").join(device.to_string())
}

fn is_live(sysfs: &Path, device: DeviceNumber) -> bool {
    folder_of(sysfs, device).exists()
}

/// Returns the kernel's name of a device: `ublkb3`.
fn name_of(sysfs: &Path, device: DeviceNumber) -> Option<String> {
    let folder = fs::canonicalize(folder_of(sysfs, device)).ok()?;
    folder.file_name().and_then(OsStr::to_str).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEAD: DeviceNumber = DeviceNumber { major: 4095, minor: 1 };
    const DEAD_TOO: DeviceNumber = DeviceNumber { major: 4095, minor: 2 };

    fn name(text: &str) -> VolumeName {
        VolumeName::new(text).unwrap()
    }

    /// Returns a directory in which nodes can be made, or None if this user may not make any.
    fn directory() -> Option<tempfile::TempDir> {
        let directory = tempfile::tempdir().unwrap();
        match make(&directory.path().join("x"), DEAD) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                println!("skipped: this user may not make device nodes");
                return None;
            }
            made => made.unwrap(),
        }
        fs::remove_file(directory.path().join("x")).unwrap();
        Some(directory)
    }

    /// Returns a block device that this machine has: its number and the name of the kernel for it.
    fn live() -> (DeviceNumber, String) {
        let entry = fs::read_dir("/sys/dev/block").unwrap().next().unwrap().unwrap();
        let device = entry.file_name().to_str().unwrap().parse().unwrap();
        (device, name_of(Path::new(SYSFS), device).unwrap())
    }

    #[test]
    fn device_numbers_from_sysfs_and_stat() {
        assert_eq!("259:3\n".parse(), Ok(DeviceNumber { major: 259, minor: 3 }));
        for bad in ["", "259", ":", "a:b", "1:-2", "1:2:3"] {
            assert!(bad.parse::<DeviceNumber>().is_err(), "{bad}");
        }
        let big = DeviceNumber { major: 259, minor: 0xf_fff0 };
        assert_eq!(big.raw(), libc::makedev(big.major, big.minor));
    }

    #[test]
    fn publishes_replaces_leftovers_and_removes() {
        let Some(dir) = directory() else { return };
        let dir = dir.path().join("longhorn");
        let path = publish(&dir, &name("a"), DEAD).unwrap();
        let meta = fs::symlink_metadata(&path).unwrap();
        assert!(meta.file_type().is_block_device());
        assert_eq!((DeviceNumber::of(meta.rdev()), meta.mode() & 0o7777), (DEAD, NODE_MODE));
        if let Some(group) = Group::from_name(NODE_GROUP).unwrap() {
            assert_eq!(meta.gid(), group.gid.as_raw());
        }
        publish(&dir, &name("a"), DEAD).unwrap();
        publish(&dir, &name("a"), DEAD_TOO).unwrap();
        assert_eq!(scan(&dir).unwrap(), [DeviceNode { volume: name("a"), device: DEAD_TOO, live: false }]);
        remove(&dir, &name("a"), DEAD).unwrap();
        assert_eq!(scan(&dir).unwrap().len(), 1, "the node of another device stays");
        remove(&dir, &name("a"), DEAD_TOO).unwrap();
        remove(&dir, &name("a"), DEAD_TOO).unwrap();
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    }

    #[test]
    fn a_killed_publish_leaves_nothing_that_matters() {
        let Some(dir) = directory() else { return };
        make(&dir.path().join(".a.new"), DEAD).unwrap();
        assert_eq!(scan(dir.path()).unwrap(), []);
        publish(dir.path(), &name("a"), DEAD_TOO).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn the_node_of_a_live_device_stays() {
        let Some(dir) = directory() else { return };
        let (device, kernel_name) = live();
        publish(dir.path(), &name("a"), device).unwrap();
        assert!(scan(dir.path()).unwrap()[0].live);
        let error = publish(dir.path(), &name("a"), DEAD).unwrap_err().to_string();
        assert!(error.contains(&device.to_string()) && error.contains(&kernel_name), "{error}");
        publish(dir.path(), &name("a"), device).unwrap();
        // Now that another volume has that number, the old node is a leftover of it.
        publish(dir.path(), &name("b"), device).unwrap();
        publish(dir.path(), &name("a"), DEAD).unwrap();
    }

    #[test]
    fn files_that_are_not_nodes_stay() {
        let Some(dir) = directory() else { return };
        fs::write(dir.path().join("a"), "data").unwrap();
        let error = publish(dir.path(), &name("a"), DEAD).unwrap_err();
        assert!(matches!(error, FrontendError::Refused { .. }), "{error}");
        assert!(error.to_string().contains("a regular file"), "{error}");
        remove(dir.path(), &name("a"), DEAD).unwrap();
        assert_eq!(fs::read(dir.path().join("a")).unwrap(), b"data");
        assert_eq!(scan(dir.path()).unwrap(), []);
        assert_eq!(scan(&dir.path().join("missing")).unwrap(), []);
    }

    #[test]
    fn a_disk_is_ready_only_with_its_size() {
        let sys = tempfile::tempdir().unwrap();
        assert_eq!(disk_of(&sys.path().join("none")).unwrap(), None);
        fs::write(sys.path().join("dev"), "259:7\n").unwrap();
        fs::write(sys.path().join("size"), "2048\n").unwrap();
        let device = DeviceNumber { major: 259, minor: 7 };
        assert_eq!(disk_of(sys.path()).unwrap(), Some((device, 1 << 20)));
        fs::write(sys.path().join("size"), "many").unwrap();
        assert!(disk_of(sys.path()).is_err());
        let error = wait_until_ready("no-such-disk", 1 << 20, None, Duration::from_millis(1))
            .unwrap_err()
            .to_string();
        assert!(error.contains("no-such-disk of 1048576 bytes"), "{error}");
    }
}
