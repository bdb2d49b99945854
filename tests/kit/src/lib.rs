//! The shared parts of the tests of several crates: an NBD client, a client of metrics and health, and a
//! counting allocator.

mod allocations;
pub mod metrics;
pub mod nbd;

pub use allocations::CountingAllocator;
