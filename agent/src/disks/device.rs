//! The known facts about a block device, and the rules that decide whether it may become a disk.

use std::path::PathBuf;

/// A smaller device holds no useful replicas, and XFS refuses less than 300 MiB.
const SIZE_MIN_BYTES: u64 = 1 << 30;
/// The largest block that replicas and the file systems made here work with.
const BLOCK_MAX_BYTES: u64 = 4096;
/// Names of devices that `discover` examines by default: disks, and RAID arrays of the kernel.
const USUAL: [&str; 7] = ["sd", "nvme", "vd", "xvd", "hd", "mmcblk", "md"];
/// Names of devices that are volumes themselves.
const VOLUMES: [&str; 2] = ["ublkb", "nbd"];
/// The vendor of disks of iSCSI that are volumes. Their names are those of any SCSI disk.
const VOLUME_VENDOR: &str = "SHRTHORN";

/// The facts by which a device is recognised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceIdentity {
    /// A link in /dev/disk/by-id, or the name in /dev if it has none.
    pub device: PathBuf,
    pub size_bytes: u64,
    /// The serial number, if it has one.
    pub serial: Option<String>,
    /// The world-wide name, if it has one.
    pub wwn: Option<String>,
    /// The number that the kernel gives each device since the start of the host (diskseq of sysfs); none: the
    /// kernel is older than 5.15.
    pub diskseq: Option<u64>,
}

/// The facts about a block device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockDevice {
    /// The name of the kernel, like `sdb`.
    pub name: String,
    /// The facts by which it is recognised.
    pub identity: DeviceIdentity,
    /// The vendor of a SCSI disk; none if it is no such disk.
    pub vendor: Option<String>,
    /// The model, for people.
    pub model: String,
    /// True if it is a partition.
    pub is_partition: bool,
    /// True if nothing can be written to it.
    pub is_read_only: bool,
    /// True if people take it out, as a memory stick.
    pub is_removable: bool,
    /// The size of its logical blocks in bytes.
    pub block_bytes: u64,
    /// The names of its partitions.
    pub partitions: Vec<String>,
    /// The names of devices that use it: LVM, RAID, encryption, multipath.
    pub holders: Vec<String>,
    /// The mount points of it and of its partitions.
    pub mount_points: Vec<PathBuf>,
    /// True if it or a partition is swap space in use.
    pub is_swap: bool,
    /// The signatures that it has: types of file systems, partition tables, LVM, RAID.
    pub signatures: Vec<Signature>,
    /// True if an mkfs was interrupted before it had completed the XFS of the device.
    pub is_incomplete: bool,
    /// True if its first or last MiB has other bytes than zeroes.
    pub has_data: bool,
    /// True if the kernel refuses its exclusive use, because something else has it.
    pub is_in_use: bool,
    /// Users that have not opened the device exclusively, like a virtual machine or a loop device.
    pub users: Option<String>,
    /// The network that it is reached over, like `iscsi`; none if it is in the host.
    pub transport: Option<String>,
    /// True if the operator has named the device. Nothing is read from devices of a network that were not.
    pub is_named: bool,
    /// The reason why it cannot be examined; none if it was.
    pub problem: Option<String>,
}

/// A signature on a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Signature {
    /// The type, as wipefs names it.
    pub kind: String,
    /// The UUID of the file system, if it has one.
    pub uuid: Option<String>,
}

/// Returns true if `discover` examines a device of this name by default.
pub fn is_usual(name: &str) -> bool {
    USUAL.iter().any(|prefix| name.starts_with(prefix))
}

/// Returns true if a device is left out until the operator names it. A blank disk of a network may be the
/// future disk of another host.
pub fn is_left_out(transport: Option<&str>, is_named: bool) -> bool {
    transport.is_some() && !is_named
}

/// Returns the network over which a device is reached; none if it is in the host. The network follows from
/// the path of the device in sysfs and the transport of its NVMe controller.
pub fn transport(sysfs_path: &str, nvme: Option<&str>) -> Option<String> {
    let has = |prefix: &str| {
        let number = |part: &str| part.strip_prefix(prefix).and_then(|rest| rest.chars().next());
        sysfs_path.split('/').any(|part| number(part).is_some_and(|first| first.is_ascii_digit()))
    };
    // Linux names the parents of a disk so: drivers/scsi/scsi_transport_iscsi.c, scsi_transport_fc.c.
    match nvme {
        _ if has("session") => Some("iscsi".to_owned()),
        _ if has("rport-") => Some("fibre channel".to_owned()),
        None | Some("pcie" | "apple-nvme") => None,
        Some(network) => Some(format!("nvme {network}")),
    }
}

