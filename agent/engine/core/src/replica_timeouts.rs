//! Decides how long the volume waits for a replica that does not answer.
//!
//! A replica whose connection breaks is lost at once. A replica that stays connected and does not answer is
//! *late*: its disk may be slow, or its process may have been stopped. The volume drops it after
//! [`CoreConfig::replica_timeout_ms`] if the others can continue without it, and else waits for it. These are
//! the limits:
//!
//! | Without the late replicas the view has | it has answered no request | it has not answered PING either |
//! |---|---|---|
//! | a majority | the time-out | the time-out |
//! | exactly half, so that the arbiter has to be asked | three times the time-out | the time-out |
//! | less, while the view changes | [`CoreConfig::late_limit_ms`] | [`CoreConfig::late_limit_ms`] |
//! | less, and the view does not change | none | [`CoreConfig::late_limit_ms`] |
//!
//! The arbiter may be unreachable, so the limit is longer if it has to be asked.
//!
//! In the last case the engine continues to wait, because a new start would need the same replicas. A change
//! of the view has a limit, from when it was proposed: replicas that have come back since can be members
//! after a new start only.
//!
//! A rebuilding replica may answer each part of a copy in time, and still hold a modification of that range
//! up for many parts. So the time for which requests wait for the copy because of the rebuilding replica
//! counts as a whole. The limit is the time-out and the time that a slow disk takes for so many bytes
//! ([`COPY_BYTES_PER_S`]).
//!
//! One disk may hold several replicas. All of them are late at almost the same time then, and answer at
//! almost the same time again. None of them may be dropped because another one is a moment ahead of it. So a
//! replica counts as able to continue only if it has answered all requests older than half of the time-out.
//! The others are dropped only when enough such replicas have existed for as long. A replica that is late
//! beyond [`CoreConfig::late_limit_ms`] is compared with weaker ones: those that have answered all requests
//! older than half of that limit. Others may be slow because they do its reads too.

use shorthorn_types::limits::{MAX_MEMBERS, MAX_QUEUES};
use shorthorn_views::Quorum;

use crate::engine::EngineCore;
use crate::event::{CoreConfig, Output, Outputs};
use crate::membership::{PeerIndex, PeerMask, PeerState};
use crate::request::Operation;
use crate::slot::{Slot, SlotPhase};

/// A connection that is silent for so long gets a PING.
const PING_INTERVAL_MS: u64 = 1000;
/// A replica may take a second longer for as many bytes that it makes zeroes: it may have to write them, and
/// an old disk writes no faster. A time-out of five seconds alone asks for more of
/// [`MAX_ZERO_BYTES`](shorthorn_types::limits::MAX_ZERO_BYTES).
const ZEROING_BYTES_PER_S: u64 = 8 << 20;
/// A rebuilding replica may hold requests up for a second longer for as many bytes of a region that is copied
/// to it.
const COPY_BYTES_PER_S: u64 = 2 << 20;
/// The factor of the time-out if the arbiter has to be asked to continue without a replica that answers PING.
/// The result stays below the 30 s after which the SCSI drivers of guests give up a request.
const TIMES_LONGER_FOR_HALF: u64 = 3;

/// The times of questions to the replicas, and of their answers.
#[derive(Debug)]
pub(crate) struct ReplicaTimeouts {
    timeout_ms: u64,
    limit_ms: u64,
    /// Per replica and queue: one connection may be dead while others carry answers.
    connections: [[ConnectionTimes; MAX_QUEUES as usize]; MAX_MEMBERS],
    queues: usize,
    pinged_at_ms: u64,
    /// True if the next PINGs do not wait for their time.
    pings_soon: bool,
    /// Replicas that answer in time, and replicas that are late but within the limit.
    prompt: Steady,
    alive: Steady,
    /// The late members that the volume waits for, and the ones of them that do not answer PING, as last
    /// reported to the engine.
    awaited: PeerMask,
    silent: PeerMask,
    /// The members that owe answers for longer than half of the time-out.
    slow: PeerMask,
}

/// A connection of one queue.
#[derive(Clone, Copy, Debug, Default)]
struct ConnectionTimes {
    /// The time of the PING that is not answered yet.
    pinged_at_ms: Option<u64>,
    /// The time of the replica's last answer of any kind.
    heard_at_ms: u64,
}

/// The times for which certain replicas have been enough of the view without a break.
#[derive(Clone, Copy, Debug, Default)]
struct Steady {
    /// The times since which they are a majority, and since which they are at least half of the view.
    majority_since_ms: u64,
    half_since_ms: u64,
}

