//! Checks that the pages of a replica's answer are plausible, before any of them is used.

use shorthorn_types::limits::{BLOCK_BYTES, MAX_VOLUME_BYTES};
use shorthorn_types::{RUNS_PER_MARK_MAX, Regions, RegionsOf};
use thiserror::Error;

use crate::{ExtentsPage, ExtentsQuery, RegionsPage, RegionsQuery};

/// The reason why a page of an answer is not plausible.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the replica has answered with {0}: it breaks the protocol, or its memory is faulty")]
pub struct BadPage(String);

impl ExtentsPage {
    /// Returns an error unless this page can answer `query`: whole blocks in order, none before the page, and
    /// a next page only after a full one.
    ///
    /// # Errors
    /// [`BadPage`].
    pub fn check(&self, query: &ExtentsQuery) -> Result<(), BadPage> {
        let from_bytes = query.from_bytes / BLOCK_BYTES * BLOCK_BYTES;
        if self.extents.len() > ExtentsPage::EXTENTS_MAX {
            return Err(BadPage(format!(
                "{} extents in one page, more than {}",
                self.extents.len(),
                ExtentsPage::EXTENTS_MAX
            )));
        }
        let mut last_end_bytes = from_bytes;
        for extent in &self.extents {
            let end_bytes = extent.offset_bytes.checked_add(extent.length_bytes);
            let end_bytes = end_bytes.filter(|end| *end <= MAX_VOLUME_BYTES);
            let is_whole = extent.offset_bytes.is_multiple_of(BLOCK_BYTES)
                && extent.length_bytes.is_multiple_of(BLOCK_BYTES);
            match end_bytes {
                Some(end) if is_whole && extent.length_bytes > 0 && extent.offset_bytes >= last_end_bytes => {
                    last_end_bytes = end;
                }
                _ => {
                    return Err(BadPage(format!(
                        "an extent of {} bytes at {}, after {last_end_bytes}",
                        extent.length_bytes, extent.offset_bytes
                    )));
                }
            }
        }
        match self.next_bytes {
            Some(next) if self.extents.len() < ExtentsPage::EXTENTS_MAX || next < last_end_bytes => {
                let extents = self.extents.len();
                Err(BadPage(format!("a next page at {next} after {extents} extents up to {last_end_bytes}")))
            }
            _ => Ok(()),
        }
    }
}

impl RegionsPage {
    /// Returns an error unless this page can answer `query`, which has the regions of the question. The runs
    /// are in order within the volume, and a next page follows only a full one. For allocated regions, which
    /// take time to find, it may follow any page with a run.
    ///
    /// # Errors
    /// [`BadPage`].
    pub fn check(&self, query: &RegionsQuery) -> Result<(), BadPage> {
        let count = Regions::of(query.size_bytes).count();
        if self.runs.len() > RUNS_PER_MARK_MAX {
            return Err(BadPage(format!(
                "{} runs in one page, more than {RUNS_PER_MARK_MAX}",
                self.runs.len()
            )));
        }
        let mut last_end = query.from;
        for (start, length) in &self.runs {
            match start.checked_add(*length).filter(|end| *end <= count) {
                Some(end) if *length > 0 && *start >= last_end => last_end = end,
                _ => {
                    return Err(BadPage(format!(
                        "{length} regions from {start} on, after {last_end}, of {count}"
                    )));
                }
            }
        }
        let full = if query.of == RegionsOf::Allocated { 1 } else { RUNS_PER_MARK_MAX };
        match self.next {
            Some(next) if self.runs.len() < full || next < last_end => {
                Err(BadPage(format!("a next page at {next} after {} runs up to {last_end}", self.runs.len())))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Extent;

    fn extents(list: &[(u64, u64)], next_bytes: Option<u64>) -> Result<(), BadPage> {
        let extents =
            list.iter().map(|(start, length)| Extent { offset_bytes: *start, length_bytes: *length });
        let page = ExtentsPage { extents: extents.collect(), next_bytes };
        page.check(&ExtentsQuery { layer: 0, from_bytes: 8292 })
    }

    #[test]
    fn extents_are_whole_blocks_in_order() {
        extents(&[], None).unwrap();
        extents(&[(8192, 4096), (12288, 8192), (1 << 30, 1 << 30)], None).unwrap();
        let full: Vec<_> = (2..202).map(|block| (block * 8192, 4096)).collect();
        extents(&full, Some(202 * 8192)).unwrap();
        for (bad, next_bytes) in [
            (&[(8192, 512)][..], None),
            (&[(8704, 4096)], None),
            (&[(8192, 0)], None),
            (&[(4096, 4096)], None),
            (&[(8192, 8192), (12288, 4096)], None),
            (&[(16384, 4096), (8192, 4096)], None),
            (&[(u64::MAX - 4095, 4096)], None),
            (&[(8192, MAX_VOLUME_BYTES)], None),
            (&[(8192, 4096)], Some(12288)),
            (&[], Some(1 << 20)),
            (&full, Some(8192)),
            (&[&full[..], &[(1 << 30, 4096)]].concat(), None),
        ] {
            let error = extents(bad, next_bytes).unwrap_err().to_string();
            assert!(error.contains("the replica has answered with"), "{error}");
        }
    }

    fn runs(of: RegionsOf, runs: &[(u32, u32)], next: Option<u32>) -> Result<(), BadPage> {
        let page = RegionsPage { kept: true, runs: runs.to_vec(), next, stamp: 0 };
        page.check(&RegionsQuery { of, from: 10, size_bytes: 1 << 30 })
    }

    #[test]
    fn runs_are_in_order_within_the_volume() {
        let count = Regions::of(1 << 30).count();
        let full: Vec<_> = (5..805).map(|run| (run * 2, 1)).collect();
        for of in [RegionsOf::Intent, RegionsOf::Allocated] {
            runs(of, &[], None).unwrap();
            runs(of, &[(10, 1), (11, 5), (count - 1, 1)], None).unwrap();
            runs(of, &full, Some(1610)).unwrap();
            for (bad, next) in [
                (&[(9, 1)][..], None),
                (&[(10, 0)], None),
                (&[(10, 2), (11, 1)], None),
                (&[(count, 1)], None),
                (&[(10, u32::MAX)], None),
                (&[], Some(11)),
                (&full, Some(1608)),
                (&[&full[..], &[(2000, 1)]].concat(), None),
            ] {
                runs(of, bad, next).unwrap_err();
            }
        }
        runs(RegionsOf::Allocated, &[(10, 1)], Some(11)).unwrap();
        runs(RegionsOf::Intent, &[(10, 1)], Some(11)).unwrap_err();
    }
}
