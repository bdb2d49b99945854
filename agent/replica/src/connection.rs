use std::io;
use std::os::fd::OwnedFd;

use shorthorn_ring::{Completion, IoBuf, Received, Ring, Stream, StreamLimits, Token};
use shorthorn_wire::{FrameError, HEADER_BYTES, Header, Session};

use crate::limits::{RECEIVE_BYTES, SLOTS};

/// The sources of the tokens of a connection's operations; the index is the connection.
pub(crate) const SOURCE_SEND: u8 = 2;
/// See [`SOURCE_SEND`].
pub(crate) const SOURCE_RECEIVE: u8 = 3;

/// A connection from an engine, encrypted or not, with its frames.
#[derive(Debug)]
pub(crate) struct EngineConnection {
    stream: Stream,
    /// Makes and reads the headers, so that none is left out of the numbers.
    session: Session,
    /// The description of the peer, for logs.
    peer: String,
    /// True if nothing is read or sent on the connection any more. It is removed when the kernel has released
    /// it and its requests have ended.
    is_over: bool,
    /// The slot whose data is being received in place.
    receiving: Option<u16>,
    /// True if bytes have come since the last tick.
    heard: bool,
    /// The number of ticks since the last received bytes.
    silent_ticks: u32,
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
            is_over: false,
            receiving: None,
            heard: true,
            silent_ticks: 0,
        }
    }

    /// Returns the description of the peer, for logs.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Returns true if the connection is over.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Ends the connection: nothing is read or sent any more.
    pub fn end(&mut self) {
        self.is_over = true;
        self.stream.shutdown();
    }

    /// Appends the slots of data and responses that are not out to `slots`, once the connection is over and
    /// the kernel has released it. Returns false before that.
    pub fn give_up_slots(&mut self, slots: &mut Vec<u32>) -> bool {
        if !self.is_over || !self.stream.is_idle() {
            return false;
        }
        self.stream.abandon(slots);
        slots.extend(self.receiving.take().map(u32::from));
        true
    }

    /// Starts a receive, unless one is in flight or the buffer is full.
    pub fn arm(&mut self, ring: &mut Ring) {
        self.stream.arm(ring);
    }

    /// Starts to send the queued frames, unless a send is in flight or the connection is over.
    pub fn flush(&mut self, ring: &mut Ring) {
        if !self.is_over {
            self.stream.flush(ring);
        }
    }

    /// Handles the completion of a receive. None if the connection has ended. After an error the connection
    /// cannot be used any more.
    pub fn on_received(&mut self, completion: Completion) -> Option<io::Result<Received>> {
        let received = self.stream.on_received(completion);
        if self.is_over {
            return None;
        }
        self.heard = true;
        Some(received)
    }

    /// Handles the completion of a send: see [`Stream::on_sent`].
    pub fn on_sent(&mut self, completion: Completion, slots: &mut Vec<u32>) -> io::Result<()> {
        self.stream.on_sent(completion, slots)
    }

    /// Returns the number of bytes that were received and not taken yet.
    pub fn received_bytes(&self) -> usize {
        self.stream.bytes().len()
    }

    /// Receives the data of the request in `slot` into `buf`. Returns true if all of it is here. Otherwise it
    /// is received in place, and [`EngineConnection::take_receiving`] returns the slot at its end.
    pub fn receive_data(&mut self, slot: u16, buf: IoBuf) -> bool {
        let is_here = self.stream.receive_into(buf);
        self.receiving = (!is_here).then_some(slot);
        is_here
    }

    /// Takes the slot whose data was received in place, if any.
    pub fn take_receiving(&mut self) -> Option<u16> {
        self.receiving.take()
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

    /// Queues the welcome, whose header the session does not encode.
    pub fn send_welcome(&mut self, header: &Header, text: Vec<u8>) -> io::Result<()> {
        self.stream.send_owned(&header.encode(), text)
    }

    /// Queues a response; `slot` has its data. After an error the connection cannot be used any more, because
    /// the number of the frame was used up.
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

    use shorthorn_ring::Arena;
    use shorthorn_types::{Generation, ReplicaId, Secret};
    use shorthorn_wire::{EngineClaim, Nonce, Opcode};

    use super::*;
    use crate::limits::{SILENT_TICKS_MAX, TICK};

    /// Returns a connection, and the engine's end of its socket.
    pub(crate) fn connection(index: u16) -> (EngineConnection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (volume, replica) = ("v1".parse().unwrap(), ReplicaId::from_random(7));
        let claim = EngineClaim { volume, replica, generation: Generation::new(1, 0), queue: 0 };
        let nonce = Nonce::new([5; 32]);
        let session = Session::of_replica(&Secret::new([3; 32]), nonce, nonce, &claim);
        (EngineConnection::new(ours.into(), session, "test".to_owned(), index), theirs)
    }

    #[test]
    fn a_connection_that_is_over_gives_its_slots_up() {
        let (mut connection, _theirs) = connection(0);
        let response = Header::request(Opcode::Ping, 1, 0, 0).response(Ok(()));
        connection.send(&response, None, 3).unwrap();
        assert!(!connection.receive_data(5, Arena::new(1, 4096).unwrap().buf(0)), "nothing has come");
        let mut slots = Vec::new();
        assert!(!connection.give_up_slots(&mut slots) && slots.is_empty(), "the connection is not over");
        connection.end();
        assert!(connection.is_over() && connection.give_up_slots(&mut slots));
        assert_eq!((slots, connection.take_receiving()), (vec![3, 5], None));
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
