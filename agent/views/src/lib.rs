//! The rules of views and generations as pure state machines: who may write, and who holds every
//! acknowledged write.
//!
//! - A replica keeps [`ReplicaViews`]: the generation that it serves, the newest committed view, and every
//!   proposed view newer than that. The shell makes them durable before it answers.
//! - An engine that starts computes its [`Basis`] from what the replicas report, and brings its first view
//!   through as a [`Change`].
//! - An engine that loses a member brings the view without it through as a [`Change`].
//!
//! Quorum of a view: more than half of its members, or exactly half together with the arbiter's grant.
#![forbid(unsafe_code)]

mod change;
mod quorum;
mod replica;
mod start;

pub use change::{Change, Progress};
pub use quorum::{Quorum, quorum};
pub use replica::{Fence, Refused, ReplicaViews};
pub use start::{Basis, CannotStart, basis};
