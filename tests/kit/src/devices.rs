//! Loop devices and bind mounts, which need root.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs a program of the host, and returns its output without the last line end.
///
/// # Panics
/// The program cannot be run, or fails; the message has its errors.
#[track_caller]
pub fn run<A: AsRef<OsStr> + std::fmt::Debug>(program: &str, arguments: &[A]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program} cannot be run: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
}

/// A loop device that is detached when this is dropped.
#[derive(Debug)]
pub struct LoopDevice(PathBuf);

impl LoopDevice {
    /// Attaches a loop device to a file or a device.
    ///
    /// # Panics
    /// This is not root, or the host has no loop devices.
    #[track_caller]
    #[must_use]
    pub fn of(file: &Path) -> LoopDevice {
        LoopDevice(run("losetup", &[Path::new("--find"), Path::new("--show"), file]).into())
    }

    /// Returns `/dev/loopN`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the name of the device in `/sys/block`.
    #[must_use]
    pub fn name(&self) -> String {
        self.0.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

/// A bind mount that is removed when this is dropped.
#[derive(Debug)]
pub struct BindMount(PathBuf);

impl BindMount {
    /// Mounts `source` on the file or directory `target`, which exists.
    ///
    /// # Panics
    /// This is not root, or one of the paths does not exist.
    #[track_caller]
    #[must_use]
    pub fn new(source: &Path, target: &Path) -> BindMount {
        run("mount", &[Path::new("--bind"), source, target]);
        BindMount(target.to_owned())
    }

    /// Returns the mount point.
    #[must_use]
    pub fn target(&self) -> &Path {
        &self.0
    }
}

impl Drop for BindMount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_has_no_last_line_end() {
        assert_eq!(run("echo", &["a", "b"]), "a b");
    }

    #[test]
    #[should_panic(expected = "cat [\"/nonexistent/file\"]: ")]
    fn a_program_that_fails_is_named_with_its_arguments() {
        run("cat", &["/nonexistent/file"]);
    }
}
