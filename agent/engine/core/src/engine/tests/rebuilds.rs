//! Tests of replicas outside the view: their out-of-sync regions, their return, and its failures.

use std::collections::BTreeMap;

use shorthorn_types::{MarkAction, RegionsOf};

use super::*;

/// The first slot for copies.
const COPY: u16 = 8;
const READER: PeerIndex = 0;

/// Returns two members and replica 2, which is being rebuilt and lacks `missing`. The test answers the
/// copies.
fn rebuilding(missing: &[u32]) -> (Bench, Outputs) {
    let mut config = config(3, 2);
    config.copy_slots = 2;
    let mut bench = Bench::with(&config);
    let out = bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(missing)) });
    (bench, out)
}

fn left_bytes(bench: &Bench) -> u64 {
    bench.core.copy_progress().rebuilds.iter().map(|(_, left)| left).sum()
}

fn is_rebuilt(out: &[Output]) -> bool {
    out.contains(&Output::Rebuilt { peer: 2 })
}

fn proposed(out: &[Output]) -> Vec<PeerIndex> {
    let to = |output: &Output| match output {
        Output::Propose { peer, .. } => Some(*peer),
        _ => None,
    };
    out.iter().filter_map(to).collect()
}

#[test]
fn missing_regions_are_copied_before_the_replica_becomes_a_member() {
    let (mut bench, out) = rebuilding(&[1, 4]);
    assert_eq!(left_bytes(&bench), 2 << 16);
    let out = bench.answer(out, &[]);
    let copied = sent(&out, COPY);
    assert_eq!(
        copied[..4],
        [(READER, Operation::CheckedRead), (2, WRITE), (1, Operation::CheckedRead), (2, WRITE)]
    );
    let flush = Operation::Flush;
    assert_eq!(copied[4..], [(0, flush), (1, flush), (2, flush)], "it has to be durable");
    assert_eq!(proposed(&out), [0, 1, 2]);
    assert!(is_rebuilt(&out));
    assert_eq!(sent_to(&bench.submit(0, WRITE, 0), 0), [0, 1, 2]);
}

#[test]
fn a_write_is_sent_to_it_unless_it_misses_all_of_its_regions() {
    let (mut bench, _) = rebuilding(&[4, 5]);
    assert_eq!(sent_to(&bench.submit(0, WRITE, 0), 0), [0, 1, 2]);
    assert_eq!(sent_to(&bench.submit(1, WRITE, 5 * REGION_BLOCKS), 1), [0, 1]);
    let range = ByteRange::new((4 << 16) - 4096, 8192).unwrap();
    let request = Request { slot: 2, operation: Operation::Discard, range };
    let out = bench.apply(Event::Submit { queue: 0, request });
    assert_eq!(sent_to(&out, 2), [], "region 4 is being copied");
    bench.reply(0, COPY, Ok(()));
    let out = bench.reply(2, COPY, Ok(()));
    assert_eq!(sent_to(&out, 2), [0, 1, 2]);
    assert_eq!(completed(&bench.reply(0, 0, Ok(())), 0), None);
    assert_eq!(completed(&bench.reply(1, 0, Ok(())), 0), None, "it waits for the rebuilding replica too");
    assert_eq!(completed(&bench.reply(2, 0, Ok(())), 0), Some(Ok(())));
    assert_eq!(sent_to(&bench.submit(3, Operation::Flush, 0), 3), [0, 1, 2]);
}

#[test]
fn reads_pass_a_copy() {
    let (mut bench, _) = rebuilding(&[4]);
    assert_eq!(sent_to(&bench.submit(0, Operation::Read, 4 * REGION_BLOCKS), 0).len(), 1);
    bench.submit(1, WRITE, 4 * REGION_BLOCKS);
    bench.reply(READER, COPY, Ok(()));
    assert_eq!(sent_to(&bench.reply(2, COPY, Ok(())), 1), [], "the read has to end first");
}

/// A replica that is rebuilt and is sent a copy in sixteen parts: every other block holds zeroes.
struct Slow {
    bench: Bench,
    now_ms: u64,
    out: Outputs,
}

impl Slow {
    fn new() -> Slow {
        let (bench, out) = rebuilding(&[4]);
        assert_eq!(sent(&out, COPY), [(READER, Operation::CheckedRead)]);
        Slow { bench, now_ms: 0, out: Vec::new() }
    }

    fn write(&mut self) {
        assert_eq!(sent_to(&self.bench.submit(0, WRITE, 4 * REGION_BLOCKS), 0), []);
    }

