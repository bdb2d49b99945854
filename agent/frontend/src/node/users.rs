//! Users of a block device.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use shorthorn_linux::block_device::{device_at, is_gone};
use shorthorn_linux::mounts::MountTable;

use super::{DeviceNumber, folder_of, name_of};
use crate::wait;

/// The time for which a program may have a device open for a look, as udev does after each change. udev needs
/// some milliseconds for that.
const GLANCE_LIMIT: Duration = Duration::from_secs(1);
/// The most users that a message names.
const NAMES_MAX: usize = 8;

/// Returns a description of the users of the block device at `path`; none if it has none. Users are mounted
/// file systems, devices on top of it, swap, loop devices, and processes that have it open. A mount of its
/// node elsewhere counts too, as kubelet makes it for pods that use it as a device.
///
/// For exclusive users the kernel decides: it gives a second one EBUSY, and names are looked up only for the
/// message. All others are searched. Three kinds are not found. The first is a process that has only mapped
/// the device. The second is a mount of the node in a mount namespace other than this one and that of the
/// init process. The third is a process in a container whose processes this one does not see. A device that
/// does not exist has no user. A device that cannot be opened counts as used.
#[must_use]
pub fn in_use(path: &Path) -> Option<String> {
    let opened = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_EXCL | libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(path);
    match opened {
        Ok(exclusive) => {
            // Else it would be found among the users.
            drop(exclusive);
            lasting_users(path, |_| true)
        }
        Err(error) if is_gone(&error) => None,
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            let users =
                device_at(path).map(|device| KernelFiles::default().users(device)).unwrap_or_default();
            Some(if users.is_empty() { "opened exclusively".to_owned() } else { listed(&users) })
        }
        Err(error) => Some(format!("perhaps: {} cannot be opened: {error}", path.display())),
    }
}

/// Returns the non-exclusive users of the block device at `path`, this process left out; none if it has none.
/// An exclusive one, which the kernel knows, is not searched.
#[must_use]
pub fn shared_with(path: &Path) -> Option<String> {
    let own = format!("opened by process {} (", std::process::id());
    lasting_users(path, |user| !user.contains(&own))
}

/// Returns the users of a device without an exclusive user that count.
fn lasting_users(path: &Path, counts: impl Fn(&String) -> bool) -> Option<String> {
    let meta = fs::metadata(path).ok().filter(|meta| meta.file_type().is_block_device())?;
    let (device, node_fs) = (DeviceNumber::of(meta.rdev()), DeviceNumber::of(meta.dev()));
    let kernel = KernelFiles::default();
    let mut users = Vec::new();
    let free = wait::until(GLANCE_LIMIT, || {
        users = kernel.sharers(device, node_fs);
        users.retain(&counts);
        Ok::<_, std::convert::Infallible>(users.is_empty().then_some(()))
    });
    matches!(free, Ok(None)).then(|| listed(&users))
}

fn listed(users: &[String]) -> String {
    let mut text = users.iter().take(NAMES_MAX).cloned().collect::<Vec<_>>().join(", ");
    if let Some(more) = users.len().checked_sub(NAMES_MAX).filter(|more| *more > 0) {
        text.push_str(&format!(" and {more} more"));
    }
    text
}

/// The paths of the kernel's information about itself.
struct KernelFiles {
    sysfs: PathBuf,
    proc: PathBuf,
}

impl Default for KernelFiles {
    fn default() -> KernelFiles {
        KernelFiles { sysfs: "/sys".into(), proc: "/proc".into() }
    }
}

