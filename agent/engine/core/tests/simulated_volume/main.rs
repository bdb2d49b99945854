//! Tests the core against replicas that are arrays: they answer in any order, lose connections and caches,
//! and the engine restarts in between. Every acknowledged write must be on every member, and no two reads may
//! disagree.
//!
//! tests/sim runs the core with everything around it. This test exists for checks that tests/sim does not
//! make:
//!
//! - Whenever a request, a rebuild or a resync ends, all members are compared at once. tests/sim compares the
//!   answers of reads, and the replicas at the end of a run. Before the end, members may differ there: a disk
//!   rots or loses its cache, and the engine learns of it later.
//! - At rest, the write intent of all replicas is empty. Regions are cleared only after their stamp.
//! - No disk rots here, so a scrub must find no difference.
//! - Discards and writes of zeroes are longer than a piece of a copy. If they fail, a resync copies several
//!   pieces. No request in tests/sim has that length. Longer ones would change the requests that the scripts
//!   in tests/sim/kept repeat.

#![allow(clippy::unwrap_used)] // clippy does not count helpers as tests

mod frontend;
mod replica;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;

use proptest::prelude::*;
use replica::{BLOCK_UNITS, REGIONS, REPLICAS, Replica, SIZE_BYTES, UNIT_BYTES, UNITS, region_set, units};
use shorthorn_core::{
    CopyLimits, CoreConfig, EngineCore, Event, FlightLimits, Operation, Output, PeerConfig, PeerIndex,
    PeerState, Request, ScrubConfig, SlotId, VolumeCheck,
};
use shorthorn_testkit::Random;
use shorthorn_types::{ByteRange, Errno, Generation, Members, ReplicaId, ReplicaReport, View, ViewId};
use shorthorn_views::basis;

const DEPTH: u16 = 6;
const COPY_SLOTS: u16 = 3;
const MAX_WRITE_UNITS: u64 = 60;

/// A message that a replica was sent and has not answered.
#[derive(Clone, Debug)]
enum SentRequest {
    Do { slot: SlotId, operation: Operation, range: ByteRange, at: usize },
    Propose { view: View, honoured: ReplicaReport },
    Commit { view: View },
    Mark { mark: u32, change: shorthorn_types::MarkRegions },
}

/// A request of the frontend, and the values that reads of it may return.
struct Asked {
    operation: Operation,
    range: ByteRange,
    value: u32,
    allowed: BTreeMap<usize, BTreeSet<u32>>,
    is_disturbed: BTreeSet<usize>,
}

struct SimulatedVolume {
    dice: Random,
    core: EngineCore,
    replicas: Vec<Replica>,
    attach: u64,
    arbiter: Option<View>,
    granting: Option<View>,
    sent: Vec<Vec<SentRequest>>,
    /// Connections that are being closed.
    closing: Vec<bool>,
    buffers: Vec<Vec<u32>>,
    asked: Vec<Option<Asked>>,
    /// The values that a read of each unit may return.
    truth: Vec<BTreeSet<u32>>,
    next_value: u32,
    now_ms: u64,
    is_frozen: bool,
    rebuilt: u64,
    /// True for replicas with full disks.
    is_full: [bool; REPLICAS],
    is_bad: [bool; REPLICAS],
    /// True for replicas that were given up: their missed units are not known any more.
    is_forgotten: [bool; REPLICAS],
    /// The number of failed requests.
    failed: u64,
}

