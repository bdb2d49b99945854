//! Waits for the writes of a process that was killed.
//!
//! A write that the kernel executes for an io_uring does not end with the process. The lock of the directory
//! is free then, and such a write may reach the disk seconds later. It could replace newer data.
//!
//! A write holds its open file until it ends. Every file that is written in this way has a shared lock
//! (flock), which ends with the last such write. An opening takes each of these locks once before it reads
//! anything.

use std::fs::{File, TryLockError};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;

use crate::directory::Directory;
use crate::error::StoreError;
use crate::lock::LOCK_FILE;

/// The time that an opening waits. After that it fails, and the supervisor tries again later.
const LIMIT: Duration = Duration::from_secs(10);
/// The interval between two looks at a lock.
const POLL: Duration = Duration::from_millis(10);

/// Opens a file for writes that may outlive the process.
pub(crate) fn open_for_writes(directory: &Directory, name: &str, flags: OFlag) -> Result<File, StoreError> {
    let file = directory.open_file(name, flags | OFlag::O_RDWR)?;
    // Every other holder of the lock shares it, because the directory is locked for this process.
    file.try_lock_shared()
        .map_err(|error| StoreError::io("lock", directory.path_of(name), io_error(error)))?;
    Ok(file)
}

/// Waits until no write of a former process to the directory, which is locked, is in flight.
///
/// # Errors
/// [`StoreError::FormerWrites`] after the limit, or an I/O error.
pub(crate) fn wait_for_former_writes(directory: &Directory, is_read_only: bool) -> Result<(), StoreError> {
    wait(directory, is_read_only, LIMIT)
}

fn wait(directory: &Directory, is_read_only: bool, limit: Duration) -> Result<(), StoreError> {
    let begun = Instant::now();
    let access = if is_read_only { OFlag::O_RDONLY } else { OFlag::O_RDWR };
    for name in directory.list()?.into_iter().filter(|name| name != LOCK_FILE) {
        // A snapshot may be protected from writes.
        let file =
            directory.open_file(&name, access).or_else(|_| directory.open_file(&name, OFlag::O_RDONLY))?;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if begun.elapsed() < limit => std::thread::sleep(POLL),
                Err(TryLockError::WouldBlock) => {
                    return Err(StoreError::FormerWrites(directory.path_of(&name)));
                }
                Err(TryLockError::Error(error)) => {
                    return Err(StoreError::io("lock", directory.path_of(&name), error));
                }
            }
        }
        // Not left to the end of the file: a child process has it too until it executes its program.
        file.unlock().map_err(|error| StoreError::io("unlock", directory.path_of(&name), error))?;
    }
    Ok(())
}

fn io_error(error: TryLockError) -> std::io::Error {
    match error {
        TryLockError::Error(error) => error,
        TryLockError::WouldBlock => nix::errno::Errno::EWOULDBLOCK.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;
    use std::sync::atomic::{AtomicBool, Ordering};

    use shorthorn_regions::SetKey;

    use super::*;
    use crate::{CreateOptions, OpenOptions, Store};

    /// Returns true if something may still write to the file.
    fn is_written(path: &Path) -> bool {
        let file = File::options().read(true).open(path).unwrap();
        matches!(file.try_lock(), Err(TryLockError::WouldBlock))
    }

    fn names_written(path: &Path) -> Vec<String> {
        let directory = Directory::open(path).unwrap();
        let names = directory.list().unwrap().into_iter();
        names.filter(|name| name != LOCK_FILE && is_written(&path.join(name))).collect()
    }

    #[test]
    fn all_files_that_a_ring_writes_to_show_that() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let options = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        let mut store = Store::create(&path, options).unwrap();
        let head = "volume-head-000.img";
        assert_eq!(names_written(&path), [head]);
        let intent = store.region_files().make(SetKey::Intent, &[0; 4096]).unwrap();
        let sums = store.open_block_sums().unwrap();
        assert_eq!(names_written(&path), ["shorthorn.block-sums", "shorthorn.intent", head]);
        drop((intent, sums));
        assert_eq!(names_written(&path), [head]);
        store.close().unwrap();
        assert!(names_written(&path).is_empty());
    }

    #[test]
    fn an_opening_waits_until_the_last_former_write_has_ended() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let options = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        Store::create(&path, options).unwrap().close().unwrap();
        let directory = Directory::open(&path).unwrap();
        // As a write in flight does.
        let written = open_for_writes(&directory, "volume-head-000.img", OFlag::empty()).unwrap();
        for is_read_only in [false, true] {
            let failed = wait(&directory, is_read_only, Duration::from_millis(30)).unwrap_err();
            assert!(failed.to_string().contains("volume-head-000.img"), "{failed}");
            assert_eq!(failed.errno().raw(), nix::libc::EBUSY);
        }
        let opened = std::thread::scope(|scope| {
            let opening = scope.spawn(|| Store::open(&path, OpenOptions::default()));
            drop(written);
            opening.join().unwrap()
        });
        opened.unwrap().close().unwrap();
    }

    /// A child process has the files of its parent until it executes its program.
    #[test]
    fn no_lock_of_the_wait_is_left_to_a_child_process() {
        let temp = tempfile::tempdir().unwrap();
        let directory = Directory::open(temp.path()).unwrap();
        directory.write("head", b"data").unwrap();
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    Command::new("true").status().unwrap();
                }
            });
            let locked = (0..2_000).try_for_each(|_| {
                wait_for_former_writes(&directory, false)?;
                open_for_writes(&directory, "head", OFlag::empty()).map(drop)
            });
            is_done.store(true, Ordering::Relaxed);
            locked.unwrap();
        });
    }
}
