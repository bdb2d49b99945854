//! The work of a process and its disk on the sums of blocks, and blocks that the disk changes by itself.

use std::ops::Range;

use super::*;
use crate::disk::SparseFile;
use crate::net::RottenBlock;
use shorthorn_store::LostBlock;

/// The interval at which a process searches regions to sum.
const LOOK_US: std::ops::Range<Micros> = 50_000..400_000;
/// The time after which the operator restarts a replica that refuses modifications.
const OPERATOR_US: std::ops::Range<Micros> = 1_000_000..5_000_000;
/// The time within which an engine gets an answer, also after a pause.
const ANSWERS_US: Micros = 10_000_000;
/// The maximum number of regions that are summed at once.
const REGIONS_AT_ONCE: u32 = 4;

/// The blocks that rot strikes, and how.
#[derive(Clone, Copy, Debug)]
pub struct Rotting {
    /// True if blocks become holes.
    pub vanish: bool,
    /// True if any block may be struck whose rot can be noticed.
    pub anywhere: bool,
}

impl Simulation {
    /// The disk of a replica changes some blocks.
    pub fn rot_blocks(&mut self, at: usize, count: u64, rotting: Rotting, rng: &mut Rng) -> bool {
        let of_volume = self.guest.replicas.clone();
        let is_guest = |id: &ReplicaId| of_volume.contains(id);
        if !self.replicas[at].up || self.replicas[at].durable.rebuilding || !is_guest(&self.replicas[at].id) {
            return false;
        }
        let mut has_rotten = false;
        for _ in 0..count {
            let block = rng.u64(0..self.replicas[at].size_bytes / BLOCK_BYTES);
            let others = (0..self.replicas.len()).filter(|other| *other != at);
            let has_other = others.into_iter().any(|other| {
                let other = &self.replicas[other];
                is_guest(&other.id) && other.is_sound(block) && (rotting.anywhere || other.is_summed(block))
            });
            let reads_rot = |range: &ByteRange| block_numbers(*range).contains(&block);
            let is_read = self.engines.values().any(|engine| engine.reads_rot.iter().any(reads_rot));
            if has_other && !is_read && self.rot_block(at, block, rotting) {
                has_rotten = true;
                self.was_rotten.insert((at, block));
                self.trace(|| format!("block {block} of replica {at} is rotten"));
            }
        }
        has_rotten
    }

    /// The disk of a replica changes a block. Returns false if that would not be noticed.
    fn rot_block(&mut self, at: usize, block: u64, Rotting { vanish, anywhere }: Rotting) -> bool {
        let replica = &mut self.replicas[at];
        let is_in_head = replica.files.head.get(block).is_some();
        let is_above = vanish && replica.durable.has_snapshot && is_in_head;
        let (is_summed, is_guarded) = (replica.is_summed(block), anywhere && replica.is_guarded(block));
        if is_above && !anywhere || !is_summed && !is_guarded {
            return false; // of two blocks, a reader would see the one below
        }
        if is_guarded && !vanish && replica.files.rot_again(block) {
            self.count("blocks that rot again");
            return true;
        }
        if !replica.files.rot(block, vanish) {
            return false;
        }
        if anywhere && !replica.is_known_rotten(block) {
            replica.files.heal(block); // it shows the data of a request that has failed
            return false;
        }
        replica.has_vanished |= vanish;
        let is_below = replica.files.rot_below().any(|(below, _)| below == block);
        let kinds = [
            (is_below, "blocks of snapshots that rot"),
            (is_above, "blocks that vanish above a snapshot"),
            (!is_summed, "blocks that rot beside rot"),
        ];
        kinds.into_iter().filter(|(is_it, _)| *is_it).for_each(|(_, kind)| self.count(kind));
        true
    }

