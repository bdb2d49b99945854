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
//! of the view has a limit, from when it was proposed. Replicas that have come back since can be members only
//! after a new start.
//!
//! A rebuilding replica may answer each part of a copy in time, and still hold a modification of that range
//! up for many parts. So the time for which requests wait for the copy because of the rebuilding replica
//! counts as a whole. The limit is the time-out and the time that a slow disk takes for the bytes of
//! the copy ([`COPY_BYTES_PER_S`]).
//!
//! One disk may hold several replicas. All of them are late at almost the same time then, and answer at
//! almost the same time again. None of them may be dropped because another one is a moment ahead of it. So a
//! replica counts as able to continue only if it has answered all requests older than half of the time-out.
//! The others are dropped only when enough such replicas have existed for as long. A replica that is late
//! beyond [`CoreConfig::late_limit_ms`] is compared with weaker ones: those that have answered all requests
//! older than half of that limit. Others may be slow because they do its reads too.
//!
//! [`CoreConfig::late_limit_ms`]: crate::CoreConfig::late_limit_ms
//! [`CoreConfig::replica_timeout_ms`]: crate::CoreConfig::replica_timeout_ms

use shorthorn_types::limits::{MAX_MEMBERS, MAX_QUEUES};
use shorthorn_views::Quorum;

use crate::copy::CopyReason;
use crate::event::{Output, Outputs};
use crate::job::Jobs;
use crate::marks::Marks;
use crate::membership::{Membership, PeerIndex, PeerMask};
use crate::request::Operation;
use crate::slot::{Slot, Slots};

/// The silence after which a connection gets a PING.
const PING_INTERVAL_MS: u64 = 1000;
/// A replica may take a second longer for as many bytes that it makes zeroes. It may have to write them, and
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
///
/// A replica that was lost or has reconnected does not owe an answer: its earlier times are forgotten.
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
    /// True while no majority of the view has answered lately.
    is_out_of_touch: bool,
    /// After a pause, the replicas that have answered a PING of the time since then. None: a majority of the
    /// view has.
    answered_since_pause: Option<PeerMask>,
    /// The time at which the pending change of the view was proposed.
    proposed_at_ms: u64,
}

/// The replicas that need something after a check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LateReplicas {
    /// Replicas to drop.
    pub late: PeerMask,
    /// Late members that the volume waits for.
    pub awaited: PeerMask,
}

/// A connection of one queue.
#[derive(Clone, Copy, Debug, Default)]
struct ConnectionTimes {
    /// The time of the PING that is not answered yet.
    pinged_at_ms: Option<u64>,
    /// True if that PING was sent before a pause of this process: its answer may be as old.
    is_ping_old: bool,
    /// The time of the replica's last answer of any kind.
    heard_at_ms: u64,
}

impl ConnectionTimes {
    /// Returns the time for which the answer to PING is owed and no other answer has arrived; none if it is
    /// not owed.
    fn silent_ms(&self, now_ms: u64) -> Option<u64> {
        let since_ms = self.pinged_at_ms?.max(self.heard_at_ms);
        Some(now_ms.saturating_sub(since_ms))
    }
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
    /// The time for which a change of the view has run, if one runs.
    changing_ms: Option<u64>,
}

/// The time for which a replica owes answers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Debt {
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

/// For each replica, the time for which it owes answers.
pub(crate) type Debts = [Debt; MAX_MEMBERS];

