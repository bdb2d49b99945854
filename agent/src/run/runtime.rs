//! Paths of the sockets and files of a volume.
//!
//! The path of a Unix socket is limited to 107 bytes, and directories of volumes have longer ones. So the
//! sockets are in DIR/run if that is short enough. Otherwise they are in a directory of their own under
//! XDG_RUNTIME_DIR or /tmp, always the same one for the same DIR.

use std::fs;
use std::hash::Hasher;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use shorthorn_types::ReplicaId;

use crate::run::RunError;
use crate::run::volume::private_dir;

/// The longest path that `sockaddr_un` takes, which also needs a NUL.
const SOCKET_PATH_MAX_BYTES: usize = 107;
/// The longest name below: a replica id and `.control`.
const NAME_MAX_BYTES: usize = "12345678.control".len();

/// The directory of the sockets of a volume.
#[derive(Clone, Debug)]
pub struct RuntimeDir(PathBuf);

/// The files of one process.
#[derive(Clone, Debug)]
pub struct ProcessFiles {
    pub spec: PathBuf,
    pub control: PathBuf,
    pub pid: PathBuf,
    /// The file for the last error of the process.
    pub error: PathBuf,
    /// The socket on which an engine leaves the sockets of its device for the next one.
    pub notify: PathBuf,
    /// The data socket: of a replica for engines, of an engine for NBD clients.
    pub data: PathBuf,
}

impl RuntimeDir {
    /// Returns the paths of the engine's spec, pid file and sockets.
    pub fn engine(&self) -> ProcessFiles {
        self.files("engine", "nbd")
    }

    /// Returns the paths of a replica's spec, pid file and sockets.
    pub fn replica(&self, replica: ReplicaId) -> ProcessFiles {
        self.files(&replica.to_string(), "data")
    }

    fn files(&self, name: &str, data: &str) -> ProcessFiles {
        let file = |extension: &str| self.0.join(format!("{name}.{extension}"));
        ProcessFiles {
            spec: file("json"),
            control: file("control"),
            pid: file("pid"),
            error: file("error"),
            notify: file("notify"),
            data: file(data),
        }
    }
}

/// Finds the directory for the volume in `dir`, which is absolute, and makes it if it is missing.
///
/// # Errors
/// [`RunError::TooLong`] if no path is short enough, [`RunError::NotOurs`] if another user has it.
pub fn prepare(dir: &Path) -> Result<RuntimeDir, RunError> {
    let inside = dir.join("run");
    if fits(&inside) {
        private_dir(&inside)?;
        return Ok(RuntimeDir(inside));
    }
    let base = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let base = base.filter(|base| base.is_absolute() && base.is_dir()).unwrap_or_else(|| "/tmp".into());
    let outside = base.join(format!("shorthorn-{:016x}", fingerprint(dir)));
    if !fits(&outside) {
        return Err(RunError::TooLong { path: outside, longest: SOCKET_PATH_MAX_BYTES });
    }
    make_our_own(&outside)?;
    Ok(RuntimeDir(outside))
}

fn fits(dir: &Path) -> bool {
    dir.as_os_str().len() + 1 + NAME_MAX_BYTES <= SOCKET_PATH_MAX_BYTES
}

/// Returns a number that is the same for the same path, in every version of this program (FNV-1a).
fn fingerprint(path: &Path) -> u64 {
    struct Fnv(u64);
    impl Hasher for Fnv {
        fn finish(&self) -> u64 {
            self.0
        }
        fn write(&mut self, bytes: &[u8]) {
            for byte in bytes {
                self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
            }
        }
    }
    let mut hasher = Fnv(0xcbf2_9ce4_8422_2325);
    hasher.write(path.as_os_str().as_bytes());
    hasher.finish()
}

/// Makes a directory that only this user may write. Any user can create files in /tmp, even under this name,
/// so others are rejected.
fn make_our_own(path: &Path) -> Result<(), RunError> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(RunError::at(path)(error));
        }
        _ => {}
    }
    let found = fs::symlink_metadata(path).map_err(RunError::at(path))?;
    let ours = found.is_dir() && found.uid() == nix::unistd::geteuid().as_raw() && found.mode() & 0o077 == 0;
    if ours { Ok(()) } else { Err(RunError::NotOurs(path.to_owned())) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn every_socket_fits() {
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("x".repeat(100));
        fs::create_dir(&long).unwrap();
        for dir in [dir.path(), &long] {
            let runtime = prepare(dir).unwrap();
            let files = [runtime.engine(), runtime.replica(ReplicaId::from_random(1))];
            for path in files.iter().flat_map(|files| [&files.control, &files.data]) {
                assert!(path.as_os_str().len() <= SOCKET_PATH_MAX_BYTES, "{}", path.display());
                std::os::unix::net::UnixListener::bind(path).unwrap();
            }
            if !runtime.0.starts_with(dir) {
                fs::remove_dir_all(&runtime.0).unwrap();
            }
        }
    }

    #[test]
    fn uses_no_directory_that_others_can_write_to() {
        let dir = tempfile::tempdir().unwrap();
        let open = dir.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(make_our_own(&open), Err(RunError::NotOurs(_))));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(matches!(make_our_own(&link), Err(RunError::NotOurs(_))));
    }

    #[test]
    fn is_the_same_for_the_same_directory() {
        assert_eq!(fingerprint(Path::new("/a")), fingerprint(Path::new("/a")));
        assert_ne!(fingerprint(Path::new("/a")), fingerprint(Path::new("/b")));
    }
}
