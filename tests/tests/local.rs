//! Real processes on this host behind the frontend `socket`, with fio, libnbd and qemu as clients: loss of
//! processes, full disks, restarts.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shorthorn_tests::{FioJob, LocalVolume, LocalVolumeOptions, SmallDisk, fio};

fn folder() -> Result<tempfile::TempDir> {
    // Not /tmp: that may be a file system without O_DIRECT, on which less is tested.
    tempfile::tempdir_in("/var/tmp").context("making a folder")
}

/// Returns the options of a volume with three replicas. The tests read the whole volume several times.
fn options(dir: &Path) -> LocalVolumeOptions {
    LocalVolumeOptions { size: "192MiB".into(), ..LocalVolumeOptions::new(dir) }
}

fn verified_load(volume: &LocalVolume, extra: &[&str]) -> Result<()> {
    let mut arguments: Vec<String> = [
        "--name=load",
        "--ioengine=nbd",
        "--rw=randwrite",
        "--bsrange=512-128k",
        "--blockalign=512",
        "--iodepth=16",
        "--size=64m",
        "--verify=crc32c",
        "--verify_fatal=1",
    ]
    .map(str::to_owned)
    .to_vec();
    arguments.push(format!("--uri={}", volume.ready.uri));
    arguments.extend(extra.iter().map(|argument| (*argument).to_owned()));
    fio(&FioJob { arguments }).map(drop)
}

fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output =
        Command::new(program).args(arguments).output().with_context(|| format!("starting {program}"))?;
    if !output.status.success() {
        let printed = [output.stdout, output.stderr].concat();
        bail!("{program} {arguments:?}: {}\n{}", output.status, String::from_utf8_lossy(&printed));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the SHA-256 of the data that an NBD client reads.
fn sum(volume: &LocalVolume, folder: &Path) -> Result<String> {
    let image = folder.join("image");
    run("nbdcopy", &[&volume.ready.uri, path(&image)?])?;
    let text = run("sha256sum", &[path(&image)?])?;
    fs::remove_file(&image)?;
    text.split_whitespace().next().map(str::to_owned).context("sha256sum prints nothing")
}

fn path(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is not UTF-8")
}

fn kill_hard(pid: i32) -> Result<()> {
    kill(Pid::from_raw(pid), Signal::SIGKILL).with_context(|| format!("killing {pid}"))
}

#[test]
fn written_data_reads_back_after_a_restart() -> Result<()> {
    let folder = folder()?;
    let options = options(&folder.path().join("volume"));
    let volume = LocalVolume::start(&options)?;
    verified_load(&volume, &[])?;
    let before = sum(&volume, folder.path())?;
    volume.stop()?;
    let volume = LocalVolume::start(&options)?;
    ensure!(sum(&volume, folder.path())? == before, "the volume reads differently after a restart");
    volume.stop()
}

#[test]
fn every_replica_has_the_same_data() -> Result<()> {
    let folder = folder()?;
    let dir = folder.path().join("volume");
    let volume = LocalVolume::start(&options(&dir))?;
    verified_load(&volume, &[])?;
    let expected = sum(&volume, folder.path())?;
    volume.stop()?;
    replicas_are(&dir, folder.path(), &expected)
}

#[test]
fn a_replica_that_dies_with_the_engine_is_waited_for() -> Result<()> {
    let folder = folder()?;
    let dir = folder.path().join("volume");
    let volume = LocalVolume::start(&options(&dir))?;
    verified_load(&volume, &[])?;
    kill_hard(volume.ready.pids.engine)?;
    kill_hard(volume.ready.pids.replicas[2])?;
    until_it_is_back(&volume, folder.path())?;
    // New writes have to reach all three: none was left behind.
    verified_load(&volume, &["--randseed=7"])?;
    let expected = sum(&volume, folder.path())?;
    volume.stop()?;
    replicas_are(&dir, folder.path(), &expected)
}

/// Checks that every replica directory below `dir`, exported, has this SHA-256.
fn replicas_are(dir: &Path, folder: &Path, expected: &str) -> Result<()> {
    let agent = shorthorn_tests::binary("shorthorn-agent")?;
    let mut replicas = 0;
    for entry in fs::read_dir(dir.join("replicas"))? {
        let image = folder.join("export");
        run(path(&agent)?, &["replica", "export", path(&entry?.path())?, path(&image)?])?;
        ensure!(run("sha256sum", &[path(&image)?])?.starts_with(expected), "replica {replicas} differs");
        fs::remove_file(&image)?;
        replicas += 1;
    }
    ensure!(replicas == 3, "{replicas} replicas");
    Ok(())
}

/// Returns the SHA-256 of the volume, as soon as its engine serves again.
fn until_it_is_back(volume: &LocalVolume, folder: &Path) -> Result<String> {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match sum(volume, folder) {
            Ok(sum) => return Ok(sum),
            Err(error) => ensure!(Instant::now() < deadline, "the engine does not come back: {error:#}"),
        }
    }
}

