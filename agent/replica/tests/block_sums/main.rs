//! Tests sums of blocks: rot is reported, and nothing else is.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

#[path = "../common/mod.rs"]
mod common;
mod snapshots;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use common::disks::{Mounted, may_mount};
use common::*;
use nix::fcntl::{FallocateFlags, fallocate};
use proptest::prelude::*;
use shorthorn_control::ReplicaSpec;
use shorthorn_regions::WriteIntentLog;
use shorthorn_store::{AlignedBuffer, OpenOptions as StoreOptions, Store};
use shorthorn_testkit::waiting::wait_for;
use shorthorn_types::{Errno, MarkAction, MarkRegions, Members, RegionSet, Regions, RegionsOf, ReplicaId};
use shorthorn_wire::{
    CopyEnd, CopyState, ExpandReplica, Flags, Header, LayerCheck, LayerList, LayerPatch, LayerRange, Opcode,
    RegionsPage, RegionsQuery, encode_patch,
};

use snapshots::{SNAPSHOT, with_snapshot};

const REGION: u64 = 64 << 10;
const BLOCK: u64 = 4096;
const SIZE: u64 = 8 * MIB;
const ROTTEN: i32 = Errno::ROTTEN.raw();
/// A rate that only the disk limits, in bytes per second.
const FAST: u64 = 1 << 40;

fn spec_of(base: &Path) -> ReplicaSpec {
    ReplicaSpec { sum_bytes_per_s: Some(FAST), ..spec(base, SIZE) }
}

fn head(spec: &ReplicaSpec) -> File {
    let path = spec.directory.join("volume-head-000.img");
    OpenOptions::new().read(true).write(true).custom_flags(nix::libc::O_DIRECT).open(path).unwrap()
}

/// Changes a byte of a block on the disk.
fn rot(spec: &ReplicaSpec, block: u64) {
    let (file, mut bytes) = (head(spec), AlignedBuffer::new(4096));
    file.read_exact_at(bytes.as_mut_slice(), block * BLOCK).unwrap();
    bytes.as_mut_slice()[100] ^= 1;
    file.write_all_at(bytes.as_slice(), block * BLOCK).unwrap();
}

/// Sends the mark of the engine that all members have flushed everything.
fn is_clean(client: &mut Client, size_bytes: u64) {
    client.flush().unwrap();
    let runs = vec![(0, Regions::of(size_bytes).count())];
    let (of, action) = (RegionsOf::Intent, MarkAction::Clear);
    client
        .send_text(Opcode::Mark, &MarkRegions { of, action, runs, stamp: 0, size_bytes: Some(size_bytes) })
        .unwrap();
}

/// Returns true if the sums of a region count, also after the process has died.
fn is_summed(spec: &ReplicaSpec, size_bytes: u64, region: u32) -> bool {
    let epoch_record = std::fs::read(spec.directory.join("shorthorn.guard")).unwrap();
    let epoch_record: serde_json::Value = serde_json::from_slice(&epoch_record).unwrap();
    let regions = Regions::of(size_bytes);
    let epoch = epoch_record["epoch"].as_u64().unwrap();
    let mut intent_log = WriteIntentLog::new(regions, epoch, &RegionSet::empty(regions.count()));
    intent_log.keep_unsummed(Some(&std::fs::read(spec.directory.join("shorthorn.unsummed")).unwrap()));
    intent_log.is_summed(region)
}

fn wait_until_summed(spec: &ReplicaSpec, size_bytes: u64, regions: &[u32]) {
    wait_for("all regions are summed", TIMEOUT, || {
        let unsummed = regions.iter().find(|region| !is_summed(spec, size_bytes, **region));
        unsummed.map_or(Ok(()), Err)
    });
}

fn read_checked(client: &mut Client, offset: u64, length: u64) -> Result<Vec<u8>, i32> {
    client.call(Opcode::Read, Flags::CHECKED, offset, u32::try_from(length).unwrap(), &[])
}

