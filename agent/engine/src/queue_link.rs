//! The connection of one queue to one replica, on the queue's ring.

use serde::Serialize;
use shorthorn_core::{Event, Operation, PeerIndex, SlotId, VolumeCheck, ZeroBlocks};
use shorthorn_ring::{Arena, Completion, IoBuf, Received, Ring, Stream, StreamLimits, Token};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, Generation, MarkRegions, ReplicaReport, View, ViewId};
use shorthorn_wire::{Flags, HEADER_BYTES, Header, MAX_TEXT_BYTES, Opcode, ViewMessage, encode_text};

use crate::connection::{ConnectError, ReadyConnection, refusal};

mod framed;

use framed::Framed;

/// [`Token::source`] of the completions of links; [`Token::index`] is the peer.
pub const SOURCE: u8 = 2;
const KIND_SEND: u8 = 0;
const KIND_RECEIVE: u8 = 1;

/// The number of frames beside those of requests: a PING, view changes and their marks, changes of sets of
/// regions.
const CONTROL_FRAMES: usize = 64;
/// A view message and a run of small replies fit; payloads of reads are received past it.
const RECEIVE_BYTES: usize = MAX_TEXT_BYTES as usize + (48 << 10);

/// The factor of the upper half of a request id, which is the kind of the request. The lower half is its
/// number.
const ID_REQUEST: u64 = 1 << 32;
const ID_PING: u64 = 2 << 32;
const ID_PROPOSE: u64 = 3 << 32;
const ID_COMMIT: u64 = 4 << 32;
const ID_MARK: u64 = 5 << 32;
const ID_KIND: u64 = 0xffff_ffff_0000_0000;

/// A message of a replica that the core need not know.
#[derive(Debug)]
pub enum Notice {
    /// A newer engine holds the volume.
    Deposed { holder: Generation },
}

/// A request: its operation, its length, and the place of its data in the slot's buffer.
#[derive(Clone, Copy, Debug)]
struct Asked {
    opcode: Opcode,
    bytes: u32,
    buffer_offset: u32,
}

/// The progress of one connection from dialling to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LinkPhase {
    /// The connection is in use.
    Open,
    /// The connection has to end; operations on it may still be under way.
    Closing,
    /// The end was reported, or the place has had no connection yet.
    Closed,
}

/// The connection of a queue to a replica, or the place for one. Errors end in [`Event::Lost`]; after
/// [`QueueLink::close`], [`QueueLink::take_closed`] reports the end of the last operation on it.
#[derive(Debug)]
pub struct QueueLink {
    peer: PeerIndex,
    queue: u16,
    generation: Generation,
    framed: Option<Framed>,
    phase: LinkPhase,
    /// Slots from here on are for copies.
    depth: u16,
    /// Per slot: the request that this replica got, until its answer.
    asked: Box<[Option<Asked>]>,
    /// The read whose data is being received, and the buffer for it.
    receiving: Option<(Header, IoBuf)>,
}

/// The slots that a link serves.
#[derive(Clone, Copy, Debug)]
pub struct LinkSlots {
    /// The number of the frontend's slots.
    pub depth: u16,
    /// The number of copy slots, which follow the frontend's.
    pub copies: u16,
}

impl QueueLink {
    /// Creates the place for a connection.
    pub fn new(peer: PeerIndex, queue: u16, generation: Generation, slots: LinkSlots) -> QueueLink {
        QueueLink {
            peer,
            queue,
            generation,
            framed: None,
            phase: LinkPhase::Closed,
            depth: slots.depth,
            asked: vec![None; usize::from(slots.depth + slots.copies)].into(),
            receiving: None,
        }
    }

    /// Takes a connection with a complete handshake if none is in use. Drops the socket otherwise.
    pub fn connect(&mut self, ready: ReadyConnection) -> bool {
        if !self.is_absent() {
            return false;
        }
        let token = |kind| Token { source: SOURCE, kind, index: u16::from(self.peer), tag: 0 };
        let limits = StreamLimits { frames: self.asked.len() + CONTROL_FRAMES, receive_bytes: RECEIVE_BYTES };
        let ReadyConnection { socket, session } = ready;
        let stream = Stream::new(socket, token(KIND_SEND), token(KIND_RECEIVE), limits);
        self.framed = Some(Framed { stream, session });
        (self.phase, self.receiving) = (LinkPhase::Open, None);
        self.asked.fill(None);
        true
    }

