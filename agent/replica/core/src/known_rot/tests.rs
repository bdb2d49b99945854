use std::ops::Range;

use super::*;

/// Blocks 3 to 6 have the sum 70.
fn known() -> KnownRot<u16> {
    let mut known = KnownRot::default();
    assert!(known.keep(0, (3..7).map(|block| (block, 70))));
    known
}

fn rotten(known: &KnownRot<u16>, block: u64, sums: [u32; 3]) -> [Option<bool>; 3] {
    sums.map(|sum| known.is_rotten(block, sum))
}

/// Merges sectors of block 4, which gets another sum. Returns true if it is still known.
fn merge(known: &mut KnownRot<u16>, part: Range<u64>, sums: (u32, u32), well: bool) -> bool {
    let range = ByteRange::new(4 * 4096 + part.start * 512, (part.end - part.start) * 512).unwrap();
    known.modified(1, 4, After::Unmerged);
    known.merged(1, range, 4, sums);
    known.ended(1, well);
    known.has(4)
}

#[test]
fn a_sum_is_known_until_its_block_gets_other_data() {
    let mut known = known();
    known.keep(0, [(3, 71), (7, 71)]);
    assert_eq!(
        rotten(&known, 3, [70, 71, 72]),
        [Some(false), Some(true), Some(true)],
        "the first one counts"
    );
    assert_eq!((known.is_rotten(2, 70), known.is_rotten(7, 71)), (None, Some(false)));
    known.modified(1, 4, After::Sum(80));
    known.ended(1, true);
    assert_eq!((known.has(3), known.has(4), known.under_way), (true, false, 0));
    known.forget_sums([]);
    assert!(!known.has(3));
}

#[test]
fn a_sum_confirms_a_block_unless_it_may_have_other_data() {
    let mut known = known();
    assert_eq!([70, 71].map(|sum| known.confirms(4, sum)), [true, false]);
    assert!(!known.confirms(9, 70), "it is not known");
    known.modified(1, 4, After::Sum(80));
    assert!(!known.confirms(4, 70), "a request is modifying it");
    known.ended(1, false);
    assert!(
        !known.confirms(4, 70) && !known.confirms(4, 80),
        "other members may have the data of the request"
    );
    known.reported(5);
    assert!(!known.confirms(5, 70), "other members decide");
    known.keep_lost([6]);
    assert!(!known.confirms(6, 70));
}

#[test]
fn the_former_data_repairs_a_block_of_whose_rot_an_engine_knows() {
    let mut known = known();
    assert!(!known.is_repaired_by(4, 2, 70), "it may be any write");
    known.reported(4);
    assert_eq!([70, 71].map(|sum| known.is_repaired_by(4, 2, sum)), [true, false]);
    known.modified(1, 4, After::Sum(70));
    assert!(!known.is_repaired_by(4, 2, 70), "another request is modifying it");
    assert!(known.is_repaired_by(4, 1, 70), "the repair has waited");
    known.ended(1, true);
    assert!(!known.is_repaired_by(4, 2, 70), "it is repaired");
    known.reported(5);
    known.modified(1, 5, After::Unmerged);
    known.ended(1, false);
    assert!(known.is_repaired_by(5, 2, 70));
    known.keep_lost([6]);
    known.reported(6);
    assert!(!known.is_repaired_by(6, 2, 70), "no sum is known");
}

/// A repair may fail, because the disk is full.
#[test]
fn a_sum_stays_known_if_its_block_gets_the_data_of_that_sum() {
    for well in [true, false] {
        let mut known = known();
        known.modified(1, 4, After::Sum(70));
        assert!(!known.awaits(1));
        known.ended(1, well);
        assert_eq!(rotten(&known, 4, [70, 71, 72]), [Some(false), Some(true), Some(true)]);
    }
}

