//! Repairs of snapshots' layers. They are rare, and wait for the disk.
//!
//! A disk may have lost a block of a layer, so that it is a hole. If a request makes zeroes of the block
//! then, it leaves the hole, because nothing lies below it. A repair that brings the block back must not show
//! its data in place of these zeroes. If a sum says that zeroes are right, they are written to the head
//! before the repair. If no sum decides, the repair is refused until other members have decided.

use shorthorn_replica_core::AboutHole;
use shorthorn_ring::Ring;
use shorthorn_store::{ByteRange, SUM_PAGE_SPAN_BYTES, StoreError};
use shorthorn_wire::LayerPatch;

use super::Executor;
use super::block::number_of;
use super::block_sums::is_summed;
use super::layer_repair::{LayerRepair, Returning};
use super::requests::is_planned;
use crate::error::ReplicaError;
use crate::limits::BLOCK_BYTES_USIZE;

impl Executor {
    /// Repairs a piece of a snapshot's layer. Waits for the disk.
    ///
    /// # Errors
    /// The error of the store.
    pub fn repair_layer(
        &mut self,
        patch: &LayerPatch,
        data: &[u8],
        ring: &mut Ring,
    ) -> Result<(), ReplicaError> {
        let repaired = self.patch_layer(patch, data, ring);
        // No other event wakes requests that wait for the pages of sets that were written beside the ring.
        self.resume_waiting(ring);
        repaired
    }

    fn patch_layer(&mut self, patch: &LayerPatch, data: &[u8], ring: &mut Ring) -> Result<(), ReplicaError> {
        let repair = LayerRepair::new(patch, data)?;
        let (image, range) = (repair.image(), repair.range());
        if !self.state.is_idle() {
            // A page that the ring still writes could overtake those that this repair writes.
            return Err(ReplicaError::SetBeingWritten(range));
        }
        let mut pages = repair.pages(self.state.intent_log().regions());
        if pages.any(|page| !self.block_sums.may_modify(page)) {
            return Err(ReplicaError::TooMuchRot(range));
        }
        repair.check(&mut self.store)?;
        self.keep_zeroes(&repair, ring)?;
        // Blocks that the repair removes from the layer read as zeroes, also if it fails after that.
        self.io.requests_mut().void_plans();
        self.zero_jobs.void_reads();
        let repaired = if self.sums_prove(&repair)? {
            // A crash or a failure may leave a block half written: its sum has to reveal that.
            repair.perform(&mut self.store).map_err(ReplicaError::from).inspect(|()| {
                // They are right for the repaired data: it does not matter if they still count on the disk.
                let _ = self.end_sums_in(range);
            })
        } else {
            // The data that a reader sees there may have been summed with the rot in it.
            self.end_sums_in(range).and_then(|()| Ok(repair.perform(&mut self.store)?))
        };
        self.read_again(ring);
        // The store has removed those of the layers above if a block has come back.
        self.layer_sums.release();
        repaired?;
        tracing::warn!(image, %range, bytes = data.len(), "a snapshot's layer was repaired");
        Ok(())
    }

    /// Returns true if each block that a reader sees, and that the repair may change, has a sum of the new
    /// data. These sums count also after a crash.
    fn sums_prove(&mut self, repair: &LayerRepair<'_>) -> Result<bool, ReplicaError> {
        // Regions that were summed lately may not count on the disk yet.
        if self.state.write_all_pages().is_err() {
            return Ok(false);
        }
        let (file, changes) = repair.changes(&self.store)?;
        let Executor { block_sums, state, read_planner, store, .. } = self;
        let intent_log = state.intent_log();
        Ok(changes.into_iter().all(|(block, sum)| {
            sum.is_some_and(|sum| block_sums.counts_on_disk(block, sum, intent_log))
                || !read_planner.is_seen_in(file, block, store)
        }))
    }

    /// Repeats the reads that wait for pages of sums to be compared: the sums that would have shown rot in
    /// their data have ended.
    fn read_again(&mut self, ring: &mut Ring) {
        let mut waiting = self.block_sums.take_comparisons();
        for slot in waiting.drain(..) {
            if is_planned(self.io.header(slot).opcode) {
                self.plan_again(slot, ring);
            } else {
                self.block_sums.compare_later(slot);
            }
        }
        self.block_sums.give_back_comparisons(waiting);
    }

