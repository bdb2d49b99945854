//! Pid files that cannot lie.
//!
//! A process holds a record lock on its pid file for as long as it lives. The kernel reports the holder of
//! the lock, so a reused pid, or a file left by an ended process, does not mislead. The text in the file is
//! for people.

use std::fs::{self, File};
use std::io::{self, Write};
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
        while let Err(error) = fcntl(&file, FcntlArg::F_SETLK(&WHOLE_FILE)) {
            if !matches!(error, Errno::EACCES | Errno::EAGAIN) {
                return Err(io(error.into()));
            }
            // Between the two calls the holder may have gone: then the lock is free, and is tried again.
            if let Some(pid) = lock_holder(&file).map_err(io)? {
                return Err(PidFileError::Held { path: path.to_owned(), pid });
            }
        }
        file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(io)?;
        Ok(PidFile { _file: file })
    }
}

/// Returns the process that has a lock on the file; none if no process has one.
fn lock_holder(file: &File) -> io::Result<Option<i32>> {
    let mut lock = WHOLE_FILE;
    fcntl(file, FcntlArg::F_GETLK(&mut lock))?;
    let is_held = libc::c_int::from(lock.l_type) != libc::F_UNLCK && lock.l_pid != 0;
    Ok(is_held.then_some(lock.l_pid))
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
    /// The error of the system.
    pub fn find(path: &Path) -> io::Result<Option<PidFileHolder>> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        loop {
            let Some(pid) = lock_holder(&file)? else { return Ok(None) };
            let Some(process) = ProcessFd::open(pid)? else { continue };
            // It held the lock before and after: the descriptor is of that very process.
            if lock_holder(&file)? == Some(pid) {
                return Ok(Some(PidFileHolder { pid, process }));
            }
        }
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
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    const HOLD: &str = "SHORTHORN_TEST_HOLD";

    /// Runs as the other process of the tests below, and is not a test of its own.
    #[test]
    fn helper_holds_until_its_input_ends() {
        let Some(path) = std::env::var_os(HOLD) else { return };
        let _held = PidFile::lock(Path::new(&path)).unwrap();
        println!("held");
        io::copy(&mut io::stdin(), &mut io::sink()).unwrap();
    }

    fn holder_process(path: &Path) -> std::process::Child {
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
    }
}
