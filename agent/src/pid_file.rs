//! Pid files that cannot lie.
//!
//! A process holds a record lock on its pid file for as long as it lives. The kernel reports the holder of
//! the lock, so a reused pid, or a file left by an ended process, does not mislead. The text in the file is
//! for people.

use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use shorthorn_linux::process::ProcessFd;
use thiserror::Error;

/// A lock for writing of a file from its first byte to its end, see fcntl(2).
#[allow(clippy::cast_possible_truncation)] // both are small numbers
const WHOLE_FILE: libc::flock = libc::flock {
    l_type: libc::F_WRLCK as libc::c_short,
    l_whence: libc::SEEK_SET as libc::c_short,
    l_start: 0,
    l_len: 0,
    l_pid: 0,
};

/// Looks at a lock while its holders end or change. A holder that has just ended can look like one of another
/// PID namespace, so a single look does not suffice.
const LOOKS_MAX: u32 = 100;

/// A pid file held by this process. The lock ends with the process, or when this is dropped.
#[derive(Debug)]
pub struct PidFile {
    _file: File,
}

/// The reason why a pid file cannot be taken.
#[derive(Debug, Error)]
pub enum PidFileError {
    /// Another process has it.
    #[error("{path} is locked by process {pid}: stop that process first")]
    Held {
        path: PathBuf,
        /// The holder's process id.
        pid: i32,
    },
    /// The file cannot be opened, locked or written.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
}

/// The holder of a lock has no process id in the PID namespace of this process. The cause of an
/// [`io::Error`].
#[derive(Debug, Error)]
#[error(
    "locked by a process of another PID namespace, such as that of a container: stop that process first; \
     lslocks shows it on the host"
)]
pub struct HeldElsewhere;

/// The holder of a lock, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LockHolder {
    None,
    Process(i32),
    /// A process of another PID namespace, whose id the kernel reports as 0.
    Elsewhere,
}

impl PidFile {
    /// Takes the pid file at `path` for this process. A process may do that once: closing any other
    /// descriptor of the file would release the lock.
    ///
    /// # Errors
    /// [`PidFileError::Held`] if another process has it.
    pub fn lock(path: &Path) -> Result<PidFile, PidFileError> {
        let io = |source| PidFileError::Io { path: path.to_owned(), source };
        let mut file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(io)?;
        let holder = repeat(|| match fcntl(&file, FcntlArg::F_SETLK(&WHOLE_FILE)) {
            Ok(_) => Ok(ControlFlow::Break(None)),
            Err(Errno::EACCES | Errno::EAGAIN) => Ok(match lock_holder(&file)? {
                LockHolder::Process(pid) => ControlFlow::Break(Some(pid)),
                // Between the two calls the holder may have ended: then the lock is free, and is tried again.
                holder => ControlFlow::Continue(holder),
            }),
            Err(error) => Err(error.into()),
        });
        if let Some(pid) = holder.map_err(io)? {
            return Err(PidFileError::Held { path: path.to_owned(), pid });
        }
        file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(io)?;
        Ok(PidFile { _file: file })
    }
}

/// Returns true if a process, of any PID namespace, holds the pid file at `path`.
///
/// # Errors
/// The error of the system.
pub fn is_held(path: &Path) -> io::Result<bool> {
    Ok(match open(path)? {
        Some(file) => lock_holder(&file)? != LockHolder::None,
        None => false,
    })
}

