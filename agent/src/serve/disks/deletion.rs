//! Deletes directories of replicas.

use std::path::Path;
use std::{fs, io};

use shorthorn_api::v1;

use crate::serve::directories::{REPLICAS, remove_tree};
use crate::serve::error::NodeError;
use crate::serve::instance::InstanceId;
use crate::serve::trash::{self, TrashLimits};

/// Deletes the directory of a replica that does not run. It is moved to the trash, with `note`, if the trash
/// keeps anything and the disk has space for its record. Else it is renamed first, so that a partly deleted
/// directory is never taken for a replica.
///
/// # Errors
/// [`NodeError::Precondition`] if something else has that name, or a process has it open.
pub fn delete_replica(
    disk: &Path,
    id: &InstanceId,
    limits: TrashLimits,
    note: &str,
) -> Result<(), NodeError> {
    let InstanceId::Replica(..) = id else {
        return Err(NodeError::Invalid(format!("the {id} is not a replica")));
    };
    let replicas = disk.join(REPLICAS);
    let (directory, trash) = (replicas.join(id.name()), replicas.join(trash_name(id)));
    remove_tree(&trash).map_err(NodeError::at(&trash))?;
    match fs::symlink_metadata(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(NodeError::at(&directory)(error)),
        Ok(meta) if !meta.is_dir() => {
            return Err(NodeError::Precondition(format!("{} is not a directory", directory.display())));
        }
        Ok(_) => {}
    }
    // The lock lasts until the end. A process that opens the directory meanwhile fails at the lock, and
    // after that the directory is gone.
    let lock = trash::lock(&directory)?;
    if !limits.keep.is_zero() {
        match trash::move_in(disk, id, &lock, note, trash::now_ms()) {
            Err(NodeError::Exhausted(message)) => {
                tracing::warn!("{message}: {} is deleted at once", directory.display());
            }
            moved => return moved,
        }
    }
    fs::rename(&directory, &trash).map_err(NodeError::at(&directory))?;
    fs::File::open(&replicas).and_then(|dir| dir.sync_all()).map_err(NodeError::at(&replicas))?;
    remove_tree(&trash).map_err(NodeError::at(&trash))
}

/// Returns the name in the trash. Longhorn takes names that end in a hyphen and eight letters or digits for
/// replicas; this is none.
fn trash_name(id: &InstanceId) -> String {
    format!(".{}.deleted", id.name())
}

fn is_trash(name: &str) -> bool {
    let inner = name.strip_prefix('.').and_then(|name| name.strip_suffix(".deleted"));
    inner.is_some_and(|name| InstanceId::parse(v1::InstanceKind::Replica, name).is_ok())
}

/// Ends the deletions that an earlier agent had begun.
pub(super) fn remove_trash(disk: &Path) {
    let replicas = disk.join(REPLICAS);
    for entry in fs::read_dir(&replicas).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(is_trash) {
            let path = entry.path();
            match remove_tree(&path) {
                Ok(()) => tracing::info!("{}: completed an interrupted deletion", path.display()),
                Err(error) => tracing::warn!("{}: {error}", path.display()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::disks::Disks;
    use crate::serve::disks::disk_state::replicas;

    const NO_TRASH: TrashLimits = TrashLimits { keep: std::time::Duration::ZERO, free_percent: 0 };

    fn replica(name: &str) -> InstanceId {
        InstanceId::parse(v1::InstanceKind::Replica, name).unwrap()
    }

    #[test]
    fn deletes_a_replica_however_often() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("replicas/v1-0123abcd");
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("volume.meta"), "{}").unwrap();
        for _ in 0..2 {
            delete_replica(dir.path(), &replica("v1-0123abcd"), NO_TRASH, "").unwrap();
            assert_eq!(fs::read_dir(dir.path().join("replicas")).unwrap().count(), 0);
        }
    }

    #[test]
    fn ends_a_deletion_that_was_begun() {
        let dir = tempfile::tempdir().unwrap();
        let trash = dir.path().join("replicas").join(trash_name(&replica("v1-0123abcd")));
        let other = dir.path().join("replicas/.other");
        fs::create_dir_all(trash.join("deep")).unwrap();
        fs::create_dir_all(&other).unwrap();
        assert!(replicas(dir.path()).is_empty());
        drop(Disks::open(&[dir.path().to_owned()], dir.path()).unwrap());
        assert!(!trash.exists() && other.exists());
    }

    #[test]
    fn deletes_no_link() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("replicas")).unwrap();
        fs::create_dir_all(dir.path().join("precious")).unwrap();
        let link = dir.path().join("replicas/v1-0123abcd");
        std::os::unix::fs::symlink(dir.path().join("precious"), &link).unwrap();
        assert!(matches!(
            delete_replica(dir.path(), &replica("v1-0123abcd"), NO_TRASH, ""),
            Err(NodeError::Precondition(_))
        ));
        assert!(dir.path().join("precious").exists());
    }
}
