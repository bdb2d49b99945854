//! The process tgtd of one volume, with one target.
//!
//! It holds a copy of the descriptor of the FUSE file, as its standard input. So the file outlives the
//! engine: requests wait until the next engine has killed this tgtd, and none is ever answered with an error.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use nix::sys::socket::{getsockopt, sockopt};
use shorthorn_linux::process::ProcessFd;

use super::channel;
use super::commands::{CONTROL_SUFFIX, CONTROL_VARIABLE, Target};
use crate::host::Host;
use crate::{FrontendError, wait};

/// The longest path that `sockaddr_un` takes, which also needs a NUL.
const SOCKET_PATH_MAX_BYTES: usize = 107;
/// The time limit of one call of tgtadm, and of a new tgtd to listen. tgtd answers from memory, but runs
/// everything in one thread, which may wait for a read.
const CALL_LIMIT: Duration = Duration::from_secs(20);
/// The time limit for the end of a killed process, once nothing holds its requests back. The kernel frees its
/// memory and closes its sockets, which takes a busy host seconds.
const END_LIMIT: Duration = Duration::from_secs(20);
/// The pause before a tgtd that does not start is started again. The port may belong to a process that is
/// just ending.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// The files of one volume's target.
#[derive(Clone, Debug)]
pub(super) struct TargetFiles {
    directory: PathBuf,
}

impl TargetFiles {
    /// The files are in `directory`.
    ///
    /// # Errors
    /// Its path is too long for a socket.
    pub(super) fn new(directory: PathBuf) -> io::Result<TargetFiles> {
        let files = TargetFiles { directory };
        let length = files.control_socket().as_os_str().len();
        if length <= SOCKET_PATH_MAX_BYTES {
            return Ok(files);
        }
        let path = files.control_socket();
        let text = format!(
            "{} has {length} bytes, and the path of a Unix socket at most {SOCKET_PATH_MAX_BYTES}: use a \
             shorter runtime_dir",
            path.display()
        );
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    }

    /// Returns the files of the target whose disk is mounted on `mount`.
    pub(super) fn of_mount(mount: &Path) -> TargetFiles {
        TargetFiles { directory: mount.parent().unwrap_or_else(|| Path::new("/")).to_owned() }
    }

    /// Returns the path of the FUSE file.
    pub(super) fn disk(&self) -> PathBuf {
        self.directory.join("disk")
    }

    /// Returns the value of [`CONTROL_VARIABLE`].
    fn control(&self) -> PathBuf {
        self.directory.join("c")
    }

    fn control_socket(&self) -> PathBuf {
        let mut path: OsString = self.control().into();
        path.push(CONTROL_SUFFIX);
        path.into()
    }

    /// Removes them all. What is left has no effect.
    pub(super) fn remove(&self) {
        if let Err(error) = fs::remove_dir_all(&self.directory)
            && error.kind() != io::ErrorKind::NotFound
        {
            let directory = self.directory.display();
            tracing::warn!(%directory, %error, "cannot remove the files of an iSCSI target");
        }
    }

    /// Returns the tgtd that listens on the control socket.
    ///
    /// # Errors
    /// It does not answer, or cannot be identified.
    pub(super) fn process(&self) -> io::Result<Option<ProcessHandle>> {
        let path = self.control_socket();
        let connected = wait::within(CALL_LIMIT, move || match UnixStream::connect(path) {
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
            {
                Ok(None)
            }
            connected => connected.map(Some),
        })?;
        let Some(socket) = connected else { return Ok(None) };
        let pid = getsockopt(&socket, sockopt::PeerCredentials)?.pid();
        ProcessHandle::of(pid)
    }
}

/// A process that need not be a child of this one.
#[derive(Clone, Debug)]
pub(super) struct ProcessHandle {
    pid: i32,
    handle: Arc<ProcessFd>,
}

impl ProcessHandle {
    fn of(pid: i32) -> io::Result<Option<ProcessHandle>> {
        Ok(ProcessFd::open(pid)?.map(|handle| ProcessHandle { pid, handle: Arc::new(handle) }))
    }

