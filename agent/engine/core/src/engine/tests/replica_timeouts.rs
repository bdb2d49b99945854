//! Members that are connected and do not answer.

use super::*;

const COPY: u16 = 8;

/// Passes time. Members in `silent` answer nothing, those in `slow` only PING; the others answer everything.
/// Returns the drops with the time of each.
fn pass(
    bench: &mut Bench,
    until_ms: u64,
    slow: &[PeerIndex],
    silent: &[PeerIndex],
) -> (Vec<(u64, PeerIndex)>, Outputs) {
    let (mut dropped, mut all) = (Vec::new(), Vec::new());
    while bench.now_ms < until_ms {
        bench.now_ms = until_ms.min(bench.now_ms + 250);
        let first = bench.apply(Event::Tick { now_ms: bench.now_ms });
        let out = answer_but(bench, first, slow, silent);
        dropped.extend(drops(&out).iter().map(|(peer, _)| (bench.now_ms, *peer)));
        all.extend(out);
    }
    (dropped, all)
}

fn answer_but(bench: &mut Bench, first: Outputs, slow: &[PeerIndex], silent: &[PeerIndex]) -> Outputs {
    let mut outputs = first;
    let mut at = 0;
    while at < outputs.len() {
        let answered = answer_to(&outputs[at]).filter(|(peer, event)| {
            !silent.contains(peer) && (!slow.contains(peer) || matches!(event, Event::Pong { .. }))
        });
        if let Some((_, event)) = answered {
            outputs.extend(bench.apply(event));
        }
        at += 1;
    }
    outputs
}

/// Submits a write that the `slow` and `silent` ones do not answer.
fn write(bench: &mut Bench, slow: &[PeerIndex], silent: &[PeerIndex]) {
    let out = bench.submit(0, WRITE, 0);
    assert_eq!(completed(&answer_but(bench, out, slow, silent), 0), None);
}

fn awaited(out: &[Output]) -> Vec<(PeerIndex, bool)> {
    let awaited = |output: &Output| match output {
        Output::Awaited { peer, is_silent, .. } => Some((*peer, *is_silent)),
        _ => None,
    };
    out.iter().filter_map(awaited).collect()
}

fn prompt(out: &[Output]) -> Vec<PeerIndex> {
    let prompt = |output: &Output| match output {
        Output::Prompt { peer } => Some(*peer),
        _ => None,
    };
    out.iter().filter_map(prompt).collect()
}

#[test]
fn one_of_three_whose_disk_hangs_is_dropped_after_the_time_out() {
    let mut bench = Bench::new(3);
    write(&mut bench, &[1], &[]);
    let (dropped, out) = pass(&mut bench, 2 * TIMEOUT_MS, &[1], &[]);
    assert_eq!(dropped, [(TIMEOUT_MS + 250, 1)]);
    assert_eq!(drops(&out)[0].1, "no answer for 5250 ms to a request, though it answers PING");
    assert!(out.iter().any(|output| matches!(output, Output::Drop { cause: DropCause::Late, .. })));
}

#[test]
fn one_of_three_that_is_silent_is_dropped_after_the_time_out() {
    let mut bench = Bench::new(3);
    let (dropped, out) = pass(&mut bench, 2 * TIMEOUT_MS, &[], &[1]);
    assert_eq!(dropped, [(TIMEOUT_MS + 1250, 1)], "the first PING is sent after a second");
    assert!(drops(&out)[0].1.contains("not even to PING"));
}

#[test]
fn two_of_three_on_one_disk_are_waited_for() {
    let mut bench = Bench::new(3);
    write(&mut bench, &[1, 2], &[]);
    let (dropped, out) = pass(&mut bench, LATE_LIMIT_MS, &[1, 2], &[]);
    assert_eq!(dropped, []);
    assert_eq!(awaited(&out), [(1, false), (2, false)], "reported once");
    // The disk has written.
    let mut out = bench.reply(1, 0, Ok(()));
    out.extend(bench.reply(2, 0, Ok(())));
    assert_eq!(completed(&out, 0), Some(Ok(())));
    let (dropped, out) = pass(&mut bench, LATE_LIMIT_MS + 1000, &[], &[]);
    assert_eq!((dropped, prompt(&out)), (vec![], vec![1, 2]));
}

