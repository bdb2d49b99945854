//! Data that could not be made durable: the next opening knows it.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use common::scratch;
use shorthorn_store::{CreateOptions, Fault, FaultHook, LossRecord, OpenOptions, Store, StoreError};

const EIO: i32 = 5;
const CREATED: &str = "2026-01-01T00:00:00Z";

/// Returns a replica that was closed cleanly.
fn prepared(base: &Path) -> PathBuf {
    let path = base.join("replica");
    let options = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
    Store::create(&path, options).unwrap().close().unwrap();
    path
}

/// Returns a store whose head cannot be made durable.
fn with_a_failing_disk(path: &Path) -> Store {
    with_fault(path, "about to sync volume-head", Fault::Fail(EIO)).unwrap()
}

fn with_fault(path: &Path, at: &'static str, fault: Fault) -> Result<Store, StoreError> {
    let hook = FaultHook::new(move |done| if done.starts_with(at) { fault } else { Fault::None });
    Store::open(path, OpenOptions { fault: Some(hook), ..OpenOptions::default() })
}

fn open(path: &Path) -> Store {
    Store::open(path, OpenOptions::default()).unwrap()
}

#[test]
fn a_close_that_cannot_make_the_data_durable_is_remembered() {
    let base = scratch();
    let path = prepared(base.path());
    let mut store = with_a_failing_disk(&path);
    store.write_at(&[1; 4096], 0, false).unwrap();
    let error = store.close().unwrap_err();
    assert!(matches!(error, StoreError::NotDurable { recorded: true, .. }), "{error}");
    assert!(error.to_string().contains("lost data"), "{error}");
    assert_eq!(error.errno().raw(), EIO);
    let store = open(&path);
    assert!(store.info().was_dirty && store.info().lost_cache, "in the same boot of the host");
    assert!(!store.has_lost_cache_now(), "it was an earlier process");
    store.close().unwrap();
    assert!(open(&path).info().lost_cache, "a clean close does not bring it back");
}

#[test]
fn a_snapshot_that_cannot_make_the_data_durable_is_remembered() {
    let base = scratch();
    let path = prepared(base.path());
    let mut store = with_a_failing_disk(&path);
    let error = store.snapshot("s", true, BTreeMap::new(), CREATED).unwrap_err();
    assert!(matches!(error, StoreError::NotDurable { .. }), "{error}");
    assert!(store.has_lost_cache_now() && store.info().lost_cache);
    // Asked again the kernel would say that all is well.
    assert!(matches!(store.close(), Err(StoreError::Broken(_))));
    assert!(open(&path).info().lost_cache);
}

#[test]
fn an_expansion_that_cannot_make_the_data_durable_is_remembered() {
    let base = scratch();
    let path = prepared(base.path());
    let mut store = with_a_failing_disk(&path);
    let _ = store.expand(2 << 20);
    assert!(store.has_lost_cache_now());
    drop(store);
    assert!(open(&path).info().lost_cache);
}

/// The kernel reports a lost write once, and an opening may be the first to get it.
#[test]
fn an_open_that_cannot_make_the_data_durable_is_remembered() {
    // The head of an expansion that was interrupted, and the mark that the directory is open.
    for (fails, is_expanding) in
        [("about to sync volume-head", true), ("SyncFile { name: \"volume.meta.tmp\" }", false)]
    {
        let base = scratch();
        let path = prepared(base.path());
        let mut store = with_fault(&path, "Grow", Fault::Die).unwrap();
        store.write_at(&[1; 4096], 0, false).unwrap();
        if is_expanding {
            store.expand(2 << 20).unwrap_err();
        }
        drop(store); // as if its process had been killed
        let error = with_fault(&path, fails, Fault::Fail(EIO)).unwrap_err();
        assert_eq!(error.errno().raw(), EIO, "{error}");
        let store = open(&path);
        assert!(store.info().lost_cache && !store.has_lost_cache_now(), "{error}");
    }
}

/// Blocks the path of the record, so that it cannot be written.
fn block_the_record(path: &Path) {
    std::fs::create_dir(path.join("shorthorn.boot.tmp")).unwrap();
}

#[test]
fn if_the_loss_cannot_be_recorded_the_record_of_the_boot_is_removed() {
    let base = scratch();
    let path = prepared(base.path());
    let mut store = open(&path);
    block_the_record(&path);
    assert_eq!(store.record_lost_cache(2).unwrap(), LossRecord::FileRemoved);
    assert!(!path.join("shorthorn.boot").exists());
    assert!(store.info().lost_cache);
    assert!(matches!(store.close(), Err(StoreError::Broken(_))), "that it is dirty tells of it");
    std::fs::remove_dir(path.join("shorthorn.boot.tmp")).unwrap();
    assert!(open(&path).info().lost_cache);
}

#[test]
fn failures_are_counted_until_the_next_record() {
    let base = scratch();
    let path = prepared(base.path());
    for failures in [1, 2, 1] {
        let mut store = open(&path);
        assert_eq!(store.record_lost_cache(failures).unwrap(), LossRecord::Written);
        drop(store);
        let mut store = open(&path);
        assert_eq!(store.info().failures, failures);
        store.cache_made_up_for().unwrap();
        store.close().unwrap();
        let info = open(&path).info();
        assert_eq!((info.failures, info.lost_cache), (failures, false), "whatever was made up for");
    }
}

#[test]
fn if_the_directory_cannot_be_changed_this_process_remembers_the_loss() {
    let base = scratch();
    let path = prepared(base.path());
    let mut store = open(&path);
    block_the_record(&path);
    std::fs::remove_file(path.join("shorthorn.boot")).unwrap();
    std::fs::create_dir(path.join("shorthorn.boot")).unwrap();
    let error = store.record_lost_cache(1).unwrap_err();
    assert!(error.to_string().contains("shorthorn.boot.tmp"), "{error}");
    assert!(store.has_lost_cache_now() && store.info().lost_cache);
    std::fs::remove_dir(path.join("shorthorn.boot")).unwrap();
    std::fs::remove_dir(path.join("shorthorn.boot.tmp")).unwrap();
    store.cache_made_up_for().unwrap();
    assert!(store.info().lost_cache, "nothing in this process makes up for it");
    drop(store);
    assert!(open(&path).info().lost_cache);
}

/// Simulates a file system that has given up: nothing in the directory can be changed.
#[test]
fn if_the_directory_cannot_be_changed_the_loss_is_recorded_elsewhere() {
    let base = scratch();
    let path = prepared(base.path());
    let record = base.path().join("lost");
    let open = || {
        let options = OpenOptions { loss_record: Some(record.clone()), ..OpenOptions::default() };
        Store::open(&path, options).unwrap()
    };
    let mut store = open();
    let blocked = [path.join("shorthorn.boot.tmp"), path.join("shorthorn.boot")];
    let boot = std::fs::read(&blocked[1]).unwrap();
    std::fs::remove_file(&blocked[1]).unwrap();
    blocked.iter().for_each(|path| std::fs::create_dir(path).unwrap());
    assert_eq!(store.record_lost_cache(1).unwrap(), LossRecord::Elsewhere);
    drop(store);
    blocked.iter().for_each(|path| std::fs::remove_dir(path).unwrap());
    std::fs::write(&blocked[1], boot).unwrap();
    let store = open();
    assert!(store.info().lost_cache && !record.exists(), "the directory says so now");
    drop(store);
    assert!(open().info().lost_cache);
}
