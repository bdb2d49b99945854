//! A directory becomes a copy of another one, however often that is interrupted.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

mod common;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Fixture, scratch};
use shorthorn_chain::DiskMeta;
use shorthorn_regions::SetKey;
use shorthorn_store::{
    ByteRange, CreateOptions, Fault, FaultHook, OpenOptions, Provenance, Store, StoreError,
};
use shorthorn_types::{RegionSet, Regions, ReplicaId};

const SIZE: u64 = 4 << 20;
const NOW: &str = "2026-11-22T10:00:00Z";

/// Returns a chain of two snapshots and a head, with holes and overlaps. The volume has grown after the first
/// one.
fn source(path: &Path) -> Store {
    let mut store =
        Store::create(path, CreateOptions { size_bytes: SIZE / 2, ..CreateOptions::default() }).unwrap();
    store.write_at(&[1; 40960], 8192, false).unwrap();
    store.snapshot("first", true, BTreeMap::from([("a".to_owned(), "b".to_owned())]), NOW).unwrap();
    store.expand(SIZE).unwrap();
    store.write_at(&[2; 8192], 4096, false).unwrap();
    store.write_at(&[0; 4096], 16384, false).unwrap();
    store.write_at(&[3; 512], SIZE - 512, false).unwrap();
    store.snapshot("second", false, BTreeMap::new(), NOW).unwrap();
    store.write_at(&[4; 4096], 0, false).unwrap();
    store
}

fn target(path: &Path) -> Store {
    let mut store =
        Store::create(path, CreateOptions { size_bytes: SIZE, ..CreateOptions::default() }).unwrap();
    store.write_at(&[9; 8192], 12288, false).unwrap();
    store.snapshot("old", true, BTreeMap::new(), NOW).unwrap();
    store.write_at(&[9; 8192], 65536, false).unwrap();
    store
}

fn open(path: &Path, fault: Option<FaultHook>) -> Result<Store, StoreError> {
    Store::open(path, OpenOptions { accept_rebuilding: true, fault, ..OpenOptions::default() })
}

/// Copies like the rebuild task of an engine.
fn copy(source: &Store, target: &mut Store, count: &AtomicUsize) -> Result<(), StoreError> {
    let layers = source.chain().copy_layers()?;
    let done = target.begin_copy(layers.clone())?;
    for (layer, is_done) in done.iter().enumerate().take(layers.len() - 1) {
        if *is_done {
            assert!(target.copy_target(layer).is_none());
            continue;
        }
        count.fetch_add(1, Ordering::Relaxed);
        let (mut from, mut extents) = (0, Vec::new());
        loop {
            let (page, next) = source.chain().layer_extents(layer, from, 2)?;
            assert!(page.len() <= 2);
            extents.extend(page);
            let Some(next) = next else { break };
            from = next;
        }
        copy_layer(source, target, layer, &extents);
        target.copy_done(layer)?;
    }
    target.end_copy()
}

fn copy_layer(source: &Store, target: &Store, layer: usize, extents: &[ByteRange]) {
    let file = |store: &Store, index| std::fs::File::from(store.fd(index).try_clone_to_owned().unwrap());
    let from = file(source, source.chain().layer_file(layer).unwrap());
    let to = file(target, target.copy_target(layer).unwrap());
    for extent in extents {
        assert!(extent.offset().is_multiple_of(4096) && extent.length().is_multiple_of(4096));
        let mut at = extent.offset();
        while at < extent.end() {
            let mut block = shorthorn_store::AlignedBuffer::new(4096);
            from.read_exact_at(block.as_mut_slice(), at).unwrap();
            to.write_all_at(block.as_slice(), at).unwrap();
            at += 4096;
        }
    }
}

/// Returns the content and the documents of all snapshots.
fn snapshots(path: &Path) -> BTreeMap<String, (Vec<u8>, Vec<u8>)> {
    let names =
        std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let images = names.filter(|name| name.starts_with("volume-snap") && name.ends_with(".img"));
    let read = |name: &str| std::fs::read(path.join(name)).unwrap();
    images.map(|name| (name.clone(), (read(&name), read(&format!("{name}.meta"))))).collect()
}