impl KernelFiles {
    /// Returns the users of `device` or a partition of it, in words. Unreadable information is left out.
    fn users(&self, device: DeviceNumber) -> Vec<String> {
        let mut users = Vec::new();
        let devices = self.with_partitions(device);
        for (_, mounts) in MountTable::of_both_namespaces(&self.proc) {
            for mount in mounts.iter() {
                if devices.contains(&mount.device) || is_one_of(&devices, &mount.source) {
                    users.push(format!("mounted at {}", mount.point.display()));
                }
            }
        }
        for member in &devices {
            let holders = fs::read_dir(folder_of(&self.sysfs, *member).join("holders"));
            for holder in holders.into_iter().flatten().flatten() {
                users.push(format!("held by {}", holder.file_name().display()));
            }
        }
        let swaps = parse_swaps(&self.read("swaps"));
        users
            .extend(swaps.iter().filter(|swap| is_one_of(&devices, swap)).map(|_| "used as swap".to_owned()));
        if users.is_empty() {
            users = self.openers(&devices);
        }
        users.sort();
        users.dedup();
        users
    }

    /// Returns the non-exclusive users of `device` or a partition of it, in words. `node_fs` is the file
    /// system that has its node.
    fn sharers(&self, device: DeviceNumber, node_fs: DeviceNumber) -> Vec<String> {
        let devices = self.with_partitions(device);
        let mut users = self.mounted_nodes(&devices, node_fs);
        users.extend(self.loops(&devices));
        users.extend(self.openers(&devices));
        users.sort();
        users.dedup();
        users
    }

    /// Returns the places at which a node of one of `devices` is mounted on a file.
    fn mounted_nodes(&self, devices: &[DeviceNumber], node_fs: DeviceNumber) -> Vec<String> {
        let mut found = Vec::new();
        for (process, mounts) in MountTable::of_both_namespaces(&self.proc) {
            let root = process.join("root");
            for mount in mounts.iter() {
                // Nothing is asked about mounts of other file systems.
                if mount.device != node_fs || mount.root == Path::new("/") {
                    continue;
                }
                let point = root.join(mount.point.strip_prefix("/").unwrap_or(&mount.point));
                if is_one_of(devices, &point) {
                    found.push(format!("the device node is mounted at {}", mount.point.display()));
                }
            }
        }
        found
    }

    /// Returns the loop devices whose file is a node of one of `devices`. They are in no list of holders.
    fn loops(&self, devices: &[DeviceNumber]) -> Vec<String> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.sysfs.join("block")).into_iter().flatten().flatten() {
            let Ok(file) = fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
            let name = entry.file_name();
            // The kernel knows the device, even if the path has changed.
            let behind = loop_backing(&Path::new("/dev").join(&name));
            let is_meant = match behind {
                Some(device) => devices.contains(&device),
                None => is_one_of(devices, Path::new(file.trim_end())),
            };
            if is_meant {
                found.push(format!("held by the loop device {}", name.display()));
            }
        }
        found
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.proc.join(name)).unwrap_or_default()
    }

    fn with_partitions(&self, device: DeviceNumber) -> Vec<DeviceNumber> {
        let mut devices = vec![device];
        for entry in fs::read_dir(folder_of(&self.sysfs, device)).into_iter().flatten().flatten() {
            let folder = entry.path();
            if folder.join("partition").exists() {
                let number = fs::read_to_string(folder.join("dev")).ok();
                devices.extend(number.and_then(|text| text.parse::<DeviceNumber>().ok()));
            }
        }
        devices
    }

    /// Returns the processes that have one of `devices` open, exclusively or not.
    fn openers(&self, devices: &[DeviceNumber]) -> Vec<String> {
        let mut openers = Vec::new();
        for process in fs::read_dir(&self.proc).into_iter().flatten().flatten() {
            let id = process.file_name();
            let Some(id) = id.to_str().filter(|id| id.bytes().all(|byte| byte.is_ascii_digit())) else {
                continue;
            };
            let files = fs::read_dir(process.path().join("fd"));
            if files.into_iter().flatten().flatten().any(|file| is_one_of(devices, &file.path())) {
                let command = self.read(&format!("{id}/comm"));
                let names: Vec<String> =
                    devices.iter().filter_map(|device| name_of(&self.sysfs, *device)).collect();
                openers.push(format!(
                    "{} opened by process {id} ({})",
                    names.join(" or "),
                    command.trim_end()
                ));
            }
        }
        openers
    }
}

