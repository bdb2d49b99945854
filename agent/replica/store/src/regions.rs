//! The files in which a replica keeps sets of regions, beside the volume: `shorthorn.intent`,
//! `shorthorn.missed-<replica>` and `shorthorn.unsummed`. `shorthorn-regions` has their contents.
//!
//! A file has all its blocks from the start and keeps its length. So its pages can be written over when the
//! disk is full. It gets its name when it is whole and durable.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::FileExt;

use nix::fcntl::{FallocateFlags, OFlag, fallocate};
use shorthorn_chain::{OWN_PREFIX, temp_name};
use shorthorn_regions::{SetKey, WriteIntentLog};
use shorthorn_types::{RegionSet, Regions, ReplicaId};

use crate::buffer::AlignedBuffer;
use crate::directory::Directory;
use crate::error::StoreError;
use crate::former_writes::open_for_writes;
use crate::medium::Medium;

type Result<T> = std::result::Result<T, StoreError>;

const OUT_OF_SYNC_PREFIX: &str = "shorthorn.missed-";

/// An open file of a set of regions. Pages are written to it as to the head: with direct I/O if the store
/// has that.
#[derive(Debug)]
pub struct RegionFile {
    file: File,
    inode: u64,
}

impl RegionFile {
    /// Writes page number `page`, whose length is that of `bytes`, durably.
    ///
    /// # Errors
    /// The error of the system; the page may then be torn.
    pub fn write_page(&self, page: u32, bytes: &[u8]) -> std::io::Result<()> {
        let mut aligned = AlignedBuffer::new(bytes.len());
        aligned.as_mut_slice().copy_from_slice(bytes);
        self.file.write_all_at(aligned.as_slice(), u64::from(page) * bytes.len() as u64)?;
        self.file.sync_data()
    }

    /// Returns the descriptor of the file.
    #[must_use]
    pub fn raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Returns the inode number, which distinguishes the file from another one of the same name.
    #[must_use]
    pub fn inode(&self) -> u64 {
        self.inode
    }
}

/// The files of the sets of regions in the directory of a store.
#[derive(Clone, Copy, Debug)]
pub struct RegionFiles<'a> {
    medium: &'a Medium,
}

