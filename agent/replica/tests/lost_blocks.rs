//! Tests blocks that no replica had sound, and rot beyond all that can be tracked.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use common::*;
use shorthorn_control::ReplicaSpec;
use shorthorn_store::{OpenOptions as StoreOptions, SavedState, Store};
use shorthorn_testkit::waiting::wait_for;
use shorthorn_types::{Errno, MarkAction, MarkRegions, Members, Regions, RegionsOf, ReplicaId};
use shorthorn_wire::{
    CopyEnd, CopyState, Flags, Header, LayerList, LayerPatch, Opcode, WireLayer, encode_patch,
};

const BLOCK: u64 = 4096;
const SIZE: u64 = 32 * MIB;
const ROTTEN: i32 = Errno::ROTTEN.raw();
/// A rate that only the disk limits, in bytes per second.
const FAST: u64 = 1 << 40;

fn record(spec: &ReplicaSpec) -> PathBuf {
    spec.directory.join("shorthorn.lost-blocks")
}

fn read_checked(client: &mut Client, block: u64) -> Result<Vec<u8>, i32> {
    client.call(Opcode::Read, Flags::CHECKED, block * BLOCK, 4096, &[])
}

/// Returns a new replica that is not in the view, with its files in a new directory.
fn new_replica(base: &tempfile::TempDir) -> ReplicaSpec {
    let first_members = Members::new([ReplicaId::from_random(1)]).unwrap();
    ReplicaSpec { sum_bytes_per_s: Some(FAST), first_members, ..spec(base.path(), SIZE) }
}

/// Returns the layers of a volume with a snapshot.
fn layers() -> LayerList {
    layers_of(&["below"])
}

