//! Marks regions dirty before they are modified, and changes the sets of regions: see [`RegionSets`].
//!
//! [`RegionSets`]: super::region_sets::RegionSets

use shorthorn_replica_core::PageEnd;
use shorthorn_ring::Ring;
use shorthorn_types::{ByteRange, Errno, MarkRegions};

use super::Executor;
use super::block_sums::Modification;
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
        let request = Modification::new(slot, &self.io);
        if self.block_sums.repairs_rot(request, range, self.state.intent_log()) {
            return Ok(self.state.admit_repair(range, slot));
        }
        Ok(self.keep_rot(slot, range, ring)? && self.state.admit(range, slot))
    }

    /// Starts the writes that waiting requests depend on. The caller has started all requests that came
    /// together.
    pub fn write_pages(&mut self, ring: &mut Ring) {
        self.state.begin_writes(false, ring);
    }

    /// Starts the writes of pages that no request waits for.
    pub fn write_stale_pages(&mut self, ring: &mut Ring) {
        self.state.begin_writes(true, ring);
    }

    pub(super) fn on_page(&mut self, page_slot: u16, result: Result<usize, Errno>, ring: &mut Ring) {
        match self.state.page_ended(page_slot, result) {
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
        let mut retried = self.state.sets_mut().take_modifications();
        for slot in retried.drain(..) {
            self.start(slot, ring);
        }
        self.state.sets_mut().give_back_modifications(retried);
        while let Some(slot) = self.state.next_durable_mark() {
            self.finish(slot, Ok(()));
        }
    }

    /// Answers everything that waits for a page with an error.
    pub(super) fn give_up_waiting(&mut self, errno: Errno) {
        while let Some(slot) = self.state.sets_mut().give_up() {
            self.finish(slot, Err(errno));
        }
    }

    /// Changes a set. True if that is durable; else the slot finishes when it is.
    ///
    /// # Errors
    /// See [`ReplicaState::mark`](shorthorn_replica_core::ReplicaState::mark).
    pub fn mark(&mut self, slot: u16, mark: &MarkRegions) -> Result<bool, ReplicaError> {
        let Some(ticket) = self.change(|state, disk| state.mark(disk, mark))? else { return Ok(true) };
        self.state.sets_mut().add_mark(slot, ticket);
        Ok(false)
    }
}
