//! The sets of regions that a replica process keeps, over its sockets and over its death.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

mod common;

use std::collections::BTreeSet;

use common::*;
use shorthorn_store::{OpenOptions, Store};
use shorthorn_types::{
    MarkAction, MarkRegions, Members, RUNS_PER_MARK_MAX, RegionsOf, ReplicaId, ReplicaReport, View, ViewId,
};
use shorthorn_wire::{CONTROL_QUEUE, ExpandReplica, Flags, Opcode, RegionsPage, RegionsQuery, ViewMessage};

const REGION: u64 = 64 << 10;
const SIZE: u64 = 64 * MIB;

fn id(n: u64) -> ReplicaId {
    ReplicaId::from_random(n)
}

/// Returns all regions of a set, or none if it is not kept.
fn regions(client: &mut Client, of: RegionsOf) -> Option<BTreeSet<u32>> {
    let (mut from, mut found) = (0, BTreeSet::new());
    loop {
        let page: RegionsPage =
            client.ask(Opcode::Regions, &RegionsQuery { of, from, size_bytes: None }).unwrap();
        if !page.kept {
            return None;
        }
        assert!(page.runs.len() <= RUNS_PER_MARK_MAX);
        found.extend(page.runs.iter().flat_map(|(first, count)| *first..first + count));
        let Some(next) = page.next else { return Some(found) };
        assert!(next > from);
        from = next;
    }
}

fn intent(client: &mut Client) -> BTreeSet<u32> {
    regions(client, RegionsOf::Intent).unwrap()
}

fn mark(client: &mut Client, of: RegionsOf, action: MarkAction, runs: &[(u32, u32)]) {
    client
        .send_text(Opcode::Mark, &MarkRegions { of, action, runs: runs.to_vec(), stamp: 0, size_bytes: None })
        .unwrap();
}

fn view(attach: u64, number: u32, members: &[u64]) -> View {
    View {
        id: ViewId { generation: generation(attach), number },
        members: Members::new(members.iter().map(|n| id(*n))).unwrap(),
    }
}

#[test]
fn written_regions_are_in_the_intent_set_until_they_are_cleared() {
    let base = base();
    let spec = spec(base.path(), SIZE);
    let mut replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    assert!(intent(&mut client).is_empty());
    client.write(3 * REGION - 512, &[1; 1024]).unwrap();
    client.call(Opcode::Discard, Flags::NONE, 10 * REGION, 512, &[]).unwrap();
    client.call(Opcode::WriteZeroes, Flags::FUA, 20 * REGION, 65536, &[]).unwrap();
    assert_eq!(intent(&mut client), [2, 3, 10, 20].into());
    mark(&mut client, RegionsOf::Intent, MarkAction::Clear, &[(2, 1), (10, 11)]);
    assert_eq!(intent(&mut client), [3].into());
    mark(&mut client, RegionsOf::Intent, MarkAction::Add, &[(7, 2)]);
    replica.kill();
    // After a crash there may be more in it, but never less.
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(2));
    assert!(intent(&mut client).is_superset(&[3, 7, 8].into()));
    mark(&mut client, RegionsOf::Intent, MarkAction::Clear, &[(0, 1024)]);
    client.write(5 * REGION, &[1; 512]).unwrap();
    assert!(replica.terminate().success());
    // A clean end writes the cleared regions.
    let replica = Replica::start(&spec);
    assert_eq!(intent(&mut replica.open(generation(3))), [5].into());
}

/// Kill -9 while writes are in flight: every block that is not as it was is in a region of the intent set.
#[test]
fn after_a_kill_the_intent_set_covers_every_block_that_differs() {
    let base = base();
    let spec = spec(base.path(), SIZE);
    for round in 1..5 {
        let mut replica = Replica::start(&spec);
        let mut client = replica.open(generation(round));
        mark(&mut client, RegionsOf::Intent, MarkAction::Clear, &[(0, 1024)]);
        client.flush().unwrap();
        let before = content(&mut client);
        let mut sender = Client::twin(&client);
        let mut send = |n: u64| {
            let offset = (n * 37 + round) % 1024 * REGION + n % 16 * 4096;
            sender.try_send(Opcode::Write, Flags::NONE, offset, 4096, &pattern(round << 32 | n, 4096))
        };
        (0..64).for_each(|n| assert!(send(n).is_ok()));
        // The replica is killed while it works: answers are read until the connection breaks.
        let mut next = 64;
        while client.receive().is_ok() && send(next).is_ok() {
            next += 1;
            if next == 64 + 50 * round {
                replica.kill();
            }
        }
        let replica = Replica::start(&spec);
        let mut client = replica.open(generation(round));
        let dirty = intent(&mut client);
        let after = content(&mut client);
        let mut differing = 0;
        for (region, (old, new)) in (0u32..).zip(before.chunks(65536).zip(after.chunks(65536))) {
            if old != new {
                differing += 1;
                assert!(dirty.contains(&region), "region {region} differs and is not in the set");
            }
        }
        println!("round {round}: {differing} regions differ, {} are in the set", dirty.len());
        assert!(differing > 0 && dirty.len() < 1024);
    }
}

