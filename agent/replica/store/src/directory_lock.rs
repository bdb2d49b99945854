use std::path::Path;

use crate::directory::Directory;
use crate::error::StoreError;
use crate::lock::Lock;

/// A lock on the directory of a replica. No process can open the directory until this is dropped. Its content
/// stays as it is.
#[derive(Debug)]
pub struct DirectoryLock {
    _lock: Lock,
}

/// Locks a directory, for instance to move it elsewhere.
///
/// # Errors
/// [`StoreError::Locked`] if a process has it open, or has locked it.
pub fn lock_directory(directory: &Path) -> Result<DirectoryLock, StoreError> {
    Ok(DirectoryLock { _lock: Lock::unchanged(&Directory::open(directory)?)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CreateOptions, Store};

    #[test]
    fn a_directory_has_one_lock_and_none_while_it_is_open() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("v1-00000001");
        let created = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        let store = Store::create(&directory, created).unwrap();
        assert!(matches!(lock_directory(&directory), Err(StoreError::Locked { .. })));
        store.close().unwrap();
        let lock = lock_directory(&directory).unwrap();
        assert!(matches!(lock_directory(&directory), Err(StoreError::Locked { .. })));
        assert!(matches!(Store::open(&directory, Default::default()), Err(StoreError::Locked { .. })));
        drop(lock);
        Store::open(&directory, Default::default()).unwrap().close().unwrap();
        // Longhorn has made it, and Shorthorn has not opened it yet: it has no lock file, and none is made.
        let plain = dir.path().join("v1-00000002");
        std::fs::create_dir(&plain).unwrap();
        lock_directory(&plain).unwrap();
        assert_eq!(std::fs::read_dir(&plain).unwrap().count(), 0);
    }
}
