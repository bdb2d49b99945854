//! A host that joins the controller of plain hosts.

use anyhow::{Context, Result, ensure};
use shorthorn_testkit::free_port;
use shorthorn_tests::ensure_has;
use shorthorn_tests::hosts::{Hosts, agent_url, name};

use super::{Cluster, Page};

const PAGE: &str = "docs/install-hosts.md";

#[test]
fn hosts_join_as_the_page_says() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let store = folder.path().join("store.redb").display().to_string();
    let listen = format!("127.0.0.1:{}", free_port()?);
    let flags = ["--store", &store, "--tls-listen", &listen].map(str::to_owned).to_vec();
    let hosts = Hosts::start_with_store(folder.path(), 2, 2, flags)?;
    let mut cluster = Cluster { hosts, folder };
    let mut page = Page::read(PAGE, "tests/tests/pages/install_hosts.rs")?;
    page.script.set("node2", &name(1));
    page.script.set("192.0.2.12:9501", &agent_url(cluster.folder.path(), 1));

    restart(&mut cluster, &mut page)?;
    let token = page.ctl(&cluster, "node token node2")?;
    ensure!(token.lines().any(|line| line.trim().len() > 40), "no token: {token}");
    page.ctl(&cluster, "node add node2 --address 192.0.2.12:9501")?;
    cluster.until_ready(1, true)?;
    ensure_has(&page.ctl(&cluster, "node list")?, &[&name(0), &name(1), &cluster.disk(1)])?;
    page.script.finish()
}

fn restart(cluster: &mut Cluster, page: &mut Page) -> Result<()> {
    page.script.next("systemctl restart shorthorn-controller")?;
    cluster.hosts.stop_controller()?;
    cluster.hosts.start_controller()?;
    cluster.until_ready(0, true)?;
    cluster.until_ready(1, true)
}
