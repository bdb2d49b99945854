//! The core against replicas that answer when the test says so.

use shorthorn_types::{ByteRange, Errno, Generation, Members, ReplicaId, View, ViewId};

use super::*;
use crate::cause::{Cause, FailedRequest};
use crate::event::{CopyLimits, DropCause, FlightLimits};
use crate::membership::PeerConfig;
use crate::request::{Operation, Request};
use crate::scrub_result::VolumeCheck;

mod copies;
mod corners;
mod expand;
mod no_space;
mod rebuilds;
mod refusals;
mod replica_timeouts;
mod rot;

const TIMEOUT_MS: u64 = 5000;
const LATE_LIMIT_MS: u64 = 60_000;
const INTERVAL_MS: u64 = 3000;
/// Eight regions.
const SIZE_BYTES: u64 = 8 << 16;

/// Number of the first mark that clears anything: four stamps come before.
const FIRST_CLEAR: u32 = 5;

struct Bench {
    core: EngineCore,
    /// Every replica stores a stamp at once, and the test does not see that.
    stores_stamps: bool,
    now_ms: u64,
    out: Outputs,
}

/// Returns a configuration with `replicas` replicas, of which the first `members` are in the view.
fn config(replicas: u64, members: u64) -> CoreConfig {
    let id = ViewId { generation: Generation::new(1, 0), number: 1 };
    let regions = Regions::of(SIZE_BYTES).count();
    let peer = |n| PeerConfig { replica: ReplicaId::from_random(n), local: false };
    CoreConfig {
        queues: 2,
        depth: 8,
        peers: (0..replicas).map(peer).collect(),
        view: View { id, members: Members::new((0..members).map(ReplicaId::from_random)).unwrap() },
        replica_timeout_ms: TIMEOUT_MS,
        late_limit_ms: LATE_LIMIT_MS,
        flight_limits: FlightLimits { bytes: 4 << 20, requests: 100 },
        size_bytes: SIZE_BYTES,
        dirty: RegionSet::empty(regions),
        resync_sources: Vec::new(),
        out_of_sync: (0..replicas).map(|_| RegionSet::empty(regions)).collect(),
        stamp: 0,
        out_of_sync_stamps: Vec::new(),
        copy_slots: 3,
        copy_limits: CopyLimits { bytes_per_s: None, share_percent: 100 },
        intent_interval_ms: Some(INTERVAL_MS),
        intent_keep_bytes: 0,
        verify_reads: false,
        refuses_requests: false,
    }
}

impl Bench {
    fn new(replicas: u64) -> Bench {
        Bench::with(&config(replicas, replicas))
    }

    fn with(config: &CoreConfig) -> Bench {
        Bench { core: EngineCore::new(config), stores_stamps: true, now_ms: 0, out: Vec::new() }
    }

    fn apply(&mut self, event: Event) -> Outputs {
        self.core.apply(event, &mut self.out);
        while self.stores_stamps
            && let Some(at) = self.out.iter().position(is_stamp)
        {
            let Some((_, stored)) = answer_to(&self.out.remove(at)) else { continue };
            self.core.apply(stored, &mut self.out);
        }
        std::mem::take(&mut self.out)
    }

    /// Answers all outputs at once for every replica but `deaf`, until no more follow.
    fn answer(&mut self, first: Outputs, deaf: &[PeerIndex]) -> Outputs {
        let mut outputs = first;
        let mut at = 0;
        while at < outputs.len() {
            let event = answer_to(&outputs[at]).filter(|(peer, _)| !deaf.contains(peer));
            if let Some((_, event)) = event {
                outputs.extend(self.apply(event));
            }
            at += 1;
        }
        outputs
    }

    /// Advances the time to `now_ms`, with ticks as often as the core needs them.
    fn tick(&mut self, now_ms: u64) -> Outputs {
        let mut out = Vec::new();
        while self.now_ms < now_ms {
            self.now_ms = now_ms.min(self.now_ms + 250);
            out.extend(self.apply(Event::Tick { now_ms: self.now_ms }));
        }
        out
    }

