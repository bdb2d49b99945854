use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::small_disk::run;

nix::ioctl_read!(
    /// FS_IOC_SHUTDOWN of ext4 and XFS.
    shut_down_file_system,
    b'X',
    125,
    u32
);

/// A file that lies on a file system of its own, which can break down and be repaired. Unmounted when
/// dropped.
#[derive(Debug)]
pub struct BadDisk {
    image: PathBuf,
    file: PathBuf,
    /// The mount points of the file system, before and after its repair.
    mounts: [PathBuf; 2],
}

impl BadDisk {
    /// Makes an ext4 in `folder`, and moves `file`, which must not be open, onto it.
    ///
    /// # Errors
    /// This is not root, or the host has no loop devices.
    pub fn under(file: &Path, folder: &Path) -> Result<BadDisk> {
        let (image, mounts) = (folder.join("bad-disk"), ["bad-1", "bad-2"].map(|name| folder.join(name)));
        File::create(&image)?.set_len(256 << 20)?;
        run(Command::new("mkfs.ext4").args(["-q", "-m", "0", "-b", "4096"]).arg(&image))?;
        let disk = BadDisk { image, file: file.to_owned(), mounts };
        BadDisk::mount_at(&disk.image, &disk.mounts[0])?;
        run(Command::new("cp").arg("--sparse=always").args([file, &disk.mounts[0].join("file")]))?;
        disk.put_in_place(&disk.mounts[0])?;
        Ok(disk)
    }

    fn mount_at(image: &Path, point: &Path) -> Result<()> {
        fs::create_dir(point)?;
        run(Command::new("mount").args(["-o", "loop"]).args([image, point]))
    }

    fn put_in_place(&self, point: &Path) -> Result<()> {
        run(Command::new("mount").arg("--bind").args([&point.join("file"), &self.file]))
    }

    /// Makes every access to the file system an I/O error. Changes that its journal does not have yet are
    /// lost.
    ///
    /// # Errors
    /// The kernel cannot do that.
    pub fn break_down(&self) -> Result<()> {
        let root = File::open(&self.mounts[0])?;
        let mut without_flushing = 2;
        // SAFETY: the call reads the number that it is given and writes nothing else.
        unsafe { shut_down_file_system(root.as_raw_fd(), &mut without_flushing) }
            .context("shutting down a file system")?;
        Ok(())
    }

    /// Makes the file usable again, with the data that the disk has kept. Open descriptors still return
    /// errors.
    ///
    /// # Errors
    /// The file system cannot be mounted again.
    pub fn repair(&self) -> Result<()> {
        // The new mount covers the former one, which writes nothing any more: so the file below is never
        // found. The kernel would have one file system for two mounts of an image: the broken one.
        let kept = self.image.with_extension("kept");
        run(Command::new("cp").arg("--sparse=always").args([&self.image, &kept]))?;
        BadDisk::mount_at(&kept, &self.mounts[1])?;
        self.put_in_place(&self.mounts[1])
    }
}

impl Drop for BadDisk {
    fn drop(&mut self) {
        // A test that failed may have left processes on it, and not all may be mounted.
        for point in [&self.file, &self.file, &self.mounts[1], &self.mounts[0]] {
            let _ = run(Command::new("umount").arg("--lazy").arg(point));
        }
    }
}
