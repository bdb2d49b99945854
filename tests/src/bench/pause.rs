//! The pause of a device while its engine is replaced, in a virtual machine whose clock counts instructions.
//!
//! Virtual time is 1 ns for each instruction of both processors: a figure is the length of a path. While both
//! processors wait for a disk, virtual time follows the clock of the host.

use std::time::Duration;

use anyhow::Result;
use shorthorn_vmkit::Kernel;

use crate::replacement::{Replacement, longest_request};
use crate::{NODE, VmHost};

const LIMIT: Duration = Duration::from_secs(300);

/// A pause, in virtual time.
#[derive(Clone, Debug)]
pub struct Pause {
    /// ublk or nbd.
    pub frontend: &'static str,
    /// The number of requests that are under way at a time.
    pub depth: u32,
    /// The way in which the engine was replaced.
    pub replacement: Replacement,
    /// The largest latency that fio reports.
    pub longest_request: Duration,
    /// The duration of the replacement.
    pub replaced: Duration,
}

/// Measures the pauses of both frontends. Prints the messages of each engine: their times are the parts of
/// the pause.
///
/// # Errors
/// The machine or a volume does not start, or fio sees an error.
pub fn measure_pauses() -> Result<Vec<Pause>> {
    let host = VmHost::start(VmHost::options(Kernel::Ublk).icount().command_limit(LIMIT))?;
    host.sh("modprobe -a ublk_drv nbd")?;
    let mut pauses = Vec::new();
    for frontend in ["ublk", "nbd"] {
        pauses_of(&host, frontend, &mut pauses)?;
    }
    Ok(pauses)
}

fn pauses_of(host: &VmHost, frontend: &'static str, pauses: &mut Vec<Pause>) -> Result<()> {
    let volume = format!("pause-{frontend}");
    host.ctl(&format!(
        "volume create {volume} --size 16MiB --replicas 3 --frontend {frontend} --soft-anti-affinity"
    ))?;
    host.ctl(&format!("volume attach {volume} --node {NODE}"))?;
    // First writes take longer, which is not measured.
    host.sh(&format!(
        "fio --name=fill --filename=/dev/longhorn/{volume} --rw=write --bs=1m --ioengine=libaio --direct=1"
    ))?;
    for (depth, replacement) in
        [(1, Replacement::Restart), (16, Replacement::Restart), (16, Replacement::Kill)]
    {
        host.sh(&format!(
            "fio --name=load --filename=/dev/longhorn/{volume} --rw=randwrite --bs=4k --ioengine=libaio \
             --direct=1 --iodepth={depth} --time_based --runtime=1s --output-format=json \
             --output=/root/pause & sleep 0.5; {}; wait $!",
            replacement.timed(&volume)
        ))?;
        println!("{frontend}, depth {depth}, {replacement:?}:\n{}", messages(host, &volume)?);
        let longest_request = longest_request(host, "/root/pause")?;
        pauses.push(Pause {
            frontend,
            depth,
            replacement,
            longest_request,
            replaced: Replacement::took(host)?,
        });
    }
    host.ctl(&format!("volume detach {volume}")).map(drop)
}

/// Returns the last messages of the engines of a volume.
fn messages(host: &VmHost, volume: &str) -> Result<String> {
    let unit = format!("shorthorn-engine@{volume}");
    host.sh(&format!("journalctl --sync; journalctl --no-pager --output short-precise --lines 24 -u {unit}"))
}
