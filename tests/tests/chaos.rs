//! A local volume under a load that checks every answer, while its processes are killed and stopped.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use shorthorn_control::{ControlClient, ProcessCommand, ScrubCommand};
use shorthorn_tests::{
    BareVolume, BareVolumeOptions, Guest, GuestOptions, Load, LocalVolume, LocalVolumeOptions, NbdClient,
    NbdRequest, SmallDisk, compare_exports, engine_status, is_whole, signal, under_load, until, until_whole,
};

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(120);
const CHAOS_SECONDS: u64 = 25;

fn folder() -> Result<tempfile::TempDir> {
    // Not /tmp: that may be a file system without O_DIRECT, on which less is tested.
    tempfile::tempdir_in("/var/tmp").context("making a folder")
}

fn seed() -> Result<u64> {
    let seed = match std::env::var("SHORTHORN_SEED") {
        Ok(seed) => seed.parse().context("SHORTHORN_SEED is not a number")?,
        Err(_) => fastrand::u64(..),
    };
    println!("SHORTHORN_SEED={seed}");
    Ok(seed)
}

fn volume(folder: &tempfile::TempDir, size: &str, extra: &[&str]) -> Result<LocalVolume> {
    let mut options = LocalVolumeOptions::new(&folder.path().join("volume"));
    options.size = size.into();
    options.extra = extra.iter().map(|flag| (*flag).to_owned()).collect();
    LocalVolume::start(&options)
}

#[test]
fn a_client_sees_no_error_while_all_processes_are_killed() -> Result<()> {
    let seconds = std::env::var("SHORTHORN_CHAOS_SECONDS").map_or(Ok(CHAOS_SECONDS), |text| text.parse())?;
    let (folder, seed) = (folder()?, seed()?);
    let volume = volume(&folder, "64MiB", &[])?;
    let guest = Guest::new(volume.client()?, GuestOptions::new(seed));
    let (kills, guest) = under_load(guest, |load| {
        let kills = kill_at_random(&volume, load, seed, Duration::from_secs(seconds))?;
        until_whole(&volume.engine_control()?, LIMIT)?;
        load.wait_for_answers(100, LIMIT)?;
        Ok(kills)
    })?;
    let status = until_whole(&volume.engine_control()?, LIMIT)?;
    println!("{kills:?} kills (engine, replicas), {:?}, generation {}", guest.counts(), status.generation);
    ensure!(kills.iter().all(|kills| *kills > 0), "not everything was killed: {kills:?}");
    let directories = volume.directories();
    volume.stop()?;
    compare_exports(&directories, folder.path()).map(drop)
}

/// Kills the engine and any replica with SIGKILL, at any time; returns how many of each.
fn kill_at_random(volume: &LocalVolume, load: &Load, seed: u64, time: Duration) -> Result<[u32; 2]> {
    let mut random = fastrand::Rng::with_seed(seed ^ 0x6b69_6c6c);
    let control = volume.engine_control()?;
    let deadline = Instant::now() + time;
    let mut kills = [0; 2];
    while Instant::now() < deadline || kills.contains(&0) {
        load.check()?;
        // When a kill comes is the random part of this test; nothing waits for it.
        std::thread::sleep(Duration::from_millis(random.u64(0..700)));
        let engine = random.u8(..) < 80;
        // A process that does not run cannot be killed.
        let pid = if engine { volume.engine_pid() } else { volume.replica_pid(random.usize(0..3)) };
        let Ok(pid) = pid else { continue };
        signal(pid, Signal::SIGKILL)?;
        kills[usize::from(!engine)] += 1;
        if random.bool() {
            until_whole(&control, LIMIT)?;
            load.wait_for_answers(50, LIMIT)?;
        }
    }
    Ok(kills)
}

/// Members differ if an engine dies between writes to them; the next one resyncs them before it serves.
#[test]
fn members_are_equal_after_every_death_of_the_engine() -> Result<()> {
    const DEATHS: u32 = 25;
    let (folder, seed) = (folder()?, seed()?);
    let mut volume = BareVolume::start(BareVolumeOptions::new(folder.path()))?;
    let mut random = fastrand::Rng::with_seed(seed);
    let mut guest = Guest::new(volume.client()?, GuestOptions { sectors: 8192, ..GuestOptions::new(seed) });
    for _ in 0..DEATHS {
        let ((), returned) = under_load(guest, |load| {
            load.wait_for_answers(random.u64(20..500), LIMIT)?;
            volume.kill_engine()?;
            volume.start_engine()?;
            load.wait_for_answers(20, LIMIT).map(drop)
        })?;
        guest = returned;
    }
    println!("{DEATHS} deaths of the engine, {:?}", guest.counts());
    let directories = volume.directories();
    volume.stop()?;
    compare_exports(&directories, folder.path()).map(drop)
}

