use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use shorthorn_types::status::{self, EnginePhase, MemberMode, MemberStatus};
use shorthorn_types::{Generation, ReplicaId, View, VolumeName};

use super::{CurrentState, DesireState, Frontend, Metadata, RebuildLimits, Volume};
use crate::{NodeName, Timestamp, schema};

/// The engine of a volume; it has the volume's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engine {
    /// Name, version and dates.
    pub metadata: Metadata,
    /// The desired state, set by the reconciler of the volume.
    pub spec: EngineSpec,
    /// The observed state, written by the reconciler of the engine.
    #[serde(default)]
    pub status: StoredEngineStatus,
}

/// The desired state of an engine, set by the reconciler of its volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "self.volumeName == oldSelf.volumeName",
        "message": "the volume of an engine cannot be changed",
    },
    {
        "rule": "self.attach >= oldSelf.attach",
        "message": "the attachment number of an engine cannot be reduced",
    },
]))]
pub struct EngineSpec {
    /// Name of the Volume object; the Engine object has the same name.
    #[schemars(with = "schema::VolumeName")]
    pub volume_name: VolumeName,
    /// In bytes.
    #[serde(with = "super::quoted")]
    #[schemars(with = "schema::Quoted")]
    pub volume_size: u64,
    /// The node on which the engine runs, or ran last.
    #[serde(rename = "nodeID", default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::NodeName>")]
    pub node_id: Option<NodeName>,
    /// The desired state of the process.
    #[serde(deserialize_with = "super::unknown_words::word")]
    #[schemars(with = "schema::DesireState")]
    pub desire_state: DesireState,
    /// The number of the attachment that it runs for.
    // None: it was never attached. It is stored as 0.
    #[serde(with = "shorthorn_types::optional::number")]
    #[schemars(with = "u64")]
    pub attach: Option<u64>,
    /// The choice of the frontend.
    #[serde(deserialize_with = "super::unknown_words::word")]
    #[schemars(with = "schema::Frontend")]
    pub frontend: Frontend,
    /// The replicas and their addresses. The running engine gets replicas that come back or are new.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, ReplicaTarget>")]
    pub replica_address_map: BTreeMap<ReplicaId, ReplicaTarget>,
    /// The number of the map, raised with every change, so that an older one that arrives late is recognised.
    #[serde(default)]
    pub map_revision: u64,
}

/// The known state of the engine process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StoredEngineStatus {
    /// The observed state of the process.
    #[serde(deserialize_with = "super::unknown_words::word")]
    #[schemars(with = "schema::CurrentState")]
    pub current_state: CurrentState,
    /// The newest attachment whose engine process was seen.
    // This number and the next ones are stored as 0 if there is none.
    #[serde(default, with = "shorthorn_types::optional::number")]
    #[schemars(with = "u64")]
    pub seen_attach: Option<u64>,
    /// The newest attachment whose engine process was seen and is gone for good. Only an engine with a
    /// higher number may follow it.
    #[serde(default, with = "shorthorn_types::optional::number")]
    #[schemars(with = "u64")]
    pub lost_attach: Option<u64>,
    /// The newest attachment whose engine process was seen to serve: its replicas know a view since.
    #[serde(default, with = "shorthorn_types::optional::number")]
    #[schemars(with = "u64")]
    pub served_attach: Option<u64>,
    /// starting, serving, frozen (no quorum) or stopped, as the engine says.
    #[serde(default, with = "super::optional::phase")]
    #[schemars(with = "String")]
    pub phase: Option<EnginePhase>,
    /// The generation in which it serves.
    #[serde(default, with = "super::optional::parsed")]
    #[schemars(with = "String")]
    pub generation: Option<Generation>,
    /// The view in which it serves.
    #[serde(default, with = "super::optional::parsed")]
    #[schemars(with = "String")]
    pub view: Option<View>,
    /// The frontend that it chose.
    #[serde(default, with = "super::optional::frontend")]
    #[schemars(with = "String")]
    pub frontend: Option<Frontend>,
    /// The device, or the socket.
    #[serde(default, with = "shorthorn_types::optional::text")]
    #[schemars(with = "String")]
    pub endpoint: Option<String>,
    /// The state of each replica in the engine.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, MemberRecord>")]
    pub replica_mode_map: BTreeMap<ReplicaId, MemberRecord>,
    /// The problem, for people; empty if none.
    #[serde(default, with = "shorthorn_types::optional::text")]
    #[schemars(with = "String")]
    pub message: Option<String>,
    /// The reason why the process could not be stopped yet, such as a device in use; empty if the stop was
    /// not refused.
    #[serde(default, with = "shorthorn_types::optional::text", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub stop_refused: Option<String>,
    /// The newest map of replicas that the process was given.
    #[serde(default)]
    pub map_revision: u64,
    /// The size that the process was given last; 0: not known.
    #[serde(with = "super::quoted::or_zero", default)]
    #[schemars(with = "schema::Quoted")]
    pub volume_size: Option<u64>,
    /// The size of the device as its user sees it; 0 if it is not known.
    #[serde(with = "super::quoted::or_zero", default)]
    #[schemars(with = "schema::Quoted")]
    pub current_size: Option<u64>,
    /// True if writes may be lost that the user of the device believes stored. Every request fails until the
    /// volume is detached.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost_writes: bool,
    /// The number of times since its start that the engine has met damaged data without a sound copy on any
    /// replica.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub damaged_ranges: u64,
    /// The pending part of an expansion, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expansion: Option<StoredExpansionStatus>,
    /// The limits that the process was given last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rebuild: Option<RebuildLimits>,
    /// True if the process runs another program than the one that is installed on its node.
    // Absent if the agent has not compared them yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub needs_upgrade: Option<bool>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// The address of a replica for an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReplicaTarget {
    /// In the order to try.
    pub addresses: Vec<String>,
    /// True if the replica is on the engine's node.
    pub local: bool,
}

