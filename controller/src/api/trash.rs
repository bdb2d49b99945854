//! Deleted volumes in the trash of their disks.

use std::time::Duration;

use shorthorn_api::{nonempty, v1};
use shorthorn_controller_core::objects::{Key, Kind, Object, Replica, ReplicaSpec, Volume};
use shorthorn_controller_core::observed::InstanceKey;
use shorthorn_controller_core::requests::RequestError;
use shorthorn_controller_core::undelete::{Trashed, Undeletion, directories, undelete};
use shorthorn_controller_core::{NodeName, Timestamp, csi, given_up_places};
use shorthorn_types::VolumeName;
use tokio::sync::broadcast::error::RecvError;
use tonic::Status;

use super::list::{nodes_page, shortened};
use super::server::Api;
use super::status;
use crate::agents::{FoundTrash, convert};
use crate::random::new_secret;
use crate::store::ObjectStoreError;

/// The maximum number of new decisions of an undeletion after conflicting changes.
const CONFLICTS_MAX: u32 = 10;

/// More than the size of a directory in an answer, with its names and views and without its problem.
const TRASH_BYTES: usize = 2048;

/// The time that an undeletion waits for the end of the deletion, which is less than the caller waits.
const DELETION_LIMIT: Duration = Duration::from_secs(20);

impl Api {
    /// Returns the trash of the volume, or of all if none is named, a page of nodes at a time.
    pub(super) async fn trash(
        &self,
        request: v1::ListVolumeTrashRequest,
    ) -> Result<v1::ListVolumeTrashResponse, Status> {
        let v1::ListVolumeTrashRequest { name, page_size, page_token } = request;
        let page = nodes_page(self.fleet.known(), page_size, &page_token)?;
        let FoundTrash { found, silent, problems } = self.fleet.trash(page.nodes.clone()).await;
        let of_it = found.into_iter().filter(|(_, trashed)| {
            (name.is_empty() || trashed.volume == name) && !self.is_restored_and_used(trashed)
        });
        let mut replicas: Vec<v1::VolumeTrash> = of_it.map(shown).collect();
        let page = shortened(page, page_size, &mut replicas, |shown| &shown.node, size_bytes)?;
        replicas.sort_by_key(|shown| {
            let replica = shown.replica.as_ref();
            replica.map(|replica| (replica.volume.clone(), replica.deleted_ms, replica.replica_id.clone()))
        });
        Ok(v1::ListVolumeTrashResponse {
            replicas,
            silent_nodes: silent.iter().map(ToString::to_string).collect(),
            problems,
            next_page_token: page.next_token,
        })
    }

    /// Returns true for a restored directory in use, which is not trash.
    fn is_restored_and_used(&self, trashed: &v1::TrashedReplica) -> bool {
        let cluster = self.store.state();
        let name = format!("{}-{}", trashed.volume, trashed.replica_id);
        let is_stored = |kind, name: &str| {
            let key = Key::new(kind, name);
            cluster.has(&key) || cluster.unknown(&key).is_some()
        };
        trashed.restored && is_stored(Kind::Volume, &trashed.volume) && is_stored(Kind::Replica, &name)
    }

    /// Deletes the trash of the volume, or of one of its replicas, for good. Restored directories stay.
    pub(super) async fn empty_trash(
        &self,
        name: &str,
        replica_id: &str,
    ) -> Result<v1::RemoveVolumeTrashResponse, Status> {
        if let Some(sentence) = self.store.state().unknown_of(name) {
            // An undeletion may need the object.
            return Err(status::of_request(&RequestError::LeftOut(sentence)));
        }
        let listed = self.fleet.trash(self.fleet.known()).await;
        let is_meant = |trashed: &v1::TrashedReplica| {
            let is_replica = replica_id.is_empty() || trashed.replica_id == replica_id;
            trashed.volume == name && is_replica && !trashed.restored
        };
        let meant = listed.found.iter().filter(|(_, trashed)| is_meant(trashed));
        let meant: Vec<Trashed> =
            meant.filter_map(|(node, trashed)| convert::trashed(node, trashed)).collect();
        if meant.is_empty() {
            let (name, replica) = (name.to_owned(), nonempty(replica_id.to_owned()));
            let error = RequestError::NotInTrash { name, replica };
            return Err(status::of_request(&error));
        }
        let mut problems = listed.unknown();
        let mut removed = 0;
        for trashed in meant {
            let (replica, node) = (trashed.replica_id, &trashed.node);
            tracing::warn!(volume = name, %replica, %node, "deleting trash for good");
            match self.fleet.remove_trash(&trashed).await {
                Ok(()) => removed += 1,
                Err(error) => {
                    problems.push(format!("replica {} on {}: {error}", trashed.replica_id, trashed.node));
                }
            }
        }
        Ok(v1::RemoveVolumeTrashResponse { removed, problems })
    }

