//! Two replicas come back, and one of them flaps for ever: it does not prevent the rebuild of the other one.
//!
//! Each return and each loss of a replica makes the others restart their last steps. The pauses of
//! [`DropHistory`] give them the time to end these.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::time::Duration;

use shorthorn_core::{
    CopyLimits, CoreConfig, DropCause, EngineCore, Event, FlightLimits, Operation, Output, PeerConfig,
    PeerIndex, PeerState, VolumeCheck,
};
use shorthorn_recovery::{DropHistory, RebuildDelay};
use shorthorn_types::{Generation, Members, RegionSet, Regions, ReplicaId, View, ViewId};

const SIZE_BYTES: u64 = 16 << 20;
const TICK_MS: u64 = 50;
/// The maximum number of breaks of the connection before the other replica is a member. Three come without a
/// pause, and the others after pauses that are shorter than the last steps of a rebuild.
const BREAKS_MAX: u32 = 9;
/// Far more breaks than that.
const ENDLESS: u32 = 300;
/// The pause before a replica is connected again that could not be rebuilt yet.
const RETRY_MS: u64 = 100;

/// A volume of four. The replicas 0 and 3 are members, 1 and 2 come back.
struct Volume {
    core: EngineCore,
    now_ms: u64,
    /// Answers that are under way, and returns, by their time and a running number.
    coming: BTreeMap<(u64, u64), (PeerIndex, Event)>,
    number: u64,
    /// The time that a replica takes for each answer.
    answer_ms: u64,
    flapping: PeerIndex,
    /// The time after which the connection breaks.
    life_ms: u64,
    breaks_at_ms: Option<u64>,
    breaks: u32,
    /// None: the replica may come back at once.
    drop_history: Option<DropHistory>,
}

impl Volume {
    fn new(flapping: PeerIndex, answer_ms: u64, life_ms: u64, has_pauses: bool) -> Volume {
        let replica = ReplicaId::from_random;
        let none = RegionSet::empty(Regions::of(SIZE_BYTES).count());
        let id = ViewId { generation: Generation::new(1, 0), number: 1 };
        let core = EngineCore::new(&CoreConfig {
            queues: 1,
            depth: 4,
            peers: (0..4).map(|n| PeerConfig { replica: replica(n), local: false }).collect(),
            view: View { id, members: Members::new([replica(0), replica(3)]).unwrap() },
            replica_timeout_ms: 5000,
            late_limit_ms: 60_000,
            flight_limits: FlightLimits { bytes: 4 << 20, requests: 100 },
            size_bytes: SIZE_BYTES,
            dirty: none.clone(),
            resync_sources: Vec::new(),
            out_of_sync: vec![none; 4],
            stamp: 0,
            out_of_sync_stamps: Vec::new(),
            copy_slots: 4,
            copy_limits: CopyLimits { bytes_per_s: None, share_percent: 50 },
            intent_interval_ms: Some(3000),
            intent_keep_bytes: 0,
            verify_reads: false,
            refuses_requests: false,
        });
        let mut volume = Volume {
            core,
            now_ms: 0,
            coming: BTreeMap::new(),
            number: 0,
            answer_ms,
            flapping,
            life_ms,
            breaks_at_ms: None,
            breaks: 0,
            drop_history: has_pauses.then(DropHistory::default),
        };
        volume.reconnects(1, 0);
        volume.reconnects(2, 0);
        volume
    }

    fn comes(&mut self, after_ms: u64, peer: PeerIndex, event: Event) {
        self.number += 1;
        self.coming.insert((self.now_ms + after_ms, self.number), (peer, event));
    }

    fn reconnects(&mut self, peer: PeerIndex, after_ms: u64) {
        let missing = Box::new(RegionSet::empty(Regions::of(SIZE_BYTES).count()));
        self.comes(after_ms, peer, Event::Rebuild { peer, missing });
    }

    fn apply(&mut self, event: Event) {
        let mut outputs = Vec::new();
        self.core.apply(event, &mut outputs);
        for output in outputs {
            match output {
                Output::Drop { peer, cause, .. } => self.dropped(peer, cause),
                output => {
                    if let Some((peer, answer)) = answer_to(&output) {
                        self.comes(self.answer_ms, peer, answer);
                    }
                }
            }
        }
    }

