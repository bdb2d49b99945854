//! Restores deleted volumes that are still in the trash of their disks.
//!
//! With each directory the agent keeps a record of its volume, as it was stored when its deletion was carried
//! out. A volume comes back detached, with the replicas that were deleted with it, each with the views in its
//! own files. It is thus attached like any other volume. An engine starts only from a quorum of the newest
//! view, and gets a higher number than any before. A replica that was deleted while its volume continued is
//! not restored: its record says so.
//!
//! Objects that a deletion could not reach still exist, with the same records, and so does their data: they
//! belong to the volume again. The deletion of an object cannot be cancelled everywhere. Such a replica
//! therefore continues like a deleted replica of an existing volume: it is in use until it is replaced.
//!
//! The directories are restored first, then the objects are stored, the volume last. So every stored object
//! has its directory in place, and nothing is started until the volume exists. An interrupted undeletion is
//! completed by the next call: an agent lists the restored directories until it learns that the volume is
//! stored.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use shorthorn_types::{ReplicaId, ViewId, VolumeName};
use shorthorn_views::Arbiter;

use crate::objects::{
    CurrentState, DataState, DesireState, Engine, Metadata, Replica, ReplicaSpec, ResourceVersion,
    SECRET_BYTES, Salvage, Secret, StoredReplicaStatus, Volume, VolumeSpec, VolumeState, VolumeStatus,
};
use crate::requests::{RequestError, check_all_known};
use crate::{ClusterState, NodeName, Timestamp};

/// The record that is kept with the directory of a deleted replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeletionRecord {
    /// True if it was deleted with its volume; else the volume has continued without it.
    pub with_volume: bool,
    /// The time of the volume's creation, by a clock.
    pub volume_created: Timestamp,
    /// The version that the store had given to the volume. A store gives a greater one to each later volume
    /// of the name. None: the record is of a release that did not record it.
    #[serde(default, with = "shorthorn_types::optional::number")]
    pub volume_version: Option<u64>,
    /// Without its secret.
    pub spec: VolumeSpec,
    /// The number of its newest attachment; none: it was never attached.
    #[serde(with = "shorthorn_types::optional::number")]
    pub attach: Option<u64>,
    /// No engine of this attachment or an older one writes; none: no engine was fenced.
    #[serde(default, with = "shorthorn_types::optional::number")]
    pub fenced_attach: Option<u64>,
    /// The last grant.
    pub arbiter: Arbiter,
    /// True if no replica and no engine had reported that yet.
    #[serde(default)]
    pub grant_unreported: bool,
    /// The salvage that had to be carried out before the next start, if any. Its grant is in `arbiter`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub salvage: Option<Salvage>,
    /// The members of the first view.
    pub first_members: Vec<ReplicaId>,
    /// The size that the volume had.
    pub current_size: u64,
    /// The identity of the disk.
    pub disk_id: String,
    /// The time at which the replica was last seen to become a member.
    #[serde(default)]
    pub healthy_at: Option<Timestamp>,
    /// The time at which it left the view, if it did.
    #[serde(default)]
    pub failed_at: Option<Timestamp>,
}

impl DeletionRecord {
    /// Returns the record of a replica that is about to be deleted, as text. `with_volume`: with its volume.
    #[must_use]
    pub fn of(volume: &Volume, replica: &Replica, with_volume: bool) -> String {
        let spec =
            VolumeSpec { node_id: None, secret: Secret::new([0; SECRET_BYTES]), ..volume.spec.clone() };
        if volume.status.attach.is_none() && volume.status.first_members.is_empty() {
            // It has never had data. An agent keeps the record of the directory that an undeletion has
            // restored.
            return String::new();
        }
        let record = DeletionRecord {
            with_volume,
            volume_created: volume.metadata.creation_timestamp,
            volume_version: volume.metadata.resource_version.map(ResourceVersion::get),
            spec,
            attach: volume.status.attach,
            fenced_attach: volume.status.fenced_attach,
            arbiter: volume.status.arbiter.clone(),
            grant_unreported: volume.status.grant_unreported,
            salvage: volume.status.pending_salvage().cloned(),
            first_members: volume.status.first_members.clone(),
            current_size: volume.current_size_bytes(),
            disk_id: replica.spec.disk_id.clone(),
            healthy_at: replica.status.healthy_at,
            failed_at: replica.status.failed_at,
        };
        // Without it the directory is kept all the same, for an inspection by hand.
        serde_json::to_string(&record).unwrap_or_default()
    }

