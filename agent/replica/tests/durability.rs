//! Tests the data that is kept when a replica process ends, gently or not.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

mod common;

use std::collections::HashMap;

use common::*;
use shorthorn_store::{OpenOptions, Store};
use shorthorn_types::{Members, ReplicaId, ReplicaReport, Secret, View, ViewId};
use shorthorn_wire::{Flags, Opcode, ViewMessage};

#[test]
fn sigterm_leaves_a_clean_directory() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), 16 * MIB));
    let spec = replica.spec.clone();
    let mut client = replica.open(generation(1));
    client.write(MIB, &pattern(1, 64 << 10)).unwrap();
    assert_eq!(volume_meta(&spec.directory)["Dirty"], true);
    assert!(replica.terminate().success());
    assert!(client.closed());
    assert_eq!(volume_meta(&spec.directory)["Dirty"], false);
    assert!(!spec.data_socket.exists() && !spec.control_socket.exists());
    let mut store = Store::open(&spec.directory, OpenOptions::default()).unwrap();
    assert!(!store.info().was_dirty);
    let mut found = vec![0; 64 << 10];
    store.read_at(&mut found, MIB).unwrap();
    assert!(found == pattern(1, 64 << 10));
}

#[test]
fn a_stop_on_the_control_socket_is_the_same() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), MIB));
    let directory = replica.spec.directory.clone();
    shorthorn_control::ControlClient::connect(&replica.spec.control_socket).unwrap().stop().unwrap();
    assert!(replica.wait().success());
    assert_eq!(volume_meta(&directory)["Dirty"], false);
}

#[test]
fn a_stop_in_the_middle_of_requests_waits_for_none_of_them_to_be_read() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), 64 * MIB));
    let directory = replica.spec.directory.clone();
    let mut client = replica.open(generation(1));
    client.socket.set_nonblocking(true).unwrap();
    while client.try_send(Opcode::Read, Flags::NONE, 0, 1 << 20, &[]).is_ok() {}
    assert!(replica.terminate().success());
    assert_eq!(volume_meta(&directory)["Dirty"], false);
}

/// Checks after a kill -9 that every answered write is complete, and that each block of an unanswered one is
/// either old or new.
#[test]
fn answered_writes_outlive_a_kill() {
    const BLOCKS: u64 = 4096;
    let base = base();
    let spec = spec(base.path(), BLOCKS * 4096);
    let mut answered: HashMap<u64, u64> = HashMap::new();
    for attach in 1..4 {
        let mut replica = Replica::start(&spec);
        let mut client = replica.open(generation(attach));
        let mut sender = Client::twin(&client);
        let mut in_flight: HashMap<u64, (u64, u64)> = HashMap::new();
        let mut send = |in_flight: &mut HashMap<u64, (u64, u64)>, n: u64| {
            let block = (n * 257 + attach) % BLOCKS;
            let version = attach << 32 | n;
            let id =
                sender.try_send(Opcode::Write, Flags::NONE, block * 4096, 4096, &pattern(version, 4096))?;
            in_flight.insert(id, (block, version));
            std::io::Result::Ok(())
        };
        (0..32).for_each(|n| send(&mut in_flight, n).unwrap());
        // The replica is killed while it works: answers are read until the connection breaks.
        let mut next = 32;
        while let Ok((header, _)) = client.receive() {
            assert_eq!(header.status, 0);
            let (block, version) = in_flight.remove(&header.id).unwrap();
            answered.insert(block, version);
            if next == 1000 {
                replica.kill();
            }
            if send(&mut in_flight, next).is_err() {
                break;
            }
            next += 1;
        }
        assert!(answered.len() > 900);
        let replica = Replica::start(&spec);
        let mut client = replica.open(generation(attach));
        let maybe: HashMap<u64, u64> = in_flight.values().copied().collect();
        for (block, version) in &mut answered {
            let found = client.read(block * 4096, 4096).unwrap();
            let newer = maybe.get(block).filter(|newer| found == pattern(**newer, 4096));
            *version = *newer.unwrap_or(version);
            assert!(
                found == pattern(*version, 4096),
                "block {block} has lost its answered write {version:#x}"
            );
        }
    }
}

fn view(attach: u64, number: u32, members: &[u64]) -> View {
    View {
        id: ViewId { generation: generation(attach), number },
        members: Members::new(members.iter().map(|n| ReplicaId::from_random(*n))).unwrap(),
    }
}

