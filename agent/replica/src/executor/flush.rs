/// Flushes that share one fdatasync.
///
/// A flush covers every write that was answered before it came. So it can not join an fdatasync that
/// runs already, but all that come while one runs share the next.
#[derive(Debug)]
pub(super) struct Flushes {
    running: Vec<u16>,
    waiting: Vec<u16>,
    /// Flushes that have just ended.
    covered: Vec<u16>,
    in_flight: bool,
    /// True if anything has changed since the last fdatasync began.
    unsynced: bool,
}

/// The decision on a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flush {
    /// All data is durable: answer at once.
    Done,
    /// Start an fdatasync; it covers this one.
    Start,
    /// The flush waits for the next one.
    Waits,
}

impl Flushes {
    /// Makes room for at most `slots` flushes at a time. Writes of earlier processes count as not durable.
    pub fn new(slots: usize) -> Flushes {
        Flushes {
            running: Vec::with_capacity(slots),
            waiting: Vec::with_capacity(slots),
            covered: Vec::with_capacity(slots),
            in_flight: false,
            unsynced: true,
        }
    }

    /// Records a change that has to be made durable.
    pub fn changed(&mut self) {
        self.unsynced = true;
    }

    /// Handles the arrival of the flush in `slot`.
    pub fn arrive(&mut self, slot: u16) -> Flush {
        if self.in_flight {
            self.waiting.push(slot);
            return Flush::Waits;
        }
        if !self.unsynced {
            return Flush::Done;
        }
        self.running.push(slot);
        self.begin();
        Flush::Start
    }

    fn begin(&mut self) {
        self.in_flight = true;
        self.unsynced = false;
    }

    /// Ends the fdatasync: the flushes that it covered have ended. Returns true if the next one has to start,
    /// for later flushes.
    pub fn ended(&mut self) -> bool {
        self.in_flight = false;
        self.covered.append(&mut self.running);
        if self.waiting.is_empty() {
            return false;
        }
        std::mem::swap(&mut self.running, &mut self.waiting);
        self.begin();
        true
    }

    /// Ends all flushes, after a failure that none of them survives.
    pub fn give_up(&mut self) {
        self.in_flight = false;
        self.unsynced = true;
        self.covered.append(&mut self.running);
        self.covered.append(&mut self.waiting);
    }

    /// Takes the flushes that have ended. The list comes back by [`Flushes::give_back_ended`].
    pub fn take_ended(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.covered)
    }

    pub fn give_back_ended(&mut self, covered: Vec<u16>) {
        debug_assert!(covered.is_empty());
        self.covered = covered;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flushes_that_wait_for_a_running_one_share_the_next() {
        let mut flushes = Flushes::new(8);
        assert_eq!(flushes.arrive(1), Flush::Start);
        assert_eq!(flushes.arrive(2), Flush::Waits);
        assert_eq!(flushes.arrive(3), Flush::Waits);
        assert!(flushes.ended());
        assert_eq!(flushes.take_ended(), [1]);
        assert!(!flushes.ended());
        assert_eq!(flushes.take_ended(), [2, 3]);
    }

    #[test]
    fn nothing_new_needs_no_fdatasync() {
        let mut flushes = Flushes::new(8);
        assert_eq!(flushes.arrive(1), Flush::Start, "an earlier process may have left something");
        flushes.changed();
        assert!(!flushes.ended());
        assert_eq!(flushes.arrive(2), Flush::Start, "the change came after the fdatasync had begun");
        assert!(!flushes.ended());
        assert_eq!(flushes.arrive(3), Flush::Done);
    }

    #[test]
    fn a_failure_ends_all_flushes() {
        let mut flushes = Flushes::new(8);
        flushes.arrive(1);
        flushes.arrive(2);
        flushes.give_up();
        assert_eq!(flushes.take_ended(), [1, 2]);
    }
}
