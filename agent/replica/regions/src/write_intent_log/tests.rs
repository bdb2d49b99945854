use shorthorn_types::{Generation, ViewId};

use super::*;

const REGION: u64 = 64 << 10;

fn id(n: u64) -> ReplicaId {
    ReplicaId::from_random(n)
}

fn intent_log(count: u64) -> WriteIntentLog {
    let regions = Regions::of(count * REGION);
    WriteIntentLog::new(regions, 1, &RegionSet::empty(regions.count()))
}

fn range(first: u64, count: u64) -> ByteRange {
    ByteRange::new(first * REGION, count * REGION).unwrap()
}

fn view(number: u32, ids: &[u64]) -> View {
    let members = Members::new(ids.iter().copied().map(id)).unwrap();
    View { id: ViewId { generation: Generation::new(1, 0), number }, members }
}

fn report(committed: View, proposed: &[View]) -> ReplicaReport {
    ReplicaReport { committed, proposed: proposed.to_vec() }
}

fn write_all(intent_log: &mut WriteIntentLog) -> Vec<(SetKey, u32)> {
    let mut written = Vec::new();
    while let Some(PageWrite { slot, key, page, .. }) = intent_log.begin_write(false) {
        written.push((key, page));
        intent_log.end_write(slot, true);
    }
    written
}

fn mark(of: RegionsOf, action: MarkAction, runs: &[(u32, u32)]) -> MarkRegions {
    MarkRegions { of, action, runs: runs.to_vec(), stamp: 0, size_bytes: None }
}

#[test]
fn a_modification_waits_for_its_pages_only_once() {
    let mut intent_log = intent_log(40_000);
    assert_eq!(intent_log.mark_dirty(range(32_255, 2)), DirtyMark::Pending);
    assert_eq!(intent_log.mark_dirty(range(32_255, 2)), DirtyMark::Pending);
    assert_eq!(write_all(&mut intent_log), [(SetKey::Intent, 0), (SetKey::Intent, 1)]);
    assert_eq!(intent_log.mark_dirty(range(32_255, 2)), DirtyMark::Durable);
    assert_eq!(intent_log.mark_dirty(range(7, 1)), DirtyMark::Pending);
    // A change that arrives during the write of a page needs no other write if it is in the page.
    let slot = intent_log.begin_write(false).unwrap().slot;
    assert_eq!(intent_log.mark_dirty(range(7, 1)), DirtyMark::Pending);
    assert!(intent_log.begin_write(false).is_none());
    assert_eq!(intent_log.mark_dirty(range(8, 1)), DirtyMark::Pending);
    assert!(intent_log.begin_write(false).is_none(), "one write of a page at a time");
    intent_log.end_write(slot, true);
    assert_eq!(
        (intent_log.mark_dirty(range(7, 1)), intent_log.mark_dirty(range(8, 1))),
        (DirtyMark::Durable, DirtyMark::Pending)
    );
    assert_eq!(write_all(&mut intent_log), [(SetKey::Intent, 0)]);
}

#[test]
fn a_failed_write_is_due_again() {
    let mut intent_log = intent_log(10);
    intent_log.mark_dirty(range(0, 1));
    let slot = intent_log.begin_write(false).unwrap().slot;
    intent_log.end_write(slot, false);
    assert_eq!(intent_log.mark_dirty(range(0, 1)), DirtyMark::Pending);
    assert_eq!(write_all(&mut intent_log).len(), 1);
}

#[test]
fn clears_are_lazy_and_cost_no_wait_before_they_are_written() {
    let mut intent_log = intent_log(10);
    intent_log.mark_dirty(range(0, 2));
    write_all(&mut intent_log);
    let clear = mark(RegionsOf::Intent, MarkAction::Clear, &[(0, 2)]);
    assert!(matches!(intent_log.mark(&clear), Ok(Marked::Done)));
    assert!(intent_log.content(SetKey::Intent).unwrap().is_empty());
    assert!(intent_log.begin_write(false).is_none());
    assert_eq!(intent_log.mark_dirty(range(0, 1)), DirtyMark::Durable, "it is on the disk still");
    let slot = intent_log.begin_write(true).unwrap().slot;
    assert_eq!(
        intent_log.mark_dirty(range(1, 1)),
        DirtyMark::Pending,
        "it may be gone from the disk already"
    );
    intent_log.end_write(slot, true);
    assert_eq!(
        (intent_log.mark_dirty(range(0, 1)), intent_log.mark_dirty(range(1, 1))),
        (DirtyMark::Durable, DirtyMark::Pending)
    );
}

