use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use shorthorn_control::ProcessCommand;
use shorthorn_linux::process::ProcessFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

use crate::serve::instance::{InstanceId, InstancePaths, control_watch};

/// The time limit for an engine to end after a command. It removes its device, or leaves it to the next
/// engine. Writing the device back may take 30 s of it.
pub const ORDERLY_LIMIT: Duration = Duration::from_secs(45);

/// The phase of an instance's process, according to its manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessPhase {
    /// The process does not exist and is not wanted.
    Stopped,
    /// The process is being started.
    Starting,
    /// The process runs.
    Running,
    /// The process is being stopped.
    Stopping,
    /// The process has ended, or cannot be started. The start is repeated if that can help.
    Failed,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceProcess {
    /// The point of its life, as the supervisor last saw it.
    pub phase: ProcessPhase,
    /// The process id of the living process.
    pub pid: Option<i32>,
    /// The reason of the failure, if the process has failed.
    pub message: Option<String>,
}

impl InstanceProcess {
    /// Returns a state in `phase`, with no id and no message.
    pub fn only(phase: ProcessPhase) -> InstanceProcess {
        InstanceProcess { phase, pid: None, message: None }
    }

    /// Returns a state in `phase` as process `pid`.
    pub fn with_pid(phase: ProcessPhase, pid: i32) -> InstanceProcess {
        InstanceProcess { phase, pid: Some(pid), message: None }
    }

    /// Returns a process that could not be started, with the reason for the controller.
    pub fn failed(message: impl Into<String>) -> InstanceProcess {
        InstanceProcess { phase: ProcessPhase::Failed, pid: None, message: Some(message.into()) }
    }
}

/// Becomes readable when the process has ended that the descriptor is of.
///
/// # Errors
/// The error of the system.
pub fn end_of(process: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is the same descriptor until it is dropped, which happens after its registration
    // ends.
    Ok(unsafe { AsyncFd::register_with_interest(process, Interest::READABLE) }?)
}

/// Waits for the end of process `pid`, but no longer than `limit`; false: it lives on, or cannot be watched.
pub async fn ends_within(pid: i32, limit: Duration) -> bool {
    if pid == 0 {
        return true;
    }
    let process = match ProcessFd::open(pid) {
        Ok(None) => return true,
        Err(_) => return false,
        Ok(Some(process)) => process,
    };
    let Ok(process) = end_of(process.into()) else { return false };
    timeout(limit, process.readable()).await.is_ok_and(|ready| ready.is_ok())
}

/// Requests the process of an instance to end, if it has a control socket that answers. Returns false if it
/// has none.
pub async fn request_end(id: &InstanceId, paths: &InstancePaths, command: &ProcessCommand) -> bool {
    let Ok(control) = paths.control(id) else { return false };
    match control_watch::request(&control, command).await {
        Ok(()) => true,
        Err(error) => {
            let control = control.display();
            tracing::info!(instance = %id, ?command, "cannot send the command to {control}: {error}");
            false
        }
    }
}
