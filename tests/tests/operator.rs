//! Tests the reports on an unhealthy volume, and the operator's decisions. Real agents, engines and replicas
//! run on three hosts, which are network namespaces of this machine.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use shorthorn_tests::hosts::{Hosts, name};
use shorthorn_tests::{
    BLOCK_BYTES, Guest, GuestOptions, compare_exports, ensure_block, ensure_has, signal, under_load, until,
    until_whole, write_block,
};

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(120);
const VOLUME: &str = "v";

fn until_shown(hosts: &Hosts, what: &str, is_so: impl Fn(&Value) -> bool) -> Result<Value> {
    until(what, LIMIT, || {
        let shown = hosts.inspect(VOLUME)?;
        ensure!(is_so(&shown), "{shown:#}");
        Ok(Some(shown))
    })
}

/// Waits until `volume why` has all these words.
fn until_event(hosts: &Hosts, words: &[&str]) -> Result<String> {
    until("explanation", LIMIT, || {
        let printed = hosts.ctl(&["volume", "why", VOLUME])?;
        ensure_has(&printed, words)?;
        Ok(Some(printed))
    })
}

/// Returns node, id and name of every replica.
fn replicas(shown: &Value) -> Result<Vec<(String, String, String)>> {
    let text = |replica: &Value, key: &str| replica[key].as_str().map(str::to_owned);
    let all = shown["replicas"].as_array().context("no replicas")?.iter();
    all.map(|r| Some((text(r, "nodeID")?, text(r, "replicaID")?, text(r, "name")?)))
        .collect::<Option<_>>()
        .with_context(|| format!("a replica without a name in {shown:#}"))
}

/// The node with the newest data is lost. The operator sees the missing data and the losses of a salvage, and
/// decides for the older data. When the node comes back, its newer data is not part of the volume.
#[test]
fn an_operator_continues_with_an_older_replica() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let mut hosts = Hosts::start(folder.path(), 3)?;
    let create = ["volume", "create", VOLUME, "--size", "64MiB", "--frontend", "socket", "--replicas", "2"];
    hosts.ctl(&create)?;
    let placed = replicas(&hosts.inspect(VOLUME)?)?;
    let host_of = |at: usize| (0..3).find(|host| name(*host) == placed[at].0).context("an unknown node");
    let (newer, older) = (host_of(0)?, host_of(1)?);
    let (newer_name, older_id) = (&placed[0].2, &placed[1].1);
    hosts.ctl(&["volume", "attach", VOLUME, "--node", &name(newer)])?;
    until_whole(&hosts.engine_control(newer, VOLUME), LIMIT)?;
    let mut client = hosts.client(newer, VOLUME)?;
    write_block(&mut client, 0, 1)?;
    until_event(&hosts, &["is healthy", "2 of 2 replicas are complete"])?;

    // A replica loses its link and misses a write.
    hosts.set_link(older, false)?;
    write_block(&mut client, 1, 2)?;
    let degraded = |shown: &Value| shown["robustness"] == "degraded";
    until_shown(&hosts, "degraded volume", degraded)?;
    let missing = format!("Replica {} on node {} is missing since", placed[1].2, name(older));
    until_event(
        &hosts,
        &["is degraded", "1 of 2 replicas are complete", &missing, "The controller replaces the replica in"],
    )?;
    drop(client);
    hosts.detach(VOLUME)?;
    until_event(&hosts, &["is detached"])?;

    // The complete replica stops with its host.
    hosts.set_link(older, true)?;
    hosts.kill_agent(newer)?;
    hosts.ctl(&["volume", "attach", VOLUME, "--node", &name(older), "--no-wait"])?;
    let silent = format!("Replica {newer_name} on node {} does not run", name(newer));
    until_event(&hosts, &["is attaching to node", &silent, "is silent since", "volume salvage v"])?;
    salvage_with_losses(&hosts, older_id)?;
    let mut client = hosts.client(older, VOLUME)?;
    ensure_block(&mut client, 0, 1)?;
    ensure_block(&mut client, 1, 0)?;
    write_block(&mut client, 2, 3)?;

    // The agent comes back, and its replica becomes a copy of the current volume.
    hosts.start_agent(newer)?;
    until_whole(&hosts.engine_control(older, VOLUME), LIMIT)?;
    until_event(&hosts, &["is healthy"])?;
    for (block, byte) in [(0, 1), (1, 0), (2, 3)] {
        ensure_block(&mut client, block, byte)?;
    }
    drop(client);
    let directories = hosts.directories(VOLUME)?;
    ensure!(directories.len() == 2, "{directories:?}");
    hosts.detach(VOLUME)?;
    compare_exports(&directories, folder.path()).map(drop)
}

