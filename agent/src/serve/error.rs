use std::fmt;
use std::io;
use std::path::Path;

use shorthorn_api::ViewError;
use shorthorn_control::SpecError;
use shorthorn_store::StoreError;
use shorthorn_types::{ReplicaIdError, TooManyMembers, VolumeNameError};
use thiserror::Error;
use tonic::{Response, Status};

/// The result of a call of the node API, for tonic.
pub type RpcResult<T> = Result<Response<T>, Status>;

/// The reason why a call of the node API fails. Each variant is one status code.
#[derive(Debug, Error)]
pub enum NodeError {
    /// A name, size or path that can never work; the text has the remedy.
    #[error("{0}")]
    Invalid(String),
    /// The object does not exist here.
    #[error("{0}")]
    NotFound(String),
    /// The same name with other arguments.
    #[error("{0}")]
    Exists(String),
    /// The state does not allow the call; the text has the obstacle.
    #[error("{0}")]
    Precondition(String),
    /// The disk has no space.
    #[error("{0}")]
    Exhausted(String),
    /// A retry may succeed.
    #[error("{0}")]
    Unavailable(String),
}

impl NodeError {
    /// Makes a function for `map_err` that reports that the system refused an action on `path`.
    pub fn at(path: &Path) -> impl FnOnce(io::Error) -> NodeError {
        |error| NodeError::of_io(&error, format!("{}: {error}", path.display()))
    }

    /// Returns the error for a lost worker thread: the runtime must be shutting down.
    pub fn lost(error: impl fmt::Display) -> NodeError {
        NodeError::Unavailable(format!("the agent is stopping: {error}"))
    }

    fn of_io(error: &io::Error, message: String) -> NodeError {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => NodeError::Exhausted(message),
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::NotADirectory => {
                NodeError::Precondition(message)
            }
            _ => NodeError::Unavailable(message),
        }
    }
}

impl From<VolumeNameError> for NodeError {
    fn from(error: VolumeNameError) -> NodeError {
        NodeError::Invalid(error.to_string())
    }
}

impl From<ReplicaIdError> for NodeError {
    fn from(error: ReplicaIdError) -> NodeError {
        NodeError::Invalid(error.to_string())
    }
}

impl From<TooManyMembers> for NodeError {
    fn from(error: TooManyMembers) -> NodeError {
        NodeError::Invalid(error.to_string())
    }
}

impl From<ViewError> for NodeError {
    fn from(error: ViewError) -> NodeError {
        NodeError::Invalid(error.to_string())
    }
}

impl From<SpecError> for NodeError {
    fn from(error: SpecError) -> NodeError {
        let message = error.to_string();
        match error {
            SpecError::Io { source, .. } => NodeError::of_io(&source, message),
            SpecError::Content { .. } => NodeError::Unavailable(message),
        }
    }
}

impl From<StoreError> for NodeError {
    fn from(error: StoreError) -> NodeError {
        match error {
            StoreError::OtherSecret(_)
            | StoreError::FingerprintDamaged { .. }
            | StoreError::FormerWrites(_)
            | StoreError::Locked { .. } => NodeError::Precondition(error.to_string()),
            _ => NodeError::Unavailable(error.to_string()),
        }
    }
}

impl From<NodeError> for Status {
    fn from(error: NodeError) -> Status {
        let message = error.to_string();
        match error {
            NodeError::Invalid(_) => Status::invalid_argument(message),
            NodeError::NotFound(_) => Status::not_found(message),
            NodeError::Exists(_) => Status::already_exists(message),
            NodeError::Precondition(_) => Status::failed_precondition(message),
            NodeError::Exhausted(_) => Status::resource_exhausted(message),
            NodeError::Unavailable(_) => Status::unavailable(message),
        }
    }
}
