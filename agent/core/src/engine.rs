use shorthorn_types::{ByteRange, Errno, ReplicaReport, View, ViewId};

use crate::membership::{Membership, PeerConfig, PeerIndex, PeerMask, PeerState, Step};
use crate::ranges::RangeTable;
use crate::request::{Operation, Request};
use crate::slot::{Phase, Slot, SlotId, Stage};

/// A connection that is silent for so long gets a PING.
const PING_INTERVAL_MS: u64 = 1000;

/// What an engine core is made with.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// How many queues.
    pub queues: u16,
    /// How many slots each has.
    pub depth: u16,
    /// Every replica that the engine was given, at most [`shorthorn_types::limits::MAX_MEMBERS`].
    pub peers: Vec<PeerConfig>,
    /// The engine's first view, through already.
    pub view: View,
    /// A replica that does not answer a request for so long has failed. Shorter than the time-out of every frontend.
    pub replica_timeout_ms: u64,
}

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A frontend submits a request.
    Submit {
        /// On which queue.
        queue: u16,
        /// The request.
        request: Request,
    },
    /// A replica has answered what it was sent; the data of a read is in the slot's buffer.
    Reply {
        /// Which replica.
        peer: PeerIndex,
        /// Whose request.
        slot: SlotId,
        /// How it went.
        outcome: Result<(), Errno>,
    },
    /// A replica has answered a PING.
    Pong {
        /// Which replica.
        peer: PeerIndex,
    },
    /// A replica has answered a proposal.
    ViewStored {
        /// Which replica.
        peer: PeerIndex,
        /// The view that it has stored.
        view: ViewId,
    },
    /// A connection to a replica is lost, or what came over it cannot be trusted.
    Lost {
        /// Which replica.
        peer: PeerIndex,
        /// Why.
        reason: String,
    },
    /// After [`Output::Drop`]: nothing is read into or sent from the buffers of `queue` for this replica any more.
    Closed {
        /// Which replica.
        peer: PeerIndex,
        /// Which queue.
        queue: u16,
    },
    /// Time passes; at least four times a second while requests are in flight.
    Tick {
        /// Milliseconds since any fixed point; never less than before.
        now_ms: u64,
    },
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send the request to a replica.
    Send {
        /// Which replica.
        peer: PeerIndex,
        /// The slot has the data of a write, or takes that of a read.
        slot: SlotId,
        /// What to send.
        operation: Operation,
        /// About which bytes.
        range: ByteRange,
    },
    /// Tell the frontend that its request is done. The slot is free.
    Complete {
        /// Whose request.
        slot: SlotId,
        /// How it went.
        outcome: Result<(), Errno>,
    },
    /// Send a PING on every connection.
    Ping {
        /// To which replica.
        peer: PeerIndex,
    },
    /// Send a proposed view.
    Propose {
        /// To which replica.
        peer: PeerIndex,
        /// The view.
        view: View,
        /// What it honours.
        honoured: ReplicaReport,
    },
    /// Tell a replica that the view is through.
    Commit {
        /// Which replica.
        peer: PeerIndex,
        /// The view.
        view: View,
    },
    /// Close every connection to a replica that has failed; [`Event::Closed`] follows for each queue.
    Drop {
        /// Which replica.
        peer: PeerIndex,
        /// Why, for people.
        reason: String,
    },
    /// The view has changed.
    ViewChanged {
        /// To this.
        view: View,
    },
    /// No quorum is left: nothing is acknowledged or read any more. The engine has to start again.
    Frozen {
        /// Why, for people.
        reason: String,
    },
}

/// Where the core puts its outputs. Keeps its memory from call to call.
pub type Outputs = Vec<Output>;

/// One volume, attached. See the crate's description.
#[derive(Debug)]
pub struct EngineCore {
    depth: u16,
    slots: Vec<Slot>,
    membership: Membership,
    ranges: RangeTable,
    held: Vec<SlotId>,
    ready: Vec<SlotId>,
    /// Per queue: replicas whose connection is closed.
    closed: Vec<PeerMask>,
    /// Per replica: when the oldest PING without an answer was sent.
    pings: Vec<Option<u64>>,
    last_ping_ms: u64,
    unfinished: usize,
    frozen: bool,
    replica_timeout_ms: u64,
    now_ms: u64,
}

impl EngineCore {
    /// A core that serves `config.view`. Allocates all that it will ever need, view changes aside.
    #[must_use]
    pub fn new(config: &CoreConfig) -> EngineCore {
        let requests = usize::from(config.queues) * usize::from(config.depth);
        EngineCore {
            depth: config.depth,
            slots: vec![Slot::FREE; requests],
            membership: Membership::new(&config.peers, config.view),
            ranges: RangeTable::new(requests),
            held: Vec::with_capacity(requests),
            ready: Vec::with_capacity(requests),
            closed: vec![PeerMask::NONE; usize::from(config.queues)],
            pings: vec![None; config.peers.len()],
            last_ping_ms: 0,
            unfinished: 0,
            frozen: false,
            replica_timeout_ms: config.replica_timeout_ms,
            now_ms: 0,
        }
    }

