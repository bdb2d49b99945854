//! Directories that a real Longhorn engine made.

#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

mod common;

use common::{Fixture, mib_sums, pattern, read_all, sha256};
use shorthorn_store::{OpenOptions, Store};

fn open(fixture: &Fixture) -> Store {
    Store::open(fixture.path(), OpenOptions::default()).unwrap()
}

#[test]
fn the_head_reads_as_longhorn_read_it() {
    for name in ["lhsimple", "lhrich"] {
        let fixture = Fixture::unpack_in(tempfile::tempdir().unwrap(), name);
        let mut store = open(&fixture);
        assert_eq!(store.size_bytes(), fixture.expected.size);
        let volume = read_all(&mut store);
        assert_eq!(mib_sums(&volume), fixture.expected.head_mib_sha256, "{name}");
        assert_eq!(sha256(&volume), fixture.expected.head_sha256, "{name}");
    }
}

#[test]
fn snapshots_are_listed_with_their_parents() {
    for name in ["lhsimple", "lhrich"] {
        let fixture = Fixture::unpack(name);
        let store = open(&fixture);
        let snapshots = store.snapshots();
        assert_eq!(snapshots.len(), fixture.expected.snapshots.len());
        for snapshot in snapshots {
            let expected = &fixture.expected.snapshots[&snapshot.name];
            assert_eq!(snapshot.parent.as_deref().unwrap_or(""), expected.parent);
            assert!(snapshot.in_chain && snapshot.user_created && !snapshot.removed);
        }
    }
}

#[test]
fn reading_and_reverting_shows_every_snapshot() {
    for name in ["lhsimple", "lhrich"] {
        let fixture = Fixture::unpack(name);
        let mut store = open(&fixture);
        for (snapshot, expected) in &fixture.expected.snapshots {
            store.revert(snapshot, "2026-01-01T00:00:00Z").unwrap();
            assert_eq!(sha256(&read_all(&mut store)), expected.sha256, "{name} {snapshot}");
        }
    }
}

#[test]
fn writes_change_the_head_and_no_snapshot() {
    let fixture = Fixture::unpack("lhrich");
    let mut store = open(&fixture);
    let mut model = read_all(&mut store);
    for (round, offset, length) in
        [(1, 512, 512), (2, 4096 * 9 + 1024, 9 * 512), (3, 5 << 20, 1 << 20), (4, 0, 4096)]
    {
        let data = pattern(round, length);
        store.write_at(&data, offset as u64, false).unwrap();
        model[offset..offset + length].copy_from_slice(&data);
    }
    store.flush().unwrap();
    assert!(read_all(&mut store) == model);
    store.close().unwrap();
    let mut store = open(&fixture);
    assert!(read_all(&mut store) == model, "after closing and opening again");
    for (snapshot, expected) in &fixture.expected.snapshots {
        store.revert(snapshot, "2026-01-01T00:00:00Z").unwrap();
        assert_eq!(sha256(&read_all(&mut store)), expected.sha256, "{snapshot}");
    }
}

#[test]
fn closing_leaves_the_documents_as_longhorn_writes_them() {
    let fixture = Fixture::unpack("lhsimple");
    let before = fixture.documents();
    let mut store = open(&fixture);
    assert!(fixture.documents()["volume.meta"].contains("\"Dirty\":true"));
    store.write_at(&pattern(1, 4096), 0, true).unwrap();
    store.close().unwrap();
    assert_eq!(fixture.documents(), before);
}

#[test]
fn folding_a_snapshot_keeps_all_others() {
    let sums = |store: &mut Store, fixture: &Fixture| -> Vec<u32> {
        let mut sum = |name: &String| {
            store.revert(name, "2026-01-01T00:00:00Z").unwrap();
            crc32c::crc32c(&read_all(store))
        };
        fixture.expected.snapshots.keys().map(&mut sum).collect()
    };
    let before = sums(&mut open(&Fixture::unpack("lhrich")), &Fixture::unpack("lhrich"));
    // The oldest, one in the middle, and the one under the head.
    for folded in ["s1", "s6", "s11"] {
        let mut fixture = Fixture::unpack("lhrich");
        let mut store = open(&fixture);
        store.remove(folded).unwrap();
        store.fold(folded).unwrap();
        assert_eq!(sha256(&read_all(&mut store)), fixture.expected.head_sha256, "{folded}");
        store.close().unwrap();
        let mut store = open(&fixture);
        assert_eq!(sha256(&read_all(&mut store)), fixture.expected.head_sha256, "{folded} after opening");
        let kept = fixture.expected.snapshots.keys().zip(&before).filter(|(name, _)| *name != folded);
        let kept: Vec<u32> = kept.map(|(_, sum)| *sum).collect();
        fixture.expected.snapshots.remove(folded);
        assert_eq!(store.snapshots().len(), fixture.expected.snapshots.len());
        assert_eq!(sums(&mut store, &fixture), kept, "{folded}");
    }
}
