//! Tests which series of sums of blocks counts.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

use std::collections::BTreeMap;
use std::path::Path;

use shorthorn_store::{CreateOptions, OpenOptions, Store, now_rfc3339};

const SIZE_BYTES: u64 = 1 << 20;
const FILE: &str = "shorthorn.block-sums";

fn create(path: &Path) -> Store {
    Store::create(path, CreateOptions { size_bytes: SIZE_BYTES, ..CreateOptions::default() }).unwrap()
}

fn open(path: &Path) -> Store {
    Store::open(path, OpenOptions::default()).unwrap()
}

fn series(store: &mut Store) -> u64 {
    store.open_block_sums().unwrap().series()
}

#[test]
fn a_series_counts_as_long_as_account_is_kept_of_changes() {
    let base = tempfile::tempdir().unwrap();
    let path = base.path().join("r");
    let mut store = create(&path);
    let first = series(&mut store);
    store.write_at(&[1; 4096], 0, true).unwrap();
    store.close().unwrap();
    let mut store = open(&path);
    assert_eq!(series(&mut store), first, "the writer has kept account");
    drop(store);
    assert_eq!(series(&mut open(&path)), first, "as after a crash");
    let mut store = open(&path);
    store.write_at(&[2; 4096], 0, true).unwrap();
    assert!(!path.join(FILE).exists());
    store.close().unwrap();
    let mut store = open(&path);
    let second = series(&mut store);
    assert!(second > first, "no store has kept account of that write");
    store.forget_block_sums().unwrap();
    drop(store);
    let mut store = open(&path);
    store.discard(0, 4096).unwrap();
    assert!(series(&mut store) > second);
}

#[test]
fn a_revert_and_a_copy_end_the_series() {
    let base = tempfile::tempdir().unwrap();
    let path = base.path().join("r");
    let mut store = create(&path);
    store.write_at(&[1; 4096], 0, true).unwrap();
    store.snapshot("s1", true, BTreeMap::new(), &now_rfc3339()).unwrap();
    let first = series(&mut store);
    store.snapshot("s2", true, BTreeMap::new(), &now_rfc3339()).unwrap();
    assert_eq!(series(&mut store), first, "a reader sees the same");
    store.revert("s1", &now_rfc3339()).unwrap();
    assert!(!path.join(FILE).exists());
    let second = series(&mut store);
    assert!(second > first);
    let layers = store.chain().copy_layers().unwrap();
    store.begin_copy(layers).unwrap();
    assert!(series(&mut store) > second);
}

#[test]
fn another_program_that_opens_the_directory_ends_the_series() {
    let base = tempfile::tempdir().unwrap();
    let path = base.path().join("r");
    let mut store = create(&path);
    let first = series(&mut store);
    store.close().unwrap();
    // Longhorn rewrites it.
    let meta = std::fs::read(path.join("volume.meta")).unwrap();
    std::fs::write(path.join("volume.meta"), meta).unwrap();
    assert!(series(&mut open(&path)) > first);
}