impl SimulatedVolume {
    fn new(seed: u64) -> SimulatedVolume {
        let first = Replica::first_view();
        let mut volume = SimulatedVolume {
            dice: Random::new(seed | 1),
            core: EngineCore::new(&config(first, Vec::new())),
            replicas: (0..REPLICAS).map(|_| Replica::new(first)).collect(),
            attach: 0,
            arbiter: None,
            granting: None,
            sent: vec![Vec::new(); REPLICAS],
            closing: vec![false; REPLICAS],
            buffers: vec![vec![0; UNITS]; usize::from(DEPTH + COPY_SLOTS)],
            asked: (0..DEPTH).map(|_| None).collect(),
            truth: vec![BTreeSet::from([0]); UNITS],
            next_value: 1,
            now_ms: 0,
            is_frozen: false,
            rebuilt: 0,
            is_full: [false; REPLICAS],
            is_bad: [false; REPLICAS],
            is_forgotten: [false; REPLICAS],
            failed: 0,
        };
        volume.start();
        volume
    }

    /// Ends the engine and starts another one from the reports of the replicas.
    fn start(&mut self) {
        for peer in 0..REPLICAS {
            self.cut(peer);
        }
        for asked in self.asked.iter_mut().filter_map(Option::take) {
            if asked.operation != Operation::Read && asked.operation != Operation::Flush {
                for unit in units(asked.range) {
                    self.truth[unit].insert(asked.value);
                }
            }
        }
        self.attach += 1;
        let generation = Generation::new(self.attach, 0);
        // Replicas whose proposals contradict one another are not reached together.
        let subsets =
            (0..200).map(|_| (0..REPLICAS).filter(|_| !self.dice.one_in(4)).collect::<Vec<usize>>());
        let reached = subsets.collect::<Vec<_>>().into_iter().find(|some| self.can_start(some));
        let Some(reached) = reached else {
            let all: Vec<usize> = (0..REPLICAS).collect();
            panic!("no start: {:?}, {:?}", self.reports(&all), self.arbiter);
        };
        for peer in &reached {
            self.replicas[*peer].views.fence(generation).unwrap();
        }
        let found = basis(&self.reports(&reached), self.arbiter).unwrap();
        let has_all = |peer: &usize| found.members.contains(id(*peer)) && !self.replicas[*peer].lost_cache;
        let spared = reached.iter().copied().find(has_all).expect("a member that has lost nothing");
        for peer in reached.iter().filter(|peer| **peer != spared) {
            if self.dice.one_in(4) {
                self.replicas[*peer].lose_cache(|| self.dice.one_in(2));
            }
        }
        let members: Vec<usize> = reached
            .iter()
            .copied()
            .filter(|peer| found.members.contains(id(*peer)) && !self.replicas[*peer].lost_cache)
            .collect();
        let in_view = Members::new(members.iter().map(|peer| id(*peer))).unwrap();
        let view = View { id: ViewId { generation, number: 1 }, members: in_view };
        if found.needs_grant {
            self.arbiter = Some(view);
        }
        let commits = self.dice.one_in(2);
        for peer in &reached {
            self.replicas[*peer].propose(generation, view, &found.honoured);
            if commits {
                self.replicas[*peer].commit(generation, view);
            }
        }
        let out_of_sync: Vec<_> = (0..REPLICAS).map(|peer| self.known_missing(peer, &members)).collect();
        let mut config = config(view, out_of_sync);
        let dirty = members.iter().flat_map(|peer| self.replicas[*peer].intent.iter().copied());
        config.dirty = region_set(&dirty.collect());
        self.core = EngineCore::new(&config);
        (self.granting, self.is_frozen) = (None, false);
        self.is_forgotten = [false; REPLICAS];
        if config.dirty.is_empty() {
            self.forgive();
        }
    }

    /// Returns the units that the members have counted as missed by `peer`, or all units if they have not
    /// counted.
    fn known_missing(&self, peer: usize, members: &[usize]) -> BTreeSet<u32> {
        let kept = members.iter().filter_map(|member| self.replicas[*member].out_of_sync.get(&peer));
        let kept: Vec<_> = kept.collect();
        match (members.contains(&peer), kept.is_empty()) {
            (true, _) => BTreeSet::new(),
            (false, true) => (0..REGIONS).collect(),
            (false, false) => kept.into_iter().flatten().copied().collect(),
        }
    }

