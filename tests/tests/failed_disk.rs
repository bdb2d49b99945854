//! A replica whose disk has failed for a while. Needs root, for mounts.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use shorthorn_control::{MemberMode, ReplicaPhase};
use shorthorn_tests::{
    BadDisk, LocalVolume, LocalVolumeOptions, NbdClient, NbdRequest, compare_exports, engine_status, signal,
    until, until_whole,
};

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(120);
const REPLICA: usize = 1;

fn write(client: &mut NbdClient, offset: u64, byte: u8) -> Result<()> {
    for request in [NbdRequest::Write { offset, data: vec![byte; 64 << 10], fua: false }, NbdRequest::Flush] {
        let answer = client.call(request, LIMIT)?;
        ensure!(answer.is_ok(), "the volume answers with error {answer:?}");
    }
    Ok(())
}

fn head_in(directory: &Path) -> Result<PathBuf> {
    let entries = std::fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let is_head = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("volume-head-") && name.ends_with(".img")
    };
    entries.into_iter().find(is_head).with_context(|| format!("{} has no head", directory.display()))
}

/// Has the head of the replica lie on a disk that can break down. The replica is killed for that: it would
/// notice that its head is another file if it had closed it.
fn with_bad_disk(volume: &LocalVolume, directory: &Path, folder: &Path) -> Result<BadDisk> {
    let pid = volume.replica_pid(REPLICA)?;
    signal(volume.ready.pids.supervisor, Signal::SIGSTOP)?;
    let disk = signal(pid, Signal::SIGKILL).and_then(|()| {
        until("end of a killed process", LIMIT, || Ok(has_ended(pid).then_some(())))?;
        BadDisk::under(&head_in(directory)?, folder)
    });
    signal(volume.ready.pids.supervisor, Signal::SIGCONT)?;
    let disk = disk?;
    until("next process", LIMIT, || Ok((volume.replica_pid(REPLICA)? != pid).then_some(())))?;
    Ok(disk)
}

/// Returns true if the process holds no files any more; its parent may not have looked yet.
fn has_ended(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    status.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with(['Z', 'X']))
}

#[test]
fn a_replica_whose_disk_fails_for_a_while_returns_by_itself() -> Result<()> {
    // Not /tmp: that may be a file system without O_DIRECT, on which less is tested.
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let mut options = LocalVolumeOptions::new(&folder.path().join("volume"));
    options.size = "64MiB".into();
    let volume = LocalVolume::start(&options)?;
    let directories = volume.directories();
    let disk = with_bad_disk(&volume, &directories[REPLICA], folder.path())?;
    let control = volume.engine_control()?;
    until_whole(&control, LIMIT)?;
    let mut client = volume.client()?;
    write(&mut client, 0, 1)?;
    let failing = volume.replica_pid(REPLICA)?;
    disk.break_down()?;
    write(&mut client, 1 << 20, 2)?;
    until("end of the process that has failed", LIMIT, || Ok(has_ended(failing).then_some(())))?;
    write(&mut client, 2 << 20, 3)?;
    let away = &engine_status(&control)?.members[REPLICA];
    ensure!(away.mode != MemberMode::Member, "{away:?}");
    disk.repair()?;
    until_whole(&control, LIMIT)?;
    let status = volume.replica_status(REPLICA)?;
    ensure!(status.failures == 1 && status.phase == ReplicaPhase::Serving, "{status:?}");
    write(&mut client, 3 << 20, 4)?;
    volume.stop()?;
    compare_exports(&directories, folder.path()).map(drop)
}
