//! Binding of a directory to its volume. Names can be used again, but the secret of a volume is drawn once.
//!
//! `shorthorn.fingerprint` has a fingerprint of that secret, and never the secret. A replica with another
//! secret does not open the directory. Otherwise a caller that can start a replica could read it with a
//! secret of its own. A directory that an earlier release has made has no fingerprint. The first replica that
//! opens it writes one.

use std::path::Path;

use serde::{Deserialize, Serialize};
use shorthorn_chain::{with_check, without_check};

use crate::directory::Directory;
use crate::directory_lock::DirectoryLock;
use crate::error::StoreError;

pub(crate) const FINGERPRINT_FILE: &str = "shorthorn.fingerprint";

#[derive(Debug, Serialize, Deserialize)]
struct Document {
    fingerprint: String,
}

/// Checks that a replica whose volume's secret has this fingerprint may open the directory.
///
/// # Errors
/// [`StoreError::OtherSecret`] if it belongs to another volume.
pub fn check_binding(directory: &Path, fingerprint: &str) -> Result<(), StoreError> {
    check(&Directory::open(directory)?, fingerprint).map(drop)
}

/// Gives the directory to the volume whose secret has this fingerprint. `_lock` is of that directory.
///
/// # Errors
/// An I/O error; the directory belongs to the volume of before then.
pub fn rebind(directory: &Path, _lock: &DirectoryLock, fingerprint: &str) -> Result<(), StoreError> {
    write(&Directory::open(directory)?, fingerprint)
}

/// Compares the fingerprint of the directory with that of the secret of a volume. A directory that has none
/// gets it.
pub(crate) fn bind(directory: &Directory, fingerprint: &str) -> Result<(), StoreError> {
    if check(directory, fingerprint)? { Ok(()) } else { write(directory, fingerprint) }
}

/// Returns true if the directory has this fingerprint, and false if it has none.
fn check(directory: &Directory, fingerprint: &str) -> Result<bool, StoreError> {
    let Some(bytes) = directory.read(FINGERPRINT_FILE)? else { return Ok(false) };
    let damaged =
        |reason: String| StoreError::FingerprintDamaged { path: directory.path_of(FINGERPRINT_FILE), reason };
    let document = without_check(FINGERPRINT_FILE, &bytes).map_err(|error| damaged(error.to_string()))?;
    let found: Document = serde_json::from_slice(&document).map_err(|error| damaged(error.to_string()))?;
    if found.fingerprint == fingerprint {
        return Ok(true);
    }
    Err(StoreError::OtherSecret(directory.path().to_owned()))
}

fn write(directory: &Directory, fingerprint: &str) -> Result<(), StoreError> {
    let document = Document { fingerprint: fingerprint.to_owned() };
    let mut bytes = serde_json::to_vec(&document)
        .map_err(|error| StoreError::io("write", directory.path_of(FINGERPRINT_FILE), error))?;
    bytes.push(b'\n');
    directory.replace(FINGERPRINT_FILE, &with_check(bytes))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{CreateOptions, Store, lock_directory};

    fn made(dir: &tempfile::TempDir) -> Store {
        let options = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        Store::create(dir.path().join("v1-00000001"), options).unwrap()
    }

    #[test]
    fn a_directory_belongs_to_the_first_secret_until_it_is_rebound() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("v1-00000001");
        let mut store = made(&dir);
        check_binding(&directory, "f1f1").unwrap();
        store.bind("f1f1").unwrap();
        store.bind("f1f1").unwrap();
        assert!(matches!(store.bind("e2e2"), Err(StoreError::OtherSecret(_))));
        store.close().unwrap();
        let refused = check_binding(&directory, "e2e2").unwrap_err().to_string();
        assert!(refused.contains("another secret") && !refused.contains("f1f1"), "{refused}");
        let lock = lock_directory(&directory).unwrap();
        rebind(&directory, &lock, "e2e2").unwrap();
        check_binding(&directory, "e2e2").unwrap();
        assert!(matches!(check_binding(&directory, "f1f1"), Err(StoreError::OtherSecret(_))));
    }

    #[test]
    fn a_damaged_fingerprint_matches_no_secret() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = made(&dir);
        store.bind("f1f1").unwrap();
        let path = dir.path().join("v1-00000001").join(FINGERPRINT_FILE);
        let text = fs::read_to_string(&path).unwrap();
        for damaged in [text.replace("f1f1", "e2e2"), String::new(), "{}".to_owned()] {
            fs::write(&path, damaged).unwrap();
            let refused = store.bind("e2e2").unwrap_err().to_string();
            assert!(refused.contains(FINGERPRINT_FILE) && refused.contains("remove"), "{refused}");
        }
    }
}