    /// Which replicas are members.
    #[must_use]
    pub fn membership(&self) -> &Membership {
        &self.membership
    }

    /// How many requests are unfinished.
    #[must_use]
    pub fn unfinished(&self) -> usize {
        self.unfinished
    }

    /// Takes an event in and appends what follows from it to `out`.
    pub fn apply(&mut self, event: Event, out: &mut Outputs) {
        match event {
            Event::Submit { queue, request } => self.submit(queue, request, out),
            Event::Reply { peer, slot, outcome } => self.reply(peer, slot, outcome, out),
            Event::Pong { peer } => {
                if let Some(ping) = self.pings.get_mut(usize::from(peer)) {
                    *ping = None;
                }
            }
            Event::ViewStored { peer, view } => {
                let step = self.membership.stored(peer, view);
                self.follow(step, out);
            }
            Event::Lost { peer, reason } => self.lose(peer, reason, out),
            Event::Closed { peer, queue } => {
                if let Some(closed) = self.closed.get_mut(usize::from(queue)) {
                    *closed = closed.with(PeerMask::one(peer));
                }
                self.release(out);
            }
            Event::Tick { now_ms } => self.tick(now_ms, out),
        }
    }

    fn slot(&mut self, id: SlotId) -> &mut Slot {
        &mut self.slots[usize::from(id.queue) * usize::from(self.depth) + usize::from(id.slot)]
    }

    fn submit(&mut self, queue: u16, request: Request, out: &mut Outputs) {
        let id = SlotId { queue, slot: request.slot };
        let slot = self.slot(id);
        assert!(slot.phase == Phase::Free, "slot {id:?} is submitted twice");
        *slot = Slot::of(request);
        let Slot { operation, range, .. } = *slot;
        self.unfinished += 1;
        if operation == Operation::Flush || self.ranges.enter(id, range, operation.modifies()) {
            self.issue(id, out);
        }
    }

    /// Sends a request whose turn has come, or holds it while nothing may be sent.
    fn issue(&mut self, id: SlotId, out: &mut Outputs) {
        if self.frozen || self.membership.is_changing() {
            self.slot(id).phase = Phase::Held;
            self.held.push(id);
            return;
        }
        let operation = self.slot(id).operation;
        let to = match operation {
            Operation::Read => self.membership.reader().map_or(PeerMask::NONE, PeerMask::one),
            _ => self.membership.answering(),
        };
        self.send(id, Stage::Request, operation, to, out);
    }

    fn send(&mut self, id: SlotId, stage: Stage, operation: Operation, to: PeerMask, out: &mut Outputs) {
        let now_ms = self.now_ms;
        let slot = self.slot(id);
        (slot.phase, slot.stage, slot.pending, slot.sent_at_ms) = (Phase::Active, stage, to, now_ms);
        let range = slot.range;
        out.extend(to.iter().map(|peer| Output::Send { peer, slot: id, operation, range }));
    }

    fn reply(&mut self, peer: PeerIndex, id: SlotId, outcome: Result<(), Errno>, out: &mut Outputs) {
        if self.membership.state(peer) != PeerState::Member {
            return; // what a replica says that is on its way out counts for nothing
        }
        let alone = self.membership.answering().is_one();
        let exists = id.slot < self.depth && usize::from(id.queue) < self.closed.len();
        if !exists || self.slot(id).phase != Phase::Active || !self.slot(id).pending.has(peer) {
            return self.lose(peer, format!("it answered what it was not asked: {id:?}"), out);
        }
        let slot = self.slot(id);
        match outcome {
            Ok(()) => {}
            Err(Errno::NO_SPACE) if slot.operation.modifies() && slot.stage == Stage::Request => {
                slot.no_space = slot.no_space.with(PeerMask::one(peer));
            }
            Err(errno) if alone => slot.error = Some(errno),
            Err(errno) => {
                // Its answer stays pending: the request goes on when the replica has left.
                let what = format!("{:?} of {}: {errno}", slot.operation, slot.range);
                return self.lose(peer, what, out);
            }
        }
        slot.pending = slot.pending.without(PeerMask::one(peer));
        if slot.pending.is_empty() {
            self.finish(id, out);
        }
    }

    /// Everybody has answered.
    fn finish(&mut self, id: SlotId, out: &mut Outputs) {
        let members = self.membership.answering();
        let slot = self.slot(id);
        let without_space = slot.no_space;
        match (slot.stage, slot.error) {
            (_, Some(errno)) => self.complete(id, Err(errno), out),
            (Stage::Request, None) if without_space.is_empty() => self.complete(id, Ok(()), out),
            (Stage::ReadBack, None) => {
                let had_space = members.without(without_space);
                self.send(id, Stage::WriteBack, Operation::Write { fua: false }, had_space, out);
            }
            (Stage::WriteBack, None) => self.complete(id, Err(Errno::NO_SPACE), out),
            (Stage::Request, None) => self.give_back(id, out),
        }
    }

