//! A program for the tests that runs one process of a volume: `volume_process engine|replica SPEC`.
#![allow(clippy::print_stderr)]

use std::path::PathBuf;
use std::process::ExitCode;

use shorthorn_engine::Ended;

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG)
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .init();
    let mut args = std::env::args_os().skip(1);
    let role = args.next().unwrap_or_default();
    let spec = PathBuf::from(args.next().unwrap_or_default());
    let ended = if role == "engine" {
        shorthorn_engine::run(&spec)
            .map(|ended| u8::from(ended == Ended::Stopped))
            .map_err(|error| error.to_string())
    } else {
        shorthorn_replica::run(&spec).map(|()| 0).map_err(|error| error.to_string())
    };
    match ended {
        // 12: stopped for good, as the agent's.
        Ok(stopped) => ExitCode::from(stopped * 12),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
