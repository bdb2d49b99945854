//! Operations on the directory. Each happens whole or not at all.
//!
//! After one, done or failed, plans made before are void, and so are file indices that were kept:
//! ask [`Store::head`] and plan again. Those on snapshots are in `snapshots.rs` and `fold.rs`.

use shorthorn_chain::{DirectoryOperation, FileStep, Recovery, temp_name};

use crate::error::StoreError;
use crate::files::Writable;
use crate::state::STATE_FILE;
use crate::store::Store;

type Result<T> = std::result::Result<T, StoreError>;

impl Store {
    /// Enlarges the volume durably; the added part reads as zeroes. Requests may be in flight: files, and
    /// plans made before, stay as they are. To the size that it has it changes nothing.
    ///
    /// # Errors
    /// [`StoreError`]; the volume then has its old size, unless the store [is broken](Store::is_broken).
    pub fn expand(&mut self, new_size_bytes: u64) -> Result<()> {
        self.medium.check_writable()?;
        self.image.check_no_fold()?;
        if new_size_bytes == self.size_bytes() {
            return Ok(());
        }
        let operation = self
            .image
            .layout()
            .plan_expand(new_size_bytes)
            .map_err(|error| self.medium.chain_error(error))?;
        self.remember_short_layers(&operation)?;
        match self.run(&operation.steps) {
            Ok(()) => self.image.set_layout(operation.after),
            Err(StoreError::Stopped) => return Err(StoreError::Stopped),
            Err(error) => self.recover_expansion(new_size_bytes, error)?,
        }
        self.image.grow_map(new_size_bytes);
        Ok(())
    }

    /// Recovers like [`Store::recover`], without reopening the files, because they are in use.
    fn recover_expansion(&mut self, new_size_bytes: u64, error: StoreError) -> Result<()> {
        self.medium.mark_broken();
        let Ok(Recovery { layout, steps, .. }) = self.image.recover(&self.medium) else {
            return Err(error);
        };
        if self.run(&without_state_temp(steps)).is_err() {
            return Err(error);
        }
        self.image.set_layout(layout);
        self.medium.mark_whole();
        if self.image.size_bytes() == new_size_bytes { Ok(()) } else { Err(error) }
    }

    /// Remembers short layers. A layer that is shorter than the one above was truncated, unless the snapshot
    /// that an expansion left explains it. Before an operation that may take that away, the sizes are
    /// recorded.
    pub(super) fn remember_short_layers(&mut self, operation: &DirectoryOperation) -> Result<()> {
        let before = self.epoch_record.known_sizes().clone();
        if !self.epoch_record.learn_sizes(operation.after.short_layers()) {
            return Ok(());
        }
        if let Err(error) = self.epoch_record.save(self.medium.directory()) {
            // Sizes that are not stored are not known: the next attempt stores them.
            self.epoch_record.set_sizes(before);
            return Err(error);
        }
        self.image.accept_sizes(self.epoch_record.known_sizes());
        Ok(())
    }

    /// Executes an operation and takes over the layout after it.
    pub(super) fn perform(&mut self, operation: DirectoryOperation) -> Result<()> {
        match self.run(&operation.steps) {
            Ok(()) => {
                self.image.set_layout(operation.after);
                self.image.learn_inode(&self.medium)
            }
            Err(StoreError::Stopped) => Err(StoreError::Stopped),
            Err(error) => self.recover(&operation, error),
        }
    }

    /// Recovers from an operation that failed in the middle, as the next open would. If only the tidying
    /// failed, the operation counts as done.
    fn recover(&mut self, operation: &DirectoryOperation, error: StoreError) -> Result<()> {
        self.medium.mark_broken();
        let Ok(Recovery { layout, steps, .. }) = self.image.recover(&self.medium) else {
            return Err(error);
        };
        if self.run(&without_state_temp(steps)).is_err() {
            return Err(error);
        }
        let happened = layout.same_documents(&operation.after);
        self.image.set_layout(layout);
        self.reopen()?;
        self.medium.mark_whole();
        if happened { Ok(()) } else { Err(error) }
    }

    /// Opens the files of the chain again and drops the block map.
    pub(super) fn reopen(&mut self) -> Result<()> {
        let writable = if self.is_copying() { Writable::All } else { Writable::Head };
        self.image.reopen(&self.medium, writable).inspect_err(|_| self.medium.mark_broken())
    }
}

/// Removes the step that deletes the temporary state file, because another thread may be writing it.
fn without_state_temp(steps: Vec<FileStep>) -> Vec<FileStep> {
    let state_temp = FileStep::Unlink { name: temp_name(STATE_FILE) };
    steps.into_iter().filter(|step| *step != state_temp).collect()
}
