use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// A file system with little room, in a file; unmounted when dropped.
#[derive(Debug)]
pub struct SmallDisk {
    /// The directory at which it is mounted.
    pub mount_point: PathBuf,
}

impl SmallDisk {
    /// Makes an ext4 of that size in `folder` and mounts it there.
    ///
    /// # Errors
    /// This is not root, or the host has no loop devices.
    pub fn mount(folder: &Path, mib: u64) -> Result<SmallDisk> {
        let (image, mount_point) = (folder.join("disk"), folder.join("mnt"));
        File::create(&image)?.set_len(mib << 20)?;
        fs::create_dir(&mount_point)?;
        // A small ext4 has blocks of 1024 bytes by default, and replicas are refused there.
        run(Command::new("mkfs.ext4").args(["-q", "-m", "0", "-b", "4096"]).arg(&image))?;
        run(Command::new("mount").args(["-o", "loop"]).args([&image, &mount_point]))?;
        Ok(SmallDisk { mount_point })
    }

    /// Takes all the room that is left.
    ///
    /// # Errors
    /// The disk has another problem than being full.
    pub fn fill(&self) -> Result<()> {
        let mut filler = OpenOptions::new().create(true).append(true).open(self.filler())?;
        for chunk_bytes in [1 << 20, 4096] {
            let chunk = vec![0x55; chunk_bytes];
            loop {
                match filler.write_all(&chunk).and_then(|()| filler.sync_data()) {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::StorageFull => break,
                    Err(error) => return Err(error).context("filling a disk"),
                }
            }
        }
        Ok(())
    }

    /// Frees the space that [`SmallDisk::fill`] took.
    ///
    /// # Errors
    /// It was not filled.
    pub fn empty(&self) -> Result<()> {
        Ok(fs::remove_file(self.filler())?)
    }

    fn filler(&self) -> PathBuf {
        self.mount_point.join("filler")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A test that failed may have left processes on it.
        let _ = run(Command::new("umount").arg("--lazy").arg(&self.mount_point));
    }
}

pub(crate) fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("starting {command:?}"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}", stderr.trim());
    Ok(())
}
