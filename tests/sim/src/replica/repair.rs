//! Repairs of the snapshot by a scrub, beside requests.
//!
//! A repair shows other data in a block without a request. A request that merges a part of the block may have
//! read it before, and writes it afterwards. The order of the steps is that of the replica.

use shorthorn_replica_core::AboutHole;

use super::*;

impl Replica {
    /// Returns the blocks of the snapshot with rot that a request is about to merge.
    pub fn rot_merged_by(&self, op: &Op) -> Vec<u64> {
        let edges: BTreeSet<u64> = edges(op).collect();
        self.files.rot_below().map(|(block, _)| block).filter(|block| edges.contains(block)).collect()
    }

    /// Prepares the repair of a block that the disk has lost. Requests may have made zeroes of it since,
    /// which have to stay. Returns the reason if the repair has to be refused.
    pub fn keep_zeroes(&mut self, block: u64, sabotage: Option<Sabotage>) -> Result<bool, &'static str> {
        let Some(was) = self.files.vanished_below(block) else { return Ok(false) };
        if self.is_being_modified(block) {
            return Err("repairs refused beside a request");
        }
        if sabotage == Some(Sabotage::RepairsUncover) {
            return Ok(false);
        }
        if self.files.head.get(block).is_some() {
            self.files.head.sync(usize::MAX);
            return Ok(false);
        }
        let is_paged_out =
            !self.known_rot.has(block) && self.is_summed(block) && self.repair_rng.u8(0..4) == 0;
        if is_paged_out {
            return Err("repairs refused until a page is read");
        }
        let [zeroes, shown] = [Block::default(), was].map(|content| check(&content).max(1));
        let kept = self.kept_sum(block);
        let shows_rot = !self.known_rot.has(block) && kept.is_some_and(|kept| kept != zeroes);
        if shows_rot && sabotage != Some(Sabotage::HolesUnkept) && !self.keep_page(block) {
            return Err("repairs refused without a place");
        }
        match self.known_rot.decide_about_hole(block, (zeroes, shown), kept) {
            AboutHole::StaysZeroes => self.files.keep_zeroes(block),
            AboutHole::ShowsLayer => return Ok(false),
            AboutHole::Undecided => {
                if !self.files.rot.contains_key(&block) && self.is_known_rotten(block) {
                    self.doubted.insert(block);
                }
                return Err("repairs refused until other members decide");
            }
        }
        Ok(true)
    }

    /// Gives a block of the snapshot its former data again. Returns the reason if the repair is refused or
    /// fails.
    pub fn repair_block(&mut self, block: u64, sabotage: Option<Sabotage>) -> Result<(), &'static str> {
        if !self.end_sums_durably(block_range(block)) {
            self.heal_unknown();
            return Err("repairs without the end of sums");
        }
        // The layer has a hole there.
        let has_failed = self.full && self.files.snapshot.get(block).is_none();
        if !has_failed {
            self.read_before_repair(block);
            self.files.repair_below(block);
        }
        if sabotage == Some(Sabotage::RepairsCure) {
            self.known_rot.forget_block(block);
        }
        self.heal_unknown();
        if has_failed { Err("repairs without space") } else { Ok(()) }
    }

    fn is_being_modified(&self, block: u64) -> bool {
        let modifications = self.ops.values().chain(self.waiting.modifications());
        let mut ranges = modifications.filter_map(|op| modified(&op.ask));
        ranges.any(|range| block_numbers(range).contains(&block))
    }

    /// Ends the sums of the regions of `range`. Returns false if that cannot be stored now.
    fn end_sums_durably(&mut self, range: ByteRange) -> bool {
        self.expect_no_sums(range);
        let intent_log = self.state.intent_log_mut();
        let regions = intent_log.regions().touched(range);
        intent_log.unsum(regions);
        if self.full_for_pages || self.takes_error(FaultyOperation::Page) {
            return false;
        }
        let Replica { state, durable, .. } = self;
        while let Some(write) = state.intent_log_mut().begin_write(false) {
            let slot = write.slot;
            durable.write_page(write.key, write.page, write.bytes);
            state.intent_log_mut().end_write(slot, true);
        }
        true
    }

    /// Returns true if the ring writes pages of sets of regions. A repair is repeated when they are written.
    pub fn is_writing_pages(&self) -> bool {
        !self.pages.is_empty()
    }

    /// Returns true if pages of sets of regions can be written beside the ring.
    pub fn can_write_pages(&self) -> bool {
        let is_broken = self.broken.get(&FaultyOperation::Page).is_some_and(|times| *times > 0);
        !self.full_for_pages && !is_broken
    }

    /// Some of the running requests have read the block already.
    fn read_before_repair(&mut self, block: u64) {
        let is_below = self.files.head.get(block).is_none() && self.files.shown_former(block).is_none();
        let Some(content) = self.files.snapshot.get(block).filter(|_| is_below) else {
            return;
        };
        let rng = &mut self.repair_rng;
        let readers = self.ops.values_mut().filter(|op| edges(op).any(|edge| edge == block));
        for op in readers.filter(|_| rng.bool()) {
            op.read_before.entry(block).or_insert(content);
        }
    }
}

/// The blocks of which a request merges a part with the former data.
fn edges(op: &Op) -> impl Iterator<Item = u64> {
    let range = match &op.ask {
        Ask::Write(range, ..) | Ask::WriteZeroes(range, _) => *range,
        _ => ByteRange::EMPTY,
    };
    let is_whole =
        move |block: u64| block * BLOCK_BYTES >= range.offset() && (block + 1) * BLOCK_BYTES <= range.end();
    block_numbers(range).filter(move |block| !is_whole(*block))
}
