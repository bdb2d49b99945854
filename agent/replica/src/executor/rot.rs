//! Keeps the sums of blocks beside known rot while requests modify blocks: see [`KnownRot`].
//!
//! [`KnownRot`]: shorthorn_replica_core::KnownRot

use std::time::Instant;

use shorthorn_replica_core::After;
use shorthorn_ring::Ring;
use shorthorn_store::{SUM_PAGE_SPAN_BYTES, SUM_UNKNOWN, block_sum};
use shorthorn_types::{ByteRange, Errno};
use shorthorn_wire::Opcode;

use super::Executor;
use super::block::{block_ranges, number_of};
use super::lost::is_rot_of_head;
use super::operation::OperationResult;
use crate::limits::{REPORTED_ROTTEN_MAX, SUM_LOOK_INTERVAL};

impl Executor {
    /// Prepares the modification of `range` by the request in the slot. Reads of `range` are not compared any
    /// more, and it has to be summed again.
    pub(super) fn sums_follow(&mut self, slot: u16, range: ByteRange) {
        if self.block_sums.pages.is_kept() {
            self.sum_schedule.wake_at(|| Instant::now() + SUM_LOOK_INTERVAL);
        }
        let is_discard = self.work(slot).header.opcode == Opcode::Discard;
        // A discard leaves blocks that it covers in part as they are.
        let blocks = if is_discard { range.shrunk_to_blocks() } else { range.grown_to_blocks() };
        let knows_any = !self.block_sums.known.is_empty();
        for block in block_ranges(blocks).filter(|_| knows_any) {
            if self.block_sums.known.has(number_of(block)) {
                let after = self.after(slot, range, block);
                self.block_sums.known.modified(slot, number_of(block), after);
            }
        }
        self.requests.end_checks_of_reads(range);
    }

    /// Records that the request in the slot is about to write a block that it has merged with the former
    /// data. `sums` has the sums before and after.
    pub(super) fn sum_merged(&mut self, slot: u16, block: ByteRange, sums: (u32, u32)) {
        let Ok(range) = self.work(slot).header.range() else { return };
        self.block_sums.known.merged(slot, range, number_of(block), sums);
    }

    /// Returns true if the request in the slot has to report the data that it merges.
    pub(super) fn sums_await(&self, slot: u16) -> bool {
        self.block_sums.known.awaits(slot)
    }

    /// The request in the slot has ended.
    pub(super) fn sums_followed(&mut self, slot: u16, outcome: OperationResult) {
        if outcome.is_err() && self.is_only_member() {
            self.block_sums.known.failed_alone(slot);
        }
        self.block_sums.known.ended(slot, outcome.is_ok());
    }

    /// Returns true if no view that may count has another member.
    fn is_only_member(&self) -> bool {
        let me = self.state.me();
        self.state.views().report().views().all(|view| view.members.without(me).is_empty())
    }

    /// Returns true if the request in the slot repairs all that it writes. An engine knows that these blocks
    /// hold rot, and the data has their sums, which count. A crash during the repair must not end the sums.
    /// The block may be half written then, and the region may have other rot.
    pub(super) fn repairs_rot(&self, slot: u16, range: ByteRange) -> bool {
        let header = &self.work(slot).header;
        let may_repair = matches!(header.opcode, Opcode::Write | Opcode::WriteZeroes);
        let known = &self.block_sums.known;
        let is_repaired = |block: ByteRange| {
            let number = number_of(block);
            known.is_reported(number) && known.is_repaired_by(number, slot, self.given_sum(slot, block))
        };
        may_repair
            && !known.is_empty()
            && !is_rot_of_head(header)
            && range == range.grown_to_blocks()
            && self.is_summed(range)
            && block_ranges(range).all(is_repaired)
    }

    /// Returns the sum of the data that the request in the slot gives a whole block.
    fn given_sum(&self, slot: u16, block: ByteRange) -> u32 {
        let work = self.work(slot);
        match work.header.opcode {
            Opcode::Write => block_sum(self.buffers.part(slot, work.blocks.offset(), block).crc32c()),
            _ => self.block_sums.zero_sum,
        }
    }

