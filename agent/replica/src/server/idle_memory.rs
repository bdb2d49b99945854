/// The memory that slots keep while requests come, and that idleness gives back.
#[derive(Debug, Default)]
pub(super) struct IdleMemory {
    /// True if a request has come since the last tick.
    is_busy: bool,
    /// True if free slots may have memory.
    may_have_memory: bool,
}

impl IdleMemory {
    /// Records that a request has come.
    pub fn used(&mut self) {
        self.is_busy = true;
        self.may_have_memory = true;
    }

    /// Returns true if ticks are needed to release memory.
    pub fn needs_ticks(&self) -> bool {
        self.may_have_memory
    }

    /// Handles a tick. Returns true if the memory is to be released: no request has come since the last tick,
    /// and no slot is in use.
    pub fn tick(&mut self, are_slots_idle: bool) -> bool {
        let is_released = self.may_have_memory && !self.is_busy && are_slots_idle;
        self.may_have_memory &= !is_released;
        self.is_busy = false;
        is_released
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_released_once_after_a_whole_tick_without_requests() {
        let mut memory = IdleMemory::default();
        assert!(!memory.tick(true) && !memory.needs_ticks(), "no request has come");
        memory.used();
        assert!(memory.needs_ticks());
        assert!(!memory.tick(true), "a request came in this tick");
        assert!(!memory.tick(false), "a slot is in use");
        assert!(memory.tick(true));
        assert!(!memory.tick(true) && !memory.needs_ticks());
    }
}
