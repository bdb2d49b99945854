//! Lists volumes, and validates their capabilities.

use std::collections::HashMap;
use std::ops::Bound;

use shorthorn_api::csi::v1;
use shorthorn_controller_core::objects::{Frontend, SECRET_BYTES, Secret, Volume};
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
        let max = usize::try_from(request.max_entries)
            .map_err(|_| CsiError::Invalid(format!("max_entries: {} is negative", request.max_entries)))?;
        let max = if max == 0 { ENTRIES_MAX } else { max.min(ENTRIES_MAX) };
        let after = after(&request.starting_token)?;
        let start = after.as_ref().map_or(Bound::Unbounded, |after| Bound::Excluded(after.as_str()));
        let cluster = self.store.state();
        let known = cluster.volumes.range::<str, _>((start, Bound::Unbounded)).map(|(name, _)| name.as_str());
        // A caller takes a volume that is missing for one that is gone. So a volume that is stored and cannot
        // be used is listed too, and one such volume does not hide the others.
        let unknown = csi::unknown_volumes(&cluster, after.as_ref().map_or("", VolumeName::as_str));
        let mut names = merged(known, unknown);
        let entries: Vec<_> = names.by_ref().take(max).map(|name| entry(&cluster, name)).collect();
        let last = entries.last().and_then(|entry| entry.volume.as_ref()).filter(|_| names.next().is_some());
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
        for wanted in &request.volume_capabilities {
            if wanted.access_mode.is_none() || wanted.access_type.is_none() {
                capability(Some(wanted.clone()))?;
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
        return Some("volume_context must be empty".into());
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
    let message = "starting_token is not one of this controller; start again without one";
    name.map(Some).ok_or_else(|| CsiError::Aborted(message.into()))
}

/// Merges two sequences of names, each in its order.
fn merged<'a>(
    one: impl Iterator<Item = &'a str>,
    other: impl Iterator<Item = &'a str>,
) -> impl Iterator<Item = &'a str> {
    let (mut one, mut other) = (one.peekable(), other.peekable());
    std::iter::from_fn(move || match (one.peek(), other.peek()) {
        (Some(first), Some(second)) if second < first => other.next(),
        (Some(_), _) => one.next(),
        (None, _) => other.next(),
    })
}

fn entry(cluster: &ClusterState, name: &str) -> v1::list_volumes_response::Entry {
    let (volume, published_node_ids) = match cluster.volumes.get(name) {
        Some(volume) => (shown(volume), published(cluster, volume)),
        None => {
            // A capacity of 0 is an unknown one.
            let volume = v1::Volume { volume_id: name.to_owned(), ..v1::Volume::default() };
            (volume, csi::published_nodes_of_unknown(cluster, name).into_iter().collect())
        }
    };
    let status = v1::list_volumes_response::VolumeStatus { published_node_ids, volume_condition: None };
    v1::list_volumes_response::Entry { volume: Some(volume), status: Some(status) }
}

fn published(cluster: &ClusterState, volume: &Volume) -> Vec<String> {
    csi::published_node(cluster, volume).into_iter().map(ToString::to_string).collect()
}
