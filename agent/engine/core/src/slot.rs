use shorthorn_types::{ByteRange, Errno};

use crate::membership::PeerMask;
use crate::request::{Operation, Request};

/// The id of one slot of one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotId {
    /// The index of the queue.
    pub queue: u16,
    /// The index of the slot in the queue.
    pub slot: u16,
}

/// The stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotPhase {
    /// The slot has no request.
    Free,
    /// The request waits for an overlapping one.
    Waiting,
    /// The request has its turn, but must not be sent now.
    Held,
    /// The request was sent.
    Active,
    /// Every replica has answered, some with an error: the members are being resynced.
    Resync,
}

/// The request in one slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub phase: SlotPhase,
    pub operation: Operation,
    pub range: ByteRange,
    /// Replicas that it was sent to when its turn came.
    pub sent: PeerMask,
    /// Replicas that have to answer before it can be completed.
    pub pending: PeerMask,
    /// Replicas that answered that they have no space.
    pub no_space: PeerMask,
    /// Members that hold rot in the range of a verified read.
    pub rotten: PeerMask,
    /// The progress of a read that goes block by block, because every member holds rot in some block. None
    /// for other reads.
    pub narrow_at_bytes: Option<u64>,
    /// The error in the answer of the last member, if any.
    pub error: Option<Errno>,
    /// The members that answered with this error.
    pub erred: PeerMask,
    pub sent_at_ms: u64,
    /// True if the request counts in a [`crate::flight::Flight`].
    pub is_in_flight: bool,
}

impl Slot {
    pub const FREE: Slot = Slot {
        phase: SlotPhase::Free,
        operation: Operation::Flush,
        range: ByteRange::EMPTY,
        sent: PeerMask::NONE,
        pending: PeerMask::NONE,
        no_space: PeerMask::NONE,
        rotten: PeerMask::NONE,
        narrow_at_bytes: None,
        error: None,
        erred: PeerMask::NONE,
        sent_at_ms: 0,
        is_in_flight: false,
    };

    pub fn of(request: Request) -> Slot {
        Slot { phase: SlotPhase::Waiting, operation: request.operation, range: request.range, ..Slot::FREE }
    }
}

/// Every slot: those of the frontend, `depth` in each queue, and behind those of queue 0 the ones for copies.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    queues: u16,
    depth: u16,
    copy_slots: u16,
}

impl Slots {
    pub fn new(queues: u16, depth: u16, copy_slots: u16) -> Slots {
        let count = usize::from(queues) * usize::from(depth) + usize::from(copy_slots);
        Slots { slots: vec![Slot::FREE; count], queues, depth, copy_slots }
    }

    /// Returns true if there is such a slot.
    pub fn has(&self, id: SlotId) -> bool {
        id.queue < self.queues && (id.slot < self.depth || self.copy_index(id).is_some())
    }

    /// Returns the index of `id` among the copy slots, if it is one.
    pub fn copy_index(&self, id: SlotId) -> Option<usize> {
        let index = id.slot.checked_sub(self.depth).filter(|index| id.queue == 0 && *index < self.copy_slots);
        index.map(usize::from)
    }

    /// Returns the slots for copies.
    pub fn copies(&self) -> impl Iterator<Item = SlotId> + use<> {
        (self.depth..self.depth + self.copy_slots).map(|slot| SlotId { queue: 0, slot })
    }

    /// Returns all slots whose buffers belong to `queue`.
    pub fn of_queue(&self, queue: u16) -> impl Iterator<Item = SlotId> + use<> {
        let copies = if queue == 0 { self.copy_slots } else { 0 };
        (0..self.depth + copies).map(move |slot| SlotId { queue, slot })
    }

    fn index(&self, id: SlotId) -> usize {
        match self.copy_index(id) {
            Some(index) => usize::from(self.queues) * usize::from(self.depth) + index,
            None => usize::from(id.queue) * usize::from(self.depth) + usize::from(id.slot),
        }
    }

    pub fn at(&self, id: SlotId) -> &Slot {
        &self.slots[self.index(id)]
    }

    pub fn at_mut(&mut self, id: SlotId) -> &mut Slot {
        let index = self.index(id);
        &mut self.slots[index]
    }

    /// Returns the slots that were sent and are not answered by every replica.
    pub fn active(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter().filter(|slot| slot.phase == SlotPhase::Active)
    }

    /// Returns the slots of the frontend that were sent and are not completed.
    pub fn active_requests(&self) -> impl Iterator<Item = &Slot> {
        let requests = usize::from(self.queues) * usize::from(self.depth);
        self.slots[..requests]
            .iter()
            .filter(|slot| matches!(slot.phase, SlotPhase::Active | SlotPhase::Resync))
    }
}

impl Operation {
    /// Returns true if it changes data.
    pub(crate) fn modifies(self) -> bool {
        matches!(self, Operation::Write { .. } | Operation::Discard | Operation::WriteZeroes { .. })
    }
}
