//! `shorthorn-controller`: keeps volumes where they should be.

use std::io::{self, IsTerminal};

use clap::Parser;
use shorthorn_controller::config::{Cli, Command, Config};
use shorthorn_controller::serve::serve;
use tracing_subscriber::EnvFilter;

fn main() -> anyhow::Result<()> {
    let Command::Serve(args) = Cli::parse().command;
    let config = Config::load(args)?;
    let filter = EnvFilter::try_new(&config.log)
        .map_err(|error| anyhow::anyhow!("--log {:?} is no filter: {error}", config.log))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr)
        .init();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(serve(config))?;
    Ok(())
}
