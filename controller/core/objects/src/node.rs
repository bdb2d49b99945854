use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Conditions, Frontend, Metadata};
use crate::{Label, Labels, Timestamp, schema};

/// The number of steps in which the free space of a disk is stored. Each step is a write of the node, and
/// wakes reconcilers of volumes.
const FREE_STEPS: u64 = 100;
/// The share of a new disk that is left to other users, in percent.
pub const RESERVED_PERCENT: u64 = 10;

/// A machine with an agent, and its disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Name, version and dates.
    pub metadata: Metadata,
    /// The desired state, set by the administrator.
    pub spec: NodeSpec,
    /// The status from the agent.
    #[serde(default)]
    pub status: NodeStatus,
}

/// The desired state of a node, set by the administrator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeSpec {
    /// URL of the node's agent: http://HOST:PORT, https://HOST:PORT or unix:///PATH. Empty while the agent
    /// has no address.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(regex(pattern = "^(|https?://[^ ]+|unix:///[^ ]+)$"))]
    pub address: String,
    /// True if new replicas may be placed here.
    #[serde(default = "yes")]
    pub allow_scheduling: bool,
    /// True to evict everything: all replicas are replaced elsewhere, and then removed.
    #[serde(default)]
    pub eviction_requested: bool,
    /// The tags that volumes can select.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    #[schemars(with = "Vec<schema::Label>")]
    pub tags: Labels,
    /// The zone, whose nodes may fail together; none: that of the agent, else that in Kubernetes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::Label>")]
    pub zone: Option<Label>,
    /// The disks by path.
    #[serde(default)]
    pub disks: BTreeMap<String, DiskSpec>,
    /// The data that the controller has found in Kubernetes; no other client writes it. The address follows
    /// it as long as both are the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub discovered: Option<Discovered>,
}

/// The data of a node in Kubernetes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Discovered {
    /// The address of the agent: the InternalIP, and the port of all agents.
    #[serde(default)]
    pub address: String,
    /// The zone according to a label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::Label>")]
    pub zone: Option<Label>,
    /// The time since which it is cordoned in Kubernetes, as this controller has seen it.
    #[serde(default, rename = "cordonedSince", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::Time>")]
    pub cordoned_since: Option<Timestamp>,
}

fn yes() -> bool {
    true
}

/// The desired state of a disk, set by the administrator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DiskSpec {
    /// True if new replicas may be placed here.
    #[serde(default = "yes")]
    pub allow_scheduling: bool,
    /// True to evict everything: all replicas are replaced elsewhere, and then removed.
    #[serde(default)]
    pub eviction_requested: bool,
    /// True if the disk is given up: its replicas are given up, like those of a lost node.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
    /// Bytes that replicas leave to others.
    #[serde(with = "super::quoted")]
    #[schemars(with = "schema::Quoted")]
    pub storage_reserved: u64,
    /// The tags that volumes can select.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    #[schemars(with = "Vec<schema::Label>")]
    pub tags: Labels,
}

/// The status of a node according to its agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// The conditions of the object, with their reasons.
    #[serde(default)]
    pub conditions: Conditions,
    /// Version of the agent.
    #[serde(default)]
    pub version: String,
    /// The address by which other nodes reach its replicas; empty if they cannot.
    #[serde(default, with = "shorthorn_types::optional::text")]
    #[schemars(with = "String")]
    pub data_address: Option<String>,
    /// The maximum number of volumes that CSI attaches to the node; 0: no limit.
    #[serde(default, with = "shorthorn_types::optional::count")]
    #[schemars(with = "u32")]
    pub max_volumes: Option<u32>,
    /// The zone in the configuration of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::Label>")]
    pub zone: Option<Label>,
    /// The frontends that it knows.
    #[serde(default)]
    pub frontends: Vec<FrontendStatus>,
    /// The free space of all disks, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub free_space: String,
    /// The disks by path.
    #[serde(default)]
    pub disk_status: BTreeMap<String, DiskStatus>,
}

/// The support of one frontend on a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FrontendStatus {
    /// ublk, nbd, iscsi, socket
    #[serde(deserialize_with = "super::unknown_words::word")]
    #[schemars(with = "String")]
    pub name: Frontend,
    /// True if the frontend works there.
    pub usable: bool,
    /// The reason why it does not work.
    #[serde(default)]
    pub reason: String,
}

