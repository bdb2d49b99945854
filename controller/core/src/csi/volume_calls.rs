//! The calls of CSI about one volume, from its creation to its deletion.

use std::collections::BTreeSet;
use std::num::NonZeroU64;

use shorthorn_types::VolumeName;
use thiserror::Error;

use super::size::{self, SizeError};
use crate::objects::{
    ConditionType, CurrentState, DesireState, Frontend, Key, Kind, Secret, Volume, VolumeState,
};
use crate::requests::{self, Change, CreateVolume, RequestError};
use crate::scheduler::SchedulingLimits;
use crate::{ClusterState, NodeName, Timestamp};

/// A volume that a caller wants.
#[derive(Clone, Debug)]
pub struct NewVolume {
    /// The requested properties, except for the size.
    pub wanted: CreateVolume,
    /// The minimum size in bytes, if it is specified.
    pub required_bytes: Option<NonZeroU64>,
    /// The maximum size in bytes, if it is specified.
    pub limit_bytes: Option<NonZeroU64>,
}

/// The reason why a volume cannot be made, or enlarged.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SizedError {
    /// No size fits the request.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// The request was refused for another reason.
    #[error(transparent)]
    Request(#[from] RequestError),
}

impl NewVolume {
    /// Returns the volume to store. A repeated call finds it there, with any size of the range.
    ///
    /// # Errors
    /// [`SizedError`] has the remedy.
    pub fn apply(
        &self,
        cluster: &ClusterState,
        secret: Secret,
        now: Timestamp,
    ) -> Result<Change<Volume>, SizedError> {
        let (required, limit) = (self.required_bytes, self.limit_bytes);
        let there = cluster.volumes.get(&self.wanted.name).map(|volume| volume.spec.size);
        let size_bytes = match there.filter(|has| size::fits(*has, required, limit)) {
            Some(has) => has,
            None => size::size_of_new(required, limit)?,
        };
        Ok(CreateVolume { size_bytes, ..self.wanted.clone() }.apply(cluster, secret, now)?)
    }
}

/// Returns the volume with the required size, and the size that it has to reach for that.
///
/// # Errors
/// [`SizedError`] has the remedy.
pub fn expand(
    cluster: &ClusterState,
    name: &str,
    required_bytes: Option<NonZeroU64>,
    limit_bytes: Option<NonZeroU64>,
    limits: SchedulingLimits,
) -> Result<(Change<Volume>, u64), SizedError> {
    let has_bytes = requests::find(cluster, name)?.spec.size;
    let size_bytes = size::size_of_grown(has_bytes, required_bytes, limit_bytes)?;
    // Another caller may want it larger still: this call does not wait for that.
    let required_bytes = required_bytes.map_or(0, NonZeroU64::get);
    let awaited_bytes = if required_bytes > has_bytes { size_bytes } else { required_bytes };
    Ok((requests::expand_within(cluster, name, size_bytes, limits)?, awaited_bytes))
}

/// The progress of a new volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlacementState {
    /// Every replica has a place.
    Scheduled,
    /// The result is not known yet.
    Pending,
    /// The cluster has no place for all replicas; the text has the reason.
    Unschedulable(String),
    /// The volume was deleted meanwhile.
    Gone,
}

/// Returns the progress of the volume.
#[must_use]
pub fn placement(cluster: &ClusterState, name: &str) -> PlacementState {
    let living = cluster.volumes.get(name).filter(|volume| !volume.is_deleting());
    let Some(volume) = living else {
        return if is_unknown(cluster, name) { PlacementState::Pending } else { PlacementState::Gone };
    };
    if volume.status.state != VolumeState::Creating {
        return PlacementState::Scheduled;
    }
    match volume.status.conditions.get(ConditionType::Scheduled) {
        Some(scheduled) if !scheduled.status => PlacementState::Unschedulable(scheduled.message.clone()),
        _ => PlacementState::Pending,
    }
}