#[test]
fn one_that_is_a_moment_ahead_of_the_others_on_its_disk_drops_none_of_them() {
    let mut bench = Bench::new(3);
    write(&mut bench, &[1], &[]);
    pass(&mut bench, TIMEOUT_MS / 2 - 500, &[1], &[]);
    // Replica 2 has answered the first and hangs with the second.
    let out = bench.submit(1, WRITE, 5);
    answer_but(&mut bench, out, &[1, 2], &[]);
    let (dropped, _) = pass(&mut bench, TIMEOUT_MS + 2000, &[1, 2], &[]);
    assert_eq!(dropped, []);
    bench.reply(2, 1, Ok(()));
    let since_ms = bench.now_ms;
    let (dropped, _) = pass(&mut bench, 3 * TIMEOUT_MS, &[1], &[]);
    assert_eq!(
        dropped,
        [(since_ms + TIMEOUT_MS / 2, 1)],
        "the others have been able to continue for a while"
    );
}

#[test]
fn disks_that_hang_for_longer_than_the_limit_are_waited_for_as_others_cannot_help() {
    let mut bench = Bench::new(3);
    write(&mut bench, &[1, 2], &[]);
    let (dropped, out) = pass(&mut bench, 3 * LATE_LIMIT_MS, &[1, 2], &[]);
    assert_eq!((dropped, is_frozen(&out)), (vec![], false));
    // One of the disks has written: the volume continues, and drops the other replica.
    bench.reply(1, 0, Ok(()));
    let since_ms = bench.now_ms;
    let (dropped, out) = pass(&mut bench, since_ms + TIMEOUT_MS, &[2], &[]);
    assert_eq!((dropped, prompt(&out)), (vec![(since_ms + TIMEOUT_MS / 2, 2)], vec![1]));
    assert_eq!(completed(&answer_but(&mut bench, out, &[2], &[]), 0), None);
    assert_eq!(completed(&bench.apply(Event::Closed { queue: 0, peer: 2 }), 0), Some(Ok(())));
}

/// The slow replica does all reads, and answers each after more than half of the time-out.
#[test]
fn a_disk_that_hangs_is_given_up_at_the_limit_if_the_other_is_only_slow() {
    let mut config = config(2, 2);
    config.peers[0].local = true;
    let mut bench = Bench::with(&config);
    write(&mut bench, &[1], &[]);
    let mut dropped = Vec::new();
    bench.submit(3, Operation::Read, 100);
    // Two reads at a time: one of them is always older than half of the time-out, but for a moment.
    for (done, next) in [(3, 4), (4, 3)].into_iter().cycle().take(60) {
        let out = bench.submit(next, Operation::Read, 100);
        assert_eq!(sent_to(&out, next), [0]);
        let until_ms = bench.now_ms + TIMEOUT_MS / 2 - 250;
        dropped = pass(&mut bench, until_ms, &[0, 1], &[]).0;
        if !dropped.is_empty() {
            break;
        }
        bench.reply(0, done, Ok(()));
    }
    let [(at_ms, 1)] = dropped[..] else { panic!("{dropped:?}") };
    assert!((LATE_LIMIT_MS..LATE_LIMIT_MS + 2 * TIMEOUT_MS).contains(&at_ms), "{at_ms}");
}

#[test]
fn a_connection_that_is_dead_while_others_answer_is_noticed() {
    let mut bench = Bench::new(2);
    write(&mut bench, &[1], &[]);
    let mut dropped = Vec::new();
    while dropped.is_empty() && bench.now_ms < LATE_LIMIT_MS {
        bench.now_ms += 250;
        let mut out = bench.apply(Event::Tick { now_ms: bench.now_ms });
        out.retain(|output| !matches!(output, Output::Ping { peer: 1, queue: 1 }));
        let out = answer_but(&mut bench, out, &[1], &[]);
        dropped.extend(drops(&out).into_iter().map(|(peer, reason)| (peer, reason.to_owned())));
    }
    let [(1, reason)] = &dropped[..] else { panic!("{dropped:?}") };
    assert!(reason.contains("not even to PING"), "{reason}");
    assert!(bench.now_ms < 2 * TIMEOUT_MS, "as a silent one: {}", bench.now_ms);
}

