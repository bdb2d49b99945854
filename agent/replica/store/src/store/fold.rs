//! Folds removed snapshots: deletes them without a loss of data for later layers. Longhorn calls it a purge.
//!
//! The data of the layer above is copied into the removed one, and the result takes the name of the layer
//! above. The newer layer is copied because it is mostly the smaller. No visible data changes until the
//! rename. So the copy can run on a thread of its own beside the data path, be abandoned, and be made again.

use std::sync::Arc;

use shorthorn_chain::{ChainError, FileStep, FoldPlan, ImageName};

use crate::directory::Directory;
use crate::error::StoreError;
use crate::options::FaultHook;
use crate::step_executor::StepExecutor;
use crate::store::Store;
use crate::sums::drop_sums;
use crate::sums_files::sweep_sums;

type Result<T> = std::result::Result<T, StoreError>;

/// The copy of a fold, to run on any thread. If it is dropped unfinished, call [`Store::abandon_fold`].
#[derive(Debug)]
pub struct FoldJob {
    directory: Arc<Directory>,
    fault: Option<FaultHook>,
    direct_io: bool,
    snapshot: String,
    copy: Vec<FileStep>,
}

/// A copy that is complete.
#[derive(Debug)]
pub struct FoldedJob {
    snapshot: String,
    child: Option<ImageName>,
}

impl FoldJob {
    /// Copies the layer; the time depends on the size of the data. `progress` gets the number of bytes
    /// that were copied since its last call.
    ///
    /// # Errors
    /// An I/O error, as when the disk is full. No visible data has changed.
    pub fn run(self, mut progress: impl FnMut(u64)) -> Result<FoldedJob> {
        let executor = StepExecutor::new(&self.directory, self.fault.as_ref(), self.direct_io);
        executor.copy(&self.copy, &mut progress)?;
        let child = self.copy.iter().find_map(|step| match step {
            FileStep::Fold { from, .. } => Some(from.clone()),
            _ => None,
        });
        Ok(FoldedJob { snapshot: self.snapshot, child })
    }
}

impl Store {
    /// Folds a removed snapshot at once, while no request is in flight. A snapshot directly under the head
    /// can only be folded so, because the head is copied. Longhorn can read the result, although it does not
    /// fold such a snapshot itself.
    ///
    /// # Errors
    /// [`StoreError`]; the snapshot is then still there, still marked as removed.
    pub fn fold(&mut self, name: &str) -> Result<()> {
        let job = self.begin(name)?;
        let error = match job.run(|_| {}) {
            Ok(job) => return self.finish_fold(job),
            Err(error) => error,
        };
        self.abandon_fold();
        self.medium.record_stop(Some(&error));
        if !self.medium.is_broken() {
            // Blocks of the head may now be in the layer below, and the map does not have them there.
            self.reopen()?;
        }
        Err(error)
    }

    /// Begins to fold a removed snapshot while the volume is in use. At most one fold runs at a time.
    /// Snapshots may be taken meanwhile, but not reverted to.
    ///
    /// # Errors
    /// [`StoreError`]; among them that the snapshot lies directly under the head.
    pub fn begin_fold(&mut self, name: &str) -> Result<FoldJob> {
        let plan = self.image.layout().plan_fold(name).map_err(|error| self.medium.chain_error(error))?;
        if matches!(&plan, FoldPlan::Fold { child, .. } if child == self.image.head_name()) {
            return Err(self.medium.chain_error(ChainError::ChildIsHead(name.to_owned())));
        }
        self.begin(name)
    }

    fn begin(&mut self, name: &str) -> Result<FoldJob> {
        self.medium.check_writable()?;
        self.image.check_no_fold()?;
        let plan = self.image.layout().plan_fold(name).map_err(|error| self.medium.chain_error(error))?;
        let copy = match plan {
            FoldPlan::Delete(_) => Vec::new(),
            FoldPlan::Fold { child, parent, copy, finish } => {
                // The copy begins with the growth of the parent, which may leave the layer below it short.
                self.remember_short_layers(&finish)?;
                // The parent is written to, and takes the name of the child.
                drop_sums(self.medium.directory(), &parent)?;
                drop_sums(self.medium.directory(), &child)?;
                copy
            }
        };
        self.image.begin_fold();
        Ok(FoldJob {
            directory: self.medium.shared_directory(),
            fault: self.medium.fault().cloned(),
            direct_io: self.medium.direct_io(),
            snapshot: name.to_owned(),
            copy,
        })
    }

