//! I/O counters of the device, one set for each queue.
//!
//! Only the thread of a queue writes its counters, so counting is a load and a store. Each queue has cache
//! lines of its own. The clock is read once for all requests that an iteration of the queue begins, and once
//! for all that it completes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use shorthorn_control::{IoCounter, IoCounters};
use shorthorn_core::{Operation, Request};

/// The kinds of requests that have counters of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestKind {
    Read,
    Write,
    Flush,
    /// A discard, or zeroes.
    Discard,
}

/// Counters of one queue. Lines in pairs, as processors fetch them so.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueCounters {
    kinds: [Counter; 4],
    refused: AtomicU64,
}

#[derive(Debug, Default)]
struct Counter {
    operations: AtomicU64,
    bytes: AtomicU64,
    failed: AtomicU64,
    duration_ns: AtomicU64,
}

/// Adds to a counter that only this thread changes.
fn add(to: &AtomicU64, more: u64) {
    to.store(to.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

impl QueueCounters {
    fn shown(&self, kind: RequestKind) -> IoCounter {
        let Counter { operations, bytes, failed, duration_ns } = &self.kinds[kind as usize];
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        IoCounter {
            operations: get(operations),
            bytes: get(bytes),
            failed: get(failed),
            duration_us: get(duration_ns) / 1000,
        }
    }
}

/// Returns the current counters of all queues. They are read one by one: requests that are completed
/// meanwhile may be in one number and not in another.
pub fn sum(queues: &[Arc<QueueCounters>]) -> IoCounters {
    let of = |kind| queues.iter().map(|queue| queue.shown(kind)).fold(IoCounter::default(), IoCounter::plus);
    IoCounters {
        read: of(RequestKind::Read),
        write: of(RequestKind::Write),
        flush: of(RequestKind::Flush),
        discard: of(RequestKind::Discard),
        refused: queues.iter().map(|queue| queue.refused.load(Ordering::Relaxed)).fold(0, u64::wrapping_add),
    }
}

/// Counts the requests of one queue from their beginning to their end.
#[derive(Debug)]
pub struct RequestMeter {
    counters: Arc<QueueCounters>,
    /// The request in each slot. A free slot keeps its last one.
    slots: Box<[Begun]>,
}

#[derive(Clone, Copy, Debug)]
struct Begun {
    kind: RequestKind,
    bytes: u64,
    at: Instant,
}

impl RequestMeter {
    pub fn new(counters: Arc<QueueCounters>, slots: u16) -> RequestMeter {
        let nothing = Begun { kind: RequestKind::Read, bytes: 0, at: Instant::now() };
        RequestMeter { counters, slots: vec![nothing; usize::from(slots)].into() }
    }

    /// Counts submitted requests.
    pub fn begin(&mut self, requests: &[Request], now: Instant) {
        for request in requests {
            let kind = match request.operation {
                Operation::Read | Operation::CheckedRead | Operation::Verify => RequestKind::Read,
                Operation::Write { .. } | Operation::WriteRot => RequestKind::Write,
                Operation::Flush => RequestKind::Flush,
                Operation::Discard | Operation::WriteZeroes { .. } => RequestKind::Discard,
            };
            if let Some(slot) = self.slots.get_mut(usize::from(request.slot)) {
                *slot = Begun { kind, bytes: request.range.length(), at: now };
            }
        }
    }

    /// Counts requests that the frontend has refused, and which never had a slot.
    pub fn refused(&mut self, count: usize) {
        add(&self.counters.refused, count as u64);
    }

    /// Counts the completed request in that slot. Bytes count if it was successful.
    pub fn end(&mut self, slot: u16, is_ok: bool, now: Instant) {
        let Some(begun) = self.slots.get(usize::from(slot)) else { return };
        let counter = &self.counters.kinds[begun.kind as usize];
        add(&counter.operations, 1);
        if is_ok {
            add(&counter.bytes, begun.bytes);
        } else {
            add(&counter.failed, 1);
        }
        let took_ns = now.saturating_duration_since(begun.at).as_nanos();
        add(&counter.duration_ns, u64::try_from(took_ns).unwrap_or(u64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shorthorn_types::ByteRange;

    use super::*;

    fn request(slot: u16, operation: Operation, length: u64) -> Request {
        Request { slot, operation, range: ByteRange::new(0, length).unwrap() }
    }

    #[test]
    fn requests_are_counted_with_bytes_and_time() {
        let queues = [Arc::<QueueCounters>::default(), Arc::default()];
        let mut meters = queues.each_ref().map(|counters| RequestMeter::new(Arc::clone(counters), 4));
        let start = Instant::now();
        let after = |ms| start + Duration::from_millis(ms);
        for meter in &mut meters {
            let write = Operation::Write { fua: false };
            meter.begin(&[request(0, write, 4096), request(1, write, 8192)], start);
            meter
                .begin(&[request(2, Operation::Flush, 0), request(3, Operation::Discard, 1 << 20)], after(1));
            meter.end(1, true, after(2));
            meter.end(0, false, after(3));
            meter.end(2, true, after(5));
            meter.end(3, true, after(1));
        }
        // A slot is used again.
        meters[0].begin(&[request(1, Operation::Read, 512)], after(7));
        meters[0].end(1, true, after(8));
        for (meter, count) in meters.iter_mut().zip([2, 1]) {
            meter.refused(count);
        }
        let counter = |operations, bytes, failed, ms: u64| IoCounter {
            operations,
            bytes,
            failed,
            duration_us: ms * 1000,
        };
        let counted = sum(&queues);
        assert_eq!(counted.write, counter(4, 2 * 8192, 2, 10));
        assert_eq!(counted.flush, counter(2, 0, 0, 8));
        assert_eq!(counted.discard, counter(2, 2 << 20, 0, 0));
        assert_eq!(counted.read, counter(1, 512, 0, 1));
        assert_eq!(counted.refused, 3);
    }
}
