//! The table of mounts, from `/proc/<pid>/mountinfo`. Its format is in proc_pid_mountinfo(5).
//!
//! - [`MountTable::read`] is for decisions about mounts: a line that is not understood is an error.
//! - [`MountTable::readable_in`] is for searches and messages: such lines are skipped.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use shorthorn_types::DeviceNumber;
use thiserror::Error;

const MOUNTINFO: &str = "/proc/self/mountinfo";
/// The maximum number of reads of a table that changes while it is read.
const READS_MAX: usize = 5;

/// A line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Device of the file system.
    pub device: DeviceNumber,
    /// The directory, or file, of the file system that is mounted.
    pub root: PathBuf,
    /// The directory or file that the mount covers.
    pub point: PathBuf,
    /// Options of the mount, separated by commas.
    pub options: String,
    /// True if mounts below it appear in other namespaces too.
    pub is_shared: bool,
    /// Kind of the file system.
    pub fs_type: String,
    /// Device, server or name of the file system.
    pub source: PathBuf,
    /// Options of the file system.
    pub super_options: String,
}

/// The line is not as proc_pid_mountinfo(5) says.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{MOUNTINFO} has a line that cannot be parsed: {0:?}")]
pub struct MountInfoError(String);

/// All mounts of a mount namespace, in the order in which the kernel lists them.
#[derive(Clone, Debug, Default)]
pub struct MountTable(Vec<Mount>);

impl MountTable {
    /// Returns the current mounts of this process.
    ///
    /// # Errors
    /// The error of the system, or [`MountInfoError`].
    pub fn read() -> io::Result<MountTable> {
        // The kernel gives the file page by page, and mounts may come and go in between.
        let mut before = fs::read(MOUNTINFO)?;
        for _ in 1..READS_MAX {
            let now = fs::read(MOUNTINFO)?;
            if now == before {
                break;
            }
            before = now;
        }
        MountTable::parse(&before).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Returns the mounts in the lines of a `mountinfo` file that are understood; none if it cannot be read.
    #[must_use]
    pub fn readable_in(file: &Path) -> MountTable {
        MountTable::readable(&fs::read(file).unwrap_or_default())
    }

    /// Returns the mounts of this process, then those of process 1, each with the folder of the process in
    /// `proc`. Process 1 sees the mounts of the host; this process may have a mount namespace of its own.
    #[must_use]
    pub fn of_both_namespaces(proc: &Path) -> [(PathBuf, MountTable); 2] {
        ["self", "1"].map(|process| {
            let process = proc.join(process);
            let table = MountTable::readable_in(&process.join("mountinfo"));
            (process, table)
        })
    }

    /// Returns the mounts in the lines of `text` that are understood.
    #[must_use]
    pub fn readable(text: &[u8]) -> MountTable {
        MountTable(lines(text).filter_map(parse_line).collect())
    }

    fn parse(text: &[u8]) -> Result<MountTable, MountInfoError> {
        let wrong = |line: &[u8]| MountInfoError(String::from_utf8_lossy(line).chars().take(200).collect());
        lines(text)
            .map(|line| parse_line(line).ok_or_else(|| wrong(line)))
            .collect::<Result<_, _>>()
            .map(MountTable)
    }

    /// Returns the visible mount at `point`: the last of mounts on top of each other.
    #[must_use]
    pub fn at(&self, point: &Path) -> Option<&Mount> {
        self.0.iter().rev().find(|mount| mount.point == point)
    }

    /// Returns the visible mount that `path` is on.
    #[must_use]
    pub fn above(&self, path: &Path) -> Option<&Mount> {
        path.ancestors().find_map(|above| self.at(above))
    }

    /// Returns the mounts in the order of the kernel.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Mount> {
        self.0.iter()
    }
}

impl Mount {
    /// Returns true if it is the file system on that device, whole.
    #[must_use]
    pub fn is_whole(&self, device: DeviceNumber) -> bool {
        self.device == device && self.root == Path::new("/")
    }

