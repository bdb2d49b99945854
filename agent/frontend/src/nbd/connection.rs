//! A connection: turns the bytes of a client into requests for the volume, and sends the replies.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use shorthorn_ring::{Completion, IoBuf, Received, Stream, StreamLimits, Token};
use shorthorn_types::limits::{MAX_IO_BYTES, MAX_ZERO_BYTES};

use super::command::{Commands, NbdCommand, RequestPart};
use super::export::Export;
use super::handshake::{Handshake, Next, Offer, greeting};
use super::protocol::{
    CommandKind, MAX_REQUEST_BYTES, NbdError, RequestHeader, data_chunk, error_chunk, simple_reply,
};
use super::request::{buffer, refusal, submit};
use super::share::SlotShare;
use crate::{QueueIo, SOURCE};

/// [`Token::kind`] of a finished send.
pub(super) const SENT: u8 = 1;
/// [`Token::kind`] of a finished receive.
pub(super) const RECEIVED: u8 = 2;

/// [`Token::kind`] of a request to end a receive.
const DISARMED: u8 = 3;

/// The maximum bytes of one receive: some ten small writes with their data, or thousands of reads. Larger
/// data is received directly into its slot.
const RECEIVE_BYTES: usize = 64 << 10;
/// The maximum number of unsent replies without a slot (errors and completed ones), beyond one for every
/// slot, at which more requests are read.
const SPARE_REPLIES: usize = 16;
/// Owner of a frame that has no slot.
const NO_SLOT: u32 = u32::MAX;

/// The state that the connections of a queue share.
#[derive(Debug)]
pub(super) struct ConnectionContext {
    pub(super) export: Arc<Export>,
    pub(super) share: SlotShare,
    pub(super) commands: Commands,
    replies_max: usize,
    frames_max: usize,
    /// Owners of the frames that were just sent.
    finished: Vec<u32>,
}

impl ConnectionContext {
    pub(super) fn new(export: Arc<Export>, slots: u16, connections: u16) -> ConnectionContext {
        let replies_max = usize::from(slots) + SPARE_REPLIES;
        // Replies that may wait, the last reply of every command in progress, and the data of every slot.
        let frames_max = replies_max + 2 * usize::from(slots) + 2;
        ConnectionContext {
            export,
            share: SlotShare::new(slots, connections),
            commands: Commands::new(slots, connections),
            replies_max,
            frames_max,
            finished: Vec::with_capacity(frames_max),
        }
    }
}

#[derive(Debug)]
enum ConnectionPhase {
    Handshake(Handshake),
    Serving,
    /// The requests in progress are answered, and then the connection ends.
    Leaving,
    /// The connection neither sends nor receives any more; requests in progress end without a reply.
    Dead,
}

/// The phase in which a connection begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstPhase {
    /// With the newstyle negotiation.
    Negotiate,
    /// In the transmission phase, as the Linux driver wants it.
    Transmission,
}

/// The connection of a client.
#[derive(Debug)]
pub(super) struct Connection {
    id: u16,
    incarnation: u32,
    opened: Instant,
    stream: Stream,
    phase: ConnectionPhase,
    structured: bool,
    /// The request that is being cut into parts.
    current: Option<u16>,
    /// The slot whose data are being received.
    receiving: Option<u16>,
    /// The number of requests in progress.
    commands: u16,
    /// Replies without a slot that wait to be sent.
    replies: usize,
    /// True if nothing is read beyond the request that has begun.
    parking: bool,
    end: ConnectionEnd,
}

/// The way in which the client and the server have ended a connection so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionEnd {
    /// The connection has not ended, unless it is dead.
    Open,
    /// The client has closed its side without a good-bye.
    ClosedByClient,
    /// The end was agreed: the client, or the server, has said good-bye.
    Agreed,
}

