//! Explains the problems of a volume in sentences for its operator. It names missing replicas with their
//! times, pending events, the progress, and possible actions.

mod text;

use std::time::Duration;

use shorthorn_types::{HumanBytes, Members, ReplicaId};

use crate::drain::EvictionReason;
use crate::objects::{
    Condition, ConditionType, CurrentState, Engine, EnginePhase, MemberMode, NEXT_ATTACH, REPLICAS_STOPPING,
    Replica, Volume, VolumeState,
};
use crate::observed::{AgentLink, Agents, CopyStatus, Detail, InstanceKey, ObservedEngine};
use crate::reconcile::Settings;
use crate::{ClusterState, NodeName, Timestamp, drain};
use text::{age, duration, passed_ms};

/// A disk with less free than this part of it counts as full.
const FULL_PART: u64 = 100;

/// The explanation of the state of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Explanation {
    /// True if the volume has no problem.
    pub healthy: bool,
    /// The most important first.
    pub sentences: Vec<String>,
    /// The actions that the operator can take now.
    pub hints: Vec<String>,
}

/// Explains the state of `volume` from the stored and observed state.
#[must_use]
pub fn explain(
    cluster: &ClusterState,
    agents: &Agents,
    volume: &Volume,
    settings: Settings,
    now: Timestamp,
) -> Explanation {
    let name = volume.metadata.name.as_str();
    let engine = cluster.engines.get(name);
    let place = engine.and_then(|engine| agents.get(engine.spec.node_id.as_ref()?));
    let instance =
        place.and_then(|agent| agent.instances.get(&InstanceKey::engine(&volume.spec.volume_name)));
    let shown = instance.and_then(|instance| match &instance.detail {
        Detail::Engine(shown) if shown.is_of(volume.status.attach) => Some(shown.as_ref()),
        _ => None,
    });
    let replicas = cluster.replicas_of(&volume.spec.volume_name).collect();
    let explanation = Explanation::default();
    let mut explainer =
        Explainer { name, cluster, agents, volume, engine, shown, replicas, settings, now, explanation };
    explainer.explain_all();
    explainer.explanation
}

/// The health of a volume that its engine serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServedHealth {
    /// No replica has some of the data sound.
    Damaged,
    /// Requests wait for a member.
    Slow,
    Healthy,
    /// A replica is missing.
    Degraded,
}

impl ServedHealth {
    const fn as_str(self) -> &'static str {
        match self {
            ServedHealth::Damaged => "damaged",
            ServedHealth::Slow => "slow",
            ServedHealth::Healthy => "healthy",
            ServedHealth::Degraded => "degraded",
        }
    }
}

struct Explainer<'a> {
    name: &'a str,
    cluster: &'a ClusterState,
    agents: &'a Agents,
    volume: &'a Volume,
    engine: Option<&'a Engine>,
    /// The observed engine of this attachment.
    shown: Option<&'a ObservedEngine>,
    replicas: Vec<&'a Replica>,
    settings: Settings,
    now: Timestamp,
    explanation: Explanation,
}

