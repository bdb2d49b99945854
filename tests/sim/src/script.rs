//! A run as data: its parameters, and every fault with its time and all of its choices.
//!
//! A script is made from a seed with a generator of its own, and can be stored, changed and run again. Other
//! choices (the duration of a message or a disk operation) come from its seed while it runs. The guest's
//! requests come from there too, by a generator of its own. So a stored script survives a change of the
//! generator of scripts, and mostly one of the simulation.

mod isolation;
mod rot;
mod scrubs;

use fastrand::Rng;
use serde::{Deserialize, Serialize};

use crate::faults::{Fault, FaultKind, FaultyOperation, LieAt, Replacement};

/// The maximum number of replicas in a run, including replacements.
pub const REPLICAS_MAX: usize = 7;
/// Hosts on which an engine may run.
pub const HOSTS: usize = 3;

/// The parameters of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    /// The seed of delays, and of the guest's requests.
    pub seed: u64,
    /// The number of replicas of the volume.
    pub replicas: u64,
    /// Blocks beyond whole regions.
    #[serde(default)]
    pub odd_blocks: u64,
    /// The most requests that the guest makes.
    pub requests: u64,
    /// The maximum duration of the trouble.
    pub trouble_us: u64,
    /// True if messages are now and then very late.
    #[serde(default)]
    pub slow_network: bool,
    /// The number of queues of the engine.
    #[serde(default = "one")]
    pub queues: u16,
    /// The number of blocks of which a replica can remember sums beside rot. Pages of sums are small then. 0:
    /// as many as a real replica, with pages as large.
    #[serde(default)]
    pub rot_places: usize,
    /// The layout of each replica at the beginning; unnamed ones have a plain one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layouts: Vec<Layout>,
    /// In the order of their times.
    pub faults: Vec<Strike>,
}

/// A fault and its time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Strike {
    /// The time of the fault.
    pub at_us: u64,
    /// The seed of the other choices: lost blocks, durations.
    #[serde(default)]
    pub salt: u64,
    /// Kind and victim.
    #[serde(flatten)]
    pub fault: Fault,
}

/// The layout of the data of a replica, which reads the same in any of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Layout {
    /// Zeroes where others have holes.
    pub has_zeroes: bool,
    /// True if no snapshot exists below the head, which holds all data.
    pub is_flat: bool,
    /// The file system cannot make holes.
    pub cannot_punch: bool,
}

fn one() -> u16 {
    1
}

/// The duration of the trouble.
const TROUBLE_US: u64 = 15_000_000;

/// The relative probability of each kind of fault.
const WEIGHTS: [(FaultKind, u32); 41] = [
    (FaultKind::KillReplica, 12),
    (FaultKind::CutPower, 7),
    (FaultKind::KillEngine, 11),
    (FaultKind::AttachElsewhere, 4),
    (FaultKind::Partition, 6),
    (FaultKind::OneWay, 4),
    (FaultKind::HalfOpen, 4),
    (FaultKind::BreakConnection, 8),
    (FaultKind::StopController, 5),
    (FaultKind::CutPowerOfAll, 1),
    (FaultKind::FillDisk, 4),
    (FaultKind::BreakWrite, 4),
    (FaultKind::BreakFlush, 3),
    (FaultKind::BreakRead, 2),
    (FaultKind::BreakVerify, 1),
    (FaultKind::BreakState, 3),
    (FaultKind::BreakPage, 2),
    (FaultKind::BreakLossRecord, 2),
    (FaultKind::LieInAnswer, 3),
    (FaultKind::LieInRegions, 4),
    (FaultKind::LieInExtents, 4),
    (FaultKind::LieAtProposals, 4),
    (FaultKind::LieAsSource, 4),
    (FaultKind::UnreadBlocks, 4),
    (FaultKind::SlowDisk, 4),
    (FaultKind::PauseEngine, 3),
    (FaultKind::PauseReplica, 4),
    (FaultKind::ClockJump, 2),
    (FaultKind::Replace, 2),
    (FaultKind::Destroy, 2),
    (FaultKind::Return, 2),
    (FaultKind::HandOver, 6),
    (FaultKind::Expand, 6),
    (FaultKind::RotSets, 2),
    (FaultKind::RotBlocks, 6),
    (FaultKind::RotUnderCopy, 6),
    (FaultKind::LoseState, 2),
    (FaultKind::RestoreController, 2),
    (FaultKind::RestoreDisk, 6),
    (FaultKind::RotUnderScrub, 10),
    (FaultKind::OtherProgram, 2),
];