/// The disk may have written a part of the data, and other blocks are unchanged.
#[test]
fn until_the_outcome_is_known_the_sums_before_and_after_both_count() {
    let mut known = known();
    known.modified(1, 4, After::Sum(80));
    assert!(known.awaits(1) && !known.awaits(2));
    assert_eq!(rotten(&known, 4, [70, 80, 81]), [Some(false), Some(false), Some(true)]);
    known.ended(2, true);
    known.ended(1, false);
    assert_eq!(rotten(&known, 4, [70, 80, 81]), [Some(false), Some(false), Some(true)]);
    assert_eq!([70, 80, 81].map(|found| known.sum_to_store(4, found)), [70, 80, 70]);
    known.modified(2, 4, After::Sum(90));
    known.ended(2, false);
    assert_eq!(rotten(&known, 4, [70, 80, 90]), [Some(false); 3]);
    // The resync copies the data of another member.
    known.modified(3, 4, After::Sum(70));
    known.ended(3, true);
    assert_eq!(rotten(&known, 4, [70, 80, 90]), [Some(false), Some(true), Some(true)]);
    known.modified(3, 4, After::Sum(80));
    known.ended(3, true);
    assert!(!known.has(4));
}

#[test]
fn a_part_of_a_block_that_is_merged_with_rot_makes_rot() {
    for well in [true, false] {
        let mut known = known();
        (3..6).for_each(|block| known.modified(1, block, After::Unmerged));
        assert_eq!(rotten(&known, 3, [70, 99, 80]), [Some(false), Some(true), Some(true)]);
        let part = |block: u64| ByteRange::new(block * 4096 + 512, 512).unwrap();
        known.merged(1, part(3), 3, (70, 80));
        known.merged(1, part(4), 4, (99, 81));
        known.merged(2, part(5), 5, (70, 82));
        known.ended(1, well);
        let sound = if well { [None; 3] } else { [Some(false), Some(false), Some(true)] };
        assert_eq!(rotten(&known, 3, [70, 80, 99]), sound);
        assert_eq!(rotten(&known, 4, [70, 81, 99]), [Some(false), Some(true), Some(true)]);
        let unmerged = rotten(&known, 5, [70, 82, 99]);
        assert_eq!(unmerged, [Some(false), Some(true), Some(true)], "zeroes leave a hole as it is");
    }
}

#[test]
fn a_block_is_no_longer_rot_if_every_sector_has_other_data() {
    let mut known = known();
    assert!(merge(&mut known, 0..3, (99, 81), true) && merge(&mut known, 6..8, (81, 82), true));
    assert!(merge(&mut known, 3..6, (82, 83), false), "it may have done nothing");
    assert!(!merge(&mut known, 3..6, (82, 83), true));
}

#[test]
fn data_counts_as_new_only_in_a_block_that_is_as_it_was_merged() {
    let merged = || {
        let mut known = known();
        assert!(merge(&mut known, 0..4, (99, 81), true) && merge(&mut known, 4..5, (81, 82), false));
        known
    };
    assert!(merge(&mut merged(), 4..8, (98, 83), true), "the disk has changed it once more");
    assert!(!merge(&mut merged(), 4..8, (81, 83), true), "the failed request has done nothing");
    assert!(!merge(&mut merged(), 5..8, (82, 83), true), "it has done all");
    assert!(merge(&mut merged(), 5..8, (81, 83), true));
    // Requests that fail are forgotten before those that succeed.
    let mut known = merged();
    for sum in 200..210 {
        assert!(merge(&mut known, 4..5, (81, sum), false) && known.blocks[&4].merged.len() <= MERGED_MAX);
    }
    assert!(!merge(&mut known, 4..8, (81, 83), true));
    // A copy of the same rot fails, and may have done all.
    let mut known = KnownRot::default();
    known.keep_lost([4]);
    merge(&mut known, 0..4, (99, 81), true);
    known.modified(1, 4, After::Rot);
    known.ended(1, false);
    assert!(merge(&mut known, 4..8, (99, 82), true));
    assert!(!merge(&mut known, 0..4, (82, 83), true));
}

/// A request for a part of the block has read the rot before the repair of a layer, or the former data after.
#[test]
fn a_repair_beside_a_request_forgets_no_rot() {
    for (read, is_rot) in [(81, true), (70, false)] {
        let mut known = known();
        assert_eq!(merge(&mut known, 0..1, (read, 82), true), is_rot);
        assert_eq!(known.has(4), is_rot);
    }
}

