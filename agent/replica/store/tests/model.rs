//! The store against a plain array of bytes, over random requests and operations.
#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

mod common;

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use common::{pattern, read_all, scratch};
use proptest::prelude::*;
use shorthorn_store::{
    CreateOptions, ExportTarget, OpenOptions, Severity, Store, StoreError, export, inspect,
};

const TIME: &str = "2026-01-01T00:00:00Z";
const START_BYTES: usize = 256 << 10;

#[derive(Clone, Debug)]
enum FileStep {
    Write { sectors: Range<usize>, fua: bool },
    Discard { sectors: Range<usize> },
    WriteZeroes { sectors: Range<usize>, fua: bool },
    Snapshot,
    Remove(usize),
    Fold(usize),
    FoldBesideWrites(usize, Range<usize>),
    Revert(usize),
    Expand(usize),
    Reopen { clean: bool },
}

fn sectors() -> impl Strategy<Value = Range<usize>> {
    let length = prop_oneof![3 => 1..24usize, 1 => 1..200usize, 1 => Just(8usize)];
    (0..800usize, length, any::<bool>()).prop_map(|(start, length, align)| {
        let start = if align { start / 8 * 8 } else { start };
        start..start + length
    })
}

fn step() -> impl Strategy<Value = FileStep> {
    let index = || 0..1000usize;
    prop_oneof![
        10 => (sectors(), any::<bool>()).prop_map(|(sectors, fua)| FileStep::Write { sectors, fua }),
        4 => sectors().prop_map(|sectors| FileStep::Discard { sectors }),
        4 => (sectors(), any::<bool>()).prop_map(|(sectors, fua)| FileStep::WriteZeroes { sectors, fua }),
        4 => Just(FileStep::Snapshot),
        2 => index().prop_map(FileStep::Remove),
        2 => index().prop_map(FileStep::Fold),
        1 => (index(), sectors()).prop_map(|(index, sectors)| FileStep::FoldBesideWrites(index, sectors)),
        1 => index().prop_map(FileStep::Revert),
        2 => (1..20usize).prop_map(FileStep::Expand),
        2 => any::<bool>().prop_map(|clean| FileStep::Reopen { clean }),
    ]
}

/// The expected content of the volume and its snapshots.
struct Model {
    volume: Vec<u8>,
    snapshots: BTreeMap<String, Snapshot>,
    writes: u64,
    names: u64,
}

struct Snapshot {
    content: Vec<u8>,
    removed: bool,
}

struct Run {
    path: PathBuf,
    store: Option<Store>,
    model: Model,
}

impl Run {
    fn new(directory: &Path) -> Run {
        let path = directory.join("replica");
        let options = CreateOptions { size_bytes: START_BYTES as u64, ..CreateOptions::default() };
        let store = Store::create(&path, options).unwrap();
        let volume = vec![0; START_BYTES];
        Run {
            path,
            store: Some(store),
            model: Model { volume, snapshots: BTreeMap::new(), writes: 0, names: 0 },
        }
    }

    fn store(&mut self) -> &mut Store {
        self.store.as_mut().unwrap()
    }

    fn bytes(&self, sectors: &Range<usize>) -> Range<usize> {
        let end = (sectors.end * 512).min(self.model.volume.len());
        (sectors.start * 512).min(end - 512)..end
    }