    fn submit(&mut self, slot: u16, operation: Operation, first_block: u64) -> Outputs {
        let length = if operation == Operation::Flush { 0 } else { 4096 };
        let range = ByteRange::new(first_block * 4096, length).unwrap();
        self.apply(Event::Submit { queue: 0, request: Request { slot, operation, range } })
    }

    fn reply(&mut self, peer: PeerIndex, slot: u16, outcome: Result<(), Errno>) -> Outputs {
        self.apply(Event::Reply { peer, slot: id(slot), outcome })
    }

    fn lose(&mut self, peer: PeerIndex) -> Outputs {
        let mut out = self.apply(Event::Lost { peer, reason: "test".into() });
        out.extend(self.close(peer));
        out
    }

    fn close(&mut self, peer: PeerIndex) -> Outputs {
        let mut out = self.apply(Event::Closed { peer, queue: 0 });
        out.extend(self.apply(Event::Closed { peer, queue: 1 }));
        out
    }

    fn granted(&mut self, number: u32) -> Outputs {
        self.apply(Event::Granted { view: ViewId { generation: Generation::new(1, 0), number } })
    }

    fn view_stored(&mut self, peer: PeerIndex, number: u32) -> Outputs {
        let view = ViewId { generation: Generation::new(1, 0), number };
        self.apply(Event::ViewStored { peer, view })
    }
}

/// Advances the time to `until_ms` while every replica answers PING.
fn tick_with_pongs(bench: &mut Bench, until_ms: u64) -> Outputs {
    let mut outputs = Vec::new();
    while bench.now_ms < until_ms {
        let ticked = bench.tick(until_ms.min(bench.now_ms + 50));
        let pings = ticked.iter().filter(|output| matches!(output, Output::Ping { .. }));
        let pongs: Vec<Event> = pings.filter_map(answer_to).map(|(_, pong)| pong).collect();
        outputs.extend(ticked);
        pongs.into_iter().for_each(|pong| outputs.extend(bench.apply(pong)));
    }
    outputs
}

fn is_stamp(output: &Output) -> bool {
    matches!(output, Output::Mark { change, .. } if change.action == shorthorn_types::MarkAction::Stamp)
}

/// Returns the answer of a well-behaved replica to an output. Every member has the same check.
fn answer_to(output: &Output) -> Option<(PeerIndex, Event)> {
    let event = match output {
        Output::Send { peer, slot, operation: Operation::Verify, .. } => {
            Event::Verified { peer: *peer, slot: *slot, outcome: Ok(VolumeCheck::unconfirmed(7)) }
        }
        Output::Send { peer, slot, .. } => Event::Reply { peer: *peer, slot: *slot, outcome: Ok(()) },
        Output::Propose { peer, view, .. } => Event::ViewStored { peer: *peer, view: view.id },
        Output::Mark { peer, mark, .. } => Event::Marked { peer: *peer, mark: *mark },
        Output::Ping { peer, queue } => Event::Pong { peer: *peer, queue: *queue, free_mib: Some(1000) },
        _ => return None,
    };
    match &event {
        Event::Verified { peer, .. }
        | Event::Reply { peer, .. }
        | Event::ViewStored { peer, .. }
        | Event::Marked { peer, .. }
        | Event::Pong { peer, .. } => Some((*peer, event)),
        _ => None,
    }
}

fn region_set(regions: &[u32]) -> RegionSet {
    let mut set = RegionSet::empty(Regions::of(SIZE_BYTES).count());
    regions.iter().for_each(|region| set.insert_run(*region..region + 1));
    set
}

/// The blocks of a region.
const REGION_BLOCKS: u64 = 16;

fn drops(out: &[Output]) -> Vec<(PeerIndex, &str)> {
    let dropped = |output| match output {
        &Output::Drop { peer, ref reason, .. } => Some((peer, reason.as_str())),
        _ => None,
    };
    out.iter().filter_map(dropped).collect()
}

/// Returns first region and count of the runs that are to be cleared or added, by replica.
fn marks(out: &[Output]) -> Vec<(PeerIndex, shorthorn_types::MarkRegions)> {
    let marked = |output: &Output| match output {
        Output::Mark { peer, change, .. } => Some((*peer, change.clone())),
        _ => None,
    };
    out.iter().filter_map(marked).collect()
}

