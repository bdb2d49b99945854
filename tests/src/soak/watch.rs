//! The load on a volume, on its own thread, and its observations.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use crate::guest::{Guest, VolumeClient, Wait};

/// A load on any device of the volume.
pub(super) type Load = Guest<Box<dyn VolumeClient + Send>>;

/// Between two rounds of requests: several volumes share the processors.
const PACE: Duration = Duration::from_millis(10);

/// The observations since the last look, unless a field says otherwise.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub longest: Wait,
    pub errors: Vec<String>,
    /// The number of connections that the load has made again since it began.
    pub reconnections: u64,
}

/// A load that runs until [`Watch::finish`], or until it sees a violation.
#[derive(Debug)]
pub(super) struct Watch {
    thread: JoinHandle<Result<Load>>,
    shared: Arc<WatchState>,
}

#[derive(Debug, Default)]
struct WatchState {
    stop: AtomicBool,
    state: Mutex<LoadProgress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct LoadProgress {
    seen: Seen,
    has_ended: bool,
    /// All requests from before have been answered.
    answered: Option<Instant>,
}

impl Watch {
    pub fn start(mut guest: Load) -> Watch {
        let shared: Arc<WatchState> = Arc::default();
        let watched = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            let outcome = watched.run(&mut guest);
            watched.record(&mut guest);
            watched.lock().has_ended = true;
            watched.changed.notify_all();
            outcome.map(|()| guest)
        });
        Watch { thread, shared }
    }

    /// Waits until every request from before `since` is answered.
    ///
    /// # Errors
    /// They are not within `limit`, or the load has ended; [`Watch::finish`] has the reason.
    pub fn wait_for_answers(&self, since: Instant, limit: Duration) -> Result<()> {
        let waits = |state: &mut LoadProgress| {
            !state.has_ended && state.answered.is_none_or(|answered| answered < since)
        };
        let state = self.shared.changed.wait_timeout_while(self.shared.lock(), limit, waits);
        let (state, timeout) = state.unwrap_or_else(PoisonError::into_inner);
        ensure!(!state.has_ended, "the load has ended");
        ensure!(!timeout.timed_out(), "requests have no answer {limit:?} after the volume is whole");
        Ok(())
    }

    /// Takes the observations since the last call.
    pub fn take(&self) -> Seen {
        let seen = &mut self.shared.lock().seen;
        let reconnections = seen.reconnections;
        Seen { reconnections, ..std::mem::replace(seen, Seen { reconnections, ..Seen::default() }) }
    }

    pub fn has_ended(&self) -> bool {
        self.shared.lock().has_ended
    }

    /// Ends the load.
    ///
    /// # Errors
    /// The error that has ended it before.
    pub fn finish(self) -> Result<Load> {
        self.shared.stop.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(outcome) => outcome,
            Err(_) => bail!("the load panicked"),
        }
    }
}

impl WatchState {
    fn lock(&self) -> MutexGuard<'_, LoadProgress> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, guest: &mut Load) -> Result<()> {
        while !self.stop.load(Ordering::Relaxed) {
            guest.step()?;
            self.record(guest);
            thread::sleep(PACE);
        }
        Ok(())
    }

    fn record(&self, guest: &mut Load) {
        let (longest, errors) = (guest.take_longest_wait(), guest.take_errors());
        let oldest = guest.oldest_in_flight().unwrap_or_default();
        let mut state = self.lock();
        if longest.time > state.seen.longest.time {
            state.seen.longest = longest;
        }
        state.seen.errors.extend(errors);
        state.seen.reconnections = guest.reconnections();
        state.answered = Instant::now().checked_sub(oldest);
        drop(state);
        self.changed.notify_all();
    }
}
