use shorthorn_types::ByteRange;

use crate::event::FlightLimits;
use crate::request::Operation;
use crate::slot::Slot;

/// The maximum bytes that are discarded or zeroed at a time; a single request may be larger.
const ZEROING_BYTES_MAX: u64 = 64 << 20;

/// Returns the bytes of data that the request moves over a connection.
fn data_bytes(operation: Operation, range: ByteRange) -> u64 {
    match operation {
        Operation::Read | Operation::Write { .. } => range.length(),
        _ => 0,
    }
}

fn writes_zeroes(operation: Operation) -> bool {
    matches!(operation, Operation::Discard | Operation::WriteZeroes { .. })
}

/// Requests of the frontend that are with the replicas.
///
/// Reads have limits of their own, because they do not wait for a member that is slow to write. Discards and
/// writes of zeroes have a limit of bytes besides. Without holes, zeroing takes the replicas as long as
/// writing, but costs the frontend no data.
#[derive(Debug)]
pub(crate) struct Flights {
    reads: Flight,
    changes: Flight,
    /// Bytes of discards and writes of zeroes.
    zeroing_bytes: u64,
}

impl Flights {
    pub fn new(limits: FlightLimits) -> Flights {
        Flights { reads: Flight::new(limits), changes: Flight::new(limits), zeroing_bytes: 0 }
    }

    fn of(&mut self, operation: Operation) -> &mut Flight {
        if operation == Operation::Read { &mut self.reads } else { &mut self.changes }
    }

    /// Returns true if the request in `slot` may be sent to the replicas now, and counts it as in flight. A
    /// read that is sent again was counted before.
    pub fn take_off(&mut self, slot: &mut Slot) -> bool {
        let (operation, range) = (slot.operation(), slot.range());
        if slot.is_in_flight() {
            return true;
        }
        if self.is_flooded(operation, range) || !self.of(operation).take_off(data_bytes(operation, range)) {
            return false;
        }
        if writes_zeroes(operation) {
            self.zeroing_bytes += range.length();
        }
        slot.set_in_flight();
        true
    }

    /// Returns true if replicas have as many bytes to zero as they can be expected to in time.
    fn is_flooded(&self, operation: Operation, range: ByteRange) -> bool {
        let bytes = self.zeroing_bytes;
        writes_zeroes(operation) && bytes > 0 && bytes + range.length() > ZEROING_BYTES_MAX
    }

    /// Takes the completed request in `slot` out of the count. Returns true if deferred requests may have
    /// room now.
    pub fn land(&mut self, slot: &Slot) -> bool {
        let (operation, range) = (slot.operation(), slot.range());
        if !slot.is_in_flight() {
            return false;
        }
        let flight = self.of(operation);
        flight.land(data_bytes(operation, range));
        let has_waiting = flight.has_waiting;
        if writes_zeroes(operation) {
            self.zeroing_bytes -= range.length();
        }
        has_waiting || writes_zeroes(operation)
    }

    /// Lets the deferred requests try again, from the first.
    pub fn retry(&mut self) {
        (self.reads.has_waiting, self.changes.has_waiting) = (false, false);
    }
}

/// Requests of one kind.
#[derive(Debug)]
struct Flight {
    limits: FlightLimits,
    bytes: u64,
    requests: usize,
    /// True if a request waits because too much is in flight. Then no later request is sent before it,
    /// however small that is: else a large request could wait for ever.
    has_waiting: bool,
}

impl Flight {
    fn new(limits: FlightLimits) -> Flight {
        Flight { limits, bytes: 0, requests: 0, has_waiting: false }
    }

    /// Returns true if a request of `bytes` may be sent. If so, the request counts as in flight.
    fn take_off(&mut self, bytes: u64) -> bool {
        let has_room = self.requests == 0
            || (self.requests < self.limits.requests && self.bytes + bytes <= self.limits.bytes);
        if self.has_waiting || !has_room {
            self.has_waiting = true;
            return false;
        }
        (self.bytes, self.requests) = (self.bytes + bytes, self.requests + 1);
        true
    }

    /// Takes a completed request out of the count.
    fn land(&mut self, bytes: u64) {
        (self.bytes, self.requests) = (self.bytes - bytes, self.requests - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Request;

    fn slot(operation: Operation, bytes: u64) -> Slot {
        Slot::of(Request { slot: 0, operation, range: ByteRange::new(0, bytes).unwrap() })
    }

    fn flights(bytes: u64, requests: usize) -> Flights {
        Flights::new(FlightLimits { bytes, requests })
    }

    const WRITE: Operation = Operation::Write { fua: false };

    #[test]
    fn a_small_request_waits_behind_a_large_one_that_has_no_room() {
        let mut flights = flights(8192, 9);
        let (mut first, mut large, mut small) = (slot(WRITE, 4096), slot(WRITE, 8192), slot(WRITE, 512));
        assert!(flights.take_off(&mut first));
        assert!(!flights.take_off(&mut large));
        assert!(!flights.take_off(&mut small), "the large one came before");
        assert!(flights.take_off(&mut slot(Operation::Read, 8192)), "reads have limits of their own");
        assert!(flights.land(&first), "a request waits for room");
        flights.retry();
        assert!(flights.take_off(&mut large));
        assert!(!flights.take_off(&mut small));
    }

    #[test]
    fn a_request_of_any_size_is_sent_alone() {
        let mut flights = flights(4096, 1);
        let mut large = slot(WRITE, 1 << 20);
        assert!(flights.take_off(&mut large));
        assert!(!flights.take_off(&mut slot(Operation::Flush, 0)), "one request at a time");
        assert!(flights.land(&large));
    }

    #[test]
    fn zeroing_has_a_limit_of_bytes_beside_the_requests() {
        let mut flights = flights(4096, 9);
        let (mut first, mut second) = (slot(Operation::Discard, 64 << 20), slot(Operation::Discard, 4096));
        assert!(flights.take_off(&mut first));
        assert!(!flights.take_off(&mut second));
        assert!(flights.take_off(&mut slot(WRITE, 4096)), "it moves data and zeroes nothing");
        assert!(flights.land(&first), "zeroing that is done makes room, though no request counts as waiting");
        assert!(flights.take_off(&mut second));
    }

    #[test]
    fn a_read_that_is_sent_again_counts_once() {
        let mut flights = flights(4096, 1);
        let mut read = slot(Operation::Read, 4096);
        assert!(flights.take_off(&mut read) && flights.take_off(&mut read));
        assert!(!flights.land(&read));
        assert!(flights.take_off(&mut slot(Operation::Read, 4096)), "all room is free again");
        assert!(!flights.land(&slot(Operation::Read, 4096)), "a request that was never sent lands nowhere");
    }
}
