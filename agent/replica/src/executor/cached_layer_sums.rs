//! Pieces of snapshots' layers, and their sums as far as they are in memory.

use shorthorn_store::{ByteRange, FileIndex, LayerSums, StoreError};
use shorthorn_types::limits::MAX_IO_BYTES;
use shorthorn_wire::{EMPTY_SUM, LayerRange, SUM_PIECE_BYTES};

use crate::error::ReplicaError;
use crate::limits::BLOCK_BYTES_USIZE;

pub(super) const PIECE_BYTES: u32 = MAX_IO_BYTES;
const _: () = assert!(PIECE_BYTES as u64 == SUM_PIECE_BYTES);

/// The sums of the layer that is being looked at. One layer at a time, so that they take little memory.
#[derive(Debug, Default)]
pub(super) struct CachedLayerSums {
    /// The sums that are kept.
    kept: Option<(String, Option<LayerSums>)>,
    /// The sums to keep, as far as received; none if the layer is too large for that.
    received: Option<(String, Option<LayerSums>)>,
}

impl CachedLayerSums {
    pub fn forget(&mut self) {
        *self = CachedLayerSums::default();
    }

    /// Frees memory that can be filled again.
    pub fn release(&mut self) {
        self.kept = None;
    }

    /// Returns true if the sums kept of this layer are in memory, or the layer is known to have none.
    pub fn has(&self, image: &str) -> bool {
        self.kept.as_ref().is_some_and(|(kept, _)| kept == image)
    }

    /// Puts the sums kept of a layer into memory.
    pub fn put(&mut self, image: &str, sums: Option<LayerSums>) {
        self.kept = Some((image.to_owned(), sums));
    }

    /// Returns the sums in memory.
    pub fn kept(&self) -> Option<&LayerSums> {
        self.kept.as_ref().and_then(|(_, sums)| sums.as_ref())
    }

    /// Begins to receive the sums of a layer.
    pub fn begin(&mut self, image: &str, layer_bytes: u64) {
        self.received = Some((image.to_owned(), LayerSums::new(layer_bytes, PIECE_BYTES, EMPTY_SUM)));
    }

    /// Returns the sums of the layer received so far. The outer option is none if another layer, or none, is
    /// being received; the inner one if the layer is too large.
    pub fn receiving(&mut self, image: &str) -> Option<Option<&mut LayerSums>> {
        let (_, received) = self.received.as_mut().filter(|(received, _)| received == image)?;
        Some(received.as_mut())
    }

    /// Ends to receive sums, and returns them.
    pub fn take_received(&mut self) -> Option<LayerSums> {
        self.received.take().and_then(|(_, received)| received)
    }
}

/// The layer check in a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Checked {
    pub file: FileIndex,
    pub piece: ByteRange,
    pub kept: Option<u32>,
}

impl Checked {
    /// Returns the file of the layer that is checked.
    pub fn file(&self) -> FileIndex {
        self.file
    }
}

pub(super) fn sum_at(sums: &LayerSums, offset_bytes: u64) -> u32 {
    let number = usize::try_from(offset_bytes / SUM_PIECE_BYTES).unwrap_or(usize::MAX);
    // A layer may be shorter than the volume: it has no blocks there.
    sums.sums.get(number).copied().unwrap_or(EMPTY_SUM)
}

/// Returns the piece that is asked for, if it is one.
pub(super) fn piece_of(asked: &LayerRange, size_bytes: u64) -> Result<ByteRange, ReplicaError> {
    let LayerRange { offset_bytes, length_bytes, .. } = asked;
    let left = size_bytes.saturating_sub(*offset_bytes).min(SUM_PIECE_BYTES);
    let is_piece =
        offset_bytes.is_multiple_of(SUM_PIECE_BYTES) && u64::from(*length_bytes) == left && left > 0;
    if !is_piece || !left.is_multiple_of(BLOCK_BYTES_USIZE as u64) {
        return Err(ReplicaError::NoPiece { offset_bytes: *offset_bytes, length_bytes: *length_bytes });
    }
    Ok(ByteRange::new(*offset_bytes, left).map_err(StoreError::from)?)
}

pub(super) fn no_layer(image: &str) -> ReplicaError {
    ReplicaError::Store(StoreError::NoSnapshotLayer(image.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_one_layer_at_a_time_are_in_memory() {
        let mut sums = CachedLayerSums::default();
        sums.put("a", None);
        assert!(sums.has("a") && !sums.has("b") && sums.kept().is_none());
        sums.put("b", LayerSums::new(SUM_PIECE_BYTES, PIECE_BYTES, 7));
        assert!(!sums.has("a") && sums.has("b"));
        assert_eq!(sums.kept().map(|sums| sum_at(sums, 0)), Some(7));
        assert_eq!(sums.kept().map(|sums| sum_at(sums, SUM_PIECE_BYTES)), Some(EMPTY_SUM), "it is shorter");
        sums.release();
        assert!(!sums.has("b"));
    }

    #[test]
    fn sums_are_received_of_the_layer_that_was_begun() {
        let mut sums = CachedLayerSums::default();
        assert!(sums.receiving("a").is_none(), "none was begun");
        sums.begin("a", SUM_PIECE_BYTES * 2);
        assert!(sums.receiving("b").is_none());
        sums.receiving("a").unwrap().unwrap().sums[1] = 5;
        assert_eq!(sums.take_received().unwrap().sums, [EMPTY_SUM, 5]);
        assert!(sums.receiving("a").is_none() && sums.take_received().is_none());
    }

    #[test]
    fn pieces_begin_at_their_multiple_and_only_the_last_is_short() {
        let piece = |offset_bytes, length_bytes| {
            let asked = LayerRange { image: "a".to_owned(), offset_bytes, length_bytes };
            piece_of(&asked, SUM_PIECE_BYTES + 8192).ok().map(|piece| (piece.offset(), piece.length()))
        };
        assert_eq!(piece(0, PIECE_BYTES), Some((0, SUM_PIECE_BYTES)));
        assert_eq!(piece(SUM_PIECE_BYTES, 8192), Some((SUM_PIECE_BYTES, 8192)));
        for (offset, length) in
            [(0, 4096), (4096, PIECE_BYTES), (SUM_PIECE_BYTES, PIECE_BYTES), (SUM_PIECE_BYTES * 2, 0)]
        {
            assert_eq!(piece(offset, length), None, "{offset} {length}");
        }
    }
}
