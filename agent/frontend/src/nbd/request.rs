//! Commands of a client as requests of the volume.

use shorthorn_core::{Operation, Request};
use shorthorn_ring::IoBuf;
use shorthorn_types::ByteRange;

use super::command::{Commands, RequestPart};
use super::protocol::{CommandKind, NbdError, RequestHeader};
use crate::{QueueIo, RefusedRequest};

pub(super) fn refusal(header: &RequestHeader, error: NbdError) -> RefusedRequest {
    let fua = header.fua();
    let operation = match header.kind {
        CommandKind::Read => Some(Operation::Read),
        CommandKind::Write => Some(Operation::Write { fua }),
        CommandKind::Flush => Some(Operation::Flush),
        CommandKind::Trim => Some(Operation::Discard),
        CommandKind::WriteZeroes => Some(Operation::WriteZeroes { fua }),
        CommandKind::Disconnect | CommandKind::Unknown(_) => None,
    };
    let (offset_bytes, length_bytes) = (header.offset_bytes, header.length_bytes.into());
    RefusedRequest { operation, offset_bytes, length_bytes, errno: error.errno() }
}

pub(super) fn buffer(io: &QueueIo<'_>, slot: u16, part: RequestPart) -> IoBuf {
    io.arena.buf(slot.into()).part(0, part.length_bytes as usize)
}

/// Asks the volume for the part in `slot`.
pub(super) fn submit(slot: u16, commands: &mut Commands, io: &mut QueueIo<'_>) {
    let part = commands.part(slot);
    let command = commands.get(part.command);
    let fua = command.fua;
    let (operation, length_bytes) = match command.kind {
        CommandKind::Read => (Operation::Read, part.length_bytes),
        CommandKind::Write => (Operation::Write { fua }, part.length_bytes),
        CommandKind::Trim => (Operation::Discard, part.length_bytes),
        // Replicas make holes of zeroes, but store data unchanged, also those of earlier versions.
        CommandKind::WriteZeroes if command.no_hole => {
            buffer(io, slot, part).zero();
            (Operation::Write { fua }, part.length_bytes)
        }
        CommandKind::WriteZeroes => (Operation::WriteZeroes { fua }, part.length_bytes),
        CommandKind::Flush | CommandKind::Disconnect | CommandKind::Unknown(_) => (Operation::Flush, 0),
    };
    let offset_bytes = if operation == Operation::Flush { 0 } else { part.offset_bytes };
    match ByteRange::new(offset_bytes, length_bytes.into()) {
        Ok(range) => io.requests.push(Request { slot, operation, range }),
        Err(error) => unreachable!("the request was checked against the volume: {error}"),
    }
}
