use std::ops::Range;

use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, Errno, Regions};

use crate::membership::{PeerIndex, PeerMask};
use crate::request::{Operation, Request};

/// The id of one slot of one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotId {
    /// The queue, from 0. Copy slots belong to queue 0.
    pub queue: u16,
    /// The index of the slot in the queue.
    pub slot: u16,
}

/// The stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotPhase {
    /// The slot has no request.
    Free,
    /// The request waits for an overlapping one.
    Waiting,
    /// The range of the request is free, but it must not be sent now.
    Deferred,
    /// The request was sent.
    Active,
    /// Every replica has answered, some with an error: the members are being resynced.
    Resync,
}

/// The request in one slot, and the answers of the replicas so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    phase: SlotPhase,
    operation: Operation,
    range: ByteRange,
    /// Replicas that it was sent to when it was ready.
    sent: PeerMask,
    /// Replicas that have to answer before it can be completed.
    pending: PeerMask,
    /// Replicas that answered that they have no space.
    no_space: PeerMask,
    /// Members that hold rot in the range of a verified read.
    rotten: PeerMask,
    /// The progress of a read that proceeds block by block, because every member holds rot in some block.
    /// None for other reads.
    narrow_at_bytes: Option<u64>,
    /// The error in the answer of the last member, if any.
    error: Option<Errno>,
    /// The members that answered with this error.
    erred: PeerMask,
    sent_at_ms: u64,
    /// True if the request counts in [`crate::flight::Flights`].
    is_in_flight: bool,
}

/// Returns the part of `range` from `start` on that is in one block.
fn block_at(range: ByteRange, start: u64) -> ByteRange {
    let end = (start / BLOCK_BYTES + 1) * BLOCK_BYTES;
    ByteRange::new(start, end.min(range.end()).saturating_sub(start)).unwrap_or(ByteRange::EMPTY)
}

