//! Volumes that grow while they are used.

use shorthorn_control::{EnginePhase, EngineStatus, MemberMode, ProcessCommand};
use shorthorn_testkit::nbd::Nbd;

use crate::load::Load;
use crate::volume::Volume;

const SIZE: u64 = 16 << 20;
const LARGER: u64 = 48 << 20;

fn has(engine: &EngineStatus, size_bytes: u64) -> bool {
    engine.phase == EnginePhase::Serving && engine.size_bytes == size_bytes && engine.expansion.is_none()
}

/// Checks that the new part reads as zeroes and keeps its writes.
fn use_added_range(volume: &Volume, from: u64) {
    let mut nbd = Nbd::connect(&volume.frontend(), "v1").unwrap();
    assert_eq!(nbd.size_bytes, volume.size_bytes);
    let end = volume.size_bytes - 4096;
    assert!(nbd.read(from, 1 << 20).unwrap().iter().all(|byte| *byte == 0));
    nbd.write(from, &[0x5a; 8192]).unwrap();
    nbd.write(end, &[0x5b; 4096]).unwrap();
    assert_eq!(nbd.read(from + 4096, 4096).unwrap(), [0x5a; 4096]);
    assert_eq!(nbd.read(end, 4096).unwrap(), [0x5b; 4096]);
}

#[test]
fn a_volume_grows_again_and_again_under_load() {
    let mut volume = Volume::start(3, SIZE);
    let load = Load::start(&volume, 31);
    let mut old = Nbd::connect(&volume.frontend(), "v1").unwrap();
    for size_bytes in [SIZE + 4096, LARGER, LARGER + (64 << 20)] {
        load.wait_for_writes(200);
        let from = volume.size_bytes;
        volume.expand(size_bytes);
        volume.wait("it has grown", move |engine| has(engine, size_bytes));
        if size_bytes > LARGER {
            use_added_range(&volume, from);
        }
        load.wait_for_writes(200);
    }
    load.stop_and_verify(&volume);
    // An earlier client continues with its known size.
    assert_eq!(old.size_bytes, SIZE);
    old.write(0, &[9; 4096]).unwrap();
    assert_eq!(old.read(0, 4096).unwrap(), [9; 4096]);
    // It never shrinks.
    volume.request(&ProcessCommand::Expand { size_bytes: SIZE });
    let more = Load::start(&volume, 32);
    more.wait_for_writes(100);
    more.stop_and_verify(&volume);
    let log = volume.log_of_engine();
    assert!(log.contains("are fewer"), "{log}");
    volume.stop();
    for number in 0..3 {
        assert_eq!(volume.dirty_regions(number), 0);
    }
    volume.assert_equal();
}

#[test]
fn an_absent_replica_grows_and_gets_its_missed_regions() {
    let mut volume = Volume::start(3, SIZE);
    let load = Load::start(&volume, 33);
    load.wait_for_writes(100);
    volume.kill(1);
    volume.wait("one has left", |engine| engine.view.unwrap().members.len() == 2);
    volume.expand(LARGER);
    volume.wait("it has grown", |engine| has(engine, LARGER));
    use_added_range(&volume, SIZE);
    volume.start_replica(1);
    volume.wait("all are members", |engine| {
        engine.view.unwrap().members.len() == 3
            && engine.members.iter().all(|member| member.mode == MemberMode::Member)
    });
    let log = volume.log_of_engine();
    assert!(log.contains("is_copy=false"), "it was recreated:\n{log}");
    load.stop_and_verify(&volume);
    volume.stop();
    volume.assert_equal();
}

/// The engine is killed when one replica has grown and the others have not.
#[test]
fn the_next_engine_ends_an_expansion_that_was_cut_off() {
    let mut volume = Volume::start(3, SIZE);
    let load = Load::start(&volume, 34);
    load.wait_for_writes(100);
    volume.pause(1);
    volume.expand(LARGER);
    volume.wait_for_growth(0);
    volume.kill_engine();
    load.abandon();
    volume.resume(1);
    assert!(!volume.log_of_replica(2).contains("the volume has grown"), "it came before the one that hangs");
    volume.start_engine();
    volume.wait("it serves", |engine| has(engine, LARGER) && engine.resync.is_none());
    use_added_range(&volume, SIZE);
    Load::start(&volume, 35).stop_and_verify(&volume);
    volume.stop();
    volume.assert_equal();
}

/// A replica that hangs while the volume grows leaves the view, as for any request; it follows when it is
/// back.
#[test]
fn a_replica_that_hangs_does_not_stop_an_expansion() {
    let mut volume = Volume::start(3, SIZE);
    let load = Load::start(&volume, 36);
    load.wait_for_writes(50);
    volume.pause(2);
    volume.expand(LARGER);
    volume.wait("it has grown", |engine| has(engine, LARGER));
    use_added_range(&volume, SIZE);
    volume.resume(2);
    volume.wait("all are members", |engine| engine.view.unwrap().members.len() == 3);
    load.stop_and_verify(&volume);
    volume.stop();
    volume.assert_equal();
}

/// A new replica is made with the size that the volume is to have, which its engine does not know yet.
#[test]
fn a_replica_that_is_too_large_is_taken_once_the_engine_knows() {
    let mut volume = Volume::start(2, SIZE);
    let load = Load::start(&volume, 37);
    load.wait_for_writes(100);
    volume.size_bytes = LARGER;
    volume.add_replica();
    volume.request(&ProcessCommand::Replicas { replicas: volume.endpoints() });
    volume.wait("it is not taken", |engine| {
        engine
            .members
            .iter()
            .any(|member| member.message.contains("this engine does not know of an expansion"))
    });
    volume.expand(LARGER);
    volume.wait("it is a member", |engine| {
        has(engine, LARGER) && engine.view.is_some_and(|view| view.members.len() == 3)
    });
    use_added_range(&volume, SIZE);
    load.stop_and_verify(&volume);
    volume.stop();
    volume.assert_equal();
}

/// An engine that does not know of an expansion refuses a replica that another engine has enlarged. This may
/// be the replica that it waits for.
#[test]
fn an_engine_that_waits_for_a_grant_takes_an_expansion() {
    let mut volume = Volume::start(2, SIZE);
    Load::start(&volume, 39).stop_and_verify(&volume);
    volume.stop_engine();
    volume.kill(1);
    volume.start_engine();
    volume.wait("it waits for the arbiter", |engine| engine.phase == EnginePhase::Frozen);
    volume.expand(LARGER);
    volume.wait_for_growth(0);
    volume.start_replica(1);
    volume.wait("it serves", |engine| has(engine, LARGER));
    use_added_range(&volume, SIZE);
    volume.stop();
    volume.assert_equal();
}

#[test]
fn a_volume_that_is_not_attached_grows_with_its_next_start() {
    let mut volume = Volume::start(2, SIZE);
    Load::start(&volume, 38).stop_and_verify(&volume);
    volume.stop_engine();
    volume.size_bytes = LARGER;
    volume.start_engine();
    volume.wait("it serves", |engine| has(engine, LARGER));
    use_added_range(&volume, SIZE);
    volume.stop();
    volume.assert_equal();
}
