//! Lists volumes, and validates their capabilities.

use std::collections::HashMap;
use std::ops::Bound;

use shorthorn_api::csi::v1;
use shorthorn_controller_core::objects::{Frontend, Key, Kind, SECRET_BYTES, Secret, Volume};
use shorthorn_controller_core::requests::{self, CreateVolume};
use shorthorn_controller_core::{ClusterState, Timestamp, csi};
use shorthorn_csi::{CsiError, capability};
use shorthorn_types::VolumeName;

use super::create::shown;
use super::status::IntoCsiError;
use super::{CsiController, arguments};

/// The maximum number of volumes in one answer, far below the limit of gRPC.
const ENTRIES_MAX: usize = 4096;
/// The prefix of a token, before the name of the last volume of the page before.
const TOKEN: &str = "after:";

impl CsiController {
    pub(super) fn list(&self, request: &v1::ListVolumesRequest) -> Result<v1::ListVolumesResponse, CsiError> {
        let max = usize::try_from(request.max_entries).map_err(|_| {
            CsiError::Invalid(format!("max_entries: {} is less than nothing", request.max_entries))
        })?;
        let max = if max == 0 { ENTRIES_MAX } else { max.min(ENTRIES_MAX) };
        let after = after(&request.starting_token)?;
        let start = after.as_ref().map_or(Bound::Unbounded, |after| Bound::Excluded(after.as_str()));
        let cluster = self.store.state();
        // Whoever lists takes a volume that is missing for one that is gone, or that is attached nowhere.
        let is_listed = |key: &Key| {
            matches!(key.kind, Kind::Volume | Kind::Engine)
                && after.as_ref().is_none_or(|after| key.name.as_str() > after.as_str())
        };
        let mut unknown = cluster.left_out().iter().map(|(key, _)| key).filter(|key| is_listed(key));
        if let Some(sentence) = unknown.find_map(|key| cluster.unknown(key)) {
            return Err(CsiError::Unavailable(sentence));
        }
        let mut volumes =
            cluster.volumes.range::<str, _>((start, Bound::Unbounded)).map(|(_, volume)| volume);
        let entries: Vec<_> = volumes.by_ref().take(max).map(|volume| entry(&cluster, volume)).collect();
        let last =
            entries.last().and_then(|entry| entry.volume.as_ref()).filter(|_| volumes.next().is_some());
        let next_token = last.map(|last| format!("{TOKEN}{}", last.volume_id)).unwrap_or_default();
        Ok(v1::ListVolumesResponse { entries, next_token })
    }

    pub(super) fn get(
        &self,
        request: &v1::ControllerGetVolumeRequest,
    ) -> Result<v1::ControllerGetVolumeResponse, CsiError> {
        let name = arguments::existing_volume_id(&request.volume_id)?;
        let cluster = self.store.state();
        let volume = requests::find(&cluster, name.as_str()).map_err(IntoCsiError::into_csi_error)?;
        let status = v1::controller_get_volume_response::VolumeStatus {
            published_node_ids: published(&cluster, volume),
            volume_condition: None,
        };
        Ok(v1::ControllerGetVolumeResponse { volume: Some(shown(volume)), status: Some(status) })
    }

    /// Validates capabilities. Unsupported ones are an answer, and no error.
    pub(super) fn validate(
        &self,
        request: v1::ValidateVolumeCapabilitiesRequest,
    ) -> Result<v1::ValidateVolumeCapabilitiesResponse, CsiError> {
        arguments::volume_id(&request.volume_id)?;
        if request.volume_capabilities.is_empty() {
            return Err(CsiError::Invalid("volume_capabilities is missing".into()));
        }
        let name = arguments::existing_volume_id(&request.volume_id)?;
        let cluster = self.store.state();
        let volume = requests::find(&cluster, name.as_str()).map_err(IntoCsiError::into_csi_error)?;
        // An incomplete capability is an error all the same.
        for wish in &request.volume_capabilities {
            if wish.access_mode.is_none() || wish.access_type.is_none() {
                capability(Some(wish.clone()))?;
            }
        }
        Ok(match unusable(&cluster, volume, &request) {
            Some(message) => v1::ValidateVolumeCapabilitiesResponse { confirmed: None, message },
            None => v1::ValidateVolumeCapabilitiesResponse {
                confirmed: Some(v1::validate_volume_capabilities_response::Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    mutable_parameters: request.mutable_parameters,
                }),
                message: String::new(),
            },
        })
    }
}

/// Returns the reason why a volume cannot be used as requested, or is another one.
fn unusable(
    cluster: &ClusterState,
    volume: &Volume,
    request: &v1::ValidateVolumeCapabilitiesRequest,
) -> Option<String> {
    if !request.volume_context.is_empty() {
        return Some("volume_context: volumes have none".into());
    }
    if volume.spec.frontend == Frontend::Socket {
        return Some("the frontend socket makes no device".into());
    }
    if let Err(error) = arguments::all_usable(request.volume_capabilities.clone()) {
        return Some(error.to_string());
    }
    let parameters = (&request.parameters, &request.mutable_parameters);
    differs(cluster, volume, parameters).err().map(|error| error.to_string())
}

fn differs(
    cluster: &ClusterState,
    volume: &Volume,
    (parameters, mutable): (&HashMap<String, String>, &HashMap<String, String>),
) -> Result<(), CsiError> {
    let wanted = arguments::parameters(parameters, mutable)?;
    if parameters.is_empty() {
        return Ok(());
    }
    let name = volume.metadata.name.clone();
    let wanted = CreateVolume { name, size_bytes: volume.spec.size, ..wanted };
    // Secrets are not compared, and nothing is stored.
    let secret = Secret::new([0; SECRET_BYTES]);
    wanted.apply(cluster, secret, Timestamp::now()).map(drop).map_err(IntoCsiError::into_csi_error)
}

/// Returns the volume that the next page comes after. It need not be there any more.
fn after(token: &str) -> Result<Option<VolumeName>, CsiError> {
    if token.is_empty() {
        return Ok(None);
    }
    let name = token.strip_prefix(TOKEN).and_then(|name| VolumeName::new(name).ok());
    let message = "starting_token is none that was given out; start again without one";
    name.map(Some).ok_or_else(|| CsiError::Aborted(message.into()))
}

fn entry(cluster: &ClusterState, volume: &Volume) -> v1::list_volumes_response::Entry {
    let status = v1::list_volumes_response::VolumeStatus {
        published_node_ids: published(cluster, volume),
        volume_condition: None,
    };
    v1::list_volumes_response::Entry { volume: Some(shown(volume)), status: Some(status) }
}

fn published(cluster: &ClusterState, volume: &Volume) -> Vec<String> {
    csi::published_node(cluster, volume).into_iter().map(ToString::to_string).collect()
}