    fn read_copy(&mut self) {
        let zeroes = [0x5555, 0, 0, 0];
        self.out.extend(self.bench.apply(Event::CopyRead { peer: READER, slot: id(COPY), zeroes }));
    }

    /// Answers PING for every replica.
    fn pass(&mut self, time_ms: u64) {
        self.now_ms += time_ms;
        let ticked = tick_with_pongs(&mut self.bench, self.now_ms);
        self.out.extend(ticked);
    }

    fn answer_part(&mut self) {
        self.out.extend(self.bench.reply(2, COPY, Ok(())));
    }
}

/// Each part of the copy is answered in time.
#[test]
fn a_rebuilding_replica_holds_a_request_up_no_longer_than_the_time_out() {
    for has_waiting in [true, false] {
        let mut slow = Slow::new();
        slow.read_copy();
        slow.pass(TIMEOUT_MS * 4 / 5);
        slow.answer_part();
        if has_waiting {
            slow.write();
        }
        slow.pass(TIMEOUT_MS * 4 / 5);
        slow.answer_part();
        assert_eq!(drops(&slow.out), []);
        slow.pass(TIMEOUT_MS * 2 / 5);
        assert_eq!(!drops(&slow.out).is_empty(), has_waiting, "{:?}", slow.out);
    }
}

/// The member that gives the copy takes its time: it is the last but one, say.
#[test]
fn a_rebuilding_replica_is_not_dropped_for_the_time_of_others() {
    let mut slow = Slow::new();
    slow.write();
    slow.pass(TIMEOUT_MS * 4 / 5);
    slow.read_copy();
    slow.pass(TIMEOUT_MS * 4 / 5);
    slow.answer_part();
    assert_eq!(drops(&slow.out), []);
}

#[test]
fn a_copy_waits_for_writes_in_flight() {
    let mut config = config(3, 2);
    config.copy_slots = 2;
    let mut bench = Bench::with(&config);
    bench.submit(0, WRITE, 4 * REGION_BLOCKS);
    let out = bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[])) });
    assert_eq!(left_bytes(&bench), 65536, "the write in flight was counted");
    assert_eq!(sent_to(&out, COPY), []);
    bench.reply(0, 0, Ok(()));
    assert_eq!(sent_to(&bench.reply(1, 0, Ok(())), COPY), [READER]);
}

#[test]
fn a_member_that_left_lacks_dirty_regions_and_later_writes() {
    let mut bench = Bench::new(3);
    let out = bench.submit(0, WRITE, REGION_BLOCKS);
    bench.answer(out, &[]);
    bench.submit(1, WRITE, 2 * REGION_BLOCKS);
    bench.lose(2);
    let out = bench.submit(2, WRITE, 3 * REGION_BLOCKS);
    assert_eq!(sent_to(&out, 2), []);
    bench.view_stored(0, 2);
    assert_eq!(sent_to(&bench.view_stored(1, 2), 2), [0, 1]);
    bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[7])) });
    assert_eq!(left_bytes(&bench), 4 << 16);
}

#[test]
fn a_rebuilding_replica_that_fails_takes_no_request_with_it() {
    for (errno, why) in [(Errno::NO_SPACE, "no space left"), (Errno::IO, "input/output error")] {
        let (mut bench, out) = rebuilding(&[]);
        bench.answer(out, &[2]);
        bench.submit(0, WRITE, 0);
        let out = bench.reply(2, 0, Err(errno));
        assert!(drops(&out)[0].1.to_lowercase().contains(why), "{out:?}");
        let wanted = if errno == Errno::IO { DropCause::Failed } else { DropCause::Full };
        assert!(out.iter().any(|output| matches!(output, Output::Drop { cause, .. } if *cause == wanted)));
        assert_eq!(proposed(&out), [], "it was not in the view");
        bench.reply(0, 0, Ok(()));
        assert_eq!(completed(&bench.reply(1, 0, Ok(())), 0), None, "it may still read the buffer");
        let out = bench.close(2);
        assert_eq!(completed(&out, 0), Some(Ok(())));
        assert_eq!(bench.core.membership().view().members.len(), 2);
    }
}