    fn reports(&self, reached: &[usize]) -> Vec<(ReplicaId, ReplicaReport)> {
        reached.iter().map(|peer| (id(*peer), self.replicas[*peer].views.report().clone())).collect()
    }

    fn can_start(&self, reached: &[usize]) -> bool {
        let Ok(found) = basis(&self.reports(reached), self.arbiter) else { return false };
        let has_all = |peer: &usize| found.members.contains(id(*peer)) && !self.replicas[*peer].lost_cache;
        reached.iter().any(has_all)
    }

    /// Restores the members that had lost their caches, because all members are equal.
    fn forgive(&mut self) {
        for peer in self.peers_in(PeerState::Member) {
            self.replicas[peer].lost_cache = false;
        }
    }

    fn peers_in(&self, state: PeerState) -> Vec<usize> {
        (0..REPLICAS)
            .filter(|peer| self.core.membership().state(u8::try_from(*peer).unwrap()) == state)
            .collect()
    }

    /// Ends a connection; a part of the sent messages arrives.
    fn cut(&mut self, peer: usize) {
        for sent in std::mem::take(&mut self.sent[peer]) {
            if self.dice.one_in(2) {
                self.execute(peer, &sent);
            }
        }
        self.closing[peer] = false;
    }

    fn apply(&mut self, event: Event) {
        let mut outputs = Vec::new();
        self.core.apply(event, &mut outputs);
        for output in outputs {
            self.perform(output);
        }
    }

    fn perform(&mut self, output: Output) {
        let (peer, sent) = match output {
            Output::Send { peer, slot, operation, range, buffer_offset } => {
                let at = usize::try_from(u64::from(buffer_offset) / UNIT_BYTES).unwrap();
                // No disk rots here.
                let operation = if operation == Operation::CheckedRead { Operation::Read } else { operation };
                (peer, SentRequest::Do { slot, operation, range, at })
            }
            Output::Propose { peer, view, honoured } => {
                (peer, SentRequest::Propose { view: *view, honoured: *honoured })
            }
            Output::Commit { peer, view } => (peer, SentRequest::Commit { view: *view }),
            Output::Mark { peer, mark, change } => (peer, SentRequest::Mark { mark, change }),
            Output::Complete { slot, outcome } => return self.completed(slot, outcome),
            Output::Ping { peer, queue } => {
                return self.apply(Event::Pong { peer, queue, free_mib: Some(1000) });
            }
            Output::AskGrant { view, .. } => {
                self.granting = Some(*view);
                return;
            }
            Output::Drop { peer, .. } => {
                self.closing[usize::from(peer)] = true;
                return;
            }
            Output::Frozen { .. } => {
                self.is_frozen = true;
                return;
            }
            Output::Resynced => {
                self.forgive();
                return self.check_equal();
            }
            Output::Rebuilt { peer } => {
                self.replicas[usize::from(peer)].lost_cache = false;
                self.rebuilt += 1;
                return self.check_equal();
            }
            Output::ScrubFound { range, odd, .. } => panic!("{odd:?} differ in {range}"),
            Output::RotFound { peer, range, .. } => panic!("{peer} holds rot in {range}"),
            Output::Awaited { .. }
            | Output::Prompt { .. }
            | Output::Failed(_)
            | Output::ViewChanged { .. }
            | Output::ScrubDone
            | Output::ClearedAll
            | Output::Expanded { .. } => return,
        };
        self.sent[usize::from(peer)].push(sent);
    }