/// Opens a pid file for reading; none if it is missing.
fn open(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

/// Returns the process that has a lock on the file.
fn lock_holder(file: &File) -> io::Result<LockHolder> {
    let mut lock = WHOLE_FILE;
    fcntl(file, FcntlArg::F_GETLK(&mut lock))?;
    Ok(match lock.l_pid {
        _ if libc::c_int::from(lock.l_type) == libc::F_UNLCK => LockHolder::None,
        0 => LockHolder::Elsewhere,
        pid => LockHolder::Process(pid),
    })
}

/// Repeats `look` until it has a result, at most [`LOOKS_MAX`] times. A look without a result returns the
/// holder that it has seen.
fn repeat<T>(mut look: impl FnMut() -> io::Result<ControlFlow<T, LockHolder>>) -> io::Result<T> {
    let mut last = LockHolder::None;
    for _ in 0..LOOKS_MAX {
        match look()? {
            ControlFlow::Break(found) => return Ok(found),
            ControlFlow::Continue(holder) => last = holder,
        }
    }
    Err(match last {
        LockHolder::Elsewhere => io::Error::other(HeldElsewhere),
        LockHolder::None | LockHolder::Process(_) => {
            io::Error::new(io::ErrorKind::ResourceBusy, "the holder of the lock changes again and again")
        }
    })
}

/// A living process that holds a pid file.
#[derive(Debug)]
pub struct PidFileHolder {
    pid: i32,
    process: ProcessFd,
}

impl PidFileHolder {
    /// Returns the holder of the pid file at `path`; none if the file is missing.
    ///
    /// # Errors
    /// The error of the system, or [`HeldElsewhere`] inside an error.
    pub fn find(path: &Path) -> io::Result<Option<PidFileHolder>> {
        let Some(file) = open(path)? else { return Ok(None) };
        repeat(|| {
            let holder = lock_holder(&file)?;
            let pid = match holder {
                LockHolder::None => return Ok(ControlFlow::Break(None)),
                LockHolder::Elsewhere => return Ok(ControlFlow::Continue(holder)),
                LockHolder::Process(pid) => pid,
            };
            let Some(process) = ProcessFd::open(pid)? else { return Ok(ControlFlow::Continue(holder)) };
            // It held the lock before and after: the descriptor is of that very process.
            Ok(match lock_holder(&file)? == holder {
                true => ControlFlow::Break(Some(PidFileHolder { pid, process })),
                false => ControlFlow::Continue(holder),
            })
        })
    }

    /// Returns the process id of the holder.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Asks it to end, as SIGTERM does.
    ///
    /// # Errors
    /// The error of the system; a process that has ended already is not an error.
    pub fn terminate(&self) -> io::Result<()> {
        self.process.terminate().map(drop)
    }

    /// Ends it at once.
    ///
    /// # Errors
    /// The error of the system; a process that has ended already is not an error.
    pub fn kill(&self) -> io::Result<()> {
        self.process.kill().map(drop)
    }

    /// Waits until it has ended, for at most `limit`; whether it has.
    ///
    /// # Errors
    /// The error of the system.
    pub fn wait(&self, limit: Duration) -> io::Result<bool> {
        self.process.ends_within(Some(limit))
    }

    /// Returns a child as the holder, which may not hold its pid file yet. The caller has not reaped it yet.
    ///
    /// # Errors
    /// The error of the system.
    pub fn of_child(child: &std::process::Child) -> io::Result<PidFileHolder> {
        let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
        Ok(PidFileHolder { pid, process: ProcessFd::of_child(child)? })
    }

    /// Returns a pidfd: readable once the process has ended.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn fd(&self) -> io::Result<OwnedFd> {
        self.process.try_clone()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    const HOLD: &str = "SHORTHORN_TEST_HOLD";
    const LOOK: &str = "SHORTHORN_TEST_LOOK";

    /// Runs as the other process of the tests below, and is not a test of its own.
    #[test]
    fn helper_holds_until_its_input_ends() {
        let Some(path) = std::env::var_os(HOLD) else { return };
        let _held = PidFile::lock(Path::new(&path)).unwrap();
        println!("held");
        io::copy(&mut io::stdin(), &mut io::sink()).unwrap();
    }

    /// Runs in another PID namespace, and is not a test of its own.
    #[test]
    fn helper_looks_at_a_pid_file_that_is_held_elsewhere() {
        let Some(path) = std::env::var_os(LOOK) else { return };
        let path = Path::new(&path);
        let is_elsewhere =
            |error: &io::Error| error.get_ref().is_some_and(|cause| cause.is::<HeldElsewhere>());
        match PidFile::lock(path) {
            Err(PidFileError::Io { source, .. }) if is_elsewhere(&source) => {}
            other => panic!("{other:?}"),
        }
        let found = PidFileHolder::find(path);
        assert!(found.as_ref().is_err_and(is_elsewhere), "{found:?}");
        assert!(is_held(path).unwrap());
        println!("looked");
    }

    #[test]
    fn a_holder_in_another_pid_namespace_is_an_error_and_not_a_free_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pid");
        let mut child = holder_process(&path);
        let looked = Command::new("unshare")
            .args(["--pid", "--fork"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture"])
            .arg("pid_file::tests::helper_looks_at_a_pid_file_that_is_held_elsewhere")
            .env(LOOK, &path)
            .output()
            .unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let output = String::from_utf8_lossy(&looked.stdout);
        let errors = String::from_utf8_lossy(&looked.stderr);
        assert!(looked.status.success() && output.contains("looked"), "{output}\n{errors}");
    }

    /// Returns the error after looks that all end in the same way, with their number.
    fn error_of_looks(holder: LockHolder) -> (io::Error, u32) {
        let mut looks = 0;
        let error = repeat::<()>(|| {
            looks += 1;
            Ok(ControlFlow::Continue(holder))
        });
        (error.unwrap_err(), looks)
    }

    #[test]
    fn looks_end_after_a_limit_and_the_error_says_how_to_find_the_holder() {
        let (error, looks) = error_of_looks(LockHolder::Elsewhere);
        assert_eq!(looks, LOOKS_MAX);
        let text = error.to_string();
        assert!(text.contains("another PID namespace") && text.contains("lslocks"), "{text}");
        for holder in [LockHolder::None, LockHolder::Process(7)] {
            let (error, looks) = error_of_looks(holder);
            assert_eq!((error.kind(), looks), (io::ErrorKind::ResourceBusy, LOOKS_MAX), "{holder:?}");
        }
    }

    #[test]
    fn a_look_with_a_result_or_an_error_is_the_last_one() {
        let mut results = [ControlFlow::Continue(LockHolder::Elsewhere), ControlFlow::Break(7)].into_iter();
        assert_eq!(repeat(|| Ok(results.next().unwrap())).unwrap(), 7);
        let mut looks = 0;
        let error = repeat::<()>(|| {
            looks += 1;
            Err(io::ErrorKind::PermissionDenied.into())
        });
        assert_eq!((error.unwrap_err().kind(), looks), (io::ErrorKind::PermissionDenied, 1));
    }

    /// Starts a process that holds the pid file at `path`.
    pub(crate) fn holder_process(path: &Path) -> std::process::Child {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "pid_file::tests::helper_holds_until_its_input_ends"])
            .env(HOLD, path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line.contains("held")));
        child
    }

    #[test]
    fn names_the_holder_while_it_lives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pid");
        assert!(PidFileHolder::find(&path).unwrap().is_none());
        let mut child = holder_process(&path);
        let holder = PidFileHolder::find(&path).unwrap().unwrap();
        assert_eq!(holder.pid().unsigned_abs(), child.id());
        match PidFile::lock(&path) {
            Err(PidFileError::Held { pid, .. }) => assert_eq!(pid.unsigned_abs(), child.id()),
            other => panic!("{other:?}"),
        }
        assert!(is_held(&path).unwrap());
        assert!(!holder.wait(Duration::ZERO).unwrap());
        holder.kill().unwrap();
        assert!(holder.wait(Duration::from_secs(20)).unwrap());
        child.wait().unwrap();
        holder.terminate().unwrap();
        assert!(PidFileHolder::find(&path).unwrap().is_none());
        assert!(PidFile::lock(&path).is_ok());
    }

    #[test]
    fn a_left_over_file_has_no_holder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pid");
        fs::write(&path, "1\n").unwrap();
        assert!(PidFileHolder::find(&path).unwrap().is_none());
        assert!(!is_held(&path).unwrap());
        assert!(!is_held(&dir.path().join("missing")).unwrap());
    }
}
