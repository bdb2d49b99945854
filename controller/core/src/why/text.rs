//! Times for people.

use crate::Timestamp;

/// Formats seconds in the two largest units.
pub(super) fn duration(seconds: u64) -> String {
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    match (hours, minutes) {
        (0, 0) => format!("{seconds} s"),
        (0, _) => format!("{minutes} min {} s", seconds % 60),
        (1..=47, _) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{} days", hours / 24),
    }
}

/// Returns the milliseconds from `since` to `now`; 0 if the clock was set back.
pub(super) fn passed_ms(since: Timestamp, now: Timestamp) -> u64 {
    now.as_millisecond().saturating_sub(since.as_millisecond()).max(0).unsigned_abs()
}

/// Formats a moment and its age.
pub(super) fn age(since: Timestamp, now: Timestamp) -> String {
    let second = Timestamp::from_second(since.as_second()).unwrap_or(since);
    format!("{second} ({} ago)", duration(passed_ms(since, now) / 1000))
}
