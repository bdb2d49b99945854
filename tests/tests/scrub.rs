//! Rot on a real disk, found and put right by a scrub of real processes; and a replica that is copied from
//! one with snapshots.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::fcntl::OFlag;
use shorthorn_control::{ScrubCommand, ScrubStatus};
use shorthorn_regions::WriteIntentLog;
use shorthorn_store::{AlignedBuffer, ExportTarget, OpenOptions as StoreOptions, Store, export};
use shorthorn_tests::{
    BareVolume, BareVolumeOptions, Guest, GuestOptions, NbdRequest, compare_exports, engine_status,
    under_load, until, until_whole,
};
use shorthorn_types::{ByteRange, RegionSet, Regions};

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;
const BLOCK_BYTES: u64 = 4096;
const EIO: u32 = 5;
const NOW: &str = "2026-11-22T10:00:00Z";
const REPAIR: ScrubCommand = ScrubCommand { bytes_per_s: None, repair: true };
const REPORT: ScrubCommand = ScrubCommand { bytes_per_s: None, repair: false };

fn folder() -> Result<tempfile::TempDir> {
    // Not /tmp: that may be a file system without O_DIRECT, on which less is tested.
    tempfile::tempdir_in("/var/tmp").context("making a folder")
}

fn options(folder: &tempfile::TempDir, replicas: usize) -> BareVolumeOptions {
    let disks = vec![folder.path().to_owned(); replicas];
    BareVolumeOptions { disks, ..BareVolumeOptions::new(folder.path()) }
}

fn pattern(seed: u64, length: u64) -> Result<Vec<u8>> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut data = vec![0; usize::try_from(length)?];
    random.fill(&mut data);
    Ok(data)
}

fn write(volume: &BareVolume, offset: u64, data: Vec<u8>) -> Result<()> {
    let mut client = volume.client()?;
    let answer = client.call(NbdRequest::Write { offset, data, fua: true }, LIMIT)?;
    ensure!(answer.is_ok(), "writing: {answer:?}");
    Ok(())
}

fn read(volume: &BareVolume, offset: u64, length: u64) -> Result<Vec<u8>> {
    let mut client = volume.client()?;
    let answer = client.call(NbdRequest::Read { offset, length: length.try_into()? }, LIMIT)?;
    answer.map_err(|errno| anyhow::anyhow!("reading: errno {errno}"))
}

/// Flips a bit of each byte of a block of an image, past every cache, like rot. Waits until the disk has it.
fn rot(image: &Path, offset: u64) -> Result<()> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags((OFlag::O_DIRECT | OFlag::O_DSYNC).bits())
        .open(image)
        .with_context(|| format!("opening {} with O_DIRECT", image.display()))?;
    let mut block = AlignedBuffer::new(usize::try_from(BLOCK_BYTES)?);
    file.read_exact_at(block.as_mut_slice(), offset)?;
    block.as_mut_slice().iter_mut().for_each(|byte| *byte ^= 0x10);
    file.write_all_at(block.as_slice(), offset)?;
    Ok(())
}

/// Returns the files in a directory whose names begin and end so.
fn files(directory: &Path, prefix: &str, suffix: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with(prefix) && name.ends_with(suffix) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn head(directory: &Path) -> Result<PathBuf> {
    files(directory, "volume-head-", ".img")?.pop().context("the directory has no head")
}

fn snapshot(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("volume-snap-{name}.img"))
}

/// Returns the counts of a scrub, and its last message.
fn found(scrub: &ScrubStatus) -> (u64, u64, &str) {
    (scrub.found, scrub.repaired, last(scrub))
}

fn last(scrub: &ScrubStatus) -> &str {
    scrub.last.as_deref().unwrap_or_default()
}

/// Makes a volume whose directories have the snapshots `first` and `second` and a head above them, all made
/// while nothing ran. So they have the same layout, which a resync does not ensure.
fn with_snapshots(folder: &tempfile::TempDir, replicas: usize) -> Result<BareVolume> {
    let volume = BareVolume::start(options(folder, replicas))?;
    again(folder, volume, replicas, |store| {
        for (seed, name) in [(1, "first"), (2, "second")] {
            // They overlap, so that a part of each is hidden.
            store.write_at(&pattern(seed, 3 * MIB)?, seed * 2 * MIB, false)?;
            store.write_at(&pattern(seed + 10, 8192)?, 40 * MIB, false)?;
            store.snapshot(name, true, BTreeMap::new(), NOW)?;
        }
        Ok(store.write_at(&pattern(3, MIB)?, 20 * MIB, false)?)
    })
}