    /// Returns true if it may only be read through this mount.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        has_option(&self.options, "ro")
    }

    /// Returns the reason why writes fail although the mount allows them; none if they work.
    #[must_use]
    pub fn trouble(&self) -> Option<&'static str> {
        let now = |option| has_option(&self.super_options, option);
        if now("shutdown") {
            return Some("the file system has shut itself down after an error");
        }
        let read_only = !self.is_read_only() && (now("ro") || now("emergency_ro"));
        read_only.then_some("the file system has made itself read-only after an error")
    }
}

fn has_option(options: &str, wanted: &str) -> bool {
    options.split(',').any(|option| option == wanted)
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty())
}

/// Parses a line like `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`.
fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let (_id, _parent) = (fields.next()?, fields.next()?);
    let device = text(fields.next()?)?.parse().ok()?;
    let (root, point) = (path(fields.next()?)?, path(fields.next()?)?);
    let options = text(fields.next()?)?;
    // Any number of optional fields.
    let mut is_shared = false;
    loop {
        match fields.next()? {
            b"-" => break,
            field => is_shared |= field.starts_with(b"shared:"),
        }
    }
    let fs_type = text(fields.next()?)?;
    let source = path(fields.next()?)?;
    let super_options = text(fields.next()?)?;
    Some(Mount { device, root, point, options, is_shared, fs_type, source, super_options })
}

/// Decodes a path of a table of the kernel, or of fstab(5); none if an escape is not understood.
#[must_use]
pub fn path(field: &[u8]) -> Option<PathBuf> {
    Some(PathBuf::from(OsString::from_vec(unescape(field)?)))
}

fn text(field: &[u8]) -> Option<String> {
    Some(String::from_utf8_lossy(&unescape(field)?).into_owned())
}