    /// Writes zeroes over the blocks that the repair brings back, and that have to stay zeroes for a reader.
    ///
    /// # Errors
    /// A request is modifying such a block, or no sum says which data a reader has to see.
    fn keep_zeroes(&mut self, repair: &LayerRepair<'_>, ring: &mut Ring) -> Result<(), ReplicaError> {
        let returning = repair.returning(self.block_sums.zero_sum(), &self.store)?;
        if returning.is_empty() {
            return Ok(());
        }
        if let Some(Returning { block, .. }) =
            returning.iter().find(|returning| self.io.is_modified(returning.block))
        {
            // It may be about to make a hole there, because it has found nothing below.
            return Err(ReplicaError::BeingModified(*block));
        }
        let (mut kept, mut undecided) = (Vec::new(), None);
        for returning in returning {
            if !self.read_planner.is_hole(returning.block, &mut self.store)? {
                continue;
            }
            match self.decide_about_hole(returning, ring)? {
                AboutHole::StaysZeroes => kept.push(returning.block),
                AboutHole::ShowsLayer => {}
                AboutHole::Undecided => undecided = undecided.or(Some(returning.block)),
            }
        }
        if let Some(block) = undecided {
            return Err(ReplicaError::UndecidedHole(block));
        }
        if !kept.is_empty() {
            let (image, range, blocks) = (repair.image(), repair.range(), kept.len());
            tracing::warn!(image, %range, blocks, "blocks that the disk had lost stay zeroes for readers");
        }
        self.write_zeroes_durably(&kept)
    }

    /// Decides by the sums about a block that is a hole.
    fn decide_about_hole(
        &mut self,
        Returning { block, sum }: Returning,
        ring: &mut Ring,
    ) -> Result<AboutHole, ReplicaError> {
        let (number, page) = (number_of(block), block.offset() / SUM_PAGE_SPAN_BYTES);
        let is_known = self.block_sums.knows(number);
        if !is_known
            && is_summed(block, self.state.intent_log())
            && self.block_sums.load_page(page, ring).is_none()
        {
            return Ok(AboutHole::Undecided); // until the page is read
        }
        let intent_log = self.state.intent_log();
        let kept = self.block_sums.kept_sum(block, intent_log);
        if !is_known && kept.is_some_and(|kept| kept != self.block_sums.zero_sum()) {
            // The repair ends the sums that show this rot, and may fail after that.
            let span = ByteRange::new(page * SUM_PAGE_SPAN_BYTES, SUM_PAGE_SPAN_BYTES);
            if !self.block_sums.keep_sums_of(span.map_err(StoreError::from)?, intent_log) {
                return Err(ReplicaError::TooMuchRot(block));
            }
        }
        Ok(self.block_sums.decide_about_hole(number, sum, kept))
    }

    /// Writes zeroes to the head, and makes all of it durable. Otherwise a loss of power after the repair
    /// could show the layer's data in place of zeroes, or of data of a request.
    fn write_zeroes_durably(&mut self, blocks: &[ByteRange]) -> Result<(), ReplicaError> {
        for block in blocks {
            self.flushes.changed();
            if let Err(error) = self.store.write_at(&[0; BLOCK_BYTES_USIZE], block.offset(), false) {
                self.write_failed(*block, error.errno());
                return Err(error.into());
            }
        }
        let flushed = self.store.flush();
        self.look_at_store();
        Ok(flushed?)
    }

    /// Invalidates the sums of the regions of `range`, durably. Waits for the disk.
    ///
    /// # Errors
    /// An I/O error. Then the sums are invalid in memory only.
    fn end_sums_in(&mut self, range: ByteRange) -> Result<(), ReplicaError> {
        let intent_log = self.state.intent_log_mut();
        let regions = intent_log.regions().touched(range);
        intent_log.unsum(regions);
        if self.block_sums.is_kept() {
            self.background_sums.sum_soon();
        }
        self.state.write_all_pages().map_err(|error| ReplicaError::system("write a set of regions", error))
    }
}

#[cfg(test)]
mod tests;
