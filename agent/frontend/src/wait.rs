//! Waits with a limit for events without a descriptor: sysfs, the state of a driver, another program.

use std::io;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// The first pause between two looks. Most conditions hold within a millisecond.
const FIRST_PAUSE: Duration = Duration::from_micros(200);
/// The longest pause: short enough for people, long compared with the cost of a look.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// Calls `look` until it finds something, at most for `limit`; then returns none. The last look comes after
/// the limit, so a thread that did not run for a while still finds a late result.
pub(crate) fn until<T, E>(
    limit: Duration,
    mut look: impl FnMut() -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    let deadline = Instant::now() + limit;
    let mut pause = FIRST_PAUSE;
    loop {
        let last = Instant::now() >= deadline;
        if let Some(found) = look()? {
            return Ok(Some(found));
        }
        if last {
            return Ok(None);
        }
        thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Runs `work` on its own thread and waits at most `limit`. After that the thread is left alone, because it
/// may be in a call to the kernel that never returns.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`], or why the thread can not start.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    thread::Builder::new().name("bounded".into()).spawn(move || {
        // The receiver is gone after the limit.
        let _ = sender.send(work());
    })?;
    receiver.recv_timeout(limit).unwrap_or_else(|_| Err(timed_out(limit)))
}

/// Returns the error that nothing happened for `limit`.
pub(crate) fn timed_out(limit: Duration) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {limit:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_its_check_until_the_limit() {
        let mut looks = 0;
        let found = until(Duration::from_secs(60), || {
            looks += 1;
            Ok::<_, ()>((looks == 5).then_some("there"))
        });
        assert_eq!((found, looks), (Ok(Some("there")), 5));
        assert_eq!(until(Duration::ZERO, || Ok::<Option<()>, ()>(None)), Ok(None));
        assert_eq!(until(Duration::from_secs(60), || Err::<Option<()>, _>("broken")), Err("broken"));
    }

    #[test]
    fn work_that_hangs_is_left_behind() {
        assert_eq!(within(Duration::from_secs(60), || Ok(7)).unwrap(), 7);
        let (_never, forever) = mpsc::channel::<()>();
        let error = within(Duration::from_millis(1), move || {
            let _ = forever.recv();
            Ok(())
        });
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