fn verify(client: &mut Client, offset: u64, length: u64) -> Result<Vec<u8>, i32> {
    client.call(Opcode::Verify, Flags::NONE, offset, u32::try_from(length).unwrap(), &[])
}

/// Returns a replica whose first and third regions have sums; the last block of the third is a hole.
fn summed(spec: &ReplicaSpec) -> (Replica, Client) {
    let replica = Replica::start(spec);
    let mut client = replica.open(generation(1));
    client.write(0, &pattern(1, 65536)).unwrap();
    client.write(2 * REGION, &pattern(2, 65536 - 4096)).unwrap();
    is_clean(&mut client, SIZE);
    wait_until_summed(spec, SIZE, &[0, 2]);
    (replica, client)
}

#[test]
fn a_rotten_block_is_reported_to_every_reader() {
    let base = base();
    let spec = spec_of(base.path());
    let (_replica, mut client) = summed(&spec);
    assert!(!is_summed(&spec, SIZE, 1), "the second region is empty");
    assert_eq!(read_checked(&mut client, 0, 65536), Ok(pattern(1, 65536)));
    rot(&spec, 3);
    assert_eq!(read_checked(&mut client, 0, 65536), Err(ROTTEN));
    assert_eq!(read_checked(&mut client, 3 * BLOCK + 512, 512), Err(ROTTEN), "a part of the block will do");
    assert_eq!(verify(&mut client, 0, MIB), Err(ROTTEN));
    assert_eq!(read_checked(&mut client, 4 * BLOCK, 12 * BLOCK), Ok(pattern(1, 65536)[16384..].to_vec()));
    assert_ne!(
        client.read(0, 65536),
        Ok(pattern(1, 65536)),
        "a read without a check returns the stored data"
    );
    client.write(3 * BLOCK, &pattern(1, 65536)[12288..16384]).unwrap();
    assert_eq!(read_checked(&mut client, 0, 65536), Ok(pattern(1, 65536)), "it was written over");
    is_clean(&mut client, SIZE);
    wait_until_summed(&spec, SIZE, &[0]);
    assert_eq!(read_checked(&mut client, 0, 65536), Ok(pattern(1, 65536)));
    rot(&spec, 3);
    assert_eq!(verify(&mut client, 0, 65536), Err(ROTTEN), "and summed again");
}

/// The write of a repair may fail, and the first one takes the sums of the whole region away.
#[test]
fn rot_stays_known_until_a_repair_has_succeeded() {
    let base = base();
    let spec = spec_of(base.path());
    let (_replica, mut client) = summed(&spec);
    [3, 4].into_iter().for_each(|block| rot(&spec, block));
    assert_eq!(read_checked(&mut client, 0, 65536), Err(ROTTEN));
    client.write(3 * BLOCK, &pattern(1, 65536)[12288..16384]).unwrap();
    rot(&spec, 3);
    for block in [3, 4] {
        assert_eq!(read_checked(&mut client, block * BLOCK, BLOCK), Err(ROTTEN), "block {block}");
    }
    // A discard does not change a block that it covers in part.
    client.call(Opcode::Discard, Flags::NONE, 4 * BLOCK + 512, 4096, &[]).unwrap();
    assert_eq!(read_checked(&mut client, 4 * BLOCK, BLOCK), Err(ROTTEN));
    client.write(3 * BLOCK, &pattern(2, 8192)).unwrap();
    assert_eq!(read_checked(&mut client, 0, 3 * BLOCK), Ok(pattern(1, 65536)[..12288].to_vec()));
    assert_eq!(read_checked(&mut client, 3 * BLOCK, 2 * BLOCK), Ok(pattern(2, 8192)), "other data");
    // A hole, which is repaired by zeroes.
    rot(&spec, 47);
    assert_eq!(read_checked(&mut client, 47 * BLOCK, BLOCK), Err(ROTTEN));
    client.call(Opcode::WriteZeroes, Flags::NONE, 47 * BLOCK, 4096, &[]).unwrap();
    assert_eq!(read_checked(&mut client, 47 * BLOCK, BLOCK), Ok(vec![0; 4096]));
    rot(&spec, 47);
    assert_eq!(read_checked(&mut client, 47 * BLOCK, BLOCK), Err(ROTTEN));
}