fn content(client: &mut Client) -> Vec<u8> {
    (0..SIZE / MIB).map(|n| client.read(n * MIB, 1 << 20).unwrap()).collect::<Vec<_>>().concat()
}

#[test]
fn a_replica_that_leaves_is_tracked_until_it_is_back() {
    let base = base();
    let spec = spec(base.path(), SIZE);
    let mut replica = Replica::start(&spec);
    let (mut client, welcome) = replica.try_open(generation(1), 0).unwrap();
    assert!(welcome.tracks.is_empty() && !welcome.rebuilding && !welcome.lost_cache);
    let out_of_sync = RegionsOf::OutOfSync(id(8));
    assert_eq!(regions(&mut client, out_of_sync), None);
    client.write(4 * REGION, &[1; 512]).unwrap();
    let without = view(1, 1, &[7]);
    let basis = welcome.report;
    client.send_text(Opcode::Propose, &ViewMessage { view: without, basis: basis.clone() }).unwrap();
    assert_eq!(
        regions(&mut client, out_of_sync),
        Some([4].into()),
        "regions of requests that may be in flight"
    );
    client.write(9 * REGION, &[1; 512]).unwrap();
    replica.kill();

    let mut replica = Replica::start(&spec);
    let (mut client, welcome) = replica.try_open(generation(1), 0).unwrap();
    assert_eq!(welcome.tracks, Members::new([id(8)]).unwrap());
    assert_eq!(regions(&mut client, out_of_sync), Some([4, 9].into()));
    client.send_text(Opcode::Commit, &ViewMessage { view: without, basis: basis.clone() }).unwrap();
    client.write(11 * REGION, &[1; 512]).unwrap();
    mark(&mut client, out_of_sync, MarkAction::Clear, &[(4, 1)]);
    assert_eq!(regions(&mut client, out_of_sync), Some([9, 11].into()));
    // A view that is only proposed may not count: the set continues until the view does.
    let again = view(1, 2, &[7, 8]);
    client.send_text(Opcode::Propose, &ViewMessage { view: again, basis: basis.clone() }).unwrap();
    assert!(regions(&mut client, out_of_sync).is_some());
    client.send_text(Opcode::Commit, &ViewMessage { view: again, basis }).unwrap();
    assert_eq!(regions(&mut client, out_of_sync), None);
    replica.kill();
    let replica = Replica::start(&spec);
    let (_, welcome) = replica.try_open(generation(2), 0).unwrap();
    assert!(welcome.tracks.is_empty());
}

#[test]
fn a_stamp_is_durable_when_it_is_answered() {
    let base = base();
    let spec = spec(base.path(), SIZE);
    for (attach, newest) in (1..6).zip([3, 4, 4, 9, 10]) {
        let mut replica = Replica::start(&spec);
        let (mut client, welcome) = replica.try_open(generation(attach), 0).unwrap();
        assert_eq!(welcome.stamp, Some([0, 3, 4, 4, 9][usize::try_from(attach).unwrap() - 1]));
        let (of, action) = (RegionsOf::Intent, MarkAction::Stamp);
        let stamp = MarkRegions { of, action, runs: vec![], stamp: newest, size_bytes: None };
        client.send_text(Opcode::Mark, &stamp).unwrap();
        replica.kill();
    }
}

