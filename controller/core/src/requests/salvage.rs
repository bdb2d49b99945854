//! The request for a salvage: the operator's decision for one replica.

use super::{Change, RequestError, check_all_known, find_living};
use crate::given_up_places::is_node_given_up;
use crate::objects::{CurrentState, DataState, Salvage, Volume, VolumeState};
use crate::{ClusterState, Timestamp, salvage};

/// The operator's decision for one replica, with the losses known at that time.
#[derive(Clone, Debug)]
pub struct SalvageVolume {
    /// Name of the volume to continue from one replica.
    pub name: String,
    /// The replica that becomes the volume.
    pub replica: String,
    /// The name again, as the confirmation.
    pub confirm: String,
    /// The person or program that decides.
    pub by: String,
    /// The reason, in the operator's words.
    pub reason: String,
    /// The known losses of the decision.
    pub losses: String,
    /// The newest attachment that a replica in reach knows: the store may be older.
    pub known_attach: u64,
    /// True if every replica is in reach.
    pub are_all_known: bool,
}

/// More attachments than a volume has between a backup of the store and its restoration.
const UNKNOWN_ATTACHES: u64 = 1 << 16;
/// A salvage draws two numbers. The lower one fences an engine that cannot be stopped
/// (`reconcile::volume::fence`).
const FENCE_AND_SALVAGE: u64 = 2;

impl SalvageVolume {
    /// Returns the volume with a new attachment number, and a grant of the arbiter for this replica alone. An
    /// engine that does not reach this replica cannot start from any other. Nothing is started before the
    /// replica has got the decision.
    ///
    /// # Errors
    /// [`RequestError`] has the obstacle.
    pub fn apply(&self, cluster: &ClusterState, now: Timestamp) -> Result<Change<Volume>, RequestError> {
        let name = || self.name.clone();
        let volume = find_living(cluster, &self.name)?;
        if self.confirm != self.name {
            return Err(RequestError::NotConfirmed(name()));
        }
        let replica = cluster
            .replicas_of(&volume.spec.volume_name)
            // A replica that is being deleted counts too: its data is there.
            .find(|replica| replica.spec.replica_id.to_string() == self.replica)
            .ok_or_else(|| RequestError::NoReplica { name: name(), replica: self.replica.clone() })?;
        if replica.status.data != DataState::Present {
            return Err(RequestError::HoldsNothing(replica.metadata.name.clone()));
        }
        let replica_id = replica.spec.replica_id;
        let status = &volume.status;
        let is_pending =
            |salvage: &Salvage| salvage.replica_id == replica_id && salvage.attach > self.known_attach;
        if status.pending_salvage().is_some_and(is_pending) {
            return Ok(Change::AlreadySo(volume.clone()));
        }
        // An unreadable replica may have everything: its data is unknown.
        check_all_known(cluster, &self.name)?;
        check_salvageable(cluster, volume)?;
        let stored = status.attach.ok_or_else(|| RequestError::NeverAttached(name()))?;
        let attach = self.next_attach(stored)?;
        let mut volume = volume.clone();
        volume.status.attach = Some(attach);
        volume.status.attach_started_at = Some(now);
        volume.status.attached_since = Some(attach);
        volume.status.arbiter = salvage::arbiter(attach, replica_id);
        volume.status.salvage = Some(Salvage {
            replica_id,
            attach,
            decided_at: now,
            by: self.by.clone(),
            reason: self.reason.clone(),
            losses: self.losses.clone(),
            done: false,
        });
        Ok(Change::Store(volume))
    }

    /// Returns a number above all that replicas know, and above the number of a fence. If the store is older
    /// than the volume, an unreachable replica may know higher numbers than the others. Numbers rise by one
    /// or two, so a gap keeps the new number above those.
    fn next_attach(&self, stored: u64) -> Result<u64, RequestError> {
        let is_older = self.known_attach > stored && !self.are_all_known;
        let step = if is_older { UNKNOWN_ATTACHES } else { FENCE_AND_SALVAGE };
        let next = stored.max(self.known_attach).checked_add(step);
        next.ok_or_else(|| RequestError::NoAttach { name: self.name.clone(), known: self.known_attach })
    }
}

/// Returns true if the operator has given up the node of the engine, and the node does not answer.
fn is_engine_given_up(cluster: &ClusterState, volume: &str) -> bool {
    let engines = cluster.engines.get(volume);
    let away = engines.filter(|engine| engine.status.current_state == CurrentState::Unknown);
    let node = away.and_then(|engine| engine.spec.node_id.as_ref());
    node.is_some_and(|node| is_node_given_up(cluster, node))
}

/// Returns an error unless a decision about the data of a volume may be made now: no engine serves it.
///
/// # Errors
/// [`RequestError`] has the obstacle.
pub fn check_salvageable(cluster: &ClusterState, volume: &Volume) -> Result<(), RequestError> {
    let name = volume.metadata.name.clone();
    // An engine that has served in this attachment may have its device in use: it would not stop, and might
    // serve again.
    let serving = cluster.engines.get(&name).is_some_and(|engine| {
        let has_served = engine.spec.attach.is_some() && engine.status.served_attach >= engine.spec.attach;
        engine.status.is_serving() || has_served && volume.status.state == VolumeState::Attaching
    });
    match volume.status.state {
        VolumeState::Creating => Err(RequestError::NeverAttached(name)),
        _ if volume.status.attach.is_none() => Err(RequestError::NeverAttached(name)),
        VolumeState::Detached => Ok(()),
        VolumeState::Attaching if !serving => Ok(()),
        VolumeState::Attaching => Err(RequestError::IsServed(name)),
        VolumeState::Attached if serving => Err(RequestError::IsServed(name)),
        // Too few replicas may be left to fence its engine.
        VolumeState::Detaching if is_engine_given_up(cluster, &name) => Ok(()),
        VolumeState::Attached | VolumeState::Detaching => Err(RequestError::IsAttached(name)),
        VolumeState::Deleting => Err(RequestError::Deleting(name)),
    }
}
