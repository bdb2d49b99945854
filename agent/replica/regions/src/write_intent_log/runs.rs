//! Sets as messages, page by page.

use shorthorn_types::{RUNS_PER_MARK_MAX, Regions};

use super::{SetKey, WriteIntentLog};

/// A page of runs of regions of a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunsPage {
    /// First region and count of each, in order, at most [`RUNS_PER_MARK_MAX`].
    pub runs: Vec<(u32, u32)>,
    /// The first region of the next page, if any.
    pub next: Option<u32>,
    /// The stamp that is kept with the set.
    pub stamp: u32,
}

impl WriteIntentLog {
    /// Returns the regions of a set from `from` on, as many as fit one message; none if the set is not kept.
    #[must_use]
    pub fn page(&self, key: SetKey, from: u32) -> Option<RunsPage> {
        self.page_for(key, from, self.regions)
    }

    /// Does the same as [`WriteIntentLog::page`], in the regions of the volume at another size.
    #[must_use]
    pub fn page_for(&self, key: SetKey, from: u32, regions: Regions) -> Option<RunsPage> {
        let set = self.find(key)?;
        let content = set.content();
        let content =
            if regions == self.regions { content } else { content.converted(self.regions, regions) };
        let mut runs = Vec::new();
        let mut next = None;
        for run in content.runs(from) {
            if runs.len() == RUNS_PER_MARK_MAX {
                next = Some(run.start);
                break;
            }
            runs.push((run.start, run.end - run.start));
        }
        Some(RunsPage { runs, next, stamp: set.stamp().unwrap_or(0) })
    }
}
