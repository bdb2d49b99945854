//! Limits the speed of copies and comparisons over control connections.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use shorthorn_types::limits::MAX_IO_BYTES;

/// A limit of speed is kept to within this: pieces are small enough for that.
const PACE: Duration = Duration::from_millis(250);
const SMALLEST_PIECE_BYTES: u64 = 64 << 10;

/// Returns the size of a copied piece at `rate` bytes per second; none: no limit.
pub fn piece_bytes(rate: Option<NonZeroU64>) -> u64 {
    let longest = u64::from(MAX_IO_BYTES);
    let Some(rate) = rate else { return longest };
    let paced = rate.get() / (1000 / u64::try_from(PACE.as_millis()).unwrap_or(1));
    (paced - paced % SMALLEST_PIECE_BYTES).clamp(SMALLEST_PIECE_BYTES, longest)
}

/// Limits the speed of a copy: returns the pause after each piece. Time that was not used is lost.
#[derive(Debug)]
pub struct Pacer {
    /// The time at which the copies so far are within the limit.
    due: Instant,
}

impl Pacer {
    pub fn new(now: Instant) -> Pacer {
        Pacer { due: now }
    }

    pub fn pause(&mut self, rate: Option<NonZeroU64>, bytes: u64, now: Instant) -> Duration {
        let Some(rate) = rate else {
            self.due = now;
            return Duration::ZERO;
        };
        let took = Duration::from_micros(bytes.saturating_mul(1_000_000) / rate);
        self.due = self.due.max(now.checked_sub(PACE).unwrap_or(now)) + took;
        self.due.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_and_bounded() {
        let at = |rate| piece_bytes(NonZeroU64::new(rate));
        assert_eq!(piece_bytes(None), 1 << 20);
        assert_eq!((at(1), at(1 << 20), at(1 << 40)), (64 << 10, 256 << 10, 1 << 20));
        assert_eq!(at(1_000_000) % 4096, 0);
    }

    #[test]
    fn a_speed_is_kept() {
        let begin = Instant::now();
        let mut now = begin;
        let mut pacer = Pacer::new(begin);
        for _ in 0..100 {
            now += pacer.pause(NonZeroU64::new(1 << 20), 256 << 10, now) + Duration::from_millis(3);
        }
        let took = now.duration_since(begin).as_secs_f64();
        assert!((24.0..26.0).contains(&took), "100 pieces of 256 KiB at 1 MiB/s took {took} s");
        assert_eq!(pacer.pause(None, 1 << 20, now), Duration::ZERO, "no limit any more");
    }
}
