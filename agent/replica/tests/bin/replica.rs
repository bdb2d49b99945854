//! A replica process for tests: `replica-under-test SPEC`.
#![allow(clippy::print_stderr)]

use std::path::PathBuf;
use std::process::ExitCode;

use shorthorn_replica::ReplicaError;

/// The exit code of a failed replica, as in the installed program.
const FAILED: u8 = 13;

fn main() -> ExitCode {
    let spec = PathBuf::from(std::env::args_os().nth(1).unwrap_or_default());
    match shorthorn_replica::run(&spec) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            match error {
                ReplicaError::Failed { .. } => ExitCode::from(FAILED),
                _ => ExitCode::FAILURE,
            }
        }
    }
}