/// Decodes space, tab, newline, backslash and '#', which are written as three octal digits.
fn unescape(field: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.iter();
    while let Some(byte) = rest.next() {
        if *byte != b'\\' {
            bytes.push(*byte);
            continue;
        }
        let mut value = 0u16;
        for _ in 0..3 {
            let digit = rest.next().filter(|digit| (b'0'..=b'7').contains(digit))?;
            value = value * 8 + u16::from(digit - b'0');
        }
        bytes.push(u8::try_from(value).ok()?);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TABLE: &str = "\
22 27 0:21 / /proc rw,relatime - proc proc rw
36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:7 - ext3 /dev/root rw,errors=continue
40 27 259:3 / /var/lib/kubelet/a\\040b\\134c\\011d rw - ext4 /dev/longhorn/v1 ro,errors=remount-ro
41 27 259:4 / /m ro,nosuid - xfs /dev/longhorn/v2 rw
42 27 259:5 / /m rw - xfs /dev/longhorn/v3 rw
43 27 0:6 /longhorn/v1 /blk rw - devtmpfs devtmpfs rw,size=1k
44 27 0:50 / /empty rw -  none rw
";

    fn table() -> MountTable {
        MountTable::parse(TABLE.as_bytes()).unwrap()
    }

    fn number(text: &str) -> DeviceNumber {
        text.parse().unwrap()
    }

    #[test]
    fn reads_every_field() {
        let table = table();
        let wanted = Mount {
            device: number("98:0"),
            root: "/mnt1".into(),
            point: "/mnt2".into(),
            options: "rw,noatime".into(),
            is_shared: true,
            fs_type: "ext3".into(),
            source: "/dev/root".into(),
            super_options: "rw,errors=continue".into(),
        };
        assert_eq!(table.at(Path::new("/mnt2")), Some(&wanted));
        assert_eq!(table.iter().count(), 7);
    }

    #[test]
    fn octal_escapes_become_bytes() {
        let point = Path::new("/var/lib/kubelet/a b\\c\td");
        assert_eq!(table().at(point).unwrap().device, number("259:3"));
        assert_eq!(unescape(b"\\040\\377\\000"), Some(vec![b' ', 255, 0]));
        for bad in [&b"\\04"[..], b"\\", b"\\08x", b"\\400", b"a\\zzz"] {
            assert_eq!(unescape(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_last_mount_at_a_place_is_the_one_that_is_seen() {
        assert_eq!(table().at(Path::new("/m")).unwrap().device, number("259:5"));
        assert_eq!(table().at(Path::new("/m/below")), None);
    }

    #[test]
    fn a_path_is_on_the_nearest_mount_above_it() {
        let above = |path: &str| table().above(Path::new(path)).map(|mount| mount.device);
        assert_eq!(above("/m/below/more"), Some(number("259:5")));
        assert_eq!(above("/mnt2"), Some(number("98:0")));
        assert_eq!(above("/mnt23"), None, "it is no part of /mnt2");
    }

    #[test]
    fn a_part_of_a_file_system_is_not_the_whole() {
        let table = table();
        assert!(!table.at(Path::new("/mnt2")).unwrap().is_whole(number("98:0")));
        let mount = table.at(Path::new("/m")).unwrap();
        assert!(mount.is_whole(number("259:5")) && !mount.is_whole(number("259:4")));
    }

    #[test]
    fn distinguishes_read_only_mounts_from_failed_file_systems() {
        let mount = |options: &str, super_options: &str| Mount {
            options: options.into(),
            super_options: super_options.into(),
            ..table().0[1].clone()
        };
        assert_eq!(mount("rw,relatime", "rw,errors=remount-ro").trouble(), None);
        assert_eq!(mount("ro", "rw").trouble(), None, "a read-only bind of a healthy one");
        assert_eq!(mount("ro", "ro").trouble(), None, "mounted so");
        assert!(mount("rw", "ro").trouble().is_some());
        assert!(mount("rw", "rw,emergency_ro").trouble().is_some());
        assert!(mount("ro", "rw,shutdown").trouble().is_some());
        assert!(mount("rw,ro_not", "rw").trouble().is_none());
    }

    #[test]
    fn invalid_lines_are_refused() {
        for bad in
            ["x", "1 2 3:4 / /m rw ext4 dev rw", "1 2 34 / /m rw - ext4 d rw", "1 2 3:4 / /m\\9 rw - e d rw"]
        {
            assert!(MountTable::parse(bad.as_bytes()).is_err(), "{bad}");
            let mixed = format!("{TABLE}{bad}\n");
            assert_eq!(MountTable::readable(mixed.as_bytes()).iter().count(), 7, "{bad}");
        }
    }

    #[test]
    fn the_mounts_of_this_process_come_before_those_of_the_host() {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir(proc.path().join("1")).unwrap();
        fs::write(proc.path().join("1/mountinfo"), TABLE).unwrap();
        let [(own, none), (host, mounts)] = MountTable::of_both_namespaces(proc.path());
        assert_eq!((own, host), (proc.path().join("self"), proc.path().join("1")));
        assert_eq!((none.iter().count(), mounts.iter().count()), (0, 7), "no file is an empty table");
    }

    #[test]
    fn the_table_of_this_machine_is_understood() {
        let table = MountTable::read().unwrap();
        assert!(table.at(Path::new("/")).is_some() && table.at(Path::new("/proc")).is_some());
    }

    proptest! {
        #[test]
        fn any_path_survives(bytes in proptest::collection::vec(1u8.., 1..40)) {
            let escape = |byte: &u8| match byte {
                b' ' | b'\t' | b'\n' | b'\\' | b'#' => format!("\\{byte:03o}").into_bytes(),
                other => vec![*other],
            };
            let mut line = b"1 2 3:4 / ".to_vec();
            line.extend(bytes.iter().flat_map(escape));
            line.extend(b" rw - ext4 d rw\n");
            let table = MountTable::parse(&line).unwrap();
            prop_assert_eq!(&table.0[0].point, &PathBuf::from(OsString::from_vec(bytes)));
        }

        #[test]
        fn nothing_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = MountTable::parse(&bytes);
        }
    }
}
