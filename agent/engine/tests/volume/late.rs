//! Replicas whose disk hangs while their processes answer: on a file system that is frozen for a while. These
//! tests need root.

use shorthorn_control::{EnginePhase, EngineStatus, MemberMode, ProcessCommand, ScrubCommand};

use crate::load::Load;
use crate::volume::Volume;

const TIMEOUT_MS: u32 = 1000;

/// Returns three replicas, those from `first_on_disk` on together on a disk that can hang.
fn volume(first_on_disk: usize) -> Volume {
    Volume::start_with(3, 64 << 20, |volume| {
        (volume.replica_timeout_ms, volume.first_on_disk) = (TIMEOUT_MS, first_on_disk);
    })
}

fn awaited(engine: &EngineStatus) -> usize {
    engine.members.iter().filter(|member| member.is_awaited()).count()
}

fn is_whole(engine: &EngineStatus) -> bool {
    engine.members.iter().all(|member| member.mode == MemberMode::Member && member.message.is_empty())
}

#[test]
fn two_of_three_on_a_disk_that_hangs_are_waited_for() {
    let mut volume = volume(1);
    let load = Load::start(&volume, 41);
    load.wait_for_writes(100);
    volume.freeze_disk();
    let status = volume.wait("the volume waits for them", |engine| awaited(engine) == 2);
    assert_eq!((status.phase, status.view.unwrap().members.len()), (EnginePhase::Serving, 3));
    let message = &status.members.iter().find(|member| member.is_awaited()).unwrap().message;
    assert!(message.contains("answers PING, but not its requests"), "{message}");
    volume.thaw_disk();
    volume.wait("they have answered", is_whole);
    load.wait_for_writes(100);
    load.stop_and_verify(&volume);
    assert!(!volume.log_of_engine().contains("a replica has failed"), "{}", volume.log_of_engine());
    volume.stop();
    volume.assert_equal();
}

#[test]
fn one_of_three_whose_disk_hangs_is_dropped_and_returns_later_each_time() {
    let mut volume = volume(2);
    let load = Load::start(&volume, 42);
    load.wait_for_writes(100);
    for turn in 0..3 {
        if turn == 2 {
            // An operator who requests a scrub lets late replicas try again.
            let scrub = ScrubCommand { bytes_per_s: None, repair: false };
            volume.request(&ProcessCommand::Scrub { scrub: Some(scrub) });
        }
        volume.freeze_disk();
        let status = volume.wait("it is dropped", |engine| engine.view.unwrap().members.len() == 2);
        let message =
            &status.members.iter().find(|member| member.mode == MemberMode::Failed).unwrap().message;
        assert!(message.contains("though it answers PING"), "{message}");
        assert_eq!(message.contains("late 2 times: stays out for 10 s"), turn == 1, "{message}");
        assert!(!message.contains("late 3 times"), "{message}");
        load.wait_for_writes(100);
        volume.thaw_disk();
        volume.wait("it is back", is_whole);
    }
    load.stop_and_verify(&volume);
    volume.stop();
    volume.assert_equal();
}
