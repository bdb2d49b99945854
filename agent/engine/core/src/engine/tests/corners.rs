//! Several things at once: losses, rebuilds, checks and failures of the same request.

use super::*;
use crate::event::ScrubConfig;

const COPY: u16 = 10;
const FIRST_COPY: u16 = 8;
const ZEROES: Operation = Operation::WriteZeroes { fua: false };
const NO_SPACE: Option<Result<(), Errno>> = Some(Err(Errno::NO_SPACE));

/// The only member cannot do it, the rebuilding replica becomes a member before it answers that it has.
#[test]
fn a_rebuilding_replica_that_becomes_a_member_while_a_request_fails_does_not_differ() {
    let mut bench = Bench::with(&config(2, 1));
    let out = bench.apply(Event::Rebuild { peer: 1, missing: Box::new(region_set(&[])) });
    assert_eq!(sent_to(&bench.submit(0, WRITE, 0), 0), [0, 1]);
    bench.reply(0, 0, Err(Errno::IO));
    let out = bench.answer(out, &[]);
    assert!(out.contains(&Output::Rebuilt { peer: 1 }), "{out:?}");
    let out = bench.reply(1, 0, Ok(()));
    let members = bench.core.membership().view().members.len();
    assert!(
        completed(&out, 0).is_none() || !drops(&out).is_empty(),
        "{members} members of which one holds the write: {out:?}"
    );
}

/// Repeats the case above with an answer that the rebuilding replica sent before it became a member.
#[test]
fn a_rebuilding_replica_that_has_answered_before() {
    let mut bench = Bench::with(&config(2, 1));
    let out = bench.apply(Event::Rebuild { peer: 1, missing: Box::new(region_set(&[])) });
    assert_eq!(sent_to(&bench.submit(0, WRITE, 0), 0), [0, 1]);
    bench.reply(1, 0, Ok(()));
    let out = bench.answer(out, &[]);
    assert!(out.contains(&Output::Rebuilt { peer: 1 }), "{out:?}");
    let out = bench.reply(0, 0, Err(Errno::IO));
    assert_eq!(drops(&out).len(), 1, "{out:?}");
}

/// A time-out of less than a second is allowed (100 ms are the least in the configuration).
#[test]
fn no_member_is_late_after_a_pause_with_a_short_time_out() {
    let mut config = config(3, 3);
    config.replica_timeout_ms = 500;
    let mut bench = Bench::with(&config);
    bench.submit(0, WRITE, 0);
    let out = bench.apply(Event::Tick { now_ms: 60_000 });
    assert_eq!((drops(&out), is_frozen(&out)), (vec![], false));
}

fn big(bench: &mut Bench, slot: u16, length: u64) -> Outputs {
    let range = ByteRange::new(0, length).unwrap();
    bench.apply(Event::Submit { queue: 0, request: Request { slot, operation: ZEROES, range } })
}

/// Pieces of a large resync: its source leaves after the first piece, and comes back as rebuilding replica
/// meanwhile.
#[test]
fn a_source_that_leaves_between_two_pieces() {
    let mut config = config(3, 3);
    config.size_bytes = 4 << 20;
    config.dirty = RegionSet::empty(Regions::of(4 << 20).count());
    config.out_of_sync = (0..3).map(|_| RegionSet::empty(Regions::of(4 << 20).count())).collect();
    let mut bench = Bench::with(&config);
    big(&mut bench, 0, 3 << 20);
    bench.reply(1, 0, Err(Errno::NO_SPACE));
    bench.reply(0, 0, Ok(()));
    let out = bench.reply(2, 0, Err(Errno::NO_SPACE));
    assert_eq!(sent(&out, COPY), [(1, Operation::CheckedRead)]);
    bench.reply(1, COPY, Ok(()));
    bench.reply(0, COPY, Ok(()));
    let out = bench.reply(2, COPY, Ok(()));
    assert_eq!(sent(&out, COPY), [(1, Operation::CheckedRead)], "the second piece");
    bench.lose(1);
    bench.view_stored(0, 2);
    let out = bench.view_stored(2, 2);
    assert_eq!(sent(&out, COPY), [(2, Operation::CheckedRead)]);
    let missing = Box::new(RegionSet::empty(Regions::of(4 << 20).count()));
    let more = bench.apply(Event::Rebuild { peer: 1, missing });
    assert_eq!(sent(&more, FIRST_COPY), [], "the range is the request's");
    let out = bench.answer(out, &[]);
    assert_eq!(completed(&out, 0), NO_SPACE);
    assert!(out.contains(&Output::Rebuilt { peer: 1 }), "{out:?}");
}

