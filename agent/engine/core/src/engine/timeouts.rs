//! Drops late replicas and sends PINGs, with every tick: see [`crate::replica_timeouts`].

use super::EngineCore;
use crate::event::Outputs;
use crate::membership::PeerState;

impl EngineCore {
    /// Drops the replicas that are too late, and reports the ones that the volume waits for.
    pub(super) fn check_timeouts(&mut self, out: &mut Outputs) {
        let now_ms = self.clock.now_ms();
        let debts = self.timeouts.debts(&self.slots, &self.membership, &self.marks, now_ms);
        let replicas = self.timeouts.check(&debts, &self.membership, now_ms);
        for peer in replicas.late.iter() {
            // An earlier one may have taken the quorum with it.
            if !self.membership.is_frozen() && self.membership.state(peer) != PeerState::Failed {
                self.lose_late(peer, self.timeouts.reason(peer, &debts), out);
            }
        }
        if let Some((peer, reason)) = self.timeouts.holds_requests_up(&self.jobs) {
            self.lose_late(peer, reason, out);
        }
        self.timeouts.report_awaited(replicas.awaited, &debts, self.membership.answering(), out);
        self.wake.all_if(self.timeouts.keep_in_touch(&debts, &self.membership));
    }

    /// Rebuilding replicas that have a part of a copy while a request waits for its range hold that request
    /// up.
    pub(super) fn charge_rebuilding(&mut self, step_ms: u64) {
        let rebuilding = self.membership.rebuilding();
        for (id, copy) in self.jobs.rebuilds() {
            let slot = self.slots.at(id);
            let delays_request = self.dispatch.waiting_for(id).any(|id| self.slots.copy_index(id).is_none());
            if slot.is_active() && delays_request {
                copy.hold_up(slot.pending().and(rebuilding), step_ms);
            }
        }
    }
}
