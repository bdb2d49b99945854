//! The disk of a replica: a small file system that can be full, on a block device whose requests can be
//! slowed down.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use nix::sys::stat::{major, minor};

use crate::SmallDisk;

/// The directories in which control groups of version 1 and 2 limit block devices.
const V1: &str = "/sys/fs/cgroup/blkio";
const V2: &str = "/sys/fs/cgroup";

/// A disk of its own. Unmounted when dropped.
#[derive(Debug)]
pub(super) struct Disk {
    pub small: SmallDisk,
    group: Group,
    /// Major and minor number of the block device.
    device: String,
}

/// A control group whose processes find the disk slow. Gone when dropped, if no process is in it.
#[derive(Debug)]
struct Group {
    dir: PathBuf,
    is_v1: bool,
}

impl Disk {
    /// Makes a disk of that size in `folder`, with a control group called `name`.
    ///
    /// # Errors
    /// This is not root, or the host has no loop devices or no control groups for block devices.
    pub fn make(folder: &Path, mib: u64, name: &str) -> Result<Disk> {
        fs::create_dir_all(folder)?;
        let small = SmallDisk::mount(folder, mib)?;
        let device = fs::metadata(&small.mount_point)?.dev();
        let device = format!("{}:{}", major(device), minor(device));
        Ok(Disk { small, group: Group::make(name)?, device })
    }

    /// Returns the file by which a process joins the control group.
    pub fn group_file(&self) -> PathBuf {
        self.group.dir.join("cgroup.procs")
    }

    /// Limits the reads and the writes of the disk per second; without a number: no limit.
    ///
    /// # Errors
    /// The kernel does not do that.
    pub fn limit(&self, requests_per_s: Option<u32>) -> Result<()> {
        let set = |file: &str, text: String| {
            let path = self.group.dir.join(file);
            fs::write(&path, &text).with_context(|| format!("writing {text} to {}", path.display()))
        };
        if self.group.is_v1 {
            for file in ["blkio.throttle.read_iops_device", "blkio.throttle.write_iops_device"] {
                // Without a limit: 0.
                set(file, format!("{} {}", self.device, requests_per_s.unwrap_or(0)))?;
            }
            return Ok(());
        }
        let most = requests_per_s.map_or_else(|| "max".to_owned(), |number| number.to_string());
        set("io.max", format!("{} riops={most} wiops={most}", self.device))
    }
}

impl Group {
    fn make(name: &str) -> Result<Group> {
        let is_v1 = Path::new(V1).join("cgroup.procs").exists();
        let root = Path::new(if is_v1 { V1 } else { V2 });
        if !is_v1 {
            fs::write(root.join("cgroup.subtree_control"), "+io").context("limits for block devices")?;
        }
        let dir = root.join(name);
        fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
        let file = dir.join(if is_v1 { "blkio.throttle.write_iops_device" } else { "io.max" });
        ensure!(file.exists(), "this kernel has no limits for block devices: {}", file.display());
        Ok(Group { dir, is_v1 })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A process that is about to end may be in it.
        let _ = fs::remove_dir(&self.dir);
    }
}