/// All copy slots but one wait for the range of a request that fails; it ends though the view changes
/// meanwhile.
#[test]
fn joins_that_fill_all_slots_do_not_hold_a_resync_up() {
    let mut bench = Bench::with(&config(4, 3));
    big(&mut bench, 0, 4 << 16);
    let out = bench.apply(Event::Rebuild { peer: 3, missing: Box::new(region_set(&[0, 1, 2, 3])) });
    assert_eq!(out, []);
    bench.reply(0, 0, Err(Errno::NO_SPACE));
    bench.reply(2, 0, Ok(()));
    bench.apply(Event::Lost { peer: 2, reason: "test".into() });
    assert_eq!(completed(&bench.reply(1, 0, Ok(())), 0), None);
    bench.view_stored(0, 2);
    let out = bench.view_stored(1, 2);
    assert_eq!(sent(&out, COPY), [(0, Operation::CheckedRead)]);
    bench.close(2);
    let out = bench.answer(out, &[]);
    assert_eq!(completed(&out, 0), NO_SPACE);
    assert!(out.contains(&Output::Rebuilt { peer: 3 }), "{out:?}");
}

/// The index is another replica's when the resync begins.
#[test]
fn an_index_of_another_replica_gets_no_more_than_it_may() {
    let mut bench = Bench::new(3);
    bench.submit(0, WRITE, 0);
    bench.reply(1, 0, Err(Errno::NO_SPACE));
    bench.reply(2, 0, Ok(()));
    bench.lose(2);
    bench.view_stored(0, 2);
    bench.view_stored(1, 2);
    bench.apply(Event::Forget { peer: 2 });
    let other = PeerConfig { replica: ReplicaId::from_random(77), local: false };
    bench.apply(Event::Track { peer: 2, config: other });
    bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[])) });
    let out = bench.reply(0, 0, Ok(()));
    let out = bench.answer(out, &[]);
    assert_eq!(completed(&out, 0), NO_SPACE);
    assert!(out.contains(&Output::Rebuilt { peer: 2 }), "{out:?}");
    let order = |find: &dyn Fn(&Output) -> bool| out.iter().position(find);
    let rebuilt = order(&|output| *output == Output::Rebuilt { peer: 2 });
    let failed = order(&|output| matches!(output, Output::Complete { .. }));
    assert!(failed < rebuilt);
}

/// The last member owes the answer to a write that a former connection of the other replica was sent, too.
#[test]
fn requests_to_a_former_connection_do_not_drop_a_replica_that_is_rebuilt() {
    let mut bench = Bench::with(&config(2, 1));
    bench.apply(Event::Rebuild { peer: 1, missing: Box::new(region_set(&[5])) });
    let out = bench.submit(0, WRITE, 0);
    assert_eq!(sent_to(&out, 0), [0, 1]);
    bench.lose(1);
    bench.apply(Event::Rebuild { peer: 1, missing: Box::new(region_set(&[5])) });
    let out = bench.reply(0, 0, Err(Errno::IO));
    assert_eq!(completed(&out, 0), Some(Err(Errno::IO)));
    assert!(!out.iter().any(|output| matches!(output, Output::Drop { .. })), "{out:?}");
}