/// The status of a disk according to its agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DiskStatus {
    /// The identity that was written on it.
    #[serde(rename = "diskUUID")]
    pub disk_uuid: String,
    /// ext4, xfs, …
    pub filesystem_type: String,
    /// The size in bytes.
    #[serde(with = "super::quoted")]
    #[schemars(with = "schema::Quoted")]
    pub storage_maximum: u64,
    /// The free bytes, in steps of a hundredth of the size.
    #[serde(with = "super::quoted", skip_serializing_if = "is_zero")]
    #[schemars(with = "schema::Quoted")]
    pub storage_available: u64,
    /// The problem and the remedy; empty if the disk is usable.
    #[serde(with = "shorthorn_types::optional::text")]
    #[schemars(with = "String")]
    pub problem: Option<String>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Node {
    /// Returns a node with a name and no further data.
    #[must_use]
    pub fn new(name: impl Into<String>, now: Timestamp) -> Node {
        Node {
            metadata: Metadata::new(name, now),
            spec: NodeSpec { allow_scheduling: true, ..NodeSpec::default() },
            status: NodeStatus::default(),
        }
    }

    /// Returns true if its machine is cordoned in Kubernetes.
    #[must_use]
    pub fn is_machine_cordoned(&self) -> bool {
        self.spec.discovered.as_ref().is_some_and(|found| found.cordoned_since.is_some())
    }

    /// Returns the zone: that of the administrator, else that of the agent, else that in Kubernetes.
    #[must_use]
    pub fn zone(&self) -> Option<&Label> {
        let discovered = || self.spec.discovered.as_ref().and_then(|discovered| discovered.zone.as_ref());
        self.spec.zone.as_ref().or(self.status.zone.as_ref()).or_else(discovered)
    }
}

impl DiskSpec {
    /// Returns the settings of a new disk of that size.
    #[must_use]
    pub fn of_new(total_bytes: u64) -> DiskSpec {
        let storage_reserved = total_bytes / 100 * RESERVED_PERCENT;
        DiskSpec {
            allow_scheduling: true,
            eviction_requested: false,
            lost: false,
            storage_reserved,
            tags: Labels::new(),
        }
    }
}

/// The mount of a pod whose device is gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeadMount {
    /// The volume, as its driver calls it.
    pub volume: String,
    /// The uid of the pod in Kubernetes, from the path of the mount.
    pub pod_uid: String,
}

/// The identity of an agent according to itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentInfo {
    /// The name of its node.
    pub name: String,
    /// The release of the agent.
    pub version: String,
    /// The address by which other nodes reach its replicas; none if they cannot.
    pub data_address: Option<String>,
    /// The zone, whose nodes may fail together, if one is configured.
    pub zone: Option<String>,
    /// The frontends that it knows.
    pub frontends: Vec<FrontendStatus>,
    /// The most volumes that CSI lets be attached to its node; none: any number.
    pub max_volumes: Option<u32>,
    /// The level of the features that not all agents have.
    pub feature_level: u32,
    /// Pods on its node that use a device that is gone.
    pub dead_mounts: Vec<DeadMount>,
    /// Problems of the host, for people.
    pub warnings: Vec<String>,
}

impl NodeStatus {
    /// Takes the part of an agent's answer over that is stored.
    pub fn take_over(&mut self, info: &AgentInfo) {
        self.version.clone_from(&info.version);
        self.data_address.clone_from(&info.data_address);
        self.max_volumes = info.max_volumes;
        self.zone = info.zone.as_deref().and_then(|zone| Label::new(zone).ok());
        self.frontends.clone_from(&info.frontends);
    }
}

/// The state of a disk according to its agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedDisk {
    /// The identity that was written on it; none if the agent has found none.
    pub uuid: Option<String>,
    /// ext4, xfs, …
    pub filesystem: String,
    /// The size in bytes.
    pub total_bytes: u64,
    /// The free bytes.
    pub available_bytes: u64,
    /// The problem and the remedy; none if the disk is usable.
    pub problem: Option<String>,
}

impl ObservedDisk {
    /// Returns true if the agent can use the disk.
    #[must_use]
    pub const fn is_usable(&self) -> bool {
        self.problem.is_none()
    }
}

impl DiskStatus {
    /// Returns the part of the agent's answer that is stored; `before` is the part stored now.
    #[must_use]
    pub fn of(disk: &ObservedDisk, before: Option<&DiskStatus>) -> DiskStatus {
        let stored = before.filter(|before| before.storage_maximum == disk.total_bytes);
        let stored = stored.map(|before| before.storage_available).filter(|stored| {
            stored.abs_diff(disk.available_bytes) < disk.total_bytes / FREE_STEPS && *stored > 0
        });
        DiskStatus {
            disk_uuid: disk.uuid.clone().unwrap_or_default(),
            filesystem_type: disk.filesystem.clone(),
            storage_maximum: disk.total_bytes,
            storage_available: stored.unwrap_or(disk.available_bytes),
            problem: disk.problem.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stored_part_of_an_answer_replaces_the_former_one() {
        let mut status = NodeStatus { max_volumes: Some(7), ..NodeStatus::default() };
        let zone = Some("not a label/".to_owned());
        let info = AgentInfo { version: "2".to_owned(), zone, ..AgentInfo::default() };
        status.take_over(&info);
        assert_eq!((status.version.as_str(), status.max_volumes, &status.zone), ("2", None, &None));
        status.take_over(&AgentInfo { zone: Some("z1".to_owned()), ..info });
        assert_eq!(status.zone.map(|zone| zone.to_string()).as_deref(), Some("z1"));
    }
}
