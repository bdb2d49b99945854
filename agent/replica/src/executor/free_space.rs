use std::time::Instant;

use crate::limits::FREE_SPACE_PERIOD;

/// The free space of the disk according to the last query.
#[derive(Debug, Default)]
pub(super) struct FreeSpace {
    /// The time of the query, and its result in MiB.
    last: Option<(Instant, Option<u32>)>,
}

impl FreeSpace {
    /// Returns the free space in MiB; none if the file system does not report it. The disk is asked through
    /// `query` for the free bytes if the last result is too old.
    pub fn mib(&mut self, now: Instant, query: impl FnOnce() -> Option<u64>) -> Option<u32> {
        let is_new = |at: Instant| now.saturating_duration_since(at) < FREE_SPACE_PERIOD;
        if let Some((_, free_mib)) = self.last.filter(|(at, _)| is_new(*at)) {
            return free_mib;
        }
        let free_mib = query().map(|free_bytes| u32::try_from(free_bytes >> 20).unwrap_or(u32::MAX));
        self.last = Some((now, free_mib));
        free_mib
    }

    /// Forgets the last result: a request has found no space.
    pub fn forget(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_is_asked_once_in_a_period_and_after_a_lack_of_space() {
        let (mut free, start) = (FreeSpace::default(), Instant::now());
        assert_eq!(free.mib(start, || Some(5 << 20)), Some(5));
        let soon = start + FREE_SPACE_PERIOD / 2;
        assert_eq!(free.mib(soon, || panic!("the last result counts")), Some(5));
        free.forget();
        assert_eq!(free.mib(soon, || Some((4 << 20) - 1)), Some(3));
        assert_eq!(free.mib(soon + FREE_SPACE_PERIOD, || None), None, "the file system does not report it");
        assert_eq!(free.mib(soon + FREE_SPACE_PERIOD * 2, || Some(u64::MAX)), Some(u32::MAX));
    }
}