#[test]
fn views_outlive_a_kill_as_soon_as_they_are_answered() {
    let base = base();
    let spec = spec(base.path(), MIB);
    let mut replica = Replica::start(&spec);
    let (mut client, welcome) = replica.try_open(generation(2), 0).unwrap();
    let basis = ReplicaReport { committed: welcome.report.committed, proposed: vec![view(1, 3, &[7, 8])] };
    let first = view(2, 1, &[7]);
    client.send_text(Opcode::Propose, &ViewMessage { view: first, basis: basis.clone() }).unwrap();
    replica.kill();

    let mut replica = Replica::start(&spec);
    let (mut client, welcome) = replica.try_open(generation(2), 0).unwrap();
    assert_eq!(
        welcome.report,
        ReplicaReport { committed: basis.committed, proposed: vec![view(1, 3, &[7, 8]), first] }
    );
    client.send_text(Opcode::Commit, &ViewMessage { view: first, basis: welcome.report }).unwrap();
    replica.kill();

    let replica = Replica::start(&spec);
    let (_, welcome) = replica.try_open(generation(3), 0).unwrap();
    assert_eq!(welcome.report, ReplicaReport { committed: first, proposed: vec![] });
}

/// Longhorn has no views. A replica that knows a view without itself must not look complete to Longhorn. To a
/// Shorthorn engine it must not look like a replica that is being rebuilt.
#[test]
fn volume_meta_shows_longhorn_that_a_replica_has_left_its_view() {
    let base = base();
    let spec = spec(base.path(), MIB);
    let says_rebuilding = || volume_meta(&spec.directory)["Rebuilding"].clone();
    let mut replica = Replica::start(&spec);
    let (mut client, welcome) = replica.try_open(generation(2), 0).unwrap();
    assert_eq!(says_rebuilding(), false);
    let message = |view, basis: &ReplicaReport| ViewMessage { view, basis: basis.clone() };
    client.send_text(Opcode::Propose, &message(view(2, 1, &[8]), &welcome.report)).unwrap();
    assert_eq!(says_rebuilding(), true);
    replica.kill();

    let mut replica = Replica::start(&spec);
    let (mut client, welcome) = replica.try_open(generation(3), 0).unwrap();
    assert!(!welcome.rebuilding, "it is judged by its views");
    client.send_text(Opcode::Commit, &message(view(2, 1, &[8]), &welcome.report)).unwrap();
    client.send_text(Opcode::Propose, &message(view(3, 1, &[7, 8]), &welcome.report)).unwrap();
    assert_eq!(says_rebuilding(), true, "it is not a member before the view is committed");
    client.send_text(Opcode::Commit, &message(view(3, 1, &[7, 8]), &welcome.report)).unwrap();
    assert_eq!(says_rebuilding(), false);
    replica.kill();

    // A new one is in no view until its engine takes it into one.
    let other = base.path().join("other");
    std::fs::create_dir(&other).unwrap();
    let mut rebuilding = common::spec(&other, MIB);
    rebuilding.replica = ReplicaId::from_random(9);
    rebuilding.first_members = Members::new([7, 8].map(ReplicaId::from_random)).unwrap();
    let replica = Replica::start(&rebuilding);
    assert_eq!(volume_meta(&rebuilding.directory)["Rebuilding"], true);
    assert!(!replica.try_open(generation(1), 0).unwrap().1.rebuilding);
}

/// Longhorn takes the replicas with the highest number: a replica that was left behind must not have it.
#[test]
fn the_revision_counter_shows_longhorn_the_age_of_the_replica() {
    let base = base();
    let spec = spec(base.path(), MIB);
    let mut replica = Replica::start(&spec);
    let counter = || {
        let block = std::fs::read(spec.directory.join("revision.counter")).unwrap();
        assert_eq!(block.len(), 4096);
        let digits = String::from_utf8(block).unwrap();
        digits.trim_end_matches('\0').parse::<i64>().unwrap()
    };
    assert!(!spec.directory.join("revision.counter").exists(), "no engine has had it");
    // As Longhorn has left it.
    std::fs::write(spec.directory.join("revision.counter"), [&b"123456"[..], &[0; 4090]].concat()).unwrap();
    let (mut client, welcome) = replica.try_open(generation(2), 0).unwrap();
    assert_eq!(counter(), 123_456);
    let message = |view, basis: &ReplicaReport| ViewMessage { view, basis: basis.clone() };
    client.send_text(Opcode::Propose, &message(view(2, 1, &[7, 8]), &welcome.report)).unwrap();
    let first = counter();
    assert!(first > 1 << 62);
    client.send_text(Opcode::Commit, &message(view(2, 1, &[7, 8]), &welcome.report)).unwrap();
    assert_eq!(counter(), first);
    client.send_text(Opcode::Commit, &message(view(2, 2, &[8]), &welcome.report)).unwrap();
    assert_eq!(counter(), first, "it has left: the others are newer");
    client.send_text(Opcode::Commit, &message(view(2, 3, &[7, 8]), &welcome.report)).unwrap();
    let last = counter();
    assert!(last > first);
    replica.kill();
    std::fs::remove_file(spec.directory.join("revision.counter")).unwrap();
    let _replica = Replica::start(&spec);
    assert_eq!(counter(), last);
}