/// Deletes a volume that a CSI caller has requested and that has no place. It has no data, so nothing is
/// lost. A volume that was scheduled meanwhile, or that another caller has created, stays.
///
/// # Errors
/// [`RequestError::NoVolume`].
pub fn undo(cluster: &ClusterState, name: &str, now: Timestamp) -> Result<Change<Volume>, RequestError> {
    let volume = requests::find(cluster, name)?;
    let is_without = matches!(placement(cluster, name), PlacementState::Unschedulable(_));
    if is_without && volume.spec.csi_name.is_some() {
        return requests::ask_for_deletion(cluster, name, now);
    }
    Ok(Change::AlreadySo(volume.clone()))
}

/// Deletes a volume that is not attached.
///
/// # Errors
/// [`RequestError`] has the obstacle.
pub fn delete(cluster: &ClusterState, name: &str, now: Timestamp) -> Result<Change<Volume>, RequestError> {
    let volume = requests::find(cluster, name)?;
    let deleting = volume.is_deleting();
    if let Some(node) =
        volume.spec.node_id.as_ref().or_else(|| published_node(cluster, volume)).filter(|_| !deleting)
    {
        return Err(elsewhere(volume, node));
    }
    requests::ask_for_deletion(cluster, name, now)
}

/// Returns the volume wanted on `node`, if no other one has it.
///
/// # Errors
/// [`RequestError`] has the obstacle.
pub fn publish(cluster: &ClusterState, name: &str, node: &str) -> Result<Change<Volume>, RequestError> {
    let volume = requests::find(cluster, name)?;
    if volume.spec.frontend == Frontend::Socket {
        return Err(RequestError::NoDevice(name.to_owned()));
    }
    // It may be on its way from there: until then its engine may write.
    match holder(volume).filter(|holder| holder.as_str() != node && !volume.is_deleting()) {
        Some(holder) => Err(elsewhere(volume, holder)),
        None => {
            let change = requests::attach(cluster, name, node)?;
            match &change {
                Change::Store(_) => check_room(cluster, name, node).map(|()| change),
                Change::AlreadySo(_) => Ok(change),
            }
        }
    }
}

/// Returns an error unless the agent of the node allows one more attached volume.
fn check_room(cluster: &ClusterState, name: &str, node: &str) -> Result<(), RequestError> {
    let Some(max_volumes) = max_volumes(cluster, node) else { return Ok(()) };
    let others = cluster.volumes_on(node).filter(|volume| volume.metadata.name != name);
    let is_there = |volume: &&Volume| {
        let wanted = volume.spec.node_id.as_ref().filter(|_| !volume.is_deleting());
        wanted.or_else(|| holder(volume)).is_some_and(|place| place.as_str() == node)
    };
    if others.filter(is_there).count() < max_volumes as usize {
        return Ok(());
    }
    Err(RequestError::NodeFull { node: node.to_owned(), max_volumes })
}

/// Returns the most volumes that may be attached to the node; none: any number.
#[must_use]
pub fn max_volumes(cluster: &ClusterState, node: &str) -> Option<u32> {
    cluster.nodes.get(node)?.status.max_volumes
}

fn elsewhere(volume: &Volume, node: &NodeName) -> RequestError {
    RequestError::AttachedElsewhere { name: volume.metadata.name.clone(), node: node.clone() }
}

/// Returns true if the volume can be used on `node`.
#[must_use]
pub fn is_published(cluster: &ClusterState, name: &str, node: &NodeName) -> bool {
    let Some(volume) = cluster.volumes.get(name) else { return false };
    let here = volume.status.current_node_id.as_ref() == Some(node);
    let wanted = volume.spec.node_id.as_ref() == Some(node) && !volume.is_deleting();
    here && wanted && volume.status.state == VolumeState::Attached
}

/// Returns the volume wanted nowhere, or not on `node` any more.
///
/// # Errors
/// [`RequestError::NoVolume`], or that the name can never work.
pub fn unpublish(
    cluster: &ClusterState,
    name: &str,
    node: Option<&str>,
) -> Result<Change<Volume>, RequestError> {
    let volume = requests::find(cluster, name)?;
    match (&volume.spec.node_id, node) {
        (Some(wanted), Some(node)) if wanted.as_str() != node => Ok(Change::AlreadySo(volume.clone())),
        _ => requests::detach(cluster, name),
    }
}

