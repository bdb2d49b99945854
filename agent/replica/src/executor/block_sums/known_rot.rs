//! The knowledge of rot while requests modify blocks: see [`KnownRot`].
//!
//! [`KnownRot`]: shorthorn_replica_core::KnownRot

use std::ops::Range;

use shorthorn_regions::WriteIntentLog;
use shorthorn_replica_core::{AboutHole, After};
use shorthorn_store::SUM_PAGE_SPAN_BYTES;
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_wire::{Header, Opcode};

use super::{BlockSums, is_rot_of_head, is_summed, touches_summed};
use crate::executor::block::{block_ranges, number_of};
use crate::executor::request_io::RequestIo;
use crate::limits::REPORTED_ROTTEN_MAX;

/// A request that modifies blocks, with its data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Modification<'a> {
    slot: u16,
    io: &'a RequestIo,
}

impl<'a> Modification<'a> {
    pub fn new(slot: u16, io: &'a RequestIo) -> Modification<'a> {
        Modification { slot, io }
    }

    fn header(&self) -> &Header {
        &self.io.work(self.slot).header
    }

    fn opcode(&self) -> Opcode {
        self.header().opcode
    }
}

impl BlockSums {
    /// Returns true if the block is known.
    pub fn knows(&self, block: u64) -> bool {
        self.known.has(block)
    }

    /// Returns the known blocks among these, in order.
    pub fn known_in(&self, blocks: Range<u64>) -> impl Iterator<Item = u64> + '_ {
        self.known.blocks_in(blocks)
    }

    /// Returns true if any block of `range` is known.
    pub fn knows_any_in(&self, range: ByteRange) -> bool {
        let blocks = range.offset() / BLOCK_BYTES..range.end().div_ceil(BLOCK_BYTES);
        self.known_in(blocks).next().is_some()
    }

    /// Forgets these blocks, also if they are lost.
    pub fn forget_blocks(&mut self, blocks: ByteRange) {
        for block in block_ranges(blocks) {
            self.known.forget_block(number_of(block));
        }
    }

    /// The request is about to modify `range`.
    pub fn follow(&mut self, request: Modification<'_>, range: ByteRange) {
        let is_discard = request.opcode() == Opcode::Discard;
        // A discard leaves blocks that it covers in part as they are.
        let blocks = if is_discard { range.shrunk_to_blocks() } else { range.grown_to_blocks() };
        let knows_any = !self.known.is_empty();
        for block in block_ranges(blocks).filter(|_| knows_any) {
            if self.known.has(number_of(block)) {
                let after = self.after(request, range, block);
                self.known.modified(request.slot, number_of(block), after);
            }
        }
    }

    /// The request ends for lack of space. It has changed no block that it does not [follow](Self::follow).
    pub fn refused(&mut self, request: Modification<'_>) {
        let Ok(range) = request.header().range() else { return };
        let knows_any = !self.known.is_empty();
        for block in block_ranges(range.shrunk_to_blocks()).filter(|_| knows_any) {
            if self.known.is_reported(number_of(block)) {
                let after = self.after(request, range, block);
                self.known.refused(number_of(block), after);
            }
        }
    }

    /// The data that `block` gets from the request. A repair writes blocks of zeroes as such.
    fn after(&self, request: Modification<'_>, range: ByteRange, block: ByteRange) -> After {
        let is_whole = block.offset() >= range.offset() && block.end() <= range.end();
        match request.opcode() {
            Opcode::WriteZeroes if !is_whole => After::PartlyZeroes { zeroes: self.zero_sum },
            _ if !is_whole => After::Unmerged,
            // Rot that is all zeroes, too, is not data that the block may hold after a failure.
            Opcode::Write if is_rot_of_head(request.header()) => After::Rot,
            Opcode::Write => self.after_sum(number_of(block), self.given_sum(request, block)),
            _ => After::Sum(self.given_sum(request, block)),
        }
    }

    /// Returns the sum of the data that the request gives a whole block.
    fn given_sum(&self, request: Modification<'_>, block: ByteRange) -> u32 {
        match request.opcode() {
            Opcode::Write => request.io.sum_of(request.slot, block),
            _ => self.zero_sum,
        }
    }

    /// Returns true if the request in the slot has to report the data that it merges.
    pub fn awaits(&self, slot: u16) -> bool {
        self.known.awaits(slot)
    }

    /// Records that the request is about to write a block that it has merged with the former data. `sums` has
    /// the sums before and after.
    pub fn merged(&mut self, request: Modification<'_>, block: ByteRange, sums: (u32, u32)) {
        let Ok(range) = request.header().range() else { return };
        self.known.merged(request.slot, range, number_of(block), sums);
    }

    /// The request in the slot is about to fail on the only member.
    pub fn failed_alone(&mut self, slot: u16) {
        self.known.failed_alone(slot);
    }

    /// The request in the slot has ended; if not `well`, it has done a part of its work, or nothing.
    pub fn ended(&mut self, slot: u16, well: bool) {
        self.known.ended(slot, well);
    }