#[test]
fn a_replica_that_leaves_the_views_begins_to_miss() {
    let mut intent_log = intent_log(100);
    intent_log.mark_dirty(range(3, 1));
    let known = report(view(1, &[1, 2, 3]), &[]);
    let new = intent_log.on_propose(id(1), &known, &known, &view(2, &[1, 2])).unwrap();
    assert_eq!(new.iter().map(NewSet::replica).collect::<Vec<_>>(), [id(3)]);
    new.into_iter().for_each(|new| intent_log.keep(new));
    let out_of_sync = SetKey::OutOfSync(id(3));
    assert_eq!(intent_log.page(out_of_sync, 0).unwrap().runs, [(3, 1)]);
    write_all(&mut intent_log);
    assert_eq!(intent_log.mark_dirty(range(9, 1)), DirtyMark::Pending);
    assert_eq!(write_all(&mut intent_log), [(SetKey::Intent, 0), (out_of_sync, 0)]);
    assert_eq!(intent_log.page(out_of_sync, 0).unwrap().runs, [(3, 1), (9, 1)]);
    // A repetition begins no set; and no replica misses its own data.
    assert!(intent_log.on_propose(id(1), &known, &known, &view(2, &[1, 2])).unwrap().is_empty());
    assert!(intent_log.on_propose(id(2), &known, &known, &view(3, &[1])).unwrap().is_empty());
    assert_eq!(intent_log.on_propose(id(1), &known, &known, &view(3, &[1])).unwrap().len(), 1);
    // It ends when no view that may count is without it.
    assert!(intent_log.on_commit(&report(view(2, &[1, 2, 3]), &[view(3, &[1, 2])])).is_empty());
    assert_eq!(intent_log.on_commit(&report(view(4, &[1, 2, 3]), &[])).len(), 1);
    intent_log.forget(id(3));
    assert_eq!(intent_log.page(out_of_sync, 0), None);
}

#[test]
fn marks_begin_grow_shrink_and_end_a_set() {
    let mut intent_log = intent_log(70_000);
    let of = RegionsOf::OutOfSync(id(5));
    let Ok(Marked::Begin(new)) = intent_log.mark(&mark(of, MarkAction::Add, &[(5, 2)])) else { panic!() };
    assert_eq!(intent_log.tracks(), Members::NONE);
    intent_log.keep(new);
    assert!(matches!(intent_log.mark(&mark(of, MarkAction::Add, &[(6, 1)])), Ok(Marked::Done)));
    let Ok(Marked::Wait(ticket)) = intent_log.mark(&mark(of, MarkAction::Add, &[(32_250, 10)])) else {
        panic!()
    };
    assert!(!intent_log.is_durable(&ticket));
    let slot = intent_log.begin_write(false).unwrap().slot;
    intent_log.end_write(slot, true);
    assert!(!intent_log.is_durable(&ticket), "there is another page");
    write_all(&mut intent_log);
    assert!(intent_log.is_durable(&ticket));
    intent_log.mark(&mark(of, MarkAction::Clear, &[(0, 32_255)])).unwrap();
    let page = RunsPage { runs: vec![(32_255, 5)], next: None, stamp: 0 };
    assert_eq!(intent_log.page(SetKey::OutOfSync(id(5)), 0), Some(page));
    assert!(matches!(intent_log.mark(&mark(of, MarkAction::Forget, &[])), Ok(Marked::Remove(_))));
    assert_eq!(intent_log.tracks().len(), 1, "until its file is gone");
}

