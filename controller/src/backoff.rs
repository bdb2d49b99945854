//! The wait between tries of a call or a run that fails.

use std::time::Duration;

/// The first wait after a failure.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
/// The longest wait after repeated failures.
const BACKOFF_MAX: Duration = Duration::from_secs(10);

/// Returns the wait before the try after that many failures.
pub(crate) fn backoff(failures: u32) -> Duration {
    let factor = 1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
    BACKOFF_MIN.saturating_mul(factor).min(BACKOFF_MAX)
}

/// Waits before the try after that many failures; for ever without one.
pub(crate) async fn wait_after(failures: u32) {
    match failures {
        0 => std::future::pending().await,
        failures => tokio::time::sleep(backoff(failures)).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_up_to_the_longest() {
        let waits_ms = [1, 2, 3, 4].map(|failures| backoff(failures).as_millis());
        assert_eq!(waits_ms, [50, 100, 200, 400]);
        assert_eq!(backoff(u32::MAX), BACKOFF_MAX);
    }
}
