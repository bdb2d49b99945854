//! Waits for the disk of the store. The kernel bounds no fsync: a disk that hangs lets no write end and no
//! thread that waits for it. Callers get an error after a limit, and no more threads begin to wait.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::lock;

/// A disk with its content, which one thread at a time uses.
#[derive(Debug)]
pub(super) struct TimedDisk<T> {
    limit: Duration,
    /// Begin of the access that has not ended.
    since: Mutex<Option<Instant>>,
    content: Mutex<T>,
}

/// An access; its end is the drop.
pub(super) struct DiskAccess<'a, T> {
    content: MutexGuard<'a, T>,
    since: &'a Mutex<Option<Instant>>,
}

impl<T> Deref for DiskAccess<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.content
    }
}

impl<T> DerefMut for DiskAccess<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.content
    }
}

impl<T> Drop for DiskAccess<'_, T> {
    fn drop(&mut self) {
        // The content is locked until after this.
        *lock(self.since) = None;
    }
}

impl<T> TimedDisk<T> {
    pub(super) fn new(limit: Duration, content: T) -> TimedDisk<T> {
        TimedDisk { limit, since: Mutex::default(), content: Mutex::new(content) }
    }

    /// The longest that a caller waits.
    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// Begins an access once no other thread has one.
    pub(super) fn access(&self) -> DiskAccess<'_, T> {
        let content = lock(&self.content);
        *lock(&self.since) = Some(Instant::now());
        DiskAccess { content, since: &self.since }
    }

    /// Checks that no access lasts longer than the limit.
    ///
    /// # Errors
    /// The time that it has lasted.
    pub(super) fn check(&self) -> Result<(), Duration> {
        let waited = lock(&self.since).map_or(Duration::ZERO, |since| since.elapsed());
        if waited < self.limit { Ok(()) } else { Err(waited) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_that_lasts_too_long_is_reported_until_it_ends() {
        let disk = TimedDisk::new(Duration::ZERO, 1);
        let long = TimedDisk::new(Duration::from_secs(3600), 1);
        assert!(long.check().is_ok(), "no access has begun");
        let (mut access, _other) = (disk.access(), long.access());
        *access += 1;
        assert!(disk.check().is_err() && long.check().is_ok());
        drop(access);
        assert_eq!(*lock(&disk.since), None);
        assert_eq!(*disk.access(), 2);
    }
}