/// The replica that differed is given up during its repair, and another one may get its index.
#[test]
fn a_repair_is_not_reported_about_the_replica_that_replaces_the_odd_one() {
    for is_replaced in [false, true] {
        let mut bench = Bench::new(3);
        let out = bench.apply(Event::Scrub(Some(ScrubConfig { bytes_per_s: None, repair: true })));
        let slot = out.iter().find_map(|output| match output {
            Output::Send { slot, operation: Operation::Verify, .. } => Some(*slot),
            _ => None,
        });
        let slot = slot.unwrap();
        // The whole piece differs: its blocks are compared one by one.
        let checks = [(0, 7), (1, 9), (2, 7)];
        for (peer, sum) in checks.into_iter().chain(checks) {
            bench.apply(Event::Verified { peer, slot, outcome: Ok(VolumeCheck::unconfirmed(sum)) });
        }
        bench.lose(1);
        bench.view_stored(0, 2);
        bench.view_stored(2, 2);
        bench.apply(Event::Forget { peer: 1 });
        if is_replaced {
            let other = PeerConfig { replica: ReplicaId::from_random(77), local: false };
            bench.apply(Event::Track { peer: 1, config: other });
        }
        let out = bench.apply(Event::Reply { peer: 0, slot, outcome: Ok(()) });
        let about = out.iter().find_map(|output| match output {
            Output::ScrubFound { odd, repaired, .. } => Some((odd.clone(), *repaired)),
            _ => None,
        });
        assert_eq!(about, Some((vec![1], false)).filter(|_| !is_replaced), "{out:?}");
        let is_compared =
            |output: &Output| matches!(output, Output::Send { operation: Operation::Verify, .. });
        assert!(out.iter().any(is_compared), "the scrub continues: {out:?}");
    }
}

/// A rebuilding replica is proposed while the last answer to a check is on its way, and has its copy from the
/// odd one.
#[test]
fn a_repair_found_while_a_rebuilding_replica_is_proposed_reaches_it() {
    let mut config = config(4, 3);
    config.peers[1].local = true;
    let mut bench = Bench::with(&config);
    let out = bench.apply(Event::Scrub(Some(ScrubConfig { bytes_per_s: None, repair: true })));
    let slot = out.iter().find_map(|output| match output {
        Output::Send { slot, operation: Operation::Verify, .. } => Some(*slot),
        _ => None,
    });
    let slot = slot.unwrap();
    // The whole piece differs: its blocks are compared one by one.
    for (peer, sum) in [(0, 7), (1, 9), (2, 7)] {
        bench.apply(Event::Verified { peer, slot, outcome: Ok(VolumeCheck::unconfirmed(sum)) });
    }
    bench.apply(Event::Verified { peer: 0, slot, outcome: Ok(VolumeCheck::unconfirmed(7)) });
    bench.apply(Event::Verified { peer: 1, slot, outcome: Ok(VolumeCheck::unconfirmed(9)) });
    // The copy is of the data of replica 1, and was made before the check.
    let out = bench.apply(Event::Rebuild { peer: 3, missing: Box::new(region_set(&[])) });
    let out = bench.answer(out, &[3]);
    let mut out: Vec<_> = out;
    // Everything of the rebuilding replica but the view.
    let mut at = 0;
    let mut later = Vec::new();
    while at < out.len() {
        match &out[at] {
            Output::Propose { peer: 3, .. } => later.push(out[at].clone()),
            output => {
                if let Some((3, event)) = answer_to(output) {
                    let more = bench.apply(event);
                    let more = bench.answer(more, &[3]);
                    out.extend(more);
                }
            }
        }
        at += 1;
    }
    later.extend(bench.apply(Event::Verified { peer: 2, slot, outcome: Ok(VolumeCheck::unconfirmed(7)) }));
    let more = bench.answer(later, &[]);
    assert!(more.contains(&Output::Rebuilt { peer: 3 }), "{more:?}");
    let is_found = more.iter().any(|output| matches!(output, Output::ScrubFound { .. }));
    let is_written = more
        .iter()
        .any(|output| matches!(output, Output::Send { peer: 3, operation: Operation::Write { .. }, .. }));
    assert_eq!(
        (is_found, is_written),
        (true, true),
        "the replica may have the data of the odd member: {more:?}"
    );
}