impl Explainer<'_> {
    fn say(&mut self, sentence: impl Into<String>) {
        self.explanation.sentences.push(sentence.into());
    }

    fn hint(&mut self, hint: impl Into<String>) {
        let hint = hint.into();
        if !self.explanation.hints.contains(&hint) {
            self.explanation.hints.push(hint);
        }
    }

    fn explain_all(&mut self) {
        if let Some(salvage) = self.volume.status.pending_salvage() {
            let replica = self.replica_name(salvage.replica_id);
            let (name, by, why) = (self.name, &salvage.by, self.reason_of_settled());
            self.say(format!("Volume {name} is being salvaged to replica {replica}, as {by} decided{why}."));
            return;
        }
        if let Some(persistent_volume) = self.volume.deletion_waits_for() {
            self.say(format!(
                "Volume {} is marked for deletion. PersistentVolume {persistent_volume} needs it; it stays \
                 until that is deleted or released.",
                self.name
            ));
        }
        match self.volume.status.state {
            VolumeState::Creating => self.explain_creating(),
            VolumeState::Detached => self.explain_detached(),
            VolumeState::Attaching => self.explain_attaching(),
            VolumeState::Attached => self.explain_attached(),
            VolumeState::Detaching | VolumeState::Deleting => self.explain_leaving(),
        }
        self.explain_expansion();
        self.explain_drained();
    }

    /// Explains a pending expansion, and the event that it waits for.
    fn explain_expansion(&mut self) {
        if !self.volume.is_expanding() {
            return;
        }
        let (has, wants) = (HumanBytes(self.volume.current_size_bytes()), HumanBytes(self.volume.spec.size));
        let trouble = self.trouble(ConditionType::Expanded);
        let waits = trouble.map(|trouble| after_colon(&trouble.message)).unwrap_or_default();
        let is_next_attach = trouble.is_some_and(|trouble| trouble.reason == NEXT_ATTACH);
        self.say(format!("Volume {} is being expanded from {has} to {wants}{waits}.", self.name));
        if is_next_attach {
            self.hint(format!(
                "Stop the users of the device, then run shorthornctl volume detach {}, and attach it again",
                self.name
            ));
        }
    }

    /// Explains replicas that have to leave their nodes, and the event that they wait for.
    fn explain_drained(&mut self) {
        for replica in self.replicas.clone() {
            let Some(leaves) = drain::eviction_reason(self.cluster, replica) else { continue };
            let left = drain::of_replica(self.cluster, self.agents, replica);
            let (name, node) = (&replica.metadata.name, &replica.spec.node_id);
            let held = if left.held { ", and cannot yet" } else { "" };
            let why = after_colon(&left.message);
            let disk = &replica.spec.disk_path;
            let (place, stay) = match leaves {
                EvictionReason::Deleted => {
                    self.say(format!(
                        "Replica {name} on node {node} is deleted once it has been replaced{why}."
                    ));
                    continue;
                }
                EvictionReason::Node => {
                    (format!("node {node}, which is drained"), format!("node uncordon {node}"))
                }
                EvictionReason::Disk => (
                    format!("disk {disk} of node {node}, which is drained"),
                    format!("disk uncordon {node} {disk}"),
                ),
                EvictionReason::Location => {
                    (format!("node {node} for a better place"), format!("rebalance --cancel {}", self.name))
                }
            };
            self.say(format!("Replica {name} has to leave {place}{held}{why}."));
            if left.held {
                self.hint(format!("To let it stay: shorthornctl {stay}"));
            }
        }
    }

    fn explain_creating(&mut self) {
        let scheduled = self.trouble(ConditionType::Scheduled);
        let why =
            scheduled.map_or_else(|| self.reason_of_settled(), |trouble| format!(": {}", trouble.message));
        self.say(format!("Volume {} has no place for all its replicas{why}.", self.name));
        self.hint_disk();
    }

    fn explain_detached(&mut self) {
        self.explanation.healthy = true;
        let stopping =
            self.trouble(ConditionType::Settled).filter(|trouble| trouble.reason == REPLICAS_STOPPING);
        let runs = match stopping {
            Some(trouble) => format!("the engine has stopped, and {}", trouble.message),
            None => "no process runs, and no problem is known".to_owned(),
        };
        self.say(format!("Volume {} is detached: {runs}.", self.name));
        self.hint(format!("shorthornctl volume attach {} --node NODE", self.name));
    }

    fn explain_leaving(&mut self) {
        let state = self.volume.status.state.as_str();
        self.say(format!("Volume {} is {state}{}.", self.name, self.reason_of_settled()));
        self.explain_silence();
        self.hint_destroyed_engine_node();
        self.explain_unserved();
        let engine = self.engine.filter(|engine| engine.status.is_serving());
        if let Some(engine) = engine.filter(|_| self.volume.status.state == VolumeState::Detaching) {
            // Requests continue until it is stopped.
            self.explain_members(engine);
        }
        self.hint("Release the device: unmount it, or stop the processes that have it open.");
        let node = self.volume.status.current_node_id.as_ref();
        if let Some(node) = node.filter(|_| !self.volume.metadata.is_deleting()) {
            self.hint(format!("To keep it there: shorthornctl volume attach {} --node {node}", self.name));
        }
    }

    /// Hints at a salvage, which needs no fence if the node of the engine is given up.
    fn hint_destroyed_engine_node(&mut self) {
        let node = self.engine.and_then(|engine| engine.spec.node_id.clone());
        let is_waiting = self.volume.status.state == VolumeState::Detaching;
        let Some(node) = node.filter(|node| is_waiting && self.silence(node).is_some()) else { return };
        self.hint(format!(
            "If node {node} was destroyed, and most replicas with it: shorthornctl node delete {node} \
             --force; then shorthornctl volume salvage {}",
            self.name
        ));
    }

    /// Explains an engine whose device is in use and whose users wait for replicas.
    fn explain_unserved(&mut self) {
        let is_held = |engine: &&Engine| {
            let status = &engine.status;
            let is_known = status.current_state != CurrentState::Unknown;
            is_known && status.stop_refused.is_some() && !status.is_serving()
        };
        let Some(engine) = self.engine.filter(is_held) else { return };
        if self.volume.spec.is_detached_by_force(engine.spec.attach) {
            return;
        }
        self.say("The engine does not serve, so requests of the users wait, and so does an unmount.");
        self.hint(format!(
            "If the missing replicas are lost for good: shorthornctl volume detach {0} --force, and then \
             shorthornctl volume salvage {0}. Requests that wait get errors. Writes in progress and data in \
             the page cache are lost.",
            self.name
        ));
    }

    fn explain_attaching(&mut self) {
        let status = &self.volume.status;
        let node = status.current_node_id.as_ref().map_or("?", NodeName::as_str);
        let since = status.attach_started_at.map(|since| format!(", since {}", age(since, self.now)));
        let (since, why) = (since.unwrap_or_default(), self.reason_of_settled());
        self.say(format!("Volume {} is attaching to node {node}{since}{why}.", self.name));
        self.explain_silence();
        self.explain_frozen();
        for replica in self.replicas.clone() {
            if replica.status.current_state == CurrentState::Running {
                continue;
            }
            let (name, node) = (&replica.metadata.name, &replica.spec.node_id);
            let (state, why) = (replica.status.current_state.as_str(), self.reason(replica));
            self.say(format!("Replica {name} on node {node} does not run ({state}){why}."));
        }
        self.hint(format!("To give up: shorthornctl volume detach {}", self.name));
        self.hint_salvage();
    }

    fn explain_attached(&mut self) {
        let Some(engine) = self.engine else { return };
        let status = &engine.status;
        match status.current_state {
            CurrentState::Unknown => {
                self.explain_silence();
                self.say(format!(
                    "The state of volume {} is unknown; most likely it still serves, as it last did ({}).",
                    self.name,
                    status.phase.map_or("unknown", EnginePhase::as_str)
                ));
            }
            _ if status.is_serving() => self.explain_serving(engine),
            _ if status.phase == Some(EnginePhase::Frozen) => self.explain_frozen(),
            state => {
                let why = after_colon(status.problem());
                self.say(format!("The engine of volume {} is {}{why}.", self.name, state.as_str()));
                self.hint(format!(
                    "See the log of shorthorn-engine@{} on its node. To retry, detach and attach the volume.",
                    self.name
                ));
            }
        }
        self.explain_members(engine);
        self.explain_copying();
        self.explain_disks();
    }

    fn explain_serving(&mut self, engine: &Engine) {
        let wanted = self.volume.spec.number_of_replicas as usize;
        let modes = engine.status.replica_mode_map.values();
        let members = modes.filter(|member| member.mode == MemberMode::Member).count();
        let node = engine.spec.node_id.as_ref().map_or("?", NodeName::as_str);
        if engine.status.lost_writes {
            self.explain_lost_writes(node);
            return;
        }
        let is_slow = engine.status.replica_mode_map.values().any(|member| member.awaited);
        let health = match members >= wanted {
            _ if engine.status.damaged_ranges > 0 => ServedHealth::Damaged,
            true if is_slow => ServedHealth::Slow,
            true => ServedHealth::Healthy,
            false => ServedHealth::Degraded,
        };
        self.explanation.healthy = health == ServedHealth::Healthy;
        self.say(format!(
            "Volume {} is {}: it is served on node {node}, and {members} of {wanted} replicas are \
             complete.",
            self.name,
            health.as_str()
        ));
        if engine.status.damaged_ranges > 0 {
            self.explain_damage(engine, node);
        }
        let unschedulable = self.trouble(ConditionType::Scheduled).map(|trouble| trouble.message.clone());
        if let Some(message) = unschedulable.filter(|_| !self.explanation.healthy) {
            self.say(format!("No disk can take a replacement: {message}."));
            self.hint_disk();
        }
    }

    /// Explains damage that no replica can repair.
    fn explain_damage(&mut self, engine: &Engine, node: &str) {
        self.say(format!(
            "Data of volume {} is damaged, and no replica has a sound copy: {} ranges since the engine \
             started.",
            self.name, engine.status.damaged_ranges
        ));
        self.hint(format!(
            "The log of shorthorn-engine@{} on node {node} names each range. Restore them from a backup.",
            self.name
        ));
    }

    /// Explains that the user of the device cannot rely on its data.
    fn explain_lost_writes(&mut self, node: &str) {
        let name = self.name;
        self.say(format!(
            "Volume {name} may have lost writes: all its replicas lost power while it was in use on node \
             {node}. Writes that were not flushed by then may be gone; flushed data is there. Every request \
             is answered with an error, so that no user continues with other data than it wrote."
        ));
        self.hint(format!(
            "Stop the users of the device and unmount it (in Kubernetes: scale the workload to 0). Then run \
             shorthornctl volume detach {name}, attach it again, and check the file system before you use it."
        ));
    }

    /// Explains a frozen engine, and the replicas that it waits for.
    fn explain_frozen(&mut self) {
        let Some(shown) = self.shown else { return };
        if let Some(wanted) = shown.grant_wanted() {
            let members = self.names(&wanted.view.members);
            self.say(format!(
                "Volume {} is frozen: only half of its replicas ({members}) answer, so the arbiter has to \
                 decide.",
                self.name
            ));
            self.explain_arbiter(
                &wanted.honoured.committed.members.filter(|id| !wanted.view.members.contains(id)),
            );
        } else if shown.phase() == Some(EnginePhase::Frozen) {
            let why = after_colon(self.engine.map_or("", |engine| engine.status.problem()));
            self.say(format!(
                "Volume {} is frozen: too few replicas answer, so requests wait{why}.",
                self.name
            ));
            self.hint_salvage();
        }
    }

    fn explain_arbiter(&mut self, missing: &Members) {
        let refused = self.trouble(ConditionType::Granted).filter(|trouble| trouble.reason == "NotGranted");
        let Some(message) = refused.map(|refused| refused.message.clone()) else {
            self.say(
                "The grant has been sent. If this message stays, the agent of its node does not deliver \
             it.",
            );
            return;
        };
        let granted = self.volume.status.arbiter.granted();
        let needed = self.names(&granted.map_or(*missing, |granted| granted.members));
        self.say(format!("{message}. The volume waits for {needed}."));
        self.hint("Bring those replicas back: their nodes, disks or agents.");
        self.hint_salvage();
    }

    /// Explains that the agent of the engine's node is unreachable.
    fn explain_silence(&mut self) {
        let Some(node) = self.engine.and_then(|engine| engine.spec.node_id.clone()) else { return };
        if let Some(silence) = self.silence(&node) {
            self.say(format!("Node {node} is silent{silence}."));
            self.hint_node(&node);
        }
    }

    fn silence(&self, node: &NodeName) -> Option<String> {
        match self.agents.get(node).map(|agent| &agent.link) {
            Some(AgentLink::Synced) => None,
            Some(AgentLink::Down { since, reason }) => {
                Some(format!(" since {} ({reason})", age(*since, self.now)))
            }
            None => Some(" (it is not configured)".to_owned()),
        }
    }

    /// Explains every replica that is not a member, and every member that is late.
    fn explain_members(&mut self, engine: &Engine) {
        for replica in self.replicas.clone() {
            let member = engine.status.replica_mode_map.get(&replica.spec.replica_id);
            let mode = member.map(|member| member.mode);
            let at = format!("Replica {} on node {}", replica.metadata.name, replica.spec.node_id);
            if mode == Some(MemberMode::Member) {
                if let Some(member) = member.filter(|member| member.awaited) {
                    self.say(format!("{at} is slow{}.", after_colon(&member.message)));
                    self.hint(format!(
                        "Check the disk {} of node {}.",
                        replica.spec.disk_path, replica.spec.node_id
                    ));
                }
                continue;
            }
            if replica.metadata.is_deleting() {
                self.say(format!("{at} is being deleted{}.", after_colon(&replica.status.message)));
            } else if mode == Some(MemberMode::Rebuilding) {
                let copy = self.shown.and_then(|shown| shown.copy_of(replica.spec.replica_id));
                let waits_for = || after_colon(member.map_or("", |member| &member.message));
                self.say(format!("{at} is being rebuilt{}.", copy.map_or_else(waits_for, progress)));
            } else {
                self.explain_missing(replica, &at);
            }
        }
    }

    fn explain_missing(&mut self, replica: &Replica, at: &str) {
        let since = replica.status.failed_at.map(|since| format!(" since {}", age(since, self.now)));
        self.say(format!("{at} is missing{}{}.", since.unwrap_or_default(), self.reason(replica)));
        if let Some(left) = self.replaced_in(replica) {
            let left = duration(left.as_secs());
            self.say(format!(
                "The controller replaces the replica in {left}, unless it comes back before then."
            ));
        }
        let (name, node) = (&replica.metadata.name, &replica.spec.node_id);
        if self.silence(node).is_some() {
            self.hint_node(node);
        } else {
            self.hint(format!("See the log of shorthorn-replica@{name} on node {node}."));
        }
    }

    /// Returns the time left before a missing replica is replaced; none if another is being made already, or
    /// nothing is replaced.
    fn replaced_in(&self, replica: &Replica) -> Option<Duration> {
        let serving = self.engine.is_some_and(|engine| engine.status.is_serving());
        let live = self.replicas.iter().filter(|replica| !replica.metadata.is_deleting()).count();
        if self.explanation.healthy || !serving || live > self.volume.spec.number_of_replicas as usize {
            return None;
        }
        let passed = Duration::from_millis(passed_ms(replica.status.lost_since?, self.now));
        self.settings.replica_replace_after.checked_sub(passed).filter(|left| !left.is_zero())
    }

    /// Returns the reason why a replica does not run or does not answer.
    fn reason(&self, replica: &Replica) -> String {
        if let Some(silence) = self.silence(&replica.spec.node_id) {
            return format!(": the node is silent{silence}");
        }
        let member =
            self.engine.and_then(|engine| engine.status.replica_mode_map.get(&replica.spec.replica_id));
        let said = [replica.status.message.as_str(), member.map_or("", |member| &member.message)];
        after_colon(said.into_iter().find(|text| !text.is_empty()).unwrap_or_default())
    }

    fn explain_copying(&mut self) {
        let Some(shown) = self.shown.and_then(|shown| shown.reported.as_ref()) else { return };
        if let Some(copy) = shown.resync {
            let progress = progress(copy);
            self.say(format!(
                "The replicas are being resynced after an unclean stop{progress}. Requests for dirty regions \
                 wait."
            ));
        }
        if let Some(scrub) = shown.scrub.as_ref().filter(|scrub| scrub.found > scrub.repaired) {
            self.explanation.healthy = false;
            let last = scrub.last.as_deref().unwrap_or_default();
            self.say(format!(
                "The last scrub found {} places with differences, and repaired {} ({last}).",
                scrub.found, scrub.repaired
            ));
            self.hint(format!("shorthornctl volume scrub {} --repair", self.name));
        }
        if let Some(read) = shown.read_findings.as_ref().filter(|read| read.found > read.repaired) {
            self.explanation.healthy = false;
            self.say(format!(
                "Reads found {} places with differences, and repaired {} ({}).",
                read.found, read.repaired, read.last
            ));
            self.hint(format!("shorthornctl volume scrub {} --repair", self.name));
        }
    }

    /// Disks of the replicas that are full: writes fail there.
    fn explain_disks(&mut self) {
        for replica in self.replicas.clone() {
            let agent = self.agents.get(&replica.spec.node_id);
            let path = &replica.spec.disk_path;
            let Some(disk) = agent.and_then(|agent| agent.disks.get(path)) else { continue };
            let (name, node) = (&replica.metadata.name, &replica.spec.node_id);
            if let Some(problem) = &disk.problem {
                self.say(format!(
                    "Disk {path} of node {node}, which has replica {name}, cannot be used: {problem}."
                ));
            } else if disk.total_bytes > 0 && disk.available_bytes < disk.total_bytes / FULL_PART {
                self.explanation.healthy = false;
                let (free, total) = (HumanBytes(disk.available_bytes), HumanBytes(disk.total_bytes));
                self.say(format!(
                    "Disk {path} of node {node}, which has replica {name}, is full ({free} of {total} are \
                     free): writes that need more space fail."
                ));
                self.hint(format!(
                    "Make room on {path} of node {node}, or discard unused blocks of the file system: fstrim."
                ));
            }
        }
    }

    fn hint_salvage(&mut self) {
        self.hint(format!(
            "If the missing replicas are lost for good, run shorthornctl volume salvage {}. The output has \
             the data of each replica and the data that would be lost.",
            self.name
        ));
    }

    fn hint_disk(&mut self) {
        self.hint("Add a disk: shorthornctl disk add NODE PATH");
    }

    fn hint_node(&mut self, node: &NodeName) {
        self.hint(format!("Check that node {node} is up and has shorthorn-agent running."));
    }

    fn trouble(&self, kind: ConditionType) -> Option<&Condition> {
        self.volume.status.conditions.get(kind).filter(|condition| !condition.status)
    }

    fn reason_of_settled(&self) -> String {
        self.trouble(ConditionType::Settled).map(|trouble| after_colon(&trouble.message)).unwrap_or_default()
    }

    fn replica_name(&self, id: ReplicaId) -> String {
        let known = self.replicas.iter().find(|replica| replica.spec.replica_id == id);
        known.map_or_else(
            || id.to_string(),
            |replica| format!("{} on node {}", replica.metadata.name, replica.spec.node_id),
        )
    }

    fn names(&self, members: &Members) -> String {
        members.iter().map(|id| self.replica_name(id)).collect::<Vec<_>>().join(", ")
    }
}

/// Adapts a quoted text for the end of a sentence.
fn after_colon(text: &str) -> String {
    let text = text.trim_end_matches('.').replace('\n', " ");
    if text.is_empty() { text } else { format!(": {text}") }
}

/// Returns the progress of a copy, for the end of a sentence.
fn progress(copy: CopyStatus) -> String {
    let left = copy.left_s().map(|seconds| format!(", about {} left", duration(seconds)));
    format!(
        ": {} % done, {} of {} remaining at {}/s{}",
        copy.percent(),
        HumanBytes(copy.left_bytes),
        HumanBytes(copy.total_bytes),
        HumanBytes(copy.bytes_per_s),
        left.unwrap_or_default()
    )
}

#[cfg(test)]
mod tests;