    /// Executes a message on the replica and returns its answer.
    fn execute(&mut self, peer: usize, sent: &SentRequest) -> Option<Event> {
        let generation = Generation::new(self.attach, 0);
        let index = u8::try_from(peer).unwrap();
        match sent.clone() {
            SentRequest::Do { slot, operation, range, .. } if self.fails(peer, operation) => {
                Some(self.fail(peer, slot, operation, range, sent))
            }
            SentRequest::Do { slot, operation: Operation::Verify, range, .. } => {
                let sum = |sum: u32, unit: &u32| sum.wrapping_mul(31).wrapping_add(*unit);
                let sum = self.replicas[peer].data[units(range)].iter().fold(0, sum);
                Some(Event::Verified { peer: index, slot, outcome: Ok(VolumeCheck::unconfirmed(sum)) })
            }
            SentRequest::Do { slot, operation, range, at } => {
                let replica = &mut self.replicas[peer];
                let buffer = &mut self.buffers[usize::from(slot.slot)];
                replica.execute(operation, range, &mut buffer[at..]);
                if operation == Operation::Read && slot.slot >= DEPTH {
                    let zeroes = zero_blocks(&buffer[..units(range).len()]);
                    return Some(Event::CopyRead { peer: index, slot, zeroes });
                }
                Some(Event::Reply { peer: index, slot, outcome: Ok(()) })
            }
            SentRequest::Propose { view, honoured } => {
                self.replicas[peer].propose(generation, view, &honoured);
                Some(Event::ViewStored { peer: index, view: view.id })
            }
            SentRequest::Commit { view } => {
                self.replicas[peer].commit(generation, view);
                None
            }
            SentRequest::Mark { mark, change } => {
                self.replicas[peer].mark(&change);
                Some(Event::Marked { peer: index, mark })
            }
        }
    }

    /// Returns true if `peer` cannot do it. It may be lost for that: never if another member has lost its
    /// cache.
    fn fails(&mut self, peer: usize, operation: Operation) -> bool {
        let modifies = !matches!(operation, Operation::Read | Operation::Flush | Operation::Verify);
        let may = (self.is_full[peer] && modifies && self.dice.one_in(2))
            || (self.is_bad[peer] && operation != Operation::Verify && self.dice.one_in(20));
        let members = self.peers_in(PeerState::Member);
        may && !members.iter().any(|other| *other != peer && self.replicas[*other].lost_cache)
    }

    /// Does an operation on some of the blocks, and fails.
    fn fail(
        &mut self,
        peer: usize,
        slot: SlotId,
        operation: Operation,
        range: ByteRange,
        sent: &SentRequest,
    ) -> Event {
        let &SentRequest::Do { at, .. } = sent else { panic!("{sent:?}") };
        let is_full = self.is_full[peer] && !matches!(operation, Operation::Read | Operation::Flush);
        if is_full || !matches!(operation, Operation::Read | Operation::Flush) {
            let per_block = self.dice.one_in(2);
            let stop = self.dice.below(units(range).len() as u64 + 1);
            let buffer = &self.buffers[usize::from(slot.slot)][at..];
            let first = units(range).start;
            let mut is_done = false;
            let mut last_block = usize::MAX;
            let mut done = Vec::new();
            for unit in units(range) {
                if unit / BLOCK_UNITS != last_block {
                    last_block = unit / BLOCK_UNITS;
                    is_done = if per_block { self.dice.one_in(2) } else { ((unit - first) as u64) < stop };
                }
                if is_done {
                    let value =
                        if matches!(operation, Operation::Write { .. }) { buffer[unit - first] } else { 0 };
                    done.push((unit, value));
                }
            }
            self.replicas[peer].execute_some(range, &done);
        }
        let outcome = Err(if is_full { Errno::NO_SPACE } else { Errno::IO });
        Event::Reply { peer: index(peer), slot, outcome }
    }