/// A replica that is copied to has left its view. To Longhorn both are the same; to us they are not.
#[test]
fn that_a_copy_has_ended_does_not_make_the_replica_a_member() {
    let base = scratch();
    let (from, to) = (base.path().join("from"), base.path().join("to"));
    let source = source(&from);
    let mut target = target(&to);
    target.set_left(true).unwrap();
    target.begin_copy(source.chain().copy_layers().unwrap()).unwrap();
    let record = std::fs::read(to.join("shorthorn.copy")).unwrap();
    assert!(target.info().rebuilding && target.info().has_left);
    copy(&source, &mut target, &AtomicUsize::new(0)).unwrap();
    assert!(!target.info().rebuilding && target.info().has_left);
    let says_rebuilding = || {
        let volume = std::fs::read_to_string(to.join("volume.meta")).unwrap();
        volume.contains("\"Rebuilding\":true")
    };
    assert!(says_rebuilding());
    // As if the process had ended before it removed the record: the mark does not make that count again.
    drop(target);
    std::fs::write(to.join("shorthorn.copy"), record).unwrap();
    let mut target = Store::open(&to, OpenOptions::default()).unwrap();
    assert!(!to.join("shorthorn.copy").exists() && target.copy_target(0).is_none());
    target.set_left(false).unwrap();
    assert!(!says_rebuilding());
    target.close().unwrap();
}

#[test]
fn a_copy_has_the_same_snapshots_and_an_empty_head() {
    let base = scratch();
    let (from, to) = (base.path().join("from"), base.path().join("to"));
    let source = source(&from);
    let mut target = target(&to);
    copy(&source, &mut target, &AtomicUsize::new(0)).unwrap();
    assert!(!target.info().rebuilding);
    assert!(snapshots(&from) == snapshots(&to));
    let holes = target.chain().layer_extents(2, 0, 10).unwrap();
    assert_eq!(holes, (vec![], None), "the head is empty");
    // The new write and the snapshots' data combine.
    target.write_at(&[4; 512], 0, false).unwrap();
    let mut read = vec![0; 12288];
    target.read_at(&mut read, 0).unwrap();
    assert_eq!((read[0], read[512], read[4096], read[8191]), (4, 0, 2, 2));
    target.close().unwrap();
    let target = Store::open(&to, OpenOptions::default()).unwrap();
    assert_eq!(target.info().provenance, Provenance::Ours);
    assert!(!to.join("shorthorn.copy").exists() && !to.join("volume-snap-old.img").exists());
}

#[test]
fn an_interrupted_copy_continues_after_any_step() {
    let base = scratch();
    let from = base.path().join("from");
    let source = source(&from);
    let expected = snapshots(&from);
    for steps in 0.. {
        let to = base.path().join(format!("to-{steps}"));
        target(&to).close().unwrap();
        let (left, copied) = (Arc::new(AtomicUsize::new(steps)), AtomicUsize::new(0));
        let hook = {
            let left = Arc::clone(&left);
            FaultHook::new(move |_| {
                let before =
                    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
                if before.is_err() { Fault::Die } else { Fault::None }
            })
        };
        let whole = open(&to, Some(hook)).and_then(|mut target| copy(&source, &mut target, &copied));
        assert!(matches!(whole, Ok(()) | Err(StoreError::Stopped)), "{whole:?}");
        let mut target = open(&to, None).unwrap();
        copy(&source, &mut target, &copied).unwrap();
        assert!(snapshots(&from) == expected && snapshots(&to) == expected, "stopped after {steps} steps");
        assert_eq!(target.chain().layer_extents(2, 0, 10).unwrap(), (vec![], None));
        target.close().unwrap();
        if whole.is_ok() {
            assert!(steps > 20, "{steps}");
            return;
        }
    }
}

#[test]
fn whole_layers_are_not_copied_again_and_others_start_over() {
    let base = scratch();
    let to = base.path().join("to");
    let source = source(&base.path().join("from"));
    let mut copying = target(&to);
    let layers = source.chain().copy_layers().unwrap();
    copying.begin_copy(layers.clone()).unwrap();
    let (extents, _) = source.chain().layer_extents(0, 0, 100).unwrap();
    copy_layer(&source, &copying, 0, &extents);
    copying.copy_done(0).unwrap();
    assert!(copying.copy_done(0).is_err() && copying.copy_done(2).is_err());
    assert!(matches!(copying.end_copy(), Err(StoreError::CopyUnfinished(_))));
    copy_layer(&source, &copying, 1, &[ByteRange::new(0, 4096).unwrap()]);
    drop(copying);
    let refused = Store::open(&to, OpenOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("Rebuilding"), "{refused}");
    let mut again = open(&to, None).unwrap();
    assert!(again.info().rebuilding);
    assert_eq!(again.begin_copy(layers.clone()).unwrap(), [true, false, false]);
    assert_eq!(again.chain().layer_extents(1, 0, 10).unwrap().0, [], "a part of a layer is worth nothing");
    // Of other snapshots nothing is kept.
    let mut others = layers;
    let mut meta = DiskMeta::parse("of the first", &others[0].meta).unwrap();
    meta.created = "2027-01-01T00:00:00Z".to_owned();
    others[0].meta = meta.to_bytes();
    assert_eq!(again.begin_copy(others).unwrap(), [false; 3]);
}

