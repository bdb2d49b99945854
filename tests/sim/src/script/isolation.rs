//! Isolated engines of some scripts. They come from a generator of their own, so that all other faults of a
//! seed stay as they are.

use super::*;

/// The maximum number of engines that are isolated.
const ISOLATIONS_MAX: u32 = 2;

impl Script {
    /// Isolates engines in some scripts.
    pub(super) fn add_isolations(&mut self) {
        let mut rng = Rng::with_seed(self.seed ^ 0x6973_6f6c_6174_6521);
        if rng.u8(0..4) > 0 {
            return;
        }
        for _ in 0..rng.u32(1..=ISOLATIONS_MAX) {
            let (at_us, salt) = (rng.u64(0..self.trouble_us), rng.u64(0..1 << 48));
            let fault = Fault::Isolate {
                keeps: rng.usize(0..REPLICAS_MAX),
                tick_first: rng.bool(),
                for_us: rng.u64(2_100_000..6_000_000),
                longer_us: rng.u64(100_000..4_000_000),
            };
            self.faults.push(Strike { at_us, salt, fault });
        }
        self.faults.sort_by_key(|strike| strike.at_us);
    }
}
