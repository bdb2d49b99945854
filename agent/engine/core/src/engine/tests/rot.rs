//! Members that know that their disk has changed something.

use super::*;
use crate::event::ScrubConfig;

/// The first slot for copies.
const COPY: u16 = 8;
const BLOCK: u64 = 4096;

/// Returns the messages about the first copy slot: peer, operation, offset, and bytes.
fn parts(out: &[Output]) -> Vec<(PeerIndex, Operation, u64, u64)> {
    let part = |output: &Output| match output {
        Output::Send { peer, slot, operation, range, .. } if *slot == id(COPY) => {
            Some((*peer, *operation, range.offset(), range.length()))
        }
        _ => None,
    };
    out.iter().filter_map(part).collect()
}

fn rot(out: &[Output]) -> Vec<(PeerIndex, bool)> {
    let found = |output: &Output| match output {
        Output::RotFound { peer, is_copied, .. } => Some((*peer, *is_copied)),
        _ => None,
    };
    out.iter().filter_map(found).collect()
}

fn rotten(bench: &mut Bench, peer: PeerIndex) -> Outputs {
    bench.reply(peer, COPY, Err(Errno::ROTTEN))
}

/// Returns members that may differ in the first region.
fn unequal(members: u64) -> (Bench, Outputs) {
    let mut config = config(members, members);
    config.dirty = region_set(&[0]);
    let mut bench = Bench::with(&config);
    let out = bench.tick(1);
    (bench, out)
}

#[test]
fn a_rotten_source_becomes_a_target() {
    let (mut bench, out) = unequal(3);
    assert_eq!(parts(&out), [(0, Operation::CheckedRead, 0, 65536)]);
    let out = rotten(&mut bench, 0);
    let half = 8 * BLOCK;
    assert_eq!((parts(&out), rot(&out)), (vec![(1, Operation::CheckedRead, 0, half)], vec![]));
    let out = bench.reply(1, COPY, Ok(()));
    assert_eq!(parts(&out), [(0, WRITE, 0, half), (2, WRITE, 0, half)]);
    bench.reply(0, COPY, Ok(()));
    let out = bench.reply(2, COPY, Ok(()));
    assert_eq!(parts(&out), [(1, Operation::CheckedRead, half, half)], "the other may hold more rot");
    // It is asked if no other one has the blocks.
    let out = rotten(&mut bench, 1);
    assert_eq!(parts(&out), [(2, Operation::CheckedRead, half, half / 2)]);
    let out = rotten(&mut bench, 2);
    assert_eq!(parts(&out), [(0, Operation::CheckedRead, half, half / 4)]);
    let out = bench.reply(0, COPY, Ok(()));
    assert!(bench.answer(out, &[]).contains(&Output::Resynced));
    assert_eq!(bench.core.membership().view().members.len(), 3, "it stays a member");
}

#[test]
fn a_sound_member_repairs_the_rotten_source_and_the_rebuilding_replica() {
    let mut bench = Bench::with(&config(3, 2));
    let out = bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[1])) });
    let [(source, Operation::CheckedRead, ..)] = parts(&out)[..] else { panic!("{out:?}") };
    let other = 1 - source;
    for blocks in [8, 4, 2, 1] {
        let out = rotten(&mut bench, source);
        let half = (source, Operation::CheckedRead, 65536, blocks * BLOCK);
        assert_eq!(parts(&out), [half], "the other may hold rot, too");
    }
    let out = rotten(&mut bench, source);
    assert_eq!(parts(&out), [(other, Operation::CheckedRead, 65536, BLOCK)]);
    let out = bench.reply(other, COPY, Ok(()));
    let mut to = parts(&out);
    to.sort_unstable_by_key(|(peer, ..)| *peer);
    assert_eq!(to, [(source, WRITE, 65536, BLOCK), (2, WRITE, 65536, BLOCK)]);
    bench.reply(source, COPY, Ok(()));
    let out = bench.reply(2, COPY, Ok(()));
    assert_eq!(parts(&out), [(source, Operation::CheckedRead, 65536 + BLOCK, BLOCK)]);
    let out = bench.reply(source, COPY, Ok(()));
    assert_eq!(parts(&out), [(2, WRITE, 65536 + BLOCK, BLOCK)], "no sound block of a member is replaced");
    let out = bench.reply(2, COPY, Ok(()));
    let next = (source, Operation::CheckedRead, 65536 + 2 * BLOCK, 2 * BLOCK);
    assert_eq!(parts(&out), [next], "pieces without rot become larger");
    assert!(bench.answer(out, &[]).contains(&Output::Rebuilt { peer: 2 }));
}

