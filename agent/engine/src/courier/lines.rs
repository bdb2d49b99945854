//! Control connections: one to each replica, made when it is needed.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use shorthorn_core::PeerIndex;
use shorthorn_recovery::{Address, Link, forget_in_vain};
use shorthorn_types::limits::MAX_MEMBERS;
use shorthorn_types::{MarkRegions, ReplicaId, ReplicaReport, View};
use shorthorn_wire::{
    CONTROL_QUEUE, CopyState, ExtentsPage, ExtentsQuery, LayerList, RegionsPage, RegionsQuery, Welcome,
};

use crate::connection::{ConnectError, Connection, finish};
use crate::courier::{Desk, Peer};
use crate::shared::lock;

/// The age at which an unused connection is replaced. A replica closes a connection that is silent for a
/// minute.
const IDLE_LIMIT: Duration = Duration::from_secs(30);
/// The time limit of an answer over a control connection. Syncing a layer, or reading the extents of a large
/// one, takes longer than a request.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// The time limit for a replica to grow: it syncs some documents and its head for that.
const GROW_LIMIT: Duration = Duration::from_secs(30);

/// The control connection of each replica. The user of a connection holds its lock.
#[derive(Debug, Default)]
pub struct Lines([Mutex<Option<Line>>; MAX_MEMBERS]);

#[derive(Debug)]
struct Line {
    replica: ReplicaId,
    connection: Connection,
    used: Instant,
}

impl Desk {
    /// Opens a new control connection to a replica, which closes the last one.
    pub fn renew_line(&self, to: Address) -> Result<Welcome, ConnectError> {
        let mut place = lock(&self.lines.0[usize::from(to.peer)]);
        *place = None;
        let (line, welcome) = self.make_line(to)?;
        *place = Some(line);
        self.update(to.peer, |peer| {
            if peer.endpoint.replica == to.replica {
                peer.run = Some(welcome.run);
            }
        });
        Ok(welcome)
    }

    /// Asks a replica something over its control connection, which is closed if that fails.
    pub fn with_line<T>(
        &self,
        to: Address,
        ask: impl FnOnce(&mut Connection) -> Result<T, ConnectError>,
    ) -> Result<T, ConnectError> {
        let mut place = lock(&self.lines.0[usize::from(to.peer)]);
        self.find_at(to)?;
        // Another replica may have had the number before.
        let is_usable = |line: &Line| line.replica == to.replica && line.used.elapsed() < IDLE_LIMIT;
        let mut line = match place.take().filter(is_usable) {
            Some(line) => line,
            None => self.make_line_again(to)?,
        };
        let answer = ask(&mut line.connection);
        // After a refusal the connection is as good as before.
        if matches!(answer, Ok(_) | Err(ConnectError::Refused { .. })) {
            line.used = Instant::now();
            *place = Some(line);
        }
        answer
    }

    /// Calls the same as [`Desk::with_line`], for replica number `peer`.
    pub fn with_line_to<T>(
        &self,
        peer: PeerIndex,
        ask: impl FnOnce(&mut Connection) -> Result<T, ConnectError>,
    ) -> Result<T, ConnectError> {
        let known = self.known_peer(peer).ok_or(ConnectError::GivenUp)?;
        self.with_line(Address { peer, replica: known.endpoint.replica }, ask)
    }

    fn find_at(&self, address: Address) -> Result<Peer, ConnectError> {
        let known = self.known_peer(address.peer);
        known.filter(|peer| peer.endpoint.replica == address.replica).ok_or(ConnectError::GivenUp)
    }

    /// Replaces a connection that was closed by a new one. It has to lead to the same run of the replica's
    /// process: a later run may lack data that was written over the closed connection and not flushed.
    fn make_line_again(&self, to: Address) -> Result<Line, ConnectError> {
        let (line, welcome) = self.make_line(to)?;
        match self.find_at(to)?.run {
            Some(run) if run != welcome.run => Err(ConnectError::OtherRun),
            _ => Ok(line),
        }
    }

    fn make_line(&self, to: Address) -> Result<(Line, Welcome), ConnectError> {
        let peer = self.find_at(to)?;
        let (mut connection, welcome) = self.greeter.greet(&peer.endpoint, CONTROL_QUEUE)?;
        set_limit(&mut connection, ANSWER_LIMIT)?;
        match finish(forget_in_vain(self, &mut connection, &welcome)) {
            // The connection is as good as before; it is tried again at the next greeting.
            Err(ConnectError::Refused { message, .. }) => {
                tracing::warn!(volume = %self.greeter.volume, replica = %to.replica, tracks = %welcome.tracks, message, "a \
                 replica still has out-of-sync sets of removed replicas");
            }
            forgotten => forgotten?,
        }
        Ok((Line { replica: to.replica, connection, used: Instant::now() }, welcome))
    }
}

/// The control connection to one replica, taken for each request.
#[derive(Clone, Copy, Debug)]
pub struct ControlLine<'a> {
    pub desk: &'a Desk,
    pub to: Address,
}

impl Link for ControlLine<'_> {
    type Error = ConnectError;

    async fn propose(&mut self, view: View, honoured: &ReplicaReport) -> Result<(), ConnectError> {
        self.desk.with_line(self.to, |line| finish(line.propose(view, honoured)))
    }

    async fn commit(&mut self, view: View, honoured: &ReplicaReport) -> Result<(), ConnectError> {
        self.desk.with_line(self.to, |line| finish(line.commit(view, honoured)))
    }

    async fn expand(&mut self, size_bytes: u64) -> Result<(), ConnectError> {
        self.desk.with_line(self.to, |line| {
            set_limit(line, GROW_LIMIT)?;
            let answer = finish(line.expand(size_bytes));
            set_limit(line, ANSWER_LIMIT).and(answer)
        })
    }

    async fn regions_page(&mut self, query: RegionsQuery) -> Result<RegionsPage, ConnectError> {
        self.desk.with_line(self.to, |line| finish(line.regions_page(query)))
    }

    async fn mark(&mut self, change: &MarkRegions) -> Result<(), ConnectError> {
        self.desk.with_line(self.to, |line| finish(line.mark(change)))
    }

    async fn layers(&mut self) -> Result<LayerList, ConnectError> {
        self.desk.with_line(self.to, Connection::list_layers)
    }

    async fn extents(&mut self, query: ExtentsQuery) -> Result<ExtentsPage, ConnectError> {
        self.desk.with_line(self.to, |line| line.list_extents(query))
    }

    async fn copy_begin(&mut self, layers: &LayerList) -> Result<CopyState, ConnectError> {
        self.desk.with_line(self.to, |line| finish(line.copy_begin(layers)))
    }

    async fn copy_end(&mut self) -> Result<(), ConnectError> {
        self.desk.with_line(self.to, |line| finish(line.copy_end()))
    }
}

fn set_limit(connection: &mut Connection, limit: Duration) -> Result<(), ConnectError> {
    let set = connection.set_timeout(Some(limit));
    set.map_err(|source| ConnectError::Io { action: "set a time-out".to_owned(), source })
}
