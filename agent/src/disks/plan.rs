//! The file that `discover` writes, an operator reviews, and `init` obeys.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shorthorn_types::HumanBytes;

use crate::disks::device::{BlockDevice, DeviceIdentity, obstacles};
use crate::filesystem::Filesystem;
use crate::serve::paths::absolute;

const VERSION: u32 = 1;
/// The directory of mount points.
const MOUNTS: &str = "/var/lib/shorthorn/disks";

/// The reviewed file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskPlan {
    pub version: u32,
    /// The node whose devices it names.
    pub node: String,
    /// The start of the host in which it was written.
    pub boot_id: String,
    #[serde(default, rename = "disk")]
    pub disks: Vec<PlannedDisk>,
}

/// A device that may become a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedDisk {
    /// True if the operator wants it: a file system is made on it.
    pub init: bool,
    /// True if data without a known signature may be lost.
    #[serde(default)]
    pub accept_data: bool,
    /// A link in /dev/disk/by-id, or the name in /dev.
    pub device: PathBuf,
    pub size_bytes: u64,
    /// Serial number that the device reports, if it does.
    #[serde(default, with = "shorthorn_types::optional::text")]
    pub serial: Option<String>,
    /// The world-wide name, if it has one.
    #[serde(default, with = "shorthorn_types::optional::text")]
    pub wwn: Option<String>,
    /// The number of the device since the start of the host, if the kernel counts devices.
    #[serde(default, with = "shorthorn_types::optional::number")]
    pub diskseq: Option<u64>,
    pub filesystem: Filesystem,
    /// The UUID that the file system gets.
    pub uuid: String,
    /// The directory at which it is mounted.
    pub mount_point: PathBuf,
}

impl PlannedDisk {
    /// Returns the facts by which the device is recognised.
    pub fn identity(&self) -> DeviceIdentity {
        DeviceIdentity {
            device: self.device.clone(),
            size_bytes: self.size_bytes,
            serial: self.serial.clone(),
            wwn: self.wwn.clone(),
            diskseq: self.diskseq,
        }
    }
}

impl DiskPlan {
    /// Parses a reviewed file for the node of this name.
    ///
    /// # Errors
    /// The problem and its line.
    pub fn parse(text: &str, node: &str) -> Result<DiskPlan, String> {
        let plan: DiskPlan = toml::from_str(text).map_err(|error| error.to_string().trim().to_owned())?;
        if plan.version != VERSION {
            return Err(format!(
                "version {}: this program knows {VERSION}; run disk discover again",
                plan.version
            ));
        }
        if plan.node != node {
            return Err(format!("the file is for node {:?}, and this is node {node:?}", plan.node));
        }
        for (at, disk) in plan.disks.iter().enumerate() {
            let name = disk.device.display();
            absolute(disk.device.clone()).map_err(|error| format!("device: {error}"))?;
            absolute(disk.mount_point.clone()).map_err(|error| format!("{name}: mount_point: {error}"))?;
            if !is_uuid(&disk.uuid) {
                return Err(format!("{name}: uuid {:?} is not a UUID", disk.uuid));
            }
            let is_twin = |other: &PlannedDisk| {
                other.device == disk.device
                    || other.mount_point == disk.mount_point
                    || other.uuid == disk.uuid
            };
            if plan.disks[..at].iter().any(is_twin) {
                return Err(format!("{name}: its device, mount_point or uuid is listed twice"));
            }
        }
        Ok(plan)
    }
}

fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text.char_indices().all(|(at, c)| match at {
            8 | 13 | 18 | 23 => c == '-',
            _ => c.is_ascii_digit() || ('a'..='f').contains(&c),
        })
}

/// Returns the text of the file to review: each device that may become a disk, and as comments the reasons
/// against the others. No device is selected until the operator sets `init`.
pub fn text(
    (node, boot_id): (&str, &str),
    devices: &[BlockDevice],
    filesystem: Filesystem,
    mut draw_uuid: impl FnMut() -> String,
) -> Result<String, toml::ser::Error> {
    let mut text = String::from(
        "# Devices of this node that may become disks for replicas. Set init = true for those that are to \
         get a\n# file system: ALL DATA ON THEM WILL BE LOST. Then run: shorthorn-agent disk init FILE\n",
    );
    let fits = |device: &&BlockDevice| obstacles(device, true).is_empty();
    let disks = devices.iter().filter(fits).map(|device| {
        let identity = device.identity.clone();
        let name = identity.device.file_name().map(|name| name.to_string_lossy().into_owned());
        PlannedDisk {
            init: false,
            accept_data: false,
            mount_point: Path::new(MOUNTS).join(name.unwrap_or_else(|| device.name.clone())),
            device: identity.device,
            size_bytes: identity.size_bytes,
            serial: identity.serial,
            wwn: identity.wwn,
            diskseq: identity.diskseq,
            filesystem,
            uuid: draw_uuid(),
        }
    });
    let disks = disks.collect();
    let plan = DiskPlan { version: VERSION, node: node.to_owned(), boot_id: boot_id.to_owned(), disks };
    text.push_str(&toml::to_string(&plan)?);
    for device in devices {
        let reasons = obstacles(device, false);
        if !reasons.is_empty() {
            let what = if fits(&device) { "needs a decision" } else { "is left alone" };
            let _ = writeln!(
                text,
                "\n# /dev/{} ({}) {what}: {}",
                device.name,
                describe(device),
                reasons.join("; ")
            );
        }
    }
    Ok(text)
}