const WRITE: Operation = Operation::Write { fua: false };

fn id(slot: u16) -> SlotId {
    SlotId { queue: 0, slot }
}

fn sent_to(out: &[Output], slot: u16) -> Vec<PeerIndex> {
    let to = |output: &Output| match output {
        Output::Send { peer, slot: sent, .. } if *sent == id(slot) => Some(*peer),
        _ => None,
    };
    out.iter().filter_map(to).collect()
}

fn completed(out: &[Output], slot: u16) -> Option<Result<(), Errno>> {
    out.iter().find_map(|output| match output {
        Output::Complete { slot: done, outcome } if *done == id(slot) => Some(*outcome),
        _ => None,
    })
}

fn is_frozen(out: &[Output]) -> bool {
    out.iter().any(|output| matches!(output, Output::Frozen { .. }))
}

#[test]
fn a_write_is_done_when_every_member_has_it() {
    let mut bench = Bench::new(3);
    let out = bench.submit(0, WRITE, 0);
    assert_eq!(sent_to(&out, 0), [0, 1, 2]);
    assert_eq!(completed(&bench.reply(2, 0, Ok(())), 0), None);
    assert_eq!(completed(&bench.reply(0, 0, Ok(())), 0), None);
    assert_eq!(completed(&bench.reply(1, 0, Ok(())), 0), Some(Ok(())));
    assert_eq!(bench.core.unfinished(), 0);
}

#[test]
fn reads_are_sent_to_one_member_in_turn() {
    let mut bench = Bench::new(3);
    let mut readers = Vec::new();
    for slot in 0..6 {
        let out = bench.submit(slot, Operation::Read, 0);
        readers.extend(sent_to(&out, slot));
    }
    assert_eq!(readers, [0, 1, 2, 0, 1, 2]);
}

#[test]
fn reads_prefer_this_host() {
    let mut config = config(3, 3);
    config.peers[1].local = true;
    let mut bench = Bench::with(&config);
    for slot in 0..4 {
        let out = bench.submit(slot, Operation::Read, 0);
        assert_eq!(sent_to(&out, slot), [1]);
    }
}

#[test]
fn overlapping_writes_are_sent_one_after_another() {
    let mut bench = Bench::new(2);
    bench.submit(0, WRITE, 5);
    let out = bench.submit(1, WRITE, 5);
    assert_eq!(sent_to(&out, 1), []);
    let out = bench.submit(2, Operation::Read, 5);
    assert_eq!(sent_to(&out, 2), [], "a read waits for the writes before it");
    bench.reply(0, 0, Ok(()));
    let out = bench.reply(1, 0, Ok(()));
    assert_eq!(sent_to(&out, 1), [0, 1]);
    bench.reply(0, 1, Ok(()));
    let out = bench.reply(1, 1, Ok(()));
    assert_eq!(sent_to(&out, 2).len(), 1);
}

#[test]
fn a_lost_replica_leaves_and_the_write_continues() {
    let mut bench = Bench::new(3);
    bench.submit(0, WRITE, 0);
    bench.reply(0, 0, Ok(()));
    bench.reply(1, 0, Ok(()));
    let out = bench.lose(2);
    let proposed = out.iter().filter(|output| matches!(output, Output::Propose { .. })).count();
    assert_eq!((proposed, completed(&out, 0)), (2, None), "not before the view change is complete");
    let out = bench.submit(1, WRITE, 9);
    assert_eq!(sent_to(&out, 1), [], "nothing is sent during a view change");
    assert_eq!(completed(&bench.view_stored(0, 2), 0), None);
    let out = bench.view_stored(1, 2);
    assert_eq!(completed(&out, 0), Some(Ok(())));
    assert_eq!(sent_to(&out, 1), [0, 1]);
    assert_eq!(out.iter().filter(|output| matches!(output, Output::Commit { .. })).count(), 2);
    assert_eq!(bench.core.membership().view().members.len(), 2);
}

