//! Waiting for a condition that nothing notifies of: a file, a status, a log, another process.
//!
//! Each wait looks again after a short pause, and ends with the last reason when its limit has passed.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// The shortest and the longest pause between two looks.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The length of a pause, in times of the look before it.
const PAUSE_PER_LOOK: u32 = 4;

/// Returns the pause after a look: several times as long as the look itself. A look into a virtual machine
/// would otherwise take the processor from the work that is waited for.
fn pause_after(look: Duration) -> Duration {
    look.saturating_mul(PAUSE_PER_LOOK).clamp(PAUSE_MIN, PAUSE_MAX)
}

/// Looks again and again until `look` succeeds, and returns its value.
///
/// # Errors
/// The last error, if `look` does not succeed within `limit`.
pub fn retry<T, E>(limit: Duration, mut look: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let deadline = Instant::now() + limit;
    loop {
        let begin = Instant::now();
        let result = look();
        if result.is_ok() || Instant::now() >= deadline {
            return result;
        }
        // Nothing notifies of the condition.
        std::thread::sleep(pause_after(begin.elapsed()));
    }
}

/// The asynchronous form of [`retry`].
///
/// # Errors
/// The last error, if `look` does not succeed within `limit`.
pub async fn retry_async<T, E>(limit: Duration, mut look: impl AsyncFnMut() -> Result<T, E>) -> Result<T, E> {
    let deadline = Instant::now() + limit;
    loop {
        let begin = Instant::now();
        let result = look().await;
        if result.is_ok() || Instant::now() >= deadline {
            return result;
        }
        // Nothing notifies of the condition.
        tokio::time::sleep(pause_after(begin.elapsed())).await;
    }
}

/// Returns the value of the first `look` that succeeds.
///
/// # Panics
/// No look succeeds within `limit`; the message has the condition and the last reason.
#[track_caller]
pub fn wait_for<T, E: Debug>(condition: &str, limit: Duration, look: impl FnMut() -> Result<T, E>) -> T {
    retry(limit, look).unwrap_or_else(|error| panic!("not within {limit:?}: {condition}: {error:?}"))
}

/// The asynchronous form of [`wait_for`].
///
/// # Panics
/// No look succeeds within `limit`; the message has the condition and the last reason.
pub async fn wait_for_async<T, E: Debug>(
    condition: &str,
    limit: Duration,
    look: impl AsyncFnMut() -> Result<T, E>,
) -> T {
    retry_async(limit, look)
        .await
        .unwrap_or_else(|error| panic!("not within {limit:?}: {condition}: {error:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_returns_the_first_success_or_the_last_error() {
        let mut looks = 0;
        let third = retry(Duration::from_secs(60), || {
            looks += 1;
            if looks == 3 { Ok(looks) } else { Err(looks) }
        });
        assert_eq!(third, Ok(3));
        assert_eq!(retry(Duration::ZERO, || Err::<(), _>("not there")), Err("not there"));
    }

    #[test]
    fn a_pause_is_longer_than_the_look_within_bounds() {
        assert_eq!(pause_after(Duration::from_micros(3)), PAUSE_MIN);
        assert_eq!(pause_after(Duration::from_millis(100)), Duration::from_millis(400));
        assert_eq!(pause_after(Duration::from_secs(9)), PAUSE_MAX);
    }

    #[test]
    #[should_panic(expected = "the file is there: \"no file\"")]
    fn a_wait_that_ends_names_its_condition() {
        wait_for("the file is there", Duration::ZERO, || Err::<(), _>("no file"));
    }
}
