//! The state that a replica keeps beside the data, with its owner and the files of its sets of regions.
//!
//! [`DurableState`] changes the memory and the disk together: see `shorthorn-replica-core`.

use std::io;
use std::time::Instant;

use shorthorn_regions::WriteIntentLog;
use shorthorn_replica_core::{FAILURES_FORGIVEN_AFTER, PageEnd, ReplicaFailure, ReplicaState};
use shorthorn_ring::Ring;
use shorthorn_store::Store;
use shorthorn_types::{ByteRange, Errno};
use shorthorn_views::ReplicaViews;

use super::durable_steps::ReplicaFiles;
use super::region_sets::RegionSets;
use crate::state::Owner;

/// See the module.
#[derive(Debug)]
pub(crate) struct DurableState {
    owner: Owner,
    replica: ReplicaState,
    sets: RegionSets,
    /// The time at which the process has begun to serve.
    since: Instant,
}

impl DurableState {
    /// Keeps the state of a replica that belongs to `owner`. The process begins to serve.
    pub fn new(owner: Owner, replica: ReplicaState, sets: RegionSets) -> DurableState {
        DurableState { owner, replica, sets, since: Instant::now() }
    }

    /// Returns the state in memory.
    pub fn replica(&self) -> &ReplicaState {
        &self.replica
    }

    /// Returns the committed and the proposed view, as stored.
    pub fn views(&self) -> &ReplicaViews {
        self.replica.views()
    }

    /// Returns the sets of regions.
    pub fn intent_log(&self) -> &WriteIntentLog {
        self.replica.intent_log()
    }

    /// Returns the sets of regions, for requests, sums and an expansion.
    pub fn intent_log_mut(&mut self) -> &mut WriteIntentLog {
        self.replica.intent_log_mut()
    }

    /// Returns the failure after which the replica does not serve any more, if any.
    pub fn failure(&self) -> Option<&ReplicaFailure> {
        self.replica.failure()
    }

    /// Returns true if the process has served for so long that earlier failures do not count any more.
    pub fn has_served_long(&self) -> bool {
        self.since.elapsed() >= FAILURES_FORGIVEN_AFTER
    }

    /// Returns true if no view that may count has another member.
    pub fn is_only_member(&self) -> bool {
        let me = self.replica.me();
        self.views().report().views().all(|view| view.members.without(me).is_empty())
    }

    /// Changes the state. Waits for the disk, so it is for rare changes only. Only `Executor::change` calls
    /// this: after a failure it also answers the requests that wait.
    pub fn change<T>(
        &mut self,
        store: &mut Store,
        change: impl FnOnce(&mut ReplicaState, &mut ReplicaFiles<'_>) -> T,
    ) -> T {
        let was_serving = self.failure().is_none();
        self.replica.served_for(self.since.elapsed());
        let mut files = ReplicaFiles { store, sets: self.sets.files_mut(), owner: &self.owner };
        let changed = change(&mut self.replica, &mut files);
        if let Some(failure) = self.failure().filter(|_| was_serving) {
            tracing::error!("the replica no longer serves: {}", failure.outlook());
        }
        changed
    }
}

/// The pages of the sets, and the requests that wait for them: see [`RegionSets`].
impl DurableState {
    /// Returns the files of the sets, and the requests that wait.
    pub fn sets_mut(&mut self) -> &mut RegionSets {
        &mut self.sets
    }

    /// Returns true if the kernel writes no page.
    pub fn is_idle(&self) -> bool {
        self.sets.is_idle()
    }

    /// Returns true if the modification in `slot` may be executed. If not, it waits.
    pub fn admit(&mut self, range: ByteRange, slot: u16) -> bool {
        self.sets.admit(&mut self.replica, range, slot)
    }

    /// Returns true if the repair in `slot` may be executed, like [`DurableState::admit`]. The sums of its
    /// regions count further.
    pub fn admit_repair(&mut self, range: ByteRange, slot: u16) -> bool {
        self.sets.admit_repair(&mut self.replica, range, slot)
    }

