//! Observed state of the agents, kept in memory and updated by the watch stream of each agent.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::{Deref, DerefMut};

pub use shorthorn_types::status::{
    CopyStatus, EnginePhase, EngineStatus, GrantWanted, MemberStatus, ObservedReplica, ReadFindings,
    ScrubStatus,
};
use shorthorn_types::{ReplicaId, VolumeName};

use crate::objects::ReplicaSpec;
pub use crate::objects::{AgentInfo, DeadMount, ObservedDisk};
use crate::{NodeName, Timestamp};

/// The observed states of all agents.
#[derive(Clone, Debug, Default)]
pub struct Agents {
    by_node: BTreeMap<NodeName, ObservedAgent>,
    /// The nodes that show an engine of a volume. Each run of an engine's reconciler asks for them.
    engines: BTreeMap<VolumeName, BTreeSet<NodeName>>,
}

impl Agents {
    /// Returns the observed state of each agent, one for every configured node.
    #[must_use]
    pub fn by_node(&self) -> &BTreeMap<NodeName, ObservedAgent> {
        &self.by_node
    }

    /// Returns the observed state of the agent of `node`; none if no such agent is configured.
    #[must_use]
    pub fn get(&self, node: &NodeName) -> Option<&ObservedAgent> {
        self.by_node.get(node)
    }

    /// Returns the nodes whose agents show an engine of `volume`, with their observed states.
    pub fn with_engine(&self, volume: &VolumeName) -> impl Iterator<Item = (&NodeName, &ObservedAgent)> {
        let nodes = self.engines.get(volume).into_iter().flatten();
        nodes.filter_map(|node| Some((node, self.by_node.get(node)?)))
    }

    /// Sets the observed state of the agent of `node`.
    pub fn insert(&mut self, node: NodeName, agent: ObservedAgent) {
        self.remove(&node);
        for volume in engines_of(&agent) {
            self.engines.entry(volume).or_default().insert(node.clone());
        }
        self.by_node.insert(node, agent);
    }

    /// Removes the agent of `node`, which is not configured any more.
    pub fn remove(&mut self, node: &NodeName) {
        // Without instances first, so that the index follows.
        if let Some(mut agent) = self.get_mut(node) {
            agent.instances.clear();
        }
        self.by_node.remove(node);
    }

    /// Returns the observed state of the agent of `node` for changes; none if no such agent is configured.
    pub fn get_mut(&mut self, node: &NodeName) -> Option<AgentMut<'_>> {
        let agent = self.by_node.get_mut(node)?;
        Some(AgentMut { before: engines_of(agent), agent, engines: &mut self.engines, node: node.clone() })
    }

    /// Returns the observed state of the agent of `node`, for changes that the index does not follow.
    #[cfg(test)]
    pub(crate) fn not_indexed(&mut self, node: &NodeName) -> Option<&mut ObservedAgent> {
        self.by_node.get_mut(node)
    }

    /// Changes the observed state of every agent.
    pub fn change_all(&mut self, mut change: impl FnMut(&mut ObservedAgent)) {
        let nodes: Vec<NodeName> = self.by_node.keys().cloned().collect();
        for node in nodes {
            if let Some(mut agent) = self.get_mut(&node) {
                change(&mut agent);
            }
        }
    }
}

/// The observed state of an agent during a change. The index of engines follows when this is dropped.
#[derive(Debug)]
pub struct AgentMut<'a> {
    agent: &'a mut ObservedAgent,
    engines: &'a mut BTreeMap<VolumeName, BTreeSet<NodeName>>,
    node: NodeName,
    before: BTreeSet<VolumeName>,
}

impl Deref for AgentMut<'_> {
    type Target = ObservedAgent;
    fn deref(&self) -> &ObservedAgent {
        self.agent
    }
}

impl DerefMut for AgentMut<'_> {
    fn deref_mut(&mut self) -> &mut ObservedAgent {
        self.agent
    }
}

impl Drop for AgentMut<'_> {
    fn drop(&mut self) {
        let after = engines_of(self.agent);
        for volume in self.before.difference(&after) {
            if let Some(nodes) = self.engines.get_mut(volume) {
                nodes.remove(&self.node);
                if nodes.is_empty() {
                    self.engines.remove(volume);
                }
            }
        }
        for volume in after.difference(&self.before) {
            self.engines.entry(volume.clone()).or_default().insert(self.node.clone());
        }
    }
}

impl FromIterator<(NodeName, ObservedAgent)> for Agents {
    fn from_iter<T: IntoIterator<Item = (NodeName, ObservedAgent)>>(observed: T) -> Agents {
        let mut agents = Agents::default();
        observed.into_iter().for_each(|(node, agent)| agents.insert(node, agent));
        agents
    }
}

fn engines_of(agent: &ObservedAgent) -> BTreeSet<VolumeName> {
    let engines = agent.instances.keys().filter(|key| key.kind == InstanceKind::Engine);
    engines.filter_map(|key| VolumeName::new(&key.name).ok()).collect()
}

/// The last answer of one agent.
#[derive(Clone, Debug)]
pub struct ObservedAgent {
    /// The URL at which the controller calls the agent.
    pub address: String,
    /// True if its node's object says so; else the controller's configuration does, and the object follows.
    pub from_object: bool,
    /// The state of the connection, which decides whether the rest is up to date.
    pub link: AgentLink,
    /// The identity of the agent according to itself.
    pub info: Option<AgentInfo>,
    /// The disks that it knows, by path.
    pub disks: BTreeMap<String, ObservedDisk>,
    /// The processes that it reports, by kind and name.
    pub instances: BTreeMap<InstanceKey, Instance>,
    /// The result of the last call for each instance whose last call failed.
    pub failures: BTreeMap<InstanceKey, CallFailure>,
}

