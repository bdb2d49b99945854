//! Work that may wait for the kernel for ever, on a thread that can be left behind.

use std::io;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::Instant;

/// Work under way.
#[derive(Debug)]
pub struct Bounded<T>(Receiver<T>);

impl<T: Send + 'static> Bounded<T> {
    /// Starts `work`.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(work: impl FnOnce() -> T + Send + 'static) -> io::Result<Bounded<T>> {
        let (sender, receiver) = sync_channel(1);
        thread::Builder::new().name("bounded".into()).spawn(move || {
            // The receiver is gone after the limit.
            let _ = sender.send(work());
        })?;
        Ok(Bounded(receiver))
    }

    /// Returns the result. After the deadline the thread is left behind.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`], or the work has panicked.
    pub fn wait_until(self, deadline: Instant) -> io::Result<T> {
        let limit = deadline.saturating_duration_since(Instant::now());
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, "no answer in time");
        self.0.recv_timeout(limit).map_err(late)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn work_that_hangs_is_left_behind() {
        let far = Instant::now() + Duration::from_secs(60);
        assert_eq!(Bounded::start(|| 7).unwrap().wait_until(far).unwrap(), 7);
        let (_never, for_ever) = channel::<()>();
        let hangs = Bounded::start(move || for_ever.recv().is_ok()).unwrap();
        assert_eq!(hangs.wait_until(Instant::now()).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
