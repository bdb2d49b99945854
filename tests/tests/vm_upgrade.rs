//! The engine is replaced and the clock jumps while fio uses the device: fio sees nothing of it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use shorthorn_tests::{FioRuns, NODE, ReadyAnnouncement, Replacement, VmHost, longest_request, until};
use shorthorn_vmkit::Kernel;

const LIMIT: Duration = Duration::from_secs(300);
/// The limit for a request beyond the time of a replacement. After a kill on NBD, the timer of the request
/// takes 3 s of it at most (`REQUEST_TIMER_MS` in the frontend). The rest is for emulated processors.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

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
    // The messages of the engines and the agent are the only trace of a failure: they must not be lost among
    // other units.
    replace_under_load(&host, frontend).with_context(|| logs(&host))
}

fn replace_under_load(host: &VmHost, frontend: &str) -> Result<()> {
    host.ctl("volume create v1 --size 64MiB --replicas 3 --soft-anti-affinity")?;
    host.ctl(&format!("volume attach v1 --node {NODE}"))?;
    no_thread_waits_for_its_own_device(host)?;
    let load = FioRuns::start(
        host,
        "--filename=/dev/longhorn/v1 --size=4m --rw=randwrite --bsrange=512-64k --bs_unaligned=0 \
         --blockalign=512 --iodepth=16 --fsync=64",
    )?;
    load.wait_for(1, LIMIT)?;
    let mut longest_replacement = Duration::ZERO;
    for _ in 0..2 {
        let took =
            replaced(host, frontend, &load, || Ok(host.ctl("volume upgrade-engine v1")?.trim().to_owned()))?;
        longest_replacement = longest_replacement.max(took);
    }
    for number in 1..=restarts()? {
        // systemd limits the starts of a unit in a minute, also those that are asked for.
        host.sh("systemctl reset-failed 'shorthorn-engine@*'")?;
        let took = replaced(host, frontend, &load, || {
            host.sh(&Replacement::Restart.script("v1"))?;
            Ok(format!("systemctl restart {number}"))
        })?;
        longest_replacement = longest_replacement.max(took);
    }
    the_clock_jumps(host, &load)?;
    load.finish(LIMIT)?;
    no_request_timed_out(host, frontend, longest_replacement)?;
    if frontend == "nbd" {
        killed_after_a_handover(host)?;
    }
    host.ctl("volume detach v1").map(drop)
}

/// Returns the number of restarts of the engine: 1, or the environment variable SHORTHORN_RESTARTS.
fn restarts() -> Result<usize> {
    std::env::var("SHORTHORN_RESTARTS").map_or(Ok(1), |number| number.parse().context("SHORTHORN_RESTARTS"))
}

/// Checks that every thread of the engine has PF_MEMALLOC_NOIO, which PR_SET_IO_FLUSHER sets: none starts
/// write-back, which may be through the engine itself, to get memory.
fn no_thread_waits_for_its_own_device(host: &VmHost) -> Result<()> {
    let pid = engine_pid(host)?;
    let unprotected = host.sh(&format!(
        "ls -d /proc/{pid}/task/* | wc -l | grep -qv '^[0-3]$' || echo 'too few threads'; \
         for stat in /proc/{pid}/task/*/stat; do \
             sed 's/.*) //' $stat | awk '{{ exit int($7 / 524288) % 2 == 0 }}' || cut -c 1-40 $stat; done"
    ))?;
    ensure!(unprotected.is_empty(), "threads that may wait for the volume that they serve: {unprotected}");
    Ok(())
}

