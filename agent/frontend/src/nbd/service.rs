//! The connections of one queue.

use std::os::fd::OwnedFd;
use std::time::Instant;

use shorthorn_ring::Completion;
use shorthorn_types::Errno;

use super::connection::{Connection, ConnectionContext, FirstPhase, RECEIVED, SENT};
use crate::{QueueIo, Quiesced};

/// All connections of one queue, and their shared state.
#[derive(Debug)]
pub(super) struct NbdConnections {
    connections: Box<[Option<Connection>]>,
    shared: ConnectionContext,
    /// The number of connections ever opened. Tokens contain it, so that late completions find no other
    /// connection.
    incarnation: u32,
    open: u16,
    lost: bool,
}

impl NbdConnections {
    /// Creates a service for at most `connections` at a time.
    pub(super) fn new(shared: ConnectionContext, connections: u16) -> NbdConnections {
        let connections = (0..connections).map(|_| None).collect();
        NbdConnections { connections, shared, incarnation: 0, open: 0, lost: false }
    }

    /// Returns the number of connections that have not ended.
    pub(super) fn open(&self) -> u16 {
        self.open
    }

    /// Returns true if there can be one more.
    pub(super) fn has_room(&self) -> bool {
        usize::from(self.open) < self.connections.len()
    }

    /// Returns the client that has negotiated for the longest time, and since when.
    pub(super) fn oldest_negotiation(&self) -> Option<(u16, Instant)> {
        let negotiating = (0..).zip(&self.connections).filter_map(|(id, connection)| {
            let since = connection.as_ref()?.negotiates_since()?;
            Some((id, since))
        });
        negotiating.min_by_key(|(_, since)| *since)
    }

    /// Ends connection `id`, which has chosen no export. Its place is free soon.
    pub(super) fn end_negotiation(&mut self, io: &mut QueueIo<'_>, id: u16) {
        tracing::info!(
            volume = %self.shared.export.name,
            "closed the connection of an NBD client that has not chosen an export, to accept another client"
        );
        self.with(id, io, |connection, _, _| connection.leave());
    }

    /// Returns true if a connection broke off since this was asked last. Its requests may still be in
    /// progress.
    pub(super) fn take_lost(&mut self) -> bool {
        std::mem::take(&mut self.lost)
    }

    /// Serves another connection. Returns none, and closes the socket, if all places are taken.
    pub(super) fn add(&mut self, fd: OwnedFd, first_phase: FirstPhase) -> Option<u16> {
        let place = self.connections.iter().position(Option::is_none)?;
        let id = u16::try_from(place).ok()?;
        self.incarnation = self.incarnation.wrapping_add(1);
        self.connections[place] = Some(Connection::new(id, self.incarnation, fd, first_phase, &self.shared));
        self.open += 1;
        Some(id)
    }

    /// Starts to talk to connection `id`.
    pub(super) fn start(&mut self, io: &mut QueueIo<'_>, id: u16) {
        self.with(id, io, Connection::start);
        self.flush(io);
    }

    /// Handles a completion of one of the connections.
    pub(super) fn on_completion(&mut self, io: &mut QueueIo<'_>, completion: Completion) {
        self.with(completion.token.index, io, |connection, shared, io| {
            if !connection.owns(completion.token) {
                return;
            }
            match completion.token.kind {
                SENT => connection.on_sent(completion, shared, io),
                RECEIVED => connection.on_received(completion, shared, io),
                _ => {}
            }
        });
        self.resume(io);
    }

    /// Handles the end of the part in `slot` in the volume.
    pub(super) fn complete(&mut self, io: &mut QueueIo<'_>, slot: u16, outcome: Result<(), Errno>) {
        let part = self.shared.commands.part(slot);
        let command = self.shared.commands.get(part.command);
        command.parts -= 1;
        if let Err(errno) = outcome {
            command.error.get_or_insert_with(|| errno.into());
        }
        let id = command.connection;
        self.with(id, io, |connection, shared, io| connection.part_done(slot, shared, io));
        self.resume(io);
    }

    /// Returns true if no slot is in use.
    pub(super) fn is_idle(&self) -> bool {
        self.shared.share.is_idle()
    }

    /// Sends the queued replies.
    pub(super) fn flush(&mut self, io: &mut QueueIo<'_>) {
        for connection in self.connections.iter_mut().flatten() {
            connection.flush(io);
        }
    }

    /// Ends all connections after the requests in progress are answered.
    pub(super) fn leave(&mut self, io: &mut QueueIo<'_>) {
        for id in 0..u16::try_from(self.connections.len()).unwrap_or(u16::MAX) {
            self.with(id, io, |connection, _, _| connection.leave());
        }
    }

    /// Reads no more requests than have begun, on any connection: see [`Connection::quiesce`].
    pub(super) fn quiesce(&mut self, io: &mut QueueIo<'_>) {
        for id in 0..u16::try_from(self.connections.len()).unwrap_or(u16::MAX) {
            self.with(id, io, |connection, _, io| connection.quiesce(io));
        }
    }

    /// Returns the progress of parking. Of several connections none is handed over: all but one are broken.
    pub(super) fn quiesced(&self) -> Quiesced {
        let mut connections = self.connections.iter().flatten();
        if !connections.clone().all(Connection::is_quiesced) {
            return Quiesced::NotYet;
        }
        match (connections.next(), connections.next()) {
            (Some(only), None) => only.share().map_or(Quiesced::Done, Quiesced::At),
            _ => Quiesced::Done,
        }
    }

    /// Does `work` on connection `id`, and forgets the connection if that was its end.
    fn with(
        &mut self,
        id: u16,
        io: &mut QueueIo<'_>,
        work: impl FnOnce(&mut Connection, &mut ConnectionContext, &mut QueueIo<'_>),
    ) {
        let Some(place) = self.connections.get_mut(usize::from(id)) else { return };
        let Some(connection) = place else { return };
        let before = connection.is_lost();
        work(connection, &mut self.shared, io);
        let over = connection.finish_if_over(&mut self.shared, io);
        self.lost |= connection.is_lost() && !before;
        if over {
            *place = None;
            self.open -= 1;
        }
    }

    /// Continues the connections that waited for slots, in their order.
    fn resume(&mut self, io: &mut QueueIo<'_>) {
        let mut position = 0;
        while let Some(id) = self.shared.share.waiting(position) {
            self.with(id, io, Connection::advance);
            if self.shared.share.waiting(position) == Some(id) {
                position += 1;
            }
        }
    }
}
