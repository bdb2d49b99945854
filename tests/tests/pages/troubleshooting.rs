//! Reports on a volume without one of its replicas, and on one that does not start.

use anyhow::{Context, Result};
use shorthorn_tests::hosts::name;
use shorthorn_tests::{ensure_has, until, write_block};

use super::{Cluster, LIMIT, Page, VOLUME};

const PAGE: &str = "docs/troubleshooting.md";

#[test]
fn problems_are_reported_as_the_page_says() -> Result<()> {
    let mut cluster = Cluster::start(3)?;
    cluster.attach_new("2", 0)?;
    let away = cluster.other_host()?;
    let nodes = cluster.nodes_of(VOLUME)?;
    let newer = (0..3).find(|host| *host != away && nodes.contains(&name(*host))).context("one replica")?;
    cluster.hosts.set_link(away, false)?;
    write_block(&mut cluster.hosts.client(0, VOLUME)?, 0, 1)?;
    cluster.until_shown(VOLUME, "degraded volume", |shown| shown["robustness"] == "degraded")?;

    let mut page = Page::read(PAGE, "tests/tests/pages/troubleshooting.rs")?;
    page.script.set("NAME", VOLUME);
    // 6: something is wrong. The volume is served: the check only warns.
    ensure_has(&page.run(&cluster, "status", &[], 6)?, &["1 degraded", "volume v ("])?;
    ensure_has(&page.ctl(&cluster, "doctor")?, &["warned  volumes are served and complete"])?;
    let printed = page.ctl(&cluster, "volume why NAME")?;
    ensure_has(&printed, &["is degraded", "is missing since", "The controller replaces the replica in"])?;

    // The replica with everything does not answer, and the other one lacks a write.
    cluster.hosts.detach(VOLUME)?;
    cluster.hosts.set_link(away, true)?;
    cluster.hosts.kill_agent(newer)?;
    cluster.hosts.ctl(&["volume", "attach", VOLUME, "--node", &name(away), "--no-wait"])?;
    until("advice to salvage", LIMIT, || {
        ensure_has(&cluster.hosts.ctl(&["volume", "why", VOLUME])?, &["volume salvage v"]).map(Some)
    })?;
    until("views of the replicas", LIMIT, || {
        let printed = cluster.hosts.ctl(&["volume", "salvage", VOLUME])?;
        ensure_has(&printed, &["lacks acknowledged writes of view"]).map(Some)
    })?;
    let printed = page.ctl(&cluster, "volume salvage NAME")?;
    ensure_has(&printed, &["lacks acknowledged writes of view", "does not answer"])?;
    page.script.finish()
}
