//! Tests texts from disks and sockets: spec files come from disks, and lines of the control socket from any
//! process that reaches it. No text makes a parser panic, and an accepted text is written again with the same
//! meaning.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

use std::fmt::Debug;

use proptest::collection::vec;
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use shorthorn_control::{EngineSpec, IoCounters, ProcessCommand, ProcessStatus, ReplicaSpec};

/// Texts as programs write them, with optional fields that may be absent.
fn texts() -> Vec<String> {
    const VIEW: &str =
        r#"{"id":{"generation":{"attach":1,"restart":0},"number":1},"members":["000000a1","000000a2"]}"#;
    const COUNTER: &str = r#"{"operations":1,"bytes":2,"failed":3,"duration_us":4}"#;
    let secret = "ab".repeat(32);
    let report = format!(r#"{{"committed":{VIEW},"proposed":[{VIEW}]}}"#);
    let replica_spec = format!(
        r#"{{"volume":"v1","replica":"000000a1","directory":"/d","size_bytes":4096,"create":true,
        "first_members":["000000a1"],"secret":"{secret}","data_socket":"/s","data_address":"127.0.0.1:0",
        "control_socket":"/c"}}"#
    );
    let engine_spec = format!(
        r#"{{"volume":"v1","size_bytes":4096,"attach":1,
        "replicas":[{{"replica":"000000a1","addresses":["unix:/r"],"local":true}}],"frontend":"auto",
        "secret":"{secret}","state_file":"/t","control_socket":"/c","frontend_socket":"/n",
        "device_dir":"/dev/longhorn","queues":1,"depth":128,"replica_timeout_ms":5000,"granted":{VIEW}}}"#
    );
    let status = format!(
        r#"{{"kind":"engine","volume":"v1","pid":1,"phase":"frozen","message":"",
        "generation":{{"attach":1,"restart":0}},"view":{VIEW},
        "members":[{{"replica":"000000a1","address":"unix:/r","mode":"member","message":""}}],"frontend":"nbd",
        "endpoint":"/n","size_bytes":4096,
        "grant_wanted":{{"view":{VIEW},"honoured":{report},"stored":["000000a1"]}}}}"#
    );
    vec![
        replica_spec,
        engine_spec,
        r#""status""#.to_owned(),
        r#"{"expand":{"size_bytes":8192}}"#.to_owned(),
        r#"{"listen":{"address":"[fd00::1]:10000"}}"#.to_owned(),
        format!(r#"{{"grant":{{"view":{VIEW}}}}}"#),
        status,
        format!(r#"{{"read":{COUNTER},"write":{COUNTER},"flush":{COUNTER},"discard":{COUNTER}}}"#),
    ]
}

/// Returns true if `text` is a `T`, which is then written again unchanged.
fn check<T: Serialize + DeserializeOwned + PartialEq + Debug>(text: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice::<T>(text) else { return false };
    let again = serde_json::to_vec(&value).unwrap();
    assert_eq!(serde_json::from_slice::<T>(&again).unwrap(), value);
    true
}

/// Returns the number of kinds of texts that accept it.
fn check_every_kind(text: &[u8]) -> usize {
    let accepted = [
        check::<ReplicaSpec>(text),
        check::<EngineSpec>(text),
        check::<ProcessCommand>(text),
        check::<ProcessStatus>(text),
        check::<IoCounters>(text),
    ];
    accepted.into_iter().filter(|accepted| *accepted).count()
}

#[test]
fn each_text_is_accepted_as_it_is() {
    for text in texts() {
        assert_eq!(check_every_kind(text.as_bytes()), 1, "{text}");
    }
}

/// Characters at the end of an escape, in a number, or out of the range of every number.
const SPECIAL: [&str; 13] =
    ["", "0", "-1", "18446744073709551616", "1e400", "\"", "{", "}", "[", "null", "\\ud800", "\0", ","];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn any_bytes_are_refused_or_written_again(text in vec(any::<u8>(), 0..200)) {
        check_every_kind(&text);
    }

    #[test]
    fn a_changed_text_is_refused_or_written_again(
        kind in any::<prop::sample::Index>(),
        edits in vec(
            (any::<prop::sample::Index>(), 0usize..16, prop::sample::select(SPECIAL.to_vec())),
            0..4,
        ),
    ) {
        let mut text = kind.get(&texts()).clone().into_bytes();
        for (at, removed, new) in edits {
            let at = at.index(text.len() + 1);
            text.splice(at..(at + removed).min(text.len()), new.bytes());
        }
        check_every_kind(&text);
    }

    /// Lists inside lists do not use up the stack of the thread of a client.
    #[test]
    fn no_depth_is_too_deep(
        open in prop::sample::select(vec!["[", "{\"a\":", "{\"grant\":"]),
        depth in 1usize..20_000,
    ) {
        prop_assert_eq!(check_every_kind(open.repeat(depth).as_bytes()), 0);
    }
}
