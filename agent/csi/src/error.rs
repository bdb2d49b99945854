use std::fmt;
use std::io;

use thiserror::Error;
use tonic::Status;

use crate::command::CommandError;
use crate::volumes::VolumesError;

/// Why a call fails. Each variant is one status code.
///
/// Kubernetes takes `Aborted`, `Unavailable` and `TooSlow` for "not known how far it came": it asks again, and undoes later.
/// Every other one has to mean that nothing was left behind.
#[derive(Debug, Error)]
pub(crate) enum CsiError {
    /// An argument is missing, or can never work.
    #[error("{0}")]
    Invalid(String),
    /// There is no such volume on this node.
    #[error("{0}")]
    NotFound(String),
    /// It is there already, and is not what is asked for.
    #[error("{0}")]
    Exists(String),
    /// Not in this state; says what is in the way.
    #[error("{0}")]
    Precondition(String),
    /// A size that cannot be.
    #[error("{0}")]
    OutOfRange(String),
    /// Another call for the same volume is under way.
    #[error("another call for volume {0} is under way")]
    Aborted(String),
    /// It may work later without anybody doing anything.
    #[error("{0}")]
    Unavailable(String),
    /// It goes on, but takes longer than a caller should wait.
    #[error("{0}")]
    TooSlow(String),
    /// A program or the system failed.
    #[error("{0}")]
    Internal(String),
}

impl CsiError {
    /// For `map_err`: the system refused `what`.
    pub(crate) fn system(what: impl fmt::Display) -> impl FnOnce(io::Error) -> CsiError {
        move |error| CsiError::Internal(format!("{what}: {error}"))
    }

    /// The same, where not everything could be undone.
    pub(crate) fn not_undone(self, undo: &CsiError) -> CsiError {
        CsiError::Unavailable(format!("{self}; and it could not be undone: {undo}"))
    }
}

impl From<CommandError> for CsiError {
    fn from(error: CommandError) -> CsiError {
        CsiError::Internal(error.to_string())
    }
}

impl From<VolumesError> for CsiError {
    fn from(error: VolumesError) -> CsiError {
        let message = error.to_string();
        match error {
            VolumesError::NotFound(_) => CsiError::NotFound(message),
            VolumesError::Unavailable(_) => CsiError::Unavailable(message),
        }
    }
}

impl From<CsiError> for Status {
    fn from(error: CsiError) -> Status {
        let message = error.to_string();
        match error {
            CsiError::Invalid(_) => Status::invalid_argument(message),
            CsiError::NotFound(_) => Status::not_found(message),
            CsiError::Exists(_) => Status::already_exists(message),
            CsiError::Precondition(_) => Status::failed_precondition(message),
            CsiError::OutOfRange(_) => Status::out_of_range(message),
            CsiError::Aborted(_) => Status::aborted(message),
            CsiError::Unavailable(_) => Status::unavailable(message),
            CsiError::TooSlow(_) => Status::deadline_exceeded(message),
            CsiError::Internal(_) => Status::internal(message),
        }
    }
}
