//! A replacement of systemd's descriptor store for an engine that is a child process of the agent.
//!
//! An engine that ends in order leaves the sockets of its device here, by messages like those to systemd
//! (sd_notify(3)): FDSTORE=1, FDSTOREREMOVE=1 and FDNAME=. The next one is started with them. Other messages
//! of engines are ignored.

use std::env;
use std::fs::{self, Permissions};
use std::io::{self, IoSliceMut};
use std::mem;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use shorthorn_types::limits::MAX_QUEUES;

/// The environment variable with the numbers of the passed descriptors: `<number>:<name>`, separated by
/// commas.
const PASSED: &str = "SHORTHORN_DESCRIPTORS";
/// The maximum number of kept descriptors: one socket for each queue.
const KEPT_MAX: usize = MAX_QUEUES as usize;
/// The maximum length of a message; messages of engines have some tens of bytes.
const MESSAGE_MAX_BYTES: usize = 4096;
const STACK_BYTES: usize = 128 << 10;

/// Keeps descriptors between two processes of an engine. They are closed when it is dropped.
#[derive(Debug)]
pub struct DescriptorStore {
    path: PathBuf,
    socket: Arc<UnixDatagram>,
    kept: Arc<Mutex<StoredDescriptors>>,
}

impl DescriptorStore {
    /// Listens on a socket of mode 0600 at `path`, and replaces an existing file.
    ///
    /// # Errors
    /// The error of bind, or of starting a thread.
    pub fn open(path: &Path) -> io::Result<DescriptorStore> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = Arc::new(UnixDatagram::bind(path)?);
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        let kept = Arc::new(Mutex::new(StoredDescriptors::default()));
        let (from, to) = (Arc::clone(&socket), Arc::clone(&kept));
        let builder = thread::Builder::new().name("descriptors".into()).stack_size(STACK_BYTES);
        builder.spawn(move || listen(&from, &to))?;
        Ok(DescriptorStore { path: path.to_owned(), socket, kept })
    }

    /// Lets the process of `command` leave its descriptors here, and passes those of the former process to
    /// it. The store keeps the passed ones no longer.
    pub fn pass_to(&self, command: &mut Command) {
        for variable in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
            command.env_remove(variable); // of our own sockets
        }
        command.env("NOTIFY_SOCKET", env::current_dir().unwrap_or_default().join(&self.path));
        let passed = mem::take(&mut *lock(&self.kept)).0;
        let list: Vec<String> =
            passed.iter().map(|(name, fd)| format!("{}:{name}", fd.as_raw_fd())).collect();
        command.env(PASSED, list.join(","));
        let inherit = move || {
            for (_, fd) in &passed {
                fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty()))?;
            }
            Ok(())
        };
        // SAFETY: between fork and exec the closure makes one system call for each descriptor and allocates
        // nothing.
        unsafe { command.pre_exec(inherit) };
    }
}