    /// Records that no member can give `range`, as far as an engine knows: it is copied unchanged.
    ///
    /// An engine knows a member by the run of its process that has answered. Another program may open the
    /// directory after that run, and what the member knew of rot is lost before the engine learns of its end.
    pub fn rot_is_copied(&mut self, engine: u64, peer: usize, range: ByteRange) {
        let Some(process) = self.engines.get(&engine) else { return };
        let Some(core) = &process.core else { return };
        let membership = core.membership();
        let replicas: Vec<(bool, usize)> = (0..process.peers.len())
            .filter_map(|other| {
                let is_member =
                    membership.state(crate::engine::index(other)) == shorthorn_core::PeerState::Member;
                let at = self.replica_index(process.peers[other].replica)?;
                let replica = &self.replicas[at];
                let is_same_run = replica.up && process.peers[other].run == Some(replica.boot);
                Some((is_member && other != peer && is_same_run, at))
            })
            .collect();
        // A block that was repaired just now may have been rotten when the engine asked.
        let was_rotten_lately = |at: usize, block: u64| {
            let repaired = self.repaired.get(&(at, block));
            repaired.is_some_and(|repaired| self.now - repaired < ANSWERS_US)
        };
        let is_sound = |at: usize| {
            let sound = |block| !self.replicas[at].is_known_rotten(block) && !was_rotten_lately(at, block);
            block_numbers(range).all(sound)
        };
        if replicas.iter().any(|(is_other, at)| *is_other && is_sound(*at)) {
            return self.violate(format!("{range} is copied with rot, and another member has it"));
        }
        if let Some(process) = self.engines.get_mut(&engine) {
            process.reads_rot.push(range);
        }
        self.count("rot without a sound copy");
        replicas.into_iter().for_each(|(_, at)| self.replicas[at].heal(range));
    }

    /// The snapshot of a replica is read to be copied. Rot that no sum is known of cannot be noticed.
    pub(super) fn read_snapshot(&mut self, at: usize, op: &Op, blocks: &Range<u64>) {
        let sabotage = self.options.sabotage;
        let is_unchecked = sabotage == Some(Sabotage::UncheckedLayers);
        let replica = &mut self.replicas[at];
        // A full copy does not look where a layer has no data.
        let vanished: Vec<u64> = replica.files.vanished().collect();
        vanished.into_iter().for_each(|block| replica.heal_or_doubt(block));
        let below: Vec<u64> = replica.files.rot_below().map(|(block, _)| block).collect();
        let unknown = below.into_iter().filter(|block| !is_unchecked && !replica.is_known_rotten(*block));
        unknown.collect::<Vec<_>>().into_iter().for_each(|block| replica.files.heal(block));
        let reported = replica.files.rot_below().filter(|(block, _)| !is_unchecked && blocks.contains(block));
        let reported: Vec<RottenBlock> = reported.collect();
        let file = Rc::new(replica.files.snapshot.clone());
        for (block, _) in &reported {
            replica.know_rot(*block, block_range(*block), sabotage);
        }
        if !reported.is_empty() {
            self.count("rot of snapshots reported");
        }
        self.answer(op.conn, op.number, ReplicaAnswer::Snapshot(file, reported));
    }

    /// A block of the snapshot is read in which another replica holds rot.
    pub(super) fn read_snapshot_block(&mut self, at: usize, op: &Op, block: u64) {
        let replica = &mut self.replicas[at];
        if replica.takes_error(FaultyOperation::SnapshotBlock) {
            let rng = &mut self.replicas[at].rng;
            let (way, errno) = (rng.u8(0..4), [Errno::IO, Errno::NO_SPACE, Errno::INVALID][rng.usize(0..3)]);
            self.count(FaultyOperation::SnapshotBlock.name());
            return match way {
                // No answer comes.
                0 => {}
                1 => self.end_at_replica(op.conn),
                _ => self.answer(op.conn, op.number, ReplicaAnswer::Error(errno)),
            };
        }
        let is_below = replica.files.rot_below().any(|(below, _)| below == block);
        if is_below && !replica.is_known_rotten(block) {
            replica.files.heal(block);
        }
        let content = replica.files.snapshot.get(block).filter(|_| replica.durable.has_snapshot);
        let answer = match content {
            _ if is_below && replica.is_known_rotten(block) => ReplicaAnswer::Error(Errno::ROTTEN),
            content => ReplicaAnswer::SnapshotBlock(content.map(Box::new)),
        };
        self.answer(op.conn, op.number, answer);
    }