/// The engine counts from its mark on. A modification that the disk was given before that may still be under
/// way. It is in nothing that the engine reads from this replica meanwhile.
#[test]
fn a_new_set_has_the_regions_that_are_being_modified() {
    let mut intent_log = intent_log(40_000);
    intent_log.mark_dirty(range(3, 1));
    write_all(&mut intent_log);
    assert_eq!(intent_log.mark_dirty(range(3, 1)), DirtyMark::Durable);
    let of = RegionsOf::OutOfSync(id(2));
    let Ok(Marked::Begin(new)) = intent_log.mark(&mark(of, MarkAction::Add, &[(5, 2)])) else { panic!() };
    intent_log.keep(new);
    let kept = intent_log.content(SetKey::OutOfSync(id(2))).map(|set| set.iter().collect::<Vec<_>>());
    assert_eq!(kept, Some(vec![3, 5, 6]));
}

#[test]
fn a_mark_of_a_region_that_is_being_written_is_answered() {
    let mut intent_log = intent_log(10);
    intent_log.mark_dirty(range(1, 1));
    let slot = intent_log.begin_write(false).unwrap().slot;
    let add = mark(RegionsOf::Intent, MarkAction::Add, &[(1, 1)]);
    let Ok(Marked::Wait(ticket)) = intent_log.mark(&add) else { panic!() };
    intent_log.end_write(slot, true);
    write_all(&mut intent_log);
    assert!(intent_log.is_durable(&ticket));
}

#[test]
fn invalid_marks_are_refused() {
    let mut intent_log = intent_log(10);
    let mut refused = |of, action, runs: &[_]| intent_log.mark(&mark(of, action, runs)).unwrap_err();
    for (of, action) in [(RegionsOf::Intent, MarkAction::Forget), (RegionsOf::Allocated, MarkAction::Add)] {
        assert_eq!(refused(of, action, &[]), IntentLogError::Unsupported { of, action });
    }
    let runs = IntentLogError::Runs { first: 9, count: 2, limit: 10 };
    assert_eq!(refused(RegionsOf::Intent, MarkAction::Add, &[(9, 2)]), runs);
    let many = vec![(0, 1); RUNS_PER_MARK_MAX + 1];
    assert_eq!(refused(RegionsOf::Intent, MarkAction::Add, &many), IntentLogError::TooManyRuns(801));
    for n in 0..8 {
        let of = RegionsOf::OutOfSync(id(n));
        let Ok(Marked::Begin(new)) = intent_log.mark(&mark(of, MarkAction::Add, &[])) else { panic!() };
        intent_log.keep(new);
    }
    let one_more = mark(RegionsOf::OutOfSync(id(9)), MarkAction::Add, &[]);
    assert_eq!(intent_log.mark(&one_more).unwrap_err(), IntentLogError::TooManySets(id(9)));
}

#[test]
fn long_sets_come_in_pages() {
    let mut intent_log = intent_log(5000);
    for region in (0..5000).step_by(2) {
        intent_log.mark_dirty(range(region, 1));
    }
    let (mut from, mut found) = (0, Vec::new());
    loop {
        let page = intent_log.page(SetKey::Intent, from).unwrap();
        assert!(page.runs.len() <= RUNS_PER_MARK_MAX);
        found.extend(page.runs);
        let Some(next) = page.next else { break };
        from = next;
    }
    assert_eq!(found, (0..5000).step_by(2).map(|region| (region, 1)).collect::<Vec<_>>());
}

#[test]
fn sets_follow_a_volume_that_grows_to_larger_regions() {
    let mut intent_log = intent_log(1000);
    intent_log.mark_dirty(range(6, 3));
    let writing = intent_log.begin_write(false).unwrap().slot;
    let Ok(Marked::Wait(ticket)) = intent_log.mark(&mark(RegionsOf::Intent, MarkAction::Add, &[(11, 1)]))
    else {
        panic!()
    };
    let regions = Regions::of(100 << 30);
    assert_eq!(regions.region_bytes(), 2 * REGION);
    let before = intent_log.file(SetKey::Intent).unwrap();
    let grown = intent_log.grown(regions);
    let (key, file) = grown.files().next().unwrap();
    intent_log.grow(grown);
    assert!(intent_log.is_durable(&ticket), "it is in the new file");
    intent_log.end_write(writing, true);
    assert_eq!(intent_log.mark_dirty(range(6, 1)), DirtyMark::Durable);
    assert_eq!(intent_log.page(key, 0).unwrap().runs, [(3, 3)]);
    // An engine that does not know of it yet still counts in the regions of the size before.
    let old = Regions::of(1000 * REGION);
    assert_eq!(intent_log.page_for(key, 0, old).unwrap().runs, [(6, 6)]);
    let clear = |runs: &[(u32, u32)]| MarkRegions {
        stamp: 0,
        size_bytes: Some(old.size_bytes()),
        ..mark(RegionsOf::Intent, MarkAction::Clear, runs)
    };
    intent_log.mark(&clear(&[(7, 3)])).unwrap();
    assert_eq!(intent_log.page(key, 0).unwrap().runs, [(3, 1), (5, 1)], "a partly cleared region stays");
    // Any file that exists when the process ends has the same content.
    for (file, is_outgrown) in [(before, true), (file, false)] {
        let (loaded, damages) = WriteIntentLog::load(regions, 1, &file);
        assert_eq!((damages.len(), loaded.is_outgrown(key)), (0, is_outgrown));
        assert_eq!(loaded.page(key, 0).unwrap().runs, [(3, 3)]);
    }
}

