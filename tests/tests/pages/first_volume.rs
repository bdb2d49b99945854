//! The first volume on a host with agent and controller.

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use shorthorn_tests::hosts::name;
use shorthorn_tests::signal;

use super::{Cluster, Page, ensure_block, ensure_has, write};

const PAGE: &str = "docs/first-volume.md";
const NAME: &str = "v1";
const NO_DEVICE: &str = "the frontend socket makes no device; tests/tests/vm_story.rs has file systems";

#[test]
fn the_first_volume_works_as_its_page_says() -> Result<()> {
    let cluster = Cluster::start(1)?;
    let hosts = &cluster.hosts;
    let mut page = Page::read(PAGE, "tests/tests/pages/first_volume.rs")?;
    page.script.set("node1", &name(0));
    let told = page.ctl(&cluster, "node list")?;
    ensure_has(&told, &[&name(0), "socket", &cluster.disk(0)])?;
    // This kernel may have no driver of devices.
    page.run(&cluster, "volume create v1", &["--frontend", "socket"], 0)?;
    let nodes = cluster.nodes_of(NAME)?;
    ensure!(nodes == vec![name(0); 3], "three replicas, all on this node: {nodes:?}");
    page.ctl(&cluster, "volume attach v1")?;
    page.script.leave_out("mkfs.ext4", NO_DEVICE)?;
    page.script.leave_out("mount", NO_DEVICE)?;
    write(&mut hosts.client(0, NAME)?, 0, 1)?;
    let told = page.ctl(&cluster, "volume inspect v1")?;
    ensure_has(&told, &["State", "attached", "Robustness", "healthy", "View", "REPLICA"])?;

    page.script.leave_out("systemctl status", "the agents of this test start processes, not units")?;
    let engines = hosts.processes(0, "engine")?;
    let replicas = hosts.processes(0, "replica")?.len();
    ensure!(engines.len() == 1 && replicas == 3, "{} engines, {replicas} replicas", engines.len());
    let words = page.script.next("systemctl kill -s KILL shorthorn-engine@v1")?;
    println!("{words:?} is a signal to the process {engines:?}");
    signal(engines[0], Signal::SIGKILL)?;
    ensure_block(&mut hosts.client(0, NAME)?, 0, 1)?;
    cluster.until_shown(NAME, "healthy volume", |shown| shown["robustness"] == "healthy")?;
    ensure_has(&page.ctl(&cluster, "volume why v1")?, &["Volume v1 is healthy"])?;

    page.script.leave_out("umount", NO_DEVICE)?;
    page.ctl(&cluster, "volume detach v1")?;
    page.ctl(&cluster, "volume expand v1 1GiB --wait")?;
    page.ctl(&cluster, "volume attach v1")?;
    page.script.leave_out("e2fsck", NO_DEVICE)?;
    page.script.leave_out("resize2fs", NO_DEVICE)?;
    let mut client = hosts.client(0, NAME)?;
    ensure!(client.size_bytes() == 1 << 30, "the device has {} bytes", client.size_bytes());
    ensure_block(&mut client, 0, 1)?;
    drop(client);
    page.ctl(&cluster, "volume detach v1")?;
    page.ctl(&cluster, "volume delete v1 --yes")?;
    ensure_has(&hosts.ctl(&["volume", "trash"])?, &[NAME, "EXPIRES"])?;
    page.script.finish()
}
