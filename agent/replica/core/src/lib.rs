//! The rules of a replica process, as pure logic: the process and the simulation run the same.
//!
//! - [`Admission`]: which engine is let in, and when.
//! - [`ReplicaState`]: the state that a replica keeps beside the data. The [steps](DurableStep) by which it
//!   becomes durable have an order, and a failed one has consequences. The shell performs each step
//!   ([`Disk`]).
//! - [`KnownRot`]: which blocks hold rot, while and after requests modify them.
//! - [`ReplicaFailure`]: when the process of a replica that has failed ends.
//! - [`revision_counter`]: the number by which Longhorn sees how new a replica is.
//! - [`WaitingRequests`]: requests that wait until regions are recorded.
#![forbid(unsafe_code)]

mod admission;
mod durable_step;
mod failure;
mod known_rot;
mod revision;
mod start;
mod state;
mod waiting;

pub use admission::{Admission, CANDIDATES_MAX, CONNECTIONS_MAX, QueueId, Ready, RefusalReason, Superseded};
pub use durable_step::{Denied, Disk, DurableStep, StepError, is_final};
pub use failure::{FAILURES_FORGIVEN_AFTER, RecordOutcome, ReplicaFailure};
pub use known_rot::{AboutHole, After, KnownRot, RotLimits};
pub use revision::revision_counter;
pub use start::{Started, StoredFiles, SumsFound};
pub use state::ReplicaState;
pub use waiting::{PageEnd, Waiter, WaitingRequests};
