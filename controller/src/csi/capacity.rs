//! Free capacity for CSI.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use shorthorn_api::csi::v1;
use shorthorn_controller_core::Timestamp;
use shorthorn_controller_core::objects::{SECRET_BYTES, Secret, Volume};
use shorthorn_controller_core::requests::CreateVolume;
use shorthorn_controller_core::scheduler::{self, PlacementRequest, Room};
use shorthorn_csi::CsiError;
use shorthorn_types::limits::BLOCK_BYTES;

use super::status::IntoCsiError;
use super::{CsiController, arguments};

/// The name of the hypothetical volume, which is never stored or shown.
const NAME: &str = "capacity";

/// Lifetime of a figure. The external-provisioner asks for each part of the cluster, one after the other.
const ROOM_LIFE: Duration = Duration::from_secs(1);
/// The most sets of parameters of which figures are kept.
const ROOMS_MAX: usize = 64;

/// The free capacity for some sets of parameters, as it was a moment ago. Looking at all nodes takes long.
#[derive(Debug, Default)]
pub(super) struct Rooms(Mutex<BTreeMap<BTreeMap<String, String>, (Instant, Room)>>);

impl Rooms {
    /// A volume has come or gone: its caller sees that at once.
    pub(super) fn forget(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The figure for these parameters, which `look` finds out unless it is known. Calls at the same time
    /// wait for one look.
    fn get(&self, parameters: BTreeMap<String, String>, now: Instant, look: impl FnOnce() -> Room) -> Room {
        let mut rooms = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        rooms.retain(|_, (at, _)| now.saturating_duration_since(*at) < ROOM_LIFE);
        if let Some((_, room)) = rooms.get(&parameters) {
            return *room;
        }
        let room = look();
        if rooms.len() < ROOMS_MAX {
            rooms.insert(parameters, (now, room));
        }
        room
    }
}

impl CsiController {
    /// Returns the room for volumes like this one. If a volume may begin with fewer replicas, its largest
    /// size is the largest that has a place for one replica. Kubernetes schedules no pod whose volume is
    /// larger than that.
    fn room(&self, volume: &Volume) -> Room {
        let nodes = scheduler::candidates_for_new(&self.store.state(), &self.fleet.agents());
        let request = PlacementRequest::of(volume, self.settings.scheduling);
        let wanted = volume.spec.number_of_replicas;
        let whole = scheduler::room(&request, &nodes, wanted);
        if !self.settings.degraded_creation || wanted <= 1 {
            return whole;
        }
        let largest_bytes = scheduler::room(&request, &nodes, 1).largest_bytes;
        Room { available_bytes: whole.available_bytes.max(largest_bytes), largest_bytes }
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
        let room = if is_reached {
            let parameters = request.parameters.into_iter().collect();
            self.rooms.get(parameters, Instant::now(), || self.room(&volume))
        } else {
            Room::default()
        };
        let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        Ok(v1::GetCapacityResponse {
            available_capacity: bytes(room.available_bytes),
            maximum_volume_size: Some(bytes(room.largest_bytes)),
            minimum_volume_size: Some(bytes(BLOCK_BYTES)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(replicas: u32) -> BTreeMap<String, String> {
        [("numberOfReplicas".to_owned(), replicas.to_string())].into()
    }

    #[test]
    fn nodes_are_looked_at_once_a_second_for_each_set_of_parameters() {
        let (rooms, start) = (Rooms::default(), Instant::now());
        let mut looks = 0;
        let mut get = |replicas, after_ms| {
            let now = start + Duration::from_millis(after_ms);
            let look = || {
                looks += 1;
                Room { available_bytes: looks, ..Room::default() }
            };
            rooms.get(parameters(replicas), now, look).available_bytes
        };
        assert_eq!([get(1, 0), get(1, 500), get(2, 600), get(1, 999)], [1, 1, 2, 1]);
        assert_eq!([get(1, 1000), get(2, 1500), get(2, 1600)], [3, 2, 4]);
    }

    #[test]
    fn many_sets_of_parameters_take_no_more_memory() {
        let (rooms, now) = (Rooms::default(), Instant::now());
        for replicas in 0..1000 {
            rooms.get(parameters(replicas), now, Room::default);
        }
        assert_eq!(rooms.0.lock().unwrap().len(), ROOMS_MAX);
    }
}