impl Connection {
    pub(super) fn new(
        id: u16,
        incarnation: u32,
        fd: OwnedFd,
        first_phase: FirstPhase,
        shared: &ConnectionContext,
    ) -> Connection {
        let token = |kind| Token { source: SOURCE, kind, index: id, tag: incarnation };
        let limits = StreamLimits { frames: shared.frames_max, receive_bytes: RECEIVE_BYTES };
        Connection {
            id,
            incarnation,
            opened: Instant::now(),
            stream: Stream::new(fd, token(SENT), token(RECEIVED), limits),
            phase: match first_phase {
                FirstPhase::Negotiate => ConnectionPhase::Handshake(Handshake::new()),
                FirstPhase::Transmission => ConnectionPhase::Serving,
            },
            structured: false,
            current: None,
            receiving: None,
            commands: 0,
            replies: 0,
            parking: false,
            end: ConnectionEnd::Open,
        }
    }

    /// Returns true if `token` was given out by this connection, not by an earlier one in its place.
    pub(super) fn owns(&self, token: Token) -> bool {
        token.tag == self.incarnation
    }

    /// Returns the time since which the client negotiates, unless it has chosen an export.
    pub(super) fn negotiates_since(&self) -> Option<Instant> {
        matches!(self.phase, ConnectionPhase::Handshake(_)).then_some(self.opened)
    }

    /// Sends the first message, if it is the server's, and begins to receive.
    pub(super) fn start(&mut self, shared: &mut ConnectionContext, io: &mut QueueIo<'_>) {
        if matches!(self.phase, ConnectionPhase::Handshake(_))
            && self.stream.send_owned(&[], greeting()).is_err()
        {
            self.lose();
        }
        self.stream.arm(io.ring);
        self.advance(shared, io);
    }

    /// Ends the connection as soon as all requests are answered.
    pub(super) fn leave(&mut self) {
        self.end = ConnectionEnd::Agreed;
        match self.phase {
            ConnectionPhase::Handshake(_) => self.lose(),
            ConnectionPhase::Serving => self.phase = ConnectionPhase::Leaving,
            ConnectionPhase::Leaving | ConnectionPhase::Dead => {}
        }
    }

    /// Reads only the requests that have arrived, and the rest of one that has arrived in part. The remaining
    /// bytes in the socket are for another process.
    pub(super) fn quiesce(&mut self, io: &mut QueueIo<'_>) {
        self.parking = true;
        // A receive for data asks for no more than belongs to its request.
        if self.receiving.is_none() {
            let token = Token { source: SOURCE, kind: DISARMED, index: self.id, tag: self.incarnation };
            self.stream.disarm(io.ring, token);
        }
    }

    /// Returns true if every request that was read is answered, and the answers are sent.
    pub(super) fn is_quiesced(&self) -> bool {
        let is_quiet = self.commands == 0 && !self.stream.is_sending();
        match self.phase {
            ConnectionPhase::Serving => {
                self.parking && is_quiet && self.stream.is_idle() && self.stream.bytes().is_empty()
            }
            ConnectionPhase::Handshake(_) | ConnectionPhase::Leaving | ConnectionPhase::Dead => is_quiet,
        }
    }

    /// Returns the socket for another process, if it is at the start of a request.
    pub(super) fn share(&self) -> Option<OwnedFd> {
        if !matches!(self.phase, ConnectionPhase::Serving) || !self.is_quiesced() {
            return None;
        }
        let shared = self.stream.share();
        shared.inspect_err(|error| tracing::warn!(%error, "nbd: a connection cannot be handed over")).ok()
    }

    /// Asks for more bytes; while parking, only for those `missing` of the request that has begun.
    fn listen(&mut self, missing: u32, io: &mut QueueIo<'_>) {
        self.stream.arm_at_most(io.ring, if self.parking { missing } else { u32::MAX });
    }

    /// Returns true if the connection broke off without a good-bye.
    pub(super) fn is_lost(&self) -> bool {
        match self.end {
            ConnectionEnd::Open => self.is_dead(),
            ConnectionEnd::ClosedByClient => true,
            ConnectionEnd::Agreed => false,
        }
    }

    /// Handles the end of the client's requests. The client may still read: its requests are answered, unless
    /// one was cut off.
    fn end(&mut self) {
        if self.end == ConnectionEnd::Open {
            self.end = ConnectionEnd::ClosedByClient;
        }
        match self.phase {
            ConnectionPhase::Serving if self.receiving.is_none() && self.current.is_none() => {
                self.phase = ConnectionPhase::Leaving;
            }
            _ => self.lose(),
        }
    }

