//! Processes of an earlier supervisor on the same directory that was killed.

use std::io;
use std::path::Path;

use shorthorn_control::ControlClient;
use shorthorn_frontend::node;

use crate::cli::{FrontendArg, RunArgs};
use crate::pid_file::PidFileHolder;
use crate::run::runtime::RuntimeDir;
use crate::run::volume::VolumeDir;
use crate::run::{RunError, STOP_LIMIT};

/// Stops them, the engine first, as a supervisor does. If the device is in use, the engine is killed instead:
/// then the device stays, its requests wait, and the next engine takes it over.
///
/// # Errors
/// [`RunError::Leftover`] if the next engine could not take the device over, or a process does not stop.
pub fn stop(args: &RunArgs, runtime: &RuntimeDir, volume: &VolumeDir) -> Result<(), RunError> {
    let find = |pid_file: &Path| PidFileHolder::find(pid_file).map_err(RunError::at(pid_file));
    if let Some(engine) = find(&runtime.engine().pid)? {
        let user = node::in_use(&args.device_dir.join(args.name.as_str()));
        match &user {
            Some(user) if args.frontend == FrontendArg::Socket => {
                let why =
                    format!("has a device that is in use by {user}: unmount it, or take the same frontend");
                return Err(RunError::Leftover { pid: engine.pid(), why });
            }
            _ => stop_one(&engine, user.is_some(), Some(&runtime.engine().control))?,
        }
    }
    for id in &volume.file().replicas {
        if let Some(replica) = find(&runtime.replica(*id).pid)? {
            stop_one(&replica, false, None)?;
        }
    }
    Ok(())
}

/// Stops a process through its control socket if it has one: after a signal, an engine would leave its device
/// to the next one.
fn stop_one(holder: &PidFileHolder, at_once: bool, control: Option<&Path>) -> Result<(), RunError> {
    let pid = holder.pid();
    let failed = |error: io::Error| RunError::Leftover { pid, why: format!("cannot be stopped: {error}") };
    tracing::warn!(pid, at_once, "a process of an earlier run is still running: stopping it");
    let is_stopping =
        |control: &Path| ControlClient::connect(control).and_then(|client| client.stop()).is_ok();
    if at_once {
        holder.kill().map_err(failed)?;
    } else if !control.is_some_and(is_stopping) {
        holder.terminate().map_err(failed)?;
    }
    if holder.wait(STOP_LIMIT).map_err(failed)? {
        return Ok(());
    }
    Err(RunError::Leftover { pid, why: format!("does not stop within {} s", STOP_LIMIT.as_secs()) })
}
