//! Resyncing members, clearing write intent, and scrubbing.

use std::num::NonZeroU64;

use shorthorn_types::{MarkAction, RegionsOf, is_current};

use super::*;
use crate::event::ScrubConfig;

/// The first slot for copies.
const COPY: u16 = 8;

/// Returns three members that may differ in `regions`, with replica 1 on this host. Background copies run
/// slowly.
fn unequal(regions: &[u32]) -> Bench {
    let mut config = config(3, 3);
    config.dirty = region_set(regions);
    config.peers[1].local = true;
    config.copy_slots = 2;
    config.copy_limits.bytes_per_s = NonZeroU64::new(64 << 10);
    Bench::with(&config)
}

/// Returns the messages about a slot: peer, operation, offset in the volume, bytes, and offset in the buffer.
fn parts(out: &[Output], slot: u16) -> Vec<(PeerIndex, Operation, u64, u64, u32)> {
    let part = |output: &Output| match output {
        Output::Send { peer, slot: sent, operation, range, buffer_offset } if *sent == id(slot) => {
            Some((*peer, *operation, range.offset(), range.length(), *buffer_offset))
        }
        _ => None,
    };
    out.iter().filter_map(part).collect()
}

fn is_resynced(out: &[Output]) -> bool {
    out.contains(&Output::Resynced)
}

#[test]
fn a_region_is_copied_from_the_source_run_by_run() {
    let mut bench = unequal(&[1]);
    let out = bench.tick(1);
    assert_eq!(parts(&out, COPY), [(1, Operation::CheckedRead, 65536, 65536, 0)]);
    let out = bench.apply(Event::CopyRead { peer: 1, slot: id(COPY), zeroes: [0b1110, 0, 0, 0] });
    assert_eq!(parts(&out, COPY), [(0, WRITE, 65536, 4096, 0), (2, WRITE, 65536, 4096, 0)]);
    assert_eq!(parts(&bench.reply(0, COPY, Ok(())), COPY), [], "one run at a time");
    let zeroes = Operation::WriteZeroes { fua: false };
    let out = bench.reply(2, COPY, Ok(()));
    assert_eq!(parts(&out, COPY), [(0, zeroes, 69632, 12288, 4096), (2, zeroes, 69632, 12288, 4096)]);
    bench.reply(0, COPY, Ok(()));
    let out = bench.reply(2, COPY, Ok(()));
    assert_eq!(parts(&out, COPY)[0], (0, WRITE, 81920, 49152, 16384));
    bench.reply(0, COPY, Ok(()));
    assert!(is_resynced(&bench.reply(2, COPY, Ok(()))));
    assert_eq!(bench.core.copy_progress().copied_bytes, 65536);
}

/// The other members may have been about to repair this one.
#[test]
fn a_region_that_few_members_have_modified_is_copied_from_the_others() {
    let mut config = config(3, 3);
    config.dirty = region_set(&[1, 2]);
    config.resync_sources = vec![region_set(&[1]), region_set(&[]), region_set(&[1])];
    config.peers[1].local = true;
    config.copy_slots = 2;
    let mut bench = Bench::with(&config);
    let out = bench.tick(1);
    assert_eq!(parts(&out, COPY), [(0, Operation::CheckedRead, 65536, 65536, 0)]);
    bench.reply(0, COPY, Ok(()));
    let out = bench.reply(1, COPY, Ok(()));
    assert_eq!(parts(&out, COPY), [(1, Operation::CheckedRead, 2 * 65536, 65536, 0)], "any member will do");
}

/// Returns three members, of which only the second one has modified region 1.
fn few_have_modified() -> CoreConfig {
    let mut config = config(3, 3);
    config.dirty = region_set(&[1]);
    config.resync_sources = vec![region_set(&[1]), region_set(&[]), region_set(&[1])];
    config.copy_slots = 2;
    config
}

