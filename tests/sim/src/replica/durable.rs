//! The state on the disk of a replica beside its data, and its changes step by step.

use std::collections::BTreeMap;

use fastrand::Rng;
use shorthorn_regions::{PAGE_BYTES, SetKey};
use shorthorn_replica_core::{
    Disk, DurableStep, RecordOutcome, ReplicaState, Started, StoredFiles, SumsFound,
};
use shorthorn_store::LostBlocks;
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{Errno, Regions, ReplicaId};
use shorthorn_views::ReplicaViews;
use shorthorn_wire::{LayerList, WireLayer};

use crate::faults::FaultyOperation;
use crate::net::SnapshotLayer;

/// The state on the disk of a replica beside its data.
#[derive(Clone, Debug)]
pub struct Durable {
    pub me: ReplicaId,
    pub views: ReplicaViews,
    /// The former views, if storing these has failed at its end: a power loss may bring them back.
    pub views_before: Option<ReplicaViews>,
    /// The files of its sets of regions.
    pub sets: BTreeMap<SetKey, Vec<u8>>,
    pub rebuilding: bool,
    /// `volume.meta` says to Longhorn that the replica has left a view.
    pub says_left: bool,
    /// True if a snapshot exists below the head.
    pub has_snapshot: bool,
    /// The attachment of the salvage that found the snapshot incomplete; 0: none has.
    pub salvaged: u64,
    /// Sums of blocks; which of them count is in a set of regions.
    pub sums: BTreeMap<u64, u32>,
    /// The snapshot is whole, though the copy of the replica may not be.
    pub is_snapshot_done: bool,
    /// Blocks that were copied as rot, and the sums of the data that they may hold.
    pub lost: LostBlocks,
    /// The epoch rises when another program has had the directory open. Sets of another epoch do not count.
    pub epoch: u64,
    /// The epoch in which `lost` was written.
    pub lost_epoch: u64,
    /// The host was off while data was not durable, and not all of that has been resynced since.
    pub power_was_lost: bool,
    /// The number of failures in a row.
    pub failures: u32,
}

impl Durable {
    /// Returns the state of a replica that has been made.
    pub fn new(me: ReplicaId, views: ReplicaViews, has_snapshot: bool) -> Durable {
        Durable {
            me,
            views,
            views_before: None,
            sets: BTreeMap::new(),
            rebuilding: false,
            says_left: false,
            has_snapshot,
            salvaged: 0,
            sums: BTreeMap::new(),
            is_snapshot_done: false,
            lost: LostBlocks::new(),
            epoch: 1,
            lost_epoch: 1,
            power_was_lost: false,
            failures: 0,
        }
    }

    /// Returns the snapshot as the list of layers names it.
    pub fn snapshot(&self) -> Option<SnapshotLayer> {
        self.has_snapshot.then_some(SnapshotLayer { salvaged: self.salvaged })
    }

    /// Returns the list of layers of a replica of `size_bytes`. The snapshot has the size of one block. It
    /// does not grow with the volume, and the copy of its data does not depend on it.
    pub fn layers(&self, size_bytes: u64) -> LayerList {
        let layer = |image: &str, meta, size_bytes| WireLayer { image: image.to_owned(), meta, size_bytes };
        let snapshot =
            |snapshot: SnapshotLayer| layer("volume-snap-s.img", snapshot.salvaged.to_string(), BLOCK_BYTES);
        let head = layer("volume-head-000.img", String::new(), size_bytes);
        LayerList { layers: self.snapshot().map(snapshot).into_iter().chain([head]).collect() }
    }
}

/// Page writes under way: slot, set (none: of a removed file), page, bytes.
pub type Pages = BTreeMap<u64, (u8, Option<SetKey>, u32, Vec<u8>)>;

/// The disk of a process that changes the state beside the data.
pub struct SimulatedFiles<'a> {
    pub durable: &'a mut Durable,
    pub pages: &'a mut Pages,
    pub broken: &'a mut BTreeMap<FaultyOperation, u32>,
    pub rng: &'a mut Rng,
    pub is_full: bool,
}