/// The process may end in a repair, or before the rest of the region is repaired. The next one is not to give
/// the rot to other members as the data of a dirty region.
#[test]
fn rot_is_known_after_a_crash_between_repairs() {
    let base = base();
    let spec = spec_of(base.path());
    let (mut replica, mut client) = summed(&spec);
    [3, 4, 47].into_iter().for_each(|block| rot(&spec, block));
    for block in [4, 3, 47] {
        assert_eq!(verify(&mut client, block * BLOCK, BLOCK), Err(ROTTEN));
    }
    let repair = |client: &mut Client, block: u64| {
        let at = usize::try_from(block * BLOCK).unwrap();
        client.write(block * BLOCK, &pattern(1, 65536)[at..at + 4096]).unwrap();
    };
    repair(&mut client, 3);
    client.call(Opcode::WriteZeroes, Flags::NONE, 47 * BLOCK, 4096, &[]).unwrap();
    // As if a loss of power had torn the first repair.
    rot(&spec, 3);
    replica.kill();
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(2));
    for block in [3, 4] {
        assert_eq!(verify(&mut client, block * BLOCK, BLOCK), Err(ROTTEN), "block {block}");
        repair(&mut client, block);
    }
    assert_eq!(read_checked(&mut client, 0, 65536), Ok(pattern(1, 65536)));
    assert_eq!(verify(&mut client, 2 * REGION, REGION).map(drop), Ok(()));
    rot(&spec, 47);
    assert_eq!(verify(&mut client, 47 * BLOCK, BLOCK), Err(ROTTEN), "the sums of its region count");
    // Other data ends the sums.
    client.write(3 * BLOCK, &pattern(5, 4096)).unwrap();
    assert!(!is_summed(&spec, SIZE, 0));
    assert_eq!(read_checked(&mut client, 3 * BLOCK, BLOCK), Ok(pattern(5, 4096)));
}

/// The disk has written a part of the data: that is sound, and so is the untouched part.
#[test]
fn rot_stays_known_if_the_disk_has_no_space_for_other_data() {
    if !may_mount() {
        return;
    }
    let base = base();
    let disk = Mounted::ext4(&base.path().join("image"), &base.path().join("disk"), 128 * MIB);
    let spec = ReplicaSpec { directory: disk.0.join("v1-00000007"), ..spec_of(base.path()) };
    let (_replica, mut client) = summed(&spec);
    rot(&spec, 32);
    assert_eq!(read_checked(&mut client, 32 * BLOCK, BLOCK), Err(ROTTEN));
    let mut filler = File::create(disk.0.join("filler")).unwrap();
    for chunk in [pattern(4, 1 << 20), pattern(4, 4096)] {
        while filler.write_all(&chunk).and_then(|()| filler.sync_data()).is_ok() {}
    }
    // The first block is a hole.
    assert_eq!(client.write(31 * BLOCK, &pattern(3, 3 * 4096)), Err(nix::libc::ENOSPC));
    let (before, after) = (pattern(2, 65536 - 4096), pattern(3, 3 * 4096));
    let mut found = client.read(32 * BLOCK, 8192).unwrap();
    for (block, found) in (32..34).zip(found.chunks_mut(4096)) {
        let at = usize::try_from((block - 32) * BLOCK).unwrap();
        let is_sound = found == &before[at..at + 4096] || found == &after[at + 4096..at + 8192];
        let read = read_checked(&mut client, block * BLOCK, BLOCK);
        assert_eq!(read, if is_sound { Ok(found.to_vec()) } else { Err(ROTTEN) }, "block {block}");
    }
    filler.set_len(0).unwrap();
    client.write(31 * BLOCK, &after).unwrap();
    assert_eq!(read_checked(&mut client, 31 * BLOCK, 3 * BLOCK), Ok(after));
}

