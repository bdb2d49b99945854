use shorthorn_types::{RegionSet, Regions};

use crate::absent::Absent;
use crate::bucket::Bucket;
use crate::clearing::Clearing;
use crate::clock::Clock;
use crate::closed::ClosedConnections;
use crate::event::{CopyProgress, CoreConfig, DropCause, Event, Output, Outputs};
use crate::failed::Space;
use crate::flight::Flights;
use crate::intent::Intent;
use crate::job::{Job, Jobs};
use crate::membership::{Membership, MembershipStep, PeerIndex, PeerMask, PeerState};
use crate::rebuild::Rebuilds;
use crate::replica_timeouts::ReplicaTimeouts;
use crate::scrub::{Scrub, Suspects};
use crate::slot::{SlotId, SlotPhase, Slots};
use crate::turns::Turns;
use crate::wake::Wake;

/// The core of the engine of one attached volume. See the crate's description.
///
/// This file handles events, losses, views and time. The module `serve` handles requests of the frontend,
/// `copy` and `resync` copies and resyncs, and `failed` requests without space. `clearing` handles write
/// intent, `timeouts` late replicas, `join` rebuilds, `scrub` the comparison of the members, and `expand`
/// another size.
#[derive(Debug)]
pub struct EngineCore {
    pub(crate) regions: Regions,
    /// The size that the volume is about to have.
    pub(crate) expanding: Option<u64>,
    pub(crate) slots: Slots,
    pub(crate) membership: Membership,
    pub(crate) turns: Turns,
    /// Requests that have failed on some replicas, which have to be made equal first.
    pub(crate) resyncs: Vec<SlotId>,
    pub(crate) wake: Wake,
    pub(crate) closed: ClosedConnections,
    pub(crate) timeouts: ReplicaTimeouts,
    /// Too few members have been heard of lately: see [`crate::replica_timeouts`].
    pub(crate) is_out_of_touch: bool,
    /// The time at which the pending change of the view was proposed.
    pub(crate) proposed_at_ms: u64,
    pub(crate) flights: Flights,
    pub(crate) frozen: bool,
    /// See [`CoreConfig::verify_reads`].
    pub(crate) verify_reads: bool,
    /// See [`CoreConfig::refuses_requests`].
    pub(crate) refuses_requests: bool,
    pub(crate) clock: Clock,

    pub(crate) jobs: Jobs,
    pub(crate) bucket: Bucket,
    pub(crate) copied_bytes: u64,
    /// Regions in which the members may differ. They are not read or changed before they are copied.
    pub(crate) resync: RegionSet,
    pub(crate) resync_cursor: u32,
    pub(crate) is_resyncing: bool,
    pub(crate) intent: Intent,
    pub(crate) clearing: Clearing,
    /// Per replica: its state if it is not in the view and the core counts the regions that it misses.
    pub(crate) absent: Vec<Option<Absent>>,
    /// The existing ones of these replicas.
    pub(crate) counted: PeerMask,
    /// Absent replicas whose out-of-sync set is complete, and does not start only at some time.
    pub(crate) trusted: PeerMask,
    pub(crate) rebuilds: Rebuilds,
    /// Rebuilding replicas that count as being rebuilt until [`Event::CopyEnded`]: no engine could start from
    /// them.
    pub(crate) in_copy: PeerMask,
    pub(crate) scrub: Option<Scrub>,
    pub(crate) suspects: Suspects,
    pub(crate) space: Space,
    next_mark: u32,
}

