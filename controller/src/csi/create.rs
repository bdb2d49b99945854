//! Making and deleting volumes.

use shorthorn_api::csi::v1;
use shorthorn_controller_core::csi::{self, NewVolume, PlacementState};
use shorthorn_controller_core::objects::{Key, Kind, Volume};
use shorthorn_controller_core::{ClusterState, Event, NodeName, Timestamp};
use shorthorn_csi::{CsiError, size_range};
use shorthorn_types::VolumeName;
use tokio::time::Instant;

use super::CsiController;
use super::arguments::{self, Segment};
use super::status::IntoCsiError;
use crate::random::new_secret;
use crate::store::change;

/// The word of the event that lists ignored parameters.
const PARAMETERS_IGNORED: &str = "ParametersIgnored";

/// The requested volume.
struct CreateRequest {
    volume: VolumeName,
    new: NewVolume,
    /// Parameters of Longhorn's StorageClass that Shorthorn ignores; empty: none.
    ignored: String,
    /// The places of which the volume must be accessible from at least one.
    requisite: Vec<Segment>,
}

impl CreateRequest {
    fn of(request: v1::CreateVolumeRequest) -> Result<CreateRequest, CsiError> {
        let volume = csi::volume_name(&request.name).map_err(|error| CsiError::Invalid(error.to_string()))?;
        arguments::all_usable(request.volume_capabilities)?;
        if request.volume_content_source.is_some() {
            let message = "volume_content_source: volumes cannot be created from snapshots or other volumes";
            return Err(CsiError::Invalid(message.into()));
        }
        let range = size_range(request.capacity_range)?;
        let mut wanted = arguments::parameters(&request.parameters, &request.mutable_parameters)?;
        let pairs = request.parameters.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let ignored = csi::ignored(pairs);
        let topology = request.accessibility_requirements.unwrap_or_default();
        let segments =
            |all: &[v1::Topology]| all.iter().map(arguments::segment).collect::<Result<Vec<_>, _>>();
        let (requisite, preferred) = (segments(&topology.requisite)?, segments(&topology.preferred)?);
        let first = preferred.into_iter().next().and_then(|segment| segment.node);
        wanted.preferred_node = first.and_then(|node| NodeName::new(&node).ok());
        wanted.name = volume.to_string();
        wanted.csi_name = Some(request.name);
        let new = NewVolume { wanted, required_bytes: range.required_bytes, limit_bytes: range.limit_bytes };
        Ok(CreateRequest { volume, new, ignored, requisite })
    }

    fn is_reached(&self, cluster: &ClusterState) -> bool {
        self.requisite.is_empty() || self.requisite.iter().any(|segment| segment.has_node(cluster))
    }
}

impl CsiController {
    pub(super) async fn create(
        &self,
        request: v1::CreateVolumeRequest,
        deadline: Instant,
    ) -> Result<v1::CreateVolumeResponse, CsiError> {
        let request = CreateRequest::of(request)?;
        let _pass = self.enter(&request.volume)?;
        if !request.is_reached(&self.store.state()) {
            let message = "no node in the requested topology has an agent of this controller";
            return Err(CsiError::Exhausted(message.into()));
        }
        let secret = new_secret().map_err(|error| {
            CsiError::Unavailable(format!("cannot get random numbers for the secret: {error}"))
        })?;
        let name = request.volume.as_str();
        change(self.store.as_ref(), |cluster| request.new.apply(cluster, secret.clone(), Timestamp::now()))
            .await
            .map_err(IntoCsiError::into_csi_error)?;
        let placement = self.wait(&request.volume, deadline, |cluster| match csi::placement(cluster, name) {
            PlacementState::Pending => None,
            placement => Some(placement),
        });
        match placement.await? {
            PlacementState::Unschedulable(why) => self.give_up(&request.volume, why, deadline).await,
            _ => {
                self.record_ignored(&request);
                self.created(&request.volume)
            }
        }
    }

    /// Reports ignored parameters of the StorageClass as an event of the volume.
    fn record_ignored(&self, request: &CreateRequest) {
        let name = request.volume.as_str();
        let (about, state) = (Key::new(Kind::Volume, name), self.store.state());
        if !state.has(&about) || request.ignored.is_empty() {
            return;
        }
        let message =
            format!("the controller ignores these parameters of the StorageClass: {}", request.ignored);
        tracing::info!(volume = name, "{message}");
        if let Some(events) = &self.events {
            let uid = state.uid(&about);
            events.record(&Event { about, warning: false, reason: PARAMETERS_IGNORED, message }, uid);
        }
    }

    /// Takes a volume back that has no place. Kubernetes may try it elsewhere, and then asks for another one.
    async fn give_up(
        &self,
        volume: &VolumeName,
        why: String,
        deadline: Instant,
    ) -> Result<v1::CreateVolumeResponse, CsiError> {
        let name = volume.as_str();
        let undone = change(self.store.as_ref(), |cluster| csi::undo(cluster, name, Timestamp::now())).await;
        undone.map_err(IntoCsiError::into_csi_error)?;
        if csi::placement(&self.store.state(), name) == PlacementState::Scheduled {
            return self.created(volume);
        }
        // Nothing was placed, so this waits for two removals only. If they take too long, the call answers
        // without them.
        let _ = self.wait(volume, deadline, |cluster| csi::is_deleted(cluster, name).then_some(())).await;
        Err(CsiError::Exhausted(why))
    }

    fn created(&self, volume: &VolumeName) -> Result<v1::CreateVolumeResponse, CsiError> {
        // Before the state is locked: the holder of the lock of the cache may wait for the state.
        self.capacity_cache.forget();
        let cluster = self.store.state();
        let found = cluster.volumes.get(volume.as_str()).filter(|volume| !volume.is_deleting());
        let message = || CsiError::Aborted(format!("volume {volume} was deleted meanwhile; ask again"));
        Ok(v1::CreateVolumeResponse { volume: Some(shown(found.ok_or_else(message)?)) })
    }

    pub(super) async fn delete(
        &self,
        request: v1::DeleteVolumeRequest,
        deadline: Instant,
    ) -> Result<v1::DeleteVolumeResponse, CsiError> {
        let Some(volume) = arguments::volume_id(&request.volume_id)? else {
            return Ok(v1::DeleteVolumeResponse {});
        };
        let _pass = self.enter(&volume)?;
        let name = volume.as_str();
        let deleted =
            change(self.store.as_ref(), |cluster| csi::delete(cluster, name, Timestamp::now())).await;
        match deleted.map_err(IntoCsiError::into_csi_error) {
            Ok(()) => {}
            Err(CsiError::NotFound(_)) => return Ok(v1::DeleteVolumeResponse {}),
            Err(error) => return Err(error),
        }
        self.wait(&volume, deadline, |cluster| csi::is_deleted(cluster, name).then_some(())).await?;
        self.capacity_cache.forget();
        Ok(v1::DeleteVolumeResponse {})
    }
}

/// The volume as callers see it.
pub(super) fn shown(volume: &Volume) -> v1::Volume {
    v1::Volume {
        capacity_bytes: i64::try_from(volume.current_size_bytes()).unwrap_or(i64::MAX),
        volume_id: volume.metadata.name.clone(),
        ..v1::Volume::default()
    }
}
