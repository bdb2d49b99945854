//! Tests the state that Shorthorn keeps beside the volume, and the detection of other users of the directory.
#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use common::Fixture;
use shorthorn_store::{OpenOptions, Provenance, SavedState, SavedStatus, Store, StoreError, inspect};

fn open(path: &Path) -> Store {
    Store::open(path, OpenOptions::default()).unwrap()
}

/// Returns a fixture that was opened here, with state `hello`, and closed or left as after a crash.
fn with_state(clean: bool) -> Fixture {
    let fixture = Fixture::unpack("lhsimple");
    let mut store = open(fixture.path());
    assert!(matches!(store.info().provenance, Provenance::Foreign { .. }));
    assert_eq!(store.load_state().unwrap(), SavedState::None);
    store.save_state(b"hello").unwrap();
    assert_eq!(store.load_state().unwrap(), SavedState::Current(b"hello".to_vec()));
    if clean {
        store.close().unwrap();
    }
    fixture
}

/// Returns the status of the fixture's state, read by a reader first, because the store writes.
fn status(path: &Path) -> SavedState {
    let found = inspect(path).unwrap().own_state.status;
    let read_only = Store::open(path, OpenOptions { read_only: true, ..OpenOptions::default() }).unwrap();
    let seen = read_only.load_state().unwrap();
    drop(read_only);
    let state = open(path).load_state().unwrap();
    assert_eq!(seen, state);
    let expected = match state {
        SavedState::None => SavedStatus::None,
        SavedState::Current(_) => SavedStatus::Current,
        SavedState::Outdated(_) => SavedStatus::Outdated,
    };
    assert_eq!(found, expected);
    state
}

/// Acts like Longhorn, which rewrites `volume.meta` at each opening and closing.
fn as_longhorn(path: &Path) {
    for dirty in ["true", "false"] {
        let name = path.join("volume.meta");
        let text = std::fs::read_to_string(&name).unwrap();
        let (before, _) = text.split_once("\"Dirty\":").unwrap();
        let (_, after) = text.split_once(",\"Rebuilding\"").unwrap();
        std::fs::write(
            path.join("volume.meta.tmp"),
            format!("{before}\"Dirty\":{dirty},\"Rebuilding\"{after}"),
        )
        .unwrap();
        std::fs::rename(path.join("volume.meta.tmp"), name).unwrap();
    }
}

#[test]
fn state_survives_a_clean_close_and_a_crash() {
    for clean in [true, false] {
        let fixture = with_state(clean);
        for _ in 0..3 {
            assert_eq!(status(fixture.path()), SavedState::Current(b"hello".to_vec()), "clean: {clean}");
        }
    }
}

#[test]
fn longhorn_in_between_is_noticed() {
    for clean in [true, false] {
        let fixture = with_state(clean);
        as_longhorn(fixture.path());
        assert_eq!(status(fixture.path()), SavedState::Outdated(b"hello".to_vec()));
        // And it stays noticed, however often the directory is opened.
        let mut store = open(fixture.path());
        assert_eq!(store.load_state().unwrap(), SavedState::Outdated(b"hello".to_vec()));
        store.save_state(b"again").unwrap();
        store.close().unwrap();
        assert_eq!(status(fixture.path()), SavedState::Current(b"again".to_vec()));
    }
}

#[test]
fn a_changed_head_is_noticed_after_a_clean_close() {
    let fixture = with_state(true);
    let head = File::options().write(true).open(fixture.path().join("volume-head-002.img")).unwrap();
    head.write_all_at(&[1; 512], 0).unwrap();
    head.sync_all().unwrap();
    assert_eq!(status(fixture.path()), SavedState::Outdated(b"hello".to_vec()));
}

#[test]
fn a_lost_record_makes_the_state_outdated() {
    let fixture = with_state(true);
    std::fs::remove_file(fixture.path().join("shorthorn.guard")).unwrap();
    // The epochs start over, and the one that the state carries must not be taken for the current one.
    assert_eq!(status(fixture.path()), SavedState::Outdated(b"hello".to_vec()));
}

#[test]
fn a_missing_state_is_a_loss_only_after_the_first_save() {
    let fixture = Fixture::unpack("lhsimple");
    let path = fixture.path();
    let is_foreign = |store: &Store| store.info().provenance != Provenance::Ours;
    // Openings that are interrupted before a state is saved.
    for _ in 0..3 {
        assert!(is_foreign(&open(path)));
    }
    // A save that is interrupted before the record of it.
    let mut store = open(path);
    let in_the_way = path.join("shorthorn.guard.tmp");
    std::fs::create_dir(&in_the_way).unwrap();
    store.save_state(b"hello").unwrap_err();
    drop(store);
    std::fs::remove_dir(&in_the_way).unwrap();
    let store = open(path);
    assert!(!is_foreign(&store));
    assert_eq!(store.load_state().unwrap(), SavedState::Current(b"hello".to_vec()));
    drop(store);
    std::fs::remove_file(path.join("shorthorn.state")).unwrap();
    for _ in 0..2 {
        assert!(!is_foreign(&open(path)));
    }
}

#[test]
fn a_state_that_was_saved_in_the_same_session_is_missed() {
    let save: [fn(&mut Store); 2] = [
        |store| store.save_state(b"hello").unwrap(),
        |store| store.state_writer().unwrap().save(b"hello").unwrap(),
    ];
    for save in save {
        let fixture = Fixture::unpack("lhsimple");
        let mut store = open(fixture.path());
        save(&mut store);
        drop(store);
        std::fs::remove_file(fixture.path().join("shorthorn.state")).unwrap();
        assert_eq!(open(fixture.path()).info().provenance, Provenance::Ours);
    }
}

#[test]
fn operations_keep_the_state() {
    let fixture = with_state(true);
    let mut store = open(fixture.path());
    store.snapshot("s3", true, Default::default(), "2026-01-01T00:00:00Z").unwrap();
    store.revert("s1", "2026-01-01T00:00:00Z").unwrap();
    store.expand(65 << 20).unwrap();
    drop(store);
    assert_eq!(status(fixture.path()), SavedState::Current(b"hello".to_vec()));
}

#[test]
fn damage_is_refused() {
    type Damage = fn(&mut Vec<u8>);
    let damages: [(Damage, &str); 4] = [
        (|bytes| bytes.clear(), "first line is missing"),
        (|bytes| bytes[2] = b'x', "first line"),
        (|bytes| bytes.truncate(bytes.len() - 1), "4 bytes of 5"),
        (|bytes| *bytes.last_mut().unwrap() ^= 1, "checksum is wrong"),
    ];
    for (damage, word) in damages {
        let fixture = with_state(true);
        let name = fixture.path().join("shorthorn.state");
        let mut bytes = std::fs::read(&name).unwrap();
        damage(&mut bytes);
        std::fs::write(&name, bytes).unwrap();
        let error = open(fixture.path()).load_state().unwrap_err();
        assert!(matches!(error, StoreError::StateDamaged { .. }));
        assert!(error.to_string().contains(word), "{error}");
        assert_eq!(inspect(fixture.path()).unwrap().own_state.status, SavedStatus::Damaged);
    }
}

#[test]
fn another_thread_can_save() {
    let fixture = with_state(true);
    let mut store = open(fixture.path());
    let mut writer = store.state_writer().unwrap();
    std::thread::spawn(move || writer.save(b"from there").unwrap()).join().unwrap();
    assert_eq!(store.load_state().unwrap(), SavedState::Current(b"from there".to_vec()));
}
