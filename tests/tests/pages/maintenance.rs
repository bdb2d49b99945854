//! The restart of a host, and drains, without Kubernetes.

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use shorthorn_tests::hosts::name;
use shorthorn_tests::{ensure_block, ensure_has, signal, until_whole, write_block};

use super::{Cluster, LIMIT, Page, VOLUME};

const PAGE: &str = "docs/maintenance.md";

#[test]
fn a_host_is_restarted_and_drained_as_the_page_says() -> Result<()> {
    let mut cluster = Cluster::start(3)?;
    cluster.attach_new("2", 0)?;
    let host = cluster.other_host()?;
    let mut page = Page::read(PAGE, "tests/tests/pages/maintenance.rs")?;
    page.script.set("NODE", &name(host));
    page.script.set("PATH", &cluster.disk(host));
    page.ctl(&cluster, "node cordon NODE")?;
    // The host of the engine cannot be restarted.
    let refusal = cluster.hosts.refused(&["node", "can-reboot", &name(0)])?;
    ensure_has(&refusal, &["volume v: attached there"])?;
    page.ctl(&cluster, "node can-reboot NODE --wait")?;
    page.script.next("reboot")?;
    cluster.hosts.kill_agent(host)?;
    for process in cluster.hosts.processes(host, "replica")? {
        signal(process, Signal::SIGKILL)?;
    }
    let mut client = cluster.hosts.client(0, VOLUME)?;
    write_block(&mut client, 0, 1)?;
    cluster.hosts.start_agent(host)?;
    cluster.until_ready(host, true)?;
    page.ctl(&cluster, "node uncordon NODE")?;
    until_whole(&cluster.hosts.engine_control(0, VOLUME), LIMIT)?;
    ensure!(cluster.nodes_of(VOLUME)?.contains(&name(host)), "the replica did not come back");

    ensure_has(&page.ctl(&cluster, "node drain NODE")?, &["nothing is left"])?;
    page.ctl(&cluster, "disk drain NODE PATH")?;
    let nodes = cluster.nodes_of(VOLUME)?;
    ensure!(nodes.len() == 2 && !nodes.contains(&name(host)), "{nodes:?}");
    page.ctl(&cluster, "node uncordon NODE")?;
    page.ctl(&cluster, "disk uncordon NODE PATH")?;
    ensure_block(&mut client, 0, 1)?;
    // The node takes new replicas again.
    cluster.hosts.ctl(&["volume", "set", VOLUME, "--replicas", "3"])?;
    cluster.until_shown(VOLUME, "replica on each node", |shown| {
        shown["replicas"].as_array().is_some_and(|all| all.len() == 3) && shown["robustness"] == "healthy"
    })?;
    page.script.finish()
}