    /// Returns true if the place has no connection, and nothing left of the last one.
    pub fn is_absent(&self) -> bool {
        self.framed.is_none()
    }

    /// Starts to receive.
    pub fn start(&mut self, ring: &mut Ring) {
        if let Some(framed) = &mut self.framed {
            framed.stream.arm(ring);
        }
    }

    /// Queues a request. `data` is its part of the slot's buffer, from `buffer_offset` on, and `data_check`
    /// the check of that for writes.
    pub fn send(
        &mut self,
        slot: SlotId,
        operation: Operation,
        range: ByteRange,
        (data, buffer_offset): (IoBuf, u32),
        data_check: u32,
        events: &mut Vec<Event>,
    ) {
        let durably = |fua| if fua { Flags::FUA } else { Flags::NONE };
        let (opcode, flags) = match operation {
            Operation::Read => (Opcode::Read, Flags::NONE),
            Operation::CheckedRead => (Opcode::Read, Flags::CHECKED),
            Operation::Write { fua } => (Opcode::Write, durably(fua)),
            Operation::WriteRot => (Opcode::Write, Flags::ROTTEN),
            Operation::Flush => (Opcode::Flush, Flags::NONE),
            Operation::Discard => (Opcode::Discard, Flags::NONE),
            Operation::WriteZeroes { fua } => (Opcode::WriteZeroes, durably(fua)),
            Operation::Verify => (Opcode::Verify, Flags::NONE),
        };
        let length = u32::try_from(range.length()).unwrap_or(u32::MAX);
        let (offset, length) = if opcode == Opcode::Flush { (0, 0) } else { (range.offset(), length) };
        let mut header = Header::request(opcode, ID_REQUEST | u64::from(slot.slot), offset, length);
        header.flags = flags;
        header.data_check = data_check;
        self.asked[usize::from(slot.slot)] = Some(Asked { opcode, bytes: length, buffer_offset });
        let payload = (opcode == Opcode::Write).then_some(data);
        if self.is_absent() {
            // It broke between its opening and its first use: the core has to learn that, or it would wait.
            return events
                .push(Event::Lost { peer: self.peer, reason: "no connection to the replica".into() });
        }
        let Some(framed) = self.framed.as_mut().filter(|_| self.phase == LinkPhase::Open) else { return };
        if let Err(error) = framed.send(&header, payload) {
            self.fail(&format!("sending: {error}"), events);
        }
    }

    /// Queues a PING.
    pub fn ping(&mut self, events: &mut Vec<Event>) {
        let header = Header::request(Opcode::Ping, ID_PING, 0, 0);
        let Some(framed) = self.framed.as_mut().filter(|_| self.phase == LinkPhase::Open) else { return };
        if let Err(error) = framed.send(&header, None) {
            self.fail(&format!("sending: {error}"), events);
        }
    }

    /// Queues a proposed view.
    pub fn propose(&mut self, view: View, honoured: ReplicaReport, events: &mut Vec<Event>) {
        self.send_view(Opcode::Propose, ID_PROPOSE, view, honoured, events);
    }

    /// Queues the message that a view is committed.
    pub fn commit(&mut self, view: View, events: &mut Vec<Event>) {
        let honoured = ReplicaReport { committed: view, proposed: Vec::new() };
        self.send_view(Opcode::Commit, ID_COMMIT, view, honoured, events);
    }

    /// Queues a change of one of the replica's sets of regions.
    pub fn mark(&mut self, mark: u32, change: &MarkRegions, events: &mut Vec<Event>) {
        self.send_text(Opcode::Mark, ID_MARK | u64::from(mark), change, events);
    }

    fn send_view(
        &mut self,
        opcode: Opcode,
        kind: u64,
        view: View,
        basis: ReplicaReport,
        events: &mut Vec<Event>,
    ) {
        self.send_text(opcode, kind | u64::from(view.id.number), &ViewMessage { view, basis }, events);
    }

    fn send_text(&mut self, opcode: Opcode, id: u64, text: &impl Serialize, events: &mut Vec<Event>) {
        let (header, text) = encode_text(Header::request(opcode, id, 0, 0), text);
        let Some(framed) = self.framed.as_mut().filter(|_| self.phase == LinkPhase::Open) else { return };
        if let Err(error) = framed.send_owned(&header, text) {
            self.fail(&format!("sending: {error}"), events);
        }
    }