    fn life(&self) -> LifeId {
        let created = self.first_members.is_empty().then_some(self.volume_created);
        LifeId { first_members: self.first_members.clone(), created }
    }
}

/// The ids that tell a volume from others of its name. A volume of an early release does not know its own.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LifeId {
    first_members: Vec<ReplicaId>,
    created: Option<Timestamp>,
}

/// The age of the data in a directory, according to itself. Of two directories of one replica the greater one
/// is newer, for any clocks of their nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct DataAge {
    /// The newest committed view; none: no engine has opened it, or it does not say.
    pub committed: Option<ViewId>,
    /// The newest that was proposed.
    pub proposed: Option<ViewId>,
    /// The newest attachment that it has seen.
    pub attach: Option<u64>,
}

/// A directory in the trash of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trashed {
    /// The node of the directory.
    pub node: NodeName,
    /// The disk there.
    pub disk_path: String,
    /// The identity of that disk; none if its agent does not report it.
    pub disk_uuid: Option<String>,
    /// The volume of the data.
    pub volume: VolumeName,
    /// Identity in the name of the directory.
    pub replica_id: ReplicaId,
    /// The time of the deletion, in milliseconds since 1970, by the clock of its node.
    pub deleted_ms: u64,
    /// The newest views and the attachment of its data.
    pub data_age: DataAge,
    /// True if the directory is in its place already, and only its record is in the trash.
    pub restored: bool,
    /// The record; none if it is damaged, or was never made.
    pub record: Option<DeletionRecord>,
}

/// The objects with which a volume comes back. They are stored in this order: the volume comes last, so that
/// no process starts and no place is sought before all of them exist.
#[derive(Clone, Debug, Default)]
pub struct Undeletion {
    /// The new replicas, and those of which only a part was stored.
    pub replicas: Vec<Replica>,
    /// The engine object, which has no process.
    pub engine: Option<Engine>,
    /// The volume; none if it exists already, and only the rest of its trash is restored.
    pub volume: Option<Volume>,
}

/// Returns the directories that a volume of that name comes back with. They have to be in place before
/// anything is stored.
///
/// # Errors
/// [`RequestError`] has the obstacle.
pub fn directories(
    cluster: &ClusterState,
    name: &str,
    trash: &[Trashed],
) -> Result<Vec<Trashed>, RequestError> {
    let deleted = DeletedVolume::newest(cluster, name, trash)?;
    deleted.there(cluster)?;
    let waits = |trashed: &&Trashed| match cluster.replicas.get(&instance_name(trashed)) {
        Some(stored) => {
            let is_same_location =
                stored.spec.node_id == trashed.node && stored.spec.disk_path == trashed.disk_path;
            // A later deletion may have moved the directory of a replica that was left behind.
            is_same_location && !(stored.is_left_behind() && trashed.restored)
        }
        None => true,
    };
    Ok(deleted.found.values().map(|(trashed, _)| *trashed).filter(waits).cloned().collect())
}

/// Plans the restoration of the volume of that name from the trash; the directories of `in_place` are there.
///
/// # Errors
/// [`RequestError`] has the obstacle.
pub fn undelete(
    cluster: &ClusterState,
    name: &str,
    trash: &[Trashed],
    in_place: &BTreeSet<ReplicaId>,
    secret: Secret,
    now: Timestamp,
) -> Result<Undeletion, RequestError> {
    let deleted = DeletedVolume::newest(cluster, name, trash)?;
    let there = deleted.there(cluster)?;
    let attach =
        there.map_or(deleted.record.attach, |volume| volume.status.attach.max(deleted.record.attach));
    if in_place.is_empty() && deleted.left.is_empty() && !deleted.has_taken {
        return Err(RequestError::NothingToUndelete(name.to_owned()));
    }
    let is_in_place = |trashed: &Trashed| in_place.contains(&trashed.replica_id);
    let found = deleted.found.values().filter(|(trashed, _)| is_in_place(trashed));
    let new = found.filter(|(trashed, _)| !cluster.replicas.contains_key(&instance_name(trashed)));
    let mut replicas: Vec<Replica> =
        new.map(|(trashed, record)| deleted.replica(trashed, record, attach, now)).collect();
    replicas.extend(deleted.left.iter().map(|(replica, record)| taken_back(replica, record, attach, now)));
    if there.is_some_and(|volume| !deleted.is_bare(cluster, volume)) {
        return Ok(Undeletion { replicas, ..Undeletion::default() });
    }
    // No other controller has asked for a volume without data of its own to have these: they are of an
    // undeletion.
    replicas.extend(deleted.half_stored(cluster, attach, now));
    let volume = match there {
        Some(volume) => Volume { status: status(&deleted.record), ..volume.clone() },
        None => {
            let spec = VolumeSpec {
                volume_name: deleted.name.clone(),
                node_id: None,
                secret,
                ..deleted.record.spec.clone()
            };
            Volume { metadata: Metadata::new(name, now), spec, status: status(&deleted.record) }
        }
    };
    let engine = (!cluster.engines.contains_key(name)).then(|| Engine::of_new(&volume, now));
    Ok(Undeletion { replicas, engine, volume: Some(volume) })
}