#[test]
fn replicas_that_do_not_answer_ping_for_the_limit_are_dropped() {
    let mut bench = Bench::new(3);
    write(&mut bench, &[], &[1, 2]);
    let (dropped, out) = pass(&mut bench, LATE_LIMIT_MS + 2000, &[], &[1, 2]);
    assert_eq!(
        dropped,
        [(LATE_LIMIT_MS + 1250, 1), (LATE_LIMIT_MS + 1250, 2)],
        "the first PING is sent after a second"
    );
    assert!(is_frozen(&out));
}

#[test]
fn a_member_that_is_late_already_has_its_time_to_store_a_view() {
    let mut bench = Bench::new(3);
    write(&mut bench, &[1, 2], &[]);
    let (dropped, _) = pass(&mut bench, 2 * LATE_LIMIT_MS, &[1, 2], &[]);
    assert_eq!(dropped, []);
    let out = bench.lose(2);
    answer_but(&mut bench, out, &[1], &[]);
    let (dropped, out) = pass(&mut bench, 3 * LATE_LIMIT_MS, &[1], &[]);
    assert_eq!((dropped, is_frozen(&out)), (vec![], false));
    let (dropped, _) = pass(&mut bench, 3 * LATE_LIMIT_MS + 500, &[1], &[]);
    assert!(matches!(dropped[..], [(_, 1)]), "{dropped:?}");
}

#[test]
fn a_change_of_the_view_is_waited_for_up_to_the_limit() {
    let mut bench = Bench::new(3);
    let out = bench.lose(2);
    answer_but(&mut bench, out, &[0, 1], &[]);
    let (dropped, out) = pass(&mut bench, LATE_LIMIT_MS + 1000, &[0, 1], &[]);
    assert_eq!(dropped[0], (LATE_LIMIT_MS + 250, 0), "replicas that have come back need a new start");
    assert!(is_frozen(&out));
}

#[test]
fn without_half_of_two_the_arbiter_is_asked_later_if_the_other_half_answers_ping() {
    let mut bench = Bench::new(2);
    write(&mut bench, &[1], &[]);
    let (dropped, out) = pass(&mut bench, 4 * TIMEOUT_MS, &[1], &[]);
    assert_eq!(dropped, [(3 * TIMEOUT_MS + 250, 1)]);
    assert_eq!(awaited(&out), [(1, false)]);
    assert!(out.iter().any(|output| matches!(output, Output::AskGrant { .. })));

    let mut bench = Bench::new(2);
    write(&mut bench, &[], &[1]);
    let (dropped, _) = pass(&mut bench, 2 * TIMEOUT_MS, &[], &[1]);
    assert_eq!(dropped, [(TIMEOUT_MS + 1250, 1)], "its host may be gone");
}

#[test]
fn no_other_member_is_dropped_while_the_arbiter_is_asked() {
    let mut bench = Bench::new(4);
    bench.lose(2);
    let out = bench.lose(3);
    let out = answer_but(&mut bench, out, &[], &[]);
    assert!(out.iter().any(|output| matches!(output, Output::AskGrant { .. })), "{out:?}");
    let (dropped, out) = pass(&mut bench, 2 * TIMEOUT_MS, &[], &[1]);
    assert_eq!((dropped, is_frozen(&out)), (vec![], false));
}

#[test]
fn reads_are_sent_to_members_that_answer() {
    let mut bench = Bench::new(3);
    write(&mut bench, &[1, 2], &[]);
    pass(&mut bench, TIMEOUT_MS, &[1, 2], &[]);
    for slot in 1..5 {
        let out = bench.submit(slot, Operation::Read, 100);
        assert_eq!(sent_to(&out, slot), [0]);
    }
}

#[test]
fn an_engine_with_half_of_the_view_sends_no_new_requests() {
    let mut bench = Bench::new(4);
    write(&mut bench, &[1], &[2, 3]);
    // Replica 1 answers PING, but is too slow to count for the continuation.
    let (dropped, _) = pass(&mut bench, 2 * TIMEOUT_MS, &[1], &[2, 3]);
    assert_eq!(dropped, []);
    let out = bench.submit(3, Operation::Read, 100);
    assert_eq!(sent_to(&out, 3), [], "the other half may have the arbiter");
}

#[test]
fn a_volume_reports_awaited_members_before_it_drops_them() {
    let mut config = config(2, 2);
    config.replica_timeout_ms = LATE_LIMIT_MS;
    let mut bench = Bench::with(&config);
    write(&mut bench, &[1], &[]);
    let (dropped, out) = pass(&mut bench, LATE_LIMIT_MS / 2 + 250, &[1], &[]);
    assert_eq!((dropped, awaited(&out)), (vec![], vec![(1, false)]));
}