/// Tests that the process that has taken the sockets dies in the middle of requests. The next one must not
/// take them, and no process may keep them open, or the kernel would not notice their death.
fn killed_after_a_handover(host: &VmHost) -> Result<()> {
    let load = host.spawn(
        "fio --name=load --filename=/dev/longhorn/v1 --size=6m --rw=randwrite --bs=4k --ioengine=libaio \
         --direct=1 --iodepth=16 --verify=crc32c --verify_fatal=1 --do_verify=1 --output-format=json \
         --output=/root/killed",
    )?;
    let sockets = engine_sockets(host)?;
    host.sh(
        "for n in $(seq 1200); do grep -q '[1-9]' /sys/block/nbd0/inflight && exit; sleep 0.05; done; exit 1",
    )?;
    host.sh(&Replacement::Kill.timed("v1"))?;
    host.finish(load, LIMIT).context("fio saw an error after a kill")?;
    let (longest, away) = (longest_request(host, "/root/killed")?, Replacement::took(host)?);
    println!("nbd, kill -9: the longest request took {longest:?}, the next engine served after {away:?}");
    ensure!(longest < away + REQUEST_LIMIT, "a request has waited for {longest:?}");
    let kept = engine_sockets(host)?.intersection(&sockets).count();
    ensure!(kept == 0, "the sockets of a process that was killed are used on");
    let replaced = host.sh("dmesg | grep -c 'reconnected socket'")?;
    ensure!(replaced == "1", "{replaced} connections were replaced, not the one");
    Ok(())
}

/// The same without systemd: the supervisor keeps the sockets.
#[test]
fn an_engine_of_a_supervisor_is_replaced_on_nbd() -> Result<()> {
    let host = VmHost::bare(VmHost::options(Kernel::Nbd))?;
    host.sh("modprobe nbd")?;
    let running = host.spawn(
        "shorthorn-agent run v1 --dir /var/lib/longhorn/v1 --size 64MiB --replicas 2 --frontend nbd",
    )?;
    let ready = until("volume that is ready", LIMIT, || {
        Ok(running.output_so_far().text().lines().find(|line| line.starts_with('{')).map(str::to_owned))
    })?;
    let ready: ReadyAnnouncement = serde_json::from_str(&ready)?;
    let load =
        FioRuns::start(&host, "--filename=/dev/longhorn/v1 --size=2m --rw=randwrite --bs=4k --iodepth=16")?;
    let engine = || host.sh("pgrep -x shorthorn-eng");
    let mut before = engine()?;
    for _ in 0..2 {
        load.wait_for(1, LIMIT)?;
        let sockets = sockets_of(&host, &before)?;
        let in_flight = "grep -q '[1-9]' /sys/block/nbd0/inflight";
        host.sh(&format!(
            "for n in $(seq 1200); do {in_flight} && kill -HUP {} && exit; sleep 0.05; done; exit 1",
            ready.pids.supervisor
        ))?;
        let next = until("next engine", LIMIT, || {
            Ok(engine().ok().filter(|pid| !pid.is_empty() && *pid != before))
        })?;
        until("socket of the engine before", LIMIT, || {
            let kept = sockets_of(&host, &next).is_ok_and(|now| now.intersection(&sockets).count() == 1);
            Ok(kept.then_some(()))
        })
        .with_context(|| running.output_so_far().text())?;
        before = next;
    }
    load.wait_for(1, LIMIT)
        .and_then(|()| load.finish(LIMIT))
        .with_context(|| running.output_so_far().text())?;
    let log = host.sh("dmesg | grep -E 'timed out|control failed|reconnected' || true")?;
    ensure!(log.is_empty(), "the kernel says: {log}");
    host.sh(&format!("kill -TERM {}", ready.pids.supervisor))?;
    host.finish(running, LIMIT).map(drop)
}

/// Replaces the engine and waits for a whole run of fio after that. On NBD the new process has the very
/// sockets of the old one. Returns the time of the replacement.
fn replaced(
    host: &VmHost,
    frontend: &str,
    load: &FioRuns<'_>,
    replace: impl FnOnce() -> Result<String>,
) -> Result<Duration> {
    let (before, sockets) = (engine_pid(host)?, engine_sockets(host)?);
    let begin = Instant::now();
    let said = replace()?;
    let took = begin.elapsed();
    println!("{frontend}: {said}: {:.1} s", took.as_secs_f32());
    ensure!(engine_pid(host)? != before, "the engine is still process {before}");
    let kept = engine_sockets(host)?.intersection(&sockets).count();
    let spec: serde_json::Value =
        serde_json::from_str(&host.sh("cat /var/lib/shorthorn/instances/engine/v1.json")?)?;
    let queues = spec["queues"].as_u64().context("the spec has queues")?;
    let expected = if frontend == "nbd" { queues } else { 0 };
    ensure!(kept as u64 == expected, "{kept} of {expected} sockets were handed over");
    load.wait_for(1, LIMIT)?;
    Ok(took)
}