#[test]
fn a_request_keeps_its_buffer_until_the_connection_is_closed() {
    let mut bench = Bench::new(3);
    let out = bench.submit(0, Operation::Read, 0);
    assert_eq!(sent_to(&out, 0), [0]);
    bench.apply(Event::Lost { peer: 0, reason: "test".into() });
    bench.view_stored(1, 2);
    let out = bench.view_stored(2, 2);
    assert_eq!(sent_to(&out, 0), [], "the lost replica may still fill the buffer");
    let out = bench.apply(Event::Closed { peer: 0, queue: 0 });
    assert_eq!(sent_to(&out, 0), [1]);
    assert_eq!(completed(&bench.reply(1, 0, Ok(())), 0), Some(Ok(())));
}

#[test]
fn a_second_loss_during_a_change_needs_a_quorum_of_the_old_view() {
    let mut bench = Bench::new(3);
    bench.lose(2);
    let out = bench.lose(1);
    assert!(is_frozen(&out), "one of three");
    assert!(!out.iter().any(|output| matches!(output, Output::Propose { .. })), "it would never go through");
    bench.view_stored(0, 2);
    let out = bench.submit(0, WRITE, 0);
    assert_eq!(sent_to(&out, 0), []);
}

#[test]
fn one_of_two_waits_for_the_arbiter() {
    let mut bench = Bench::new(2);
    bench.submit(0, WRITE, 0);
    bench.reply(0, 0, Ok(()));
    bench.lose(1);
    let out = bench.view_stored(0, 2);
    let asked =
        |out: &[Output]| out.iter().filter(|output| matches!(output, Output::AskGrant { .. })).count();
    assert_eq!((asked(&out), is_frozen(&out), completed(&out, 0)), (1, false, None));
    assert_eq!(asked(&bench.view_stored(0, 2)), 0, "once is enough");
    let out = bench.submit(1, WRITE, 1);
    assert_eq!(sent_to(&out, 1), []);
    let out = bench.granted(3);
    assert_eq!(completed(&out, 0), None, "another view");
    let out = bench.granted(2);
    assert_eq!(completed(&out, 0), Some(Ok(())));
    assert_eq!(sent_to(&out, 1), [0]);
}

#[test]
fn a_leaving_member_that_stores_the_view_makes_the_grant_needless() {
    let mut bench = Bench::new(2);
    bench.lose(1);
    bench.view_stored(0, 2);
    let out = bench.view_stored(1, 2);
    assert!(out.iter().any(|output| matches!(output, Output::ViewChanged { .. })));
}

#[test]
fn a_further_loss_while_the_arbiter_is_asked_freezes_the_volume() {
    let mut bench = Bench::new(4);
    bench.lose(3);
    bench.lose(2);
    bench.view_stored(0, 3);
    let out = bench.view_stored(1, 3);
    assert!(matches!(out[..], [Output::AskGrant { .. }]));
    let out = bench.lose(1);
    let is_reported =
        |output: &Output| matches!(output, Output::Frozen { reason } if reason.contains("arbiter"));
    assert!(out.iter().any(is_reported), "{out:?}");
    assert!(!bench.granted(3).iter().any(|output| matches!(output, Output::Send { .. })));
}

#[test]
fn the_last_replica_passes_its_errors_on() {
    let mut bench = Bench::new(1);
    bench.submit(0, Operation::Read, 0);
    assert_eq!(completed(&bench.reply(0, 0, Err(Errno::IO)), 0), Some(Err(Errno::IO)));
    assert!(is_frozen(&bench.lose(0)));
}

fn sent(out: &[Output], slot: u16) -> Vec<(PeerIndex, Operation)> {
    let what = |output: &Output| match output {
        Output::Send { peer, slot: sent, operation, .. } if *sent == id(slot) => Some((*peer, *operation)),
        _ => None,
    };
    out.iter().filter_map(what).collect()
}

#[test]
fn an_io_error_of_one_member_does_not_fail_the_request() {
    let mut bench = Bench::new(3);
    bench.submit(0, Operation::Flush, 0);
    bench.reply(0, 0, Ok(()));
    bench.reply(1, 0, Ok(()));
    let out = bench.reply(2, 0, Err(Errno::IO));
    assert!(out.iter().any(|output| matches!(output, Output::Drop { peer: 2, .. })));
    bench.close(2);
    bench.view_stored(0, 2);
    assert_eq!(completed(&bench.view_stored(1, 2), 0), Some(Ok(())));
}

