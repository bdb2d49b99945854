//! The state of a replica and its disk: the real rules of views, regions and layers, over a simulated disk.

mod durable;
mod execute;
mod head_repair;
mod lies;
mod repair;
mod sums;

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use shorthorn_chain::{BlockMap, BlockSource, EdgeBlock, FileIndex, ZeroStep};
use shorthorn_checker::{Id, Micros, ROT};
use shorthorn_regions::{SetKey, WriteIntentLog};
use shorthorn_replica_core::{Admission, KnownRot, ReplicaState, WaitingRequests};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, Generation, Members, Regions, ReplicaId, ReplicaReport, View, ViewId};
use shorthorn_views::ReplicaViews;
use shorthorn_wire::Welcome;

use self::durable::{Durable, Pages, SimulatedFiles, takes_error};
pub use self::sums::Summing;
use crate::Sabotage;
use crate::disk::{BLOCK_SECTORS, Block, Files};
use crate::faults::{FaultyOperation, LieAt};
use crate::net::{Ask, ConnId};
use crate::occurrence::Occurrence;
use crate::script::Layout;

/// A copy of a disk.
#[derive(Clone, Debug)]
struct Saved {
    files: Files,
    durable: Durable,
    size_bytes: u64,
    /// The newest stamp that the replica was sent by then.
    stamp: Option<u32>,
}

/// The number of later stamps by which the stamps of the other members reveal a restored disk. The others
/// have all of these but the last.
const STAMPS_THAT_TELL: u32 = 3;
/// The smallest view that recognises such a disk: each of its quorums has another member.
const MEMBERS_THAT_TELL: usize = 3;

/// A request that is being executed.
#[derive(Debug)]
pub struct Op {
    pub conn: ConnId,
    pub number: u64,
    pub ask: Ask,
    /// The number of unsynced changes of the head when a flush began.
    pub mark: usize,
    /// The blocks that it has read, to merge a part of them, before a repair changed them.
    pub read_before: BTreeMap<u64, Block>,
}

impl Op {
    pub fn new(conn: ConnId, number: u64, ask: Ask) -> Op {
        Op { conn, number, ask, mark: 0, read_before: BTreeMap::new() }
    }

    /// Returns a key that distinguishes it from all others.
    pub fn key(&self) -> (ConnId, u64) {
        (self.conn, self.number)
    }
}

/// A replica, its disk, and its process if it runs.
#[derive(Debug)]
pub struct Replica {
    pub id: ReplicaId,
    pub files: Files,
    pub durable: Durable,
    pub size_bytes: u64,
    pub up: bool,
    /// The number of the process.
    pub boot: u64,
    /// True if the process is paused: its events happen later.
    pub paused: bool,
    pub backlog: Vec<Occurrence>,
    /// True if the disk has no space for new blocks.
    pub full: bool,
    /// Nor for the sets of regions.
    pub full_for_pages: bool,
    /// Requests that fail have changed some blocks.
    pub is_partial: bool,
    /// The additional time of the disk.
    pub slow_by_us: Micros,
    /// Errors to come.
    pub broken: BTreeMap<FaultyOperation, u32>,
    /// The lies of its process, and the number of the fault.
    pub lies: BTreeMap<LieAt, u64>,
    /// The time after a failure at which it is started again.
    pub restarts_after: Micros,
    /// True after an error of the disk: nothing is served until the process is restarted.
    pub failed: bool,
    /// True if a failed process is ended from outside, whether or not engines are connected.
    pub is_ended_by_others: bool,
    /// The random numbers for delays, and for the effects of errors.
    pub rng: Rng,
    /// The random numbers for repairs, so that kept scripts stay as they are.
    pub repair_rng: Rng,
    can_punch: bool,
    /// Some of its blocks have vanished, so that the map of its blocks cannot be relied on.
    pub has_vanished: bool,
    /// The number of blocks whose sums are in one page.
    page_blocks: u64,
    /// A block with rot that the process knew, until a request that has not given it other data.
    pub forgotten_rot: Option<u64>,
    /// Sound blocks that may look rotten. An engine knew of rot, which was repaired since, and a write of the
    /// whole block has failed. The member cannot know whether another one has decided. Or several requests
    /// have overwritten the rot, and the process has ended in between, or one has failed.
    pub doubted: BTreeSet<u64>,
    /// A block that counts as lost, although a request has given it other data.
    pub stale_lost: Option<u64>,
    /// Regions that only repairs have modified since their sums count on the disk.
    repaired_regions: BTreeSet<u32>,
    /// For [`Sabotage::StaleSectors`]: the sums of the last merges of parts of blocks.
    last_merged: BTreeMap<u64, u32>,
    /// True if the process has refused a modification, because it could not remember the rot beside it.
    pub is_refusing: bool,
    /// True while a scrub repairs the rot of the snapshot.
    pub is_under_repair: bool,
    /// An earlier copy of the disk.
    saved: Option<Saved>,
    /// The disk was restored, and not recreated since.
    pub is_rolled_back: bool,
    /// The state that the process keeps beside the data.
    pub state: ReplicaState,
    pub map: BlockMap,
    /// In the hands of the disk.
    pub ops: BTreeMap<u64, Op>,
    /// Wait for pages.
    pub waiting: WaitingRequests<Op, (ConnId, u64)>,
    pub pages: Pages,
    /// Regions that are being summed.
    pub summing: Option<Summing>,
    /// Sums that stay known because rot was met beside their blocks: the first repair takes the sums of the
    /// region away.
    pub known_rot: KnownRot<(ConnId, u64)>,
    /// The connections; a candidate has the number of its hello.
    pub admission: Admission<ConnId, (ConnId, u64)>,
    pub gone: bool,
}

