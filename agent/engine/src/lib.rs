//! The engine process: one volume, attached.
//!
//! [`run`] opens the replicas ([`open`]: fence, find the view, have the first one stored) and creates the
//! frontend. Then one thread per queue ([`queue`]) moves requests between the frontend, the core and the
//! replicas ([`queue_link`]). The main thread only watches ([`serving`]): signals, the control socket,
//! events of the queues. A thread for each replica outside the view rebuilds it ([`rebuild_tasks`]). A scrub
//! compares the snapshots on a thread of its own ([`scrubber`]) before the core compares the volume. A volume
//! grows step by step ([`expansion`]).

mod connection;
mod connector;
mod context;
mod copy_limits;
mod counters;
mod error;
mod events;
mod expansion;
mod failures;
mod handover;
mod main_loop;
mod open;
mod pacer;
mod queue;
mod queue_link;
mod rebuild_tasks;
mod scrubber;
mod serving;
mod shared_core;
mod state;
mod status;

pub use error::EngineError;
pub use main_loop::{Ended, run};
