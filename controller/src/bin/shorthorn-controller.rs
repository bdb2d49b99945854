//! `shorthorn-controller`: keeps volumes in their desired state.

use std::io::{self, Write};
use std::time::Duration;

use clap::Parser;
use shorthorn_controller::config::{Cli, Config, ControllerCommand, CrdsArgs};
use shorthorn_controller::kubernetes::crds::{self, Rules};
use shorthorn_controller::kubernetes::deletion_guard;
use shorthorn_controller::manual;
use shorthorn_controller::open_files;
use shorthorn_controller::serve::serve;
use tokio::signal::unix::{SignalKind, signal};

/// The client of the Kubernetes API logs each failed try as an error; the controller logs once that the API
/// server is away.
const QUIET: &[&str] = &["kube_client=off"];

/// The longest that threads with a write may delay the end. A commit takes one fsync; a disk that hangs must
/// not keep the process.
const THREADS_LIMIT: Duration = Duration::from_secs(5);

fn main() -> anyhow::Result<()> {
    let args = match Cli::parse().command {
        ControllerCommand::Serve(args) => args,
        ControllerCommand::Crds(args) => return print_crds(&args),
        ControllerCommand::DeletionGuard(args) => {
            return Ok(io::stdout().write_all(deletion_guard::yaml(&args.namespace)?.as_bytes())?);
        }
        ControllerCommand::Pause => return pause(),
        ControllerCommand::Man { directory } => return manual::pages(&directory),
    };
    let config = Config::load(*args)?;
    shorthorn_logging::start(&config.log, config.log_format, QUIET);
    open_files::raise_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(serve(config));
    // A thread that waits for a disk which hangs does not hold up the end.
    runtime.shutdown_timeout(THREADS_LIMIT);
    Ok(served?)
}

/// Waits for a signal, because the first process of a container must handle SIGTERM itself.
fn pause() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        Ok(())
    })
}

fn print_crds(args: &CrdsArgs) -> anyhow::Result<()> {
    let rules = if args.without_rules { Rules::LeftOut } else { Rules::Included };
    for kind in crds::ORDER {
        io::stdout().write_all(crds::yaml(kind, rules)?.as_bytes())?;
    }
    Ok(())
}
