//! The first read of a new device that this process serves. It shows that the device answers requests.
//!
//! **A child process reads.** A reader of a block device waits until the request is answered, and cannot be
//! killed meanwhile. A thread that waits keeps all files of its process open, also after the end of the
//! other threads. If this process ended during the read, it would keep the sockets of the device and the lock
//! of its state file. The next process could then neither start nor answer the request.

use std::ffi::OsString;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use shorthorn_types::limits::SECTOR_BYTES;

use crate::wait;

/// The program that reads. Only options that each implementation has are used: dd of uutils 0.8 cannot read
/// some devices past the page cache (uutils/coreutils #12085). The page cache of a new device has only
/// answers of this device.
pub(crate) const PROGRAM: &str = "dd";

/// Reads the first sector through the block device `path` within `limit`. `reader` starts [`PROGRAM`]. If no
/// child process can be started, the log has that, and the device counts as one that answers.
///
/// # Errors
/// The error of the device; [`io::ErrorKind::TimedOut`] if it does not answer.
pub(crate) fn first_read(mut reader: Command, path: &Path, limit: Duration) -> io::Result<()> {
    let mut input = OsString::from("if=");
    input.push(path);
    reader.arg(input).arg(format!("bs={SECTOR_BYTES}")).arg("count=1");
    reader.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match reader.spawn() {
        Ok(child) => child,
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "cannot start dd: the new device is not read");
            return Ok(());
        }
    };
    let Some(status) = wait::until(limit, || child.try_wait())? else {
        // It ends when its request does. The end of this process has it reaped.
        let _ = child.kill();
        return Err(wait::timed_out(limit));
    };
    let (data, message) = output(&mut child)?;
    match status.success() {
        true if data.len() as u64 == SECTOR_BYTES => Ok(()),
        true => Err(io::ErrorKind::UnexpectedEof.into()),
        false => Err(io::Error::other(format!("{status}: {}", String::from_utf8_lossy(&message).trim_end()))),
    }
}

/// Returns the data and the messages of a child that has ended. Both fit into pipes.
fn output(child: &mut Child) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let (mut data, mut message) = (Vec::new(), Vec::new());
    if let Some(mut pipe) = child.stdout.take() {
        pipe.read_to_end(&mut data)?;
    }
    if let Some(mut pipe) = child.stderr.take() {
        pipe.read_to_end(&mut message)?;
    }
    Ok((data, message))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nix::sys::stat::{Mode, SFlag, mknod};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn dd() -> Command {
        Command::new(PROGRAM)
    }

    #[test]
    fn a_file_reads_like_a_device() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a device");
        fs::write(&path, [1; 4096]).unwrap();
        first_read(dd(), &path, LIMIT).unwrap();
        fs::write(&path, [1; 100]).unwrap();
        assert_eq!(first_read(dd(), &path, LIMIT).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        let error = first_read(dd(), &dir.path().join("missing"), LIMIT).unwrap_err().to_string();
        assert!(error.contains("missing"), "{error}");
    }

    #[test]
    fn no_thread_of_this_process_waits_for_a_device_that_does_not_answer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        mknod(&path, SFlag::S_IFIFO, Mode::S_IRWXU, 0).unwrap();
        let error = first_read(dd(), &path, Duration::from_millis(300)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        // Those of other tests end with their tests.
        let ended =
            wait::until(LIMIT, || Ok::<_, io::Error>((!has_bounded_thread()?).then_some(()))).unwrap();
        assert!(ended.is_some(), "a thread still waits");
    }

    /// Returns true if this process has a thread of `wait::within`.
    fn has_bounded_thread() -> io::Result<bool> {
        for thread in fs::read_dir("/proc/self/task")? {
            // A thread may have ended since.
            let name = fs::read_to_string(thread?.path().join("comm")).unwrap_or_default();
            if name.trim_end() == "bounded" {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