/// Returns the layers of a volume with these snapshots, the oldest first.
fn layers_of(snapshots: &[&str]) -> LayerList {
    let base = base();
    let spec = spec(base.path(), SIZE);
    assert!(Replica::start(&spec).terminate().success());
    let mut store = Store::open(&spec.directory, StoreOptions::default()).unwrap();
    for name in snapshots {
        store.snapshot(name, true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
    }
    let layers = store.chain().copy_layers().unwrap().into_iter().map(|layer| WireLayer {
        image: layer.image.to_string(),
        meta: String::from_utf8(layer.meta).unwrap(),
        size_bytes: layer.size_bytes,
    });
    LayerList { layers: layers.collect() }
}

/// Copies a snapshot of eight blocks, of which block 3 is lost.
fn copy_snapshot(client: &mut Client, layers: &LayerList) {
    let state: CopyState = client.ask(Opcode::CopyBegin, layers).unwrap();
    assert_eq!(state.done, [false, false]);
    for block in 0..8 {
        let flags = if block == 3 { Flags::ROTTEN } else { Flags::NONE };
        client.call(Opcode::WriteLayer, flags, block * BLOCK, 4096, &pattern(block, 4096)).unwrap();
    }
    client.send_text(Opcode::CopyEnd, &CopyEnd { layer: Some(0) }).unwrap();
}

fn end_copy(client: &mut Client) {
    client.send_text(Opcode::CopyEnd, &CopyEnd { layer: None }).unwrap();
}

/// Returns a replica that was made with block 3 lost.
fn copied(spec: &ReplicaSpec) -> (Replica, Client) {
    let replica = Replica::start(spec);
    let mut client = replica.open(generation(1));
    copy_snapshot(&mut client, &layers());
    end_copy(&mut client);
    (replica, client)
}

fn is_clean(client: &mut Client, size_bytes: u64) {
    client.flush().unwrap();
    let runs = vec![(0, Regions::of(size_bytes).count())];
    let (of, action) = (RegionsOf::Intent, MarkAction::Clear);
    client
        .send_text(Opcode::Mark, &MarkRegions { of, action, runs, stamp: 0, size_bytes: Some(size_bytes) })
        .unwrap();
}

#[test]
fn rot_that_is_merged_with_new_data_stays_known_after_a_crash() {
    let base = base();
    let spec = new_replica(&base);
    let (mut replica, mut client) = copied(&spec);
    for attach in 2..5 {
        client.write(3 * BLOCK + attach * 512, &pattern(attach, 512)).unwrap();
        assert_eq!(read_checked(&mut client, 3), Err(ROTTEN));
        replica.kill();
        replica = Replica::start(&spec);
        client = replica.open(generation(attach));
        assert_eq!(read_checked(&mut client, 3), Err(ROTTEN), "attach {attach}");
        assert_eq!(read_checked(&mut client, 2), Ok(pattern(2, 4096)));
    }
    client.write(3 * BLOCK, &pattern(9, 4096)).unwrap();
    assert!(!record(&spec).exists());
    replica.kill();
    let replica = Replica::start(&spec);
    assert_eq!(read_checked(&mut replica.open(generation(9)), 3), Ok(pattern(9, 4096)));
}

/// Lets another program open the directory, and write to a block of it. The operator chooses the replica all
/// the same.
fn opened_by_others(spec: &ReplicaSpec, written: Option<u64>) {
    let (meta, aside) = (spec.directory.join("volume.meta"), spec.directory.with_extension("aside"));
    fs::copy(&meta, &aside).unwrap();
    fs::rename(&aside, &meta).unwrap();
    let mut store = Store::open(&spec.directory, StoreOptions::default()).unwrap();
    if let Some(block) = written {
        store.write_at(&pattern(9, 4096), block * BLOCK, true).unwrap();
    }
    let SavedState::Outdated(state) = store.load_state().unwrap() else { panic!("it was not noticed") };
    store.save_state(&state).unwrap();
    store.close().unwrap();
}

/// Returns a replica that has merged parts of block 3, which is lost, with new data.
fn merged(spec: &ReplicaSpec) -> Replica {
    let (replica, mut client) = copied(spec);
    client.write(3 * BLOCK + 512, &pattern(2, 512)).unwrap();
    client.call(Opcode::WriteZeroes, Flags::NONE, 3 * BLOCK + 1024, 512, &[]).unwrap();
    replica
}

#[test]
fn rot_that_is_merged_with_new_data_stays_known_after_another_program() {
    for is_crash in [false, true] {
        let base = base();
        let spec = new_replica(&base);
        let mut replica = merged(&spec);
        if is_crash {
            replica.kill();
        } else {
            assert!(replica.terminate().success());
        }
        for attach in 2..4 {
            opened_by_others(&spec, Some(2));
            let replica = Replica::start(&spec);
            let mut client = replica.open(generation(attach));
            assert_eq!(read_checked(&mut client, 3), Err(ROTTEN), "crash: {is_crash}");
            assert_eq!(read_checked(&mut client, 2), Ok(pattern(9, 4096)));
            assert!(replica.terminate().success());
        }
        opened_by_others(&spec, Some(3));
        let replica = Replica::start(&spec);
        assert_eq!(read_checked(&mut replica.open(generation(4)), 3), Ok(pattern(9, 4096)));
        assert!(!record(&spec).exists());
    }
}

/// The next opening after the crash records the data that the block has got.
#[test]
fn a_lost_block_that_a_crash_has_torn_stays_known_after_another_program() {
    let base = base();
    let spec = new_replica(&base);
    merged(&spec).kill();
    rot_in(&spec, &layers().layers[1].image, 3);
    assert!(Replica::start(&spec).terminate().success());
    opened_by_others(&spec, None);
    let replica = Replica::start(&spec);
    assert_eq!(read_checked(&mut replica.open(generation(2)), 3), Err(ROTTEN));
}

#[test]
fn a_block_is_lost_without_sums_too() {
    let base = base();
    let spec = ReplicaSpec { sum_bytes_per_s: None, ..new_replica(&base) };
    let (mut replica, mut client) = copied(&spec);
    assert_eq!(read_checked(&mut client, 3), Err(ROTTEN));
    client.call(Opcode::Discard, Flags::NONE, 3 * BLOCK, 4096, &[]).unwrap();
    assert_eq!((read_checked(&mut client, 3), record(&spec).exists()), (Ok(vec![0; 4096]), false));
    replica.kill();
    let replica = Replica::start(&ReplicaSpec { sum_bytes_per_s: Some(FAST), ..spec });
    assert_eq!(read_checked(&mut replica.open(generation(2)), 3), Ok(vec![0; 4096]));
}

/// The next attempt drops the head, and keeps the snapshot with the rot.
#[test]
fn a_copy_that_is_interrupted_forgets_no_lost_block() {
    let base = base();
    let (spec, layers) = (new_replica(&base), layers());
    let mut replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    copy_snapshot(&mut client, &layers);
    client.write(3 * BLOCK, &pattern(9, 4096)).unwrap();
    assert_eq!(read_checked(&mut client, 3), Ok(pattern(9, 4096)));
    replica.kill();
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(2));
    let state: CopyState = client.ask(Opcode::CopyBegin, &layers).unwrap();
    assert_eq!(state.done, [true, false]);
    assert_eq!(read_checked(&mut client, 3), Err(ROTTEN));
    client.write(3 * BLOCK, &pattern(9, 4096)).unwrap();
    assert!(record(&spec).exists());
    end_copy(&mut client);
    assert_eq!((read_checked(&mut client, 3), record(&spec).exists()), (Ok(pattern(9, 4096)), false));
}