/// Returns all reasons why the device must not become a disk; none if it may. `accept_data`: the operator has
/// confirmed that unknown data may be overwritten.
pub fn obstacles(device: &BlockDevice, accept_data: bool) -> Vec<String> {
    let mut found = Vec::new();
    let mut refuse = |condition: bool, reason: String| {
        if condition {
            found.push(reason);
        }
    };
    let problem = device.problem.as_deref();
    refuse(problem.is_some(), format!("the device cannot be examined: {}", problem.unwrap_or_default()));
    refuse(
        VOLUMES.iter().any(|prefix| device.name.starts_with(prefix))
            || device.vendor.as_deref() == Some(VOLUME_VENDOR),
        "the device is that of a volume".to_owned(),
    );
    let transport = device.transport.as_deref();
    refuse(
        is_left_out(transport, device.is_named),
        format!(
            "the device is reached over {}, and may be of another host: name the device to use it",
            transport.unwrap_or_default()
        ),
    );
    refuse(device.is_partition, "the device is a partition: name the whole device".to_owned());
    refuse(device.is_read_only, "the device is read-only".to_owned());
    refuse(device.is_removable, "the device is removable".to_owned());
    let size_bytes = device.identity.size_bytes;
    refuse(
        size_bytes < SIZE_MIN_BYTES,
        format!("the device has {size_bytes} bytes, less than {SIZE_MIN_BYTES}"),
    );
    let block_bytes = device.block_bytes;
    refuse(
        block_bytes > BLOCK_MAX_BYTES,
        format!("the device has blocks of {block_bytes} bytes, more than {BLOCK_MAX_BYTES}"),
    );
    refuse(
        !device.partitions.is_empty(),
        format!("the device has partitions: {}", device.partitions.join(", ")),
    );
    refuse(!device.holders.is_empty(), format!("the device is used by {}", device.holders.join(", ")));
    let points: Vec<String> = device.mount_points.iter().map(|point| point.display().to_string()).collect();
    refuse(!points.is_empty(), format!("the device is mounted at {}", points.join(", ")));
    refuse(device.is_swap, "the device is swap space in use".to_owned());
    let kinds: Vec<&str> = device.signatures.iter().map(|signature| signature.kind.as_str()).collect();
    refuse(!kinds.is_empty(), format!("the device has a signature: {}", kinds.join(", ")));
    refuse(device.is_in_use, "another program has the device open exclusively".to_owned());
    let users = device.users.as_deref();
    refuse(users.is_some(), format!("the device is in use: {}", users.unwrap_or_default()));
    let has_only_data = device.has_data && kinds.is_empty() && device.partitions.is_empty();
    refuse(
        has_only_data && !accept_data,
        "the device has data without a known signature: set accept_data = true if that may be lost"
            .to_owned(),
    );
    found
}

