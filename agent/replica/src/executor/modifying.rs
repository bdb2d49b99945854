//! Keeps the sums of blocks beside known rot while requests modify blocks: see [`KnownRot`].
//!
//! [`KnownRot`]: shorthorn_replica_core::KnownRot

use shorthorn_ring::Ring;
use shorthorn_store::SUM_PAGE_SPAN_BYTES;
use shorthorn_types::{ByteRange, Errno};

use super::Executor;
use super::block_sums::{Modification, touches_summed};
use super::operation::OperationResult;
use super::requests::is_modification;

impl Executor {
    /// Prepares the modification of `range` by the request in the slot. Reads of `range` are not compared any
    /// more, and it has to be summed again.
    pub(super) fn sums_follow(&mut self, slot: u16, range: ByteRange) {
        if self.block_sums.is_kept() {
            self.background_sums.follow();
        }
        self.block_sums.follow(Modification::new(slot, &self.io), range);
        self.io.requests_mut().end_checks_of_reads(range);
    }

    /// The request in the slot has ended.
    pub(super) fn sums_followed(&mut self, slot: u16, outcome: OperationResult) {
        match outcome {
            Err(_) if self.state.is_only_member() => self.block_sums.failed_alone(slot),
            Err(Errno::NO_SPACE) if is_modification(self.io.header(slot).opcode) => {
                self.block_sums.refused(Modification::new(slot, &self.io));
            }
            _ => {}
        }
        self.block_sums.ended(slot, outcome.is_ok());
    }

    /// Keeps the sums that the modification of `range` in the slot invalidates, if there is rot in their
    /// pages. Otherwise that rot would look sound. Returns false if a page of sums has to be read first: then
    /// the request is started again.
    ///
    /// # Errors
    /// Only the page of sums knows the rot, and the sums of the page exceed the limit of blocks.
    pub(super) fn keep_rot(&mut self, slot: u16, range: ByteRange, ring: &mut Ring) -> Result<bool, Errno> {
        if !self.block_sums.has_untracked() {
            return Ok(true);
        }
        if !touches_summed(range, self.state.intent_log()) {
            return Ok(true); // they have ended already
        }
        let regions = self.state.intent_log().regions();
        let ends = regions.bytes(regions.touched(range));
        for number in ends.offset() / SUM_PAGE_SPAN_BYTES..ends.end().div_ceil(SUM_PAGE_SPAN_BYTES) {
            if number < self.io.work(slot).kept_before || self.block_sums.may_modify(number) {
                continue;
            }
            if self.block_sums.load_page(number, ring).is_none() {
                self.block_sums.modify_later(slot);
                return Ok(false);
            }
            let start = ends.offset().max(number * SUM_PAGE_SPAN_BYTES);
            let end = ends.end().min((number + 1) * SUM_PAGE_SPAN_BYTES);
            let part = ByteRange::new(start, end.saturating_sub(start)).unwrap_or(ByteRange::EMPTY);
            if !self.block_sums.keep_sums_of(part, self.state.intent_log()) {
                return Err(Errno::IO);
            }
            self.io.requests_mut().set_kept_rot_before(slot, number + 1);
        }
        Ok(true)
    }

    /// Starts the modifications again that waited for pages of sums: one was read, or an entry is free.
    pub(super) fn resume_keeping(&mut self, ring: &mut Ring) {
        let mut retried = self.block_sums.take_modifications();
        for slot in retried.drain(..) {
            self.start(slot, ring);
        }
        self.block_sums.give_back_modifications(retried);
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_replica_core::After;
    use shorthorn_types::{Generation, Members, ReplicaId, View, ViewId};
    use shorthorn_views::ReplicaViews;
    use shorthorn_wire::{Header, Opcode};

    use super::*;
    use crate::executor::Loaded;
    use crate::executor::block_sums::is_summed;
    use crate::executor::tests::new_store;

    fn sum_first_region(executor: &mut Executor) {
        let intent_log = executor.state.intent_log_mut();
        intent_log.keep_unsummed(None);
        intent_log.want_sums(0..1);
        assert!(intent_log.begin_sums(0..1));
        intent_log.end_sums(true);
    }

    #[test]
    fn only_other_members_decide_about_a_block_whose_write_has_failed() {
        for (members, is_former_sound) in [(1..2, true), (1..3, false)] {
            let temp = tempfile::tempdir().unwrap();
            let (mut store, owner, _) = new_store(&temp.path().join("replica"));
            let id = ViewId { generation: Generation::NEVER, number: 0 };
            let members = Members::new(members.map(ReplicaId::from_random)).unwrap();
            let views = ReplicaViews::new(View { id, members });
            let loaded = Loaded::load(&mut store, &owner, views, None).unwrap();
            let mut executor = Executor::new(store, owner, loaded).unwrap();
            let known = executor.block_sums.known();
            assert!(known.keep_some([(3, 70), (4, 70), (5, 70)]));
            (3..6).for_each(|block| known.reported(block));
            known.modified(0, 3, After::Sum(80));
            executor.sums_followed(0, Err(Errno::NO_SPACE));
            let known = executor.block_sums.known();
            assert_eq!([70, 80].map(|sum| known.is_rotten(3, sum)), [Some(!is_former_sound), Some(false)]);

            // These blocks get no page for their regions: the request does not begin.
            executor.assign(1, Header::request(Opcode::WriteZeroes, 1, 4 * 4096, 4096 + 512));
            executor.finish(1, Err(Errno::NO_SPACE));
            let zeroes = executor.block_sums.zero_sum();
            let known = executor.block_sums.known();
            let sums = [70, zeroes].map(|sum| known.is_rotten(4, sum));
            assert_eq!(sums, [Some(!is_former_sound), Some(is_former_sound)]);
            assert_eq!(known.is_rotten(5, 70), Some(false), "the request has a part of it");
        }
    }

    #[test]
    fn an_interrupted_read_of_a_page_of_sums_ends_no_sums() {
        let temp = tempfile::tempdir().unwrap();
        let (mut store, owner, loaded) = new_store(&temp.path().join("replica"));
        let file = store.open_block_sums().unwrap();
        let mut executor = Executor::new(store, owner, loaded).unwrap();
        executor.block_sums.begin(file);
        sum_first_region(&mut executor);
        let (mut ring, mut completions) = (Ring::new(16).unwrap(), Vec::new());
        let block = ByteRange::new(0, 4096).unwrap();
        assert_eq!(executor.block_sums.load_page(0, &mut ring), None);
        for (errno, counts) in [(libc::EINTR, true), (libc::EAGAIN, true), (libc::EIO, false)] {
            ring.wait(None, &mut completions).unwrap();
            let mut completion = completions.remove(0);
            completion.result = -errno;
            executor.on_completion(completion, &mut ring);
            assert_eq!(
                (is_summed(block, executor.state.intent_log()), executor.is_idle()),
                (counts, !counts),
                "{errno}"
            );
        }
    }
}