#[test]
fn sets_begin_and_end_by_marks() {
    let base = base();
    let spec = spec(base.path(), SIZE);
    let mut replica = Replica::start(&spec);
    let mut client = replica.try_open(generation(1), CONTROL_QUEUE).unwrap().0;
    for n in 20..28 {
        mark(&mut client, RegionsOf::OutOfSync(id(n)), MarkAction::Add, &[]);
    }
    let one_more = MarkRegions {
        of: RegionsOf::OutOfSync(id(28)),
        action: MarkAction::Add,
        runs: vec![],
        stamp: 0,
        size_bytes: None,
    };
    let (errno, refusal) = client.send_text(Opcode::Mark, &one_more).unwrap_err();
    assert!(errno == libc::ENOSPC && refusal.message.contains("do not come back"), "{refusal:?}");
    let outside = MarkRegions {
        of: RegionsOf::OutOfSync(id(20)),
        action: MarkAction::Add,
        runs: vec![(1023, 2)],
        stamp: 0,
        size_bytes: None,
    };
    assert_eq!(client.send_text(Opcode::Mark, &outside).unwrap_err().0, libc::EINVAL);
    mark(&mut client, RegionsOf::OutOfSync(id(20)), MarkAction::Add, &[(1023, 1), (5, 2)]);
    mark(&mut client, RegionsOf::OutOfSync(id(21)), MarkAction::Forget, &[]);
    client.write(0, &[1; 512]).unwrap();
    replica.kill();
    let replica = Replica::start(&spec);
    let (mut client, welcome) = replica.try_open(generation(1), CONTROL_QUEUE).unwrap();
    assert_eq!(welcome.tracks.len(), 7);
    assert_eq!(regions(&mut client, RegionsOf::OutOfSync(id(20))), Some([0, 5, 6, 1023].into()));
    assert_eq!(regions(&mut client, RegionsOf::OutOfSync(id(21))), None);
    assert_eq!(regions(&mut client, RegionsOf::Allocated), Some([0].into()));
    // No remains block the engine's queues, and the engine has no further queue.
    replica.try_open(generation(1), 0).unwrap();
    assert_eq!(replica.try_open(generation(1), CONTROL_QUEUE + 1).err().unwrap().0, libc::EINVAL);
}

#[test]
fn damaged_or_missing_sets_count_as_full() {
    let base = base();
    let spec = spec(base.path(), SIZE);
    let replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    client.write(0, &[1; 512]).unwrap();
    mark(&mut client, RegionsOf::OutOfSync(id(9)), MarkAction::Add, &[]);
    assert!(replica.terminate().success());
    for name in ["shorthorn.intent", "shorthorn.missed-00000009"] {
        let path = spec.directory.join(name);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[2000] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
    let mut replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    assert_eq!(intent(&mut client).len(), 1024);
    assert_eq!(regions(&mut client, RegionsOf::OutOfSync(id(9))).unwrap().len(), 1024);
    replica.kill();
    std::fs::remove_file(spec.directory.join("shorthorn.intent")).unwrap();
    let replica = Replica::start(&spec);
    assert_eq!(intent(&mut replica.open(generation(1))).len(), 1024, "as of one that never kept any");
}

#[test]
fn a_restart_of_the_host_is_reported_until_its_regions_are_cleared() {
    let base = base();
    let spec = spec(base.path(), SIZE);
    let mut replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    client.write(3 * REGION, &[1; 512]).unwrap();
    replica.kill();
    let boot = spec.directory.join("shorthorn.boot");
    let mut replica = Replica::start(&spec);
    assert!(!replica.try_open(generation(1), 0).unwrap().1.lost_cache, "the page cache is still there");
    replica.kill();
    let mut found: serde_json::Value = serde_json::from_slice(&std::fs::read(&boot).unwrap()).unwrap();
    found["boot_id"] = "another".into();
    // The old check would not match. A document without a check is accepted.
    found.as_object_mut().unwrap().remove("ShorthornCheck");
    std::fs::write(&boot, found.to_string()).unwrap();
    for _ in 0..2 {
        let replica = Replica::start(&spec);
        assert!(replica.try_open(generation(1), 0).unwrap().1.lost_cache);
        assert!(replica.terminate().success());
    }
    let mut replica = Replica::start(&spec);
    mark(&mut replica.open(generation(2)), RegionsOf::Intent, MarkAction::Clear, &[(0, 1024)]);
    assert!(!replica.try_open(generation(2), 1).unwrap().1.lost_cache);
    replica.kill();
    let replica = Replica::start(&spec);
    assert!(!replica.try_open(generation(2), 0).unwrap().1.lost_cache);
}

#[test]
fn verify_answers_with_the_check_of_the_data() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), SIZE));
    let mut client = replica.open(generation(1));
    client.write(4096 + 512, &pattern(3, 65536)).unwrap();
    for (offset, length) in [(4096 + 512, 65536u32), (0, 1 << 20), (512, 512)] {
        let data = client.read(offset, length).unwrap();
        client.send(Opcode::Verify, Flags::NONE, offset, length, &[]);
        let (header, payload) = client.receive().unwrap();
        assert!(payload.is_empty());
        assert_eq!((header.status, header.data_check), (0, crc32c(&data)));
    }
    assert_eq!(client.call(Opcode::Verify, Flags::NONE, SIZE, 512, &[]), Err(libc::EINVAL));
}

