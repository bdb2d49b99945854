//! Control connections: one to each replica, made when it is needed.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use shorthorn_core::PeerIndex;
use shorthorn_types::limits::MAX_MEMBERS;
use shorthorn_types::{Members, ReplicaId};
use shorthorn_views::accounts_to_forget;
use shorthorn_wire::{CONTROL_QUEUE, Welcome};

use crate::accounts;
use crate::connection::{ConnectError, Connection};
use crate::courier::Desk;
use crate::shared::lock;

/// A replica closes a connection that is silent for a minute: one that was not used for so long is made anew.
const IDLE_LIMIT: Duration = Duration::from_secs(30);
/// How long a replica may take for what is asked over a control connection: making a layer durable, or reading
/// where a large one has data, takes longer than a request.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

/// One place for each replica. Who uses a connection holds its lock meanwhile.
#[derive(Debug, Default)]
pub struct Lines([Mutex<Option<Line>>; MAX_MEMBERS]);

#[derive(Debug)]
struct Line {
    connection: Connection,
    used: Instant,
}

impl Desk {
    /// Opens a new control connection to a replica, which closes the last one.
    pub fn open_line(&self, peer: PeerIndex) -> Result<Welcome, ConnectError> {
        let mut place = lock(&self.lines.0[usize::from(peer)]);
        *place = None;
        let (line, welcome) = self.make_line(peer)?;
        *place = Some(line);
        Ok(welcome)
    }

    /// Asks a replica something over its control connection, which is closed where that fails.
    pub fn with_line<T>(
        &self,
        peer: PeerIndex,
        ask: impl FnOnce(&mut Connection) -> Result<T, ConnectError>,
    ) -> Result<T, ConnectError> {
        let mut place = lock(&self.lines.0[usize::from(peer)]);
        let mut line = match place.take().filter(|line| line.used.elapsed() < IDLE_LIMIT) {
            Some(line) => line,
            None => self.make_line(peer)?.0,
        };
        let answer = ask(&mut line.connection);
        // After a refusal the connection is as good as before.
        if matches!(answer, Ok(_) | Err(ConnectError::Refused { .. })) {
            line.used = Instant::now();
            *place = Some(line);
        }
        answer
    }

    /// As [`Desk::with_line`], for what has to be answered within `limit`.
    pub fn with_line_within<T>(
        &self,
        peer: PeerIndex,
        limit: Duration,
        ask: impl FnOnce(&mut Connection) -> Result<T, ConnectError>,
    ) -> Result<T, ConnectError> {
        self.with_line(peer, |line| {
            set_limit(line, limit)?;
            let answer = ask(line);
            set_limit(line, ANSWER_LIMIT).and(answer)
        })
    }

    fn make_line(&self, peer: PeerIndex) -> Result<(Line, Welcome), ConnectError> {
        let peer = self.peer(peer).ok_or_else(|| ConnectError::Address(String::new()))?;
        let (mut connection, welcome) = self.greeter.greet(&peer.endpoint, CONTROL_QUEUE)?;
        set_limit(&connection, ANSWER_LIMIT)?;
        self.reconcile(&mut connection, peer.endpoint.replica, &welcome)?;
        Ok((Line { connection, used: Instant::now() }, welcome))
    }

    /// Has a replica that was greeted forget the accounts that it keeps in vain. Nobody begins one on it meanwhile: that
    /// goes over its line, whose place is locked, or comes with a view, and then the replica is in a view.
    fn reconcile(
        &self,
        connection: &mut Connection,
        me: ReplicaId,
        welcome: &Welcome,
    ) -> Result<(), ConnectError> {
        if welcome.tracks.is_empty() {
            return Ok(());
        }
        let wanted = Members::new(self.peers().iter().map(|(_, peer)| peer.endpoint.replica));
        let (view, pending) = (self.shared.look(|core| core.membership().view()), self.shared.pending_view());
        let honoured = pending.iter().flat_map(|pending| pending.honoured.views());
        let proposed = pending.iter().map(|pending| &pending.view);
        let views = welcome.report.views().chain([&view]).chain(honoured).chain(proposed);
        let gone = accounts_to_forget(&welcome.tracks, &wanted.unwrap_or_default(), views);
        match accounts::forget(connection, me, &gone) {
            // The connection is as good as before; it is tried again at the next greeting.
            Err(ConnectError::Refused { message, .. }) => {
                tracing::warn!(volume = %self.greeter.volume, replica = %me, %gone, message, "a replica still counts what replicas miss that are gone");
                Ok(())
            }
            forgotten => forgotten,
        }
    }
}

fn set_limit(connection: &Connection, limit: Duration) -> Result<(), ConnectError> {
    let set = connection.set_timeout(Some(limit));
    set.map_err(|source| ConnectError::Io { action: "set a time-out".to_owned(), source })
}
