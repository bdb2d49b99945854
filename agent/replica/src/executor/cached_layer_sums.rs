//! Pieces of snapshots' layers, and their sums as far as they are in memory.

use shorthorn_store::{ByteRange, FileIndex, FoundSums, LayerSums, Store, StoreError};
use shorthorn_types::limits::MAX_IO_BYTES;
use shorthorn_wire::{EMPTY_SUM, KeepSums, LayerRange, SUM_PIECE_BYTES};

use crate::error::ReplicaError;
use crate::limits::BLOCK_BYTES_USIZE;

pub(super) const PIECE_BYTES: u32 = MAX_IO_BYTES;
const _: () = assert!(PIECE_BYTES as u64 == SUM_PIECE_BYTES);

/// The sums of the layer that is being looked at. One layer at a time, so that they take little memory.
#[derive(Debug, Default)]
pub(super) struct CachedLayerSums {
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

    /// Returns the sums that are kept of a layer, and keeps them in memory.
    pub fn load(&mut self, image: &str, store: &Store) -> Result<Option<&LayerSums>, StoreError> {
        if !self.has(image) {
            let sums = match store.snapshot_layers().load_sums(image)? {
                FoundSums::Kept(sums) if sums.piece_bytes == PIECE_BYTES => Some(sums),
                FoundSums::Kept(_) | FoundSums::None => None,
                FoundSums::Damaged(reason) => {
                    tracing::warn!(
                        image,
                        reason,
                        "the checksums of a snapshot are damaged and ignored; a scrub recomputes those on \
                         which all members agree"
                    );
                    None
                }
            };
            self.put(image, sums);
        }
        Ok(self.kept())
    }

    /// Returns the next piece from `from_bytes` on where the layer in `file` has blocks, or had when its sums
    /// were kept. The sums of this layer are in memory.
    pub fn next_piece(
        &self,
        file: FileIndex,
        from_bytes: u64,
        store: &Store,
    ) -> Result<Option<u64>, StoreError> {
        let data = store.chain().next_layer_data(file, from_bytes)?;
        let has_data = data.map(|at| at.max(from_bytes) / SUM_PIECE_BYTES * SUM_PIECE_BYTES);
        let first = usize::try_from(from_bytes / SUM_PIECE_BYTES).unwrap_or(usize::MAX);
        let had_data = self.kept().and_then(|sums| {
            let had_blocks =
                |number: &usize| sums.piece(*number).flatten().is_some_and(|sum| sum != EMPTY_SUM);
            let number = (first..sums.sums.len()).find(had_blocks)?;
            Some(number as u64 * SUM_PIECE_BYTES)
        });
        let next = [has_data, had_data].into_iter().flatten().min();
        Ok(next.filter(|at| *at < store.size_bytes()))
    }

    /// Takes sums to keep. They are stored when the last ones of the layer have come.
    ///
    /// # Errors
    /// The sums do not fit the layer, or the error of the store.
    pub fn keep(&mut self, message: &KeepSums, store: &mut Store) -> Result<(), ReplicaError> {
        let KeepSums { image, is_first, is_last, first_piece, sums } = message;
        let layer_bytes = store.snapshot_layers().size_bytes(image).ok_or_else(|| no_layer(image))?;
        if *is_first {
            self.begin(image, layer_bytes);
        }
        let received = self.receiving(image).ok_or_else(|| no_layer(image))?;
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
        if *is_last { self.save_received(image, store) } else { Ok(()) }
    }

    fn save_received(&mut self, image: &str, store: &mut Store) -> Result<(), ReplicaError> {
        let Some(received) = self.take_received() else { return Ok(()) };
        let is_known = self.load(image, store)?.is_some_and(|kept| *kept == received);
        self.forget();
        if !is_known {
            store.snapshot_layers().save_sums(image, &received)?;
            tracing::info!(image, pieces = received.sums.len(), "the sums of a snapshot are kept");
        }
        Ok(())
    }

    /// Returns true if the sums kept of this layer are in memory, or the layer is known to have none.
    fn has(&self, image: &str) -> bool {
        self.kept.as_ref().is_some_and(|(kept, _)| kept == image)
    }

