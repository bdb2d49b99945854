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
//! members are made equal there, from one that had no space: all others have room for its data. A discard
//! fails in the same way: a client loses nothing by that, and the volume would lose a replica.

use shorthorn_types::Errno;
use shorthorn_views::Quorum;

use crate::engine::EngineCore;
use crate::event::Outputs;
use crate::job::{Copy, Job, Why};
use crate::membership::{PeerIndex, PeerMask};
use crate::request::Operation;
use crate::slot::{SlotId, SlotPhase};

/// A disk with so much space has room for a change of the view.
const ROOM_MIB: u32 = 16;

/// The answers of members on their free space since a request found none. An answer to an older PING does not
/// count.
#[derive(Debug, Default)]
pub(crate) struct Space {
    known: PeerMask,
    has_room: PeerMask,
    /// The time since which the members are asked.
    since_ms: u64,
}

impl Space {
    fn ponged(&mut self, peer: PeerIndex, free_mib: u32) {
        let peer = PeerMask::one(peer);
        self.known = self.known.with(peer);
        self.has_room =
            if free_mib >= ROOM_MIB { self.has_room.with(peer) } else { self.has_room.without(peer) };
    }
}

/// The ways to continue a request for which some members have no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WayOut {
    /// The members leave, and the request succeeds.
    Leave,
    /// The members may leave as soon as the others are not slow.
    Wait,
    /// The request fails, and all members are made equal.
    Fail,
}

impl EngineCore {
    /// Continues the request in slot `id`, which every replica has answered, after some have found no space.
    pub(crate) fn found_no_space(&mut self, id: SlotId, out: &mut Outputs) {
        let slot = *self.slots.at(id);
        let members = self.membership.answering();
        if slot.no_space.and(members).is_empty() {
            let leaving = slot.no_space.and(self.membership.in_view()).without(members);
            if leaving.is_empty() {
                // They have left: all others have done it.
                return self.complete(id, Ok(()), out);
            }
            // They are about to leave. Until they have, a member has not done it.
            self.slots.at_mut(id).pending = leaving;
            return;
        }
        if slot.sent.and(self.membership.connected()).is_one() {
            return self.complete(id, Err(Errno::NO_SPACE), out);
        }
        if self.resyncs.is_empty() {
            self.space = Space { since_ms: self.clock.now_ms(), ..Space::default() };
            self.timeouts.ping_soon();
        }
        self.slots.at_mut(id).phase = SlotPhase::Resync;
        self.resyncs.push(id);
        self.wake.work();
    }

    /// Handles the answer of `peer` to the PING of `pinged_at_ms`, with the space of its disk.
    pub(crate) fn has_space(&mut self, peer: PeerIndex, pinged_at_ms: Option<u64>, free_mib: u32) {
        if self.resyncs.is_empty() {
            return;
        }
        if pinged_at_ms.is_some_and(|at_ms| at_ms > self.space.since_ms) {
            self.space.ponged(peer, free_mib);
            self.wake.work();
        } else {
            // An older PING: the disk may have become full since.
            self.timeouts.ping_soon();
        }
    }

    /// Drops members without space if the view can continue without them. Each change of the view may settle
    /// other requests, too.
    pub(crate) fn leave_without_space(&mut self, out: &mut Outputs) {
        let mut at = 0;
        while at < self.resyncs.len() && !self.is_paused() {
            let id = self.resyncs[at];
            let full = self.slots.at(id).no_space.and(self.membership.answering());
            match self.way_out(id) {
                // They have left since: all others have done it.
                WayOut::Leave if full.is_empty() => {
                    self.resyncs.remove(at);
                    self.complete(id, Ok(()), out);
                }
                WayOut::Leave => {
                    self.resyncs.remove(at);
                    let slot = self.slots.at_mut(id);
                    (slot.phase, slot.pending) = (SlotPhase::Active, full);
                    let reason = format!("no space left for {:?} of {}", slot.operation, slot.range);
                    for peer in full.iter() {
                        self.lose_full(peer, reason.clone(), out);
                    }
                }
                WayOut::Wait | WayOut::Fail => at += 1,
            }
        }
    }

    fn way_out(&self, id: SlotId) -> WayOut {
        let members = self.membership.answering();
        let slot = self.slots.at(id);
        let rest = members.without(slot.no_space);
        if rest == members {
            return WayOut::Leave;
        }
        let Space { known, has_room, since_ms } = self.space;
        let is_over = self.clock.now_ms().saturating_sub(since_ms) > self.timeouts.wait_for_space_ms();
        let is_most = |peers: PeerMask| self.membership.quorum_of(peers) == Quorum::More;
        if slot.operation == Operation::Discard || is_over || !is_most(rest.without(known.without(has_room)))
        {
            WayOut::Fail
        } else if is_most(rest.and(has_room).without(self.timeouts.slow())) {
            WayOut::Leave
        } else {
            WayOut::Wait
        }
    }

    /// Starts to make the replicas equal where the request that has waited for it the longest has failed.
    pub(crate) fn start_resync(&mut self, id: SlotId, out: &mut Outputs) {
        let Some(at) = self.resyncs.iter().position(|id| self.way_out(*id) == WayOut::Fail) else { return };
        let request = self.resyncs.remove(at);
        let slot = *self.slots.at(request);
        let why = Why::Failed { request, sources: slot.no_space, tried: PeerMask::NONE };
        // To all but the source, which is chosen when it is asked.
        let targets = slot.sent.and(self.membership.connected());
        self.take_slot(id, Job::Copy(Copy::new(why, slot.range.grown_to_blocks(), targets)));
        self.advance(id, out);
    }

    /// A member has no space for what the source of a resync holds. It holds less: the others get that, from
    /// the piece on whose turn it is. Each member is the source once, so that this ends.
    pub(crate) fn becomes_source(&mut self, peer: PeerIndex, id: SlotId) -> bool {
        let is_member = self.membership.answering().has(peer);
        let Some(Job::Copy(copy)) = self.job(id) else { return false };
        let Why::Failed { sources, tried, .. } = &mut copy.why else { return false };
        if !is_member || tried.has(peer) {
            return false;
        }
        *sources = PeerMask::one(peer);
        *tried = tried.with(*sources);
        copy.starts_over = true;
        true
    }

    /// Continues after the resync, when the remaining replicas are equal in the range of the failed request.
    pub(crate) fn is_resynced(&mut self, request: SlotId, out: &mut Outputs) {
        self.complete(request, Err(Errno::NO_SPACE), out);
    }
}
