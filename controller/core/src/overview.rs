//! The whole cluster on one screen: problems, activities, and versions.

use std::collections::BTreeMap;

use crate::objects::{ConditionType, Node, Robustness, Volume, VolumeState};
use crate::observed::{Agents, Detail};
use crate::{ClusterState, NodeName, drain};

/// The maximum number of listed issues of each kind; more are counted.
pub const ISSUES_MAX: usize = 50;
/// The maximum number of listed names for each version.
pub const NAMES_MAX: usize = 5;

/// The whole cluster at a glance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overview {
    /// The numbers of volumes by their state.
    pub volumes: VolumeCounts,
    /// Count of Node objects, reachable or not.
    pub nodes: u32,
    /// The number of nodes that answer.
    pub ready_nodes: u32,
    /// The number of nodes that get no new replicas.
    pub closed_nodes: u32,
    /// The space of all disks in reach.
    pub space: DiskBytes,
    /// The problems, such as `DiskProblem`.
    pub wrong: Issues,
    /// The activities and the waits.
    pub waiting: Issues,
    /// The running versions.
    pub versions: Vec<Version>,
}

/// Numbers of volumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeCounts {
    /// Count of Volume objects, attached or not.
    pub all: u32,
    /// The number of volumes with a device.
    pub attached: u32,
    /// Attached ones whose replicas all have everything.
    pub healthy: u32,
    /// Attached ones that serve with fewer.
    pub degraded: u32,
    /// The number of volumes that cannot serve.
    pub faulted: u32,
}

/// The capacity of the disks of a cluster, and its free part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskBytes {
    /// The sum of the sizes of the disks.
    pub total_bytes: u64,
    /// The sum of the free space of the disks.
    pub available_bytes: u64,
    /// The sum of the volume sizes of all replicas.
    pub scheduled_bytes: u64,
}

/// A list of issues, the first of them in words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Issues {
    /// At most [`ISSUES_MAX`].
    pub listed: Vec<Issue>,
    /// The number of further entries.
    pub more: u32,
}

/// An issue of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issue {
    /// Kind and name, like `volume v1`.
    pub about: String,
    /// The word for programs.
    pub reason: String,
    /// The sentence for people.
    pub message: String,
}

/// A version of a program, and the places where it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// controller, agent or engine.
    pub program: &'static str,
    /// Empty: it does not say.
    pub version: String,
    /// The number of programs of the version.
    pub count: u32,
    /// Nodes of agents, volumes of engines; at most [`NAMES_MAX`].
    pub names: Vec<String>,
    /// True if the controller is of another version.
    pub differs: bool,
}

impl Overview {
    /// Returns the current state, as a controller of that version sees it.
    #[must_use]
    pub fn of(cluster: &ClusterState, agents: &Agents, version: &str) -> Overview {
        let mut overview = Overview::default();
        cluster.nodes.values().for_each(|node| overview.look_at_node(cluster, agents, node));
        cluster.volumes.values().for_each(|volume| overview.look_at_volume(volume));
        overview.look_at_moves(cluster, agents);
        overview.versions = versions(cluster, agents, version);
        overview
    }

    fn look_at_node(&mut self, cluster: &ClusterState, agents: &Agents, node: &Node) {
        let name = node.metadata.name.as_str();
        let about = || format!("node {name}");
        self.nodes += 1;
        self.closed_nodes += u32::from(!node.spec.allow_scheduling);
        let ready = node.status.conditions.get(ConditionType::Ready);
        self.ready_nodes += u32::from(ready.is_some_and(|ready| ready.status));
        match ready {
            Some(ready) if !ready.status => self.wrong.add(about(), &ready.reason, &ready.message),
            None => self.waiting.add(about(), "NotSeenYet", "the agent was not reached yet"),
            Some(_) => {}
        }
        let agent = NodeName::new(name).ok().and_then(|name| agents.get(&name));
        for (path, disk) in agent.into_iter().flat_map(|agent| &agent.disks) {
            self.space.total_bytes = self.space.total_bytes.saturating_add(disk.total_bytes);
            self.space.available_bytes = self.space.available_bytes.saturating_add(disk.available_bytes);
            if let Some(problem) = &disk.problem {
                self.wrong.add(format!("disk {path} of node {name}"), "DiskProblem", problem);
            }
        }
        let scheduled = cluster.replicas.scheduled_on(name).into_iter().flat_map(BTreeMap::values);
        let scheduled: u128 = scheduled.map(|scheduled| scheduled.bytes).sum();
        let scheduled = u64::try_from(scheduled).unwrap_or(u64::MAX);
        self.space.scheduled_bytes = self.space.scheduled_bytes.saturating_add(scheduled);
    }

