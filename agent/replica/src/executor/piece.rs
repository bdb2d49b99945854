use shorthorn_store::FileIndex;

use super::block::block_count;
use crate::limits::{BLOCK_BYTES_USIZE, EDGE_BLOCKS, SLOT_BYTES};

/// A run of blocks in the buffer of a slot, and the file that they are read from or written to. It travels
/// through the kernel in the tag of a token, so that nothing has to be kept for each operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The first block, counted from the start of the buffer.
    pub first: u16,
    /// Length of the run in blocks of 4096 bytes, at least 1.
    pub blocks: u16,
    /// The index of the image file in the store.
    pub file: FileIndex,
}

const FIELD_BITS: u32 = 12;
const FIELD_MASK: u32 = (1 << FIELD_BITS) - 1;
const FILE_BITS: u32 = 8;
// Every block of a slot has a number.
const _: () = assert!(SLOT_BYTES / BLOCK_BYTES_USIZE <= FIELD_MASK as usize);

impl Piece {
    /// Creates the piece of `blocks` blocks from `first` on. A slot has a few hundred blocks.
    pub fn new(first: usize, blocks: usize, file: FileIndex) -> Piece {
        let number = |n: usize| u16::try_from(n).unwrap_or(u16::MAX);
        Piece { first: number(first), blocks: number(blocks), file }
    }

    /// Creates the piece of all blocks of a request of `length_bytes`.
    pub fn blocks_of(length_bytes: u64, file: FileIndex) -> Piece {
        Piece::new(EDGE_BLOCKS, block_count(length_bytes), file)
    }

    /// Packs the piece into the tag of a token.
    pub fn pack(self) -> u32 {
        let (first, blocks) = (u32::from(self.first), u32::from(self.blocks));
        debug_assert!(first <= FIELD_MASK && blocks <= FIELD_MASK);
        let file = u32::try_from(self.file.slot()).unwrap_or(0);
        first << (FIELD_BITS + FILE_BITS) | blocks << FILE_BITS | file
    }

    /// Unpacks the tag; none if it was never packed.
    #[allow(clippy::cast_possible_truncation)] // each cast cuts a field out
    pub fn unpack(tag: u32) -> Option<Piece> {
        let first = (tag >> (FIELD_BITS + FILE_BITS)) as u16;
        let blocks = (tag >> FILE_BITS & FIELD_MASK) as u16;
        Some(Piece { first, blocks, file: FileIndex::new(tag as u8)? })
    }

    /// Returns the rest of the piece after `count` bytes more are done; none if it is complete.
    pub fn after(self, count: usize) -> Option<Piece> {
        let done = u16::try_from(count / BLOCK_BYTES_USIZE).unwrap_or(u16::MAX).min(self.blocks);
        let rest = Piece { first: self.first + done, blocks: self.blocks - done, file: self.file };
        (rest.blocks > 0).then_some(rest)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn tags_and_back(first in 0u16..4096, blocks in 0u16..4096, file in 0u8..255) {
            let piece = Piece { first, blocks, file: FileIndex::new(file).unwrap() };
            prop_assert_eq!(Piece::unpack(piece.pack()), Some(piece));
        }
    }

    #[test]
    fn a_piece_continues_after_a_short_transfer() {
        let piece = Piece { first: 3, blocks: 5, file: FileIndex::new(1).unwrap() };
        assert_eq!(piece.after(2 * 4096 + 512), Some(Piece { first: 5, blocks: 3, ..piece }));
        assert_eq!(piece.after(5 * 4096), None);
        assert_eq!(piece.after(9 * 4096), None);
    }
}
