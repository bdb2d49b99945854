//! The outputs of the core, as the shell performs them; and the sabotages that lie to the core.

use std::rc::Rc;

use shorthorn_core::{DropCause, Event, Operation, Output, Outputs, PeerIndex, PeerState, SlotId};
use shorthorn_types::{ByteRange, Errno, Members, Regions, ReplicaReport, View};

use super::{ID_COMMIT, ID_KIND, ID_MARK, ID_PING, ID_PROPOSE, ID_REQUEST, key};
use crate::Sabotage;
use crate::engine::DEPTH;
use crate::net::{Ask, NetMessage};
use crate::occurrence::Occurrence;
use crate::replica::block_numbers;
use crate::simulation::Simulation;

impl Simulation {
    /// Gives the core an event, and performs its outputs.
    pub fn apply(&mut self, engine: u64, event: Event) {
        let (now_ms, sabotage) = (self.clock_ms(engine), self.options.sabotage);
        let mut outputs = std::mem::take(&mut self.outputs);
        let Some(process) = self.engines.get_mut(&engine) else { return };
        // A command that the simulation gives a paused process does not end the pause.
        let notices = !process.paused && sabotage != Some(Sabotage::PausesUnnoticed);
        let Some(core) = process.core.as_mut() else { return };
        if notices {
            core.runs_at(now_ms);
        }
        core.apply(event, &mut outputs);
        for output in outputs.drain(..) {
            self.perform(engine, output);
        }
        self.outputs = outputs;
    }

    /// Performs the outputs of the core.
    pub fn perform_all(&mut self, engine: u64, outputs: Outputs) {
        outputs.into_iter().for_each(|output| self.perform(engine, output));
    }

    fn is_sabotaged(&self, by: Sabotage) -> bool {
        self.options.sabotage == Some(by)
    }

    /// Sends a request, or sabotages it.
    fn send_request(&mut self, engine: u64, peer: PeerIndex, slot: SlotId, operation: Operation, ask: Ask) {
        if slot.slot >= DEPTH
            && operation == Operation::Flush
            && self.is_sabotaged(Sabotage::ClearWithoutFlush)
        {
            return self.apply(engine, Event::Reply { peer, slot, outcome: Ok(()) });
        }
        let modifies = !matches!(
            operation,
            Operation::Read | Operation::CheckedRead | Operation::Flush | Operation::Verify
        ) && slot.slot < DEPTH;
        if modifies && self.is_sabotaged(Sabotage::RebuildingSkipped) && self.is_rebuilding(engine, peer) {
            return self.apply(engine, Event::Reply { peer, slot, outcome: Ok(()) });
        }
        self.ask(engine, peer, slot.queue, ID_REQUEST | u64::from(slot.slot), ask);
        if modifies && self.is_sabotaged(Sabotage::NoRangeTable) {
            // The core believes that the request is done, and sends overlapping ones. The guest gets the
            // answer when it is done.
            if let Some(process) = self.engines.get_mut(&engine) {
                process.lies.entry(key(slot)).or_default().waits_for.push(peer);
            }
            self.apply(engine, Event::Reply { peer, slot, outcome: Ok(()) });
        }
    }

    fn is_rebuilding(&self, engine: u64, peer: PeerIndex) -> bool {
        let core = self.engines.get(&engine).and_then(|process| process.core.as_ref());
        core.is_some_and(|core| core.membership().state(peer) == PeerState::Rebuilding)
    }

    /// Completes a request as far as the core knows.
    pub(super) fn complete(&mut self, engine: u64, slot: SlotId, outcome: Result<(), Errno>) {
        if let Some(process) = self.engines.get_mut(&engine)
            && let Some(lie) = process.lies.get_mut(&key(slot))
        {
            lie.outcome = Some(outcome);
            return self.own_up(engine, slot);
        }
        self.completed(engine, slot, outcome);
    }

