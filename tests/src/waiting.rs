use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// The pause between two looks at a condition without a notification.
const PAUSE: Duration = Duration::from_millis(10);

/// Looks again and again until `look` finds something, and returns it.
///
/// # Errors
/// Nothing is found within `limit`; the message has the last error, or the last reason for `Err`.
pub fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        let found = look();
        if let Ok(Some(found)) = found {
            return Ok(found);
        }
        if Instant::now() >= deadline {
            let message = format!("no {what} within {limit:?}");
            match found {
                Ok(_) => bail!("{message}"),
                Err(error) => return Err(error).context(message),
            }
        }
        std::thread::sleep(PAUSE);
    }
}
