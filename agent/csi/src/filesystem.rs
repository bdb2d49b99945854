//! Probes devices, and makes, checks and grows the file systems of volumes.
//!
//! A device is formatted only if that cannot destroy anything. Either blkid knows nothing on it *and* both
//! its ends are zero, or it has the label of an incomplete format of Shorthorn. A file system is made with
//! that label, everything is flushed, and only then is the label removed. After a power cut, the
//! remains of a format are therefore empty, or labelled, or not a file system that can be mounted. (They can
//! also be blocks without any signature. They look like data of a user, and are refused.)

use std::path::Path;
use std::time::Duration;

use shorthorn_csi::{CsiError, FsKind};

use crate::command::{CommandError, Tool};
use crate::device;
use crate::volumes::VolumeDevice;

/// The label of a file system that is not finished. xfs has room for 12 bytes.
pub(crate) const UNFINISHED_LABEL: &str = "shorthorn-mk";
/// Reading a few blocks. A degraded volume may hold each of these reads up for seconds.
const PROBE_LIMIT: Duration = Duration::from_secs(60);
/// Making a file system writes some parts per thousand of the volume. A large volume on slow disks takes
/// minutes for that.
const FORMAT_LIMIT: Duration = Duration::from_secs(30 * 60);
/// Replaying a journal takes seconds; a full check, after an error, hours.
const CHECK_LIMIT: Duration = Duration::from_secs(12 * 3600);
/// Growing writes metadata of the new part, as making a file system does.
const GROW_LIMIT: Duration = Duration::from_secs(30 * 60);

/// The exit code with which blkid(8) reports that it has found nothing.
const BLKID_NOTHING: i32 = 2;
/// And when it finds more than one thing.
const BLKID_AMBIVALENT: i32 = 8;
/// fsck(8): errors are left that it may not repair by itself. Below: nothing, or all is repaired.
const FSCK_ERRORS_LEFT: i32 = 4;

/// The content of a device, which decides if a file system may be made on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DeviceContent {
    /// The device has no data.
    Empty,
    /// The device has an interrupted format of Shorthorn, so no user has ever written to it.
    Unfinished,
    /// A file system that can be mounted.
    FileSystem(FsKind),
    /// The device has other data; a description of it.
    Other(String),
}

pub(crate) fn probe(device: &VolumeDevice) -> Result<DeviceContent, CsiError> {
    let path = &device.path;
    let tool = Tool::new("blkid", PROBE_LIMIT).args(["-p", "-o", "export"]);
    let found =
        tool.args(["-s", "TYPE", "-s", "LABEL", "-s", "PTTYPE", "-s", "USAGE", "--"]).arg(path).run()?;
    match found.code {
        Some(0) => Ok(content(&found.output)),
        Some(BLKID_NOTHING) => {
            let zero = device::has_zero_ends(path, device.size_bytes);
            Ok(match zero.map_err(CsiError::system(path.display()))? {
                true => DeviceContent::Empty,
                false => DeviceContent::Other("data of an unknown format".into()),
            })
        }
        Some(BLKID_AMBIVALENT) => Ok(DeviceContent::Other("more than one kind of data".into())),
        _ => Err(found.failed().into()),
    }
}

/// Parses the output of blkid.
fn content(output: &str) -> DeviceContent {
    let value = |key: &str| {
        let line = output.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        line.filter(|value| !value.is_empty())
    };
    let partitions = value("PTTYPE");
    match (value("TYPE"), partitions) {
        (Some(name), None) => match FsKind::of(name) {
            Some(_) if value("LABEL") == Some(UNFINISHED_LABEL) => DeviceContent::Unfinished,
            Some(kind) => DeviceContent::FileSystem(kind),
            None => DeviceContent::Other(format!("{name} ({})", value("USAGE").unwrap_or("of no known use"))),
        },
        (name, Some(table)) => {
            let name = name.map(|name| format!(" and {name}")).unwrap_or_default();
            DeviceContent::Other(format!("a partition table ({table}){name}"))
        }
        (None, None) => DeviceContent::Other("data of an unknown format".into()),
    }
}

/// Makes a file system on a device whose content is [`DeviceContent::Empty`] or
/// [`DeviceContent::Unfinished`].
pub(crate) fn format(device: &VolumeDevice, kind: FsKind) -> Result<(), CsiError> {
    let path = &device.path;
    make(path, kind).succeed()?;
    device::flush(path).map_err(CsiError::system(path.display()))?;
    finish(path, kind).succeed()?;
    device::flush(path).map_err(CsiError::system(path.display()))?;
    match probe(device)? {
        DeviceContent::FileSystem(made) if made == kind => Ok(()),
        other => {
            let message =
                format!("{} was formatted as {} and now holds {other:?}", path.display(), kind.name());
            Err(CsiError::Internal(message))
        }
    }
}