/// Otherwise an interruption of this copy could make the member that has modified the region the next source.
#[test]
fn members_that_have_not_modified_a_region_keep_it_out_of_their_write_intent() {
    let mut bench = Bench::with(&few_have_modified());
    let out = bench.tick(1);
    assert_eq!(parts(&out, COPY), [(0, Operation::CheckedRead, 65536, 65536, 0)]);
    assert_eq!(sent(&bench.reply(0, COPY, Ok(())), COPY), [(1, WRITE)]);
    assert!(is_resynced(&bench.reply(1, COPY, Ok(()))));
}

/// Members may hold rot in different blocks. The one that has modified the region may hold rot that is not
/// known.
#[test]
fn known_rot_of_members_that_have_not_modified_the_region_is_repaired_in_single_blocks() {
    let mut bench = Bench::with(&few_have_modified());
    bench.tick(1);
    for blocks in [8, 4, 2, 1] {
        let out = bench.reply(0, COPY, Err(Errno::ROTTEN));
        assert_eq!(parts(&out, COPY), [(0, Operation::CheckedRead, 65536, blocks * 4096, 0)]);
    }
    let out = bench.reply(0, COPY, Err(Errno::ROTTEN));
    assert_eq!(parts(&out, COPY), [(2, Operation::CheckedRead, 65536, 4096, 0)]);
    assert_eq!(sent(&bench.reply(2, COPY, Ok(())), COPY), [(0, WRITE), (1, WRITE)]);
    assert_eq!(drops(&bench.reply(0, COPY, Err(Errno::NO_SPACE))), [], "its rot stays known");
    let out = bench.reply(1, COPY, Ok(()));
    assert_eq!(parts(&out, COPY), [(0, Operation::CheckedRead, 65536 + 4096, 4096, 0)]);
    assert_eq!(sent(&bench.reply(0, COPY, Ok(())), COPY), [(1, WRITE)]);
    bench.reply(1, COPY, Ok(()));
    // First in two blocks.
    bench.reply(0, COPY, Err(Errno::ROTTEN));
    bench.reply(0, COPY, Err(Errno::ROTTEN));
    let out = bench.reply(2, COPY, Err(Errno::ROTTEN));
    let third = 65536 + 2 * 4096;
    assert_eq!(parts(&out, COPY), [(1, Operation::CheckedRead, third, 4096, 0)], "no other one");
    assert_eq!(sent(&bench.reply(1, COPY, Ok(())), COPY), [(0, WRITE), (2, WRITE)]);
}

#[test]
fn requests_wait_until_their_regions_are_equal_and_others_continue() {
    let mut bench = unequal(&[0, 5]);
    let out = bench.submit(0, WRITE, 2 * REGION_BLOCKS);
    assert_eq!(sent_to(&out, 0), [0, 1, 2]);
    let out = bench.submit(1, Operation::Read, 5 * REGION_BLOCKS);
    assert_eq!((sent_to(&out, 1), sent_to(&out, COPY)), (vec![], vec![]), "the slot is busy with region 0");
    let out = bench.submit(2, WRITE, 5 * REGION_BLOCKS + 1);
    assert_eq!(sent_to(&out, 2), []);
    bench.reply(1, COPY, Ok(()));
    bench.reply(0, COPY, Ok(()));
    let out = bench.reply(2, COPY, Ok(()));
    assert_eq!(parts(&out, COPY), [(1, Operation::CheckedRead, 5 * 65536, 65536, 0)]);
    bench.reply(1, COPY, Ok(()));
    bench.reply(0, COPY, Ok(()));
    let out = bench.reply(2, COPY, Ok(()));
    assert!(is_resynced(&out));
    assert_eq!((sent_to(&out, 1).len(), sent_to(&out, 2)), (1, vec![0, 1, 2]));
}

#[test]
fn the_region_that_a_request_waits_for_is_next() {
    let mut bench = unequal(&[0, 1, 2, 3, 4, 5, 6]);
    bench.core.bucket.pay(1 << 30);
    let out = bench.tick(1);
    assert_eq!(parts(&out, COPY), [], "nothing may be copied now");
    let out = bench.submit(0, Operation::Read, 6 * REGION_BLOCKS);
    assert_eq!(parts(&out, COPY), [(1, Operation::CheckedRead, 6 * 65536, 65536, 0)]);
}