/// The rest of the block is still rot, which a write of a part must not hide.
#[test]
fn a_part_that_is_written_over_known_rot_leaves_the_block_rotten() {
    let base = base();
    let spec = spec_of(base.path());
    let (_replica, mut client) = summed(&spec);
    [3, 4, 5].into_iter().for_each(|block| rot(&spec, block));
    assert_eq!(read_checked(&mut client, 0, 65536), Err(ROTTEN));
    client.write(3 * BLOCK + 512, &pattern(5, 512)).unwrap();
    client.call(Opcode::WriteZeroes, Flags::NONE, 4 * BLOCK + 512, 512, &[]).unwrap();
    client.write(6 * BLOCK + 512, &pattern(5, 512)).unwrap();
    for block in [3, 4, 5] {
        assert_eq!(read_checked(&mut client, block * BLOCK, BLOCK), Err(ROTTEN), "block {block}");
    }
    assert!(read_checked(&mut client, 6 * BLOCK, BLOCK).is_ok(), "it was sound");
    is_clean(&mut client, SIZE);
    wait_until_summed(&spec, SIZE, &[0]);
    assert_eq!(read_checked(&mut client, 3 * BLOCK, BLOCK), Err(ROTTEN), "it is summed as rot");
    client.write(3 * BLOCK, &pattern(6, 8192)).unwrap();
    assert_eq!(read_checked(&mut client, 3 * BLOCK, 2 * BLOCK), Ok(pattern(6, 8192)));
    for sector in 0..8 {
        assert_eq!(
            read_checked(&mut client, 5 * BLOCK, BLOCK),
            Err(ROTTEN),
            "{sector} sectors have other data"
        );
        client.write(5 * BLOCK + sector * 512, &pattern(8 + sector, 512)).unwrap();
    }
    assert!(read_checked(&mut client, 5 * BLOCK, BLOCK).is_ok(), "nothing is left of the rot");
}

/// Copies the snapshot of one replica to another one, except for a block that no member has sound.
fn copy_with_a_lost_block(from: &mut Client, to: &mut Client, lost: u64) {
    let list: LayerList = from.ask(Opcode::Layers, &()).unwrap();
    let _: CopyState = to.ask(Opcode::CopyBegin, &list).unwrap();
    let data = pattern(1, 4 << 16);
    for (block, data) in (0..).zip(data.chunks(4096)) {
        let flags = if block == lost { Flags::ROTTEN } else { Flags::NONE };
        let data = if block == lost { vec![0; 4096] } else { data.to_vec() };
        to.call(Opcode::WriteLayer, flags, block * BLOCK, 4096, &data).unwrap();
    }
    to.send_text(Opcode::CopyEnd, &CopyEnd { layer: Some(0) }).unwrap();
    to.send_text(Opcode::CopyEnd, &CopyEnd { layer: None }).unwrap();
}

#[test]
fn a_block_lost_by_all_stays_known_until_it_gets_other_data() {
    let base = base();
    let (from, to) = (base.path().join("from"), base.path().join("to"));
    [&from, &to].into_iter().for_each(|path| std::fs::create_dir_all(path).unwrap());
    let (_source, mut source) = with_snapshot(&spec_of(&from));
    let replica = ReplicaId::from_random(99);
    let first_members = Members::new([ReplicaId::from_random(1)]).unwrap();
    let spec = ReplicaSpec { replica, first_members, ..spec_of(&to) };
    let mut target = Replica::start(&spec);
    let mut client = target.open(generation(1));
    copy_with_a_lost_block(&mut source, &mut client, 3);
    let sound = pattern(1, 4 << 16);
    for attach in 2..4 {
        assert_eq!(read_checked(&mut client, 0, 3 * BLOCK), Ok(sound[..3 * 4096].to_vec()));
        assert_eq!(read_checked(&mut client, 3 * BLOCK, BLOCK), Err(ROTTEN));
        target.kill();
        target = Replica::start(&spec);
        client = target.open(generation(attach));
    }
    is_clean(&mut client, SIZE);
    wait_until_summed(&spec, SIZE, &[0, 1, 2, 3]);
    assert_eq!(read_checked(&mut client, 3 * BLOCK, BLOCK), Err(ROTTEN), "it is never summed as sound");
    client.write(3 * BLOCK, &pattern(7, 4096)).unwrap();
    assert!(!spec.directory.join("shorthorn.lost-blocks").exists());
    // The block holds the same data as when it was lost, and yet it was stored.
    client.write(3 * BLOCK, &[0; 4096]).unwrap();
    target.kill();
    let target = Replica::start(&spec);
    assert_eq!(read_checked(&mut target.open(generation(9)), 3 * BLOCK, BLOCK), Ok(vec![0; 4096]));
}