impl Steady {
    /// Returns the share of the view that they have been for `time_ms`, if they are `left` now.
    fn update(&mut self, left: Quorum, now_ms: u64, time_ms: u64) -> Quorum {
        if left < Quorum::More {
            self.majority_since_ms = now_ms;
        }
        if left < Quorum::Half {
            self.half_since_ms = now_ms;
        }
        let is_steady = |since_ms: u64| now_ms.saturating_sub(since_ms) >= time_ms;
        match left {
            Quorum::More if is_steady(self.majority_since_ms) => Quorum::More,
            Quorum::More | Quorum::Half if is_steady(self.half_since_ms) => Quorum::Half,
            _ => Quorum::Less,
        }
    }
}

/// The state of the other replicas, without a late one.
#[derive(Clone, Copy, Debug)]
struct Others {
    prompt: Quorum,
    alive: Quorum,
    /// For how long the view has been changing, if it is.
    changing_ms: Option<u64>,
}

/// For how long a replica owes answers.
#[derive(Clone, Copy, Debug, Default)]
struct Debt {
    /// To the oldest request, proposal or mark.
    work_ms: u64,
    /// To PING, while nothing else has come from it.
    silent_ms: u64,
}

impl Debt {
    fn worst_ms(self) -> u64 {
        self.work_ms.max(self.silent_ms)
    }

    fn owes_since(&mut self, since_ms: u64, now_ms: u64) {
        self.work_ms = self.work_ms.max(now_ms.saturating_sub(since_ms));
    }
}

type Debts = [Debt; MAX_MEMBERS];

impl ReplicaTimeouts {
    pub fn new(config: &CoreConfig) -> ReplicaTimeouts {
        ReplicaTimeouts {
            timeout_ms: config.replica_timeout_ms,
            limit_ms: config.late_limit_ms.max(config.replica_timeout_ms),
            connections: Default::default(),
            queues: usize::from(config.queues.min(MAX_QUEUES)),
            pinged_at_ms: 0,
            pings_soon: false,
            prompt: Steady::default(),
            alive: Steady::default(),
            awaited: PeerMask::NONE,
            silent: PeerMask::NONE,
            slow: PeerMask::NONE,
        }
    }

    /// Returns the maximum by which one tick advances the clock, so that a pause of this process makes no
    /// replica late.
    pub fn step_ms_max(&self) -> u64 {
        self.timeout_ms / 2
    }

    fn connection(&mut self, peer: PeerIndex, queue: u16) -> Option<&mut ConnectionTimes> {
        self.connections.get_mut(usize::from(peer))?.get_mut(usize::from(queue))
    }

    /// Records an answer of `peer` over its connection of `queue`.
    pub fn heard(&mut self, peer: PeerIndex, queue: u16, now_ms: u64) {
        if let Some(connection) = self.connection(peer, queue) {
            connection.heard_at_ms = now_ms;
        }
    }

    /// Records the answer of `peer` to the PING over its connection of `queue`. Returns when that PING was
    /// sent.
    pub fn ponged(&mut self, peer: PeerIndex, queue: u16) -> Option<u64> {
        self.connection(peer, queue)?.pinged_at_ms.take()
    }

    /// Forgets the debts of `peer`, which is lost or connected anew.
    pub fn forgive(&mut self, peer: PeerIndex, now_ms: u64) {
        if let Some(connections) = self.connections.get_mut(usize::from(peer)) {
            *connections = [ConnectionTimes { pinged_at_ms: None, heard_at_ms: now_ms }; MAX_QUEUES as usize];
        }
        self.awaited = self.awaited.without(PeerMask::one(peer));
        self.silent = self.silent.without(PeerMask::one(peer));
        self.slow = self.slow.without(PeerMask::one(peer));
    }

    /// Returns the time that a request waits for members to report whether they have space. Late ones are
    /// dropped before.
    pub fn wait_for_space_ms(&self) -> u64 {
        self.timeout_ms.saturating_mul(2)
    }

    /// Makes the next tick send PINGs to all that owe no answer to one.
    pub fn ping_soon(&mut self) {
        self.pings_soon = true;
    }

    /// Returns the members that would answer a read late.
    pub fn slow(&self) -> PeerMask {
        self.slow
    }

    /// Returns the lateness of a member at which the core reports that the volume waits for it. It is less
    /// than the limit at which the member is dropped.
    fn reported_late_ms(&self) -> u64 {
        self.timeout_ms.min(self.limit_ms / 2)
    }