#[test]
fn too_many_proposed_views_are_refused_and_the_connection_stays() {
    let base = base();
    let replica = Replica::start(&spec(base.path(), MIB));
    let (mut client, welcome) = replica.try_open(generation(1), 0).unwrap();
    let mut propose = |number: u32| {
        // Of views with the same members only the newest is kept.
        let others = (0..5).filter(|bit| number >> bit & 1 == 1);
        let members: Vec<u64> = others.chain([7]).collect();
        let message = ViewMessage { view: view(1, number, &members), basis: welcome.report.clone() };
        client.send_text(Opcode::Propose, &message)
    };
    (1..=16).for_each(|number| propose(number).unwrap());
    let (status, refusal) = propose(17).unwrap_err();
    assert!(status != 0 && refusal.message.contains("proposed views"), "{refusal:?}");
    client.ping().unwrap();
}

#[test]
fn directories_that_must_not_be_served_are_refused_with_a_reason() {
    let base = base();
    let good = spec(base.path(), MIB);
    let reason = |spec| Replica::try_start(&spec).err().unwrap();
    let mut missing = good.clone();
    missing.create = false;
    assert!(reason(missing).contains("holds no replica, and the spec does not allow creating one"));

    assert!(Replica::start(&good).terminate().success());
    let mut larger = good.clone();
    larger.size_bytes = 2 * MIB;
    // An existing directory keeps its own size: its engine makes it grow.
    let replica = Replica::start(&larger);
    assert_eq!(replica.try_open(generation(1), 0).unwrap().1.size_bytes, MIB);
    assert!(replica.terminate().success());
    let mut other = good.clone();
    other.replica = ReplicaId::from_random(9);
    assert!(reason(other).contains("belongs to replica 00000007 of volume v1, not to replica 00000009"));

    let mut stranger = good.clone();
    stranger.secret = Secret::new([0x11; 32]);
    assert!(reason(stranger).contains("belongs to a volume with another secret"));

    let replica = Replica::start(&good);
    let mut second = good.clone();
    (second.data_socket, second.control_socket) = (base.path().join("other"), base.path().join("control2"));
    assert!(reason(second).contains("is in use by process"));
    replica.open(generation(2)).write(0, &[1; 512]).unwrap();
    assert!(replica.terminate().success());

    let mut elsewhere = good.clone();
    elsewhere.data_socket = base.path().join("a-file");
    std::fs::write(&elsewhere.data_socket, "kept").unwrap();
    assert!(reason(elsewhere).contains("something that is not a socket is there"));

    std::fs::rename(good.directory.join("shorthorn.state"), base.path().join("kept")).unwrap();
    assert!(reason(good.clone()).contains("has lost shorthorn.state"));
    std::fs::rename(base.path().join("kept"), good.directory.join("shorthorn.state")).unwrap();

    // As Longhorn does when it opens a replica.
    let meta = std::fs::read(good.directory.join("volume.meta")).unwrap();
    std::fs::write(base.path().join("new"), meta).unwrap();
    std::fs::rename(base.path().join("new"), good.directory.join("volume.meta")).unwrap();
    assert!(reason(good).contains("was opened by another program"));
}

/// The supervisor starts the process again while the disk is not mounted.
#[test]
fn a_directory_that_was_made_once_is_not_made_again() {
    let base = base();
    let mut spec = spec(base.path(), MIB);
    spec.create_once = true;
    Replica::start(&spec).kill();
    let away = base.path().join("away");
    std::fs::rename(&spec.directory, &away).unwrap();
    let refused = Replica::try_start(&spec).err().unwrap();
    assert!(refused.contains("holds no replica"), "{refused}");
    assert!(!spec.directory.exists());
    std::fs::rename(&away, &spec.directory).unwrap();
    Replica::start(&spec);
}