/// A full copy looks at the sums of blocks that the file does not have any more.
#[test]
fn a_region_that_has_vanished_counts_as_one_with_data() {
    let base = base();
    let spec = spec_of(base.path());
    let (mut replica, _) = summed(&spec);
    replica.kill();
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(head(&spec).as_fd(), punch, 2 * 65536, 65536).unwrap();
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(2));
    let query = RegionsQuery { of: RegionsOf::Allocated, from: 0, size_bytes: Some(SIZE) };
    let page: RegionsPage = client.ask(Opcode::Regions, &query).unwrap();
    assert_eq!(page.runs, [(0, 1), (2, 1)]);
    assert_eq!(read_checked(&mut client, 2 * REGION, REGION), Err(ROTTEN));
}

/// The process knows the sums of vanished blocks after a modification has ended those of their region.
#[test]
fn a_region_that_has_vanished_counts_without_its_sums_too() {
    let base = base();
    let spec = spec_of(base.path());
    let (mut replica, _) = with_snapshot(&spec);
    replica.kill();
    let snapshot = OpenOptions::new().write(true).open(spec.directory.join(SNAPSHOT)).unwrap();
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(snapshot.as_fd(), punch, 2 * 65536, 65536).unwrap();
    let mut replica = Replica::start(&spec);
    let mut client = replica.open(generation(2));
    assert_eq!(read_checked(&mut client, 2 * REGION, REGION), Err(ROTTEN));
    client.call(Opcode::WriteZeroes, Flags::NONE, 2 * REGION, 4096, &[]).unwrap();
    let query = RegionsQuery { of: RegionsOf::Allocated, from: 0, size_bytes: Some(SIZE) };
    let page: RegionsPage = client.ask(Opcode::Regions, &query).unwrap();
    assert_eq!(page.runs, [(0, 4)], "a copy looks at its sums");
    is_clean(&mut client, SIZE);
    wait_until_summed(&spec, SIZE, &[2]);
    replica.kill();
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(3));
    assert_eq!(read_checked(&mut client, 2 * REGION, BLOCK).map(drop), Ok(()));
    assert_eq!(read_checked(&mut client, 2 * REGION + BLOCK, BLOCK), Err(ROTTEN));
}

#[test]
fn blocks_that_vanish_or_appear_are_rotten() {
    let base = base();
    let spec = spec_of(base.path());
    let (mut replica, _) = summed(&spec);
    replica.kill();
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(head(&spec).as_fd(), punch, 5 * 4096, 4096).unwrap();
    rot(&spec, 47);
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(2));
    assert_eq!(verify(&mut client, 0, 5 * BLOCK).map(drop), Ok(()));
    assert_eq!(verify(&mut client, 5 * BLOCK, BLOCK), Err(ROTTEN), "it is a hole now");
    assert_eq!(verify(&mut client, 2 * REGION, 15 * BLOCK).map(drop), Ok(()));
    assert_eq!(verify(&mut client, 47 * BLOCK, BLOCK), Err(ROTTEN), "it was a hole");
    client.call(Opcode::WriteZeroes, Flags::NONE, 5 * BLOCK + 512, 512, &[]).unwrap();
    assert_eq!(verify(&mut client, 5 * BLOCK, BLOCK), Err(ROTTEN), "zeroes have left the hole as it was");
    client.call(Opcode::WriteZeroes, Flags::NONE, 5 * BLOCK, 4096, &[]).unwrap();
    assert_eq!(verify(&mut client, 5 * BLOCK, BLOCK).map(drop), Ok(()));
}

