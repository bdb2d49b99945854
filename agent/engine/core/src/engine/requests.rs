//! Requests of the frontend, from their submission to the answers of the replicas.

use shorthorn_types::{ByteRange, Errno};

use super::EngineCore;
use crate::cause::{Cause, FailedRequest};
use crate::event::{Output, Outputs};
use crate::membership::{PeerIndex, PeerMask};
use crate::ranges::RangeAccess;
use crate::request::{Operation, Request};
use crate::slot::SlotId;

impl EngineCore {
    pub(super) fn submit(&mut self, queue: u16, request: Request, out: &mut Outputs) {
        let id = self.slots.free_for(queue, &request);
        let Request { operation, range, .. } = request;
        if self.refuses_requests {
            // The check comes before the request is counted, ordered or deferred, so that the request never
            // waits.
            let failure =
                FailedRequest { slot: id, operation, range, errno: Errno::IO, cause: Cause::LostWrites };
            out.push(Output::Failed(failure));
            out.push(Output::Complete { slot: id, outcome: Err(Errno::IO) });
            return;
        }
        self.slots.open(id, request);
        let access = if operation.modifies() { RangeAccess::Modify } else { RangeAccess::Read };
        if operation == Operation::Flush || self.dispatch.enter(id, range, access) {
            self.issue_request(id, out);
        }
    }

    /// Sends a request that is ready, or defers it while it may not be sent.
    pub(super) fn issue_request(&mut self, id: SlotId, out: &mut Outputs) {
        let slot = self.slots.at(id);
        let (operation, range, rotten) = (slot.operation(), slot.range(), slot.rotten());
        let waits = self.is_paused()
            || self.has_to_wait(operation, range)
            || !self.flights.take_off(self.slots.at_mut(id));
        if waits {
            return self.defer(id);
        }
        if operation == Operation::Read {
            return self.send_read(id, rotten, out);
        }
        let to = match operation {
            Operation::Flush => self.membership.connected(),
            _ => self.count_modification(range),
        };
        self.slots.at_mut(id).set_sent(to);
        self.send(id, operation, range, 0, to, out);
    }

    /// Sends a read, or its next block, to a member that is not in `rotten`.
    fn send_read(&mut self, id: SlotId, rotten: PeerMask, out: &mut Outputs) {
        let Some(peer) = self.membership.reader(self.timeouts.slow(), rotten) else {
            return self.all_readers_rotten(id, rotten, out);
        };
        let to = PeerMask::one(peer);
        let slot = self.slots.at_mut(id);
        slot.set_sent(to);
        let part = slot.part_to_read();
        let buffer_offset = u32::try_from(part.offset() - slot.range().offset()).unwrap_or(u32::MAX);
        let operation = if self.verify_reads { Operation::CheckedRead } else { Operation::Read };
        self.send(id, operation, part, buffer_offset, to, out);
    }

    /// Handles a read for which every member holds rot. They may hold it in different blocks, so the core
    /// reads single blocks then.
    fn all_readers_rotten(&mut self, id: SlotId, rotten: PeerMask, out: &mut Outputs) {
        let slot = self.slots.at_mut(id);
        if rotten.is_empty() {
            let (operation, range) = (slot.operation(), slot.range());
            return self.send(id, operation, range, 0, PeerMask::NONE, out);
        }
        if rotten.is_one() || !slot.begin_blocks() {
            return self.fail(id, Errno::IO, out);
        }
        self.issue_request(id, out);
    }

    /// Returns true if the members may differ in `range`, or are clearing its regions from their write
    /// intent.
    fn has_to_wait(&mut self, operation: Operation, range: ByteRange) -> bool {
        let touched = self.size.regions().touched(range);
        if self.resync.holds_up(touched.clone()) {
            self.wake.work(); // it is copied next
            return true;
        }
        operation.modifies() && self.intent.is_clearing(touched)
    }