/// The state of a replica according to its disk, for the operator.
#[derive(Clone, Debug)]
pub struct Judgement {
    /// True if the replica lacks data.
    pub rebuilding: bool,
    /// True if the replica may lack data.
    pub lost_cache: bool,
    /// The stored views.
    pub report: ReplicaReport,
    /// The newest stamp that it has kept.
    pub stamp: Option<u32>,
}

fn chain_map(size_bytes: u64, has_snapshot: bool, can_punch: bool) -> BlockMap {
    let below = [Files::SNAPSHOT].into_iter().filter(|_| has_snapshot);
    let files = [Files::HEAD].into_iter().chain(below).filter_map(FileIndex::new).collect();
    BlockMap::new(size_bytes, files, can_punch)
}

impl Replica {
    /// Creates a replica of a new volume, or one that is to be rebuilt.
    pub fn new(
        id: ReplicaId,
        size_bytes: u64,
        views: ReplicaViews,
        files: Files,
        layout: Layout,
        seed: u64,
    ) -> Replica {
        let regions = Regions::of(size_bytes);
        let (has_snapshot, can_punch) = (!layout.is_flat, !layout.cannot_punch);
        let mut durable = Durable::new(id, views, has_snapshot);
        // Nothing was written to it since it was made.
        let state = durable.start(id, regions, false);
        let files = files.laid_out(layout, size_bytes / BLOCK_BYTES);
        Replica {
            id,
            files,
            durable,
            size_bytes,
            up: true,
            boot: 0,
            paused: false,
            backlog: Vec::new(),
            full: false,
            full_for_pages: false,
            is_partial: false,
            slow_by_us: 0,
            broken: BTreeMap::new(),
            lies: BTreeMap::new(),
            restarts_after: 0,
            failed: false,
            is_ended_by_others: false,
            rng: Rng::with_seed(seed),
            repair_rng: Rng::with_seed(!seed),
            can_punch,
            has_vanished: false,
            page_blocks: sums::PAGE_BLOCKS,
            forgotten_rot: None,
            doubted: BTreeSet::new(),
            stale_lost: None,
            repaired_regions: BTreeSet::new(),
            last_merged: BTreeMap::new(),
            is_refusing: false,
            is_under_repair: false,
            saved: None,
            is_rolled_back: false,
            state,
            map: chain_map(size_bytes, has_snapshot, can_punch),
            ops: BTreeMap::new(),
            waiting: WaitingRequests::default(),
            pages: BTreeMap::new(),
            summing: None,
            known_rot: KnownRot::default(),
            admission: Admission::default(),
            gone: false,
        }
    }

    /// Gives the disk space again.
    pub fn has_space(&mut self) {
        (self.full, self.full_for_pages) = (false, false);
    }

    /// Returns true if the disk fails at this, this time.
    pub fn takes_error(&mut self, what: FaultyOperation) -> bool {
        takes_error(&mut self.broken, what)
    }

