//! The addresses of hosts change under a load that checks every answer: volumes stay attached, replicas and
//! engines follow, and no request fails. Each host is a network namespace of this machine.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shorthorn_tests::hosts::{Hosts, name};
use shorthorn_tests::{Guest, GuestOptions, Load, compare_exports, is_whole, under_load, until, until_whole};

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(120);
const VOLUME: &str = "v";
/// The host of the engine.
const ENGINE: usize = 0;
/// The host of a replica.
const REPLICA: usize = 1;

struct Cluster {
    hosts: Hosts,
    folder: tempfile::TempDir,
}

/// Three hosts whose agents follow eth0, with a volume that is attached to the first.
fn cluster() -> Result<Cluster> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let hosts = Hosts::start_following(folder.path(), 3)?;
    hosts.ctl(&["volume", "create", VOLUME, "--size", "64MiB", "--frontend", "socket", "--replicas", "3"])?;
    hosts.ctl(&["volume", "attach", VOLUME, "--node", &name(ENGINE)])?;
    until_whole(&hosts.engine_control(ENGINE, VOLUME), LIMIT)?;
    Ok(Cluster { hosts, folder })
}

impl Cluster {
    /// Runs `change` under load, and compares the replicas at the end.
    fn under_load(&self, change: impl FnOnce(&Load) -> Result<()>) -> Result<()> {
        let options = GuestOptions { sectors: 8192, ..GuestOptions::new(fastrand::u64(..)) };
        let guest = Guest::new(self.hosts.client(ENGINE, VOLUME)?, options);
        let ((), guest) = under_load(guest, change)?;
        println!("{:?}", guest.counts());
        let directories = self.hosts.directories(VOLUME)?;
        self.hosts.detach(VOLUME)?;
        compare_exports(&directories, self.folder.path()).map(drop)
    }

    /// Waits until all replicas are members, and those of other hosts have exactly these addresses.
    fn await_members_at(&self, addresses: &[&str]) -> Result<()> {
        until(&format!("members at {addresses:?}"), LIMIT, || {
            let status = self.hosts.engine_status(ENGINE, VOLUME)?;
            let remote: Vec<&str> =
                status.members.iter().filter_map(|member| member.address.strip_prefix("tcp:")).collect();
            let is_there = |address: &&str| remote.iter().any(|remote| remote.starts_with(*address));
            ensure!(is_whole(&status), "not whole: {status:#?}");
            ensure!(
                remote.len() == addresses.len() && addresses.iter().all(is_there),
                "members are at {remote:?}"
            );
            Ok(Some(()))
        })
    }

    fn await_node(&self, host: usize, text: &str, is_there: bool) -> Result<()> {
        let node = name(host);
        until(&format!("{text:?} of node {node}"), LIMIT, || {
            let shown = self.hosts.ctl(&["node", "inspect", &node])?;
            ensure!(shown.contains(text) == is_there, "{shown}");
            Ok(Some(()))
        })
    }
}

#[test]
fn a_replica_moves_to_the_new_address_of_its_host() -> Result<()> {
    let cluster = cluster()?;
    cluster.under_load(|load| {
        load.wait_for_answers(100, LIMIT)?;
        cluster.hosts.set_address(REPLICA, "10.77.0.101/24")?;
        cluster.await_members_at(&["10.77.0.101:", "10.77.0.3:"])?;
        load.wait_for_answers(100, LIMIT)?;
        cluster.await_node(REPLICA, "10.77.0.101", true)
    })
}

#[test]
fn an_address_stays_while_its_link_is_down() -> Result<()> {
    let cluster = cluster()?;
    cluster.under_load(|load| {
        cluster.hosts.set_interface(REPLICA, false)?;
        cluster.await_node(REPLICA, "eth0 is down", true)?;
        cluster.await_node(REPLICA, "10.77.0.2", true)?;
        load.wait_for_answers(100, LIMIT)?;
        cluster.hosts.set_interface(REPLICA, true)?;
        cluster.await_members_at(&["10.77.0.2:", "10.77.0.3:"])?;
        cluster.await_node(REPLICA, "eth0 is down", false)?;
        load.wait_for_answers(100, LIMIT).map(drop)
    })
}

#[test]
fn an_engine_connects_again_when_its_own_host_has_another_address() -> Result<()> {
    let cluster = cluster()?;
    cluster.under_load(|load| {
        load.wait_for_answers(100, LIMIT)?;
        cluster.hosts.set_address(ENGINE, "10.77.0.100/24")?;
        cluster.await_node(ENGINE, "10.77.0.100", true)?;
        load.wait_for_answers(100, LIMIT)?;
        cluster.await_members_at(&["10.77.0.2:", "10.77.0.3:"])
    })
}

#[test]
fn hosts_change_from_ipv4_to_ipv6() -> Result<()> {
    let cluster = cluster()?;
    cluster.under_load(|load| {
        for host in 0..3 {
            cluster.hosts.set_address(host, &format!("fd77::{}/64", host + 1))?;
        }
        cluster.await_members_at(&["[fd77::2]:", "[fd77::3]:"])?;
        load.wait_for_answers(100, LIMIT).map(drop)
    })
}