/// Writes a block of a layer that is being copied. The number of the layer is in the status field.
fn write_layer(client: &mut Client, layer: i32, block: u64, data: &[u8]) {
    let mut header = Header::request(Opcode::WriteLayer, 1 << 40, block * BLOCK, 4096);
    (header.status, header.data_check) = (layer, crc32c(data));
    client.raw(&[&client.encode(&header)[..], data].concat());
    assert_eq!(client.receive().unwrap().0.status, 0);
}

/// Until then the next attempt recreates it, maybe from a member that has the same data in another layer.
#[test]
fn a_later_snapshot_ends_a_record_once_it_is_whole() {
    let base = base();
    let (spec, layers) = (new_replica(&base), layers_of(&["below", "above"]));
    let mut replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    let _: CopyState = client.ask(Opcode::CopyBegin, &layers).unwrap();
    client.call(Opcode::WriteLayer, Flags::ROTTEN, 3 * BLOCK, 4096, &pattern(3, 4096)).unwrap();
    client.send_text(Opcode::CopyEnd, &CopyEnd { layer: Some(0) }).unwrap();
    write_layer(&mut client, 1, 3, &pattern(9, 4096));
    replica.kill();
    replica = Replica::start(&spec);
    client = replica.open(generation(2));
    let state: CopyState = client.ask(Opcode::CopyBegin, &layers).unwrap();
    assert_eq!(state.done, [true, false, false]);
    assert_eq!(read_checked(&mut client, 3), Err(ROTTEN));
    write_layer(&mut client, 1, 3, &pattern(9, 4096));
    assert!(record(&spec).exists());
    client.send_text(Opcode::CopyEnd, &CopyEnd { layer: Some(1) }).unwrap();
    assert!(!record(&spec).exists());
    end_copy(&mut client);
    assert_eq!(read_checked(&mut client, 3), Ok(pattern(9, 4096)));
}

/// A copy of a region of the head writes all of its blocks, also those that every member has lost.
#[test]
fn the_same_rot_in_the_head_ends_no_record() {
    let base = base();
    let spec = new_replica(&base);
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    copy_snapshot(&mut client, &layers());
    client.write(3 * BLOCK, &pattern(3, 4096)).unwrap();
    assert_eq!(read_checked(&mut client, 3), Err(ROTTEN));
    end_copy(&mut client);
    client.write(3 * BLOCK, &pattern(3, 4096)).unwrap();
    assert_eq!((read_checked(&mut client, 3), record(&spec).exists()), (Err(ROTTEN), true));
    client.write(3 * BLOCK, &pattern(9, 4096)).unwrap();
    assert_eq!((read_checked(&mut client, 3), record(&spec).exists()), (Ok(pattern(9, 4096)), false));
}

