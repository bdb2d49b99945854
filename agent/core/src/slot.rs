use shorthorn_types::{ByteRange, Errno};

use crate::membership::PeerMask;
use crate::request::{Operation, Request};

/// One slot of one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotId {
    /// Which queue.
    pub queue: u16,
    /// Which of its slots.
    pub slot: u16,
}

/// Where a request is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// There is no request.
    Free,
    /// It waits for an overlapping one.
    Waiting,
    /// Its turn has come, but nothing may be sent now.
    Held,
    /// It was sent.
    Active,
}

/// What is being done for a request that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// What it asks for.
    Request,
    /// A write found no space on some members: what one of them still has is read back.
    ReadBack,
    /// What was read back is written to the members that had the space.
    WriteBack,
}

/// The request in one slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub phase: Phase,
    pub stage: Stage,
    pub operation: Operation,
    pub range: ByteRange,
    /// Replicas that have to answer before it can be completed.
    pub pending: PeerMask,
    /// Replicas that answered that they have no space.
    pub no_space: PeerMask,
    /// What the last member answered, where that was an error.
    pub error: Option<Errno>,
    pub sent_at_ms: u64,
}

impl Slot {
    pub const FREE: Slot = Slot {
        phase: Phase::Free,
        stage: Stage::Request,
        operation: Operation::Flush,
        range: EMPTY,
        pending: PeerMask::NONE,
        no_space: PeerMask::NONE,
        error: None,
        sent_at_ms: 0,
    };

    pub fn of(request: Request) -> Slot {
        Slot { phase: Phase::Waiting, operation: request.operation, range: request.range, ..Slot::FREE }
    }
}

const EMPTY: ByteRange = match ByteRange::new(0, 0) {
    Ok(range) => range,
    Err(_) => unreachable!(),
};

impl Operation {
    /// Whether it changes data.
    pub(crate) fn modifies(self) -> bool {
        matches!(self, Operation::Write { .. } | Operation::Discard | Operation::WriteZeroes { .. })
    }
}
