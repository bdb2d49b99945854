//! A model of a replica: an array, with a disk that loses data that was not flushed.

use std::collections::{BTreeMap, BTreeSet};

use shorthorn_core::Operation;
use shorthorn_types::{
    ByteRange, Generation, MarkAction, MarkRegions, Members, RegionSet, Regions, RegionsOf, ReplicaId,
    ReplicaReport, View, ViewId,
};
use shorthorn_views::ReplicaViews;

pub const REPLICAS: usize = 3;
/// A block has two, so that requests share blocks.
pub const UNIT_BYTES: u64 = 2048;
pub const BLOCK_UNITS: usize = 2;
/// A size beyond the buffer of a copy, with a short last region.
pub const SIZE_BYTES: u64 = ((REGIONS as u64 - 1) << 16) + (16 << 10);
pub const REGIONS: u32 = 20;
pub const UNITS: usize = (SIZE_BYTES / UNIT_BYTES) as usize;

pub struct Replica {
    pub views: ReplicaViews,
    pub data: Vec<u32>,
    disk: Vec<u32>,
    pub intent: BTreeSet<u32>,
    pub stamp: u32,
    pub out_of_sync: BTreeMap<usize, BTreeSet<u32>>,
    pub lost_cache: bool,
}

pub fn units(range: ByteRange) -> std::ops::Range<usize> {
    let unit = |bytes: u64| usize::try_from(bytes / UNIT_BYTES).unwrap();
    unit(range.offset())..unit(range.end())
}

pub fn region_set(regions: &BTreeSet<u32>) -> RegionSet {
    let mut set = RegionSet::empty(REGIONS);
    for region in regions {
        set.insert(*region);
    }
    set
}

impl Replica {
    pub fn id(peer: usize) -> ReplicaId {
        ReplicaId::from_random(peer as u64)
    }

    pub fn first_view() -> View {
        let members = Members::new((0..REPLICAS).map(Replica::id)).unwrap();
        View { id: ViewId { generation: Generation::NEVER, number: 0 }, members }
    }

    pub fn new(first: View) -> Replica {
        Replica {
            views: ReplicaViews::new(first),
            data: vec![0; UNITS],
            disk: vec![0; UNITS],
            intent: BTreeSet::new(),
            stamp: 0,
            out_of_sync: BTreeMap::new(),
            lost_cache: false,
        }
    }

    pub fn execute(&mut self, operation: Operation, range: ByteRange, buffer: &mut [u32]) {
        let length = units(range).len();
        match operation {
            Operation::Read => buffer[..length].copy_from_slice(&self.data[units(range)]),
            Operation::Flush => self.disk.clone_from(&self.data),
            Operation::Write { .. } | Operation::WriteRot => {
                self.touch(range);
                self.data[units(range)].copy_from_slice(&buffer[..length]);
            }
            Operation::WriteZeroes { .. } => {
                self.touch(range);
                self.data[units(range)].fill(0);
            }
            Operation::Discard => {
                self.touch(range);
                self.data[units(range.shrunk_to_blocks())].fill(0);
            }
            Operation::Verify | Operation::CheckedRead => {}
        }
    }

    /// Fails the operation after it has changed `done`.
    pub fn execute_some(&mut self, range: ByteRange, done: &[(usize, u32)]) {
        self.touch(range);
        for (unit, value) in done {
            self.data[*unit] = *value;
        }
    }

    fn touch(&mut self, range: ByteRange) {
        let touched = Regions::of(SIZE_BYTES).touched(range);
        self.intent.extend(touched.clone());
        for out_of_sync in self.out_of_sync.values_mut() {
            out_of_sync.extend(touched.clone());
        }
    }

    pub fn mark(&mut self, change: &MarkRegions) {
        if change.action == MarkAction::Stamp {
            self.stamp = self.stamp.max(change.stamp);
            return;
        }
        assert!(
            change.action != MarkAction::Clear || self.stamp >= change.stamp,
            "cleared before it was stamped"
        );
        let set = match change.of {
            RegionsOf::Intent => &mut self.intent,
            RegionsOf::OutOfSync(replica) => {
                let peer = (0..REPLICAS).find(|peer| Replica::id(*peer) == replica).unwrap();
                match change.action {
                    MarkAction::Clear if !self.out_of_sync.contains_key(&peer) => return,
                    _ => self.out_of_sync.entry(peer).or_default(),
                }
            }
            RegionsOf::Allocated => panic!("the engine never marks allocated regions"),
        };
        for region in change.runs.iter().flat_map(|(start, count)| *start..start + count) {
            match change.action {
                MarkAction::Add => set.insert(region),
                MarkAction::Clear | MarkAction::Forget => set.remove(&region),
                MarkAction::Stamp => unreachable!("it has no set"),
            };
        }
    }

    pub fn propose(&mut self, generation: Generation, view: View, honoured: &ReplicaReport) {
        let report = self.views.report().clone();
        let known = [report.committed, honoured.committed].into_iter().chain(report.proposed);
        let before: Vec<View> = known.chain(honoured.proposed.clone()).collect();
        for peer in 0..REPLICAS {
            let id = Replica::id(peer);
            if !view.members.contains(id) && before.iter().any(|view| view.members.contains(id)) {
                self.out_of_sync.entry(peer).or_insert_with(|| self.intent.clone());
            }
        }
        self.views.propose(generation, view, honoured).unwrap();
    }

    pub fn commit(&mut self, generation: Generation, view: View) {
        self.views.commit(generation, view).unwrap();
        self.out_of_sync.retain(|peer, _| !view.members.contains(Replica::id(*peer)));
    }

    /// Loses a part of the data that was not flushed.
    pub fn lose_cache(&mut self, mut is_lost: impl FnMut() -> bool) {
        self.lost_cache = true;
        for (unit, durable) in self.data.iter_mut().zip(&mut self.disk) {
            if is_lost() {
                *unit = *durable;
            }
            *durable = *unit;
        }
    }
}