    /// The data that `block` gets from the request in the slot. A repair writes blocks of zeroes as such.
    fn after(&self, slot: u16, range: ByteRange, block: ByteRange) -> After {
        let work = self.work(slot);
        let is_whole = block.offset() >= range.offset() && block.end() <= range.end();
        match work.header.opcode {
            Opcode::WriteZeroes if !is_whole => After::PartlyZeroes { zeroes: self.block_sums.zero_sum },
            _ if !is_whole => After::Unmerged,
            // Rot that is all zeroes, too, is not data that the block may hold after a failure.
            Opcode::Write if is_rot_of_head(&work.header) => After::Rot,
            Opcode::Write => self.block_sums.after(number_of(block), self.given_sum(slot, block)),
            _ => After::Sum(self.given_sum(slot, block)),
        }
    }

    /// Remembers the rot that the sums of a region show. The repair of a block removes all sums of its
    /// region.
    pub(super) fn know_rot(&mut self, block: ByteRange) {
        let start = block.offset() / SUM_PAGE_SPAN_BYTES * SUM_PAGE_SPAN_BYTES;
        let Ok(page) = ByteRange::new(start, SUM_PAGE_SPAN_BYTES) else { return };
        let number = start / SUM_PAGE_SPAN_BYTES;
        if self.block_sums.pages.peek(number).is_none() && self.has_summed(page) {
            return; // the block was known, and the sums beside it are not: they may still be untracked
        }
        let sums = self.kept_sums_of(page);
        let was_kept = self.block_sums.known.may_modify(number);
        if !self.block_sums.known.keep(number, sums) && was_kept {
            self.report_too_much_rot(page);
        }
    }

    /// Returns the blocks of `range` whose sums count, and these. Their page is in memory.
    pub(super) fn kept_sums_of(&self, range: ByteRange) -> Vec<(u64, u32)> {
        let sums = block_ranges(range).map(|block| (number_of(block), self.kept_sum(block)));
        sums.filter(|(_, sum)| *sum != SUM_UNKNOWN).collect()
    }

    /// Returns true if `range` touches a region whose sums count.
    fn has_summed(&self, range: ByteRange) -> bool {
        let intent_log = self.state.intent_log();
        intent_log.regions().touched(range).any(|region| intent_log.is_summed(region))
    }

    fn report_too_much_rot(&mut self, page: ByteRange) {
        self.block_sums.untracked += 1;
        if self.block_sums.untracked <= REPORTED_ROTTEN_MAX {
            tracing::error!(
                %page,
                "more blocks hold rot than can be tracked: modifications here fail, because they would make \
                 the rest of the rot look sound. Repair the volume by a scrub, or replace this replica"
            );
        }
    }

    /// Keeps the sums that the modification of `range` in the slot invalidates, if there is rot in their
    /// pages. Otherwise that rot would look sound. Returns false if a page of sums has to be read first: then
    /// the request is started again.
    ///
    /// # Errors
    /// Only the page of sums knows the rot, and the sums of the page exceed the limit of blocks.
    pub(super) fn keep_rot(&mut self, slot: u16, range: ByteRange, ring: &mut Ring) -> Result<bool, Errno> {
        if self.block_sums.untracked == 0 || !self.block_sums.pages.is_kept() {
            return Ok(true);
        }
        if !self.has_summed(range) {
            return Ok(true); // they have ended already
        }
        let regions = self.state.intent_log().regions();
        let ends = regions.bytes(regions.touched(range));
        for number in ends.offset() / SUM_PAGE_SPAN_BYTES..ends.end().div_ceil(SUM_PAGE_SPAN_BYTES) {
            if number < self.work(slot).kept_before || self.block_sums.known.may_modify(number) {
                continue;
            }
            if self.sum_page(number, ring).is_none() {
                self.block_sums.unkept.add(slot);
                return Ok(false);
            }
            let start = ends.offset().max(number * SUM_PAGE_SPAN_BYTES);
            let end = ends.end().min((number + 1) * SUM_PAGE_SPAN_BYTES);
            let part = ByteRange::new(start, end.saturating_sub(start)).unwrap_or(ByteRange::EMPTY);
            let sums = self.kept_sums_of(part);
            if !self.block_sums.known.keep_some(sums) {
                return Err(Errno::IO);
            }
            self.requests.set_kept_rot_before(slot, number + 1);
        }
        Ok(true)
    }

