//! Tests whole volumes: the processes of an engine and its replicas are killed, restarted, added and removed.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod ends;
mod errors;
mod expansions;
mod late;
mod load;
mod lost_writes;
mod moves;
mod out_of_sync_sets;
mod repairs;
mod rolled_back;
mod slow_clients;
mod volume;

use std::time::Duration;

use load::Load;
use shorthorn_control::{EnginePhase, EngineStatus, MemberMode, ProcessCommand, RebuildLimits};
use shorthorn_testkit::nbd::Nbd;
use shorthorn_types::Regions;
use volume::Volume;

/// The time limit of every wait, far above the usual durations: reaching it is a bug.
pub const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_killed_replica_is_rebuilt_by_its_out_of_sync_regions() {
    let mut volume = Volume::start(3, 64 << 20);
    let load = Load::start(&volume, 1);
    load.wait_for_writes(200);
    volume.kill(1);
    volume.wait("one has left", |engine| engine.view.unwrap().members.len() == 2);
    load.wait_for_writes(200);
    volume.start_replica(1);
    volume.wait("all are back", |engine| {
        engine.view.unwrap().members.len() == 3
            && engine.members.iter().all(|member| member.mode == MemberMode::Member && member.copy.is_none())
    });
    load.wait_for_writes(200);
    let log = volume.log_of_engine();
    assert!(log.contains("is_copy=false"), "it was recreated:\n{log}");
    load.stop_and_verify(&volume);
    volume.stop();
    volume.assert_equal();
}

#[test]
fn a_short_copy_logs_all_bytes_that_it_copies() {
    const REGIONS: u64 = 5;
    let mut volume = Volume::start(3, 64 << 20);
    volume.kill(1);
    volume.wait("one has left", |engine| engine.view.unwrap().members.len() == 2);
    let region_bytes = Regions::of(volume.size_bytes).region_bytes();
    let mut nbd = Nbd::connect(&volume.frontend(), "v1").unwrap();
    for region in 0..REGIONS {
        nbd.write(2 * region * region_bytes, &[1; 4096]).unwrap();
    }
    drop(nbd);
    volume.start_replica(1);
    volume.wait("it is back", |engine| engine.members.iter().all(|member| member.mode == MemberMode::Member));
    let bytes = REGIONS * region_bytes;
    for what in ["rebuilding a replica", "a replica is a member again"] {
        let log = volume.log_of_engine();
        let line = log.lines().find(|line| line.contains(what)).unwrap();
        assert!(line.contains(&format!("bytes={bytes} ")), "{line}");
    }
    volume.stop();
    volume.assert_equal();
}

#[test]
fn a_new_replica_becomes_a_member() {
    let mut volume = Volume::start(2, 64 << 20);
    let load = Load::start(&volume, 2);
    load.wait_for_writes(500);
    let limits = RebuildLimits { bytes_per_s: None, share_percent: 90 };
    volume.request(&ProcessCommand::Limits { limits });
    volume.add_replica();
    volume.request(&ProcessCommand::Replicas { replicas: volume.endpoints() });
    volume.wait("the new one is a member", |engine| engine.view.unwrap().members.len() == 3);
    let log = volume.log_of_engine();
    assert!(log.contains("is_copy=true"), "{log}");
    load.wait_for_writes(100);
    // The first two are not needed any more.
    volume.kill(0);
    volume.wait("one has left", |engine| engine.view.unwrap().members.len() == 2);
    load.stop_and_verify(&volume);
    volume.start_replica(0);
    volume.wait("all are back", |engine| engine.view.unwrap().members.len() == 3);
    volume.stop();
    volume.assert_equal();
}

#[test]
fn after_the_death_of_the_engine_the_members_are_made_equal() {
    let mut volume = Volume::start(3, 64 << 20);
    for seed in 3..6 {
        let load = Load::start(&volume, seed);
        load.wait_for_writes(300);
        volume.kill_engine();
        load.abandon();
        volume.start_engine();
        volume
            .wait("they are equal", |engine| engine.phase == EnginePhase::Serving && engine.resync.is_none());
    }
    assert!(volume.log_of_engine().contains("the members are equal"));
    volume.stop();
    volume.assert_equal();
}

#[test]
fn one_of_two_continues_with_the_grant_of_the_arbiter() {
    let mut volume = Volume::start(2, 64 << 20);
    let load = Load::start(&volume, 7);
    load.wait_for_writes(100);
    volume.kill(1);
    let frozen = volume.wait("it asks the arbiter", |engine| engine.grant_wanted.is_some());
    assert_eq!(frozen.phase, EnginePhase::Frozen);
    let wanted = frozen.grant_wanted.unwrap();
    assert_eq!((wanted.view.members.len(), wanted.stored), (1, wanted.view.members));
    volume.request(&ProcessCommand::Grant { view: wanted.view });
    volume.wait("the copy continues", move |engine| {
        engine.phase == EnginePhase::Serving
            && engine.view == Some(wanted.view)
            && engine.grant_wanted.is_none()
    });
    load.wait_for_writes(100);
    volume.start_replica(1);
    volume.wait("the other one is back", |engine| engine.view.unwrap().members.len() == 2);
    load.stop_and_verify(&volume);
    volume.stop();
    volume.assert_equal();
}

