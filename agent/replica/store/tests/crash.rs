//! Every operation, cut short after each of its steps.
#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{pattern, read_all, scratch};
use shorthorn_store::{
    CreateOptions, ExportTarget, Fault, FaultHook, OpenOptions, SavedState, Store, StoreError, export,
    inspect,
};

const TIME: &str = "2026-01-01T00:00:00Z";
const SIZE_BYTES: u64 = 96 << 10;

/// The visible state of a directory: the volume, and each snapshot with its content unless it is removed.
#[derive(Clone, Debug, PartialEq)]
struct View {
    volume: Vec<u8>,
    snapshots: BTreeMap<String, Option<Vec<u8>>>,
}

/// Makes a chain `a` ← `b` ← `c` ← head with a side branch on `a`; `b` is removed. All layers overlap.
fn prepare(path: &Path) {
    let options =
        CreateOptions { size_bytes: SIZE_BYTES, created: Some(TIME.to_owned()), ..CreateOptions::default() };
    let mut store = Store::create(path, options).unwrap();
    let write = |store: &mut Store, seed: u64, offset: u64, length: usize| {
        store.write_at(&pattern(seed, length), offset, false).unwrap();
    };
    let snapshot = |store: &mut Store, name: &str| store.snapshot(name, true, BTreeMap::new(), TIME).unwrap();
    write(&mut store, 1, 0, 40 << 10);
    snapshot(&mut store, "a");
    write(&mut store, 2, 8 << 10, 9 << 10);
    snapshot(&mut store, "side");
    store.revert("a", TIME).unwrap();
    write(&mut store, 3, 20 << 10, 30 << 10);
    snapshot(&mut store, "b");
    write(&mut store, 4, 4 << 10, 24 << 10);
    snapshot(&mut store, "c");
    write(&mut store, 5, 1536, 11 << 10);
    store.write_zeroes(44 << 10, 8 << 10, false).unwrap();
    store.remove("b").unwrap();
    store.save_state(b"state").unwrap();
    store.close().unwrap();
}

fn view(path: &Path) -> View {
    let image = path.with_extension("raw");
    let read = |snapshot: Option<&str>| {
        export(path, snapshot, ExportTarget::File(image.clone()), |_, _| {})
            .map(|_| std::fs::read(&image).unwrap())
    };
    let layers = inspect(path).unwrap().layers;
    let names = layers.iter().filter_map(|layer| Some((layer.snapshot.clone()?, layer.removed)));
    let snapshots = names.map(|(name, removed)| {
        let content = (!removed).then(|| read(Some(&name)).unwrap());
        (name, content)
    });
    View { snapshots: snapshots.collect(), volume: read(None).unwrap() }
}

/// Checks that the directory has only the files of the layers and of Shorthorn.
fn assert_tidy(path: &Path) {
    let inspection = inspect(path).unwrap();
    assert!(inspection.usable && inspection.problems.is_empty(), "{inspection}");
    let mut expected: BTreeSet<String> = [
        "volume.meta",
        "shorthorn.lock",
        "shorthorn.guard",
        "shorthorn.state",
        "shorthorn.reserve",
        "shorthorn.boot",
    ]
    .map(str::to_owned)
    .into();
    for layer in inspection.layers {
        expected.extend([layer.image.clone(), format!("{}.meta", layer.image)]);
    }
    let found: BTreeSet<String> = std::fs::read_dir(path)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(found, expected);
}

/// Returns a hook that does `fault` after `steps` steps, once.
fn after(steps: usize, fault: Fault) -> (FaultHook, Arc<AtomicUsize>) {
    let left = Arc::new(AtomicUsize::new(steps));
    let counter = Arc::clone(&left);
    let hook = FaultHook::new(move |_| {
        let before = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if before == Ok(1) { fault } else { Fault::None }
    });
    (hook, left)
}

fn open(path: &Path, fault: Option<FaultHook>) -> Result<Store, StoreError> {
    Store::open(path, OpenOptions { fault, ..OpenOptions::default() })
}

