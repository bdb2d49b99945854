//! The backup of the store of a controller without Kubernetes, and its restore.

use std::fs;

use anyhow::{Result, ensure};
use shorthorn_tests::{ensure_block, write_block};

use super::{Cluster, Page, VOLUME, system};

const PAGE: &str = "docs/backup.md";

#[test]
fn the_store_is_saved_as_the_page_says() -> Result<()> {
    let mut cluster = Cluster::start(2)?;
    cluster.attach_new("2", 0)?;
    let store = cluster.folder.path().join("store.redb");
    let saved = cluster.folder.path().join("saved.redb");
    let mut page = Page::read(PAGE, "tests/tests/pages/backup.rs")?;
    page.script.set("/var/lib/shorthorn/controller.redb", &store.display().to_string());
    page.script.set("/root/controller.redb", &saved.display().to_string());
    let mut client = cluster.hosts.client(0, VOLUME)?;

    page.script.next("systemctl stop shorthorn-controller")?;
    cluster.hosts.stop_controller()?;
    system(&page.script.next("cp")?, cluster.folder.path())?;
    // Attached volumes continue meanwhile.
    write_block(&mut client, 0, 1)?;
    page.script.next("systemctl start shorthorn-controller")?;
    cluster.hosts.start_controller()?;
    page.script.finish()?;

    // The restore: the volume is as before, and can be detached and attached.
    cluster.hosts.stop_controller()?;
    fs::remove_file(&store)?;
    fs::copy(&saved, &store)?;
    cluster.hosts.start_controller()?;
    ensure_block(&mut client, 0, 1)?;
    drop(client);
    cluster.hosts.detach(VOLUME)?;
    cluster.hosts.ctl(&["volume", "attach", VOLUME, "--node", "n1"])?;
    ensure_block(&mut cluster.hosts.client(1, VOLUME)?, 0, 1)?;
    let printed = cluster.hosts.ctl(&["volume", "why", VOLUME])?;
    ensure!(printed.contains("is healthy") || printed.contains("is degraded"), "{printed}");
    Ok(())
}
