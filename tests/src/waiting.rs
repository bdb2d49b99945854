use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use shorthorn_testkit::waiting::retry;

/// Looks again and again until `look` finds something, and returns it.
///
/// # Errors
/// Nothing is found within `limit`; the message has the last error, or the last reason for `Err`.
pub fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let message = || format!("no {what} within {limit:?}");
    // None stands for a look that found nothing.
    let found = retry(limit, || match look() {
        Ok(Some(found)) => Ok(found),
        Ok(None) => Err(None),
        Err(error) => Err(Some(error)),
    });
    match found {
        Ok(found) => Ok(found),
        Err(Some(error)) => Err(error).with_context(message),
        Err(None) => Err(anyhow!(message())),
    }
}