impl Drop for DescriptorStore {
    fn drop(&mut self) {
        // Ends the thread. The name stays: another store may have it already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// The kept descriptors, by name.
#[derive(Debug, Default)]
struct StoredDescriptors(Vec<(String, OwnedFd)>);

impl StoredDescriptors {
    /// Carries a message out. Descriptors that are not to be kept are closed, which is the answer to
    /// BARRIER=1.
    fn take(&mut self, message: &str, descriptors: Vec<OwnedFd>) {
        let says = |line: &str| message.lines().any(|other| other == line);
        let Some(name) = message.lines().find_map(|line| line.strip_prefix("FDNAME=")) else { return };
        // The name becomes a part of a list in the environment.
        if name.is_empty() || name.contains([',', ':', '\0']) {
            return tracing::warn!(
                name,
                "an engine has left a descriptor with a name that cannot be passed on"
            );
        }
        if says("FDSTOREREMOVE=1") {
            self.0.retain(|(other, _)| other != name);
        } else if says("FDSTORE=1") {
            for fd in descriptors {
                if self.0.len() == KEPT_MAX {
                    return tracing::warn!(name, "an engine has left more than {KEPT_MAX} descriptors");
                }
                self.0.push((name.to_owned(), fd));
            }
        }
    }
}

fn lock(kept: &Mutex<StoredDescriptors>) -> MutexGuard<'_, StoredDescriptors> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs until the socket is shut down.
fn listen(socket: &UnixDatagram, kept: &Mutex<StoredDescriptors>) {
    let mut buffer = vec![0; MESSAGE_MAX_BYTES];
    loop {
        match receive(socket, &mut buffer) {
            Ok(None) => return,
            Ok(Some((message, descriptors))) => lock(kept).take(&message, descriptors),
            Err(Errno::EINTR) => {}
            Err(error) => {
                return tracing::warn!(%error, "no longer accepting descriptors of engines");
            }
        }
    }
}

/// Receives the next message and its descriptors; none if the socket is shut down.
fn receive(socket: &UnixDatagram, buffer: &mut [u8]) -> Result<Option<(String, Vec<OwnedFd>)>, Errno> {
    let mut control = nix::cmsg_space!([RawFd; KEPT_MAX]);
    let mut parts = [IoSliceMut::new(buffer)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let received = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut control), flags)?;
    let mut descriptors = Vec::new();
    for message in received.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = message {
            // SAFETY: the kernel has made these descriptors for us with this message.
            descriptors.extend(numbers.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    let bytes = received.bytes;
    let text = String::from_utf8_lossy(&buffer[..bytes]).into_owned();
    Ok((bytes > 0 || !descriptors.is_empty()).then_some((text, descriptors)))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    use super::*;

    fn fd() -> OwnedFd {
        UnixStream::pair().unwrap().0.into()
    }

    fn names(kept: &StoredDescriptors) -> Vec<&str> {
        kept.0.iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn keeps_the_descriptors_that_messages_name_and_no_others() {
        let mut kept = StoredDescriptors::default();
        kept.take("FDSTORE=1\nFDNAME=nbd-1-0-0\n", vec![fd()]);
        kept.take("FDNAME=nbd-1-0-1\nFDSTORE=1\n", vec![fd()]);
        for other in ["READY=1\n", "BARRIER=1\n", "FDSTORE=1\n", "FDNAME=x\n", "FDSTORE=1\nFDNAME=a:b\n", ""]
        {
            kept.take(other, vec![fd()]);
        }
        assert_eq!(names(&kept), ["nbd-1-0-0", "nbd-1-0-1"]);
        kept.take("FDSTOREREMOVE=1\nFDNAME=nbd-1-0-0\n", Vec::new());
        assert_eq!(names(&kept), ["nbd-1-0-1"]);
        for _ in 0..2 * KEPT_MAX {
            kept.take("FDSTORE=1\nFDNAME=many\n", vec![fd()]);
        }
        assert_eq!(kept.0.len(), KEPT_MAX);
    }

    /// Runs a process that leaves a descriptor, and one that finds it.
    #[test]
    fn the_next_process_gets_the_descriptors_of_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let store = DescriptorStore::open(&dir.path().join("notify")).unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let message = |text: &str, fd: OwnedFd| {
            use nix::sys::socket::{ControlMessage, UnixAddr, sendmsg};
            let sender = UnixDatagram::unbound().unwrap();
            let to = UnixAddr::new(&store.path).unwrap();
            let (part, rights) = ([io::IoSlice::new(text.as_bytes())], [fd.as_raw_fd()]);
            let rights = [ControlMessage::ScmRights(&rights)];
            sendmsg(sender.as_raw_fd(), &part, &rights, MsgFlags::empty(), Some(&to)).unwrap();
        };
        message("FDSTORE=1\nFDNAME=nbd-1-0-0\n", theirs.into());
        let (mut waiting, barrier) = UnixStream::pair().unwrap();
        message("BARRIER=1\n", barrier.into());
        assert_eq!(waiting.read(&mut [0]).unwrap(), 0, "the barrier is closed when all is taken");
        let script =
            r#"test "${SHORTHORN_DESCRIPTORS#*:}" = nbd-1-0-0 && echo here >&"${SHORTHORN_DESCRIPTORS%%:*}""#;
        let mut command = Command::new("bash");
        command.args(["-c", script]).stdin(Stdio::null());
        store.pass_to(&mut command);
        assert!(command.status().unwrap().success());
        drop(command);
        let mut text = String::new();
        ours.read_to_string(&mut text).unwrap();
        assert_eq!(text, "here\n", "no other process has it");
        assert!(lock(&store.kept).0.is_empty(), "a descriptor is taken once");
    }

    #[test]
    fn its_thread_ends_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let store = DescriptorStore::open(&dir.path().join("notify")).unwrap();
        let socket = Arc::downgrade(&store.socket);
        drop(store);
        let deadline = Instant::now() + Duration::from_secs(30);
        while socket.upgrade().is_some() {
            assert!(Instant::now() < deadline, "the thread continues");
            thread::yield_now();
        }
    }
}
