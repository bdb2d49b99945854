//! Tests inspection and export: their output for people, and that nothing changes.
#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

mod common;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use common::{Fixture, scratch, sha256};
use shorthorn_regions::{SetKey, WriteIntentLog};
use shorthorn_store::{CreateOptions, ExportTarget, OpenOptions, Severity, Store, export, inspect};
use shorthorn_types::{RegionSet, Regions, ReplicaId};

/// Returns all properties of all files that a change would show in.
fn traces(path: &Path) -> BTreeMap<String, (u64, i64, i64, u64)> {
    let trace = |path: &Path| {
        let metadata = std::fs::metadata(path).unwrap();
        (metadata.ino(), metadata.ctime(), metadata.ctime_nsec(), metadata.size())
    };
    let mut traces = BTreeMap::from([(".".to_owned(), trace(path))]);
    for entry in std::fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        traces.insert(entry.file_name().into_string().unwrap(), trace(&entry.path()));
    }
    traces
}

#[test]
fn exports_are_right_sparse_and_leave_no_trace() {
    for name in ["lhsimple", "lhrich"] {
        let fixture = Fixture::unpack(name);
        let before = traces(fixture.path());
        let target = fixture.path().parent().unwrap().join("volume.raw");
        let expected = &fixture.expected;
        let snapshots =
            expected.snapshots.iter().map(|(name, snapshot)| (Some(name.as_str()), &snapshot.sha256));
        for (snapshot, sum) in snapshots.chain([(None, &expected.head_sha256)]) {
            let mut last = (0, 0);
            let exported =
                export(fixture.path(), snapshot, ExportTarget::File(target.clone()), |done, all| {
                    last = (done, all)
                });
            assert_eq!(last, (expected.size, expected.size));
            let exported = exported.unwrap();
            assert_eq!(exported.size_bytes, expected.size);
            assert!(!exported.was_dirty);
            assert_eq!(sha256(&std::fs::read(&target).unwrap()), *sum, "{name} {snapshot:?}");
            assert!(std::fs::metadata(&target).unwrap().blocks() * 512 <= exported.data_bytes + (64 << 10));
        }
        assert!(inspect(fixture.path()).unwrap().usable);
        assert_eq!(traces(fixture.path()), before, "{name}");
    }
}

#[test]
fn a_stream_gets_every_byte() {
    let fixture = Fixture::unpack("lhsimple");
    let target = fixture.path().parent().unwrap().join("stream");
    let stream = std::fs::File::create(&target).unwrap();
    export(fixture.path(), Some("s1"), ExportTarget::Stream(Box::new(stream)), |_, _| {}).unwrap();
    assert_eq!(sha256(&std::fs::read(&target).unwrap()), fixture.expected.snapshots["s1"].sha256);
}

#[test]
fn invalid_exports_are_refused() {
    let fixture = Fixture::unpack("lhsimple");
    let to = |path: &Path, snapshot: Option<&str>| {
        export(fixture.path(), snapshot, ExportTarget::File(path.to_owned()), |_, _| {})
            .unwrap_err()
            .to_string()
    };
    let inside = fixture.path().join("volume-snap-s1.img");
    assert!(to(&inside, None).contains("lies in the replica's own directory"));
    let outside = fixture.path().parent().unwrap().join("x");
    assert!(to(&outside, Some("nope")).contains("no snapshot 'nope'"));
    assert!(to(Path::new("/nonexistent/x"), None).contains("cannot create"));
    let _store = Store::open(fixture.path(), OpenOptions::default()).unwrap();
    assert!(to(&outside, None).contains("in use by process"));
}

#[test]
fn an_inspection_shows_volume_layers_and_state() {
    let fixture = Fixture::unpack("lhsimple");
    let inspection = inspect(fixture.path()).unwrap();
    assert!(inspection.usable && inspection.problems.is_empty());
    let text = inspection.to_string();
    let text = text.replace(fixture.path().to_str().unwrap(), "DIR");
    // Allocated sizes depend on the file system.
    let lines: Vec<String> = text
        .lines()
        .map(|line| {
            line.split("  ").filter(|cell| !cell.is_empty()).map(str::trim).collect::<Vec<_>>().join("|")
        })
        .collect();
    assert_eq!(lines[0], "DIR");
    assert_eq!(lines[1], "volume|64 MiB (67108864 bytes), closed cleanly");
    assert_eq!(lines[2], "head|volume-head-002.img");
    assert_eq!(lines[3], "ours|nothing: never opened by Shorthorn");
    assert_eq!(lines[5], "LAYER|KIND|SIZE|ALLOCATED|CREATED|PARENT|LABELS");
    assert!(lines[6].starts_with("volume-head-002.img|head|64 MiB|"), "{}", lines[6]);
    assert!(
        lines[7].starts_with("s2|user|64 MiB|") && lines[7].ends_with("|2026-11-20T23:36:34Z|s1"),
        "{}",
        lines[7]
    );
    assert!(lines[8].ends_with("|-"), "{}", lines[8]);
    let json = serde_json::to_value(&inspection).unwrap();
    assert_eq!(json["volume"]["size_bytes"], 67_108_864);
    assert_eq!(json["layers"][1]["snapshot"], "s2");
    assert_eq!(json["layers"][1]["parent"], "volume-snap-s1.img");
    assert_eq!(json["own_state"]["status"], "none");
}