    /// Starts the modifications again that waited for pages of sums: one was read, or an entry is free.
    pub(super) fn resume_keeping(&mut self, ring: &mut Ring) {
        let mut retried = self.block_sums.unkept.take();
        for slot in retried.drain(..) {
            self.start(slot, ring);
        }
        self.block_sums.unkept.give_back(retried);
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_store::BLOCKS_PER_SUM_PAGE;
    use shorthorn_types::{Generation, Members, ReplicaId, View, ViewId};
    use shorthorn_views::ReplicaViews;

    use super::*;
    use crate::executor::Loaded;
    use crate::executor::tests::new_store;

    fn sum_first_region(executor: &mut Executor) {
        let intent_log = executor.state.intent_log_mut();
        intent_log.keep_unsummed(None);
        intent_log.want_sums(0..1);
        assert!(intent_log.begin_sums(0..1));
        intent_log.end_sums(true);
    }

    /// An untracked page with rot has to be read before any of its regions is modified.
    #[test]
    fn a_known_block_of_a_page_that_is_not_in_memory_gives_the_page_no_place() {
        let temp = tempfile::tempdir().unwrap();
        let (store, owner, loaded) = new_store(&temp.path().join("replica"));
        let mut executor = Executor::new(store, owner, loaded).unwrap();
        sum_first_region(&mut executor);
        let known = &mut executor.block_sums.known;
        let block_of = |page: u64| page * BLOCKS_PER_SUM_PAGE as u64;
        let full = (1..).take_while(|page| known.keep(*page, (0..512).map(|at| (block_of(*page) + at, 7))));
        assert!(full.count() > 0);
        known.keep_lost([3]);
        assert!(!known.keep(0, [(4, 7)]) && !known.may_modify(0));
        let block = ByteRange::new(3 * 4096, 4096).unwrap();
        assert!(executor.has_summed(block) && executor.block_sums.pages.peek(0).is_none());
        executor.know_rot(block);
        assert!(!executor.block_sums.known.may_modify(0));
    }

    #[test]
    fn only_other_members_decide_about_a_block_whose_write_has_failed() {
        for (members, is_former_sound) in [(1..2, true), (1..3, false)] {
            let temp = tempfile::tempdir().unwrap();
            let (mut store, owner, _) = new_store(&temp.path().join("replica"));
            let id = ViewId { generation: Generation::NEVER, number: 0 };
            let members = Members::new(members.map(ReplicaId::from_random)).unwrap();
            let views = ReplicaViews::new(View { id, members });
            let loaded = Loaded::load(&mut store, &owner, views, 0).unwrap();
            let mut executor = Executor::new(store, owner, loaded).unwrap();
            let known = &mut executor.block_sums.known;
            assert!(known.keep_some([(3, 70)]));
            known.reported(3);
            known.modified(0, 3, After::Sum(80));
            executor.sums_followed(0, Err(Errno::NO_SPACE));
            let known = &executor.block_sums.known;
            assert_eq!([70, 80].map(|sum| known.is_rotten(3, sum)), [Some(!is_former_sound), Some(false)]);
        }
    }

    #[test]
    fn an_interrupted_read_of_a_page_of_sums_ends_no_sums() {
        let temp = tempfile::tempdir().unwrap();
        let (mut store, owner, loaded) = new_store(&temp.path().join("replica"));
        let file = store.open_block_sums().unwrap();
        let mut executor = Executor::new(store, owner, loaded).unwrap();
        executor.block_sums.pages.begin(file);
        sum_first_region(&mut executor);
        let (mut ring, mut completions) = (Ring::new(16).unwrap(), Vec::new());
        let block = ByteRange::new(0, 4096).unwrap();
        assert_eq!(executor.sum_page(0, &mut ring), None);
        for (errno, is_summed) in [(libc::EINTR, true), (libc::EAGAIN, true), (libc::EIO, false)] {
            ring.wait(None, &mut completions).unwrap();
            let mut completion = completions.remove(0);
            completion.result = -errno;
            executor.on_completion(completion, &mut ring);
            assert_eq!((executor.is_summed(block), executor.is_idle()), (is_summed, !is_summed), "{errno}");
        }
    }
}
