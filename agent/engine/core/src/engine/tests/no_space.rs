//! Modifications that find no space.

use super::*;

/// The slot for copies that is kept for this.
const COPY: u16 = 10;
const ZEROES: Operation = Operation::WriteZeroes { fua: false };

/// Returns a request that has found no space on `without_space` of three members.
fn torn(operation: Operation, without_space: &[PeerIndex]) -> (Bench, Outputs) {
    let mut bench = Bench::new(3);
    bench.submit(0, operation, 0);
    let mut out = Vec::new();
    for peer in 0..3 {
        let outcome = if without_space.contains(&peer) { Err(Errno::NO_SPACE) } else { Ok(()) };
        out = bench.reply(peer, 0, outcome);
    }
    (bench, out)
}

const NO_SPACE: Option<Result<(), Errno>> = Some(Err(Errno::NO_SPACE));

#[test]
fn a_member_without_space_leaves_if_most_have_done_the_request() {
    for operation in [WRITE, ZEROES] {
        let (mut bench, out) = torn(operation, &[1]);
        assert_eq!(drops(&out), [], "the others have not said whether they have space");
        let out = tick_with_pongs(&mut bench, 250);
        assert!(matches!(drops(&out)[..], [(1, reason)] if reason.contains("no space left")), "{out:?}");
        assert_eq!((sent(&out, COPY), completed(&out, 0)), (vec![], None));
        assert_eq!(sent_to(&bench.submit(1, Operation::Read, 0), 1), [], "replica 1 is still in the view");
        bench.close(1);
        bench.view_stored(0, 2);
        let out = bench.view_stored(2, 2);
        assert_eq!(completed(&out, 0), Some(Ok(())), "{operation:?}");
        assert_eq!(sent_to(&out, 1).len(), 1, "the read continues");
        let out_of_sync = bench.core.out_of_sync(1).unwrap();
        assert!(out_of_sync.contains(0), "it may have done a part");
    }
}

/// Two of three have done the request, and one of them may be needed to continue without the other.
#[test]
fn a_member_without_space_stays_while_another_one_is_late() {
    for is_back in [true, false] {
        let mut bench = Bench::new(3);
        bench.submit(0, WRITE, 0);
        bench.submit(1, WRITE, 100);
        for peer in [1, 2] {
            bench.reply(peer, 0, Ok(()));
        }
        tick_with_pongs(&mut bench, TIMEOUT_MS * 3 / 4);
        bench.reply(0, 1, Ok(()));
        bench.reply(1, 1, Ok(()));
        let out = bench.reply(0, 0, Err(Errno::NO_SPACE));
        assert_eq!((drops(&out), sent(&out, COPY), completed(&out, 0)), (vec![], vec![], None));
        if is_back {
            bench.reply(2, 1, Ok(()));
            let ticked = tick_with_pongs(&mut bench, TIMEOUT_MS);
            let dropped: Vec<PeerIndex> = drops(&ticked).iter().map(|(peer, _)| *peer).collect();
            assert_eq!(dropped, [0], "{ticked:?}");
        } else {
            let out = bench.lose(2);
            let out = bench.answer(out, &[]);
            assert_eq!(completed(&out, 0), NO_SPACE, "half of two: {out:?}");
            assert_eq!(bench.core.membership().view().members.len(), 2);
        }
    }
}

/// Two of five have no space, and one of them only for the second request.
#[test]
fn members_without_space_leave_one_after_another() {
    let mut bench = Bench::new(5);
    bench.submit(0, WRITE, 0);
    bench.submit(1, WRITE, 100);
    for peer in [0, 1, 2, 3] {
        bench.reply(peer, 0, Ok(()));
        bench.reply(peer, 1, if peer == 3 { Err(Errno::NO_SPACE) } else { Ok(()) });
    }
    bench.reply(4, 0, Err(Errno::NO_SPACE));
    let out = tick_with_pongs(&mut bench, 250);
    assert_eq!(drops(&out).len(), 1);
    let more = bench.reply(4, 1, Err(Errno::NO_SPACE));
    assert_eq!(drops(&more), [], "the answer of a replica that is about to leave counts for nothing");
    let mut out = bench.answer(out, &[]);
    out.extend(bench.close(4));
    out.extend(tick_with_pongs(&mut bench, 1500));
    let dropped: Vec<PeerIndex> = drops(&out).iter().map(|(peer, _)| *peer).collect();
    assert_eq!(dropped, [4, 3], "{out:?}");
    let mut out = bench.answer(out, &[]);
    out.extend(bench.close(3));
    let out = bench.answer(out, &[]);
    assert_eq!((completed(&out, 0), completed(&out, 1)), (Some(Ok(())), Some(Ok(()))));
    assert_eq!(bench.core.membership().view().members.len(), 3);
}

