//! Blocks of the head that are allocated and were never written.
//!
//! A direct write allocates its blocks first and marks them as written when the data is there. A loss of
//! power or a failed write in between leaves them allocated and not written. To Shorthorn such blocks are
//! holes (SEEK_DATA), which show the lower layers. To Longhorn they are zeroes (FIEMAP), which hide the lower
//! layers. So they are made holes before Longhorn can see them: before the directory counts as cleanly
//! closed, and before the head becomes a snapshot.

use std::fs::File;
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use shorthorn_types::ByteRange;

use crate::directory::is_full;
use crate::error::StoreError;
use crate::fiemap::ExtentPage;
use crate::files::signed;
use crate::store::Store;
use crate::unverified::UnverifiedRange;

type Result<T> = std::result::Result<T, StoreError>;

impl Store {
    /// Makes holes of the blocks of the head that are allocated and were never written, as far as writes may
    /// have left any. The directory was not closed cleanly: that may be so anywhere.
    ///
    /// A full disk has no room for the records of new holes. It must not keep the replica from opening: then
    /// the close tries again, and until it succeeds the directory stays dirty.
    pub(crate) fn mend_head(&mut self) -> Result<()> {
        self.unverified = UnverifiedRange::everywhere(self.size_bytes());
        match self.punch_unwritten() {
            Ok(0) => {}
            Ok(bytes) => {
                let head = self.image.head_name();
                self.opening.add_repair(format!(
                    "made holes of {bytes} bytes of {head} that were allocated and never written: Longhorn \
                     would take them for zeroes"
                ));
            }
            // A failed flush has lost data, for a lack of space too.
            Err(error @ StoreError::Io { .. }) if is_full(error.errno()) => {
                let head = self.image.head_name();
                self.opening.add_repair(format!(
                    "{head} may have allocated blocks that were never written, and the disk has no space to \
                     make holes of them: {error}. The directory stays dirty until then"
                ));
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Does the same after failed writes. No request may be in flight. How many bytes were such.
    pub(crate) fn punch_unwritten(&mut self) -> Result<u64> {
        let Some(range) = self.unverified.range() else { return Ok(0) };
        // File systems that have unwritten extents can also make holes.
        if !self.medium.can_punch() {
            self.unverified.clear();
            return Ok(0);
        }
        // Data in the page cache counts as written only once it is on the disk.
        self.flush()?;
        let head = self.head();
        let path = self.medium.directory().path_of(self.image.head_name().as_str());
        let punched = self.medium.directory().with_reserve(|| {
            punch(self.image.file(head), range)
                .map_err(|errno| StoreError::io("make holes of unwritten space in", &path, errno))
        })?;
        self.image.forget(range);
        self.unverified.clear();
        Ok(punched)
    }
}

/// Makes holes of the blocks of `range` that are allocated and were never written. Reads the extents page by
/// page.
fn punch(file: &File, range: ByteRange) -> nix::Result<u64> {
    let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let mut page = ExtentPage::new();
    let (mut at, mut punched_bytes) = (range.offset(), 0);
    while at < range.end() {
        let extents = match page.read(file, at, range.end()) {
            Ok(extents) => extents,
            // Longhorn cannot use a file system that has no answer.
            Err(Errno::EOPNOTSUPP | Errno::ENOTTY) => return Ok(0),
            Err(Errno::EINTR) => continue,
            Err(errno) => return Err(errno),
        };
        for extent in extents.iter().filter(|extent| extent.is_unwritten()) {
            let start = extent.offset().max(range.offset());
            let length = extent.end().min(range.end()).saturating_sub(start);
            let blocks = ByteRange::new(start, length).map_err(|_| Errno::EOVERFLOW)?.shrunk_to_blocks();
            if !blocks.is_empty() {
                fallocate(file.as_fd(), hole, signed(blocks.offset()), signed(blocks.length()))?;
                punched_bytes += blocks.length();
            }
        }
        match extents.last() {
            Some(last) if !last.is_last() && last.end() > at => at = last.end(),
            _ => break,
        }
    }
    Ok(punched_bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::{CreateOptions, OpenOptions};

    const SIZE: usize = 2 << 20;
    const SIZE_BYTES: u64 = 2 << 20;
    const TIME: &str = "2026-01-01T00:00:00Z";

    /// Returns a replica with a snapshot of nothing but sevens below its head. Opened.
    fn replica(path: &Path) -> Store {
        let options = CreateOptions { size_bytes: SIZE_BYTES, ..CreateOptions::default() };
        let mut store = Store::create(path, options).unwrap();
        store.write_at(&vec![7; SIZE], 0, false).unwrap();
        store.snapshot("below", true, BTreeMap::new(), TIME).unwrap();
        store
    }

    fn image(path: &Path, name: &str) -> File {
        File::options().read(true).write(true).open(path.join(name)).unwrap()
    }

    /// Makes the extents that an unfinished direct write leaves.
    fn allocate(file: &File, offset: u64, length: u64) {
        fallocate(file.as_fd(), FallocateFlags::empty(), signed(offset), signed(length)).unwrap();
        file.sync_all().unwrap();
    }

    /// Returns the bytes that are allocated and not written; none if the file system does not report them.
    fn unwritten_bytes(file: &File) -> Option<u64> {
        let (mut page, mut at, mut bytes) = (ExtentPage::new(), 0, 0);
        loop {
            let Ok(extents) = page.read(file, at, SIZE_BYTES) else {
                println!(
                    "skipped: the file system of the temporary directory does not tell the extents of files"
                );
                return None;
            };
            let unwritten = extents.iter().filter(|extent| extent.is_unwritten());
            bytes += unwritten.map(|extent| extent.end() - extent.offset().max(at)).sum::<u64>();
            match extents.last() {
                Some(last) if !last.is_last() => at = last.end(),
                _ => return Some(bytes),
            }
        }
    }

    fn content(store: &mut Store) -> Vec<u8> {
        let mut bytes = vec![0; SIZE];
        store.read_at(&mut bytes, 0).unwrap();
        bytes
    }

    #[test]
    fn a_dirty_open_punches_holes_into_unwritten_extents() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let mut store = replica(&path);
        store.write_at(&[1; 8192], 8192, true).unwrap();
        let mut expected = vec![7; SIZE];
        expected[8192..16384].fill(1);
        drop(store); // as if its process had been killed
        let head = image(&path, "volume-head-001.img");
        allocate(&head, 0, SIZE_BYTES / 2);
        let Some(before) = unwritten_bytes(&head) else { return };
        assert_eq!(before, SIZE_BYTES / 2 - 8192);
        let mut store = Store::open(&path, OpenOptions::default()).unwrap();
        assert_eq!(unwritten_bytes(&head), Some(0));
        assert!(content(&mut store) == expected);
        let repairs = store.info().repairs;
        assert!(repairs.iter().any(|repair| repair.contains("never written")), "{repairs:?}");
        store.close().unwrap();
        let store = Store::open(&path, OpenOptions::default()).unwrap();
        assert!(store.info().repairs.is_empty(), "once");
    }

    #[test]
    fn a_snapshot_and_a_close_punch_holes_into_ranges_of_failed_writes() {
        type End = fn(Store) -> Result<()>;
        let snapshot: End = |mut store| store.snapshot("above", true, BTreeMap::new(), TIME);
        let close: End = Store::close;
        for (end, name) in [(snapshot, "volume-snap-above.img"), (close, "volume-head-001.img")] {
            let temp = tempfile::tempdir().unwrap();
            let path = temp.path().join("replica");
            let mut store = replica(&path);
            let head = image(&path, "volume-head-001.img");
            allocate(&head, 4096, 16384);
            allocate(&head, 1 << 20, 4096);
            let Some(before) = unwritten_bytes(&head) else { return };
            assert_eq!(before, 20480);
            for (offset, length) in [(1 << 20, 4096), (4096, 8192)] {
                store.write_failed(ByteRange::new(offset, length).unwrap());
            }
            end(store).unwrap();
            assert_eq!(unwritten_bytes(&image(&path, name)), Some(0), "{name}");
        }
    }

    #[test]
    fn only_ranges_of_failed_writes_are_punched() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let mut store = replica(&path);
        let head = image(&path, "volume-head-001.img");
        allocate(&head, 0, 1 << 20);
        if unwritten_bytes(&head).is_none() {
            return;
        }
        store.write_failed(ByteRange::new(8192, 4096).unwrap());
        assert_eq!(store.punch_unwritten().unwrap(), 4096);
        assert_eq!(unwritten_bytes(&head), Some((1 << 20) - 4096));
        assert_eq!(store.punch_unwritten().unwrap(), 0, "once");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn no_byte_changes_and_nothing_is_left(
            pieces in prop::collection::vec((any::<bool>(), 0..512usize, 1..40usize), 1..40),
        ) {
            let temp = tempfile::tempdir().unwrap();
            let path = temp.path().join("replica");
            drop(replica(&path));
            let head = image(&path, "volume-head-001.img");
            let mut expected = vec![7; SIZE];
            for (is_written, block, blocks) in pieces {
                let blocks = blocks.min(512 - block);
                let (start, length) = (block * 4096, blocks * 4096);
                if is_written {
                    head.write_all_at(&vec![1; length], start as u64).unwrap();
                    expected[start..][..length].fill(1);
                } else {
                    allocate(&head, start as u64, length as u64);
                }
            }
            head.sync_all().unwrap();
            let mut store = Store::open(&path, OpenOptions::default()).unwrap();
            prop_assert!(content(&mut store) == expected);
            prop_assert!(matches!(unwritten_bytes(&head), None | Some(0)));
        }
    }
}
