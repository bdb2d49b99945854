//! Figures of free capacity, kept for a moment.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use shorthorn_controller_core::scheduler::Room;

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
    pub(super) fn get(
        &self,
        parameters: BTreeMap<String, String>,
        now: Instant,
        look: impl FnOnce() -> Room,
    ) -> Room {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(replicas: u32) -> BTreeMap<String, String> {
        [("numberOfReplicas".to_owned(), replicas.to_string())].into()
    }

    #[test]
    fn nodes_are_searched_once_a_second_for_each_set_of_parameters() {
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