#[test]
fn a_salvaged_part_of_a_copy_does_not_count_as_whole_elsewhere() {
    let base = scratch();
    let (whole, salvaged) = (base.path().join("whole"), base.path().join("salvaged"));
    let source = source(&base.path().join("from"));
    let layers = source.chain().copy_layers().unwrap();
    let begin = |path: &Path, done: usize| {
        let mut copying = target(path);
        copying.begin_copy(layers.clone()).unwrap();
        for layer in 0..done {
            let (extents, _) = source.chain().layer_extents(layer, 0, 100).unwrap();
            copy_layer(&source, &copying, layer, &extents);
            copying.copy_done(layer).unwrap();
        }
        copying
    };
    let mut whole = begin(&whole, 2);
    assert_eq!(whole.begin_copy(layers.clone()).unwrap(), [true, true, false]);
    begin(&salvaged, 1).close().unwrap();
    // Whichever step fails, it does not count as complete without the label.
    let is_labelled = || {
        let meta = std::fs::read_to_string(salvaged.join("volume-snap-second.img.meta")).unwrap();
        meta.contains("shorthorn-salvaged")
    };
    let mut failures = 0;
    loop {
        let left = AtomicUsize::new(failures);
        let fails = move |_: &str| match left.fetch_sub(1, Ordering::Relaxed) {
            0 => Fault::Fail(5),
            _ => Fault::None,
        };
        let failing = open(&salvaged, Some(FaultHook::new(fails)));
        let accepted = failing.and_then(|mut failing| failing.accept_unfinished_copy("7-a"));
        let chosen = open(&salvaged, None).unwrap();
        assert!(chosen.info().rebuilding || is_labelled(), "failure {failures}");
        if accepted.is_ok() {
            break;
        }
        failures += 1;
    }
    assert!(failures > 3, "{failures}");
    let mut chosen = open(&salvaged, None).unwrap();
    chosen.accept_unfinished_copy("8-a").unwrap();
    assert!(!chosen.info().rebuilding && !salvaged.join("shorthorn.copy").exists());
    chosen.close().unwrap();
    let chosen = Store::open(&salvaged, OpenOptions::default()).unwrap();
    let theirs = chosen.chain().copy_layers().unwrap();
    assert_eq!(theirs[0], layers[0], "a complete snapshot is that of the others");
    let meta = DiskMeta::parse("of the second", &theirs[1].meta).unwrap();
    assert_eq!(meta.labels.unwrap()["shorthorn-salvaged"], "7-a", "the first salvage counts");
    assert_eq!(whole.begin_copy(theirs).unwrap(), [false; 3]);
}

/// Programs that did not check the sizes of layers before they stored them have left such records.
#[test]
fn a_stored_copy_that_is_impossible_starts_over() {
    for is_emptied in [false, true] {
        let base = scratch();
        let (from, to) = (base.path().join("from"), base.path().join("to"));
        let source = source(&from);
        let mut target = target(&to);
        target.begin_copy(source.chain().copy_layers().unwrap()).unwrap();
        drop(target);
        let file = to.join("shorthorn.copy");
        let mut record: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        record.as_object_mut().unwrap().remove("ShorthornCheck").unwrap();
        record["layers"][0]["size_bytes"] = (1u64 << 62).into();
        record["prepared"] = false.into();
        std::fs::write(&file, record.to_string()).unwrap();
        if is_emptied {
            std::fs::remove_file(to.join("volume-snap-first.img")).unwrap();
        }
        // It is interrupted after each of its steps.
        let mut steps = 0;
        let mut target = loop {
            let left = AtomicUsize::new(steps);
            let dies = move |_: &str| match left.fetch_sub(1, Ordering::Relaxed) {
                0 => Fault::Die,
                _ => Fault::None,
            };
            match open(&to, Some(FaultHook::new(dies))).map(drop) {
                Ok(()) => break open(&to, None).unwrap(),
                Err(error) => assert!(matches!(error, StoreError::Stopped), "{error}"),
            }
            steps += 1;
        };
        assert!(target.info().rebuilding && !file.exists() && (!is_emptied || steps > 5), "{steps}");
        assert_eq!(target.layers().len(), if is_emptied { 1 } else { 3 });
        let error = target.end_copy().unwrap_err();
        assert!(matches!(error, StoreError::CopyUnfinished(_)), "{error}");
        let copied = AtomicUsize::new(0);
        copy(&source, &mut target, &copied).unwrap();
        assert_eq!(copied.into_inner(), 2, "no layer counted as whole");
        target.close().unwrap();
        assert!(snapshots(&from) == snapshots(&to));
    }
}

