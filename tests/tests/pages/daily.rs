//! The commands of every day, and those after a deletion by mistake.

use std::fs;

use anyhow::{Context, Result, ensure};
use shorthorn_tests::hosts::name;
use shorthorn_tests::{ensure_has, until_whole};

use super::{Cluster, LIMIT, Page, system};

const PAGE: &str = "docs/daily.md";
const NAME: &str = "v1";

#[test]
fn the_commands_of_every_day_work_as_their_page_says() -> Result<()> {
    let cluster = Cluster::start(3)?;
    for host in 0..3 {
        cluster.hosts.ctl(&["node", "set", &name(host), "--tags", "fast"])?;
    }
    cluster.attach_new_named(NAME, "3", 0)?;
    let mut page = Page::read(PAGE, "tests/tests/pages/daily.rs")?;
    page.script.set("node2", &name(1));
    ensure_has(&page.ctl(&cluster, "status")?, &["Wrong: nothing", "Versions"])?;
    ensure_has(&page.ctl(&cluster, "doctor")?, &["passed  volumes are served and complete"])?;
    let printed = page.ctl(&cluster, "volume list -o wide")?;
    ensure_has(&printed, &["PVC", "WORKLOAD", "ACTUAL", "REASON", NAME])?;
    let printed = page.ctl(&cluster, "volume list -n shop")?;
    ensure!(!printed.contains("attached"), "{printed}");
    replicas_are_changed(&cluster, &mut page)?;
    let printed = page.ctl(&cluster, "rebalance --dry-run")?;
    ensure_has(&printed, &["would be better elsewhere"])?;
    let printed = page.ctl(&cluster, "node inspect node2")?;
    ensure_has(&printed, &["Frontend socket: usable", "Replicas", "Warning: ", &cluster.disk(1)])?;
    page.ctl(&cluster, "support-bundle")?;
    let files =
        fs::read_dir(cluster.folder.path())?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let bundles = files.filter(|file| file.starts_with("shorthorn-support-")).count();
    ensure!(bundles == 1, "{bundles} bundles");
    page.script.leave_out("source", "the next lines do that")?;
    let completion = page.ctl(&cluster, "completion bash")?;
    fs::write(cluster.folder.path().join("completion"), completion)?;
    let shell = ["bash", "-c", "source completion && complete -p shorthornctl"].map(str::to_owned);
    system(&shell, cluster.folder.path())?;
    a_deleted_volume_is_undeleted(&cluster, &mut page)?;
    page.script.finish()
}

fn replicas_are_changed(cluster: &Cluster, page: &mut Page) -> Result<()> {
    page.ctl(cluster, "volume set v1 --replicas 2")?;
    let shown = cluster.until_shown(NAME, "two replicas", |shown| {
        shown["replicas"].as_array().is_some_and(|all| all.len() == 2) && shown["robustness"] == "healthy"
    })?;
    let printed = page.ctl(cluster, "volume rebuild-limit v1")?;
    ensure_has(&printed, &["50 MiB/s", "20 %"])?;
    page.ctl(cluster, "volume scrub v1 --repair")?;
    let replicas = shown["replicas"].as_array().context("no replicas")?;
    let evicted = replicas.iter().find(|replica| replica["nodeID"] != name(0)).context("no other node")?;
    let evicted = evicted["name"].as_str().context("no name")?;
    page.script.set("v1-8rqh2w91", evicted);
    page.ctl(cluster, "replica evict")?;
    let shown = cluster.until_shown(NAME, "healthy volume", |shown| shown["robustness"] == "healthy")?;
    let names = shown["replicas"].as_array().context("no replicas")?.iter().map(|replica| &replica["name"]);
    let names: Vec<_> = names.collect();
    ensure!(names.len() == 2 && names.iter().all(|name| **name != evicted), "{names:?}");
    until_whole(&cluster.hosts.engine_control(0, NAME), LIMIT).map(drop)
}

/// The second block of the page.
fn a_deleted_volume_is_undeleted(cluster: &Cluster, page: &mut Page) -> Result<()> {
    let hosts = &cluster.hosts;
    hosts.detach(NAME)?;
    hosts.ctl(&["volume", "delete", NAME, "--yes"])?;
    ensure_has(&page.ctl(cluster, "volume trash")?, &[NAME, "EXPIRES", "yes"])?;
    page.ctl(cluster, "volume undelete v1")?;
    ensure!(hosts.inspect(NAME)?["state"] == "detached", "it is not detached");
    page.at_terminal(cluster, "volume delete v1", NAME)?;
    page.at_terminal(cluster, "volume trash v1 --remove", NAME)?;
    let printed = hosts.ctl(&["volume", "trash"])?;
    ensure!(!printed.contains("yes"), "{printed}");
    let left = hosts.directories(NAME)?;
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}