#[test]
fn no_new_requests_are_sent_while_too_few_members_answer() {
    let mut bench = Bench::new(3);
    let (dropped, out) = pass(&mut bench, 2 * TIMEOUT_MS, &[], &[1, 2]);
    assert_eq!((dropped, awaited(&out)), (vec![], vec![(1, true), (2, true)]));
    let out = bench.submit(3, Operation::Read, 0);
    assert_eq!(sent_to(&out, 3), [], "a newer engine may have the other two");
    (0..2).for_each(|queue| drop(bench.apply(Event::Pong { peer: 1, queue, free_mib: None })));
    let (dropped, out) = pass(&mut bench, 3 * TIMEOUT_MS, &[], &[2]);
    assert_eq!(completed(&out, 3), Some(Ok(())));
    assert!(matches!(dropped[..], [(_, 2)]), "the others can go on without it: {dropped:?}");
}

#[test]
fn a_rebuilding_replica_is_dropped_after_the_time_out() {
    let mut bench = Bench::with(&config(3, 2));
    let rebuild = Event::Rebuild { peer: 2, missing: Box::new(region_set(&[0])) };
    let out = bench.apply(rebuild);
    answer_but(&mut bench, out, &[2], &[]);
    let (dropped, out) = pass(&mut bench, 2 * TIMEOUT_MS, &[2], &[]);
    assert_eq!((dropped, awaited(&out)), (vec![(TIMEOUT_MS + 250, 2)], vec![]));
}

#[test]
fn a_view_that_is_not_stored_makes_late() {
    let mut bench = Bench::new(4);
    let out = bench.lose(3);
    answer_but(&mut bench, out, &[2], &[]);
    let (dropped, _) = pass(&mut bench, 4 * TIMEOUT_MS, &[2], &[]);
    assert_eq!(dropped, [(3 * TIMEOUT_MS + 250, 2)], "half of the view is left without it");
}

#[test]
fn a_mark_that_is_not_answered_makes_late() {
    let mut bench = super::copies::with_cold_region();
    bench.reply(0, COPY, Ok(()));
    bench.reply(1, COPY, Ok(()));
    bench.apply(Event::Marked { peer: 0, mark: FIRST_CLEAR });
    let sent_at_ms = bench.now_ms;
    let (dropped, _) = pass(&mut bench, sent_at_ms + 4 * TIMEOUT_MS, &[1], &[]);
    assert_eq!(dropped, [(sent_at_ms + 3 * TIMEOUT_MS + 250, 1)]);
}

/// The first answer arrives with the first look at the clock. The others are still in the sockets.
#[test]
fn no_member_is_late_because_the_process_was_paused() {
    let mut bench = Bench::new(3);
    write(&mut bench, &[1, 2], &[]);
    let out = bench.apply(Event::Tick { now_ms: 60_000 });
    assert_eq!((drops(&out), is_frozen(&out)), (vec![], false));
    answer_but(&mut bench, out, &[1, 2], &[]);
    bench.now_ms = 60_000;
    bench.reply(1, 0, Ok(()));
    let (dropped, _) = pass(&mut bench, 60_000 + TIMEOUT_MS, &[2], &[]);
    assert!(matches!(dropped[..], [(_, 2)]), "it has had its time: {dropped:?}");
}

#[test]
fn large_zeroes_may_take_longer() {
    let mut config = config(3, 3);
    config.size_bytes = 32 << 20;
    config.dirty = RegionSet::empty(Regions::of(config.size_bytes).count());
    let mut bench = Bench::with(&config);
    let range = ByteRange::new(0, config.size_bytes).unwrap();
    let request = Request { slot: 0, operation: Operation::WriteZeroes { fua: false }, range };
    let out = bench.apply(Event::Submit { queue: 0, request });
    answer_but(&mut bench, out, &[1], &[]);
    let (dropped, _) = pass(&mut bench, 3 * TIMEOUT_MS, &[1], &[]);
    assert_eq!(dropped, [(TIMEOUT_MS + 4250, 1)], "a second for each 8 MiB");
}

mod flight {
    use super::*;

    fn bench(bytes: u64, requests: usize) -> Bench {
        let mut config = config(3, 3);
        config.flight_limits = FlightLimits { bytes, requests };
        Bench::with(&config)
    }

