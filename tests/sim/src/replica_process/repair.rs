//! Changes of a replica's files without its engine: a scrub that repairs the snapshot, and other programs.

use super::*;

impl Simulation {
    /// Begins a scrub of the snapshot of a replica. It meets the rot there, and repairs it within `for_us`,
    /// most of it while a request merges a part of the block.
    pub fn scrub_snapshot(&mut self, at: usize, for_us: Micros) -> bool {
        let sabotage = self.options.sabotage;
        let replica = &mut self.replicas[at];
        let can_repair = replica.up && !replica.failed && !replica.durable.rebuilding;
        // A check of a layer compares a block that has vanished only if no other layer has it.
        let is_read = replica.files.vanished().next().is_none() || replica.repair_rng.u8(0..8) > 0;
        let files = &replica.files;
        let rotten = files.rot_below().map(|(block, _)| block);
        let rotten = rotten.filter(|block| is_read || !files.has_vanished(*block));
        let met: Vec<u64> = rotten.filter(|block| replica.is_known_rotten(*block)).collect();
        let has_vanished = replica.files.vanished().chain(replica.files.covered()).next().is_some();
        if !can_repair || met.is_empty() && !has_vanished {
            return false;
        }
        met.into_iter().for_each(|block| replica.know_rot(block, block_range(block), sabotage));
        replica.is_under_repair = true;
        let boot = replica.boot;
        self.after(for_us, Occurrence::Repair { replica: at, boot, block: None });
        true
    }

    /// Kills a replica process, and has another program open its directory. Without the stamps of others, or
    /// its own, a restored disk would be like any other.
    pub fn open_by_other(&mut self, at: usize, for_us: Micros, rng: &mut Rng) -> bool {
        let is_any_restored = self.replicas.iter().any(|replica| replica.is_rolled_back);
        let is_opened = !is_any_restored && self.kill_replica(at, false, for_us, rng);
        if is_opened {
            self.replicas[at].open_by_other();
        }
        is_opened
    }

    /// Has the rot that the request is about to merge repaired within the time that it takes.
    pub(super) fn repair_beside(&mut self, at: usize, op: &Op, delay: Micros) {
        let replica = &mut self.replicas[at];
        if !replica.is_under_repair {
            return;
        }
        let boot = replica.boot;
        for block in replica.rot_merged_by(op) {
            let earlier = self.replicas[at].repair_rng.u64(0..=delay);
            self.after(earlier, Occurrence::Repair { replica: at, boot, block: Some(block) });
        }
    }

    /// Repairs a block of the snapshot, or all that are left at the end of the scrub.
    pub fn repair_snapshot(&mut self, at: usize, boot: u64, block: Option<u64>) {
        let replica = &mut self.replicas[at];
        if replica.boot != boot || !replica.up {
            return;
        }
        replica.is_under_repair &= block.is_some();
        if replica.failed || replica.durable.rebuilding {
            return;
        }
        let is_wanted = |rotten: &u64| block.is_none_or(|block| *rotten == block);
        let rotten = replica.files.rot_below().map(|(rotten, _)| rotten).chain(replica.files.covered());
        let rotten: Vec<u64> = rotten.filter(is_wanted).collect();
        for block in rotten {
            self.repair_block(at, block);
        }
        self.resume_waiting(at);
    }

    fn repair_block(&mut self, at: usize, block: u64) {
        let sabotage = self.options.sabotage;
        let is_source =
            |other: &Replica| self.guest.replicas.contains(&other.id) && other.has_sound_below(block);
        let has_source =
            (0..self.replicas.len()).any(|other| other != at && is_source(&self.replicas[other]));
        let replica = &mut self.replicas[at];
        let is_covered = replica.files.covered().any(|covered| covered == block);
        if !has_source || !is_covered && !replica.is_known_rotten(block) {
            return;
        }
        if replica.is_writing_pages() {
            return self.count("repairs refused beside the write of a set");
        }
        if !replica.can_write_pages() && !replica.files.has_vanished(block) {
            // The sums have ended by then, and the scrub has just met the rot.
            replica.know_rot(block, block_range(block), sabotage);
        }
        if replica.has_untracked_rot(block_range(block)) {
            return self.count("repairs refused beside rot");
        }
        // Rot of the head that only a page shows, and that was not met, looks sound once its sum has ended.
        let is_hole = replica.files.head.get(block).is_none();
        let was_known = replica.is_known_rotten(block) && (is_hole || replica.known_rot.has(block));
        let kept = match replica.keep_zeroes(block, sabotage) {
            Err(reason) => return self.count(reason),
            Ok(kept) => kept,
        };
        let repaired = replica.repair_block(block, sabotage);
        let is_forgotten = repaired.is_err() && was_known && !kept && !replica.is_known_rotten(block);
        let forgotten = replica.forgotten_rot.take().or_else(|| is_forgotten.then_some(block));
        let is_beside = replica.ops.values().any(|op| op.read_before.contains_key(&block));
        self.trace(|| format!("repair of block {block} of the snapshot of replica {at}: {repaired:?}"));
        if let Some(block) = forgotten {
            self.violate(format!("a repair of replica {at} has forgotten the rot of block {block}"));
        }
        if repaired.is_ok() {
            self.repaired.insert((at, block), self.now);
        }
        self.count(match repaired {
            Ok(()) => "blocks of snapshots repaired",
            Err(reason) => reason,
        });
        if is_beside && repaired.is_ok() {
            self.count("repairs beside a request that has read rot");
        }
        if kept {
            self.count("zeroes that stay after a repair");
        }
    }
}
