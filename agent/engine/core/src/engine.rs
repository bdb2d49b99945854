mod acknowledge;
mod clearing;
mod copy;
mod expand;
mod no_space;
mod rebuild;
mod requests;
mod resync;
mod scrub;
mod timeouts;

use shorthorn_types::{RegionSet, Regions};

use crate::absent::AbsentReplicas;
use crate::bucket::Bucket;
use crate::clearing::Clearing;
use crate::clock::Clock;
use crate::closed::ClosedConnections;
use crate::dispatch::DispatchQueue;
use crate::event::{CopyProgress, CoreConfig, DropCause, Event, Output, Outputs};
use crate::flight::Flights;
use crate::intent::WriteIntent;
use crate::job::{Job, Jobs};
use crate::marks::Marks;
use crate::membership::{Membership, MembershipStep, PeerIndex, PeerMask, PeerState};
use crate::no_space::Space;
use crate::rebuild_end::Rebuilds;
use crate::replica_timeouts::ReplicaTimeouts;
use crate::resync::Resync;
use crate::scrub::{Scrub, ScrubCandidates};
use crate::size::VolumeSize;
use crate::slot::{SlotId, Slots};
use crate::wake_flags::WakeFlags;

/// The core of the engine of one attached volume. See the crate's description.
///
/// It is composed of parts. Each has its own state, rules and tests, in a module of the crate. The methods
/// of the core route events to the parts and write the outputs. If a rule needs two parts, the core passes
/// one to the other. The modules below this one have the methods by topic. `requests` has those for requests
/// of the frontend, `acknowledge` those for their completion, and `copy` those for the copy slots. The others
/// have those for the part or event in their name.
#[derive(Debug)]
pub struct EngineCore {
    /// See [`CoreConfig::verify_reads`].
    verify_reads: bool,
    /// See [`CoreConfig::refuses_requests`].
    refuses_requests: bool,
    size: VolumeSize,
    clock: Clock,
    wake: WakeFlags,

    membership: Membership,
    timeouts: ReplicaTimeouts,
    closed: ClosedConnections,

    slots: Slots,
    dispatch: DispatchQueue,
    flights: Flights,
    space: Space,

    jobs: Jobs,
    bucket: Bucket,
    resync: Resync,
    scrub: Option<Scrub>,
    scrub_candidates: ScrubCandidates,

    intent: WriteIntent,
    clearing: Clearing,
    marks: Marks,
    absent: AbsentReplicas,
    rebuilds: Rebuilds,
}

impl EngineCore {
    /// Creates a core that serves `config.view`. Allocates all that requests will ever need.
    #[must_use]
    pub fn new(config: &CoreConfig) -> EngineCore {
        assert!(config.copy_slots > 1, "a failed request needs one copy slot, and other copies another");
        let regions = Regions::of(config.size_bytes);
        let slots = Slots::new(config.queues, config.depth, config.copy_slots);
        let every = usize::from(config.queues) * usize::from(config.depth) + usize::from(config.copy_slots);
        let mut core = EngineCore {
            size: VolumeSize::new(config.size_bytes),
            membership: Membership::new(&config.peers, config.view),
            dispatch: DispatchQueue::new(every),
            wake: WakeFlags::new(),
            closed: ClosedConnections::new(config.queues),
            timeouts: ReplicaTimeouts::new(config.queues, config.replica_timeout_ms, config.late_limit_ms),
            flights: Flights::new(config.flight_limits),
            verify_reads: config.verify_reads,
            refuses_requests: config.refuses_requests,
            clock: Clock::default(),
            jobs: Jobs::new(slots.copies()),
            slots,
            bucket: Bucket::new(config.copy_limits),
            resync: Resync::new(regions.count(), &config.dirty, config.resync_sources.clone()),
            intent: WriteIntent::new(regions.count()),
            clearing: Clearing::new(config.intent_interval_ms, config.intent_keep_bytes, config.stamp),
            marks: Marks::default(),
            absent: AbsentReplicas::new(config.peers.len()),
            rebuilds: Rebuilds::default(),
            scrub: None,
            scrub_candidates: ScrubCandidates::default(),
            space: Space::new(every),
        };
        core.begin(config);
        core
    }

    /// Starts from the region sets that the members have kept since an earlier engine.
    fn begin(&mut self, config: &CoreConfig) {
        for peer in (0..).take(config.peers.len()) {
            if self.membership.state(peer) != PeerState::Member {
                self.count(peer);
                if let Some(out_of_sync) = config.out_of_sync.get(usize::from(peer)) {
                    let stamp = config.out_of_sync_stamps.get(usize::from(peer)).copied().flatten();
                    self.absent.take_over(peer, out_of_sync, stamp);
                }
            }
        }
        self.skip_equal_regions();
    }