fn make(path: &Path, kind: FsKind) -> Tool {
    let tool = match kind {
        // A volume that has never been written to has nothing to discard. No blocks for root alone; 4 KiB
        // blocks also if the volume is small, because it may grow.
        FsKind::Ext4 => Tool::new("mkfs.ext4", FORMAT_LIMIT).args([
            "-q",
            "-F",
            "-m",
            "0",
            "-b",
            "4096",
            "-E",
            "nodiscard",
            "-L",
            UNFINISHED_LABEL,
        ]),
        FsKind::Xfs => Tool::new("mkfs.xfs", FORMAT_LIMIT).args(["-q", "-f", "-K", "-L", UNFINISHED_LABEL]),
    };
    tool.arg("--").arg(path)
}

/// Removes the label of an incomplete format.
fn finish(path: &Path, kind: FsKind) -> Tool {
    match kind {
        FsKind::Ext4 => Tool::new("tune2fs", PROBE_LIMIT).args(["-L", "", "--"]).arg(path),
        FsKind::Xfs => Tool::new("xfs_admin", PROBE_LIMIT).args(["-L", "--"]).arg(path),
    }
}

/// Repairs all damage that needs no decision. The file system must not be mounted.
pub(crate) fn check(path: &Path, kind: FsKind) -> Result<(), CsiError> {
    if kind == FsKind::Xfs {
        // The file system replays its log when it is mounted, and refuses the mount if that is not enough.
        return Ok(());
    }
    let finished = Tool::new("fsck.ext4", CHECK_LIMIT).args(["-p", "--"]).arg(path).run()?;
    match finished.code {
        Some(0) => Ok(()),
        Some(code) if code < FSCK_ERRORS_LEFT => {
            tracing::warn!(
                device = %path.display(),
                "fsck.ext4 has repaired the file system: {}",
                finished.output.trim()
            );
            Ok(())
        }
        _ => {
            let error = finished.failed();
            let hint = "the file system needs a repair by hand, for instance fsck.ext4 -f, on a copy or \
                        after a snapshot";
            Err(CsiError::Internal(format!("{}: {error}; {hint}", path.display())))
        }
    }
}

/// Grows a mounted file system to the whole device. Does nothing if it has that size already.
pub(crate) fn grow(device: &Path, mounted_at: &Path, kind: FsKind) -> Result<(), CommandError> {
    let tool = match kind {
        FsKind::Ext4 => Tool::new("resize2fs", GROW_LIMIT).arg("--").arg(device),
        FsKind::Xfs => Tool::new("xfs_growfs", GROW_LIMIT).args(["-d", "--"]).arg(mounted_at),
    };
    tool.succeed().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_and_finished_file_systems_are_taken_for_one() {
        let other = |text: &str| DeviceContent::Other(text.into());
        let cases = [
            ("DEVNAME=/dev/x\nTYPE=ext4\nUSAGE=filesystem\n", DeviceContent::FileSystem(FsKind::Ext4)),
            ("TYPE=xfs\nLABEL=data\n", DeviceContent::FileSystem(FsKind::Xfs)),
            ("TYPE=xfs\nLABEL=shorthorn-mk\n", DeviceContent::Unfinished),
            ("TYPE=ext3\nLABEL=shorthorn-mk\nUSAGE=filesystem\n", other("ext3 (filesystem)")),
            ("TYPE=crypto_LUKS\nUSAGE=crypto\n", other("crypto_LUKS (crypto)")),
            ("PTTYPE=gpt\n", other("a partition table (gpt)")),
            ("PTTYPE=dos\nTYPE=ext4\n", other("a partition table (dos) and ext4")),
            ("DEVNAME=/dev/x\n", other("data of an unknown format")),
            ("", other("data of an unknown format")),
        ];
        for (output, wanted) in cases {
            assert_eq!(content(output), wanted, "{output:?}");
        }
    }

    #[test]
    fn a_name_that_looks_like_an_option_stays_a_name() {
        for tool in [make(Path::new("/dev/x"), FsKind::Ext4), finish(Path::new("/dev/x"), FsKind::Xfs)] {
            let arguments = tool.arguments();
            assert_eq!(arguments[arguments.len() - 2..], ["--", "/dev/x"], "{tool:?}");
        }
    }
}