    fn perform(&mut self, step: FileStep) {
        match step {
            FileStep::Write { sectors, fua } => self.write(&sectors, fua),
            FileStep::Discard { sectors } => self.discard(&sectors),
            FileStep::WriteZeroes { sectors, fua } => {
                let bytes = self.bytes(&sectors);
                self.store().write_zeroes(bytes.start as u64, bytes.len() as u64, fua).unwrap();
                self.model.volume[bytes].fill(0);
            }
            FileStep::Snapshot => self.snapshot(),
            FileStep::Remove(index) => {
                let Some(name) = self.pick(index, |_| true) else { return };
                self.store().remove(&name).unwrap();
                self.model.snapshots.get_mut(&name).unwrap().removed = true;
            }
            FileStep::Fold(index) => self.fold(index),
            FileStep::FoldBesideWrites(index, sectors) => self.fold_beside_writes(index, &sectors),
            FileStep::Revert(index) => {
                let Some(name) = self.pick(index, |snapshot| !snapshot.removed) else { return };
                self.store().revert(&name, TIME).unwrap();
                let size = self.model.volume.len();
                self.model.volume.clone_from(&self.model.snapshots[&name].content);
                self.model.volume.resize(size, 0);
            }
            FileStep::Expand(blocks) => {
                let size = self.model.volume.len() + blocks * 4096;
                self.store().expand(size as u64).unwrap();
                self.model.volume.resize(size, 0);
            }
            FileStep::Reopen { clean } => {
                let store = self.store.take().unwrap();
                if clean {
                    store.close().unwrap()
                } else {
                    drop(store)
                }
                self.store = Some(Store::open(&self.path, OpenOptions::default()).unwrap());
            }
        }
    }

    fn write(&mut self, sectors: &Range<usize>, fua: bool) {
        self.model.writes += 1;
        let bytes = self.bytes(sectors);
        let data = pattern(self.model.writes, bytes.len());
        self.store().write_at(&data, bytes.start as u64, fua).unwrap();
        self.model.volume[bytes].copy_from_slice(&data);
    }

    /// Discards: every whole block reads as zeroes, and those only touched as before.
    fn discard(&mut self, sectors: &Range<usize>) {
        let bytes = self.bytes(sectors);
        self.store().discard(bytes.start as u64, bytes.len() as u64).unwrap();
        let (start, end) = (bytes.start.next_multiple_of(4096), bytes.end / 4096 * 4096);
        self.model.volume[start..end.max(start)].fill(0);
    }

    fn snapshot(&mut self) {
        self.model.names += 1;
        let name = format!("s{}", self.model.names);
        self.store().snapshot(&name, true, BTreeMap::new(), TIME).unwrap();
        let content = self.model.volume.clone();
        self.model.snapshots.insert(name, Snapshot { content, removed: false });
    }

    fn fold(&mut self, index: usize) {
        let Some(name) = self.pick(index, |snapshot| snapshot.removed) else { return };
        if self.has_several_children(&name) {
            assert!(self.store().fold(&name).unwrap_err().to_string().contains("children"));
        } else {
            self.store().fold(&name).unwrap();
            self.model.snapshots.remove(&name);
        }
    }

