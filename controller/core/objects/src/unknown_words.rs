//! Words of a later version. An object with one is not left out: it is read as the word that assumes the
//! least.

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::{CurrentState, DataLocality, DesireState, Frontend, Robustness, VolumeState};

/// A set of words that later versions may add to.
pub(super) trait OpenEnum: DeserializeOwned {
    /// The meaning of an unknown word.
    const UNKNOWN: Self;
}

impl OpenEnum for DesireState {
    /// A process may be there.
    const UNKNOWN: DesireState = DesireState::Running;
}

impl OpenEnum for CurrentState {
    const UNKNOWN: CurrentState = CurrentState::Unknown;
}

impl OpenEnum for VolumeState {
    /// The state for unknown words: an engine may exist, so actions that need its absence are not taken.
    const UNKNOWN: VolumeState = VolumeState::Attaching;
}

impl OpenEnum for Robustness {
    const UNKNOWN: Robustness = Robustness::Unknown;
}

impl OpenEnum for Frontend {
    /// No engine is started with another one than its owner has chosen.
    const UNKNOWN: Frontend = Frontend::Unknown;
}

impl OpenEnum for DataLocality {
    const UNKNOWN: DataLocality = DataLocality::Disabled;
}

/// Deserialises one word of the set, or one of a later version; for `deserialize_with`.
pub(super) fn word<'de, D: Deserializer<'de>, T: OpenEnum>(deserializer: D) -> Result<T, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::String(word) => Ok(T::deserialize(Value::String(word)).unwrap_or(T::UNKNOWN)),
        other => Err(D::Error::custom(format!("{other} is not a word"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{
        DataLocality, DataState, Engine, EnginePhase, Frontend, MemberMode, Node, Object, Replica,
        Robustness, Volume, VolumeState,
    };
    use super::*;

    /// Returns objects of each kind as release 0.1.0 has stored them.
    fn stored() -> Vec<Value> {
        serde_json::from_str(include_str!("../tests/releases/0.1.0/objects.json")).unwrap()
    }

    #[test]
    fn objects_of_earlier_releases_are_read_and_written_unchanged() {
        let kinds: Vec<Value> = stored().iter().map(|object| object["kind"].clone()).collect();
        assert_eq!(kinds, ["Engine", "Node", "Replica", "Volume"]);
        for mut stored in stored() {
            let object = Object::deserialize(&stored).unwrap_or_else(|error| panic!("{error}: {stored:#}"));
            // The one key that has another name since, and the one that was added.
            let members = stored.pointer_mut("/status/replicaModeMap").and_then(Value::as_object_mut);
            for member in members.into_iter().flat_map(serde_json::Map::values_mut) {
                let away = member.as_object_mut().unwrap().remove("away_since_ms").unwrap();
                member["awaySinceMs"] = away;
                member["awaited"] = json!(false);
            }
            assert_eq!(serde_json::to_value(object).unwrap(), stored);
        }
    }

    #[test]
    fn the_time_of_absence_of_a_replica_is_read_under_both_names() {
        let read = |member: Value| {
            serde_json::from_value::<super::super::MemberRecord>(member).unwrap().away_since_ms
        };
        assert_eq!(read(json!({ "mode": "failed", "away_since_ms": 7 })), Some(7));
        assert_eq!(read(json!({ "mode": "failed", "awaySinceMs": 8 })), Some(8));
        assert_eq!(read(json!({ "mode": "member" })), None);
        // A writer that has replaced the one has left the other unchanged.
        assert_eq!(read(json!({ "mode": "member", "awaySinceMs": 0, "away_since_ms": 7 })), None);
    }

    #[test]
    fn a_wait_for_a_member_is_read_from_its_field_or_from_the_message_of_release_0_1_0() {
        let read =
            |member: Value| serde_json::from_value::<super::super::MemberRecord>(member).unwrap().awaited;
        assert!(read(json!({ "mode": "member", "message": "late" })));
        assert!(!read(json!({ "mode": "member", "message": "" })));
        assert!(!read(json!({ "mode": "failed", "message": "gone" })));
        assert!(!read(json!({ "mode": "member", "message": "late", "awaited": false })));
        assert!(read(json!({ "mode": "member", "message": "late", "awaited": true })));
        assert!(!read(json!({ "mode": "member", "awaited": true })), "release 0.1.0 has ended the wait");
        // Release 0.1.0 has replaced the mode, and has left the field unchanged.
        assert!(!read(json!({ "mode": "failed", "message": "gone", "awaited": true })));
    }

    fn changed<T: DeserializeOwned>(kind: &str, changes: &[(&str, Value)]) -> T {
        let mut object = stored().into_iter().find(|object| object["kind"] == kind).unwrap();
        for (at, value) in changes {
            let (parent, name) = at.rsplit_once('/').unwrap();
            object.pointer_mut(parent).unwrap()[name] = value.clone();
        }
        T::deserialize(object).unwrap()
    }

    #[test]
    fn objects_with_words_or_fields_of_a_later_version_stay_readable() {
        let word = json!("levitating");
        let volume: Volume = changed(
            "Volume",
            &[
                ("/spec/frontend", word.clone()),
                ("/spec/dataLocality", word.clone()),
                ("/spec/levitation", json!({ "height": 1 })),
                ("/status/state", word.clone()),
                ("/status/robustness", word.clone()),
                ("/status/arbiter/levitates", json!(true)),
                ("/status/conditions/0/type", word.clone()),
            ],
        );
        assert_eq!(
            (volume.spec.frontend, volume.spec.data_locality),
            (Frontend::Unknown, DataLocality::Disabled)
        );
        assert_eq!(
            (volume.status.state, volume.status.robustness),
            (VolumeState::Attaching, Robustness::Unknown)
        );
        let engine: Engine = changed(
            "Engine",
            &[
                ("/spec/desireState", word.clone()),
                ("/spec/frontend", word.clone()),
                ("/status/currentState", word.clone()),
                ("/status/replicaModeMap/8rqh2w91/mode", word.clone()),
                ("/status/phase", word.clone()),
                ("/status/frontend", word.clone()),
                ("/status/generation", word.clone()),
                ("/status/view", word.clone()),
            ],
        );
        assert_eq!(engine.status.phase, Some(EnginePhase::Unknown));
        assert_eq!(engine.status.frontend, Some(Frontend::Unknown));
        assert_eq!((engine.status.generation, engine.status.view), (None, None), "they are observed again");
        assert_eq!(engine.spec.desire_state, DesireState::Running);
        assert!(!engine.status.replica_mode_map.values().any(|member| member.mode == MemberMode::Member));
        let replica: Replica = changed(
            "Replica",
            &[
                ("/status/data", word.clone()),
                ("/status/currentState", word.clone()),
                ("/spec/desireState", word),
            ],
        );
        assert_eq!(
            (replica.status.data, replica.status.current_state),
            (DataState::Present, CurrentState::Unknown)
        );
    }

    #[test]
    fn a_node_with_a_frontend_of_a_later_version_is_read() {
        let node: Node = changed(
            "Node",
            &[
                ("/spec/levitation", json!(1)),
                ("/status/levitation", json!(1)),
                ("/status/frontends", json!([{ "name": "levitating", "usable": true }])),
            ],
        );
        assert_eq!(node.status.frontends[0].name, Frontend::Unknown);
    }

    #[test]
    fn a_state_that_is_not_a_word_is_an_error() {
        let mut volume = stored().remove(3);
        volume["status"]["state"] = json!(7);
        assert!(Volume::deserialize(volume).unwrap_err().to_string().contains("not a word"));
    }
}
