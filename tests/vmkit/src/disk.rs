//! Data disks: files on the host that are plugged into a running VM.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::machine::DISK_BUS;

/// The serial number of the data disk, part of its name in the guest.
pub const DATA_SERIAL: &str = "shorthorn-data";

/// A file system that a data disk has when the VM starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystem {
    /// With the defaults of mkfs.ext4.
    Ext4,
    /// With the defaults of mkfs.xfs.
    Xfs,
}

impl FileSystem {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }
}

/// The fate of written data that the guest did not flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// The data is in the host's page cache, which survives a power cut of the VM.
    HostCache,
    /// The data bypasses the host's page cache, and a flush reaches the host's disk: for measurements of the
    /// disk itself.
    Direct,
    /// A power cut loses first writes to a 64 KiB block since the last flush, like a disk with a volatile
    /// cache. Later writes to such a block survive.
    VolatileCache,
}

/// A disk besides the root disk, kept over a reboot and a power cut.
#[derive(Debug, Clone)]
pub struct DataDisk {
    /// The size the guest sees; the file on the host is sparse.
    pub size_mib: u64,
    /// None leaves the disk empty and unmounted.
    pub file_system: Option<FileSystem>,
    /// The mount point, now and at every later boot.
    pub mount_point: String,
    /// The effect of a power cut on the disk.
    pub durability: Durability,
}

impl DataDisk {
    /// Creates a disk mounted where the agent keeps its replicas.
    pub fn new(size_mib: u64, file_system: FileSystem) -> Self {
        Self {
            size_mib,
            file_system: Some(file_system),
            mount_point: "/var/lib/longhorn".to_owned(),
            durability: Durability::HostCache,
        }
    }

    /// Returns a disk without a file system.
    pub fn blank(size_mib: u64) -> Self {
        Self { file_system: None, ..Self::new(size_mib, FileSystem::Ext4) }
    }

    /// Sets the effect of a power cut on data that was not flushed.
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// Returns the path of the disk in the guest.
    pub fn guest_path() -> String {
        guest_path(DATA_SERIAL)
    }

    /// Makes the disk's files in `dir`.
    pub(crate) fn create(&self, dir: &Path) -> Result<Disk> {
        let raw = dir.join("data.img");
        let file = File::create_new(&raw).with_context(|| format!("cannot create {}", raw.display()))?;
        file.set_len(self.size_mib * 1024 * 1024)
            .with_context(|| format!("cannot extend {}", raw.display()))?;
        // Made here rather than in the guest: native speed.
        match self.file_system {
            Some(FileSystem::Ext4) => run(Command::new("mkfs.ext4").arg("-q").arg(&raw))?,
            Some(FileSystem::Xfs) => run(Command::new("mkfs.xfs").arg("-q").arg(&raw))?,
            None => {}
        }
        let path = if self.durability == Durability::VolatileCache {
            let overlay = dir.join("data.qcow2");
            create_overlay(&raw, "raw", &overlay)?;
            overlay
        } else {
            raw
        };
        Ok(Disk { serial: DATA_SERIAL.to_owned(), path, durability: self.durability, read_only: false })
    }
}

/// A disk that can be plugged in.
#[derive(Debug, Clone)]
pub struct Disk {
    pub serial: String,
    pub path: PathBuf,
    pub durability: Durability,
    pub read_only: bool,
}

impl Disk {
    /// Returns QEMU's description of the file.
    pub fn blockdev(&self) -> Value {
        let direct = self.durability == Durability::Direct;
        let driver = if self.durability == Durability::VolatileCache { "qcow2" } else { "raw" };
        // A flush reaches the driver: qcow2 writes its tables then. It does not reach the host's disk: the
        // files live as long as the VM, and survive QEMU's death in the host's page cache.
        json!({
            "driver": driver,
            "node-name": self.serial,
            "read-only": self.read_only,
            "discard": "unmap",
            "cache": { "direct": direct, "no-flush": false },
            "file": {
                "driver": "file",
                "filename": self.path,
                "discard": "unmap",
                "cache": { "direct": direct, "no-flush": !direct },
            },
        })
    }

    /// Returns QEMU's description of the disk in front of it.
    pub fn device(&self) -> Value {
        json!({
            "driver": "scsi-hd",
            "bus": DISK_BUS,
            "id": format!("disk-{}", self.serial),
            "drive": self.serial,
            "serial": self.serial,
        })
    }
}

/// Returns the path of udev's link in the guest for a disk with that serial number.
pub fn guest_path(serial: &str) -> String {
    format!("/dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_{serial}")
}

/// Makes a copy-on-write file above a disk.
pub fn create_overlay(backing: &Path, format: &str, overlay: &Path) -> Result<()> {
    run(Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-F", format, "-b"])
        .arg(backing)
        .arg(overlay))
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