impl Script {
    /// Derives options and faults from `seed`, always the same ones.
    #[must_use]
    pub fn of(seed: u64) -> Script {
        // The seed itself is for the delays.
        let mut rng = Rng::with_seed(seed ^ 0x5eed_0f5c_1197);
        let replicas = [2, 3, 3, 3, 1, 2][rng.usize(0..6)];
        let mut script = Script {
            seed,
            replicas,
            odd_blocks: rng.u64(0..3),
            requests: rng.u64(200..6_000),
            trouble_us: TROUBLE_US,
            slow_network: rng.u8(0..3) == 0,
            queues: [1, 1, 2, 3][rng.usize(0..4)],
            rot_places: if rng.u8(0..4) == 0 { rng.usize(20..70) } else { 0 },
            layouts: Vec::new(),
            faults: Vec::new(),
        };
        if rng.bool() {
            let layout = |_| Layout {
                has_zeroes: rng.bool(),
                is_flat: rng.u8(0..4) == 0,
                cannot_punch: rng.u8(0..4) == 0,
            };
            script.layouts = (0..REPLICAS_MAX).map(layout).collect();
        }
        script.choose_faults(&mut rng);
        script.add_rot();
        script.add_scrubs();
        script.add_isolations();
        script
    }

    fn choose_faults(&mut self, rng: &mut Rng) {
        let mut at_us = 0;
        loop {
            // Some come together.
            at_us += if rng.u8(0..4) == 0 { rng.u64(0..30_000) } else { rng.u64(10_000..1_700_000) };
            if at_us >= self.trouble_us {
                return;
            }
            let mut pick = rng.u32(0..WEIGHTS.iter().map(|(_, weight)| weight).sum());
            let chosen = WEIGHTS.iter().find(|(_, weight)| {
                let is_it = pick < *weight;
                pick = pick.saturating_sub(*weight);
                is_it
            });
            let Some((kind, _)) = chosen else { return };
            let salt = rng.u64(0..1 << 48);
            for (offset_us, fault) in choose(*kind, rng) {
                self.faults.push(Strike { at_us: at_us + offset_us, salt, fault });
            }
            self.faults.sort_by_key(|strike| strike.at_us);
        }
    }
}

/// Returns the parts of a fault of several disks, or of one disk and more.
fn disks_that_fail(
    kind: FaultKind,
    victim: usize,
    partial: bool,
    for_us: u64,
    rng: &mut Rng,
) -> Vec<(u64, Fault)> {
    match kind {
        FaultKind::RotUnderCopy => rot_under_copy(victim, partial, for_us, rng),
        FaultKind::RotUnderScrub => rot_under_scrub(victim, for_us, rng),
        FaultKind::SlowDisk => slow_disks(victim, for_us, rng),
        FaultKind::RestoreDisk => restore_disk(victim, rng),
        _ => unread_blocks(victim, for_us * 3, rng),
    }
}

/// The disks of two replicas cannot read some blocks of snapshots, and the third one is replaced.
fn unread_blocks(victim: usize, for_us: u64, rng: &mut Rng) -> Vec<(u64, Fault)> {
    let unread = |victim| (0, Fault::Lie { victim, at: LieAt::Blocks, for_us });
    let (other, gone) = ((victim + 1) % REPLICAS_MAX, (victim + 2) % REPLICAS_MAX);
    let replace = (rng.u64(0..300_000), Fault::Replace { victim: gone });
    vec![unread(victim), unread(other), replace]
}