    /// Kills it, and waits until its main thread is gone: the one that answers the initiator. Its other
    /// threads may wait for the engine for ever.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(super) fn kill(&self) -> io::Result<()> {
        if !self.handle.kill()? {
            return Ok(());
        }
        let is_gone = wait::until(END_LIMIT, || {
            let text = fs::read_to_string(format!("/proc/{0}/task/{0}/stat", self.pid));
            Ok::<_, io::Error>((!text.is_ok_and(|stat| is_running(&stat))).then_some(()))
        })?;
        is_gone.ok_or_else(|| wait::timed_out(END_LIMIT))
    }

    /// Waits until all of its threads are gone.
    ///
    /// # Errors
    /// They are not within `limit`.
    pub(super) fn wait(&self, limit: Duration) -> io::Result<()> {
        self.handle.ends_within(Some(limit))?.then_some(()).ok_or_else(|| wait::timed_out(limit))
    }
}

/// Returns true if the killed thread of this line of /proc/…/stat may still run its program. One that is dead
/// does not, and neither does one in a wait of the kernel that cannot be interrupted: it dies after that.
fn is_running(stat: &str) -> bool {
    // The name of the program may contain anything, brackets too.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    !matches!(state, None | Some('Z' | 'X' | 'D'))
}

/// Kills the tgtd with these files, and removes its disk. In this order: an initiator never sees the errors
/// of the requests that end with the disk.
///
/// # Errors
/// The obstacle.
pub(super) fn remove(files: &TargetFiles) -> io::Result<()> {
    let process = files.process()?;
    if let Some(process) = &process {
        process.kill()?;
    }
    channel::unmount(&files.disk())?;
    process.map_or(Ok(()), |process| process.wait(END_LIMIT))
}

/// The target of a volume that this engine serves.
#[derive(Debug)]
pub(super) struct TargetServer {
    pub(super) target: Target,
    pub(super) host: Host,
    pub(super) files: TargetFiles,
    /// The descriptor of the FUSE file, for tgtd.
    fuse: OwnedFd,
    state: Mutex<TgtdState>,
}

#[derive(Debug, Default)]
struct TgtdState {
    process: Option<ProcessHandle>,
    is_stopped: bool,
}