    /// Has the directories restored, then stores the objects, the volume last: a repeated call after an end
    /// in between finds the rest in the trash.
    pub(super) async fn undelete(&self, name: &str) -> Result<v1::UndeleteVolumeResponse, Status> {
        self.wait_for_deletion(name).await?;
        let listed = self.fleet.trash(self.fleet.known()).await;
        let trash: Vec<Trashed> =
            listed.found.iter().filter_map(|(node, trashed)| convert::trashed(node, trashed)).collect();
        let wanted =
            directories(&self.store.state(), name, &trash).map_err(|error| status::of_request(&error))?;
        tracing::warn!(volume = name, replicas = wanted.len(), "a volume is undeleted");
        let mut problems = listed.unknown();
        let mut restored = Vec::new();
        for trashed in wanted {
            match self.fleet.restore_replica(&trashed).await {
                Ok(()) => restored.push(trashed),
                Err(error) => {
                    problems.push(format!("replica {} on {}: {error}", trashed.replica_id, trashed.node));
                }
            }
        }
        if let Err(error) = self.store_undeleted(name, &trash, &restored).await {
            let troubles =
                if problems.is_empty() { String::new() } else { format!("; {}", problems.join("; ")) };
            return Err(Status::new(error.code(), format!("{}{troubles}", error.message())));
        }
        problems.extend(self.restore_later_deletions(name, &trash).await);
        for trashed in &restored {
            // A remaining one is listed as restored, and is removed with the directory.
            if let Err(error) = self.fleet.remove_trash(trashed).await {
                let node = &trashed.node;
                tracing::warn!(volume = name, %node, %error, "the record of a restored replica stays");
            }
        }
        Ok(v1::UndeleteVolumeResponse { volume: Some(self.show(name)?), problems })
    }

    /// Waits until a deletion has ended. Kubernetes cannot cancel a deletion, so it completes, without
    /// waiting for unreachable nodes, and then the volume comes back. The call also waits for objects left
    /// behind on nodes that answer again: their data is being moved to the trash.
    async fn wait_for_deletion(&self, name: &str) -> Result<(), Status> {
        let mut changes = self.store.changes();
        let gone = async {
            loop {
                if !self.is_being_deleted(name) {
                    return;
                }
                // After any message it checks the store again; without a store the controller has ended.
                if let Err(RecvError::Closed) = changes.recv().await {
                    return;
                }
            }
        };
        tokio::time::timeout(DELETION_LIMIT, gone).await.map_err(|_| {
            let waits_for = csi::waits_for(&self.store.state(), name);
            Status::failed_precondition(format!("{waits_for}; it can be undeleted once it is deleted"))
        })
    }

    fn is_being_deleted(&self, name: &str) -> bool {
        let (cluster, agents) = (self.store.state(), self.fleet.agents());
        if cluster.volumes.get(name).is_some_and(Volume::is_deleting) {
            return true;
        }
        let Ok(name) = VolumeName::new(name) else { return false };
        let is_asked = |replica: &Replica| {
            let key = InstanceKey::replica(&name, replica.spec.replica_id);
            // One whose disk fails may stay for as long as that.
            let agent = agents.get(&replica.spec.node_id).filter(|agent| agent.is_synced());
            agent.is_some_and(|agent| !agent.failures.contains_key(&key))
                && !given_up_places::is_disk_given_up(&cluster, replica)
        };
        cluster.left_behind(&name).any(is_asked)
    }

