//! The storage of the state of the cluster's CA: the file of the store, or a Secret of Kubernetes.

use async_trait::async_trait;
use thiserror::Error;

/// The storage of the state of the CA.
#[async_trait]
pub trait CaStorage: Send + Sync + 'static {
    /// The stored state, as it was saved. None: no CA was made yet, and none is lost.
    async fn load(&self) -> Result<Option<Vec<u8>>, CaStorageError>;

    /// Stores the state durably. No other controller has stored one since it was loaded.
    async fn save(&self, state: Vec<u8>) -> Result<(), CaStorageError>;
}

/// The state of the CA cannot be loaded or stored.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct CaStorageError(pub String);