/// A scrub may repair a snapshot from a member that has summed the same rot. If a member has other data, the
/// scrub copies it to the head.
#[test]
fn a_repair_of_a_snapshot_ends_no_record() {
    let base = base();
    let spec = new_replica(&base);
    let (_replica, mut client) = copied(&spec);
    let image = layers().layers[0].image.clone();
    for data in [pattern(3, 4096), pattern(9, 4096)] {
        rot_in(&spec, &image, 3);
        assert_eq!(read_checked(&mut client, 3), Err(ROTTEN));
        let (offset_bytes, runs) = (3 * BLOCK, vec![(0, 1)]);
        let patch = LayerPatch { image: image.clone(), offset_bytes, length_bytes: 4096, runs };
        let (header, text) = encode_patch(1 << 40, &patch, &data);
        client.raw(&[&client.encode(&header)[..], &text].concat());
        assert_eq!(client.receive().unwrap().0.status, 0);
        assert_eq!((read_checked(&mut client, 3), record(&spec).exists()), (Err(ROTTEN), true));
    }
    client.write(3 * BLOCK, &pattern(9, 4096)).unwrap();
    assert_eq!((read_checked(&mut client, 3), record(&spec).exists()), (Ok(pattern(9, 4096)), false));
}

/// A copy of a region of the head writes rot of which no member has a sound copy.
#[test]
fn rot_that_is_copied_to_the_head_is_lost_until_it_gets_other_data() {
    let base = base();
    let spec = ReplicaSpec { sum_bytes_per_s: Some(FAST), ..spec(base.path(), SIZE) };
    let mut replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    for block in 0..8 {
        let flags = if block == 3 { Flags::ROTTEN } else { Flags::NONE };
        client.call(Opcode::Write, flags, block * BLOCK, 4096, &pattern(block, 4096)).unwrap();
    }
    for attach in 2..4 {
        assert_eq!(read_checked(&mut client, 3), Err(ROTTEN), "attach {attach}");
        assert_eq!(read_checked(&mut client, 4), Ok(pattern(4, 4096)));
        replica.kill();
        replica = Replica::start(&spec);
        client = replica.open(generation(attach));
    }
    client.write(3 * BLOCK, &pattern(9, 4096)).unwrap();
    assert_eq!((read_checked(&mut client, 3), record(&spec).exists()), (Ok(pattern(9, 4096)), false));
}

#[test]
fn a_replica_whose_record_is_damaged_has_to_be_rebuilt() {
    let base = base();
    let (spec, layers) = (new_replica(&base), layers());
    let mut replica = Replica::start(&spec);
    copy_snapshot(&mut replica.open(generation(1)), &layers);
    replica.kill();
    fs::write(record(&spec), "damaged").unwrap();
    let replica = Replica::start(&spec);
    let (mut client, welcome) = replica.try_open(generation(2), shorthorn_wire::CONTROL_QUEUE).unwrap();
    assert!(welcome.rebuilding && !record(&spec).exists());
    // Nor does a layer count that was whole.
    copy_snapshot(&mut client, &layers);
    end_copy(&mut client);
    assert!(replica.terminate().success());
    fs::write(record(&spec), "damaged").unwrap();
    let replica = Replica::start(&spec);
    let (_, welcome) = replica.try_open(generation(3), shorthorn_wire::CONTROL_QUEUE).unwrap();
    assert!(welcome.rebuilding && !record(&spec).exists());
}