/// Looks at the losses with the older replica, and decides for it.
fn salvage_with_losses(hosts: &Hosts, older_id: &str) -> Result<()> {
    let table = hosts.ctl(&["volume", "salvage", VOLUME])?;
    let loss = format!("With {older_id}: lacks acknowledged writes of view");
    ensure!(table.contains(&loss) && table.contains("does not answer"), "{table}");
    let refusal = hosts.refused(&["volume", "salvage", VOLUME, "--replica", older_id])?;
    ensure!(refusal.contains("--yes-i-may-lose-data"), "{refusal}");
    let decide = [
        "volume",
        "salvage",
        VOLUME,
        "--replica",
        older_id,
        "--reason",
        "the host burnt",
        "--yes-i-may-lose-data",
    ];
    hosts.ctl(&decide)?;
    let shown = until_shown(hosts, "attached volume", |shown| shown["state"] == "attached")?;
    ensure!(shown["salvage"]["reason"] == "the host burnt", "{shown:#}");
    Ok(())
}

/// A replica leaves a drained node while its volume is written. The only copy of another volume stays, and
/// the operator sees the reason.
#[test]
fn a_node_is_drained_under_load() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let hosts = Hosts::start(folder.path(), 3)?;
    let create = |volume, replicas| -> Result<Vec<(String, String, String)>> {
        let words =
            ["volume", "create", volume, "--size", "64MiB", "--frontend", "socket", "--replicas", replicas];
        hosts.ctl(&words)?;
        replicas_of(&hosts, volume)
    };
    let placed = create(VOLUME, "2")?;
    let (stays, leaves) = (&placed[0].0, &placed[1].0);
    let host = (0..3).find(|host| name(*host) == *stays).context("an unknown node")?;
    hosts.ctl(&["volume", "attach", VOLUME, "--node", stays])?;
    until_whole(&hosts.engine_control(host, VOLUME), LIMIT)?;
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let guest =
        Guest::new(hosts.client(host, VOLUME)?, GuestOptions { sectors: 8192, ..GuestOptions::new(seed) });
    let ((), _) = under_load(guest, |load| {
        load.wait_for_answers(200, LIMIT)?;
        let printed = hosts.ctl(&["node", "drain", leaves])?;
        ensure!(printed.contains("nothing is left"), "{printed}");
        load.wait_for_answers(200, LIMIT).map(drop)
    })?;
    let moved = replicas_of(&hosts, VOLUME)?;
    ensure!(moved.len() == 2 && moved.iter().all(|replica| replica.0 != *leaves), "{moved:?}");
    let directories = hosts.directories(VOLUME)?;
    ensure!(directories.len() == 2, "{directories:?}");
    hosts.ctl(&["node", "uncordon", leaves])?;
    hosts.detach(VOLUME)?;
    compare_exports(&directories, folder.path())?;

    let alone = create("w", "1")?.remove(0);
    hosts.ctl(&["volume", "attach", "w", "--node", &alone.0])?;
    hosts.detach("w")?;
    let refusal = hosts.refused(&["node", "drain", &alone.0])?;
    ensure!(refusal.contains(&alone.2) && refusal.contains("is detached"), "{refusal}");
    ensure!(hosts.directories("w")?.len() == 1, "the last replica is gone");
    Ok(())
}

/// Numbers of attachments start over with a volume that is made again under its name, on a node where the
/// other one was.
#[test]
fn a_volume_is_created_again_under_its_name() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let hosts = Hosts::start(folder.path(), 2)?;
    for attachments in [3, 1] {
        let create =
            ["volume", "create", VOLUME, "--size", "64MiB", "--frontend", "socket", "--replicas", "2"];
        hosts.ctl(&create)?;
        for _ in 0..attachments {
            hosts.ctl(&["volume", "attach", VOLUME, "--node", &name(0)])?;
            let mut client = hosts.client(0, VOLUME)?;
            write_block(&mut client, 0, 1)?;
            ensure_block(&mut client, 0, 1)?;
            drop(client);
            hosts.detach(VOLUME)?;
        }
        hosts.ctl(&["volume", "delete", VOLUME, "--yes"])?;
    }
    Ok(())
}

