//! Tests orderly ends of an engine: written data is flushed and cleared before, and that never takes long.

use std::time::{Duration, Instant};

use shorthorn_control::EnginePhase;

use crate::load::Load;
use crate::volume::Volume;

const ALL_FLUSHED: &str = "every member has flushed all writes";
const NOT_ALL_FLUSHED: &str = "not every member has flushed in time";
const UNEQUAL: &str = "resyncing the members in dirty regions";
/// The limit of an end that waits for an unresponsive replica. It must be far below the time that callers of
/// the end wait.
const END_LIMIT: Duration = Duration::from_secs(20);

/// Starts the next engine, which serves with nothing to resync.
fn start_equal(volume: &mut Volume) {
    volume.start_engine();
    let engine = volume.wait("it serves", |engine| engine.phase == EnginePhase::Serving);
    assert_eq!(engine.resync, None);
    assert!(!volume.log_of_engine().contains(UNEQUAL), "{}", volume.log_of_engine());
}

#[test]
fn after_a_stop_no_region_needs_a_resync() {
    let mut volume = Volume::start(3, 64 << 20);
    let load = Load::start(&volume, 20);
    load.wait_for_writes(500);
    load.stop_and_verify(&volume);
    volume.stop_engine();
    assert!(volume.log_of_engine().contains(ALL_FLUSHED), "{}", volume.log_of_engine());
    start_equal(&mut volume);
    volume.stop();
    assert_eq!([0, 1, 2].map(|number| volume.dirty_regions(number)), [0; 3]);
    volume.assert_equal();
}

#[test]
fn after_a_stop_under_load_no_region_needs_a_resync() {
    let mut volume = Volume::start(3, 64 << 20);
    let load = Load::start(&volume, 21);
    load.wait_for_writes(500);
    volume.stop_engine();
    load.abandon();
    start_equal(&mut volume);
    volume.stop();
    assert_eq!([0, 1, 2].map(|number| volume.dirty_regions(number)), [0; 3]);
    volume.assert_equal();
}

#[test]
fn a_handover_clears_regions_before_requests_have_to_wait() {
    let mut volume = Volume::start(3, 64 << 20);
    let load = Load::start(&volume, 22);
    load.wait_for_writes(500);
    volume.hand_over();
    load.abandon();
    let log = volume.log_of_engine();
    assert_eq!(
        log.matches(ALL_FLUSHED).count(),
        2,
        "while requests go on, and when the frontend is gone: {log}"
    );
    assert!(log.rfind(ALL_FLUSHED) < log.find("ended="), "{log}");
    start_equal(&mut volume);
    volume.stop();
    volume.assert_equal();
}

#[test]
fn a_stop_does_not_wait_long_for_a_replica_that_hangs() {
    let mut volume = Volume::start(3, 16 << 20);
    let load = Load::start(&volume, 23);
    load.wait_for_writes(100);
    load.stop_and_verify(&volume);
    volume.pause(2);
    let begin = Instant::now();
    volume.stop_engine();
    assert!(begin.elapsed() < END_LIMIT, "{:?}", begin.elapsed());
    println!("stopped after {:?}", begin.elapsed());
    assert!(volume.log_of_engine().contains(NOT_ALL_FLUSHED), "{}", volume.log_of_engine());
    volume.resume(2);
    volume.start_engine();
    volume.wait("all are members and equal", |engine| {
        engine.phase == EnginePhase::Serving
            && engine.resync.is_none()
            && engine.view.unwrap().members.len() == 3
    });
    volume.stop();
    volume.assert_equal();
}

#[test]
fn a_stop_clears_regions_without_a_replica_that_is_dead() {
    let mut volume = Volume::start(3, 16 << 20);
    let load = Load::start(&volume, 24);
    load.wait_for_writes(100);
    load.stop_and_verify(&volume);
    volume.kill(2);
    volume.stop_engine();
    assert!(volume.log_of_engine().contains(ALL_FLUSHED), "{}", volume.log_of_engine());
    start_equal(&mut volume);
    volume.stop();
    assert_eq!([0, 1].map(|number| volume.dirty_regions(number)), [0; 2]);
}

#[test]
fn a_stop_does_not_wait_for_the_arbiter() {
    let mut volume = Volume::start(2, 16 << 20);
    Load::start(&volume, 25).stop_and_verify(&volume);
    volume.kill(1);
    volume.wait("it asks the arbiter", |engine| engine.grant_wanted.is_some());
    let begin = Instant::now();
    volume.stop_engine();
    assert!(begin.elapsed() < END_LIMIT, "{:?}", begin.elapsed());
    println!("stopped after {:?}", begin.elapsed());
    assert!(
        !volume.log_of_engine().contains(NOT_ALL_FLUSHED),
        "it did not even try: {}",
        volume.log_of_engine()
    );
}