/// Runs opening, the operation, and closing.
fn session(path: &Path, fault: FaultHook, operation: &Operation) -> Result<(), StoreError> {
    let mut store = open(path, Some(fault))?;
    operation(&mut store)?;
    store.close()
}

type Operation = dyn Fn(&mut Store) -> Result<(), StoreError>;

struct Cases {
    directory: tempfile::TempDir,
    number: usize,
    old: View,
    new: View,
}

impl Cases {
    fn new(operation: &Operation) -> Cases {
        let directory = scratch();
        let path = directory.path().join("whole");
        prepare(&path);
        let old = view(&path);
        let (hook, _) = after(usize::MAX, Fault::None);
        session(&path, hook, operation).unwrap();
        let new = view(&path);
        assert_tidy(&path);
        Cases { directory, number: 0, old, new }
    }

    fn fresh(&mut self) -> PathBuf {
        self.number += 1;
        let path = self.directory.path().join(format!("case-{}", self.number));
        prepare(&path);
        path
    }

    /// Checks that the directory shows the old state or the new one; returns which.
    fn judge(&self, path: &Path, when: &str) -> bool {
        let found = view(path);
        assert!(
            found == self.old || found == self.new,
            "neither old nor new {when}: {:?}",
            inspect(path).unwrap()
        );
        found == self.new
    }

    /// Opens and closes it; then it must be tidy, and the operation must still work.
    fn finish(&self, path: &Path, operation: &Operation, when: &str) {
        let shown = self.judge(path, when);
        let store = open(path, None).unwrap();
        assert_eq!(store.load_state().unwrap(), SavedState::Current(b"state".to_vec()), "{when}");
        store.close().unwrap();
        assert_tidy(path);
        assert_eq!(self.judge(path, when), shown, "opening changed the data {when}");
        if !shown {
            let mut store = open(path, None).unwrap();
            operation(&mut store).unwrap();
            store.close().unwrap();
            assert!(self.judge(path, when), "the operation did nothing when repeated {when}");
        }
        assert_tidy(path);
        std::fs::remove_dir_all(path).unwrap();
    }
}

/// Kills the session after every step, and the repair after every step of it too.
fn killed_at_every_step(operation: &Operation) {
    let mut cases = Cases::new(operation);
    for steps in 1.. {
        let path = cases.fresh();
        let (hook, left) = after(steps, Fault::Die);
        let result = session(&path, hook, operation);
        if result.is_ok() {
            assert!(left.load(Ordering::Relaxed) > 0 && steps > 10, "{steps}");
            break;
        }
        assert!(matches!(result, Err(StoreError::Stopped)), "{result:?}");
        cases.finish(&path, operation, &format!("after step {steps}"));
        // Every third step of the repair, beginning with another one each time.
        for again in (1 + steps % 3..).step_by(3) {
            let path = cases.fresh();
            session(&path, after(steps, Fault::Die).0, operation).unwrap_err();
            let Err(_) = open(&path, Some(after(again, Fault::Die).0)) else { break };
            cases.finish(&path, operation, &format!("after step {steps} and step {again} of the repair"));
        }
    }
}

/// Fails every step of the operation: it must have happened or not, and the store must continue.
fn failing_at_every_step(operation: &Operation) {
    let mut cases = Cases::new(operation);
    for steps in 1.. {
        let path = cases.fresh();
        let (hook, left) = after(steps, Fault::Fail(28));
        // The opening has steps of its own; only those of the operation count.
        left.store(0, Ordering::Relaxed);
        let mut store = open(&path, Some(hook)).unwrap();
        left.store(steps, Ordering::Relaxed);
        let result = operation(&mut store);
        let reached = left.swap(0, Ordering::Relaxed) == 0;
        if let Err(error) = &result {
            assert_eq!(error.errno().raw(), 28, "{error}");
        }
        let mut volume = read_all(&mut store);
        store.write_at(&pattern(9, 4096), 0, true).unwrap();
        volume[..4096].copy_from_slice(&pattern(9, 4096));
        assert!(read_all(&mut store) == volume);
        store.write_at(if result.is_ok() { &cases.new.volume } else { &cases.old.volume }, 0, true).unwrap();
        if store.has_lost_cache_now() {
            // The head could not be made durable: that is not closed over.
            assert!(matches!(store.close(), Err(StoreError::Broken(_))));
            store = open(&path, None).unwrap();
            assert!(store.info().lost_cache);
            store.cache_made_up_for().unwrap();
        }
        store.close().unwrap();
        assert_eq!(cases.judge(&path, &format!("after step {steps} failed")), result.is_ok());
        assert_tidy(&path);
        std::fs::remove_dir_all(&path).unwrap();
        if !reached {
            assert!(steps > 2);
            break;
        }
    }
}

