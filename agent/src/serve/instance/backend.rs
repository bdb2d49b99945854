use std::pin::Pin;

use thiserror::Error;

use crate::serve::error::NodeError;
use crate::serve::instance::InstanceId;

/// The future of an operation of a backend.
pub type BackendFuture<'a> = Pin<Box<dyn Future<Output = Result<(), BackendError>> + Send + 'a>>;

/// The manager of instances. The spec file of an instance exists from before its start until after its stop.
///
/// It puts the observed states of processes into the [`Table`](crate::serve::instance::Table), for every
/// instance that was adopted or started; not of one that was stopped.
pub trait Backend: Send + Sync {
    /// Takes over an instance that an earlier agent has started. An instance that has not run since the
    /// host's restart stays stopped.
    fn adopt<'a>(&'a self, id: &'a InstanceId) -> BackendFuture<'a>;

    /// Starts an instance, and keeps it running. A running one continues.
    fn start<'a>(&'a self, id: &'a InstanceId) -> BackendFuture<'a>;

    /// Stops an instance and returns after the end of its process. A stopped one stays stopped. An engine
    /// that still answers removes its device first.
    fn stop<'a>(&'a self, id: &'a InstanceId) -> BackendFuture<'a>;

    /// Makes the process hand over to a new one of the program that is installed now, with the current spec.
    /// An engine leaves its device to that. Done when the old process is gone and the new one is starting.
    fn restart<'a>(&'a self, id: &'a InstanceId) -> BackendFuture<'a>;
}

/// The reason why a backend has failed.
#[derive(Debug, Error)]
pub enum BackendError {
    /// systemd says no.
    #[error("systemd: {0}")]
    Bus(#[from] zbus::Error),
    /// The units of instances are not installed.
    #[error(
        "systemd does not know {0}: install the unit files of shorthorn-agent, and run systemctl \
         daemon-reload"
    )]
    NoUnit(String),
    /// The system says no.
    #[error("{action}: {source}")]
    System { action: String, source: std::io::Error },
    /// A process does not end.
    #[error("process {0} outlives SIGKILL: it waits for the kernel")]
    Immortal(i32),
    /// The process ended, but not because we wanted it to, or it did not end at all.
    #[error("{0} does not stop: {1}")]
    NotStopped(String, String),
}

impl From<BackendError> for NodeError {
    fn from(error: BackendError) -> NodeError {
        match error {
            BackendError::NoUnit(_) => NodeError::Precondition(error.to_string()),
            _ => NodeError::Unavailable(error.to_string()),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Finds every process as it should be, and records the commands to change that.
    #[derive(Clone, Default)]
    pub struct Commanded(Arc<Mutex<Vec<&'static str>>>);

    impl Commanded {
        /// Returns the commands since the last call.
        pub fn take(&self) -> Vec<&'static str> {
            std::mem::take(&mut self.0.lock().unwrap())
        }

        fn record(&self, command: &'static str) -> BackendFuture<'static> {
            self.0.lock().unwrap().push(command);
            Box::pin(async { Ok(()) })
        }
    }

    impl Backend for Commanded {
        fn adopt<'a>(&'a self, _: &'a InstanceId) -> BackendFuture<'a> {
            Box::pin(async { Ok(()) })
        }

        fn start<'a>(&'a self, _: &'a InstanceId) -> BackendFuture<'a> {
            self.record("start")
        }

        fn stop<'a>(&'a self, _: &'a InstanceId) -> BackendFuture<'a> {
            self.record("stop")
        }

        fn restart<'a>(&'a self, _: &'a InstanceId) -> BackendFuture<'a> {
            self.record("restart")
        }
    }
}
