//! Figures of free capacity, kept for a moment.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use shorthorn_controller_core::scheduler::FreeCapacity;

/// Lifetime of a figure. The external-provisioner asks for each part of the cluster, one after the other.
const FIGURE_LIFE: Duration = Duration::from_secs(1);
/// The most sets of parameters of which figures are kept.
const FIGURES_MAX: usize = 64;

/// The free capacity for some sets of parameters, as it was a moment ago. Looking at all nodes takes long.
#[derive(Debug, Default)]
pub(super) struct CapacityCache(Mutex<BTreeMap<BTreeMap<String, String>, (Instant, FreeCapacity)>>);

impl CapacityCache {
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
        look: impl FnOnce() -> FreeCapacity,
    ) -> FreeCapacity {
        let mut figures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        figures.retain(|_, (at, _)| now.saturating_duration_since(*at) < FIGURE_LIFE);
        if let Some((_, figure)) = figures.get(&parameters) {
            return *figure;
        }
        let figure = look();
        if figures.len() < FIGURES_MAX {
            figures.insert(parameters, (now, figure));
        }
        figure
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
        let (cache, start) = (CapacityCache::default(), Instant::now());
        let mut looks = 0;
        let mut get = |replicas, after_ms| {
            let now = start + Duration::from_millis(after_ms);
            let look = || {
                looks += 1;
                FreeCapacity { available_bytes: looks, ..FreeCapacity::default() }
            };
            cache.get(parameters(replicas), now, look).available_bytes
        };
        assert_eq!([get(1, 0), get(1, 500), get(2, 600), get(1, 999)], [1, 1, 2, 1]);
        assert_eq!([get(1, 1000), get(2, 1500), get(2, 1600)], [3, 2, 4]);
    }

    #[test]
    fn many_sets_of_parameters_take_no_more_memory() {
        let (cache, now) = (CapacityCache::default(), Instant::now());
        for replicas in 0..1000 {
            cache.get(parameters(replicas), now, FreeCapacity::default);
        }
        assert_eq!(cache.0.lock().unwrap().len(), FIGURES_MAX);
    }
}
