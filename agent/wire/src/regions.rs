use serde::{Deserialize, Serialize};
use shorthorn_types::RegionsOf;
use shorthorn_types::limits::MAX_QUEUES;

/// The queue number of a connection that carries no requests of a frontend: the engine's main thread asks
/// and copies over it.
pub const CONTROL_QUEUE: u16 = MAX_QUEUES;

/// Asks for the regions of a set, a page at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionsQuery {
    /// The set to list.
    pub of: RegionsOf,
    /// The first region of interest.
    pub from: u32,
    /// The size of the volume in whose regions is asked and answered, as in
    /// [`MarkRegions`](shorthorn_types::MarkRegions). None, which is 0 in the message: the replica's own.
    #[serde(default, with = "shorthorn_types::optional::number")]
    pub size_bytes: Option<u64>,
}

/// Orders a replica to grow with the volume: it enlarges itself durably before it answers. It never shrinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpandReplica {
    /// The new size of the volume.
    pub size_bytes: u64,
}

/// A page of the regions of a set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionsPage {
    /// True if the replica keeps this set at all. Missed regions that are not kept are not known.
    pub kept: bool,
    /// First region and count of each run, in order, at most
    /// [`RUNS_PER_MARK_MAX`](shorthorn_types::RUNS_PER_MARK_MAX).
    pub runs: Vec<(u32, u32)>,
    /// The first region of the next page, if any.
    #[serde(deserialize_with = "Option::deserialize")] // a text that does not have it is refused
    pub next: Option<u32>,
    /// The stamp that is kept with the set: see [`is_current`](shorthorn_types::is_current). 0 of a set that
    /// is not kept.
    #[serde(default)]
    pub stamp: u32,
}

impl RegionsPage {
    /// The answer for a set that is not kept.
    pub const NONE: RegionsPage = RegionsPage { kept: false, runs: Vec::new(), next: None, stamp: 0 };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_without_a_size_is_sent_with_zero() {
        let query = |size_bytes| RegionsQuery { of: RegionsOf::Intent, from: 4, size_bytes };
        for (size_bytes, sent) in [(None, 0), (Some(4096), 4096)] {
            let text = serde_json::to_value(query(size_bytes)).unwrap();
            assert_eq!((&text["from"], &text["size_bytes"]), (&4.into(), &sent.into()));
            assert_eq!(serde_json::from_value::<RegionsQuery>(text).unwrap(), query(size_bytes));
        }
    }
}
