//! Observed state of the agents, kept in memory and updated by the watch stream of each agent.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::{Deref, DerefMut};

use shorthorn_types::{Members, ReplicaId, ReplicaReport, View, VolumeName};

use crate::dead_mounts::DeadMount;
use crate::objects::{ExpansionStatus, FrontendStatus, MemberStatus, ReplicaSpec};
use crate::{NodeName, Timestamp};

/// What all agents show.
#[derive(Clone, Debug, Default)]
pub struct Agents {
    by_node: BTreeMap<NodeName, AgentView>,
    /// The nodes that show an engine of a volume. Each run of an engine's reconciler asks for them.
    engines: BTreeMap<VolumeName, BTreeSet<NodeName>>,
}

impl Agents {
    /// What each agent shows; every configured node is there.
    #[must_use]
    pub fn by_node(&self) -> &BTreeMap<NodeName, AgentView> {
        &self.by_node
    }

    /// What the agent of `node` shows; none if no such agent is configured.
    #[must_use]
    pub fn get(&self, node: &NodeName) -> Option<&AgentView> {
        self.by_node.get(node)
    }

    /// The nodes whose agents show an engine of `volume`, and what they show.
    pub fn with_engine(&self, volume: &VolumeName) -> impl Iterator<Item = (&NodeName, &AgentView)> {
        let nodes = self.engines.get(volume).into_iter().flatten();
        nodes.filter_map(|node| Some((node, self.by_node.get(node)?)))
    }

    /// The agent of `node` shows this from now on.
    pub fn insert(&mut self, node: NodeName, view: AgentView) {
        self.remove(&node);
        for volume in engines_of(&view) {
            self.engines.entry(volume).or_default().insert(node.clone());
        }
        self.by_node.insert(node, view);
    }

    /// No agent of `node` is configured any more.
    pub fn remove(&mut self, node: &NodeName) {
        // Without instances first, so that the index follows.
        if let Some(mut view) = self.get_mut(node) {
            view.instances.clear();
        }
        self.by_node.remove(node);
    }

    /// What the agent of `node` shows, to be changed; none if no such agent is configured.
    pub fn get_mut(&mut self, node: &NodeName) -> Option<ViewMut<'_>> {
        let view = self.by_node.get_mut(node)?;
        Some(ViewMut { before: engines_of(view), view, engines: &mut self.engines, node: node.clone() })
    }

    /// What the agent of `node` shows, for changes that the index does not follow.
    #[cfg(test)]
    pub(crate) fn not_indexed(&mut self, node: &NodeName) -> Option<&mut AgentView> {
        self.by_node.get_mut(node)
    }

    /// Changes what every agent shows.
    pub fn change_all(&mut self, mut change: impl FnMut(&mut AgentView)) {
        let nodes: Vec<NodeName> = self.by_node.keys().cloned().collect();
        for node in nodes {
            if let Some(mut view) = self.get_mut(&node) {
                change(&mut view);
            }
        }
    }
}

/// What an agent shows, while it is being changed. The index of engines follows when this is dropped.
#[derive(Debug)]
pub struct ViewMut<'a> {
    view: &'a mut AgentView,
    engines: &'a mut BTreeMap<VolumeName, BTreeSet<NodeName>>,
    node: NodeName,
    before: BTreeSet<VolumeName>,
}

impl Deref for ViewMut<'_> {
    type Target = AgentView;
    fn deref(&self) -> &AgentView {
        self.view
    }
}

impl DerefMut for ViewMut<'_> {
    fn deref_mut(&mut self) -> &mut AgentView {
        self.view
    }
}

impl Drop for ViewMut<'_> {
    fn drop(&mut self) {
        let after = engines_of(self.view);
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

impl FromIterator<(NodeName, AgentView)> for Agents {
    fn from_iter<T: IntoIterator<Item = (NodeName, AgentView)>>(views: T) -> Agents {
        let mut agents = Agents::default();
        views.into_iter().for_each(|(node, view)| agents.insert(node, view));
        agents
    }
}

fn engines_of(view: &AgentView) -> BTreeSet<VolumeName> {
    let engines = view.instances.keys().filter(|key| key.kind == InstanceKind::Engine);
    engines.filter_map(|key| VolumeName::new(&key.name).ok()).collect()
}

/// What one agent shows.
#[derive(Clone, Debug)]
pub struct AgentView {
    /// Where the agent is reached.
    pub address: String,
    /// True if its node's object says so; else the controller's configuration does, and the object follows.
    pub from_object: bool,
    /// Whether the rest is up to date.
    pub link: Link,
    /// Who the agent says it is.
    pub info: Option<AgentInfo>,
    /// The disks that it knows, by path.
    pub disks: BTreeMap<String, DiskView>,
    /// The processes that it knows.
    pub instances: BTreeMap<InstanceKey, Instance>,
    /// What became of the last call about an instance, where that failed.
    pub failures: BTreeMap<InstanceKey, Failure>,
}

/// A call that has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Its name in the node API.
    pub call: &'static str,
    /// What was in the way.
    pub message: String,
}

impl AgentView {
    /// The view of an agent that has not been reached yet.
    #[must_use]
    pub fn new(address: impl Into<String>, now: Timestamp) -> AgentView {
        AgentView {
            address: address.into(),
            from_object: false,
            link: Link::Down { since: now, reason: "not reached yet".to_owned() },
            info: None,
            disks: BTreeMap::new(),
            instances: BTreeMap::new(),
            failures: BTreeMap::new(),
        }
    }

    /// Returns true if the view is up to date.
    #[must_use]
    pub const fn is_synced(&self) -> bool {
        matches!(self.link, Link::Synced)
    }
}