impl TargetServer {
    pub(super) fn new(target: Target, host: Host, files: TargetFiles, fuse: OwnedFd) -> TargetServer {
        TargetServer { target, host, files, fuse, state: Mutex::default() }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, TgtdState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Uses the tgtd that the last engine has started.
    pub(super) fn adopt(&self, process: ProcessHandle) {
        self.state().process = Some(process);
    }

    /// Starts tgtd and makes the target.
    ///
    /// # Errors
    /// The obstacle.
    pub(super) fn start(&self) -> Result<(), FrontendError> {
        let mut state = self.state();
        state.process = Some(self.started()?);
        Ok(())
    }

    /// Replaces tgtd, whose disk has another size now. Requests wait meanwhile.
    ///
    /// # Errors
    /// The obstacle; the volume's tgtd is started again by [`TargetServer::watch`].
    pub(super) fn restart(&self) -> Result<(), FrontendError> {
        let mut state = self.state();
        if let Some(process) = &state.process {
            // When all of its threads have ended, none of its requests is in the volume any more. An old
            // write could otherwise arrive behind a newer one.
            let ended = process.kill().and_then(|()| process.wait(END_LIMIT));
            ended.map_err(|source| self.failed("end tgtd", source))?;
        }
        state.process = Some(self.started()?);
        Ok(())
    }

    /// Restarts a tgtd that has ended without a command, until [`TargetServer::stop`].
    ///
    /// # Errors
    /// No thread can be started.
    pub(super) fn watch(self: &Arc<TargetServer>) -> io::Result<()> {
        let server = Arc::clone(self);
        let work = move || {
            while let Some(process) = server.current() {
                if process.handle.ends_within(None).is_err() || !server.replaced(&process) {
                    thread::sleep(RETRY_PAUSE);
                }
            }
        };
        thread::Builder::new().name("tgtd".into()).spawn(work).map(drop)
    }

    /// Returns the process to watch; none once the target is stopped.
    fn current(&self) -> Option<ProcessHandle> {
        let state = self.state();
        state.process.clone().filter(|_| !state.is_stopped)
    }

    /// Starts the successor of a process that has ended, unless it has one. Returns false if that fails.
    fn replaced(&self, ended: &ProcessHandle) -> bool {
        let mut state = self.state();
        let is_current = state.process.as_ref().is_some_and(|now| Arc::ptr_eq(&now.handle, &ended.handle));
        if state.is_stopped || !is_current {
            return true;
        }
        let volume = &self.target.volume;
        tracing::warn!(%volume, pid = ended.pid, "tgtd has ended: starting it again");
        match self.started() {
            Ok(process) => {
                state.process = Some(process);
                true
            }
            Err(error) => {
                tracing::error!(%volume, %error, "tgtd does not start: requests of the volume wait");
                false
            }
        }
    }

    /// Ends tgtd and removes its disk.
    ///
    /// # Errors
    /// The obstacle.
    pub(super) fn stop(&self) -> Result<(), FrontendError> {
        let mut state = self.state();
        state.is_stopped = true;
        remove(&self.files).map_err(|source| self.failed("end tgtd", source))
    }

    /// Starts a process and waits until its target can be used.
    fn started(&self) -> Result<ProcessHandle, FrontendError> {
        self.end_rest().map_err(|source| self.failed("end an earlier tgtd", source))?;
        let mut child = self.spawn().map_err(|source| self.failed("start tgtd", source))?;
        let process =
            self.listening(&mut child).map_err(|source| self.failed("wait for tgtd to listen", source))?;
        reap(child);
        let control = self.files.control();
        for call in self.target.set_up(&self.files.disk()) {
            self.host.run(&call, &[(CONTROL_VARIABLE, &control)], CALL_LIMIT)?;
        }
        Ok(process)
    }

    /// Ends a tgtd whose target could not be made.
    fn end_rest(&self) -> io::Result<()> {
        self.files.process()?.map_or(Ok(()), |process| process.kill().and_then(|()| process.wait(END_LIMIT)))
    }

    fn spawn(&self) -> io::Result<Child> {
        let call = self.target.daemon();
        let description = format!("Shorthorn iSCSI target of volume {}", self.target.volume);
        let mut command = self.host.daemon(&description, call.program);
        command.args(&call.arguments).env(CONTROL_VARIABLE, self.files.control());
        command.stdin(Stdio::from(self.fuse.try_clone()?)).stdout(Stdio::null());
        command.spawn()
    }

    fn listening(&self, child: &mut Child) -> io::Result<ProcessHandle> {
        let found = wait::until(CALL_LIMIT, || {
            if let Some(process) = self.files.process()? {
                return Ok(Some(process));
            }
            match child.try_wait()? {
                Some(status) => Err(io::Error::other(format!("tgtd has ended: {status}; see the log"))),
                None => Ok(None),
            }
        })?;
        found.ok_or_else(|| {
            // It may be in a call to the kernel that does not end.
            let _ = child.kill();
            wait::timed_out(CALL_LIMIT)
        })
    }

    fn failed(&self, action: &str, source: io::Error) -> FrontendError {
        FrontendError::System { action: format!("{action} for {}", self.target.volume), source }
    }
}

/// Takes the exit status of a child when it ends, so that it does not stay in the table of processes.
pub(super) fn reap(mut child: Child) {
    let reaper = thread::Builder::new().name("reaper".into()).spawn(move || child.wait());
    if let Err(error) = reaper {
        tracing::debug!(%error, "cannot wait for tgtd: tgtd stays a zombie after its end");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_killed_thread_that_cannot_run_any_more_is_known() {
        for running in ["7 (tgtd) S 1 7", "7 (a) Z) R 1 7", "7 (tgtd) R 1"] {
            assert!(is_running(running), "{running}");
        }
        for dead in ["7 (tgtd) Z 1 7", "7 (a) R) X 1", "7 (tgtd) D 1", "", "7 (tgtd)"] {
            assert!(!is_running(dead), "{dead}");
        }
    }

    #[test]
    fn the_process_behind_the_control_socket_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let files = TargetFiles::new(dir.path().to_owned()).unwrap();
        assert!(files.process().unwrap().is_none());
        let listener = UnixListener::bind(dir.path().join("c.0")).unwrap();
        assert_eq!(files.process().unwrap().unwrap().pid, i32::try_from(std::process::id()).unwrap());
        drop(listener);
        assert!(files.process().unwrap().is_none(), "no process listens any more");
        files.remove();
        files.remove();
        assert!(!dir.path().exists());
    }

    #[test]
    fn a_killed_process_ends_once() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = ProcessHandle::of(i32::try_from(child.id()).unwrap()).unwrap().unwrap();
        assert!(process.wait(Duration::ZERO).is_err());
        process.kill().unwrap();
        process.wait(END_LIMIT).unwrap();
        child.wait().unwrap();
        process.kill().unwrap();
    }

    #[test]
    fn a_path_that_is_too_long_for_a_socket_is_refused_in_words() {
        let error = TargetFiles::new(format!("/{}", "r".repeat(110)).into()).unwrap_err();
        assert!(error.to_string().contains("shorter runtime_dir"), "{error}");
    }
}
