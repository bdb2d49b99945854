use std::os::fd::OwnedFd;

use shorthorn_ring::{Stream, StreamLimits, Token};

use crate::limits::{RECEIVE_BYTES, SLOTS};

/// The sources of the tokens of a connection's operations; the index is the connection.
pub(crate) const SOURCE_SEND: u8 = 2;
/// See [`SOURCE_SEND`].
pub(crate) const SOURCE_RECEIVE: u8 = 3;

/// One connection of an engine.
#[derive(Debug)]
pub(crate) struct Connection {
    /// The socket.
    pub stream: Stream,
    /// Who it is, for logs.
    pub peer: String,
    /// It is over: nothing is read or sent any more. It goes when the kernel has let go of it and its
    /// requests have ended.
    pub ending: bool,
    /// The slot whose data is being received in place.
    pub receiving: Option<u16>,
    /// Whether bytes have come since the last tick.
    pub heard: bool,
    /// How many ticks ago the last bytes came.
    pub silent_ticks: u32,
}

impl Connection {
    /// The connection number `index`, on a socket that is open already.
    pub fn new(socket: OwnedFd, peer: String, index: u16) -> Connection {
        let token = |source| Token { source, kind: 0, index, tag: 0 };
        // Every response has a slot, and there is one welcome beside.
        let limits = StreamLimits { frames: SLOTS + 1, receive_bytes: RECEIVE_BYTES };
        Connection {
            stream: Stream::new(socket, token(SOURCE_SEND), token(SOURCE_RECEIVE), limits),
            peer,
            ending: false,
            receiving: None,
            heard: true,
            silent_ticks: 0,
        }
    }

    /// A tick has passed. How many have since the last byte came.
    pub fn tick(&mut self) -> u32 {
        self.silent_ticks = if self.heard { 0 } else { self.silent_ticks + 1 };
        self.heard = false;
        self.silent_ticks
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::limits::{SILENT_TICKS_MAX, TICK};

    #[test]
    fn silence_is_counted_from_the_last_byte() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut connection = Connection::new(ours.into(), "test".to_owned(), 0);
        assert_eq!(connection.tick(), 0, "it has just come");
        assert_eq!([connection.tick(), connection.tick()], [1, 2]);
        connection.heard = true;
        assert_eq!([connection.tick(), connection.tick()], [0, 1]);
        assert_eq!(TICK * SILENT_TICKS_MAX, std::time::Duration::from_secs(60), "as is documented");
    }
}
