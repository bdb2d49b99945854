//! Limits of the format and of the map.

use shorthorn_types::limits::BLOCK_BYTES;
pub use shorthorn_types::limits::MAX_LAYERS;

/// Blocks that one window of the map covers.
pub(crate) const WINDOW_BLOCKS: usize = 4096;

/// Bytes of the volume that one window of the map covers: 16 MiB.
pub const WINDOW_BYTES: u64 = WINDOW_BLOCKS as u64 * BLOCK_BYTES;

/// The memory that the map may always use, however small the volume is.
const MEMORY_FLOOR_BYTES: u64 = 1 << 20;

/// Returns the maximum memory of the map of a volume of `size_bytes`. It is one bit for each block, or 32 MiB
/// for each TiB, but at least 1 MiB.
#[must_use]
pub const fn memory_limit_bytes(size_bytes: u64) -> u64 {
    let limit = size_bytes / (BLOCK_BYTES * 8);
    if limit < MEMORY_FLOOR_BYTES { MEMORY_FLOOR_BYTES } else { limit }
}
