//! The execution of requests on the disk of a replica.

use shorthorn_regions::SetKey;
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, Errno, RegionSet, Regions, RegionsOf};
use shorthorn_wire::{Extent, ExtentsPage, LayerList, RegionsPage, RegionsQuery};

use super::{Op, Replica, check};
use crate::Sabotage;
use crate::disk::{BLOCK_SECTORS, Block, Files};
use crate::faults::FaultyOperation;
use crate::net::{Ask, ReplicaAnswer, SnapshotLayer};

impl Replica {
    /// Executes the request on the disk, and returns the answer and the reported error, if any.
    pub fn done(&mut self, op: &Op, sabotage: Option<Sabotage>) -> (ReplicaAnswer, Option<FaultyOperation>) {
        let lies = sabotage == Some(Sabotage::LyingFlush);
        let is_unchecked = sabotage == Some(Sabotage::UncheckedSources);
        let error = match &op.ask {
            Ask::Read(_) | Ask::CheckedRead(_) => FaultyOperation::Read,
            Ask::Verify(_) => FaultyOperation::Verify,
            Ask::Flush => FaultyOperation::Flush,
            _ => FaultyOperation::Write,
        };
        let breaks = self.takes_error(error);
        let answer = match &op.ask {
            Ask::CheckedRead(range) | Ask::Verify(range)
                if !breaks && !is_unchecked && self.shows_rot(*range, sabotage) =>
            {
                ReplicaAnswer::Error(Errno::ROTTEN)
            }
            Ask::Read(range) | Ask::CheckedRead(range) if !breaks => {
                ReplicaAnswer::Data(self.read_data(*range))
            }
            Ask::Verify(range) if !breaks => ReplicaAnswer::Check(check(&self.read(*range))),
            Ask::Read(_) | Ask::CheckedRead(_) | Ask::Verify(_) => ReplicaAnswer::Error(Errno::IO),
            Ask::Flush if breaks => {
                // Data that was not durable may be lost, and the kernel reports that only once.
                let mut rng = self.rng.fork();
                for block in self.files.lose_power(&mut rng) {
                    self.files.heal(block);
                }
                self.remap();
                ReplicaAnswer::Error(Errno::IO)
            }
            Ask::Flush => {
                if !lies {
                    self.files.head.sync(op.mark);
                }
                ReplicaAnswer::Done
            }
            _ => {
                let outcome = self.modify(op, breaks, sabotage);
                if outcome.is_ok() {
                    self.record_cured(op);
                }
                self.sums_have_followed(op, outcome.is_ok());
                outcome.map_or_else(ReplicaAnswer::Error, |()| ReplicaAnswer::Done)
            }
        };
        (answer, Some(error).filter(|_| breaks))
    }

    /// Returns true if the replica knows that a block of `range` is rotten.
    fn shows_rot(&self, range: ByteRange, sabotage: Option<Sabotage>) -> bool {
        let shows_through = |block: &u64| {
            let is_above = self.files.head.get(*block).is_none() && self.files.snapshot.get(*block).is_some();
            sabotage == Some(Sabotage::HolesShowThrough) && is_above && self.files.has_vanished(*block)
        };
        self.rotten_blocks(range).iter().any(|block| !shows_through(block))
    }

    pub(super) fn modify(&mut self, op: &Op, breaks: bool, sabotage: Option<Sabotage>) -> Result<(), Errno> {
        let changes = self.changes(op);
        self.sums_are_merged(op, &changes, sabotage);
        if sabotage != Some(Sabotage::MergesUnrecorded) {
            self.record_merged(op);
        }
        let head = &self.files.head;
        let has_room =
            |(block, content): &(u64, Option<Block>)| content.is_none() || head.get(*block).is_some();
        let fills = self.full && !changes.iter().all(has_room);
        if breaks || fills {
            if self.is_partial {
                let possible: Vec<_> =
                    changes.into_iter().filter(|change| breaks || has_room(change)).collect();
                for (block, content) in possible {
                    if self.rng.bool() {
                        self.put(block, content);
                    }
                }
                self.remap(); // the former places of the data are unknown
            }
            return Err(if breaks { Errno::IO } else { Errno::NO_SPACE });
        }
        let blocks: Vec<u64> = changes.iter().map(|(block, _)| *block).collect();
        for (block, content) in changes {
            self.put(block, content);
        }
        match &op.ask {
            Ask::Write(_, _, true) => self.files.head.sync_blocks(&blocks),
            Ask::WriteZeroes(_, true) => self.files.head.sync(usize::MAX),
            _ => {}
        }
        Ok(())
    }

