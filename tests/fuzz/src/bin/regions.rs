//! Files of region sets. Any content loads as a set that works; without a valid check every region is in the
//! set.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shorthorn_regions::{PAGE_BYTES, PageWrite, SetKey, WriteIntentLog};
use shorthorn_types::{ByteRange, MarkRegions, Regions, ReplicaId};

const EPOCH: u64 = 5;
/// Place of the check in a page.
const CHECK_AT: usize = 60;
const HEADER_BYTES: usize = 64;

fuzz_target!(|data: &[u8]| {
    let Some((options, rest)) = data.split_first() else { return };
    let size_bytes = 1 << (20 + options % 12);
    let mut file = vec![0; (usize::from(options >> 4) % 3 + 1) * PAGE_BYTES];
    spread(rest, &mut file);
    if options % 2 == 0 {
        make_checks_fit(&mut file);
    }
    use_file(&file, size_bytes);
});

/// Puts the bytes of `from` at the starts of the pages, as the headers decide.
fn spread(from: &[u8], file: &mut [u8]) {
    let pages = file.len() / PAGE_BYTES;
    for (page, part) in file.chunks_exact_mut(PAGE_BYTES).zip(from.chunks(from.len().div_ceil(pages).max(1)))
    {
        let length = part.len().min(PAGE_BYTES);
        page[..length].copy_from_slice(&part[..length]);
    }
}

fn make_checks_fit(file: &mut [u8]) {
    for page in file.chunks_exact_mut(PAGE_BYTES) {
        page[CHECK_AT..HEADER_BYTES].fill(0);
        let check = crc32c::crc32c(page).to_le_bytes();
        page[CHECK_AT..HEADER_BYTES].copy_from_slice(&check);
    }
}

fn use_file(file: &[u8], size_bytes: u64) {
    let regions = Regions::of(size_bytes);
    let (mut intent_log, damages) = WriteIntentLog::load(regions, EPOCH, file);
    let content = intent_log.content(SetKey::Intent).expect("every log has a write intent");
    if damages.len() * PAGE_BYTES >= file.len() {
        assert!(content.contains_all(0..regions.count()), "damaged pages count as full");
    }
    let _ = intent_log.load_out_of_sync(ReplicaId::from_random(7), file);
    assert!(intent_log.grown(Regions::of(size_bytes * 2)).files().count() > 0);
    let range = ByteRange::new(0, size_bytes.min(1 << 20)).expect("a range from 0");
    let _ = intent_log.mark_dirty(range);
    let _ = intent_log.mark(&MarkRegions::stamp(u32::MAX));
    for _ in 0..file.len() / PAGE_BYTES + 2 {
        let Some(PageWrite { slot, .. }) = intent_log.begin_write(false) else { break };
        intent_log.end_write(slot, true);
    }
    let now = intent_log.content(SetKey::Intent).expect("every log has a write intent");
    assert!(content.runs(0).all(|run| now.contains_all(run)), "a region was lost");
}