impl EngineCore {
    /// Creates a core that serves `config.view`. Allocates all that requests will ever need.
    #[must_use]
    pub fn new(config: &CoreConfig) -> EngineCore {
        assert!(config.copy_slots > 1, "nothing to copy with beside what a failed request needs");
        let regions = Regions::of(config.size_bytes);
        let slots = Slots::new(config.queues, config.depth, config.copy_slots);
        let every = usize::from(config.queues) * usize::from(config.depth) + usize::from(config.copy_slots);
        let mut core = EngineCore {
            regions,
            expanding: None,
            membership: Membership::new(&config.peers, config.view),
            turns: Turns::new(every),
            resyncs: Vec::with_capacity(every),
            wake: Wake::new(),
            closed: ClosedConnections::new(config.queues),
            timeouts: ReplicaTimeouts::new(config),
            is_out_of_touch: false,
            proposed_at_ms: 0,
            flights: Flights::new(config.flight_limits),
            frozen: false,
            verify_reads: config.verify_reads,
            refuses_requests: config.refuses_requests,
            clock: Clock::default(),
            jobs: Jobs::new(slots.copies()),
            slots,
            bucket: Bucket::new(config.copy_limits),
            copied_bytes: 0,
            resync: RegionSet::empty(regions.count()),
            resync_cursor: 0,
            is_resyncing: false,
            intent: Intent::new(regions.count()),
            clearing: Clearing::new(config.intent_interval_ms, config.intent_keep_bytes, config.stamp),
            absent: config.peers.iter().map(|_| None).collect(),
            counted: PeerMask::NONE,
            trusted: PeerMask::NONE,
            rebuilds: Rebuilds::default(),
            in_copy: PeerMask::NONE,
            scrub: None,
            suspects: Suspects::default(),
            space: Space::default(),
            next_mark: 0,
        };
        core.begin(config);
        core
    }

    /// Takes over the members' records of an earlier engine's end.
    fn begin(&mut self, config: &CoreConfig) {
        self.resync.insert_all(&config.dirty);
        self.is_resyncing = !self.resync.is_empty();
        for peer in (0..).take(config.peers.len()) {
            if self.membership.state(peer) != PeerState::Member {
                self.count(peer);
                let known = config.out_of_sync.get(usize::from(peer));
                if let (Some(absent), Some(out_of_sync)) = (&mut self.absent[usize::from(peer)], known) {
                    absent.out_of_sync.insert_all(out_of_sync);
                    absent.stamp = config.out_of_sync_stamps.get(usize::from(peer)).copied().unwrap_or(0);
                }
            }
        }
        self.skip_resync_if_alone();
    }

    /// Returns the members and their states.
    #[must_use]
    pub fn membership(&self) -> &Membership {
        &self.membership
    }

    /// Returns the progress of copies and comparisons.
    #[must_use]
    pub fn copy_progress(&self) -> CopyProgress {
        let mut dirty = self.resync.clone();
        self.intent.add_dirty_to(&mut dirty);
        let left = |peer| {
            let absent = self.absent.get(usize::from(peer))?.as_ref()?;
            Some((peer, self.bytes_of(&absent.out_of_sync)))
        };
        CopyProgress {
            resync_left_bytes: self.bytes_of(&self.resync),
            rebuilds: self.membership.rebuilding().iter().filter_map(left).collect(),
            copied_bytes: self.copied_bytes,
            scrub_at_bytes: self.scrub.as_ref().map(Scrub::at_bytes),
            dirty_bytes: self.bytes_of(&dirty),
        }
    }

    fn bytes_of(&self, set: &RegionSet) -> u64 {
        let whole = u64::from(set.len()) * self.regions.region_bytes();
        let Some(last) = self.regions.count().checked_sub(1) else { return 0 };
        let is_short =
            if set.contains(last) { self.regions.range(last).length() } else { self.regions.region_bytes() };
        whole + is_short - self.regions.region_bytes()
    }

    /// Returns the number of unfinished requests of the frontend.
    #[must_use]
    pub fn unfinished(&self) -> usize {
        self.slots.unfinished()
    }