    fn lose(&mut self) {
        if !self.is_dead() {
            self.stream.shutdown();
            self.phase = ConnectionPhase::Dead;
        }
    }

    fn is_dead(&self) -> bool {
        matches!(self.phase, ConnectionPhase::Dead)
    }

    /// Advances as far as the available bytes and slots allow.
    pub(super) fn advance(&mut self, shared: &mut ConnectionContext, io: &mut QueueIo<'_>) {
        while self.receiving.is_none() {
            let more = match (&self.phase, self.current) {
                (ConnectionPhase::Handshake(_), _) => self.negotiate(shared, io),
                (ConnectionPhase::Serving | ConnectionPhase::Leaving, Some(id)) => {
                    self.continue_command(id, shared, io)
                }
                (ConnectionPhase::Serving, None) => self.next_request(shared, io),
                (ConnectionPhase::Leaving, None) | (ConnectionPhase::Dead, _) => false,
            };
            if !more {
                return;
            }
        }
    }

    /// Handles a message of the handshake. Returns false if it has to wait for more bytes.
    fn negotiate(&mut self, shared: &ConnectionContext, io: &mut QueueIo<'_>) -> bool {
        // One answer at a time: a client that sends without reading gets no further memory.
        let ConnectionPhase::Handshake(handshake) = &mut self.phase else { return false };
        if self.stream.is_sending() {
            return false;
        }
        let slots = u32::from(shared.share.largest_reservation());
        let offer = Offer {
            name: shared.export.name.as_str(),
            size_bytes: shared.export.size_bytes(),
            max_request_bytes: MAX_REQUEST_BYTES,
            max_simple_request_bytes: MAX_REQUEST_BYTES.min(slots * MAX_IO_BYTES),
        };
        let mut answer = Vec::new();
        let (used, next) = handshake.advance(&offer, self.stream.bytes(), &mut answer);
        self.structured = handshake.structured();
        self.stream.consume(used);
        if !answer.is_empty() && self.stream.send_owned(&[], answer).is_err() {
            self.lose();
        }
        match next {
            Next::Wait => self.stream.arm(io.ring),
            Next::Go => return true,
            Next::Close => {
                self.end = ConnectionEnd::Agreed;
                self.phase = ConnectionPhase::Leaving;
            }
            Next::Transmission => {
                self.phase = ConnectionPhase::Serving;
                return true;
            }
        }
        false
    }

    /// Reads the header of the next request; returns false if it has to wait.
    fn next_request(&mut self, shared: &mut ConnectionContext, io: &mut QueueIo<'_>) -> bool {
        if self.replies >= shared.replies_max {
            return false; // continues when some are sent
        }
        let header = match RequestHeader::parse(self.stream.bytes()) {
            None => {
                self.listen(missing_of_header(self.stream.bytes().len()), io);
                return false;
            }
            Some(Err(bad)) => {
                tracing::warn!(
                    volume = %shared.export.name,
                    magic = bad.0,
                    "NBD client sent no request: closed"
                );
                self.lose();
                return false;
            }
            Some(Ok(header)) => header,
        };
        self.stream.consume(RequestHeader::BYTES);
        if header.kind == CommandKind::Disconnect {
            self.end = ConnectionEnd::Agreed;
            self.phase = ConnectionPhase::Leaving;
            return false;
        }
        self.take_on(&header, shared, io);
        true
    }

    fn take_on(&mut self, header: &RequestHeader, shared: &mut ConnectionContext, io: &mut QueueIo<'_>) {
        let mut command = NbdCommand::new(self.id, header.kind, header.fua(), header.cookie);
        // Of a longer range the zeroes are made without taking space. All requests behind it on this
        // connection wait until its last part is under way, and as data it may be 4 GiB.
        command.no_hole = header.no_hole() && header.length_bytes <= MAX_ZERO_BYTES;
        command.offset_bytes = header.offset_bytes;
        command.rest_bytes = match header.kind {
            CommandKind::Flush => 1,
            CommandKind::Unknown(_) => 0,
            _ => header.length_bytes,
        };
        command.error = header.check(shared.export.size_bytes()).err();
        let parts = command.rest_bytes.div_ceil(MAX_IO_BYTES);
        if self.waits_for_all(&command) && parts > shared.share.largest_reservation().into() {
            command.error.get_or_insert(NbdError::INVALID);
        }
        if let Some(error) = command.error {
            io.refusals.push(refusal(header, error));
        }
        self.current = shared.commands.insert(command);
        debug_assert!(self.current.is_some(), "more commands than slots and connections");
        self.commands += 1;
    }

