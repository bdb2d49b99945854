//! Modifications that have found no space on some members. A full disk is the writer's error and not the end of a replica.
//! But such a replica may have done a part of the modification, and others all of it: before the request fails and lets go
//! of its range, they are made equal there, from one that had no space: all others have room for what that one holds.

use shorthorn_types::Errno;

use crate::engine::EngineCore;
use crate::event::Outputs;
use crate::job::{Copy, Job, Why};
use crate::membership::{PeerIndex, PeerMask};
use crate::slot::{Phase, SlotId};

impl EngineCore {
    /// Everybody has answered the request in slot `id`, and some have found no space.
    pub(crate) fn found_no_space(&mut self, id: SlotId, out: &mut Outputs) {
        let slot = *self.slots.at(id);
        let members = self.membership.answering();
        if slot.no_space.and(members).is_empty() {
            let leaving = slot.no_space.and(self.membership.in_view()).without(members);
            if leaving.is_empty() {
                // They have left: everybody else has done it.
                return self.complete(id, Ok(()), out);
            }
            // They are about to leave. Until they have, a member has not done it.
            self.slots.at_mut(id).pending = leaving;
            return;
        }
        if slot.sent.and(self.membership.connected()).is_one() {
            return self.complete(id, Err(Errno::NO_SPACE), out);
        }
        self.slots.at_mut(id).phase = Phase::Resync;
        self.resyncs.push(id);
        self.wake = true;
    }

    /// Starts to make the replicas equal where the request that has waited for it the longest has failed.
    pub(crate) fn start_resync(&mut self, id: SlotId, out: &mut Outputs) {
        if self.resyncs.is_empty() {
            return;
        }
        let request = self.resyncs.remove(0);
        let slot = *self.slots.at(request);
        let why = Why::Failed { request, sources: slot.no_space, tried: PeerMask::NONE };
        // To all but the source, which is chosen when it is asked.
        let targets = slot.sent.and(self.membership.connected());
        self.take_slot(id, Job::Copy(Copy::new(why, slot.range.grown_to_blocks(), targets)));
        self.advance(id, out);
    }

    /// From which member the others get what the range holds.
    pub(crate) fn source_of_resync(&mut self, sources: PeerMask) -> PeerMask {
        let members = self.membership.answering();
        let without_space = sources.and(members);
        if without_space.is_empty() { members } else { without_space }
    }

    /// A member has no space for what the source of a resync holds. It holds less: the others get that, from the piece on
    /// whose turn it is. Each member is the source once, so that this ends.
    pub(crate) fn becomes_source(&mut self, peer: PeerIndex, id: SlotId) -> bool {
        let is_member = self.membership.answering().has(peer);
        let Some(Job::Copy(copy)) = self.job(id) else { return false };
        let Why::Failed { request, sources, tried } = &mut copy.why else { return false };
        if !is_member || tried.has(peer) {
            return false;
        }
        *sources = PeerMask::one(peer);
        *tried = tried.with(*sources);
        copy.starts_over = true;
        let request = *request;
        let targets = self.slots.at(request).sent.and(self.membership.connected());
        if let Some(Job::Copy(copy)) = self.job(id) {
            copy.targets = targets;
        }
        true
    }

    /// The replicas that are left are equal where the request has failed.
    pub(crate) fn is_resynced(&mut self, request: SlotId, out: &mut Outputs) {
        self.complete(request, Err(Errno::NO_SPACE), out);
    }
}
