//! Volumes that grow.

use shorthorn_types::RegionsOf;

use super::*;

const COPY: u16 = 8;
/// A size at which regions are twice as large as those of [`SIZE_BYTES`].
const LARGE_BYTES: u64 = 100 << 30;

fn expanded(out: &[Output]) -> Option<u64> {
    out.iter().find_map(|output| match output {
        Output::Expanded { size_bytes } => Some(*size_bytes),
        _ => None,
    })
}

#[test]
fn the_added_range_is_served_and_counted() {
    let mut bench = Bench::new(3);
    bench.submit(0, WRITE, 7 * REGION_BLOCKS);
    let out = bench.apply(Event::Expand { size_bytes: 2 * SIZE_BYTES });
    assert_eq!(expanded(&out), Some(2 * SIZE_BYTES));
    assert_eq!(expanded(&bench.apply(Event::Expand { size_bytes: SIZE_BYTES })), Some(2 * SIZE_BYTES));
    assert_eq!(sent_to(&bench.submit(1, WRITE, 15 * REGION_BLOCKS), 1), [0, 1, 2]);
    assert_eq!(bench.core.copy_progress().dirty_bytes, 2 * 65536);
    bench.lose(2);
    let out_of_sync = bench.core.out_of_sync(2).unwrap().iter().collect::<Vec<_>>();
    assert_eq!(out_of_sync, [7, 15]);
}

#[test]
fn regions_that_become_larger_wait_for_those_that_are_made_equal() {
    let mut config = config(3, 3);
    config.dirty = region_set(&[1, 4]);
    let mut bench = Bench::with(&config);
    let first = bench.tick(1);
    let out = bench.apply(Event::Expand { size_bytes: LARGE_BYTES });
    assert_eq!(expanded(&out), None);
    assert_eq!(sent_to(&bench.submit(0, WRITE, 7 * REGION_BLOCKS), 0), [0, 1, 2], "others go on");
    let out = bench.answer(first, &[]);
    let at = |wanted: &Output| out.iter().position(|output| output == wanted);
    let grown = at(&Output::Expanded { size_bytes: LARGE_BYTES });
    assert!(grown.is_some() && at(&Output::Resynced) < grown, "{out:?}");
    assert_eq!(bench.core.regions(), Regions::of(LARGE_BYTES));
    // 1, 4 and 7 of the regions before.
    assert_eq!(bench.core.copy_progress().dirty_bytes, 3 * 131_072);
}

#[test]
fn regions_that_a_replica_misses_are_copied_in_the_larger_size() {
    let mut config = config(3, 2);
    config.out_of_sync[2] = region_set(&[3, 6]);
    let mut bench = Bench::with(&config);
    let start_rebuild_of = Event::Rebuild { peer: 2, missing: Box::new(region_set(&[])) };
    let first = bench.apply(start_rebuild_of);
    let out = bench.apply(Event::Expand { size_bytes: LARGE_BYTES });
    assert_eq!(expanded(&out), None, "a copy of a region is under way");
    let out = bench.answer(first, &[]);
    assert_eq!(expanded(&out), Some(LARGE_BYTES));
    let rebuilt = out.iter().position(|output| *output == Output::Rebuilt { peer: 2 });
    assert!(rebuilt.is_some(), "{out:?}");
    for output in &out {
        if let Output::Mark { change, .. } = output {
            assert_ne!(change.of, RegionsOf::Allocated);
            assert!([Some(SIZE_BYTES), Some(LARGE_BYTES)].contains(&change.size_bytes));
        }
    }
}

/// Marks name regions: the answer to one must find the regions that it is about.
#[test]
fn regions_that_become_larger_wait_for_those_that_are_being_cleared() {
    let mut bench = Bench::new(3);
    let written = bench.submit(0, WRITE, 2 * REGION_BLOCKS);
    bench.answer(written, &[]);
    bench.apply(Event::ClearAll);
    bench.reply(0, COPY, Ok(()));
    bench.reply(1, COPY, Ok(()));
    let flushed = bench.reply(2, COPY, Ok(()));
    assert_eq!(marks(&flushed).len(), 3, "{flushed:?}");
    assert_eq!(expanded(&bench.apply(Event::Expand { size_bytes: LARGE_BYTES })), None);
    let out = bench.answer(flushed, &[]);
    assert_eq!(expanded(&out), Some(LARGE_BYTES));
    assert_eq!(bench.core.copy_progress().dirty_bytes, 0);
}

/// Sends modifications of the new part to the members only, so that the rebuilding replica misses the region.
/// The running copy ends at the former end of the region.
#[test]
fn a_last_region_that_grows_while_it_is_copied_is_copied_again() {
    let mut config = config(3, 2);
    config.size_bytes = SIZE_BYTES - 32768;
    config.out_of_sync[2] = region_set(&[7]);
    let mut bench = Bench::with(&config);
    let first = bench.apply(Event::Rebuild { peer: 2, missing: Box::new(region_set(&[])) });
    let grown = bench.apply(Event::Expand { size_bytes: SIZE_BYTES });
    assert_eq!(expanded(&grown), Some(SIZE_BYTES));
    let written = bench.submit(0, WRITE, 8 * REGION_BLOCKS - 1);
    assert_eq!(sent_to(&written, 0), [0, 1]);
    bench.answer(written, &[]);
    let out = bench.answer(first, &[]);
    let reaches_end = |output: &Output| {
        matches!(output, Output::Send { peer: 2, operation: Operation::Write { .. }, range, .. }
            if range.end() == SIZE_BYTES)
    };
    let copied = out.iter().position(reaches_end);
    let rebuilt = out.iter().position(|output| *output == Output::Rebuilt { peer: 2 });
    assert!(copied.is_some() && copied < rebuilt, "{out:?}");
}