    fn submit(bench: &mut Bench, slot: u16, blocks: u64) -> bool {
        let range = ByteRange::new(u64::from(slot) * 8 * 4096, blocks * 4096).unwrap();
        let out = bench.apply(Event::Submit { queue: 0, request: Request { slot, operation: WRITE, range } });
        !sent_to(&out, slot).is_empty()
    }

    fn finish(bench: &mut Bench, slot: u16) -> Outputs {
        (0..3).flat_map(|peer| bench.reply(peer, slot, Ok(()))).collect()
    }

    #[test]
    fn requests_over_the_limit_wait_and_small_ones_do_not_overtake_them() {
        let mut bench = bench(4 * 4096, 100);
        assert!(submit(&mut bench, 0, 3));
        assert!(!submit(&mut bench, 1, 2), "five blocks are too many");
        assert!(!submit(&mut bench, 2, 1), "it would have room, but came later");
        let out = finish(&mut bench, 0);
        assert_eq!((sent_to(&out, 1).len(), sent_to(&out, 2).len()), (3, 3));
    }

    #[test]
    fn a_request_larger_than_the_limit_is_sent_alone() {
        let mut bench = bench(4096, 100);
        assert!(submit(&mut bench, 0, 3));
        assert!(!submit(&mut bench, 1, 3));
        assert!(!sent_to(&finish(&mut bench, 0), 1).is_empty());
    }

    #[test]
    fn requests_are_counted_too() {
        let mut bench = bench(4 << 20, 2);
        assert!(submit(&mut bench, 0, 1) && submit(&mut bench, 1, 1));
        assert!(!submit(&mut bench, 2, 1));
        assert!(!sent_to(&finish(&mut bench, 1), 2).is_empty());
    }

    #[test]
    fn reads_do_not_wait_for_writes_that_hang() {
        let mut bench = bench(4096, 100);
        assert!(submit(&mut bench, 0, 1) && !submit(&mut bench, 1, 1));
        let out = bench.submit(2, Operation::Read, 100);
        assert_eq!(sent_to(&out, 2).len(), 1);
    }

    #[test]
    fn flushes_count_as_requests() {
        let mut bench = bench(4 << 20, 1);
        let out = bench.submit(0, Operation::Flush, 0);
        assert_eq!(sent_to(&out, 0).len(), 3);
        assert!(!submit(&mut bench, 1, 1));
        assert!(!sent_to(&finish(&mut bench, 0), 1).is_empty());
    }

    #[test]
    fn the_time_of_a_request_begins_when_it_is_sent() {
        let mut bench = bench(4096, 100);
        assert!(submit(&mut bench, 0, 1));
        assert!(!submit(&mut bench, 1, 1));
        let slow = [0, 1, 2];
        pass(&mut bench, TIMEOUT_MS, &slow, &[]);
        finish(&mut bench, 0);
        let (dropped, out) = pass(&mut bench, 2 * TIMEOUT_MS, &slow, &[]);
        assert_eq!((dropped, awaited(&out)), (vec![], vec![]));
    }

    #[test]
    fn a_read_that_is_sent_again_counts_once() {
        let mut bench = bench(4096, 100);
        let out = bench.submit(0, Operation::Read, 0);
        let reader = sent_to(&out, 0)[0];
        let out = bench.lose(reader);
        let out = bench.answer(out, &[]);
        assert_eq!(completed(&out, 0), Some(Ok(())));
        assert!(submit(&mut bench, 1, 1), "nothing is left in flight");
    }
}

#[test]
fn a_read_after_a_pause_is_sent_once_a_majority_has_answered() {
    let mut bench = Bench::new(3);
    bench.core.runs_at(60_000);
    assert_eq!(sent_to(&bench.submit(0, Operation::Read, 0), 0), []);
    let pings = bench.apply(Event::Tick { now_ms: 60_000 });
    let pongs = pings.iter().filter_map(answer_to).map(|(_, event)| event);
    let pongs: Vec<Event> = pongs.filter(|event| matches!(event, Event::Pong { queue: 0, .. })).collect();
    assert_eq!(pongs.len(), 3);
    let mut pongs = pongs.into_iter();
    assert_eq!(sent_to(&bench.apply(pongs.next().unwrap()), 0), []);
    assert_eq!(sent_to(&bench.apply(pongs.next().unwrap()), 0).len(), 1);
}
