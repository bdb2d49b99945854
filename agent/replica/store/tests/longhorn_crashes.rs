//! Tests the remains of a Longhorn process that dies in the middle of an operation.
#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

mod common;

use std::collections::BTreeMap;
use std::fs::{File, hard_link};
use std::os::unix::fs::FileExt;
use std::path::Path;

use common::{Fixture, pattern, read_all, sha256};
use shorthorn_store::{OpenOptions, Severity, Store, inspect};

const HEAD: &str = "volume-head-002.img";
const NEXT: &str = "volume-head-003.img";
const SIZE_BYTES: u64 = 64 << 20;

/// Opens a spoiled copy of `lhsimple`. It must read as before, have these snapshots, be repaired with notes
/// that have all of `words`, and be without problems afterwards.
fn mended(spoil: impl Fn(&Path), snapshots: &[&str], words: &[&str]) -> Fixture {
    let fixture = Fixture::unpack("lhsimple");
    spoil(fixture.path());
    let before = inspect(fixture.path()).unwrap();
    assert!(before.usable, "{before}");
    let mut read_only =
        Store::open(fixture.path(), OpenOptions { read_only: true, ..OpenOptions::default() }).unwrap();
    assert_eq!(sha256(&read_all(&mut read_only)), fixture.expected.head_sha256, "before the repair");
    drop(read_only);
    let mut store = Store::open(fixture.path(), OpenOptions::default()).unwrap();
    let repairs = store.info().repairs.join("\n");
    for word in words {
        assert!(repairs.contains(word), "'{repairs}' does not say '{word}'");
        assert!(
            before
                .problems
                .iter()
                .any(|problem| { problem.severity == Severity::Repair && problem.message.contains(word) })
        );
    }
    let names: Vec<String> = store.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
    assert_eq!(names, snapshots);
    assert_eq!(sha256(&read_all(&mut store)), fixture.expected.head_sha256, "after the repair");
    store.close().unwrap();
    fixture
}

fn new_head(path: &Path) {
    File::create(path.join(NEXT)).unwrap().set_len(SIZE_BYTES).unwrap();
}

fn new_head_meta(path: &Path) {
    let meta = std::fs::read_to_string(path.join(format!("{HEAD}.meta"))).unwrap();
    let meta = meta.replace(HEAD, NEXT).replace("volume-snap-s2.img", "volume-snap-s3.img");
    std::fs::write(path.join(format!("{NEXT}.meta")), meta).unwrap();
}

fn link_snapshot(path: &Path) {
    for suffix in ["", ".meta"] {
        hard_link(path.join(format!("{HEAD}{suffix}")), path.join(format!("volume-snap-s3.img{suffix}")))
            .unwrap();
    }
}

fn commit(path: &Path) {
    let meta = std::fs::read_to_string(path.join("volume.meta")).unwrap();
    let meta = meta.replace(HEAD, NEXT).replace("volume-snap-s2.img", "volume-snap-s3.img");
    std::fs::write(path.join("volume.meta"), meta.replace("\"Dirty\":false", "\"Dirty\":true")).unwrap();
}

#[test]
fn a_new_head_that_never_came_into_use() {
    let gone = |fixture: Fixture| {
        assert!(!fixture.path().join(NEXT).exists());
        assert!(!fixture.path().join(format!("{NEXT}.meta")).exists());
    };
    let words = ["removed volume-head-003.img, an empty head"];
    gone(mended(new_head, &["s1", "s2"], &words));
    let with_meta = |path: &Path| {
        new_head(path);
        new_head_meta(path);
    };
    gone(mended(with_meta, &["s1", "s2"], &words));
    let with_empty_meta = |path: &Path| {
        new_head(path);
        File::create(path.join(format!("{NEXT}.meta"))).unwrap();
    };
    gone(mended(with_empty_meta, &["s1", "s2"], &words));
}