#[test]
fn a_large_region_is_copied_in_pieces() {
    let mut config = config(2, 2);
    config.size_bytes = 2 << 40;
    let regions = Regions::of(config.size_bytes);
    assert_eq!(regions.region_bytes(), 2 << 20);
    config.dirty = RegionSet::empty(regions.count());
    config.dirty.insert(9);
    config.out_of_sync.clear();
    let mut bench = Bench::with(&config);
    let out = bench.tick(1);
    let out = bench.answer(out, &[]);
    let starts: Vec<u64> = parts(&out, COPY).iter().map(|part| part.2).collect();
    assert_eq!(starts, [18 << 20, 18 << 20, 19 << 20, 19 << 20], "each is read and written");
    assert!(is_resynced(&out));
}

#[test]
fn another_member_takes_over_from_a_source_that_fails() {
    let mut bench = unequal(&[1]);
    bench.tick(1);
    bench.reply(1, COPY, Err(Errno::IO));
    let mut out = bench.close(1);
    out.extend(bench.view_stored(0, 2));
    out.extend(bench.view_stored(2, 2));
    assert_eq!(parts(&out, COPY), [(0, Operation::CheckedRead, 65536, 65536, 0)]);
    let out = bench.reply(0, COPY, Ok(()));
    assert_eq!(sent(&out, COPY), [(2, WRITE)]);
    assert!(is_resynced(&bench.reply(2, COPY, Ok(()))));
}

#[test]
fn a_member_without_space_for_a_copy_leaves() {
    let mut bench = unequal(&[1]);
    bench.tick(1);
    bench.reply(1, COPY, Ok(()));
    bench.reply(0, COPY, Ok(()));
    let out = bench.reply(2, COPY, Err(Errno::NO_SPACE));
    assert_eq!(drops(&out), [(2, "no space left")]);
    bench.close(2);
    bench.view_stored(0, 2);
    assert!(is_resynced(&bench.view_stored(1, 2)));
}

#[test]
fn a_single_member_needs_no_resync() {
    let mut config = config(2, 2);
    config.dirty = region_set(&[0, 1, 2, 3]);
    let mut bench = Bench::with(&config);
    let out = bench.submit(0, Operation::Read, 3 * REGION_BLOCKS);
    assert_eq!(sent_to(&out, 0), []);
    bench.lose(1);
    bench.view_stored(0, 2);
    let out = bench.granted(2);
    assert_eq!(sent_to(&out, 0), [], "a copy of its region is under way");
    assert_eq!(sent_to(&bench.reply(0, COPY, Ok(())), 0), [0]);
    assert!(is_resynced(&bench.reply(0, COPY + 1, Ok(()))));
    assert_eq!(bench.core.copy_progress().dirty_bytes, 4 << 16, "another crash would not make it clean");
}

/// Completes a write to region 0, and passes the time after which the region is cold. The flush was sent.
pub(super) fn with_cold_region() -> Bench {
    let mut bench = Bench::new(2);
    let out = bench.submit(0, WRITE, 0);
    bench.answer(out, &[]);
    let out = bench.tick(INTERVAL_MS);
    bench.answer(out, &[]);
    let out = bench.tick(2 * INTERVAL_MS);
    assert_eq!(sent(&out, COPY), [(0, Operation::Flush), (1, Operation::Flush)]);
    pong(&mut bench, 0);
    pong(&mut bench, 1);
    bench
}

#[test]
fn intent_is_cleared_after_a_flush_and_writes_wait_meanwhile() {
    let mut bench = with_cold_region();
    bench.reply(0, COPY, Ok(()));
    let out = bench.reply(1, COPY, Ok(()));
    let cleared = marks(&out);
    assert_eq!(
        (cleared.len(), cleared[0].1.of, cleared[0].1.action),
        (2, RegionsOf::Intent, MarkAction::Clear)
    );
    assert_eq!(cleared[0].1.runs, [(0, 1)]);
    assert_eq!(sent_to(&bench.submit(0, WRITE, 1), 0), [], "the clear could overtake it");
    assert_eq!(sent_to(&bench.submit(1, Operation::Read, 2), 1).len(), 1);
    assert_eq!(sent_to(&bench.submit(2, WRITE, REGION_BLOCKS), 2), [0, 1]);
    bench.apply(Event::Marked { peer: 0, mark: FIRST_CLEAR });
    let out = bench.apply(Event::Marked { peer: 1, mark: FIRST_CLEAR });
    assert_eq!(sent_to(&out, 0), [0, 1]);
}