/// The last deleted volume of a name.
struct DeletedVolume<'a> {
    name: VolumeName,
    /// The directories that were deleted with it, with their records, by replica.
    found: BTreeMap<ReplicaId, (&'a Trashed, &'a DeletionRecord)>,
    /// The replicas that it has left behind, with theirs.
    left: Vec<(Replica, DeletionRecord)>,
    /// True if an undeletion that was cut off has already taken back some replicas that were left behind.
    has_taken: bool,
    /// The newest of the records.
    record: DeletionRecord,
}

impl<'a> DeletedVolume<'a> {
    /// Chooses the last stored one of several volumes of the name: the name was free only after the former
    /// one was gone. Clocks decide only between records of earlier releases. Of several directories of a
    /// replica, and of several records, the newest by content counts.
    fn newest(
        cluster: &ClusterState,
        name: &str,
        trash: &'a [Trashed],
    ) -> Result<DeletedVolume<'a>, RequestError> {
        let name = VolumeName::new(name)?;
        check_all_known(cluster, name.as_str())?;
        let of_it = trash.iter().filter(|trashed| trashed.volume == name);
        let usable = of_it.filter_map(|trashed| {
            Some((trashed, trashed.record.as_ref().filter(|record| record.with_volume)?))
        });
        let mut all: Vec<(&Trashed, &DeletionRecord)> = usable.collect();
        let read =
            |text: &Option<String>| -> Option<DeletionRecord> { serde_json::from_str(text.as_ref()?).ok() };
        let left = cluster.left_behind(&name);
        let mut left: Vec<(Replica, DeletionRecord)> = left
            .filter_map(|replica| Some((replica.clone(), read(&replica.status.deletion_record)?)))
            .collect();
        let taken = cluster.replicas_of(&name);
        let mut taken: Vec<DeletionRecord> =
            taken.filter_map(|replica| read(&replica.status.undeletion_record)).collect();
        let of_left = || left.iter().map(|(_, record)| record).chain(&taken);
        let records = || all.iter().map(|(_, record)| *record).chain(of_left());
        let last = records().max_by_key(|record| (record.volume_version, record.volume_created));
        let Some(life) = last.map(DeletionRecord::life) else {
            return Err(RequestError::NothingToUndelete(name.to_string()));
        };
        let age = |record: &DeletionRecord| {
            let granted = record.arbiter.granted().map(|view| view.id);
            (record.attach, granted, record.fenced_attach, record.current_size)
        };
        let of_last = records().filter(|record| record.life() == life);
        let Some(record) = of_last.max_by_key(|record| age(record)).cloned() else {
            return Err(RequestError::NothingToUndelete(name.to_string()));
        };
        all.retain(|(_, record)| record.life() == life);
        left.retain(|(_, record)| record.life() == life);
        taken.retain(|record| record.life() == life);
        let has_taken = !taken.is_empty();
        let newness = |trashed: &Trashed| (trashed.restored, trashed.data_age, trashed.deleted_ms);
        let mut found: BTreeMap<ReplicaId, (&Trashed, &DeletionRecord)> = BTreeMap::new();
        for (trashed, record) in all {
            let known = found.get(&trashed.replica_id);
            if known.is_none_or(|(known, _)| newness(known) < newness(trashed)) {
                found.insert(trashed.replica_id, (trashed, record));
            }
        }
        Ok(DeletedVolume { name, found, left, has_taken, record })
    }

    /// Returns the volume, if it exists: its undeletion was interrupted, or had not reached every node.
    fn there<'w>(&self, cluster: &'w ClusterState) -> Result<Option<&'w Volume>, RequestError> {
        let Some(volume) = cluster.volumes.get(self.name.as_str()) else { return Ok(None) };
        let name = volume.metadata.name.clone();
        if volume.metadata.is_deleting() {
            return Err(RequestError::Deleting(name));
        }
        // No other volume of the name has had the same ids.
        let first_members = &self.record.first_members;
        let is_it = !first_members.is_empty() && volume.status.first_members == *first_members;
        if !is_it && !self.is_bare(cluster, volume) {
            return Err(RequestError::Exists { name, differs: "life: it is not the one that was deleted" });
        }
        Ok(Some(volume))
    }

    /// Returns true if its status was not stored any more: a new volume does not have these replicas.
    /// Replicas that were left behind belong to no volume at all.
    fn is_bare(&self, cluster: &ClusterState, volume: &Volume) -> bool {
        let is_stored = |trashed: &Trashed| {
            cluster.replicas.get(&instance_name(trashed)).is_some_and(|replica| !replica.is_left_behind())
        };
        volume.status.state == VolumeState::Creating
            && volume.status.attach.is_none()
            && (self.found.values().any(|(trashed, _)| is_stored(trashed))
                || cluster.replicas_of(&self.name).any(|replica| replica.status.data == DataState::Present))
    }

    /// Returns the replicas of which a store has taken the spec and not the status. Also of those whose node
    /// does not answer now: their directories are in place, as their specs are stored.
    fn half_stored(&self, cluster: &ClusterState, attach: Option<u64>, now: Timestamp) -> Vec<Replica> {
        let bare =
            cluster.replicas_of(&self.name).filter(|replica| replica.status.data != DataState::Present);
        let with_status = |replica: &Replica| {
            let found = self.found.get(&replica.spec.replica_id);
            let status = match found {
                Some((trashed, record)) => self.replica(trashed, record, attach, now).status,
                None => {
                    StoredReplicaStatus { data: DataState::Present, rebind: true, ..replica.status.clone() }
                }
            };
            Replica { status, ..replica.clone() }
        };
        bare.map(with_status).collect()
    }

    /// Returns the replica as it was. `attach`: the number of the newest attachment of the volume.
    fn replica(
        &self,
        trashed: &Trashed,
        record: &DeletionRecord,
        attach: Option<u64>,
        now: Timestamp,
    ) -> Replica {
        let mut replica = replica(trashed, record, now);
        if record.attach < attach {
            // The volume has continued without it.
            replica.status.failed_at.get_or_insert(now);
        }
        replica
    }
}