    /// Runs the copy and requests to the volume at the same time.
    fn fold_beside_writes(&mut self, index: usize, sectors: &Range<usize>) {
        let Some(name) = self.pick(index, |snapshot| snapshot.removed) else { return };
        let Ok(job) = self.store().begin_fold(&name) else { return };
        self.write(sectors, false);
        let done = job.run(|_| {}).unwrap();
        self.discard(sectors);
        let before = self.model.snapshots.len();
        self.snapshot();
        self.write(sectors, true);
        match self.store().finish_fold(done) {
            Ok(()) => {
                self.model.snapshots.remove(&name);
                assert_eq!(self.model.snapshots.len(), before);
            }
            Err(StoreError::FoldOutdated(_) | StoreError::Chain { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn has_several_children(&mut self, name: &str) -> bool {
        self.store().snapshots().iter().any(|snapshot| snapshot.name == name && snapshot.children.len() > 1)
    }

    fn pick(&self, index: usize, wanted: impl Fn(&Snapshot) -> bool) -> Option<String> {
        let names: Vec<_> = self.model.snapshots.iter().filter(|(_, snapshot)| wanted(snapshot)).collect();
        (!names.is_empty()).then(|| names[index % names.len()].0.clone())
    }

    fn check(&mut self) {
        let found = read_all(self.store());
        assert!(
            found == self.model.volume,
            "the volume differs at {:?}",
            difference(&found, &self.model.volume)
        );
        let usage = self.store().info().map;
        assert!(usage.used_bytes <= usage.limit_bytes, "{usage:?}");
    }

    /// Exports everything from the closed directory.
    fn finish(mut self) {
        self.store.take().unwrap().close().unwrap();
        assert!(exported(&self.path, None) == self.model.volume, "the exported volume differs");
        for (name, snapshot) in &self.model.snapshots {
            if snapshot.removed {
                assert!(export(&self.path, Some(name), sink().0, |_, _| {}).is_err());
            } else {
                assert!(exported(&self.path, Some(name)) == snapshot.content, "snapshot {name} differs");
            }
        }
        let inspection = inspect(&self.path).unwrap();
        assert!(inspection.usable && inspection.problems.is_empty(), "{inspection}");
        assert!(inspection.problems.iter().all(|problem| problem.severity != Severity::Error));
    }
}

fn difference(one: &[u8], other: &[u8]) -> Option<usize> {
    (0..one.len().max(other.len())).find(|&at| one.get(at) != other.get(at))
}

#[derive(Clone, Debug, Default)]
struct Bytes(Arc<Mutex<Vec<u8>>>);

impl Write for Bytes {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn sink() -> (ExportTarget, Bytes) {
    let bytes = Bytes::default();
    (ExportTarget::Stream(Box::new(bytes.clone())), bytes)
}

fn exported(path: &Path, snapshot: Option<&str>) -> Vec<u8> {
    let (target, bytes) = sink();
    export(path, snapshot, target, |done, all| assert!(done <= all)).unwrap();
    bytes.0.lock().unwrap().clone()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn the_store_is_an_array_of_bytes(steps in prop::collection::vec(step(), 1..50)) {
        let directory = scratch();
        let mut run = Run::new(directory.path());
        for step in steps {
            run.perform(step);
            run.check();
        }
        run.finish();
    }
}

/// Repeats the test on the disk of the temporary directory, with real direct I/O.
#[test]
fn a_disk_behaves_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let mut run = Run::new(directory.path());
    let write = |start: usize, end: usize| FileStep::Write { sectors: start..end, fua: false };
    let steps = [
        write(0, 64),
        FileStep::Snapshot,
        write(3, 17),
        FileStep::Discard { sectors: 0..64 },
        FileStep::WriteZeroes { sectors: 20..45, fua: true },
        FileStep::Snapshot,
        FileStep::Expand(3),
        write(500, 540),
        FileStep::Reopen { clean: false },
        FileStep::Remove(0),
        FileStep::Fold(0),
        write(0, 1),
        FileStep::Reopen { clean: true },
    ];
    for step in steps {
        run.perform(step);
        run.check();
    }
    run.finish();
}

/// The layers below are then shorter than the head, which is not a truncation.
#[test]
fn a_volume_that_was_expanded_and_reverted_opens() {
    for record_is_lost in [false, true] {
        let directory = scratch();
        let mut run = Run::new(directory.path());
        let write = FileStep::Write { sectors: 0..64, fua: false };
        for step in [
            FileStep::Snapshot,
            write.clone(),
            FileStep::Expand(1),
            write.clone(),
            FileStep::Expand(2),
            write,
        ] {
            run.perform(step);
        }
        run.store().revert("s1", TIME).unwrap();
        run.store.take().unwrap().close().unwrap();
        if record_is_lost {
            std::fs::remove_file(run.path.join("shorthorn.guard")).unwrap();
        }
        let mut store = Store::open(&run.path, OpenOptions::default()).unwrap();
        assert_eq!(store.size_bytes(), START_BYTES as u64 + 3 * 4096);
        assert!(read_all(&mut store).iter().all(|byte| *byte == 0));
        drop(store);
        // A truncated layer is still recognised.
        let layer =
            std::fs::OpenOptions::new().write(true).open(run.path.join("volume-snap-s1.img")).unwrap();
        layer.set_len(4096).unwrap();
        assert!(Store::open(&run.path, OpenOptions::default()).is_err());
    }
}