#[test]
fn a_rotten_member_without_space_for_its_repair_stays() {
    let mut bench = Bench::with(&config(3, 2));
    let out = bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[1])) });
    let [(source, Operation::CheckedRead, ..)] = parts(&out)[..] else { panic!("{out:?}") };
    (0..5).for_each(|_| drop(rotten(&mut bench, source)));
    bench.reply(1 - source, COPY, Ok(()));
    bench.reply(source, COPY, Err(Errno::NO_SPACE));
    let out = bench.reply(2, COPY, Ok(()));
    assert!(bench.answer(out, &[]).contains(&Output::Rebuilt { peer: 2 }));
    assert_eq!(bench.core.membership().view().members.len(), 3, "all members have stayed");
}

#[test]
fn if_all_members_hold_rot_only_blocks_lost_by_all_are_copied_as_rot() {
    let (mut bench, _) = unequal(2);
    let out = rotten(&mut bench, 0);
    assert_eq!(parts(&out), [(1, Operation::CheckedRead, 0, 8 * BLOCK)]);
    let mut out = rotten(&mut bench, 1);
    for blocks in [4, 2, 1] {
        assert_eq!(parts(&out), [(0, Operation::CheckedRead, 0, blocks * BLOCK)]);
        out = rotten(&mut bench, 0);
    }
    // The first block is rotten in both.
    assert_eq!((parts(&out), rot(&out)), (vec![(1, Operation::CheckedRead, 0, BLOCK)], vec![(0, false)]));
    let out = rotten(&mut bench, 1);
    assert_eq!((parts(&out), rot(&out)), (vec![(0, Operation::Read, 0, BLOCK)], vec![(1, false), (0, true)]));
    let out = bench.reply(0, COPY, Ok(()));
    assert_eq!(parts(&out), [(1, Operation::WriteRot, 0, BLOCK)], "the target must not take it for data");
    let out = bench.reply(1, COPY, Ok(()));
    // Of the second block one has a sound copy.
    assert_eq!(parts(&out), [(0, Operation::CheckedRead, BLOCK, BLOCK)]);
    assert_eq!(parts(&rotten(&mut bench, 0)), [(1, Operation::CheckedRead, BLOCK, BLOCK)]);
    let out = bench.reply(1, COPY, Ok(()));
    assert_eq!(parts(&out), [(0, WRITE, BLOCK, BLOCK)]);
    let out = bench.reply(0, COPY, Ok(()));
    // A former source is a target again.
    assert_eq!(parts(&out), [(0, Operation::CheckedRead, 2 * BLOCK, BLOCK)]);
    let out = bench.reply(0, COPY, Ok(()));
    assert_eq!(parts(&out), [(1, WRITE, 2 * BLOCK, BLOCK)]);
    assert!(bench.answer(out, &[]).contains(&Output::Resynced));
}

/// The slot for copies that is kept for requests that have failed.
const RESYNC: u16 = 10;

/// Makes a write of three blocks that has found no space on `full`, and failed. `answer` returns a member's
/// answer to a part of the resync.
fn resync(
    members: u64,
    full: &[PeerIndex],
    answer: impl Fn(PeerIndex, Operation, u64) -> Result<(), Errno>,
) -> (Bench, Outputs) {
    let mut bench = Bench::new(members);
    let range = ByteRange::new(0, 3 * BLOCK).unwrap();
    let mut outputs =
        bench.apply(Event::Submit { queue: 0, request: Request { slot: 0, operation: WRITE, range } });
    let mut at = 0;
    while at < outputs.len() {
        let event = match &outputs[at] {
            Output::Send { peer, slot, .. } if *slot == id(0) => {
                let outcome = if full.contains(peer) { Err(Errno::NO_SPACE) } else { Ok(()) };
                Some(Event::Reply { peer: *peer, slot: *slot, outcome })
            }
            Output::Send { peer, slot, operation, range, .. } if *slot == id(RESYNC) => {
                let last = (range.end() - 1) / BLOCK;
                let blocks = range.offset() / BLOCK..=last;
                let outcome = blocks.into_iter().try_for_each(|block| answer(*peer, *operation, block));
                Some(Event::Reply { peer: *peer, slot: *slot, outcome })
            }
            output => answer_to(output).map(|(_, event)| event),
        };
        outputs.extend(event.map(|event| bench.apply(event)).unwrap_or_default());
        at += 1;
    }
    (bench, outputs)
}

