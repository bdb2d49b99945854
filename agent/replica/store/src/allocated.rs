//! The regions of the volume in which any layer has data.

use shorthorn_types::{ByteRange, RUNS_PER_MARK_MAX, RegionSet, Regions};

use crate::chain::Chain;
use crate::error::StoreError;

/// The maximum number of questions of one call to the file system about a layer's data. Each takes a
/// microsecond or two.
const QUESTIONS_MAX: usize = 4096;

/// A page of runs of regions, first and count, and the region to continue from.
pub type AllocatedRuns = (Vec<(u32, u32)>, Option<u32>);

impl Chain<'_> {
    /// The runs of regions from `from` on where any layer has data, or that are in `also`. Bounded in length
    /// and time: it may stop early, and then returns where to continue. Holes of any size cost nothing.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn allocated(
        &self,
        regions: Regions,
        from: u32,
        also: &RegionSet,
    ) -> Result<AllocatedRuns, StoreError> {
        let region_bytes = regions.region_bytes();
        let mut runs: Vec<(u32, u32)> = Vec::new();
        // The next data in each layer; each is queried again only after that has been passed.
        let mut layers: Vec<_> =
            self.files().into_iter().map(|file| (file, Some(ByteRange::EMPTY))).collect();
        let mut questions = 0;
        let mut at = from;
        while at < regions.count() {
            if questions >= QUESTIONS_MAX {
                return Ok((runs, Some(at)));
            }
            let at_bytes = u64::from(at) * region_bytes;
            let mut first: Option<ByteRange> = None;
            for (file, next) in &mut layers {
                if next.is_some_and(|data| data.end() <= at_bytes) {
                    *next = self.next_data(*file, at_bytes)?;
                    questions += 2;
                }
                first = [first, *next].into_iter().flatten().min_by_key(|data| data.offset().max(at_bytes));
            }
            let touched = first.map(|data| regions.touched(data)).filter(|touched| !touched.is_empty());
            let other = also.next(at).map(|region| region..region + 1);
            let touched = [touched, other].into_iter().flatten().min_by_key(|touched| touched.start.max(at));
            let Some(touched) = touched.filter(|touched| !touched.is_empty()) else { break };
            let start = touched.start.max(at);
            let count = touched.end - start;
            let is_full = runs.len() == RUNS_PER_MARK_MAX;
            match runs.last_mut() {
                Some(run) if run.0 + run.1 == start => run.1 += count,
                _ if is_full => return Ok((runs, Some(start))),
                _ => runs.push((start, count)),
            }
            at = touched.end;
        }
        Ok((runs, None))
    }
}
