/// The operations on layers that the kernel has.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    all: usize,
    /// The reads of blocks to be summed: no request waits for them.
    for_sums: usize,
}

impl InFlight {
    /// Counts an operation of a request, or the fdatasync of several.
    pub fn began(&mut self) {
        self.all += 1;
    }

    /// Counts a read of blocks to be summed.
    pub fn began_for_sums(&mut self) {
        self.all += 1;
        self.for_sums += 1;
    }

    /// Ends an operation of a request.
    pub fn ended(&mut self) {
        debug_assert!(self.all > self.for_sums, "no request has an operation in flight");
        self.all -= 1;
    }

    /// Ends a read of blocks to be summed.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_make_nothing_busy() {
        let mut in_flight = InFlight::default();
        in_flight.began_for_sums();
        assert!(!in_flight.is_busy() && !in_flight.is_idle());
        in_flight.began();
        assert!(in_flight.is_busy());
        in_flight.ended_for_sums();
        assert!(in_flight.is_busy() && !in_flight.is_idle());
        in_flight.ended();
        assert!(in_flight.is_idle() && !in_flight.is_busy());
    }
}
