//! The sockets that kubelet calls: taken from systemd, or made.

use std::fs;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

/// `FileDescriptorName=` of the socket units.
const CSI: &str = "csi";
const REGISTRATION: &str = "registration";

/// Sockets that systemd holds and has passed.
#[derive(Debug, Default)]
pub struct Inherited {
    csi: Option<StdListener>,
    registration: Option<StdListener>,
}

impl Inherited {
    /// Takes the passed descriptors. May be called only once: afterwards the descriptors have owners.
    ///
    /// # Errors
    /// The passed descriptors do not match sd_listen_fds(3).
    pub fn take() -> io::Result<Inherited> {
        let mut inherited = Inherited::default();
        for (fd, name) in sd_notify::listen_fds_with_names()? {
            // SAFETY: systemd has opened the descriptor for this process, no other code here knows its
            // number, and this is called once.
            let fd = unsafe { OwnedFd::from_raw_fd(fd) };
            let place = match name.as_str() {
                CSI => &mut inherited.csi,
                REGISTRATION => &mut inherited.registration,
                _ => {
                    tracing::warn!("systemd has passed a socket {name:?}, which is not used");
                    continue;
                }
            };
            let listener = StdListener::from(fd);
            listener.set_nonblocking(true)?;
            *place = Some(listener);
        }
        Ok(inherited)
    }

    /// Returns the socket of CSI, if systemd has it at `path`.
    pub fn csi_at(&self, path: &Path) -> Option<Socket> {
        self.csi.as_ref().and_then(|listener| Socket::share(listener, path))
    }

    /// Returns the socket of the registration, if systemd has it at `path`.
    pub fn registration_at(&self, path: &Path) -> Option<Socket> {
        self.registration.as_ref().and_then(|listener| Socket::share(listener, path))
    }
}

/// A socket that is listened on.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    name: SocketFile,
}

#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    file: (u64, u64),
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<SocketFile> {
        Ok(SocketFile { path: path.to_owned(), file: file_at(path)? })
    }

    /// Returns true if the name still leads to the socket.
    pub fn is_there(&self) -> bool {
        file_at(&self.path).is_ok_and(|file| file == self.file)
    }
}

fn file_at(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()))
}

impl Socket {
    /// Makes a socket for root only, and replaces that of an earlier agent.
    ///
    /// It is made under another name, which kubelet ignores, and moved: so it never has other permissions,
    /// and the path always has a socket.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn bind(path: &Path) -> io::Result<Socket> {
        let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str()))
        else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        fs::DirBuilder::new().recursive(true).mode(0o750).create(folder)?;
        let new = folder.join(format!(".{name}"));
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&new)?;
        fs::set_permissions(&new, fs::Permissions::from_mode(0o600))?;
        fs::rename(&new, path)?;
        Ok(Socket { listener, name: SocketFile::of(path)? })
    }

    /// Listens on a socket of systemd's, unless that is elsewhere, or its name is gone.
    fn share(listener: &StdListener, path: &Path) -> Option<Socket> {
        let address = listener.local_addr().ok()?;
        if address.as_pathname() != Some(path) {
            tracing::warn!(
                ?address,
                wanted = %path.display(),
                "systemd has the socket elsewhere: it is not used"
            );
            return None;
        }
        let name = SocketFile::of(path).ok()?;
        let listener = UnixListener::from_std(listener.try_clone().ok()?).ok()?;
        Some(Socket { listener, name })
    }

    /// Returns the listener, and its name to watch over.
    pub fn split(self) -> (UnixListener, SocketFile) {
        (self.listener, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_of_an_earlier_agent_is_replaced_and_its_end_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("plugins/csi.sock");
        let (_first, old) = Socket::bind(&path).unwrap().split();
        assert!(old.is_there());
        let (_second, new) = Socket::bind(&path).unwrap().split();
        assert!(!old.is_there() && new.is_there());
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        fs::remove_file(&path).unwrap();
        assert!(!new.is_there());
    }

    #[tokio::test]
    async fn a_socket_of_systemd_is_used_only_at_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("csi.sock");
        let inherited = Inherited { csi: Some(StdListener::bind(&path).unwrap()), registration: None };
        inherited.csi.as_ref().unwrap().set_nonblocking(true).unwrap();
        let other = dir.path().join("other.sock");
        let _other = StdListener::bind(&other).unwrap();
        assert!(inherited.csi_at(&other).is_none(), "kubelet looks elsewhere");
        assert!(inherited.registration_at(&path).is_none());
        // More than once: the agent may serve, stop and serve again.
        for _ in 0..2 {
            let (listener, name) = inherited.csi_at(&path).unwrap().split();
            let _client = tokio::net::UnixStream::connect(&path).await.unwrap();
            listener.accept().await.unwrap();
            assert!(name.is_there());
        }
        fs::remove_file(&path).unwrap();
        assert!(inherited.csi_at(&path).is_none(), "a socket without a name cannot be called");
    }
}