    /// Some members had no space for the write. A full disk is the writer's error and not the end of a
    /// replica; but the members that had the space must not keep what the others do not have: they get
    /// back what one of the others still holds, and then the write has failed on all.
    fn give_back(&mut self, id: SlotId, out: &mut Outputs) {
        let members = self.membership.answering();
        let in_view = self.membership.in_view();
        let slot = self.slot(id);
        let without_space = slot.no_space;
        let leaving = without_space.without(without_space.without(in_view)).without(members);
        let holders = without_space.without(without_space.without(members));
        if members.without(without_space).is_empty() {
            return self.complete(id, Err(Errno::NO_SPACE), out);
        }
        if !matches!(slot.operation, Operation::Write { .. }) {
            // There is no buffer to carry the old data: those without space leave.
            slot.pending = without_space;
            slot.no_space = PeerMask::NONE;
            for peer in without_space.iter() {
                self.lose(peer, "it has no space left for zeroes, others have".to_owned(), out);
            }
            return;
        }
        match holders.iter().next() {
            Some(source) => self.send(id, Stage::ReadBack, Operation::Read, PeerMask::one(source), out),
            // Those without space are about to leave. Until they have, a member does not hold the data.
            None if !leaving.is_empty() => self.slot(id).pending = leaving,
            // They have left: everybody else has the data.
            None => self.complete(id, Ok(()), out),
        }
    }

    fn complete(&mut self, id: SlotId, outcome: Result<(), Errno>, out: &mut Outputs) {
        let slot = self.slot(id);
        slot.phase = Phase::Free;
        let is_ranged = slot.operation != Operation::Flush;
        self.unfinished -= 1;
        out.push(Output::Complete { slot: id, outcome });
        if !is_ranged {
            return;
        }
        let mut ready = std::mem::take(&mut self.ready);
        self.ranges.leave(id, &mut ready);
        for id in ready.drain(..) {
            self.issue(id, out);
        }
        self.ready = ready;
    }

    fn lose(&mut self, peer: PeerIndex, reason: String, out: &mut Outputs) {
        if self.membership.state(peer) != PeerState::Member {
            return;
        }
        if let Some(ping) = self.pings.get_mut(usize::from(peer)) {
            *ping = None;
        }
        let step = self.membership.lose(peer);
        out.push(Output::Drop { peer, reason });
        self.follow(step, out);
    }

    fn follow(&mut self, step: Step, out: &mut Outputs) {
        match step {
            Step::Wait => {}
            Step::Propose(view, honoured) => {
                let propose = |peer| Output::Propose { peer, view, honoured: honoured.clone() };
                out.extend(self.membership.answering().iter().map(propose));
            }
            Step::Frozen(reason) => {
                self.frozen = true;
                out.push(Output::Frozen { reason });
            }
            Step::Installed(view) => {
                out.extend(self.membership.answering().iter().map(|peer| Output::Commit { peer, view }));
                out.push(Output::ViewChanged { view });
                self.release(out);
                let held = std::mem::take(&mut self.held);
                for id in held {
                    self.issue(id, out);
                }
            }
        }
    }

    /// Requests no longer wait for replicas that have left the view and whose connection is closed.
    fn release(&mut self, out: &mut Outputs) {
        let in_view = self.membership.in_view();
        for queue in 0..self.closed.len() {
            let gone = self.closed[queue].without(in_view);
            if gone.is_empty() {
                continue;
            }
            for slot in 0..self.depth {
                let id = SlotId { queue: u16::try_from(queue).unwrap_or(u16::MAX), slot };
                self.release_slot(id, gone, out);
            }
        }
    }

    fn release_slot(&mut self, id: SlotId, gone: PeerMask, out: &mut Outputs) {
        let slot = self.slot(id);
        let left = slot.pending.without(gone);
        if slot.phase != Phase::Active || left == slot.pending {
            return;
        }
        slot.pending = left;
        if !left.is_empty() {
            return;
        }
        match (slot.operation, slot.stage) {
            (Operation::Read, _) => self.issue(id, out),
            (_, Stage::ReadBack) => self.give_back(id, out),
            _ => self.finish(id, out),
        }
    }

    fn tick(&mut self, now_ms: u64, out: &mut Outputs) {
        self.now_ms = now_ms.max(self.now_ms);
        let deadline = self.now_ms.saturating_sub(self.replica_timeout_ms);
        let is_late = |slot: &&Slot| slot.phase == Phase::Active && slot.sent_at_ms < deadline;
        let mut late =
            self.slots.iter().filter(is_late).fold(PeerMask::NONE, |all, slot| all.with(slot.pending));
        for (peer, ping) in (0..).zip(&self.pings) {
            if ping.is_some_and(|sent_at_ms| sent_at_ms < deadline) {
                late = late.with(PeerMask::one(peer));
            }
        }
        for peer in late.iter() {
            self.lose(peer, format!("no answer for {} ms", self.replica_timeout_ms), out);
        }
        if self.now_ms >= self.last_ping_ms + PING_INTERVAL_MS {
            self.last_ping_ms = self.now_ms;
            for peer in self.membership.answering().iter() {
                if let Some(ping @ None) = self.pings.get_mut(usize::from(peer)) {
                    *ping = Some(now_ms);
                    out.push(Output::Ping { peer });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
