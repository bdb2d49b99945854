use crate::event::FlightLimits;

/// Requests of the frontend that are with the replicas.
#[derive(Debug)]
pub(crate) struct Flight {
    limits: FlightLimits,
    bytes: u64,
    requests: usize,
    /// Whether a request waits for what is in flight to land. Then no other one takes off before it, however small that is: else a
    /// large one could wait for ever.
    pub is_awaited: bool,
}

impl Flight {
    pub fn new(limits: FlightLimits) -> Flight {
        Flight { limits, bytes: 0, requests: 0, is_awaited: false }
    }

    /// Whether a request with so many bytes may be sent; it counts then.
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

    /// A request is done.
    pub fn land(&mut self, bytes: u64) {
        (self.bytes, self.requests) = (self.bytes - bytes, self.requests - 1);
    }
}