    fn look_at_volume(&mut self, volume: &Volume) {
        let status = &volume.status;
        let is_attached = status.state == VolumeState::Attached;
        self.volumes.all += 1;
        self.volumes.attached += u32::from(is_attached);
        self.volumes.healthy += u32::from(is_attached && status.robustness == Robustness::Healthy);
        self.volumes.degraded += u32::from(status.robustness == Robustness::Degraded);
        self.volumes.faulted += u32::from(status.robustness == Robustness::Faulted);
        let about = || format!("volume {}", volume.metadata.name);
        for condition in status.conditions.iter().filter(|condition| !condition.status) {
            let issues = match condition.kind {
                // They report the progress of work that continues by itself.
                ConditionType::Settled | ConditionType::Expanded | ConditionType::EngineCurrent => {
                    &mut self.waiting
                }
                // A detached volume is not served: the condition says nothing about its data.
                ConditionType::Healthy if status.robustness == Robustness::Unknown && !is_attached => {
                    continue;
                }
                _ => &mut self.wrong,
            };
            issues.add(about(), &condition.reason, &condition.message);
        }
    }

    /// Copies that are under way, and replicas that are to leave their places.
    fn look_at_moves(&mut self, cluster: &ClusterState, agents: &Agents) {
        for (key, detail) in agents.by_node().values().flat_map(|agent| &agent.instances) {
            let Detail::Engine(engine) = &detail.detail else { continue };
            let copies = engine.reported.iter().flat_map(|status| &status.members);
            let copies = copies.filter_map(|member| Some((member.replica, member.copy?)));
            for (replica, copy) in copies {
                let left = copy.left_s().map(|seconds| format!(", about {seconds} s left"));
                let message = format!(
                    "replica {}-{replica} is being rebuilt: {} %{}",
                    key.name,
                    copy.percent(),
                    left.unwrap_or_default()
                );
                self.waiting.add(format!("volume {}", key.name), "Rebuilding", &message);
            }
        }
        for replica in cluster.replicas.values().filter(|replica| drain::is_evicted(cluster, replica)) {
            let left = drain::of_replica(cluster, agents, replica);
            let about = format!("replica {}", replica.metadata.name);
            let (issues, reason) =
                if left.held { (&mut self.wrong, "EvictionHeld") } else { (&mut self.waiting, "Evicting") };
            issues.add(about, reason, &left.message);
        }
    }
}

impl Issues {
    fn add(&mut self, about: String, reason: &str, message: &str) {
        if self.listed.len() >= ISSUES_MAX {
            self.more += 1;
            return;
        }
        self.listed.push(Issue { about, reason: reason.to_owned(), message: message.to_owned() });
    }
}

fn versions(cluster: &ClusterState, agents: &Agents, own: &str) -> Vec<Version> {
    let mut found: BTreeMap<(&'static str, String), Version> = BTreeMap::new();
    let mut count = |program: &'static str, version: &str, name: String| {
        let differs = !version.is_empty() && version != own;
        let of_it = found.entry((program, version.to_owned())).or_insert_with(|| Version {
            program,
            version: version.to_owned(),
            count: 0,
            names: Vec::new(),
            differs,
        });
        of_it.count += 1;
        if of_it.names.len() < NAMES_MAX {
            of_it.names.push(name);
        }
    };
    for node in cluster.nodes.values().filter(|node| !node.status.version.is_empty()) {
        count("agent", &node.status.version, node.metadata.name.clone());
    }
    for (key, instance) in agents.by_node().values().flat_map(|agent| &agent.instances) {
        if let Detail::Engine(engine) = &instance.detail {
            count("engine", engine.version().unwrap_or_default(), key.name.clone());
        }
    }
    let controller = Version {
        program: "controller",
        version: own.to_owned(),
        count: 1,
        names: Vec::new(),
        differs: false,
    };
    std::iter::once(controller).chain(found.into_values()).collect()
}

#[cfg(test)]
mod tests;
