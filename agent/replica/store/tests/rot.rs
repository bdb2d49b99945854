//! Damaged small files: a changed byte is noticed even if the document still parses.
#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::scratch;
use shorthorn_store::{CreateOptions, OpenOptions, Store, StoreError, inspect};

const TIME: &str = "2026-01-01T00:00:00Z";

fn create(path: &Path) -> Store {
    let options = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
    let mut store = Store::create(path, options).unwrap();
    store.write_at(&[1; 4096], 0, false).unwrap();
    store.snapshot("s", true, BTreeMap::new(), TIME).unwrap();
    store
}

fn open(path: &Path) -> Result<Store, StoreError> {
    Store::open(path, OpenOptions { accept_rebuilding: true, ..OpenOptions::default() })
}

/// Puts `to` where `from` is in the file, once.
fn change(file: &Path, from: &str, to: &str) {
    let text = std::fs::read_to_string(file).unwrap();
    assert!(text.contains(from), "{text}");
    std::fs::write(file, text.replacen(from, to, 1)).unwrap();
}

/// Removes the check from a file, as a Shorthorn version without checks, or Longhorn, would have written it.
fn take_check_out(file: &Path) {
    let mut document: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    document.as_object_mut().unwrap().remove("ShorthornCheck").unwrap();
    std::fs::write(file, document.to_string()).unwrap();
}

#[test]
fn a_changed_document_of_an_image_is_refused() {
    let base = scratch();
    for name in ["volume-snap-s.img.meta", "volume-head-001.img.meta"] {
        let path = base.path().join(name);
        create(&path).close().unwrap();
        let file = path.join(name);
        change(&file, "\"Created\":\"2026", "\"Created\":\"2126");
        let error = open(&path).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("Rebuild the replica"), "{error}");
        let inspection = inspect(&path).unwrap();
        assert!(!inspection.usable && inspection.to_string().contains(name), "{inspection}");
        take_check_out(&file);
        open(&path).unwrap().close().unwrap();
    }
}

#[test]
fn a_damaged_record_of_the_boot_counts_as_lost_data() {
    let base = scratch();
    for (from, to) in [("\"lost_cache\":false", "\"lost_cachf\":false"), ("\"boot_id\"", "boot_id")] {
        let path = base.path().join(to.len().to_string());
        create(&path).close().unwrap();
        let file = path.join("shorthorn.boot");
        change(&file, from, to);
        let inspection = inspect(&path).unwrap();
        assert!(inspection.own_state.lost_cache, "{inspection}");
        assert!(inspection.to_string().contains("shorthorn.boot is damaged"), "{inspection}");
        let mut store = open(&path).unwrap();
        assert!(store.info().lost_cache, "it may have said so");
        let repairs = store.info().repairs;
        assert!(repairs.iter().any(|repair| repair.contains("shorthorn.boot is damaged")), "{repairs:?}");
        store.cache_made_up_for().unwrap();
        store.close().unwrap();
        take_check_out(&file);
        let store = open(&path).unwrap();
        assert!(!store.info().lost_cache && store.info().repairs.is_empty());
    }
}

#[test]
fn a_copy_with_a_damaged_record_starts_over() {
    let base = scratch();
    let (from, to) = (base.path().join("from"), base.path().join("to"));
    let (source, mut target) = (create(&from), create(&to));
    target.begin_copy(source.chain().copy_layers().unwrap()).unwrap();
    drop(target);
    let file = to.join("shorthorn.copy");
    let record = std::fs::read(&file).unwrap();
    // It would count a layer as whole that has no data.
    change(&file, "\"done\":[false,", "\"done\":[true,");
    let mut dropped = open(&to).unwrap();
    let info = dropped.info();
    assert!(info.rebuilding && info.repairs.iter().any(|repair| repair.contains("starts over")), "{info:?}");
    assert!(dropped.copy_target(0).is_none() && !file.exists());
    let error = dropped.end_copy().unwrap_err();
    assert!(matches!(error, StoreError::CopyUnfinished(_)), "{error}");
    drop(dropped);
    std::fs::write(&file, &record).unwrap();
    take_check_out(&file);
    change(&file, "\"format\":1", "\"format\":2");
    let error = open(&to).unwrap_err().to_string();
    assert!(error.contains("shorthorn.copy has format 2"), "{error}");
    std::fs::write(&file, &record).unwrap();
    take_check_out(&file);
    let mut target = open(&to).unwrap();
    assert!(target.copy_target(0).is_some());
    // After its end the record says nothing any more, be it damaged or not.
    target.set_rebuilding(false).unwrap();
    drop(target);
    std::fs::write(&file, "{").unwrap();
    open(&to).unwrap().close().unwrap();
    assert!(!file.exists());
}
