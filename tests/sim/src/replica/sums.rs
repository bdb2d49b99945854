//! Sums of blocks, and disks that change blocks by themselves.
//!
//! A disk rots only in blocks with sums on the replica, and never in a block that no other replica has. The
//! former content is remembered, and is restored as soon as no sum of the block counts any more. Rot without
//! sums cannot be noticed at all. The sums of a region end when it is modified, except for those beside known
//! rot. They stay known until their block has got other data, so that such a block stays rotten. The replica
//! and its simulation keep them in the same way: see [`KnownRot`].
//!
//! In some scripts few sums can stay known, and pages are small, so that rot stays untracked. The simulation
//! reads a page at once.

use super::*;
use shorthorn_replica_core::{After, RotLimits};
use shorthorn_types::Errno;
use shorthorn_types::limits::SECTOR_BYTES;

use crate::Sabotage;

/// The number of blocks whose sums are in one page of the file of a replica.
pub const PAGE_BLOCKS: u64 = 512;
/// The same if few blocks can be tracked: a small volume has several pages then.
const FEW_PLACES_PAGE_BLOCKS: u64 = 24;
/// The sum of a page for a block without one.
const NO_SUM: u32 = 0;
/// The maximum number of untracked pages, if few blocks can be tracked.
const UNTRACKED_PAGES: usize = 3;

/// Regions that are being summed.
#[derive(Debug)]
pub struct Summing {
    pub regions: std::ops::Range<u32>,
    /// By block, once they are read.
    pub sums: BTreeMap<u64, u32>,
    /// The sums of the data that was read.
    pub read_back: BTreeMap<u64, u32>,
    /// True if the sums are not needed any more. The disk still completes its operations for them.
    pub is_void: bool,
}

impl Replica {
    /// Returns the sum of a block as a reader sees it; never 0.
    pub fn sum_of(&self, block: u64) -> u32 {
        let content = self.files.head.get(block).or_else(|| self.files.snapshot.get(block));
        let content = self.files.shown_former(block).or(content).unwrap_or_default();
        check(&content).max(1)
    }

    pub fn is_summed(&self, block: u64) -> bool {
        let intent_log = self.state.intent_log();
        let mut regions = intent_log.regions().touched(block_range(block));
        !regions.is_empty()
            && regions.all(|region| intent_log.is_summed(region))
            && self.durable.sums.contains_key(&block)
    }

    /// The sum that the page of a block says, if that counts.
    pub(super) fn kept_sum(&self, block: u64) -> Option<u32> {
        self.durable.sums.get(&block).copied().filter(|sum| *sum != NO_SUM && self.is_summed(block))
    }

    /// Returns true if a page has a sum of the block, whether it counts or not.
    pub(super) fn has_stored_sum(&self, block: u64) -> bool {
        self.durable.sums.get(&block).is_some_and(|sum| *sum != NO_SUM)
    }

    /// Returns true if any sum of the block counts.
    pub fn is_guarded(&self, block: u64) -> bool {
        self.known_rot.has(block) || self.kept_sum(block).is_some()
    }

    /// Returns true if a block is known to hold something else than was stored there.
    pub fn is_known_rotten(&self, block: u64) -> bool {
        let found = self.sum_of(block);
        let known = self.known_rot.is_rotten(block, found);
        known.unwrap_or_else(|| self.kept_sum(block).is_some_and(|sum| sum != found))
    }

    /// Keeps the sums beside a block with rot that a read of `range` has met.
    pub fn know_rot(&mut self, block: u64, range: ByteRange, sabotage: Option<Sabotage>) {
        let page = block / self.page_blocks;
        let blocks = page * self.page_blocks..(page + 1) * self.page_blocks;
        let read = block_numbers(range);
        let read = read.start.max(blocks.start)..read.end.min(blocks.end);
        let is_in_memory = self.has_summed(read) || self.repair_rng.bool();
        if !is_in_memory && sabotage != Some(Sabotage::UnreadPages) && self.has_summed(blocks.clone()) {
            return;
        }
        let rotten = blocks.clone().filter(|block| is_in_memory && self.is_known_rotten(*block));
        rotten.collect::<Vec<_>>().into_iter().for_each(|block| self.files.meet(block));
        let sums = self.kept_sums_of(blocks.filter(|_| is_in_memory));
        self.known_rot.keep(page, sums);
    }