#[test]
fn files_of_another_epoch_are_worth_nothing() {
    let mut old = intent_log(10);
    let add = mark(RegionsOf::OutOfSync(id(1)), MarkAction::Add, &[(1, 1)]);
    let Ok(Marked::Begin(new)) = old.mark(&add) else { panic!() };
    let intent = old.file(SetKey::Intent).unwrap();
    let (mut later, damages) = WriteIntentLog::load(old.regions(), 2, &intent);
    assert_eq!(damages, [PageDamage::Outdated]);
    assert_eq!(later.content(SetKey::Intent), Some(RegionSet::full(10)));
    assert_eq!(later.load_out_of_sync(id(1), &new.file()), Ok((false, vec![PageDamage::Outdated])));
    assert!(later.tracks().is_empty());
}

#[test]
fn a_lost_cache_ends_when_all_dirty_regions_are_cleared() {
    let mut intent_log = intent_log(10);
    intent_log.lost_cache();
    assert!(!intent_log.has_lost_cache(), "nothing was dirty");
    intent_log.mark_dirty(range(2, 4));
    intent_log.lost_cache();
    intent_log.mark_dirty(range(8, 1));
    intent_log.mark(&mark(RegionsOf::Intent, MarkAction::Clear, &[(2, 3)])).unwrap();
    assert!(intent_log.has_lost_cache());
    intent_log.mark(&mark(RegionsOf::Intent, MarkAction::Clear, &[(0, 6)])).unwrap();
    assert!(!intent_log.has_lost_cache());
}

fn stamp(stamp: u32) -> MarkRegions {
    MarkRegions { stamp, ..mark(RegionsOf::Intent, MarkAction::Stamp, &[]) }
}

fn reloaded(intent_log: &WriteIntentLog) -> WriteIntentLog {
    WriteIntentLog::load(intent_log.regions(), 1, &intent_log.file(SetKey::Intent).unwrap()).0
}

/// Returns the bytes and the number of the page that a stamp is written to.
fn stamped(intent_log: &mut WriteIntentLog, number: u32) -> (u32, Vec<u8>) {
    let Marked::Wait(ticket) = intent_log.mark(&stamp(number)).unwrap() else { panic!("it is not durable") };
    assert!(!intent_log.is_durable(&ticket));
    let PageWrite { slot, key, page, bytes } = intent_log.begin_write(false).unwrap();
    assert_eq!(key, SetKey::Intent);
    let bytes = bytes.to_vec();
    intent_log.end_write(slot, true);
    assert!(intent_log.is_durable(&ticket));
    (page, bytes)
}

#[test]
fn a_stamp_that_is_torn_is_not_known() {
    let mut intent_log = intent_log(40_000);
    let mut file = intent_log.file(SetKey::Intent).unwrap();
    let mut load = |page: u32, bytes: &[u8]| {
        let at = page as usize * PAGE_BYTES;
        file[at..at + bytes.len()].copy_from_slice(bytes);
        let (loaded, damages) = WriteIntentLog::load(Regions::of(40_000 * REGION), 1, &file);
        assert!(damages.is_empty(), "no region is in this page: {damages:?}");
        loaded.stamp()
    };
    // An engine that knows of no stamp starts over.
    for number in [1, 2, 300, 4] {
        let (page, bytes) = stamped(&mut intent_log, number);
        assert_eq!(load(page, &bytes[..57]), None);
        assert_eq!(load(page, &bytes), Some(number));
        // A page of regions has it too.
        intent_log.mark_dirty(range(u64::from(number), 1));
        let PageWrite { slot, page, bytes, .. } = intent_log.begin_write(false).unwrap();
        assert_eq!(load(page, bytes), Some(number));
        intent_log.end_write(slot, true);
    }
}