    /// Returns true if a replica with this debt is too late.
    fn is_over(&self, debt: Debt, others: Others) -> bool {
        let is_silent = debt.silent_ms > self.timeout_ms;
        match others.prompt {
            Quorum::More => debt.worst_ms() > self.timeout_ms,
            Quorum::Half if is_silent => debt.worst_ms() > self.timeout_ms,
            Quorum::Half => {
                let longer_ms = self.timeout_ms.saturating_mul(TIMES_LONGER_FOR_HALF);
                debt.worst_ms() > longer_ms.min(self.limit_ms)
            }
            Quorum::Less => match others.changing_ms {
                Some(changing_ms) => debt.worst_ms().min(changing_ms) > self.limit_ms,
                None if others.alive >= Quorum::Half => debt.worst_ms() > self.limit_ms,
                None => debt.silent_ms > self.limit_ms,
            },
        }
    }
}

impl EngineCore {
    /// Drops the replicas that are too late, and reports the ones that the volume waits for.
    pub(crate) fn check_timeouts(&mut self, out: &mut Outputs) {
        let debts = self.debts();
        let of = |peer: PeerIndex| debts[usize::from(peer)];
        let timeout_ms = self.timeouts.timeout_ms;
        let members = self.membership.answering();
        let prompt = members.filter(|peer| of(peer).worst_ms() <= timeout_ms / 2);
        self.timeouts.slow = members.without(prompt);
        let others = self.others(members, prompt, &debts);
        let mut awaited = PeerMask::NONE;
        for peer in self.membership.connected().iter() {
            let debt = of(peer);
            // A rebuilding replica is dropped like a member without which the others can continue.
            let others = if members.has(peer) { others } else { Others { prompt: Quorum::More, ..others } };
            if self.timeouts.is_over(debt, others) {
                self.drop_late(peer, debt, out);
            } else if members.has(peer) && debt.worst_ms() > self.timeouts.reported_late_ms() {
                awaited = awaited.with(PeerMask::one(peer));
            }
        }
        self.check_rebuilding(out);
        self.report_awaited(awaited, &debts, out);
        self.keep_in_touch(&debts);
    }

    fn others(&mut self, members: PeerMask, prompt: PeerMask, debts: &Debts) -> Others {
        let (now_ms, time_ms, limit_ms) = (self.clock.now_ms(), self.timeouts.timeout_ms / 2, self.timeouts.limit_ms);
        let alive = members.filter(|peer| debts[usize::from(peer)].worst_ms() <= limit_ms / 2);
        let (prompt, alive) = (self.membership.quorum_of(prompt), self.membership.quorum_of(alive));
        let is_changing = self.membership.is_changing();
        Others {
            prompt: self.timeouts.prompt.update(prompt, now_ms, time_ms),
            alive: self.timeouts.alive.update(alive, now_ms, time_ms),
            changing_ms: is_changing.then(|| now_ms.saturating_sub(self.proposed_at_ms)),
        }
    }

    fn drop_late(&mut self, peer: PeerIndex, debt: Debt, out: &mut Outputs) {
        // An earlier one may have taken the quorum with it.
        if self.frozen || self.membership.state(peer) == PeerState::Failed {
            return;
        }
        let reason = match debt.silent_ms > self.timeouts.timeout_ms {
            true => format!("no answer for {} ms, not even to PING", debt.worst_ms()),
            false => format!("no answer for {} ms to a request, though it answers PING", debt.work_ms),
        };
        self.lose_late(peer, reason, out);
    }

    fn report_awaited(&mut self, awaited: PeerMask, debts: &Debts, out: &mut Outputs) {
        let awaited = awaited.and(self.membership.answering());
        let silent = awaited.filter(|peer| debts[usize::from(peer)].silent_ms > self.timeouts.timeout_ms / 2);
        let before = std::mem::replace(&mut self.timeouts.awaited, awaited);
        let silent_before = std::mem::replace(&mut self.timeouts.silent, silent);
        for peer in awaited.iter() {
            let is_silent = silent.has(peer);
            if !before.has(peer) || is_silent != silent_before.has(peer) {
                out.push(Output::Awaited { peer, late_ms: debts[usize::from(peer)].worst_ms(), is_silent });
            }
        }
        let answered = before.without(awaited).and(self.membership.answering());
        out.extend(answered.iter().map(|peer| Output::Prompt { peer }));
    }

