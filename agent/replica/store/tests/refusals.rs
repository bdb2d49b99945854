//! Directories that must not be opened, each with a message that says why.
#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

mod common;

use std::fs::{File, OpenOptions as FileOptions};
use std::path::Path;

use common::{Fixture, documents, scratch};
use shorthorn_store::{CreateOptions, OpenOptions, Severity, Store, inspect};

/// Spoils a copy of `lhsimple` and expects the open to fail with a message that has all of `words`. The
/// inspection must say the same, and nothing may have changed.
fn refused(spoil: impl Fn(&Path), words: &[&str]) {
    let fixture = Fixture::unpack("lhsimple");
    spoil(fixture.path());
    let before = documents(fixture.path());
    for read_only in [true, false] {
        let error =
            Store::open(fixture.path(), OpenOptions { read_only, ..OpenOptions::default() }).unwrap_err();
        let message = error.to_string();
        for word in words {
            assert!(message.contains(word), "'{message}' does not say '{word}'");
        }
    }
    let inspection = inspect(fixture.path()).unwrap();
    let is_reported =
        inspection.problems.iter().any(|problem| words.iter().all(|word| problem.message.contains(word)));
    assert!(is_reported, "{:?}", inspection.problems);
    assert_eq!(documents(fixture.path()), before);
}

fn shorten(path: &Path, name: &str, size_bytes: u64) {
    FileOptions::new().write(true).open(path.join(name)).unwrap().set_len(size_bytes).unwrap();
}

fn edit(path: &Path, name: &str, from: &str, to: &str) {
    let text = std::fs::read_to_string(path.join(name)).unwrap();
    assert!(text.contains(from), "{text}");
    std::fs::write(path.join(name), text.replace(from, to)).unwrap();
}

fn remove(path: &Path, name: &str) {
    std::fs::remove_file(path.join(name)).unwrap();
}

const MIB: u64 = 1 << 20;

#[test]
fn truncated_heads() {
    refused(
        |dir| shorten(dir, "volume-head-002.img", 32 * MIB),
        &["volume-head-002.img has 33554432 bytes", "truncated"],
    );
    refused(|dir| shorten(dir, "volume-head-002.img", 0), &["volume-head-002.img has 0 bytes", "truncated"]);
    refused(
        |dir| shorten(dir, "volume-head-002.img", 65 * MIB),
        &["volume-head-002.img", "truncated or replaced"],
    );
}

#[test]
fn truncated_snapshots() {
    refused(|dir| shorten(dir, "volume-snap-s2.img", 32 * MIB), &["volume-snap-s2.img was truncated"]);
    refused(
        |dir| shorten(dir, "volume-snap-s1.img", 32 * MIB),
        &["volume-snap-s1.img has 33554432 bytes", "truncated"],
    );
    refused(
        |dir| shorten(dir, "volume-snap-s1.img", 64 * MIB - 512),
        &["volume-snap-s1.img", "not a multiple of 4096"],
    );
    refused(|dir| shorten(dir, "volume-snap-s1.img", 0), &["volume-snap-s1.img has 0 bytes"]);
}

#[test]
fn damaged_documents() {
    for name in ["volume.meta", "volume-head-002.img.meta", "volume-snap-s1.img.meta"] {
        let damaged = format!("{name} is damaged");
        refused(|dir| shorten(dir, name, 40), &[&damaged]);
        refused(|dir| edit(dir, name, "\":", "\";"), &[&damaged, "line 1 column"]);
        let empty = format!("{name} is empty");
        refused(|dir| shorten(dir, name, 0), &[&empty]);
    }
}

#[test]
fn missing_files() {
    for name in ["volume-head-002.img", "volume-snap-s1.img", "volume-snap-s2.img"] {
        let missing = format!("{name} is missing");
        refused(|dir| remove(dir, name), &[&missing, "needs it"]);
        let meta = format!("{name}.meta");
        let missing = format!("{meta} is missing");
        refused(|dir| remove(dir, &meta), &[&missing, "needs it"]);
    }
    refused(|dir| remove(dir, "volume.meta"), &["volume.meta is missing"]);
}

#[test]
fn documents_that_cannot_be_right() {
    refused(
        |dir| edit(dir, "volume.meta", "67108864", "67108000"),
        &["Size is 67108000", "multiple of 4096"],
    );
    refused(|dir| edit(dir, "volume.meta", "67108864", "-4096"), &["Size is -4096"]);
    refused(
        |dir| edit(dir, "volume.meta", "volume-head-002.img", "../x"),
        &["Head is '../x'", "volume-head-NNN.img"],
    );
    refused(
        |dir| edit(dir, "volume-snap-s1.img.meta", "\"Parent\":\"\"", "\"Parent\":\"/etc/passwd\""),
        &["volume-snap-s1.img.meta", "Parent is '/etc/passwd'"],
    );
    refused(
        |dir| edit(dir, "volume-snap-s1.img.meta", "\"Parent\":\"\"", "\"Parent\":\"volume-snap-s2.img\""),
        &["has a cycle at volume-snap-s2.img"],
    );
    refused(
        |dir| std::fs::write(dir.join("notes.meta"), "{}").unwrap(),
        &["notes.meta does not belong to the chain"],
    );
}

