//! Bundles on disk. A file is replaced as a whole, so that an interrupted store leaves the earlier pair.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::bundle::{BUNDLE_MAX_BYTES, Bundle, BundleError};

/// For the owner only.
const MODE: u32 = 0o600;
/// Bits that let others read or write.
const OTHERS: u32 = 0o077;

/// A bundle cannot be loaded or stored.
#[derive(Debug, Error)]
pub enum BundleFileError {
    /// The system refuses it.
    #[error("cannot {verb} {path}: {error}")]
    Io {
        /// The verb of the failed call, such as "read".
        verb: &'static str,
        /// Path of the file or folder that the call was for.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// Others can read the private key.
    #[error(
        "{path} has mode {mode:o}: its private key must be readable by its owner only; run chmod 600 {path}"
    )]
    Mode {
        /// The file that holds the key.
        path: PathBuf,
        /// The permissions, as of stat(2).
        mode: u32,
    },
    /// Not a bundle.
    #[error("{path} cannot be used: {error}")]
    Bundle {
        /// The file that was read.
        path: PathBuf,
        /// The problem of the bundle.
        error: BundleError,
    },
}

/// Loads the bundle in `path`; none if the file does not exist.
///
/// # Errors
/// [`BundleFileError`].
pub fn load(path: &Path) -> Result<Option<Bundle>, BundleFileError> {
    let failed = |error| BundleFileError::Io { verb: "read", path: path.to_owned(), error };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mode = file.metadata().map_err(failed)?.mode() & 0o777;
    if mode & OTHERS != 0 {
        return Err(BundleFileError::Mode { path: path.to_owned(), mode });
    }
    let mut text = Vec::new();
    let limit = u64::try_from(BUNDLE_MAX_BYTES).unwrap_or(u64::MAX).saturating_add(1);
    file.take(limit).read_to_end(&mut text).map_err(failed)?;
    let bundle = Bundle::from_pem(&text);
    bundle.map(Some).map_err(|error| BundleFileError::Bundle { path: path.to_owned(), error })
}

/// Stores the bundle durably in `path`, readable by its owner only. Either the file of before is there
/// afterwards or the new one, each with a key and the certificate that fits.
///
/// # Errors
/// [`BundleFileError`]; the file of before is then still there.
pub fn store(path: &Path, bundle: &Bundle) -> Result<(), BundleFileError> {
    let of_bundle = |error| BundleFileError::Bundle { path: path.to_owned(), error };
    bundle.check().map_err(of_bundle)?;
    let text = bundle.to_pem().map_err(of_bundle)?;
    let temporary = temporary(path);
    let failed = |verb, path: &Path| {
        let path = path.to_owned();
        move |error| BundleFileError::Io { verb, path, error }
    };
    // Removes the file of an interrupted store. Opening a new file does not follow a link in its place.
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(failed("remove", &temporary)(error));
        }
        _ => {}
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(MODE)
        .open(&temporary)
        .map_err(failed("create", &temporary))?;
    file.write_all(text.as_bytes()).map_err(failed("write", &temporary))?;
    file.sync_all().map_err(failed("write", &temporary))?;
    fs::rename(&temporary, path).map_err(failed("replace", path))?;
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    let folder_file = File::open(folder).map_err(failed("open", folder))?;
    folder_file.sync_all().map_err(failed("write", folder))
}

fn temporary(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".new");
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use super::*;
    use crate::{Authority, ClusterId, Role, UnixTime};

    fn bundles() -> (Bundle, Bundle) {
        let now = UnixTime::since_unix_epoch(Duration::from_secs(1_800_000_000));
        let mut authority = Authority::create(ClusterId::new("c").unwrap(), now).unwrap();
        let (role, trust) = (Role::node("a").unwrap(), authority.trust().unwrap());
        let mut bundle =
            || Bundle { identity: Some(authority.issue(&role, now).unwrap()), trust: trust.clone() };
        (bundle(), bundle())
    }

    fn serial(path: &Path) -> crate::Serial {
        load(path).unwrap().unwrap().identity.unwrap().certificate().serial.clone()
    }

    #[test]
    fn a_store_that_ends_half_way_leaves_the_pair_of_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tls.pem");
        assert!(load(&path).unwrap().is_none());
        let (one, two) = bundles();
        store(&path, &one).unwrap();
        let first = one.identity.as_ref().unwrap().certificate().serial.clone();
        assert_eq!(serial(&path), first);
        // As far as a store gets that is interrupted twice.
        let half = &two.to_pem().unwrap()[..100];
        for _ in 0..2 {
            fs::write(temporary(&path), half).unwrap();
            assert_eq!(serial(&path), first);
        }
        store(&path, &two).unwrap();
        assert_ne!(serial(&path), first);
        assert!(!temporary(&path).exists());
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_key_that_others_can_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tls.pem");
        store(&path, &bundles().0).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let error = load(&path).unwrap_err();
        assert!(matches!(error, BundleFileError::Mode { mode: 0o640, .. }), "{error}");
    }

    #[test]
    fn a_link_in_place_of_the_temporary_file_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, target) = (folder.path().join("tls.pem"), folder.path().join("other"));
        std::os::unix::fs::symlink(&target, temporary(&path)).unwrap();
        store(&path, &bundles().0).unwrap();
        assert!(!target.exists());
    }
}
