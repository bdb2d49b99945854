//! The blocks of a volume, their numbers, and their places in buffers and pages of sums.

use shorthorn_store::BLOCKS_PER_SUM_PAGE;
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;

/// The number of a block in the volume.
pub(super) fn number_of(block: ByteRange) -> u64 {
    block.offset() / BLOCK_BYTES
}

/// The place of a block in its page.
pub(super) fn number_in_page(block: ByteRange) -> usize {
    let number = block.offset() / BLOCK_BYTES % BLOCKS_PER_SUM_PAGE as u64;
    usize::try_from(number).unwrap_or(usize::MAX)
}

pub(super) fn block_ranges(blocks: ByteRange) -> impl Iterator<Item = ByteRange> {
    (blocks.offset()..blocks.end())
        .step_by(distance(BLOCK_BYTES))
        .filter_map(|at| ByteRange::new(at, BLOCK_BYTES).ok())
}

/// Returns the number of blocks in a distance inside a request.
pub(super) fn block_count(bytes: u64) -> usize {
    distance(bytes / BLOCK_BYTES)
}

/// Returns the length of a range that lies in a buffer.
pub(super) fn length_of(range: ByteRange) -> usize {
    distance(range.length())
}

/// Returns a distance inside a buffer, which always fits.
#[allow(clippy::cast_possible_truncation)]
pub(super) fn distance(bytes: u64) -> usize {
    bytes as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_numbered_in_the_volume_and_in_their_page() {
        let start = (BLOCKS_PER_SUM_PAGE as u64 * 3 + 510) * BLOCK_BYTES;
        let range = ByteRange::new(start, 4 * BLOCK_BYTES).unwrap();
        let blocks: Vec<ByteRange> = block_ranges(range).collect();
        assert!(blocks.iter().all(|block| block.length() == BLOCK_BYTES));
        let numbers: Vec<_> =
            blocks.iter().map(|block| (number_of(*block), number_in_page(*block))).collect();
        assert_eq!(numbers, [(2046, 510), (2047, 511), (2048, 0), (2049, 1)]);
        assert_eq!((block_count(range.length()), length_of(range)), (4, 16384));
    }
}
