//! Copies and repairs of snapshots exclude each other, and so do scrubs.
//!
//! A copy lists the blocks of a layer, and then reads these. A repair in between may make a hole of a block:
//! the copy would store zeroes there, which hide the data of a lower layer.
//!
//! A scrub that was stopped ends after the piece that it looks at. Until then a member could take its sums
//! for those of the next scrub, and would keep a series with gaps. A gap says that a piece has no blocks.

use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

/// The use of the members' snapshots by the rebuild tasks and the scrub of this engine.
#[derive(Debug, Default)]
pub struct SnapshotUse {
    data: RwLock<()>,
    scrub: Mutex<()>,
}

impl SnapshotUse {
    /// Keeps repairs from beginning. None while one is under way. Several replicas may be copied at once.
    pub fn copying(&self) -> Option<RwLockReadGuard<'_, ()>> {
        match self.data.try_read() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Keeps copies from beginning. None if one is under way, which may take hours.
    pub fn repairing(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        match self.data.try_write() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Keeps other scrubs from beginning. None while one is under way.
    pub fn scrubbing(&self) -> Option<MutexGuard<'_, ()>> {
        match self.scrub.try_lock() {
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

    #[test]
    fn a_scrub_does_not_begin_beside_another_one() {
        let snapshots = SnapshotUse::default();
        let scrub = snapshots.scrubbing();
        assert!(scrub.is_some() && snapshots.scrubbing().is_none());
        assert!(snapshots.repairing().is_some() && snapshots.copying().is_some(), "it may repair");
        drop(scrub);
        assert!(snapshots.scrubbing().is_some());
    }
}
