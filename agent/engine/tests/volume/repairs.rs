//! Tests repairs of snapshots by a scrub of real processes.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use shorthorn_control::{EnginePhase, ProcessCommand, ScrubCommand, ScrubStatus};
use shorthorn_regions::WriteIntentLog;
use shorthorn_store::{AlignedBuffer, OpenOptions, Store};
use shorthorn_testkit::waiting::wait_for;
use shorthorn_types::{RegionSet, Regions};

use crate::LIMIT;
use crate::load::Load;
use crate::volume::Volume;

const SIZE: u64 = 16 << 20;
const BLOCK: u64 = 4096;

/// Returns a volume of two replicas with a snapshot. The head hides its third block.
fn with_snapshot(size_bytes: u64) -> Volume {
    let mut volume = Volume::start(2, size_bytes);
    volume.stop();
    for number in 0..2 {
        let mut store = Store::open(volume.directory(number), OpenOptions::default()).unwrap();
        let data: Vec<u8> = (1..=16_u8).flat_map(|block| [block; 4096]).collect();
        store.write_at(&data, 0, false).unwrap();
        store.snapshot("below", true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
        store.write_at(&[99; 4096], 2 * BLOCK, false).unwrap();
        store.close().unwrap();
        volume.start_replica(number);
    }
    volume.attach += 1;
    volume.start_engine();
    volume.wait("it serves", |engine| engine.phase == EnginePhase::Serving);
    for number in 0..2 {
        let directory = PathBuf::from(volume.directory(number));
        let is_summed = || is_summed(&directory, size_bytes).then_some(()).ok_or(number);
        wait_for("the first region is summed", LIMIT, is_summed);
    }
    volume
}

/// Returns true if the checksums of the first region count, also after the process has died.
fn is_summed(directory: &Path, size_bytes: u64) -> bool {
    let epoch_record: serde_json::Value =
        serde_json::from_slice(&fs::read(directory.join("shorthorn.guard")).unwrap()).unwrap();
    let regions = Regions::of(size_bytes);
    let epoch = epoch_record["epoch"].as_u64().unwrap();
    let mut intent_log = WriteIntentLog::new(regions, epoch, &RegionSet::empty(regions.count()));
    let Ok(pages) = fs::read(directory.join("shorthorn.unsummed")) else { return false };
    intent_log.keep_unsummed(Some(&pages));
    intent_log.is_summed(0)
}

fn image(volume: &Volume, number: usize) -> PathBuf {
    PathBuf::from(volume.directory(number)).join("volume-snap-below.img")
}

/// Returns the data of the snapshot.
fn data_of(volume: &Volume, number: usize) -> Vec<u8> {
    let mut data = vec![0; 16 * 4096];
    fs::File::open(image(volume, number)).unwrap().read_exact_at(&mut data, 0).unwrap();
    data
}

/// The disk changes a block of the snapshot.
fn rot(volume: &Volume, number: usize, block: u64) {
    const O_DIRECT: i32 = nix::libc::O_DIRECT;
    let path = image(volume, number);
    let file = fs::File::options().read(true).write(true).custom_flags(O_DIRECT).open(path).unwrap();
    let mut bytes = AlignedBuffer::new(4096);
    bytes.as_mut_slice().fill(200);
    file.write_all_at(bytes.as_slice(), block * BLOCK).unwrap();
}

/// Scrubs the volume and its snapshots, and repairs them.
fn scrub(volume: &Volume, number: u64) -> ScrubStatus {
    let scrub = Some(ScrubCommand { bytes_per_s: None, repair: true });
    volume.request(&ProcessCommand::Scrub { scrub });
    let has_ended = move |scrub: &ScrubStatus| scrub.number == Some(number) && !scrub.running;
    let status = volume.wait("the scrub ends", move |engine| engine.scrub.as_ref().is_some_and(has_ended));
    status.scrub.unwrap()
}

fn has_reaction(scrub: &ScrubStatus, reaction: &str) -> bool {
    scrub.last.as_ref().is_some_and(|last| last.contains(reaction))
}

/// The source has rot that no checksum shows, because the head hides the block. The other replica has that
/// block sound, and knows of rot beside it.
#[test]
fn a_repair_of_rot_leaves_sound_blocks_beside_it() {
    let mut volume = with_snapshot(SIZE);
    let before = data_of(&volume, 0);
    rot(&volume, 0, 3);
    rot(&volume, 1, 2);
    let found = scrub(&volume, 1);
    assert!(has_reaction(&found, "no checksum proves"), "{found:?}");
    assert_eq!((found.found, found.repaired), (1, 0));
    assert!(data_of(&volume, 0) == before, "a sound block was replaced, or the rot stayed");
    let found = scrub(&volume, 2);
    assert!(has_reaction(&found, "no majority"), "{found:?}");
    assert!(data_of(&volume, 0) == before);
    volume.stop();
}

#[test]
fn a_repair_makes_a_piece_equal_if_only_rot_differs() {
    let mut volume = with_snapshot(SIZE);
    let before = data_of(&volume, 0);
    [3, 4, 15].into_iter().for_each(|block| rot(&volume, 0, block));
    let found = scrub(&volume, 1);
    assert_eq!((found.found, found.repaired), (1, 1), "{found:?}");
    assert!(data_of(&volume, 0) == before);
    let found = scrub(&volume, 2);
    assert_eq!((found.found, found.repaired), (0, 0), "{found:?}");
    volume.stop();
}

/// Each write makes its region dirty: the replicas write pages of their sets nearly all the time.
#[test]
fn a_repair_waits_while_a_set_is_written() {
    let mut volume = with_snapshot(1 << 30);
    let before = data_of(&volume, 0);
    (4..16).step_by(2).for_each(|block| rot(&volume, 0, block));
    let load = Load::start(&volume, 7);
    let found = scrub(&volume, 1);
    load.stop_and_verify(&volume);
    assert_eq!((found.found, found.repaired), (1, 1), "{found:?}");
    assert!(data_of(&volume, 0) == before);
    assert!(!volume.log_of_replica(0).contains("RepairLayer refused"), "each attempt was logged");
    volume.stop();
}
