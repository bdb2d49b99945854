//! Rot in a snapshot, and its repair.

use super::*;

pub const SNAPSHOT: &str = "volume-snap-below.img";

/// A replica with a snapshot of four regions, and one block in the head. All is summed.
pub fn with_snapshot(spec: &ReplicaSpec) -> (Replica, Client) {
    assert!(Replica::start(spec).terminate().success());
    let mut store = Store::open(&spec.directory, StoreOptions::default()).unwrap();
    store.write_at(&pattern(1, 4 << 16), 0, false).unwrap();
    store.snapshot("below", true, BTreeMap::new(), "2026-01-01T00:00:00Z").unwrap();
    store.write_at(&pattern(2, 4096), 5 * BLOCK, false).unwrap();
    store.close().unwrap();
    let replica = Replica::start(spec);
    let mut client = replica.open(generation(1));
    is_clean(&mut client, SIZE);
    wait_until_summed(spec, SIZE, &[0, 1, 2, 3]);
    (replica, client)
}

fn check_layer(client: &mut Client) -> LayerCheck {
    let length_bytes = u32::try_from(MIB).unwrap();
    let asked = LayerRange { image: SNAPSHOT.to_owned(), offset_bytes: 0, length_bytes };
    client.ask(Opcode::CheckLayer, &asked).unwrap()
}

/// Repairs `blocks` blocks of the snapshot, from block 3 on.
fn repair_below(client: &mut Client, blocks: u32) {
    assert_eq!(try_repair_below(client, blocks), 0);
}

fn try_repair_below(client: &mut Client, blocks: u32) -> i32 {
    let (offset_bytes, length_bytes) = (3 * BLOCK, blocks * 4096);
    let patch =
        LayerPatch { image: SNAPSHOT.to_owned(), offset_bytes, length_bytes, runs: vec![(0, blocks)] };
    let data = &pattern(1, 4 << 16)[3 * 4096..][..length_bytes as usize];
    let (header, text) = encode_patch(7001, &patch, data);
    let bytes = [&client.encode(&header)[..], &text].concat();
    client.raw(&bytes);
    client.receive().unwrap().0.status
}

/// Rot in a snapshot is reported to copies and comparisons, but not in blocks that a reader does not see
/// there.
#[test]
fn rot_in_a_snapshot_is_reported_to_copies_and_comparisons() {
    let base = base();
    let spec = spec_of(base.path());
    let (_replica, mut client) = with_snapshot(&spec);
    let read = |client: &mut Client, flags| {
        let mut request = Header::request(Opcode::ReadLayer, 7000, 0, 65536);
        request.flags = flags;
        let bytes = client.encode(&request);
        client.raw(&bytes);
        let (header, data) = client.receive().unwrap();
        if header.status == 0 { Ok(data) } else { Err(header.status) }
    };
    // A reader does not see the sixth block of the snapshot.
    rot_in(&spec, SNAPSHOT, 5);
    assert!(read(&mut client, Flags::CHECKED).is_ok());
    assert!(check_layer(&mut client).sum.is_some());
    rot_in(&spec, SNAPSHOT, 3);
    assert_eq!(read(&mut client, Flags::CHECKED), Err(ROTTEN));
    assert!(read(&mut client, Flags::NONE).is_ok(), "a read without a check returns the stored data");
    assert_eq!(check_layer(&mut client).sum, None, "rot does not vote");
}

/// A block has vanished from the snapshot, and no other layer has it.
#[test]
fn a_snapshot_with_a_vanished_block_does_not_vote() {
    let base = base();
    let spec = spec_of(base.path());
    let (mut replica, mut client) = with_snapshot(&spec);
    let sound = check_layer(&mut client).sum;
    replica.kill();
    let snapshot = OpenOptions::new().write(true).open(spec.directory.join(SNAPSHOT)).unwrap();
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(snapshot.as_fd(), punch, i64::try_from(3 * BLOCK).unwrap(), 4096).unwrap();
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(2));
    assert_eq!(check_layer(&mut client).sum, None);
    repair_below(&mut client, 1);
    assert!(sound.is_some() && check_layer(&mut client).sum == sound);
    assert_eq!(verify(&mut client, 0, 65536).map(drop), Ok(()));
}

#[test]
fn a_repair_of_a_snapshot_leaves_the_sums_of_other_regions() {
    let base = base();
    let spec = spec_of(base.path());
    let (_replica, mut client) = with_snapshot(&spec);
    [3, 4, 40].into_iter().for_each(|block| rot_in(&spec, SNAPSHOT, block));
    assert_eq!(verify(&mut client, 0, 65536), Err(ROTTEN));
    repair_below(&mut client, 1);
    assert_eq!(verify(&mut client, 3 * BLOCK, BLOCK).map(drop), Ok(()));
    assert_eq!(verify(&mut client, 4 * BLOCK, BLOCK), Err(ROTTEN), "it is known");
    assert!(is_summed(&spec, SIZE, 1) && is_summed(&spec, SIZE, 2));
    assert_eq!(verify(&mut client, 40 * BLOCK, BLOCK), Err(ROTTEN), "of another region");
    assert_eq!(verify(&mut client, 48 * BLOCK, 16 * BLOCK).map(drop), Ok(()));
}

