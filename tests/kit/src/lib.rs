//! What the tests of several crates share: an NBD client, a client of metrics and health, and an allocator that counts.

mod allocations;
pub mod metrics;
pub mod nbd;

pub use allocations::CountingAllocator;