/// For each part that is written: the replica, the first block, and the number of blocks.
fn written(out: &[Output]) -> Vec<(PeerIndex, u64, u64)> {
    let part = |output: &Output| match output {
        Output::Send { peer, slot, operation: WRITE, range, .. } if *slot == id(RESYNC) => {
            Some((*peer, range.offset() / BLOCK, range.length() / BLOCK))
        }
        _ => None,
    };
    out.iter().filter_map(part).collect()
}

#[test]
fn a_resync_copies_no_rot_of_its_source() {
    let is_rotten = |peer, operation, block| match (peer, operation, block) {
        (1, Operation::CheckedRead, 1) => Err(Errno::ROTTEN),
        _ => Ok(()),
    };
    let (_, out) = resync(2, &[1], is_rotten);
    assert_eq!(
        written(&out),
        [(0, 0, 1), (1, 1, 1), (0, 2, 1)],
        "the second block is of the other one: {out:?}"
    );
    assert_eq!((rot(&out), completed(&out, 0)), (vec![(1, false)], Some(Err(Errno::NO_SPACE))));
}

#[test]
fn another_member_without_space_is_the_source_of_a_block_first() {
    let is_rotten = |peer, operation, block| match (peer, operation, block) {
        (1, Operation::CheckedRead, 1) => Err(Errno::ROTTEN),
        _ => Ok(()),
    };
    let (_, out) = resync(3, &[1, 2], is_rotten);
    let mut of_second: Vec<_> = written(&out).into_iter().filter(|(_, block, _)| *block == 1).collect();
    of_second.sort_unstable();
    assert_eq!(of_second, [(0, 1, 1), (1, 1, 1)], "{out:?}");
}

/// The replica knows that it holds rot there, and gets the other blocks.
#[test]
fn a_member_without_space_for_a_sound_block_stays() {
    let answer = |peer, operation, block| match (peer, operation, block) {
        (1, Operation::CheckedRead, 1) => Err(Errno::ROTTEN),
        (1, WRITE, 1) => Err(Errno::NO_SPACE),
        _ => Ok(()),
    };
    let (bench, out) = resync(2, &[1], answer);
    assert_eq!(written(&out), [(0, 0, 1), (1, 1, 1), (0, 2, 1)], "{out:?}");
    assert_eq!((drops(&out), completed(&out, 0)), (vec![], Some(Err(Errno::NO_SPACE))));
    assert_eq!(bench.core.membership().view().members.len(), 2);
}

#[test]
fn a_block_that_all_have_lost_is_copied_and_reported() {
    let answer = |_, operation, block| match (operation, block) {
        (Operation::CheckedRead, 1) => Err(Errno::ROTTEN),
        _ => Ok(()),
    };
    let (_, out) = resync(2, &[1], answer);
    assert_eq!(rot(&out), [(1, false), (0, false), (1, true)]);
    assert_eq!(completed(&out, 0), Some(Err(Errno::NO_SPACE)));
}

/// Scrubs two members; `sums` returns the answer of a member for one block or for all of them.
fn scrub(sums: impl Fn(PeerIndex, ByteRange) -> Result<u32, Errno>) -> Outputs {
    let mut bench = Bench::new(2);
    let mut outputs = bench.apply(Event::Scrub(Some(ScrubConfig { bytes_per_s: None, repair: true })));
    let mut at = 0;
    while at < outputs.len() {
        let event = match &outputs[at] {
            Output::Send { peer, slot, operation: Operation::Verify, range, .. } => Some(Event::Verified {
                peer: *peer,
                slot: *slot,
                outcome: sums(*peer, *range).map(VolumeCheck::unconfirmed),
            }),
            output => answer_to(output).map(|(_, event)| event),
        };
        if let Some(event) = event {
            outputs.extend(bench.apply(event));
        }
        at += 1;
    }
    assert!(outputs.contains(&Output::ScrubDone));
    outputs
}

