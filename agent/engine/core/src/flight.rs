use crate::event::FlightLimits;

/// Requests of the frontend that are with the replicas.
#[derive(Debug)]
pub(crate) struct Flight {
    limits: FlightLimits,
    bytes: u64,
    requests: usize,
    /// True if a request waits because too much is in flight. Then no later request is sent before it,
    /// however small that is: else a large request could wait for ever.
    pub is_awaited: bool,
}

impl Flight {
    pub fn new(limits: FlightLimits) -> Flight {
        Flight { limits, bytes: 0, requests: 0, is_awaited: false }
    }

    /// Returns true if a request with so many bytes may be sent. If so, it counts as in flight.
    pub fn take_off(&mut self, bytes: u64) -> bool {
        let has_room = self.requests == 0
            || (self.requests < self.limits.requests && self.bytes + bytes <= self.limits.bytes);
        if self.is_awaited || !has_room {
            self.is_awaited = true;
            return false;
        }
        (self.bytes, self.requests) = (self.bytes + bytes, self.requests + 1);
        true
    }

    /// Takes a completed request out of the count.
    pub fn land(&mut self, bytes: u64) {
        (self.bytes, self.requests) = (self.bytes - bytes, self.requests - 1);
    }
}