    /// Returns the members and their states.
    #[must_use]
    pub fn membership(&self) -> &Membership {
        &self.membership
    }

    /// Returns the time for which a connected replica owes the answer to PING on every connection. A
    /// connection gets a PING each second.
    #[must_use]
    pub fn silent_ms(&self, peer: PeerIndex) -> u64 {
        self.timeouts.silent_ms(peer, self.clock.now_ms())
    }

    /// Returns true if the slot copies a region to replicas that are rebuilt.
    #[must_use]
    pub fn is_rebuild_copy(&self, slot: SlotId) -> bool {
        self.jobs.is_rebuild(slot)
    }

    /// Returns the progress of copies and comparisons.
    #[must_use]
    pub fn copy_progress(&self) -> CopyProgress {
        let mut dirty = self.resync.left().clone();
        self.intent.add_dirty_to(&mut dirty);
        let left = |peer| Some((peer, self.bytes_of(self.absent.out_of_sync(peer)?)));
        CopyProgress {
            resync_left_bytes: self.bytes_of(self.resync.left()),
            rebuilds: self.membership.rebuilding().iter().filter_map(left).collect(),
            copied_bytes: self.jobs.copied_bytes(),
            scrub_at_bytes: self.scrub.as_ref().map(Scrub::at_bytes),
            dirty_bytes: self.bytes_of(&dirty),
        }
    }

    fn bytes_of(&self, set: &RegionSet) -> u64 {
        let regions = self.size.regions();
        let whole = u64::from(set.len()) * regions.region_bytes();
        let Some(last) = regions.count().checked_sub(1) else { return 0 };
        let is_short = if set.contains(last) { regions.range(last).length() } else { regions.region_bytes() };
        whole + is_short - regions.region_bytes()
    }

    /// Returns the number of unfinished requests of the frontend.
    #[must_use]
    pub fn unfinished(&self) -> usize {
        self.slots.unfinished()
    }

    /// Records that the process runs at `now_ms` of its clock. The caller does so before each event, under
    /// the same lock. After a pause, new requests wait until a majority of the view answers a PING. A newer
    /// engine may have taken the volume meanwhile. The only member in reach may be one that it does without.
    pub fn runs_at(&mut self, now_ms: u64) {
        if self.clock.is_after_pause(now_ms) {
            self.timeouts.paused();
        }
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
                self.record_free_space(peer, pinged_at_ms, free_mib);
                self.wake.all_if(self.timeouts.ends_pause(&self.membership));
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
                self.rebuilds.end_copy(peer);
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
        while self.wake.take_work() {
            self.work(out);
        }
    }

    /// Continues all work that can continue, except requests that do not wait.
    fn work(&mut self, out: &mut Outputs) {
        if self.wake.take_requests() {
            self.issue_deferred(out);
        }
        self.grow(out);
        self.leave_without_space(out);
        if self.is_paused() {
            return;
        }
        self.report_resynced(out);
        self.stamp_next(out);
        self.clear_next(out);
        self.start_clearing_cycle();
        self.report_cleared_all(out);
        self.finish_rebuild(out);
        if !self.is_paused() {
            self.start_jobs(out);
        }
    }

    /// Returns true if no new request may be sent, because a change of the members is not complete.
    fn is_paused(&self) -> bool {
        self.membership.is_frozen() || self.timeouts.is_out_of_touch() || self.membership.is_changing()
    }

    /// Sends a request or copy whose range is free, or defers it.
    fn issue(&mut self, id: SlotId, out: &mut Outputs) {
        if self.slots.copy_index(id).is_some() {
            self.advance(id, out);
        } else {
            self.issue_request(id, out);
        }
    }

    fn defer(&mut self, id: SlotId) {
        self.slots.at_mut(id).defer();
        self.dispatch.defer(id);
    }

    fn issue_deferred(&mut self, out: &mut Outputs) {
        self.flights.retry();
        let deferred = self.dispatch.take_deferred();
        for id in &deferred {
            self.issue(*id, out);
        }
        self.dispatch.give_back_deferred(deferred);
    }

    /// Takes a finished request or copy out of the range table and wakes the requests that waited for its
    /// range.
    fn leave_range(&mut self, id: SlotId, out: &mut Outputs) {
        let ready = self.dispatch.leave(id);
        for id in &ready {
            self.issue(*id, out);
        }
        self.dispatch.give_back_ready(ready);
    }

