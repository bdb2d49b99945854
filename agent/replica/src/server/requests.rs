//! Parses received bytes to requests, and makes responses from finished ones.

use serde::Serialize;
use serde::de::DeserializeOwned;
use shorthorn_ring::{Completion, Received};
use shorthorn_types::limits::MAX_IO_BYTES;
use shorthorn_types::{Errno, Generation};
use shorthorn_wire::{Flags, HEADER_BYTES, Header, Opcode, Refusal, decode_text, encode_text};

use super::Server;
use crate::error::ReplicaError;
use crate::executor::{OperationResult, reads_data};
use crate::limits::RECEIVE_BYTES;

/// The maximum data of a request that is received whole before it is handled. Its data is copied once more,
/// but one system call receives many such requests. Larger data is received in place.
const INLINE_DATA_BYTES: usize = RECEIVE_BYTES / 4;

/// The result of parsing the start of a connection's receive buffer.
enum Parsed {
    /// A complete request in this slot.
    Ready(u16),
    /// The request needs more bytes.
    MoreBytes,
    /// The request needs a free slot.
    NoSlot,
    /// The connection has to end.
    Broken(String),
}

impl Server {
    pub(super) fn on_received(&mut self, index: u16, completion: Completion) {
        let Some(connection) = self.connections.get(index) else { return };
        let Some(received) = connection.on_received(completion) else { return };
        match received {
            Ok(Received::Part) => self.arm(index),
            Ok(Received::Bytes) => self.take_requests(index, None),
            Ok(Received::Payload) => {
                if let Some(slot) = connection.take_receiving() {
                    self.take_up(index, slot);
                }
                self.take_requests(index, None);
            }
            Ok(Received::End) => self.end(index, "the engine has closed it"),
            Err(error) => self.end(index, error),
        }
    }

    fn arm(&mut self, index: u16) {
        if let Some(connection) = self.connections.get(index) {
            connection.arm(&mut self.ring);
        }
    }

    /// Takes up all requests that have been received; the first one has `slot`, if that is given.
    fn take_requests(&mut self, index: u16, mut slot: Option<u16>) {
        loop {
            match self.parse(index, slot.take()) {
                Parsed::Ready(slot) => self.take_up(index, slot),
                Parsed::MoreBytes => return self.arm(index),
                Parsed::NoSlot => return,
                Parsed::Broken(why) => return self.end(index, why),
            }
        }
    }

    fn parse(&mut self, index: u16, slot: Option<u16>) -> Parsed {
        let Some(connection) = self.connections.get(index) else { return Parsed::NoSlot };
        if connection.is_over() {
            debug_assert!(slot.is_none(), "an ended connection waits for nothing");
            return Parsed::NoSlot;
        }
        let header = match connection.header() {
            Some(Ok(header)) if is_request(&header) => header,
            Some(Ok(header)) => return Parsed::Broken(format!("{header} is nothing that an engine sends")),
            Some(Err(error)) => return Parsed::Broken(error.to_string()),
            None => return Parsed::MoreBytes,
        };
        let data_bytes = header.data_bytes() as usize;
        let missing = (HEADER_BYTES + data_bytes).saturating_sub(connection.received_bytes());
        if missing > 0 && data_bytes <= INLINE_DATA_BYTES {
            return Parsed::MoreBytes;
        }
        let Some(slot) = slot.or_else(|| self.slots.take(index, data_in_slot(&header))) else {
            return Parsed::NoSlot;
        };
        self.memory.used();
        self.executor.assign(slot, header);
        connection.take_header();
        if data_bytes > 0 && !connection.receive_data(slot, self.executor.io().payload(slot)) {
            return Parsed::MoreBytes;
        }
        Parsed::Ready(slot)
    }

    /// Executes the request in `slot`, whose data has arrived.
    fn take_up(&mut self, index: u16, slot: u16) {
        let header = self.executor.io().header(slot);
        match header.opcode {
            opcode if opcode.is_control() => return self.take_text(index, slot, &header),
            Opcode::Write | Opcode::WriteLayer => {
                if let Err(error) = header.check_data(self.executor.io().payload(slot).crc32c()) {
                    self.free(slot);
                    return self.end(index, format!("{header}: {error}"));
                }
            }
            _ => {}
        }
        self.executor.start(slot, &mut self.ring);
    }

    fn take_text(&mut self, index: u16, slot: u16, header: &Header) {
        if self.executor.state().failure().is_some() {
            return self.respond(slot, Err(Errno::IO));
        }
        match header.opcode {
            Opcode::Propose | Opcode::Commit => self.take_view(index, slot, header),
            Opcode::Regions => self.take_regions(index, slot, header),
            Opcode::Mark => self.take_mark(index, slot, header),
            Opcode::Layers => self.take_layers(slot, header),
            Opcode::CopyBegin => self.take_copy_begin(index, slot, header),
            Opcode::Extents => self.take_extents(index, slot, header),
            Opcode::CopyEnd => self.take_copy_end(index, slot, header),
            Opcode::CheckLayer => self.take_check_layer(index, slot, header),
            Opcode::KeepSums => self.take_keep_sums(index, slot, header),
            Opcode::RepairLayer => self.take_repair_layer(index, slot, header),
            Opcode::Expand => self.take_expand(index, slot, header),
            _ => self.respond(slot, Err(Errno::INVALID)),
        }
    }