#[test]
fn sums_count_after_a_restart() {
    let base = base();
    let spec = spec_of(base.path());
    let (mut replica, _) = summed(&spec);
    replica.kill();
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(2));
    assert_eq!(verify(&mut client, 0, 65536).map(drop), Ok(()));
    rot(&spec, 0);
    assert_eq!(verify(&mut client, 0, 65536), Err(ROTTEN));
    assert!(replica.terminate().success());
    let replica = Replica::start(&spec);
    assert_eq!(verify(&mut replica.open(generation(3)), 0, 65536), Err(ROTTEN));
}

#[test]
fn outdated_sums_do_not_count() {
    let base = base();
    let spec = spec_of(base.path());
    let (replica, _) = summed(&spec);
    assert!(replica.terminate().success());
    // Without sums for a while.
    let off = ReplicaSpec { sum_bytes_per_s: None, ..spec.clone() };
    let replica = Replica::start(&off);
    let mut client = replica.open(generation(2));
    client.write(0, &pattern(3, 4096)).unwrap();
    assert!(!spec.directory.join("shorthorn.unsummed").exists());
    assert!(!spec.directory.join("shorthorn.block-sums").exists());
    assert!(replica.terminate().success());
    let mut replica = Replica::start(&spec);
    let mut client = replica.open(generation(3));
    assert_eq!(read_checked(&mut client, 0, 4096), Ok(pattern(3, 4096)));
    is_clean(&mut client, SIZE);
    wait_until_summed(&spec, SIZE, &[0, 2]);
    replica.kill();
    // A version that knows no sums: it writes the epoch record as it knows it, and the head, and leaves all
    // other files alone.
    let path = spec.directory.join("shorthorn.guard");
    let mut epoch_record: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert!(epoch_record.as_object_mut().unwrap().remove("block_sums").unwrap().is_u64());
    std::fs::write(&path, epoch_record.to_string()).unwrap();
    rot(&spec, 0);
    let replica = Replica::start(&spec);
    assert_eq!(verify(&mut replica.open(generation(4)), 0, 65536).map(drop), Ok(()));
}

#[test]
fn a_page_of_sums_that_is_damaged_makes_nothing_look_rotten() {
    let base = base();
    let spec = spec_of(base.path());
    let (mut replica, _) = summed(&spec);
    replica.kill();
    let sums = OpenOptions::new().write(true).open(spec.directory.join("shorthorn.block-sums")).unwrap();
    sums.write_all_at(&[0x5a; 512], 0).unwrap();
    sums.sync_all().unwrap();
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(2));
    assert_eq!(verify(&mut client, 0, MIB).map(drop), Ok(()));
    // They are made again.
    wait_for("the sums are stored", TIMEOUT, || {
        let page = std::fs::read(spec.directory.join("shorthorn.block-sums")).unwrap()[..4096].to_vec();
        if &page[..8] == b"SHRNBSUM" { Ok(()) } else { Err(page) }
    });
    wait_until_summed(&spec, SIZE, &[0, 2]);
    rot(&spec, 1);
    assert_eq!(verify(&mut client, 0, MIB), Err(ROTTEN));
}

#[test]
fn sums_stay_when_the_volume_grows() {
    let base = base();
    let spec = spec_of(base.path());
    let (_replica, mut client) = summed(&spec);
    let size_bytes = SIZE + 3 * BLOCK;
    client.send_text(Opcode::Expand, &ExpandReplica { size_bytes }).unwrap();
    client.write(SIZE + BLOCK, &pattern(4, 8192)).unwrap();
    assert_eq!(verify(&mut client, SIZE, 3 * BLOCK).map(drop), Ok(()));
    is_clean(&mut client, size_bytes);
    wait_until_summed(&spec, size_bytes, &[0, 2, 128]);
    assert_eq!(verify(&mut client, SIZE, 3 * BLOCK).map(drop), Ok(()));
    rot(&spec, 2048);
    rot(&spec, 0);
    assert_eq!(verify(&mut client, SIZE, 3 * BLOCK), Err(ROTTEN));
    assert_eq!(verify(&mut client, 0, 65536), Err(ROTTEN));
}

