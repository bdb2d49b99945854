//! Scrubs of some scripts, after rot. They come from a generator of their own, so that all other faults of a
//! seed stay as they are.

use super::*;

/// The maximum number of such scrubs.
const SCRUBS_MAX: u32 = 4;

impl Script {
    /// Adds scrubs to some scripts.
    pub(super) fn add_scrubs(&mut self) {
        let mut rng = Rng::with_seed(self.seed ^ 0x7363_7275_6273_2121);
        if rng.u8(0..3) > 0 {
            return;
        }
        for _ in 0..rng.u32(1..=SCRUBS_MAX) {
            let at_us = rng.u64(0..self.trouble_us);
            let salt = rng.u64(0..1 << 48);
            for (offset_us, fault) in scrub_after_rot(&mut rng) {
                self.faults.push(Strike { at_us: at_us + offset_us, salt, fault });
            }
        }
        self.faults.sort_by_key(|strike| strike.at_us);
    }
}

/// Has a disk rot, so that a scrub compares block by block, and is stopped in between.
fn scrub_after_rot(rng: &mut Rng) -> Vec<(u64, Fault)> {
    let victim = rng.usize(0..REPLICAS_MAX);
    let rot = Fault::RotBlocks { victim, blocks: rng.u64(1..100), vanish: rng.bool(), anywhere: rng.bool() };
    let bytes_per_s = if rng.u8(0..4) == 0 { 0 } else { rng.u64(50_000..2_000_000) };
    let scrub = Fault::Scrub { repair: rng.bool(), bytes_per_s, for_us: rng.u64(1_000..3_000_000) };
    vec![(0, rot), (rng.u64(0..300_000), scrub)]
}