    /// Returns true if the command needs all of its data before the reply begins. A READ with a simple reply
    /// does, because the header reports errors.
    fn waits_for_all(&self, command: &NbdCommand) -> bool {
        command.kind == CommandKind::Read && !self.structured
    }

    /// Makes the next part of command `id`; returns false if it has to wait.
    fn continue_command(&mut self, id: u16, shared: &mut ConnectionContext, io: &mut QueueIo<'_>) -> bool {
        let command = shared.commands.get(id);
        if command.error.is_some() {
            shared.share.leave(self.id);
            let passing = if command.kind == CommandKind::Write { command.rest_bytes } else { 0 };
            let here = u32::try_from(self.stream.bytes().len()).map_or(passing, |here| here.min(passing));
            self.stream.consume(here as usize);
            let missing = passing - here;
            command.rest_bytes = missing;
            if missing > 0 {
                self.listen(missing, io);
                return false;
            }
        }
        let command = *command;
        if command.rest_bytes == 0 {
            self.current = None;
            if command.is_over() {
                self.finish(id, shared, io);
            }
            return true;
        }
        let parts = if self.waits_for_all(&command) { command.rest_bytes.div_ceil(MAX_IO_BYTES) } else { 1 };
        let parts = u16::try_from(parts).unwrap_or(u16::MAX);
        if !shared.share.reserve(self.id, parts) {
            return false; // continues when slots are given back
        }
        for _ in 0..parts {
            self.make_part(id, shared, io);
        }
        true
    }

    fn make_part(&mut self, id: u16, shared: &mut ConnectionContext, io: &mut QueueIo<'_>) {
        let slot = shared.share.take();
        let command = shared.commands.get(id);
        let part = RequestPart::new(id, command.offset_bytes, command.next_part_bytes());
        command.offset_bytes += u64::from(part.length_bytes);
        command.rest_bytes -= part.length_bytes;
        command.parts += 1;
        let command = *command;
        shared.commands.set_part(slot, part);
        if self.waits_for_all(&command) {
            shared.commands.chain(slot);
        }
        if command.kind == CommandKind::Write && !self.stream.receive_into(buffer(io, slot, part)) {
            self.receiving = Some(slot);
            self.stream.arm(io.ring);
            return;
        }
        submit(slot, &mut shared.commands, io);
    }

    /// Handles the end of a receive.
    pub(super) fn on_received(
        &mut self,
        completion: Completion,
        shared: &mut ConnectionContext,
        io: &mut QueueIo<'_>,
    ) {
        match self.stream.on_received(completion) {
            Ok(Received::Bytes) => self.advance(shared, io),
            Ok(Received::Part) => self.stream.arm(io.ring),
            Ok(Received::Payload) => {
                if let Some(slot) = self.receiving.take() {
                    submit(slot, &mut shared.commands, io);
                }
                self.advance(shared, io);
            }
            Ok(Received::End) => self.end(),
            Err(_) => self.lose(),
        }
    }

    /// Handles the end of a send: slots whose data is out are free.
    pub(super) fn on_sent(
        &mut self,
        completion: Completion,
        shared: &mut ConnectionContext,
        io: &mut QueueIo<'_>,
    ) {
        if self.stream.on_sent(completion, &mut shared.finished).is_err() {
            self.lose();
        }
        self.frames_gone(shared);
        if !self.is_dead() {
            self.stream.flush(io.ring);
            self.advance(shared, io);
        }
    }

    fn frames_gone(&mut self, shared: &mut ConnectionContext) {
        while let Some(owner) = shared.finished.pop() {
            match u16::try_from(owner) {
                Ok(slot) => shared.share.give(self.id, slot),
                Err(_) => self.replies -= 1,
            }
        }
    }

