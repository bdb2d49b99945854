//! The sets of regions that the replica keeps, on the disk: see `shorthorn-regions`.
//!
//! A modification that has to be recorded first waits in its slot. The pages that it needs are written when
//! all requests that came together have been taken up, so that one write serves all of them. Requests that
//! arrive during the write of a page share its next write.

use std::io;

use shorthorn_regions::{PAGE_BYTES, PAGE_WRITES_MAX, SetKey, Ticket};
use shorthorn_replica_core::{PageEnd, ReplicaState, Waiter, WaitingRequests};
use shorthorn_ring::{Arena, Ring};
use shorthorn_store::RegionFile;
use shorthorn_types::{ByteRange, Errno};

use super::durable_steps::SetFiles;
use super::operation::{kind, numbered_token};
use crate::limits::SLOTS;

/// See the module.
#[derive(Debug)]
pub(crate) struct RegionSets {
    files: SetFiles,
    /// The buffers of running page writes.
    pages: Arena,
    /// The slots of modifications and marks that wait.
    waiting: WaitingRequests<u16, u16>,
    /// Requests that are examined again.
    retried: Vec<u16>,
}

impl RegionSets {
    /// Creates the sets of a replica, without open files.
    pub fn new() -> io::Result<RegionSets> {
        Ok(RegionSets {
            files: SetFiles::default(),
            pages: Arena::new(PAGE_WRITES_MAX, PAGE_BYTES)?,
            waiting: WaitingRequests::with_capacity(SLOTS),
            retried: Vec::with_capacity(SLOTS),
        })
    }

    /// Returns the files, to be changed by durable steps.
    pub(super) fn files_mut(&mut self) -> &mut SetFiles {
        &mut self.files
    }

    /// Returns true if the set has an open file.
    pub fn has_file(&self, key: SetKey) -> bool {
        self.files.find(key).is_some()
    }

    pub fn put_file(&mut self, key: SetKey, file: RegionFile) {
        self.files.put(key, file);
    }

    /// Returns true if the kernel writes no page.
    pub fn is_idle(&self) -> bool {
        self.files.is_idle()
    }

    /// Looks again at all waiting requests later: the sets have grown.
    pub fn grown(&mut self) {
        self.waiting.grown();
    }

    /// Returns true if the modification in `slot` may be executed. If not, it waits.
    pub fn admit(&mut self, state: &mut ReplicaState, range: ByteRange, slot: u16) -> bool {
        self.waiting.admit(state, range, slot).is_some()
    }

    /// Returns true if the repair in `slot` may be executed, like [`RegionSets::admit`]. The sums of its
    /// regions count further.
    pub fn admit_repair(&mut self, state: &mut ReplicaState, range: ByteRange, slot: u16) -> bool {
        self.waiting.admit_repair(state, range, slot).is_some()
    }

    /// Lets the mark in `slot` wait until the change with this ticket is durable.
    pub fn add_mark(&mut self, slot: u16, ticket: Ticket) {
        self.waiting.add_mark(slot, ticket);
    }

    /// Starts the writes of pages that are due. With `lazy`, also of pages that no request waits for.
    pub fn begin_writes(&mut self, state: &mut ReplicaState, lazy: bool, ring: &mut Ring) {
        let RegionSets { files, pages, waiting, .. } = self;
        while let Some(write) = waiting.next_write(state, lazy) {
            let buf = pages.buf(usize::from(write.slot));
            buf.copy_from(write.bytes);
            let (slot, key, page) = (write.slot, write.key, write.page);
            let Some(fd) = files.fd(key) else {
                debug_assert!(false, "a set without a file: {key}");
                return;
            };
            let token = numbered_token(kind::PAGE, u16::from(slot));
            ring.write(fd, buf, u64::from(page) * PAGE_BYTES as u64, true, token);
            files.write_began();
        }
    }

    /// Ends the write of a page.
    pub fn page_ended(
        &mut self,
        state: &mut ReplicaState,
        page_slot: u16,
        result: Result<usize, Errno>,
    ) -> PageEnd {
        let outcome = match result {
            Ok(PAGE_BYTES) => Ok(()),
            Ok(_) => Err(Errno::IO),
            Err(errno) => Err(errno),
        };
        self.files.write_ended();
        self.waiting.page_ended(state, u8::try_from(page_slot).unwrap_or(u8::MAX), outcome)
    }

    /// Takes all waiting modifications, to look at them again. The list comes back by
    /// [`RegionSets::give_back_modifications`].
    pub fn take_modifications(&mut self) -> Vec<u16> {
        let mut retried = std::mem::take(&mut self.retried);
        self.waiting.take_modifications(&mut retried);
        retried
    }

    pub fn give_back_modifications(&mut self, retried: Vec<u16>) {
        debug_assert!(retried.is_empty());
        self.retried = retried;
    }

    /// Returns the slot of a mark that has become durable, if any.
    pub fn next_durable_mark(&mut self, state: &ReplicaState) -> Option<u16> {
        self.waiting.next_durable_mark(state.intent_log())
    }

    /// Removes a waiting request, and returns its slot.
    pub fn give_up(&mut self) -> Option<u16> {
        let (Waiter::Modification(slot) | Waiter::Mark(slot)) = self.waiting.give_up()?;
        Some(slot)
    }

    /// Writes all pages that have changed. Blocks; nothing is under way.
    pub fn write_all(&self, state: &mut ReplicaState) -> io::Result<()> {
        let intent_log = state.intent_log_mut();
        while let Some(write) = intent_log.begin_write(true) {
            let slot = write.slot;
            let written =
                self.files.find(write.key).map_or(Ok(()), |file| file.write_page(write.page, write.bytes));
            intent_log.end_write(slot, written.is_ok());
            written?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::Loaded;
    use crate::executor::tests::new_store;

    fn range(offset: u64) -> ByteRange {
        ByteRange::new(offset, 4096).unwrap()
    }

    /// Waits for a page write, and ends it.
    fn end_write(region_sets: &mut RegionSets, state: &mut ReplicaState, ring: &mut Ring) -> PageEnd {
        let mut completions = Vec::new();
        ring.wait(None, &mut completions).unwrap();
        assert_eq!(completions.len(), 1);
        let completion = completions[0];
        assert_eq!(completion.token.kind, kind::PAGE);
        region_sets.page_ended(
            state,
            completion.token.index,
            completion.count().map_err(|error| Errno::of(&error)),
        )
    }

    #[test]
    fn modifications_that_came_together_share_the_write_of_a_page() {
        let temp = tempfile::tempdir().unwrap();
        let (store, owner, loaded) = new_store(&temp.path().join("replica"));
        let Loaded { mut state, mut region_sets, .. } = loaded;
        let mut ring = Ring::new(16).unwrap();
        assert!(!region_sets.admit(&mut state, range(0), 3), "the region is clean");
        assert!(!region_sets.admit(&mut state, range(8192), 4));
        region_sets.begin_writes(&mut state, false, &mut ring);
        assert!(!region_sets.is_idle());
        assert_eq!(end_write(&mut region_sets, &mut state, &mut ring), PageEnd::Written);
        assert!(region_sets.is_idle());
        assert_eq!(region_sets.take_modifications(), [3, 4]);
        assert!(region_sets.admit(&mut state, range(0), 3), "the region is dirty");
        assert_eq!(region_sets.give_up(), None);
        drop((store, owner));
    }
}