/// Returns the stamps that are sent now.
fn stamps(out: &[Output]) -> Vec<(PeerIndex, u32)> {
    out.iter()
        .filter(|output| is_stamp(output))
        .flat_map(|output| marks(std::slice::from_ref(output)))
        .map(|(peer, change)| (peer, change.stamp))
        .collect()
}

fn store(bench: &mut Bench, peer: PeerIndex, mark: u32) -> Outputs {
    bench.apply(Event::Marked { peer, mark })
}

#[test]
fn three_stamps_come_between_the_flush_and_the_clearing() {
    let mut bench = with_cold_region();
    bench.stores_stamps = false;
    bench.reply(0, COPY, Ok(()));
    assert_eq!(stamps(&bench.reply(1, COPY, Ok(()))), [(0, 1), (1, 1)]);
    store(&mut bench, 1, 2);
    assert_eq!(stamps(&store(&mut bench, 0, 2)), [(0, 2), (1, 2)]);
    store(&mut bench, 1, 3);
    assert_eq!(stamps(&store(&mut bench, 0, 3)), [(0, 3), (1, 3)]);
    assert_eq!(store(&mut bench, 0, 4), [], "nothing is cleared before everybody has stored all");
    let out = store(&mut bench, 1, 4);
    assert_eq!((cleared(&out).len(), stamps(&out).len()), (2, 0));
    assert_eq!(bench.core.stamp(), 3);
}

#[test]
fn the_first_that_members_store_is_the_newest_stamp() {
    let mut config = config(2, 2);
    config.stamp = 6;
    let mut bench = Bench::with(&config);
    bench.stores_stamps = false;
    assert_eq!(
        stamps(&bench.apply(Event::Tick { now_ms: 1 })),
        [(0, 6), (1, 6)],
        "one of them may not know its own"
    );
    store(&mut bench, 0, 1);
    assert_eq!(store(&mut bench, 1, 1), []);
    assert_eq!(bench.core.stamp(), 6);
}

/// Needs the next cycle, because the contents before the copy may have the newest stamp too.
#[test]
fn a_copy_counts_as_current_after_the_next_cycle() {
    let mut bench = Bench::with(&config(3, 2));
    bench.core.start_full_copy(2);
    let out = bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[1])) });
    assert!(!is_current(Some(bench.core.stamp()), bench.core.stamp_of(2).unwrap()));
    bench.answer(out, &[]);
    let out = bench.apply(Event::ClearAll);
    bench.answer(out, &[]);
    assert!(is_current(Some(bench.core.stamp()), bench.core.stamp_of(2).unwrap()));
}

#[test]
fn no_stamp_follows_one_that_a_member_may_not_have() {
    let mut bench = with_cold_region();
    bench.stores_stamps = false;
    bench.reply(0, COPY, Ok(()));
    bench.reply(1, COPY, Ok(()));
    store(&mut bench, 0, 2);
    assert_eq!(marks(&bench.lose(1)), []);
    assert_eq!(bench.core.stamp_of(1), Some(1), "it may have that one, and has the one before");
    bench.view_stored(0, 2);
    assert_eq!(marks(&bench.granted(2)), [], "the cycle is over");
    pong(&mut bench, 0);
    let out = bench.apply(Event::ClearAll);
    assert_eq!(sent(&out, COPY), [(0, Operation::Flush)]);
    assert_eq!(stamps(&bench.reply(0, COPY, Ok(()))), [(0, 1)], "first everybody has it");
}

