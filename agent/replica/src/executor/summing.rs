//! Makes sums of blocks in the background while the volume is idle: see [`BackgroundSums`].
//!
//! [`BackgroundSums`]: super::background_sums::BackgroundSums

use std::time::Duration;

use shorthorn_replica_core::is_final;
use shorthorn_ring::Ring;
use shorthorn_store::SUM_PAGE_BYTES;
use shorthorn_types::Errno;
use shorthorn_wire::{Header, Opcode};

use super::Executor;
use super::operation::is_passing;
use super::requests::SUM_SLOT;
use super::sum_job::{SumRange, SummingStep};
use crate::error::ReplicaError;

impl Executor {
    /// Returns the time until [`Executor::sum`] has work, unless an event comes before.
    pub fn sums_pause(&self) -> Option<Duration> {
        self.background_sums.pause()
    }

    /// Does a step of the sums that does not wait for the disk.
    pub fn sum(&mut self, ring: &mut Ring) {
        if !self.block_sums.is_kept() || self.state.failure().is_some() {
            return self.background_sums.stop();
        }
        while let Some(job) = self.background_sums.range() {
            if job.is_void && !job.is_in_ring() {
                return self.background_sums.end(job, self.io.is_busy());
            }
            match job.step {
                SummingStep::Next => self.read_next(job, ring),
                SummingStep::Read(outcome) => {
                    self.background_sums.take_piece(outcome, self.state.intent_log_mut(), &self.io);
                }
                SummingStep::Page { number } => {
                    let intent_log = self.state.intent_log();
                    return self.background_sums.write_page(number, &mut self.block_sums, intent_log, ring);
                }
                SummingStep::Reading | SummingStep::Writing => return,
            }
        }
        if self.background_sums.is_due() {
            if self.background_sums.begin(self.state.intent_log_mut(), &self.store, &self.io) {
                // Sums made before count after the end of the process too.
                self.write_stale_pages(ring);
            }
            if self.background_sums.is_running() {
                self.sum(ring);
            }
        }
    }

    /// Reads the next regions of the page, or starts the step after the last one.
    fn read_next(&mut self, job: SumRange, ring: &mut Ring) {
        let Executor { background_sums, state, block_sums, read_planner, store, .. } = self;
        // The sums of known blocks have to become durable too. If the file system does not say where data is,
        // the range is read.
        let holds_anything =
            |range| block_sums.knows_any_in(range) || !read_planner.is_hole(range, store).unwrap_or(false);
        let Some(piece) = background_sums.next_piece(job, state.intent_log_mut(), holds_anything) else {
            return;
        };
        let length_bytes = u32::try_from(piece.length()).unwrap_or(0);
        self.io.assign(SUM_SLOT, Header::request(Opcode::Read, 0, piece.offset(), length_bytes));
        if let Err(errno) = self.start_read(SUM_SLOT, piece, ring) {
            self.background_sums.read_ended(Err(errno));
        }
    }

    pub(super) fn on_sums_written(&mut self, at: usize, result: Result<usize, Errno>, ring: &mut Ring) {
        let well = result == Ok(SUM_PAGE_BYTES);
        let is_wanted = self.block_sums.page_written(at, well);
        if let Err(errno) = result
            && is_final(errno)
            && !is_passing(errno)
        {
            // The page was to be durable: the reported error may be about other data.
            self.fail(&format!("sums of blocks could not be stored: {errno}"));
        }
        let (intent_log, is_busy) = (self.state.intent_log_mut(), self.io.is_busy());
        self.background_sums.page_written(well, is_wanted, &mut self.block_sums, intent_log, is_busy);
        self.resume_after_page(ring);
    }

    pub(super) fn on_sums_read(&mut self, at: usize, result: Result<usize, Errno>, ring: &mut Ring) {
        // The page is not damaged: the rot that it shows would be forgotten.
        if result.is_err_and(is_passing) && self.block_sums.read_page_again(at, ring) {
            return;
        }
        if let Some((number, false)) = self.block_sums.page_loaded(at, result.unwrap_or(0)) {
            let intent_log = self.state.intent_log_mut();
            self.background_sums.page_is_unknown(number, &mut self.block_sums, intent_log);
        }
        self.resume_after_page(ring);
    }

    /// Looks again at the requests that wait for pages of sums: one is here, or a place has become free.
    fn resume_after_page(&mut self, ring: &mut Ring) {
        // Modifications come first: comparisons would take the entries of their pages.
        self.resume_keeping(ring);
        self.resume_comparing(ring);
    }

    /// Invalidates the kept sums: the volume is about to be, or was, changed beside the requests. Then
    /// starts over.
    ///
    /// # Errors
    /// The sums can be neither invalidated nor deleted. The replica then serves nothing any more.
    pub(super) fn renew_sums(&mut self) -> Result<(), ReplicaError> {
        if !self.block_sums.retire() {
            return Ok(());
        }
        let intent_log = self.state.intent_log_mut();
        self.background_sums.void(intent_log);
        intent_log.unsum(0..intent_log.regions().count());
        match self.store.open_block_sums() {
            Ok(file) => {
                self.block_sums.begin(file);
                self.background_sums.begin_again();
                Ok(())
            }
            Err(error) => {
                tracing::warn!(%error, "block checksums are off: rot on the disk is not detected until the \
                 replica restarts");
                self.state.intent_log_mut().forget_unsummed();
                let forgotten = self.store.forget_block_sums();
                if let Err(error) = &forgotten {
                    self.fail(&format!("sums of blocks that do not count could not be forgotten: {error}"));
                }
                Ok(forgotten?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::executor::background_sums::BackgroundSums;
    use crate::executor::kind;
    use crate::executor::sum_schedule::SumSchedule;
    use crate::executor::tests::new_store;
    use crate::limits::SUM_SPACE_INTERVAL;

    /// A disk may need seconds for each attempt.
    #[test]
    fn a_region_that_cannot_be_read_is_tried_again_later_and_others_get_sums() {
        let temp = tempfile::tempdir().unwrap();
        let (mut store, owner, loaded) = new_store(&temp.path().join("replica"));
        store.write_at(&vec![7; 128 << 10], 0, true).unwrap();
        let file = store.open_block_sums().unwrap();
        let mut executor = Executor::new(store, owner, loaded).unwrap();
        executor.block_sums.begin(file);
        let mut schedule = SumSchedule::new(true, Some(32 << 20), Instant::now());
        schedule.searched_to(None);
        executor.background_sums = BackgroundSums::new(schedule);
        let intent_log = executor.state.intent_log_mut();
        intent_log.keep_unsummed(None);
        intent_log.want_sums(0..2);
        let (mut ring, mut completions, mut reads) = (Ring::new(16).unwrap(), Vec::new(), 0);
        executor.sum(&mut ring);
        while executor.background_sums.is_running() {
            ring.wait(None, &mut completions).unwrap();
            for mut completion in completions.drain(..) {
                if completion.token.kind == kind::READ {
                    reads += 1;
                    completion.result = if reads == 1 { -libc::EIO } else { completion.result };
                }
                executor.on_completion(completion, &mut ring);
            }
            executor.sum(&mut ring);
        }
        let intent_log = executor.state.intent_log();
        assert_eq!((reads, [0, 1].map(|region| intent_log.is_summed(region))), (2, [false, true]));
        assert_eq!(intent_log.next_to_sum(0), Some(0));
        assert!(executor.sums_pause().unwrap() > SUM_SPACE_INTERVAL / 2);
    }
}
