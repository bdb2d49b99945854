//! Deleted volumes that are still in the trash of their disks, and how they come back.
//!
//! With each directory the agent keeps a record of its volume, as it was stored when its deletion was carried out. A volume comes
//! back detached, with the replicas that were deleted with it, each with the views in its own files. So it is attached as
//! any other volume: an engine starts only from replicas that are enough of the newest view, and gets a higher number than any
//! before. A replica that was deleted while its volume went on is not brought back: its record says so.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shorthorn_types::{ReplicaId, VolumeName};
use shorthorn_views::Arbiter;

use crate::objects::{
    CurrentState, DataState, DesireState, Engine, Metadata, Replica, ReplicaSpec, ReplicaStatus,
    SECRET_BYTES, Secret, Volume, VolumeSpec, VolumeState, VolumeStatus,
};
use crate::requests::RequestError;
use crate::{NodeName, Timestamp, World};

/// What is kept with the directory of a deleted replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// Whether it was deleted with its volume; else the volume has gone on without it.
    pub with_volume: bool,
    /// Which volume of the name: when it was made.
    pub volume_created: Timestamp,
    /// Without its secret.
    pub spec: VolumeSpec,
    /// The number of its newest attachment.
    pub attach: u64,
    /// No engine of this attachment or an older one writes.
    #[serde(default)]
    pub fenced_attach: u64,
    /// What was granted last.
    pub arbiter: Arbiter,
    /// The members of the first view.
    pub first_members: Vec<ReplicaId>,
    /// The size that the volume had.
    pub current_size: u64,
    /// The identity of the disk.
    pub disk_id: String,
    /// When the replica was last seen to become a member.
    #[serde(default)]
    pub healthy_at: Option<Timestamp>,
    /// When it left the view, if it did.
    #[serde(default)]
    pub failed_at: Option<Timestamp>,
}

impl Record {
    /// The record of a replica that is about to be deleted, as text.
    #[must_use]
    pub fn of(volume: &Volume, replica: &Replica) -> String {
        let spec =
            VolumeSpec { node_id: None, secret: Secret::new([0; SECRET_BYTES]), ..volume.spec.clone() };
        let record = Record {
            with_volume: volume.is_deleting(),
            volume_created: volume.metadata.creation_timestamp,
            spec,
            attach: volume.status.attach,
            fenced_attach: volume.status.fenced_attach,
            arbiter: volume.status.arbiter.clone(),
            first_members: volume.status.first_members.clone(),
            current_size: volume.current_size_bytes(),
            disk_id: replica.spec.disk_id.clone(),
            healthy_at: replica.status.healthy_at,
            failed_at: replica.status.failed_at,
        };
        // Without it the directory is kept all the same, for whoever looks at it by hand.
        serde_json::to_string(&record).unwrap_or_default()
    }
}

/// A directory in the trash of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trashed {
    /// Where it is.
    pub node: NodeName,
    /// The disk there.
    pub disk_path: String,
    /// Whose data it holds.
    pub volume: VolumeName,
    /// Which replica.
    pub replica_id: ReplicaId,
    /// When it was deleted, in milliseconds since 1970.
    pub deleted_ms: u64,
    /// Its record; none: it is damaged, or was never made.
    pub record: Option<Record>,
}

/// How a volume comes back.
#[derive(Clone, Debug)]
pub struct Undeletion {
    /// Stored in this order, each that is not there yet: the volume comes last, so that no place is sought for replicas.
    pub replicas: Vec<Replica>,
    /// Its engine, which nothing runs of.
    pub engine: Option<Engine>,
    /// The volume; none: it is there already, and only what is left in the trash comes back.
    pub volume: Option<Volume>,
    /// What is taken out of the trash after that.
    pub restored: Vec<Trashed>,
}

