//! Bringing volumes to nodes, and away from them.

use shorthorn_api::csi::v1;
use shorthorn_controller_core::{ClusterState, NodeName, csi};
use shorthorn_csi::CsiError;
use shorthorn_types::VolumeName;
use tokio::time::Instant;

use super::status::IntoCsiError;
use super::{CsiController, arguments};
use crate::store::change;

impl CsiController {
    /// Publishes the volume. The node finds it by its name alone: the context is empty.
    pub(super) async fn publish(
        &self,
        request: v1::ControllerPublishVolumeRequest,
        deadline: Instant,
    ) -> Result<v1::ControllerPublishVolumeResponse, CsiError> {
        arguments::volume_id(&request.volume_id)?;
        arguments::node_id(&request.node_id)?;
        arguments::usable(request.volume_capability)?;
        if request.readonly {
            let message = "readonly: the driver does not have the capability PUBLISH_READONLY; mount the \
                           volume read-only instead";
            return Err(CsiError::Invalid(message.into()));
        }
        let volume = arguments::existing_volume_id(&request.volume_id)?;
        let _pass = self.enter(&volume)?;
        let (name, node) = (volume.as_str(), request.node_id.as_str());
        {
            // If volumes are counted, one comes after the other: two never take the last place.
            let is_limited = csi::max_volumes(&self.store.state(), node).is_some();
            let _counting = if is_limited { Some(self.counting.lock().await) } else { None };
            change(self.store.as_ref(), |cluster| csi::publish(cluster, name, node))
                .await
                .map_err(IntoCsiError::into_csi_error)?;
        }
        let node = NodeName::new(node).map_err(|error| CsiError::NotFound(error.to_string()))?;
        self.wait(&volume, deadline, |cluster| has_come(cluster, &volume, &node)).await??;
        Ok(v1::ControllerPublishVolumeResponse::default())
    }

    pub(super) async fn unpublish(
        &self,
        request: v1::ControllerUnpublishVolumeRequest,
        deadline: Instant,
    ) -> Result<v1::ControllerUnpublishVolumeResponse, CsiError> {
        let gone = v1::ControllerUnpublishVolumeResponse {};
        let volume = arguments::volume_id(&request.volume_id)?;
        let node = Some(request.node_id.as_str()).filter(|node| !node.is_empty());
        node.map(arguments::node_id).transpose()?;
        let Some(volume) = volume else { return Ok(gone) };
        let _pass = self.enter(&volume)?;
        let name = volume.as_str();
        let unpublished = change(self.store.as_ref(), |cluster| csi::unpublish(cluster, name, node)).await;
        match unpublished.map_err(IntoCsiError::into_csi_error) {
            Ok(()) => {}
            Err(CsiError::NotFound(_)) => return Ok(gone),
            Err(error) => return Err(error),
        }
        self.wait(&volume, deadline, |cluster| csi::is_away(cluster, name, node).then_some(())).await?;
        Ok(gone)
    }
}

/// Returns the outcome once the volume is attached as wanted, or will not be.
fn has_come(cluster: &ClusterState, volume: &VolumeName, node: &NodeName) -> Option<Result<(), CsiError>> {
    if csi::is_published(cluster, volume.as_str(), node) {
        return Some(Ok(()));
    }
    if csi::is_unknown(cluster, volume.as_str()) {
        // Whether it has come is not known.
        return None;
    }
    let stored = cluster.volumes.get(volume.as_str()).filter(|stored| !stored.is_deleting());
    let wanted = stored.is_some_and(|stored| stored.spec.node_id.as_ref() == Some(node));
    let message = || format!("volume {volume} is no longer wanted on {node}: it was detached or deleted");
    (!wanted).then(|| Err(CsiError::Aborted(message())))
}
