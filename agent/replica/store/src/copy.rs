//! Copying a replica: the source's description of its layers, and the way in which a directory becomes a
//! copy. `Copy` is the record of it.

use std::collections::BTreeSet;
use std::os::fd::AsFd;

use nix::unistd::fdatasync;
use shorthorn_chain::{Checks, CopyLayer, CopyList, FileIndex, ImageName};
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;

use crate::copy_record::Copy;
use crate::error::StoreError;
use crate::facts::recover_directory;
use crate::files::next_data;
use crate::steps::Executor;
use crate::store::Store;
use crate::sums_files::{forget_block_sums, sweep_sums};

type Result<T> = std::result::Result<T, StoreError>;

impl Store {
    /// Returns the layers as a copy of this replica has to have them, the oldest first, the head last. Their
    /// places in this list are the numbers that the calls below take.
    ///
    /// # Errors
    /// An I/O error.
    pub fn copy_layers(&self) -> Result<Vec<CopyLayer>> {
        let layer = |image: &ImageName| {
            let size_bytes = self.layout.disks().get(image).map_or(0, |disk| disk.size_bytes);
            let meta = self.directory.read(&image.meta_name())?.unwrap_or_default();
            Ok(CopyLayer { image: image.clone(), meta, size_bytes })
        };
        self.layout.chain().iter().rev().map(layer).collect()
    }

    /// Returns the file of a layer.
    #[must_use]
    pub fn layer_file(&self, layer: usize) -> Option<FileIndex> {
        let chain = self.layout.chain();
        self.files.find(chain.get(chain.len().checked_sub(layer + 1)?)?)
    }

    /// Returns the size of a layer.
    #[must_use]
    pub fn layer_bytes(&self, layer: usize) -> Option<u64> {
        let chain = self.layout.chain();
        let image = chain.get(chain.len().checked_sub(layer + 1)?)?;
        Some(self.layout.disks().get(image)?.size_bytes)
    }

    /// Returns up to `extents_max` runs of whole blocks from `from_bytes` on where a layer has data, and
    /// where to look for more.
    ///
    /// # Errors
    /// The layer does not exist, or an I/O error.
    pub fn layer_extents(
        &self,
        layer: usize,
        from_bytes: u64,
        extents_max: usize,
    ) -> Result<(Vec<ByteRange>, Option<u64>)> {
        let file = self.layer_file(layer).ok_or(StoreError::NoLayer(layer))?;
        let mut extents: Vec<ByteRange> = Vec::new();
        let mut at = from_bytes;
        while let Some(data) = self.next_data_of(file, at)? {
            if extents.len() == extents_max {
                return Ok((extents, Some(data.offset().max(at))));
            }
            let blocks = data.grown_to_blocks();
            let start = blocks.offset().max(from_bytes / BLOCK_BYTES * BLOCK_BYTES);
            let end = blocks.end().min(self.size_bytes());
            if end <= start {
                break;
            }
            extents.push(ByteRange::new(start, end - start)?);
            at = end;
        }
        Ok((extents, None))
    }

    /// Returns the first run of data of a layer that ends after `from_bytes`; it begins there or later.
    pub(crate) fn next_data_of(&self, file: FileIndex, from_bytes: u64) -> Result<Option<ByteRange>> {
        next_data(self.files.get(file), from_bytes).map_err(|errno| {
            let name = self.files.name(file).map_or("a layer", ImageName::as_str);
            StoreError::io("find the data of", self.directory.path_of(name), errno)
        })
    }

    /// Becomes a copy of a replica that has these layers: the present content is dropped, the layers are made
    /// without data, and the replica counts as rebuilding. Returns which layers are complete already, from an
    /// interrupted copy of the same snapshots; the head is always empty.
    ///
    /// No request may be in flight, and plans made before are void.
    ///
    /// # Errors
    /// [`StoreError`]; unless the layers were refused, the store has to be opened again, which continues the
    /// copy.
    pub fn begin_copy(&mut self, layers: Vec<CopyLayer>) -> Result<Vec<bool>> {
        self.check_writable()?;
        self.check_no_fold()?;
        let list = CopyList::new(layers, self.size_bytes()).map_err(|error| self.chain_error(error))?;
        let interrupted = self.copy.take().filter(|_| self.layout.volume().is_rebuilding());
        let mut done = interrupted.filter(|copy| copy.list.has_snapshots_of(&list)).map(|copy| copy.done);
        let done = done.get_or_insert_with(|| vec![false; list.layers().len()]).clone();
        self.broken = true;
        self.start_copy(Copy { list, prepared: false, done: done.clone(), epoch: self.guard.epoch })?;
        self.broken = false;
        Ok(done)
    }