/// Repeats the test without a client that sends again, and with a replica that surely lacks data of the
/// others.
#[test]
fn writes_that_a_dead_engine_left_incomplete_are_made_equal() -> Result<()> {
    const DEATHS: usize = 8;
    let (folder, seed) = (folder()?, seed()?);
    let mut volume = BareVolume::start(BareVolumeOptions::new(folder.path()))?;
    let mut random = fastrand::Rng::with_seed(seed);
    let mut guest = Guest::new(volume.client()?, GuestOptions { sectors: 8192, ..GuestOptions::new(seed) });
    for death in 0..DEATHS {
        let load = Load::start(guest);
        load.wait_for_answers(random.u64(20..500), LIMIT)?;
        let behind = death % 3;
        signal(volume.replica_pid(behind)?, Signal::SIGSTOP)?;
        until_it_stalls(&load)?;
        volume.kill_engine()?;
        volume.kill_replica(behind)?;
        guest = load.finish()?;
        volume.start_replica(behind)?;
        volume.start_engine()?;
        drop(guest.move_to(volume.client()?));
        guest.compare_everything()?;
    }
    println!("{DEATHS} deaths of the engine, {:?}", guest.counts());
    let directories = volume.directories();
    volume.stop()?;
    compare_exports(&directories, folder.path()).map(drop)
}

/// A start waits for some seconds for a hanging replica, and the time of the running attempt counts. With a
/// longer time-out the first attempt continues without it.
#[test]
fn a_start_waits_no_second_time_for_a_replica_that_hangs() -> Result<()> {
    let folder = folder()?;
    let options = BareVolumeOptions { replica_timeout_ms: 6000, ..BareVolumeOptions::new(folder.path()) };
    let mut volume = BareVolume::start(options)?;
    until_whole(&volume.engine_control(), LIMIT)?;
    let (hangs, control) = (volume.replica_pid(2)?, volume.engine_control());
    volume.kill_engine()?;
    signal(hangs, Signal::SIGSTOP)?;
    let serves = AtomicBool::new(false);
    let (started, waited) = std::thread::scope(|scope| {
        let messages = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            while !serves.load(Ordering::Relaxed) {
                seen.extend(engine_status(&control).ok().map(|status| status.message));
                std::thread::sleep(Duration::from_millis(10)); // a status cannot be waited for
            }
            seen
        });
        let started = volume.start_engine();
        serves.store(true, Ordering::Relaxed);
        (started, messages.join())
    });
    signal(hangs, Signal::SIGCONT)?;
    started?;
    let waited = waited.map_err(|_| anyhow::anyhow!("the thread that looks at the status panicked"))?;
    ensure!(!waited.iter().any(|message| message.contains("do not answer")), "{waited:?}");
    until_whole(&volume.engine_control(), LIMIT)?;
    volume.stop()
}

/// Waits until answers stop for a moment: each further request waits for one replica.
fn until_it_stalls(load: &Load) -> Result<()> {
    const MOMENT: Duration = Duration::from_millis(100);
    while load.wait_for_answers(1, MOMENT).is_ok() {}
    load.check()
}

/// Stops a replica for a while: it leaves, and returns by a copy of the regions that it has missed.
#[test]
fn a_replica_that_hangs_for_a_while_returns() -> Result<()> {
    let (folder, seed) = (folder()?, seed()?);
    let volume = volume(&folder, "64MiB", &["--replica-timeout-ms", "1000"])?;
    let control = volume.engine_control()?;
    let guest = Guest::new(volume.client()?, GuestOptions::new(seed));
    under_load(guest, |load| {
        for index in [1, 0, 2] {
            load.wait_for_answers(200, LIMIT)?;
            let pid = volume.replica_pid(index)?;
            signal(pid, Signal::SIGSTOP)?;
            until("view without it", LIMIT, || Ok((!is_whole(&engine_status(&control)?)).then_some(())))?;
            load.wait_for_answers(200, LIMIT).context("while a replica hangs")?;
            signal(pid, Signal::SIGCONT)?;
            until_whole(&control, LIMIT)?;
        }
        Ok(())
    })?;
    let directories = volume.directories();
    volume.stop()?;
    compare_exports(&directories, folder.path()).map(drop)
}

/// Fills one replica's disk for a while: the replica leaves, no writer notices, and it returns with all data.
#[test]
fn a_disk_that_is_full_for_a_while_costs_nothing() -> Result<()> {
    let (folder, seed) = (folder()?, seed()?);
    let disk = SmallDisk::mount(folder.path(), 64)?;
    let mut options = BareVolumeOptions::new(folder.path());
    options.disks[2].clone_from(&disk.mount_point);
    let volume = BareVolume::start(options)?;
    disk.fill()?;
    let ((), guest) = under_load(Guest::new(volume.client()?, GuestOptions::new(seed)), |load| {
        for _ in 0..3 {
            load.wait_for_answers(500, LIMIT)?;
            disk.empty()?;
            load.wait_for_answers(500, LIMIT)?;
            until_whole(&volume.engine_control(), LIMIT)?;
            disk.fill()?;
        }
        disk.empty()?;
        load.wait_for_answers(500, LIMIT).map(drop)
    })?;
    println!("{:?}", guest.counts());
    until_whole(&volume.engine_control(), LIMIT)?;
    let directories = volume.directories();
    volume.stop()?;
    compare_exports(&directories, folder.path()).map(drop)
}

