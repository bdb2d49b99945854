//! Opens connections to the replicas, with the identity and the size of the volume.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use shorthorn_control::{EngineSpec, ReplicaEndpoint};
use shorthorn_recovery::{SizeMismatch, fit};
use shorthorn_tls::connection_secret;
use shorthorn_types::{Generation, ReplicaId};
use shorthorn_wire::{EngineClaim, Welcome};

use crate::connection::{ConnectError, ReplicaConnection, finish};

/// The replicas to connect to, and the identity for the handshake.
#[derive(Clone, Debug)]
pub struct ReplicaConnector {
    pub volume: shorthorn_types::VolumeName,
    /// The size of the volume, shared by all clones of a connector.
    size_bytes: Arc<AtomicU64>,
    pub secret: shorthorn_control::Secret,
    pub generation: Generation,
    pub timeout: Duration,
    /// True if connections to other hosts are encrypted.
    encrypts: bool,
}

impl ReplicaConnector {
    pub fn new(spec: &EngineSpec, generation: Generation) -> ReplicaConnector {
        ReplicaConnector {
            volume: spec.volume.clone(),
            size_bytes: Arc::new(AtomicU64::new(spec.size_bytes)),
            secret: connection_secret(&spec.secret, spec.encrypt_in_transit),
            generation,
            timeout: Duration::from_millis(u64::from(spec.replica_timeout_ms)),
            encrypts: spec.encrypt_in_transit,
        }
    }

    /// Returns the size of the volume.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    /// Sets the size of the volume: replicas grow first in each handshake from now on.
    pub fn set_size(&self, size_bytes: u64) {
        self.size_bytes.fetch_max(size_bytes, Ordering::AcqRel);
    }

    /// Opens one connection to a replica, at the first of its addresses that answers.
    pub fn connect(
        &self,
        endpoint: &ReplicaEndpoint,
        queue: u16,
    ) -> Result<(ReplicaConnection, Welcome), ConnectError> {
        let mut last = ConnectError::Address(String::new());
        for address in &endpoint.addresses {
            match self.connect_at(address, endpoint.replica, queue) {
                Ok(answer) => return Ok(answer),
                Err(deposed @ ConnectError::Deposed { .. }) => return Err(deposed),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn connect_at(
        &self,
        address: &str,
        replica: ReplicaId,
        queue: u16,
    ) -> Result<(ReplicaConnection, Welcome), ConnectError> {
        let (volume, generation) = (self.volume.clone(), self.generation);
        let claim = EngineClaim { volume, replica, generation, queue };
        let mut connection = ReplicaConnection::open(address, self.timeout)?;
        connection.require_encryption(self.encrypts);
        let mut welcome = connection.handshake(claim, &self.secret)?;
        let size_bytes = self.size_bytes();
        match finish(fit(&mut connection, &mut welcome, size_bytes)) {
            Ok(()) => Ok((connection, welcome)),
            Err(SizeMismatch::TooLarge { has_bytes }) => {
                let message = format!(
                    "the replica has {has_bytes} bytes, the volume {size_bytes}: this engine does not know \
                     of an expansion yet"
                );
                Err(ConnectError::Refused { message, errno: shorthorn_types::Errno::INVALID })
            }
            Err(SizeMismatch::NotGrown(error)) => Err(error),
        }
    }
}
