//! Control connections: one to each replica.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use shorthorn_core::PeerIndex;
use shorthorn_types::ReplicaId;
use shorthorn_types::limits::MAX_MEMBERS;

use crate::connection::ReplicaConnection;
use crate::shared_core::lock;

/// The age at which an unused connection is replaced. A replica closes a connection that is silent for a
/// minute.
const IDLE_LIMIT: Duration = Duration::from_secs(30);

/// The control connection of each replica. The user of a connection holds its lock.
#[derive(Debug, Default)]
pub struct ControlConnections([Mutex<Option<ControlConnection>>; MAX_MEMBERS]);

impl ControlConnections {
    /// Waits for the connection to replica number `peer`, below [`MAX_MEMBERS`].
    pub fn of(&self, peer: PeerIndex) -> MutexGuard<'_, Option<ControlConnection>> {
        lock(&self.0[usize::from(peer)])
    }
}

/// An open control connection.
#[derive(Debug)]
pub struct ControlConnection {
    replica: ReplicaId,
    pub connection: ReplicaConnection,
    used: Instant,
}

impl ControlConnection {
    /// Returns the connection that was just opened to `replica`.
    pub fn new(replica: ReplicaId, connection: ReplicaConnection) -> ControlConnection {
        ControlConnection { replica, connection, used: Instant::now() }
    }

    /// Returns true if a request may be sent to `replica`. Another replica may have had the number before.
    pub fn is_usable(&self, replica: ReplicaId) -> bool {
        self.replica == replica && self.used.elapsed() < IDLE_LIMIT
    }

    /// Records that a request was answered.
    pub fn used(&mut self) {
        self.used = Instant::now();
    }
}