impl Slot {
    const FREE: Slot = Slot {
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

    /// Returns a slot with a request that is not ready yet.
    pub fn of(request: Request) -> Slot {
        Slot { phase: SlotPhase::Waiting, operation: request.operation, range: request.range, ..Slot::FREE }
    }

    pub fn operation(&self) -> Operation {
        self.operation
    }

    pub fn range(&self) -> ByteRange {
        self.range
    }

    /// Returns the replicas that the request was sent to when it was ready.
    pub fn sent(&self) -> PeerMask {
        self.sent
    }

    /// Returns the replicas that have to answer before the request can be completed.
    pub fn pending(&self) -> PeerMask {
        self.pending
    }

    /// Returns the time at which the request was sent the last time.
    pub fn sent_at_ms(&self) -> u64 {
        self.sent_at_ms
    }

    /// Returns the replicas that answered that they have no space.
    pub fn no_space(&self) -> PeerMask {
        self.no_space
    }

    /// Returns the members that hold rot in the range, or in the current block, of a verified read.
    pub fn rotten(&self) -> PeerMask {
        self.rotten
    }

    /// Returns the error in the answer of the last member, if any.
    pub fn error(&self) -> Option<Errno> {
        self.error
    }

    /// Returns the members that have answered with an error as the last member.
    pub fn erred(&self) -> PeerMask {
        self.erred
    }

    /// Returns true if the request, or its current part, was sent and its answers have not been handled.
    pub fn is_active(&self) -> bool {
        self.phase == SlotPhase::Active
    }

    /// Returns true if the request counts in [`crate::flight::Flights`].
    pub fn is_in_flight(&self) -> bool {
        self.is_in_flight
    }

    /// Records that the request counts in [`crate::flight::Flights`].
    pub fn set_in_flight(&mut self) {
        self.is_in_flight = true;
    }

    /// Records that the request must not be sent now, although its range is free.
    pub fn defer(&mut self) {
        self.phase = SlotPhase::Deferred;
    }

    /// Records the replicas that a ready request is sent to.
    pub fn set_sent(&mut self, to: PeerMask) {
        self.sent = to;
    }

    /// Records that a part of the request was sent to the replicas in `to`, which have to answer.
    pub fn ask(&mut self, to: PeerMask, now_ms: u64) {
        (self.phase, self.pending, self.sent_at_ms) = (SlotPhase::Active, to, now_ms);
    }

    /// Removes `peer` from the replicas that still have to answer. Returns true if it was the last one.
    pub fn answered_by(&mut self, peer: PeerIndex) -> bool {
        self.pending = self.pending.without(PeerMask::one(peer));
        self.pending.is_empty()
    }

    /// Records that `peer`, the last member, has answered with an error.
    pub fn record_error(&mut self, peer: PeerIndex, errno: Errno) {
        (self.error, self.erred) = (Some(errno), PeerMask::one(peer));
    }

    /// Forgets the error, because its member is not the last one any more.
    pub fn clear_error(&mut self) {
        self.error = None;
    }

    /// Records that `peer` has no space for the modification.
    pub fn record_no_space(&mut self, peer: PeerIndex) {
        self.no_space = self.no_space.with(PeerMask::one(peer));
    }

    /// Records that `peer` holds rot in the part that was read. Another member has to answer.
    pub fn record_rot(&mut self, peer: PeerIndex) {
        (self.pending, self.rotten) = (PeerMask::NONE, self.rotten.with(PeerMask::one(peer)));
    }

    /// Returns the part of its range that a read has to be sent for: all of it, or one block.
    pub fn part_to_read(&self) -> ByteRange {
        self.narrow_at_bytes.map_or(self.range, |at_bytes| block_at(self.range, at_bytes))
    }

    /// Lets a read proceed block by block, from the first. Returns false if it does already, or has only one
    /// block.
    pub fn begin_blocks(&mut self) -> bool {
        let is_one_block = self.range.grown_to_blocks().length() <= BLOCK_BYTES;
        if self.narrow_at_bytes.is_some() || is_one_block {
            return false;
        }
        (self.narrow_at_bytes, self.rotten) = (Some(self.range.offset()), PeerMask::NONE);
        true
    }

    /// Records the answer for the part that was sent. Returns true if it was the last: only a read that
    /// proceeds block by block has several.
    pub fn part_answered(&mut self) -> bool {
        let Some(at_bytes) = self.narrow_at_bytes else { return true };
        let end = block_at(self.range, at_bytes).end();
        (self.narrow_at_bytes, self.rotten) = (Some(end), PeerMask::NONE);
        end >= self.range.end()
    }

    /// Waits until the replicas in `leaving`, which have answered, have left. Continues then like after their
    /// answers.
    pub fn wait_until_left(&mut self, leaving: PeerMask) {
        (self.phase, self.pending) = (SlotPhase::Active, leaving);
    }

    /// Records that every replica has answered, some without space. The request waits until these leave or
    /// the members are resynced.
    pub fn wait_for_resync(&mut self) {
        self.phase = SlotPhase::Resync;
    }

    /// Removes `replica`, which has left, from the records of requests and answers.
    fn forget(&mut self, replica: PeerMask) {
        for peers in [&mut self.sent, &mut self.no_space, &mut self.rotten, &mut self.erred] {
            *peers = peers.without(replica);
        }
    }

    /// Stops waiting for the replicas in `gone`. Returns true if the slot has waited only for them.
    pub fn drop_waits(&mut self, gone: PeerMask) -> bool {
        let left = self.pending.without(gone);
        if self.phase != SlotPhase::Active || left == self.pending {
            return false;
        }
        self.pending = left;
        left.is_empty()
    }
}

/// Every slot: those of the frontend, `depth` in each queue, and behind those of queue 0 the ones for copies.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    /// The number of slots of the frontend that are not free.
    unfinished: usize,
    queues: u16,
    depth: u16,
    copy_slots: u16,
}

impl Slots {
    pub fn new(queues: u16, depth: u16, copy_slots: u16) -> Slots {
        let count = usize::from(queues) * usize::from(depth) + usize::from(copy_slots);
        Slots { slots: vec![Slot::FREE; count], unfinished: 0, queues, depth, copy_slots }
    }

    /// Returns the id of the free slot for `request` of `queue`. Any other slot is an error of the frontend.
    pub fn free_for(&self, queue: u16, request: &Request) -> SlotId {
        let id = SlotId { queue, slot: request.slot };
        let is_request = self.has(id) && self.copy_index(id).is_none();
        assert!(is_request, "slot {id:?} is not one for requests");
        assert!(self.at(id).phase == SlotPhase::Free, "slot {id:?} is submitted twice");
        id
    }