    /// Keeps the sums of the page of a block. Returns false if they find no place.
    pub(super) fn keep_page(&mut self, block: u64) -> bool {
        let first = block / self.page_blocks * self.page_blocks;
        let blocks = first..first + self.page_blocks;
        let sums = self.kept_sums_of(blocks.clone());
        let has_place = self.known_rot.keep_some(sums);
        let rotten = blocks.filter(|block| has_place && self.is_known_rotten(*block));
        rotten.collect::<Vec<_>>().into_iter().for_each(|block| self.files.meet(block));
        has_place
    }

    pub(super) fn forget_known_rot(&mut self) {
        self.known_rot.forget_sums([]);
        self.files.meet_none();
    }

    fn kept_sums_of(&self, blocks: impl Iterator<Item = u64>) -> Vec<(u64, u32)> {
        blocks.filter_map(|block| Some((block, self.kept_sum(block)?))).collect()
    }

    /// Returns true if the blocks touch a region whose sums count.
    fn has_summed(&self, blocks: std::ops::Range<u64>) -> bool {
        let intent_log = self.state.intent_log();
        let length_bytes = blocks.end.saturating_sub(blocks.start) * BLOCK_BYTES;
        let range = ByteRange::new(blocks.start * BLOCK_BYTES, length_bytes).unwrap_or(ByteRange::EMPTY);
        intent_log.regions().touched(range).any(|region| intent_log.is_summed(region))
    }

    /// Bounds the knowledge of rot, so that pages exceed it.
    pub fn limit_known_rot(&mut self, blocks: usize) {
        if blocks > 0 {
            self.page_blocks = FEW_PLACES_PAGE_BLOCKS;
            self.known_rot.set_limits(RotLimits { blocks, untracked_pages: UNTRACKED_PAGES });
        }
    }

    /// The pages with the sums that a modification of `range` ends.
    fn pages_of(&self, range: ByteRange) -> std::ops::Range<u64> {
        let blocks = block_numbers(self.regions_of(range));
        blocks.start / self.page_blocks..blocks.end.div_ceil(self.page_blocks)
    }

    /// Returns true if rot that only a page shows would be forgotten by a modification of `range`.
    pub fn has_untracked_rot(&self, range: ByteRange) -> bool {
        self.pages_of(range).any(|page| !self.known_rot.may_modify(page))
    }

    /// Keeps the sums that a modification of `range` ends, if their pages have untracked rot. Every page
    /// can be read at once. Returns an error if the limit is reached.
    pub fn keep_rot(&mut self, range: ByteRange) -> Result<(), Errno> {
        if !self.has_summed(block_numbers(range)) {
            return Ok(());
        }
        let ends = block_numbers(self.regions_of(range));
        for page in self.pages_of(range) {
            let blocks = page * self.page_blocks..(page + 1) * self.page_blocks;
            let part = blocks.start.max(ends.start)..blocks.end.min(ends.end);
            if !self.known_rot.may_modify(page) && !self.known_rot.keep_some(self.kept_sums_of(part)) {
                return Err(Errno::IO);
            }
        }
        Ok(())
    }

    /// Invalidates the sums of the regions of `range`, which a request is to modify, whether it is admitted
    /// or not.
    pub fn sums_end(&mut self, range: ByteRange) {
        let bytes = self.regions_of(range);
        let rotten = self.files.rot.range(block_numbers(bytes)).map(|(block, _)| *block);
        let unknown: Vec<u64> =
            rotten.filter(|block| !self.known_rot.has(*block) && !self.files.has_lost(*block)).collect();
        let is_forgotten = |block: &u64| self.files.is_met(*block) && self.is_known_rotten(*block);
        self.forgotten_rot = self.forgotten_rot.or_else(|| unknown.iter().copied().find(is_forgotten));
        unknown.into_iter().for_each(|block| self.heal_block(block));
    }

    /// Handles the admission of the request. Changes by the disk stay until the outcome is known.
    pub fn sums_follow(&mut self, op: &Op, range: ByteRange, sabotage: Option<Sabotage>) {
        let is_discard = matches!(op.ask, Ask::Discard(_));
        let blocks = if is_discard { whole_blocks(range) } else { block_numbers(range) };
        for block in blocks {
            if sabotage == Some(Sabotage::EarlyForgetting) {
                // As if another request had modified it meanwhile.
                self.known_rot.modified((ConnId::MAX, 0), block, after(&op.ask, range, block));
            }
            self.known_rot.modified(op.key(), block, after(&op.ask, range, block));
        }
        if sabotage == Some(Sabotage::ForgottenRot) {
            // The current data of the other regions is summed.
            let others =
                block_numbers(self.regions_of(range)).filter(|block| !block_numbers(range).contains(block));
            for block in others.filter(|block| self.known_rot.has(*block)).collect::<Vec<_>>() {
                (0..2).for_each(|number| {
                    self.known_rot.modified((ConnId::MAX, number), block, After::Unmerged)
                });
                let sum = self.sum_of(block);
                self.known_rot.keep(0, [(block, sum)]);
            }
        }
    }

