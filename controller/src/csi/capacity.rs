//! Free capacity for CSI.

use std::time::Instant;

use shorthorn_api::csi::v1;
use shorthorn_controller_core::Timestamp;
use shorthorn_controller_core::objects::{SECRET_BYTES, Secret, Volume};
use shorthorn_controller_core::requests::CreateVolume;
use shorthorn_controller_core::scheduler::{self, FreeCapacity, PlacementRequest};
use shorthorn_csi::CsiError;
use shorthorn_types::limits::BLOCK_BYTES;

use super::status::IntoCsiError;
use super::{CsiController, arguments};

/// The name of the hypothetical volume, which is never stored or shown.
const NAME: &str = "capacity";

impl CsiController {
    /// Returns the free capacity for volumes like this one. If a volume may begin with fewer replicas, its
    /// largest size is the largest that has a place for one replica. Kubernetes schedules no pod whose volume
    /// is larger than that.
    fn free_capacity(&self, volume: &Volume) -> FreeCapacity {
        let nodes = scheduler::candidates_for_new(&self.store.state(), &self.fleet.agents());
        let request = PlacementRequest::of(volume, self.settings.scheduling);
        let wanted = volume.spec.number_of_replicas;
        let whole = scheduler::free_capacity(&request, &nodes, wanted);
        if !self.settings.degraded_creation || wanted <= 1 {
            return whole;
        }
        let largest_bytes = scheduler::free_capacity(&request, &nodes, 1).largest_bytes;
        FreeCapacity { available_bytes: whole.available_bytes.max(largest_bytes), largest_bytes }
    }

    /// Returns the capacity for volumes with these parameters. It is the same for every part of the cluster
    /// that has a node: every volume can be reached from there, wherever its replicas are.
    pub(super) fn capacity(
        &self,
        request: v1::GetCapacityRequest,
    ) -> Result<v1::GetCapacityResponse, CsiError> {
        if !request.volume_capabilities.is_empty() {
            arguments::all_usable(request.volume_capabilities)?;
        }
        let wanted = arguments::parameters(&request.parameters, &Default::default())?;
        let wanted = CreateVolume { name: NAME.into(), size_bytes: BLOCK_BYTES, ..wanted };
        let sketch = wanted.sketch(Secret::new([0; SECRET_BYTES]), Timestamp::now());
        let volume = sketch.map_err(IntoCsiError::into_csi_error)?;
        let segment = request.accessible_topology.as_ref().map(arguments::segment).transpose()?;
        let is_reached = segment.is_none_or(|segment| segment.has_node(&self.store.state()));
        let free = if is_reached {
            let parameters = request.parameters.into_iter().collect();
            self.capacity_cache.get(parameters, Instant::now(), || self.free_capacity(&volume))
        } else {
            FreeCapacity::default()
        };
        let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        Ok(v1::GetCapacityResponse {
            available_capacity: bytes(free.available_bytes),
            maximum_volume_size: Some(bytes(free.largest_bytes)),
            minimum_volume_size: Some(bytes(BLOCK_BYTES)),
        })
    }
}
