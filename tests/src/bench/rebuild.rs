//! Measures the cost and the speed of a rebuild.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use super::workload::Workload;
use crate::{
    FioJob, LocalVolume, LocalVolumeOptions, engine_status, fio, is_whole, signal, until, until_whole,
};

/// The data that a replica misses, and the range of the loads.
pub(super) const USED: &str = "1g";
const USED_BYTES: u64 = 1 << 30;
const LIMIT: Duration = Duration::from_secs(600);
/// Once over all of it.
pub(super) const WRITE: Workload =
    Workload { name: "write 1 MiB sequential", rw: "write", block_size: "1m", depth: 8 };
const RANDOM: Workload = Workload { name: "depth 32", rw: "randwrite", block_size: "4k", depth: 32 };

/// The figures of a run with three replicas on this host.
#[derive(Clone, Copy, Debug)]
pub struct RebuildFigures {
    /// Random writes at depth 32 while all replicas are members, per second.
    pub whole: f64,
    /// Sequential writes of the client, bytes per second.
    pub written_bytes_per_s: f64,
    /// Copying to a replica that has missed everything, with no other load.
    pub copied_bytes_per_s: f64,
    /// Random writes at depth 32 while a replica is absent, without a copy.
    pub degraded: f64,
    /// The same during the rebuild.
    pub beside_rebuild: f64,
    /// The bytes copied in that time, per second.
    pub copied_beside_bytes_per_s: f64,
}

/// Measures all of them, with the files below `base`.
///
/// # Errors
/// The volume does not start, or a load sees an error.
pub fn measure_rebuild(base: &Path, seconds: u32) -> Result<RebuildFigures> {
    let folder = tempfile::Builder::new().prefix("bench-").tempdir_in(base)?;
    let mut options = LocalVolumeOptions::new(folder.path());
    options.size = "10GiB".into();
    options.extra = ["--replica-timeout-ms", "1000"].map(str::to_owned).to_vec();
    let volume = LocalVolume::start(&options)?;
    let run = |workload: &Workload, size: &str| load(&volume, workload, size, seconds);
    let written_bytes_per_s = run(&WRITE, USED)?.bytes_per_s;
    let whole = run(&RANDOM, USED)?.requests_per_s;
    let copied_bytes_per_s = rebuild(&volume)?;
    let mut degraded = 0.0;
    miss_everything(&volume, || {
        degraded = run(&RANDOM, USED)?.requests_per_s;
        Ok(())
    })?;
    let started = Instant::now();
    let beside_rebuild = run(&RANDOM, USED)?.requests_per_s;
    let copied = USED_BYTES.saturating_sub(left_bytes(&volume)?) as f64;
    let copied_beside_bytes_per_s = copied / started.elapsed().as_secs_f64();
    until_whole(&volume.engine_control()?, LIMIT)?;
    volume.stop()?;
    Ok(RebuildFigures {
        whole,
        written_bytes_per_s,
        copied_bytes_per_s,
        degraded,
        beside_rebuild,
        copied_beside_bytes_per_s,
    })
}

pub(super) fn load(
    volume: &LocalVolume,
    workload: &Workload,
    size: &str,
    seconds: u32,
) -> Result<crate::FioReport> {
    load_at(&volume.ready.uri, workload, size, seconds)
}

/// Runs a load on the volume at this address.
pub(super) fn load_at(uri: &str, workload: &Workload, size: &str, seconds: u32) -> Result<crate::FioReport> {
    let mut arguments = workload.arguments(seconds, size);
    arguments.extend(["--ioengine=nbd".into(), format!("--uri={uri}"), "--name=nbd".into()]);
    fio(&FioJob { arguments })
}

/// Measures the speed at which a replica returns that has missed a write of the whole volume.
fn rebuild(volume: &LocalVolume) -> Result<f64> {
    miss_everything(volume, || Ok(()))?;
    let started = Instant::now();
    until_whole(&volume.engine_control()?, LIMIT)?;
    Ok(USED_BYTES as f64 / started.elapsed().as_secs_f64())
}

/// Pauses a replica while everything is written, and during `then`; returns as soon as its rebuild begins.
fn miss_everything(volume: &LocalVolume, then: impl FnOnce() -> Result<()>) -> Result<()> {
    let (control, pid) = (volume.engine_control()?, volume.replica_pid(2)?);
    signal(pid, Signal::SIGSTOP)?;
    let written = load(volume, &WRITE, USED, 0).and_then(|_| then());
    let left = engine_status(&control).map(|status| !is_whole(&status));
    signal(pid, Signal::SIGCONT)?;
    written?;
    ensure!(left?, "a replica that hangs is a member");
    until("replica that is being rebuilt", LIMIT, || {
        let status = engine_status(&control)?;
        Ok(status.members.iter().any(|member| member.copy.is_some()).then_some(()))
    })
}

/// Returns the bytes left to copy; 0 if every replica is a member.
fn left_bytes(volume: &LocalVolume) -> Result<u64> {
    let status = engine_status(&volume.engine_control()?).context("asking the engine")?;
    Ok(status.members.iter().filter_map(|member| member.copy).map(|copy| copy.left_bytes).sum())
}
