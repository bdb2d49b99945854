//! Copies and repairs of snapshots exclude each other.
//!
//! A copy lists the blocks of a layer, and then reads these. A repair in between may make a hole of a block:
//! the copy would store zeroes there, which hide the data of a lower layer.

use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

/// The use of the members' snapshots by the rebuild tasks and the scrub of this engine.
#[derive(Debug, Default)]
pub struct SnapshotUse(RwLock<()>);

impl SnapshotUse {
    /// Keeps repairs from beginning. None while one is under way. Several replicas may be copied at once.
    pub fn copying(&self) -> Option<RwLockReadGuard<'_, ()>> {
        match self.0.try_read() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Keeps copies from beginning. None if one is under way, which may take hours.
    pub fn repairing(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        match self.0.try_write() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repair_does_not_begin_beside_a_copy() {
        let snapshots = SnapshotUse::default();
        let copies = [snapshots.copying(), snapshots.copying()];
        assert!(copies.iter().all(Option::is_some) && snapshots.repairing().is_none());
        drop(copies);
        let repair = snapshots.repairing();
        assert!(repair.is_some() && snapshots.copying().is_none());
    }
}