    /// Puts the sums kept of a layer into memory.
    fn put(&mut self, image: &str, sums: Option<LayerSums>) {
        self.kept = Some((image.to_owned(), sums));
    }

    /// Returns the sums in memory.
    fn kept(&self) -> Option<&LayerSums> {
        self.kept.as_ref().and_then(|(_, sums)| sums.as_ref())
    }

    /// Begins to receive the sums of a layer.
    fn begin(&mut self, image: &str, layer_bytes: u64) {
        self.received = Some((image.to_owned(), LayerSums::new(layer_bytes, PIECE_BYTES, EMPTY_SUM)));
    }

    /// Returns the sums of the layer received so far. The outer option is none if another layer, or none, is
    /// being received; the inner one if the layer is too large.
    fn receiving(&mut self, image: &str) -> Option<Option<&mut LayerSums>> {
        let (_, received) = self.received.as_mut().filter(|(received, _)| received == image)?;
        Some(received.as_mut())
    }

    /// Ends to receive sums, and returns them.
    fn take_received(&mut self) -> Option<LayerSums> {
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

/// Returns the sum of the piece at that offset; none if it is not known.
pub(super) fn sum_at(sums: &LayerSums, offset_bytes: u64) -> Option<u32> {
    let number = usize::try_from(offset_bytes / SUM_PIECE_BYTES).unwrap_or(usize::MAX);
    // A layer may be shorter than the volume: it has no blocks there.
    sums.piece(number).unwrap_or(Some(EMPTY_SUM))
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
    use std::collections::BTreeMap;

    use super::*;
    use crate::executor::tests::new_store;

    #[test]
    fn sums_are_kept_when_the_last_ones_have_come() {
        let temp = tempfile::tempdir().unwrap();
        let (mut store, ..) = new_store(&temp.path().join("replica"));
        store.write_at(&[7; 4096], SUM_PIECE_BYTES * 2, true).unwrap();
        store.snapshot("below", true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
        let image = store.chain().copy_layers().unwrap()[0].image.to_string();
        let file = store.snapshot_layers().find(&image).unwrap();
        let mut sums = CachedLayerSums::default();
        let message = |first_piece: u32, values: &[u32], is_last| {
            let (is_first, values) = (first_piece == 0, values.to_vec());
            KeepSums { image: image.clone(), is_first, is_last, first_piece, sums: values }
        };
        sums.keep(&message(0, &[EMPTY_SUM, EMPTY_SUM, 5], false), &mut store).unwrap();
        assert!(sums.load(&image, &store).unwrap().is_none());
        assert_eq!(sums.next_piece(file, 0, &store).unwrap(), Some(SUM_PIECE_BYTES * 2));
        let too_many = sums.keep(&message(9, &[6; 100], true), &mut store);
        assert!(too_many.is_err(), "the layer is not that large");
        sums.keep(&message(3, &[EMPTY_SUM, 6], true), &mut store).unwrap();
        let kept = sums.load(&image, &store).unwrap().map(|sums| sums.sums[..5].to_vec());
        assert_eq!(kept, Some(vec![EMPTY_SUM, EMPTY_SUM, 5, EMPTY_SUM, 6]));
        let after = SUM_PIECE_BYTES * 3;
        assert_eq!(sums.next_piece(file, after, &store).unwrap(), Some(SUM_PIECE_BYTES * 4), "it had blocks");
    }

    #[test]
    fn sums_of_one_layer_at_a_time_are_in_memory() {
        let mut sums = CachedLayerSums::default();
        sums.put("a", None);
        assert!(sums.has("a") && !sums.has("b") && sums.kept().is_none());
        sums.put("b", LayerSums::new(SUM_PIECE_BYTES, PIECE_BYTES, 7));
        assert!(!sums.has("a") && sums.has("b"));
        assert_eq!(sums.kept().and_then(|sums| sum_at(sums, 0)), Some(7));
        let behind = sums.kept().and_then(|sums| sum_at(sums, SUM_PIECE_BYTES));
        assert_eq!(behind, Some(EMPTY_SUM), "it is shorter");
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
