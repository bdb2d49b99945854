//! Tests a power loss of all members while the volume is in use. The engine reports it to the user until the
//! user detaches.

use std::io;

use shorthorn_control::{EnginePhase, EngineStatus};
use shorthorn_testkit::nbd::Nbd;

use crate::volume::Volume;

const OFFSET: u64 = 1 << 20;
const DATA: [u8; 4096] = [7; 4096];
const IO_ERROR: i32 = 5;

/// Returns two members, and a write that is acknowledged and not flushed.
fn written() -> Volume {
    let volume = Volume::start(2, 16 << 20);
    client(&volume).write_volatile(OFFSET, &DATA).unwrap();
    volume
}

fn client(volume: &Volume) -> Nbd {
    Nbd::connect(&volume.frontend(), "v1").unwrap()
}

/// Returns the next engine, as soon as it serves.
fn next_engine(volume: &mut Volume) -> EngineStatus {
    volume.start_engine();
    volume.wait("it serves", |engine| engine.phase == EnginePhase::Serving)
}

fn assert_refuses(volume: &Volume, what: &str) {
    let errno = |result: io::Result<()>| result.err().and_then(|error| error.raw_os_error());
    let mut client = client(volume);
    assert_eq!(errno(client.flush()), Some(IO_ERROR), "a flush {what}");
    assert_eq!(errno(client.read(OFFSET, 4096).map(drop)), Some(IO_ERROR), "a read {what}");
    assert_eq!(errno(client.write(0, &DATA)), Some(IO_ERROR), "a write {what}");
}

#[test]
fn a_flush_does_not_succeed_after_all_members_have_lost_power() {
    let mut volume = written();
    for number in 0..2 {
        volume.lose_power(number, OFFSET);
        volume.start_replica(number);
    }
    volume.kill_engine();
    let engine = next_engine(&mut volume);
    assert_refuses(&volume, "after the loss");
    assert!(engine.lost_writes && engine.message.contains("detach"), "{engine:?}");

    // The members are equal again, and nothing that they say shows the loss any more: it is remembered.
    volume.wait("they are equal", |engine| engine.resync.is_none());
    volume.hand_over();
    assert!(next_engine(&mut volume).lost_writes);
    assert_refuses(&volume, "of a later process");

    volume.kill_engine();
    volume.attach = 2;
    assert!(!next_engine(&mut volume).lost_writes);
    let mut client = client(&volume);
    assert_eq!(
        client.read(OFFSET, 4096).unwrap(),
        [0; 4096],
        "the record is gone: the process that attached the volume knows"
    );
    client.write(0, &DATA).unwrap();
    client.flush().unwrap();
    drop(client);
    volume.wait("both are members", |engine| engine.view.unwrap().members.len() == 2);
    volume.stop();
    volume.assert_equal();
}

#[test]
fn one_member_that_has_kept_everything_is_enough() {
    let mut volume = written();
    volume.lose_power(0, OFFSET);
    volume.start_replica(0);
    volume.kill_engine();
    assert!(!next_engine(&mut volume).lost_writes);
    let mut client = client(&volume);
    client.flush().unwrap();
    assert_eq!(client.read(OFFSET, 4096).unwrap(), DATA);
    drop(client);
    volume.wait("it is a member again", |engine| engine.view.unwrap().members.len() == 2);
    volume.stop();
    volume.assert_equal();
}

#[test]
fn an_attachment_that_begins_after_the_loss_reports_no_lost_writes() {
    let mut volume = written();
    volume.kill_engine();
    for number in 0..2 {
        volume.lose_power(number, OFFSET);
        volume.start_replica(number);
    }
    volume.attach = 2;
    assert!(!next_engine(&mut volume).lost_writes);
    client(&volume).flush().unwrap();
}
