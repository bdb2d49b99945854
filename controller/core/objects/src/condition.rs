use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error;
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::{Timestamp, schema};

/// The reason of [`ConditionType::Expanded`] if the device of a volume in use cannot change its size.
pub const NEXT_ATTACH: &str = "NextAttach";

/// The reason of [`ConditionType::Settled`] while the volume is detached and its replicas have not stopped.
pub const REPLICAS_STOPPING: &str = "ReplicasStopping";

/// The statement of a condition. True is always the good side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum ConditionType {
    /// The spec of the volume is valid.
    Accepted,
    /// Every replica of the volume has a disk.
    Scheduled,
    /// Every replica of the volume has every acknowledged write.
    Healthy,
    /// The volume is attached to the wanted node, or detached as wanted. Otherwise the message has the cause.
    Settled,
    /// The engine of the volume does not wait for the arbiter.
    Granted,
    /// The volume has the size that its owner wants.
    Expanded,
    /// The engine of the volume runs the program that is installed on its node.
    EngineCurrent,
    /// The agent of the node answers.
    Ready,
}

impl ConditionType {
    /// Returns the word that is stored and shown.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            ConditionType::Accepted => "Accepted",
            ConditionType::Scheduled => "Scheduled",
            ConditionType::Healthy => "Healthy",
            ConditionType::Settled => "Settled",
            ConditionType::Granted => "Granted",
            ConditionType::Expanded => "Expanded",
            ConditionType::EngineCurrent => "EngineCurrent",
            ConditionType::Ready => "Ready",
        }
    }

    /// Returns the reason of a condition that holds.
    const fn reason_of_well(self) -> &'static str {
        match self {
            ConditionType::Accepted => "SpecAccepted",
            ConditionType::Scheduled => "ReplicasPlaced",
            ConditionType::Healthy => "ReplicasComplete",
            ConditionType::Settled => "AsWanted",
            ConditionType::Granted => "NotWaiting",
            ConditionType::Expanded => "SizeReached",
            ConditionType::EngineCurrent => "InstalledProgram",
            ConditionType::Ready => "AgentAnswers",
        }
    }
}

/// A statement about an object that is true or false, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// The statement, whose true side is the good one.
    #[serde(rename = "type")]
    pub kind: ConditionType,
    /// True if the statement holds.
    #[serde(with = "super::condition_status")]
    #[schemars(with = "schema::Truth")]
    pub status: bool,
    /// The generation of the object that this was found out about; absent: the store counts none.
    #[serde(default, with = "shorthorn_types::optional::number", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u64")]
    pub observed_generation: Option<u64>,
    /// The reason: a word for programs, like `ReplicaFailed`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// A sentence for people with the obstacle and the remedy.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// The time at which `status` last changed.
    #[schemars(with = "schema::Time")]
    pub last_transition_time: Timestamp,
    /// Fields of a later version, which are kept unchanged.
    #[serde(flatten, skip_deserializing)]
    #[schemars(skip)]
    later: Map<String, Value>,
}

impl Condition {
    fn observe(&mut self, generation: Option<u64>) {
        self.observed_generation = generation.or(self.observed_generation);
    }
}

/// The fields of a condition that this version knows.
const FIELDS: [&str; 6] = ["type", "status", "observedGeneration", "reason", "message", "lastTransitionTime"];

/// The finding of a reconciler for a condition: no problem, or the reason and the sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// The condition holds.
    Well,
    /// The condition does not hold: the word for programs, the sentence for people.
    Wrong(&'static str, String),
}

impl Finding {
    /// Returns a finding that something is wrong.
    #[must_use]
    pub fn wrong(reason: &'static str, message: impl Into<String>) -> Finding {
        Finding::Wrong(reason, message.into())
    }
}

/// The conditions of an object, at most one of each type.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    known: Vec<Condition>,
    /// Conditions of types that a later version knows, which are kept unchanged.
    later: Vec<serde_json::Value>,
}

impl Serialize for Conditions {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut all = serializer.serialize_seq(Some(self.known.len() + self.later.len()))?;
        for condition in &self.known {
            all.serialize_element(condition)?;
        }
        for condition in &self.later {
            all.serialize_element(condition)?;
        }
        all.end()
    }
}

impl<'de> Deserialize<'de> for Conditions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Conditions, D::Error> {
        let mut conditions = Conditions::default();
        for condition in Vec::<serde_json::Value>::deserialize(deserializer)? {
            if ConditionType::deserialize(&condition["type"]).is_ok() {
                let mut known = Condition::deserialize(&condition).map_err(D::Error::custom)?;
                if let Value::Object(mut fields) = condition {
                    fields.retain(|name, _| !FIELDS.contains(&name.as_str()));
                    known.later = fields;
                }
                conditions.known.push(known);
            } else {
                conditions.later.push(condition);
            }
        }
        Ok(conditions)
    }
}