    /// Returns the text of a control frame; ends the connection if it is invalid.
    pub(super) fn text<T: DeserializeOwned>(&mut self, index: u16, slot: u16, header: &Header) -> Option<T> {
        let mut text = vec![0; header.data_bytes() as usize];
        self.executor.io().payload(slot).copy_to(&mut text);
        match decode_text(header, &text) {
            Ok(message) => Some(message),
            Err(error) => {
                self.free(slot);
                self.end(index, error);
                None
            }
        }
    }

    /// Returns the generation of the engine at the other end of a connection.
    pub(super) fn generation_of(&self, index: u16) -> Generation {
        // A connection that is gone has none, and all of its requests are refused.
        self.admission.queue_id(index).map_or(Generation::NEVER, |queue_id| queue_id.generation)
    }

    /// Answers a control frame with a text.
    pub(super) fn respond_text(&mut self, slot: u16, header: &Header, text: &impl Serialize) {
        let (response, text) = encode_text(header.response(Ok(())), text);
        match self.executor.put_text(slot, &text) {
            Some(payload) => self.send(slot, &response, Some(payload)),
            None => self.respond(slot, Err(Errno::new(libc::EMSGSIZE))),
        }
    }

    /// Answers a control frame with an error, and why.
    pub(super) fn refuse_text(&mut self, slot: u16, header: &Header, error: &ReplicaError) {
        if !error.passes_soon() {
            tracing::warn!(%error, "{:?} refused", header.opcode);
        }
        let refusal = Refusal { message: error.to_string(), holder: None };
        let (response, text) = encode_text(header.response(Err(error.errno())), &refusal);
        let payload = self.executor.put_text(slot, &text);
        self.send(slot, &response, payload);
    }

    /// Answers all finished requests, and gives slots to waiting connections, until neither is left.
    pub(super) fn answer(&mut self) {
        let mut finished = std::mem::take(&mut self.finished);
        loop {
            while self.executor.take_finished(&mut finished) {
                for (slot, outcome) in finished.drain(..) {
                    self.respond(slot, outcome);
                }
            }
            let Some((index, slot)) = self.slots.serve() else { break };
            self.take_requests(index, Some(slot));
        }
        self.finished = finished;
    }

    pub(super) fn respond(&mut self, slot: u16, outcome: OperationResult) {
        let header = self.executor.io().header(slot);
        if header.opcode == Opcode::CheckLayer {
            return self.respond_check(slot, &header, outcome);
        }
        self.respond_plainly(slot, &header, outcome);
    }

    pub(super) fn respond_plainly(&mut self, slot: u16, header: &Header, outcome: OperationResult) {
        let mut response = header.response(outcome);
        let mut payload = None;
        if reads_data(header) && outcome.is_ok() {
            let data = self.executor.io().payload(slot);
            response.data_check = data.crc32c();
            payload = Some(data).filter(|_| response.data_bytes() > 0);
            if self.executor.io().is_confirmed(slot) {
                response.flags = response.flags.with(Flags::CHECKED);
            }
        }
        if header.opcode == Opcode::Ping && outcome.is_ok() {
            response = response.with_free_mib(self.executor.free_mib());
        }
        if header.opcode.is_control() {
            response.length_bytes = 0;
        }
        self.send(slot, &response, payload);
    }

    /// Queues a response; the slot is free when it has gone out.
    fn send(&mut self, slot: u16, response: &Header, payload: Option<shorthorn_ring::IoBuf>) {
        let index = self.slots.connection(slot);
        let Some(connection) = self.connections.open(index) else {
            return self.free(slot);
        };
        if let Err(error) = connection.send(response, payload, slot) {
            self.free(slot);
            self.end(index, error);
        }
    }

    pub(super) fn on_sent(&mut self, index: u16, completion: Completion) {
        let Some(connection) = self.connections.get(index) else { return };
        let result = connection.on_sent(completion, &mut self.sent);
        self.free_sent();
        if let Err(error) = result {
            self.end(index, error);
        }
    }

    pub(super) fn free(&mut self, slot: u16) {
        self.executor.free(slot);
        self.slots.give(slot);
    }
}

/// Returns true if an engine may send this once it is welcome.
fn is_request(header: &Header) -> bool {
    !header.is_response() && !matches!(header.opcode, Opcode::Challenge | Opcode::Hello)
}

/// Returns the memory that the request's data takes.
fn data_in_slot(header: &Header) -> u32 {
    match header.opcode {
        Opcode::CheckLayer => MAX_IO_BYTES,
        _ if reads_data(header) => header.length_bytes,
        _ => header.data_bytes(),
    }
}