/// Another user, such as Longhorn, makes changes that the sets do not record.
#[test]
fn sets_are_not_trusted_after_another_program_opened_the_directory() {
    let base = base();
    let spec = spec(base.path(), SIZE);
    let replica = Replica::start(&spec);
    mark(&mut replica.open(generation(1)), RegionsOf::OutOfSync(id(9)), MarkAction::Add, &[]);
    assert!(replica.terminate().success());
    let meta = spec.directory.join("volume.meta");
    std::fs::write(base.path().join("new"), std::fs::read(&meta).unwrap()).unwrap();
    std::fs::rename(base.path().join("new"), &meta).unwrap();
    // Acts like a salvage: the volume is taken unchanged.
    let mut store = Store::open(&spec.directory, OpenOptions::default()).unwrap();
    store.write_at(&[1; 512], 0, false).unwrap();
    let state = match store.load_state().unwrap() {
        shorthorn_store::SavedState::Outdated(state) => state,
        other => panic!("{other:?}"),
    };
    store.save_state(&state).unwrap();
    store.close().unwrap();
    let replica = Replica::start(&spec);
    let (mut client, welcome) = replica.try_open(generation(1), 0).unwrap();
    assert!(welcome.tracks.is_empty());
    assert_eq!(intent(&mut client).len(), 1024);
    let report: ReplicaReport = welcome.report;
    assert_eq!(report.proposed, []);
}

/// Checks that the sets follow, and that the new part reads as zeroes and can be written. The replica keeps
/// its size whatever its spec says.
#[test]
fn a_replica_grows_while_it_serves_and_never_shrinks() {
    const LARGER: u64 = 128 << 30;
    let base = base();
    let spec = spec(base.path(), SIZE);
    let mut replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    client.write(5 * REGION, &[1; 4096]).unwrap();
    mark(&mut client, RegionsOf::OutOfSync(id(9)), MarkAction::Add, &[(2, 1)]);
    // Requests in flight continue.
    let early = client.send(Opcode::Write, Flags::FUA, 30 * REGION, 4096, &[2; 4096]);
    let mut control = replica.try_open(generation(1), CONTROL_QUEUE).unwrap().0;
    control.send_text(Opcode::Expand, &ExpandReplica { size_bytes: LARGER }).unwrap();
    assert_eq!(client.receive().unwrap().0.id, early);
    control.send_text(Opcode::Expand, &ExpandReplica { size_bytes: LARGER }).unwrap();
    assert_eq!(replica.status().size_bytes, LARGER);
    for (bad, words) in
        [(SIZE, "only grows"), (LARGER + 512, "multiple of 4096"), (1 << 50, "larger than the maximum")]
    {
        let (_, refusal) = control.send_text(Opcode::Expand, &ExpandReplica { size_bytes: bad }).unwrap_err();
        assert!(refusal.message.contains(words), "{}", refusal.message);
    }
    let end = LARGER - 4096;
    assert!(client.read(end, 4096).unwrap().iter().all(|byte| *byte == 0));
    client.write(end, &[3; 4096]).unwrap();
    assert!(client.read(LARGER, 512).is_err());
    // Its regions have twice the length now. The set of missed ones has begun as the write intent.
    let last = u32::try_from(LARGER / (2 * REGION) - 1).unwrap();
    assert_eq!(intent(&mut client), [2, 15, last].into());
    assert_eq!(regions(&mut client, RegionsOf::OutOfSync(id(9))), Some([1, 2, 15, last].into()));
    replica.kill();
    let replica = Replica::start(&spec);
    let (mut client, welcome) = replica.try_open(generation(2), 0).unwrap();
    assert_eq!(welcome.size_bytes, LARGER);
    assert!(intent(&mut client).is_superset(&[2, 15, last].into()));
    for (at, fill) in [(5 * REGION, 1), (30 * REGION, 2), (end, 3)] {
        assert_eq!(client.read(at, 4096).unwrap(), [fill; 4096]);
    }
    assert!(replica.terminate().success());
}

/// The process ends after the volume has grown, and before the files of its sets have followed.
#[test]
fn sets_of_the_size_before_count_after_an_expansion_that_was_cut_off() {
    const LARGER: u64 = 128 << 30;
    let base = base();
    let spec = spec(base.path(), SIZE);
    let mut replica = Replica::start(&spec);
    let mut client = replica.open(generation(1));
    client.write(5 * REGION, &[1; 4096]).unwrap();
    mark(&mut client, RegionsOf::OutOfSync(id(9)), MarkAction::Add, &[(2, 1)]);
    replica.kill();
    let mut store = Store::open(&spec.directory, OpenOptions::default()).unwrap();
    store.expand(LARGER).unwrap();
    drop(store);
    for attach in 2..4 {
        let replica = Replica::start(&spec);
        let mut client = replica.open(generation(attach));
        assert_eq!(intent(&mut client), [2].into());
        assert_eq!(regions(&mut client, RegionsOf::OutOfSync(id(9))), Some([1, 2].into()));
        assert!(replica.terminate().success());
    }
}