#[test]
fn one_of_two_continues_when_the_other_one_is_back() {
    let mut volume = Volume::start(2, 16 << 20);
    let load = Load::start(&volume, 8);
    load.wait_for_writes(100);
    volume.kill(0);
    volume.wait("it asks the arbiter", |engine| engine.grant_wanted.is_some());
    volume.start_replica(0);
    volume.wait("both are members", |engine| {
        engine.phase == EnginePhase::Serving && engine.view.unwrap().members.len() == 2
    });
    load.stop_and_verify(&volume);
    volume.stop();
    volume.assert_equal();
}

#[test]
fn a_start_with_one_of_two_waits_for_the_arbiter() {
    let mut volume = Volume::start(2, 16 << 20);
    volume.stop_engine();
    volume.kill(0);
    volume.start_engine();
    let frozen = volume.wait("it asks the arbiter", |engine| engine.grant_wanted.is_some());
    let view = frozen.grant_wanted.unwrap().view;
    volume.request(&ProcessCommand::Grant { view });
    volume.wait("it serves", move |engine| {
        engine.phase == EnginePhase::Serving && engine.view == Some(view) && engine.grant_wanted.is_none()
    });
    Load::start(&volume, 9).stop_and_verify(&volume);
    // The grant is known to the next start as well.
    volume.kill_engine();
    volume.start_engine();
    volume.start_replica(0);
    volume.wait("both are members", |engine| {
        engine.phase == EnginePhase::Serving && engine.view.unwrap().members.len() == 2
    });
    volume.stop();
    volume.assert_equal();
}

#[test]
fn a_start_with_one_of_two_continues_when_the_other_one_is_back() {
    let mut volume = Volume::start(2, 16 << 20);
    volume.stop_engine();
    volume.kill(0);
    volume.start_engine();
    volume.wait("it asks the arbiter", |engine| engine.grant_wanted.is_some());
    volume.start_replica(0);
    volume.wait("both are members", |engine| {
        engine.phase == EnginePhase::Serving && engine.view.is_some_and(|view| view.members.len() == 2)
    });
    volume.stop();
}

#[test]
fn a_start_that_waits_for_the_arbiter_begins_again_with_another_list_of_replicas() {
    let mut volume = Volume::start(2, 16 << 20);
    volume.stop_engine();
    volume.kill(0);
    volume.start_engine();
    let first = volume.wait("it asks the arbiter", |engine| engine.grant_wanted.is_some());
    let first = first.grant_wanted.unwrap().view;
    let replicas = volume.endpoints().into_iter().rev().collect();
    volume.request(&ProcessCommand::Replicas { replicas });
    let asks_for_another =
        move |wanted: &shorthorn_control::GrantWanted| wanted.view.id.generation > first.id.generation;
    let again = volume.wait("it asks for another view", move |engine| {
        engine.grant_wanted.as_ref().is_some_and(asks_for_another)
    });
    let view = again.grant_wanted.unwrap().view;
    assert_eq!(view.members, first.members);
    volume.request(&ProcessCommand::Grant { view });
    volume.wait("it serves", move |engine| engine.phase == EnginePhase::Serving && engine.view == Some(view));
    let load = Load::start(&volume, 9);
    volume.start_replica(0);
    volume.wait("both are members", |engine| engine.view.is_some_and(|view| view.members.len() == 2));
    load.stop_and_verify(&volume);
    volume.stop();
    volume.assert_equal();
}

#[test]
fn a_replica_is_given_up_when_it_is_not_in_the_view() {
    let mut volume = Volume::start(3, 16 << 20);
    let without_the_last: Vec<_> = volume.endpoints().into_iter().take(2).collect();
    volume.request(&ProcessCommand::Replicas { replicas: without_the_last });
    volume.kill(2);
    let engine = volume.wait("it is forgotten", |engine| engine.members.len() == 2);
    assert_eq!(engine.view.unwrap().members.len(), 2);
    Load::start(&volume, 10).stop_and_verify(&volume);
    volume.stop();
}

