//! Deleted volumes in the trash of their disks.

use shorthorn_controller_core::Timestamp;
use shorthorn_controller_core::objects::Object;
use shorthorn_controller_core::undelete::{Trashed, Undeletion, directories, undelete};
use shorthorn_proto::v1;
use tonic::Status;

use super::server::Api;
use super::status;
use crate::agents::convert;
use crate::random::new_secret;
use crate::store::StoreError;

impl Api {
    pub(super) async fn trash(&self, name: &str) -> v1::ListVolumeTrashResponse {
        let (found, silent) = self.fleet.trash().await;
        let of_it = found.into_iter().filter(|(_, trashed)| name.is_empty() || trashed.volume == name);
        let shown = of_it.map(|(node, replica)| {
            let record = convert::trashed(&node, &replica).and_then(|trashed| trashed.record);
            v1::VolumeTrash {
                node: node.to_string(),
                with_volume: record.is_some_and(|record| record.with_volume),
                // It is for the controller.
                replica: Some(v1::TrashedReplica { record: String::new(), ..replica }),
            }
        });
        let mut replicas: Vec<v1::VolumeTrash> = shown.collect();
        replicas.sort_by_key(|shown| {
            let replica = shown.replica.as_ref();
            replica.map(|replica| (replica.volume.clone(), replica.deleted_ms, replica.replica_id.clone()))
        });
        v1::ListVolumeTrashResponse {
            replicas,
            silent_nodes: silent.iter().map(ToString::to_string).collect(),
        }
    }

    /// Has the directories restored, then stores the objects, the volume last: whoever calls again after an end in between finds
    /// the rest in the trash.
    pub(super) async fn undelete(&self, name: &str) -> Result<v1::UndeleteVolumeResponse, Status> {
        let (found, silent) = self.fleet.trash().await;
        let trash: Vec<Trashed> =
            found.iter().filter_map(|(node, trashed)| convert::trashed(node, trashed)).collect();
        let wanted =
            directories(&self.store.world(), name, &trash).map_err(|error| status::of_request(&error))?;
        tracing::warn!(volume = name, replicas = wanted.len(), "a volume is undeleted");
        let mut problems: Vec<String> =
            silent.iter().map(|node| format!("node {node} does not say what is in its trash")).collect();
        let mut restored = Vec::new();
        for trashed in wanted {
            match self.fleet.restore_replica(&trashed).await {
                Ok(()) => restored.push(trashed),
                Err(error) => {
                    problems.push(format!("replica {} on {}: {error}", trashed.replica_id, trashed.node));
                }
            }
        }
        if restored.is_empty() {
            let message = format!("nothing of volume {name} could be restored: {}", problems.join("; "));
            return Err(Status::failed_precondition(message));
        }
        self.store_undeleted(name, &trash, &restored).await?;
        for trashed in &restored {
            // One that stays is listed as restored, and goes with the directory.
            if let Err(error) = self.fleet.remove_trash(trashed).await {
                tracing::warn!(volume = name, node = %trashed.node, %error, "the record of a restored replica stays");
            }
        }
        Ok(v1::UndeleteVolumeResponse { volume: Some(self.show(name)?), problems })
    }

    async fn store_undeleted(
        &self,
        name: &str,
        trash: &[Trashed],
        restored: &[Trashed],
    ) -> Result<(), Status> {
        let secret = new_secret()
            .map_err(|error| Status::unavailable(format!("no random numbers for the secret: {error}")))?;
        let in_place = restored.iter().map(|trashed| trashed.replica_id).collect();
        let decided = undelete(&self.store.world(), name, trash, &in_place, secret, Timestamp::now());
        let Undeletion { replicas, engine, volume } = decided.map_err(|error| status::of_request(&error))?;
        let objects = replicas.into_iter().map(Object::from);
        for object in objects.chain(engine.map(Object::from)).chain(volume.map(Object::from)) {
            match self.store.put(object).await {
                Ok(_) => {}
                Err(conflict @ StoreError::Conflict { .. }) => {
                    return Err(Status::aborted(format!("{conflict}; try again")));
                }
                Err(error) => return Err(status::of_store(&error)),
            }
        }
        Ok(())
    }
}
