//! Tracks lost blocks: no member had a sound copy, so their rot was copied. They stay known until they get
//! other data.
//!
//! A block counts as lost while the record on the disk names it, whatever data it holds.

use shorthorn_replica_core::is_final;
use shorthorn_store::LOST_BLOCKS_MAX;
use shorthorn_types::{ByteRange, Errno};
use shorthorn_wire::Flags;

use super::Executor;
use super::block_sums::{NotRecorded, is_rot_of_head};
use super::operation::OperationResult;
use super::requests::Work;

impl Executor {
    /// Records the blocks of the head that a copy is about to overwrite with rot, because no member has them.
    /// The record is durable before the data: a recorded block is lost, whatever it holds.
    pub(super) fn record_rot_of_head(&mut self, slot: u16) -> OperationResult {
        let Work { header, blocks, .. } = *self.io.work(slot);
        if !is_rot_of_head(&header) {
            return Ok(());
        }
        if header.range() != Ok(blocks) {
            return Err(Errno::INVALID);
        }
        self.record_rot(slot, blocks)
    }

    /// Records the sums of lost blocks that the request in the slot has merged with new data, and is about to
    /// write. So they stay lost after another program has had the directory open. Waits for the disk.
    pub(super) fn record_merged(&mut self, slot: u16) -> OperationResult {
        let recorded = self.block_sums.record_merged(slot, &mut self.store);
        self.record_ended(recorded)
    }

    /// The request in the slot has succeeded. Blocks that have other data now are not lost any more.
    pub(super) fn record_cured(&mut self, slot: u16) -> OperationResult {
        if !self.cures_lost(slot) {
            return Ok(());
        }
        let recorded = self.block_sums.record_cured(slot, &mut self.store);
        self.record_ended(recorded)
    }

    /// Returns true if the modification in the slot gives lost blocks other data, which the ring has to make
    /// durable before [`Executor::finish`]. While the replica is being copied, the record stays: another
    /// attempt drops the head, and keeps the layers.
    pub(super) fn cures_lost(&self, slot: u16) -> bool {
        !self.store.is_copying() && self.block_sums.cures_lost(slot)
    }

    /// Ends the copy of a part of a layer. The engine's statement about it is on the disk before the answer.
    /// Sound data does not end a record before the layer is whole, and its data durable. Another attempt
    /// makes the layer again, and keeps the ones below it.
    pub(super) fn layer_is_written(&mut self, slot: u16) -> OperationResult {
        let header = self.io.header(slot);
        let blocks = self.io.work(slot).blocks;
        let is_rotten = header.flags.has(Flags::ROTTEN);
        if !is_rotten && !self.block_sums.has_lost() {
            return Ok(());
        }
        self.block_sums.forget_blocks(blocks);
        if is_rotten { self.record_rot(slot, blocks) } else { Ok(()) }
    }

    /// Records that the data in the slot is that of lost blocks.
    fn record_rot(&mut self, slot: u16, blocks: ByteRange) -> OperationResult {
        let sum_of = |block| self.io.sum_of(slot, block);
        let recorded = self.block_sums.record_rot(blocks, sum_of, &mut self.store);
        self.record_ended(recorded)
    }

    /// Returns the outcome of a request after the record of the lost blocks has changed. If it could not be
    /// written, the replica stops serving, unless only space was missing.
    fn record_ended(&mut self, recorded: Result<(), NotRecorded>) -> OperationResult {
        let error = match recorded {
            Ok(()) => return Ok(()),
            Err(NotRecorded::TooMany) => {
                tracing::error!(
                    "more than {LOST_BLOCKS_MAX} blocks are lost, which cannot be recorded: this replica \
                     cannot be made. Restore the volume from a backup, or overwrite the damaged blocks"
                );
                return Err(Errno::new(libc::EOVERFLOW));
            }
            Err(NotRecorded::Unwritten(error)) => error,
        };
        if is_final(error.errno()) {
            self.fail(&format!("cannot record which blocks are lost: {error}"));
        } else {
            tracing::warn!(%error, "cannot record which blocks are lost");
        }
        Err(error.errno())
    }