#[test]
fn an_unknown_stamp_is_none() {
    let intent_log = intent_log(10);
    assert_eq!((intent_log.stamp(), reloaded(&intent_log).stamp()), (Some(0), Some(0)));
    let regions = intent_log.regions();
    let mut lost = WriteIntentLog::new(regions, 1, &RegionSet::full(regions.count()));
    assert_eq!((lost.stamp(), reloaded(&lost).stamp()), (None, None));
    // As a version without stamps has left it.
    let file = intent_log.file(SetKey::Intent).unwrap();
    let (old, damages) = WriteIntentLog::load(regions, 1, &file[..PAGE_BYTES]);
    assert_eq!((old.stamp(), damages), (None, vec![]));
    stamped(&mut lost, 4);
    assert_eq!(reloaded(&lost).stamp(), Some(4));
    let grown = lost.grown(Regions::of(50_000 * REGION));
    lost.grow(grown);
    assert_eq!((lost.stamp(), reloaded(&lost).stamp()), (Some(4), Some(4)));
}

#[test]
fn out_of_sync_sets_keep_the_stamp_of_their_replica() {
    let mut intent_log = intent_log(10);
    stamped(&mut intent_log, 7);
    let all = view(1, &[1, 2, 3]);
    let new = intent_log.on_propose(id(1), &report(all, &[]), &report(all, &[]), &view(2, &[1, 2])).unwrap();
    new.into_iter().for_each(|new| intent_log.keep(new));
    let stamp_of =
        |intent_log: &WriteIntentLog, n| intent_log.page(SetKey::OutOfSync(id(n)), 0).unwrap().stamp;
    assert_eq!(stamp_of(&intent_log, 3), 7, "as the members had when it left");
    stamped(&mut intent_log, 9);
    assert_eq!(stamp_of(&intent_log, 3), 7);
    // The engine knows better about a set that it has made begin.
    let add =
        |n, stamp| MarkRegions { stamp, ..mark(RegionsOf::OutOfSync(id(n)), MarkAction::Add, &[(1, 1)]) };
    let Marked::Begin(new) = intent_log.mark(&add(4, 5)).unwrap() else { panic!("it begins") };
    intent_log.keep(new);
    assert_eq!(stamp_of(&intent_log, 4), 5);
    intent_log.mark(&add(3, 6)).unwrap();
    assert_eq!(stamp_of(&intent_log, 3), 7, "it is never older");
    let clear = MarkRegions { stamp: 9, ..mark(RegionsOf::OutOfSync(id(3)), MarkAction::Clear, &[(1, 1)]) };
    intent_log.mark(&clear).unwrap();
    assert_eq!(stamp_of(&intent_log, 3), 9);
    let file = intent_log.file(SetKey::OutOfSync(id(3))).unwrap();
    let mut again = reloaded(&intent_log);
    assert!(again.load_out_of_sync(id(3), &file).unwrap().0);
    assert_eq!(stamp_of(&again, 3), 9);
    // The page of the regions says it too.
    let mut again = reloaded(&intent_log);
    assert!(again.load_out_of_sync(id(3), &file[..PAGE_BYTES]).unwrap().0);
    assert_eq!(stamp_of(&again, 3), 9);
}

/// Returns sets whose regions have sums and are clean.
fn summed() -> WriteIntentLog {
    let mut intent_log = intent_log(10);
    intent_log.keep_unsummed(None);
    intent_log.want_sums(0..10);
    assert!(intent_log.begin_sums(0..10));
    intent_log.end_sums(true);
    assert!((0..10).all(|region| intent_log.is_summed(region)) && !intent_log.wants_sums());
    intent_log
}