    /// Records that the request has merged a part of each of these blocks with the former data; they are
    /// about to be written.
    pub fn sums_are_merged(&mut self, op: &Op, changes: &[(u64, Option<Block>)], sabotage: Option<Sabotage>) {
        let is_stale = sabotage == Some(Sabotage::StaleSectors);
        let Some(range) = modified(&op.ask).filter(|_| self.known_rot.awaits(op.key())) else { return };
        for (block, content) in changes {
            if matches!(after(&op.ask, range, *block), After::Unmerged | After::PartlyZeroes { .. }) {
                let read = op.read_before.get(block).map(|content| check(content).max(1));
                let before = read.unwrap_or_else(|| self.sum_of(*block));
                let after = check(&content.unwrap_or_default()).max(1);
                let stale = self.last_merged.get(block).copied().filter(|_| is_stale);
                self.known_rot.merged(op.key(), range, *block, (stale.unwrap_or(before), after));
                if is_stale {
                    self.last_merged.insert(*block, after);
                }
            }
        }
    }

    /// Records the end of the request; if not `well`, it has done a part of its work.
    pub(super) fn sums_have_followed(&mut self, op: &Op, well: bool) {
        let Some(range) = modified(&op.ask) else { return };
        let known: Vec<u64> =
            block_numbers(range).filter(|block| well && self.known_rot.has(*block)).collect();
        let is_alone = self.is_only_member();
        if !well && is_alone {
            self.known_rot.failed_alone(op.key());
        }
        for block in whole_blocks(range) {
            let is_sound = !self.files.rot.contains_key(&block);
            if well {
                self.doubted.remove(&block);
            } else if !is_alone && is_sound && self.known_rot.is_reported(block) {
                self.doubted.insert(block);
            }
        }
        self.known_rot.ended(op.key(), well);
        for block in whole_blocks(range).filter(|_| !well && !is_alone) {
            self.files.owe(block, content_of(&op.ask, range, block));
        }
        if let Ask::WriteZeroes(..) = op.ask
            && well
        {
            self.files.owe_zeroes(range);
        }
        let is_lost = |block: &u64| well && !self.durable.rebuilding && self.has_recorded_lost(*block);
        self.stale_lost = self.stale_lost.or_else(|| whole_blocks(range).find(is_lost));
        for block in whole_blocks(range) {
            if self.files.rot.contains_key(&block) && (well || self.may_be_the_hole_of_a_request(block)) {
                self.files.cover(block);
            }
        }
        let is_forgotten = |block: &u64| !self.known_rot.has(*block) && self.files.rot.contains_key(block);
        // A repair has cured a block, or a request is to write its rot once more.
        let merged = op.read_before.keys().copied().filter(|_| well);
        let mut known = known.into_iter().chain(merged);
        self.forgotten_rot = self.forgotten_rot.or_else(|| known.find(is_forgotten));
    }

    /// The request was refused before it changed anything.
    pub fn sums_are_refused(&mut self, op: &Op, errno: Errno) {
        let decides = errno == Errno::NO_SPACE && !self.is_only_member();
        let Some(range) = modified(&op.ask).filter(|_| decides) else { return };
        for block in whole_blocks(range) {
            if !self.files.rot.contains_key(&block) && self.known_rot.is_reported(block) {
                self.doubted.insert(block);
            }
            self.known_rot.refused(block, after(&op.ask, range, block));
            self.files.owe(block, content_of(&op.ask, range, block));
            if self.may_be_the_hole_of_a_request(block) {
                self.files.cover(block);
            }
        }
    }

    /// Returns true if no view that may count has another member.
    fn is_only_member(&self) -> bool {
        self.state.views().report().views().all(|view| view.members.without(self.id).is_empty())
    }

    /// Returns true if the block has vanished, and a failed request was to make a hole there. Either may have
    /// made it, and the data of the request is sound. A hole that was to be one was not written.
    fn may_be_the_hole_of_a_request(&self, block: u64) -> bool {
        self.files.has_vanished(block) && self.known_rot.is_rotten(block, self.sum_of(block)) == Some(false)
    }