#[test]
fn an_unexpected_answer_is_a_failure() {
    let mut bench = Bench::new(3);
    let out = bench.reply(1, 3, Ok(()));
    assert!(matches!(&out[0], Output::Drop { peer: 1, reason, .. } if reason.contains("did not get")));
    let out = bench.apply(Event::Reply { peer: 0, slot: SlotId { queue: 9, slot: 0 }, outcome: Ok(()) });
    assert!(matches!(&out[0], Output::Drop { peer: 0, .. }));
}

fn blamed(out: &[Output], slot: u16) -> Vec<(PeerIndex, Errno)> {
    let failure = out.iter().find_map(|output| match output {
        Output::Failed(failure) if failure.slot == id(slot) => Some(failure),
        _ => None,
    });
    let Some(FailedRequest { errno, cause: Cause::Replicas(blamed), .. }) = failure else {
        return Vec::new();
    };
    blamed.iter().map(|peer| (peer, *errno)).collect()
}

#[test]
fn an_error_names_the_replicas_that_have_caused_it() {
    let mut bench = Bench::new(1);
    bench.submit(0, WRITE, 0);
    assert_eq!(blamed(&bench.reply(0, 0, Err(Errno::TIMED_OUT)), 0), [(0, Errno::TIMED_OUT)]);
    bench.submit(0, WRITE, 0);
    assert_eq!(blamed(&bench.reply(0, 0, Err(Errno::NO_SPACE)), 0), [(0, Errno::NO_SPACE)]);
    bench.submit(0, WRITE, 0);
    assert_eq!(blamed(&bench.reply(0, 0, Ok(())), 0), []);

    let mut bench = Bench::new(3);
    bench.submit(0, WRITE, 0);
    bench.reply(0, 0, Err(Errno::NO_SPACE));
    bench.reply(1, 0, Ok(()));
    let out = bench.reply(2, 0, Err(Errno::NO_SPACE));
    let out = bench.answer(out, &[]);
    assert_eq!(blamed(&out, 0), [(0, Errno::NO_SPACE), (2, Errno::NO_SPACE)]);
    let at = |find: &dyn Fn(&Output) -> bool| out.iter().position(find);
    assert!(
        at(&|output| matches!(output, Output::Failed(_)))
            < at(&|output| matches!(output, Output::Complete { .. }))
    );
}

/// Drops a member whose disk has failed for good while the volume was idle.
#[test]
fn a_member_that_answers_a_ping_with_an_error_leaves() {
    let mut bench = Bench::new(3);
    bench.tick(1000);
    let out = bench.apply(Event::PingFailed { peer: 1, queue: 0, errno: Errno::IO });
    assert!(matches!(drops(&out)[..], [(1, reason)] if reason.contains("Ping")), "{out:?}");
}

/// The user of the volume gets its errors, one by one. If it left, the volume would freeze.
#[test]
fn the_last_member_stays_when_it_answers_a_ping_with_an_error() {
    let mut bench = Bench::with(&config(2, 1));
    bench.apply(Event::Rebuild { peer: 1, missing: Box::new(region_set(&[0])) });
    bench.tick(1000);
    drop(bench.apply(Event::PingFailed { peer: 0, queue: 1, errno: Errno::IO }));
    let out = bench.apply(Event::PingFailed { peer: 0, queue: 0, errno: Errno::IO });
    assert_eq!((drops(&out), is_frozen(&out)), (vec![], false));
    let out = bench.apply(Event::PingFailed { peer: 1, queue: 0, errno: Errno::IO });
    assert!(matches!(drops(&out)[..], [(1, _)]), "one that is being rebuilt does not: {out:?}");
    // It was an answer: the next PING follows.
    let out = bench.tick(2000);
    assert!(out.contains(&Output::Ping { peer: 0, queue: 0 }), "{out:?}");
}