/// Stops everything, does something to each directory, and starts it again.
fn again(
    folder: &tempfile::TempDir,
    volume: BareVolume,
    replicas: usize,
    change: impl Fn(&mut Store) -> Result<()>,
) -> Result<BareVolume> {
    let directories = volume.directories();
    volume.stop()?;
    for directory in directories {
        let mut store = Store::open(&directory, StoreOptions::default())?;
        change(&mut store)?;
        store.close()?;
    }
    BareVolume::start(options(folder, replicas))
}

/// Stops the volume, and checks that the files of each snapshot, and the volume, have the same content on all
/// replicas.
fn all_are_equal(folder: &Path, volume: BareVolume) -> Result<()> {
    let directories = volume.directories();
    volume.stop()?;
    compare_exports(&directories, folder)?;
    let layers = |directory: &Path| -> Result<BTreeMap<String, Vec<u8>>> {
        let images = files(directory, "volume-snap-", ".img")?.into_iter();
        images
            .map(|path| Ok((path.file_name().unwrap_or_default().to_string_lossy().into(), fs::read(&path)?)))
            .collect()
    };
    let first = layers(&directories[0])?;
    for directory in &directories[1..] {
        let other = layers(directory)?;
        ensure!(first.keys().eq(other.keys()), "{} has {:?}", directory.display(), other.keys());
        for (name, content) in &other {
            let blocks = first[name].chunks(4096).zip(content.chunks(4096));
            let differs = blocks.enumerate().find(|(_, (one, other))| one != other);
            let differs = differs.map(|(block, _)| block as u64 * BLOCK_BYTES);
            ensure!(differs.is_none(), "{name} in {} differs at {differs:?}", directory.display());
        }
    }
    Ok(())
}

#[test]
fn a_rotten_block_of_the_volume_is_repaired_from_the_majority() -> Result<()> {
    let folder = folder()?;
    let volume = BareVolume::start(options(&folder, 3))?;
    let data = pattern(7, 4 * MIB)?;
    write(&volume, 8 * MIB, data.clone())?;
    ensure!(found(&volume.scrub(REPAIR, LIMIT)?) == (0, 0, ""));
    rot(&head(&volume.directory(1))?, 9 * MIB + 8192)?;
    let scrub = volume.scrub(REPORT, LIMIT)?;
    ensure!((scrub.found, scrub.repaired) == (1, 0), "{scrub:?}");
    let replica = volume.replica_id(1).to_string();
    ensure!(last(&scrub).contains(&replica) && last(&scrub).contains("9437184"), "{scrub:?}");
    let scrub = volume.scrub(REPAIR, LIMIT)?;
    ensure!((scrub.found, scrub.repaired) == (1, 1) && last(&scrub).contains(&replica), "{scrub:?}");
    ensure!(found(&volume.scrub(REPAIR, LIMIT)?) == (0, 0, ""));
    ensure!(read(&volume, 8 * MIB, 4 * MIB)? == data);
    all_are_equal(folder.path(), volume)
}

/// Stops a volume in order, so that all of it is clean, and starts it again; waits for its sums.
fn summed(folder: &tempfile::TempDir, volume: BareVolume, replicas: usize) -> Result<BareVolume> {
    let volume = again(folder, volume, replicas, |_| Ok(()))?;
    until_summed(&volume)?;
    Ok(volume)
}

/// Waits until each replica has summed all that it holds.
fn until_summed(volume: &BareVolume) -> Result<()> {
    for directory in volume.directories() {
        let sums = format!("sums of {}", directory.display());
        until(&sums, LIMIT, || Ok(is_summed(&directory)?.then_some(())))?;
    }
    Ok(())
}

/// Returns the regions whose sums count according to a replica, also after the process dies.
fn sums_of(directory: &Path) -> Result<WriteIntentLog> {
    let epoch_record: serde_json::Value =
        serde_json::from_slice(&fs::read(directory.join("shorthorn.guard"))?)?;
    let regions = Regions::of(fs::metadata(head(directory)?)?.len());
    let epoch = epoch_record["epoch"].as_u64().context("the epoch record has no epoch")?;
    let mut intent_log = WriteIntentLog::new(regions, epoch, &RegionSet::empty(regions.count()));
    intent_log.keep_unsummed(Some(&fs::read(directory.join("shorthorn.unsummed"))?));
    Ok(intent_log)
}

