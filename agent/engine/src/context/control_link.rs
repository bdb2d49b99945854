//! Requests over the control connections, each of which is made when it is needed.

use std::time::Duration;

use shorthorn_core::PeerIndex;
use shorthorn_recovery::{Address, ReplicaLink, forget_in_vain};
use shorthorn_types::{MarkRegions, ReplicaReport, View};
use shorthorn_wire::{
    CONTROL_QUEUE, CopyState, ExtentsPage, ExtentsQuery, LayerList, RegionsPage, RegionsQuery, Welcome,
};

use super::control_connections::ControlConnection;
use super::{EngineContext, PeerContext};
use crate::connection::{ConnectError, ReplicaConnection, finish};

/// The time limit of an answer over a control connection. Syncing a layer, or reading the extents of a large
/// one, takes longer than a request.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// The time limit for a replica to grow: it syncs some documents and its head for that.
const GROW_LIMIT: Duration = Duration::from_secs(30);

impl EngineContext {
    /// Opens a new control connection to a replica, which closes the last one.
    pub fn renew_control(&self, to: Address) -> Result<Welcome, ConnectError> {
        let mut slot = self.control_connections.of(to.peer);
        *slot = None;
        let (control, welcome) = self.open_control(to)?;
        *slot = Some(control);
        self.update(to.peer, |peer| {
            if peer.endpoint.replica == to.replica {
                peer.run = Some(welcome.run);
            }
        });
        Ok(welcome)
    }

    /// Asks a replica something over its control connection, which is closed if that fails.
    pub fn with_control<T>(
        &self,
        to: Address,
        ask: impl FnOnce(&mut ReplicaConnection) -> Result<T, ConnectError>,
    ) -> Result<T, ConnectError> {
        let mut slot = self.control_connections.of(to.peer);
        self.find_at(to)?;
        let mut control = match slot.take().filter(|control| control.is_usable(to.replica)) {
            Some(control) => control,
            None => self.reopen_control(to)?,
        };
        let answer = ask(&mut control.connection);
        // After a refusal the connection is as good as before.
        if matches!(answer, Ok(_) | Err(ConnectError::Refused { .. })) {
            control.used();
            *slot = Some(control);
        }
        answer
    }

    /// Calls the same as [`EngineContext::with_control`], for replica number `peer`.
    pub fn with_control_of<T>(
        &self,
        peer: PeerIndex,
        ask: impl FnOnce(&mut ReplicaConnection) -> Result<T, ConnectError>,
    ) -> Result<T, ConnectError> {
        let known = self.known_peer(peer).ok_or(ConnectError::GivenUp)?;
        self.with_control(Address { peer, replica: known.endpoint.replica }, ask)
    }

    fn find_at(&self, address: Address) -> Result<PeerContext, ConnectError> {
        let known = self.known_peer(address.peer);
        known.filter(|peer| peer.endpoint.replica == address.replica).ok_or(ConnectError::GivenUp)
    }

    /// Replaces a connection that was closed by a new one. It has to lead to the same run of the replica's
    /// process. A later run may lack data that was written over the closed connection and not flushed.
    fn reopen_control(&self, to: Address) -> Result<ControlConnection, ConnectError> {
        let (control, welcome) = self.open_control(to)?;
        match self.find_at(to)?.run {
            Some(run) if run != welcome.run => Err(ConnectError::OtherRun),
            _ => Ok(control),
        }
    }

    fn open_control(&self, to: Address) -> Result<(ControlConnection, Welcome), ConnectError> {
        let peer = self.find_at(to)?;
        let (mut connection, welcome) = self.connector.connect(&peer.endpoint, CONTROL_QUEUE)?;
        set_limit(&mut connection, ANSWER_LIMIT)?;
        match finish(forget_in_vain(self, &mut connection, &welcome)) {
            // The connection is as good as before; the next handshake tries again.
            Err(ConnectError::Refused { message, .. }) => {
                tracing::warn!(
                    volume = %self.connector.volume,
                    replica = %to.replica,
                    tracks = %welcome.tracks,
                    message,
                    "a replica still has out-of-sync sets of removed replicas"
                );
            }
            forgotten => forgotten?,
        }
        Ok((ControlConnection::new(to.replica, connection), welcome))
    }
}

/// The control connection to one replica, taken for each request.
#[derive(Clone, Copy, Debug)]
pub struct ControlLink<'a> {
    pub context: &'a EngineContext,
    pub to: Address,
}

impl ReplicaLink for ControlLink<'_> {
    type Error = ConnectError;

    async fn propose(&mut self, view: View, honoured: &ReplicaReport) -> Result<(), ConnectError> {
        self.context.with_control(self.to, |control| finish(control.propose(view, honoured)))
    }

    async fn commit(&mut self, view: View, honoured: &ReplicaReport) -> Result<(), ConnectError> {
        self.context.with_control(self.to, |control| finish(control.commit(view, honoured)))
    }

    async fn expand(&mut self, size_bytes: u64) -> Result<(), ConnectError> {
        self.context.with_control(self.to, |control| {
            set_limit(control, GROW_LIMIT)?;
            let answer = finish(control.expand(size_bytes));
            set_limit(control, ANSWER_LIMIT).and(answer)
        })
    }

    async fn regions_page(&mut self, query: RegionsQuery) -> Result<RegionsPage, ConnectError> {
        self.context.with_control(self.to, |control| finish(control.regions_page(query)))
    }

    async fn mark(&mut self, change: &MarkRegions) -> Result<(), ConnectError> {
        self.context.with_control(self.to, |control| finish(control.mark(change)))
    }

    async fn layers(&mut self, volume_bytes: impl FnOnce() -> u64) -> Result<LayerList, ConnectError> {
        self.context.with_control(self.to, |control| control.list_layers(volume_bytes))
    }

    async fn extents(
        &mut self,
        query: ExtentsQuery,
        layer_bytes: impl FnOnce() -> u64,
    ) -> Result<ExtentsPage, ConnectError> {
        self.context.with_control(self.to, |control| control.list_extents(query, layer_bytes))
    }

    async fn copy_begin(&mut self, layers: &LayerList) -> Result<CopyState, ConnectError> {
        self.context.with_control(self.to, |control| finish(control.copy_begin(layers)))
    }

    async fn copy_end(&mut self) -> Result<(), ConnectError> {
        self.context.with_control(self.to, |control| finish(control.copy_end()))
    }
}

fn set_limit(connection: &mut ReplicaConnection, limit: Duration) -> Result<(), ConnectError> {
    let set = connection.set_timeout(Some(limit));
    set.map_err(|source| ConnectError::Io { action: "set a time-out".to_owned(), source })
}