    /// Starts the writes of pages that are due. With `lazy`, also of pages that no request waits for.
    pub fn begin_writes(&mut self, lazy: bool, ring: &mut Ring) {
        self.sets.begin_writes(&mut self.replica, lazy, ring);
    }

    /// Ends the write of a page.
    pub fn page_ended(&mut self, page_slot: u16, result: Result<usize, Errno>) -> PageEnd {
        self.sets.page_ended(&mut self.replica, page_slot, result)
    }

    /// Returns the slot of a mark that has become durable, if any.
    pub fn next_durable_mark(&mut self) -> Option<u16> {
        self.sets.next_durable_mark(&self.replica)
    }

    /// Writes all pages that have changed. Blocks; nothing is under way.
    pub fn write_all_pages(&mut self) -> io::Result<()> {
        debug_assert!(self.is_idle(), "the ring writes a page");
        self.sets.write_all(&mut self.replica)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use shorthorn_types::{Generation, Members, ReplicaId, View, ViewId};

    use super::*;
    use crate::executor::Loaded;
    use crate::executor::tests::new_store;

    fn state_of(directory: &Path) -> (Store, DurableState) {
        let (store, owner, Loaded { state, region_sets, .. }) = new_store(directory);
        (store, DurableState::new(owner, state, region_sets))
    }

    #[test]
    fn a_modification_waits_until_its_region_is_recorded() {
        let temp = tempfile::tempdir().unwrap();
        let (_store, mut state) = state_of(&temp.path().join("replica"));
        let range = ByteRange::new(0, 4096).unwrap();
        let (mut ring, mut completions) = (Ring::new(16).unwrap(), Vec::new());
        assert!(!state.admit(range, 3) && state.is_idle());
        state.begin_writes(false, &mut ring);
        assert!(!state.is_idle());
        ring.wait(None, &mut completions).unwrap();
        let result = completions[0].count().map_err(|error| Errno::of(&error));
        assert_eq!(state.page_ended(completions[0].token.index, result), PageEnd::Written);
        assert_eq!(state.sets_mut().take_modifications(), [3]);
        assert!(state.admit(range, 3) && state.is_idle());
    }

    #[test]
    fn pages_that_are_written_at_once_need_no_ring() {
        let temp = tempfile::tempdir().unwrap();
        let (_store, mut state) = state_of(&temp.path().join("replica"));
        let range = ByteRange::new(0, 4096).unwrap();
        assert!(!state.admit(range, 3));
        state.write_all_pages().unwrap();
        assert_eq!(state.sets_mut().take_modifications(), [3]);
        assert!(state.admit(range, 3));
    }

    #[test]
    fn only_the_first_failure_counts() {
        let temp = tempfile::tempdir().unwrap();
        let (mut store, mut state) = state_of(&temp.path().join("replica"));
        assert!(state.failure().is_none() && !state.has_served_long());
        for message in ["the disk", "again"] {
            state.change(&mut store, |replica, disk| replica.fail(disk, message.to_owned()));
            assert_eq!(state.failure().map(|failure| failure.message.as_str()), Some("the disk"));
        }
    }

    #[test]
    fn every_member_of_a_view_counts() {
        for (members, is_only) in [(1..2, true), (1..3, false)] {
            let temp = tempfile::tempdir().unwrap();
            let (mut store, owner, _) = new_store(&temp.path().join("replica"));
            let id = ViewId { generation: Generation::NEVER, number: 0 };
            let members = Members::new(members.map(ReplicaId::from_random)).unwrap();
            let views = ReplicaViews::new(View { id, members });
            let Loaded { state, region_sets, .. } = Loaded::load(&mut store, &owner, views, None).unwrap();
            assert_eq!(DurableState::new(owner, state, region_sets).is_only_member(), is_only);
        }
    }
}