/// Returns true if the sums of all regions with data in the head count.
fn is_summed(directory: &Path) -> Result<bool> {
    let intent_log = sums_of(directory)?;
    let (head, regions) = (fs::File::open(head(directory)?)?, intent_log.regions());
    let mut region_holds = vec![0; usize::try_from(regions.region_bytes())?];
    for region in 0..regions.count() {
        let range = regions.range(region);
        let bytes = &mut region_holds[..usize::try_from(range.length())?];
        head.read_exact_at(bytes, range.offset())?;
        if bytes.iter().any(|byte| *byte != 0) && !intent_log.is_summed(region) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[test]
fn of_two_replicas_the_one_that_knows_its_sums_is_right() -> Result<()> {
    let folder = folder()?;
    let volume = BareVolume::start(options(&folder, 2))?;
    let data = pattern(7, 4 * MIB)?;
    write(&volume, 8 * MIB, data.clone())?;
    let volume = summed(&folder, volume, 2)?;
    ensure!(found(&volume.scrub(REPAIR, LIMIT)?) == (0, 0, ""));
    // Each has lost other blocks of the same MiB, one of them two of one region.
    rot(&head(&volume.directory(1))?, 9 * MIB + 8192)?;
    rot(&head(&volume.directory(1))?, 9 * MIB + 16384)?;
    rot(&head(&volume.directory(0))?, 9 * MIB + 65536)?;
    let scrub = volume.scrub(REPORT, LIMIT)?;
    ensure!((scrub.found, scrub.repaired) == (3, 0), "{scrub:?}");
    let scrub = volume.scrub(REPAIR, LIMIT)?;
    ensure!((scrub.found, scrub.repaired) == (3, 3), "{scrub:?}");
    ensure!(
        last(&scrub).contains(&volume.replica_id(0).to_string()) && last(&scrub).contains("9502720"),
        "{scrub:?}"
    );
    ensure!(found(&volume.scrub(REPAIR, LIMIT)?) == (0, 0, ""));
    ensure!(read(&volume, 8 * MIB, 4 * MIB)? == data);
    all_are_equal(folder.path(), volume)
}

#[test]
fn a_read_that_is_verified_never_shows_rot_and_has_it_repaired() -> Result<()> {
    let folder = folder()?;
    let options = || BareVolumeOptions { verify_reads: true, ..options(&folder, 2) };
    let volume = BareVolume::start(options())?;
    let data = pattern(9, 4 * MIB)?;
    write(&volume, 8 * MIB, data.clone())?;
    volume.stop()?;
    let volume = BareVolume::start(options())?;
    until_summed(&volume)?;
    // Each has lost other blocks. Reads take turns: two of everything come to both.
    rot(&head(&volume.directory(0))?, 8 * MIB + 65536)?;
    rot(&head(&volume.directory(1))?, 9 * MIB + 8192)?;
    for _ in 0..2 {
        ensure!(read(&volume, 8 * MIB, 2 * MIB)? == data[..usize::try_from(2 * MIB)?], "rot is shown");
        // Less than a block of it.
        ensure!(read(&volume, 8 * MIB + 65536 + 512, 512)? == data[66048..66560], "rot is shown");
    }
    let is_repaired = || {
        let status = engine_status(&volume.engine_control())?;
        ensure!(status.scrub.is_none(), "no scrub was ordered: {:?}", status.scrub);
        let read = status.read_findings.map(|read| (read.found, read.repaired));
        Ok((read == Some((2, 2))).then_some(()))
    };
    until("repair of both", LIMIT, is_repaired)?;
    ensure!(found(&volume.scrub(REPAIR, LIMIT)?) == (0, 0, ""));
    // Data that both have lost is an error. That region was not repaired: its sums count.
    for replica in 0..2 {
        rot(&head(&volume.directory(replica))?, 10 * MIB)?;
    }
    let mut client = volume.client()?;
    let answer = client.call(NbdRequest::Read { offset: 10 * MIB, length: 4096 }, LIMIT)?;
    ensure!(answer == Err(EIO), "rot is shown");
    drop(client);
    volume.stop()
}

#[test]
fn a_replica_is_never_rebuilt_from_rot_while_a_sound_member_exists() -> Result<()> {
    let folder = folder()?;
    let volume = BareVolume::start(options(&folder, 3))?;
    let data = pattern(8, 4 * MIB)?;
    write(&volume, 8 * MIB, data.clone())?;
    let volume = summed(&folder, volume, 3)?;
    // Every other region of one, the rest of another one: whichever is asked first, it is rotten somewhere.
    for region in 0..4 * MIB / 65536 {
        rot(&head(&volume.directory(usize::try_from(region % 2)?))?, 8 * MIB + region * 65536)?;
    }
    let directories = volume.directories();
    volume.stop()?;
    fs::remove_dir_all(&directories[2])?;
    let volume = BareVolume::start(options(&folder, 3))?;
    until_whole(&volume.engine_control(), LIMIT)?;
    volume.stop()?;
    let copy = exported(&directories[2], None, folder.path())?;
    let at = usize::try_from(8 * MIB)?;
    ensure!(copy[at..at + data.len()] == data, "rot was copied");
    // Rot met by reads is repaired; a scrub finds the rest.
    let volume = BareVolume::start(options(&folder, 3))?;
    volume.scrub(REPAIR, LIMIT)?;
    ensure!(found(&volume.scrub(REPAIR, LIMIT)?) == (0, 0, ""));
    ensure!(read(&volume, 8 * MIB, 4 * MIB)? == data);
    all_are_equal(folder.path(), volume)
}

/// Two members have lost blocks of the snapshots, different ones but for one.
#[test]
fn each_block_of_a_snapshot_is_copied_from_a_sound_member_or_known_as_lost() -> Result<()> {
    let folder = folder()?;
    let volume = with_snapshots(&folder, 3)?;
    let shown = ByteRange::new(2 * MIB, 5 * MIB)?;
    for directory in volume.directories() {
        until("sums of the snapshots", LIMIT, || {
            let intent_log = sums_of(&directory)?;
            let is_summed = intent_log.regions().touched(shown).all(|region| intent_log.is_summed(region));
            Ok(is_summed.then_some(()))
        })?;
    }
    // The second snapshot hides the rest of the first one.
    for region in 0..2 * MIB / 65536 {
        let directory = volume.directory(usize::try_from(region % 2)?);
        rot(&snapshot(&directory, "first"), 2 * MIB + region * 65536)?;
    }
    for number in 0..2 {
        rot(&snapshot(&volume.directory(number), "second"), 5 * MIB)?;
    }
    let directories = volume.directories();
    volume.stop()?;
    fs::remove_dir_all(&directories[2])?;
    let volume = BareVolume::start(options(&folder, 3))?;
    until_whole(&volume.engine_control(), LIMIT)?;
    volume.stop()?;
    let copy = fs::read(snapshot(&directories[2], "first"))?;
    let at = usize::try_from(2 * MIB)?;
    ensure!(copy[at..2 * at] == pattern(1, 3 * MIB)?[..at], "rot was copied");
    let lost: serde_json::Value =
        serde_json::from_slice(&fs::read(directories[2].join("shorthorn.lost-blocks"))?)?;
    ensure!(
        lost["blocks"][0][0] == 5 * MIB / 4096 && lost["blocks"].as_array().map(Vec::len) == Some(1),
        "{lost}"
    );
    Ok(())
}

#[test]
fn of_two_replicas_the_kept_sum_shows_the_rotten_snapshot() -> Result<()> {
    let folder = folder()?;
    let volume = with_snapshots(&folder, 2)?;
    ensure!(found(&volume.scrub(REPAIR, LIMIT)?) == (0, 0, ""), "all agree, and keep that");
    for directory in volume.directories() {
        ensure!(files(&directory, "shorthorn.sums-", "")?.len() == 2, "{} has no sums", directory.display());
    }
    // The kept sums outlive the processes.
    let volume = again(&folder, volume, 2, |_| Ok(()))?;
    // A block that the volume shows, and one that a newer layer hides.
    rot(&snapshot(&volume.directory(0), "first"), 3 * MIB)?;
    rot(&snapshot(&volume.directory(1), "first"), 40 * MIB + 4096)?;
    let scrub = volume.scrub(REPAIR, LIMIT)?;
    ensure!((scrub.found, scrub.repaired) == (2, 2), "{scrub:?}");
    let names = ["snapshot first at", "41943040", &volume.replica_id(1).to_string(), "repaired from"];
    ensure!(names.iter().all(|name| last(&scrub).contains(name)), "{scrub:?}");
    ensure!(found(&volume.scrub(REPAIR, LIMIT)?) == (0, 0, ""));
    ensure!(read(&volume, 2 * MIB, 2 * MIB)? == pattern(1, 3 * MIB)?[..2 << 20]);
    all_are_equal(folder.path(), volume)
}

#[test]
fn rot_of_an_unsummed_snapshot_is_repaired_by_three_and_reported_by_two() -> Result<()> {
    let folder = folder()?;
    let volume = with_snapshots(&folder, 3)?;
    rot(&snapshot(&volume.directory(2), "second"), 5 * MIB)?;
    let scrub = volume.scrub(REPAIR, LIMIT)?;
    ensure!((scrub.found, scrub.repaired) == (1, 1), "{scrub:?}");
    ensure!(last(&scrub).contains(&volume.replica_id(2).to_string()), "{scrub:?}");
    all_are_equal(folder.path(), volume)?;
    let folder = self::folder()?;
    let volume = with_snapshots(&folder, 2)?;
    // The volume does not show it: only the scrub of the snapshots sees it.
    rot(&snapshot(&volume.directory(1), "first"), 40 * MIB)?;
    for _ in 0..2 {
        let scrub = volume.scrub(REPAIR, LIMIT)?;
        ensure!((scrub.found, scrub.repaired) == (1, 0) && last(&scrub).contains("no majority"), "{scrub:?}");
    }
    // When the rot is gone, both agree, and that is kept.
    rot(&snapshot(&volume.directory(1), "first"), 40 * MIB)?;
    ensure!(found(&volume.scrub(REPAIR, LIMIT)?) == (0, 0, ""));
    rot(&snapshot(&volume.directory(1), "first"), 40 * MIB)?;
    let scrub = volume.scrub(REPAIR, LIMIT)?;
    ensure!((scrub.found, scrub.repaired) == (1, 1), "{scrub:?}");
    all_are_equal(folder.path(), volume)
}

#[test]
fn a_scrub_without_repair_only_reports() -> Result<()> {
    let folder = folder()?;
    let volume = with_snapshots(&folder, 2)?;
    volume.scrub(REPORT, LIMIT)?;
    let image = snapshot(&volume.directory(0), "second");
    rot(&image, 40 * MIB)?;
    let before = fs::read(&image)?;
    for _ in 0..2 {
        let scrub = volume.scrub(REPORT, LIMIT)?;
        // In the snapshot, and in the volume that shows it.
        ensure!((scrub.found, scrub.repaired) == (2, 0), "{scrub:?}");
    }
    ensure!(fs::read(&image)? == before, "it was changed");
    let scrub = volume.scrub(REPAIR, LIMIT)?;
    ensure!(
        (scrub.found, scrub.repaired) == (1, 1),
        "a repaired block of a snapshot is right in the volume: {scrub:?}"
    );
    all_are_equal(folder.path(), volume)
}

#[test]
fn damaged_sums_are_recreated_and_removed_with_their_snapshot() -> Result<()> {
    let folder = folder()?;
    let volume = with_snapshots(&folder, 2)?;
    volume.scrub(REPAIR, LIMIT)?;
    let sums = volume.directory(0).join("shorthorn.sums-first");
    let whole = fs::read(&sums)?;
    let mut damaged = whole.clone();
    damaged[60] ^= 1;
    fs::write(&sums, &damaged)?;
    ensure!(found(&volume.scrub(REPAIR, LIMIT)?) == (0, 0, ""));
    ensure!(fs::read(&sums)? == whole, "they were not made again");
    let volume = again(&folder, volume, 2, |store| {
        store.remove("first")?;
        Ok(store.fold("first")?)
    })?;
    ensure!(files(&volume.directory(0), "shorthorn.sums-", "")?.is_empty(), "`second` is another file now");
    ensure!(found(&volume.scrub(REPAIR, LIMIT)?) == (0, 0, ""));
    ensure!(files(&volume.directory(0), "shorthorn.sums-", "")?.len() == 1);
    all_are_equal(folder.path(), volume)
}

/// Members may hold the same in other layers, as after a rebuild: that is not rot, neither before it was seen
/// nor after.
#[test]
fn equal_data_in_other_layers_is_not_rot() -> Result<()> {
    let folder = folder()?;
    let volume = with_snapshots(&folder, 2)?;
    let (directories, data) = (volume.directories(), pattern(1, 3 * MIB)?);
    volume.stop()?;
    for (index, directory) in directories.iter().enumerate() {
        let mut store = Store::open(directory, StoreOptions::default())?;
        if index == 1 {
            // The data that the volume shows there anyway, in the head; and zeroes where it has no data.
            store.write_at(&data[..65536], 2 * MIB, false)?;
            store.write_at(&[0; 65536], 50 * MIB, false)?;
        }
        store.snapshot("third", true, BTreeMap::new(), NOW)?;
        store.close()?;
    }
    let volume = BareVolume::start(options(&folder, 2))?;
    for _ in 0..2 {
        ensure!(found(&volume.scrub(REPAIR, LIMIT)?) == (0, 0, ""));
    }
    rot(&snapshot(&volume.directory(1), "third"), 2 * MIB)?;
    let scrub = volume.scrub(REPAIR, LIMIT)?;
    ensure!((scrub.found, scrub.repaired) == (1, 1), "{scrub:?}");
    ensure!(read(&volume, 2 * MIB, 2 * MIB)? == data[..2 << 20]);
    ensure!(found(&volume.scrub(REPAIR, LIMIT)?) == (0, 0, ""));
    let directories = volume.directories();
    volume.stop()?;
    compare_exports(&directories, folder.path()).map(drop)
}

#[test]
fn under_load_a_scrub_finds_nothing() -> Result<()> {
    const SCRUBS: u32 = 5;
    let folder = folder()?;
    let volume = with_snapshots(&folder, 3)?;
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    // On a part that is not written yet.
    let options = GuestOptions { first_sector: 44 * MIB / 512, ..GuestOptions::new(seed) };
    let guest = Guest::new(volume.client()?, options);
    let ((), guest) = under_load(guest, |load| {
        for _ in 0..SCRUBS {
            load.wait_for_answers(200, LIMIT)?;
            ensure!(found(&volume.scrub(REPAIR, LIMIT)?) == (0, 0, ""));
        }
        load.wait_for_answers(200, LIMIT).map(drop)
    })?;
    println!("{SCRUBS} scrubs, {:?}", guest.counts());
    all_are_equal(folder.path(), volume)
}

/// Returns the content of a snapshot or of the volume.
fn exported(directory: &Path, snapshot: Option<&str>, folder: &Path) -> Result<Vec<u8>> {
    let image = folder.join("exported");
    export(directory, snapshot, ExportTarget::File(image.clone()), |_, _| {})?;
    let bytes = fs::read(&image)?;
    fs::remove_file(image)?;
    Ok(bytes)
}

#[test]
fn a_rebuilt_replica_has_all_snapshots_of_its_source() -> Result<()> {
    let folder = folder()?;
    let volume = with_snapshots(&folder, 3)?;
    let volume = again(&folder, volume, 3, |store| {
        store.snapshot("third", false, BTreeMap::from([("why".to_owned(), "test".to_owned())]), NOW)?;
        // It stays as a layer that cannot be read by its name.
        Ok(store.remove("second")?)
    })?;
    write(&volume, 3 * MIB, pattern(4, MIB)?)?;
    let directories = volume.directories();
    volume.stop()?;
    fs::remove_dir_all(&directories[1])?;
    let volume = BareVolume::start(options(&folder, 3))?;
    write(&volume, 30 * MIB, pattern(5, MIB)?)?;
    until_whole(&volume.engine_control(), LIMIT)?;
    write(&volume, 32 * MIB, pattern(6, MIB)?)?;
    ensure!(found(&volume.scrub(REPAIR, LIMIT)?) == (0, 0, ""));
    volume.stop()?;
    for name in [Some("first"), Some("third"), None] {
        let [one, other] = [&directories[0], &directories[1]].map(|path| exported(path, name, folder.path()));
        ensure!(one? == other?, "{name:?} reads otherwise in the copy");
    }
    for directory in &directories {
        let refused = exported(directory, Some("second"), folder.path());
        ensure!(refused.is_err_and(|error| error.to_string().contains("removed")), "it is marked as removed");
    }
    for suffix in [".img", ".img.meta"] {
        let [ours, theirs] =
            [&directories[0], &directories[1]].map(|path| files(path, "volume-snap-", suffix));
        let (ours, theirs) = (ours?, theirs?);
        ensure!(ours.len() == 3 && theirs.len() == 3, "{ours:?}, {theirs:?}");
        for (ours, theirs) in ours.iter().zip(&theirs) {
            ensure!(
                ours.file_name() == theirs.file_name() && fs::read(ours)? == fs::read(theirs)?,
                "{theirs:?}"
            );
        }
    }
    Ok(())
}
