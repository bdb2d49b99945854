//! Sums of snapshots: kept with their layer, gone with it; and layers that are put right.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::scratch;
use shorthorn_store::{ByteRange, CreateOptions, FoundSums, LayerSums, OpenOptions, Store, StoreError};

const SIZE: u64 = 4 << 20;
const NOW: &str = "2026-11-22T10:00:00Z";
const FIRST: &str = "volume-snap-first.img";
const SECOND: &str = "volume-snap-second.img";

fn store(path: &Path) -> Store {
    let mut store =
        Store::create(path, CreateOptions { size_bytes: SIZE, ..CreateOptions::default() }).unwrap();
    store.write_at(&[1; 16384], 0, false).unwrap();
    store.snapshot("first", true, BTreeMap::new(), NOW).unwrap();
    store.write_at(&[2; 8192], 8192, false).unwrap();
    store.snapshot("second", true, BTreeMap::new(), NOW).unwrap();
    store
}

fn sums(first: u32) -> LayerSums {
    let mut sums = LayerSums::new(SIZE, 1 << 20, 1).unwrap();
    sums.sums[0] = first;
    sums
}

fn blocks(first: u64, count: u64) -> ByteRange {
    ByteRange::new(first * 4096, count * 4096).unwrap()
}

fn names(path: &Path) -> Vec<String> {
    let names =
        std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name.starts_with("shorthorn.sums-")).collect();
    names.sort();
    names
}

#[test]
fn sums_outlive_the_process_and_are_removed_with_their_layer() {
    let base = scratch();
    let path = base.path().join("replica");
    let open = store(&path);
    assert_eq!(open.snapshot_layers().load_sums(FIRST).unwrap(), FoundSums::None);
    open.snapshot_layers().save_sums(FIRST, &sums(7)).unwrap();
    open.snapshot_layers().save_sums(SECOND, &sums(8)).unwrap();
    assert!(matches!(
        open.snapshot_layers().save_sums("volume-head-002.img", &sums(9)),
        Err(StoreError::NoSnapshotLayer(_))
    ));
    open.close().unwrap();
    let mut open = Store::open(&path, OpenOptions::default()).unwrap();
    assert_eq!(open.snapshot_layers().load_sums(FIRST).unwrap(), FoundSums::Kept(sums(7)));
    open.remove("first").unwrap();
    assert_eq!(
        open.snapshot_layers().load_sums(FIRST).unwrap(),
        FoundSums::Kept(sums(7)),
        "the layer is there as before"
    );
    open.fold("first").unwrap();
    assert_eq!(names(&path), [] as [&str; 0], "one is gone, and the other has become another file");
    assert_eq!(open.snapshot_layers().load_sums(SECOND).unwrap(), FoundSums::None);
    open.snapshot_layers().save_sums(SECOND, &sums(8)).unwrap();
    open.revert("second", NOW).unwrap();
    assert_eq!(open.snapshot_layers().load_sums(SECOND).unwrap(), FoundSums::Kept(sums(8)));
}

#[test]
fn sums_of_another_file_of_the_same_name_count_for_nothing() {
    let base = scratch();
    let path = base.path().join("replica");
    let open = store(&path);
    open.snapshot_layers().save_sums(FIRST, &sums(7)).unwrap();
    open.close().unwrap();
    // Another program has replaced the layer.
    std::fs::copy(path.join(FIRST), path.join("copy")).unwrap();
    std::fs::rename(path.join("copy"), path.join(FIRST)).unwrap();
    // And left the sums of a snapshot that is gone.
    std::fs::copy(path.join("shorthorn.sums-first"), path.join("shorthorn.sums-gone")).unwrap();
    let open = Store::open(&path, OpenOptions::default()).unwrap();
    assert_eq!(open.snapshot_layers().load_sums(FIRST).unwrap(), FoundSums::None);
    assert_eq!(names(&path), ["shorthorn.sums-first"]);
}

#[test]
fn sums_from_before_another_program_had_the_directory_open_count_for_nothing() {
    let base = scratch();
    let path = base.path().join("replica");
    let open = store(&path);
    open.snapshot_layers().save_sums(FIRST, &sums(7)).unwrap();
    open.close().unwrap();
    let meta = path.join("volume.meta");
    let content = std::fs::read(&meta).unwrap();
    std::fs::write(path.join("new"), content).unwrap();
    std::fs::rename(path.join("new"), meta).unwrap();
    let open = Store::open(&path, OpenOptions::default()).unwrap();
    assert_eq!(open.snapshot_layers().load_sums(FIRST).unwrap(), FoundSums::None);
}