/// Returns true if the volume has left `node`, or all nodes, so that it may be used elsewhere.
#[must_use]
pub fn is_away(cluster: &ClusterState, name: &str, node: Option<&str>) -> bool {
    let Some(volume) = cluster.volumes.get(name) else { return !is_unknown(cluster, name) };
    let is_meant = |holder: &NodeName| node.is_none_or(|node| holder.as_str() == node);
    let at = if volume.is_deleting() { published_node(cluster, volume) } else { holder(volume) };
    !at.is_some_and(is_meant)
}

/// Returns true if the volume is stored and the controller cannot use it.
#[must_use]
pub fn is_unknown(cluster: &ClusterState, name: &str) -> bool {
    cluster.unknown(&Key::new(Kind::Volume, name)).is_some()
}

/// Returns true if the volume is gone. Another volume may already have its name.
#[must_use]
pub fn is_deleted(cluster: &ClusterState, name: &str) -> bool {
    match cluster.volumes.get(name) {
        // One that Kubernetes still holds is not gone, though it lives for now.
        Some(volume) => !volume.metadata.is_deleting(),
        None => !is_unknown(cluster, name),
    }
}

/// Returns the node that has the volume, or is about to get or lose it.
fn holder(volume: &Volume) -> Option<&NodeName> {
    let status = &volume.status;
    let is_on_no_node = matches!(status.state, VolumeState::Creating | VolumeState::Detached);
    status.current_node_id.as_ref().filter(|_| !is_on_no_node)
}

/// Returns the node on which an engine of the volume runs, or may run.
#[must_use]
pub fn published_node<'a>(cluster: &ClusterState, volume: &'a Volume) -> Option<&'a NodeName> {
    let name = &volume.metadata.name;
    let Some(engine) = cluster.engines.get(name) else {
        let may_run = cluster.unknown(&Key::new(Kind::Engine, name)).is_some();
        return holder(volume).filter(|_| may_run);
    };
    // A stored `stopped` is a promise that no start is under way.
    let stopped = engine.spec.desire_state == DesireState::Stopped
        && (engine.status.current_state == CurrentState::Stopped
            || volume.status.is_fenced(engine.spec.attach));
    holder(volume).filter(|_| !stopped)
}

/// Returns the names of the volumes that are stored and cannot be used, after the name `after`. An object
/// whose name no volume can have is none: no call can be about it, and no page can begin after it.
pub fn unknown_volumes<'a>(cluster: &'a ClusterState, after: &'a str) -> impl Iterator<Item = &'a str> {
    let volumes = cluster.left_out().iter().map(|(key, _)| key).filter(|key| key.kind == Kind::Volume);
    let volumes = volumes.filter(move |key| !cluster.has(key) && VolumeName::new(&key.name).is_ok());
    volumes.map(|key| &*key.name).filter(move |name| *name > after)
}

/// Returns the nodes on which an engine of a volume may run that is stored and cannot be used.
#[must_use]
pub fn published_nodes_of_unknown(cluster: &ClusterState, name: &str) -> BTreeSet<String> {
    let left_out = cluster.left_out().get(&Key::new(Kind::Volume, name));
    let mut nodes: BTreeSet<String> =
        left_out.into_iter().flat_map(|left_out| left_out.nodes()).map(str::to_owned).collect();
    let engine = cluster.engines.get(name);
    let running = engine.filter(|engine| engine.status.current_state != CurrentState::Stopped);
    nodes.extend(running.and_then(|engine| engine.spec.node_id.as_ref()).map(ToString::to_string));
    nodes
}

/// Returns the current transition of the volume, and the event that it waits for.
#[must_use]
pub fn waits_for(cluster: &ClusterState, name: &str) -> String {
    let Some(volume) = cluster.volumes.get(name) else {
        let unknown = cluster.unknown(&Key::new(Kind::Volume, name));
        return unknown.unwrap_or_else(|| format!("volume {name} is gone"));
    };
    let mut text = format!("volume {name} is {}", volume.status.state.as_str());
    if let Some(node) = &volume.status.current_node_id {
        text.push_str(&format!(", node {node}"));
    }
    for about in [ConditionType::Settled, ConditionType::Expanded] {
        match volume.status.conditions.get(about) {
            Some(recorded) if !recorded.status => text.push_str(&format!(": {}", recorded.message)),
            _ => {}
        }
    }
    text
}