#[test]
fn layers_of_a_fixture_are_copied() {
    let fixture = Fixture::unpack("lhrich");
    let source = Store::open(fixture.path(), OpenOptions::default()).unwrap();
    let base = scratch();
    let to = base.path().join("to");
    let options = CreateOptions { size_bytes: source.size_bytes(), ..CreateOptions::default() };
    let mut target = Store::create(&to, options).unwrap();
    copy(&source, &mut target, &AtomicUsize::new(0)).unwrap();
    assert!(!snapshots(&to).is_empty());
    for (name, expected) in snapshots(&to) {
        assert!(snapshots(fixture.path())[&name] == expected, "{name}");
    }
}

#[test]
fn files_of_regions_are_whole_and_allocated() {
    use std::os::unix::fs::MetadataExt;
    let base = scratch();
    let path = base.path().join("replica");
    let store = target(&path);
    let out_of_sync = SetKey::OutOfSync(ReplicaId::from_random(5));
    assert_eq!(store.region_files().read(SetKey::Intent).unwrap(), None);
    store.region_files().make(SetKey::Intent, &[7; 8192]).unwrap();
    let first = store.region_files().make(out_of_sync, &[8; 4096]).unwrap().inode();
    assert_ne!(store.region_files().make(out_of_sync, &[9; 4096]).unwrap().inode(), first);
    assert_eq!(store.region_files().out_of_sync().unwrap(), [ReplicaId::from_random(5)]);
    assert_eq!(store.region_files().read(out_of_sync).unwrap(), Some(vec![9; 4096]));
    let file = std::fs::metadata(path.join("shorthorn.intent")).unwrap();
    assert_eq!((file.len(), file.blocks()), (8192, 16));
    store.region_files().remove(out_of_sync).unwrap();
    assert!(store.region_files().out_of_sync().unwrap().is_empty());
}

#[test]
fn allocated_regions_are_those_with_data_in_any_layer() {
    let base = scratch();
    let store = source(&base.path().join("from"));
    let regions = Regions::of(SIZE);
    let none = RegionSet::empty(regions.count());
    assert_eq!(store.chain().allocated(regions, 0, &none).unwrap(), (vec![(0, 1), (63, 1)], None));
    assert_eq!(store.chain().allocated(regions, 1, &none).unwrap(), (vec![(63, 1)], None));
    let mut others = none.clone();
    for region in [0, 1, 9, 62] {
        others.insert(region);
    }
    let found = store.chain().allocated(regions, 0, &others).unwrap();
    assert_eq!(found, (vec![(0, 2), (9, 1), (62, 2)], None), "and where something was");
    // Many runs come in pages.
    let large = Store::create(
        base.path().join("large"),
        CreateOptions { size_bytes: 1 << 30, ..CreateOptions::default() },
    );
    let mut large = large.unwrap();
    for n in (0..4000).step_by(2) {
        large.write_at(&[1; 4096], n * (64 << 10) + 4096, false).unwrap();
    }
    let (mut from, mut found, mut pages) = (0, Vec::new(), 0);
    loop {
        let (runs, next) = large
            .chain()
            .allocated(Regions::of(1 << 30), from, &RegionSet::empty(Regions::of(1 << 30).count()))
            .unwrap();
        found.extend(runs);
        pages += 1;
        let Some(next) = next else { break };
        from = next;
    }
    assert_eq!(found, (0..4000).step_by(2).map(|n| (n, 1)).collect::<Vec<_>>());
    assert_eq!(pages, 3);
}

/// A terabyte with little data in it takes no longer than a small volume.
#[test]
fn holes_cost_nothing() {
    let base = scratch();
    let size_bytes = 1 << 40;
    let options = CreateOptions { size_bytes, ..CreateOptions::default() };
    let mut store = Store::create(base.path().join("huge"), options).unwrap();
    store.write_at(&[1; 4096], 5 << 30, false).unwrap();
    store.write_at(&[1; 4096], size_bytes - 4096, false).unwrap();
    let begun = std::time::Instant::now();
    let found = store
        .chain()
        .allocated(Regions::of(size_bytes), 0, &RegionSet::empty(Regions::of(size_bytes).count()))
        .unwrap();
    println!("{:?}", begun.elapsed());
    assert_eq!(found, (vec![(5 << 10, 1), ((1 << 20) - 1, 1)], None));
}