/// Returns all choices of a fault, and how much later than the first its parts strike.
fn choose(kind: FaultKind, rng: &mut Rng) -> Vec<(u64, Fault)> {
    let victim = rng.usize(0..REPLICAS_MAX);
    let host = rng.usize(0..HOSTS);
    let for_us = rng.u64(50_000..4_000_000);
    let partial = rng.bool();
    let later_us = rng.u64(100_000..6_000_000);
    let broken = |what: FaultyOperation, rng: &mut Rng| Fault::BreakDisk {
        victim,
        what,
        times: [1, 1, 1, 3][rng.usize(0..4)],
        partial,
        for_us,
    };
    let fault = match kind {
        FaultKind::KillReplica => kill_replica(victim, false, rng),
        FaultKind::CutPower => kill_replica(victim, true, rng),
        FaultKind::KillEngine => kill_engine(rng),
        FaultKind::HandOver => Fault::HandOver { for_us: rng.u64(5_000..300_000) },
        FaultKind::AttachElsewhere => Fault::AttachElsewhere,
        FaultKind::Partition => Fault::Partition { host, victim, to_replica: true, to_engine: true, for_us },
        FaultKind::OneWay => one_way(host, victim, for_us, rng),
        FaultKind::HalfOpen => half_open(rng),
        FaultKind::BreakConnection => Fault::BreakConnection { pick: rng.u64(0..1 << 16) },
        FaultKind::StopController => Fault::StopController { for_us },
        FaultKind::CutPowerOfAll => Fault::CutPowerOfAll,
        FaultKind::FillDisk => Fault::FillDisk { victim, partial, pages: rng.bool(), for_us },
        FaultKind::BreakWrite => broken(FaultyOperation::Write, rng),
        FaultKind::BreakFlush => broken(FaultyOperation::Flush, rng),
        FaultKind::BreakRead => broken(FaultyOperation::Read, rng),
        FaultKind::BreakVerify => broken(FaultyOperation::Verify, rng),
        FaultKind::BreakState => broken(FaultyOperation::State, rng),
        FaultKind::BreakPage => broken(FaultyOperation::Page, rng),
        FaultKind::BreakLossRecord => return break_loss_record(broken, rng),
        FaultKind::LieInAnswer => broken(FaultyOperation::Answer, rng),
        FaultKind::LieInRegions => broken(FaultyOperation::Regions, rng),
        FaultKind::LieInExtents => broken(FaultyOperation::Extents, rng),
        FaultKind::LieAtProposals => Fault::Lie { victim, at: LieAt::Proposals, for_us: for_us * 3 },
        FaultKind::LieAsSource => Fault::Lie { victim, at: LieAt::Source, for_us: for_us * 3 },
        FaultKind::UnreadBlocks
        | FaultKind::RotUnderCopy
        | FaultKind::RotUnderScrub
        | FaultKind::SlowDisk
        | FaultKind::RestoreDisk => return disks_that_fail(kind, victim, partial, for_us, rng),
        FaultKind::PauseEngine => pause_engine(rng),
        FaultKind::PauseReplica => Fault::PauseReplica { victim, for_us: choose_pause_us(rng) },
        FaultKind::ClockJump => Fault::ClockJump { host, by_ms: rng.u64(100..60_000) },
        FaultKind::Replace => Fault::Replace { victim },
        FaultKind::Destroy => Fault::Destroy { victim, replacement: choose_replacement(rng) },
        FaultKind::Return => return return_replica(victim, later_us, rng),
        FaultKind::Expand => Fault::Expand { blocks: rng.u64(1..40) },
        FaultKind::RotSets => Fault::RotSets { victim, for_us: rng.u64(5_000..500_000) },
        FaultKind::RotBlocks => {
            Fault::RotBlocks { victim, blocks: rng.u64(1..200), vanish: rng.bool(), anywhere: false }
        }
        FaultKind::OtherProgram => Fault::OtherProgram { victim, for_us: rng.u64(5_000..500_000) },
        FaultKind::LoseState => Fault::LoseState { host },
        FaultKind::RestoreController => return restore_controller(later_us),
    };
    vec![(0, fault)]
}

fn kill_replica(victim: usize, power: bool, rng: &mut Rng) -> Fault {
    Fault::KillReplica { victim, power, for_us: rng.u64(5_000..2_500_000) }
}

fn choose_replacement(rng: &mut Rng) -> Replacement {
    [Replacement::AtOnce, Replacement::NewFirst, Replacement::OldFirst][rng.usize(0..3)]
}

/// Has a replica return that was lost before, or one that is destroyed for that.
fn return_replica(victim: usize, later_us: u64, rng: &mut Rng) -> Vec<(u64, Fault)> {
    let back = Fault::Return { victim, for_us: rng.u64(5_000..500_000) };
    if rng.bool() {
        return vec![(0, back)];
    }
    let destroy = Fault::Destroy { victim, replacement: choose_replacement(rng) };
    vec![(0, destroy), (later_us, back)]
}

fn half_open(rng: &mut Rng) -> Fault {
    Fault::HalfOpen { pick: rng.u64(0..1 << 16), for_us: rng.u64(100_000..12_000_000) }
}

fn break_loss_record(
    broken: impl Fn(FaultyOperation, &mut Rng) -> Fault,
    rng: &mut Rng,
) -> Vec<(u64, Fault)> {
    let other =
        [FaultyOperation::Write, FaultyOperation::Flush, FaultyOperation::Flush, FaultyOperation::State]
            [rng.usize(0..4)];
    vec![(0, broken(FaultyOperation::LossRecord, rng)), (0, broken(other, rng))]
}