    /// Handles the end of a copy, or of that of a layer. Blocks that have got other data meanwhile are not
    /// lost any more: first their data becomes durable, then the record. Waits for the disk.
    pub(super) fn record_cured_by_copy(&mut self) -> OperationResult {
        let cured = self.block_sums.cured_by_copy();
        if cured.is_empty() {
            return Ok(());
        }
        if let Err(error) = self.store.flush() {
            self.fail(&format!("the data of blocks that were lost could not be made durable: {error}"));
            return Err(Errno::IO);
        }
        let recorded = self.block_sums.end_records(&cured, &mut self.store);
        self.record_ended(recorded)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use shorthorn_ring::{Completion, Ring};
    use shorthorn_store::{CreateOptions, LostBlock, LostBlocks, Store, sum_of_zeroes};
    use shorthorn_types::limits::BLOCK_BYTES;
    use shorthorn_types::{Generation, Members, ReplicaId, View, ViewId};
    use shorthorn_views::ReplicaViews;
    use shorthorn_wire::{Header, Opcode};

    use super::*;
    use crate::executor::{Loaded, kind};
    use crate::state::Owner;

    const LOST: u64 = 3;

    /// Makes a replica that has lost a block.
    fn replica(directory: &Path) -> Executor {
        let options = CreateOptions { size_bytes: 16 << 20, ..CreateOptions::default() };
        let mut store = Store::create(directory, options).unwrap();
        store.write_at(&vec![7; 1 << 20], 0, true).unwrap();
        store.save_lost_blocks(&LostBlocks::from([(LOST, LostBlock::new(9))])).unwrap();
        let id = ViewId { generation: Generation::NEVER, number: 0 };
        let committed = View { id, members: Members::default() };
        let unknown = shorthorn_control::Unknown::default();
        let owner = Owner { volume: "v1".parse().unwrap(), replica: ReplicaId::from_random(1), unknown };
        let loaded = Loaded::load(&mut store, &owner, ReplicaViews::new(committed), None).unwrap();
        Executor::new(store, owner, loaded).unwrap()
    }

    /// Executes a modification to its end. Returns its outcome, and the operations of the ring on the data.
    fn execute(executor: &mut Executor, header: Header) -> (OperationResult, Vec<u8>) {
        execute_with(executor, header, 5, |_| {})
    }

    /// Executes a modification with such bytes to its end. `change` may alter each completion.
    fn execute_with(
        executor: &mut Executor,
        header: Header,
        byte: u8,
        mut change: impl FnMut(&mut Completion),
    ) -> (OperationResult, Vec<u8>) {
        let mut ring = Ring::new(16).unwrap();
        executor.assign(0, header);
        if header.data_bytes() > 0 {
            executor.io.payload(0).copy_from(&vec![byte; header.data_bytes() as usize]);
        }
        executor.start(0, &mut ring);
        let (mut completions, mut finished, mut kinds) = (Vec::new(), Vec::new(), Vec::new());
        while !executor.take_finished(&mut finished) {
            executor.write_pages(&mut ring);
            ring.wait(None, &mut completions).unwrap();
            for mut completion in completions.drain(..) {
                change(&mut completion);
                kinds.extend(Some(completion.token.kind).filter(|kind| *kind != kind::PAGE));
                executor.on_completion(completion, &mut ring);
            }
        }
        executor.free(0);
        (finished[0].1, kinds)
    }

    /// The data thread waits for no fdatasync: requests of other blocks continue.
    #[test]
    fn the_ring_makes_the_data_of_a_cured_block_durable() {
        for (opcode, done) in [(Opcode::Write, kind::WRITE), (Opcode::WriteZeroes, kind::ZERO_STEP)] {
            let temp = tempfile::tempdir().unwrap();
            let path = temp.path().join("replica");
            let mut executor = replica(&path);
            let at = |block: u64| Header::request(opcode, 1, block * BLOCK_BYTES, 4096);
            assert_eq!(execute(&mut executor, at(LOST + 1)), (Ok(()), vec![done]), "{opcode:?}");
            assert!(path.join("shorthorn.lost-blocks").exists());
            assert_eq!(execute(&mut executor, at(LOST)), (Ok(()), vec![done, kind::SYNC]), "{opcode:?}");
            assert!(!path.join("shorthorn.lost-blocks").exists());
        }
    }

    /// Otherwise the block would count as sound if another program opened the directory after a crash.
    #[test]
    fn a_merge_with_a_lost_block_is_recorded_before_it_is_written() {
        for (opcode, done) in [
            (Opcode::Write, [kind::EDGE, kind::WRITE]),
            (Opcode::WriteZeroes, [kind::ZERO_EDGE, kind::ZERO_STEP]),
        ] {
            let temp = tempfile::tempdir().unwrap();
            let path = temp.path().join("replica");
            let mut executor = replica(&path);
            let record = path.join("shorthorn.lost-blocks");
            let at = |block: u64| Header::request(opcode, 1, block * BLOCK_BYTES + 512, 1024);
            let before = std::fs::read(&record).unwrap();
            assert_eq!(execute(&mut executor, at(LOST + 1)), (Ok(()), done.to_vec()));
            assert_eq!(std::fs::read(&record).unwrap(), before, "{opcode:?}: the block is not lost");
            assert_eq!(execute(&mut executor, at(LOST)), (Ok(()), done.to_vec()));
            assert_ne!(std::fs::read(&record).unwrap(), before, "{opcode:?}");
            std::fs::create_dir(path.join("shorthorn.lost-blocks.tmp")).unwrap();
            let at = Header::request(opcode, 1, LOST * BLOCK_BYTES + 2048, 512);
            let (outcome, kinds) = execute(&mut executor, at);
            assert!(outcome.is_err() && kinds == done[..1], "{opcode:?}: {outcome:?} {kinds:?}");
        }
    }

    /// A member without space stays in the view, and its block may already hold the zeroes.
    #[test]
    fn rot_that_is_all_zeroes_stays_known_after_a_write_of_it_has_failed() {
        for is_full in [false, true] {
            let temp = tempfile::tempdir().unwrap();
            let mut executor = replica(&temp.path().join("replica"));
            let hole = 600;
            let header = Header::request(Opcode::Write, 1, hole * BLOCK_BYTES, 4096);
            let header = Header { flags: Flags::ROTTEN, ..header };
            let (outcome, _) = execute_with(&mut executor, header, 0, |completion| {
                if is_full && completion.token.kind == kind::WRITE {
                    completion.result = -libc::ENOSPC;
                }
            });
            assert_eq!(outcome, if is_full { Err(Errno::NO_SPACE) } else { Ok(()) });
            assert!(executor.block_sums.lost().contains_key(&hole));
            assert_eq!(executor.block_sums.known().is_rotten(hole, sum_of_zeroes()), Some(true), "{is_full}");
        }
    }
}