#[derive(Clone, Debug)]
enum TestStep {
    Write {
        sector: u64,
        sectors: u64,
    },
    Discard {
        sector: u64,
        sectors: u64,
    },
    Zero {
        sector: u64,
        sectors: u64,
    },
    /// The engine says that all is clean, and regions may be summed.
    Clean {
        waits_ms: u64,
    },
    Check {
        block: u64,
        blocks: u64,
    },
    Kill,
    Restart,
}

/// Three regions.
const SECTORS: u64 = 3 * REGION / 512;

fn step() -> impl Strategy<Value = TestStep> {
    let part = || (0..SECTORS - 40, 1..40u64);
    prop_oneof![
        6 => part().prop_map(|(sector, sectors)| TestStep::Write { sector, sectors }),
        2 => part().prop_map(|(sector, sectors)| TestStep::Discard { sector, sectors }),
        2 => part().prop_map(|(sector, sectors)| TestStep::Zero { sector, sectors }),
        4 => (0u64..12).prop_map(|waits_ms| TestStep::Clean { waits_ms }),
        4 => (0u64..40, 1u64..8).prop_map(|(block, blocks)| TestStep::Check { block, blocks }),
        2 => Just(TestStep::Kill),
        1 => Just(TestStep::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 100, ..ProptestConfig::default() })]

    /// Writes and discards at random, and kills the process at any point: sound blocks stay sound.
    #[test]
    fn a_sound_block_never_looks_rotten(steps in prop::collection::vec(step(), 10..60)) {
        let base = base_in_memory();
        let spec = spec_of(base.path());
        let mut replica = Replica::start(&spec);
        let mut attach = 1;
        let mut client = replica.open(generation(attach));
        let mut model = vec![0u8; usize::try_from(SECTORS * 512).unwrap()];
        for (number, step) in (0u64..).zip(steps) {
            match step {
                TestStep::Write { sector, sectors } => {
                    let data = pattern(number + 100, usize::try_from(sectors * 512).unwrap());
                    client.write(sector * 512, &data).unwrap();
                    let at = usize::try_from(sector * 512).unwrap();
                    model[at..at + data.len()].copy_from_slice(&data);
                }
                TestStep::Discard { sector, sectors } => {
                    let length = u32::try_from(sectors * 512).unwrap();
                    client.call(Opcode::Discard, Flags::NONE, sector * 512, length, &[]).unwrap();
                    let start = (sector * 512).next_multiple_of(BLOCK);
                    let end = (sector + sectors) * 512 / BLOCK * BLOCK;
                    if start < end {
                        model[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()].fill(0);
                    }
                }
                TestStep::Zero { sector, sectors } => {
                    let length = u32::try_from(sectors * 512).unwrap();
                    client.call(Opcode::WriteZeroes, Flags::NONE, sector * 512, length, &[]).unwrap();
                    let at = usize::try_from(sector * 512).unwrap();
                    model[at..at + length as usize].fill(0);
                }
                TestStep::Clean { waits_ms } => {
                    is_clean(&mut client, SIZE);
                    // The kill should meet the process in the middle of its reaction.
                    std::thread::sleep(Duration::from_millis(waits_ms));
                }
                TestStep::Check { block, blocks } => {
                    let data = read_checked(&mut client, block * BLOCK, blocks * BLOCK).unwrap();
                    let at = usize::try_from(block * BLOCK).unwrap();
                    prop_assert_eq!(&data, &model[at..at + data.len()]);
                }
                TestStep::Kill => replica.kill(),
                TestStep::Restart => prop_assert!(replica.terminate_in_place().success()),
            }
            if matches!(step, TestStep::Kill | TestStep::Restart) {
                attach += 1;
                replica = Replica::start(&spec);
                client = replica.open(generation(attach));
            }
        }
        is_clean(&mut client, SIZE);
        prop_assert_eq!(read_checked(&mut client, 0, SECTORS * 512).unwrap(), model);
    }
}
