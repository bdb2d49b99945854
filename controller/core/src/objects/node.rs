use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Conditions, Metadata};
use crate::observed::DiskView;
use crate::scheduler::RESERVED_PERCENT;
use crate::{Label, Labels, Timestamp, schema};

/// In how many steps the free space of a disk is stored: each step is a write of the node, which volumes look at.
const FREE_STEPS: u64 = 100;

/// A machine with an agent, and its disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Name, version and dates.
    pub metadata: Metadata,
    /// What its administrator wants.
    pub spec: NodeSpec,
    /// What its agent says.
    #[serde(default)]
    pub status: NodeStatus,
}

/// What the administrator wants of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeSpec {
    /// Where its agent answers: http://HOST:PORT, https://HOST:PORT or unix:///PATH; empty: nowhere yet.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(regex(pattern = "^(|https?://[^ ]+|unix:///[^ ]+)$"))]
    pub address: String,
    /// Whether new replicas may go there.
    #[serde(default = "yes")]
    pub allow_scheduling: bool,
    /// Whether everything is to leave it: its replicas are replaced elsewhere, then they go.
    #[serde(default)]
    pub eviction_requested: bool,
    /// What volumes can ask for.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub tags: Labels,
    /// What fails together with it; none: what its agent says, else what Kubernetes says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<Label>,
    /// Its disks by path.
    #[serde(default)]
    pub disks: BTreeMap<String, DiskSpec>,
    /// What the controller has found out from Kubernetes; nobody else writes it. The address follows it as long as
    /// both are the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub discovered: Option<Discovered>,
}

/// What Kubernetes says of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Discovered {
    /// Where its agent answers: the InternalIP, and the port of all agents.
    #[serde(default)]
    pub address: String,
    /// What fails together with it, as a label says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<Label>,
    /// Since when it is cordoned in Kubernetes, as this controller has seen it.
    #[serde(default, rename = "cordonedSince", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::Time>")]
    pub cordoned_since: Option<Timestamp>,
}

fn yes() -> bool {
    true
}

/// What the administrator wants of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DiskSpec {
    /// Whether new replicas may go there.
    #[serde(default = "yes")]
    pub allow_scheduling: bool,
    /// Whether everything is to leave it: its replicas are replaced elsewhere, then they go.
    #[serde(default)]
    pub eviction_requested: bool,
    /// Whether somebody has said that it does not come back: its replicas are given up, as those of a node
    /// that is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
    /// Bytes that replicas leave to others.
    #[serde(with = "super::quoted")]
    #[schemars(with = "schema::Quoted")]
    pub storage_reserved: u64,
    /// What volumes can ask for.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub tags: Labels,
}

/// What the agent of a node says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// What holds and what does not, and why.
    #[serde(default)]
    pub conditions: Conditions,
    /// Version of the agent.
    #[serde(default)]
    pub version: String,
    /// Where other nodes reach its replicas; empty: they cannot.
    #[serde(default)]
    pub data_address: String,
    /// The most volumes that CSI lets be attached to it; 0: any number.
    #[serde(default)]
    pub max_volumes: u32,
    /// What fails together with it, as its agent is configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<Label>,
    /// The frontends that it knows.
    #[serde(default)]
    pub frontends: Vec<FrontendStatus>,
    /// What is free of all its disks, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub free_space: String,
    /// Its disks by path.
    #[serde(default)]
    pub disk_status: BTreeMap<String, DiskStatus>,
}

/// Whether a node can make devices in one way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FrontendStatus {
    /// ublk, nbd, socket
    pub name: String,
    /// Whether it works there.
    pub usable: bool,
    /// Why not.
    #[serde(default)]
    pub reason: String,
}

/// What the agent says of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DiskStatus {
    /// The identity that was written on it.
    #[serde(rename = "diskUUID")]
    pub disk_uuid: String,
    /// ext4, xfs, …
    pub filesystem_type: String,
    /// Its size in bytes.
    #[serde(with = "super::quoted")]
    #[schemars(with = "schema::Quoted")]
    pub storage_maximum: u64,
    /// What is free on it, in bytes; follows the disk in steps of a hundredth of its size.
    #[serde(with = "super::quoted", skip_serializing_if = "is_zero")]
    #[schemars(with = "schema::Quoted")]
    pub storage_available: u64,
    /// What is wrong and what to do; empty: usable.
    #[serde(default)]
    pub problem: String,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Node {
    /// A node of which nothing is known yet but its name.
    #[must_use]
    pub fn new(name: impl Into<String>, now: Timestamp) -> Node {
        Node {
            metadata: Metadata::new(name, now),
            spec: NodeSpec { allow_scheduling: true, ..NodeSpec::default() },
            status: NodeStatus::default(),
        }
    }

    /// Whether its machine is cordoned in Kubernetes.
    #[must_use]
    pub fn is_machine_cordoned(&self) -> bool {
        self.spec.discovered.as_ref().is_some_and(|found| found.cordoned_since.is_some())
    }

    /// What fails together with it: what its administrator says, else what its agent is configured with, else what
    /// Kubernetes says.
    #[must_use]
    pub fn zone(&self) -> Option<&Label> {
        let discovered = || self.spec.discovered.as_ref().and_then(|discovered| discovered.zone.as_ref());
        self.spec.zone.as_ref().or(self.status.zone.as_ref()).or_else(discovered)
    }
}

impl DiskSpec {
    /// What a disk of that size gets when it is first seen.
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

impl DiskStatus {
    /// The part of what the agent says that is stored; `before` is what is stored now.
    #[must_use]
    pub fn of(disk: &DiskView, before: Option<&DiskStatus>) -> DiskStatus {
        let stored = before.filter(|before| before.storage_maximum == disk.total_bytes);
        let stored = stored.map(|before| before.storage_available).filter(|stored| {
            stored.abs_diff(disk.available_bytes) < disk.total_bytes / FREE_STEPS && *stored > 0
        });
        DiskStatus {
            disk_uuid: disk.uuid.clone(),
            filesystem_type: disk.filesystem.clone(),
            storage_maximum: disk.total_bytes,
            storage_available: stored.unwrap_or(disk.available_bytes),
            problem: disk.problem.clone(),
        }
    }
}