    /// Brings a replica outside the view back.
    fn restart_replica(&mut self, peer: usize) {
        let in_view = self.core.membership().view().members.contains(id(peer));
        if in_view || self.closing[peer] || self.core.membership().is_changing() {
            return;
        }
        let index = u8::try_from(peer).unwrap();
        self.apply(Event::Track { peer: index, config: peer_config(peer) });
        if self.replicas[peer].views.fence(Generation::new(self.attach, 0)).is_err() {
            return;
        }
        let mut missing = self.replicas[peer].intent.clone();
        if std::mem::take(&mut self.is_forgotten[peer]) {
            missing.extend(0..REGIONS);
        }
        let members = self.peers_in(PeerState::Member);
        let counted: Vec<usize> =
            (0..REPLICAS).filter(|other| *other != peer && !members.contains(other)).collect();
        for other in counted {
            self.replicas[peer].out_of_sync.entry(other).or_default();
        }
        for other in members.into_iter().chain(self.peers_in(PeerState::Rebuilding)) {
            self.replicas[other].out_of_sync.entry(peer).or_default().extend(&missing);
        }
        let missing = Box::new(region_set(&missing));
        self.apply(Event::Rebuild { peer: index, missing });
    }

    fn step(&mut self) {
        match self.dice.below(100) {
            0 if self.dice.one_in(4) => self.start(),
            1 => {
                let peer = self.pick();
                self.lose(peer);
            }
            2 => {
                for peer in self.peers_in(PeerState::Failed) {
                    self.restart_replica(peer);
                }
            }
            3 if self.dice.one_in(4) => self.apply(Event::ClearAll),
            3..=6 => self.tick(),
            7..=16 => {
                let slot = u16::try_from(self.dice.below(u64::from(DEPTH))).unwrap();
                if self.asked[usize::from(slot)].is_none() {
                    self.submit(slot);
                }
            }
            17..=18 => self.converge(),
            19 => {
                let (peer, is_so) = (self.pick(), self.dice.one_in(3));
                match self.dice.below(3) {
                    0 => self.is_bad[peer] = is_so,
                    _ => self.is_full[peer] = is_so,
                }
            }
            20 if self.dice.one_in(5) => {
                let config = ScrubConfig { bytes_per_s: None, repair: self.dice.one_in(2) };
                self.apply(Event::Scrub(Some(config)));
            }
            21 if self.dice.one_in(10) => {
                let peer = self.pick();
                let is_member = self.peers_in(PeerState::Member).contains(&peer);
                let in_view = self.core.membership().view().members.contains(id(peer));
                if !is_member && !in_view {
                    self.is_forgotten[peer] = true;
                    self.apply(Event::Forget { peer: index(peer) });
                }
            }
            _ => {
                let peer = self.pick();
                self.answer(peer);
            }
        }
    }

    /// Fails a replica. It loses its cache only if another complete member would be found: one that has lost
    /// nothing itself, and knows that it is a member.
    fn lose(&mut self, peer: usize) {
        let members = self.peers_in(PeerState::Member);
        let others: Vec<&usize> = members.iter().filter(|other| **other != peer).collect();
        if others.iter().any(|other| self.replicas[**other].lost_cache) {
            return;
        }
        let knows =
            |other: &&usize| self.replicas[**other].views.report().committed.members.contains(id(**other));
        let is_spared = !others.iter().any(knows);
        self.apply(Event::Lost { peer: index(peer), reason: "a cut cable".into() });
        if !is_spared && self.dice.one_in(3) {
            self.cut(peer);
            self.closing[peer] = true;
            self.replicas[peer].lose_cache(|| self.dice.one_in(2));
        }
    }

    fn pick(&mut self) -> usize {
        usize::try_from(self.dice.below(REPLICAS as u64)).unwrap()
    }

    fn tick(&mut self) {
        self.now_ms += 150;
        self.apply(Event::Tick { now_ms: self.now_ms });
    }

    /// Completes pending work: connections close, the arbiter grants, a frozen engine ends.
    fn converge(&mut self) {
        for peer in (0..REPLICAS).filter(|peer| self.closing[*peer]).collect::<Vec<_>>() {
            self.cut(peer);
            self.apply(Event::Closed { peer: index(peer), queue: 0 });
        }
        if let Some(view) = self.granting.take() {
            self.arbiter = Some(view);
            self.apply(Event::Granted { view: view.id });
        }
        if self.is_frozen {
            self.start();
        }
    }