fn found(out: &[Output]) -> Vec<(u64, u64, Vec<PeerIndex>, bool)> {
    let one = |output: &Output| match output {
        Output::ScrubFound { range, odd, repaired } => {
            Some((range.offset() / BLOCK, range.length() / BLOCK, odd.clone(), *repaired))
        }
        _ => None,
    };
    out.iter().filter_map(one).collect()
}

#[test]
fn a_scrub_of_two_repairs_the_one_that_holds_rot() {
    let has = |range: ByteRange, block: u64| range.offset() <= block * BLOCK && block * BLOCK < range.end();
    let out = scrub(|peer, range| match peer {
        0 if has(range, 3) => Err(Errno::ROTTEN),
        1 if has(range, 5) => Err(Errno::ROTTEN),
        _ => Ok(7),
    });
    assert_eq!(found(&out), [(3, 1, vec![0], true), (5, 1, vec![1], true)], "each from the other");
    let writes: Vec<_> = parts(&out).into_iter().filter(|(_, operation, ..)| *operation == WRITE).collect();
    assert_eq!(writes, [(0, WRITE, 3 * BLOCK, BLOCK), (1, WRITE, 5 * BLOCK, BLOCK)]);
}

/// Two of four hold rot, and one of them has no space for its repair.
#[test]
fn a_repair_that_a_member_has_no_space_for_is_not_done() {
    for is_full in [false, true] {
        let mut bench = Bench::new(4);
        let mut outputs = bench.apply(Event::Scrub(Some(ScrubConfig { bytes_per_s: None, repair: true })));
        let mut at = 0;
        while at < outputs.len() {
            let event = match &outputs[at] {
                Output::Send { peer, slot, operation: Operation::Verify, range, .. }
                    if *peer < 2 && range.offset() == 0 =>
                {
                    Some(Event::Verified { peer: *peer, slot: *slot, outcome: Err(Errno::ROTTEN) })
                }
                Output::Send { peer: 1, slot, operation: Operation::Write { .. }, .. } if is_full => {
                    Some(Event::Reply { peer: 1, slot: *slot, outcome: Err(Errno::NO_SPACE) })
                }
                output => answer_to(output).map(|(_, event)| event),
            };
            outputs.extend(event.map(|event| bench.apply(event)).unwrap_or_default());
            at += 1;
        }
        assert_eq!(found(&outputs), [(0, 1, vec![0, 1], !is_full)], "{outputs:?}");
        assert_eq!(bench.core.membership().view().members.len(), 4);
    }
}

#[test]
fn a_scrub_repairs_no_block_without_a_proven_source() {
    let has = |range: ByteRange, block: u64| range.offset() <= block * BLOCK && block * BLOCK < range.end();
    // The members differ in block 5, and no sum of it is known.
    let out = scrub(|peer, range| match peer {
        0 if has(range, 3) => Err(Errno::ROTTEN),
        _ if has(range, 5) => Ok(u32::from(peer)),
        _ => Ok(7),
    });
    assert_eq!(found(&out), [(3, 1, vec![0], true), (5, 1, vec![0, 1], false)]);
    let out = scrub(|_, range| if has(range, 3) { Err(Errno::ROTTEN) } else { Ok(7) });
    assert_eq!(found(&out), [(3, 1, vec![0, 1], false)], "both have lost it");
}

/// A scrub ends, or begins again, while the members are compared. One of them knows that it holds rot
/// somewhere in the piece, and the other may be wrong in another block of it.
#[test]
fn a_piece_with_rot_is_not_repaired_as_a_whole_after_its_scrub_has_ended() {
    for next in [None, Some(ScrubConfig { bytes_per_s: None, repair: true })] {
        let mut bench = Bench::new(2);
        let out = bench.apply(Event::Scrub(Some(ScrubConfig { bytes_per_s: None, repair: true })));
        let verify = |peer| (peer, Operation::Verify, 0, SIZE_BYTES);
        assert_eq!(parts(&out), [verify(0), verify(1)]);
        bench.apply(Event::Scrub(next));
        rotten(&mut bench, 0);
        let out = bench.apply(Event::Verified {
            peer: 1,
            slot: id(COPY),
            outcome: Ok(VolumeCheck::unconfirmed(7)),
        });
        assert_eq!(found(&out), []);
        let again = next.map_or(Vec::new(), |_| vec![verify(0), verify(1)]);
        assert_eq!(parts(&out), again);
    }
}