/// Whether an agent is in reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// Its stream is open and everything that was there at its start has been seen.
    Synced,
    /// It is not in reach.
    Down {
        /// Since when.
        since: Timestamp,
        /// What the last attempt said.
        reason: String,
    },
}

/// Who an agent says it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentInfo {
    /// The name of its node.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Where other nodes reach its replicas; empty: they cannot.
    pub data_address: String,
    /// What fails together with it; empty: it is not configured.
    pub zone: String,
    /// The frontends that it knows.
    pub frontends: Vec<FrontendStatus>,
    /// The most volumes that CSI lets be attached to its node; 0: any number.
    pub max_volumes: u32,
    /// What it can do beyond what all agents can.
    pub feature_level: u32,
    /// Pods on its node that use a device that is gone.
    pub dead_mounts: Vec<DeadMount>,
    /// What is so on its host and should not be, for people.
    pub warnings: Vec<String>,
}

/// What an agent says of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskView {
    /// The identity that was written on it.
    pub uuid: String,
    /// ext4, xfs, …
    pub filesystem: String,
    /// Its size.
    pub total_bytes: u64,
    /// What is free on it now.
    pub available_bytes: u64,
    /// What is wrong and what to do; empty: usable.
    pub problem: String,
}

/// What identifies a process on a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceKey {
    /// Engine or replica.
    pub kind: InstanceKind,
    /// The volume's name, or `<volume>-<replica id>`.
    pub name: String,
}

impl InstanceKey {
    /// The engine of `volume`.
    #[must_use]
    pub fn engine(volume: &VolumeName) -> InstanceKey {
        InstanceKey { kind: InstanceKind::Engine, name: volume.to_string() }
    }

    /// A replica of `volume`.
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
    /// A replica.
    Replica,
}

impl InstanceKind {
    /// The word in messages.
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
    /// What it is doing.
    pub state: InstanceState,
    /// What is wrong.
    pub message: String,
    /// What only one kind has.
    pub detail: Detail,
}

/// What a process is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceState {
    /// It is there, or about to be, and does not serve yet.
    Starting,
    /// It serves.
    Running,
    /// It is on its way out.
    Stopping,
    /// It has ended.
    Stopped,
    /// It ended or cannot start; the agent goes on trying where that can help.
    Error,
}

/// What only one kind of process has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Of an engine.
    Engine(Box<EngineView>),
    /// Of a replica.
    Replica(ReplicaView),
}

/// What an engine process says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineView {
    /// Number of the attachment that it was started for.
    pub attach: u64,
    /// starting, serving, frozen (no quorum) or stopped.
    pub phase: String,
    /// The generation in which it serves.
    pub generation: String,
    /// The view in which it serves.
    pub view: String,
    /// The frontend that it chose.
    pub frontend: String,
    /// The device, or the socket.
    pub endpoint: String,
    /// The size of the device, as whoever uses it sees it; 0: not known.
    pub size_bytes: u64,
    /// True if writes may be gone that the user of the device was told are stored, so that it refuses every
    /// request.
    pub lost_writes: bool,
    /// How many times it has met damaged data of which no replica has a sound copy.
    pub damaged_ranges: u64,
    /// What is still to come of an expansion.
    pub expansion: Option<ExpansionStatus>,
    /// What each replica is to it.
    pub members: BTreeMap<ReplicaId, MemberStatus>,
    /// How far the replicas are that are being brought up.
    pub copies: BTreeMap<ReplicaId, CopyView>,
    /// Regions that are made equal after an unclean stop, while there are any.
    pub equalising: Option<CopyView>,
    /// The last or current scrub.
    pub scrub: Option<Box<ScrubView>>,
    /// The view that waits for the arbiter.
    pub grant_wanted: Option<Box<GrantWanted>>,
    /// Version of its program; empty: it does not say.
    pub version: String,
}

/// A view that an engine cannot bring through by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantWanted {
    /// The view.
    pub view: View,
    /// What it honours.
    pub honoured: ReplicaReport,
    /// Who has stored it.
    pub stored: Members,
}

/// How far copying is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyView {
    /// What there was to copy when it began.
    pub total_bytes: u64,
    /// What is left of that.
    pub left_bytes: u64,
    /// How fast it goes.
    pub bytes_per_s: u64,
}

impl CopyView {
    /// How much is done, 0 to 100.
    #[must_use]
    pub fn percent(&self) -> u64 {
        let done = u128::from(self.total_bytes.saturating_sub(self.left_bytes)) * 100;
        done.checked_div(self.total_bytes.into()).map_or(100, |percent| u64::try_from(percent).unwrap_or(100))
    }

    /// How long it takes at this speed; none where it stands still.
    #[must_use]
    pub fn left_s(&self) -> Option<u64> {
        self.left_bytes.checked_div(self.bytes_per_s)
    }
}

/// What a scrub has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubView {
    /// True if it is under way.
    pub running: bool,
    /// The snapshot that is being compared; empty: the volume is.
    pub snapshot: String,
    /// Where it is, in the snapshot or in the volume.
    pub at_bytes: u64,
    /// Places where members differed.
    pub found: u64,
    /// Those of them that were repaired.
    pub repaired: u64,
    /// The last of them.
    pub last: String,
}

/// What a replica process says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplicaView {
    /// Where it serves.
    pub addresses: Vec<String>,
    /// What its directory takes on the disk.
    pub allocated_bytes: u64,
    /// That directory; empty: it does not say.
    pub directory: String,
    /// The attachment whose engine holds it: those of older ones are refused. 0: none ever did, or it does not say.
    pub attach: u64,
    /// The views that it knows, no older than that.
    pub views: Option<Box<ReplicaReport>>,
}
