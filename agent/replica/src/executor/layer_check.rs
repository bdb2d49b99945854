//! Sums of snapshots' layers: as they are now, and as they are kept.
//!
//! A piece is read like other data, without delaying requests. Sums are kept rarely: that waits for the disk.

use shorthorn_ring::Ring;
use shorthorn_store::{ByteRange, FileIndex, FoundSums, LayerSums, StoreError};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_wire::{EMPTY_SUM, KeepSums, LayerCheck, LayerRange, SUM_PIECE_BYTES, SummedRun, piece_sum};

use super::Executor;
use super::cached_layer_sums::{Checked, PIECE_BYTES, no_layer, piece_of, sum_at};
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
        let kept = self.kept_sums(&asked.image)?.map(|sums| sum_at(sums, piece_range.offset()));
        let checked = Checked { file, piece: piece_range, kept: kept.filter(|sum| *sum != 0) };
        self.requests.check_layer(slot, piece_range, checked);
        self.buffers.touch(slot, piece_range);
        // Rot does not vote: it is as if it could not be read.
        self.begin_check(slot);
        self.read(slot, kind::READ, Piece::blocks_of(piece_range.length(), file), ring);
        Ok(())
    }

    pub(super) fn kept_sums(&mut self, image: &str) -> Result<Option<&LayerSums>, StoreError> {
        if !self.layer_sums.has(image) {
            let sums = match self.store.snapshot_layers().load_sums(image)? {
                FoundSums::Kept(sums) if sums.piece_bytes == PIECE_BYTES => Some(sums),
                FoundSums::Kept(_) | FoundSums::None => None,
                FoundSums::Damaged(reason) => {
                    tracing::warn!(
                        image,
                        reason,
                        "the checksums of a snapshot are damaged and ignored; a scrub makes those again on \
                         which all members agree"
                    );
                    None
                }
            };
            self.layer_sums.put(image, sums);
        }
        Ok(self.layer_sums.kept())
    }

    /// Returns the result of the check in `slot`, if a check was begun there.
    pub fn layer_check(&self, slot: u16, outcome: OperationResult) -> Option<Result<LayerCheck, StoreError>> {
        let checked = self.work(slot).checked?;
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
                Some(piece_sum(runs.iter().map(|run| self.summed_run(slot, piece, *run))))
            }
            Err(_) => None,
        };
        let next_bytes = self.next_piece(file, piece.end())?;
        Ok(LayerCheck { sum, kept, next_bytes })
    }

    fn summed_run(&self, slot: u16, piece: ByteRange, run: ByteRange) -> SummedRun {
        let number = |bytes: u64| u32::try_from(bytes / BLOCK_BYTES).unwrap_or(u32::MAX);
        SummedRun {
            first_block: number(run.offset() - piece.offset()),
            blocks: number(run.length()),
            crc32c: self.buffers.part(slot, piece.offset(), run).crc32c(),
        }
    }

    /// Returns the next piece from `from_bytes` on where the layer has blocks, or had when its sums were
    /// kept.
    fn next_piece(&self, file: FileIndex, from_bytes: u64) -> Result<Option<u64>, StoreError> {
        let data = self.store.chain().next_layer_data(file, from_bytes)?;
        let has_data = data.map(|at| at.max(from_bytes) / SUM_PIECE_BYTES * SUM_PIECE_BYTES);
        let kept = self.layer_sums.kept();
        let first = from_bytes / SUM_PIECE_BYTES;
        let had_data = kept.and_then(|sums| {
            let later = sums.sums.iter().skip(usize::try_from(first).unwrap_or(usize::MAX));
            let at = later.take_while(|sum| matches!(**sum, 0 | EMPTY_SUM)).count();
            let number = first + at as u64;
            (number < sums.sums.len() as u64).then_some(number * SUM_PIECE_BYTES)
        });
        let next = [has_data, had_data].into_iter().flatten().min();
        Ok(next.filter(|at| *at < self.store.size_bytes()))
    }

    /// Takes sums to keep.
    ///
    /// # Errors
    /// The sums do not fit the layer, or the error of the store.
    pub fn keep_sums(&mut self, message: &KeepSums) -> Result<(), ReplicaError> {
        let KeepSums { image, is_first, is_last, first_piece, sums } = message;
        let layer_bytes = self.store.snapshot_layers().size_bytes(image).ok_or_else(|| no_layer(image))?;
        if *is_first {
            self.layer_sums.begin(image, layer_bytes);
        }
        let received = self.layer_sums.receiving(image).ok_or_else(|| no_layer(image))?;
        let Some(received) = received else { return Ok(()) };
        let places = received.sums.iter_mut().skip(*first_piece as usize);
        if sums.len() > KeepSums::SUMS_MAX || places.len() < sums.len() {
            return Err(ReplicaError::Sums {
                image: image.clone(),
                first_piece: *first_piece,
                count: sums.len(),
            });
        }
        places.zip(sums).for_each(|(place, sum)| *place = *sum);
        if *is_last { self.save_received(image) } else { Ok(()) }
    }

    fn save_received(&mut self, image: &str) -> Result<(), ReplicaError> {
        let Some(received) = self.layer_sums.take_received() else { return Ok(()) };
        let is_known = self.kept_sums(image)?.is_some_and(|kept| *kept == received);
        self.layer_sums.forget();
        if !is_known {
            self.store.snapshot_layers().save_sums(image, &received)?;
            tracing::info!(image, pieces = received.sums.len(), "the sums of a snapshot are kept");
        }
        Ok(())
    }
}
