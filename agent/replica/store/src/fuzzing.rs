//! Entry points of the fuzz targets in tests/fuzz: the parsers of records are private otherwise.

use crate::block_sums::{SUM_PAGE_BYTES, SumPage};
use crate::{boot, copy_record, epoch_record, lost_blocks, state, sums};

/// The number of the page and its series.
const PAGE: (u64, u64) = (3, 5);

/// Parses `bytes` as each of the documents.
///
/// # Panics
/// A document is accepted that is beyond its limits, or means something else once it is written again.
pub fn check_documents(bytes: &[u8]) {
    boot::fuzzing::check(bytes);
    copy_record::fuzzing::check(bytes);
    epoch_record::fuzzing::check(bytes);
    lost_blocks::fuzzing::check(bytes);
    state::fuzzing::check(bytes);
}

/// Reads `bytes` as the sums of a layer, with a check that fits.
///
/// # Panics
/// Sums are accepted that are written otherwise.
pub fn check_layer_sums(bytes: &[u8]) {
    sums::fuzzing::check(bytes);
}

/// Reads `bytes` as a page of sums of blocks, as it is and with a header that fits.
///
/// # Panics
/// A page is accepted that is written otherwise.
pub fn check_sum_page(bytes: &[u8]) {
    let mut page = SumPage::unknown();
    assert!(!page.decode(PAGE.0, PAGE.1, bytes) || bytes.len() >= SUM_PAGE_BYTES);
    let mut written = [0; SUM_PAGE_BYTES];
    for (block, sum) in bytes.chunks_exact(4).enumerate() {
        page.set(block, u32::from_le_bytes([sum[0], sum[1], sum[2], sum[3]]));
    }
    page.encode(PAGE.0, PAGE.1, &mut written);
    let mut again = SumPage::unknown();
    assert!(again.decode(PAGE.0, PAGE.1, &written) && again == page);
    let at = bytes.first().map_or(0, |byte| usize::from(*byte) * 16);
    written[at] ^= 1;
    assert!(!again.decode(PAGE.0, PAGE.1, &written) && again.is_unknown(), "a changed page");
}
