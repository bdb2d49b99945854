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
use shorthorn_chain::ImageName;
use shorthorn_types::ByteRange;

use crate::directory::is_full;
use crate::error::StoreError;
use crate::fiemap::ExtentPage;
use crate::files::signed;
use crate::image::Image;
use crate::medium::Medium;

type Result<T> = std::result::Result<T, StoreError>;

/// The range of the head in which blocks may be allocated but not written.
///
/// Covers all places with one range: that needs no memory, and failures are rare.
#[derive(Debug, Default)]
pub(crate) struct UnverifiedRange {
    range: Option<ByteRange>,
}

impl UnverifiedRange {
    /// Suspects the whole head of a volume.
    pub fn everywhere(size_bytes: u64) -> UnverifiedRange {
        UnverifiedRange { range: ByteRange::new(0, size_bytes).ok() }
    }

    /// Returns true if blocks may have to become holes. On a file system without holes, no block does: file
    /// systems that have unwritten extents can also make holes.
    pub fn needs_holes(&mut self, medium: &Medium) -> bool {
        if !medium.can_punch() {
            self.clear();
        }
        self.range.is_some()
    }

    /// Makes holes of the blocks of the range that are allocated and were never written, and returns their
    /// bytes. All other data of the head is on the disk: in the page cache it does not count as written.
    pub fn make_holes(&mut self, medium: &Medium, image: &mut Image) -> Result<u64> {
        let Some(range) = self.range else { return Ok(0) };
        let path = medium.directory().path_of(image.head_name().as_str());
        let punched_bytes = medium.directory().with_reserve(|| {
            punch(image.file(image.head()), range)
                .map_err(|errno| StoreError::io("make holes of unwritten space in", &path, errno))
        })?;
        image.forget(range);
        self.clear();
        Ok(punched_bytes)
    }

    /// Grows the range to include another one.
    pub fn add(&mut self, range: ByteRange) {
        let hull = self.range.map_or(Ok(range), |before| {
            let start = before.offset().min(range.offset());
            ByteRange::new(start, before.end().max(range.end()) - start)
        });
        self.range = hull.ok().filter(|range| !range.is_empty()).or(self.range);
    }

    /// Trusts all of the head: its unwritten blocks are holes now.
    fn clear(&mut self) {
        self.range = None;
    }
}

/// Returns the line about the repair of a directory that was not closed cleanly, if it needed one.
///
/// A full disk has no room for the records of new holes. It must not keep the replica from opening: then the
/// close tries again, and until it succeeds the directory stays dirty.
pub(crate) fn repair_line(punched_bytes: Result<u64>, head: &ImageName) -> Result<Option<String>> {
    match punched_bytes {
        Ok(0) => Ok(None),
        Ok(bytes) => Ok(Some(format!(
            "made holes of {bytes} bytes of {head} that were allocated and never written: Longhorn would \
             take them for zeroes"
        ))),
        // A failed flush has lost data, for a lack of space too.
        Err(error @ StoreError::Io { .. }) if is_full(error.errno()) => Ok(Some(format!(
            "{head} may have allocated blocks that were never written, and the disk has no space to make \
             holes of them: {error}. The directory stays dirty until then"
        ))),
        Err(error) => Err(error),
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
    use crate::{CreateOptions, OpenOptions, Store};

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

    #[test]
    fn the_range_covers_all_that_was_added_until_it_is_cleared() {
        let range = |start: u64, end: u64| ByteRange::new(start, end - start).unwrap();
        let mut unverified = UnverifiedRange::default();
        unverified.add(range(8192, 8192));
        assert_eq!(unverified.range, None, "nothing was written");
        unverified.add(range(8192, 12288));
        assert_eq!(unverified.range, Some(range(8192, 12288)));
        unverified.add(range(0, 4096));
        unverified.add(range(4096, 16384));
        unverified.add(range(8192, 12288));
        assert_eq!(unverified.range, Some(range(0, 16384)));
        unverified.clear();
        assert_eq!(unverified.range, None);
        assert_eq!(UnverifiedRange::everywhere(1 << 20).range, Some(range(0, 1 << 20)));
    }

    #[test]
    fn only_a_full_disk_leaves_unwritten_blocks_to_the_close() {
        let head = ImageName::head(1);
        let failed = |errno: i32| StoreError::io("make holes of", "head", Errno::from_raw(errno));
        assert_eq!(repair_line(Ok(0), &head).unwrap(), None);
        assert!(repair_line(Ok(4096), &head).unwrap().unwrap().contains("4096 bytes of volume-head-001.img"));
        let full = repair_line(Err(failed(nix::libc::ENOSPC)), &head).unwrap().unwrap();
        assert!(full.contains("stays dirty"), "{full}");
        repair_line(Err(failed(nix::libc::EIO)), &head).unwrap_err();
        repair_line(Err(failed(nix::libc::ENOSPC).not_durable()), &head).unwrap_err();
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