    /// Sends the guest the result that was kept from it, once every replica has really answered.
    fn own_up(&mut self, engine: u64, slot: SlotId) {
        let Some(process) = self.engines.get_mut(&engine) else { return };
        let Some(lie) = process.lies.get(&key(slot)) else { return };
        let Some(outcome) = lie.outcome.filter(|_| lie.waits_for.is_empty()) else { return };
        let outcome = lie.error.map_or(outcome, Err);
        process.lies.remove(&key(slot));
        self.completed(engine, slot, outcome);
    }

    pub(super) fn stop_waiting_for(&mut self, engine: u64, peer: PeerIndex, queue: u16) {
        let Some(process) = self.engines.get_mut(&engine) else { return };
        let slots: Vec<u16> =
            process.lies.keys().filter(|(of, _)| *of == queue).map(|(_, slot)| *slot).collect();
        for slot in slots {
            let slot = SlotId { queue, slot };
            if let Some(lie) =
                self.engines.get_mut(&engine).and_then(|process| process.lies.get_mut(&key(slot)))
            {
                lie.waits_for.retain(|other| *other != peer);
            }
            self.own_up(engine, slot);
        }
    }

    /// Returns true if the core must not hear of an answer that it was lied to about.
    pub(super) fn is_lied_about(
        &mut self,
        engine: u64,
        peer: PeerIndex,
        slot: SlotId,
        outcome: &mut Result<(), Errno>,
    ) -> bool {
        let no_give_back = self.is_sabotaged(Sabotage::NoGiveBack);
        let Some(process) = self.engines.get_mut(&engine) else { return false };
        if no_give_back && slot.slot < DEPTH && *outcome == Err(Errno::NO_SPACE) {
            process.lies.entry(key(slot)).or_default().error = Some(Errno::NO_SPACE);
            *outcome = Ok(());
        }
        let Some(lie) = process.lies.get_mut(&key(slot)) else { return false };
        let Some(at) = lie.waits_for.iter().position(|other| *other == peer) else { return false };
        lie.waits_for.swap_remove(at);
        lie.error = lie.error.or_else(|| outcome.err());
        self.own_up(engine, slot);
        true
    }

    fn perform(&mut self, engine: u64, output: Output) {
        match output {
            Output::Send { peer, slot, operation, range, buffer_offset } => {
                self.look_at_scrub(engine, operation, range);
                self.look_at_rebuild(engine, peer, slot, operation, range);
                if let Some(ask) = self.ask_of(engine, slot, operation, range, buffer_offset as usize / 512) {
                    self.send_request(engine, peer, slot, operation, ask);
                }
            }
            Output::Complete { slot, outcome } => self.complete(engine, slot, outcome),
            Output::Failed(failure) => self.trace(|| format!("engine {engine}: {failure:?}")),
            Output::Ping { peer, queue } => self.ask(engine, peer, queue, ID_PING, Ask::Ping),
            Output::Propose { peer, view, honoured } => self.propose(engine, peer, *view, *honoured),
            Output::Commit { peer, view } => {
                self.ask(engine, peer, 0, ID_COMMIT | u64::from(view.id.number), Ask::Commit(*view));
            }
            Output::AskGrant { view, honoured, stored } => self.want(engine, *view, *honoured, *stored),
            Output::Mark { peer, mark, change } => {
                self.ask(engine, peer, 0, ID_MARK | u64::from(mark), Ask::Mark(change));
            }
            Output::Awaited { peer, .. } => {
                self.trace(|| format!("engine {engine} waits for {peer}"));
                self.count("waits for late members");
            }
            Output::Prompt { peer } => {
                self.trace(|| format!("engine {engine}: {peer} has answered"));
                self.count("late members answered");
            }
            Output::Drop { peer, reason, cause } => {
                self.trace(|| format!("engine {engine} drops {peer}: {reason}"));
                self.count(if cause == DropCause::Late { "drops of late replicas" } else { "drops" });
                self.record_dropped(engine, peer);
                self.close_links(engine, peer);
            }
            Output::ViewChanged { view } => self.view_changed(engine, *view),
            Output::Rebuilt { peer } => {
                self.trace(|| format!("engine {engine}: {peer} is rebuilt"));
                self.count("rebuilds");
            }
            Output::Resynced => self.count("resynced"),
            Output::ClearedAll => self.cleared_all(engine),
            Output::ScrubFound { range, odd, repaired } => {
                self.look_at_report(engine, range, repaired);
                self.scrub_found(engine, range, &odd);
            }
            Output::RotFound { peer, range, is_copied } => self.rot_found(engine, peer, range, is_copied),
            Output::ScrubDone => {
                self.scrubs_done += 1;
                self.trace(|| "  a scrub is done".to_owned());
                self.count("scrubs");
            }
            Output::Expanded { size_bytes } => self.expanded(engine, size_bytes),
            Output::Frozen { reason } => {
                self.trace(|| format!("engine {engine} is frozen: {reason}"));
                self.count("frozen");
                self.end_engine(engine);
            }
        }
    }

