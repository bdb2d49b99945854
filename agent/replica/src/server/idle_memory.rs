/// The memory that slots keep while requests come, and that idleness gives back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum IdleMemory {
    /// Free slots have no memory.
    #[default]
    Released,
    /// Free slots may have memory, and no request has come since the last tick.
    Idle,
    /// Free slots may have memory, and a request has come since the last tick.
    Busy,
}

impl IdleMemory {
    /// Records that a request has come.
    pub fn used(&mut self) {
        *self = IdleMemory::Busy;
    }

    /// Returns true if ticks are needed to release memory.
    pub fn needs_ticks(&self) -> bool {
        *self != IdleMemory::Released
    }

    /// Handles a tick. Returns true if the memory is to be released: no request has come since the last tick,
    /// and no slot is in use.
    pub fn tick(&mut self, are_slots_idle: bool) -> bool {
        let is_released = *self == IdleMemory::Idle && are_slots_idle;
        *self = match *self {
            IdleMemory::Busy => IdleMemory::Idle,
            IdleMemory::Idle if !are_slots_idle => IdleMemory::Idle,
            IdleMemory::Idle | IdleMemory::Released => IdleMemory::Released,
        };
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
