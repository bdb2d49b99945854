//! An io_uring for each thread, with buffers and byte streams, behind a safe interface.
//!
//! All memory that the kernel reads or writes asynchronously is in an [`Arena`] or a [`Stream`]. An arena is
//! never freed while the process lives, and a stream outlives its own requests. This makes the operations
//! here safe to call: a completion can come late, but never into freed memory.
//!
//! Nothing allocates after set-up.

mod arena;
mod peer;
mod process;
mod ring;
mod stream;
mod token;
mod waker;

pub use arena::{Arena, IoBuf, SlotPool};
pub use peer::{bind_tcp, set_up_tcp};
pub use process::{ProtectionReport, protect_allocations, protect_thread};
pub use ring::{Completion, Ring, TaskWork};
pub use stream::{Received, Stream, StreamLimits};
pub use token::Token;
pub use waker::{WakeReceiver, Waker};