    /// Returns the request for an operation of the core, whose data is in its slot from that sector on.
    fn ask_of(
        &mut self,
        engine: u64,
        slot: SlotId,
        operation: Operation,
        range: ByteRange,
        at: usize,
    ) -> Option<Ask> {
        let process = self.engines.get_mut(&engine)?;
        let sectors = usize::try_from(range.length() / 512).unwrap_or(0);
        if matches!(operation, Operation::Read | Operation::CheckedRead) {
            process.read_to.insert(key(slot), at);
        }
        let mut data = || Rc::from(&process.buffer(slot)[at..at + sectors]);
        Some(match operation {
            Operation::Read => Ask::Read(range),
            Operation::CheckedRead => Ask::CheckedRead(range),
            Operation::Write { fua } => Ask::Write(range, data(), fua),
            Operation::WriteRot => {
                // Healed meanwhile: see `Simulation::rot_is_copied`.
                let ask = Ask::Write(range, data(), false);
                process.reads_rot.retain(|reads| *reads != range);
                ask
            }
            Operation::Flush => Ask::Flush,
            Operation::Discard => Ask::Discard(range),
            Operation::WriteZeroes { fua } => Ask::WriteZeroes(range, fua),
            Operation::Verify => Ask::Verify(range),
        })
    }

    /// Checks that a rebuild replaces no sound block of a member. Its source may hold rot in that block, and
    /// no checksum that shows it.
    fn look_at_rebuild(
        &mut self,
        engine: u64,
        peer: PeerIndex,
        slot: SlotId,
        operation: Operation,
        range: ByteRange,
    ) {
        let is_write = matches!(operation, Operation::Write { .. } | Operation::WriteZeroes { .. });
        let Some(process) = self.engines.get(&engine) else { return };
        let Some(core) = process.core.as_ref().filter(|core| is_write && core.is_rebuild_copy(slot)) else {
            return;
        };
        if core.membership().state(peer) != PeerState::Member {
            return;
        }
        let Some(at) = self.replica_index(process.peers[usize::from(peer)].replica) else { return };
        self.count("blocks of members repaired by rebuilds");
        let replica = &self.replicas[at];
        // A scrub of the snapshots may have repaired it since the member has reported it.
        let was_rotten = |block: u64| self.was_rotten.contains(&(at, block));
        let sound =
            |block: &u64| replica.is_sound(*block) && !replica.is_known_rotten(*block) && !was_rotten(*block);
        if let Some(block) = block_numbers(range).find(sound) {
            self.violate(format!("a rebuild replaces block {block} of replica {at}, which is sound there"));
        }
    }