fn restore_controller(later_us: u64) -> Vec<(u64, Fault)> {
    vec![(0, Fault::SaveController), (later_us, Fault::RestoreController)]
}

fn kill_engine(rng: &mut Rng) -> Fault {
    // The messages of the dead one may still be in flight when the next one has started.
    let lingers_us = if rng.u8(0..3) == 0 { rng.u64(1_000..800_000) } else { 0 };
    Fault::KillEngine { lingers_us, for_us: rng.u64(5_000..300_000) }
}

fn slow_disks(victim: usize, for_us: u64, rng: &mut Rng) -> Vec<(u64, Fault)> {
    // The same disk may hold every replica.
    let victims = if rng.u8(0..3) == 0 { 0..REPLICAS_MAX } else { victim..victim + 1 };
    let by_us = rng.u64(10_000..8_000_000);
    victims.map(|victim| (0, Fault::SlowDisk { victim, by_us, for_us })).collect()
}

fn one_way(host: usize, victim: usize, for_us: u64, rng: &mut Rng) -> Fault {
    let to_replica = rng.bool();
    Fault::Partition { host, victim, to_replica, to_engine: !to_replica, for_us }
}

fn pause_engine(rng: &mut Rng) -> Fault {
    let for_us = choose_pause_us(rng);
    Fault::PauseEngine { tick_first: rng.bool(), for_us }
}

fn choose_pause_us(rng: &mut Rng) -> u64 {
    if rng.bool() { rng.u64(50_000..900_000) } else { rng.u64(900_000..8_000_000) }
}

/// Has two replicas rot, one of which cannot be read everywhere, and recreates the third one.
fn rot_under_copy(victim: usize, partial: bool, for_us: u64, rng: &mut Rng) -> Vec<(u64, Fault)> {
    let rot = |victim| Fault::RotBlocks { victim, blocks: 300, vanish: false, anywhere: false };
    let (other, gone) = ((victim + 1) % REPLICAS_MAX, (victim + 2) % REPLICAS_MAX);
    let times = rng.u32(0..4);
    let unread =
        Fault::BreakDisk { victim: other, what: FaultyOperation::SnapshotBlock, times, partial, for_us };
    let replace = (rng.u64(0..300_000), Fault::Replace { victim: gone });
    let mut faults = vec![(0, rot(victim)), (0, rot(other)), (0, unread), replace];
    if rng.bool() {
        // The new replica is one of them, and may know lost blocks.
        let open = |victim| Fault::OtherProgram { victim, for_us: 100_000 };
        let later = rng.u64(500_000..5_000_000);
        faults.extend((0..REPLICAS_MAX).map(|victim| (later + victim as u64 * 400_000, open(victim))));
    }
    faults
}

/// Has the disk of a replica rot, and a scrub repair its snapshot beside requests. The disk is slow, so that
/// these take long.
fn rot_under_scrub(victim: usize, for_us: u64, rng: &mut Rng) -> Vec<(u64, Fault)> {
    let vanish = rng.bool();
    let rot = Fault::RotBlocks { victim, blocks: 300, vanish, anywhere: false };
    let slow = Fault::SlowDisk { victim, by_us: rng.u64(1_000..40_000), for_us };
    // Requests may make zeroes of blocks that have vanished.
    let later_us = if vanish { rng.u64(0..3_000_000) } else { 0 };
    vec![(0, rot), (0, slow), (later_us, Fault::ScrubSnapshot { victim, for_us })]
}

fn restore_disk(victim: usize, rng: &mut Rng) -> Vec<(u64, Fault)> {
    let restore = Fault::RestoreDisk { victim, for_us: rng.u64(5_000..500_000) };
    // A view seldom lasts longer, and the copy has to be older than the last stamps.
    vec![(0, Fault::SaveDisk { victim }), (rng.u64(700_000..2_500_000), restore)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_stored_and_read_again() {
        for seed in 0..50 {
            let script = Script::of(seed);
            let text = serde_json::to_string(&script).unwrap();
            assert_eq!(serde_json::from_str::<Script>(&text).unwrap(), script, "{text}");
        }
    }

    #[test]
    fn a_seed_has_one_script() {
        assert_eq!(Script::of(7), Script::of(7));
        assert_ne!(Script::of(7).faults, Script::of(8).faults);
    }
}
