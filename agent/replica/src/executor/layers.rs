//! Accesses single layers for copies: reads layers of this replica, and writes a layer that is being copied.

use shorthorn_replica_core::is_final;
use shorthorn_ring::Ring;
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, Errno};

use super::Executor;
use super::operation::{OperationResult, is_passing, kind};
use super::piece::Piece;
use super::requests::layer_of;

impl Executor {
    /// Reads the blocks of `range` from one layer, independently of the others.
    pub(super) fn start_read_layer(
        &mut self,
        slot: u16,
        range: ByteRange,
        ring: &mut Ring,
    ) -> OperationResult {
        let file = self.store.chain().layer_file(layer_of(&self.io.header(slot))?).ok_or(Errno::INVALID)?;
        self.begin_check(slot);
        let piece = Piece::blocks_of(range.grown_to_blocks().length(), file);
        self.io.read(slot, kind::READ, piece, &self.store, ring);
        Ok(())
    }

    /// Writes blocks of a snapshot that is being copied and is not whole.
    pub(super) fn start_write_layer(
        &mut self,
        slot: u16,
        range: ByteRange,
        ring: &mut Ring,
    ) -> OperationResult {
        let layer = layer_of(&self.io.header(slot))?;
        let file = self.store.copy_target(layer).ok_or(Errno::INVALID)?;
        let fits = self.store.chain().layer_bytes(layer).is_some_and(|size_bytes| range.end() <= size_bytes);
        let whole_blocks =
            range.offset().is_multiple_of(BLOCK_BYTES) && range.length().is_multiple_of(BLOCK_BYTES);
        if !fits || !whole_blocks {
            return Err(Errno::INVALID);
        }
        self.io.write_layer(slot, Piece::blocks_of(range.length(), file), &self.store, ring);
        Ok(())
    }

    pub(super) fn on_layer_written(
        &mut self,
        slot: u16,
        piece: Piece,
        result: Result<usize, Errno>,
        ring: &mut Ring,
    ) {
        let outcome = match result {
            Err(errno) if is_passing(errno) => return self.io.write_layer(slot, piece, &self.store, ring),
            Err(errno) => Err(errno),
            Ok(count) => match piece.after(count) {
                Some(rest) if rest.first > piece.first => {
                    return self.io.write_layer(slot, rest, &self.store, ring);
                }
                Some(_) => Err(Errno::IO),
                None => Ok(()),
            },
        };
        if let Err(errno) = outcome
            && is_final(errno)
        {
            self.fail(&format!("writing a layer failed: {errno}"));
        }
        let outcome = outcome.and_then(|()| self.layer_is_written(slot));
        self.finish(slot, outcome);
    }
}