    /// Returns the blocks of `range` that the replica knows to be rotten.
    pub fn rotten_blocks(&self, range: ByteRange) -> Vec<u64> {
        block_numbers(range).filter(|block| self.is_known_rotten(*block)).collect()
    }

    /// Returns all of the regions that `range` touches.
    fn regions_of(&self, range: ByteRange) -> ByteRange {
        let regions = self.state.intent_log().regions();
        regions.bytes(regions.touched(range))
    }

    /// Returns true if the replica could give the block for sure.
    pub fn is_sound(&self, block: u64) -> bool {
        let is_rotten = self.files.rot.contains_key(&block) || self.known_rot.is_lost(block);
        self.up && !self.failed && !self.durable.rebuilding && !is_rotten
    }

    /// Returns true if the snapshot has the block as it was stored, and can be read.
    pub fn has_sound_below(&self, block: u64) -> bool {
        let is_rotten = self.files.rot.contains_key(&block);
        self.up
            && !self.failed
            && self.durable.has_snapshot
            && !is_rotten
            && self.files.snapshot.get(block).is_some()
    }

    /// Heals blocks whose sums do not count any more.
    pub fn heal_unknown(&mut self) {
        // If a lost block is not known, that is a mistake.
        let is_unknown = |block: &u64| !self.is_guarded(*block) && !self.files.has_lost(*block);
        let unknown: Vec<u64> = self.files.rot.keys().copied().filter(is_unknown).collect();
        unknown.into_iter().for_each(|block| self.heal_block(block));
    }

    /// Heals a block. If rot was merged into it, its stored sum is not that of the correct data. The sum does
    /// not count now, but it does again if the process ends before the disk has stored that.
    fn heal_block(&mut self, block: u64) {
        if self.files.is_merged_with_rot(block) {
            self.durable.sums.remove(&block);
        }
        self.files.heal(block);
    }

    /// Heals a block that a copy does not find. It may still look rotten.
    pub fn heal_or_doubt(&mut self, block: u64) {
        self.files.heal(block);
        if self.is_known_rotten(block) {
            self.doubted.insert(block);
        }
    }

    /// Heals the regions of `range`, which all replicas give up.
    pub fn heal(&mut self, range: ByteRange) {
        let bytes = self.regions_of(range);
        let rotten: Vec<u64> = self.files.rot.range(block_numbers(bytes)).map(|(block, _)| *block).collect();
        for block in rotten {
            // A part of the block may have been written since it rotted. Neither a known nor a stored sum is
            // that of the correct data.
            self.known_rot.forget_block(block);
            self.durable.lost.remove(&block);
            self.durable.sums.remove(&block);
            if let Some(summing) = &mut self.summing {
                summing.sums.remove(&block);
            }
            self.files.heal(block);
        }
    }

    /// Ends the process in the middle: the page that it was writing is new, old, or torn.
    pub fn end_summing(&mut self, rng: &mut Rng) {
        let Some(Summing { sums, is_void: false, .. }) = self.summing.take() else { return };
        match rng.u8(0..3) {
            0 => {}
            1 => self.durable.sums.extend(sums),
            _ => self.durable.sums.clear(),
        }
    }

    /// Drops the running sums, because the data has changed.
    pub fn void_summing(&mut self) {
        if let Some(summing) = &mut self.summing {
            summing.is_void = true;
        }
    }

    /// Knows the blocks that no member had when the replica was made.
    pub fn know_lost(&mut self, sabotage: Option<Sabotage>) {
        // As if a block with other data than it was copied with were not lost any more.
        let by_sum = sabotage == Some(Sabotage::MergedForgotten);
        let lost = self.durable.lost.iter();
        let lost = lost.filter(|(block, lost)| !by_sum || self.sum_of(**block) == lost.copied());
        let lost: Vec<u64> = lost.map(|(block, _)| *block).collect();
        self.known_rot.keep_lost(lost);
    }

    /// Loads the lost blocks. After another program has had the directory open, those with none of their sums
    /// have got other data from it. Otherwise a crash may have torn a merge or a write.
    pub(super) fn load_lost(&mut self) {
        let mut lost = std::mem::take(&mut self.durable.lost);
        if std::mem::replace(&mut self.durable.lost_epoch, self.durable.epoch) != self.durable.epoch {
            lost.retain(|block, lost| lost.has(self.sum_of(*block)));
        }
        for (block, lost) in &mut lost {
            let sum = self.sum_of(*block);
            if !lost.has(sum) {
                lost.add_merged(sum);
            }
        }
        self.durable.lost = lost;
    }