    /// Handles an event and appends the resulting outputs to `out`.
    pub fn apply(&mut self, event: Event, out: &mut Outputs) {
        if let Some((peer, queue)) = event.answered_by() {
            self.timeouts.heard(peer, queue, self.clock.now_ms());
        }
        match event {
            Event::Submit { queue, request } => self.submit(queue, request, out),
            Event::Reply { peer, slot, outcome } => self.reply(peer, slot, outcome, out),
            Event::CopyRead { peer, slot, zeroes } => self.copy_read(peer, slot, zeroes, out),
            Event::Verified { peer, slot, outcome } => self.verified(peer, slot, outcome, out),
            Event::Marked { peer, mark } => self.marked(peer, mark),
            Event::Pong { peer, queue, free_mib } => {
                let pinged_at_ms = self.timeouts.ponged(peer, queue);
                self.has_space(peer, pinged_at_ms, free_mib);
            }
            Event::PingFailed { peer, queue, errno } => self.ping_failed(peer, queue, errno, out),
            Event::ViewStored { peer, view } => {
                let step = self.membership.stored(peer, view);
                self.follow(step, out);
            }
            Event::Granted { view } => {
                let step = self.membership.granted(view);
                self.follow(step, out);
            }
            Event::Track { peer, config } => self.track(peer, config),
            Event::Rebuild { peer, missing } => self.rebuild(peer, &missing, out),
            Event::CopyEnded { peer } => {
                self.in_copy = self.in_copy.without(PeerMask::one(peer));
                self.wake.work();
            }
            Event::Forget { peer } => self.forget(peer, out),
            Event::Lost { peer, reason } => self.lose(peer, reason, out),
            Event::Closed { peer, queue } => {
                self.closed.close(peer, queue);
                self.drop_waits(out);
            }
            Event::Scrub(config) => self.set_scrub(config),
            Event::SetCopyLimits(limits) => self.bucket.set_limits(limits),
            Event::ClearAll => self.clear_all(),
            Event::Expand { size_bytes } => self.expand(size_bytes),
            Event::Tick { now_ms } => self.tick(now_ms, out),
        }
        while self.wake.takes_work() {
            self.work(out);
        }
    }

    /// Continues all work that can continue, except requests that do not wait.
    fn work(&mut self, out: &mut Outputs) {
        if self.wake.takes_requests() {
            self.issue_held(out);
        }
        self.grow(out);
        self.leave_without_space(out);
        if self.is_paused() {
            return;
        }
        self.report_resynced(out);
        self.stamp_next(out);
        self.clear_next(out);
        self.turn_intent();
        self.report_cleared_all(out);
        self.finish_rebuild(out);
        if !self.is_paused() {
            self.start_jobs(out);
        }
    }

    /// Returns true if no new request may be sent, because the change of the members is not settled.
    pub(crate) fn is_paused(&self) -> bool {
        self.frozen || self.is_out_of_touch || self.membership.is_changing()
    }

    /// Sends a request that has its turn in the range table, or holds it.
    pub(crate) fn issue(&mut self, id: SlotId, out: &mut Outputs) {
        if self.slots.copy_index(id).is_some() {
            self.advance(id, out);
        } else {
            self.issue_request(id, out);
        }
    }

    pub(crate) fn hold(&mut self, id: SlotId) {
        self.slots.at_mut(id).phase = SlotPhase::Held;
        self.turns.hold(id);
    }

    fn issue_held(&mut self, out: &mut Outputs) {
        self.flights.retry();
        let held = self.turns.take_held();
        for id in &held {
            self.issue(*id, out);
        }
        self.turns.give_back_held(held);
    }

    /// Takes a finished request or copy out of the range table and wakes the requests that waited for its
    /// range.
    pub(crate) fn leave_range(&mut self, id: SlotId, out: &mut Outputs) {
        let ready = self.turns.leave(id);
        for id in &ready {
            self.issue(*id, out);
        }
        self.turns.give_back_ready(ready);
    }

    /// Returns true if `peer` was asked for something in slot `id`, and drops the peer if it was not. Answers
    /// of a replica that is about to leave do not count.
    pub(crate) fn expects(&mut self, peer: PeerIndex, id: SlotId, out: &mut Outputs) -> bool {
        if self.membership.state(peer) == PeerState::Failed {
            return false;
        }
        let is_asked = self.slots.expects(peer, id);
        if !is_asked {
            self.lose(peer, format!("it answered what it was not asked: {id:?}"), out);
        }
        is_asked
    }