impl Engine {
    /// Returns the engine of a volume that has none: nothing runs, and nothing was ever started for it.
    #[must_use]
    pub fn of_new(volume: &Volume, now: Timestamp) -> Engine {
        Engine {
            metadata: Metadata::new(&volume.metadata.name, now),
            spec: EngineSpec {
                volume_name: volume.spec.volume_name.clone(),
                volume_size: volume.spec.size,
                node_id: None,
                desire_state: DesireState::Stopped,
                attach: None,
                frontend: volume.spec.frontend,
                replica_address_map: BTreeMap::new(),
                map_revision: 0,
            },
            status: StoredEngineStatus::default(),
        }
    }
}

impl StoredEngineStatus {
    /// Returns the part that is stored of the status which an engine reports; nothing if it reports none.
    #[must_use]
    pub fn of_reported(reported: Option<&status::EngineStatus>) -> StoredEngineStatus {
        let Some(reported) = reported else { return StoredEngineStatus::default() };
        StoredEngineStatus {
            phase: Some(reported.phase),
            generation: Some(reported.generation),
            view: reported.view,
            frontend: reported.frontend,
            endpoint: reported.endpoint.as_ref().map(|path| path.display().to_string()),
            replica_mode_map: reported.members.iter().map(|member| (member.replica, member.into())).collect(),
            lost_writes: reported.lost_writes,
            damaged_ranges: reported.damaged_ranges(),
            expansion: reported.expansion.as_ref().map(Into::into),
            ..StoredEngineStatus::default()
        }
    }

    /// Returns the problem for a text; empty if none.
    #[must_use]
    pub fn problem(&self) -> &str {
        self.message.as_deref().unwrap_or_default()
    }

    /// Returns true if that replica is in the view, according to the engine.
    #[must_use]
    pub fn has_member(&self, replica: ReplicaId) -> bool {
        self.replica_mode_map.get(&replica).is_some_and(|member| member.mode == MemberMode::Member)
    }

    /// Returns true if the engine serves the volume.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.current_state == CurrentState::Running && self.phase == Some(EnginePhase::Serving)
    }
}

/// An expansion that the device has not followed yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StoredExpansionStatus {
    /// The obstacle of the expansion; empty if it is under way.
    #[serde(default, with = "shorthorn_types::optional::text")]
    #[schemars(with = "String")]
    pub message: Option<String>,
    /// True if the device grows only with the next attachment.
    #[serde(default)]
    pub next_attach: bool,
}

impl From<&status::ExpansionStatus> for StoredExpansionStatus {
    fn from(expansion: &status::ExpansionStatus) -> StoredExpansionStatus {
        let status::ExpansionStatus { message, next_attach, .. } = expansion;
        StoredExpansionStatus { message: message.clone(), next_attach: *next_attach }
    }
}

/// The state of one replica in the engine.
// The part of a member's status that decisions need while its agent does not answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemberRecord {
    /// In the view or not.
    #[schemars(with = "schema::MemberMode")]
    pub mode: MemberMode,
    /// The reason why the replica is not a member, or why requests wait for a member, if they do.
    #[serde(default)]
    pub message: String,
    /// True if requests wait for the replica, because it is late.
    #[serde(default)]
    pub awaited: bool,
    /// The time since which the replica is not a member, in milliseconds since 1970; 0 for a member, or if
    /// unknown.
    #[serde(default, serialize_with = "shorthorn_types::optional::number::serialize")]
    #[schemars(with = "u64")]
    pub away_since_ms: Option<u64>,
    /// True if the replica itself has ended a rebuild since it left.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rebuild_failed: bool,
}