/// How the volume of that name comes back from what is in the trash.
///
/// # Errors
/// [`RequestError`] says what is in the way.
pub fn undelete(
    world: &World,
    name: &str,
    trash: &[Trashed],
    secret: Secret,
    now: Timestamp,
) -> Result<Undeletion, RequestError> {
    let name = VolumeName::new(name)?;
    let found = newest(&name, trash);
    let nothing = || RequestError::NothingToUndelete(name.to_string());
    let (_, record) = found.values().max_by_key(|(trashed, _)| trashed.deleted_ms).ok_or_else(nothing)?;
    if let Some(volume) = world.volumes.get(name.as_str()) {
        return go_on(world, volume, &found, record, now);
    }
    let metadata = Metadata::new(name.as_str(), now);
    // Of an undeletion that was cut off the replicas are there.
    let is_new = |trashed: &&&Trashed| !world.replicas.contains_key(&instance_name(trashed));
    let trashed: Vec<&Trashed> = found.values().map(|(trashed, _)| *trashed).collect();
    let replicas =
        trashed.iter().filter(is_new).filter_map(|trashed| Some(replica(trashed, record_of(trashed)?, now)));
    let replicas = replicas.collect();
    let spec = VolumeSpec { volume_name: name, node_id: None, secret, ..record.spec.clone() };
    let volume = Volume { metadata, spec, status: status(record) };
    let engine = (!world.engines.contains_key(&volume.metadata.name)).then(|| Engine::of_new(&volume, now));
    let restored = trashed.into_iter().cloned().collect();
    Ok(Undeletion { replicas, engine, volume: Some(volume), restored })
}

/// What was deleted with the volume that was deleted last, by replica.
fn newest<'a>(name: &VolumeName, trash: &'a [Trashed]) -> BTreeMap<ReplicaId, (&'a Trashed, &'a Record)> {
    let of_it = trash.iter().filter(|trashed| trashed.volume == *name);
    let usable =
        of_it.filter_map(|trashed| Some((trashed, record_of(trashed).filter(|record| record.with_volume)?)));
    let all: Vec<(&Trashed, &Record)> = usable.collect();
    let newest =
        all.iter().max_by_key(|(trashed, _)| trashed.deleted_ms).map(|(_, record)| record.volume_created);
    let mut found: BTreeMap<ReplicaId, (&Trashed, &Record)> = BTreeMap::new();
    for (trashed, record) in all.into_iter().filter(|(_, record)| Some(record.volume_created) == newest) {
        let known =
            found.get(&trashed.replica_id).is_some_and(|(known, _)| known.deleted_ms > trashed.deleted_ms);
        if !known {
            found.insert(trashed.replica_id, (trashed, record));
        }
    }
    found
}

fn record_of(trashed: &Trashed) -> Option<&Record> {
    trashed.record.as_ref()
}

fn instance_name(trashed: &Trashed) -> String {
    ReplicaSpec::instance_name(&trashed.volume, trashed.replica_id)
}

/// An undeletion that was cut off, or had not reached every node: the volume is there.
fn go_on(
    world: &World,
    volume: &Volume,
    found: &BTreeMap<ReplicaId, (&Trashed, &Record)>,
    record: &Record,
    now: Timestamp,
) -> Result<Undeletion, RequestError> {
    let name = volume.metadata.name.clone();
    let stored = |trashed: &Trashed| world.replicas.get(&instance_name(trashed));
    // Its status may not have been stored.
    let is_bare = volume.status.state == VolumeState::Creating
        && volume.status.attach == 0
        && found.values().any(|(trashed, _)| stored(trashed).is_some());
    // No other volume of the name has had the same ids.
    let is_it = !record.first_members.is_empty() && volume.status.first_members == record.first_members;
    if volume.metadata.is_deleting() || !(is_bare || is_it) {
        return Err(RequestError::Exists { name, differs: "life: it is not the one that was deleted" });
    }
    let new = found.values().filter(|(trashed, _)| stored(trashed).is_none());
    let replicas = new.map(|(trashed, record)| {
        let mut replica = replica(trashed, record, now);
        if volume.status.attach > record.attach {
            // The volume has gone on without it.
            replica.status.failed_at.get_or_insert(now);
        }
        replica
    });
    let replicas: Vec<Replica> = replicas.collect();
    let waits = |trashed: &&Trashed| {
        stored(trashed).is_none_or(|replica| {
            let is_there =
                replica.spec.node_id == trashed.node && replica.spec.disk_path == trashed.disk_path;
            is_there && !replica.metadata.is_deleting() && replica.status.data == DataState::Present
        })
    };
    let restored = found.values().map(|(trashed, _)| *trashed).filter(waits).cloned().collect();
    let volume = is_bare.then(|| Volume { status: status(record), ..volume.clone() });
    Ok(Undeletion { replicas, engine: None, volume, restored })
}