    /// Handles the failure of a member or rebuilding replica.
    pub(crate) fn lose(&mut self, peer: PeerIndex, reason: String, out: &mut Outputs) {
        self.lose_for(peer, reason, DropCause::Broken, out);
    }

    /// Drops a replica that has not answered in time.
    pub(crate) fn lose_late(&mut self, peer: PeerIndex, reason: String, out: &mut Outputs) {
        self.lose_for(peer, reason, DropCause::Late, out);
    }

    /// Drops a replica that has no space for a request.
    pub(crate) fn lose_full(&mut self, peer: PeerIndex, reason: String, out: &mut Outputs) {
        self.lose_for(peer, reason, DropCause::Full, out);
    }

    fn lose_for(&mut self, peer: PeerIndex, reason: String, cause: DropCause, out: &mut Outputs) {
        self.in_copy = self.in_copy.without(PeerMask::one(peer));
        if self.membership.state(peer) == PeerState::Failed {
            return;
        }
        self.timeouts.forgive(peer, self.clock.now_ms());
        let step = self.membership.lose(peer);
        self.count(peer);
        self.jobs.forget(PeerMask::one(peer));
        self.forget_marks_of(peer);
        self.wake.work();
        out.push(Output::Drop { peer, reason, cause });
        self.follow(step, out);
    }

    pub(crate) fn follow(&mut self, step: MembershipStep, out: &mut Outputs) {
        match step {
            MembershipStep::Wait => {}
            MembershipStep::Propose(view, honoured) => {
                self.proposed_at_ms = self.clock.now_ms();
                let propose = |peer| Output::Propose {
                    peer,
                    view: Box::new(view),
                    honoured: Box::new(honoured.clone()),
                };
                out.extend(self.membership.proposed_to().iter().map(propose));
            }
            MembershipStep::AskGrant(view, honoured, stored) => out.push(Output::AskGrant {
                view: Box::new(view),
                honoured: Box::new(honoured),
                stored: Box::new(stored),
            }),
            MembershipStep::Frozen(reason) => {
                self.frozen = true;
                out.push(Output::Frozen { reason });
            }
            MembershipStep::Installed(view, rebuilt) => {
                let commit = |peer| Output::Commit { peer, view: Box::new(view) };
                out.extend(self.membership.answering().iter().map(commit));
                out.push(Output::ViewChanged { view: Box::new(view) });
                for peer in rebuilt.iter() {
                    self.absent[usize::from(peer)] = None;
                    self.counted = self.counted.without(PeerMask::one(peer));
                    out.push(Output::Rebuilt { peer });
                }
                self.skip_resync_if_alone();
                self.drop_waits(out);
                self.wake.all();
            }
        }
    }

    /// Requests no longer wait for replicas that have left the view and whose connection is closed.
    fn drop_waits(&mut self, out: &mut Outputs) {
        let in_view = self.membership.in_view();
        for queue in self.closed.queues() {
            let gone = self.closed.of_queue(queue).without(in_view);
            if gone.is_empty() {
                continue;
            }
            for id in self.slots.of_queue(queue) {
                self.drop_waits_of_slot(id, gone, out);
            }
        }
    }

    fn drop_waits_of_slot(&mut self, id: SlotId, gone: PeerMask, out: &mut Outputs) {
        if !self.slots.at_mut(id).drop_waits(gone) {
            return;
        }
        if self.slots.copy_index(id).is_some() {
            self.advance(id, out);
        } else {
            self.slot_answered(id, out);
        }
    }

    fn tick(&mut self, now_ms: u64, out: &mut Outputs) {
        let step_ms = self.clock.tick(now_ms, self.timeouts.step_ms_max());
        self.charge_rebuilding(step_ms);
        self.check_timeouts(out);
        self.ping(out);
        self.bucket.refill(self.clock.now_ms());
        if let Some(scrub) = &mut self.scrub {
            scrub.refill(self.clock.now_ms());
        }
        self.turn_intent();
        // A member without space may leave as soon as the others are prompt.
        self.wake.work_if(!self.resyncs.is_empty());
        self.wake.work_if(self.is_resyncing || self.scrub.is_some() || !self.membership.rebuilding().is_empty());
    }