#[test]
fn a_replica_whose_record_cannot_be_read_does_not_serve() {
    let base = base();
    let spec = new_replica(&base);
    let (replica, _) = copied(&spec);
    assert!(replica.terminate().success());
    let aside = base.path().join("aside");
    fs::rename(record(&spec), &aside).unwrap();
    fs::create_dir(record(&spec)).unwrap();
    let message = Replica::try_start(&spec).err().unwrap();
    assert!(message.contains("lost-blocks") && message.contains("serve rot as data"), "{message}");
    // It was not the file.
    fs::remove_dir(record(&spec)).unwrap();
    fs::rename(&aside, record(&spec)).unwrap();
    let replica = Replica::start(&spec);
    let (mut client, welcome) = replica.try_open(generation(2), 0).unwrap();
    assert_eq!((welcome.rebuilding, read_checked(&mut client, 3)), (false, Err(ROTTEN)));
}

#[test]
fn more_lost_blocks_than_can_be_recorded_are_refused() {
    let base = base();
    let spec = new_replica(&base);
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    let _: CopyState = client.ask(Opcode::CopyBegin, &layers()).unwrap();
    let data = vec![1; usize::try_from(MIB).unwrap()];
    for piece in 0..16 {
        let length = u32::try_from(MIB).unwrap();
        client.call(Opcode::WriteLayer, Flags::ROTTEN, piece * MIB, length, &data).unwrap();
    }
    let refused = client.call(Opcode::WriteLayer, Flags::ROTTEN, 16 * MIB, 4096, &data[..4096]);
    assert_eq!(refused, Err(nix::libc::EOVERFLOW));
}

/// Changes a byte of a block of the head on the disk.
fn rot(spec: &ReplicaSpec, block: u64) {
    rot_in(spec, "volume-head-000.img", block);
}

#[test]
fn modifications_beside_rot_that_cannot_be_tracked_are_refused() {
    const PAGES: u64 = 65;
    let (base, size_bytes) = (base(), 256 * MIB);
    let spec = ReplicaSpec { sum_bytes_per_s: Some(FAST), ..spec(base.path(), size_bytes) };
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    let data = pattern(1, usize::try_from(MIB).unwrap());
    (0..2 * PAGES).for_each(|piece| client.write(piece * MIB, &data).unwrap());
    is_clean(&mut client, size_bytes);
    (0..PAGES).for_each(|page| {
        wait_for("the page is summed", TIMEOUT, || {
            rot(&spec, page * 512 + 7);
            let read = read_checked(&mut client, page * 512 + 7);
            rot(&spec, page * 512 + 7);
            if read == Err(ROTTEN) {
                return Ok(());
            }
            // The page may have been summed with the rot of this moment.
            if read_checked(&mut client, page * 512 + 7) == Err(ROTTEN) {
                client.write((page * 512 + 7) * BLOCK, &data[7 * 4096..8 * 4096]).unwrap();
                is_clean(&mut client, size_bytes);
            }
            Err(page)
        });
        rot(&spec, page * 512 + 9);
    });
    let last = (PAGES - 1) * 512;
    assert_eq!(client.write((last + 3) * BLOCK, &data[..4096]), Err(Errno::IO.raw()));
    assert_eq!(read_checked(&mut client, last + 9), Err(ROTTEN), "it is still known");
    client.write(3 * BLOCK, &data[..4096]).unwrap();
    // Blocks can be tracked when a page was repaired, and summed again.
    client.write(9 * BLOCK, &data[9 * 4096..10 * 4096]).unwrap();
    is_clean(&mut client, size_bytes);
    wait_for("a block can be tracked", TIMEOUT, || {
        // Its page is not in memory then: the modification has to wait for that.
        (1..PAGES - 1).for_each(|page| assert!(read_checked(&mut client, page * 512 + 20).is_ok()));
        client.write((last + 3) * BLOCK, &data[..4096])
    });
    assert_eq!(read_checked(&mut client, last + 9), Err(ROTTEN), "it is known beside the page");
}
