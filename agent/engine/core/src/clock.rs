/// The maximum by which one tick advances the core's clock. A longer time between two ticks is a pause of
/// this process or of the machine. The core takes in the answers that arrived meanwhile between the next
/// ticks, before any replica is late.
const TICK_STEP_MS_MAX: u64 = 1000;

/// The time without any event after which a newer engine may hold the volume. It is longer than the interval
/// of ticks of an idle engine. An engine that is not paused notices by the silence of the replicas.
const PAUSE_MS: u64 = 2000;

/// The core's own clock. Pauses are left out, so that it never advances far in one step.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    now_ms: u64,
    /// The time of the last tick, by the clock of the process.
    last_tick_ms: u64,
    /// The time of the last event, by the clock of the process.
    alive_at_ms: u64,
}

impl Clock {
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// Records that the process runs at `now_ms` of its clock. Returns true if it was paused before.
    pub fn is_after_pause(&mut self, now_ms: u64) -> bool {
        let before_ms = std::mem::replace(&mut self.alive_at_ms, now_ms);
        now_ms.saturating_sub(before_ms) > PAUSE_MS
    }

    /// Advances the clock to a tick at `tick_ms` of the process's clock, by at most `step_ms_max`. Returns
    /// the step.
    pub fn tick(&mut self, tick_ms: u64, step_ms_max: u64) -> u64 {
        let last_tick_ms = std::mem::replace(&mut self.last_tick_ms, tick_ms);
        let step_ms = tick_ms.saturating_sub(last_tick_ms).min(TICK_STEP_MS_MAX).min(step_ms_max);
        self.now_ms += step_ms;
        step_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_ticks_is_not_paused() {
        let mut clock = Clock::default();
        let paused = [1000, 1250, 3250, 3251, 9000, 8000].map(|now_ms| clock.is_after_pause(now_ms));
        assert_eq!(paused, [false, false, false, false, true, false]);
    }

    #[test]
    fn a_pause_counts_as_one_step() {
        let mut clock = Clock::default();
        assert_eq!(clock.tick(250, 2500), 250);
        assert_eq!(clock.tick(60_000, 2500), TICK_STEP_MS_MAX);
        assert_eq!(clock.tick(60_250, 100), 100, "a short time-out makes short steps");
        assert_eq!(clock.tick(60_000, 2500), 0, "the clock never turns back");
        assert_eq!(clock.now_ms(), 250 + TICK_STEP_MS_MAX + 100);
    }
}