#[test]
fn a_client_notices_nothing_when_a_replica_is_killed() -> Result<()> {
    let folder = folder()?;
    let volume = LocalVolume::start(&options(&folder.path().join("volume")))?;
    let victim = volume.ready.pids.replicas[1];
    std::thread::scope(|scope| -> Result<()> {
        let load = scope.spawn(|| verified_load(&volume, &["--time_based=1", "--runtime=6"]));
        wait_for_writes(&folder.path().join("volume"))?;
        kill_hard(victim)?;
        match load.join() {
            Ok(result) => result,
            Err(_) => bail!("the load panicked"),
        }
    })?;
    verified_load(&volume, &[])?;
    volume.stop()
}

/// Waits until a replica has data, so that the load is running.
fn wait_for_writes(dir: &Path) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let used = run("du", &["--summarize", "--bytes", "--block-size=1", path(dir)?])?;
        let allocated = run("du", &["--summarize", "--block-size=1", path(dir)?])?;
        let bytes: u64 = allocated.split_whitespace().next().and_then(|text| text.parse().ok()).unwrap_or(0);
        if bytes > 1 << 20 {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "nothing was written after half a minute: {used}");
    }
}

#[test]
fn a_killed_engine_returns_with_the_same_data() -> Result<()> {
    let folder = folder()?;
    let volume = LocalVolume::start(&options(&folder.path().join("volume")))?;
    verified_load(&volume, &[])?;
    let before = sum(&volume, folder.path())?;
    kill_hard(volume.ready.pids.engine)?;
    let after = until_it_is_back(&volume, folder.path())?;
    ensure!(before == after, "the volume reads differently after the engine was killed");
    volume.stop()
}

#[test]
fn a_full_disk_is_an_error_to_the_writer_and_nothing_else() -> Result<()> {
    let folder = folder()?;
    let disk = SmallDisk::mount(folder.path(), 48)?;
    let options = options(&disk.mount_point.join("volume"));
    let volume = LocalVolume::start(&options)?;
    let write = |pattern: &str| run("qemu-io", &["-f", "raw", &volume.ready.uri, "-c", pattern]);
    write("write -P 7 0 4M")?;
    let full = write("write -P 9 100M 64M");
    ensure!(full.as_ref().is_err_and(|error| error.to_string().contains("No space left")), "{full:?}");
    write("read -P 7 0 4M")?;
    write("write -P 8 0 4M")?;
    write("read -P 8 0 4M")?;
    volume.stop()
}

#[test]
fn qemu_sees_zeroes_after_discard_and_write_zeroes() -> Result<()> {
    let folder = folder()?;
    let volume = LocalVolume::start(&options(&folder.path().join("volume")))?;
    let io = |commands: &[&str]| {
        let mut arguments = vec!["-f", "raw", &volume.ready.uri];
        arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
        run("qemu-io", &arguments)
    };
    io(&["write -P 5 0 8M", "write -z 1M 2M", "read -P 0 1M 2M", "read -P 5 0 1M", "read -P 5 3M 5M"])?;
    io(&["write -P 6 4100k 8k", "write -z 4101k 2k", "read -P 6 4100k 1k", "read -P 0 4101k 2k", "flush"])?;
    io(&["discard 4M 1M", "read -P 5 0 1M", "read -P 0 4M 1M", "read -P 5 5M 3M"])?;
    volume.stop()
}
