//! Messages between the agent and an engine or replica. They are a spec file from which the process starts,
//! and its control socket, which carries lines of JSON.
//!
//! A client sends one [`ProcessCommand`] per line. The answer to `status` is one [`ProcessStatus`] line, and
//! that to `io` is one [`IoCounters`] line. `watch` gets one [`ProcessStatus`] line at once, and one after
//! every change until the client disconnects. The others have no answer: their result shows in the status.
#![forbid(unsafe_code)]

mod client;
mod server;
mod spec;
mod status;

pub use client::{ControlClient, ControlError};
pub use server::{ControlServer, Publisher};
pub use shorthorn_types::Secret;
pub use shorthorn_types::status::{
    CopyStatus, EnginePhase, EngineStatus, ExpansionStatus, GrantWanted, MemberMode, MemberStatus,
    ReadFindings, ReplicaPhase, ReplicaStatus, ScrubStatus,
};
pub use spec::{
    EngineSpec, FrontendChoice, INTENT_CLEAR_AFTER_MS, RebuildLimits, ReplicaEndpoint, ReplicaSpec,
    SUM_BYTES_PER_S, SpecError, Unknown, load_spec, store_spec, update_spec,
};
pub use status::{IoCounter, IoCounters, ProcessCommand, ProcessStatus, ScrubCommand};