#[test]
fn features_that_we_do_not_have() {
    refused(
        |dir| edit(dir, "volume.meta", "\"BackingFilePath\":\"\"", "\"BackingFilePath\":\"/b/backing\""),
        &["'/b/backing'", "backing image is not supported"],
    );
    refused(
        |dir| edit(dir, "volume.meta", "\"Encrypted\":false", "\"Encrypted\":true"),
        &["encrypted volume"],
    );
    refused(
        |dir| edit(dir, "volume.meta", "\"SectorSize\":512", "\"SectorSize\":4096"),
        &["SectorSize is 4096"],
    );
}

#[test]
fn unfinished_rebuilds_unless_asked_for() {
    let fixture = Fixture::unpack("lhsimple");
    edit(fixture.path(), "volume.meta", "\"Rebuilding\":false", "\"Rebuilding\":true");
    let error = Store::open(fixture.path(), OpenOptions::default()).unwrap_err().to_string();
    assert!(error.contains("lacks data"), "{error}");
    let options = OpenOptions { accept_rebuilding: true, ..OpenOptions::default() };
    let mut store = Store::open(fixture.path(), options).unwrap();
    store.set_rebuilding(false).unwrap();
    store.close().unwrap();
    Store::open(fixture.path(), OpenOptions::default()).unwrap();
}

#[test]
fn a_short_layer_can_be_accepted_once_for_all() {
    let fixture = Fixture::unpack("lhsimple");
    // As when the volume was expanded after s1, and the snapshot that this left was purged.
    shorten(fixture.path(), "volume-snap-s1.img", 32 * MIB);
    let options = OpenOptions { accept_short_layers: true, ..OpenOptions::default() };
    Store::open(fixture.path(), options).unwrap().close().unwrap();
    Store::open(fixture.path(), OpenOptions::default()).unwrap();
}

#[test]
fn a_snapshot_that_is_the_head() {
    refused(
        |dir| {
            remove(dir, "volume-snap-s2.img");
            std::fs::hard_link(dir.join("volume-head-002.img"), dir.join("volume-snap-s2.img")).unwrap();
        },
        &["volume-snap-s2.img and the head volume-head-002.img are the same file"],
    );
}

#[test]
fn more_layers_than_longhorn_takes() {
    let temp = scratch();
    let path = temp.path().join("r");
    Store::create(&path, CreateOptions { size_bytes: MIB, ..CreateOptions::default() })
        .unwrap()
        .close()
        .unwrap();
    let mut parent = String::new();
    for number in 0..250 {
        let image = format!("volume-snap-{number}.img");
        File::create(path.join(&image)).unwrap().set_len(MIB).unwrap();
        let meta =
            format!("{{\"Name\":\"{image}\",\"Parent\":\"{parent}\",\"Created\":\"\",\"Labels\":null}}\n");
        std::fs::write(path.join(format!("{image}.meta")), meta).unwrap();
        let head = format!("{{\"Name\":\"volume-head-000.img\",\"Parent\":\"{image}\",\"Labels\":null}}\n");
        parent = image;
        if number < 248 {
            continue;
        }
        std::fs::write(path.join("volume-head-000.img.meta"), head).unwrap();
        let opened = Store::open(&path, OpenOptions::default());
        if number == 248 {
            let mut store = opened.unwrap();
            assert_eq!(store.layers().len(), 250);
            let error = store.snapshot("one-more", true, Default::default(), "").unwrap_err().to_string();
            assert!(error.contains("more than 250 layers"), "{error}");
        } else {
            assert!(opened.unwrap_err().to_string().contains("more than 250 layers"));
        }
    }
}

#[test]
fn a_second_store() {
    let fixture = Fixture::unpack("lhsimple");
    let store = Store::open(fixture.path(), OpenOptions::default()).unwrap();
    let holder = format!("in use by process {}", std::process::id());
    for read_only in [true, false] {
        let error =
            Store::open(fixture.path(), OpenOptions { read_only, ..OpenOptions::default() }).unwrap_err();
        assert!(error.to_string().contains(&holder), "{error}");
        assert_eq!(error.errno().raw(), 16);
    }
    assert_eq!(inspect(fixture.path()).unwrap().in_use_by, Some(std::process::id()));
    drop(store);
    Store::open(fixture.path(), OpenOptions::default()).unwrap();
}

