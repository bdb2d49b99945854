//! Gives up a node that never comes back.
//!
//! The operator deletes its object. From then on the controller waits for no answer of the node. Its replicas
//! are removed once the engine of their volume serves without them and has forgotten them, or with their
//! volume. Everything else takes its usual course. An engine there is stopped or fenced before another one is
//! started, and a replica that may be in the view stays. The object stays until no other one names the node.

use crate::objects::{ConditionType, Node, Replica, Volume, VolumeState};
use crate::observed::{Agents, ObservedAgent};
use crate::requests::{Change, RequestError, find_node};
use crate::surviving_replicas::{Losses, listed};
use crate::{ClusterState, NodeName, Timestamp, drain};

/// Returns true if a stored object is still on the node, or may be.
#[must_use]
pub fn is_named(cluster: &ClusterState, node: &str) -> bool {
    let on_it = |name: &NodeName| name.as_str() == node;
    let is_wanted = |volume: &Volume| {
        let places = [&volume.spec.node_id, &volume.status.current_node_id];
        places.into_iter().flatten().any(on_it)
    };
    cluster.replicas_on(node).any(|replica| on_it(&replica.spec.node_id))
        || cluster.volumes_on(node).any(is_wanted)
        || cluster.unknown_on(node).is_some()
}

/// The operator's request to give up a node.
#[derive(Clone, Debug, Default)]
pub struct DeleteNode {
    /// Name of the node to give up.
    pub name: String,
    /// The name again, as a confirmation.
    pub confirm: String,
    /// True to give up a node that is not cordoned, even if volumes lose the last complete replica, or are
    /// still being detached from it.
    pub force: bool,
}

impl DeleteNode {
    /// Returns the node to store.
    ///
    /// # Errors
    /// [`RequestError`] has the obstacle.
    pub fn apply(
        &self,
        cluster: &ClusterState,
        agents: &Agents,
        now: Timestamp,
    ) -> Result<Change<Node>, RequestError> {
        let name = || self.name.clone();
        let node = find_node(cluster, &self.name)?;
        if node.metadata.is_deleting() {
            return Ok(Change::AlreadySo(node.clone()));
        }
        if self.confirm != self.name {
            return Err(RequestError::NodeNotConfirmed(name()));
        }
        if answers(node, agents) {
            return Err(RequestError::NodeAnswers(name()));
        }
        if node.spec.allow_scheduling && !self.force {
            return Err(RequestError::NodeNotCordoned(name()));
        }
        // A volume that is being deleted gets no further engine. One that is to be detached, or is being
        // salvaged, may wait for replicas that are lost with the node.
        let is_kept = |name: &&str| {
            let volume = &cluster.volumes[*name];
            let wanted = volume.spec.node_id.as_ref();
            let is_leaving = match volume.status.state {
                VolumeState::Detaching => wanted.is_none_or(|wanted| wanted.as_str() != self.name),
                VolumeState::Attaching => volume.status.pending_salvage().is_some(),
                _ => false,
            };
            !(volume.is_deleting() || is_leaving && self.force)
        };
        let engines: Vec<&str> =
            drain::attached_to(cluster, &self.name).into_iter().filter(is_kept).collect();
        if !engines.is_empty() {
            return Err(RequestError::NodeHasEngines { node: name(), volumes: listed(&engines) });
        }
        if let (Some(sentence), false) = (cluster.unknown_on(&self.name), self.force) {
            return Err(RequestError::LeftOut(sentence));
        }
        let is_lost = |replica: &Replica| replica.spec.node_id.as_str() == self.name;
        let lost = Losses::of(cluster, cluster.replicas_on(&self.name), is_lost);
        if let (Some(sentence), false) = (lost.unknown(cluster), self.force) {
            return Err(RequestError::LeftOut(sentence));
        }
        if let (Some(volumes), false) = (lost.everything(), self.force) {
            return Err(RequestError::NodeHasLast { node: name(), volumes });
        }
        if let (Some(volumes), false) = (lost.too_many(), self.force) {
            return Err(RequestError::NodeHasMajority { node: name(), volumes });
        }
        let mut node = node.clone();
        // Nothing else is changed, because a store may need separate calls for a deletion and for other
        // changes.
        node.metadata.deletion_timestamp = Some(now);
        Ok(Change::Store(node))
    }
}

/// Returns true if the node answers, according to this controller or the last one.
fn answers(node: &Node, agents: &Agents) -> bool {
    let agent = NodeName::new(&node.metadata.name).ok().and_then(|name| agents.get(&name));
    let was_ready = node.status.conditions.get(ConditionType::Ready).is_some_and(|ready| ready.status);
    agent.is_some_and(ObservedAgent::is_synced) || was_ready
}

#[cfg(test)]
mod tests;