/// All replicas are on one disk, and two of three have got its last block.
#[test]
fn no_member_leaves_if_the_others_lack_space_to_store_the_view() {
    let (mut bench, _) = torn(WRITE, &[1]);
    bench.tick(50);
    let out = bench.apply(Event::Pong { peer: 0, queue: 0, free_mib: Some(1000) });
    assert_eq!((sent(&out, COPY), drops(&out)), (vec![], vec![]));
    let out = bench.apply(Event::Pong { peer: 2, queue: 0, free_mib: Some(15) });
    assert_eq!((sent(&out, COPY), drops(&out)), (vec![(1, Operation::CheckedRead)], vec![]));
    assert_eq!(completed(&bench.answer(out, &[]), 0), NO_SPACE);
    assert_eq!(bench.core.membership().view().members.len(), 3);
}

/// The disks may have become full since.
#[test]
fn an_answer_to_an_older_ping_does_not_prove_free_space() {
    let mut bench = Bench::new(3);
    assert!(bench.tick(1000).iter().any(|output| matches!(output, Output::Ping { peer: 0, .. })));
    // The clock advances only with a tick: this may be later than the PINGs.
    bench.submit(0, WRITE, 0);
    for (peer, outcome) in [(0, Ok(())), (1, Err(Errno::NO_SPACE)), (2, Ok(()))] {
        bench.reply(peer, 0, outcome);
    }
    for (peer, queue) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)] {
        let out = bench.apply(Event::Pong { peer, queue, free_mib: Some(1000) });
        assert_eq!(drops(&out), []);
    }
    let dropped: Vec<PeerIndex> =
        drops(&tick_with_pongs(&mut bench, 1200)).iter().map(|(peer, _)| *peer).collect();
    assert_eq!(dropped, [1], "they are asked again at once");
}

/// The arbiter may be away, and the disk of the other one may be as good as full.
#[test]
fn half_of_a_view_without_space_does_not_leave() {
    let mut bench = Bench::new(2);
    bench.submit(0, WRITE, 0);
    bench.reply(0, 0, Ok(()));
    let out = bench.reply(1, 0, Err(Errno::NO_SPACE));
    assert_eq!((sent(&out, COPY), drops(&out)), (vec![(1, Operation::CheckedRead)], vec![]));
    assert_eq!(completed(&bench.answer(out, &[]), 0), NO_SPACE);
    assert_eq!(bench.core.membership().view().members.len(), 2);
}

/// The client loses nothing if a discard fails.
#[test]
fn no_member_leaves_because_of_a_discard() {
    let (mut bench, out) = torn(Operation::Discard, &[1]);
    assert_eq!((sent(&out, COPY), drops(&out)), (vec![(1, Operation::CheckedRead)], vec![]));
    assert_eq!(completed(&bench.answer(out, &[]), 0), NO_SPACE);
}

/// Each may have done a part of it before it ran out of space.
#[test]
fn members_without_space_are_made_equal_before_the_request_fails() {
    for operation in [WRITE, ZEROES, Operation::Discard] {
        for without_space in [&[0, 2][..], &[1, 2], &[0, 1, 2]] {
            let (mut bench, out) = torn(operation, without_space);
            let source = without_space[0];
            assert_eq!(
                (sent(&out, COPY), completed(&out, 0)),
                (vec![(source, Operation::CheckedRead)], None)
            );
            assert_eq!(sent_to(&bench.submit(1, Operation::Read, 0), 1), [], "they may differ");
            let out = bench.reply(source, COPY, Ok(()));
            let others: Vec<PeerIndex> = (0..3).filter(|peer| *peer != source).collect();
            assert_eq!(sent_to(&out, COPY), others);
            bench.reply(others[0], COPY, Ok(()));
            let out = bench.reply(others[1], COPY, Ok(()));
            assert_eq!(completed(&out, 0), NO_SPACE, "{operation:?}");
            assert_eq!(sent_to(&out, 1).len(), 1, "a request that waited continues");
            assert_eq!(bench.core.membership().view().members.len(), 3, "all members have stayed");
            assert_eq!(bench.core.copy_progress().dirty_bytes, 65536);
        }
    }
}

#[test]
fn a_single_member_without_space_fails_the_request_at_once() {
    let mut bench = Bench::new(1);
    bench.submit(0, WRITE, 0);
    assert_eq!(completed(&bench.reply(0, 0, Err(Errno::NO_SPACE)), 0), NO_SPACE);
}