#[test]
fn a_damaged_file_of_sums_is_reported_and_replaced() {
    let base = scratch();
    let path = base.path().join("replica");
    let open = store(&path);
    open.snapshot_layers().save_sums(FIRST, &sums(7)).unwrap();
    let file = path.join("shorthorn.sums-first");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[49] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    assert!(matches!(open.snapshot_layers().load_sums(FIRST).unwrap(), FoundSums::Damaged(_)));
    open.snapshot_layers().save_sums(FIRST, &sums(9)).unwrap();
    assert_eq!(open.snapshot_layers().load_sums(FIRST).unwrap(), FoundSums::Kept(sums(9)));
}

#[test]
fn a_copy_of_another_replica_keeps_no_sums_of_its_own() {
    let base = scratch();
    let source = store(&base.path().join("from"));
    let to = base.path().join("to");
    let mut open = store(&to);
    open.snapshot_layers().save_sums(FIRST, &sums(7)).unwrap();
    open.begin_copy(source.chain().copy_layers().unwrap()).unwrap();
    assert_eq!(names(&to), [] as [&str; 0]);
    assert!(open.snapshot_layers().find(FIRST).is_none(), "it is not whole");
}

#[test]
fn a_layer_is_repaired_block_by_block() {
    let base = scratch();
    let path = base.path().join("replica");
    let mut open = store(&path);
    let read = |store: &mut Store| {
        let mut data = [0; 24576];
        store.read_at(&mut data, 0).unwrap();
        data.chunks(4096).map(|block| block[0]).collect::<Vec<_>>()
    };
    assert_eq!(read(&mut open), [1, 1, 2, 2, 0, 0], "where its blocks are is known from here on");
    let file = open.snapshot_layers().find(SECOND).unwrap();
    assert_eq!(open.chain().layer_blocks(file, blocks(0, 6)).unwrap(), [blocks(2, 2)]);
    // A hole in place of a superfluous block, and a block in place of a missing one.
    let data = [[5; 4096], [6; 4096]].concat();
    open.repair_layer(SECOND, blocks(0, 6), &[blocks(0, 1), blocks(3, 1)], &data).unwrap();
    assert_eq!(open.chain().layer_blocks(file, blocks(0, 6)).unwrap(), [blocks(0, 1), blocks(3, 1)]);
    assert_eq!(read(&mut open), [5, 1, 1, 6, 0, 0]);
    open.repair_layer(SECOND, blocks(3, 1), &[blocks(3, 1)], &[7; 4096]).unwrap();
    assert_eq!(read(&mut open), [5, 1, 1, 7, 0, 0]);
    for image in ["volume-head-002.img", "volume-snap-none.img"] {
        assert!(open.repair_layer(image, blocks(0, 1), &[], &[]).is_err(), "{image}");
    }
    assert!(open.repair_layer(SECOND, blocks(SIZE / 4096, 1), &[], &[]).is_err(), "past its end");
    open.close().unwrap();
    assert_eq!(read(&mut Store::open(&path, OpenOptions::default()).unwrap()), [5, 1, 1, 7, 0, 0]);
}

/// The pieces of a scrub end with the volume, and not with a layer that is smaller.
#[test]
fn the_end_of_a_layer_is_repaired_after_an_expansion() {
    let base = scratch();
    let path = base.path().join("replica");
    let mut open =
        Store::create(&path, CreateOptions { size_bytes: 8192, ..CreateOptions::default() }).unwrap();
    open.write_at(&[1; 8192], 0, true).unwrap();
    open.snapshot("first", true, BTreeMap::new(), NOW).unwrap();
    open.expand(1 << 20).unwrap();
    open.repair_layer(FIRST, blocks(0, 128), &[blocks(0, 2)], &[5; 8192]).unwrap();
    open.repair_layer(FIRST, blocks(128, 128), &[], &[]).unwrap();
    let mut data = [0; 12288];
    open.read_at(&mut data, 0).unwrap();
    assert_eq!([data[0], data[4096], data[8192]], [5, 5, 0]);
    assert!(open.repair_layer(FIRST, blocks(0, 128), &[blocks(1, 2)], &[6; 8192]).is_err(), "past its end");
    assert_eq!(open.snapshot_layers().size_bytes(FIRST), Some(8192));
    open.close().unwrap();
    Store::open(&path, OpenOptions::default()).unwrap();
}
