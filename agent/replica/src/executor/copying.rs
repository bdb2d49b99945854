//! Copies of the replica: lists layers and regions for a reader, and becomes a copy of another replica.

use shorthorn_replica_core::is_final;
use shorthorn_store::{AllocatedRuns, CopyLayer, StoreError};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, Regions};

use super::Executor;
use crate::error::ReplicaError;
use crate::state::holds_data;

impl Executor {
    /// Returns an error unless the replica may be made a copy of another one now: see
    /// [`ReplicaState::check_may_discard`](shorthorn_replica_core::ReplicaState::check_may_discard).
    ///
    /// # Errors
    /// It may not.
    pub fn check_may_become_copy(&self) -> Result<(), ReplicaError> {
        let (holds_data, is_busy) = (holds_data(&self.store)?, self.io.is_busy());
        Ok(self.state.replica().check_may_discard(self.is_rebuilding(), holds_data, is_busy)?)
    }

    /// Returns the layers for a copy of this replica: see
    /// [`Chain::copy_layers`](shorthorn_store::Chain::copy_layers).
    ///
    /// # Errors
    /// An I/O error.
    pub fn copy_layers(&self) -> Result<Vec<CopyLayer>, StoreError> {
        self.store.chain().copy_layers()
    }

    /// Returns a page of the runs of a layer that have data: see
    /// [`Chain::layer_extents`](shorthorn_store::Chain::layer_extents).
    ///
    /// # Errors
    /// The layer does not exist, or an I/O error.
    pub fn layer_extents(
        &self,
        layer: usize,
        from_bytes: u64,
        extents_max: usize,
    ) -> Result<(Vec<ByteRange>, Option<u64>), StoreError> {
        self.store.chain().layer_extents(layer, from_bytes, extents_max)
    }

    /// Returns the regions in which any layer has data, or may have lost it. A copy finds a vanished block
    /// only by its sum: in a summed region, or known beside rot. See
    /// [`Chain::allocated`](shorthorn_store::Chain::allocated), which bounds the time.
    pub fn allocated(&self, regions: Regions, from: u32) -> Result<AllocatedRuns, StoreError> {
        let intent_log = self.state.intent_log();
        let mut others = intent_log.summed().converted(intent_log.regions(), regions);
        for block in self.block_sums.known_in(0..u64::MAX) {
            if let Ok(block) = ByteRange::new(block * BLOCK_BYTES, BLOCK_BYTES) {
                others.insert_run(regions.touched(block));
            }
        }
        self.store.chain().allocated(regions, from, &others)
    }

    /// Becomes a copy of a replica with these layers: see
    /// [`Store::begin_copy`](shorthorn_store::Store::begin_copy). Waits for the disk.
    ///
    /// # Errors
    /// The error of the store. After a failure half-way, the replica does not serve any more.
    pub fn begin_copy(&mut self, layers: Vec<CopyLayer>) -> Result<Vec<bool>, ReplicaError> {
        debug_assert!(!self.io.is_busy(), "the caller has checked that no request is in flight");
        self.layer_sums.forget();
        let begun = self.store.begin_copy(layers);
        if self.store.is_broken() {
            self.fail("becoming a copy of another replica was interrupted");
        }
        self.look_at_store();
        self.flushes.changed();
        if let Ok(done) = &begun {
            let is_anything_kept = done.iter().any(|done| *done);
            self.renew_sums()?;
            self.block_sums.begin_copy(is_anything_kept, &mut self.store)?;
        }
        Ok(begun?)
    }

    /// Completes the copy of a layer: see [`Store::copy_done`](shorthorn_store::Store::copy_done). Waits for
    /// the disk.
    pub fn copy_done(&mut self, layer: usize) -> Result<(), ReplicaError> {
        let done = self.store.copy_done(layer);
        self.look_at_store();
        self.look_at_document(&done);
        done?;
        self.record_cured_by_copy().map_err(ReplicaError::LostBlocksUnwritten)
    }

    /// Completes the copy: see [`Store::end_copy`](shorthorn_store::Store::end_copy). Waits for the disk.
    pub fn end_copy(&mut self) -> Result<(), ReplicaError> {
        let ended = self.store.end_copy();
        self.look_at_document(&ended);
        ended?;
        self.record_cured_by_copy().map_err(ReplicaError::LostBlocksUnwritten)
    }

    /// Stops serving if a document could not be written, unless only space was missing.
    fn look_at_document(&mut self, written: &Result<(), StoreError>) {
        if let Err(error @ (StoreError::Io { .. } | StoreError::NotDurable { .. })) = written
            && is_final(error.errno())
        {
            self.fail(&format!("the state of a copy could not be stored: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::tests::{SIZE, new_store};

    /// Makes a replica whose first `bytes` are written.
    fn replica(directory: &std::path::Path, bytes: usize) -> Executor {
        let (mut store, owner, loaded) = new_store(directory);
        if bytes > 0 {
            store.write_at(&vec![7; bytes], 0, true).unwrap();
        }
        Executor::new(store, owner, loaded).unwrap()
    }

    #[test]
    fn a_reader_finds_the_layers_with_their_data() {
        let temp = tempfile::tempdir().unwrap();
        let executor = replica(&temp.path().join("replica"), 1 << 20);
        let sizes = executor.copy_layers().unwrap().into_iter().map(|layer| layer.size_bytes);
        assert_eq!(sizes.collect::<Vec<_>>(), [executor.size_bytes()]);
        let written = ByteRange::new(0, 1 << 20).unwrap();
        assert_eq!(executor.layer_extents(0, 0, 8).unwrap(), (vec![written], None));
        assert_eq!(executor.layer_extents(0, 1 << 20, 8).unwrap(), (Vec::new(), None));
        assert_eq!(executor.layer_extents(0, 0, 0).unwrap(), (Vec::new(), Some(0)), "the next page");
        assert!(matches!(executor.layer_extents(1, 0, 8), Err(StoreError::NoLayer(1))));
    }

    #[test]
    fn a_replica_that_becomes_a_copy_counts_as_rebuilding() {
        let temp = tempfile::tempdir().unwrap();
        let source = replica(&temp.path().join("source"), 1 << 20);
        let mut target = replica(&temp.path().join("target"), 0);
        assert_eq!((target.size_bytes(), target.is_rebuilding()), (SIZE, false));
        assert_eq!(target.begin_copy(source.copy_layers().unwrap()).unwrap(), [false]);
        assert_eq!((target.size_bytes(), target.is_rebuilding()), (SIZE, true));
        assert!(!source.is_rebuilding());
    }
}
