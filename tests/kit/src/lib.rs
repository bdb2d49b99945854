//! What the tests of several crates share: an NBD client, and an allocator that counts.

mod allocations;
pub mod nbd;

pub use allocations::CountingAllocator;