/// The engine copies the data of another member here, and nothing else is sound from then on.
#[test]
fn only_data_of_other_members_is_sound_after_rot_was_reported() {
    let fails = |known: &mut KnownRot<u16>, sum: u32| {
        known.modified(1, 4, After::Sum(sum));
        known.ended(1, false);
    };
    let mut known = known();
    merge(&mut known, 0..7, (99, 98), true);
    fails(&mut known, 80);
    assert_eq!(rotten(&known, 4, [70, 80, 81]), [Some(false), Some(false), Some(true)]);
    known.reported(4);
    fails(&mut known, 81);
    assert_eq!(rotten(&known, 4, [70, 80, 81]), [Some(true), Some(true), Some(false)]);
    assert_eq!(known.sum_to_store(4, 70), 81);
    assert!(merge(&mut known, 7..8, (98, 97), true), "the other sectors were written before");
    // The engine asks once more before it decides about another request.
    fails(&mut known, 70);
    assert_eq!(rotten(&known, 4, [70, 80, 81]), [Some(false), Some(true), Some(false)]);
    known.reported(4);
    fails(&mut known, 70);
    assert_eq!(rotten(&known, 4, [70, 80, 81]), [Some(false), Some(true), Some(true)]);
    // The repair of a layer, or one of the head, has brought the former data back.
    for is_found in [true, false] {
        known.reported(4);
        if is_found {
            known.found_sound(4);
        } else {
            known.modified(1, 4, After::Sum(70));
            known.ended(1, true);
        }
        assert!(!known.is_reported(4));
        fails(&mut known, 80);
        assert_eq!(rotten(&known, 4, [70, 80, 81]), [Some(false), Some(false), Some(true)]);
    }

    let mut lost = KnownRot::default();
    lost.keep_lost([4]);
    fails(&mut lost, 80);
    lost.reported(4);
    fails(&mut lost, 81);
    assert_eq!(rotten(&lost, 4, [70, 80, 81]), [Some(true), Some(true), Some(false)]);
    assert!(lost.is_lost(4) && lost.lost == 1);
}

/// The client gets the error, and the block may hold the former data or that of the request.
#[test]
fn a_request_that_is_refused_decides_like_one_that_has_failed() {
    let mut known = known();
    known.refused(4, After::Sum(80));
    assert_eq!(rotten(&known, 4, [70, 80, 90]), [Some(false), Some(true), Some(true)], "no engine knows");
    known.reported(4);
    known.refused(4, After::Unmerged);
    assert!(known.is_reported(4), "a part of the block decides nothing");
    known.refused(4, After::Sum(80));
    assert_eq!(rotten(&known, 4, [70, 80, 90]), [Some(true), Some(false), Some(true)]);
    assert!(!known.is_reported(4));
    for _ in 0..2 {
        known.reported(4);
        assert!(!known.is_repaired_by(4, 1, 80), "the page of sums has the former sum");
        known.refused(4, After::Sum(80));
    }
    known.modified(1, 4, After::Sum(80));
    known.ended(1, true);
    known.reported(4);
    assert!(known.is_repaired_by(4, 1, 80), "that repair has ended the sums of the region");

    known.reported(5);
    known.refused(5, After::Sum(70));
    known.reported(5);
    assert!(known.is_repaired_by(5, 1, 70), "the page of sums has this sum");

    known.reported(6);
    known.modified(1, 6, After::Sum(81));
    known.refused(6, After::Sum(80));
    known.ended(1, false);
    assert_eq!(rotten(&known, 6, [70, 80, 81]), [Some(true), Some(true), Some(false)], "the other decides");
}

#[test]
fn the_former_data_stays_sound_if_a_request_fails_on_the_only_member() {
    let mut known = known();
    known.reported(4);
    known.modified(1, 4, After::Sum(80));
    known.failed_alone(2);
    assert!(known.blocks[&4].is_reported);
    known.failed_alone(1);
    known.ended(1, false);
    assert_eq!(rotten(&known, 4, [70, 80, 81]), [Some(false), Some(false), Some(true)]);
}

#[test]
fn two_requests_that_modify_one_block_leave_nothing_known() {
    let mut known = known();
    known.modified(1, 4, After::Sum(80));
    known.modified(1, 4, After::Sum(80));
    assert!(known.has(4), "it was begun twice");
    known.modified(2, 4, After::Sum(81));
    assert!(!known.has(4) && known.under_way == 0);
    known.ended(1, false);
    known.ended(2, true);
    assert!(known.has(3) && !known.has(4));
}

