//! The engine core: one volume as a state machine without I/O.
//!
//! Events go in ([`Event`]), outputs come out ([`Output`]). The core owns which requests are in flight, in
//! which order overlapping ones reach the replicas, when a request may be acknowledged, and which replicas
//! are members. It has no clock, no socket and no thread: the engine process and the simulator drive it.
//!
//! What it promises:
//! - A write, discard or write-zeroes is completed when every member of the current view has answered it, a
//!   flush likewise.
//! - Of two overlapping requests (rounded to whole blocks) of which one modifies data, the later is sent when
//!   the earlier is completed. Reads that overlap no modification in flight never wait.
//! - A replica that fails leaves by a view change. Until that is through nothing is acknowledged that the
//!   replica has not answered, and nothing new is sent.
#![forbid(unsafe_code)]

mod engine;
mod membership;
mod ranges;
mod request;
mod slot;

pub use engine::{CoreConfig, EngineCore, Event, Output, Outputs};
pub use membership::{Membership, PeerConfig, PeerIndex, PeerState};
pub use request::{Operation, Request};
pub use slot::SlotId;
