//! Who uses a block device.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{DeviceNumber, folder_of, is_gone, name_of};

/// Whether somebody holds the block device at `path` exclusively (a mounted file system, another device on top
/// of it, swap, or a program that asked for it), and who. A program that has it open without asking for
/// exclusivity is not noticed.
///
/// The kernel decides: it gives a second exclusive opener EBUSY. Names are looked up only for the message. A
/// device that does not exist is used by nobody; one that can not be opened is taken as used.
#[must_use]
pub fn in_use(path: &Path) -> Option<String> {
    let opened = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_EXCL | libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(path);
    match opened {
        Ok(_) => None,
        Err(error) if is_gone(&error) => None,
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            let users = device_at(path).map(|device| Host::default().users(device)).unwrap_or_default();
            Some(if users.is_empty() { "opened exclusively".to_owned() } else { users.join(", ") })
        }
        Err(error) => Some(format!("perhaps: {} can not be opened: {error}", path.display())),
    }
}

/// The device that the node at `path` leads to, links followed.
fn device_at(path: &Path) -> Option<DeviceNumber> {
    let meta = fs::metadata(path).ok()?;
    meta.file_type().is_block_device().then(|| DeviceNumber::of(meta.rdev()))
}

/// Where the kernel tells about itself.
struct Host {
    sysfs: PathBuf,
    proc: PathBuf,
}

impl Default for Host {
    fn default() -> Host {
        Host { sysfs: "/sys".into(), proc: "/proc".into() }
    }
}

impl Host {
    /// Who uses `device` or a partition of it, in words. What can not be read is left out.
    fn users(&self, device: DeviceNumber) -> Vec<String> {
        let mut users = Vec::new();
        let devices = self.with_partitions(device);
        // Process 1 sees the mounts of the host; we may live in a namespace of our own.
        for process in ["self", "1"] {
            let mounts = self.read(&format!("{process}/mountinfo"));
            for mount in parse_mountinfo(&mounts) {
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

    /// The processes that have one of `devices` open, exclusively or not: at least one of them does.
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

fn is_one_of(devices: &[DeviceNumber], path: &Path) -> bool {
    // Sources of mounts need not be paths: "tmpfs", "host:/export".
    path.is_absolute() && device_at(path).is_some_and(|device| devices.contains(&device))
}

/// One line of /proc/<pid>/mountinfo, see proc_pid_mountinfo(5).
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    /// The device of the file system; made up where it spans several devices (btrfs).
    device: DeviceNumber,
    point: PathBuf,
    source: PathBuf,
}

/// Lines that do not look as they should are skipped: this serves messages only.
fn parse_mountinfo(text: &str) -> Vec<Mount> {
    let parse = |line: &str| {
        let (front, back) = line.split_once(" - ")?;
        let mut front = front.split(' ').skip(2);
        let device = front.next()?.parse().ok()?;
        let point = unescape(front.nth(1)?);
        let source = unescape(back.split(' ').nth(1)?);
        Some(Mount { device, point, source })
    };
    text.lines().filter_map(parse).collect()
}

/// The devices and files in /proc/swaps, see proc_swaps(5).
fn parse_swaps(text: &str) -> Vec<PathBuf> {
    text.lines().skip(1).filter_map(|line| line.split_whitespace().next()).map(unescape).collect()
}

/// Undoes the escaping of blanks, tabs, newlines, '#' and backslashes as three octal digits.
fn unescape(text: &str) -> PathBuf {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let digits = text.get(at + 1..at + 4).filter(|_| *byte == b'\\');
        let escaped = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        out.push(escaped.unwrap_or(*byte));
        at += if escaped.is_some() { 4 } else { 1 };
    }
    OsString::from_vec(out).into()
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

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
    fn mounts_have_device_point_and_source() {
        let mounts = parse_mountinfo(MOUNTINFO);
        assert_eq!(mounts.len(), 4);
        let expected = Mount { device: DISK, point: "/mnt/my data".into(), source: "/dev/longhorn/a".into() };
        assert_eq!(mounts[1], expected);
        assert_eq!(mounts[2].source, Path::new("/dev/longhorn/b"));
    }

    #[test]
    fn swaps_have_names() {
        let text = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n/dev/ublkb0                             partition\t1020\t0\t-2\n/a\\040b file 1 0 -3\n";
        assert_eq!(parse_swaps(text), [Path::new("/dev/ublkb0"), Path::new("/a b")]);
        assert_eq!(parse_swaps(""), Vec::<PathBuf>::new());
    }

    #[test]
    fn says_who_uses_a_disk_or_its_partition() {
        let root = tempfile::tempdir().unwrap();
        let host = Host { sysfs: root.path().join("sys"), proc: root.path().join("proc") };
        let disk = host.sysfs.join("dev/block/259:3");
        let partition = disk.join("ublkb0p1");
        for (path, content) in [
            (partition.join("partition"), "1\n"),
            (partition.join("dev"), "259:4\n"),
            (host.sysfs.join("dev/block/259:4/holders/dm-0"), ""),
            (host.proc.join("self/mountinfo"), MOUNTINFO),
            (host.proc.join("1/mountinfo"), MOUNTINFO),
        ] {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        assert_eq!(host.users(DISK), ["held by dm-0", "mounted at /mnt/my data"]);
        assert_eq!(host.users(DeviceNumber { major: 8, minor: 0 }), Vec::<String>::new());
    }

    #[test]
    fn a_device_that_is_not_there_is_free() {
        assert_eq!(in_use(Path::new("/dev/no-such-device")), None);
    }

    proptest! {
        #[test]
        fn escaping_is_undone(name in "[ -~\t\n]{0,40}") {
            let escaped: String = name
                .bytes()
                .map(|byte| match byte {
                    b' ' | b'\t' | b'\n' | b'\\' | b'#' => format!("\\{byte:03o}"),
                    _ => char::from(byte).to_string(),
                })
                .collect();
            let path = unescape(&escaped);
            prop_assert_eq!(path.as_os_str().as_bytes(), name.as_bytes());
        }

        #[test]
        fn any_text_is_taken_without_harm(text in "\\PC{0,200}") {
            parse_mountinfo(&text);
            parse_swaps(&text);
            unescape(&text);
        }
    }
}
