//! Modifications that have found no space on some members.
//!
//! If the members that have done the modification are more than half of the view, those without space leave
//! it, and the request succeeds. A replica comes back when its disk has space again. First the other members
//! have to answer a PING with the information that their disks have space. They have to store the new view,
//! and then the regions that the others miss. All replicas may be on one disk. While too few of them answer
//! in time, the request waits: the members without space may be needed to continue without one of the others.
//!
//! Otherwise the writer gets the error, and no replica leaves. Half of a view would have to ask the arbiter,
//! and would hold the only copies while the disks of the others are full. A replica without space may have
//! done a part of the modification, and others all of it. Before the request fails and leaves its range, the
//! members are resynced there. The source is one that had no space: all others have room for its data. A
//! discard fails in the same way: a client loses nothing by that, and the volume would lose a replica.

use shorthorn_types::Errno;

use super::EngineCore;
use crate::copy::{Copy, CopyReason};
use crate::event::Outputs;
use crate::job::Job;
use crate::membership::{PeerIndex, PeerMask};
use crate::no_space::{NoSpaceAction, Space, WaitingForSpace};
use crate::slot::SlotId;

impl EngineCore {
    /// Continues the request in slot `id`, which every replica has answered, after some have found no space.
    pub(super) fn found_no_space(&mut self, id: SlotId, out: &mut Outputs) {
        let slot = *self.slots.at(id);
        let members = self.membership.answering();
        if slot.no_space().and(members).is_empty() {
            let leaving = slot.no_space().and(self.membership.in_view()).without(members);
            if leaving.is_empty() {
                // They have left: all others have done it.
                return self.complete(id, Ok(()), out);
            }
            // They are about to leave. Until they have, a member has not done it.
            self.slots.at_mut(id).wait_until_left(leaving);
            return;
        }
        if slot.sent().and(self.membership.connected()).is_one() {
            return self.complete(id, Err(Errno::NO_SPACE), out);
        }
        if self.space.wait(id, slot.operation(), self.clock.now_ms()) {
            self.timeouts.ping_soon();
        }
        self.slots.at_mut(id).wait_for_resync();
        self.wake.work();
    }

    /// Handles the answer of `peer` to the PING of `pinged_at_ms`, with the space of its disk.
    pub(super) fn record_free_space(
        &mut self,
        peer: PeerIndex,
        pinged_at_ms: Option<u64>,
        free_mib: Option<u32>,
    ) {
        if !self.space.has_waiting() {
            return;
        }
        match self.space.ponged(peer, pinged_at_ms, free_mib) {
            true => self.wake.work(),
            false => self.timeouts.ping_soon(),
        }
    }

    /// Drops members without space if the view can continue without them. Each change of the view may decide
    /// about other requests, too.
    pub(super) fn leave_without_space(&mut self, out: &mut Outputs) {
        let mut at = 0;
        while let Some(waiting) = self.space.get(at).filter(|_| !self.is_paused()) {
            let id = waiting.id;
            let full = self.slots.at(id).no_space().and(self.membership.answering());
            match self.no_space_action(waiting) {
                // They have left since: all others have done it.
                NoSpaceAction::Drop if full.is_empty() => {
                    self.space.remove(at);
                    self.complete(id, Ok(()), out);
                }
                NoSpaceAction::Drop => {
                    self.space.remove(at);
                    let slot = self.slots.at_mut(id);
                    slot.wait_until_left(full);
                    let reason = format!("no space left for {:?} of {}", slot.operation(), slot.range());
                    for peer in full.iter() {
                        self.lose_full(peer, reason.clone(), out);
                    }
                }
                NoSpaceAction::Wait | NoSpaceAction::Fail => at += 1,
            }
        }
    }

    fn no_space_action(&self, WaitingForSpace { id, since_ms, .. }: WaitingForSpace) -> NoSpaceAction {
        let waited_ms = self.clock.now_ms().saturating_sub(since_ms);
        self.space.no_space_action(self.slots.at(id), &self.membership, &self.timeouts, waited_ms)
    }

    /// Starts to resync the replicas in the range of the failed request that has waited the longest.
    pub(super) fn start_resync(&mut self, id: SlotId, out: &mut Outputs) {
        let (members, timeouts, now_ms) = (&self.membership, &self.timeouts, self.clock.now_ms());
        let slots = &self.slots;
        let fails = |space: &Space, WaitingForSpace { id, since_ms, .. }: WaitingForSpace| {
            let waited_ms = now_ms.saturating_sub(since_ms);
            space.no_space_action(slots.at(id), members, timeouts, waited_ms) == NoSpaceAction::Fail
        };
        let Some(request) = self.space.remove_first(fails) else { return };
        let slot = *self.slots.at(request);
        let why = CopyReason::Failed { request, sources: slot.no_space(), tried: PeerMask::NONE };
        // To all but the source, which is chosen when it is asked.
        let targets = slot.sent().and(self.membership.connected());
        self.take_slot(id, Job::Copy(Copy::new(why, slot.range().grown_to_blocks(), targets)));
        self.advance(id, out);
    }

    /// Returns true if `peer`, which has no space for a copy, becomes its source instead.
    pub(super) fn becomes_source(&mut self, peer: PeerIndex, id: SlotId) -> bool {
        let is_member = self.membership.answering().has(peer);
        let Some(Job::Copy(copy)) = self.job(id) else { return false };
        is_member && copy.becomes_source(peer)
    }

    /// Continues after the resync, when the remaining replicas are equal in the range of the failed request.
    pub(super) fn range_resynced(&mut self, request: SlotId, out: &mut Outputs) {
        self.complete(request, Err(Errno::NO_SPACE), out);
    }
}
