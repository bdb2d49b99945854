//! Volumes across three hosts, which are network namespaces of this machine. Links are cut, processes die,
//! and the controller stops and starts, under a load that checks every answer.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use shorthorn_tests::hosts::{Hosts, name};
use shorthorn_tests::{
    Guest, GuestOptions, Load, NbdRequest, compare_exports, is_whole, signal, under_load, until, until_whole,
};

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(120);
const CHAOS_SECONDS: u64 = 25;
const VOLUME: &str = "v";
const UPGRADES: u32 = 5;

struct Cluster {
    hosts: Hosts,
    folder: tempfile::TempDir,
    seed: u64,
}

/// Hosts with a volume that is attached to the first.
fn cluster(replicas: &str) -> Result<Cluster> {
    let seed = match std::env::var("SHORTHORN_SEED") {
        Ok(seed) => seed.parse().context("SHORTHORN_SEED is not a number")?,
        Err(_) => fastrand::u64(..),
    };
    println!("SHORTHORN_SEED={seed}");
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let hosts = Hosts::start(folder.path(), 3)?;
    let create =
        ["volume", "create", VOLUME, "--size", "64MiB", "--frontend", "socket", "--replicas", replicas];
    hosts.ctl(&create)?;
    hosts.ctl(&["volume", "attach", VOLUME, "--node", &name(0)])?;
    until_whole(&hosts.engine_control(0, VOLUME), LIMIT)?;
    Ok(Cluster { hosts, folder, seed })
}

impl Cluster {
    fn guest(&self) -> Result<Guest> {
        let options = GuestOptions { sectors: 8192, ..GuestOptions::new(self.seed) };
        Ok(Guest::new(self.hosts.client(0, VOLUME)?, options))
    }

    fn compare_replicas(&self) -> Result<()> {
        let directories = self.hosts.directories(VOLUME)?;
        self.hosts.detach(VOLUME)?;
        compare_exports(&directories, self.folder.path()).map(drop)
    }
}

#[test]
fn a_client_sees_no_error_while_links_are_cut_and_processes_die() -> Result<()> {
    let seconds = std::env::var("SHORTHORN_CHAOS_SECONDS").map_or(Ok(CHAOS_SECONDS), |text| text.parse())?;
    let mut cluster = cluster("3")?;
    let guest = cluster.guest()?;
    let ((), guest) = under_load(guest, |load| {
        let faults = cluster.faults_at_random(load, Duration::from_secs(seconds));
        // After any error, the load can only end when it is answered.
        (0..3).try_for_each(|host| cluster.hosts.set_link(host, true))?;
        println!("{:?}", faults?);
        until_whole(&cluster.hosts.engine_control(0, VOLUME), LIMIT)?;
        load.wait_for_answers(100, LIMIT).map(drop)
    })?;
    println!("{:?}", guest.counts());
    until_whole(&cluster.hosts.engine_control(0, VOLUME), LIMIT)?;
    cluster.compare_replicas()
}

#[derive(Debug, Default)]
struct Faults {
    cuts: u32,
    replicas: u32,
    engines: u32,
    agents: u32,
    controllers: u32,
}

impl Cluster {
    fn faults_at_random(&mut self, load: &Load, time: Duration) -> Result<Faults> {
        let mut random = fastrand::Rng::with_seed(self.seed ^ 0x6c69_6e6b);
        let (mut faults, deadline) = (Faults::default(), Instant::now() + time);
        while Instant::now() < deadline {
            load.check()?;
            self.fault(&mut random, &mut faults)?;
            if random.u8(..) < 100 {
                (0..3).try_for_each(|host| self.hosts.set_link(host, true))?;
                until_whole(&self.hosts.engine_control(0, VOLUME), LIMIT)?;
                load.wait_for_answers(50, LIMIT)?;
            }
        }
        Ok(faults)
    }

