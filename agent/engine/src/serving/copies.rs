//! The progress of running copies: the resync of the members, and the rebuild of each replica.

use std::time::{Duration, Instant};

use shorthorn_control::CopyStatus;
use shorthorn_core::PeerIndex;
use shorthorn_types::limits::MAX_MEMBERS;

use crate::status::Meter;

/// The interval of logging the progress of a copy. A copy takes minutes to hours.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Debug)]
pub(super) struct Copies {
    resync: Option<Meter>,
    /// For each replica, the copy to it.
    rebuilds: [Option<Meter>; MAX_MEMBERS],
    logged: Instant,
}

impl Copies {
    /// Begins with a resync of `resync_bytes`, if any.
    pub fn new(resync_bytes: Option<u64>, now: Instant) -> Copies {
        Copies {
            resync: resync_bytes.map(|bytes| Meter::new(bytes, now)),
            rebuilds: [const { None }; MAX_MEMBERS],
            logged: now,
        }
    }

    /// Returns true if anything is being copied.
    pub fn is_running(&self) -> bool {
        self.resync.is_some() || self.rebuilds.iter().any(Option::is_some)
    }

    /// Updates the resync, and returns its progress; none if no resync is running.
    pub fn update_resync(&mut self, left_bytes: u64, now: Instant) -> Option<CopyStatus> {
        updated(&mut self.resync, left_bytes, now)
    }

    /// Ends the resync, and returns its meter, if one was running.
    pub fn end_resync(&mut self) -> Option<Meter> {
        self.resync.take()
    }

    /// Updates the copy of snapshots to replica number `peer`, and returns its progress. Also returns true if
    /// that is its first report.
    pub fn update_snapshots(
        &mut self,
        peer: PeerIndex,
        (total_bytes, left_bytes): (u64, u64),
        now: Instant,
    ) -> (CopyStatus, bool) {
        let rebuild = &mut self.rebuilds[usize::from(peer)];
        let is_first = rebuild.is_none();
        let meter = rebuild.get_or_insert_with(|| Meter::new(total_bytes, now));
        meter.update(left_bytes, now);
        (meter.status(), is_first)
    }

    /// Begins to copy the out-of-sync regions of replica number `peer`, and returns the progress of that. The
    /// bytes of its snapshots do not count any more.
    pub fn begin_rebuild(&mut self, peer: PeerIndex, missing_bytes: u64, now: Instant) -> CopyStatus {
        self.rebuilds[usize::from(peer)].insert(Meter::new(missing_bytes, now)).status()
    }

    /// Updates the copy to replica number `peer`, and returns its progress; none if no copy is running.
    pub fn update_rebuild(&mut self, peer: PeerIndex, left_bytes: u64, now: Instant) -> Option<CopyStatus> {
        updated(&mut self.rebuilds[usize::from(peer)], left_bytes, now)
    }

    /// Returns the time for which the copy to replica number `peer` has run. Its snapshots and its regions
    /// count separately.
    pub fn rebuild_time(&self, peer: PeerIndex, now: Instant) -> Duration {
        let meter = self.rebuilds[usize::from(peer)].as_ref();
        meter.map_or(Duration::ZERO, |meter| meter.runs_for(now))
    }

    /// Ends the copy to replica number `peer`, and returns its meter, if one was running.
    pub fn end_rebuild(&mut self, peer: PeerIndex) -> Option<Meter> {
        self.rebuilds[usize::from(peer)].take()
    }

    /// Returns true if the progress is to be logged `now`. The next time is an interval later.
    pub fn begin_log(&mut self, now: Instant) -> bool {
        let is_due = now.saturating_duration_since(self.logged) >= LOG_INTERVAL;
        if is_due {
            self.logged = now;
        }
        is_due
    }
}

fn updated(meter: &mut Option<Meter>, left_bytes: u64, now: Instant) -> Option<CopyStatus> {
    let meter = meter.as_mut()?;
    meter.update(left_bytes, now);
    Some(meter.status())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_rebuild_counts_its_snapshots_and_then_its_regions() {
        let now = Instant::now();
        let mut copies = Copies::new(None, now);
        assert!(!copies.is_running() && copies.update_rebuild(2, 0, now).is_none());
        let (shown, is_first) = copies.update_snapshots(2, (100, 100), now);
        assert_eq!((shown.total_bytes, shown.left_bytes, is_first), (100, 100, true));
        let (shown, is_first) = copies.update_snapshots(2, (100, 40), now + SECOND);
        assert_eq!((shown.total_bytes, shown.left_bytes, is_first), (100, 40, false));
        assert!(copies.is_running());
        let shown = copies.begin_rebuild(2, 300, now + SECOND);
        assert_eq!((shown.total_bytes, shown.left_bytes), (300, 300));
        let shown = copies.update_rebuild(2, 200, now + 2 * SECOND).unwrap();
        assert_eq!((shown.total_bytes, shown.left_bytes), (300, 200));
        assert!(copies.update_rebuild(1, 200, now).is_none(), "another replica");
        assert_eq!(copies.end_rebuild(2).map(|meter| meter.total_bytes()), Some(300));
        assert!(!copies.is_running() && copies.end_rebuild(2).is_none());
    }

    #[test]
    fn a_resync_is_running_until_its_end() {
        let now = Instant::now();
        let mut copies = Copies::new(Some(100), now);
        assert!(copies.is_running());
        assert_eq!(copies.update_resync(30, now + SECOND).map(|shown| shown.left_bytes), Some(30));
        assert_eq!(copies.end_resync().map(|meter| meter.total_bytes()), Some(100));
        assert!(!copies.is_running() && copies.update_resync(0, now).is_none());
    }

    #[test]
    fn progress_is_logged_at_an_interval() {
        let now = Instant::now();
        let mut copies = Copies::new(None, now);
        assert!(!copies.begin_log(now + LOG_INTERVAL / 2));
        assert!(copies.begin_log(now + LOG_INTERVAL));
        assert!(!copies.begin_log(now + LOG_INTERVAL + SECOND));
        assert!(copies.begin_log(now + 2 * LOG_INTERVAL));
    }
}