    /// Changes the state that the process keeps beside the data.
    pub fn change<T>(&mut self, change: impl FnOnce(&mut ReplicaState, &mut SimulatedFiles<'_>) -> T) -> T {
        let Replica { state, durable, pages, broken, rng, full_for_pages, .. } = self;
        let mut files = SimulatedFiles { durable, pages, broken, rng, is_full: *full_for_pages };
        change(state, &mut files)
    }

    /// Damages or removes sets of regions on the disk. Returns false if the disk has none.
    pub fn rot_sets(&mut self, rng: &mut Rng) -> bool {
        let keys: Vec<SetKey> = self.durable.sets.keys().copied().collect();
        if keys.is_empty() {
            return false;
        }
        let key = keys[rng.usize(0..keys.len())];
        if rng.u8(0..4) == 0 {
            self.durable.sets.remove(&key);
            return true;
        }
        if let Some(file) = self.durable.sets.get_mut(&key).filter(|file| !file.is_empty()) {
            let at = rng.usize(0..file.len());
            let count = rng.usize(1..64).min(file.len() - at);
            file[at..at + count].iter_mut().for_each(|byte| *byte ^= rng.u8(1..));
        }
        true
    }

    /// Copies the current disk.
    pub fn save_disk(&mut self) {
        let (files, durable) = (self.files.clone(), self.durable.clone());
        let (size_bytes, stamp) = (self.size_bytes, self.state.intent_log().stamp());
        self.saved = Some(Saved { files, durable, size_bytes, stamp });
    }

    /// Returns true if there is a copy from within the view that lasts, and old enough to be recognised.
    pub fn has_saved_disk(&self) -> bool {
        let view = self.durable.views.report().committed;
        let is_member = view.members.contains(self.id) && view.members.len() >= MEMBERS_THAT_TELL;
        self.saved.as_ref().is_some_and(|saved| {
            let is_same_view = saved.durable.views.report().committed == view && !saved.durable.rebuilding;
            let (then, now) = (saved.stamp, self.state.intent_log().stamp());
            let is_old = then.zip(now).is_some_and(|(then, now)| now >= then + STAMPS_THAT_TELL);
            is_member && is_same_view && is_old
        })
    }

    /// Restores the disk from the copy: as after a loss of power at that time.
    pub fn restore_disk(&mut self, rng: &mut Rng) {
        let Some(Saved { mut files, mut durable, size_bytes, .. }) = self.saved.clone() else { return };
        for block in files.lose_power(rng) {
            files.heal(block);
        }
        durable.power_was_lost = true;
        self.repaired_regions.clear();
        (self.files, self.durable, self.size_bytes) = (files, durable, size_bytes);
        self.is_rolled_back = true;
    }

    /// Returns the state according to the disk.
    pub fn judgement(&self) -> Judgement {
        let regions = Regions::of(self.size_bytes);
        let intent = self.durable.sets.get(&SetKey::Intent);
        Judgement {
            rebuilding: self.durable.rebuilding,
            lost_cache: self.durable.power_was_lost,
            report: self.durable.views.report().clone(),
            stamp: intent.and_then(|file| WriteIntentLog::load(regions, self.durable.epoch, file).0.stamp()),
        }
    }

    /// Makes it the volume, like an operator. It does not run.
    pub fn salvage(&mut self, attach: u64) {
        let generation = Generation::new(attach, 0);
        let members = Members::new([self.id]).unwrap_or_default();
        let mut views = ReplicaViews::new(View { id: ViewId { generation, number: 0 }, members });
        // No generation holds these.
        let _ = views.fence(generation);
        self.durable.views = views;
        self.durable.views_before = None;
        self.durable.sets.clear();
        self.repaired_regions.clear();
        self.files.heal_all(true);
        self.durable.lost.clear();
        if self.durable.rebuilding && !self.durable.is_snapshot_done {
            self.durable.salvaged = attach;
        }
        (self.durable.rebuilding, self.durable.says_left) = (false, false);
        self.is_rolled_back = false;
    }

    /// Returns the last attachment that opened it.
    pub fn attach(&self) -> u64 {
        self.durable.views.generation().attach
    }

    /// Returns the free space on the disk, as in the answer to a PING.
    pub fn free_mib(&self) -> u32 {
        if self.full || self.full_for_pages { 0 } else { 1000 }
    }

    /// Returns the content of the volume on this replica.
    pub fn content(&self) -> Vec<Block> {
        self.files.content(self.size_bytes / BLOCK_BYTES)
    }

    pub fn restart(&mut self, boot: u64, sabotage: Option<Sabotage>) {
        let regions = Regions::of(self.size_bytes);
        let is_set_whole = self.sums_on_disk().is_some();
        self.state = self.durable.start(self.id, regions, self.holds_data());
        self.remap();
        self.summing = None;
        self.forget_known_rot();
        self.load_lost();
        self.know_lost(sabotage);
        self.find_ended_sums(is_set_whole);
        self.heal_unknown();
        self.boot = boot;
        self.up = true;
        self.failed = false;
        (self.is_under_repair, self.is_refusing) = (false, false);
    }

    pub fn remap(&mut self) {
        self.map = chain_map(self.size_bytes, self.durable.has_snapshot, self.can_punch);
    }

    /// Returns true if the process may end after a failure: the next one knows that data may be gone.
    pub fn may_end(&self) -> bool {
        self.state.failure().is_some_and(|failure| failure.pause_before_end().is_some())
    }

    /// Returns true if no engine is connected, and no work is in progress.
    pub fn is_quiet(&self) -> bool {
        self.admission.connections().next().is_none() && self.ops.is_empty() && self.pages.is_empty()
    }

    /// Tries the record of a failure once more.
    pub fn retry_record(&mut self) {
        self.change(|state, disk| state.retry_record(disk));
    }

    /// Returns true if something is being done that was sent on this connection.
    pub fn is_busy_with(&self, conn: ConnId) -> bool {
        let is_its = |op: &Op| op.conn == conn;
        self.ops.values().chain(self.waiting.modifications()).any(is_its)
            || self.waiting.marks().any(|(of, _)| *of == conn)
    }

    pub fn welcome(&self) -> Welcome {
        Welcome {
            run: self.boot,
            report: self.state.views().report().clone(),
            lost_cache: self.state.intent_log().has_lost_cache(),
            rebuilding: self.durable.rebuilding,
            size_bytes: self.size_bytes,
            tracks: self.state.intent_log().tracks(),
            stamp: self.state.intent_log().stamp(),
        }
    }

    /// Reads data: vanished blocks show as rot.
    fn read_data(&mut self, range: ByteRange) -> Vec<Id> {
        let mut data = self.read(range);
        for (at, sector) in data.iter_mut().enumerate() {
            let block = (range.offset() + at as u64 * 512) / BLOCK_BYTES;
            if self.files.has_vanished(block) {
                *sector = ROT;
            }
        }
        data
    }

    fn look_at_map(&mut self) {
        if self.files.has_grown() || self.has_vanished {
            self.remap();
        }
    }

    pub fn read(&mut self, range: ByteRange) -> Vec<Id> {
        self.look_at_map();
        let mut segments = Vec::new();
        let blocks = range.grown_to_blocks();
        let Ok(()) = self.map.plan_read(blocks, &mut self.files, &mut segments) else { return Vec::new() };
        let mut sectors = Vec::new();
        for segment in segments {
            for block in block_numbers(segment.range) {
                sectors.extend(self.source_block(segment.source, block));
            }
        }
        let skip = usize::try_from((range.offset() - blocks.offset()) / 512).unwrap_or(0);
        let count = usize::try_from(range.length() / 512).unwrap_or(0);
        sectors[skip..skip + count].to_vec()
    }

    fn source_block(&self, source: BlockSource, block: u64) -> Block {
        match source {
            BlockSource::Zero => Block::default(),
            BlockSource::File(file) => self.files.file(file).get(block).unwrap_or_default(),
        }
    }

    /// Returns the blocks that a write puts into the head.
    fn plan_write(&mut self, op: &Op, range: ByteRange, data: &[Id]) -> Vec<(u64, Option<Block>)> {
        let Ok(plan) = self.map.plan_write(range, &mut self.files) else { return Vec::new() };
        let mut blocks = Vec::new();
        for edge in [plan.first, plan.last].into_iter().flatten() {
            blocks.push(self.merged(op, edge, |sector| data[place(sector, range)]));
        }
        for block in plan.whole.into_iter().flat_map(block_numbers) {
            let mut content = Block::default();
            for (at, id) in content.iter_mut().enumerate() {
                *id = data[place(block * BLOCK_BYTES + at as u64 * 512, range)];
            }
            blocks.push((block, Some(content)));
        }
        blocks
    }

    fn merged(&self, op: &Op, edge: EdgeBlock, new: impl Fn(u64) -> Id) -> (u64, Option<Block>) {
        let number = edge.block.offset() / BLOCK_BYTES;
        let has_vanished = self.files.has_vanished(number);
        let now = if has_vanished { [ROT; BLOCK_SECTORS] } else { self.source_block(edge.source, number) };
        let mut content = op.read_before.get(&number).copied().unwrap_or(now);
        for (at, id) in content.iter_mut().enumerate() {
            let sector = edge.block.offset() + at as u64 * 512;
            if sector >= edge.part.offset() && sector < edge.part.end() {
                *id = new(sector);
            }
        }
        (number, Some(content))
    }

    /// Returns the blocks that a discard or a write of zeroes changes in the head.
    fn plan_zeroes(&mut self, op: &Op, range: ByteRange, discard: bool) -> Vec<(u64, Option<Block>)> {
        let mut steps = Vec::new();
        let planned = if discard {
            self.map.plan_discard(range, &mut self.files, &mut steps)
        } else {
            self.map.plan_write_zeroes(range, &mut self.files, &mut steps)
        };
        let Ok(()) = planned else { return Vec::new() };
        let mut blocks = Vec::new();
        for step in steps {
            match step {
                ZeroStep::Punch(range) => blocks.extend(block_numbers(range).map(|block| (block, None))),
                ZeroStep::WriteZeroes(range) => {
                    blocks.extend(block_numbers(range).map(|block| (block, Some(Block::default()))));
                }
                ZeroStep::Merge(edge) => blocks.push(self.merged(op, edge, |_| 0)),
            }
        }
        blocks
    }

    pub fn changes(&mut self, op: &Op) -> Vec<(u64, Option<Block>)> {
        self.look_at_map();
        match &op.ask {
            Ask::Write(range, data, _) => self.plan_write(op, *range, data),
            Ask::Discard(range) => self.plan_zeroes(op, *range, true),
            Ask::WriteZeroes(range, _) => self.plan_zeroes(op, *range, false),
            _ => Vec::new(),
        }
    }

    pub fn put(&mut self, block: u64, content: Option<Block>) {
        let is_lost = self.durable.lost.contains_key(&block);
        let was_merged = self.files.is_merged_with_rot(block);
        match content {
            None if self.files.vanished_below(block).is_some() => self.files.cover(block),
            _ => self.files.overwrite_rot(block, &content.unwrap_or_default(), is_lost),
        }
        if was_merged && !self.files.rot.contains_key(&block) {
            self.doubted.insert(block);
        }
        self.files.head.set(block, content);
        let range = block_range(block);
        match content {
            Some(_) => self.map.written(range),
            None => self.map.punched(range),
        }
    }
}

pub fn block_range(block: u64) -> ByteRange {
    ByteRange::new(block * BLOCK_BYTES, BLOCK_BYTES).unwrap_or(ByteRange::EMPTY)
}

pub fn block_numbers(range: ByteRange) -> std::ops::Range<u64> {
    range.offset() / BLOCK_BYTES..range.end().div_ceil(BLOCK_BYTES)
}

fn place(sector: u64, range: ByteRange) -> usize {
    usize::try_from((sector - range.offset()) / 512).unwrap_or(usize::MAX)
}

pub fn modified(ask: &Ask) -> Option<ByteRange> {
    match ask {
        Ask::Write(range, ..) | Ask::Discard(range) | Ask::WriteZeroes(range, _) => Some(*range),
        _ => None,
    }
}

/// Returns a check of some sectors. Every id changes all bits of the check. Otherwise contents with small ids
/// and with rot, the complement of zeroes, would have the same check.
fn check(sectors: &[Id]) -> u32 {
    let mixed = sectors.iter().fold(17_u64, |mixed, id| {
        let product = (mixed ^ u64::from(*id)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        product ^ (product >> 32)
    });
    u32::try_from(mixed >> 32).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn contents_that_are_alike_have_different_checks() {
        let ids: [Id; 4] = [0, 1, 3, ROT];
        let block = |number: usize| -> Block { std::array::from_fn(|at| ids[number >> (2 * at) & 3]) };
        // The first sector has zeroes.
        let numbers = (0..1 << 14).map(|number| number << 2);
        let checks: BTreeSet<u32> = numbers.clone().map(|number| check(&block(number))).collect();
        assert_eq!(checks.len(), numbers.count());
    }
}
