//! The loss of a host that uses a volume.

use anyhow::{Result, ensure};
use shorthorn_tests::hosts::name;
use shorthorn_tests::{ensure_block, ensure_has, write_block};

use super::{Cluster, Page, VOLUME};

const PAGE: &str = "docs/lost-node.md";
/// The host that is lost.
const LOST: usize = 2;

#[test]
fn a_lost_node_is_given_up_as_the_page_says() -> Result<()> {
    let mut cluster = Cluster::start(3)?;
    cluster.attach_new("3", LOST)?;
    write_block(&mut cluster.hosts.client(LOST, VOLUME)?, 0, 1)?;
    cluster.hosts.set_link(LOST, false)?;
    cluster.hosts.kill_agent(LOST)?;
    cluster.until_ready(LOST, false)?;

    let mut page = Page::read(PAGE, "tests/tests/pages/lost_node.rs")?;
    page.script.set("NODE", &name(LOST));
    page.script.set("NAME", VOLUME);
    page.script.set("OTHER", &name(0));
    // 6: something is wrong.
    ensure_has(&page.run(&cluster, "status", &[], 6)?, &[&format!("node {}", name(LOST))])?;
    ensure_has(&page.ctl(&cluster, "node inspect NODE")?, &["Ready no"])?;
    ensure_has(&page.ctl(&cluster, "volume why NAME")?, &[&name(LOST), "What you can do"])?;

    // The old engine runs, cut off.
    page.ctl(&cluster, "volume detach NAME")?;
    page.ctl(&cluster, "volume attach NAME --node OTHER")?;
    let mut client = cluster.hosts.client(0, VOLUME)?;
    ensure_block(&mut client, 0, 1)?;
    write_block(&mut client, 1, 2)?;
    drop(client);

    page.ctl(&cluster, "node cordon NODE")?;
    page.ctl(&cluster, "volume detach NAME")?;
    page.at_terminal(&cluster, "node delete NODE", &name(LOST))?;
    cluster.hosts.ctl(&["volume", "attach", VOLUME, "--node", &name(0)])?;
    cluster.until_shown(VOLUME, "volume without the lost replica", |shown| {
        let replicas = shown["replicas"].as_array().cloned().unwrap_or_default();
        shown["state"] == "attached" && replicas.iter().all(|replica| replica["nodeID"] != name(LOST))
    })?;
    let mut client = cluster.hosts.client(0, VOLUME)?;
    ensure_block(&mut client, 1, 2)?;
    let printed = cluster.hosts.ctl(&["node", "list"])?;
    ensure!(printed.contains("given up"), "the flag --node of the controller names it: {printed}");
    page.script.finish()
}