#[test]
fn a_copy_continues_after_an_interruption() {
    let mut volume = Volume::start(2, 64 << 20);
    let load = Load::start(&volume, 11);
    load.wait_for_writes(1000);
    let slow = RebuildLimits { bytes_per_s: Some(4 << 20), share_percent: 50 };
    volume.request(&ProcessCommand::Limits { limits: slow });
    volume.add_replica();
    volume.request(&ProcessCommand::Replicas { replicas: volume.endpoints() });
    volume.wait("some of it is there", |engine| {
        engine.members.iter().any(|member| member.copy.is_some_and(|copy| copy.left_bytes < copy.total_bytes))
    });
    volume.kill_engine();
    load.abandon();
    volume.start_engine();
    volume.wait("the new one is a member", |engine| {
        engine.phase == EnginePhase::Serving && engine.view.unwrap().members.len() == 3
    });
    let log = volume.log_of_engine();
    assert_eq!(log.matches("is_copy=true").count(), 1, "it was recreated again:\n{log}");
    Load::start(&volume, 12).stop_and_verify(&volume);
    volume.stop();
    volume.assert_equal();
}

#[test]
fn a_lost_directory_is_noticed_and_filled_again() {
    let mut volume = Volume::start(3, 16 << 20);
    let load = Load::start(&volume, 13);
    load.wait_for_writes(100);
    volume.kill(2);
    volume.wait("one has left", |engine| engine.view.unwrap().members.len() == 2);
    volume.lose_directory(2);
    volume.start_replica(2);
    volume.wait("it is a member again", |engine| engine.view.unwrap().members.len() == 3);
    assert!(volume.log_of_engine().contains("is_copy=true"));
    load.stop_and_verify(&volume);
    // The same without an engine.
    volume.stop_engine();
    volume.kill(1);
    volume.lose_directory(1);
    volume.start_replica(1);
    volume.start_engine();
    volume.wait("it is a member again", |engine| {
        engine.phase == EnginePhase::Serving && engine.view.unwrap().members.len() == 3
    });
    assert!(volume.log_of_engine().contains("its directory was replaced"), "{}", volume.log_of_engine());
    Load::start(&volume, 14).stop_and_verify(&volume);
    volume.stop();
    volume.assert_equal();
}

#[test]
fn a_directory_that_is_lost_while_its_replica_is_away_is_filled_again() {
    let mut volume = Volume::start(3, 16 << 20);
    let load = Load::start(&volume, 15);
    load.wait_for_writes(300);
    volume.kill(2);
    volume.wait("one has left", |engine| engine.view.unwrap().members.len() == 2);
    load.wait_for_writes(20);
    load.stop_and_verify(&volume);
    volume.stop_engine();
    volume.lose_directory(2);
    volume.start_replica(2);
    volume.start_engine();
    volume.wait("it is a member again", |engine| {
        engine.phase == EnginePhase::Serving && engine.view.unwrap().members.len() == 3
    });
    assert!(volume.log_of_engine().contains("is_copy=true"), "{}", volume.log_of_engine());
    volume.stop();
    volume.assert_equal();
}

/// An agent, and then its engine, may be restarted between the question and the answer. An agent may miss the
/// change from no question to a question, so the question is shown until it is answered.
#[test]
fn a_grant_is_requested_until_the_arbiter_answers() {
    let mut volume = Volume::start(2, 16 << 20);
    let load = Load::start(&volume, 26);
    load.wait_for_writes(100);
    volume.kill(1);
    let asks = |engine: &EngineStatus| engine.grant_wanted.is_some();
    let first = volume.wait("it asks the arbiter", asks).grant_wanted.unwrap().view;
    // This client has taken the question and is gone.
    let again = volume.wait("it still asks", asks).grant_wanted.unwrap().view;
    assert_eq!(again, first);
    volume.kill_engine();
    load.abandon();
    volume.start_engine();
    let next = volume.wait("the next engine asks", asks).grant_wanted.unwrap().view;
    assert!(next.id > first.id, "{next} after {first}");
    // The answer to the one before comes late. The arbiter has granted it, so it has to be honoured.
    volume.request(&ProcessCommand::Grant { view: first });
    let honours = move |engine: &EngineStatus| {
        engine.grant_wanted.as_ref().is_some_and(|wanted| {
            wanted.view.id > next.id && wanted.honoured.views().any(|view| view.id >= first.id)
        }) || engine.phase == EnginePhase::Serving
    };
    let last = volume.wait("it asks for one that honours the grant, or needs no other", honours);
    if let Some(wanted) = last.grant_wanted {
        volume.request(&ProcessCommand::Grant { view: wanted.view });
    }
    volume.wait("it serves", |engine| engine.phase == EnginePhase::Serving && engine.grant_wanted.is_none());
    let load = Load::start(&volume, 27);
    volume.start_replica(1);
    volume.wait("both are members", |engine| engine.view.is_some_and(|view| view.members.len() == 2));
    load.stop_and_verify(&volume);
    volume.stop();
    volume.assert_equal();
}
