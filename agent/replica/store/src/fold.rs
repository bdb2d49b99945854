//! Taking removed snapshots out of the directory.
//!
//! The layer above is folded into the removed one, and that takes its name. The data of the newer layer is
//! copied, which is mostly the smaller. No visible data changes until the rename. So the copy can run on a
//! thread of its own beside the data path, be abandoned, and be made again.

use std::sync::Arc;

use shorthorn_chain::{ChainError, FileStep, FoldPlan, ImageName};

use crate::directory::Directory;
use crate::error::StoreError;
use crate::options::FaultHook;
use crate::steps::Executor;
use crate::store::Store;
use crate::sums_files::sweep_sums;

type Result<T> = std::result::Result<T, StoreError>;

/// The copy of a fold, to run on any thread. If it is dropped unfinished, call [`Store::abandon_coalesce`].
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
    /// Copies the layer; the time depends on the size of the data. `progress` hears how many bytes more are
    /// copied.
    ///
    /// # Errors
    /// An I/O error, as when the disk is full. No visible data has changed.
    pub fn run(self, mut progress: impl FnMut(u64)) -> Result<FoldedJob> {
        let executor =
            Executor { directory: &self.directory, fault: self.fault.as_ref(), direct_io: self.direct_io };
        executor.copy(&self.copy, &mut progress)?;
        let child = self.copy.iter().find_map(|step| match step {
            FileStep::Fold { from, .. } => Some(from.clone()),
            _ => None,
        });
        Ok(FoldedJob { snapshot: self.snapshot, child })
    }
}

impl Store {
    /// Folds a removed snapshot at once, while no request is in flight. For the snapshot directly under the
    /// head this is the only way, because the head is copied. The result is a directory as Longhorn knows it,
    /// which Longhorn itself cannot make.
    ///
    /// # Errors
    /// [`StoreError`]; the snapshot is then still there, still marked as removed.
    pub fn coalesce(&mut self, name: &str) -> Result<()> {
        let job = self.begin(name)?;
        let error = match job.run(|_| {}) {
            Ok(job) => return self.finish_coalesce(job),
            Err(error) => error,
        };
        self.abandon_coalesce();
        self.broken |= matches!(error, StoreError::Stopped);
        if !self.broken {
            // Blocks of the head may lie in the layer below now, where the map has seen none.
            self.reopen()?;
        }
        Err(error)
    }

    /// Begins to take a removed snapshot out of the directory while the volume is in use. One at a
    /// time; snapshots may be taken meanwhile, but not reverted to.
    ///
    /// # Errors
    /// [`StoreError`]; among them that the snapshot lies directly under the head.
    pub fn begin_coalesce(&mut self, name: &str) -> Result<FoldJob> {
        let plan = self.layout.plan_fold(name).map_err(|error| self.chain_error(error))?;
        if matches!(&plan, FoldPlan::Fold { child, .. } if child == self.layout.head()) {
            return Err(self.chain_error(ChainError::ChildIsHead(name.to_owned())));
        }
        self.begin(name)
    }

    fn begin(&mut self, name: &str) -> Result<FoldJob> {
        self.check_writable()?;
        self.check_no_fold()?;
        let plan = self.layout.plan_fold(name).map_err(|error| self.chain_error(error))?;
        let copy = match plan {
            FoldPlan::Delete(_) => Vec::new(),
            FoldPlan::Fold { child, parent, copy, .. } => {
                // One is written to, and takes the other's name.
                self.drop_sums(&parent)?;
                self.drop_sums(&child)?;
                copy
            }
        };
        self.fold_running = true;
        Ok(FoldJob {
            directory: Arc::clone(&self.directory),
            fault: self.fault.clone(),
            direct_io: self.host.direct_io,
            snapshot: name.to_owned(),
            copy,
        })
    }

    /// Completes a fold with the copied data, within milliseconds. Plans made before are void afterwards.
    ///
    /// # Errors
    /// [`StoreError`]; the snapshot is then still there, still marked as removed.
    pub fn finish_coalesce(&mut self, job: FoldedJob) -> Result<()> {
        self.fold_running = false;
        self.check_writable()?;
        let plan = self.layout.plan_fold(&job.snapshot).map_err(|error| self.chain_error(error))?;
        match (plan, job.child) {
            (FoldPlan::Delete(operation), None) => {
                self.remember_short_layers(&operation)?;
                self.perform(operation)?;
                sweep_sums(&self.directory, |image| self.layout.disks().contains_key(image))
            }
            (FoldPlan::Fold { child, parent, finish, .. }, Some(copied)) if child == copied => {
                self.remember_short_layers(&finish)?;
                let indices = (self.files.find(&child), self.files.find(&parent));
                let is_head = child == *self.layout.head();
                self.perform(finish)?;
                match indices {
                    // The head's file is another one now.
                    _ if is_head => self.reopen(),
                    (Some(upper), Some(lower)) if self.files.find(&parent) == Some(lower) => {
                        self.map.fold(upper, lower);
                        self.files.close(upper);
                        self.files.rename(lower, child);
                        Ok(())
                    }
                    // On a side branch, or opened anew after a failure.
                    _ => Ok(()),
                }
            }
            _ => Err(StoreError::FoldOutdated(job.snapshot)),
        }
    }

    /// Abandons a running fold. The copied data does no harm: the layer above hides it.
    pub fn abandon_coalesce(&mut self) {
        self.fold_running = false;
    }
}