#[test]
fn a_snapshot_before_it_counted() {
    let spoil = |path: &Path| {
        new_head(path);
        new_head_meta(path);
        link_snapshot(path);
    };
    let fixture = mended(spoil, &["s1", "s2"], &["took back the unfinished snapshot volume-snap-s3.img"]);
    // Longhorn itself would be stuck here: the next snapshot must work.
    let mut store = Store::open(fixture.path(), OpenOptions::default()).unwrap();
    store.snapshot("s3", true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
    assert_eq!(sha256(&read_all(&mut store)), fixture.expected.head_sha256);
}

#[test]
fn a_snapshot_whose_document_is_still_the_heads() {
    let spoil = |path: &Path| {
        new_head(path);
        new_head_meta(path);
        link_snapshot(path);
        commit(path);
    };
    let fixture = mended(spoil, &["s1", "s2", "s3"], &["finished the snapshot volume-snap-s3.img"]);
    assert!(!fixture.path().join(HEAD).exists());
    let store = Store::open(fixture.path(), OpenOptions::default()).unwrap();
    let snapshot = store.snapshots().into_iter().find(|snapshot| snapshot.name == "s3").unwrap();
    assert!(snapshot.user_created, "or the next purge throws it away");
    assert_eq!(snapshot.parent.as_deref(), Some("s2"));
}

#[test]
fn a_snapshot_whose_old_name_is_still_there() {
    let spoil = |path: &Path| {
        new_head(path);
        new_head_meta(path);
        link_snapshot(path);
        commit(path);
        let meta = std::fs::read_to_string(path.join("volume-snap-s3.img.meta")).unwrap();
        let meta = meta.replace("null", "{\"mine\":\"yes\"}");
        std::fs::remove_file(path.join("volume-snap-s3.img.meta")).unwrap();
        std::fs::write(path.join("volume-snap-s3.img.meta"), meta).unwrap();
    };
    let fixture = mended(spoil, &["s1", "s2", "s3"], &["finished the snapshot volume-snap-s3.img"]);
    let store = Store::open(fixture.path(), OpenOptions::default()).unwrap();
    let snapshot = store.snapshots().into_iter().find(|snapshot| snapshot.name == "s3").unwrap();
    assert!(
        !snapshot.user_created && snapshot.labels["mine"] == "yes",
        "a document of its own stays as it is"
    );
}

#[test]
fn documents_that_were_being_written() {
    let spoil = |path: &Path| {
        for name in ["volume.meta.tmp", "volume-snap-s1.img.meta.tmp"] {
            std::fs::write(path.join(name), "{\"Si").unwrap();
        }
        std::fs::write(path.join("mine.tmp"), "not yours").unwrap();
    };
    let fixture = mended(spoil, &["s1", "s2"], &[]);
    assert!(!fixture.path().join("volume.meta.tmp").exists());
    assert!(!fixture.path().join("volume-snap-s1.img.meta.tmp").exists());
    assert!(fixture.path().join("mine.tmp").exists());
}

#[test]
fn an_old_head_with_data_is_left_alone() {
    let spoil = |path: &Path| {
        new_head(path);
        new_head_meta(path);
        let stray = File::options().write(true).open(path.join(NEXT)).unwrap();
        stray.write_all_at(&pattern(1, 4096), 4096).unwrap();
    };
    let meta_fits = |path: &Path| {
        spoil(path);
        let name = path.join(format!("{NEXT}.meta"));
        let meta = std::fs::read_to_string(&name).unwrap();
        std::fs::write(name, meta.replace("s3", "s2")).unwrap();
    };
    let fixture = mended(meta_fits, &["s1", "s2"], &["volume-head-003.img is not the head and holds data"]);
    assert!(fixture.path().join(NEXT).exists());
    let mut store = Store::open(fixture.path(), OpenOptions::default()).unwrap();
    store.snapshot("s3", true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
    assert_eq!(store.info().head.as_str(), "volume-head-004.img");
    assert_eq!(sha256(&read_all(&mut store)), fixture.expected.head_sha256);
}

/// A purge stopped between the removal of the child's name and its assignment to the parent; or the file was
/// lost. No file shows which, so recovery does not guess.
#[test]
fn a_fold_that_lost_its_name_is_refused() {
    let fixture = Fixture::unpack("lhsimple");
    let meta = fixture.path().join("volume-snap-s1.img.meta");
    let text = std::fs::read_to_string(&meta).unwrap().replace("\"Removed\":false", "\"Removed\":true");
    std::fs::write(meta, text).unwrap();
    std::fs::remove_file(fixture.path().join("volume-snap-s2.img")).unwrap();
    let error = Store::open(fixture.path(), OpenOptions::default()).unwrap_err().to_string();
    assert!(error.contains("volume-snap-s2.img is missing"), "{error}");
    assert!(error.contains("rename volume-snap-s1.img to volume-snap-s2.img"), "{error}");
}