    /// Sends the queued messages.
    pub fn flush(&mut self, ring: &mut Ring) {
        if let Some(framed) = self.framed.as_mut().filter(|_| self.phase == LinkPhase::Open) {
            framed.stream.flush(ring);
        }
    }

    /// Ends the connection; later messages do not count. [`QueueLink::take_closed`] reports the end, even if
    /// no connection existed any more.
    pub fn close(&mut self) {
        self.phase = LinkPhase::Closing;
        if let Some(framed) = &self.framed {
            framed.stream.shutdown();
        }
    }

    /// Returns the event once, when the connection was closed and no operation on it is under way: its
    /// buffers are free.
    pub fn take_closed(&mut self) -> Option<Event> {
        let idle = self.framed.as_ref().is_none_or(|framed| framed.stream.is_idle());
        if self.phase != LinkPhase::Closing || !idle {
            return None;
        }
        self.phase = LinkPhase::Closed;
        self.framed = None;
        Some(Event::Closed { peer: self.peer, queue: self.queue })
    }

    /// Takes a completion of [`SOURCE`] for this peer.
    pub fn on_completion(
        &mut self,
        completion: Completion,
        ring: &mut Ring,
        arena: &Arena,
        events: &mut Vec<Event>,
    ) -> Option<Notice> {
        let Some(Framed { stream, .. }) = &mut self.framed else { return None };
        if completion.token.kind == KIND_SEND {
            let mut owners = Vec::new(); // frames of requests have no owners: it stays empty
            if let Err(error) = stream.on_sent(completion, &mut owners) {
                self.fail(&format!("sending: {error}"), events);
            }
            return None;
        }
        let received = stream.on_received(completion);
        if self.phase != LinkPhase::Open {
            return None;
        }
        let result = match received {
            Ok(Received::End) => Err("the replica closed the connection".to_owned()),
            Err(error) => Err(format!("receiving: {error}")),
            Ok(Received::Part) => Ok(None),
            Ok(Received::Payload) => self.payload_done(events).and_then(|()| self.parse(arena, events)),
            Ok(Received::Bytes) => self.parse(arena, events),
        };
        match result {
            Ok(notice) => {
                self.start(ring);
                notice
            }
            Err(reason) => {
                self.fail(&reason, events);
                None
            }
        }
    }

    fn fail(&mut self, reason: &str, events: &mut Vec<Event>) {
        if self.phase == LinkPhase::Open {
            self.close();
            events.push(Event::Lost { peer: self.peer, reason: reason.to_owned() });
        }
    }

    /// Takes every whole frame out of the receive buffer.
    fn parse(&mut self, arena: &Arena, events: &mut Vec<Event>) -> Result<Option<Notice>, String> {
        let mut notice = None;
        while let Some(header) = self.framed.as_ref().and_then(Framed::header) {
            let header = header.map_err(|error| error.to_string())?;
            if !header.is_response() {
                return Err(format!("replica sends a request: {header}"));
            }
            if header.opcode == Opcode::Read && header.status == 0 {
                if !self.begin_payload(header, arena)? {
                    break;
                }
                self.payload_done(events)?;
            } else if header.opcode.is_control() {
                if !self.take_control(&header, events, &mut notice)? {
                    break;
                }
            } else {
                self.take_header();
                self.take_answer(&header, events)?;
            }
        }
        Ok(notice)
    }

    fn take_header(&mut self) {
        if let Some(framed) = &mut self.framed {
            framed.take(0);
        }
    }

    /// Handles the header of a successful read, whose data is received directly into the slot. Returns true
    /// if all of the data has arrived.
    fn begin_payload(&mut self, header: Header, arena: &Arena) -> Result<bool, String> {
        let slot = self.slot_of(&header)?;
        let asked = self.asked[usize::from(slot.slot)].take();
        let asked = asked.filter(|asked| asked.opcode == Opcode::Read);
        let fitting = asked.filter(|asked| asked.bytes == header.length_bytes);
        let Some(Asked { bytes, buffer_offset, .. }) = fitting else {
            let bytes = asked.map_or(0, |asked| asked.bytes);
            return Err(format!("the answer {header} does not fit {bytes} bytes asked for"));
        };
        self.take_header();
        let target = arena.buf(usize::from(slot.slot)).part(buffer_offset as usize, bytes as usize);
        self.receiving = Some((header, target));
        Ok(self.framed.as_mut().is_some_and(|framed| framed.stream.receive_into(target)))
    }