/// Returns members whose reads are verified.
fn verifying(members: u64) -> Bench {
    let config = CoreConfig { verify_reads: true, ..config(members, members) };
    Bench::with(&config)
}

#[test]
fn another_member_answers_a_read_of_rot_and_the_range_is_repaired() {
    let mut bench = verifying(2);
    let out = bench.submit(0, Operation::Read, 5);
    let [first] = sent_to(&out, 0)[..] else { panic!("{out:?}") };
    assert_eq!(sent(&out, 0), [(first, Operation::CheckedRead)]);
    let out = bench.reply(first, 0, Err(Errno::ROTTEN));
    let other = 1 - first;
    assert_eq!((sent(&out, 0), completed(&out, 0)), (vec![(other, Operation::CheckedRead)], None));
    assert_eq!(drops(&out), [], "it stays, and is repaired");
    let verified = bench.reply(other, 0, Ok(()));
    assert_eq!(completed(&verified, 0), Some(Ok(())));
    // The comparison waited for the read.
    let mut outputs = verified;
    let mut at = 0;
    while at < outputs.len() {
        let event = match &outputs[at] {
            Output::Send { peer, slot, operation: Operation::Verify, .. } => {
                let outcome =
                    if *peer == first { Err(Errno::ROTTEN) } else { Ok(VolumeCheck::unconfirmed(7)) };
                Some(Event::Verified { peer: *peer, slot: *slot, outcome })
            }
            output => answer_to(output).map(|(_, event)| event),
        };
        outputs.extend(event.map(|event| bench.apply(event)).unwrap_or_default());
        at += 1;
    }
    assert_eq!(found(&outputs), [(5, 1, vec![first], true)], "{outputs:?}");
}

#[test]
fn a_read_fails_if_every_member_holds_rot_there() {
    let mut bench = verifying(2);
    let out = bench.submit(0, Operation::Read, 0);
    let first = sent_to(&out, 0)[0];
    bench.reply(first, 0, Err(Errno::ROTTEN));
    let out = bench.reply(1 - first, 0, Err(Errno::ROTTEN));
    assert_eq!(completed(&out, 0), Some(Err(Errno::IO)));
    let is_reported =
        |output: &Output| matches!(output, Output::Failed(failure) if matches!(failure.cause, Cause::Rot(_)));
    assert!(out.iter().any(is_reported), "{out:?}");

    let mut bench = verifying(1);
    bench.submit(0, Operation::Read, 0);
    let out = bench.reply(0, 0, Err(Errno::ROTTEN));
    assert_eq!((completed(&out, 0), drops(&out)), (Some(Err(Errno::IO)), vec![]));
    assert_eq!(sent(&out, COPY), [], "no member has the right data");
}

/// Each has lost another block.
#[test]
fn a_read_is_put_together_from_blocks_of_several_members() {
    let mut bench = verifying(2);
    let range = ByteRange::new(512, 3 * BLOCK).unwrap();
    let request = Request { slot: 0, operation: Operation::Read, range };
    let mut outputs = bench.apply(Event::Submit { queue: 0, request });
    let (mut at, mut parts) = (0, Vec::new());
    while at < outputs.len() {
        let event = match &outputs[at] {
            Output::Send { peer, slot, operation: Operation::CheckedRead, range, buffer_offset }
                if *slot == id(0) =>
            {
                let lost = u64::from(*peer) * BLOCK..u64::from(*peer + 1) * BLOCK;
                let is_lost = range.offset() < lost.end && lost.start < range.end();
                if !is_lost {
                    parts.push((range.offset(), range.length(), u64::from(*buffer_offset)));
                }
                let outcome = if is_lost { Err(Errno::ROTTEN) } else { Ok(()) };
                Some(Event::Reply { peer: *peer, slot: *slot, outcome })
            }
            _ => None,
        };
        outputs.extend(event.map(|event| bench.apply(event)).unwrap_or_default());
        at += 1;
    }
    assert_eq!(completed(&outputs, 0), Some(Ok(())), "{outputs:?}");
    let expected = [(512, 3584, 0), (4096, 4096, 3584), (8192, 4096, 7680), (12288, 512, 11776)];
    assert_eq!(parts, expected);
}

