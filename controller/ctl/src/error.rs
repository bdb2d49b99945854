use std::process::ExitCode;

use thiserror::Error;
use tonic::{Code, Status};

/// The reason why a command has failed. The exit codes are documented in `--help`.
#[derive(Debug, Error)]
pub enum CtlError {
    /// The controller said no.
    #[error("{0}")]
    Refused(String),
    /// The object does not exist.
    #[error("{0}")]
    NotFound(String),
    /// A part of it is done.
    #[error("{0}")]
    Incomplete(String),
    /// The condition did not hold in time.
    #[error("{0}")]
    Timeout(String),
    /// No controller answers.
    #[error(
        "no controller answers at {server} ({reason}); check that shorthorn-controller runs, and the address \
         of --server (or SHORTHORN_SERVER)"
    )]
    Unreachable {
        /// The address of the controller.
        server: String,
        /// The error of the system.
        reason: String,
    },
    /// Deleting needs a yes.
    #[error("{0}")]
    NotConfirmed(String),
    /// The question was answered, and the answer is that something is wrong.
    #[error("{0}")]
    Unwell(String),
    /// The result cannot be written.
    #[error("cannot write the result: {0}")]
    Output(String),
}

impl CtlError {
    /// Returns the code that the process ends with.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            CtlError::Refused(_)
            | CtlError::Incomplete(_)
            | CtlError::NotConfirmed(_)
            | CtlError::Output(_) => 1,
            CtlError::NotFound(_) => 3,
            CtlError::Timeout(_) => 4,
            CtlError::Unreachable { .. } => 5,
            CtlError::Unwell(_) => 6,
        })
    }

    /// Returns the error of a call to the controller at `server`.
    pub(super) fn of(status: &Status, server: &str) -> CtlError {
        match status.code() {
            Code::NotFound => CtlError::NotFound(status.message().to_owned()),
            _ if is_unreachable(status) => {
                CtlError::Unreachable { server: server.to_owned(), reason: reason(status) }
            }
            _ if status.message().is_empty() => CtlError::Refused(status.code().to_string()),
            _ => CtlError::Refused(status.message().to_owned()),
        }
    }
}

/// Returns true if the status was made on this side, because the connection failed.
pub(super) fn is_unreachable(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}

fn reason(status: &Status) -> String {
    let mut source = std::error::Error::source(status);
    let mut text = status.message().to_owned();
    while let Some(error) = source {
        text = error.to_string();
        source = error.source();
    }
    text
}
