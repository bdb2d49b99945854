use shorthorn_types::limits::MAX_IO_BYTES;

use crate::event::CopyLimits;

/// The interval at which the bucket measures the frontend's traffic and refills, in milliseconds.
const REFILL_INTERVAL_MS: u64 = 100;
/// The maximum time for which the bucket refills after a pause.
const REFILL_MS_MAX: u64 = 1000;
/// The minimum bandwidth of copies beside the busiest frontend, so that every copy ends.
const SHARE_BYTES_PER_S_MIN: u64 = 4 << 20;

/// A token bucket with the bytes that may be copied now. Its balance may fall below zero by one copy.
#[derive(Debug)]
pub(crate) struct Bucket {
    limits: CopyLimits,
    /// Absent while copies have no limit.
    tokens: Option<i64>,
    /// Bytes that the frontend has moved since the last refill.
    moved_bytes: u64,
    refilled_at_ms: u64,
}

impl Bucket {
    pub fn new(limits: CopyLimits) -> Bucket {
        let tokens = limits.bytes_per_s.map(|_| i64::from(MAX_IO_BYTES));
        Bucket { limits, tokens, moved_bytes: 0, refilled_at_ms: 0 }
    }

    pub fn set_limits(&mut self, limits: CopyLimits) {
        self.limits = limits;
    }

    /// Counts `bytes` that the frontend has moved.
    pub fn moved(&mut self, bytes: u64) {
        self.moved_bytes = self.moved_bytes.saturating_add(bytes);
    }

    /// Returns true if `bytes` may be copied now, and takes them from the bucket.
    pub fn take(&mut self, bytes: u64) -> bool {
        let may = self.tokens.is_none_or(|tokens| tokens > 0);
        if may {
            self.pay(bytes);
        }
        may
    }

    /// Takes the bytes of a copy that cannot wait. The debt is bounded, so that other copies eventually
    /// continue.
    pub fn pay(&mut self, bytes: u64) {
        if let Some(tokens) = &mut self.tokens {
            let floor = -4 * i64::from(MAX_IO_BYTES).max(signed(bytes));
            *tokens = tokens.saturating_sub(signed(bytes)).max(floor);
        }
    }

    /// Refills the bucket for the time up to `now_ms`.
    pub fn refill(&mut self, now_ms: u64) {
        let passed_ms = now_ms.saturating_sub(self.refilled_at_ms);
        if passed_ms < REFILL_INTERVAL_MS {
            return;
        }
        self.refilled_at_ms = now_ms;
        let passed_ms = passed_ms.min(REFILL_MS_MAX);
        let moved_bytes = std::mem::take(&mut self.moved_bytes);
        let in_time = |bytes_per_s: u64| bytes_per_s.saturating_mul(passed_ms) / 1000;
        let CopyLimits { bytes_per_s, share_percent } = self.limits;
        let by_rate = bytes_per_s.map(|rate| in_time(rate.get()).max(1));
        let share = u64::from(share_percent.clamp(1, 100));
        let by_share = (moved_bytes > 0 && share < 100)
            .then(|| (moved_bytes.saturating_mul(share) / (100 - share)).max(in_time(SHARE_BYTES_PER_S_MIN)));
        let gained = match (by_rate, by_share) {
            (Some(rate), Some(share)) => Some(rate.min(share)),
            (rate, share) => rate.or(share),
        };
        self.tokens = gained.map(|gained| {
            let gained = signed(gained);
            let most = gained.max(i64::from(MAX_IO_BYTES));
            self.tokens.unwrap_or(0).saturating_add(gained).min(most)
        });
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;

    const REGION_BYTES: u64 = 64 << 10;

    fn limits(bytes_per_s: u64, share_percent: u8) -> CopyLimits {
        CopyLimits { bytes_per_s: NonZeroU64::new(bytes_per_s), share_percent }
    }

    /// Returns the bytes that are copied in ten seconds, while the frontend moves `moved` bytes per 100 ms.
    fn copied(limits: CopyLimits, moved: u64) -> u64 {
        let mut bucket = Bucket::new(limits);
        let mut copied = 0;
        for tick in 1..=100 {
            bucket.moved(moved);
            bucket.refill(tick * REFILL_INTERVAL_MS);
            while copied < 1 << 40 && bucket.take(REGION_BYTES) {
                copied += if bucket.tokens.is_some() { REGION_BYTES } else { 1 << 40 };
            }
        }
        copied
    }

    #[test]
    fn keeps_to_the_rate() {
        let limits = limits(10 << 20, 100);
        let bytes = copied(limits, 1 << 30);
        assert!((100 << 20..102 << 20).contains(&bytes), "{bytes}");
    }

    #[test]
    fn takes_its_share_of_a_busy_frontend_and_all_of_an_idle_one() {
        let limits = limits(0, 20);
        let bytes = copied(limits, 40 << 20);
        assert!((995 << 20..1005 << 20).contains(&bytes), "a fifth of the bytes that move: {bytes}");
        assert!(copied(limits, 0) >= 1 << 40);
    }

    #[test]
    fn copies_always_continue() {
        let limits = limits(0, 1);
        assert!(copied(limits, 1) >= 39 << 20);
    }

    #[test]
    fn writes_that_cannot_wait_make_bounded_debts() {
        let limits = limits(8 << 20, 50);
        let mut bucket = Bucket::new(limits);
        for _ in 0..1000 {
            bucket.pay(1 << 20);
        }
        assert!(!bucket.take(1));
        bucket.refill(1000);
        assert!(bucket.take(1), "four MiB of debt, eight gained");
    }
}