#[test]
fn a_rebuilding_replica_without_space_for_a_copy_is_dropped() {
    let (mut bench, _) = rebuilding(&[3]);
    bench.reply(READER, COPY, Ok(()));
    let out = bench.reply(2, COPY, Err(Errno::NO_SPACE));
    assert_eq!(drops(&out), [(2, "no space left")]);
    let out = bench.submit(0, WRITE, 3 * REGION_BLOCKS);
    assert_eq!(sent_to(&out, 0), [], "the copy has its range until the connection is closed");
    assert_eq!(sent_to(&bench.close(2), 0), [0, 1]);
    bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[])) });
    assert_eq!(left_bytes(&bench), 65536, "the region is still missing");
}

#[test]
fn a_rebuild_ends_if_the_last_member_cannot_read_a_region() {
    let mut bench = Bench::with(&config(2, 1));
    bench.apply(Event::Rebuild { peer: 1, missing: Box::new(region_set(&[3])) });
    let out = bench.reply(0, COPY, Err(Errno::IO));
    assert!(matches!(drops(&out)[..], [(1, reason)] if reason.contains("cannot read")));
    assert!(!is_frozen(&out));
}

#[test]
fn a_write_that_no_member_has_space_for_is_taken_back_from_the_rebuilding_replica() {
    let (mut bench, out) = rebuilding(&[]);
    bench.answer(out, &[2]);
    bench.submit(0, WRITE, 0);
    bench.reply(2, 0, Ok(()));
    bench.reply(0, 0, Err(Errno::NO_SPACE));
    let out = bench.reply(1, 0, Err(Errno::NO_SPACE));
    assert_eq!(sent(&out, COPY + 1), [(0, Operation::CheckedRead)]);
    assert_eq!(sent(&bench.reply(0, COPY + 1, Ok(())), COPY + 1), [(1, WRITE), (2, WRITE)]);
    bench.reply(1, COPY + 1, Ok(()));
    let out = bench.reply(2, COPY + 1, Ok(()));
    assert_eq!(completed(&out, 0), Some(Err(Errno::NO_SPACE)));
}

#[test]
fn a_rebuilding_replica_that_fails_when_it_was_proposed_is_proposed_out_again() {
    let (mut bench, out) = rebuilding(&[]);
    let mut out = bench.answer(out, &[2]);
    out.extend(bench.reply(2, COPY, Ok(())));
    assert_eq!(proposed(&out), [0, 1, 2]);
    let out = bench.submit(0, WRITE, 0);
    assert_eq!(sent_to(&out, 0), []);
    let out = bench.lose(2);
    assert_eq!(proposed(&out), [0, 1]);
    let out = bench.answer(out, &[]);
    assert_eq!(bench.core.membership().view().members.len(), 2);
    assert_eq!(sent_to(&out, 0), [0, 1]);
}

#[test]
fn a_member_that_fails_when_a_rebuilding_replica_is_proposed_leaves_first() {
    let (mut bench, out) = rebuilding(&[]);
    bench.answer(out, &[2]);
    bench.reply(2, COPY, Ok(()));
    let out = bench.lose(1);
    assert_eq!(proposed(&out), [0]);
    let out = bench.view_stored(0, 3);
    assert!(matches!(out[..], [Output::AskGrant { .. }]), "one of two");
    let out = bench.granted(3);
    let out = bench.answer(out, &[]);
    assert!(is_rebuilt(&out), "then the rebuilding replica is proposed again");
    let marked = marks(&out);
    assert!(marked.iter().all(|(peer, change)| *peer == 2 && change.action == MarkAction::Add));
    let lost = RegionsOf::OutOfSync(ReplicaId::from_random(1));
    assert_eq!(marked[0].1.of, lost, "the replica keeps the out-of-sync set of the other");
}

#[test]
fn a_rebuilding_replica_gets_the_regions_that_the_others_have_missed() {
    let mut config = config(4, 2);
    config.out_of_sync[3] = region_set(&[2, 3, 6]);
    let mut bench = Bench::with(&config);
    let out = bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[])) });
    let out = bench.answer(out, &[]);
    let marked: Vec<_> = marks(&out).into_iter().map(|(peer, change)| (peer, change.runs)).collect();
    assert_eq!(marked, [(2, vec![]), (2, vec![(2, 2), (6, 1)])], "first that there is a set at all");
    assert!(is_rebuilt(&out));
}