fn status(record: &Record) -> VolumeStatus {
    VolumeStatus {
        state: VolumeState::Detached,
        attach: record.attach,
        fenced_attach: record.fenced_attach,
        arbiter: record.arbiter.clone(),
        first_members: record.first_members.clone(),
        current_size: record.current_size,
        ..VolumeStatus::default()
    }
}

fn replica(trashed: &Trashed, record: &Record, now: Timestamp) -> Replica {
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
        status: ReplicaStatus {
            current_state: CurrentState::Stopped,
            // It is never made anew, even if it does not come back.
            data: DataState::Present,
            healthy_at: record.healthy_at,
            failed_at: record.failed_at,
            ..ReplicaStatus::default()
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::Object;
    use crate::requests::{Change, CreateVolume};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn volume(created: i64) -> Volume {
        let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
        let made = wanted.apply(&World::default(), Secret::new([7; SECRET_BYTES]), at(created)).unwrap();
        let Change::Store(mut volume) = made else { panic!("{made:?}") };
        volume.status.state = VolumeState::Deleting;
        volume.status.attach = 5;
        volume.status.first_members = (1..=3).map(ReplicaId::from_random).collect();
        volume
    }

    /// The directory of a replica on a node of its own, as it is in the trash after the deletion.
    fn trashed(volume: &Volume, id: u64, deleted_ms: u64, failed: bool) -> Trashed {
        let mut there = Trashed {
            node: NodeName::new(&format!("n{id}")).unwrap(),
            disk_path: "/disk".to_owned(),
            volume: volume.spec.volume_name.clone(),
            replica_id: ReplicaId::from_random(id),
            deleted_ms,
            record: None,
        };
        let stored = Record {
            with_volume: false,
            volume_created: at(0),
            spec: volume.spec.clone(),
            attach: 0,
            fenced_attach: 0,
            arbiter: Arbiter::default(),
            first_members: Vec::new(),
            current_size: 0,
            disk_id: "disk".to_owned(),
            healthy_at: None,
            failed_at: failed.then(|| at(9)),
        };
        let text = Record::of(volume, &replica(&there, &stored, at(1)));
        assert!(!text.contains(&"07".repeat(SECRET_BYTES)), "the secret is not kept: {text}");
        there.record = Some(serde_json::from_str(&text).unwrap());
        there
    }

    fn deleted(created: i64) -> Volume {
        let mut volume = volume(created);
        volume.metadata.deletion_timestamp = Some(at(100));
        volume
    }

    fn back(world: &World, trash: &[Trashed]) -> Result<Undeletion, RequestError> {
        undelete(world, "v", trash, Secret::new([9; SECRET_BYTES]), at(200))
    }

    fn stored(undeletion: &Undeletion) -> World {
        let mut world = World::default();
        undeletion.replicas.iter().cloned().for_each(|replica| world.insert(replica.into()));
        undeletion.engine.iter().cloned().for_each(|engine| world.insert(engine.into()));
        undeletion.volume.iter().cloned().for_each(|volume| world.insert(volume.into()));
        world
    }

    #[test]
    fn a_volume_comes_back_detached_with_what_was_deleted_with_it() {
        let volume = deleted(1);
        let trash =
            [trashed(&volume, 1, 10, false), trashed(&volume, 2, 11, false), trashed(&volume, 3, 12, true)];
        let undeletion = back(&World::default(), &trash).unwrap();
        let found = undeletion.volume.clone().unwrap();
        assert_eq!((found.status.state, found.status.attach), (VolumeState::Detached, 5));
        assert_eq!((found.spec.node_id.clone(), found.spec.secret.bytes()[0]), (None, 9));
        assert_eq!(found.status.first_members, volume.status.first_members);
        assert!(!found.metadata.is_deleting());
        let failed: Vec<bool> =
            undeletion.replicas.iter().map(|replica| replica.status.failed_at.is_some()).collect();
        assert_eq!(failed, [false, false, true], "who had left the view has left it");
        let is_kept = |replica: &Replica| {
            replica.status.data == DataState::Present && replica.spec.desire_state == DesireState::Stopped
        };
        assert!(undeletion.replicas.iter().all(is_kept), "none is made anew");
        assert_eq!(undeletion.restored, trash);
    }

    #[test]
    fn a_replica_that_its_volume_went_on_without_stays_where_it_is() {
        let (living, gone) = (volume(1), deleted(1));
        let trash = [trashed(&living, 3, 5, false), trashed(&gone, 1, 10, false)];
        let undeletion = back(&World::default(), &trash).unwrap();
        assert_eq!(undeletion.restored, trash[1..]);
        assert!(matches!(back(&World::default(), &trash[..1]), Err(RequestError::NothingToUndelete(_))));
        let damaged = Trashed { record: None, ..trash[1].clone() };
        assert!(matches!(back(&World::default(), &[damaged]), Err(RequestError::NothingToUndelete(_))));
    }

    #[test]
    fn of_two_volumes_of_the_name_the_last_one_comes_back() {
        let (first, second) = (deleted(1), deleted(50));
        let trash =
            [trashed(&first, 1, 10, false), trashed(&second, 2, 60, false), trashed(&first, 3, 11, false)];
        assert_eq!(back(&World::default(), &trash).unwrap().restored, trash[1..2]);
    }

    #[test]
    fn what_was_cut_off_goes_on_and_another_volume_of_the_name_is_left_alone() {
        let gone = deleted(1);
        let trash = [trashed(&gone, 1, 10, false), trashed(&gone, 2, 11, false)];
        let undeletion = back(&World::default(), &trash).unwrap();
        // The replicas are stored, and nothing else.
        let mut world = stored(&Undeletion { volume: None, ..undeletion.clone() });
        let again = back(&world, &trash).unwrap();
        assert!(again.replicas.is_empty() && again.engine.is_none());
        assert!(again.volume.is_some() && again.restored == trash);
        // The spec of the volume is stored, and not its status.
        let mut bare = undeletion.volume.clone().unwrap();
        bare.status = VolumeStatus::default();
        world.insert(bare.into());
        let again = back(&world, &trash).unwrap();
        assert_eq!(again.volume.map(|volume| volume.status.attach), Some(5));
        // One node was not reached by its call, and then not even asked.
        let world = stored(&undeletion);
        let again = back(&world, &trash[1..]).unwrap();
        assert!(again.volume.is_none() && again.replicas.is_empty() && again.restored == trash[1..]);
        let mut world = stored(&back(&World::default(), &trash[..1]).unwrap());
        let again = back(&world, &trash[1..]).unwrap();
        assert!(again.volume.is_none() && again.restored == trash[1..]);
        assert!(again.replicas.len() == 1 && again.replicas[0].status.failed_at.is_none());
        let mut served = world.volumes["v"].clone();
        served.status.attach += 1;
        world.insert(served.into());
        let late = back(&world, &trash[1..]).unwrap();
        assert!(late.replicas[0].status.failed_at.is_some(), "the volume has gone on without it");
        let mut other = World::default();
        let mut stranger = volume(300);
        stranger.status.first_members = vec![ReplicaId::from_random(4)];
        other.insert(Object::Volume(stranger));
        assert!(matches!(back(&other, &trash), Err(RequestError::Exists { .. })));
    }
}