    /// Handles the end of the part in `slot`; its command knows it already.
    pub(super) fn part_done(&mut self, slot: u16, shared: &mut ConnectionContext, io: &mut QueueIo<'_>) {
        let part = shared.commands.part(slot);
        let command = *shared.commands.get(part.command);
        let failed = command.error.is_some() || self.is_dead();
        match command.kind {
            _ if self.waits_for_all(&command) => {}
            CommandKind::Read if !failed => {
                let header =
                    data_chunk(command.cookie, part.offset_bytes, part.length_bytes, command.is_over());
                self.send_data(&header, buffer(io, slot, part), slot);
            }
            CommandKind::Trim if command.fua && command.is_over() && !failed => {
                // A discard has no FUA of its own.
                let flush = shared.commands.get(part.command);
                flush.kind = CommandKind::Flush;
                flush.parts = 1;
                submit(slot, &mut shared.commands, io);
                return;
            }
            _ => shared.share.give(self.id, slot),
        }
        if command.is_over() {
            self.finish(part.command, shared, io);
        }
    }

    /// Answers a command whose parts are all done, and forgets it.
    fn finish(&mut self, id: u16, shared: &mut ConnectionContext, io: &mut QueueIo<'_>) {
        let command = *shared.commands.get(id);
        let failed = command.error.is_some() || self.is_dead();
        let reply = simple_reply(command.cookie, command.error);
        match (command.kind, command.error) {
            (CommandKind::Read, Some(error)) if self.structured => {
                self.send_reply(&error_chunk(command.cookie, error));
            }
            (CommandKind::Read, None) if self.structured => {} // the last chunk said so
            (CommandKind::Read, None) => {
                let mut header: &[u8] = &reply;
                while !failed && let Some(slot) = shared.commands.unchain(id) {
                    self.send_data(header, buffer(io, slot, shared.commands.part(slot)), slot);
                    header = &[];
                }
            }
            _ => self.send_reply(&reply),
        }
        while let Some(slot) = shared.commands.unchain(id) {
            shared.share.give(self.id, slot);
        }
        shared.commands.remove(id);
        self.commands -= 1;
    }

    fn send_reply(&mut self, reply: &[u8]) {
        if self.is_dead() {
            return;
        }
        self.replies += 1;
        self.queue(reply, None, NO_SLOT);
    }

    fn send_data(&mut self, header: &[u8], data: IoBuf, slot: u16) {
        self.queue(header, Some(data), slot.into());
    }

    fn queue(&mut self, header: &[u8], data: Option<IoBuf>, owner: u32) {
        // The stream has room for all replies there can be: see ConnectionContext::new.
        let queued = self.stream.send(header, data, Some(owner));
        debug_assert!(queued.is_ok(), "{queued:?}");
        if queued.is_err() {
            self.lose();
        }
    }

    /// Sends the queued replies.
    pub(super) fn flush(&mut self, io: &mut QueueIo<'_>) {
        if !self.is_dead() && self.stream.is_sending() {
            self.stream.flush(io.ring);
        }
    }

    /// Ends the connection if it is over. Returns true if nothing of it is left in the ring or in the volume.
    pub(super) fn finish_if_over(&mut self, shared: &mut ConnectionContext, io: &mut QueueIo<'_>) -> bool {
        if matches!(self.phase, ConnectionPhase::Leaving) && self.commands == 0 && !self.stream.is_sending() {
            self.lose();
        }
        if !self.is_dead() || !self.stream.is_idle() {
            return false;
        }
        // The kernel holds none of our buffers any more.
        shared.share.leave(self.id);
        self.stream.abandon(&mut shared.finished);
        self.frames_gone(shared);
        if let Some(slot) = self.receiving.take() {
            let command = shared.commands.part(slot).command;
            shared.commands.get(command).parts -= 1;
            shared.share.give(self.id, slot);
        }
        if let Some(id) = self.current.take() {
            shared.commands.get(id).rest_bytes = 0;
            if shared.commands.get(id).is_over() {
                self.finish(id, shared, io);
            }
        }
        self.commands == 0
    }
}

/// Returns the missing bytes of a request's header of which `here` bytes have arrived; 0 if it has not begun.
fn missing_of_header(here: usize) -> u32 {
    if here == 0 { 0 } else { u32::try_from(RequestHeader::BYTES.saturating_sub(here)).unwrap_or(0) }
}