    /// Restores directories again that a deletion may have moved since `before` was listed, if it was decided
    /// before the volume was stored. Returns the problems.
    async fn restore_later_deletions(&self, name: &str, before: &[Trashed]) -> Vec<String> {
        let FoundTrash { found, .. } = self.fleet.trash(self.fleet.known()).await;
        let is_stored = |trashed: &Trashed| {
            let cluster = self.store.state();
            let stored =
                cluster.replicas.get(&ReplicaSpec::instance_name(&trashed.volume, trashed.replica_id));
            stored.is_some_and(|replica| {
                let is_same_location =
                    replica.spec.node_id == trashed.node && replica.spec.disk_path == trashed.disk_path;
                is_same_location && !replica.is_left_behind()
            })
        };
        let found = found.iter().filter_map(|(node, trashed)| convert::trashed(node, trashed));
        // Older directories of the same replicas stay in their place.
        let was_there = |trashed: &Trashed| {
            let id = |trashed: &Trashed| (trashed.node.clone(), trashed.replica_id, trashed.deleted_ms);
            before.iter().any(|older| id(older) == id(trashed))
        };
        let is_new = |trashed: &Trashed| !trashed.restored && !was_there(trashed);
        let moved = found.filter(|trashed| trashed.volume.as_str() == name && is_new(trashed));
        let mut problems = Vec::new();
        for trashed in moved.filter(is_stored).collect::<Vec<_>>() {
            let restored = match self.fleet.restore_replica(&trashed).await {
                Ok(()) => self.fleet.remove_trash(&trashed).await,
                Err(error) => Err(error),
            };
            if let Err(error) = restored {
                problems.push(format!("replica {} on {}: {error}", trashed.replica_id, trashed.node));
            }
        }
        problems
    }

    /// Stores an undeletion, and decides again after a conflicting change.
    async fn store_undeleted(
        &self,
        name: &str,
        trash: &[Trashed],
        restored: &[Trashed],
    ) -> Result<(), Status> {
        let secret = new_secret().map_err(|error| {
            Status::unavailable(format!("cannot get random numbers for the secret: {error}"))
        })?;
        let in_place = restored.iter().map(|trashed| trashed.replica_id).collect();
        let mut conflicts = 0;
        loop {
            let secret = secret.clone();
            let decided = undelete(&self.store.state(), name, trash, &in_place, secret, Timestamp::now());
            match self.put_undeleted(decided.map_err(|error| status::of_request(&error))?).await {
                Ok(()) => return Ok(()),
                Err(ObjectStoreError::Conflict { .. }) if conflicts < CONFLICTS_MAX => conflicts += 1,
                Err(conflict @ ObjectStoreError::Conflict { .. }) => {
                    return Err(Status::aborted(format!("too many changes at once: {conflict}; try again")));
                }
                Err(error) => return Err(status::of_store(&error)),
            }
        }
    }

    /// Stores the objects, the volume last.
    async fn put_undeleted(&self, undeletion: Undeletion) -> Result<(), ObjectStoreError> {
        let Undeletion { replicas, engine, volume } = undeletion;
        let objects = replicas.into_iter().map(Object::from);
        for object in objects.chain(engine.map(Object::from)).chain(volume.map(Object::from)) {
            self.store.put(object).await?;
        }
        Ok(())
    }
}

/// Converts a directory in the trash for a client; its record is for the controller.
fn shown((node, replica): (NodeName, v1::TrashedReplica)) -> v1::VolumeTrash {
    let record = convert::trashed(&node, &replica).and_then(|trashed| trashed.record);
    v1::VolumeTrash {
        node: node.to_string(),
        with_volume: record.is_some_and(|record| record.with_volume),
        replica: Some(v1::TrashedReplica { record: String::new(), ..replica }),
    }
}

/// Returns more than the size of a directory in an answer.
fn size_bytes(trash: &v1::VolumeTrash) -> usize {
    let problem = trash.replica.as_ref().map_or(0, |replica| replica.problem.len());
    TRASH_BYTES + problem
}
