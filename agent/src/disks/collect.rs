//! Reads the facts about block devices from sysfs, the udev database and wipefs. Devices are opened for
//! reading only.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};
use nix::libc;
use serde::Deserialize;
use shorthorn_api::nonzero;
use shorthorn_frontend::node::{DeviceNumber, property, shared_with};
use shorthorn_linux::block_device;
use shorthorn_linux::mounts::MountTable;
use shorthorn_types::limits::SECTOR_BYTES;

use crate::disks::device::{BlockDevice, DeviceIdentity, Signature, is_left_out, is_usual, transport};

const SYSFS: &str = "/sys/class/block";
const BY_ID: &str = "/dev/disk/by-id";
/// The part at each end of a device in which signatures and data are searched.
const ENDS_BYTES: u64 = 1 << 20;

/// Returns the disks of this host that may be fit, with all facts.
///
/// # Errors
/// sysfs cannot be read.
pub fn usual_devices() -> anyhow::Result<Vec<BlockDevice>> {
    let links = links_by_id();
    let mut names = Vec::new();
    for entry in fs::read_dir(SYSFS).context(SYSFS)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        // A drive without a medium has no size.
        if is_usual(&name) && !is_partition(&name) && size_bytes(&name) > 0 {
            names.push(name);
        }
    }
    names.sort();
    let found = names.iter().map(|name| {
        let transport = transport_of(name);
        if is_left_out(transport.as_deref(), false) {
            return BlockDevice { transport, ..unexamined(name) };
        }
        let failed =
            |error: anyhow::Error| BlockDevice { problem: Some(format!("{error:#}")), ..unexamined(name) };
        read_device(name, &links).unwrap_or_else(failed)
    });
    Ok(found.collect())
}

/// Returns the facts that sysfs has about a device. The other ones are those of a fit device, so the caller
/// has to set an obstacle.
fn unexamined(name: &str) -> BlockDevice {
    let (device, size_bytes) = (Path::new("/dev").join(name), size_bytes(name));
    BlockDevice {
        name: name.to_owned(),
        identity: DeviceIdentity { device, size_bytes, ..DeviceIdentity::default() },
        vendor: first_of([attribute(name, "device/vendor")]),
        model: attribute(name, "device/model"),
        ..BlockDevice::default()
    }
}

/// Returns the network over which a device is reached; none if it is in the host.
fn transport_of(name: &str) -> Option<String> {
    let path = fs::canonicalize(Path::new(SYSFS).join(name)).unwrap_or_default();
    // A namespace of NVMe has the transport at its controller, or a subsystem with controllers.
    let controllers = entries(&path.join("device"), |entry| entry.join("transport").exists());
    let below =
        controllers.first().map(|controller| attribute(name, &format!("device/{controller}/transport")));
    let nvme = first_of([attribute(name, "device/transport"), below.unwrap_or_default()]);
    transport(&path.to_string_lossy(), nvme.as_deref())
}

/// Returns the facts about the device at `path`, which may be a link.
///
/// # Errors
/// The path is not a block device, or it cannot be examined.
pub fn device_at(path: &Path) -> anyhow::Result<BlockDevice> {
    let shown = path.display();
    let real = fs::canonicalize(path).with_context(|| shown.to_string())?;
    let metadata = fs::metadata(&real)?;
    ensure!(metadata.file_type().is_block_device(), "{shown} is not a block device");
    let number = DeviceNumber::of(metadata.rdev());
    let link = fs::read_link(format!("/sys/dev/block/{number}")).with_context(|| shown.to_string())?;
    let name = link.file_name().map(|name| name.to_string_lossy().into_owned());
    let device = read_device(&name.with_context(|| format!("{shown} has no name"))?, &links_by_id())?;
    Ok(BlockDevice { is_named: true, ..device })
}

/// Returns the id of this start of the host.
///
/// # Errors
/// The error of the system.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Returns a random UUID.
///
/// # Errors
/// The error of the system.
pub fn draw_uuid() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned())
}

/// Returns the stable links to devices: the number of each device with the link that names it best.
fn links_by_id() -> HashMap<u64, PathBuf> {
    let mut links: Vec<PathBuf> =
        fs::read_dir(BY_ID).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    // Names with a model and a serial number are better to read than world-wide names.
    links.sort_by_key(|link| {
        let name = link.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        (name.starts_with("wwn-") || name.starts_with("nvme-eui."), name)
    });
    let mut found = HashMap::new();
    for link in links {
        if let Ok(metadata) = fs::metadata(&link) {
            found.entry(metadata.rdev()).or_insert(link);
        }
    }
    found
}

