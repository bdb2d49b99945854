//! The processes that `serve` and `run` start: an engine, a replica.
//!
//! They have no async runtime: everything that they do after their start is in the crates of their roles.

use std::ffi::CStr;
use std::fs;
use std::path::Path;

use anyhow::Context;
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::getppid;
use shorthorn_engine::Ended;

use crate::cli::RoleArgs;
use crate::pid_file::PidFile;

/// The exit code of an engine that was ordered to stop for good. It must not be started again
/// (RestartPreventExitStatus in shorthorn-engine@.service). After any other end it has left its device to the
/// next process.
pub const STOPPED: i32 = 12;

/// Runs the engine of one volume until it is stopped.
pub fn engine(args: &RoleArgs) -> anyhow::Result<()> {
    match run(args, c"shorthorn-eng", |spec| Ok(shorthorn_engine::run(spec)?))? {
        Ended::LeftToNext => Ok(()),
        #[expect(clippy::exit, reason = "everything has ended, and only the exit status remains")]
        Ended::Stopped => std::process::exit(STOPPED),
    }
}

/// Serves one replica directory until it is stopped.
pub fn replica(args: &RoleArgs) -> anyhow::Result<()> {
    run(args, c"shorthorn-rep", |spec| Ok(shorthorn_replica::run(spec)?))
}

fn run<T>(args: &RoleArgs, name: &CStr, role: impl FnOnce(&Path) -> anyhow::Result<T>) -> anyhow::Result<T> {
    // Started from /proc/self/exe the process would be called "exe"; the name is only for people.
    let _ = prctl::set_name(name);
    let ended = start(args).and_then(|_held| role(&args.spec));
    if let (Err(error), Some(path)) = (&ended, &args.error_file)
        && let Err(unwritten) = fs::write(path, format!("{error:#}\n"))
    {
        tracing::warn!("{}: {unwritten}", path.display());
    }
    ended
}

fn start(args: &RoleArgs) -> anyhow::Result<Option<PidFile>> {
    if let Some(parent) = args.parent {
        prctl::set_pdeathsig(Signal::SIGTERM).context("cannot request a signal at the parent's end")?;
        // The parent may have ended before that call.
        anyhow::ensure!(getppid().as_raw() == parent, "the parent, process {parent}, has ended");
    }
    let held = args.pid_file.as_deref().map(PidFile::lock).transpose()?;
    if let Some(path) = &args.error_file {
        match fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).context(format!("{}", path.display()));
            }
            _ => {}
        }
    }
    Ok(held)
}