/// Returns a replica that its volume had left behind to the volume.
fn taken_back(replica: &Replica, record: &DeletionRecord, attach: Option<u64>, now: Timestamp) -> Replica {
    let mut status = StoredReplicaStatus {
        deletion_record: None,
        // Kept until the volume is stored: an undeletion that is interrupted before that has no other record.
        undeletion_record: replica.status.deletion_record.clone(),
        message: String::new(),
        // A process of it, on a node that does not answer, has the secret that the volume had before.
        stop_first: true,
        rebind: true,
        ..replica.status.clone()
    };
    if record.attach < attach {
        status.failed_at.get_or_insert(now);
    }
    Replica { status, ..replica.clone() }
}

fn instance_name(trashed: &Trashed) -> String {
    ReplicaSpec::instance_name(&trashed.volume, trashed.replica_id)
}

fn status(record: &DeletionRecord) -> VolumeStatus {
    VolumeStatus {
        state: VolumeState::Detached,
        attach: record.attach,
        fenced_attach: record.fenced_attach,
        arbiter: record.arbiter.clone(),
        grant_unreported: record.grant_unreported,
        salvage: record.salvage.clone(),
        first_members: record.first_members.clone(),
        current_size: Some(record.current_size).filter(|size| *size > 0),
        ..VolumeStatus::default()
    }
}

fn replica(trashed: &Trashed, record: &DeletionRecord, now: Timestamp) -> Replica {
    Replica {
        metadata: Metadata::new(instance_name(trashed), now),
        spec: ReplicaSpec {
            volume_name: trashed.volume.clone(),
            volume_size: record.spec.size,
            replica_id: trashed.replica_id,
            node_id: trashed.node.clone(),
            disk_path: trashed.disk_path.clone(),
            disk_id: record.disk_id.clone(),
            desire_state: DesireState::Stopped,
            eviction_requested: false,
        },
        status: StoredReplicaStatus {
            current_state: CurrentState::Stopped,
            // It is never recreated, even if it does not come back.
            data: DataState::Present,
            healthy_at: record.healthy_at,
            failed_at: record.failed_at,
            rebind: true,
            ..StoredReplicaStatus::default()
        },
    }
}

#[cfg(test)]
mod tests;
