//! Hosts' networks without virtual machines: namespaces joined by a bridge, with links that a test can cut.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use crate::signal;

const PREFIX: &str = "shorthorn";

/// Network namespaces called after the process that made them, joined by a bridge in one more; gone when
/// dropped.
#[derive(Debug)]
pub struct Network {
    name: String,
    hosts: usize,
}

impl Network {
    /// Makes the namespaces.
    ///
    /// # Errors
    /// This is not root, or the kernel has no network namespaces.
    pub fn create(hosts: usize) -> Result<Network> {
        ensure!(
            nix::unistd::geteuid().is_root(),
            "network namespaces need root: run this test as root (make test does not use sudo by itself)"
        );
        remove_leftovers()?;
        static CREATED: AtomicU32 = AtomicU32::new(0);
        let number = CREATED.fetch_add(1, Ordering::Relaxed);
        let network = Network { name: format!("{PREFIX}-{}-{number}", std::process::id()), hosts };
        let hub = network.hub();
        ip(&["netns", "add", &hub]).context("making a network namespace")?;
        ip(&["-n", &hub, "link", "add", "bridge", "type", "bridge"])?;
        ip(&["-n", &hub, "link", "set", "bridge", "up"])?;
        for host in 0..hosts {
            let (namespace, port) = (network.host(host), Network::port(host));
            ip(&["netns", "add", &namespace])?;
            let peer = ["type", "veth", "peer", "name", "eth0", "netns", &namespace];
            ip(&[&["-n", &hub, "link", "add", &port], &peer[..]].concat())?;
            ip(&["-n", &hub, "link", "set", &port, "master", "bridge", "up"])?;
            ip(&["-n", &namespace, "link", "set", "lo", "up"])?;
            ip(&["-n", &namespace, "address", "add", &format!("{}/24", address(host)), "dev", "eth0"])?;
            ip(&["-n", &namespace, "link", "set", "eth0", "up"])?;
        }
        Ok(network)
    }

    /// Cuts the link of a host, or heals it.
    ///
    /// # Errors
    /// The host does not exist.
    pub fn set_link(&self, host: usize, up: bool) -> Result<()> {
        let state = if up { "up" } else { "down" };
        ip(&["-n", &self.hub(), "link", "set", &Network::port(host), state]).map(drop)
    }

    /// Limits the speed of a host's link in each direction. The switch drops a frame that would wait for 50
    /// ms, like one with small buffers.
    ///
    /// # Errors
    /// The host does not exist, or the kernel has no token bucket filter (sch_tbf).
    pub fn limit_rate(&self, host: usize, mbit_per_s: u32) -> Result<()> {
        let rate = format!("{mbit_per_s}mbit");
        for (namespace, device) in [(self.host(host), "eth0"), (self.hub(), &*Network::port(host))] {
            let qdisc = ["qdisc", "replace", "dev", device, "root", "tbf", "rate", &rate];
            let arguments =
                [&["-n", &namespace], &qdisc[..], &["burst", "256kb", "latency", "50ms"]].concat();
            run("tc", &arguments)?;
        }
        Ok(())
    }

    /// Sets the interface of a host down or up. Unlike with a cut link, the host notices that itself.
    ///
    /// # Errors
    /// The host does not exist.
    pub fn set_interface(&self, host: usize, up: bool) -> Result<()> {
        let state = if up { "up" } else { "down" };
        ip(&["-n", &self.host(host), "link", "set", "eth0", state]).map(drop)
    }

    /// Removes all addresses of a host's interface, and gives it another one.
    ///
    /// # Errors
    /// The host does not exist.
    pub fn set_address(&self, host: usize, address: &str) -> Result<()> {
        let namespace = self.host(host);
        ip(&["-n", &namespace, "address", "flush", "dev", "eth0", "scope", "global"])?;
        ip(&["-n", &namespace, "address", "add", address, "dev", "eth0"]).map(drop)
    }

    /// Returns the processes of a host.
    ///
    /// # Errors
    /// The host does not exist.
    pub fn processes(&self, host: usize) -> Result<Vec<i32>> {
        processes_in(&self.host(host))
    }

    /// Returns the file that the network of a host is entered with.
    #[must_use]
    pub fn file(&self, host: usize) -> PathBuf {
        Path::new("/run/netns").join(self.host(host))
    }

    fn hub(&self) -> String {
        format!("{}-hub", self.name)
    }

    fn host(&self, host: usize) -> String {
        format!("{}-{host}", self.name)
    }

    fn port(host: usize) -> String {
        format!("port{host}")
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for namespace in (0..self.hosts).map(|host| self.host(host)).chain([self.hub()]) {
            // A part of it may be missing if making it has failed.
            let _ = remove_namespace(&namespace);
        }
    }
}

/// Removes the remains of killed tests.
fn remove_leftovers() -> Result<()> {
    let list = ip(&["netns", "list"])?;
    for namespace in list.lines().filter_map(|line| line.split_whitespace().next()) {
        let Some(rest) = namespace.strip_prefix(PREFIX).and_then(|rest| rest.strip_prefix('-')) else {
            continue;
        };
        let owner = rest.split('-').next().unwrap_or_default();
        if !Path::new("/proc").join(owner).exists() {
            // Another test may be at it too.
            let is_gone = |_: &anyhow::Error| !Path::new("/run/netns").join(namespace).exists();
            remove_namespace(namespace).or_else(|error| if is_gone(&error) { Ok(()) } else { Err(error) })?;
        }
    }
    Ok(())
}

fn remove_namespace(namespace: &str) -> Result<()> {
    for pid in processes_in(namespace)? {
        let _ = signal(pid, Signal::SIGKILL); // it may have ended meanwhile
    }
    ip(&["netns", "delete", namespace]).map(drop)
}

fn processes_in(namespace: &str) -> Result<Vec<i32>> {
    Ok(ip(&["netns", "pids", namespace])?.lines().filter_map(|line| line.trim().parse().ok()).collect())
}

/// Returns the IPv4 address that the other hosts use.
#[must_use]
pub fn address(host: usize) -> String {
    format!("10.77.0.{}", host + 1)
}

fn ip(arguments: &[&str]) -> Result<String> {
    run("ip", arguments)
}

/// Runs a program of the package iproute2.
fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.with_context(|| format!("starting {program} (package iproute2)"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), stderr.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
