//! Gates: one call at a time for each volume.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shorthorn_types::VolumeName;

/// The volumes that a call is under way for.
#[derive(Clone, Debug, Default)]
pub struct Gates(Arc<Mutex<HashSet<VolumeName>>>);

/// The right to work on a volume, until it is dropped.
#[derive(Debug)]
pub struct Pass {
    gates: Gates,
    volume: VolumeName,
}

impl Gates {
    /// Returns a pass for the volume; none while another call has one.
    #[must_use]
    pub fn enter(&self, volume: &VolumeName) -> Option<Pass> {
        let entered = self.lock().insert(volume.clone());
        entered.then(|| Pass { gates: self.clone(), volume: volume.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<VolumeName>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.gates.lock().remove(&self.volume);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_for_each_volume() {
        let gates = Gates::default();
        let [a, b] = ["a", "b"].map(|name| VolumeName::new(name).unwrap());
        let pass = gates.enter(&a).unwrap();
        assert!(gates.enter(&a).is_none());
        assert!(gates.enter(&b).is_some());
        drop(pass);
        assert!(gates.enter(&a).is_some());
        assert!(gates.lock().is_empty(), "nothing is kept of volumes without a call");
    }
}