/// Checks that the kernel sends nothing again, and gives up no connection, while engines are replaced. Checks
/// that no request has waited for much longer than a replacement takes on this machine.
fn no_request_timed_out(host: &VmHost, frontend: &str, replacement: Duration) -> Result<()> {
    // On NBD the timer of a request runs out after 2 s. That says nothing on an emulated machine.
    let complaints =
        "timed out|reconnected|control failed|Dead connection|send failed|shutting down|I/O error";
    // The files for the machine are on a disk of an odd size, which is another matter.
    let log = host.sh(&format!("dmesg | grep -E '{complaints}' | grep -v 'dev sd' || true"))?;
    ensure!(log.is_empty(), "the kernel says: {log}");
    let longest = longest_request(host, FioRuns::REPORTS)?;
    println!("{frontend}: the longest request took {longest:?}, the longest replacement {replacement:?}");
    // The longest of each part, by the log of the engines.
    println!(
        "{}",
        host.sh("journalctl --no-pager --output cat -u shorthorn-engine@v1 | \
             grep -oE '(took|drained|opened|prepared|live)_ms=[0-9]+' | sort -t= -k 1,1 -k 2,2nr | \
             sort -s -u -t= -k 1,1 || true")?
    );
    ensure!(longest < replacement + REQUEST_LIMIT, "a request has waited for {longest:?}");
    Ok(())
}

/// Tests that changes of the wall clock by people do not affect any time-out.
fn the_clock_jumps(host: &VmHost, load: &FioRuns<'_>) -> Result<()> {
    let state = || -> Result<(String, String)> {
        let volume = host.inspect("v1")?;
        Ok((engine_pid(host)?, format!("{} {}", volume["robustness"], volume["engine"]["view"])))
    };
    let before = state()?;
    let clock = || -> Result<i64> { Ok(host.sh("date +%s")?.parse()?) };
    for (jump, hours) in [("+1 hour", 1), ("-2 hours", -2), ("+1 hour", 1)] {
        let was = clock()?;
        // The harness's connection to the guest may not outlive it; whether it was done shows in the clock.
        let outcome = host.vm.run(&format!("date --set '{jump}'"));
        let passed = clock()? - was - hours * 3600;
        ensure!((0..600).contains(&passed), "the clock was not set: {outcome:?}");
        load.wait_for(1, LIMIT).with_context(|| format!("after a jump of {jump}"))?;
        let after = state()?;
        ensure!(after == before, "after a jump of {jump}: {after:?}, before {before:?}");
    }
    Ok(())
}

/// Returns the sockets that the engine has open, as /proc shows them.
fn engine_sockets(host: &VmHost) -> Result<BTreeSet<String>> {
    sockets_of(host, &engine_pid(host)?)
}

fn sockets_of(host: &VmHost, pid: &str) -> Result<BTreeSet<String>> {
    let links = host.sh(&format!("find /proc/{pid}/fd -type l -printf '%l\\n' | grep '^socket:'"))?;
    Ok(links.lines().map(str::to_owned).collect())
}

/// Returns the logs of the engines, the agent and the kernel.
fn logs(host: &VmHost) -> String {
    let journal = "journalctl --no-pager --output short-monotonic";
    let output = host
        .vm
        .run(&format!("{journal} -u 'shorthorn-engine@*' -u shorthorn-agent; {journal} -k --lines 100"));
    output.map_or_else(|error| format!("no journal: {error:#}"), |output| output.text())
}

fn engine_pid(host: &VmHost) -> Result<String> {
    host.sh("systemctl show --property MainPID --value shorthorn-engine@v1.service")
}