    /// Starts a copy. The mark is written first: with it, the next opening recognises any part of the rest.
    /// Without it, the record would look like that of a copy that has ended.
    fn start_copy(&mut self, mut copy: Copy) -> Result<()> {
        let executor = Executor {
            directory: &self.directory,
            fault: self.fault.as_ref(),
            direct_io: self.host.direct_io,
        };
        // New layers may get the inodes of removed ones.
        sweep_sums(&self.directory, |_| false)?;
        forget_block_sums(&mut self.guard, &self.directory)?;
        self.layout.volume_mut().set_rebuilding(true);
        executor.run(&self.layout.volume_steps(), &mut self.guard)?;
        copy.save(&self.directory)?;
        executor.pass(|| "recorded the copy".to_owned())?;
        copy.prepare(&executor, &mut self.guard)?;
        executor.pass(|| "prepared the copy".to_owned())?;
        // The source has accepted the sizes of its layers.
        let accepting = Checks { accept_short_layers: true, accept_rebuilding: true, ..Checks::default() };
        self.layout = recover_directory(&self.directory, &accepting)?.layout;
        self.guard.known_sizes = self.layout.short_layers();
        self.guard.save(&self.directory)?;
        self.checks.known_sizes.clone_from(&self.guard.known_sizes);
        self.copy = Some(copy);
        self.reopen()
    }

    /// Returns the file of a snapshot layer that is being copied to and is not whole yet.
    #[must_use]
    pub fn copy_target(&self, layer: usize) -> Option<FileIndex> {
        let copy = self.copy.as_ref()?;
        let open = layer + 1 < copy.done.len() && !copy.done[layer];
        if open { self.layer_file(layer) } else { None }
    }

    /// Returns true if the replica is being made a copy of another one.
    #[must_use]
    pub fn is_copying(&self) -> bool {
        self.copy.is_some()
    }

    /// Makes a complete snapshot layer durable and records that. The layer never changes from here on, but
    /// its extents found before may be outdated.
    ///
    /// # Errors
    /// A layer that is not being copied to, or an I/O error.
    pub fn copy_done(&mut self, layer: usize) -> Result<()> {
        self.check_writable()?;
        let file = self.copy_target(layer).ok_or(StoreError::NoLayer(layer))?;
        let name = self.files.name(file).map_or("a layer", ImageName::as_str);
        let synced = fdatasync(self.files.fd(file).as_fd())
            .map_err(|errno| StoreError::io("sync", self.directory.path_of(name), errno).not_durable());
        self.noting_loss(synced)?;
        let Some(copy) = &mut self.copy else { return Err(StoreError::NoLayer(layer)) };
        copy.done[layer] = true;
        copy.save(&self.directory)?;
        self.forget_map();
        Ok(())
    }

    /// Makes the replica count as complete although its copy was not, because the operator has chosen it.
    /// Snapshots that are not known to be complete are marked with `salvage`: other replicas may hold
    /// complete snapshots of the same names from their own interrupted copies, and must not keep these.
    ///
    /// # Errors
    /// [`StoreError`]. A repetition after the next opening completes this.
    pub fn accept_unfinished_copy(&mut self, salvage: &str) -> Result<()> {
        self.check_writable()?;
        if !self.layout.volume().is_rebuilding() {
            return Ok(());
        }
        // Longhorn and a mark of distrust leave no record of complete layers.
        let done = self.copy.as_ref().map_or(&[][..], |copy| &copy.done);
        let is_done = |(layer, _): &(usize, &ImageName)| done.get(*layer).copied().unwrap_or(false);
        let chain = self.layout.chain().iter().rev().enumerate();
        let complete: BTreeSet<&ImageName> = chain.filter(is_done).map(|(_, image)| image).collect();
        let images = self.layout.disks().keys();
        let doubtful: Vec<ImageName> =
            images.filter(|image| !image.is_head() && !complete.contains(image)).cloned().collect();
        let operation =
            self.layout.plan_salvaged(&doubtful, salvage).map_err(|error| self.chain_error(error))?;
        // Without the mark it must not count as complete: a failure is no reason to tidy up and continue.
        self.run(&operation.steps)?;
        self.layout = operation.after;
        self.set_rebuilding(false)?;
        self.copy = None;
        Copy::remove(&self.directory)
    }

    /// Makes each layer of a copy that is under way count as incomplete.
    pub(crate) fn forget_done_layers(&mut self) -> Result<()> {
        let Some(copy) = self.copy.as_mut().filter(|copy| copy.done.contains(&true)) else { return Ok(()) };
        copy.done.fill(false);
        copy.save(&self.directory)
    }

    /// Completes the copy: the replica no longer counts as rebuilding. Repeating that changes nothing.
    ///
    /// # Errors
    /// [`StoreError::CopyUnfinished`] where a layer is not whole, or an I/O error.
    pub fn end_copy(&mut self) -> Result<()> {
        self.check_writable()?;
        if !self.layout.volume().is_rebuilding() {
            return Ok(());
        }
        // Without a record, another program has begun to rebuild it: the missing data is unknown.
        let snapshots = self.copy.as_ref().map_or(&[][..], |copy| &copy.done[..copy.done.len() - 1]);
        let unfinished = snapshots.iter().position(|done| !done);
        if self.copy.is_none() || unfinished.is_some() {
            let layer = unfinished.and_then(|layer| self.layer_file(layer)).unwrap_or_else(|| self.head());
            let image = self.files.name(layer).map_or("a layer", ImageName::as_str);
            return Err(StoreError::CopyUnfinished(image.to_owned()));
        }
        self.set_rebuilding(false)?;
        self.copy = None;
        Copy::remove(&self.directory)
    }
}
