//! The errors of calls, and their codes on the wire.

use std::fmt;
use std::io;

use shorthorn_types::VolumeName;
use thiserror::Error;
use tonic::Status;

/// The reason why a call fails. Each variant is one status code.
///
/// For Kubernetes, `Aborted`, `Unavailable` and `TooSlow` mean that the result is unknown: it asks again, and
/// undoes later. Every other one has to mean that nothing was left behind.
#[derive(Debug, Error)]
pub enum CsiError {
    /// An argument is missing, or can never work.
    #[error("{0}")]
    Invalid(String),
    /// The volume or node does not exist here.
    #[error("{0}")]
    NotFound(String),
    /// The object exists already, and differs from the requested one.
    #[error("{0}")]
    Exists(String),
    /// The state does not allow the call; the message has the obstacle.
    #[error("{0}")]
    Precondition(String),
    /// A size that cannot be.
    #[error("{0}")]
    OutOfRange(String),
    /// Another call is in progress, or has interfered: retry from the start.
    #[error("{0}")]
    Aborted(String),
    /// The resources do not suffice here. The caller may try another place, and the call may succeed later.
    #[error("{0}")]
    Exhausted(String),
    /// The call may succeed later without any intervention.
    #[error("{0}")]
    Unavailable(String),
    /// The work continues, but takes longer than a caller should wait.
    #[error("{0}")]
    TooSlow(String),
    /// A program or the system failed.
    #[error("{0}")]
    Internal(String),
}

impl CsiError {
    /// Returns the error that another call for the same volume is under way.
    #[must_use]
    pub fn busy(volume: &VolumeName) -> CsiError {
        CsiError::Aborted(format!("another call for volume {volume} is under way"))
    }

    /// Makes a function for `map_err` that reports that the system refused `what`.
    pub fn system(what: impl fmt::Display) -> impl FnOnce(io::Error) -> CsiError {
        move |error| CsiError::Internal(format!("{what}: {error}"))
    }

    /// Returns the same, if not everything could be reverted.
    pub fn not_undone(self, undo: &CsiError) -> CsiError {
        CsiError::Unavailable(format!("{self}; and it could not be undone: {undo}"))
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
            CsiError::Exhausted(_) => Status::resource_exhausted(message),
            CsiError::Unavailable(_) => Status::unavailable(message),
            CsiError::TooSlow(_) => Status::deadline_exceeded(message),
            CsiError::Internal(_) => Status::internal(message),
        }
    }
}