    /// Closes the connection at once, and has the replica come back as the engine's shell does.
    fn dropped(&mut self, peer: PeerIndex, cause: DropCause) {
        self.coming.retain(|_, (from, _)| *from != peer);
        self.comes(0, peer, Event::Closed { peer, queue: 0 });
        let delay = match (&mut self.drop_history, cause) {
            (_, DropCause::Unused) => RebuildDelay::For(Duration::from_millis(RETRY_MS)),
            (None, _) => RebuildDelay::For(Duration::ZERO),
            (Some(drop_history), _) => {
                // From long before the start on, as in the engine.
                let now = Duration::from_secs(1 << 20) + Duration::from_millis(self.now_ms);
                drop_history.dropped(cause, now, false)
            }
        };
        let RebuildDelay::For(pause) = delay else {
            panic!("a connection that breaks leaves no replica out")
        };
        self.reconnects(peer, u64::try_from(pause.as_millis()).unwrap());
    }

    /// Advances the time by a tick.
    fn pass(&mut self) {
        self.now_ms += TICK_MS;
        while let Some(next) = self.coming.first_entry().filter(|next| next.key().0 <= self.now_ms) {
            let (peer, event) = next.remove();
            let is_return = matches!(event, Event::Rebuild { .. });
            self.apply(event);
            if is_return && peer == self.flapping && self.core.membership().state(peer) != PeerState::Failed {
                self.breaks_at_ms = Some(self.now_ms + self.life_ms);
            }
        }
        if self.breaks_at_ms.is_some_and(|at| at <= self.now_ms) {
            (self.breaks_at_ms, self.breaks) = (None, self.breaks + 1);
            self.apply(Event::Lost { peer: self.flapping, reason: "it flaps".to_owned() });
        }
        self.apply(Event::Tick { now_ms: self.now_ms });
    }

    /// Returns how often the one has flapped before the other is a member, [`ENDLESS`] at most.
    fn breaks_before_the_other_is_a_member(mut self) -> u32 {
        let other = 3 - self.flapping;
        while self.core.membership().state(other) != PeerState::Member && self.breaks < ENDLESS {
            self.pass();
        }
        self.breaks
    }
}

/// Returns the answer of a well-behaved replica.
fn answer_to(output: &Output) -> Option<(PeerIndex, Event)> {
    Some(match output {
        Output::Send { peer, slot, operation: Operation::Verify, .. } => {
            (*peer, Event::Verified { peer: *peer, slot: *slot, outcome: Ok(VolumeCheck::unconfirmed(7)) })
        }
        Output::Send { peer, slot, .. } => {
            (*peer, Event::Reply { peer: *peer, slot: *slot, outcome: Ok(()) })
        }
        Output::Propose { peer, view, .. } => (*peer, Event::ViewStored { peer: *peer, view: view.id }),
        Output::Mark { peer, mark, .. } => (*peer, Event::Marked { peer: *peer, mark: *mark }),
        Output::Ping { peer, queue } => {
            (*peer, Event::Pong { peer: *peer, queue: *queue, free_mib: Some(1000) })
        }
        _ => return None,
    })
}

/// The most breaks over all lifetimes of the connection, whichever of the two flaps.
fn most_breaks(answer_ms: u64, has_pauses: bool) -> u32 {
    let lives_ms = (0..40).map(|tenth| tenth * answer_ms / 4);
    let runs = lives_ms.flat_map(|life_ms| [1, 2].map(|flapping| (flapping, life_ms)));
    let breaks = |(flapping, life_ms)| {
        Volume::new(flapping, answer_ms, life_ms, has_pauses).breaks_before_the_other_is_a_member()
    };
    runs.map(breaks).max().unwrap()
}

#[test]
fn a_replica_that_flaps_prevents_no_rebuild_of_another_one() {
    // The last steps of a join take several answers.
    for answer_ms in [50, 200, 1000] {
        let breaks = most_breaks(answer_ms, true);
        assert!(breaks <= BREAKS_MAX, "answers after {answer_ms} ms: {breaks} breaks");
    }
}

/// Without the pauses the test would fail: it is about them.
#[test]
fn without_pauses_a_flapping_replica_prevents_every_rebuild() {
    assert_eq!(most_breaks(200, false), ENDLESS);
}