    fn answer(&mut self, peer: usize) {
        if self.sent[peer].is_empty() || self.closing[peer] {
            return;
        }
        let which = usize::try_from(self.dice.below(self.sent[peer].len() as u64)).unwrap();
        // Messages about views stay in order; all others may overtake.
        let is_view =
            |sent: &SentRequest| matches!(sent, SentRequest::Propose { .. } | SentRequest::Commit { .. });
        let which = match is_view(&self.sent[peer][which]) {
            true => self.sent[peer].iter().position(is_view).unwrap_or(which),
            false => which,
        };
        let sent = self.sent[peer].remove(which);
        if let Some(event) = self.execute(peer, &sent) {
            self.apply(event);
        }
    }

    /// Runs without faults until all work has ended.
    fn rest(&mut self) {
        (self.is_full, self.is_bad) = ([false; REPLICAS], [false; REPLICAS]);
        for _ in 0..20_000 {
            self.converge();
            self.tick();
            for peer in 0..REPLICAS {
                while !self.sent[peer].is_empty() && !self.closing[peer] {
                    self.answer(peer);
                }
            }
            for peer in self.peers_in(PeerState::Failed) {
                self.restart_replica(peer);
            }
            let progress = self.core.copy_progress();
            if self.core.unfinished() == 0
                && self.peers_in(PeerState::Member).len() == REPLICAS
                && progress.resync_left_bytes + progress.dirty_bytes == 0
            {
                assert!(self.replicas.iter().all(|replica| replica.intent.is_empty()), "intent is cleared");
                return self.check_equal();
            }
        }
        panic!("{:?} with {} unfinished", self.core.copy_progress(), self.core.unfinished());
    }
}

fn index(peer: usize) -> PeerIndex {
    u8::try_from(peer).unwrap()
}

fn id(peer: usize) -> ReplicaId {
    Replica::id(peer)
}

fn peer_config(peer: usize) -> PeerConfig {
    PeerConfig { replica: id(peer), local: peer == 0 }
}

fn config(view: View, out_of_sync: Vec<BTreeSet<u32>>) -> CoreConfig {
    CoreConfig {
        queues: 1,
        depth: DEPTH,
        peers: (0..REPLICAS).map(peer_config).collect(),
        view,
        replica_timeout_ms: u64::MAX,
        late_limit_ms: u64::MAX,
        flight_limits: FlightLimits { bytes: 16 << 10, requests: 3 },
        size_bytes: SIZE_BYTES,
        dirty: region_set(&BTreeSet::new()),
        resync_sources: Vec::new(),
        out_of_sync: out_of_sync.iter().map(region_set).collect(),
        stamp: 0,
        out_of_sync_stamps: Vec::new(),
        copy_slots: COPY_SLOTS,
        copy_limits: CopyLimits { bytes_per_s: NonZeroU64::new(1 << 20), share_percent: 50 },
        intent_interval_ms: Some(400),
        intent_keep_bytes: 0,
        verify_reads: false,
        refuses_requests: false,
    }
}

fn zero_blocks(data: &[u32]) -> [u64; 4] {
    let mut zeroes = [0; 4];
    for (block, units) in data.chunks(BLOCK_UNITS).enumerate() {
        if units.iter().all(|unit| *unit == 0) {
            zeroes[block / 64] |= 1 << (block % 64);
        }
    }
    zeroes
}

proptest! {
    // A smaller seed does not give a smaller run.
    #![proptest_config(ProptestConfig {
        cases: 60,
        max_shrink_iters: 0,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn acknowledged_data_is_on_every_member(seed in any::<u64>()) {
        let mut volume = SimulatedVolume::new(seed);
        for _ in 0..6000 {
            volume.step();
        }
        volume.rest();
    }
}