impl<'a> RegionFiles<'a> {
    pub(crate) fn new(medium: &'a Medium) -> RegionFiles<'a> {
        RegionFiles { medium }
    }

    /// Returns the replicas whose out-of-sync sets have a file.
    ///
    /// # Errors
    /// An I/O error.
    pub fn out_of_sync(&self) -> Result<Vec<ReplicaId>> {
        let names = self.medium.directory().list()?;
        Ok(names.iter().filter_map(|name| name.strip_prefix(OUT_OF_SYNC_PREFIX)?.parse().ok()).collect())
    }

    /// Reads the file of a set, if it exists.
    ///
    /// # Errors
    /// An I/O error.
    pub fn read(&self, key: SetKey) -> Result<Option<Vec<u8>>> {
        self.medium.directory().read(&name_of(key))
    }

    /// Opens the file of a set that was read.
    ///
    /// # Errors
    /// An I/O error.
    pub fn open(&self, key: SetKey) -> Result<RegionFile> {
        self.medium.check_writable()?;
        let name = name_of(key);
        let file = open_for_writes(self.medium.directory(), &name, self.medium.direct_flag())?;
        let inode = self.medium.directory().stat(&name)?.map_or(0, |stat| stat.inode);
        Ok(RegionFile { file, inode })
    }

    /// Creates or replaces the file of a set with these bytes. The file is complete and durable on return.
    /// After an error it is absent, or the former one.
    ///
    /// # Errors
    /// An I/O error. A little space is set aside, so that there is room for a few files on a full disk.
    pub fn make(&self, key: SetKey, bytes: &[u8]) -> Result<RegionFile> {
        self.stage(key, bytes)?;
        self.adopt(key)
    }

    /// Writes a new file of a set under another name, to replace the existing one. Durable on return; the
    /// next opening removes it.
    ///
    /// # Errors
    /// The errors of [`RegionFiles::make`]; the file does not exist then.
    pub fn stage(&self, key: SetKey, bytes: &[u8]) -> Result<()> {
        self.medium.check_writable()?;
        let temp = temp_name(&name_of(key));
        let written =
            self.medium.directory().with_reserve(|| write_allocated(self.medium.directory(), &temp, bytes));
        if written.is_err() {
            self.unstage(key);
        }
        written
    }

    /// Forgets a file that was staged.
    pub fn unstage(&self, key: SetKey) {
        // The partial file has no name that counts; the next opening removes it if this fails.
        let _ = self.medium.directory().unlink(&temp_name(&name_of(key)));
    }

    /// Replaces the file of a set by the staged one.
    ///
    /// # Errors
    /// An I/O error.
    pub fn adopt(&self, key: SetKey) -> Result<RegionFile> {
        self.medium.check_writable()?;
        let (name, temp) = (name_of(key), temp_name(&name_of(key)));
        let named =
            self.medium.directory().rename(&temp, &name).and_then(|()| self.medium.directory().sync());
        let made = named.and_then(|()| self.open(key));
        if made.is_err() {
            // An outdated file must not be found later. If even the removal fails, the error that led here
            // describes the disk.
            let _ = self.medium.directory().unlink(&name);
        }
        made
    }

    /// Removes the files of all sets. They are gone for good on return.
    ///
    /// # Errors
    /// An I/O error; some may be gone then.
    pub fn remove_all(&self) -> Result<()> {
        self.medium.check_writable()?;
        let out_of_sync = self.out_of_sync()?.into_iter().map(SetKey::OutOfSync);
        for key in out_of_sync.chain([SetKey::Intent, SetKey::Unsummed]) {
            self.medium.directory().unlink(&name_of(key))?;
        }
        self.medium.directory().sync()
    }

    /// Removes the file of a set. It is gone for good on return.
    ///
    /// # Errors
    /// An I/O error.
    pub fn remove(&self, key: SetKey) -> Result<()> {
        self.medium.check_writable()?;
        self.medium.directory().unlink(&name_of(key))?;
        self.medium.directory().sync()
    }
}

/// Returns the recently written regions, if they are recorded with the epoch `trusted`.
pub(crate) fn written_lately(
    directory: &Directory,
    regions: Regions,
    trusted: Option<u64>,
) -> Result<Option<RegionSet>> {
    let Some(epoch) = trusted else { return Ok(None) };
    let Some(bytes) = directory.read(&name_of(SetKey::Intent))? else { return Ok(None) };
    let (intent_log, _) = WriteIntentLog::load(regions, epoch, &bytes);
    Ok(intent_log.content(SetKey::Intent))
}

fn name_of(key: SetKey) -> String {
    format!("{OWN_PREFIX}{key}")
}

fn write_allocated(directory: &Directory, name: &str, bytes: &[u8]) -> Result<()> {
    let failed = |error: std::io::Error| StoreError::io("write", directory.path_of(name), error);
    let mut file = directory.open_file(name, OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_TRUNC)?;
    let length = i64::try_from(bytes.len()).unwrap_or(i64::MAX);
    // If the file system cannot allocate ahead, writing does.
    match fallocate(file.as_fd(), FallocateFlags::empty(), 0, length) {
        Ok(()) | Err(nix::errno::Errno::EOPNOTSUPP) => {}
        Err(errno) => return Err(failed(errno.into())),
    }
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_staged_file_counts_only_once_it_is_adopted() {
        let temp = tempfile::tempdir().unwrap();
        let medium = Medium::at(temp.path(), false);
        let files = RegionFiles::new(&medium);
        let former = files.make(SetKey::Intent, &[1; 4096]).unwrap();
        files.stage(SetKey::Intent, &[2; 8192]).unwrap();
        assert_eq!(files.read(SetKey::Intent).unwrap(), Some(vec![1; 4096]));
        let adopted = files.adopt(SetKey::Intent).unwrap();
        assert_ne!(adopted.inode(), former.inode());
        assert_eq!(files.read(SetKey::Intent).unwrap(), Some(vec![2; 8192]));
        files.stage(SetKey::Intent, &[3; 4096]).unwrap();
        files.unstage(SetKey::Intent);
        files.adopt(SetKey::Intent).unwrap_err();
        assert_eq!(files.read(SetKey::Intent).unwrap(), None, "the former file would be outdated");
    }

    #[test]
    fn the_sets_of_a_directory_for_reading_do_not_change() {
        let temp = tempfile::tempdir().unwrap();
        let out_of_sync = SetKey::OutOfSync(ReplicaId::from_random(5));
        RegionFiles::new(&Medium::at(temp.path(), false)).make(out_of_sync, &[1; 4096]).unwrap();
        let medium = Medium::at(temp.path(), true);
        let files = RegionFiles::new(&medium);
        assert_eq!(files.out_of_sync().unwrap(), [ReplicaId::from_random(5)]);
        assert!(matches!(files.make(out_of_sync, &[2; 4096]), Err(StoreError::ReadOnly(_))));
        assert!(matches!(files.remove(out_of_sync), Err(StoreError::ReadOnly(_))));
        assert!(matches!(files.remove_all(), Err(StoreError::ReadOnly(_))));
        assert_eq!(files.read(out_of_sync).unwrap(), Some(vec![1; 4096]));
    }
}
