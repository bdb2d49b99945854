//! `shorthorn-controller`: keeps volumes where they should be.

use std::io::{self, IsTerminal, Write};

use clap::Parser;
use shorthorn_controller::config::{Cli, Command, Config, CrdsArgs, LogFormat};
use shorthorn_controller::kubernetes::crds::{self, Rules};
use shorthorn_controller::serve::serve;
use tracing_subscriber::EnvFilter;

fn main() -> anyhow::Result<()> {
    let args = match Cli::parse().command {
        Command::Serve(args) => args,
        Command::Crds(args) => return print_crds(&args),
    };
    let config = Config::load(*args)?;
    let filter = EnvFilter::try_new(&config.log)
        .map_err(|error| anyhow::anyhow!("--log {:?} is no filter: {error}", config.log))?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    match config.log_format {
        LogFormat::Text => log.with_ansi(io::stderr().is_terminal()).init(),
        LogFormat::Json => log.json().init(),
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(serve(config))?;
    Ok(())
}

fn print_crds(args: &CrdsArgs) -> anyhow::Result<()> {
    let rules = if args.without_rules { Rules::LeftOut } else { Rules::Included };
    for kind in crds::ORDER {
        io::stdout().write_all(crds::yaml(kind, rules)?.as_bytes())?;
    }
    Ok(())
}
