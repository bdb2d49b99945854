//! `shorthornctl`: manages volumes for people and scripts.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use shorthornctl::{Cli, run, terminal_text};

fn main() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match runtime.block_on(run(cli)) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            writeln!(std::io::stderr(), "error: {}", terminal_text(&error.to_string()))?;
            Ok(error.exit_code())
        }
    }
}