#[test]
fn an_inspection_distinguishes_states() {
    let temp = scratch();
    let path = temp.path().join("replica");
    let mut store =
        Store::create(&path, CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() }).unwrap();
    let labels = BTreeMap::from([("who".to_owned(), "me".to_owned())]);
    store.snapshot("kept", true, labels, "2026-01-01T00:00:00Z").unwrap();
    store.snapshot("going", false, BTreeMap::new(), "2026-01-02T00:00:00Z").unwrap();
    store.remove("going").unwrap();
    store.revert("kept", "2026-01-03T00:00:00Z").unwrap();
    store.save_state(b"123").unwrap();
    let text = inspect(&path).unwrap().to_string();
    let in_use = format!("in use by process {}", std::process::id());
    for word in [&in_use, "3 bytes of state, current", "system, removed, side", "who=me"] {
        assert!(text.contains(word), "no '{word}' in\n{text}");
    }
    drop(store);
    let inspection = inspect(&path).unwrap();
    assert!(inspection.to_string().contains("note: the replica was not closed cleanly"), "{inspection}");
    assert_eq!(inspection.problems[0].severity, Severity::Note);
    std::fs::write(path.join("volume-snap-kept.img.meta"), "{").unwrap();
    let inspection = inspect(&path).unwrap();
    assert!(!inspection.usable && inspection.layers.len() == 3);
    assert!(inspection.to_string().contains("error: volume-snap-kept.img.meta is damaged"), "{inspection}");
}

#[test]
fn a_restart_of_the_host_under_an_open_replica_shows() {
    let dir = scratch();
    let path = dir.path().join("replica");
    let options = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
    let mut store = Store::create(&path, options).unwrap();
    store.write_at(&[1; 4096], 0, false).unwrap();
    drop(store); // as if its process had been killed
    assert!(!inspect(&path).unwrap().own_state.lost_cache, "the page cache is still there");
    let boot = path.join("shorthorn.boot");
    let mut found: serde_json::Value = serde_json::from_slice(&std::fs::read(&boot).unwrap()).unwrap();
    found["boot_id"] = "another".into();
    // The old check would not match. A document without a check is accepted.
    found.as_object_mut().unwrap().remove("ShorthornCheck");
    std::fs::write(&boot, found.to_string()).unwrap();
    let before = traces(&path);
    let inspection = inspect(&path).unwrap();
    assert!(inspection.own_state.lost_cache && inspection.usable);
    assert!(inspection.to_string().contains("the host was restarted"), "{inspection}");
    assert_eq!(serde_json::to_value(&inspection).unwrap()["own_state"]["lost_cache"], true);
    assert_eq!(traces(&path), before);
    // If everything written had been flushed on all replicas, nothing can be lost.
    let regions = Regions::of(1 << 20);
    let store = Store::open(&path, OpenOptions::default()).unwrap();
    let epoch = store.info().epoch;
    let set = |runs: &[u32]| {
        let mut set = RegionSet::empty(regions.count());
        for region in runs {
            set.insert(*region);
        }
        WriteIntentLog::new(regions, epoch, &set).file(SetKey::Intent).unwrap()
    };
    store.region_files().make(SetKey::Intent, &set(&[])).unwrap();
    assert!(!inspect(&path).unwrap().own_state.lost_cache);
    store.region_files().make(SetKey::Intent, &set(&[1])).unwrap();
    assert!(inspect(&path).unwrap().own_state.lost_cache, "beside the process that has it open too");
    store.region_files().make(SetKey::OutOfSync(ReplicaId::from_random(1)), &set(&[1])).unwrap();
    store.region_files().remove_all().unwrap();
    assert_eq!(store.region_files().out_of_sync().unwrap(), []);
    assert_eq!(store.region_files().read(SetKey::Intent).unwrap(), None);
}