#[test]
fn a_write_is_good_when_those_without_space_have_left() {
    let (mut bench, _) = torn(WRITE, &[1, 2]);
    bench.lose(1);
    let out = bench.view_stored(0, 2);
    assert_eq!(completed(&out, 0), None);
    let out = bench.view_stored(2, 2);
    let out = bench.answer(out, &[]);
    assert_eq!(completed(&out, 0), NO_SPACE, "the copy had begun: from a remaining member");
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
fn zeroes_are_good_when_those_without_space_have_left_before() {
    let mut bench = Bench::new(3);
    bench.submit(0, ZEROES, 0);
    bench.reply(0, 0, Err(Errno::NO_SPACE));
    bench.lose(0);
    bench.view_stored(1, 2);
    bench.view_stored(2, 2);
    bench.reply(1, 0, Ok(()));
    assert_eq!(completed(&bench.reply(2, 0, Ok(())), 0), Some(Ok(())));
}

#[test]
fn two_requests_without_space_end() {
    for (of_1, expected) in [(Err(Errno::NO_SPACE), NO_SPACE), (Ok(()), Some(Ok(())))] {
        let mut bench = Bench::new(3);
        bench.submit(0, ZEROES, 0);
        bench.submit(1, ZEROES, 100);
        let mut out = Vec::new();
        for slot in [0, 1] {
            bench.reply(1, slot, of_1);
            bench.reply(2, slot, Ok(()));
        }
        for slot in [0, 1] {
            out.extend(bench.reply(0, slot, Err(Errno::NO_SPACE)));
        }
        if of_1.is_ok() {
            out.extend(tick_with_pongs(&mut bench, 250));
            out.extend(bench.close(0));
        }
        let out = bench.answer(out, &[]);
        assert_eq!((completed(&out, 0), completed(&out, 1)), (expected, expected));
        assert_eq!(bench.core.unfinished(), 0);
    }
}

/// All disks are full, and one had room for a little more than another.
#[test]
fn a_member_without_space_for_the_data_of_the_source_becomes_the_source() {
    let (mut bench, _) = torn(WRITE, &[0, 1, 2]);
    bench.reply(0, COPY, Ok(()));
    bench.reply(2, COPY, Ok(()));
    let out = bench.reply(1, COPY, Err(Errno::NO_SPACE));
    assert_eq!((sent(&out, COPY), drops(&out)), (vec![(1, Operation::CheckedRead)], vec![]));
    let out = bench.reply(1, COPY, Ok(()));
    assert_eq!(sent_to(&out, COPY), [0, 2]);
    bench.reply(2, COPY, Ok(()));
    assert_eq!(completed(&bench.reply(0, COPY, Ok(())), 0), NO_SPACE);
    assert_eq!(bench.core.membership().view().members.len(), 3);
}

/// Each member lacks the space for the data of another one, so no content is known to fit on all of them.
#[test]
fn a_member_that_cannot_be_made_equal_to_any_other_leaves() {
    let (mut bench, out) = torn(WRITE, &[0, 1]);
    let answer = |bench: &mut Bench, first: Outputs| {
        let (mut outputs, mut at) = (first, 0);
        while at < outputs.len() {
            let event = match &outputs[at] {
                Output::Send { peer, slot, operation: Operation::Write { .. }, .. } if *peer < 2 => {
                    Some(Event::Reply { peer: *peer, slot: *slot, outcome: Err(Errno::NO_SPACE) })
                }
                Output::Drop { peer, .. } => {
                    outputs.extend(bench.close(*peer));
                    None
                }
                output => answer_to(output).map(|(_, event)| event),
            };
            outputs.extend(event.map(|event| bench.apply(event)).unwrap_or_default());
            at += 1;
        }
        outputs
    };
    let out = answer(&mut bench, out);
    assert_eq!(drops(&out).len(), 1, "{out:?}");
    assert_eq!(completed(&out, 0), NO_SPACE);
    assert_eq!(bench.core.membership().view().members.len(), 2);
}

/// 32 MiB each: replicas that cannot punch write all of it, and have their time for that.
#[test]
fn a_flood_of_zeroes_is_sent_bit_by_bit() {
    let mut config = config(2, 2);
    config.size_bytes = 1 << 30;
    let regions = Regions::of(config.size_bytes).count();
    (config.dirty, config.out_of_sync) = (RegionSet::empty(regions), vec![RegionSet::empty(regions); 2]);
    let mut bench = Bench::with(&config);
    let zero = |bench: &mut Bench, slot: u16, operation| {
        let range = ByteRange::new(u64::from(slot) << 25, 32 << 20).unwrap();
        bench.apply(Event::Submit { queue: 0, request: Request { slot, operation, range } })
    };
    assert_eq!(sent_to(&zero(&mut bench, 0, ZEROES), 0), [0, 1]);
    assert_eq!(sent_to(&zero(&mut bench, 1, Operation::Discard), 1), [0, 1]);
    assert_eq!(sent_to(&zero(&mut bench, 2, Operation::Discard), 2), []);
    assert_eq!(sent_to(&bench.submit(5, WRITE, 200_000), 5), [0, 1], "others do not wait");
    bench.reply(0, 0, Ok(()));
    let out = bench.reply(1, 0, Ok(()));
    assert_eq!(sent_to(&out, 2), [0, 1]);
    assert_eq!(sent_to(&zero(&mut bench, 3, Operation::Discard), 3), [], "two of them are in flight");
}
