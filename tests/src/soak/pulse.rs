//! The delays of the machine itself: a thread wakes at fixed times and writes to the disk. No fault hinders
//! it.
//!
//! A volume cannot answer sooner than its processes run and its disks write. Its limits grant it these
//! delays.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

const INTERVAL: Duration = Duration::from_millis(100);
/// The beats that are remembered: a quarter of an hour, longer than any episode.
const BEATS_MAX: usize = 9000;

/// Measures until [`Pulse::finish`].
#[derive(Debug)]
pub(super) struct Pulse {
    thread: JoinHandle<Result<()>>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    beats: Mutex<Beats>,
}

/// The last beats.
#[derive(Debug, Default)]
struct Beats {
    ended: VecDeque<Beat>,
    /// The time at which the beat under way should have ended.
    due: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Beat {
    end: Instant,
    late: Duration,
}

impl Pulse {
    /// Writes to a file in `dir`.
    pub fn start(dir: &Path) -> Result<Pulse> {
        let path = dir.join("pulse");
        let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let shared: Arc<Shared> = Arc::default();
        let beaten = Arc::clone(&shared);
        let thread = thread::spawn(move || beaten.run(&file).context("measuring the delays of the disk"));
        Ok(Pulse { thread, shared })
    }

    /// Returns the longest delay since `since`.
    pub fn longest_since(&self, since: Instant) -> Duration {
        self.shared.lock().longest(since, Instant::now())
    }

    /// # Errors
    /// A write has failed: the delays are unknown.
    pub fn finish(self) -> Result<()> {
        self.shared.stop.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(outcome) => outcome,
            Err(_) => bail!("the thread that measures delays panicked"),
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Beats> {
        self.beats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, file: &File) -> Result<()> {
        while !self.stop.load(Ordering::Relaxed) {
            let due = Instant::now() + INTERVAL;
            self.lock().due = Some(due);
            // The interval is the thing that is measured.
            thread::sleep(INTERVAL);
            file.write_all_at(&[0; 512], 0)?;
            file.sync_data()?;
            self.lock().ended(due, Instant::now());
        }
        Ok(())
    }
}

impl Beats {
    fn ended(&mut self, due: Instant, end: Instant) {
        if self.ended.len() == BEATS_MAX {
            self.ended.pop_front();
        }
        self.ended.push_back(Beat { end, late: end.saturating_duration_since(due) });
        self.due = None;
    }

    fn longest(&self, since: Instant, now: Instant) -> Duration {
        let ended = self.ended.iter().rev().take_while(|beat| beat.end >= since).map(|beat| beat.late);
        let under_way = self.due.map(|due| now.saturating_duration_since(due));
        ended.chain(under_way).max().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_delay_of_the_time_counts() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut beats = Beats::default();
        assert_eq!(beats.longest(start, at(50)), Duration::ZERO);
        beats.ended(at(100), at(900));
        beats.ended(at(1000), at(1020));
        assert_eq!(beats.longest(start, at(1100)), Duration::from_millis(800));
        assert_eq!(beats.longest(at(901), at(1100)), Duration::from_millis(20));
        beats.due = Some(at(1120));
        assert_eq!(beats.longest(at(901), at(1100)), Duration::from_millis(20));
        assert_eq!(beats.longest(at(901), at(1220)), Duration::from_millis(100));
        (0..BEATS_MAX).for_each(|_| beats.ended(at(2000), at(2001)));
        assert_eq!(beats.longest(start, at(2002)), Duration::from_millis(1), "the old ones are forgotten");
    }

    #[test]
    fn a_disk_is_written_and_stays_so_until_the_end() {
        let temp = tempfile::tempdir().unwrap();
        let pulse = Pulse::start(temp.path()).unwrap();
        while pulse.shared.lock().ended.is_empty() {
            thread::yield_now();
        }
        pulse.finish().unwrap();
        assert!(Pulse::start(&temp.path().join("missing")).is_err());
    }
}
