//! Sums of snapshots' layers: as they are now, and as they are kept.
//!
//! A piece is read like other data, without delaying requests. Sums are kept rarely: that waits for the disk.

use shorthorn_ring::Ring;
use shorthorn_store::{ByteRange, StoreError};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_wire::{KeepSums, LayerCheck, LayerRange, SummedRun, piece_sum};

use super::Executor;
use super::cached_layer_sums::{Checked, no_layer, piece_of, sum_at};
use super::operation::{OperationResult, kind};
use super::piece::Piece;
use crate::error::ReplicaError;

impl Executor {
    /// Begins to read a piece of a snapshot's layer. The request has finished when [`Executor::layer_check`]
    /// returns a result.
    pub fn start_check(
        &mut self,
        slot: u16,
        asked: &LayerRange,
        ring: &mut Ring,
    ) -> Result<(), ReplicaError> {
        let file = self.store.snapshot_layers().find(&asked.image).ok_or_else(|| no_layer(&asked.image))?;
        let piece_range = piece_of(asked, self.store.size_bytes())?;
        let sums = self.layer_sums.load(&asked.image, &self.store)?;
        let kept = sums.and_then(|sums| sum_at(sums, piece_range.offset()));
        let checked = Checked { file, piece: piece_range, kept };
        self.io.check_layer(slot, piece_range, checked);
        // Rot does not vote: it is as if it could not be read.
        self.begin_check(slot);
        let piece = Piece::blocks_of(piece_range.length(), file);
        self.io.read(slot, kind::READ, piece, &self.store, ring);
        Ok(())
    }

    /// Returns the result of the check in `slot`, if a check was begun there.
    pub fn layer_check(&self, slot: u16, outcome: OperationResult) -> Option<Result<LayerCheck, StoreError>> {
        let checked = self.io.work(slot).checked?;
        Some(self.summed(slot, checked, outcome))
    }

    fn summed(
        &self,
        slot: u16,
        checked: Checked,
        outcome: OperationResult,
    ) -> Result<LayerCheck, StoreError> {
        let Checked { file, piece, kept } = checked;
        let sum = match outcome {
            Ok(()) => {
                let runs = self.store.chain().layer_blocks(file, piece)?;
                let summed = |run: &ByteRange| summed_run(piece, *run, self.io.data(slot, *run).crc32c());
                Some(piece_sum(runs.iter().map(summed)))
            }
            Err(_) => None,
        };
        let next_bytes = self.layer_sums.next_piece(file, piece.end(), &self.store)?;
        Ok(LayerCheck { sum, kept, next_bytes })
    }

    /// Takes sums to keep: see [`CachedLayerSums::keep`].
    ///
    /// [`CachedLayerSums::keep`]: super::cached_layer_sums::CachedLayerSums::keep
    pub fn keep_sums(&mut self, message: &KeepSums) -> Result<(), ReplicaError> {
        self.layer_sums.keep(message, &mut self.store)
    }
}

fn summed_run(piece: ByteRange, run: ByteRange, crc32c: u32) -> SummedRun {
    let number = |bytes: u64| u32::try_from(bytes / BLOCK_BYTES).unwrap_or(u32::MAX);
    let (first_block, blocks) = (number(run.offset() - piece.offset()), number(run.length()));
    SummedRun { first_block, blocks, crc32c }
}
