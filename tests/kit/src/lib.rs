//! The shared parts of the tests of several crates. They are the built programs, an NBD client, a client of
//! metrics and health, a counting allocator, waits for conditions, random numbers of a seed, free ports, loop
//! devices, and the documentation.

mod allocations;
mod binaries;
pub mod devices;
pub mod docs;
pub mod metrics;
pub mod nbd;
mod ports;
mod random;
pub mod waiting;

pub use allocations::CountingAllocator;
pub use binaries::binary;
pub use ports::free_port;
pub use random::Random;
