//! The engine process: one volume, attached.
//!
//! [`run`] opens the replicas ([`open`]: fence, find the view, propose the first one), brings up the
//! frontend, and then lets one thread per queue ([`queue`]) move requests between the frontend, the core and
//! the replicas ([`link`]). The main thread only watches: signals, the control socket, what the queues tell.

mod connection;
mod error;
mod link;
mod main_loop;
mod open;
mod queue;
mod shared;
mod state;

pub use error::EngineError;
pub use main_loop::run;
