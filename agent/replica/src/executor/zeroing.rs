//! Discards and writes of zeroes.

use shorthorn_ring::Ring;
use shorthorn_store::{BlockSource, EdgeBlock, ZeroStep};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, Errno};
use shorthorn_wire::Opcode;

use super::Executor;
use super::block_sums::Modification;
use super::operation::{OperationResult, is_passing, kind, not_rot};
use super::requests::is_durable;
use super::zeroes::ZeroingAction;

impl Executor {
    /// Plans until there is something to do, and begins it.
    pub(super) fn next_zero_step(&mut self, job: u8, ring: &mut Ring) {
        loop {
            match self.zero_jobs.job(job).next() {
                ZeroingAction::Step(step) => return self.begin_zero_step(job, step, ring),
                ZeroingAction::Plan(piece) => {
                    let slot = self.zero_jobs.job(job).slot();
                    let discards = slot.is_some_and(|slot| self.io.header(slot).opcode == Opcode::Discard);
                    let planned = self.zero_jobs.job(job).plan(piece, discards, &mut self.store);
                    if let Err(error) = planned {
                        let errno = self.read_planner.not_planned(&error);
                        return self.end_zeroing(job, Err(errno), ring);
                    }
                }
                ZeroingAction::Done => return self.end_zeroing(job, Ok(()), ring),
            }
        }
    }

    fn begin_zero_step(&mut self, job: u8, step: ZeroStep, ring: &mut Ring) {
        self.zero_jobs.job(job).begin(step);
        match step {
            ZeroStep::Punch(range) => self.io.punch(job, range, &self.store, ring),
            ZeroStep::WriteZeroes(range) => self.io.write_zeroes(job, range, &self.store, ring),
            ZeroStep::Merge(edge) => self.read_zero_edge(job, edge, ring),
        }
    }

    /// Starts the first step of a merge: reads the block.
    fn read_zero_edge(&mut self, job: u8, edge: EdgeBlock, ring: &mut Ring) {
        let Some(slot) = self.zero_jobs.job(job).slot() else { return };
        let source = match self.store.plan_write(edge.part) {
            // The layers may have changed since the plan of the job.
            Ok(plan) => plan.first.or(plan.last).map_or(edge.source, |found| found.source),
            Err(error) => {
                let errno = self.read_planner.not_planned(&error);
                return self.end_zeroing(job, Err(errno), ring);
            }
        };
        match source {
            BlockSource::File(file) => {
                self.io.read_zero_edge(job, slot, edge.block, file, &self.store, ring);
            }
            BlockSource::Zero => {
                self.io.edge(slot, 0).zero();
                self.write_zero_edge(job, slot, edge, ring);
            }
        }
    }

    /// Starts the second step of a merge: writes the block with zeroes in it.
    fn write_zero_edge(&mut self, job: u8, slot: u16, edge: EdgeBlock, ring: &mut Ring) {
        if let Some(sums) = self.io.zero_edge(slot, edge, self.block_sums.awaits(slot)) {
            self.block_sums.merged(Modification::new(slot, &self.io), edge.block, sums);
        }
        if let Err(errno) = self.record_merged(slot) {
            return self.end_zeroing(job, Err(errno), ring);
        }
        self.io.write_zero_edge(job, slot, edge.block, &self.store, ring);
    }

    pub(super) fn on_zero_step(&mut self, job: u8, kind: u8, result: Result<usize, Errno>, ring: &mut Ring) {
        let state = self.zero_jobs.job(job);
        let (Some(slot), Some(step)) = (state.slot(), state.current()) else { return };
        match (step, result) {
            (step, Err(errno)) if is_passing(errno) => self.begin_zero_step(job, step, ring),
            (ZeroStep::Merge(_), Ok(_)) if kind == kind::ZERO_EDGE && state.is_void() => {
                self.begin_zero_step(job, step, ring);
            }
            (ZeroStep::Merge(edge), Ok(count)) if kind == kind::ZERO_EDGE => {
                // Short only where a layer below the head ends inside the block.
                let buf = self.io.edge(slot, 0);
                buf.part(count.min(buf.len()), buf.len() - count.min(buf.len())).zero();
                self.write_zero_edge(job, slot, edge, ring);
            }
            (ZeroStep::Merge(_), Err(errno)) if kind == kind::ZERO_EDGE => {
                self.end_zeroing(job, Err(not_rot(errno)), ring);
            }
            (step, Err(errno)) => self.zero_step_failed(job, step, errno, ring),
            (ZeroStep::Punch(range), Ok(_)) => {
                self.flushes.changed();
                self.store.punched(range);
                self.next_zero_step(job, ring);
            }
            (ZeroStep::WriteZeroes(range), Ok(count)) => self.zeroes_written(job, step, range, count, ring),
            (ZeroStep::Merge(edge), Ok(count)) => self.zeroes_written(job, step, edge.block, count, ring),
        }
    }

    /// Handles `count` written bytes of `range`; the rest, if any, is tried again.
    fn zeroes_written(&mut self, job: u8, step: ZeroStep, range: ByteRange, count: usize, ring: &mut Ring) {
        let done = (count as u64 / BLOCK_BYTES * BLOCK_BYTES).min(range.length());
        if done == 0 {
            return self.zero_step_failed(job, step, Errno::IO, ring);
        }
        self.flushes.changed();
        let (now, rest) = range.split_at(range.offset() + done);
        self.store.written(now);
        match rest {
            Some(rest) => self.begin_zero_step(job, ZeroStep::WriteZeroes(rest), ring),
            None => self.next_zero_step(job, ring),
        }
    }