impl ReplicaTimeouts {
    /// Creates the times of replicas with `queues` connections each, and the limits of
    /// [`CoreConfig`](crate::CoreConfig).
    pub fn new(queues: u16, timeout_ms: u64, late_limit_ms: u64) -> ReplicaTimeouts {
        ReplicaTimeouts {
            timeout_ms,
            limit_ms: late_limit_ms.max(timeout_ms),
            connections: Default::default(),
            queues: usize::from(queues.min(MAX_QUEUES)),
            pinged_at_ms: 0,
            pings_soon: false,
            prompt: Steady::default(),
            alive: Steady::default(),
            awaited: PeerMask::NONE,
            silent: PeerMask::NONE,
            slow: PeerMask::NONE,
            is_out_of_touch: false,
            answered_since_pause: None,
            proposed_at_ms: 0,
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
        let connection = self.connection(peer, queue)?;
        let pinged_at_ms = connection.pinged_at_ms.take();
        let is_old = std::mem::take(&mut connection.is_ping_old);
        if let Some(answered) = self.answered_since_pause.as_mut().filter(|_| !is_old) {
            *answered = answered.with(PeerMask::one(peer));
        }
        pinged_at_ms
    }

    /// Stops new requests after a pause of this process. The silence of replicas during the pause is not
    /// known, and a newer engine may hold the volume by now.
    pub fn paused(&mut self) {
        self.answered_since_pause = Some(PeerMask::NONE);
        for connection in self.connections.iter_mut().flatten() {
            connection.is_ping_old = connection.pinged_at_ms.is_some();
        }
    }

    /// Returns true if requests may continue after a pause: a majority of the view has answered since.
    pub fn ends_pause(&mut self, membership: &Membership) -> bool {
        let is_majority = |answered: PeerMask| {
            membership.quorum_of(membership.answering().filter(|peer| answered.has(peer))) == Quorum::More
        };
        let ends = self.answered_since_pause.is_some_and(is_majority);
        if ends {
            self.answered_since_pause = None;
        }
        ends && !self.is_out_of_touch
    }

    /// Returns the time for which `peer` owes the answer to PING on each of its connections, and has sent
    /// nothing else. A replica that was not asked is not silent.
    pub fn silent_ms(&self, peer: PeerIndex, now_ms: u64) -> u64 {
        let connections = self.connections.get(usize::from(peer)).into_iter();
        let connections = connections.flat_map(|connections| connections.iter().take(self.queues));
        let silent_ms = connections.map(|connection| connection.silent_ms(now_ms).unwrap_or(0));
        silent_ms.min().unwrap_or(0)
    }

    /// Forgets the debts of `peer`, which was lost or has reconnected.
    pub fn forgive(&mut self, peer: PeerIndex, now_ms: u64) {
        if let Some(connections) = self.connections.get_mut(usize::from(peer)) {
            let fresh = ConnectionTimes { heard_at_ms: now_ms, ..ConnectionTimes::default() };
            *connections = [fresh; MAX_QUEUES as usize];
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

    /// Records that a change of the view was proposed.
    pub fn proposed(&mut self, now_ms: u64) {
        self.proposed_at_ms = now_ms;
    }

    /// Returns true if new requests have to wait, because no majority of the view has answered lately.
    pub fn is_out_of_touch(&self) -> bool {
        self.is_out_of_touch || self.answered_since_pause.is_some()
    }

    /// Returns the time for which each replica owes answers.
    pub fn debts(&self, slots: &Slots, membership: &Membership, marks: &Marks, now_ms: u64) -> Debts {
        let mut debts = Debts::default();
        let mut owe = |peers: PeerMask, since_ms: u64| {
            for peer in peers.iter() {
                debts[usize::from(peer)].owes_since(since_ms, now_ms);
            }
        };
        for slot in slots.active() {
            owe(slot.pending(), slot.sent_at_ms().saturating_add(extra_ms(slot)));
        }
        if membership.is_changing() {
            owe(membership.unstored(), self.proposed_at_ms);
        }
        marks.pending().for_each(|(pending, sent_at_ms)| owe(pending, sent_at_ms));
        for (debt, connections) in debts.iter_mut().zip(&self.connections) {
            let silent_ms = connections.iter().filter_map(|connection| connection.silent_ms(now_ms));
            debt.silent_ms = silent_ms.max().unwrap_or(0);
        }
        debts
    }

    /// Decides which replicas are too late, and for which late ones the volume waits.
    pub fn check(&mut self, debts: &Debts, membership: &Membership, now_ms: u64) -> LateReplicas {
        let of = |peer: PeerIndex| debts[usize::from(peer)];
        let members = membership.answering();
        let prompt = members.filter(|peer| of(peer).worst_ms() <= self.timeout_ms / 2);
        self.slow = members.without(prompt);
        let others = self.others(prompt, debts, membership, now_ms);
        let mut late_replicas = LateReplicas::default();
        for peer in membership.connected().iter() {
            let debt = of(peer);
            // A rebuilding replica is dropped like a member without which the others can continue.
            let others = if members.has(peer) { others } else { Others { prompt: Quorum::More, ..others } };
            if self.is_over(debt, others) {
                late_replicas.late = late_replicas.late.with(PeerMask::one(peer));
            } else if members.has(peer) && debt.worst_ms() > self.reported_late_ms() {
                late_replicas.awaited = late_replicas.awaited.with(PeerMask::one(peer));
            }
        }
        late_replicas
    }

    fn others(&mut self, prompt: PeerMask, debts: &Debts, membership: &Membership, now_ms: u64) -> Others {
        let (time_ms, limit_ms) = (self.timeout_ms / 2, self.limit_ms);
        let is_alive = |peer| debts[usize::from(peer)].worst_ms() <= limit_ms / 2;
        let alive = membership.answering().filter(is_alive);
        Others {
            prompt: self.prompt.update(membership.quorum_of(prompt), now_ms, time_ms),
            alive: self.alive.update(membership.quorum_of(alive), now_ms, time_ms),
            changing_ms: membership.is_changing().then(|| now_ms.saturating_sub(self.proposed_at_ms)),
        }
    }

    /// Returns the reason for dropping `peer`, for people.
    pub fn reason(&self, peer: PeerIndex, debts: &Debts) -> String {
        let debt = debts[usize::from(peer)];
        match debt.silent_ms > self.timeout_ms {
            true => format!("no answer for {} ms, not even to PING", debt.worst_ms()),
            false => format!("no answer for {} ms to a request, though it answers PING", debt.work_ms),
        }
    }

    /// Returns a rebuilding replica that has held requests up for too long by one copy, and the reason for
    /// people.
    pub fn holds_requests_up(&self, jobs: &Jobs) -> Option<(PeerIndex, String)> {
        jobs.copies().filter(|copy| matches!(copy.why(), CopyReason::Rebuild { .. })).find_map(|copy| {
            let range = copy.range();
            let limit_ms = self.timeout_ms.saturating_add(range.length() * 1000 / COPY_BYTES_PER_S);
            let (peer, held_up_ms) = copy.held_up_beyond(limit_ms)?;
            Some((peer, format!("requests have waited for {held_up_ms} ms for the copy of {range} to it")))
        })
    }

    /// Reports the members in `awaited` unless it has before, and the ones that have answered since.
    pub fn report_awaited(&mut self, awaited: PeerMask, debts: &Debts, members: PeerMask, out: &mut Outputs) {
        let awaited = awaited.and(members);
        let silent = awaited.filter(|peer| debts[usize::from(peer)].silent_ms > self.timeout_ms / 2);
        let before = std::mem::replace(&mut self.awaited, awaited);
        let silent_before = std::mem::replace(&mut self.silent, silent);
        for peer in awaited.iter() {
            let is_silent = silent.has(peer);
            if !before.has(peer) || is_silent != silent_before.has(peer) {
                out.push(Output::Awaited { peer, late_ms: debts[usize::from(peer)].worst_ms(), is_silent });
            }
        }
        let answered = before.without(awaited).and(members);
        out.extend(answered.iter().map(|peer| Output::Prompt { peer }));
    }

    /// Stops new requests while no majority of the view has answered lately. A newer engine may hold the
    /// volume, and one of these few would answer reads with data that is older than that engine's. Returns
    /// true if requests may continue again.
    pub fn keep_in_touch(&mut self, debts: &Debts, membership: &Membership) -> bool {
        let is_heard = |peer| debts[usize::from(peer)].silent_ms <= self.timeout_ms;
        let heard = membership.answering().filter(is_heard);
        let is_out_of_touch = !membership.is_frozen()
            && !membership.is_changing()
            && membership.quorum_of(heard) != Quorum::More;
        let was_out_of_touch = std::mem::replace(&mut self.is_out_of_touch, is_out_of_touch);
        was_out_of_touch && !self.is_out_of_touch()
    }

    /// Sends PINGs to the replicas in `connected`, if it is time for that.
    pub fn ping(&mut self, connected: PeerMask, now_ms: u64, out: &mut Outputs) {
        let is_due = now_ms >= self.pinged_at_ms + PING_INTERVAL_MS;
        let to = match (std::mem::take(&mut self.pings_soon) || is_due, self.answered_since_pause) {
            (true, _) => connected,
            // Ticks may follow each other closely.
            (false, Some(answered)) => connected.without(answered),
            (false, None) => return,
        };
        if is_due {
            self.pinged_at_ms = now_ms;
        }
        for peer in to.iter() {
            let Some(connections) = self.connections.get_mut(usize::from(peer)) else { continue };
            // The PING is sent on every connection: a replica closes a silent one, and a single connection
            // may be dead.
            if connections.iter().all(|connection| connection.pinged_at_ms.is_none()) {
                for (queue, connection) in (0..).zip(connections.iter_mut().take(self.queues)) {
                    connection.pinged_at_ms = Some(now_ms);
                    out.push(Output::Ping { peer, queue });
                }
            }
        }
    }
}

/// Returns the time by which the request may take longer than others.
fn extra_ms(slot: &Slot) -> u64 {
    match slot.operation() {
        Operation::Discard | Operation::WriteZeroes { .. } => {
            slot.range().length() * 1000 / ZEROING_BYTES_PER_S
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests;