/// The set would pass for all that the other one has missed, if the rebuilding replica alone is left at the
/// next start.
#[test]
fn a_rebuilding_replica_keeps_no_incomplete_out_of_sync_set() {
    let mut config = config(5, 2);
    config.out_of_sync[3] = region_set(&[2]);
    let mut bench = Bench::with(&config);
    bench.core.distrust(3);
    bench.apply(Event::Track {
        peer: 5,
        config: PeerConfig { replica: ReplicaId::from_random(9), local: false },
    });
    let out = bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[])) });
    let out = bench.answer(out, &[]);
    let marked: Vec<_> = marks(&out).into_iter().map(|(_, change)| (change.of, change.action)).collect();
    let expected = [(3, MarkAction::Forget), (4, MarkAction::Add), (9, MarkAction::Forget)];
    assert_eq!(marked, expected.map(|(n, action)| (RegionsOf::OutOfSync(ReplicaId::from_random(n)), action)));
    assert!(is_rebuilt(&out));
}

#[test]
fn the_out_of_sync_set_is_complete_after_the_report_of_its_replica() {
    let mut bench = Bench::with(&config(4, 2));
    bench.core.distrust(3);
    bench.apply(Event::Rebuild { peer: 3, missing: Box::new(region_set(&[4])) });
    bench.apply(Event::Lost { peer: 3, reason: String::new() });
    assert_eq!(bench.core.out_of_sync(3), Some(&region_set(&[4])));
    let out = bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[])) });
    let out = bench.answer(out, &[]);
    let marked: Vec<_> = marks(&out).into_iter().map(|(_, change)| change.runs).collect();
    assert_eq!(marked, [vec![], vec![(4, 1)]]);
}

#[test]
fn copied_regions_are_cleared_from_the_out_of_sync_sets() {
    let (mut bench, _) = rebuilding(&[2, 3]);
    bench.reply(READER, COPY, Ok(()));
    bench.reply(2, COPY, Ok(())); // and region 3 is being read
    bench.tick(INTERVAL_MS);
    bench.reply(1, COPY, Ok(()));
    let out = bench.reply(2, COPY, Ok(()));
    assert_eq!(sent(&out, COPY).len(), 3, "the flush of everybody");
    let out = bench.answer(out, &[]);
    let cleared = &marks(&out)[0].1;
    assert_eq!(cleared.of, RegionsOf::OutOfSync(ReplicaId::from_random(2)));
    assert_eq!((cleared.action, &cleared.runs[..]), (MarkAction::Clear, &[(2, 1)][..]), "3 was in flight");
    assert!(marks(&out).iter().all(|(peer, _)| *peer != 2));
}

#[test]
fn a_replica_is_rebuilt_only_if_its_out_of_sync_set_is_tracked() {
    let (mut bench, out) = rebuilding(&[]);
    bench.answer(out, &[]);
    let replica = ReplicaId::from_random(9);
    let missing = || Box::new(region_set(&[]));
    let out = bench.apply(Event::Rebuild { peer: 3, missing: missing() });
    assert!(matches!(drops(&out)[..], [(3, _)]));
    bench.apply(Event::Track { peer: 3, config: PeerConfig { replica, local: false } });
    bench.apply(Event::Forget { peer: 3 });
    let out = bench.apply(Event::Rebuild { peer: 3, missing: missing() });
    assert!(matches!(drops(&out)[..], [(3, _)]));
    bench.apply(Event::Track { peer: 3, config: PeerConfig { replica, local: false } });
    let out = bench.apply(Event::Rebuild { peer: 3, missing: missing() });
    let out = bench.answer(out, &[]);
    assert!(out.contains(&Output::Rebuilt { peer: 3 }));
    assert_eq!(bench.core.membership().view().members.len(), 4);
}

#[test]
fn a_replica_does_not_join_before_it_has_left() {
    let mut bench = Bench::new(2);
    bench.lose(1);
    let out = bench.apply(Event::Rebuild { peer: 1, missing: Box::new(region_set(&[])) });
    assert!(matches!(drops(&out)[..], [(1, reason)] if reason.contains("not complete")));
}

#[test]
fn a_rebuilding_replica_that_is_given_up_is_dropped() {
    let (mut bench, _) = rebuilding(&[1]);
    assert_eq!(drops(&bench.apply(Event::Forget { peer: 2 })), [(2, "given up")]);
    bench.close(2);
    assert_eq!(sent_to(&bench.submit(0, WRITE, REGION_BLOCKS), 0), [], "the copy still reads");
    assert_eq!(sent_to(&bench.reply(READER, COPY, Ok(())), 0), [0, 1]);
}

