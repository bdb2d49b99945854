use std::io;
use std::os::fd::OwnedFd;

use shorthorn_ring::{IoBuf, Stream, StreamLimits, Token};
use shorthorn_wire::{FrameError, HEADER_BYTES, Header, Session};

use crate::limits::{RECEIVE_BYTES, SLOTS};

/// The sources of the tokens of a connection's operations; the index is the connection.
pub(crate) const SOURCE_SEND: u8 = 2;
/// See [`SOURCE_SEND`].
pub(crate) const SOURCE_RECEIVE: u8 = 3;

/// A connection from an engine, encrypted or not, with its frames.
#[derive(Debug)]
pub(crate) struct EngineConnection {
    /// The socket, for all but headers of frames.
    pub stream: Stream,
    /// Makes and reads the headers, so that none is left out of the numbers.
    session: Session,
    /// The description of the peer, for logs.
    pub peer: String,
    /// True if nothing is read or sent on the connection any more. It is removed when the kernel has released
    /// it and its requests have ended.
    pub ending: bool,
    /// The slot whose data is being received in place.
    pub receiving: Option<u16>,
    /// True if bytes have come since the last tick.
    pub heard: bool,
    /// The number of ticks since the last received bytes.
    pub silent_ticks: u32,
}

impl EngineConnection {
    /// Creates the connection number `index`, on a socket that is open already.
    pub fn new(socket: OwnedFd, session: Session, peer: String, index: u16) -> EngineConnection {
        let token = |source| Token { source, kind: 0, index, tag: 0 };
        // Every response has a slot, and there is one welcome beside.
        let limits = StreamLimits { frames: SLOTS + 1, receive_bytes: RECEIVE_BYTES };
        EngineConnection {
            stream: Stream::new(socket, token(SOURCE_SEND), token(SOURCE_RECEIVE), limits),
            session,
            peer,
            ending: false,
            receiving: None,
            heard: true,
            silent_ticks: 0,
        }
    }

    /// Returns the header of the next frame, if it is here whole. The frame stays the next one until its
    /// header is taken.
    pub fn header(&self) -> Option<Result<Header, FrameError>> {
        self.stream.bytes().first_chunk().map(|bytes| self.session.decode(bytes))
    }

    /// Takes the next frame's header; its data comes next.
    pub fn take_header(&mut self) {
        self.session.advance();
        self.stream.consume(HEADER_BYTES);
    }

    /// Queues a response; `slot` has its data. After an error the connection is of no more use: the number of
    /// the frame is gone.
    pub fn send(&mut self, response: &Header, data: Option<IoBuf>, slot: u16) -> io::Result<()> {
        self.stream.send(&self.session.encode(response), data, Some(u32::from(slot)))
    }

    /// Counts a tick. Returns the number of ticks since the last received byte.
    pub fn tick(&mut self) -> u32 {
        self.silent_ticks = if self.heard { 0 } else { self.silent_ticks + 1 };
        self.heard = false;
        self.silent_ticks
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::net::UnixStream;

    use shorthorn_types::{Generation, ReplicaId, Secret};
    use shorthorn_wire::{Claim, Nonce};

    use super::*;
    use crate::limits::{SILENT_TICKS_MAX, TICK};

    /// Returns a connection, and the engine's end of its socket.
    pub(crate) fn connection(index: u16) -> (EngineConnection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (volume, replica) = ("v1".parse().unwrap(), ReplicaId::from_random(7));
        let claim = Claim { volume, replica, generation: Generation::new(1, 0), queue: 0 };
        let nonce = Nonce::new([5; 32]);
        let session = Session::of_replica(&Secret::new([3; 32]), nonce, nonce, &claim);
        (EngineConnection::new(ours.into(), session, "test".to_owned(), index), theirs)
    }

    #[test]
    fn silence_is_counted_from_the_last_byte() {
        let (mut connection, _theirs) = connection(0);
        assert_eq!(connection.tick(), 0, "the connection is new");
        assert_eq!([connection.tick(), connection.tick()], [1, 2]);
        connection.heard = true;
        assert_eq!([connection.tick(), connection.tick()], [0, 1]);
        assert_eq!(TICK * SILENT_TICKS_MAX, std::time::Duration::from_secs(60), "as is documented");
    }
}