impl<'de> Deserialize<'de> for MemberRecord {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<MemberRecord, D::Error> {
        /// The stored form.
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Stored {
            mode: MemberMode,
            #[serde(default)]
            message: String,
            /// None: release 0.1.0 has written the record.
            awaited: Option<bool>,
            away_since_ms: Option<u64>,
            /// The field as release 0.1.0 has written it; it stays beside the new one.
            #[serde(rename = "away_since_ms")]
            of_first_release: Option<u64>,
            #[serde(default)]
            rebuild_failed: bool,
        }
        let Stored { mode, message, awaited, away_since_ms, of_first_release, rebuild_failed } =
            Stored::deserialize(deserializer)?;
        // A controller of release 0.1.0 keeps the field, and removes the message when the wait ends.
        let awaited = mode.is_awaited(awaited, &message) && !message.is_empty();
        let away_since_ms = away_since_ms.or(of_first_release).filter(|since_ms| *since_ms > 0);
        Ok(MemberRecord { mode, message, awaited, away_since_ms, rebuild_failed })
    }
}

impl From<&MemberStatus> for MemberRecord {
    fn from(member: &MemberStatus) -> MemberRecord {
        let awaited = member.is_awaited();
        let MemberStatus { mode, message, away_since_ms, rebuild_failed, .. } = member.clone();
        MemberRecord { mode, message, awaited, away_since_ms, rebuild_failed }
    }
}

impl MemberRecord {
    /// Returns a replica in that mode without further data.
    #[must_use]
    pub const fn of(mode: MemberMode) -> MemberRecord {
        MemberRecord {
            mode,
            message: String::new(),
            awaited: false,
            away_since_ms: None,
            rebuild_failed: false,
        }
    }

    /// Returns a member for which requests wait, for the reason in `message`.
    #[must_use]
    pub const fn awaited(message: String) -> MemberRecord {
        MemberRecord {
            mode: MemberMode::Member,
            message,
            awaited: true,
            away_since_ms: None,
            rebuild_failed: false,
        }
    }

    /// Returns the status of the member: the fields of this record, and the others from `seen`.
    #[must_use]
    pub fn with_rest_of(&self, seen: MemberStatus) -> MemberStatus {
        let MemberRecord { mode, message, awaited, away_since_ms, rebuild_failed } = self.clone();
        let copy = seen.copy.filter(|_| mode == MemberMode::Rebuilding);
        MemberStatus { mode, message, awaited: Some(awaited), away_since_ms, rebuild_failed, copy, ..seen }
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::status::CopyStatus;

    use super::*;

    #[test]
    fn numbers_of_attachments_are_stored_as_zero_for_none() {
        let text = r#"{"currentState":"stopped","seenAttach":0,"lostAttach":3}"#;
        let status: StoredEngineStatus = serde_json::from_str(text).unwrap();
        assert_eq!((status.seen_attach, status.lost_attach, status.served_attach), (None, Some(3), None));
        let written = serde_json::to_value(&status).unwrap();
        let numbers = ["seenAttach", "lostAttach", "servedAttach"].map(|key| written[key].as_u64());
        assert_eq!(numbers, [Some(0), Some(3), Some(0)]);
        let text =
            r#"{"volumeName":"v","volumeSize":"1","desireState":"stopped","attach":0,"frontend":"auto"}"#;
        let spec: EngineSpec = serde_json::from_str(text).unwrap();
        assert_eq!(spec.attach, None);
        assert_eq!(serde_json::to_value(&spec).unwrap()["attach"], 0);
        let spec = EngineSpec { attach: Some(7), ..spec };
        assert_eq!(serde_json::to_value(&spec).unwrap()["attach"], 7);
        assert!(serde_json::from_str::<EngineSpec>(&text.replace(r#""attach":0,"#, "")).is_err(), "required");
    }

    #[test]
    fn a_record_decides_and_the_engine_adds_the_rest() {
        let id = ReplicaId::from_random(1);
        let copy = Some(CopyStatus { total_bytes: 9, left_bytes: 3, bytes_per_s: 1 });
        let seen = MemberStatus { times_awaited: 4, copy, ..MemberStatus::of(id, MemberMode::Member) };
        let (mode, message) = (MemberMode::Failed, "gone".to_owned());
        let away_since_ms = Some(5);
        let record = MemberRecord { mode, message, awaited: false, away_since_ms, rebuild_failed: true };
        let whole = record.with_rest_of(seen.clone());
        assert_eq!(MemberRecord::from(&whole), record);
        assert_eq!((whole.times_awaited, whole.copy), (4, None), "it is not being rebuilt");
        assert_eq!(MemberRecord::of(MemberMode::Rebuilding).with_rest_of(seen).copy, copy);
    }
}