/// Adds the writes that the rebuilding replica was sent and did not miss: after their clearing no member
/// counts them.
#[test]
fn a_rebuilding_replica_that_returns_without_its_stamps_lacks_more() {
    let mut bench = Bench::with(&config(3, 2));
    bench.core.start_full_copy(2);
    let out = bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[])) });
    bench.answer(out, &[]);
    let out = bench.submit(0, WRITE, 0);
    bench.answer(out, &[]);
    let out = bench.apply(Event::ClearAll);
    bench.answer(out, &[]);
    assert!(bench.core.stamp() >= 3 && bench.core.stamp_of(2) == Some(bench.core.stamp()));
}

#[test]
fn stamps_continue_while_the_same_region_is_written_repeatedly() {
    let mut bench = Bench::new(2);
    for interval in 1..6 {
        let out = bench.submit(0, WRITE, 0);
        bench.answer(out, &[]);
        let out = bench.tick(interval * INTERVAL_MS);
        bench.answer(out, &[]);
        assert_eq!(
            u64::from(bench.core.stamp()),
            3 * (interval - 1),
            "a region that is written once stays as it is"
        );
    }
    assert_eq!(bench.core.copy_progress().dirty_bytes, 65536);
}

#[test]
fn writes_after_the_flush_was_sent_stay_dirty() {
    let mut bench = with_cold_region();
    let out = bench.submit(0, WRITE, 1);
    bench.reply(0, COPY, Ok(()));
    let flushed = bench.reply(1, COPY, Ok(()));
    assert_eq!(marks(&flushed), []);
    bench.answer(out, &[]);
    assert_eq!(bench.core.copy_progress().dirty_bytes, 65536);
}

fn scrub(repair: bool) -> Event {
    Event::Scrub(Some(ScrubConfig { bytes_per_s: None, repair }))
}

#[test]
fn a_scrub_compares_every_byte_while_writes_wait() {
    let mut bench = Bench::new(2);
    let out = bench.apply(scrub(true));
    assert_eq!(parts(&out, COPY)[0], (0, Operation::Verify, 0, SIZE_BYTES, 0));
    assert_eq!(sent_to(&bench.submit(0, WRITE, 3), 0), [], "a write would change the compared data");
    let out = bench.answer(out, &[]);
    assert_eq!(sent_to(&out, 0), [0, 1]);
    assert!(out.contains(&Output::ScrubDone));
    assert_eq!(bench.core.copy_progress().scrub_at_bytes, None);
}

fn found(out: &[Output]) -> Option<(Vec<PeerIndex>, bool)> {
    out.iter().find_map(|output| match output {
        Output::ScrubFound { odd, repaired, .. } => Some((odd.clone(), *repaired)),
        _ => None,
    })
}

/// Returns the outputs of a scrub in which the members' checks of the first block are `checks`. A repair of
/// three members compares it alone, after the whole piece.
fn scrubbed(repair: bool, checks: &[VolumeCheck]) -> (Bench, Outputs) {
    let mut bench = Bench::new(checks.len() as u64);
    let mut out = bench.apply(scrub(repair));
    while sent(&out, COPY).iter().any(|(_, operation)| *operation == Operation::Verify) {
        for (peer, check) in (0..).zip(checks) {
            out = bench.apply(Event::Verified { peer, slot: id(COPY), outcome: Ok(*check) });
        }
        if found(&out).is_some() {
            break;
        }
    }
    (bench, out)
}

fn checks<const N: usize>(sums: [u32; N]) -> [VolumeCheck; N] {
    sums.map(VolumeCheck::unconfirmed)
}

#[test]
fn the_majority_repairs_a_differing_member() {
    let (mut bench, out) = scrubbed(true, &checks([1, 2, 1]));
    assert_eq!(sent(&out, COPY), [(0, Operation::CheckedRead)]);
    assert_eq!(sent_to(&bench.submit(0, Operation::Read, 0), 0), [], "not before it is repaired");
    let out = bench.answer(out, &[]);
    assert_eq!(sent(&out, COPY)[1], (1, WRITE));
    assert_eq!(found(&out), Some((vec![1], true)));
    assert!(out.contains(&Output::ScrubDone));
}

