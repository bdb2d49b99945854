//! Deadlines of CSI calls.

use std::time::Duration;

use tonic::metadata::MetadataMap;

/// The maximum wait, whatever the caller asks for: it may call again.
const WAIT_LIMIT: Duration = Duration::from_secs(60);
/// The answer has to be there before the caller gives up: this much of the time is left for it…
const ANSWER_PART: u32 = 10;
/// …and no more than this.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// The most digits that a time-out has.
const DIGITS_MAX: usize = 8;

/// Returns the time limit of a call with these headers.
pub(super) fn wait_limit(headers: &MetadataMap) -> Duration {
    let timeout = headers.get("grpc-timeout").and_then(|value| parse(value.to_str().ok()?));
    match timeout {
        Some(timeout) => WAIT_LIMIT.min(timeout - ANSWER_MAX.min(timeout / ANSWER_PART)),
        None => WAIT_LIMIT,
    }
}

/// Digits and a unit, as gRPC over HTTP/2 has it.
fn parse(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > DIGITS_MAX || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(number * 3600)),
        "M" => Some(Duration::from_secs(number * 60)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(timeout: Option<&str>) -> Duration {
        let mut headers = MetadataMap::new();
        if let Some(timeout) = timeout {
            headers.insert("grpc-timeout", timeout.parse().unwrap());
        }
        wait_limit(&headers)
    }

    #[test]
    fn the_caller_hears_before_it_gives_up() {
        assert_eq!(of(Some("10S")), Duration::from_secs(9));
        assert_eq!(of(Some("14999999u")), Duration::from_micros(13_999_999));
        assert_eq!(of(Some("1000m")), Duration::from_millis(900));
        assert_eq!(of(Some("0n")), Duration::ZERO);
    }

    #[test]
    fn no_call_waits_longer_than_the_limit() {
        for timeout in [
            None,
            Some("99999999H"),
            Some("2M"),
            Some("x"),
            Some(""),
            Some("S"),
            Some("1.5S"),
            Some("123456789S"),
        ] {
            assert_eq!(of(timeout), WAIT_LIMIT, "{timeout:?}");
        }
    }
}
