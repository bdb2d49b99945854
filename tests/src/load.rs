use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use crate::guest::Guest;

/// A [`Guest`] on its own thread, beside the test.
#[derive(Debug)]
pub struct Load {
    thread: JoinHandle<Result<Guest>>,
    shared: Arc<LoadState>,
}

#[derive(Debug, Default)]
struct LoadState {
    stop: AtomicBool,
    answered: AtomicU64,
}

impl Load {
    /// Lets a guest run until [`Load::finish`], or its first error.
    #[must_use]
    pub fn start(mut guest: Guest) -> Load {
        let shared: Arc<LoadState> = Arc::default();
        let seen = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            while !seen.stop.load(Ordering::Relaxed) {
                guest.step()?;
                seen.answered.store(guest.counts().answered, Ordering::Relaxed);
            }
            Ok(guest)
        });
        Load { thread, shared }
    }

    /// Answers so far.
    #[must_use]
    pub fn answered(&self) -> u64 {
        self.shared.answered.load(Ordering::Relaxed)
    }

    /// Waits for `more` answers, and returns the duration.
    ///
    /// # Errors
    /// They do not come within `limit`, or the guest has ended; [`Load::finish`] has the reason.
    pub fn wait_for_answers(&self, more: u64, limit: Duration) -> Result<Duration> {
        let (started, target) = (Instant::now(), self.answered() + more);
        while self.answered() < target {
            self.check()?;
            let waited = started.elapsed();
            ensure!(waited < limit, "{} of {target} answers after {waited:?}", self.answered());
            std::thread::sleep(Duration::from_millis(2)); // a thread's counter cannot be waited for
        }
        Ok(started.elapsed())
    }

    /// Returns an error if the guest has ended.
    ///
    /// # Errors
    /// The guest has ended; [`Load::finish`] has the reason.
    pub fn check(&self) -> Result<()> {
        ensure!(!self.thread.is_finished(), "the load has ended with an error");
        Ok(())
    }

    /// Ends the load, its requests in flight excepted; see [`Guest::drain`] and
    /// [`Guest::compare_everything`].
    ///
    /// # Errors
    /// The violation that the guest has found.
    pub fn finish(self) -> Result<Guest> {
        self.shared.stop.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(outcome) => outcome,
            Err(_) => bail!("the load panicked"),
        }
    }
}

/// Runs `body` beside a load and compares everything at the end. If both fail, the error of the load counts,
/// because it is more specific.
///
/// # Errors
/// The violation that the guest has found, else the error of `body`.
pub fn under_load<T>(guest: Guest, body: impl FnOnce(&Load) -> Result<T>) -> Result<(T, Guest)> {
    let load = Load::start(guest);
    let outcome = body(&load);
    let mut guest = match (load.finish(), &outcome) {
        (Err(found), Err(also)) => return Err(found.context(format!("and: {also:#}"))),
        (found, _) => found?,
    };
    let outcome = outcome?;
    guest.compare_everything()?;
    Ok((outcome, guest))
}
