//! Tests the lines of control sockets: processes of different versions read them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use shorthorn_types::status::{
    EnginePhase, ExpansionStatus, MemberMode, MemberStatus, ReplicaPhase, ReplicaStatus, ScrubStatus,
};
use shorthorn_types::{Generation, ReplicaId};

/// Returns the status of a replica as release 0.1.0 writes it.
fn line(serving: bool, failed: bool, attach: u64) -> String {
    format!(
        r#"{{"volume":"v1","replica":"000000a1","pid":1,"serving":{serving},"failed":{failed},"failures":0,"message":"","addresses":[],"size_bytes":4096,"allocated_bytes":0,"generation":{{"attach":{attach},"restart":0}},"directory":"/d"}}"#
    )
}

#[test]
fn a_replica_is_written_as_release_0_1_0_does() {
    for (serving, failed, phase) in [
        (false, false, ReplicaPhase::Closed),
        (true, false, ReplicaPhase::Serving),
        (false, true, ReplicaPhase::Failed),
    ] {
        for (attach, generation) in [(0, None), (3, Some(Generation::new(3, 0)))] {
            let line = line(serving, failed, attach);
            let status: ReplicaStatus = serde_json::from_str(&line).unwrap();
            assert_eq!((status.phase, status.generation), (phase, generation));
            assert_eq!(serde_json::to_string(&status).unwrap(), line);
        }
    }
}

#[test]
fn words_of_a_later_version_are_read() {
    assert_eq!(serde_json::from_str::<EnginePhase>(r#""levitating""#).unwrap(), EnginePhase::Unknown);
    assert_eq!(serde_json::from_str::<MemberMode>(r#""levitating""#).unwrap(), MemberMode::Connecting);
    for mode in MemberMode::ALL {
        assert_eq!(serde_json::to_value(mode).unwrap(), mode.as_str());
        assert_eq!(MemberMode::of_word(mode.as_str()), mode);
    }
    for word in ["starting", "serving", "frozen", "stopping", "stopped"] {
        let phase = EnginePhase::of_word(word).unwrap();
        assert_eq!((serde_json::to_value(phase).unwrap(), phase.as_str()), (word.into(), word));
    }
    assert_eq!(EnginePhase::of_word(""), None);
}

#[test]
fn a_wait_for_a_member_is_reported_by_a_field_and_by_release_0_1_0_by_a_message() {
    let read = |mode: &str, message: &str| -> MemberStatus {
        let line = format!(r#"{{"replica":"000000a1","address":"","mode":"{mode}","message":"{message}"}}"#);
        serde_json::from_str(&line).unwrap()
    };
    assert!(read("member", "late").is_awaited());
    assert!(!read("member", "").is_awaited());
    assert!(!read("failed", "gone").is_awaited());

    let mut member = MemberStatus::of(ReplicaId::from_random(1), MemberMode::Member);
    member.message = "a message of another kind".to_owned();
    assert!(!member.is_awaited());
    for message in ["late for 5 s", "late for 9 s"] {
        member.begin_wait(message.to_owned());
        assert_eq!((member.is_awaited(), member.times_awaited, member.message.as_str()), (true, 1, message));
    }
    let line = serde_json::to_string(&member).unwrap();
    assert_eq!(serde_json::from_str::<MemberStatus>(&line).unwrap(), member);
    member.end_wait();
    assert_eq!((member.is_awaited(), member.message.as_str()), (false, ""));
    member.begin_wait("late again".to_owned());
    assert_eq!(member.times_awaited, 2);

    let mut failed = MemberStatus::of(ReplicaId::from_random(1), MemberMode::Failed);
    failed.begin_wait("late".to_owned());
    assert_eq!((failed.is_awaited(), failed.times_awaited, failed.message.as_str()), (false, 0, ""));
}

#[test]
fn a_replica_is_not_being_rebuilt_between_two_attempts() {
    let mut member = MemberStatus::of(ReplicaId::from_random(1), MemberMode::Rebuilding);
    (member.away_since_ms, member.rebuild_failed) = (Some(7), true);
    member.rebuild_waits("it does not answer".to_owned());
    assert_eq!((member.mode, member.message.as_str()), (MemberMode::Failed, "it does not answer"));
    member.mode = MemberMode::Connecting;
    member.rebuild_waits("refused".to_owned());
    assert_eq!((member.mode, member.message.as_str()), (MemberMode::Connecting, "refused"));
    member.rebuilt();
    assert_eq!(member, MemberStatus::of(ReplicaId::from_random(1), MemberMode::Member));
}

#[test]
fn an_expansion_without_an_obstacle_has_an_empty_message() {
    for (text, message) in [("", None), ("full", Some("full".to_owned()))] {
        let line = format!(r#"{{"size_bytes":4096,"message":"{text}","next_attach":false}}"#);
        let status: ExpansionStatus = serde_json::from_str(&line).unwrap();
        assert_eq!(status.message, message);
        assert_eq!(serde_json::to_string(&status).unwrap(), line);
    }
}

#[test]
fn a_scrub_without_a_difference_has_an_empty_last_one() {
    for (text, last) in [("", None), ("a block", Some("a block".to_owned()))] {
        let line =
            format!(r#"{{"number":1,"running":false,"at_bytes":8,"found":0,"repaired":0,"last":"{text}"}}"#);
        let mut status: ScrubStatus = serde_json::from_str(&line).unwrap();
        assert_eq!(status.last, last);
        assert_eq!(serde_json::to_string(&status).unwrap(), line);
        status.stop();
        let stopped = "stopped before everything was compared";
        let after = last.map_or_else(|| stopped.to_owned(), |last| format!("{last}; {stopped}"));
        assert_eq!(status.last, Some(after));
    }
}