    /// Records the sums of lost blocks that the request has merged with new data, and is about to write.
    pub fn record_merged(&mut self, op: &Op) {
        for (block, sum) in self.known_rot.merged_by(op.key()) {
            self.durable.lost.entry(block).and_modify(|lost| lost.add_merged(sum));
        }
    }

    /// Another program opens the directory and closes it, without a change of data.
    pub fn open_by_other(&mut self) {
        self.durable.epoch += 1;
        self.durable.is_snapshot_done = false;
        self.files.head.sync(usize::MAX);
    }

    /// Returns true if the disk records the block as lost.
    pub fn has_recorded_lost(&self, block: u64) -> bool {
        self.durable.lost.contains_key(&block)
    }

    /// Returns a lost block that holds rot, and that the process does not know.
    pub fn unknown_lost(&self) -> Option<u64> {
        let counts = !self.durable.rebuilding || self.durable.is_snapshot_done;
        self.files.lost().find(|block| counts && !self.is_known_rotten(*block))
    }

    /// The request has given lost blocks other data: that becomes durable, then the record.
    pub(super) fn record_cured(&mut self, op: &Op) {
        let cured: Vec<u64> = self.known_rot.cured_by(op.key()).collect();
        if !self.durable.rebuilding && !cured.is_empty() {
            self.files.head.sync(usize::MAX);
            self.durable.lost.retain(|block, _| !cured.contains(block));
        }
    }

    /// Records the blocks that the ended copy has cured.
    pub fn record_cured_by_copy(&mut self) {
        self.files.head.sync(usize::MAX);
        self.durable.lost.retain(|block, _| self.known_rot.is_lost(*block));
    }

    /// No sum counts any more. Requests that modify lost blocks still do.
    pub(super) fn forget_sums(&mut self) {
        self.known_rot.forget_sums(self.durable.lost.keys().copied());
        self.files.meet_none();
        // They write sound data, because the rot could not be noticed.
        let lost = &self.durable.lost;
        self.ops.values_mut().for_each(|op| op.read_before.retain(|block, _| lost.contains_key(block)));
        self.void_summing();
        self.known_rot.forget_pages();
        self.durable.sums.clear();
        self.repaired_regions.clear();
        let regions = self.state.intent_log().regions();
        self.state.intent_log_mut().end_sums(false);
        self.state.intent_log_mut().unsum(0..regions.count());
        self.heal_unknown();
    }
}

impl Replica {
    /// Returns the sums of the blocks of those regions that are being summed.
    pub fn sums_now(&self, regions: std::ops::Range<u32>) -> BTreeMap<u64, u32> {
        let intent_log = self.state.intent_log();
        let is_begun = |region: &u32| intent_log.is_being_summed(*region) || !intent_log.is_summed(*region);
        let blocks =
            regions.filter(is_begun).flat_map(|region| block_numbers(intent_log.regions().range(region)));
        // A region that was repaired is read back: its block may have rot that was not found yet.
        let kept = |block| self.kept_sum(block).filter(|_| !self.known_rot.has(block));
        let found = |block| self.known_rot.sum_to_store(block, self.sum_of(block));
        let sum = |block| kept(block).unwrap_or_else(|| found(block));
        blocks.map(|block| (block, sum(block))).collect()
    }
}

/// The numbers of the blocks that are in the range as a whole.
fn whole_blocks(range: ByteRange) -> std::ops::Range<u64> {
    range.offset().div_ceil(BLOCK_BYTES)..range.end() / BLOCK_BYTES
}

/// The data that `block` gets by `ask`.
fn after(ask: &Ask, range: ByteRange, block: u64) -> After {
    if !whole_blocks(range).contains(&block) {
        let zeroes = check(&Block::default()).max(1);
        let is_zeroes = matches!(ask, Ask::WriteZeroes(..));
        return if is_zeroes { After::PartlyZeroes { zeroes } } else { After::Unmerged };
    }
    After::Sum(check(&content_of(ask, range, block)).max(1))
}

/// The data of a block that is in the range as a whole.
pub(super) fn content_of(ask: &Ask, range: ByteRange, block: u64) -> Block {
    let Ask::Write(_, data, _) = ask else { return Block::default() };
    let at = |sector: usize| data[place(block * BLOCK_BYTES + sector as u64 * SECTOR_BYTES, range)];
    std::array::from_fn(at)
}
