//! Tests the lines of control sockets: processes of different versions read them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use shorthorn_types::Generation;
use shorthorn_types::status::{EnginePhase, MemberMode, ReplicaPhase, ReplicaStatus};

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