#[test]
fn a_lost_block_is_cured_by_data_for_all_of_it_and_by_nothing_else() {
    let mut known = KnownRot::default();
    known.keep_lost([4, 5]);
    let part = ByteRange::new(4 * 4096 + 512, 512).unwrap();
    for well in [false, true] {
        known.modified(1, 4, After::Unmerged);
        assert_eq!(known.cured_by(1).count(), 0, "it may not even have been merged");
        assert_eq!(known.merged_by(1).count(), 0);
        known.merged(1, part, 4, (99, 81));
        assert_eq!((known.cured_by(1).count(), known.merged_by(2).count()), (0, 0));
        assert_eq!(known.merged_by(1).collect::<Vec<_>>(), [(4, 81)]);
        known.ended(1, well);
        assert_eq!((known.is_lost(4), known.is_rotten(4, 81)), (true, Some(true)), "well: {well}");
        // The same rot is copied once more.
        known.modified(1, 4, After::Rot);
        assert_eq!((known.cured_by(1).count(), known.is_rotten(4, 99)), (0, Some(true)));
        known.ended(1, well);
    }
    for sum in [1, 70, 81, 99, !81, !99, u32::MAX] {
        assert_eq!(known.is_rotten(4, sum), Some(true), "no data looks sound");
        assert_ne!(known.sum_to_store(4, sum), sum);
    }
    // Not even the failure of many requests, or of two at a time.
    for request in 1..10_u16 {
        known.modified(request, 4, After::Sum(100 + u32::from(request)));
        known.ended(request, false);
    }
    assert!(known.is_lost(4) && known.is_rotten(4, 99) == Some(true));
    known.modified(1, 4, After::Sum(80));
    known.modified(2, 4, After::Sum(81));
    known.ended(2, true);
    assert!(known.is_lost(4) && known.is_rotten(4, 99) == Some(true));
    known.modified(1, 4, After::Sum(80));
    assert_eq!(known.cured_by(1).collect::<Vec<_>>(), [4]);
    assert_eq!(known.cured_by(2).count(), 0);
    known.ended(1, true);
    assert_eq!((known.has(4), known.is_lost(5), known.lost), (false, true, 1));
    known.keep(0, [(5, 1), (6, 1)]);
    known.summed(5, 70);
    assert_eq!((known.is_lost(5), known.is_lost(6)), (true, false));
    known.forget_block(5);
    assert_eq!((known.has(5), known.lost), (false, 0));
}

#[test]
fn a_place_is_free_when_the_sum_of_a_sound_block_is_durable() {
    let mut known = known();
    known.modified(1, 6, After::Sum(80));
    (3..7).for_each(|block| known.summed(block, if block == 4 { 99 } else { 70 }));
    assert_eq!([3, 4, 5, 6].map(|block| known.has(block)), [false, true, false, true]);
    known.ended(1, false);
    known.summed(6, 80);
    assert!(!known.has(6), "it holds the data of the request");
}

#[test]
fn a_page_without_a_place_must_not_be_modified() {
    let mut known = KnownRot::<u16>::default();
    known.keep_lost([1 << 40]);
    assert!(known.keep(0, (0..RotLimits::default().blocks as u64).map(|block| (block, 70))));
    let far = 100 * 512;
    assert!(!known.keep(100, [(far, 70)]) && !known.keep_some([(far, 70)]));
    assert_eq!((known.has(far), known.may_modify(0), known.may_modify(100)), (false, true, false));
    assert!(known.keep(0, [(3, 70)]), "it is there already");
    known.summed(3, 70);
    assert!(known.keep_some([(far, 70)]) && !known.may_modify(100), "that is a part of the page");
    assert!(known.keep(100, [(far, 70)]) && known.may_modify(100));
    let untracked = 110..=110 + RotLimits::default().untracked_pages as u64;
    assert!(untracked.clone().all(|page| !known.keep(page, [(page * 512, 70)])));
    assert!(!known.may_modify(1 << 20), "too many to be listed");
    known.forget_sums([]);
    assert!(known.may_modify(110));
}

#[test]
fn outcomes_of_failed_requests_are_bounded() {
    let mut known = KnownRot::default();
    known.keep(0, [(9, 70)]);
    for request in 0..=u32::try_from(FAILED_MAX).unwrap() {
        assert!(known.has(9));
        known.modified(request, 9, After::Sum(100 + request));
        known.ended(request, false);
    }
    assert!(!known.has(9));
}