    /// Puts a request of the frontend into the free slot `id`.
    pub fn open(&mut self, id: SlotId, request: Request) {
        *self.at_mut(id) = Slot::of(request);
        self.unfinished += 1;
    }

    /// Frees the slot of a request of the frontend. Returns its last state.
    pub fn close(&mut self, id: SlotId) -> Slot {
        self.unfinished -= 1;
        let slot = self.at_mut(id);
        slot.phase = SlotPhase::Free;
        *slot
    }

    /// Lets the copy slot `id` wait until its job is ready.
    pub fn begin_job(&mut self, id: SlotId) {
        *self.at_mut(id) = Slot { phase: SlotPhase::Waiting, ..Slot::FREE };
    }

    /// Frees the copy slot `id`.
    pub fn end_job(&mut self, id: SlotId) {
        *self.at_mut(id) = Slot::FREE;
    }

    /// Handles that the index of a replica outside the view means new connections, or another replica, from
    /// now on. Unfinished requests were not sent to it, and their errors are not about it.
    pub fn forget(&mut self, peer: PeerIndex) {
        self.slots.iter_mut().for_each(|slot| slot.forget(PeerMask::one(peer)));
    }

    /// Returns the number of requests of the frontend.
    pub fn unfinished(&self) -> usize {
        self.unfinished
    }

    /// Returns true if an answer of `peer` is expected in slot `id`.
    pub fn expects(&self, peer: PeerIndex, id: SlotId) -> bool {
        self.has(id) && {
            let slot = self.at(id);
            slot.is_active() && slot.pending.has(peer)
        }
    }

    /// Returns true if the slot exists.
    pub fn has(&self, id: SlotId) -> bool {
        id.queue < self.queues && (id.slot < self.depth || self.copy_index(id).is_some())
    }

    /// Returns the index of `id` among the copy slots, if it is one.
    pub fn copy_index(&self, id: SlotId) -> Option<usize> {
        let index = id.slot.checked_sub(self.depth).filter(|index| id.queue == 0 && *index < self.copy_slots);
        index.map(usize::from)
    }

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
        self.slots.iter().filter(|slot| slot.is_active())
    }

    /// Returns the slots of the frontend that were sent and are not completed.
    fn active_requests(&self) -> impl Iterator<Item = &Slot> {
        let requests = usize::from(self.queues) * usize::from(self.depth);
        self.slots[..requests]
            .iter()
            .filter(|slot| matches!(slot.phase, SlotPhase::Active | SlotPhase::Resync))
    }

    /// Returns the regions of the frontend's modifications that were sent and are not completed.
    pub fn modified(&self, regions: Regions) -> impl Iterator<Item = Range<u32>> {
        let modifications = self.active_requests().filter(|slot| slot.operation.modifies());
        modifications.map(move |slot| regions.touched(slot.range))
    }
}

