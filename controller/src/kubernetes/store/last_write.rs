//! The outcome of the last write. Reads can work while writes fail: without the right to write, or if a
//! webhook or the storage of the API server refuses.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::store::ObjectStoreError;

/// The time for which a failed write counts if no later one succeeds. Failed runs are repeated sooner.
pub(super) const DOUBT_LIMIT: Duration = Duration::from_secs(30);

/// The last write, if it failed.
#[derive(Debug, Default)]
pub(super) struct LastWrite(Mutex<Option<FailedWrite>>);

#[derive(Debug)]
struct FailedWrite {
    at: Instant,
    message: String,
}

impl LastWrite {
    /// Records the outcome of a write, and returns it. A refusal and a conflict say nothing about other
    /// writes.
    pub(super) fn record<T>(&self, result: Result<T, ObjectStoreError>) -> Result<T, ObjectStoreError> {
        let mut failed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &result {
            Ok(_) => *failed = None,
            Err(ObjectStoreError::Unavailable { message }) => {
                *failed = Some(FailedWrite { at: Instant::now(), message: message.clone() });
            }
            Err(_) => {}
        }
        drop(failed);
        result
    }

    /// Checks that no write has failed within [`DOUBT_LIMIT`], unless a later one succeeded.
    ///
    /// # Errors
    /// [`ObjectStoreError::Unavailable`] with the error of the last write.
    pub(super) fn check(&self) -> Result<(), ObjectStoreError> {
        let failed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = failed.as_ref().filter(|failed| failed.at.elapsed() < DOUBT_LIMIT);
        match recent {
            Some(FailedWrite { message, .. }) => {
                Err(ObjectStoreError::Unavailable { message: format!("the last write failed: {message}") })
            }
            None => Ok(()),
        }
    }
}
