//! The directories of replicas on a disk.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::serve::instance::InstanceId;

/// The folder of the replicas.
pub const REPLICAS: &str = "replicas";

/// Returns the directory of a replica.
pub fn directory_of(disk: &Path, id: &InstanceId) -> PathBuf {
    disk.join(REPLICAS).join(id.name())
}

/// Removes a tree. Two calls may do that at the same time.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