    fn propose(&mut self, engine: u64, peer: PeerIndex, view: View, honoured: ReplicaReport) {
        if let Some(process) = self.engines.get_mut(&engine) {
            process.pending = Some((view, honoured.clone()));
        }
        let number = ID_PROPOSE | u64::from(view.id.number);
        self.ask(engine, peer, 0, number, Ask::Propose(view, honoured));
        if self.is_sabotaged(Sabotage::NotPaused) {
            self.apply(engine, Event::ViewStored { peer, view: view.id });
        }
    }

    /// Asks the arbiter for a view.
    fn want(&mut self, engine: u64, view: View, honoured: ReplicaReport, stored: Members) {
        self.count("grants asked");
        if let Some(process) = self.engines.get_mut(&engine) {
            process.wants = Some((view, honoured, stored));
        }
        self.after(500, Occurrence::AskArbiter { engine });
        if self.is_sabotaged(Sabotage::NotPaused) {
            self.apply(engine, Event::Granted { view: view.id });
        }
    }

    fn view_changed(&mut self, engine: u64, view: View) {
        self.trace(|| format!("engine {engine}: view {view}"));
        self.count("view changes");
        if let Some(process) = self.engines.get_mut(&engine) {
            process.view = Some(view);
            process.pending = None;
            process.wants = None;
        }
    }

    fn rot_found(&mut self, engine: u64, peer: PeerIndex, range: ByteRange, is_copied: bool) {
        self.trace(|| format!("engine {engine}: replica {peer} holds rot at {range}, copied: {is_copied}"));
        self.count("rot found by copies");
        if is_copied {
            self.rot_is_copied(engine, usize::from(peer), range);
        }
    }

    fn expanded(&mut self, engine: u64, size_bytes: u64) {
        self.trace(|| format!("engine {engine}: the volume has {size_bytes} bytes"));
        self.count("expansions");
        let region_bytes = |size_bytes| Regions::of(size_bytes).region_bytes();
        if region_bytes(self.guest.size_bytes) != region_bytes(size_bytes) {
            self.count("expansions to larger regions");
        }
        self.device_grows(engine);
    }

    /// Checks that members and core count all that a member misses from its failure on.
    fn record_dropped(&mut self, engine: u64, peer: PeerIndex) {
        let Some(process) = self.engines.get_mut(&engine) else { return };
        let Some(view) = process.view else { return };
        let peer = &mut process.peers[usize::from(peer)];
        if view.members.contains(peer.replica) {
            (peer.is_complete, peer.last_view) = (true, Some(view));
        }
    }

    /// Handles a difference that a scrub has found: members must not differ, but a disk may be unreadable.
    fn scrub_found(&mut self, engine: u64, range: ByteRange, odd: &[PeerIndex]) {
        let Some(process) = self.engines.get(&engine) else { return };
        let found: Vec<usize> = odd
            .iter()
            .filter_map(|peer| self.replica_index(process.peers.get(usize::from(*peer))?.replica))
            .collect();
        if found.iter().any(|at| self.has_rotten(*at, range)) {
            self.count("rot found by scrubs");
        } else if found.iter().all(|at| !self.failed_checks.contains_key(&(*at, engine))) {
            self.violate(format!("scrub: {odd:?} differ at {range}"));
        }
        found.into_iter().for_each(|at| self.forget_failed_check(at, engine));
    }

    fn forget_failed_check(&mut self, at: usize, engine: u64) {
        match self.failed_checks.get_mut(&(at, engine)) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(self.failed_checks.remove(&(at, engine))),
        }
    }

    fn ask(&mut self, engine: u64, peer: PeerIndex, queue: u16, number: u64, ask: Ask) {
        let Some(process) = self.engines.get(&engine) else { return };
        match process.links[usize::from(peer)][usize::from(queue)] {
            Some(link) => self.send(link, true, NetMessage::Ask(number, Box::new(ask))),
            // It broke between its opening and its first use: the core has to learn that, or it would wait.
            None if number & ID_KIND == ID_REQUEST => {
                self.apply(engine, Event::Lost { peer, reason: "the replica has no connection".to_owned() });
            }
            None => {}
        }
    }
}