    /// Counts the modification of `range` and returns the replicas that have to do it.
    fn count_modification(&mut self, range: ByteRange) -> PeerMask {
        let touched = self.size.regions().touched(range);
        self.intent.touch(touched.clone());
        let rebuilding = self.absent.count_modification(&touched, self.membership.rebuilding());
        self.membership.answering().with(rebuilding)
    }

    /// Sends an operation on a part of the slot's range.
    pub(super) fn send(
        &mut self,
        id: SlotId,
        operation: Operation,
        range: ByteRange,
        buffer_offset: u32,
        to: PeerMask,
        out: &mut Outputs,
    ) {
        self.slots.at_mut(id).ask(to, self.clock.now_ms());
        out.extend(to.iter().map(|peer| Output::Send { peer, slot: id, operation, range, buffer_offset }));
    }

    pub(super) fn reply(
        &mut self,
        peer: PeerIndex,
        id: SlotId,
        outcome: Result<(), Errno>,
        out: &mut Outputs,
    ) {
        if !self.expects(peer, id, out) {
            return;
        }
        if self.slots.copy_index(id).is_some() {
            return self.copy_reply(peer, id, outcome, out);
        }
        let is_member = self.membership.answering().has(peer);
        let alone = self.is_alone(peer);
        let slot = self.slots.at_mut(id);
        match outcome {
            Ok(()) => {}
            Err(Errno::ROTTEN) if self.verify_reads && slot.operation() == Operation::Read => {
                return self.read_elsewhere(peer, id, out);
            }
            Err(Errno::NO_SPACE) if !is_member => {
                return self.lose_full(peer, "no space left".to_owned(), out);
            }
            Err(Errno::NO_SPACE) if slot.operation().modifies() => slot.record_no_space(peer),
            Err(errno) if alone => slot.record_error(peer, errno),
            Err(errno) => {
                // Its answer stays pending: the request continues when the replica has left.
                let what = format!("{:?} of {}: {errno}", slot.operation(), slot.range());
                return self.lose_failed(peer, what, out);
            }
        }
        let slot = self.slots.at_mut(id);
        if slot.answered_by(peer) {
            match slot.part_answered() {
                true => self.finish(id, out),
                false => self.issue_request(id, out),
            }
        }
    }

    /// Handles rot that `peer` holds in the range of a read: another member answers it, and the range is
    /// compared and repaired.
    fn read_elsewhere(&mut self, peer: PeerIndex, id: SlotId, out: &mut Outputs) {
        let slot = self.slots.at_mut(id);
        slot.record_rot(peer);
        let range = slot.range();
        // The error of the last member fails the request, which is reported.
        if !self.is_alone(peer) && self.scrub_candidates.add(range.grown_to_blocks()) {
            out.push(Output::RotFound { peer, range, is_copied: false });
            self.wake.work();
        }
        self.issue_request(id, out);
    }

    fn is_alone(&self, peer: PeerIndex) -> bool {
        let members = self.membership.answering();
        members.has(peer) && members.is_one()
    }

    /// Records that a replica cannot even answer a PING, so it has failed, whether a request has shown that
    /// or not. Unless it is the last member: its errors go to the frontend, request by request, and its loss
    /// would freeze the volume.
    pub(super) fn ping_failed(&mut self, peer: PeerIndex, queue: u16, errno: Errno, out: &mut Outputs) {
        if self.is_alone(peer) {
            self.timeouts.ponged(peer, queue);
            self.wake.all_if(self.timeouts.ends_pause(&self.membership));
            return;
        }
        self.lose_failed(peer, format!("Ping: {errno}"), out);
    }

    /// Ends the wait of a slot after the last replica that had to answer is gone.
    pub(super) fn slot_answered(&mut self, id: SlotId, out: &mut Outputs) {
        match self.slots.at(id).operation() {
            Operation::Read => self.issue_request(id, out),
            _ => self.finish(id, out),
        }
    }
}
