//! Upgrades of the agent, the controller and the engines of hosts.

use anyhow::{Result, ensure};
use shorthorn_tests::hosts::name;
use shorthorn_tests::{ensure_block, ensure_has, until_whole, write_block};

use super::{Cluster, LIMIT, Page, VOLUME};

const PAGE: &str = "docs/upgrade.md";
const HOSTS: usize = 3;

#[test]
fn programs_are_upgraded_as_the_page_says() -> Result<()> {
    let mut cluster = Cluster::start(HOSTS)?;
    cluster.attach_new("3", 0)?;
    let mut client = cluster.hosts.client(0, VOLUME)?;
    write_block(&mut client, 0, 1)?;
    let mut page = Page::read(PAGE, "tests/tests/pages/upgrade.rs")?;

    page.script.next("apt install ./shorthorn-agent_*.deb")?;
    cluster.hosts.install_other_build()?;
    agents_are_restarted(&mut cluster)?;
    let printed = page.ctl(&cluster, "node list")?;
    ensure_has(&printed, &[&name(0), &name(1), &name(2)])?;
    ensure!(needs_upgrade(&cluster, true)?, "the engine is current");
    ensure_has(&page.ctl(&cluster, "doctor")?, &["warned  engines run the installed program"])?;
    engines_are_replaced(&cluster, &mut page)?;
    ensure_block(&mut client, 0, 1)?;

    // A second upgrade, on plain hosts.
    page.script.next("apt install ./shorthorn-controller_*.deb ./shorthornctl_*.deb")?;
    cluster.hosts.stop_controller()?;
    cluster.hosts.start_controller()?;
    page.script.next("apt install ./shorthorn-agent_*.deb")?;
    cluster.hosts.install_first_build()?;
    agents_are_restarted(&mut cluster)?;
    ensure!(needs_upgrade(&cluster, true)?, "the engine is current");
    engines_are_replaced(&cluster, &mut page)?;
    ensure_block(&mut client, 0, 1)?;
    page.script.finish()
}

/// Restarts all agents, as the package does.
fn agents_are_restarted(cluster: &mut Cluster) -> Result<()> {
    for host in 0..HOSTS {
        cluster.hosts.kill_agent(host)?;
        cluster.hosts.start_agent(host)?;
    }
    (0..HOSTS).try_for_each(|host| cluster.until_ready(host, true))
}

fn engines_are_replaced(cluster: &Cluster, page: &mut Page) -> Result<()> {
    let before = cluster.hosts.processes(0, "engine")?;
    let printed = page.ctl(cluster, "upgrade engines")?;
    ensure_has(&printed, &[VOLUME, "ms"])?;
    let after = cluster.hosts.processes(0, "engine")?;
    ensure!(before.len() == 1 && after.len() == 1 && before != after, "{before:?}, then {after:?}");
    ensure!(needs_upgrade(cluster, false)?, "the engine is still another program");
    until_whole(&cluster.hosts.engine_control(0, VOLUME), LIMIT).map(drop)
}

/// Waits until the volume shows that its engine needs an upgrade, or does not.
fn needs_upgrade(cluster: &Cluster, needed: bool) -> Result<bool> {
    let shown = cluster.until_shown(VOLUME, "comparison of the programs", |shown| {
        shown["engine"]["needsUpgrade"] == needed
    })?;
    Ok(shown["engine"]["needsUpgrade"] == needed)
}