/// A call that has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallFailure {
    /// The name of the call in the node API.
    pub call: &'static str,
    /// The error, in words.
    pub message: String,
}

impl ObservedAgent {
    /// Creates the observed state of an agent that has not been reached yet.
    #[must_use]
    pub fn new(address: impl Into<String>, now: Timestamp) -> ObservedAgent {
        ObservedAgent {
            address: address.into(),
            from_object: false,
            link: AgentLink::Down { since: now, reason: "not reached yet".to_owned() },
            info: None,
            disks: BTreeMap::new(),
            instances: BTreeMap::new(),
            failures: BTreeMap::new(),
        }
    }

    /// Returns true if the observed state is up to date.
    #[must_use]
    pub const fn is_synced(&self) -> bool {
        matches!(self.link, AgentLink::Synced)
    }
}

/// The state of the connection to an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentLink {
    /// The stream is open, and the controller has received everything that existed at its start.
    Synced,
    /// The agent is unreachable.
    Down {
        /// The time of the last contact.
        since: Timestamp,
        /// The error of the last attempt.
        reason: String,
    },
}

/// The identity of a process on a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceKey {
    /// Engine or replica.
    pub kind: InstanceKind,
    /// The volume's name, or `<volume>-<replica id>`.
    pub name: String,
}

impl InstanceKey {
    /// Makes the key of the volume's only engine on a node.
    #[must_use]
    pub fn engine(volume: &VolumeName) -> InstanceKey {
        InstanceKey { kind: InstanceKind::Engine, name: volume.to_string() }
    }

    /// Makes the key of a replica process of the volume.
    #[must_use]
    pub fn replica(volume: &VolumeName, id: ReplicaId) -> InstanceKey {
        InstanceKey { kind: InstanceKind::Replica, name: ReplicaSpec::instance_name(volume, id) }
    }
}

impl fmt::Display for InstanceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.as_str(), self.name)
    }
}

/// The kinds of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InstanceKind {
    /// The engine of a volume.
    Engine,
    /// A replica process.
    Replica,
}

impl InstanceKind {
    /// Returns the word in messages.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            InstanceKind::Engine => "engine",
            InstanceKind::Replica => "replica",
        }
    }
}

/// A process, as its agent shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The state of the process.
    pub state: InstanceState,
    /// The problem, or the event that the process waits for, if any.
    pub message: Option<String>,
    /// The part that only one kind has.
    pub detail: Detail,
}

/// The state of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceState {
    /// The process exists or is about to, and does not serve yet.
    Starting,
    /// The process serves.
    Running,
    /// The process is about to end.
    Stopping,
    /// The process has ended.
    Stopped,
    /// The process has ended or cannot start. The agent repeats the start if that can help.
    Error,
}

/// The part that only one kind of process has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detail {
    /// The part of an engine.
    Engine(Box<ObservedEngine>),
    /// The part of a replica.
    Replica(ObservedReplica),
}

/// An engine process: its status, and the facts that its agent adds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedEngine {
    /// Number of the attachment that it was started for; none if it does not report one.
    pub attach: Option<u64>,
    /// The size of the device as its user sees it; before the engine has reported one, that of its start.
    pub size_bytes: Option<u64>,
    /// True if it runs another program than the one that is installed beside its agent; none if they are not
    /// compared yet.
    pub needs_upgrade: Option<bool>,
    /// The status of the engine according to itself; none before it has reported one.
    pub reported: Option<EngineStatus>,
}

impl ObservedEngine {
    /// Returns an engine of that attachment with that status.
    #[must_use]
    pub fn of(attach: u64, status: EngineStatus) -> ObservedEngine {
        let size_bytes = Some(status.size_bytes);
        ObservedEngine { attach: Some(attach), size_bytes, needs_upgrade: None, reported: Some(status) }
    }

    /// Returns true if the engine is known to run for that attachment. `attach`: none if the volume was never
    /// attached.
    #[must_use]
    pub fn is_of(&self, attach: Option<u64>) -> bool {
        attach.is_some() && self.attach == attach
    }

    /// Returns the phase; none before the engine has reported one.
    #[must_use]
    pub fn phase(&self) -> Option<EnginePhase> {
        self.reported.as_ref().map(|status| status.phase)
    }

    /// Returns the view that waits for the arbiter, if any.
    #[must_use]
    pub fn grant_wanted(&self) -> Option<&GrantWanted> {
        self.reported.as_ref()?.grant_wanted.as_ref()
    }

    /// Returns the version of its program, if the engine reports one.
    #[must_use]
    pub fn version(&self) -> Option<&str> {
        self.reported.as_ref()?.version.as_deref()
    }

    /// Returns the progress of the rebuild of that replica, if one runs.
    #[must_use]
    pub fn copy_of(&self, replica: ReplicaId) -> Option<CopyStatus> {
        self.reported.as_ref()?.member(replica)?.copy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_of_an_attachment_only_if_both_are_known() {
        let engine = |attach| ObservedEngine { attach, ..ObservedEngine::default() };
        assert!(engine(Some(3)).is_of(Some(3)) && !engine(Some(3)).is_of(Some(4)));
        assert!(!engine(None).is_of(Some(3)) && !engine(Some(3)).is_of(None));
        assert!(!engine(None).is_of(None), "neither is known");
    }
}