/// A repair may end half done, with the process. The next one knows only the disk.
#[test]
fn rot_is_known_after_a_crash_in_its_repair() {
    let base = base();
    let spec = spec_of(base.path());
    let (mut replica, mut client) = with_snapshot(&spec);
    rot_in(&spec, SNAPSHOT, 3);
    assert_eq!(check_layer(&mut client).sum, None);
    let (layer, elsewhere) = (spec.directory.join(SNAPSHOT), base.path().join("elsewhere"));
    std::fs::rename(&layer, &elsewhere).unwrap();
    assert_ne!(try_repair_below(&mut client, 1), 0);
    replica.kill();
    std::fs::rename(&elsewhere, &layer).unwrap();
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(2));
    assert_eq!(verify(&mut client, 3 * BLOCK, BLOCK), Err(ROTTEN));
    repair_below(&mut client, 1);
    assert_eq!(verify(&mut client, 0, 65536).map(drop), Ok(()));
}

/// A block has vanished from the head, so that a reader sees the block below it. The repair of another block
/// writes that block once more.
#[test]
fn a_repair_of_a_snapshot_leaves_rot_of_the_head_known() {
    let base = base();
    let spec = spec_of(base.path());
    let (mut replica, _) = with_snapshot(&spec);
    replica.kill();
    let head = OpenOptions::new().write(true).open(spec.directory.join("volume-head-001.img")).unwrap();
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(head.as_fd(), punch, i64::try_from(5 * BLOCK).unwrap(), 4096).unwrap();
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(2));
    rot_in(&spec, SNAPSHOT, 3);
    assert_eq!(read_checked(&mut client, 5 * BLOCK, BLOCK), Err(ROTTEN));
    assert_eq!(read_checked(&mut client, 3 * BLOCK, BLOCK), Err(ROTTEN));
    repair_below(&mut client, 4);
    assert_eq!(read_checked(&mut client, 3 * BLOCK, BLOCK).map(drop), Ok(()));
    assert_eq!(read_checked(&mut client, 5 * BLOCK, BLOCK), Err(ROTTEN), "it is older data");
    assert_eq!(read_checked(&mut client, 6 * BLOCK, BLOCK).map(drop), Ok(()));
}

/// A scrub believes a member that its checksums confirm more than others.
#[test]
fn an_answer_says_if_checksums_confirm_all_of_it() {
    let base = base();
    let spec = spec_of(base.path());
    let (_replica, mut client) = with_snapshot(&spec);
    let confirms = |client: &mut Client, opcode, flags, block, blocks: u32| {
        let mut request = Header::request(opcode, 7002, block * BLOCK, blocks * 4096);
        request.flags = flags;
        let bytes = client.encode(&request);
        client.raw(&bytes);
        let (header, _) = client.receive().unwrap();
        (header.status == 0).then(|| header.flags.has(Flags::CHECKED))
    };
    let verify =
        |client: &mut Client, block, blocks| confirms(client, Opcode::Verify, Flags::NONE, block, blocks);
    let layer = |client: &mut Client, block, blocks| {
        confirms(client, Opcode::ReadLayer, Flags::CHECKED, block, blocks)
    };
    assert_eq!(verify(&mut client, 0, 64), Some(true));
    assert_eq!(verify(&mut client, 0, 65), Some(false), "the last block is in a region without checksums");
    assert_eq!(layer(&mut client, 0, 5), Some(true));
    assert_eq!(layer(&mut client, 5, 1), Some(false), "a reader does not see it there");
    assert_eq!(confirms(&mut client, Opcode::ReadLayer, Flags::NONE, 0, 5), Some(false));
    assert_eq!(
        confirms(&mut client, Opcode::Read, Flags::CHECKED, 0, 5),
        Some(false),
        "no scrub asks for it"
    );
    // The second block beside the rot is known as sound, also if its region has no checksums any more.
    rot_in(&spec, SNAPSHOT, 3);
    assert_eq!([verify(&mut client, 3, 1), layer(&mut client, 3, 1)], [None; 2]);
    client.write(20 * BLOCK, &pattern(3, 4096)).unwrap();
    client.write(8 * BLOCK, &pattern(3, 4096)).unwrap();
    assert_eq!(verify(&mut client, 4, 1), Some(true));
    assert_eq!(verify(&mut client, 8, 1), Some(false));
    assert_eq!(layer(&mut client, 4, 1), Some(true));
}