impl Disk for SimulatedFiles<'_> {
    type Error = Errno;

    fn perform(&mut self, step: DurableStep<'_>) -> Result<(), Errno> {
        if self.is_full && matches!(step, DurableStep::MakeSet(..)) {
            return Err(Errno::NO_SPACE);
        }
        let breaks = takes_error(self.broken, FaultyOperation::State);
        let is_done = !breaks || self.rng.bool();
        if is_done {
            let before =
                (breaks && matches!(step, DurableStep::SaveViews(_))).then(|| self.durable.views.clone());
            self.durable.perform(step);
            self.durable.views_before = before.or_else(|| self.durable.views_before.take());
            // A running write changes the former file, and not its successor.
            if let DurableStep::MakeSet(of, _) | DurableStep::RemoveSet(of) = step {
                self.pages.values_mut().for_each(|(_, key, ..)| *key = key.filter(|key| *key != of));
            }
        }
        // It may be done, and yet the last part of that has failed.
        if breaks { Err(Errno::IO) } else { Ok(()) }
    }

    fn record_failure(&mut self, in_a_row: u32) -> RecordOutcome {
        if !takes_error(self.broken, FaultyOperation::LossRecord) {
            return self.durable.record_failure(in_a_row);
        }
        match self.rng.u8(0..3) {
            0 => {
                self.durable.record_failure(in_a_row);
                RecordOutcome::Uncounted
            }
            // It may be recorded, and yet the last part of that has failed.
            1 => {
                self.durable.record_failure(in_a_row);
                RecordOutcome::Not
            }
            _ => RecordOutcome::Not,
        }
    }
}

pub(super) fn takes_error(broken: &mut BTreeMap<FaultyOperation, u32>, what: FaultyOperation) -> bool {
    let Some(left) = broken.get_mut(&what).filter(|left| **left > 0) else { return false };
    *left -= 1;
    true
}

/// A disk on which nothing fails.
impl Disk for Durable {
    type Error = Errno;

    fn perform(&mut self, step: DurableStep<'_>) -> Result<(), Errno> {
        Durable::perform(self, step);
        Ok(())
    }

    fn record_failure(&mut self, in_a_row: u32) -> RecordOutcome {
        (self.power_was_lost, self.failures) = (true, in_a_row);
        RecordOutcome::Counted
    }
}

impl Durable {
    fn perform(&mut self, step: DurableStep<'_>) {
        match step {
            DurableStep::SaveViews(views) => {
                let is_member = views.report().views().all(|view| view.members.contains(self.me));
                assert!(
                    is_member || self.says_left,
                    "Longhorn would take it as whole, though it knows it has left"
                );
                self.views = views.clone();
                self.views_before = None;
            }
            DurableStep::MakeSet(key, file) => drop(self.sets.insert(key, file.to_vec())),
            DurableStep::RemoveSet(key) => drop(self.sets.remove(&key)),
            DurableStep::RecordMadeUpFor => self.power_was_lost = false,
            DurableStep::RecordLeft => self.says_left = true,
            DurableStep::RecordMember => self.says_left = false,
        }
    }

    /// Starts a process from this state.
    pub fn start(&mut self, me: ReplicaId, regions: Regions, holds_data: bool) -> ReplicaState {
        let out_of_sync = self.sets.iter().filter_map(|(key, file)| match key {
            SetKey::OutOfSync(replica) => Some((*replica, file.clone())),
            SetKey::Intent | SetKey::Unsummed => None,
        });
        let found = StoredFiles {
            me,
            views: self.views.clone(),
            regions,
            epoch: self.epoch,
            intent: self.sets.get(&SetKey::Intent).cloned(),
            out_of_sync: out_of_sync.collect(),
            sums: SumsFound::Wanted(self.sets.get(&SetKey::Unsummed).cloned()),
            holds_data,
            lost_cache: self.power_was_lost,
            is_left_recorded: self.says_left,
            failures: self.failures,
        };
        match ReplicaState::start(self, found) {
            Ok(Started { state, .. }) => state,
            Err(errno) => unreachable!("nothing fails here: {errno}"),
        }
    }

    /// Switches the host of the replica off.
    pub fn lose_power(&mut self, rng: &mut Rng) {
        self.power_was_lost = true;
        if let Some(before) = self.views_before.take().filter(|_| rng.bool()) {
            self.views = before;
        }
    }

    pub fn write_page(&mut self, key: SetKey, page: u32, bytes: &[u8]) {
        if let Some(file) = self.sets.get_mut(&key) {
            let at = page as usize * PAGE_BYTES;
            file.resize(file.len().max(at + PAGE_BYTES), 0);
            file[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }
}