#[test]
fn snapshot() {
    let operation = |store: &mut Store| store.snapshot("new", true, BTreeMap::new(), TIME);
    killed_at_every_step(&operation);
    failing_at_every_step(&operation);
}

#[test]
fn remove() {
    let operation = |store: &mut Store| store.remove("a");
    killed_at_every_step(&operation);
    failing_at_every_step(&operation);
}

#[test]
fn revert() {
    let operation = |store: &mut Store| store.revert("a", TIME);
    killed_at_every_step(&operation);
    failing_at_every_step(&operation);
}

#[test]
fn revert_to_a_side_branch() {
    killed_at_every_step(&|store: &mut Store| store.revert("side", TIME));
}

#[test]
fn fold_into_a_snapshot() {
    let operation = |store: &mut Store| store.fold("b");
    killed_at_every_step(&operation);
    failing_at_every_step(&operation);
}

#[test]
fn fold_the_last_one_under_the_head() {
    let operation = |store: &mut Store| {
        // Repeated after a crash, it may be removed already, or gone.
        match store.remove("c") {
            Err(error) if error.errno().raw() == 2 => Ok(()),
            _ => store.fold("c"),
        }
    };
    // Between the two calls the snapshot exists and is removed, which is neither old nor new.
    let mut cases = Cases::new(&operation);
    cases.old.snapshots.insert("c".to_owned(), None);
    for steps in 1.. {
        let path = cases.fresh();
        let mut store = open(&path, None).unwrap();
        store.remove("c").unwrap();
        store.close().unwrap();
        if session(&path, after(steps, Fault::Die).0, &|store| store.fold("c")).is_ok() {
            break;
        }
        cases.finish(&path, &operation, &format!("after step {steps}"));
    }
}

#[test]
fn fold_a_leaf() {
    let mut cases = Cases::new(&|store| {
        store.remove("side")?;
        store.fold("side")
    });
    cases.old.snapshots.insert("side".to_owned(), None);
    for steps in 1.. {
        let path = cases.fresh();
        let mut store = open(&path, None).unwrap();
        store.remove("side").unwrap();
        store.close().unwrap();
        if session(&path, after(steps, Fault::Die).0, &|store| store.fold("side")).is_ok() {
            break;
        }
        cases.finish(&path, &|store| store.fold("side"), &format!("after step {steps}"));
    }
}

#[test]
fn expand() {
    let operation = |store: &mut Store| {
        store.expand(SIZE_BYTES + 8192)?;
        Ok(())
    };
    killed_at_every_step(&operation);
    failing_at_every_step(&operation);
}

#[test]
fn create() {
    let directory = scratch();
    for steps in 1.. {
        let path = directory.path().join(format!("case-{steps}"));
        let (hook, _) = after(steps, Fault::Die);
        let options = |fault| {
            let created = Some(TIME.to_owned());
            CreateOptions { size_bytes: SIZE_BYTES, created, fault, ..CreateOptions::default() }
        };
        if Store::create(&path, options(Some(hook))).is_ok() {
            assert!(steps > 10);
            break;
        }
        // The replica is complete, or it can be made again.
        let mut store = match Store::create(&path, options(None)) {
            Err(StoreError::Exists(_)) => open(&path, None).unwrap(),
            created => created.unwrap(),
        };
        assert!(read_all(&mut store).iter().all(|byte| *byte == 0));
        store.save_state(b"").unwrap();
        store.close().unwrap();
        assert_tidy(&path);
    }
}
