//! Tests file systems that can hold replicas, and file systems that cannot. Made in files and mounted, which
//! takes root and the tools; without them these tests pass without a check, and say so.
#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

mod common;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{pattern, read_all};
use nix::fcntl::{FallocateFlags, fallocate};
use shorthorn_store::{CreateOptions, OpenOptions, Store, StoreError};

const TIME: &str = "2026-01-01T00:00:00Z";

/// A file system in a file, unmounted when dropped.
struct Mounted {
    _directory: tempfile::TempDir,
    point: PathBuf,
}

impl Mounted {
    fn new(size_bytes: u64, mkfs: &str, options: &[&str]) -> Option<Mounted> {
        let directory = tempfile::tempdir().unwrap();
        let (image, point) = (directory.path().join("image"), directory.path().join("mount"));
        File::create(&image).unwrap().set_len(size_bytes).unwrap();
        std::fs::create_dir(&point).unwrap();
        let succeeds = |command: &mut Command| {
            command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
        };
        let made = succeeds(Command::new(mkfs).args(options).arg(&image))
            && succeeds(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&point));
        if !made {
            println!("skipped: {mkfs} {options:?} cannot be made or mounted here");
            return None;
        }
        Some(Mounted { _directory: directory, point })
    }

    fn path(&self) -> &Path {
        &self.point
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.point).status();
    }
}

fn create(path: &Path, size_bytes: u64) -> Result<Store, StoreError> {
    Store::create(path, CreateOptions { size_bytes, ..CreateOptions::default() })
}

/// Writes single blocks over a snapshot, holes and zeroes, and reads them back before and after opening
/// again.
fn exercise(path: &Path) {
    let mut store = create(path, 8 << 20).unwrap();
    let mut model = vec![0; 8 << 20];
    let write = |store: &mut Store, seed: u64, offset: usize, length: usize, model: &mut Vec<u8>| {
        let data = pattern(seed, length);
        store.write_at(&data, offset as u64, false).unwrap();
        model[offset..offset + length].copy_from_slice(&data);
    };
    write(&mut store, 1, 0, 4 << 20, &mut model);
    store.snapshot("s", true, BTreeMap::new(), TIME).unwrap();
    for block in 0..60 {
        write(&mut store, block as u64, block * 17 * 4096, 4096, &mut model);
        write(&mut store, block as u64, block * 23 * 4096 + 512, 1024, &mut model);
    }
    store.write_zeroes(100 << 12, 40 << 12, false).unwrap();
    model[100 << 12..140 << 12].fill(0);
    store.write_zeroes(1100 << 12, 40 << 12, false).unwrap();
    model[1100 << 12..1140 << 12].fill(0);
    assert!(read_all(&mut store) == model);
    store.close().unwrap();
    let mut store = Store::open(path, OpenOptions::default()).unwrap();
    assert!(read_all(&mut store) == model, "after opening again");
}

#[test]
fn common_file_systems_will_do() {
    let kinds: [(&str, &[&str]); 4] = [
        ("mkfs.ext4", &["-q", "-F"]),
        ("mkfs.ext4", &["-q", "-F", "-O", "bigalloc", "-C", "65536"]),
        ("mkfs.xfs", &["-q", "-f"]),
        ("mkfs.btrfs", &["-q", "-f"]),
    ];
    for (mkfs, options) in kinds {
        let Some(mounted) = Mounted::new(512 << 20, mkfs, options) else { continue };
        exercise(&mounted.path().join("replica"));
    }
    exercise(&common::scratch().path().join("replica"));
    exercise(&tempfile::tempdir().unwrap().path().join("replica"));
}

#[test]
fn large_blocks_are_refused() {
    let Some(mounted) = Mounted::new(512 << 20, "mkfs.xfs", &["-q", "-f", "-b", "size=16384"]) else {
        return;
    };
    let error = create(&mounted.path().join("replica"), 1 << 20).unwrap_err();
    assert!(matches!(error, StoreError::AllocationUnit { unit_bytes: 16384, .. }), "{error}");
    assert!(error.to_string().contains("allocates 16384 bytes for a write of 4096"), "{error}");
    // A replica that was copied there is refused too, by every caller.
    let elsewhere = tempfile::tempdir().unwrap();
    let path = elsewhere.path().join("replica");
    create(&path, 1 << 20).unwrap().close().unwrap();
    let copied = Command::new("cp").args(["-r", "--sparse=always"]).arg(&path).arg(mounted.path()).status();
    assert!(copied.unwrap().success());
    for read_only in [true, false] {
        let options = OpenOptions { read_only, ..OpenOptions::default() };
        let error = Store::open(mounted.path().join("replica"), options).unwrap_err();
        assert!(matches!(error, StoreError::AllocationUnit { .. }), "{error}");
    }
}