fn attribute(name: &str, attribute: &str) -> String {
    let text = fs::read_to_string(Path::new(SYSFS).join(name).join(attribute)).unwrap_or_default();
    text.trim_matches(|c: char| c.is_whitespace() || c == '\0').to_owned()
}

fn is_partition(name: &str) -> bool {
    Path::new(SYSFS).join(name).join("partition").exists()
}

/// Returns the size of a device in bytes; 0 if it is unknown.
fn size_bytes(name: &str) -> u64 {
    block_device::size_in(&Path::new(SYSFS).join(name)).ok().flatten().unwrap_or_default()
}

/// Returns the entries of a folder of sysfs that a filter accepts.
fn entries(folder: &Path, accept: impl Fn(&Path) -> bool) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut names: Vec<String> = entries
        .filter(|path| accept(path))
        .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .collect();
    names.sort();
    names
}

fn first_of(texts: impl IntoIterator<Item = String>) -> Option<String> {
    texts.into_iter().find(|text| !text.is_empty())
}

fn read_device(name: &str, links: &HashMap<u64, PathBuf>) -> anyhow::Result<BlockDevice> {
    let folder = Path::new(SYSFS).join(name);
    let path = Path::new("/dev").join(name);
    let number = attribute(name, "dev");
    let rdev = fs::metadata(&path).with_context(|| path.display().to_string())?.rdev();
    let has_number = number == DeviceNumber::of(rdev).to_string();
    ensure!(has_number, "{} is not device {number}", path.display());
    let partitions = entries(&folder, |entry| entry.join("partition").exists());
    let mut holders = entries(&folder.join("holders"), |_| true);
    let mut numbers = vec![number.clone()];
    for partition in &partitions {
        holders.extend(entries(&Path::new(SYSFS).join(partition).join("holders"), |_| true));
        numbers.push(attribute(partition, "dev"));
    }
    let of_udev = |key| property(DeviceNumber::of(rdev), key).unwrap_or_default();
    let identity = DeviceIdentity {
        device: links.get(&rdev).cloned().unwrap_or_else(|| path.clone()),
        size_bytes: size_bytes(name),
        serial: first_of([
            of_udev("ID_SERIAL_SHORT"),
            attribute(name, "device/serial"),
            attribute(name, "serial"),
        ]),
        wwn: first_of([of_udev("ID_WWN"), attribute(name, "wwid"), attribute(name, "device/wwid")]),
        diskseq: attribute(name, "diskseq").parse().ok().and_then(nonzero),
    };
    Ok(BlockDevice {
        name: name.to_owned(),
        identity,
        vendor: first_of([attribute(name, "device/vendor")]),
        model: first_of([of_udev("ID_MODEL"), attribute(name, "device/model")]).unwrap_or_default(),
        is_partition: is_partition(name),
        is_read_only: attribute(name, "ro") != "0",
        is_removable: attribute(name, "removable") == "1",
        block_bytes: attribute(name, "queue/logical_block_size").parse().unwrap_or(u64::MAX),
        mount_points: mount_points(&numbers),
        is_swap: is_swap(name, &partitions)?,
        partitions,
        holders,
        signatures: signatures(&path)?,
        is_incomplete: is_incomplete(&path).with_context(|| path.display().to_string())?,
        has_data: has_data(&path).with_context(|| path.display().to_string())?,
        is_in_use: open_exclusively(&path).is_err(),
        users: shared_with(&path),
        transport: transport_of(name),
        is_named: false,
        problem: None,
    })
}

/// Opens a device for reading, with the kernel's word that nothing else uses it. No mount, LVM, RAID or swap
/// does (O_EXCL of block devices, open(2)).
///
/// # Errors
/// EBUSY, or another error of the system.
pub fn open_exclusively(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_EXCL | libc::O_CLOEXEC).open(path)
}