    /// Returns true if `peer` was sent a request of slot `id`. Otherwise drops the peer. Answers of a replica
    /// that is about to leave do not count.
    fn expects(&mut self, peer: PeerIndex, id: SlotId, out: &mut Outputs) -> bool {
        if self.membership.state(peer) == PeerState::Failed {
            return false;
        }
        let is_asked = self.slots.expects(peer, id);
        if !is_asked {
            self.lose(peer, format!("answered a request that it did not get: {id:?}"), out);
        }
        is_asked
    }

    /// Handles the failure of a member or rebuilding replica.
    fn lose(&mut self, peer: PeerIndex, reason: String, out: &mut Outputs) {
        self.lose_for(peer, reason, DropCause::Broken, out);
    }

    /// Drops a replica that has answered with an error.
    fn lose_failed(&mut self, peer: PeerIndex, reason: String, out: &mut Outputs) {
        self.lose_for(peer, reason, DropCause::Failed, out);
    }

    /// Drops a replica that has not answered in time.
    fn lose_late(&mut self, peer: PeerIndex, reason: String, out: &mut Outputs) {
        self.lose_for(peer, reason, DropCause::Late, out);
    }

    /// Drops a replica that has no space for a request.
    fn lose_full(&mut self, peer: PeerIndex, reason: String, out: &mut Outputs) {
        self.lose_for(peer, reason, DropCause::Full, out);
    }

    fn lose_for(&mut self, peer: PeerIndex, reason: String, cause: DropCause, out: &mut Outputs) {
        self.rebuilds.end_copy(peer);
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

    fn follow(&mut self, step: MembershipStep, out: &mut Outputs) {
        match step {
            MembershipStep::Wait => {}
            MembershipStep::Propose(view, honoured) => {
                self.timeouts.proposed(self.clock.now_ms());
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
            MembershipStep::Frozen(reason) => out.push(Output::Frozen { reason }),
            MembershipStep::Installed(view, rebuilt) => {
                let commit = |peer| Output::Commit { peer, view: Box::new(view) };
                out.extend(self.membership.answering().iter().map(commit));
                out.push(Output::ViewChanged { view: Box::new(view) });
                for peer in rebuilt.iter() {
                    self.absent.stop_counting(peer);
                    out.push(Output::Rebuilt { peer });
                }
                self.skip_equal_regions();
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
        self.timeouts.ping(self.membership.connected(), self.clock.now_ms(), out);
        self.bucket.refill(self.clock.now_ms());
        if let Some(scrub) = &mut self.scrub {
            scrub.refill(self.clock.now_ms());
        }
        self.start_clearing_cycle();
        // A member without space may leave as soon as the others are prompt.
        self.wake.work_if(self.space.has_waiting());
        self.wake.work_if(
            self.resync.is_under_way() || self.scrub.is_some() || !self.membership.rebuilding().is_empty(),
        );
    }

    /// Returns the regions that `peer`, which is outside the view, is known to miss.
    #[must_use]
    pub fn out_of_sync(&self, peer: PeerIndex) -> Option<&RegionSet> {
        self.absent.out_of_sync(peer)
    }

    /// Returns the newest stamp that any replica was sent.
    #[must_use]
    pub fn stamp(&self) -> u32 {
        self.clearing.stamp()
    }

    /// Returns the newest stamp that was sent to `peer`, which is not in the view; none if that is not known.
    /// If its disk has lost that stamp, it misses more regions than are counted: see
    /// [`shorthorn_types::is_current`].
    #[must_use]
    pub fn stamp_of(&self, peer: PeerIndex) -> Option<u32> {
        self.absent.stamp_of(peer)
    }

    /// Records that `peer` receives a full copy: it becomes a member only after [`Event::CopyEnded`]. The
    /// state before the copy may have the newest stamp. `peer` therefore counts as current only after the
    /// stamps of the next cycle.
    pub fn start_full_copy(&mut self, peer: PeerIndex) {
        self.rebuilds.start_copy(peer);
        self.absent.stamped(PeerMask::one(peer), self.clearing.unreached_stamp());
    }

    /// Marks the out-of-sync set of `peer` as incomplete: the members know only a part, or `peer` has lost
    /// more data. Rebuilding replicas keep no such set for `peer` until it is a member and reports all
    /// regions that it lacks.
    pub fn distrust(&mut self, peer: PeerIndex) {
        self.absent.distrust(peer);
        // A replica in its last steps may have got a part of that set.
        self.restart_finish();
        self.wake.work();
    }

    /// Returns the job of a copy slot.
    fn job(&mut self, id: SlotId) -> Option<&mut Job> {
        self.slots.copy_index(id).map(|index| self.jobs.at(index))
    }
}

#[cfg(test)]
mod tests;