    /// Returns true if the request repairs all that it writes. An engine knows that these blocks hold rot,
    /// and the data has their sums, which count. A crash during the repair must not end the sums. The block
    /// may be half written then, and the region may have other rot.
    pub fn repairs_rot(
        &self,
        request: Modification<'_>,
        range: ByteRange,
        intent_log: &WriteIntentLog,
    ) -> bool {
        let header = request.header();
        let may_repair = matches!(header.opcode, Opcode::Write | Opcode::WriteZeroes);
        let is_repaired = |block: ByteRange| {
            let number = number_of(block);
            self.known.is_reported(number)
                && self.known.is_repaired_by(number, request.slot, self.given_sum(request, block))
        };
        may_repair
            && !self.known.is_empty()
            && !is_rot_of_head(header)
            && range == range.grown_to_blocks()
            && is_summed(range, intent_log)
            && block_ranges(range).all(is_repaired)
    }

    /// An engine gets an answer about these blocks: one of them is rotten, or all are sound.
    pub fn answered(&mut self, blocks: ByteRange, rotten: Option<ByteRange>) {
        if self.known.is_empty() {
            return;
        }
        match rotten {
            Some(block) => self.known.reported(number_of(block)),
            None => block_ranges(blocks).for_each(|block| self.known.found_sound(number_of(block))),
        }
    }

    /// Forgets a known block that was read back with this sum: a sum that says the same is durable, and
    /// counts.
    pub fn summed(&mut self, block: u64, found: u32) {
        self.known.summed(block, found);
    }

    /// Remembers the rot that the sums of a region show. The repair of a block removes all sums of its
    /// region.
    pub fn know_rot(&mut self, block: ByteRange, intent_log: &WriteIntentLog) {
        let start = block.offset() / SUM_PAGE_SPAN_BYTES * SUM_PAGE_SPAN_BYTES;
        let Ok(page) = ByteRange::new(start, SUM_PAGE_SPAN_BYTES) else { return };
        let number = start / SUM_PAGE_SPAN_BYTES;
        if self.pages.peek(number).is_none() && touches_summed(page, intent_log) {
            return; // the block was known, and the sums beside it are not: they may still be untracked
        }
        let sums = self.kept_sums_of(page, intent_log);
        let was_kept = self.known.may_modify(number);
        if !self.known.keep(number, sums) && was_kept {
            self.report_too_much_rot(page);
        }
    }

    fn report_too_much_rot(&mut self, page: ByteRange) {
        self.untracked += 1;
        if self.untracked <= REPORTED_ROTTEN_MAX {
            tracing::error!(
                %page,
                "more blocks hold rot than can be tracked: modifications here fail, because they would make \
                 the rest of the rot look sound. Repair the volume by a scrub, or replace this replica"
            );
        }
    }

    /// Returns true if the sums of some page with rot may not be kept: see [`BlockSums::may_modify`].
    pub fn has_untracked(&self) -> bool {
        self.untracked > 0 && self.pages.is_kept()
    }

    /// Returns false if the page has rot that would be forgotten when its sums end.
    pub fn may_modify(&self, page: u64) -> bool {
        self.known.may_modify(page)
    }

    /// Keeps the sums of `range` that count, whose page is in memory. Returns false if they exceed the limit
    /// of blocks.
    pub fn keep_sums_of(&mut self, range: ByteRange, intent_log: &WriteIntentLog) -> bool {
        let sums = self.kept_sums_of(range, intent_log);
        self.known.keep_some(sums)
    }

    /// Decides about a block that is a hole, and in which a repair is about to show data with the sum
    /// `shown`. `kept` is its sum in a page, if that counts.
    pub fn decide_about_hole(&mut self, block: u64, shown: u32, kept: Option<u32>) -> AboutHole {
        self.known.decide_about_hole(block, (self.zero_sum, shown), kept)
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_store::BLOCKS_PER_SUM_PAGE;

    use super::*;
    use crate::executor::tests::new_store;

    /// An untracked page with rot has to be read before any of its regions is modified.
    #[test]
    fn a_known_block_of_a_page_that_is_not_in_memory_gives_the_page_no_place() {
        let temp = tempfile::tempdir().unwrap();
        let (.., mut loaded) = new_store(&temp.path().join("replica"));
        let (intent_log, sums) = (loaded.state.intent_log_mut(), &mut loaded.block_sums);
        intent_log.keep_unsummed(None);
        intent_log.want_sums(0..1);
        assert!(intent_log.begin_sums(0..1));
        intent_log.end_sums(true);
        let known = &mut sums.known;
        let block_of = |page: u64| page * BLOCKS_PER_SUM_PAGE as u64;
        let full = (1..).take_while(|page| known.keep(*page, (0..512).map(|at| (block_of(*page) + at, 7))));
        assert!(full.count() > 0);
        known.keep_lost([3]);
        assert!(!known.keep(0, [(4, 7)]) && !known.may_modify(0));
        let block = ByteRange::new(3 * 4096, 4096).unwrap();
        assert!(touches_summed(block, intent_log) && sums.pages.peek(0).is_none());
        sums.know_rot(block, intent_log);
        assert!(!sums.may_modify(0));
    }
}
