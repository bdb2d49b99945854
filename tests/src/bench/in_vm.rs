//! ublk against NBD on the same volume, in a virtual machine whose clock counts instructions.
//!
//! Virtual time is the number of instructions executed. So the figures show the length of the CPU's path, not
//! the speed of this host, and repeat under any other load.

use std::time::Duration;

use anyhow::{Context, Result};
use shorthorn_vmkit::{Kernel, RunningCommand, VmOptions};

use super::workload::Workload;
use crate::{ReadyAnnouncement, VmHost, parse_fio, until};

const START_LIMIT: Duration = Duration::from_secs(120);
const LOAD_LIMIT: Duration = Duration::from_secs(600);

/// Requests per second of one workload.
#[derive(Clone, Debug)]
pub struct VmFigure {
    /// ublk or nbd.
    pub frontend: &'static str,
    /// The number of replicas of the volume.
    pub replicas: u32,
    /// Name of the fio job.
    pub workload: &'static str,
    /// In virtual time.
    pub requests_per_s: f64,
}

/// Measures the 4-KiB workloads on both frontends.
///
/// # Errors
/// The machine or a volume does not start, or fio sees an error.
pub fn measure_in_vm(workloads: &[Workload], replicas: u32) -> Result<Vec<VmFigure>> {
    let options = VmOptions::new(Kernel::Ublk).icount().memory_mib(3072).command_limit(LOAD_LIMIT);
    let host = VmHost::bare(options)?;
    host.sh(
        "mkdir -p /mnt/bench && mount -t tmpfs -o size=1500m tmpfs /mnt/bench && modprobe -a ublk_drv nbd",
    )?;
    let mut figures = Vec::new();
    for frontend in ["ublk", "nbd"] {
        let (running, ready) = start(&host, frontend, replicas)?;
        let device = ready.device.context("the volume has no device")?;
        let fill = "--name=fill --rw=write --bs=1m --iodepth=4 --ioengine=libaio --direct=1";
        host.sh(&format!("fio --filename={} {fill} --output-format=terse", device.display()))?;
        for workload in workloads.iter().filter(|workload| workload.block_size == "4k") {
            let arguments = workload.arguments(1, "100%").join(" ");
            let report = host.sh(&format!(
                "fio --name=bench --filename={} --ioengine=libaio --direct=1 {arguments} \
                 --output-format=json",
                device.display()
            ))?;
            let requests_per_s = parse_fio(&report)?.requests_per_s;
            figures.push(VmFigure { frontend, replicas, workload: workload.name, requests_per_s });
        }
        host.sh(&format!("kill -TERM {}", ready.pids.supervisor))?;
        host.finish(running, START_LIMIT)?;
    }
    Ok(figures)
}

fn start(host: &VmHost, frontend: &str, replicas: u32) -> Result<(RunningCommand, ReadyAnnouncement)> {
    let running = host.spawn(&format!(
        "shorthorn-agent run bench --dir /mnt/bench/volume --size 128MiB --replicas {replicas} \
         --frontend {frontend}"
    ))?;
    let ready = until("volume that is ready", START_LIMIT, || {
        let output = running.output_so_far().text();
        let line = output.lines().find(|line| line.starts_with('{')).map(str::to_owned);
        line.with_context(|| format!("the output: {output}")).map(Some)
    })?;
    Ok((running, serde_json::from_str(&ready)?))
}