/// Returns the block device behind the loop device at `path`; none if that is a file, or unknown.
fn loop_backing(path: &Path) -> Option<DeviceNumber> {
    /// LOOP_GET_STATUS64 of linux/loop.h.
    const GET_STATUS: libc::Ioctl = 0x4c05;
    /// The length of `struct loop_info64` in numbers of 8 bytes. The third is the number of the device behind
    /// it, as in stat(2).
    const WORDS: usize = 232 / 8;
    let file = fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    let mut info = [0_u64; WORDS];
    // SAFETY: the kernel writes sizeof(struct loop_info64) = 232 bytes to `info`, which has as many and
    // outlives the call. Every pattern of bits is a valid array of numbers.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), GET_STATUS, info.as_mut_ptr()) };
    (answer == 0 && info[2] != 0).then(|| DeviceNumber::of(info[2]))
}

fn is_one_of(devices: &[DeviceNumber], path: &Path) -> bool {
    // Sources of mounts need not be paths: "tmpfs", "host:/export".
    path.is_absolute() && device_at(path).is_some_and(|device| devices.contains(&device))
}

/// Returns the devices and files in /proc/swaps, see proc_swaps(5).
fn parse_swaps(text: &str) -> Vec<PathBuf> {
    let names = text.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    names.filter_map(|name| shorthorn_linux::mounts::path(name.as_bytes())).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DISK: DeviceNumber = DeviceNumber { major: 259, minor: 3 };

    const MOUNTINFO: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
90 22 259:3 / /mnt/my\\040data rw,relatime shared:40 master:2 - ext4 /dev/longhorn/a rw,stripe=256
91 22 0:44 /sub /srv rw shared:41 - btrfs /dev/longhorn/b rw,space_cache=v2
92 22 0:45 / /tmp rw - tmpfs tmpfs rw
garbage
93 22 1:x / /odd rw - ext4 /dev/odd rw
";

    #[test]
    fn swaps_have_names() {
        let text = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
                    /dev/ublkb0                             partition\t1020\t0\t-2\n/a\\040b file 1 0 -3\n";
        assert_eq!(parse_swaps(text), [Path::new("/dev/ublkb0"), Path::new("/a b")]);
        assert_eq!(parse_swaps(""), Vec::<PathBuf>::new());
    }

    #[test]
    fn names_the_users_of_a_disk_and_its_partitions() {
        let root = tempfile::tempdir().unwrap();
        let kernel = KernelFiles { sysfs: root.path().join("sys"), proc: root.path().join("proc") };
        let disk = kernel.sysfs.join("dev/block/259:3");
        let partition = disk.join("ublkb0p1");
        for (path, content) in [
            (partition.join("partition"), "1\n"),
            (partition.join("dev"), "259:4\n"),
            (kernel.sysfs.join("dev/block/259:4/holders/dm-0"), ""),
            (kernel.proc.join("self/mountinfo"), MOUNTINFO),
            (kernel.proc.join("1/mountinfo"), MOUNTINFO),
        ] {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        assert_eq!(kernel.users(DISK), ["held by dm-0", "mounted at /mnt/my data"]);
        assert_eq!(kernel.users(DeviceNumber { major: 8, minor: 0 }), Vec::<String>::new());
    }

    #[test]
    fn a_message_names_only_so_many_users() {
        let users: Vec<String> = (0..NAMES_MAX + 2).map(|at| at.to_string()).collect();
        assert_eq!(listed(&users[..2]), "0, 1");
        assert!(listed(&users).ends_with("7 and 2 more"), "{}", listed(&users));
    }

    #[test]
    fn a_device_that_is_not_there_is_free() {
        assert_eq!(in_use(Path::new("/dev/no-such-device")), None);
    }

    proptest! {
        #[test]
        fn any_text_is_taken_without_harm(text in "\\PC{0,200}") {
            parse_swaps(&text);
        }
    }
}
