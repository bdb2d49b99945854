use std::io;
use std::path::PathBuf;

use shorthorn_control::SpecError;
use shorthorn_frontend::FrontendError;
use shorthorn_types::{Generation, VolumeName};
use thiserror::Error;

/// The reason why an engine process ends.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The spec file cannot be used.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A value in the spec can never work.
    #[error("spec of volume {volume}: {reason}")]
    BadSpec {
        /// See [`EngineSpec::volume`](shorthorn_control::EngineSpec::volume).
        volume: VolumeName,
        /// The setting with the bad value, and the values that are allowed.
        reason: String,
    },
    /// The state file of the engine cannot be used.
    #[error("state file {path}: {source}")]
    State {
        /// See [`EngineSpec::state_file`](shorthorn_control::EngineSpec::state_file).
        path: PathBuf,
        /// The answer of the kernel, or the reason why the content is not valid.
        source: io::Error,
    },
    /// Another engine of the volume runs on this host.
    #[error("state file {path} is locked: another engine of this volume runs on this host")]
    Running {
        /// See [`EngineSpec::state_file`](shorthorn_control::EngineSpec::state_file).
        path: PathBuf,
    },
    /// The spec is older than the last one of this engine.
    #[error(
        "attachment {asked} is older than {known}, which ran on this host before: the spec is out of \
     date"
    )]
    Outdated {
        /// The number of the attachment in the spec.
        asked: u64,
        /// The number of the attachment in the state file.
        known: u64,
    },
    /// A newer engine holds the volume: this one never comes back.
    #[error("generation {generation} is fenced: generation {holder} holds the volume")]
    Deposed {
        /// The generation that this engine had drawn, lower than `holder`.
        generation: Generation,
        /// The generation of the newer engine.
        holder: Generation,
    },
    /// Too few replicas are left. A new start waits for them.
    #[error("the volume is frozen: {0}")]
    Frozen(String),
    /// The frontend does not work.
    #[error(transparent)]
    Frontend(#[from] FrontendError),
    /// A call to the system failed.
    #[error("{action}: {source}")]
    System {
        /// The step of the program, such as "starting a thread".
        action: &'static str,
        /// The answer of the kernel.
        source: io::Error,
    },
}

impl EngineError {
    pub(crate) fn system(action: &'static str) -> impl FnOnce(io::Error) -> EngineError {
        move |source| EngineError::System { action, source }
    }
}