    /// Starts to count the regions that `peer` misses. The replica lacks at most the regions that may differ
    /// now, because they include everything in flight.
    pub(crate) fn count(&mut self, peer: PeerIndex) {
        let at = usize::from(peer);
        if self.absent.len() <= at {
            self.absent.resize_with(at + 1, || None);
        }
        let (count, stamp) = (self.regions.count(), self.clearing.stamp());
        let absent = self.absent[at].get_or_insert_with(|| Absent::new(RegionSet::empty(count), stamp));
        absent.disconnected();
        absent.out_of_sync.insert_all(&self.resync);
        self.intent.add_dirty_to(&mut absent.out_of_sync);
        self.counted = self.counted.with(PeerMask::one(peer));
        self.trusted = self.trusted.with(PeerMask::one(peer));
    }

    /// Returns the regions that `peer`, which is outside the view, is known to miss.
    #[must_use]
    pub fn out_of_sync(&self, peer: PeerIndex) -> Option<&RegionSet> {
        self.absent.get(usize::from(peer))?.as_ref().map(|absent| &absent.out_of_sync)
    }

    /// Returns the newest stamp that any replica was sent.
    #[must_use]
    pub fn stamp(&self) -> u32 {
        self.clearing.stamp()
    }

    /// Returns the newest stamp that was sent to `peer`, which is not in the view; 0 if that is not known. If
    /// its disk has lost that stamp, it misses more regions than are counted: see
    /// [`shorthorn_types::is_current`].
    #[must_use]
    pub fn stamp_of(&self, peer: PeerIndex) -> u32 {
        self.absent.get(usize::from(peer)).and_then(Option::as_ref).map_or(0, |absent| absent.stamp)
    }

    /// Counts `peer`, which joins next, as being rebuilt: it becomes no member before [`Event::CopyEnded`].
    /// The state before the copy may have the newest stamp: so `peer` counts as current only after the stamps
    /// of the next turn.
    pub fn is_in_copy(&mut self, peer: PeerIndex) {
        self.in_copy = self.in_copy.with(PeerMask::one(peer));
        if let Some(absent) = self.absent.get_mut(usize::from(peer)).and_then(Option::as_mut) {
            absent.stamp = absent.stamp.max(self.clearing.stamp_of_nobody());
        }
    }

    /// Marks the out-of-sync set of `peer` as incomplete, because the members do not know more or the peer
    /// has lost more. Rebuilding replicas keep no such set for `peer` until it joins itself and reports what
    /// it lacks.
    pub fn distrust(&mut self, peer: PeerIndex) {
        self.trusted = self.trusted.without(PeerMask::one(peer));
    }

    pub(crate) fn next_mark(&mut self) -> u32 {
        self.next_mark = self.next_mark.wrapping_add(1);
        self.next_mark
    }

    fn marked(&mut self, peer: PeerIndex, mark: u32) {
        if self.clearing.marks.answered(peer, mark) {
            self.cleared();
        }
        self.wake.work_if(self.rebuilds.marks.answered(peer, mark));
    }

    /// Stops waiting for the answers of `peer` to marks.
    fn forget_marks_of(&mut self, peer: PeerIndex) {
        self.clearing.forget(peer, self.membership.in_view().has(peer));
        if self.clearing.marks.forget(peer) {
            self.cleared();
        }
        // The out-of-sync sets of the others have grown: a replica that is about to join has to get them
        // again.
        self.rebuilds.start_over();
    }

    /// Returns the job of a copy slot.
    pub(crate) fn job(&mut self, id: SlotId) -> Option<&mut Job> {
        self.slots.copy_index(id).map(|index| self.jobs.at(index))
    }
}

#[cfg(test)]
mod tests;