/// Checks that a return copies the missed regions, and not the whole volume.
#[test]
fn a_return_to_a_tebibyte_copies_only_missed_regions() -> Result<()> {
    let (folder, seed) = (folder()?, seed()?);
    let options = ["--replica-timeout-ms", "1000", "--intent-clear-after-ms", "400"];
    let volume = volume(&folder, "1TiB", &options)?;
    let mut random = fastrand::Rng::with_seed(seed);
    let mut client = volume.client()?;
    let (all, chunks) = (client.size_bytes() / CHUNK_BYTES, OUT_OF_SYNC_BYTES / CHUNK_BYTES);
    write_chunks(&mut client, 0..BASE_BYTES / CHUNK_BYTES)?;
    // Regions of a volume of 1 TiB have 1 MiB. Recent writes count as missed too, until they were left alone
    // for a while, which is not visible from outside.
    let (deadline, mut rest) = (Instant::now() + LIMIT, Duration::from_secs(4));
    while copied_bytes(&volume, &mut client, "in order", all / 2..all / 2 + chunks)? > 2 * OUT_OF_SYNC_BYTES {
        ensure!(Instant::now() < deadline, "more is copied than was missed, again and again");
        // The regions have to be left alone for longer until they count as clean.
        std::thread::sleep(rest);
        rest *= 2;
    }
    let places: Vec<u64> = (0..chunks).map(|_| random.u64(0..all)).collect();
    let copied = copied_bytes(&volume, &mut client, "at random places", places)?;
    ensure!(copied >> 20 <= 2 * chunks, "{} MiB were copied for {chunks} places", copied >> 20);
    volume.stop()
}

const BASE_BYTES: u64 = 512 << 20;
const OUT_OF_SYNC_BYTES: u64 = 64 << 20;
const CHUNK_BYTES: u64 = 64 << 10;

/// Pauses a replica while these chunks are written; returns how many bytes of regions were copied to it then.
fn copied_bytes(
    volume: &LocalVolume,
    client: &mut NbdClient,
    places: &str,
    chunks: impl IntoIterator<Item = u64>,
) -> Result<u64> {
    let (control, pid) = (volume.engine_control()?, volume.replica_pid(2)?);
    forgive(&control)?;
    signal(pid, Signal::SIGSTOP)?;
    write_chunks(client, chunks)?;
    let left = engine_status(&control).map(|status| !is_whole(&status));
    signal(pid, Signal::SIGCONT)?;
    ensure!(left?, "a replica that hangs is a member");
    let (continued, mut copied) = (Instant::now(), 0);
    until("volume with all members", LIMIT, || {
        let status = engine_status(&control)?;
        let copies = status.members.iter().filter_map(|member| member.copy);
        copied = copies.map(|copy| copy.total_bytes).max().unwrap_or(0).max(copied);
        Ok(is_whole(&status).then_some(()))
    })?;
    let waited = continued.elapsed();
    println!(
        "1 TiB, {} MiB missed {places}: a member again after {:.2} s, {} MiB of regions copied",
        OUT_OF_SYNC_BYTES >> 20,
        waited.as_secs_f64(),
        copied >> 20
    );
    ensure!(waited < Duration::from_secs(60), "coming back took {waited:?}");
    Ok(copied)
}

/// Tests that a replica that was late again and again stays out for longer each time, unless an operator
/// orders a scrub meanwhile.
fn forgive(control: &Path) -> Result<()> {
    let command = ScrubCommand { bytes_per_s: Some(1 << 20), repair: false };
    for scrub in [Some(command), None] {
        ControlClient::connect(control)?.request(&ProcessCommand::Scrub { scrub })?;
    }
    Ok(())
}

/// Writes chunks with these numbers, a few at a time.
fn write_chunks(client: &mut NbdClient, chunks: impl IntoIterator<Item = u64>) -> Result<()> {
    let answered = |client: &mut NbdClient| -> Result<()> {
        let completion = client.wait(LIMIT)?.context("no answer to a write")?;
        ensure!(completion.outcome.is_ok(), "a write fails: {:?}", completion.outcome);
        Ok(())
    };
    for offset in chunks.into_iter().map(|chunk| chunk * CHUNK_BYTES) {
        let data = offset.to_le_bytes().repeat(usize::try_from(CHUNK_BYTES / 8)?);
        client.submit(NbdRequest::Write { offset, data, fua: false });
        if client.outstanding().len() >= 8 {
            answered(client)?;
        }
    }
    while !client.outstanding().is_empty() {
        answered(client)?;
    }
    Ok(())
}