    fn zero_step_failed(&mut self, job: u8, step: ZeroStep, errno: Errno, ring: &mut Ring) {
        self.flushes.changed();
        if let Some(blocks) = step.written_instead(errno) {
            self.store.write_failed(blocks);
            self.zero_jobs.job(job).write_out(blocks);
            return self.next_zero_step(job, ring);
        }
        let errno = self.write_failed(step.blocks(), errno);
        self.end_zeroing(job, Err(errno), ring);
    }

    fn end_zeroing(&mut self, job: u8, outcome: OperationResult, ring: &mut Ring) {
        let slot = self.zero_jobs.job(job).slot();
        self.zero_jobs.end(job);
        let Some(slot) = slot else { return };
        match outcome {
            Ok(()) if is_durable(&self.io.header(slot)) || self.cures_lost(slot) => self.flush(slot, ring),
            outcome => self.finish(slot, outcome),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::path::Path;

    use shorthorn_ring::Completion;
    use shorthorn_store::{OpenOptions, Store};
    use shorthorn_wire::Header;

    use super::*;
    use crate::executor::tests::new_store;

    fn replica(directory: &Path) -> Executor {
        let (mut store, owner, loaded) = new_store(directory);
        store.write_at(&vec![7; 8 << 20], 0, true).unwrap();
        Executor::new(store, owner, loaded).unwrap()
    }

    /// Executes a request to its end. `change` may alter each completion.
    fn execute(
        executor: &mut Executor,
        header: Header,
        mut change: impl FnMut(Option<ZeroStep>, &mut Completion),
    ) -> OperationResult {
        let mut ring = Ring::new(16).unwrap();
        executor.assign(0, header);
        executor.modify(0, header.range().unwrap(), &mut ring).unwrap();
        let (mut completions, mut finished) = (Vec::new(), Vec::new());
        while !executor.take_finished(&mut finished) {
            ring.wait(None, &mut completions).unwrap();
            for mut completion in completions.drain(..) {
                change(executor.zero_jobs.job(0).current(), &mut completion);
                executor.on_completion(completion, &mut ring);
            }
        }
        finished[0].1
    }

    fn head(directory: &Path) -> File {
        File::open(directory.join("volume-head-000.img")).unwrap()
    }

    #[test]
    fn zeroes_are_written_if_holes_are_refused() {
        for opcode in [Opcode::Discard, Opcode::WriteZeroes] {
            for errno in [Errno::NOT_SUPPORTED, Errno::NO_SPACE] {
                let temp = tempfile::tempdir().unwrap();
                let path = temp.path().join("replica");
                let mut executor = replica(&path);
                // The ends of it are parts of blocks.
                let header = Header::request(opcode, 1, (1 << 20) + 512, 6 << 20);
                let (mut refused, mut written) = (0, 0);
                let outcome = execute(&mut executor, header, |step, completion| match step {
                    Some(ZeroStep::Punch(_)) => {
                        (completion.result, refused) = (-errno.raw(), refused + 1);
                    }
                    Some(ZeroStep::WriteZeroes(blocks)) => written += blocks.length(),
                    _ => {}
                });
                assert_eq!(
                    (outcome, refused),
                    (Ok(()), 2),
                    "{opcode:?}: one hole for each piece of the plan"
                );
                assert_eq!(written, (6 << 20) - 4096, "{opcode:?}");
                let mut found = vec![0; 8 << 20];
                let head = head(&path);
                head.read_exact_at(&mut found, 0).unwrap();
                let (start, end) = match opcode {
                    Opcode::Discard => ((1 << 20) + 4096, 7 << 20),
                    _ => ((1 << 20) + 512, (7 << 20) + 512),
                };
                assert!(found[start..end].iter().all(|byte| *byte == 0), "{opcode:?}");
                assert!(found[..start].iter().chain(&found[end..]).all(|byte| *byte == 7), "{opcode:?}");
                assert!(head.metadata().unwrap().blocks() * 512 >= 8 << 20, "{opcode:?} has made holes");
            }
        }
    }

    /// Counts the completed part of a discard without space as done, as with every modification.
    #[test]
    fn a_discard_without_space_has_failed() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("replica");
        let mut executor = replica(&path);
        let header = Header::request(Opcode::Discard, 1, 0, 8 << 20);
        let full = |step: Option<ZeroStep>, completion: &mut Completion| {
            if !matches!(step, Some(ZeroStep::Punch(blocks)) if blocks.offset() == 0) {
                completion.result = -libc::ENOSPC;
            }
        };
        assert_eq!(execute(&mut executor, header, full), Err(Errno::NO_SPACE));
        assert_eq!(executor.state().failure(), None);
        assert_eq!(execute(&mut executor, header, |_, _| {}), Ok(()), "with space again it is done");
        drop(executor);
        let mut store = Store::open(&path, OpenOptions::default()).unwrap();
        let mut found = vec![7; 8 << 20];
        store.read_at(&mut found, 0).unwrap();
        assert!(found.iter().all(|byte| *byte == 0));
    }
}
