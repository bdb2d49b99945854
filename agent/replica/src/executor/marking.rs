//! Marks regions dirty before they are modified, and changes the sets of regions: see [`RegionSets`].
//!
//! [`RegionSets`]: super::region_sets::RegionSets

use shorthorn_replica_core::PageEnd;
use shorthorn_ring::Ring;
use shorthorn_types::{ByteRange, Errno, MarkRegions};

use super::Executor;
use crate::error::ReplicaError;

impl Executor {
    /// Returns true if the modification in `slot` may be executed. If not, it is started again when that may
    /// be so.
    ///
    /// # Errors
    /// See [`Executor::keep_rot`].
    pub(super) fn is_admitted(
        &mut self,
        slot: u16,
        range: ByteRange,
        ring: &mut Ring,
    ) -> Result<bool, Errno> {
        if self.repairs_rot(slot, range) {
            return Ok(self.region_sets.admit_repair(&mut self.state, range, slot));
        }
        Ok(self.keep_rot(slot, range, ring)? && self.region_sets.admit(&mut self.state, range, slot))
    }

    /// Starts the writes that waiting requests depend on. The caller has started all requests that came
    /// together.
    pub fn write_pages(&mut self, ring: &mut Ring) {
        self.region_sets.begin_writes(&mut self.state, false, ring);
    }

    /// Starts the writes of pages that no request waits for.
    pub fn write_stale_pages(&mut self, ring: &mut Ring) {
        self.region_sets.begin_writes(&mut self.state, true, ring);
    }

    pub(super) fn on_page(&mut self, page_slot: u16, result: Result<usize, Errno>, ring: &mut Ring) {
        match self.region_sets.page_ended(&mut self.state, page_slot, result) {
            PageEnd::Written => self.resume_waiting(ring),
            PageEnd::Again => {}
            PageEnd::NoSpace(errno) => self.give_up_waiting(errno),
            PageEnd::Failed(errno) => {
                self.fail(&format!("cannot mark the region dirty: {errno}"));
            }
        }
    }

    /// Looks again at everything that waits.
    pub(super) fn resume_waiting(&mut self, ring: &mut Ring) {
        let mut retried = self.region_sets.take_modifications();
        for slot in retried.drain(..) {
            self.start(slot, ring);
        }
        self.region_sets.give_back_modifications(retried);
        while let Some(slot) = self.region_sets.next_durable_mark(&self.state) {
            self.finish(slot, Ok(()));
        }
    }

    /// Answers everything that waits for a page with an error.
    pub(super) fn give_up_waiting(&mut self, errno: Errno) {
        while let Some(slot) = self.region_sets.give_up() {
            self.finish(slot, Err(errno));
        }
    }

    /// Changes a set. True if that is durable; else the slot finishes when it is.
    ///
    /// # Errors
    /// See [`ReplicaState::mark`](shorthorn_replica_core::ReplicaState::mark).
    pub fn mark(&mut self, slot: u16, mark: &MarkRegions) -> Result<bool, ReplicaError> {
        let Some(ticket) = self.change(|state, disk| state.mark(disk, mark))? else { return Ok(true) };
        self.region_sets.add_mark(slot, ticket);
        Ok(false)
    }

    /// Writes the unwritten pages of the sets at the end, when no write is under way.
    pub(super) fn close_marks(&mut self) {
        // Without it regions are copied that need not be.
        if let Err(error) = self.write_all_pages() {
            tracing::warn!(%error, "cannot write the cleared regions");
        }
    }

    /// Writes all pages that have changed. Blocks; nothing is under way.
    pub(super) fn write_all_pages(&mut self) -> std::io::Result<()> {
        self.region_sets.write_all(&mut self.state)
    }
}