impl JsonSchema for Conditions {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Conditions".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = generator.subschema_for::<Vec<Condition>>();
        schema.insert("x-kubernetes-list-type".to_owned(), "map".into());
        schema.insert("x-kubernetes-list-map-keys".to_owned(), serde_json::json!(["type"]));
        schema.insert(
            "description".to_owned(),
            "The conditions of an object, at most one of each type.".into(),
        );
        schema
    }
}

impl Conditions {
    /// Records `finding`; the transition time changes only with the status.
    pub fn set(&mut self, kind: ConditionType, finding: Finding, now: Timestamp) {
        let (status, reason, message) = match finding {
            Finding::Well => (true, kind.reason_of_well().to_owned(), String::new()),
            Finding::Wrong(reason, message) => (false, reason.to_owned(), message),
        };
        match self.known.iter_mut().find(|condition| condition.kind == kind) {
            Some(condition) => {
                if condition.status != status {
                    condition.last_transition_time = now;
                }
                (condition.status, condition.reason, condition.message) = (status, reason, message);
            }
            None => self.known.push(Condition {
                kind,
                status,
                observed_generation: None,
                reason,
                message,
                last_transition_time: now,
                later: Map::new(),
            }),
        }
    }

    /// Records that all of them are about the object as its owner wants it in that generation; none: the
    /// store counts none, and nothing changes.
    pub fn observe(&mut self, generation: Option<u64>) {
        self.known.iter_mut().for_each(|condition| condition.observe(generation));
    }

    /// Does the same for one of them.
    pub fn observe_one(&mut self, kind: ConditionType, generation: Option<u64>) {
        let condition = self.known.iter_mut().find(|condition| condition.kind == kind);
        condition.into_iter().for_each(|condition| condition.observe(generation));
    }

    /// Returns the condition of that type, if it was ever set.
    #[must_use]
    pub fn get(&self, kind: ConditionType) -> Option<&Condition> {
        self.known.iter().find(|condition| condition.kind == kind)
    }

    /// Returns true if the condition was set and holds.
    #[must_use]
    pub fn is_true(&self, kind: ConditionType) -> bool {
        self.get(kind).is_some_and(|condition| condition.status)
    }

    /// Returns all of them, in the order in which they were first set.
    pub fn iter(&self) -> impl Iterator<Item = &Condition> {
        self.known.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_have_a_reason_and_an_observed_generation() {
        let mut conditions = Conditions::default();
        conditions.set(ConditionType::Healthy, Finding::Well, Timestamp::UNIX_EPOCH);
        conditions.observe(None);
        let written = serde_json::to_value(&conditions).unwrap();
        assert_eq!(written[0]["reason"], "ReplicasComplete");
        assert!(written[0].get("observedGeneration").is_none(), "this store counts none: {written}");
        conditions.observe(Some(7));
        conditions.observe(None);
        let mut written = serde_json::to_value(&conditions).unwrap();
        assert_eq!(written[0]["observedGeneration"], 7);
        written[0]["observedGeneration"] = 0.into();
        let read: Conditions = serde_json::from_value(written).unwrap();
        assert_eq!(read.get(ConditionType::Healthy).unwrap().observed_generation, None);
    }

    #[test]
    fn fields_of_a_later_version_stay_in_a_condition() {
        let stored = serde_json::json!([{
            "type": "Healthy", "status": "True", "observedGeneration": 3, "reason": "R", "message": "m",
            "lastTransitionTime": "2026-01-02T03:04:05Z", "height": { "cm": 3 } }]);
        let mut conditions: Conditions = serde_json::from_value(stored.clone()).unwrap();
        assert_eq!(
            conditions.get(ConditionType::Healthy).unwrap().later.len(),
            1,
            "no known field is there twice"
        );
        assert_eq!(serde_json::to_value(&conditions).unwrap(), stored);
        conditions.set(ConditionType::Healthy, Finding::wrong("A", "b"), Timestamp::UNIX_EPOCH);
        let written = serde_json::to_value(conditions).unwrap();
        assert_eq!((&written[0]["status"], &written[0]["height"]["cm"]), (&"False".into(), &3.into()));
    }

    #[test]
    fn a_condition_of_a_later_version_stays() {
        let later = serde_json::json!({ "type": "Levitating", "status": "True", "height": 3 });
        let healthy = serde_json::json!(
            { "type": "Healthy", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z" });
        let mut conditions: Conditions = serde_json::from_value(serde_json::json!([later, healthy])).unwrap();
        assert!(conditions.is_true(ConditionType::Healthy) && conditions.iter().count() == 1);
        conditions.set(ConditionType::Healthy, Finding::wrong("A", "b"), Timestamp::UNIX_EPOCH);
        let written = serde_json::to_value(conditions).unwrap();
        assert_eq!((&written[0]["status"], &written[1]), (&"False".into(), &later));
        assert!(serde_json::from_value::<Conditions>(serde_json::json!([{ "type": "Healthy" }])).is_err());
    }
}