#[test]
fn rebuilding_replicas_are_pinged() {
    let (mut bench, _) = rebuilding(&[1]);
    let out = bench.tick(1000);
    assert!(out.contains(&Output::Ping { peer: 2, queue: 0 }));
    let out = bench.tick(1001 + TIMEOUT_MS);
    assert!(matches!(drops(&out)[..], [(2, _)]), "the members are waited for: {out:?}");
}

#[test]
fn a_region_that_is_being_copied_stays_dirty() {
    let mut config = config(3, 2);
    config.replica_timeout_ms = 4 * INTERVAL_MS;
    let mut bench = Bench::with(&config);
    let out = bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[3])) });
    assert_eq!(sent_to(&out, COPY), [READER]);
    for half in 1..5 {
        let out = bench.tick(half * INTERVAL_MS / 2);
        assert_eq!(sent_to(&bench.answer(out, &[]), COPY + 1), [], "no write needs a flush");
    }
}

#[test]
fn a_copy_waits_while_its_region_is_being_cleared() {
    let mut bench = Bench::with(&config(3, 2));
    let out = bench.submit(0, WRITE, 0);
    bench.answer(out, &[]);
    let out = bench.tick(INTERVAL_MS);
    bench.answer(out, &[]);
    bench.tick(2 * INTERVAL_MS);
    bench.reply(0, COPY, Ok(()));
    assert_eq!(marks(&bench.reply(1, COPY, Ok(()))).len(), 2);
    let out = bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[])) });
    assert_eq!((left_bytes(&bench), sent_to(&out, COPY)), (65536, vec![]));
    bench.apply(Event::Marked { peer: 0, mark: FIRST_CLEAR });
    assert_eq!(sent_to(&bench.apply(Event::Marked { peer: 1, mark: FIRST_CLEAR }), COPY), [READER]);
}

#[test]
fn a_rebuilding_replica_gets_them_again_when_a_member_leaves_meanwhile() {
    let mut bench = Bench::with(&config(4, 2));
    bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[])) });
    bench.reply(0, COPY, Ok(()));
    bench.reply(1, COPY, Ok(()));
    assert_eq!(marks(&bench.reply(2, COPY, Ok(()))).len(), 1, "that there is a set for replica 3");
    bench.lose(1);
    bench.view_stored(0, 2);
    let out = bench.granted(2);
    let out = bench.answer(out, &[]);
    let marked: Vec<_> = marks(&out).into_iter().map(|(_, change)| change.of).collect();
    assert_eq!(marked, [1, 3].map(|n| RegionsOf::OutOfSync(ReplicaId::from_random(n))));
    assert!(is_rebuilt(&out));
}

#[test]
fn regions_written_during_the_copy_stay_in_the_out_of_sync_sets() {
    let (mut bench, _) = rebuilding(&[2, 3]);
    bench.reply(READER, COPY, Ok(()));
    bench.reply(2, COPY, Ok(())); // and region 3 is being read
    let write = bench.submit(0, WRITE, 2 * REGION_BLOCKS);
    assert_eq!(sent_to(&write, 0), [0, 1, 2]);
    bench.tick(INTERVAL_MS);
    bench.reply(1, COPY, Ok(()));
    let out = bench.reply(2, COPY, Ok(()));
    let out = bench.answer(out, &[]);
    assert_eq!(marks(&out), []);
    assert!(is_rebuilt(&out));
}

#[test]
fn a_rebuilding_replica_with_a_write_that_the_last_member_failed_is_dropped() {
    let mut bench = Bench::with(&config(2, 1));
    bench.apply(Event::Rebuild { peer: 1, missing: Box::new(region_set(&[])) });
    bench.submit(0, WRITE, 0);
    bench.reply(1, 0, Ok(()));
    let out = bench.reply(0, 0, Err(Errno::IO));
    assert_eq!(completed(&out, 0), Some(Err(Errno::IO)));
    assert!(matches!(drops(&out)[..], [(1, _)]), "it has the data, the member may not");
}

#[test]
fn a_replica_does_not_join_before_its_last_connections_are_closed() {
    let mut bench = Bench::new(3);
    bench.submit(0, WRITE, 0);
    bench.apply(Event::Lost { peer: 2, reason: "test".into() });
    bench.view_stored(0, 2);
    bench.view_stored(1, 2);
    let rebuild = || Event::Rebuild { peer: 2, missing: Box::new(region_set(&[])) };
    assert!(matches!(drops(&bench.apply(rebuild()))[..], [(2, reason)] if reason.contains("not closed")));
    bench.close(2);
    assert_eq!(drops(&bench.apply(rebuild())), []);
}

