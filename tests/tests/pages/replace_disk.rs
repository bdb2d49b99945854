//! The replacement of a disk that works, and of one that is gone.

use std::fs;

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use shorthorn_tests::hosts::name;
use shorthorn_tests::{ensure_block, ensure_has, signal, until, write_block};

use super::{Cluster, LIMIT, Page, VOLUME};

const PAGE: &str = "docs/replace-disk.md";

#[test]
fn a_disk_is_replaced_as_the_page_says() -> Result<()> {
    let cluster = Cluster::start(3)?;
    cluster.attach_new("2", 0)?;
    let mut client = cluster.hosts.client(0, VOLUME)?;
    write_block(&mut client, 0, 1)?;
    let mut page = Page::read(PAGE, "tests/tests/pages/replace_disk.rs")?;
    page.script.set("NAME", VOLUME);

    let drained = cluster.other_host()?;
    page.script.set("NODE", &name(drained));
    page.script.set("PATH", &cluster.disk(drained));
    page.ctl(&cluster, "disk drain NODE PATH")?;
    ensure!(!cluster.nodes_of(VOLUME)?.contains(&name(drained)), "a replica stays");
    // The trash of the disk would be forgotten.
    let remove = ["disk", "remove", &name(drained), &cluster.disk(drained)];
    ensure_has(
        &cluster.hosts.refused(&remove)?,
        &["has 1 directories, which the controller does not list", "--force"],
    )?;
    ensure_has(&page.ctl(&cluster, "volume trash")?, &[VOLUME, &cluster.disk(drained)])?;
    page.at_terminal(&cluster, "volume trash NAME --remove", VOLUME)?;
    page.ctl(&cluster, "disk remove NODE PATH")?;
    let printed = cluster.hosts.ctl(&["disk", "list"])?;
    ensure!(!printed.contains(&cluster.disk(drained)), "{printed}");

    // The other way to lose a disk, on another host. The replica moves to the host that has no disk now.
    cluster.hosts.ctl(&["disk", "add", &name(drained), &cluster.disk(drained)])?;
    let lost = cluster.other_host()?;
    let disk = cluster.disk(lost);
    page.script.set("NODE", &name(lost));
    page.script.set("PATH", &disk);
    fs::rename(&disk, format!("{disk}.away"))?;
    for process in cluster.hosts.processes(lost, "replica")? {
        signal(process, Signal::SIGKILL)?;
    }
    until("report of the agent", LIMIT, || {
        ensure_has(&cluster.hosts.ctl(&["disk", "list"])?, &["no such directory"]).map(Some)
    })?;
    page.at_terminal(&cluster, "disk remove NODE PATH --lost", &disk)?;
    until("replica elsewhere", LIMIT, || {
        let printed = cluster.hosts.ctl(&["replica", "list", "--node", &name(lost)])?;
        ensure!(!printed.contains(&disk), "{printed}");
        Ok(Some(()))
    })?;
    page.ctl(&cluster, "replica list --node NODE")?;
    page.ctl(&cluster, "disk remove NODE PATH")?;

    fs::create_dir(&disk)?;
    page.ctl(&cluster, "disk add NODE PATH")?;
    ensure_has(&page.ctl(&cluster, "rebalance --dry-run")?, &["would be better elsewhere"])?;
    ensure_block(&mut client, 0, 1)?;
    ensure_has(&cluster.hosts.ctl(&["disk", "list"])?, &[&disk])?;
    page.script.finish()
}