/// Returns the mount points of devices with these numbers, in the namespaces of this process and of PID 1.
fn mount_points(numbers: &[String]) -> Vec<PathBuf> {
    let mut points = Vec::new();
    for (_, mounts) in MountTable::of_both_namespaces(Path::new("/proc")) {
        for mount in mounts.iter() {
            let number = mount.device.to_string();
            if numbers.contains(&number) && !points.contains(&mount.point) {
                points.push(mount.point.clone());
            }
        }
    }
    points
}

fn is_swap(name: &str, partitions: &[String]) -> anyhow::Result<bool> {
    let swaps = fs::read_to_string("/proc/swaps").context("/proc/swaps")?;
    let mut devices = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    Ok(devices.any(|device| {
        let swap = Path::new(device).file_name().map(|swap| swap.to_string_lossy().into_owned());
        swap.is_some_and(|swap| swap == name || partitions.contains(&swap))
    }))
}

#[derive(Deserialize)]
struct WipefsOutput {
    signatures: Vec<WipefsSignature>,
}

#[derive(Deserialize)]
struct WipefsSignature {
    #[serde(rename = "type")]
    kind: Option<String>,
    uuid: Option<String>,
}

/// Returns all signatures on a device. wipefs(8) finds them with libblkid and opens the device for reading.
fn signatures(path: &Path) -> anyhow::Result<Vec<Signature>> {
    let output = Command::new("wipefs").args(["--no-act", "--json"]).arg(path).output();
    let output = output.context("starting wipefs (package util-linux)")?;
    if !output.status.success() {
        bail!("wipefs {}: {}", path.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    parse_signatures(&output.stdout).with_context(|| format!("the answer of wipefs about {}", path.display()))
}

fn parse_signatures(text: &[u8]) -> serde_json::Result<Vec<Signature>> {
    if text.trim_ascii().is_empty() {
        return Ok(Vec::new()); // it writes nothing about a device without a signature
    }
    let found: WipefsOutput = serde_json::from_slice(text)?;
    let signature = |found: WipefsSignature| Signature {
        kind: found.kind.unwrap_or_else(|| "unknown".to_owned()),
        uuid: found.uuid,
    };
    Ok(found.signatures.into_iter().map(signature).collect())
}

/// Returns true if a device has the superblock of an XFS that mkfs.xfs has not completed. mkfs.xfs sets
/// `sb_inprogress` first, and clears it last (fs/xfs/libxfs/xfs_format.h of Linux). No kernel mounts such a
/// file system.
fn is_incomplete(path: &Path) -> io::Result<bool> {
    const MAGIC: &[u8] = b"XFSB";
    const IN_PROGRESS_AT: usize = 126;
    let mut start = Vec::new();
    File::open(path)?.take(SECTOR_BYTES).read_to_end(&mut start)?;
    Ok(start.starts_with(MAGIC) && start.get(IN_PROGRESS_AT).is_some_and(|byte| *byte != 0))
}

/// Returns true if the first or the last MiB has other bytes than zeroes.
fn has_data(path: &Path) -> io::Result<bool> {
    let mut file = File::open(path)?;
    let size_bytes = file.seek(SeekFrom::End(0))?;
    for start in [0, size_bytes.saturating_sub(ENDS_BYTES)] {
        file.seek(SeekFrom::Start(start))?;
        let mut data = Vec::new();
        (&mut file).take(ENDS_BYTES).read_to_end(&mut data)?;
        if data.iter().any(|byte| *byte != 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_of_wipefs_is_read() {
        let text = br#"{"signatures": [
            {"device":"loop0", "offset":"0x438", "type":"ext4", "uuid":"0f8fad5b", "label":null},
            {"device":"loop0", "offset":"0x1fe", "type":"dos", "uuid":null, "label":null}]}"#;
        let found = parse_signatures(text).unwrap();
        assert_eq!((found[0].kind.as_str(), found[0].uuid.as_deref()), ("ext4", Some("0f8fad5b")));
        assert_eq!((found[1].kind.as_str(), found[1].uuid.as_deref()), ("dos", None));
        assert!(parse_signatures(b"\n").unwrap().is_empty());
        // An answer that is not understood is never taken for an empty device.
        assert!(parse_signatures(b"{}").is_err());
        assert!(parse_signatures(b"no devices").is_err());
    }

    #[test]
    fn paths_that_are_not_block_devices_are_refused() {
        for path in ["/dev/null", "/etc/passwd", "/dev", "/dev/no-such-device"] {
            assert!(device_at(Path::new(path)).is_err(), "{path}");
        }
    }
}