fn write_page(intent_log: &mut WriteIntentLog, of: SetKey) {
    let PageWrite { slot, key, .. } = intent_log.begin_write(false).unwrap();
    assert_eq!(key, of);
    intent_log.end_write(slot, true);
}

#[test]
fn a_repair_leaves_the_sums_of_its_region_and_has_it_read_back() {
    let mut intent_log = summed();
    assert_eq!(intent_log.mark_dirty_for_repair(range(3, 1)), DirtyMark::Pending, "the members may differ");
    write_page(&mut intent_log, SetKey::Intent);
    assert_eq!(intent_log.mark_dirty_for_repair(range(3, 1)), DirtyMark::Durable);
    assert!(intent_log.is_summed(3) && intent_log.next_to_sum(0).is_none(), "it is dirty");
    intent_log.mark(&mark(RegionsOf::Intent, MarkAction::Clear, &[(3, 1)])).unwrap();
    assert_eq!(intent_log.next_to_sum(0), Some(3));
    assert!(intent_log.begin_sums(3..4) && intent_log.is_summed(3));
    intent_log.mark_dirty_for_repair(range(3, 1));
    intent_log.end_sums(true);
    assert!(intent_log.is_summed(3) && intent_log.wants_sums(), "another repair: it is read back again");
    intent_log.mark(&mark(RegionsOf::Intent, MarkAction::Clear, &[(3, 1)])).unwrap();
    assert!(intent_log.begin_sums(3..4));
    intent_log.end_sums(true);
    assert!(intent_log.is_summed(3) && !intent_log.wants_sums());
}

#[test]
fn other_data_ends_the_sums_of_a_region_that_is_read_back() {
    let mut intent_log = summed();
    intent_log.mark_dirty_for_repair(range(3, 1));
    intent_log.mark(&mark(RegionsOf::Intent, MarkAction::Clear, &[(3, 1)])).unwrap();
    assert!(intent_log.begin_sums(3..4));
    intent_log.mark_dirty(range(3, 1));
    intent_log.end_sums(true);
    assert!(!intent_log.is_summed(3) && intent_log.wants_sums());
}

/// The block may hold rot that was not found yet. A sum of that must not replace one that counts on the disk.
#[test]
fn a_region_that_is_read_back_or_about_to_be_modified_gets_no_new_sums() {
    let mut intent_log = intent_log(10);
    intent_log.keep_unsummed(None);
    intent_log.want_sums(0..10);
    assert!(!intent_log.may_have_new_sums(3), "nothing is being summed");
    assert!(intent_log.begin_sums(2..4));
    assert_eq!([1, 2, 3].map(|region| intent_log.may_have_new_sums(region)), [false, true, true]);
    assert_eq!(intent_log.mark_dirty(range(2, 1)), DirtyMark::Pending);
    assert_eq!([2, 3].map(|region| intent_log.may_have_new_sums(region)), [false, true]);
    let mut intent_log = summed();
    assert_eq!(intent_log.mark_dirty_for_repair(range(3, 1)), DirtyMark::Pending);
    write_all(&mut intent_log);
    intent_log.mark(&mark(RegionsOf::Intent, MarkAction::Clear, &[(3, 1)])).unwrap();
    assert!(intent_log.begin_sums(3..4) && !intent_log.may_have_new_sums(3), "it was repaired");
    while let Some(PageWrite { slot, .. }) = intent_log.begin_write(true) {
        intent_log.end_write(slot, true);
    }
    assert_eq!(intent_log.mark_dirty(range(3, 1)), DirtyMark::Pending);
    assert!(!intent_log.is_summed(3) && !intent_log.may_have_new_sums(3), "the record is not durable yet");
}

#[test]
fn a_region_that_cannot_be_read_is_left_out_of_the_running_sum_and_summed_later() {
    let mut intent_log = intent_log(10);
    intent_log.keep_unsummed(None);
    intent_log.want_sums(2..4);
    assert!(intent_log.begin_sums(2..4));
    intent_log.leave_out_of_sums(&(3..4));
    assert_eq!([2, 3].map(|region| intent_log.is_being_summed(region)), [true, false]);
    intent_log.end_sums(true);
    assert_eq!([2, 3].map(|region| intent_log.is_summed(region)), [true, false]);
    assert_eq!(intent_log.next_to_sum(0), Some(3));
}
