//! Lock of a directory: one process at a time.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};

use crate::directory::Directory;
use crate::error::StoreError;

/// The file that is locked; it holds the number of the process that holds the lock.
pub(crate) const LOCK_FILE: &str = "shorthorn.lock";

/// The lock on a directory; given back when dropped or when the process ends.
#[derive(Debug)]
pub(crate) struct Lock {
    file: Option<Flock<File>>,
}

impl Lock {
    /// Takes the directory for this process alone.
    pub fn exclusive(directory: &Directory) -> Result<Lock, StoreError> {
        let file = directory.open_file(LOCK_FILE, OFlag::O_RDWR | OFlag::O_CREAT)?;
        let file = lock(directory, file, FlockArg::LockExclusiveNonblock)?;
        let pid = format!("{}\n", std::process::id());
        // The file keeps its block: on a full disk, another program could take a block that is freed.
        let write = || file.write_all_at(pid.as_bytes(), 0).and_then(|()| file.set_len(pid.len() as u64));
        directory.with_reserve(|| {
            write().map_err(|error| StoreError::io("write", directory.path_of(LOCK_FILE), error))
        })?;
        Ok(Lock { file: Some(file) })
    }

    /// Takes the directory for this process alone and changes nothing, so that it needs no space. Without a
    /// lock file, no store has ever had the directory open, and the call has nothing to hold on to.
    pub fn unchanged(directory: &Directory) -> Result<Lock, StoreError> {
        if directory.stat(LOCK_FILE)?.is_none() {
            return Ok(Lock { file: None });
        }
        let file = directory.open_file(LOCK_FILE, OFlag::O_RDONLY)?;
        Ok(Lock { file: Some(lock(directory, file, FlockArg::LockExclusiveNonblock)?) })
    }

    /// Keeps writers out without changing anything. Without a lock file, no store has ever had the directory
    /// open, and the call has nothing to hold on to.
    pub fn shared(directory: &Directory) -> Result<Lock, StoreError> {
        if directory.stat(LOCK_FILE)?.is_none() {
            return Ok(Lock { file: None });
        }
        let file = directory.open_file(LOCK_FILE, OFlag::O_RDONLY)?;
        Ok(Lock { file: Some(lock(directory, file, FlockArg::LockSharedNonblock)?) })
    }

    /// Checks, at the end of reading, that no other program has opened the directory meanwhile. A directory
    /// that had no lock file must still have none.
    pub fn still_alone(&self, directory: &Directory) -> Result<(), StoreError> {
        if self.file.is_none() && directory.stat(LOCK_FILE)?.is_some() {
            return Err(StoreError::Locked { directory: directory.path().to_owned(), holder: None });
        }
        Ok(())
    }
}

fn lock(directory: &Directory, file: File, how: FlockArg) -> Result<Flock<File>, StoreError> {
    Flock::lock(file, how).map_err(|(mut file, errno)| {
        if errno != Errno::EWOULDBLOCK {
            return StoreError::io("lock", directory.path_of(LOCK_FILE), errno);
        }
        let mut text = String::new();
        let holder = file.read_to_string(&mut text).ok().and_then(|_| text.trim().parse().ok());
        StoreError::Locked { directory: directory.path().to_owned(), holder }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::RESERVE_FILE;
    use crate::directory::tests::SmallDisk;

    /// Returns the lock file while the directory is locked.
    fn locked(directory: &Directory) -> String {
        let _lock = Lock::exclusive(directory).unwrap();
        std::fs::read_to_string(directory.path_of(LOCK_FILE)).unwrap()
    }

    #[test]
    fn a_full_disk_can_be_locked() {
        let Some(disk) = SmallDisk::mount() else { return };
        let directory = disk.directory();
        let (pid, longer) = (format!("{}\n", std::process::id()), format!("{}0\n", u32::MAX));
        std::fs::write(directory.path_of(LOCK_FILE), longer).unwrap();
        directory.sync_file(LOCK_FILE).unwrap();
        disk.fill(&directory, 0);
        // The file has a block already, and the reserve stays.
        let reserve = directory.stat(RESERVE_FILE).unwrap().unwrap();
        assert_eq!(locked(&directory), pid);
        assert_eq!(directory.stat(RESERVE_FILE).unwrap().unwrap().inode, reserve.inode);
        // The file is empty, as releases left it that truncated it first.
        std::fs::write(directory.path_of(LOCK_FILE), "").unwrap();
        directory.sync_file(LOCK_FILE).unwrap();
        disk.fill(&directory, 1);
        assert_eq!(locked(&directory), pid);
    }
}