#[test]
fn places_for_a_new_replica() {
    let temp = scratch();
    let create = |path: &Path, size_bytes| {
        Store::create(path, CreateOptions { size_bytes, ..CreateOptions::default() })
    };
    let path = temp.path().join("r");
    for size_bytes in [0, 512, 4097, 1 << 63] {
        assert!(
            create(&path, size_bytes).unwrap_err().to_string().contains("multiple of 4096"),
            "{size_bytes}"
        );
    }
    create(&path, MIB).unwrap().close().unwrap();
    assert!(create(&path, MIB).unwrap_err().to_string().contains("holds a replica already"));
    let other = temp.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("letter.txt"), "dear").unwrap();
    assert!(create(&other, MIB).unwrap_err().to_string().contains("not empty (letter.txt)"));
    assert!(
        create(&temp.path().join("a/b"), MIB).unwrap_err().to_string().contains("cannot make the directory")
    );
    let missing = Store::open(temp.path().join("none"), OpenOptions::default()).unwrap_err();
    assert_eq!(missing.errno().raw(), 2);
}

#[test]
fn requests_that_the_volume_cannot_serve() {
    let temp = scratch();
    let options = CreateOptions { size_bytes: MIB, ..CreateOptions::default() };
    let mut store = Store::create(temp.path().join("r"), options).unwrap();
    let mut buffer = vec![0; 4096];
    for offset in [1, MIB, MIB - 512, u64::MAX - 511] {
        assert_eq!(store.read_at(&mut buffer, offset).unwrap_err().errno().raw(), 22, "{offset}");
        assert_eq!(store.write_at(&buffer, offset, false).unwrap_err().errno().raw(), 22, "{offset}");
        assert_eq!(store.discard(offset, 4096).unwrap_err().errno().raw(), 22, "{offset}");
        assert_eq!(store.write_zeroes(offset, 4096, false).unwrap_err().errno().raw(), 22, "{offset}");
    }
    assert!(store.read_at(&mut [], 0).is_err());
    assert!(store.read_at(&mut buffer[..100], 0).is_err());
    store.close().unwrap();
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let mut store = Store::open(temp.path().join("r"), options).unwrap();
    store.read_at(&mut buffer, 0).unwrap();
    assert_eq!(store.write_at(&buffer, 0, false).unwrap_err().errno().raw(), 30);
    assert_eq!(store.snapshot("s", true, Default::default(), "").unwrap_err().errno().raw(), 30);
}

#[test]
fn operations_that_make_no_sense() {
    let fixture = Fixture::unpack("lhrich");
    let mut store = Store::open(fixture.path(), OpenOptions::default()).unwrap();
    let snapshot = |store: &mut Store, name: &str| {
        store.snapshot(name, true, Default::default(), "2026-01-01T00:00:00Z")
    };
    assert!(snapshot(&mut store, "s5").unwrap_err().to_string().contains("snapshot 's5' exists already"));
    assert!(snapshot(&mut store, "../x").unwrap_err().to_string().contains("cannot be a snapshot's name"));
    assert!(store.remove("none").unwrap_err().to_string().contains("no snapshot 'none'"));
    assert!(store.fold("s5").unwrap_err().to_string().contains("remove it before"));
    store.remove("s5").unwrap();
    assert!(store.revert("s5", "").unwrap_err().to_string().contains("no longer kept"));
    assert!(store.expand(MIB).unwrap_err().to_string().contains("only grows"));
    assert!(store.expand(65 * MIB + 512).unwrap_err().to_string().contains("multiple of 4096"));
    store.revert("s6", "2026-01-01T00:00:00Z").unwrap();
    snapshot(&mut store, "branch").unwrap();
    store.remove("s6").unwrap();
    assert!(store.fold("s6").unwrap_err().to_string().contains("has 2 children"));
    store.remove("branch").unwrap();
    let error = store.begin_fold("branch").unwrap_err();
    assert!(error.to_string().contains("directly under the head"), "{error}");
    let job = store.begin_fold("s5").unwrap();
    assert!(store.revert("s1", "").unwrap_err().to_string().contains("being folded"));
    assert!(store.begin_fold("s6").is_err());
    let job = job.run(|_| {}).unwrap();
    store.finish_fold(job).unwrap();
    assert!(
        !inspect(fixture.path()).unwrap().problems.iter().any(|problem| problem.severity == Severity::Error)
    );
}

#[test]
fn a_replica_that_could_not_be_marked_as_whole_is_not() {
    let base = scratch();
    let path = base.path().join("replica");
    let mut store =
        Store::create(&path, CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() }).unwrap();
    store.set_rebuilding(true).unwrap();
    let in_the_way = path.join("volume.meta.tmp");
    std::fs::create_dir(&in_the_way).unwrap();
    store.set_rebuilding(false).unwrap_err();
    assert!(store.info().rebuilding);
    std::fs::remove_dir(&in_the_way).unwrap();
    store.set_rebuilding(false).unwrap();
    assert!(!store.info().rebuilding);
}
