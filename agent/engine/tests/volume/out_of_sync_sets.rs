//! Tests replicas that are replaced: the out-of-sync sets of former replicas do not pile up.

use shorthorn_control::{EnginePhase, EngineStatus, MemberMode, ProcessCommand};
use shorthorn_testkit::nbd::Nbd;

use crate::volume::Volume;

const SIZE_BYTES: u64 = 16 << 20;
/// The number of replaced replicas: more than a replica keeps out-of-sync sets.
const REPLACED: usize = 9;

fn members(count: usize) -> impl Fn(&EngineStatus) -> bool + Send + 'static {
    move |engine| {
        engine.phase == EnginePhase::Serving
            && engine.view.is_some_and(|view| view.members.len() == count)
            && engine.members.iter().filter(|member| member.mode == MemberMode::Member).count() == count
    }
}

/// Returns the place that is written while replica `number` is a member.
fn place(number: usize) -> u64 {
    number as u64 * 4096
}

fn content(number: usize) -> [u8; 4096] {
    [u8::try_from(number).unwrap(); 4096]
}

/// A remaining replica is absent whenever another one is given up, and learns of it only after its return.
#[test]
fn more_replicas_are_replaced_than_a_replica_keeps_out_of_sync_sets() {
    let mut volume = Volume::start(3, SIZE_BYTES);
    let staying = volume.endpoints();
    let mut nbd = Nbd::connect(&volume.frontend(), "v1").unwrap();
    for number in 3..3 + REPLACED {
        volume.add_replica();
        let new = volume.endpoints().pop().unwrap();
        let replicas = [staying.clone(), vec![new]].concat();
        volume.request(&ProcessCommand::Replicas { replicas });
        volume.wait("the new one is a member", members(4));
        nbd.write(place(number), &content(number)).unwrap();
        volume.kill(number);
        volume.wait("the new one has left", members(3));
        volume.kill(1);
        volume.wait("another one is away", members(2));
        volume.request(&ProcessCommand::Replicas { replicas: staying.clone() });
        volume.wait("the new one is given up", |engine| engine.members.len() == 3);
        volume.start_replica(1);
        volume.wait("the other one is back", members(3));
    }
    for number in 3..3 + REPLACED {
        assert_eq!(nbd.read(place(number), 4096).unwrap(), content(number));
    }
    volume.kill(0);
    volume.wait("the out-of-sync sets of the others have room", members(2));
    volume.start_replica(0);
    volume.wait("all are back", members(3));
    drop(nbd);
    volume.stop();
    for number in 0..3 {
        assert!(
            volume.out_of_sync_sets(number).is_empty(),
            "replica {number}: {:?}",
            volume.out_of_sync_sets(number)
        );
    }
}

/// An engine of an earlier version may have left such replicas.
#[test]
fn a_volume_opens_whose_replicas_have_room_for_no_out_of_sync_set() {
    let mut volume = Volume::start(3, SIZE_BYTES);
    volume.stop();
    for number in 0..3 {
        volume.keep_unneeded_out_of_sync_sets(number, 8);
        assert_eq!(volume.out_of_sync_sets(number).len(), 8);
    }
    // One is away: the others have to begin an out-of-sync set of it to store the first view.
    volume.start_replica(0);
    volume.start_replica(1);
    volume.start_engine();
    volume.wait("it serves without the third", members(2));
    volume.start_replica(2);
    volume.wait("all are back", members(3));
    volume.stop();
    for number in 0..3 {
        assert!(
            volume.out_of_sync_sets(number).is_empty(),
            "replica {number}: {:?}",
            volume.out_of_sync_sets(number)
        );
    }
}
