//! Faults of some scripts on top of the others: rot, and disks that are full or slow beside it. They come
//! from a generator of their own, so that all other faults of a seed stay as they are.

use super::*;

/// The maximum number of such faults, each of which has several parts.
const FAULTS_MAX: u32 = 6;

impl Script {
    /// Adds rot to some scripts.
    pub(super) fn add_rot(&mut self) {
        let mut rng = Rng::with_seed(self.seed ^ 0x726f_745f_726f_7421);
        if rng.u8(0..3) > 0 {
            return;
        }
        if self.rot_places == 0 && rng.u8(0..4) == 0 {
            self.rot_places = rng.usize(10..40);
        }
        for _ in 0..rng.u32(1..=FAULTS_MAX) {
            let at_us = rng.u64(0..self.trouble_us);
            let salt = rng.u64(0..1 << 48);
            let faults = match rng.u8(0..3) {
                0 => rot_without_space(&mut rng),
                _ => rot_beside_rot(&mut rng),
            };
            for (offset_us, fault) in faults {
                self.faults.push(Strike { at_us: at_us + offset_us, salt, fault });
            }
        }
        self.faults.sort_by_key(|strike| strike.at_us);
    }
}

/// Has blocks vanish from a disk that is full, or rot on one whose sets of regions cannot grow. A scrub
/// repairs the snapshot meanwhile.
fn rot_without_space(rng: &mut Rng) -> Vec<(u64, Fault)> {
    let victim = rng.usize(0..REPLICAS_MAX);
    let (vanish, pages, for_us) = (rng.bool(), rng.bool(), rng.u64(50_000..2_000_000));
    let rot = Fault::RotBlocks { victim, blocks: 300, vanish, anywhere: false };
    let full = Fault::FillDisk { victim, partial: rng.bool(), pages, for_us: for_us + rng.u64(0..1_000_000) };
    let later_us = rng.u64(0..1_000_000);
    vec![(0, rot), (later_us, full), (later_us, Fault::ScrubSnapshot { victim, for_us })]
}

/// Has the disk of a replica rot several times. The volume is now and then used between these.
fn rot_beside_rot(rng: &mut Rng) -> Vec<(u64, Fault)> {
    let victim = rng.usize(0..REPLICAS_MAX);
    let mut at_us = 0;
    let rot = |_| {
        let fault = Fault::RotBlocks { victim, blocks: rng.u64(20..400), vanish: rng.bool(), anywhere: true };
        at_us += rng.u64(1_000..700_000);
        (at_us, fault)
    };
    (0..4).map(rot).collect()
}