    fn fault(&mut self, random: &mut fastrand::Rng, faults: &mut Faults) -> Result<()> {
        // The random duration of a fault, and of the calm after it: each sleep below is a part of a fault.
        let pause = Duration::from_millis(random.u64(0..1500));
        let host = random.usize(0..3);
        match random.u8(..) {
            0..110 => {
                self.hosts.set_link(host, false)?;
                std::thread::sleep(pause * 2); // the length of the cut
                self.hosts.set_link(host, true)?;
                faults.cuts += 1;
            }
            110..180 => faults.replicas += self.kill_all(host, "replica")?,
            180..210 => faults.engines += self.kill_all(0, "engine")?,
            210..230 => {
                self.hosts.kill_agent(host)?;
                self.hosts.start_agent(host)?;
                faults.agents += 1;
            }
            230.. => {
                self.hosts.kill_controller()?;
                std::thread::sleep(pause); // the time without a controller
                self.hosts.start_controller()?;
                faults.controllers += 1;
            }
        }
        std::thread::sleep(pause / 2); // the calm before the next fault
        Ok(())
    }

    fn kill_all(&self, host: usize, role: &str) -> Result<u32> {
        let mut killed = 0;
        for pid in self.hosts.processes(host, role)? {
            killed += u32::from(signal(pid, Signal::SIGKILL).is_ok());
        }
        Ok(killed)
    }
}

/// The host of the engine loses all links. Another engine serves; the first one never answers again, and no
/// write that it had answered is lost.
#[test]
fn an_engine_that_is_cut_off_is_fenced() -> Result<()> {
    let mut cluster = cluster("3")?;
    let mut guest = cluster.guest()?;
    while guest.counts().answered < 500 {
        guest.step()?;
    }
    // Its agent too, else the controller would stop the engine.
    cluster.hosts.kill_agent(0)?;
    cluster.hosts.set_link(0, false)?;
    let mut successor = cluster.hosts.attach_by_hand(VOLUME, 0, 1)?;
    let deadline = Instant::now() + LIMIT;
    let client = loop {
        // Answers of the first engine before the second one serves count.
        guest.step()?;
        if let Some(client) = successor.try_client()? {
            break client;
        }
        ensure!(Instant::now() < deadline, "the second engine does not serve: {:?}", successor.status());
    };
    guest.take_answers(Duration::ZERO)?;
    let mut old = guest.move_to(client);
    ensure!(!old.outstanding().is_empty(), "the first engine has answered everything");
    old.submit(NbdRequest::Flush);
    old.submit(NbdRequest::Read { offset: 0, length: 4096 });
    while guest.counts().answered < 2000 {
        guest.step()?;
        ensure_silent(&mut old)?;
    }
    // Its link to the replicas works again, and they refuse it.
    cluster.hosts.set_link(0, true)?;
    let deadline = Instant::now() + LIMIT;
    while !is_whole(&successor.status()?) {
        guest.step()?;
        ensure_silent(&mut old)?;
        ensure!(Instant::now() < deadline, "not all are members again: {:#?}", successor.status()?);
    }
    guest.compare_everything()?;
    ensure_silent(&mut old)
}

/// The host of a volume loses all links, and the volume is wanted elsewhere. It moves when the engine on that
/// host can have nothing acknowledged any more, and no acknowledged write is lost. When the host is back, its
/// engine is removed.
#[test]
fn a_volume_moves_from_a_host_that_is_cut_off() -> Result<()> {
    let mut cluster = cluster("3")?;
    let mut guest = cluster.guest()?;
    while guest.counts().answered < 500 {
        guest.step()?;
    }
    cluster.hosts.kill_agent(0)?;
    cluster.hosts.set_link(0, false)?;
    cluster.hosts.ctl(&["volume", "detach", VOLUME])?;
    // The answers until here count.
    guest.take_answers(Duration::ZERO)?;
    cluster.hosts.ctl(&["volume", "attach", VOLUME, "--node", &name(1)])?;
    let mut old = guest.move_to(cluster.hosts.client(1, VOLUME)?);
    old.submit(NbdRequest::Flush);
    old.submit(NbdRequest::Read { offset: 0, length: 4096 });
    while guest.counts().answered < 2000 {
        guest.step()?;
        ensure_silent(&mut old)?;
    }
    cluster.hosts.set_link(0, true)?;
    cluster.hosts.start_agent(0)?;
    until("end of the engine of the lost host", LIMIT, || {
        guest.step()?;
        let left = cluster.hosts.processes(0, "engine")?;
        ensure!(left.is_empty(), "{left:?} is left");
        Ok(Some(()))
    })?;
    // Its engine was started without the replica of the lost host, and gets its address.
    until("three members", LIMIT, || {
        let shown = cluster.hosts.inspect(VOLUME)?;
        ensure!(shown["robustness"] == "healthy", "{shown:#}");
        Ok(Some(()))
    })?;
    guest.compare_everything()?;
    drop(guest);
    cluster.compare_replicas()
}

