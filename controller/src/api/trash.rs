//! Deleted volumes in the trash of their disks.

use shorthorn_controller_core::Timestamp;
use shorthorn_controller_core::objects::Object;
use shorthorn_controller_core::undelete::{Trashed, Undeletion, undelete};
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

    /// Stores the replicas, then the volume, then has the directories restored: whoever calls again after an end in between
    /// finds the rest in the trash.
    pub(super) async fn undelete(&self, name: &str) -> Result<v1::UndeleteVolumeResponse, Status> {
        let (found, silent) = self.fleet.trash().await;
        let trash: Vec<Trashed> =
            found.iter().filter_map(|(node, trashed)| convert::trashed(node, trashed)).collect();
        let secret = new_secret()
            .map_err(|error| Status::unavailable(format!("no random numbers for the secret: {error}")))?;
        let decided = undelete(&self.store.world(), name, &trash, secret, Timestamp::now());
        let Undeletion { replicas, engine, volume, restored } =
            decided.map_err(|error| status::of_request(&error))?;
        tracing::warn!(volume = name, replicas = restored.len(), "a volume is undeleted");
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
        let mut problems: Vec<String> =
            silent.iter().map(|node| format!("node {node} does not say what is in its trash")).collect();
        for trashed in &restored {
            if let Err(error) = self.fleet.restore_replica(trashed).await {
                problems.push(format!("replica {} on {}: {error}", trashed.replica_id, trashed.node));
            }
        }
        Ok(v1::UndeleteVolumeResponse { volume: Some(self.show(name)?), problems })
    }
}