    /// Handles the data of a read in its slot.
    fn payload_done(&mut self, events: &mut Vec<Event>) -> Result<(), String> {
        let Some((header, data)) = self.receiving.take() else {
            return Err("data without a header".to_owned());
        };
        let slot = self.slot_of(&header)?;
        header.check_data(data.crc32c()).map_err(|error| error.to_string())?;
        let peer = self.peer;
        events.push(if slot.slot < self.depth {
            Event::Reply { peer, slot, outcome: Ok(()) }
        } else {
            Event::CopyRead { peer, slot, zeroes: zero_blocks(data) }
        });
        Ok(())
    }

    /// Handles an answer without data.
    fn take_answer(&mut self, header: &Header, events: &mut Vec<Event>) -> Result<(), String> {
        let peer = self.peer;
        if header.id & ID_KIND == ID_PING {
            events.push(match header.outcome() {
                Ok(()) => Event::Pong { peer, queue: self.queue, free_mib: header.free_mib() },
                Err(errno) => Event::PingFailed { peer, queue: self.queue, errno },
            });
            return Ok(());
        }
        let slot = self.slot_of(header)?;
        let asked = self.asked[usize::from(slot.slot)].take();
        if let Some(asked) = asked.filter(|asked| asked.opcode != header.opcode) {
            // The slot of a read would keep the data of an earlier request.
            return Err(format!(
                "the answer {header} does not fit the operation {:?} asked for",
                asked.opcode
            ));
        }
        let outcome = header.outcome();
        events.push(if header.opcode == Opcode::Verify {
            let check =
                VolumeCheck { sum: header.data_check, is_confirmed: header.flags.has(Flags::CHECKED) };
            Event::Verified { peer, slot, outcome: outcome.map(|()| check) }
        } else {
            Event::Reply { peer, slot, outcome }
        });
        Ok(())
    }

    /// Handles the answer to a request with a text, if it has arrived whole.
    fn take_control(
        &mut self,
        header: &Header,
        events: &mut Vec<Event>,
        notice: &mut Option<Notice>,
    ) -> Result<bool, String> {
        let whole = HEADER_BYTES + header.data_bytes() as usize;
        let Some(framed) = &mut self.framed else { return Ok(false) };
        let Some(text) = framed.stream.bytes().get(HEADER_BYTES..whole) else { return Ok(false) };
        let outcome = header.outcome().map_err(|errno| refusal(header, text, errno, &framed.session));
        framed.take(text.len());
        match outcome {
            Err(ConnectError::Deposed { holder, .. }) => *notice = Some(Notice::Deposed { holder }),
            Err(error) => return Err(error.to_string()),
            Ok(()) => {
                let (peer, generation) = (self.peer, self.generation);
                let number = u32::try_from(header.id & !ID_KIND).unwrap_or(u32::MAX);
                events.extend(match header.id & ID_KIND {
                    ID_PROPOSE => Some(Event::ViewStored { peer, view: ViewId { generation, number } }),
                    ID_MARK => Some(Event::Marked { peer, mark: number }),
                    _ => None,
                });
            }
        }
        Ok(true)
    }

    fn slot_of(&self, header: &Header) -> Result<SlotId, String> {
        let slot = u16::try_from(header.id & !ID_KIND).ok();
        match slot.filter(|slot| header.id & ID_KIND == ID_REQUEST && usize::from(*slot) < self.asked.len()) {
            Some(slot) => Ok(SlotId { queue: self.queue, slot }),
            None => Err(format!("replica answers a request that was not sent: {header}")),
        }
    }
}

pub fn peer_of(token: Token) -> PeerIndex {
    u8::try_from(token.index).unwrap_or(u8::MAX)
}

/// Returns a bit for each block of `data` that is all zeroes.
fn zero_blocks(data: IoBuf) -> ZeroBlocks {
    let block_bytes = usize::try_from(BLOCK_BYTES).unwrap_or(usize::MAX);
    let mut zeroes = ZeroBlocks::default();
    let bits = zeroes.len() * 64;
    for block in 0..(data.len() / block_bytes).min(bits) {
        if data.part(block * block_bytes, block_bytes).is_zero() {
            zeroes[block / 64] |= 1 << (block % 64);
        }
    }
    zeroes
}

#[cfg(test)]
pub mod tests;
