/// The operations on layers and on the file of sums that the kernel has.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    all: usize,
    /// The operations that compute or load sums: no request waits for them.
    for_sums: usize,
}

impl InFlight {
    /// Counts an operation of a request, or the fdatasync of several.
    pub fn began(&mut self) {
        self.all += 1;
    }

    /// Counts an operation on sums.
    pub fn began_for_sums(&mut self) {
        self.all += 1;
        self.for_sums += 1;
    }

    /// Ends an operation of a request.
    pub fn ended(&mut self) {
        debug_assert!(self.all > self.for_sums, "no request has an operation in flight");
        self.all -= 1;
    }

    /// Ends an operation on sums.
    pub fn ended_for_sums(&mut self) {
        self.all -= 1;
        self.for_sums -= 1;
    }

    /// Returns true if the kernel has no operation.
    pub fn is_idle(&self) -> bool {
        self.all == 0
    }

    /// Returns true if requests have operations in flight.
    pub fn is_busy(&self) -> bool {
        self.all > self.for_sums
    }

    /// Returns true if no operation on sums is in flight.
    pub fn is_idle_for_sums(&self) -> bool {
        self.for_sums == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_make_nothing_busy() {
        let mut in_flight = InFlight::default();
        in_flight.began_for_sums();
        assert!(!in_flight.is_busy() && !in_flight.is_idle() && !in_flight.is_idle_for_sums());
        in_flight.began();
        assert!(in_flight.is_busy());
        in_flight.ended_for_sums();
        assert!(in_flight.is_busy() && in_flight.is_idle_for_sums());
        in_flight.ended();
        assert!(in_flight.is_idle() && !in_flight.is_busy());
    }
}
