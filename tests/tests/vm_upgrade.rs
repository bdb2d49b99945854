//! The engine is replaced and the clock jumps while fio uses the device: fio sees nothing of it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use shorthorn_tests::{NODE, VmHost, until};
use shorthorn_vmkit::Kernel;

const LIMIT: Duration = Duration::from_secs(300);

#[test]
fn an_engine_is_replaced_under_load_on_ublk() -> Result<()> {
    replaced_under_load(Kernel::Ublk, "ublk")
}

#[test]
fn an_engine_is_replaced_under_load_on_nbd() -> Result<()> {
    replaced_under_load(Kernel::Nbd, "nbd")
}

fn replaced_under_load(kernel: Kernel, frontend: &str) -> Result<()> {
    let host = VmHost::start(VmHost::options(kernel))?;
    host.ctl("volume create v1 --size 64MiB --replicas 3 --soft-anti-affinity")?;
    host.ctl(&format!("volume attach v1 --node {NODE}"))?;
    // One short run after the other, so that the load ends soon after it is told to.
    let load = host.spawn(
        "while test ! -e /root/enough; do fio --name=load --filename=/dev/longhorn/v1 --size=16m --rw=randwrite \
         --bsrange=512-64k --bs_unaligned=0 --blockalign=512 --ioengine=libaio --direct=1 --iodepth=16 \
         --verify=crc32c --verify_fatal=1 --do_verify=1 --fsync=64 --output-format=terse \
         || exit 1; echo run >> /root/runs; done",
    )?;
    runs(&host, 1)?;
    for _ in 0..2 {
        let before = engine_pid(&host)?;
        println!("{frontend}: {}", host.ctl("volume upgrade-engine v1")?.trim());
        ensure!(engine_pid(&host)? != before, "the engine is still process {before}");
        runs(&host, 1)?;
    }
    let before = engine_pid(&host)?;
    let restart = Instant::now();
    host.sh("systemctl restart shorthorn-engine@v1")?;
    println!("{frontend}: systemctl restart took {:.1} s", restart.elapsed().as_secs_f32());
    ensure!(engine_pid(&host)? != before, "the engine is still process {before}");
    runs(&host, 1)?;
    the_clock_jumps(&host)?;
    host.sh("touch /root/enough")?;
    host.finish(load, LIMIT).context("fio saw an error")?;
    host.ctl("volume detach v1").map(drop)
}

/// Nothing that counts time may take a clock that people set for one that runs.
fn the_clock_jumps(host: &VmHost) -> Result<()> {
    let state = || -> Result<(String, String)> {
        let volume = host.inspect("v1")?;
        Ok((engine_pid(host)?, format!("{} {}", volume["robustness"], volume["engine"]["view"])))
    };
    let before = state()?;
    let clock = || -> Result<i64> { Ok(host.sh("date +%s")?.parse()?) };
    for (jump, hours) in [("+1 hour", 1), ("-2 hours", -2), ("+1 hour", 1)] {
        let was = clock()?;
        // The harness's connection to the guest may not outlive it; whether it was done shows in the clock.
        let told = host.vm.run(&format!("date --set '{jump}'"));
        let passed = clock()? - was - hours * 3600;
        ensure!((0..600).contains(&passed), "the clock was not set: {told:?}");
        runs(host, 1).with_context(|| format!("after a jump of {jump}"))?;
        let after = state()?;
        ensure!(after == before, "after a jump of {jump}: {after:?}, before {before:?}");
    }
    Ok(())
}

/// Waits for so many more runs of fio; all have been without an error.
fn runs(host: &VmHost, more: usize) -> Result<()> {
    let count = || -> Result<usize> { Ok(host.sh("cat /root/runs 2>/dev/null || true")?.lines().count()) };
    let enough = count()? + more;
    until("finished run of fio", LIMIT, || Ok((count()? >= enough).then_some(())))
        .with_context(|| host.journal())
}

fn engine_pid(host: &VmHost) -> Result<String> {
    host.sh("systemctl show --property MainPID --value shorthorn-engine@v1.service")
}
