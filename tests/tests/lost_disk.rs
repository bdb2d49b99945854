//! A disk that is gone for good, with a replica of a volume in use: three hosts, which are network namespaces
//! of this machine. Needs root.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use shorthorn_tests::hosts::{Hosts, name};
use shorthorn_tests::{Guest, GuestOptions, compare_exports, signal, under_load, until, until_whole};

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(120);
const VOLUME: &str = "v";
/// The host of the engine.
const USER: usize = 0;

/// The host whose disk is lost: it has a replica and not the engine.
fn victim(hosts: &Hosts) -> Result<(usize, PathBuf)> {
    let directories = hosts.directories(VOLUME)?;
    let on = |host: usize| directories.iter().find(|path| path.iter().any(|part| *part == *name(host)));
    let found = (USER + 1..3).find_map(|host| Some((host, on(host)?.clone())));
    found.with_context(|| format!("no other host has a replica: {directories:?}"))
}

/// Returns the nodes of the replicas that are members.
fn members(volume: &Value) -> Vec<String> {
    let replicas = volume["replicas"].as_array().cloned().unwrap_or_default();
    let members = replicas.iter().filter(|replica| replica["mode"] == "member");
    members.filter_map(|replica| Some(replica["nodeID"].as_str()?.to_owned())).collect()
}

#[test]
fn a_lost_disk_is_given_up_and_its_replicas_are_replaced() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let hosts = Hosts::start(folder.path(), 3)?;
    hosts.ctl(&["volume", "create", VOLUME, "--size", "64MiB", "--frontend", "socket", "--replicas", "2"])?;
    hosts.ctl(&["volume", "attach", VOLUME, "--node", &name(USER)])?;
    until_whole(&hosts.engine_control(USER, VOLUME), LIMIT)?;
    let (host, directory) = victim(&hosts)?;
    let disk = folder.path().join(name(host)).join("disk");
    let (disk_text, away) = (disk.display().to_string(), disk.with_extension("away"));
    let guest =
        Guest::new(hosts.client(USER, VOLUME)?, GuestOptions { sectors: 8192, ..GuestOptions::new(7) });
    let ((), _) = under_load(guest, |load| {
        load.wait_for_answers(100, LIMIT)?;
        // An administrator who means another disk is stopped.
        let refusal = hosts.refused(&["disk", "remove", &name(host), &disk_text, "--lost", "--yes"])?;
        ensure!(refusal.contains("--force"), "{refusal}");
        fs::rename(&disk, &away)?;
        for pid in hosts.processes(host, "replica")? {
            signal(pid, Signal::SIGKILL)?;
        }
        // Until the agent reports that the disk is gone, the command is refused as before.
        hosts.ctl(&["disk", "remove", &name(host), &disk_text, "--lost", "--yes"])?;
        until("replica on another disk", LIMIT, || {
            let volume = hosts.inspect(VOLUME)?;
            let members = members(&volume);
            ensure!(members.len() == 2 && !members.contains(&name(host)), "{volume:#}");
            let stored = volume["replicas"].as_array().map_or(0, Vec::len);
            ensure!(stored == 2, "the replica on the lost disk is not forgotten: {volume:#}");
            Ok(Some(()))
        })?;
        load.wait_for_answers(100, LIMIT).map(drop)
    })?;

    // The disk comes back. Its data has no owner, and is deleted only by name.
    fs::rename(&away, &disk)?;
    let orphan = directory.file_name().and_then(|name| name.to_str()).context("no name")?;
    until("orphan on the disk that is back", LIMIT, || {
        let list = hosts.ctl(&["orphan", "list"])?;
        ensure!(list.contains(orphan), "{list}");
        Ok(Some(()))
    })?;
    ensure!(directory.exists(), "the data was deleted without an order");
    hosts.ctl(&["orphan", "delete", &name(host), &disk_text, orphan, "--yes"])?;
    ensure!(!directory.exists(), "the orphan stays");
    let directories = hosts.directories(VOLUME)?;
    ensure!(directories.len() == 2, "{directories:?}");
    hosts.detach(VOLUME)?;
    compare_exports(&directories, folder.path()).map(drop)
}