/// A repair beside the requests may end all sums.
#[test]
fn requests_that_modify_lost_blocks_continue_after_the_end_of_all_sums() {
    let mut known = known();
    known.keep_lost([4, 5, 6]);
    known.modified(1, 3, After::Sum(80));
    known.modified(1, 4, After::Sum(80));
    known.modified(2, 5, After::Unmerged);
    known.forget_sums([4, 5, 6]);
    assert_eq!((known.has(3), known.lost, known.under_way), (false, 3, 2));
    assert_eq!(known.cured_by(1).collect::<Vec<_>>(), [4]);
    known.merged(2, ByteRange::new(5 * 4096, 512).unwrap(), 5, (90, 91));
    assert_eq!(known.merged_by(2).collect::<Vec<_>>(), [(5, 91)]);
    known.ended(1, true);
    known.ended(2, true);
    assert_eq!((known.has(4), known.is_lost(5), known.lost, known.under_way), (false, true, 2, 0));
}

/// The sum of a block of zeroes.
const ZEROES: u32 = 7;

#[test]
fn zeroes_in_a_part_of_a_hole_that_rot_has_made_outdate_the_former_data() {
    let mut known = known();
    assert!(known.keep_some([(9, ZEROES)]));
    for (block, former, is_former_sound) in [(4, 70, false), (9, ZEROES, true)] {
        for well in [false, true] {
            known.modified(1, block, After::PartlyZeroes { zeroes: ZEROES });
            known.ended(1, well);
            let is_sound = is_former_sound || !well;
            assert_eq!(known.is_rotten(block, former), Some(!is_sound), "{block} {well}");
        }
    }
    assert_eq!((known.is_rotten(4, ZEROES), known.sum_to_store(4, ZEROES)), (Some(true), NO_SUM));
    known.modified(1, 4, After::Sum(80));
    known.ended(1, true);
    assert!(!known.has(4));
}

#[test]
fn zeroes_stay_if_they_may_be_right_and_else_only_a_sum_shows_the_layer() {
    let mut known = known();
    let about =
        |known: &mut KnownRot<u16>, block, shown| known.decide_about_hole(block, (ZEROES, shown), None);
    assert_eq!(about(&mut known, 4, 70), AboutHole::ShowsLayer);
    assert_eq!(about(&mut known, 4, 71), AboutHole::Undecided);
    known.modified(1, 4, After::Sum(ZEROES));
    known.ended(1, false);
    let about_4 = about(&mut known, 4, 70);
    assert_eq!(about_4, AboutHole::StaysZeroes, "a request that has failed may have made them");
    for (kept, decided) in [(ZEROES, AboutHole::StaysZeroes), (70, AboutHole::ShowsLayer)] {
        assert_eq!(known.decide_about_hole(9, (ZEROES, 70), Some(kept)), decided);
        assert!(!known.has(9));
    }
    assert_eq!(about(&mut known, 9, 70), AboutHole::Undecided);
    assert_eq!(rotten(&known, 9, [ZEROES, 70, 71]), [Some(true); 3]);
    known.keep_lost([4]);
    assert_eq!(about(&mut known, 4, 70), AboutHole::ShowsLayer, "its data is lost anyway");
}

/// The request that decides gives it zeroes, and makes a hole of it again.
#[test]
fn an_undecided_block_stays_known_with_the_data_that_decides() {
    for sum in [ZEROES, 80] {
        let mut known = known();
        assert_eq!(known.decide_about_hole(9, (ZEROES, 70), None), AboutHole::Undecided);
        known.modified(1, 9, After::Sum(sum));
        known.ended(1, true);
        assert_eq!(rotten(&known, 9, [sum, 70, 71]), [Some(false), Some(true), Some(true)]);
        let decided = if sum == ZEROES { AboutHole::StaysZeroes } else { AboutHole::Undecided };
        assert_eq!(known.decide_about_hole(9, (ZEROES, 70), None), decided);
    }
    let mut known = known();
    known.decide_about_hole(9, (ZEROES, 70), None);
    known.modified(1, 9, After::Sum(80));
    known.ended(1, true);
    known.modified(2, 9, After::Sum(81));
    known.ended(2, true);
    assert!(!known.has(9), "only one request decides");
}

#[test]
fn undecided_blocks_leave_half_of_the_places() {
    let mut known = known();
    known.set_limits(RotLimits { blocks: 10, untracked_pages: 1 });
    assert!((20..30).all(|block| known.decide_about_hole(block, (ZEROES, 70), None) == AboutHole::Undecided));
    assert_eq!([20, 21].map(|block| known.has(block)), [true, false]);
}
