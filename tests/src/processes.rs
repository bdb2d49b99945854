//! Processes of the project: signals, and status over control sockets.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shorthorn_control::{ControlClient, EnginePhase, EngineStatus, MemberMode, ProcessStatus, ReplicaStatus};

use crate::{binary, until};

/// Sends a signal.
///
/// # Errors
/// The process does not exist.
pub fn signal(pid: i32, signal: Signal) -> Result<()> {
    kill(Pid::from_raw(pid), signal).with_context(|| format!("sending {signal} to {pid}"))
}

/// Returns the status of an engine.
///
/// # Errors
/// It does not answer.
pub fn engine_status(control: &Path) -> Result<EngineStatus> {
    match ControlClient::connect(control)?.status()? {
        ProcessStatus::Engine(status) => Ok(status),
        ProcessStatus::Replica(status) => bail!("{} is a replica: {status:?}", control.display()),
    }
}

/// Returns the status of a replica.
///
/// # Errors
/// It does not answer.
pub fn replica_status(control: &Path) -> Result<ReplicaStatus> {
    match ControlClient::connect(control)?.status()? {
        ProcessStatus::Replica(status) => Ok(status),
        ProcessStatus::Engine(status) => bail!("{} is an engine: {status:?}", control.display()),
    }
}

/// Returns true if an engine serves and every replica that it was given is a member.
#[must_use]
pub fn is_whole(status: &EngineStatus) -> bool {
    status.phase == EnginePhase::Serving
        && status.members.iter().all(|member| member.mode == MemberMode::Member)
}

/// Waits until an engine serves with all replicas as members.
///
/// # Errors
/// That is not so within `limit`; the last status is in the message.
pub fn until_whole(control: &Path, limit: Duration) -> Result<EngineStatus> {
    until("volume with all members", limit, || {
        let status = engine_status(control)?;
        ensure!(is_whole(&status), "{status:#?}");
        Ok(Some(status))
    })
}

/// Writes each replica directory as an image into `folder` and compares them all; returns how many bytes each
/// has.
///
/// # Errors
/// Two differ, the first place is in the message; or one cannot be read.
pub fn compare_exports(directories: &[impl AsRef<Path>], folder: &Path) -> Result<u64> {
    let mut first: Option<Vec<u8>> = None;
    for directory in directories {
        let directory = directory.as_ref();
        let image = folder.join("export");
        let output = Command::new(binary("shorthorn-agent")?)
            .args(["replica", "export"])
            .args([directory, &image])
            .output()
            .context("starting shorthorn-agent replica export")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "exporting {}: {stderr}", directory.display());
        let content = fs::read(&image)?;
        fs::remove_file(&image)?;
        match &first {
            None => first = Some(content),
            Some(first) => same(first, &content).with_context(|| format!("{}", directory.display()))?,
        }
    }
    Ok(first.context("the volume has no replicas")?.len() as u64)
}

fn same(first: &[u8], other: &[u8]) -> Result<()> {
    ensure!(first.len() == other.len(), "{} bytes, the first replica has {}", other.len(), first.len());
    let differs = |(a, b): (&[u8], &[u8])| a != b;
    let sectors = || first.chunks(512).zip(other.chunks(512));
    if let Some(sector) = sectors().position(differs) {
        let count = sectors().filter(|pair| differs(*pair)).count();
        let (a, b) = (&first[sector * 512..][..16], &other[sector * 512..][..16]);
        bail!(
            "{count} sectors differ from the first replica; sector {sector}: {a:02x?} there, {b:02x?} here"
        );
    }
    Ok(())
}