    /// Writes a document that is not of the steps. If that breaks, it may be done all the same.
    pub fn write_document(
        &mut self,
        write: impl FnOnce(&mut Replica) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let breaks = self.takes_error(FaultyOperation::State);
        let written = if breaks && self.rng.bool() { Ok(()) } else { write(self) };
        if breaks {
            self.change(|state, disk| state.fail(disk, FaultyOperation::State.name().to_owned()));
            return Err(Errno::IO);
        }
        written
    }

    pub(super) fn holds_data(&self) -> bool {
        !self.files.head.is_empty() || !self.files.snapshot.is_empty()
    }

    /// Returns true if the replica can have these layers.
    pub fn can_have(&self, layers: &LayerList) -> bool {
        let head_bytes = layers.layers.last().map(|head| head.size_bytes);
        layers.check(self.size_bytes).is_ok() && head_bytes == Some(self.size_bytes)
    }

    /// Becomes a copy. A snapshot that is whole, from an interrupted copy, is kept.
    pub fn copy_begin(&mut self, layers: &LayerList, is_sabotaged: bool) -> Result<(), Errno> {
        let (holds_data, is_busy) = (self.holds_data(), !self.ops.is_empty());
        self.state.check_may_discard(self.durable.rebuilding, holds_data, is_busy)?;
        if !self.can_have(layers) && !is_sabotaged {
            return Err(Errno::INVALID);
        }
        let snapshot = SnapshotLayer::of(layers);
        let durable = &mut self.durable;
        durable.is_snapshot_done &=
            durable.rebuilding && snapshot.is_some() && snapshot == durable.snapshot();
        durable.rebuilding = true;
        self.is_rolled_back = false;
        durable.has_snapshot = snapshot.is_some();
        durable.salvaged = snapshot.map_or(0, |snapshot| snapshot.salvaged);
        if durable.is_snapshot_done {
            self.files.drop_head();
        } else {
            self.files = Files::default();
            durable.lost.clear();
        }
        self.forget_sums();
        self.remap();
        Ok(())
    }

    /// Returns the extents of the head, from `from_bytes` on.
    pub fn head_extents(&self, from_bytes: u64) -> ExtentsPage {
        let blocks = from_bytes / BLOCK_BYTES..self.size_bytes / BLOCK_BYTES;
        let mut held = blocks.filter(|block| self.files.head.get(*block).is_some());
        let extent = |block| Extent { offset_bytes: block * BLOCK_BYTES, length_bytes: BLOCK_BYTES };
        let extents = held.by_ref().take(ExtentsPage::EXTENTS_MAX).map(extent).collect();
        ExtentsPage { extents, next_bytes: held.next().map(|block| block * BLOCK_BYTES) }
    }

    pub fn regions(&self, query: &RegionsQuery, sabotage: Option<Sabotage>) -> RegionsPage {
        let is_unseen = sabotage == Some(Sabotage::HolesUnseen);
        let regions = match query.size_bytes {
            None => self.state.intent_log().regions(),
            Some(size_bytes) => Regions::of(size_bytes),
        };
        let kept = |key| {
            let page = self.state.intent_log().page_for(key, query.from, regions);
            page.map_or(RegionsPage::NONE, |page| RegionsPage {
                kept: true,
                runs: page.runs,
                next: page.next,
                stamp: page.stamp,
            })
        };
        match query.of {
            RegionsOf::Intent => kept(SetKey::Intent),
            RegionsOf::OutOfSync(replica) => kept(SetKey::OutOfSync(replica)),
            RegionsOf::Allocated => {
                let mut set = RegionSet::empty(regions.count());
                if !is_unseen {
                    let intent_log = self.state.intent_log();
                    set.insert_all(&intent_log.summed().converted(intent_log.regions(), regions));
                    for block in self.known_rot.blocks_in(0..u64::MAX) {
                        set.insert_run(regions.touched(super::block_range(block)));
                    }
                }
                for (block, content) in (0u64..).zip(self.content()) {
                    let range = ByteRange::new(block * BLOCK_BYTES, BLOCK_BYTES).unwrap_or(ByteRange::EMPTY);
                    let is_held = content != [0; BLOCK_SECTORS] || self.files.head.get(block).is_some();
                    if is_held && range.end() <= regions.size_bytes() {
                        set.insert_run(regions.touched(range));
                    }
                }
                let runs = set.runs(query.from).map(|run| (run.start, run.end - run.start)).collect();
                RegionsPage { kept: true, runs, next: None, stamp: 0 }
            }
        }
    }
}