    /// Stops new requests while no majority of the view has answered lately. A newer engine may hold the
    /// volume, and one of these few would answer reads with data that is older than that engine's.
    fn keep_in_touch(&mut self, debts: &Debts) {
        let timeout_ms = self.timeouts.timeout_ms;
        let heard =
            self.membership.answering().filter(|peer| debts[usize::from(peer)].silent_ms <= timeout_ms);
        let was = std::mem::replace(
            &mut self.is_out_of_touch,
            !self.frozen
                && !self.membership.is_changing()
                && self.membership.quorum_of(heard) != Quorum::More,
        );
        if was && !self.is_out_of_touch {
            self.wake.all();
        }
    }

    /// Returns for how long each replica owes answers.
    fn debts(&self) -> Debts {
        let now_ms = self.clock.now_ms();
        let mut debts = Debts::default();
        let mut owe = |peers: PeerMask, since_ms: u64| {
            for peer in peers.iter() {
                debts[usize::from(peer)].owes_since(since_ms, now_ms);
            }
        };
        for slot in self.slots.active() {
            owe(slot.pending, slot.sent_at_ms.saturating_add(extra_ms(slot)));
        }
        if self.membership.is_changing() {
            owe(self.membership.unstored(), self.proposed_at_ms);
        }
        for marks in [&self.clearing.marks, &self.rebuilds.marks] {
            if let Some((pending, sent_at_ms)) = marks.pending() {
                owe(pending, sent_at_ms);
            }
        }
        for (debt, connections) in debts.iter_mut().zip(&self.timeouts.connections) {
            let silent_ms = |connection: &ConnectionTimes| {
                let since_ms = connection.pinged_at_ms?.max(connection.heard_at_ms);
                Some(now_ms.saturating_sub(since_ms))
            };
            debt.silent_ms = connections.iter().filter_map(silent_ms).max().unwrap_or(0);
        }
        debts
    }

    /// Rebuilding replicas that have a part of a copy while a request waits for its range hold that request
    /// up.
    pub(crate) fn charge_rebuilding(&mut self, step_ms: u64) {
        let rebuilding = self.membership.rebuilding();
        for (id, copy) in self.jobs.rebuilds() {
            let slot = self.slots.at(id);
            let is_awaited = self.turns.waiting_for(id).any(|id| self.slots.copy_index(id).is_none());
            if slot.phase == SlotPhase::Active && is_awaited {
                let held_up_ms = &mut copy.held_up_ms;
                slot.pending.and(rebuilding).iter().for_each(|peer| held_up_ms[usize::from(peer)] += step_ms);
            }
        }
    }

    /// Drops a rebuilding replica that has held requests up for too long by one copy.
    fn check_rebuilding(&mut self, out: &mut Outputs) {
        let timeout_ms = self.timeouts.timeout_ms;
        let mut late = None;
        for (_, copy) in self.jobs.rebuilds() {
            let limit_ms = timeout_ms.saturating_add(copy.range.length() * 1000 / COPY_BYTES_PER_S);
            let held_up = copy.targets.iter().find(|peer| copy.held_up_ms[usize::from(*peer)] > limit_ms);
            let held_up = held_up.map(|peer| (peer, copy.held_up_ms[usize::from(peer)], copy.range));
            late = late.or(held_up);
        }
        if let Some((peer, held_up_ms, range)) = late {
            let reason = format!("requests have waited for {held_up_ms} ms for the copy of {range} to it");
            self.lose_late(peer, reason, out);
        }
    }

    /// Sends PINGs, if it is time for that.
    pub(crate) fn ping(&mut self, out: &mut Outputs) {
        let now_ms = self.clock.now_ms();
        let is_soon = std::mem::take(&mut self.timeouts.pings_soon);
        if !is_soon && now_ms < self.timeouts.pinged_at_ms + PING_INTERVAL_MS {
            return;
        }
        self.timeouts.pinged_at_ms = now_ms;
        let queues = self.timeouts.queues;
        for peer in self.membership.connected().iter() {
            let Some(connections) = self.timeouts.connections.get_mut(usize::from(peer)) else { continue };
            // The PING is sent on every connection: a replica closes a silent one, and a single connection
            // may be dead.
            if connections.iter().all(|connection| connection.pinged_at_ms.is_none()) {
                for (queue, connection) in (0..).zip(connections.iter_mut().take(queues)) {
                    connection.pinged_at_ms = Some(now_ms);
                    out.push(Output::Ping { peer, queue });
                }
            }
        }
    }
}

/// Returns by how much longer than others the request may take.
fn extra_ms(slot: &Slot) -> u64 {
    match slot.operation {
        Operation::Discard | Operation::WriteZeroes { .. } => {
            slot.range.length() * 1000 / ZEROING_BYTES_PER_S
        }
        _ => 0,
    }
}