#[test]
fn a_full_disk_is_an_error_and_nothing_else() {
    let Some(mounted) = Mounted::new(24 << 20, "mkfs.ext4", &["-q", "-F", "-m", "0", "-b", "4096"]) else {
        return;
    };
    let path = mounted.path().join("replica");
    let mut store = create(&path, 64 << 20).unwrap();
    let old = pattern(1, 1 << 20);
    let mut written = 0;
    // A part below a snapshot, the rest above it.
    let error = loop {
        if written == 4 {
            store.snapshot("below", true, BTreeMap::new(), TIME).unwrap();
        }
        match store.write_at(&old, written << 20, false) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.errno().raw(), 28, "{error}");
    assert!(written > 4 && written < 24, "{written}");
    // Over the lower layers no space is left either; each sector is then the old or the new one.
    let new = pattern(2, 1 << 20);
    let mut read = vec![0; 1 << 20];
    store.read_at(&mut read, 0).unwrap();
    assert_eq!(store.write_at(&new, 0, false).unwrap_err().errno().raw(), 28);
    store.read_at(&mut read, 0).unwrap();
    for (number, sector) in read.chunks(512).enumerate() {
        let at = number * 512..number * 512 + 512;
        assert!(*sector == old[at.clone()] || *sector == new[at], "sector {number}");
    }
    for at in 1..written {
        store.read_at(&mut read, at << 20).unwrap();
        assert!(read == old, "{at}");
    }
    // Existing data can still be written, and freed.
    store.write_at(&new, 5 << 20, true).unwrap();
    store.discard(6 << 20, 4 << 20).unwrap();
    store.snapshot("after", true, BTreeMap::new(), TIME).unwrap();
    store.write_at(&new, 0, true).unwrap();
    store.close().unwrap();
}

/// A loss of power there could leave a part of a block: the rest would be zeroes that were never written.
#[test]
fn small_blocks_are_refused_but_for_reading() {
    for (mkfs, options, block_bytes) in
        [("mkfs.ext4", &["-q", "-F", "-b", "1024"], 1024), ("mkfs.ext4", &["-q", "-F", "-b", "2048"], 2048)]
    {
        let Some(mounted) = Mounted::new(64 << 20, mkfs, options) else { return };
        let refused = |result: Result<Store, StoreError>| {
            let error = result.unwrap_err();
            assert!(
                matches!(
                    error, StoreError::SmallAllocationUnit { unit_bytes, .. } if unit_bytes == block_bytes
                ),
                "{error}"
            );
            assert!(error.to_string().contains("mkfs.ext4 -b 4096"), "{error}");
        };
        refused(create(&mounted.path().join("new"), 1 << 20));

        let elsewhere = tempfile::tempdir().unwrap();
        let mut store = create(&elsewhere.path().join("replica"), 1 << 20).unwrap();
        store.write_at(&pattern(1, 1 << 20), 0, false).unwrap();
        store.snapshot("a", true, BTreeMap::new(), TIME).unwrap();
        store.close().unwrap();
        let copied =
            Command::new("cp").arg("-a").arg(elsewhere.path().join("replica")).arg(mounted.path()).status();
        assert!(copied.unwrap().success());
        let path = mounted.path().join("replica");
        refused(Store::open(&path, OpenOptions::default()));

        // A block of which only a part was written hides the lower layers, as with Longhorn.
        let head = File::options().write(true).open(path.join("volume-head-001.img")).unwrap();
        let part = usize::try_from(block_bytes).unwrap();
        head.write_all_at(&vec![7; part], 8192 + block_bytes).unwrap();
        head.sync_all().unwrap();
        let mut model = pattern(1, 1 << 20);
        model[8192..12288].fill(0);
        model[8192 + part..8192 + 2 * part].fill(7);
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let mut store = Store::open(&path, options).unwrap();
        assert!(read_all(&mut store) == model);
    }
}

#[test]
fn unwritten_extents_are_holes() {
    for directory in [common::scratch(), tempfile::tempdir().unwrap()] {
        let path = directory.path().join("replica");
        let mut store = create(&path, 1 << 20).unwrap();
        store.write_at(&pattern(1, 1 << 20), 0, false).unwrap();
        store.snapshot("s", true, BTreeMap::new(), TIME).unwrap();
        store.close().unwrap();
        // As power loss leaves blocks that were allocated and not yet written.
        let head = File::options().write(true).open(path.join("volume-head-001.img")).unwrap();
        fallocate(head.as_fd(), FallocateFlags::empty(), 4096, 1 << 19).unwrap();
        head.sync_all().unwrap();
        let mut store = Store::open(&path, OpenOptions::default()).unwrap();
        assert!(read_all(&mut store) == pattern(1, 1 << 20));
    }
}
