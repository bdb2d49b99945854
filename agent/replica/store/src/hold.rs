use std::path::Path;

use crate::directory::Directory;
use crate::error::StoreError;
use crate::lock::Lock;

/// The directory of a replica that no process has open. No process can open it until this is dropped. Its
/// content stays as it is.
#[derive(Debug)]
pub struct Held {
    _lock: Lock,
}

/// Holds a directory, for instance to move it elsewhere.
///
/// # Errors
/// [`StoreError::Locked`] if a process has it open, or another one holds it.
pub fn hold(directory: &Path) -> Result<Held, StoreError> {
    Ok(Held { _lock: Lock::unchanged(&Directory::open(directory)?)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CreateOptions, Store};

    #[test]
    fn a_directory_is_held_by_one_and_not_while_it_is_open() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("v1-00000001");
        let created = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        let store = Store::create(&directory, created).unwrap();
        assert!(matches!(hold(&directory), Err(StoreError::Locked { .. })));
        store.close().unwrap();
        let held = hold(&directory).unwrap();
        assert!(matches!(hold(&directory), Err(StoreError::Locked { .. })));
        assert!(matches!(Store::open(&directory, Default::default()), Err(StoreError::Locked { .. })));
        drop(held);
        Store::open(&directory, Default::default()).unwrap().close().unwrap();
        // Longhorn has made it, and Shorthorn has not opened it yet: it has no lock file, and none is made.
        let plain = dir.path().join("v1-00000002");
        std::fs::create_dir(&plain).unwrap();
        hold(&plain).unwrap();
        assert_eq!(std::fs::read_dir(&plain).unwrap().count(), 0);
    }
}
