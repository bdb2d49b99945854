//! The time of the next work on sums of blocks, and the regions with which it begins.

use std::time::{Duration, Instant};

use crate::limits::{SUM_BUSY_SHARE, SUM_SPACE_INTERVAL};

/// See the module.
#[derive(Debug)]
pub(super) struct SumSchedule {
    bytes_per_s: u64,
    /// The region from which the search for regions with data continues.
    search_from: Option<u32>,
    /// The region from which the next region to sum is searched.
    cursor: u32,
    /// The time of the next possible work; none to wait for a modification.
    next_at: Option<Instant>,
    /// Regions were summed since the set was written last.
    has_new_sums: bool,
}

impl SumSchedule {
    /// Creates the schedule of a process that starts to serve `now`. The schedule is empty unless the replica
    /// keeps block checksums.
    pub fn new(is_kept: bool, bytes_per_s: Option<u64>, now: Instant) -> SumSchedule {
        SumSchedule {
            bytes_per_s: bytes_per_s.unwrap_or_default().max(1),
            search_from: is_kept.then_some(0),
            cursor: 0,
            next_at: is_kept.then_some(now),
            has_new_sums: false,
        }
    }

    /// Starts over, with a search of all regions.
    pub fn begin_again(&mut self, now: Instant) {
        (self.search_from, self.next_at) = (Some(0), Some(now));
    }

    /// Returns the time of the next work; none to wait for a modification.
    pub fn next_at(&self) -> Option<Instant> {
        self.next_at
    }

    /// Waits for a modification.
    pub fn stop(&mut self) {
        self.next_at = None;
    }

    /// Sets the time of the next work.
    pub fn wait_until(&mut self, at: Instant) {
        self.next_at = Some(at);
    }

    /// Sets the time of the next work if none is set. The clock is not read otherwise.
    pub fn wake_at(&mut self, at: impl FnOnce() -> Instant) {
        self.next_at.get_or_insert_with(at);
    }

    /// Pauses after so much was read.
    pub fn pause(&mut self, bytes: u64, is_busy: bool, now: Instant) {
        let rate = if is_busy { (self.bytes_per_s / SUM_BUSY_SHARE).max(1) } else { self.bytes_per_s };
        let pause = Duration::from_micros(bytes.saturating_mul(1_000_000) / rate);
        self.next_at = Some(now + pause.min(SUM_SPACE_INTERVAL));
    }

    /// Returns the region from which regions with data are to be searched, unless all are known.
    pub fn search_from(&self) -> Option<u32> {
        self.search_from
    }

    /// Sets the region from which the search continues; none if it is complete.
    pub fn searched_to(&mut self, next: Option<u32>) {
        self.search_from = next;
    }

    /// Restarts the search, unless it is complete: regions are about to have other numbers.
    pub fn search_again(&mut self) {
        self.search_from = self.search_from.map(|_| 0);
    }

    /// Returns the region from which the next region to sum is searched.
    pub fn cursor(&self) -> u32 {
        self.cursor
    }

    /// Continues the search of regions to sum at `region`.
    pub fn advance(&mut self, region: u32) {
        self.cursor = region;
    }

    /// Records that regions were summed.
    pub fn record_summed(&mut self) {
        self.has_new_sums = true;
    }

    /// Returns true if regions were summed since the last call.
    pub fn take_new_sums(&mut self) -> bool {
        std::mem::take(&mut self.has_new_sums)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_follow_the_rate_and_requests_come_first() {
        let now = Instant::now();
        let mut schedule = SumSchedule::new(true, Some(1 << 20), now);
        assert_eq!(schedule.next_at(), Some(now));
        schedule.pause(2 << 20, false, now);
        assert_eq!(schedule.next_at(), Some(now + Duration::from_secs(2)));
        schedule.pause(2 << 20, true, now);
        assert_eq!(schedule.next_at(), Some(now + Duration::from_secs(16)));
        schedule.pause(u64::MAX, false, now);
        assert_eq!(schedule.next_at(), Some(now + SUM_SPACE_INTERVAL), "a pause has a bound");
    }

    #[test]
    fn without_sums_nothing_is_due_before_it_begins_again() {
        let now = Instant::now();
        let mut schedule = SumSchedule::new(false, None, now);
        schedule.search_again();
        assert_eq!((schedule.next_at(), schedule.search_from()), (None, None));
        schedule.begin_again(now);
        assert_eq!((schedule.next_at(), schedule.search_from()), (Some(now), Some(0)));
    }

    #[test]
    fn only_a_search_under_way_begins_again() {
        let mut schedule = SumSchedule::new(true, Some(1), Instant::now());
        schedule.searched_to(Some(7));
        schedule.search_again();
        assert_eq!(schedule.search_from(), Some(0));
        schedule.searched_to(None);
        schedule.search_again();
        assert_eq!(schedule.search_from(), None);
    }

    #[test]
    fn a_modification_does_not_move_work_that_has_a_time() {
        let now = Instant::now();
        let later = now + Duration::from_secs(1);
        let mut schedule = SumSchedule::new(true, Some(1), now);
        schedule.wake_at(|| later);
        assert_eq!(schedule.next_at(), Some(now));
        schedule.stop();
        schedule.wake_at(|| later);
        assert_eq!(schedule.next_at(), Some(later));
    }
}
