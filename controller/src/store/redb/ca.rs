//! The cluster's CA in the file of the store: both have one backup.

use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;

use super::RedbStore;
use crate::ca_storage::{CaStorage, CaStorageError};
use crate::store::ObjectStoreError;

/// The number of states of the CA that were to be saved.
#[derive(Debug, Default)]
pub(super) struct Saves(AtomicU64);

impl Saves {
    /// Returns the number of the next one.
    pub(super) fn begin(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Returns an error if another one has begun since that one.
    fn check_last(&self, number: u64) -> Result<(), ObjectStoreError> {
        if self.0.load(Ordering::SeqCst) == number {
            return Ok(());
        }
        // Its caller got an error because of the wait, and has stored another state since.
        let message = "another state of the CA was to be stored since".to_owned();
        Err(ObjectStoreError::Unavailable { message })
    }
}

/// The storage of the CA.
#[derive(Debug)]
pub(super) struct RedbCa(pub(super) RedbStore);

#[async_trait]
impl CaStorage for RedbCa {
    async fn load(&self) -> Result<Option<Vec<u8>>, CaStorageError> {
        let loaded = self.0.blocking(|inner| inner.disk.access().file().authority());
        loaded.await.map_err(|error| CaStorageError(error.to_string()))
    }

    async fn save(&self, state: Vec<u8>) -> Result<(), CaStorageError> {
        let number = self.0.inner.saves.begin();
        let saved = self.0.blocking(move |inner| {
            let writer = inner.disk.access();
            inner.saves.check_last(number)?;
            writer.file().save_authority(&state)
        });
        saved.await.map_err(|error| CaStorageError(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_state_may_be_stored() {
        let saves = Saves::default();
        let first = saves.begin();
        assert!(saves.check_last(first).is_ok());
        let second = saves.begin();
        assert!(matches!(saves.check_last(first), Err(ObjectStoreError::Unavailable { .. })));
        assert!(saves.check_last(second).is_ok());
    }
}
