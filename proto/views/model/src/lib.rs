//! The rules of views and generations, searched for a way to lose data.
//!
//! The decisions are made by the code that the engine, the replica and the controller run:
//! [`shorthorn_views`]. This crate adds the surroundings, small enough to be searched: a network, crashes,
//! and the data, a set of writes per replica.
//!
//! - [`State`]: one controller (arbiter), up to four replicas, engines. [`ModelStep`]: the next possible
//!   steps.
//! - [`Message`]s are a set from which none is removed. A message that is never delivered was lost, and a
//!   message can be delivered again at any time, and in any order. A crash of a replica or of the arbiter is
//!   the loss of all messages in flight to and from it. Both store before they answer and keep nothing else.
//! - [`invariants`]: the conditions that always hold.
//! - [`search()`]: breadth first, with shortest ways to a violation; [`walk()`]: long random ways, replayed
//!   by seed.
//! - [`Mutation`]: rules that are known to be wrong. The model has to find each of them, or it proves
//!   nothing.
//!
//! The model does not use `stateright`, whose random checker chooses all steps alike and reports no seed.
//! Losses of data lie at the end of long ways on which engines must not crash all the time. So weights matter
//! more than anything else here. It would also bring a web server and some forty crates in place of two short
//! files.
//!
//! # What is not modelled
//!
//! - A write is an element of a set, durable when it is applied. The model has no places, so no order of
//!   overlapping writes, and no volatile cache (think of FUA writes). Messages that arrive late over a closed
//!   connection never take effect.
//! - The copy before the first view and the one to a rebuilding replica happen at once. They happen only
//!   between replicas that the engine holds; writes on the target that are not on the source are lost by it.
//! - Time: the engine may take any replica for failed at any moment, and never has to.
//! - Salvage by an operator, replacing a replica by an empty one, and more than sixteen proposed views.
//! - Replicas that fail requests after they have reported: a start may leave out any that it has reached, for
//!   any reason.
//! - Lost caches: a start may choose any of the complete replicas as its members, for any reason.
#![forbid(unsafe_code)]

mod bits;
mod controller;
mod engine;
mod fingerprint;
mod healing;
pub mod invariants;
mod model;
mod mutation;
mod network;
mod replica;
mod rules;
mod search;
mod state;
mod step;
mod walk;

pub use bits::Bits;
pub use invariants::Violation;
pub use model::{Limits, Model};
pub use mutation::Mutation;
pub use network::Message;
pub use search::{SearchResult, search};
pub use state::{Engine, HostState, Proposal, Replica, State, Underway};
pub use step::ModelStep;
pub use walk::{Walk, walk};
