//! Control connections: one to each replica, made when it is needed.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use shorthorn_core::PeerIndex;
use shorthorn_types::limits::MAX_MEMBERS;
use shorthorn_wire::{CONTROL_QUEUE, Welcome};

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
        let (connection, welcome) = self.greeter.greet(&peer.endpoint, CONTROL_QUEUE)?;
        set_limit(&connection, ANSWER_LIMIT)?;
        Ok((Line { connection, used: Instant::now() }, welcome))
    }
}

fn set_limit(connection: &Connection, limit: Duration) -> Result<(), ConnectError> {
    let set = connection.set_timeout(Some(limit));
    set.map_err(|source| ConnectError::Io { action: "set a time-out".to_owned(), source })
}
