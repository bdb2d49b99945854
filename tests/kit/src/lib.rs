//! The shared parts of the tests of several crates. They are the built programs, clients of NBD, of metrics
//! and of health, a counting allocator, and waits for conditions. Random numbers of a seed, free ports, loop
//! devices, and the documentation are here, too.

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
