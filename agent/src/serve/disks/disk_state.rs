//! The current state of a disk.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::{fs, io};

use nix::sys::statvfs::{FsFlags, statvfs};
use shorthorn_api::v1;
use shorthorn_types::DeviceNumber;
use shorthorn_types::limits::BLOCK_BYTES;

use super::identity::{IDENTITY_FILE, read_identity};
use super::mounts::{filesystem_in, own_mounts};
use crate::serve::directories::REPLICAS;
use crate::serve::instance::InstanceId;
use crate::serve::trash;

/// Returns the current state of a disk, with its problem in words. Changes nothing, and works while an agent
/// runs.
pub fn disk_state(path: &Path) -> v1::Disk {
    let mut disk = v1::Disk { path: path.display().to_string(), ..v1::Disk::default() };
    if let Some(problem) = obstacle(path) {
        disk.problem = problem;
        return disk;
    }
    match read_identity(path) {
        Ok(Some(identity)) => disk.uuid = identity.disk_uuid,
        Ok(None) => disk.problem = format!("{IDENTITY_FILE} is missing: mount the disk, or add it again"),
        Err(problem) => disk.problem = problem,
    }
    match statvfs(path) {
        Ok(space) => {
            disk.total_bytes = space.blocks().saturating_mul(space.fragment_size());
            disk.available_bytes = space.blocks_available().saturating_mul(space.fragment_size());
        }
        Err(error) => disk.problem = format!("free space is unknown: {error}"),
    }
    disk.filesystem = filesystem(path).unwrap_or_default();
    disk.replicas = replicas(path);
    disk.trash_bytes = trash::trash_bytes(path);
    disk
}

/// Returns the reason why a directory cannot be a disk.
pub(super) fn obstacle(path: &Path) -> Option<String> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Some("no such directory: mount the disk, or create the directory".into());
        }
        Err(error) => return Some(error.to_string()),
        Ok(meta) if !meta.is_dir() => return Some("not a directory".into()),
        Ok(_) => {}
    }
    let space = match statvfs(path) {
        Ok(space) => space,
        Err(error) => return Some(error.to_string()),
    };
    if space.flags().contains(FsFlags::ST_RDONLY) {
        return Some(
            "file system is mounted read-only: see the kernel's log for the cause, and mount it again".into(),
        );
    }
    allocation_obstacle(space.fragment_size(), &filesystem(path).unwrap_or_default())
}

/// Returns the reason why replicas do not open on a file system of this type. Other types report sizes of
/// transfers instead of `unit`, which a replica finds out when it opens.
fn allocation_obstacle(unit: u64, filesystem: &str) -> Option<String> {
    let is_small = unit < BLOCK_BYTES && matches!(filesystem, "ext2" | "ext3" | "ext4" | "xfs");
    (unit > BLOCK_BYTES || is_small).then(|| {
        format!(
            "the file system allocates {unit} bytes at a time, and replicas need {BLOCK_BYTES}: make one \
             with blocks of that size (mkfs.ext4 -b {BLOCK_BYTES})"
        )
    })
}

/// Returns the type of the file system that `path` is on.
fn filesystem(path: &Path) -> Option<String> {
    let device = fs::metadata(path).ok()?.dev();
    filesystem_in(&own_mounts(), DeviceNumber::of(device), path)
}

pub(super) fn replicas(disk: &Path) -> Vec<String> {
    let entries = fs::read_dir(disk.join(REPLICAS)).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> =
        names.filter(|name| InstanceId::parse(v1::InstanceKind::Replica, name).is_ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_with_small_blocks_is_no_disk() {
        let refused = |unit, filesystem| allocation_obstacle(unit, filesystem).is_some();
        assert!(refused(1024, "ext4") && refused(512, "xfs") && refused(65536, "xfs"));
        assert!(!refused(4096, "ext4") && !refused(512, "zfs"), "ZFS does not report its blocks");
    }
}
