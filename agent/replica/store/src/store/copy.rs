//! The way in which a directory becomes a copy of another replica. `OngoingCopy` is the copy under way.

use std::collections::BTreeSet;

use nix::unistd::fdatasync;
use shorthorn_chain::{CopyLayer, CopyList, FileIndex, ImageName};

use crate::copy_record::CopyRecord;
use crate::error::StoreError;
use crate::store::Store;

type Result<T> = std::result::Result<T, StoreError>;

impl Store {
    /// Becomes a copy of a replica that has these layers. The present content is dropped, the layers are made
    /// without data, and the replica counts as rebuilding. Returns which layers are complete already, from an
    /// interrupted copy of the same snapshots; the head is always empty.
    ///
    /// No request may be in flight, and plans made before are void.
    ///
    /// # Errors
    /// [`StoreError`]; unless the layers were refused, the store has to be opened again, which continues the
    /// copy.
    pub fn begin_copy(&mut self, layers: Vec<CopyLayer>) -> Result<Vec<bool>> {
        self.medium.check_writable()?;
        self.image.check_no_fold()?;
        let list =
            CopyList::new(layers, self.size_bytes()).map_err(|error| self.medium.chain_error(error))?;
        self.medium.check_layers(list.layers().len())?;
        let done = self.copy.take_done(&list, self.image.layout().volume().is_rebuilding());
        self.medium.mark_broken();
        let record = CopyRecord::new(list, done.clone(), self.epoch_record.epoch());
        self.copy.start(record, &self.medium, &mut self.image, &mut self.epoch_record)?;
        self.reopen()?;
        self.medium.mark_whole();
        Ok(done)
    }

    /// Returns the file of a snapshot layer that is being copied to and is not whole yet.
    #[must_use]
    pub fn copy_target(&self, layer: usize) -> Option<FileIndex> {
        if self.copy.is_open(layer) { self.chain().layer_file(layer) } else { None }
    }

    /// Returns true if the replica is being made a copy of another one.
    #[must_use]
    pub fn is_copying(&self) -> bool {
        self.copy.is_under_way()
    }

    /// Makes a complete snapshot layer durable and records that. The layer never changes from here on, but
    /// its extents found before may be outdated.
    ///
    /// # Errors
    /// A layer that is not being copied to, or an I/O error.
    pub fn copy_done(&mut self, layer: usize) -> Result<()> {
        self.medium.check_writable()?;
        let file = self.copy_target(layer).ok_or(StoreError::NoLayer(layer))?;
        let synced = fdatasync(self.image.fd(file)).map_err(|errno| {
            StoreError::io("sync", self.medium.directory().path_of(self.image.name(file)), errno)
                .not_durable()
        });
        self.recording_loss(synced)?;
        self.copy.complete(layer, self.medium.directory())?;
        self.image.forget_map(&self.medium);
        Ok(())
    }

    /// Makes the replica count as complete although its copy was not, because the operator has chosen it.
    /// Snapshots that may be incomplete are marked with `salvage`. Other replicas may have complete snapshots
    /// of the same names from their own interrupted copies, and must not keep these.
    ///
    /// # Errors
    /// [`StoreError`]. A repetition after the next opening completes this.
    pub fn accept_unfinished_copy(&mut self, salvage: &str) -> Result<()> {
        self.medium.check_writable()?;
        if !self.image.layout().volume().is_rebuilding() {
            return Ok(());
        }
        // Longhorn and a mark of distrust leave no record of complete layers.
        let done = self.copy.done();
        let is_done = |(layer, _): &(usize, &ImageName)| done.get(*layer).copied().unwrap_or(false);
        let chain = self.image.layout().chain().iter().rev().enumerate();
        let complete: BTreeSet<&ImageName> = chain.filter(is_done).map(|(_, image)| image).collect();
        let images = self.image.layout().disks().keys();
        let doubtful: Vec<ImageName> =
            images.filter(|image| !image.is_head() && !complete.contains(image)).cloned().collect();
        let operation = self
            .image
            .layout()
            .plan_salvaged(&doubtful, salvage)
            .map_err(|error| self.medium.chain_error(error))?;
        // Without the mark it must not count as complete: a failure is not a reason to tidy up and continue.
        self.run(&operation.steps)?;
        self.image.set_layout(operation.after);
        self.set_rebuilding(false)?;
        self.copy.end(self.medium.directory())
    }

    /// Completes the copy: the replica no longer counts as rebuilding. Repeating that changes nothing.
    ///
    /// # Errors
    /// [`StoreError::CopyUnfinished`] if a layer is not whole, or an I/O error.
    pub fn end_copy(&mut self) -> Result<()> {
        self.medium.check_writable()?;
        if !self.image.layout().volume().is_rebuilding() {
            return Ok(());
        }
        // Without a record, another program has begun to rebuild it: the missing data is unknown.
        let unfinished = self.copy.first_unfinished();
        if !self.is_copying() || unfinished.is_some() {
            let layer =
                unfinished.and_then(|layer| self.chain().layer_file(layer)).unwrap_or_else(|| self.head());
            return Err(StoreError::CopyUnfinished(self.image.name(layer).to_owned()));
        }
        self.set_rebuilding(false)?;
        self.copy.end(self.medium.directory())
    }
}
