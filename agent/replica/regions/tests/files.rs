//! Tests files of sets that are damaged or come from other programs. No content makes the write-intent log
//! panic, and unreadable pages count as full: a set never loses a region by that.
#![allow(clippy::unwrap_used)] // an unexpected value fails the test

use proptest::collection::vec;
use proptest::prelude::*;
use shorthorn_regions::{PAGE_BYTES, PageWrite, SetKey, WriteIntentLog};
use shorthorn_types::{ByteRange, MarkRegions, RegionSet, Regions, ReplicaId};

const SIZE_BYTES: u64 = 1 << 30;
const EPOCH: u64 = 5;
/// The page of regions, and the page of the stamp.
const PAGES: usize = 2;
const HEADER_BYTES: usize = 64;
const CHECK_AT: usize = 60;

fn regions() -> Regions {
    Regions::of(SIZE_BYTES)
}

/// Returns a file of a set that has some regions.
fn file() -> Vec<u8> {
    let mut set = RegionSet::empty(regions().count());
    [3, 4, 77].into_iter().for_each(|region| {
        set.insert(region);
    });
    WriteIntentLog::new(regions(), EPOCH, &set).file(SetKey::Intent).unwrap()
}

/// Makes the check of a page fit, as an attacker does.
fn mend(file: &mut [u8]) {
    for page in file.chunks_exact_mut(PAGE_BYTES) {
        page[CHECK_AT..HEADER_BYTES].fill(0);
        let check = crc32c::crc32c(page).to_le_bytes();
        page[CHECK_AT..HEADER_BYTES].copy_from_slice(&check);
    }
}

/// Loads a file as both kinds of sets, and uses the write-intent log like a replica does.
fn use_file(file: &[u8], size_bytes: u64) -> WriteIntentLog {
    let divided = Regions::of(size_bytes);
    let (mut intent_log, _) = WriteIntentLog::load(divided, EPOCH, file);
    let _ = intent_log.load_out_of_sync(ReplicaId::from_random(7), file);
    let _ = (intent_log.stamp(), intent_log.is_outgrown(SetKey::Intent), intent_log.file(SetKey::Intent));
    let grown = intent_log.grown(Regions::of(size_bytes * 2));
    assert!(grown.files().count() > 0);
    let content = intent_log.content(SetKey::Intent).unwrap();
    let _ = intent_log.mark_dirty(ByteRange::new(0, size_bytes.min(1 << 20)).unwrap());
    let _ = intent_log.mark(&MarkRegions::stamp(u32::MAX));
    for _ in 0..PAGES {
        while let Some(PageWrite { slot, .. }) = intent_log.begin_write(false) {
            intent_log.end_write(slot, true);
        }
    }
    let now = intent_log.content(SetKey::Intent).unwrap();
    assert!(content.runs(0).all(|run| now.contains_all(run)), "nothing was cleared");
    intent_log
}

#[test]
fn a_file_reads_as_it_was_written() {
    let (intent_log, damages) = WriteIntentLog::load(regions(), EPOCH, &file());
    assert_eq!(damages, []);
    assert_eq!(intent_log.content(SetKey::Intent).unwrap().len(), 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_bytes_are_a_set(start in vec(any::<u8>(), 0..200), length in 0usize..3 * PAGE_BYTES, mends: bool) {
        let mut bytes = start;
        bytes.resize(length, 0xa5);
        if mends {
            mend(&mut bytes);
        }
        let intent_log = use_file(&bytes, SIZE_BYTES);
        prop_assert!(intent_log.content(SetKey::Intent).unwrap().contains_all(0..regions().count()), "all is in it");
    }

    #[test]
    fn a_changed_file_loses_no_region_unless_its_check_fits(
        changes in vec((0usize..2 * HEADER_BYTES, any::<u8>()), 0..4),
        cut in prop::option::of(0usize..PAGES * PAGE_BYTES),
        mends: bool,
        size_bytes in prop::sample::select(vec![SIZE_BYTES, 2 * SIZE_BYTES, SIZE_BYTES / 2, 1 << 20]),
    ) {
        let mut bytes = file();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut);
        }
        if mends {
            mend(&mut bytes);
        }
        let intent_log = use_file(&bytes, size_bytes);
        if !mends && size_bytes == SIZE_BYTES {
            let content = intent_log.content(SetKey::Intent).unwrap();
            prop_assert!([3, 4, 77].into_iter().all(|region| content.contains(region)));
        }
    }

    /// The numbers in a header that would overflow.
    #[test]
    fn the_largest_numbers_do_not_overflow(
        at in prop::sample::select(vec![12usize, 24, 32, 40, 48, 56]), page in 0..PAGES
    ) {
        let mut bytes = file();
        let from = page * PAGE_BYTES + at;
        bytes[from..from + 4].fill(0xff);
        if at != 12 && at != 56 {
            bytes[from + 4..from + 8].fill(0xff);
        }
        mend(&mut bytes);
        use_file(&bytes, SIZE_BYTES);
    }
}