    /// A replica that is recreated gets blocks of the snapshot. It knows the blocks that all have lost.
    /// Returns false if the process ends by a crash, before the record of these blocks or after it.
    pub(super) fn copy_snapshot(
        &mut self,
        at: usize,
        file: &SparseFile,
        blocks: &Range<u64>,
        lost: &[RottenBlock],
    ) -> bool {
        let is_calm = self.calm;
        let replica = &mut self.replicas[at];
        let is_cut_off = !is_calm && replica.rng.u8(..) < 12;
        let is_recorded = !is_cut_off || replica.rng.bool();
        for block in blocks.clone() {
            replica.files.snapshot.replace(block, file.get(block));
        }
        replica.remap();
        for (block, was) in lost {
            replica.files.is_lost(*block, *was);
            let sum = replica.sum_of(*block);
            if is_recorded {
                replica.durable.lost.insert(*block, LostBlock::new(sum));
            }
            self.was_rotten.insert((at, *block));
        }
        let replica = &mut self.replicas[at];
        replica.know_lost(None);
        let is_rotten = |block: &u64| file.get(*block).is_some_and(|sectors| has_rot(&sectors));
        let is_reported = |block: &u64| lost.iter().any(|(lost, _)| lost == block);
        if let Some(block) = blocks.clone().find(|block| is_rotten(block) && !is_reported(block)) {
            self.violate(format!("rot is copied to replica {at} in block {block} of its snapshot"));
        }
        if is_cut_off {
            self.count("snapshot copies cut off");
            let mut rng = self.rng.fork();
            self.kill_replica(at, false, 0, &mut rng);
        }
        !is_cut_off
    }

    /// Prepares the sums for a modification of `range`. Returns true if it is a repair, which keeps them.
    pub(super) fn prepare_sums(&mut self, at: usize, ask: &Ask, range: ByteRange) -> Result<bool, Errno> {
        let replica = &mut self.replicas[at];
        let is_repair = replica.repairs_rot(ask);
        let has_sums = is_repair && block_numbers(range).all(|block| replica.is_summed(block));
        if !is_repair {
            replica.expect_no_sums(range);
        }
        if has_sums {
            replica.expect_sums(range);
            self.count("repairs that keep sums");
        }
        if has_sums && self.options.sabotage != Some(Sabotage::RepairsEndSums) {
            return Ok(true);
        }
        self.keep_rot(at, range)?;
        self.replicas[at].sums_end(range);
        Ok(false)
    }

    /// Keeps the sums beside rot that a modification of `range` would end. If the replica refuses because of
    /// the limit, the operator restarts it after a while. Rot that is unknown then is healed.
    pub(super) fn keep_rot(&mut self, at: usize, range: ByteRange) -> Result<(), Errno> {
        let is_sabotaged = self.options.sabotage == Some(Sabotage::UntrackedRot);
        let replica = &mut self.replicas[at];
        let kept = replica.keep_rot(range);
        if kept.is_ok() || is_sabotaged {
            return Ok(());
        }
        let (boot, is_first) = (replica.boot, !std::mem::replace(&mut replica.is_refusing, true));
        if is_first {
            let delay = replica.repair_rng.u64(OPERATOR_US);
            self.after(delay, Occurrence::Mend(Mend::Refusing(at, boot)));
        }
        self.count("modifications refused beside rot");
        kept
    }

