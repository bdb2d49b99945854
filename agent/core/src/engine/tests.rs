//! The core against replicas that answer when the test says so.

use shorthorn_types::{Generation, Members, ReplicaId};

use super::*;

const TIMEOUT_MS: u64 = 5000;

struct Bench {
    core: EngineCore,
    out: Outputs,
}

impl Bench {
    fn new(replicas: u64) -> Bench {
        let ids: Vec<ReplicaId> = (0..replicas).map(ReplicaId::from_random).collect();
        let id = ViewId { generation: Generation::new(1, 0), number: 1 };
        let core = EngineCore::new(&CoreConfig {
            queues: 2,
            depth: 8,
            peers: ids.iter().map(|replica| PeerConfig { replica: *replica, local: false }).collect(),
            view: View { id, members: Members::new(ids).unwrap() },
            replica_timeout_ms: TIMEOUT_MS,
        });
        Bench { core, out: Vec::new() }
    }

    fn apply(&mut self, event: Event) -> Outputs {
        self.core.apply(event, &mut self.out);
        std::mem::take(&mut self.out)
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

    fn view_stored(&mut self, peer: PeerIndex, number: u32) -> Outputs {
        let view = ViewId { generation: Generation::new(1, 0), number };
        self.apply(Event::ViewStored { peer, view })
    }
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
fn reads_go_to_one_member_in_turn() {
    let mut bench = Bench::new(3);
    let mut turns = Vec::new();
    for slot in 0..6 {
        let out = bench.submit(slot, Operation::Read, 0);
        turns.extend(sent_to(&out, slot));
    }
    assert_eq!(turns, [0, 1, 2, 0, 1, 2]);
}

#[test]
fn reads_prefer_this_host() {
    let mut bench = Bench::new(3);
    let peers: Vec<PeerConfig> =
        (0..3).map(|n| PeerConfig { replica: ReplicaId::from_random(n), local: n == 1 }).collect();
    let view = bench.core.membership().view();
    bench.core =
        EngineCore::new(&CoreConfig { queues: 2, depth: 8, peers, view, replica_timeout_ms: TIMEOUT_MS });
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
fn a_lost_replica_leaves_and_the_write_goes_on() {
    let mut bench = Bench::new(3);
    bench.submit(0, WRITE, 0);
    bench.reply(0, 0, Ok(()));
    bench.reply(1, 0, Ok(()));
    let out = bench.lose(2);
    let proposed = out.iter().filter(|output| matches!(output, Output::Propose { .. })).count();
    assert_eq!((proposed, completed(&out, 0)), (2, None), "not before the view change is through");
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
    assert!(out.iter().any(|output| matches!(output, Output::Propose { peer: 0, .. })));
    assert!(!is_frozen(&out));
    assert!(!is_frozen(&bench.view_stored(0, 2)), "an answer to the change that was replaced");
    assert!(is_frozen(&bench.view_stored(0, 3)), "one of three");
    let out = bench.submit(0, WRITE, 0);
    assert_eq!(sent_to(&out, 0), []);
}

#[test]
fn one_of_two_freezes_without_an_arbiter() {
    let mut bench = Bench::new(2);
    bench.submit(0, WRITE, 0);
    bench.reply(0, 0, Ok(()));
    bench.lose(1);
    let out = bench.view_stored(0, 2);
    assert!(is_frozen(&out));
    assert_eq!(completed(&out, 0), None);
}

#[test]
fn the_last_replica_passes_its_errors_on() {
    let mut bench = Bench::new(1);
    bench.submit(0, Operation::Read, 0);
    assert_eq!(completed(&bench.reply(0, 0, Err(Errno::IO)), 0), Some(Err(Errno::IO)));
    assert!(is_frozen(&bench.lose(0)));
}

#[test]
fn no_space_everywhere_is_an_error_to_the_writer() {
    let mut bench = Bench::new(3);
    bench.submit(0, WRITE, 0);
    bench.reply(0, 0, Err(Errno::NO_SPACE));
    bench.reply(1, 0, Err(Errno::NO_SPACE));
    let out = bench.reply(2, 0, Err(Errno::NO_SPACE));
    assert_eq!(completed(&out, 0), Some(Err(Errno::NO_SPACE)));
    assert_eq!(bench.core.membership().view().members.len(), 3);
}

fn sent(out: &[Output], slot: u16) -> Vec<(PeerIndex, Operation)> {
    let what = |output: &Output| match output {
        Output::Send { peer, slot: sent, operation, .. } if *sent == id(slot) => Some((*peer, *operation)),
        _ => None,
    };
    out.iter().filter_map(what).collect()
}

/// A write that has found no space on replica 1 only.
fn torn_write() -> (Bench, Outputs) {
    let mut bench = Bench::new(3);
    bench.submit(0, WRITE, 0);
    bench.reply(0, 0, Ok(()));
    bench.reply(1, 0, Err(Errno::NO_SPACE));
    let out = bench.reply(2, 0, Ok(()));
    (bench, out)
}

#[test]
fn no_space_on_one_fails_the_write_on_all() {
    let (mut bench, out) = torn_write();
    assert_eq!(sent(&out, 0), [(1, Operation::Read)], "what it still has is read back");
    let out = bench.reply(1, 0, Ok(()));
    assert_eq!(sent(&out, 0), [(0, WRITE), (2, WRITE)], "and given to those that had the space");
    bench.reply(0, 0, Ok(()));
    let out = bench.reply(2, 0, Ok(()));
    assert_eq!(completed(&out, 0), Some(Err(Errno::NO_SPACE)));
    assert_eq!(bench.core.membership().view().members.len(), 3, "nobody has left");
}

#[test]
fn a_write_is_good_when_those_without_space_have_left() {
    let (mut bench, _) = torn_write();
    bench.lose(1);
    bench.view_stored(0, 2);
    assert_eq!(completed(&bench.view_stored(2, 2), 0), Some(Ok(())));
}

#[test]
fn a_write_waits_until_those_without_space_have_left() {
    let mut bench = Bench::new(3);
    bench.submit(0, WRITE, 0);
    bench.reply(0, 0, Ok(()));
    bench.reply(1, 0, Err(Errno::NO_SPACE));
    bench.lose(1);
    let out = bench.reply(2, 0, Ok(()));
    assert_eq!(completed(&out, 0), None, "replica 1 is still in the view and does not hold the data");
    bench.view_stored(0, 2);
    assert_eq!(completed(&bench.view_stored(2, 2), 0), Some(Ok(())));
}

#[test]
fn a_replica_that_does_not_take_the_old_data_back_leaves() {
    let (mut bench, _) = torn_write();
    bench.reply(1, 0, Ok(()));
    bench.reply(0, 0, Ok(()));
    let out = bench.reply(2, 0, Err(Errno::NO_SPACE));
    assert!(out.iter().any(|output| matches!(output, Output::Drop { peer: 2, .. })));
    bench.close(2);
    bench.view_stored(0, 2);
    assert_eq!(completed(&bench.view_stored(1, 2), 0), Some(Err(Errno::NO_SPACE)));
}

#[test]
fn an_io_error_of_one_is_not_the_writers() {
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
fn a_silent_replica_fails_after_its_time() {
    let mut bench = Bench::new(3);
    bench.apply(Event::Tick { now_ms: 100 });
    bench.submit(0, WRITE, 0);
    bench.reply(0, 0, Ok(()));
    bench.reply(1, 0, Ok(()));
    for peer in 0..3 {
        bench.apply(Event::Pong { peer });
    }
    let dropped = |out: &[Output]| out.iter().any(|output| matches!(output, Output::Drop { peer: 2, .. }));
    assert!(!dropped(&bench.apply(Event::Tick { now_ms: 100 + TIMEOUT_MS })));
    assert!(dropped(&bench.apply(Event::Tick { now_ms: 101 + TIMEOUT_MS })));
}

#[test]
fn an_idle_replica_is_pinged_and_fails_when_it_does_not_answer() {
    let mut bench = Bench::new(3);
    let out = bench.apply(Event::Tick { now_ms: 1000 });
    assert_eq!(out, [0, 1, 2].map(|peer| Output::Ping { peer }));
    assert_eq!(bench.apply(Event::Tick { now_ms: 2000 }), [], "one at a time");
    bench.apply(Event::Pong { peer: 0 });
    bench.apply(Event::Pong { peer: 2 });
    let out = bench.apply(Event::Tick { now_ms: 1001 + TIMEOUT_MS });
    assert!(out.iter().any(|output| matches!(output, Output::Drop { peer: 1, .. })));
}

#[test]
fn an_answer_that_nobody_asked_for_is_a_failure() {
    let mut bench = Bench::new(3);
    let out = bench.reply(1, 3, Ok(()));
    assert!(matches!(&out[0], Output::Drop { peer: 1, reason } if reason.contains("not asked")));
    let out = bench.apply(Event::Reply { peer: 0, slot: SlotId { queue: 9, slot: 0 }, outcome: Ok(()) });
    assert!(matches!(&out[0], Output::Drop { peer: 0, .. }));
}