/// A node with an empty disk joins. Replicas move there only on request: then it gets its share while the
/// volumes are written, and after that no move is left.
#[test]
fn an_empty_node_gets_its_share_under_load() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let hosts = Hosts::start(folder.path(), 3)?;
    hosts.ctl(&["node", "cordon", &name(2)])?;
    for volume in [VOLUME, "w"] {
        let words =
            ["volume", "create", volume, "--size", "64MiB", "--frontend", "socket", "--replicas", "2"];
        hosts.ctl(&words)?;
        hosts.ctl(&["volume", "attach", volume, "--node", &name(0)])?;
        until_whole(&hosts.engine_control(0, volume), LIMIT)?;
    }
    hosts.ctl(&["node", "uncordon", &name(2)])?;
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let guest =
        Guest::new(hosts.client(0, VOLUME)?, GuestOptions { sectors: 8192, ..GuestOptions::new(seed) });
    let ((), _) = under_load(guest, |load| {
        load.wait_for_answers(200, LIMIT)?;
        let printed = hosts.ctl(&["rebalance", "--dry-run", VOLUME])?;
        ensure!(
            printed.contains("1 more would be better elsewhere") && printed.contains("more room"),
            "{printed}"
        );
        ensure!(replicas_of(&hosts, VOLUME)?.iter().all(|replica| replica.0 != name(2)), "moved unasked");
        let printed = hosts.ctl(&["rebalance", VOLUME])?;
        ensure!(printed.contains("moved 1 replica"), "{printed}");
        load.wait_for_answers(200, LIMIT).map(drop)
    })?;
    let printed = hosts.ctl(&["rebalance"])?;
    ensure!(printed.contains("every replica has the best placement"), "{printed}");
    let moved = replicas_of(&hosts, VOLUME)?;
    ensure!(moved.len() == 2 && moved.iter().any(|replica| replica.0 == name(2)), "{moved:?}");
    let directories = hosts.directories(VOLUME)?;
    ensure!(directories.len() == 2, "{directories:?}");
    hosts.ctl(&["volume", "detach", "w"])?;
    hosts.detach(VOLUME)?;
    compare_exports(&directories, folder.path()).map(drop)
}

fn replicas_of(hosts: &Hosts, volume: &str) -> Result<Vec<(String, String, String)>> {
    replicas(&hosts.inspect(volume)?)
}

/// A volume grows under load while one of its replicas dies and another cannot be reached. The data stays,
/// the new part reads as zeroes, and in the end all replicas have the same size and content.
#[test]
fn a_volume_grows_under_load() -> Result<()> {
    const LAST_BLOCK: u64 = (128 << 20) / BLOCK_BYTES as u64 - 1;

    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let hosts = Hosts::start(folder.path(), 3)?;
    let create = ["volume", "create", VOLUME, "--size", "64MiB", "--frontend", "socket", "--replicas", "3"];
    hosts.ctl(&create)?;
    let placed = replicas_of(&hosts, VOLUME)?;
    let host_of = |at: usize| (0..3).find(|host| name(*host) == placed[at].0).context("an unknown node");
    let (served, dies, cut_off) = (host_of(0)?, host_of(1)?, host_of(2)?);
    hosts.ctl(&["volume", "attach", VOLUME, "--node", &name(served)])?;
    until_whole(&hosts.engine_control(served, VOLUME), LIMIT)?;
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let options = GuestOptions { sectors: 8192, ..GuestOptions::new(seed) };
    let guest = Guest::new(hosts.client(served, VOLUME)?, options);
    let ((), guest) = under_load(guest, |load| {
        load.wait_for_answers(200, LIMIT)?;
        hosts.set_link(cut_off, false)?;
        for process in hosts.processes(dies, "replica")? {
            signal(process, Signal::SIGKILL)?;
        }
        hosts.ctl(&["volume", "expand", VOLUME, "128MiB", "--wait"])?;
        load.wait_for_answers(200, LIMIT)?;
        let shown = hosts.inspect(VOLUME)?;
        ensure!(shown["currentSize"] == 128 << 20, "{shown:#}");
        let mut client = hosts.client(served, VOLUME)?;
        ensure!(client.size_bytes() == 128 << 20, "the device has {} bytes", client.size_bytes());
        ensure_block(&mut client, LAST_BLOCK, 0)?;
        write_block(&mut client, LAST_BLOCK, 7)?;
        hosts.set_link(cut_off, true)?;
        until_whole(&hosts.engine_control(served, VOLUME), LIMIT)?;
        ensure_block(&mut client, LAST_BLOCK, 7)?;
        load.wait_for_answers(200, LIMIT).map(drop)
    })?;
    drop(guest);
    let refusal = hosts.refused(&["volume", "expand", VOLUME, "64MiB"])?;
    ensure!(refusal.contains("only grows"), "{refusal}");
    let directories = hosts.directories(VOLUME)?;
    hosts.detach(VOLUME)?;
    compare_exports(&directories, folder.path())?;

    // The same for a detached volume.
    hosts.ctl(&["volume", "expand", VOLUME, "192MiB", "--wait"])?;
    hosts.ctl(&["volume", "attach", VOLUME, "--node", &name(served)])?;
    let mut client = hosts.client(served, VOLUME)?;
    ensure!(client.size_bytes() == 192 << 20, "the device has {} bytes", client.size_bytes());
    ensure_block(&mut client, LAST_BLOCK, 7)?;
    ensure_block(&mut client, LAST_BLOCK + 1, 0)?;
    until_whole(&hosts.engine_control(served, VOLUME), LIMIT)?;
    drop(client);
    hosts.detach(VOLUME)?;
    compare_exports(&directories, folder.path()).map(drop)
}