/// A guest that reads the same again and again costs no log line each time.
#[test]
fn rot_that_cannot_be_repaired_is_reported_once() {
    let mut bench = verifying(2);
    let mut reports = 0;
    for _ in 0..3 {
        let mut outputs = bench.submit(0, Operation::Read, 0);
        let mut at = 0;
        while at < outputs.len() {
            let event = match &outputs[at] {
                Output::Send { peer, slot, operation: Operation::Verify, .. } => {
                    Some(Event::Verified { peer: *peer, slot: *slot, outcome: Err(Errno::ROTTEN) })
                }
                Output::Send { peer, slot, .. } => {
                    Some(Event::Reply { peer: *peer, slot: *slot, outcome: Err(Errno::ROTTEN) })
                }
                _ => None,
            };
            outputs.extend(event.map(|event| bench.apply(event)).unwrap_or_default());
            at += 1;
        }
        assert_eq!(completed(&outputs, 0), Some(Err(Errno::IO)));
        let is_report =
            |output: &&Output| matches!(output, Output::RotFound { .. } | Output::ScrubFound { .. });
        reports += outputs.iter().filter(is_report).count();
    }
    assert_eq!(reports, 2, "the rot, and that it stays");
}

/// A scrub that only reports leaves the repair to the read.
#[test]
fn a_read_repairs_rot_that_a_scrub_has_reported() {
    let mut bench = verifying(2);
    let mut outputs = bench.apply(Event::Scrub(Some(ScrubConfig { bytes_per_s: None, repair: false })));
    let mut at = 0;
    let mut is_read = false;
    loop {
        while at < outputs.len() {
            let event = match &outputs[at] {
                Output::Send { peer: 0, slot, operation: Operation::Verify, range, .. }
                    if range.offset() == 0 =>
                {
                    Some(Event::Verified { peer: 0, slot: *slot, outcome: Err(Errno::ROTTEN) })
                }
                Output::Send { peer: 0, slot, operation: Operation::CheckedRead, .. } if *slot == id(0) => {
                    Some(Event::Reply { peer: 0, slot: *slot, outcome: Err(Errno::ROTTEN) })
                }
                output => answer_to(output).map(|(_, event)| event),
            };
            outputs.extend(event.map(|event| bench.apply(event)).unwrap_or_default());
            at += 1;
        }
        if std::mem::replace(&mut is_read, true) {
            break;
        }
        // Twice: reads take turns.
        outputs.extend(bench.submit(0, Operation::Read, 0));
        outputs.extend(bench.submit(1, Operation::Read, 0));
    }
    assert_eq!(found(&outputs), [(0, 1, vec![0], false), (0, 1, vec![0], true)], "{outputs:?}");
}

/// The member stays: it may be needed, and lacks nothing that it had before.
#[test]
fn a_member_without_space_for_its_repair_stays() {
    let mut bench = verifying(2);
    let out = bench.submit(0, Operation::Read, 5);
    let first = sent_to(&out, 0)[0];
    let mut outputs = bench.reply(first, 0, Err(Errno::ROTTEN));
    let mut at = 0;
    while at < outputs.len() {
        let event = match &outputs[at] {
            Output::Send { peer, slot, operation: Operation::Verify, .. } => {
                let outcome =
                    if *peer == first { Err(Errno::ROTTEN) } else { Ok(VolumeCheck::unconfirmed(7)) };
                Some(Event::Verified { peer: *peer, slot: *slot, outcome })
            }
            Output::Send { peer, slot, operation: Operation::Write { .. }, .. } => {
                Some(Event::Reply { peer: *peer, slot: *slot, outcome: Err(Errno::NO_SPACE) })
            }
            output => answer_to(output).map(|(_, event)| event),
        };
        outputs.extend(event.map(|event| bench.apply(event)).unwrap_or_default());
        at += 1;
    }
    assert_eq!((found(&outputs), drops(&outputs)), (vec![(5, 1, vec![first], false)], vec![]), "{outputs:?}");
}

#[test]
fn reads_are_verified_only_if_that_was_asked_for() {
    let mut bench = Bench::new(2);
    let out = bench.submit(0, Operation::Read, 0);
    assert!(matches!(sent(&out, 0)[..], [(_, Operation::Read)]), "{out:?}");
}
