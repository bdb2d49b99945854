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
    if space.fragment_size() > BLOCK_BYTES {
        let unit = space.fragment_size();
        return Some(format!(
            "the file system allocates {unit} bytes at a time, and replicas need {BLOCK_BYTES} or less: make \
             one with blocks of {BLOCK_BYTES}"
        ));
    }
    None
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