/// Describes a device for people.
pub fn describe(device: &BlockDevice) -> String {
    let size = HumanBytes(device.identity.size_bytes);
    let serial = device.identity.serial.as_deref().unwrap_or_default();
    let parts = [device.model.trim(), serial.trim()];
    let named: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    if named.is_empty() { size.to_string() } else { format!("{size}, {}", named.join(" ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disks::device::Signature;
    use crate::filesystem::Filesystem;

    const UUID: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";

    fn device(name: &str, signature: &str) -> BlockDevice {
        let kind = signature.to_owned();
        BlockDevice {
            name: name.to_owned(),
            identity: DeviceIdentity {
                device: format!("/dev/disk/by-id/ata-{name}").into(),
                size_bytes: 8 << 30,
                serial: Some(format!("S-{name}")),
                ..DeviceIdentity::default()
            },
            block_bytes: 512,
            signatures: if kind.is_empty() { Vec::new() } else { vec![Signature { kind, uuid: None }] },
            ..BlockDevice::default()
        }
    }

    fn written() -> String {
        let dirty = BlockDevice { has_data: true, ..device("sdc", "") };
        let devices = [device("sda", "dos"), device("sdb", ""), dirty];
        let mut count = 0;
        let uuid = || {
            count += 1;
            UUID.replace("0e", &format!("{count:02}"))
        };
        text(("n1", "boot"), &devices, Filesystem::Xfs, uuid).unwrap()
    }

    #[test]
    fn a_file_names_the_devices_that_fit_and_wants_none_of_them() {
        let text = written();
        let plan = DiskPlan::parse(&text, "n1").unwrap();
        let devices: Vec<_> = plan.disks.iter().filter_map(|disk| disk.identity().serial).collect();
        assert_eq!(devices, ["S-sdb", "S-sdc"]);
        assert!(plan.disks.iter().all(|disk| !disk.init && !disk.accept_data));
        assert_eq!(plan.disks[0].mount_point, Path::new("/var/lib/shorthorn/disks/ata-sdb"));
        assert!(
            text.contains("# /dev/sda (8 GiB, S-sda) is left alone: the device has a signature: dos"),
            "{text}"
        );
        assert!(text.contains("# /dev/sdc (8 GiB, S-sdc) needs a decision: the device has data"), "{text}");
    }

    #[test]
    fn a_device_is_described_by_its_size_model_and_serial_number() {
        let mut disk = BlockDevice { model: "QEMU  ".to_owned(), ..device("sda", "") };
        assert_eq!(describe(&disk), "8 GiB, QEMU S-sda");
        disk.identity = DeviceIdentity { size_bytes: 700 << 20, ..DeviceIdentity::default() };
        disk.model.clear();
        assert_eq!(describe(&disk), "700 MiB");
    }

    #[test]
    fn a_wrong_file_is_refused() {
        let text = written();
        for (from, to, problem) in [
            ("version = 1", "version = 2", "disk discover again"),
            ("init = false", "init = \"yes\"", "invalid type"),
            ("init = false", "inti = false", "unknown field"),
            ("/dev/disk/by-id/ata-sdb", "sdb", "not an absolute path"),
            ("/var/lib/shorthorn/disks/ata-sdb", "/a/../b", "mount_point"),
            ("0f8fad5b", "0F8FAD5B", "is not a UUID"),
            ("ata-sdc\"\nsize", "ata-sdb\"\nsize", "listed twice"),
        ] {
            let changed = text.replacen(from, to, 1);
            assert_ne!(changed, text, "{from}");
            let error = DiskPlan::parse(&changed, "n1").unwrap_err();
            assert!(error.contains(problem), "{to}: {error}");
        }
        assert!(DiskPlan::parse(&text, "n2").unwrap_err().contains("this is node \"n2\""));
    }

    #[test]
    fn no_program_is_asked_to_overwrite_a_file_system() {
        for filesystem in [Filesystem::Xfs, Filesystem::Ext4] {
            let (program, arguments) = filesystem.make(UUID, Path::new("/dev/sdb"));
            assert!(program.ends_with(filesystem.as_str()));
            assert!(
                !arguments.iter().any(|argument| matches!(argument.as_str(), "-f" | "-F")),
                "{arguments:?}"
            );
            assert!(arguments.iter().any(|argument| argument.contains("4096")), "{arguments:?}");
            assert_eq!(arguments.last().unwrap(), "/dev/sdb");
        }
    }
}