/// The piece has regions without checksums, so that only the answer about the single block shows them.
#[test]
fn a_member_that_its_checksums_confirm_in_the_block_is_not_outvoted() {
    let mut bench = Bench::new(3);
    let mut out = bench.apply(scrub(true));
    let answers =
        [checks([1, 2, 2]), [VolumeCheck { sum: 1, is_confirmed: true }, checks([2])[0], checks([2])[0]]];
    for answer in answers {
        assert_eq!(sent(&out, COPY), [0, 1, 2].map(|peer| (peer, Operation::Verify)));
        for (peer, check) in (0..).zip(answer) {
            out = bench.apply(Event::Verified { peer, slot: id(COPY), outcome: Ok(check) });
        }
    }
    assert_eq!(found(&out), Some((vec![0, 1, 2], false)));
}

/// The blocks of the piece need not be compared one by one.
#[test]
fn a_majority_whose_checksums_confirm_a_whole_piece_repairs_all_of_it() {
    for confirmed in 0..3 {
        let mut bench = Bench::new(3);
        let mut out = bench.apply(scrub(true));
        for (peer, sum) in [(0, 1), (1, 2), (2, 1)] {
            let check = VolumeCheck { sum, is_confirmed: peer == confirmed };
            out = bench.apply(Event::Verified { peer, slot: id(COPY), outcome: Ok(check) });
        }
        let repairs = [(0, Operation::CheckedRead)];
        let compares = [0, 1, 2].map(|peer| (peer, Operation::Verify));
        let next = if confirmed == 1 { &compares[..] } else { &repairs[..] };
        assert_eq!(sent(&out, COPY), next, "{confirmed}");
    }
}

#[test]
fn rot_that_cannot_or_shall_not_be_repaired_is_reported() {
    assert_eq!(found(&scrubbed(true, &checks([1, 2])).1), Some((vec![0, 1], false)));
    assert_eq!(found(&scrubbed(false, &checks([1, 1, 2])).1), Some((vec![2], false)));
}

fn is_cleared(out: &[Output]) -> bool {
    out.contains(&Output::ClearedAll)
}

/// Returns the marks among the outputs, without mere pings.
fn cleared(out: &[Output]) -> Vec<(PeerIndex, Vec<(u32, u32)>)> {
    marks(out).into_iter().map(|(peer, change)| (peer, change.runs)).collect()
}

#[test]
fn clear_all_flushes_and_clears_completed_writes_at_once() {
    let mut bench = Bench::new(3);
    let out = bench.submit(0, WRITE, 0);
    bench.answer(out, &[]);
    let flush = bench.apply(Event::ClearAll);
    assert_eq!(sent(&flush, COPY), [0, 1, 2].map(|peer| (peer, Operation::Flush)), "with no tick");
    // Requests continue; their modifications meanwhile are not cleared.
    let out = bench.submit(1, WRITE, 3 * REGION_BLOCKS);
    bench.answer(out, &[]);
    let out = bench.answer(flush, &[]);
    assert_eq!(cleared(&out), [0, 1, 2].map(|peer| (peer, vec![(0, 1)])));
    assert!(is_cleared(&out));
    assert_eq!(bench.core.copy_progress().dirty_bytes, 65536);
    let out = bench.apply(Event::ClearAll);
    let out = bench.answer(out, &[]);
    assert_eq!((cleared(&out).len(), is_cleared(&out)), (3, true));
    assert_eq!(bench.core.copy_progress().dirty_bytes, 0);
    assert_eq!(bench.apply(Event::ClearAll), [Output::ClearedAll], "nothing is dirty");
}

#[test]
fn regions_of_writes_in_flight_stay_dirty() {
    let mut bench = Bench::new(3);
    bench.submit(0, WRITE, 0);
    let out = bench.submit(1, WRITE, 3 * REGION_BLOCKS);
    bench.answer(out, &[]);
    let out = bench.apply(Event::ClearAll);
    let out = bench.answer(out, &[]);
    assert_eq!(cleared(&out), [0, 1, 2].map(|peer| (peer, vec![(3, 1)])));
    assert!(is_cleared(&out));
    assert_eq!(bench.core.copy_progress().dirty_bytes, 65536);
}