    /// The operator restarts a replica that refuses modifications.
    pub fn restart_refusing(&mut self, at: usize, boot: u64) {
        if self.replicas[at].boot == boot {
            let mut rng = self.replicas[at].repair_rng.fork();
            self.kill_replica(at, false, 1000, &mut rng);
        }
    }

    /// Looks for regions to sum.
    pub fn look_for_sums(&mut self, at: usize, boot: u64) {
        let delay = self.rng.u64(LOOK_US);
        let replica = &mut self.replicas[at];
        if replica.boot != boot || !replica.up {
            return;
        }
        self.after(delay, Occurrence::Sum { replica: at, boot, is_read: None });
        let is_early = self.options.sabotage == Some(Sabotage::SumsBeforeLook);
        let replica = &mut self.replicas[at];
        if replica.summing.is_some() || replica.failed || replica.durable.rebuilding {
            return;
        }
        let regions = replica.state.intent_log().regions();
        replica.state.intent_log_mut().want_sums(0..regions.count());
        let (files, known) = (&replica.files, &replica.known_rot);
        let holds_or_has_lost = |region: u32| {
            block_numbers(regions.range(region)).any(|block| files.holds(block) || known.has(block))
        };
        let empty: Vec<u32> = (0..regions.count()).filter(|region| !holds_or_has_lost(*region)).collect();
        empty.into_iter().for_each(|region| replica.state.intent_log_mut().need_no_sums(region..region + 1));
        let from = replica.rng.u32(0..regions.count());
        let intent_log = replica.state.intent_log_mut();
        let Some(first) = intent_log.next_to_sum(from).or_else(|| intent_log.next_to_sum(0)) else { return };
        let run = first..(first + REGIONS_AT_ONCE).min(regions.count());
        let mut summing = Summing {
            regions: run.clone(),
            sums: BTreeMap::new(),
            read_back: BTreeMap::new(),
            is_void: false,
        };
        if is_early {
            // Blocks that are read before the record begins may be modified in between.
            summing.sums = replica.sums_now(run.clone());
        } else if !replica.state.intent_log_mut().begin_sums(run) {
            return;
        }
        replica.summing = Some(summing);
        let delay = if is_early { 3_000_000 } else { self.disk_delay(at) };
        self.after(delay, Occurrence::Sum { replica: at, boot, is_read: Some(false) });
    }

    /// Continues after the blocks are read, or after the sums are on the disk.
    pub fn sums_done(&mut self, at: usize, boot: u64, is_written: bool) {
        let is_early = self.options.sabotage == Some(Sabotage::SumsBeforeLook);
        let replica = &mut self.replicas[at];
        if replica.boot != boot || !replica.up || replica.failed {
            return;
        }
        let Some(mut summing) = replica.summing.take().filter(|summing| !summing.is_void) else { return };
        if !is_written {
            if !is_early {
                summing.sums = replica.sums_now(summing.regions.clone());
                let found = summing.sums.keys().map(|block| (*block, replica.sum_of(*block)));
                summing.read_back = found.collect();
            }
            replica.summing = Some(summing);
            let delay = self.disk_delay(at);
            return self.after(delay, Occurrence::Sum { replica: at, boot, is_read: Some(true) });
        }
        if is_early {
            replica.state.intent_log_mut().begin_sums(summing.regions.clone());
        }
        replica.durable.sums.extend(summing.sums);
        replica.state.intent_log_mut().end_sums(true);
        for (block, found) in summing.read_back {
            if replica.is_summed(block) {
                replica.known_rot.summed(block, found);
            }
        }
        self.count("regions summed");
        self.write_pages(at);
    }

    /// Returns true if the replica has had rot in `range`, by now perhaps repaired.
    pub fn has_rotten(&self, at: usize, range: ByteRange) -> bool {
        self.was_rotten
            .range((at, range.offset() / BLOCK_BYTES)..(at, range.end().div_ceil(BLOCK_BYTES)))
            .next()
            .is_some()
    }
}