fn ensure_silent(old: &mut shorthorn_tests::NbdClient) -> Result<()> {
    while let Some(completion) = old.wait(Duration::ZERO)? {
        ensure!(completion.outcome.is_err(), "an engine that was replaced answers {:?}", completion.request);
    }
    Ok(())
}

/// A dead replica of three holds requests up until its process is seen to be gone, or its time-out is over.
/// The time-out is 2 s on these hosts.
#[test]
fn a_volume_continues_without_a_dead_replica() -> Result<()> {
    let cluster = cluster("3")?;
    let whole = || until_whole(&cluster.hosts.engine_control(0, VOLUME), LIMIT).map(drop);
    let ((), guest) = under_load(cluster.guest()?, |load| {
        for host in [1, 2, 1] {
            load.wait_for_answers(200, LIMIT)?;
            ensure!(cluster.kill_all(host, "replica")? == 1, "host {host} has not one replica");
            load.wait_for_answers(200, LIMIT)?;
            whole()?;
        }
        Ok(())
    })?;
    let killed = guest.counts().longest_stall;
    let ((), guest) = under_load(guest, |load| {
        for host in [1, 2, 1] {
            load.wait_for_answers(200, LIMIT)?;
            cluster.hosts.set_link(host, false)?;
            until_degraded(&cluster.hosts)?;
            load.wait_for_answers(200, LIMIT)?;
            cluster.hosts.set_link(host, true)?;
            whole()?;
        }
        Ok(())
    })?;
    let cut = guest.counts().longest_stall;
    println!("longest wait: {killed:?} with replicas killed, {cut:?} with links cut");
    ensure!(cut < Duration::from_secs(20), "a cut link holds requests up for {cut:?}");
    cluster.compare_replicas()
}

fn until_degraded(hosts: &Hosts) -> Result<()> {
    until("engine that continues without a replica", LIMIT, || {
        let status = hosts.engine_status(0, VOLUME)?;
        Ok((!is_whole(&status)).then_some(()))
    })
}

/// The engine's process is replaced again and again under a load that checks every answer. The processors are
/// not emulated, so the reported pause is that of a real host.
#[test]
fn an_engine_is_replaced_under_load() -> Result<()> {
    let cluster = cluster("3")?;
    let guest = cluster.guest()?;
    let ((), guest) = under_load(guest, |load| {
        for _ in 0..UPGRADES {
            load.wait_for_answers(200, LIMIT)?;
            println!("{}", cluster.hosts.ctl(&["volume", "upgrade-engine", VOLUME])?.trim());
            until_whole(&cluster.hosts.engine_control(0, VOLUME), LIMIT)?;
        }
        load.wait_for_answers(200, LIMIT).map(drop)
    })?;
    println!("{:?}", guest.counts());
    cluster.compare_replicas()
}

/// Half of two replicas continues only with the arbiter: without a controller the volume waits, and continues
/// when one runs.
#[test]
fn half_of_a_volume_waits_for_the_controller() -> Result<()> {
    let mut cluster = cluster("2")?;
    let other =
        (1..3).find(|host| cluster.hosts.processes(*host, "replica").is_ok_and(|all| !all.is_empty()));
    let other = other.context("both replicas are on the first host")?;
    let guest = cluster.guest()?;
    under_load(guest, |load| {
        for _ in 0..3 {
            load.wait_for_answers(200, LIMIT)?;
            cluster.hosts.kill_controller()?;
            cluster.hosts.set_link(other, false)?;
            until("engine that waits for the arbiter", LIMIT, || {
                Ok(cluster.hosts.engine_status(0, VOLUME)?.grant_wanted)
            })?;
            let frozen_at = load.answered();
            cluster.hosts.start_controller()?;
            let answers = load.answered() - frozen_at;
            let waited = if answers > 0 { Duration::ZERO } else { load.wait_for_answers(1, LIMIT)? };
            println!("a volume of two continues {waited:?} after the controller answers its clients");
            ensure!(waited < Duration::from_secs(20), "thawing took {waited:?}");
            cluster.hosts.set_link(other, true)?;
            until_whole(&cluster.hosts.engine_control(0, VOLUME), LIMIT)?;
        }
        Ok(())
    })?;
    cluster.compare_replicas()
}