/// Returns the reason why `found` is not the device that `wanted` names; none if it is. `same_boot`: the host
/// was not restarted since `wanted` was written.
pub fn difference(wanted: &DeviceIdentity, found: &DeviceIdentity, same_boot: bool) -> Option<String> {
    let differs = |what: &str, wanted: &str, found: &str| {
        (wanted != found).then(|| format!("the {what} is {found:?}, and the file says {wanted:?}"))
    };
    let size = differs("size_bytes", &wanted.size_bytes.to_string(), &found.size_bytes.to_string());
    let text = |name: &Option<String>| name.clone().unwrap_or_default();
    let named = || {
        differs("serial", &text(&wanted.serial), &text(&found.serial))
            .or_else(|| differs("wwn", &text(&wanted.wwn), &text(&found.wwn)))
    };
    let number = |diskseq: Option<u64>| diskseq.unwrap_or_default().to_string();
    let seen = || {
        if same_boot {
            return differs("diskseq", &number(wanted.diskseq), &number(found.diskseq));
        }
        let is_unique = wanted.serial.is_some() || wanted.wwn.is_some();
        (!is_unique).then(|| {
            "the device has neither a serial number nor a wwn, and the host was restarted: its name may have \
             changed"
                .to_owned()
        })
    };
    size.or_else(named).or_else(seen)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn empty_disk() -> BlockDevice {
        BlockDevice {
            name: "sdb".to_owned(),
            identity: DeviceIdentity {
                device: "/dev/disk/by-id/ata-X_1".into(),
                size_bytes: 1 << 40,
                serial: Some("X1".to_owned()),
                wwn: Some("0x5000".to_owned()),
                diskseq: Some(7),
            },
            block_bytes: 512,
            ..BlockDevice::default()
        }
    }

    type Change = fn(&mut BlockDevice);

    const ILL: [(Change, &str); 18] = [
        (|disk| disk.name = "ublkb3".to_owned(), "that of a volume"),
        (|disk| disk.name = "nbd0".to_owned(), "that of a volume"),
        (|disk| disk.vendor = Some("SHRTHORN".to_owned()), "that of a volume"),
        (|disk| disk.transport = Some("iscsi".to_owned()), "reached over iscsi"),
        (|disk| disk.is_partition = true, "a partition"),
        (|disk| disk.is_read_only = true, "read-only"),
        (|disk| disk.is_removable = true, "removable"),
        (|disk| disk.identity.size_bytes = 4096, "4096 bytes"),
        (|disk| disk.block_bytes = 16384, "blocks of 16384"),
        (|disk| disk.partitions.push("sdb1".to_owned()), "partitions: sdb1"),
        (|disk| disk.holders.push("dm-0".to_owned()), "used by dm-0"),
        (|disk| disk.mount_points.push("/data".into()), "mounted at /data"),
        (|disk| disk.is_swap = true, "swap"),
        (
            |disk| disk.signatures.push(Signature { kind: "LVM2_member".to_owned(), uuid: None }),
            "signature: LVM2_member",
        ),
        (|disk| disk.is_in_use = true, "exclusively"),
        (
            |disk| disk.users = Some("sdb opened by process 7 (qemu)".to_owned()),
            "in use: sdb opened by process 7",
        ),
        (|disk| disk.problem = Some("EPERM".to_owned()), "cannot be examined: EPERM"),
        (|disk| disk.has_data = true, "accept_data"),
    ];

    #[test]
    fn only_an_empty_disk_may_be_used() {
        assert_eq!(obstacles(&empty_disk(), false), Vec::<String>::new());
        for (change, reason) in ILL {
            let mut disk = empty_disk();
            change(&mut disk);
            let found = obstacles(&disk, false);
            assert!(found.len() == 1 && found[0].contains(reason), "{reason}: {found:?}");
        }
    }

    proptest! {
        /// Each obstacle stops the device, with any others. Only unknown data can be accepted.
        #[test]
        fn an_obstacle_is_never_hidden_by_others(mask in 1u32..(1 << 18), accept_data: bool) {
            let mut disk = empty_disk();
            for (bit, (change, _)) in ILL.iter().enumerate() {
                if mask & (1 << bit) != 0 {
                    change(&mut disk);
                }
            }
            let is_only_data = mask == 1 << 17;
            prop_assert_eq!(obstacles(&disk, accept_data).is_empty(), is_only_data && accept_data);
        }
    }

    #[test]
    fn a_disk_of_a_network_is_used_only_if_it_is_named() {
        let disk = BlockDevice { transport: Some("iscsi".to_owned()), is_named: true, ..empty_disk() };
        assert_eq!(obstacles(&disk, false), Vec::<String>::new());
        for (path, nvme, found) in [
            ("/sys/devices/platform/host3/session7/target3:0:0/3:0:0:1/block/sdc", None, Some("iscsi")),
            ("/sys/devices/pci0000:00/0000:00:1f.2/ata1/host0/target0:0:0/0:0:0:0/block/sda", None, None),
            (
                "/sys/devices/pci0000:00/host5/rport-5:0-2/target5:0:0/5:0:0:0/block/sdd",
                None,
                Some("fibre channel"),
            ),
            ("/sys/devices/pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1", Some("pcie"), None),
            ("/sys/devices/virtual/nvme-subsystem/nvme-subsys1/nvme1n1", Some("tcp"), Some("nvme tcp")),
            ("/sys/devices/virtual/block/md-session", None, None),
        ] {
            assert_eq!(transport(path, nvme).as_deref(), found, "{path}");
        }
    }

    #[test]
    fn a_device_is_recognised_by_every_fact() {
        let wanted = empty_disk().identity;
        let with = |change: fn(&mut DeviceIdentity)| {
            let mut found = empty_disk().identity;
            change(&mut found);
            found
        };
        assert_eq!(difference(&wanted, &wanted, true), None);
        let other_size = with(|identity| identity.size_bytes = 4096);
        let other_serial = with(|identity| identity.serial = Some("X2".to_owned()));
        let other_wwn = with(|identity| identity.wwn = None);
        let other_seq = with(|identity| identity.diskseq = Some(8));
        for same_boot in [false, true] {
            assert!(difference(&wanted, &other_size, same_boot).unwrap().contains("size_bytes"));
            assert!(difference(&wanted, &other_serial, same_boot).unwrap().contains("serial"));
            assert!(difference(&wanted, &other_wwn, same_boot).unwrap().contains("wwn"));
        }
        // The kernel numbers devices again after a restart of the host.
        assert!(difference(&wanted, &other_seq, true).unwrap().contains("diskseq"));
        assert_eq!(difference(&wanted, &other_seq, false), None);
        // Without a serial number, a name says nothing after that.
        let nameless = DeviceIdentity { serial: None, wwn: None, ..wanted };
        assert_eq!(difference(&nameless, &nameless, true), None);
        assert!(difference(&nameless, &nameless, false).unwrap().contains("restarted"));
    }

    #[test]
    fn devices_of_volumes_and_memory_are_skipped() {
        assert!(["sda", "nvme0n1", "vdb", "md127", "mmcblk0"].into_iter().all(is_usual));
        assert!(
            !["loop0", "ram0", "zram0", "sr0", "dm-0", "ublkb0", "nbd0", "fd0"].into_iter().any(is_usual)
        );
    }
}