impl Operation {
    /// Returns true if it changes data.
    pub(crate) fn modifies(self) -> bool {
        match self {
            Operation::Write { .. } | Operation::WriteRot => true,
            Operation::Discard | Operation::WriteZeroes { .. } => true,
            Operation::Read | Operation::CheckedRead | Operation::Verify | Operation::Flush => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: Operation = Operation::Write { fua: false };

    fn slots() -> Slots {
        Slots::new(2, 4, 2)
    }

    fn request(slot: u16, operation: Operation, first_block: u64) -> Request {
        Request { slot, operation, range: ByteRange::new(first_block * 4096, 4096).unwrap() }
    }

    #[test]
    fn a_slot_counts_from_open_to_close() {
        let mut slots = slots();
        let id = slots.free_for(1, &request(3, WRITE, 0));
        assert_eq!(id, SlotId { queue: 1, slot: 3 });
        slots.open(id, request(3, WRITE, 0));
        assert_eq!((slots.unfinished(), slots.at(id).phase), (1, SlotPhase::Waiting));
        assert_eq!(slots.close(id).operation, WRITE);
        assert_eq!((slots.unfinished(), slots.at(id).phase), (0, SlotPhase::Free));
    }

    #[test]
    #[should_panic(expected = "submitted twice")]
    fn a_slot_takes_one_request() {
        let mut slots = slots();
        slots.open(SlotId { queue: 0, slot: 1 }, request(1, WRITE, 0));
        slots.free_for(0, &request(1, WRITE, 0));
    }

    #[test]
    #[should_panic(expected = "is not one for requests")]
    fn copy_slots_take_no_requests() {
        slots().free_for(0, &request(4, WRITE, 0));
    }

    #[test]
    fn answers_count_from_whom_they_are_expected() {
        let mut slots = slots();
        let id = SlotId { queue: 0, slot: 4 };
        assert!(!slots.expects(1, id), "nothing was sent");
        slots.at_mut(id).ask(PeerMask::one(1).with(PeerMask::one(2)), 7);
        assert!(slots.expects(1, id) && !slots.expects(0, id));
        assert!(!slots.expects(1, SlotId { queue: 1, slot: 4 }), "queue 1 has no copy slots");
        assert!(!slots.at_mut(id).answered_by(1));
        assert!(!slots.expects(1, id), "it has answered");
        assert!(slots.at_mut(id).answered_by(2));
    }

    #[test]
    fn a_slot_continues_when_the_last_one_is_gone() {
        let mut slot = Slot::of(request(0, WRITE, 0));
        let (first, second) = (PeerMask::one(0), PeerMask::one(1));
        assert!(!slot.drop_waits(first), "it is not sent yet");
        slot.ask(first.with(second), 0);
        assert!(!slot.drop_waits(PeerMask::one(2)) && !slot.drop_waits(first));
        assert_eq!(slot.pending, second);
        assert!(slot.drop_waits(first.with(second)));
        assert!(!slot.drop_waits(first.with(second)), "once");
    }

    #[test]
    fn a_read_that_finds_rot_everywhere_proceeds_block_by_block() {
        let range = ByteRange::new(2048, 8192).unwrap();
        let mut slot = Slot::of(Request { slot: 0, operation: Operation::Read, range });
        slot.ask(PeerMask::one(0), 0);
        assert_eq!(slot.part_to_read(), range);
        slot.record_rot(0);
        assert!(slot.pending().is_empty() && slot.rotten().has(0));
        assert!(slot.begin_blocks());
        for (offset, length, is_last) in [(2048, 2048, false), (4096, 4096, false), (8192, 2048, true)] {
            assert!(slot.rotten().is_empty(), "rot of another block does not count");
            assert_eq!(slot.part_to_read(), ByteRange::new(offset, length).unwrap());
            slot.record_rot(1);
            assert!(!slot.begin_blocks(), "once");
            assert_eq!(slot.part_answered(), is_last);
        }
    }

    #[test]
    fn other_reads_have_one_part() {
        let range = ByteRange::new(512, 1024).unwrap();
        let mut slot = Slot::of(Request { slot: 0, operation: Operation::Read, range });
        assert!(slot.part_answered());
        assert!(!slot.begin_blocks(), "it is in one block");
        assert_eq!(slot.part_to_read(), range);
    }

    #[test]
    fn the_error_of_the_last_member_counts_until_it_is_not_the_last() {
        let mut slot = Slot::of(request(0, WRITE, 0));
        slot.ask(PeerMask::one(2), 0);
        slot.record_error(2, Errno::IO);
        assert!(slot.answered_by(2));
        assert_eq!((slot.error(), slot.erred()), (Some(Errno::IO), PeerMask::one(2)));
        slot.clear_error();
        slot.wait_until_left(slot.erred());
        assert_eq!((slot.error(), slot.pending()), (None, PeerMask::one(2)));
        assert!(slot.is_active() && slot.drop_waits(PeerMask::one(2)));
    }

    #[test]
    fn only_modifications_that_were_sent_are_in_flight() {
        let mut slots = slots();
        let regions = Regions::of(1 << 20);
        for (slot, operation) in [(0, WRITE), (1, Operation::Read), (2, WRITE), (3, Operation::Discard)] {
            let request = request(slot, operation, u64::from(slot) * 16);
            let id = slots.free_for(0, &request);
            slots.open(id, request);
            if slot != 2 {
                slots.at_mut(id).ask(PeerMask::one(0), 0);
            }
        }
        slots.at_mut(SlotId { queue: 0, slot: 3 }).wait_for_resync();
        assert_eq!(slots.modified(regions).collect::<Vec<_>>(), [0..1, 3..4]);
    }
}
