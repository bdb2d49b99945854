//! Disks that are made for a test, and break down in it. Needs root, for mounts.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system that is mounted under a directory until this is dropped.
pub struct Mounted(pub PathBuf);

impl Mounted {
    pub fn tmpfs(at: &Path, size_bytes: u64) -> Mounted {
        std::fs::create_dir_all(at).unwrap();
        run("mount", &["-t", "tmpfs", "-o", &format!("size={size_bytes}"), "tmpfs", at.to_str().unwrap()]);
        Mounted(at.to_owned())
    }

    /// Returns an ext4 of `size_bytes` in a sparse file.
    pub fn ext4(image: &Path, at: &Path, size_bytes: u64) -> Mounted {
        std::fs::create_dir_all(at).unwrap();
        std::fs::File::create(image).unwrap().set_len(size_bytes).unwrap();
        run("mkfs.ext4", &["-q", "-b", "4096", "-O", "^has_journal", image.to_str().unwrap()]);
        run("mount", &["-o", "loop", image.to_str().unwrap(), at.to_str().unwrap()]);
        Mounted(at.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Runs a program that must succeed, and returns its output.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

pub fn may_mount() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("skipped: mounting needs root");
    }
    root
}

nix::ioctl_read!(
    /// FS_IOC_SHUTDOWN of ext4 and XFS.
    shut_down_file_system,
    b'X',
    125,
    u32
);

/// Makes every access to the file system of `directory` an I/O error.
pub fn break_down(directory: &Path) {
    let file = std::fs::File::open(directory).unwrap();
    let mut without_flushing = 2;
    // SAFETY: the call reads the number that it is given and writes nothing else.
    unsafe { shut_down_file_system(file.as_raw_fd(), &mut without_flushing) }.unwrap();
}

/// Moves the head of the replica in `directory` to another file system, which can be frozen without the rest
/// of the directory.
pub fn move_head(directory: &Path, to: &Mounted) -> Mounted {
    let head = directory.join("volume-head-000.img");
    let moved = to.0.join("head");
    run("cp", &["--sparse=always", head.to_str().unwrap(), moved.to_str().unwrap()]);
    run("mount", &["--bind", moved.to_str().unwrap(), head.to_str().unwrap()]);
    Mounted(head)
}