/// Counts the rebuilding replica as being rebuilt until then: if it alone were left, no engine could start
/// from it.
#[test]
fn a_rebuilding_replica_whose_copy_has_not_ended_is_not_a_member() {
    let mut bench = Bench::with(&config(3, 2));
    bench.core.start_full_copy(2);
    let out = bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[1])) });
    let out = bench.answer(out, &[]);
    assert!(!is_rebuilt(&out), "{out:?}");
    let out = bench.apply(Event::CopyEnded { peer: 2 });
    assert!(is_rebuilt(&bench.answer(out, &[])));
}

/// The rebuilding replica has done a write that no member has done or recorded.
#[test]
fn a_rebuilding_replica_keeps_its_intent_in_regions_that_it_misses() {
    let mut config = config(3, 2);
    config.copy_slots = 2;
    let mut bench = Bench::with(&config);
    let written = bench.submit(0, WRITE, 4 * REGION_BLOCKS);
    bench.answer(written, &[]);
    let mut out = bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[2, 3, 4])) });
    // The flush for clearing comes next, before the copies of the other regions. That of 3 has the only slot
    // then.
    out.extend(bench.apply(Event::ClearAll));
    let is_of_3 = |range: &ByteRange| range.offset() == 3 << 16 && range.length() == 1 << 16;
    let mut at = 0;
    while at < out.len() {
        let waits = matches!(
            &out[at], Output::Send { operation: Operation::CheckedRead, range, .. } if is_of_3(range)
        );
        let event = answer_to(&out[at]).filter(|_| !waits);
        out.extend(event.map(|(_, event)| bench.apply(event)).unwrap_or_default());
        at += 1;
    }
    let cleared = marks(&out).into_iter().filter(|(_, change)| change.of == RegionsOf::Intent);
    let cleared: Vec<_> = cleared.map(|(peer, change)| (peer, change.runs)).collect();
    assert_eq!(cleared, [(0, vec![(4, 1)]), (1, vec![(4, 1)])]);
}

/// The rebuilding replica is getting the set of replica 2, which turns out to be incomplete. It must get the
/// whole set of replica 3, and must not keep a part of the other one.
#[test]
fn a_set_that_is_distrusted_while_it_is_sent_does_not_cut_another_short() {
    let mut config = config(4, 1);
    config.out_of_sync[2] = region_set(&[5]);
    config.out_of_sync[3] = region_set(&[2]);
    let mut bench = Bench::with(&config);
    let mut outputs = bench.apply(Event::Rebuild { peer: 1, missing: Box::new(region_set(&[])) });
    let (mut at, mut kept, mut is_distrusted) = (0, BTreeMap::new(), false);
    while at < outputs.len() {
        if let Output::Mark { peer: 1, change, .. } = &outputs[at]
            && let RegionsOf::OutOfSync(replica) = change.of
        {
            if change.action == MarkAction::Add {
                kept.entry(replica).or_insert_with(Vec::new).extend(change.runs.clone());
            } else {
                kept.remove(&replica);
            }
            if !is_distrusted && !change.runs.is_empty() {
                is_distrusted = true;
                bench.core.distrust(2);
            }
        }
        if let Some((_, event)) = answer_to(&outputs[at]) {
            outputs.extend(bench.apply(event));
        }
        at += 1;
    }
    assert!(is_distrusted && outputs.contains(&Output::Rebuilt { peer: 1 }), "{outputs:?}");
    assert_eq!(kept, BTreeMap::from([(ReplicaId::from_random(3), vec![(2, 1)])]));
}

/// Replica 2 was given up, and has come back under the number of another one. Its former number is free for
/// a new replica, although the view has replica 2.
#[test]
fn the_former_number_of_a_replica_that_is_back_is_free() {
    let mut bench = Bench::with(&config(3, 1));
    bench.apply(Event::Forget { peer: 1 });
    bench.apply(Event::Forget { peer: 2 });
    let config = |replica| PeerConfig { replica: ReplicaId::from_random(replica), local: false };
    for (peer, replica) in [(1, 2), (2, 9)] {
        bench.apply(Event::Track { peer, config: config(replica) });
        let missing = Box::new(region_set(&[0]));
        let out = bench.apply(Event::Rebuild { peer, missing });
        assert_eq!(drops(&out), []);
        let out = bench.answer(out, &[]);
        assert!(out.contains(&Output::Rebuilt { peer }), "{out:?}");
    }
    assert_eq!(bench.core.membership().view().members.len(), 3);
}
