//! The rules of views and generations, searched for a way to lose data.
//!
//! What decides is the code that the engine, the replica and the controller run: [`shorthorn_views`]. This
//! crate adds what surrounds it, small enough to be searched: a network, crashes, and the data, a set of
//! writes per replica.
//!
//! - [`State`]: one controller (arbiter), up to three replicas, engines. [`Step`]: what can happen next.
//! - [`Message`]s are a set from which nothing is taken: one that is never delivered was lost, one can be
//!   delivered again at any time, and in any order. A crash of a replica or of the arbiter is the loss of all
//!   that was on its way to and from it, because both store before they answer and keep nothing else.
//! - [`invariants`]: what must hold.
//! - [`search()`]: breadth first, with shortest ways to a violation; [`walk()`]: long random ways, replayed
//!   by seed.
//! - [`Mutation`]: rules that are known to be wrong. The model has to find each of them, or it proves
//!   nothing.
//!
//! Not `stateright`, whose random checker chooses all steps alike and reports no seed: what loses data lies
//! at the end of long ways on which engines must not crash all the time, so that weights matter more than
//! anything else here. Beyond that it would bring a web server and some forty crates for what are two short
//! files.
//!
//! # What is not modelled
//!
//! - A write is an element of a set, durable when it is applied: no places, so no order of overlapping
//!   writes, and no volatile cache (think of FUA writes). What came late over a closed connection never takes
//!   effect.
//! - The copy before the first view and the one to a joining replica happen at once. They happen only between
//!   replicas that the engine holds; what was applied to the target and is not on the source is lost by it.
//! - Time: the engine may take any replica for failed at any moment, and never has to.
//! - Salvage by an operator, replacing a replica by an empty one, and more than sixteen proposed views.
//! - Replicas that do not do as they are asked after they have reported: a start may leave out any that it
//!   has reached, for whatever reason.
//! - Lost caches: a start may choose any of those that hold everything as its members, for whatever reason.
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
pub use search::{Found, search};
pub use state::{Engine, Host, Proposal, Replica, State, Underway};
pub use step::Step;
pub use walk::{Walk, walk};