    /// Completes a fold with the copied data, within milliseconds. Plans made before are void afterwards.
    ///
    /// # Errors
    /// [`StoreError`]; the snapshot is then still there, still marked as removed.
    pub fn finish_fold(&mut self, job: FoldedJob) -> Result<()> {
        self.image.end_fold();
        self.medium.check_writable()?;
        let plan =
            self.image.layout().plan_fold(&job.snapshot).map_err(|error| self.medium.chain_error(error))?;
        match (plan, job.child) {
            (FoldPlan::Delete(operation), None) => {
                self.remember_short_layers(&operation)?;
                self.perform(operation)?;
                sweep_sums(self.medium.directory(), |image| self.image.layout().disks().contains_key(image))
            }
            (FoldPlan::Fold { child, parent, finish, .. }, Some(copied)) if child == copied => {
                self.remember_short_layers(&finish)?;
                let indices = (self.image.find(&child), self.image.find(&parent));
                let is_head = child == *self.image.head_name();
                self.perform(finish)?;
                match indices {
                    // The head has another file now.
                    _ if is_head => self.reopen(),
                    (Some(upper), Some(lower)) if self.image.find(&parent) == Some(lower) => {
                        self.image.fold(upper, lower, child);
                        Ok(())
                    }
                    // On a side branch, or reopened after a failure.
                    _ => Ok(()),
                }
            }
            _ => Err(StoreError::FoldOutdated(job.snapshot)),
        }
    }

    /// Abandons a running fold. The copied data does no harm: the layer above hides it.
    pub fn abandon_fold(&mut self) {
        self.image.end_fold();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use shorthorn_chain::temp_name;

    use super::*;
    use crate::epoch_record::EPOCH_RECORD_FILE;
    use crate::{CreateOptions, Fault, OpenOptions};

    const TIME: &str = "2026-01-01T00:00:00Z";
    const SIZE_BYTES: u64 = 96 << 10;
    const MORE_BYTES: u64 = 8 << 10;

    /// Makes a chain `a` ← `b` ← head, expands the volume and removes `b`. With `is_above`, a snapshot `c` of
    /// the larger volume lies above `b`.
    fn expanded(path: &Path, is_above: bool) {
        let created = CreateOptions { size_bytes: SIZE_BYTES, ..CreateOptions::default() };
        let mut store = Store::create(path, created).unwrap();
        let snapshot = |store: &mut Store, name| store.snapshot(name, true, BTreeMap::new(), TIME).unwrap();
        for name in ["a", "b"] {
            store.write_at(name.repeat(4096).as_bytes(), 0, false).unwrap();
            snapshot(&mut store, name);
        }
        store.expand(SIZE_BYTES + MORE_BYTES).unwrap();
        store.write_at(&[b'c'; 4096], SIZE_BYTES, false).unwrap();
        if is_above {
            snapshot(&mut store, "c");
        }
        store.remove("b").unwrap();
        store.close().unwrap();
    }

    /// Opens the directory, folds `b` and checks the content.
    fn fold_and_check(path: &Path) {
        let mut store = Store::open(path, OpenOptions::default()).unwrap();
        store.fold("b").unwrap();
        let mut block = [0; 4096];
        for (offset, byte) in [(0, b'b'), (SIZE_BYTES, b'c')] {
            store.read_at(&mut block, offset).unwrap();
            assert_eq!(block, [byte; 4096]);
        }
        store.close().unwrap();
    }

    /// Opens the directory and returns a store that stops with `fault` once `b` has grown.
    fn open_with(path: &Path, fault: Fault) -> Store {
        let hook = FaultHook::new(move |done| match done {
            done if done.starts_with("Grow") && done.contains("volume-snap-b.img") => fault,
            _ => Fault::None,
        });
        Store::open(path, OpenOptions { fault: Some(hook), ..OpenOptions::default() }).unwrap()
    }

    #[test]
    fn a_directory_opens_after_an_interrupted_fold_of_an_expanded_volume() {
        for fault in [Fault::Die, Fault::Fail(nix::libc::ENOSPC)] {
            for is_above in [true, false] {
                let temp = tempfile::tempdir().unwrap();
                let path = temp.path().join("replica");
                expanded(&path, is_above);
                let mut store = open_with(&path, fault);
                store.fold("b").unwrap_err();
                drop(store);
                fold_and_check(&path);
            }
        }
    }

    #[test]
    fn a_fold_whose_record_failed_records_it_again() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        expanded(&path, true);
        let mut store = open_with(&path, Fault::Die);
        let in_the_way = path.join(temp_name(EPOCH_RECORD_FILE));
        std::fs::create_dir(&in_the_way).unwrap();
        assert!(matches!(store.fold("b").unwrap_err(), StoreError::Io { .. }));
        std::fs::remove_dir(&in_the_way).unwrap();
        assert!(matches!(store.fold("b").unwrap_err(), StoreError::Stopped));
        drop(store);
        fold_and_check(&path);
    }
}
