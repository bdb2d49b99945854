//! The agent of a node, and the processes that it starts.

mod check;
mod cli;
mod descriptor_store;
mod disks;
mod enrol;
mod filesystem;
mod join;
mod manual;
mod on_host;
mod pid_file;
mod roles;
mod run;
mod serve;
mod setup;
mod size;
mod supervision;
mod tools;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

use cli::{AgentCommand, Cli, DiskCommand, LogArgs, ReplicaDirectoryCommand, ServeArgs};
use serve::Examinations;
use serve::config::{Config, DEFAULT_PATH};
use serve::network::DataSource;
use shorthorn_engine::EngineError;
use shorthorn_replica::ReplicaError;

const DEFAULT_LOG_LEVEL: &str = "info";
/// The exit code of an engine that a newer one has fenced. It must not be started again
/// (RestartPreventExitStatus in shorthorn-engine@.service).
const DEPOSED: u8 = 10;
/// The exit code of a failed replica. It is to be started again, and has waited before it ended.
const FAILED: u8 = 13;
/// The exit code of any other error.
const FAILURE: u8 = 1;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match dispatch(&cli) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            // If standard error is closed, no message is possible.
            let _ = writeln!(std::io::stderr(), "shorthorn-agent: {error:#}");
            ExitCode::from(code_of(&error))
        }
    }
}

/// Returns the exit code for an error.
fn code_of(error: &anyhow::Error) -> u8 {
    if let Some(EngineError::Deposed { .. }) = error.downcast_ref() {
        DEPOSED
    } else if let Some(ReplicaError::Failed { .. }) = error.downcast_ref() {
        FAILED
    } else {
        FAILURE
    }
}

/// Returns the exit code.
fn dispatch(cli: &Cli) -> anyhow::Result<u8> {
    if let AgentCommand::Check(args) = &cli.command {
        let (text, code) = check::check(args)?;
        writeln!(io::stdout(), "{}", text.trim_end()).context("standard output")?;
        return Ok(code);
    }
    if let AgentCommand::Setup(args) = &cli.command {
        start_logs(&cli.log);
        return setup::setup(args);
    }
    run_command(cli).map(|()| 0)
}

fn run_command(cli: &Cli) -> anyhow::Result<()> {
    match &cli.command {
        AgentCommand::Check(_) | AgentCommand::Setup(_) => Ok(()), // they have more exit codes
        AgentCommand::Disk(DiskCommand::Discover(args)) => disks::discover(args),
        AgentCommand::Disk(DiskCommand::Init(args)) => disks::init(args),
        AgentCommand::Serve(args) => serve_node(args, &cli.log),
        AgentCommand::ServeOnHost(args) => match on_host::serve_on_host(args)? {},
        AgentCommand::Join(args) => {
            start_logs(&cli.log);
            writeln!(io::stdout(), "{}", join::join(args)?).context("standard output")
        }
        AgentCommand::Run(args) => {
            start_logs(&cli.log);
            Ok(run::run(args)?)
        }
        AgentCommand::Engine(args) => {
            start_logs(&cli.log);
            roles::engine(args)
        }
        AgentCommand::Replica(ReplicaDirectoryCommand::Serve(args)) => {
            start_logs(&cli.log);
            roles::replica(args)
        }
        AgentCommand::Replica(ReplicaDirectoryCommand::Inspect(args)) => tools::inspect(args),
        AgentCommand::Replica(ReplicaDirectoryCommand::Export(args)) => {
            start_logs(&cli.log);
            tools::export(args)
        }
        AgentCommand::Man { directory } => manual::pages(directory),
    }
}

fn start_logs(args: &LogArgs) {
    let level = args.log_level.as_deref().unwrap_or(DEFAULT_LOG_LEVEL);
    shorthorn_logging::start(level, args.log_format.unwrap_or_default(), &[]);
}

fn serve_node(args: &ServeArgs, log: &LogArgs) -> anyhow::Result<()> {
    let mut config = Config::load(args.config.as_deref())?;
    if let Some(address) = args.data_address {
        config.data = DataSource::Fixed(address);
    }
    if let Some(listen) = args.metrics_listen {
        config.metrics_listen = listen;
    }
    if args.check {
        let file = args.config.as_deref().unwrap_or_else(|| Path::new(DEFAULT_PATH));
        let remark = serve::tls::check(&config).map_err(anyhow::Error::msg)?;
        let mut text = format!("{}: no mistakes; this is node {}", file.display(), config.node_name);
        if let Some(remark) = remark {
            text.push('\n');
            text.push_str(&remark);
        }
        return writeln!(io::stdout(), "{text}").context("standard output");
    }
    let level = log.log_level.as_deref().unwrap_or(&config.log_level);
    shorthorn_logging::start(level, log.log_format.unwrap_or(config.log_format), &[]);
    serve::serve(config, Examinations { warnings: check::warnings, devices: disks::discovered })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replica_that_has_failed_ends_with_a_code_of_its_own() {
        let failed = ReplicaError::Failed { message: "the disk".to_owned(), in_a_row: 1 };
        assert_eq!(code_of(&failed.into()), FAILED);
        assert_eq!(code_of(&ReplicaError::ThreadEnded.into()), FAILURE);
    }
}
