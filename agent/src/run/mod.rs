//! `shorthorn-agent run`: one volume with no daemon at all.
//!
//! This process is the supervisor. It makes or opens the volume's directory, and starts a process per replica
//! and the engine. It reports on standard output when the volume is ready, restarts processes that die, and
//! stops everything on SIGTERM. It has a few threads and no async runtime, because its memory counts beside
//! the engine's.

mod announce;
mod error;
mod events;
mod leftovers;
mod process;
mod runtime;
mod supervisor;
mod volume;

pub use error::RunError;

use std::time::Duration;

use shorthorn_control::FrontendChoice;

use crate::cli::RunArgs;
use supervisor::Supervisor;
use volume::VolumeDir;

/// The time limit for a process to stop, also for one of an earlier run. An engine writes its device back and
/// flushes its replicas first.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// Runs the volume until SIGTERM or SIGINT.
pub fn run(args: &RunArgs) -> Result<(), RunError> {
    // Before there is any thread: all inherit the mask.
    let signals = events::block_signals()?;
    let mut volume = VolumeDir::open(args)?;
    let runtime = runtime::prepare(volume.path())?;
    leftovers::stop(args, &runtime, &volume)?;
    volume.raise_attach()?;
    tracing::info!(
        volume = %args.name,
        directory = %volume.path().display(),
        attach = volume.file().attach,
        "starting"
    );
    Supervisor::new(args, volume, runtime, signals)?.run()
}

/// Returns true if the processes of the volume end with their supervisor, however that ends.
///
/// With a kernel frontend they must not: a file system may be mounted on the device.
fn dies_with_supervisor(frontend: FrontendChoice) -> bool {
    frontend == FrontendChoice::Socket
}