#[test]
fn settling_follows_a_turn_that_is_under_way() {
    let mut bench = Bench::new(3);
    let out = bench.submit(0, WRITE, 0);
    bench.answer(out, &[]);
    bench.tick(INTERVAL_MS);
    let flush = bench.tick(2 * INTERVAL_MS);
    assert_eq!(sent(&flush, COPY).len(), 3);
    let out = bench.submit(0, WRITE, 3 * REGION_BLOCKS);
    bench.answer(out, &[]);
    assert_eq!(sent(&bench.apply(Event::ClearAll), COPY), []);
    let out = bench.answer(flush, &[]);
    let runs: Vec<_> = cleared(&out).into_iter().map(|(_, runs)| runs).collect();
    assert_eq!(runs, [vec![(0, 1)], vec![(0, 1)], vec![(0, 1)], vec![(3, 1)], vec![(3, 1)], vec![(3, 1)]]);
    assert!(is_cleared(&out));
}

#[test]
fn a_clearing_waits_until_the_view_has_changed() {
    let mut bench = Bench::new(3);
    let out = bench.submit(0, WRITE, 0);
    bench.answer(out, &[]);
    bench.lose(2);
    assert_eq!(bench.apply(Event::ClearAll), []);
    bench.view_stored(0, 2);
    let out = bench.view_stored(1, 2);
    let out = bench.answer(out, &[]);
    assert_eq!(cleared(&out), [0, 1].map(|peer| (peer, vec![(0, 1)])));
    assert!(is_cleared(&out));
}

#[test]
fn a_clearing_ends_if_the_last_member_cannot_flush() {
    let mut bench = Bench::new(1);
    let out = bench.submit(0, WRITE, 0);
    bench.answer(out, &[]);
    bench.apply(Event::ClearAll);
    let out = bench.reply(0, COPY, Err(Errno::IO));
    assert!(is_cleared(&out) && cleared(&out).is_empty());
    assert_eq!(bench.core.copy_progress().dirty_bytes, 65536);
}

#[test]
fn regions_within_the_limit_to_keep_are_cleared_later() {
    let mut config = config(3, 3);
    (config.intent_interval_ms, config.intent_keep_bytes) = (Some(1), 2 * 65536);
    let mut bench = Bench::with(&config);
    let write = |bench: &mut Bench, region: u64| {
        let out = bench.submit(0, WRITE, region * REGION_BLOCKS);
        bench.answer(out, &[]);
    };
    write(&mut bench, 0);
    write(&mut bench, 1);
    // Cycles start at twelve intervals and twenty-four. The second one has regions without writes since.
    let is_flush = |out: &[Output]| !sent(out, COPY).is_empty();
    let flushed = (1..=24).filter(|now_ms| is_flush(&bench.tick(*now_ms))).collect::<Vec<_>>();
    assert_eq!(flushed, [24]);

    let mut bench = Bench::with(&config);
    (0..3).for_each(|region| write(&mut bench, region));
    let flushed = (1..=2).filter(|now_ms| is_flush(&bench.tick(*now_ms))).collect::<Vec<_>>();
    assert_eq!(flushed, [2], "three regions are more than may be kept");
}

#[test]
fn regions_stay_dirty_if_the_clearing_interval_is_zero() {
    let mut config = config(3, 3);
    config.intent_interval_ms = None;
    let mut bench = Bench::with(&config);
    let out = bench.submit(0, WRITE, 0);
    bench.answer(out, &[]);
    for at in 1..4 {
        let out = bench.tick(at * INTERVAL_MS);
        assert_eq!(cleared(&bench.answer(out, &[])), []);
    }
    let out = bench.apply(Event::ClearAll);
    assert!(is_cleared(&bench.answer(out, &[])));
    assert_eq!(bench.core.copy_progress().dirty_bytes, 0);
}

/// Answers PING over every connection.
fn pong(bench: &mut Bench, peer: PeerIndex) {
    for queue in 0..2 {
        bench.apply(Event::Pong { peer, queue, free_mib: None });
    }
}
