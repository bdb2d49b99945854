//! A replica process: the real rules of views, regions and layers, over a simulated disk.

use std::collections::{BTreeMap, VecDeque};

use shorthorn_chain::{BlockMap, BlockSource, EdgeBlock, FileIndex, ZeroStep};
use shorthorn_regions::{Admit, Marked, NewSet, PAGE_BYTES, RegionKeeper, SetKey, Ticket};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{
    ByteRange, Errno, MarkRegions, Members, RegionSet, Regions, RegionsOf, ReplicaId, ReplicaReport,
};
use shorthorn_views::{Fence, Refused, ReplicaViews};
use shorthorn_wire::{RegionsPage, RegionsQuery};

use crate::checker::{Id, Micros};
use crate::disk::{BLOCK_SECTORS, Block, Files};
use crate::net::{Answer, Ask, ConnId, Greeting, Message};
use crate::world::{Occurrence, World};

/// What is on the disk of a replica beside its data.
#[derive(Clone, Debug)]
struct Durable {
    views: ReplicaViews,
    /// The files of its sets of regions.
    sets: BTreeMap<SetKey, Vec<u8>>,
    rebuilding: bool,
    /// The host was off while data was not durable, and not all of that has been made equal since.
    power_was_lost: bool,
}

/// A request that is being executed.
#[derive(Debug)]
struct Op {
    conn: ConnId,
    number: u64,
    ask: Ask,
    /// How much of the head was unsynced when a flush began.
    mark: usize,
}

/// A replica, its disk, and its process if it runs.
#[derive(Debug)]
pub struct Replica {
    pub id: ReplicaId,
    pub files: Files,
    durable: Durable,
    pub size_bytes: u64,
    pub up: bool,
    /// Which process this is.
    pub boot: u64,
    /// The disk has no space for blocks that are not there yet.
    pub full: bool,
    pub slow: bool,
    /// Writes that fail.
    pub errors_to_come: u32,
    /// After an error of the disk: nothing is served until the process is restarted.
    pub failed: bool,
    keeper: RegionKeeper,
    map: BlockMap,
    /// In the hands of the disk.
    ops: BTreeMap<u64, Op>,
    /// Wait for pages.
    waiting: VecDeque<Op>,
    marks: Vec<(ConnId, u64, Ticket)>,
    /// Page writes under way: slot, set (none: of a file that is not there any more), page, bytes.
    pages: BTreeMap<u64, (u8, Option<SetKey>, u32, Vec<u8>)>,
    /// Connections that have been let in.
    pub conns: Vec<ConnId>,
    /// Hellos that wait until older engines' requests have ended.
    candidates: Vec<(ConnId, u64)>,
    pub gone: bool,
}

fn chain_map(size_bytes: u64) -> BlockMap {
    let files = [Files::HEAD, Files::SNAPSHOT].into_iter().filter_map(FileIndex::new).collect();
    BlockMap::new(size_bytes, files, true)
}

impl Replica {
    /// A replica of a new volume, or one that is to be brought up.
    pub fn new(id: ReplicaId, size_bytes: u64, views: ReplicaViews, files: Files) -> Replica {
        let regions = Regions::of(size_bytes);
        let keeper = RegionKeeper::new(regions, 1, &RegionSet::empty(regions.count()));
        let mut sets = BTreeMap::new();
        sets.extend(keeper.file(SetKey::Intent).map(|file| (SetKey::Intent, file)));
        let durable = Durable { views, sets, rebuilding: false, power_was_lost: false };
        Replica {
            id,
            files,
            durable,
            size_bytes,
            up: true,
            boot: 0,
            full: false,
            slow: false,
            errors_to_come: 0,
            failed: false,
            keeper,
            map: chain_map(size_bytes),
            ops: BTreeMap::new(),
            waiting: VecDeque::new(),
            marks: Vec::new(),
            pages: BTreeMap::new(),
            conns: Vec::new(),
            candidates: Vec::new(),
            gone: false,
        }
    }

    /// What the volume reads as here.
    pub fn content(&self) -> Vec<Block> {
        self.files.content(self.size_bytes / BLOCK_BYTES)
    }

    fn restart(&mut self, boot: u64) {
        let regions = Regions::of(self.size_bytes);
        let intent = self.durable.sets.get(&SetKey::Intent).cloned().unwrap_or_default();
        (self.keeper, _) = RegionKeeper::load(regions, 1, &intent);
        for (key, file) in &self.durable.sets {
            if let SetKey::Missed(replica) = key {
                // There are never more than fit: they were kept before.
                let _ = self.keeper.load_missed(*replica, file);
            }
        }
        if self.durable.power_was_lost {
            self.keeper.lost_cache();
        }
        for (key, file) in &mut self.durable.sets {
            if self.keeper.is_outgrown(*key) {
                *file = self.keeper.file(*key).unwrap_or_default();
            }
        }
        self.map = chain_map(self.size_bytes);
        self.boot = boot;
        self.up = true;
        self.failed = false;
    }

    fn write_page(&mut self, key: SetKey, page: u32, bytes: &[u8]) {
        if let Some(file) = self.durable.sets.get_mut(&key) {
            let at = page as usize * PAGE_BYTES;
            file[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    fn begin_set(&mut self, new: NewSet) {
        self.durable.sets.insert(SetKey::Missed(new.replica()), new.file());
        self.keeper.keep(new);
    }

    fn end_sets(&mut self, replicas: Members) {
        for replica in replicas.iter() {
            self.durable.sets.remove(&SetKey::Missed(replica));
            self.keeper.forget(replica);
        }
    }

    fn greeting(&self) -> Greeting {
        Greeting {
            report: self.durable.views.report().clone(),
            lost_cache: self.keeper.has_lost_cache(),
            rebuilding: self.durable.rebuilding,
            size_bytes: self.size_bytes,
        }
    }

    fn read(&mut self, range: ByteRange) -> Vec<Id> {
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

    /// The blocks that a write puts into the head.
    fn plan_write(&mut self, range: ByteRange, data: &[Id]) -> Vec<(u64, Option<Block>)> {
        let Ok(plan) = self.map.plan_write(range, &mut self.files) else { return Vec::new() };
        let mut blocks = Vec::new();
        for edge in [plan.first, plan.last].into_iter().flatten() {
            blocks.push(self.merged(edge, |sector| data[place(sector, range)]));
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

    fn merged(&self, edge: EdgeBlock, new: impl Fn(u64) -> Id) -> (u64, Option<Block>) {
        let number = edge.block.offset() / BLOCK_BYTES;
        let mut content = self.source_block(edge.source, number);
        for (at, id) in content.iter_mut().enumerate() {
            let sector = edge.block.offset() + at as u64 * 512;
            if sector >= edge.part.offset() && sector < edge.part.end() {
                *id = new(sector);
            }
        }
        (number, Some(content))
    }

    /// The blocks that a discard or a write of zeroes changes in the head.
    fn plan_zeroes(&mut self, range: ByteRange, discard: bool) -> Vec<(u64, Option<Block>)> {
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
                ZeroStep::Merge(edge) => blocks.push(self.merged(edge, |_| 0)),
            }
        }
        blocks
    }

    fn changes(&mut self, ask: &Ask) -> Vec<(u64, Option<Block>)> {
        match ask {
            Ask::Write(range, data, _) => self.plan_write(*range, data),
            Ask::Discard(range) => self.plan_zeroes(*range, true),
            Ask::WriteZeroes(range, _) => self.plan_zeroes(*range, false),
            _ => Vec::new(),
        }
    }

    fn put(&mut self, block: u64, content: Option<Block>) {
        self.files.head.set(block, content);
        let Ok(range) = ByteRange::new(block * BLOCK_BYTES, BLOCK_BYTES) else { return };
        match content {
            Some(_) => self.map.written(range),
            None => self.map.punched(range),
        }
    }
}

fn block_numbers(range: ByteRange) -> std::ops::Range<u64> {
    range.offset() / BLOCK_BYTES..range.end().div_ceil(BLOCK_BYTES)
}

fn place(sector: u64, range: ByteRange) -> usize {
    usize::try_from((sector - range.offset()) / 512).unwrap_or(usize::MAX)
}

fn modified(ask: &Ask) -> Option<ByteRange> {
    match ask {
        Ask::Write(range, ..) | Ask::Discard(range) | Ask::WriteZeroes(range, _) => Some(*range),
        _ => None,
    }
}

fn describe(ask: &Ask, range: ByteRange) -> String {
    let sectors = crate::guest::sectors(range);
    match ask {
        Ask::Write(_, data, _) => format!("write {:?} of {:?}", sectors, data.first()),
        Ask::Discard(_) => format!("discard {sectors:?}"),
        _ => format!("zeroes {sectors:?}"),
    }
}

impl World {
    fn disk_delay(&mut self, replica: usize) -> Micros {
        let base = self.rng.u64(30..600);
        if self.replicas[replica].slow { base + self.rng.u64(0..1_500_000) } else { base }
    }

    fn answer(&mut self, conn: ConnId, number: u64, answer: Answer) {
        if self.conns.get(&conn).is_some_and(|conn| conn.replica_open) {
            self.send(conn, false, Message::Answer(number, answer));
        }
    }

    /// A request has arrived at a replica.
    pub fn asked(&mut self, id: ConnId, number: u64, ask: Ask) {
        let Some(conn) = self.conns.get(&id) else { return };
        let (at, boot, place) = (conn.replica, conn.boot, conn.place);
        let replica = &self.replicas[at];
        if !replica.up || replica.boot != boot || !conn.replica_open {
            return self.end_at_replica(id);
        }
        if let Ask::Hello(generation, queue) = ask {
            if let Some(conn) = self.conns.get_mut(&id) {
                conn.place = Some((generation, queue));
            }
            return self.hello(at, id, number);
        }
        if place.is_none() || !replica.conns.contains(&id) {
            return self.end_at_replica(id);
        }
        if replica.failed {
            return self.answer(id, number, Answer::Error(Errno::IO));
        }
        self.execute(at, Op { conn: id, number, ask, mark: 0 });
    }

    fn end_at_replica(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let at = conn.replica;
        if std::mem::replace(&mut conn.replica_open, false) {
            self.send(id, false, Message::Close);
        }
        self.replicas[at].conns.retain(|other| *other != id);
        self.replicas[at].candidates.retain(|(other, _)| *other != id);
        self.welcome_ready(at);
    }

    /// The engine has closed its end.
    pub fn engine_has_closed(&mut self, id: ConnId) {
        let Some(at) = self.conns.get(&id).map(|conn| conn.replica) else { return };
        self.replicas[at].conns.retain(|other| *other != id);
        self.replicas[at].candidates.retain(|(other, _)| *other != id);
        self.welcome_ready(at);
    }

    fn hello(&mut self, at: usize, id: ConnId, number: u64) {
        let Some((generation, queue)) = self.conns.get(&id).and_then(|conn| conn.place) else { return };
        let replica = &mut self.replicas[at];
        if replica.failed {
            return self.end_at_replica(id);
        }
        let fence = replica.durable.views.fence(generation);
        let holder = replica.durable.views.generation();
        match fence {
            Err(Refused::Fenced { .. }) => {
                self.answer(id, number, Answer::Deposed(holder));
                return self.end_at_replica(id);
            }
            Err(_) => return self.end_at_replica(id),
            Ok(Fence::Raised | Fence::Same) => {}
        }
        let older: Vec<ConnId> = self.replicas[at]
            .conns
            .iter()
            .copied()
            .filter(|other| {
                let place = self.conns.get(other).and_then(|conn| conn.place);
                place.is_none_or(|(older, same)| older < generation || (older, same) == (generation, queue))
            })
            .collect();
        for conn in older {
            self.end_at_replica(conn);
        }
        self.replicas[at].candidates.push((id, number));
        self.welcome_ready(at);
    }

    /// Lets in whom no request of an older connection stands in the way of.
    fn welcome_ready(&mut self, at: usize) {
        let sabotaged = self.options.sabotage == Some(crate::Sabotage::ServeBeforeFenced);
        for (id, number) in std::mem::take(&mut self.replicas[at].candidates) {
            let replica = &self.replicas[at];
            let open = |op: &Op| replica.conns.contains(&op.conn);
            let quiet = replica.ops.values().chain(&replica.waiting).all(open) || sabotaged;
            if quiet {
                let greeting = replica.greeting();
                self.replicas[at].conns.push(id);
                self.answer(id, number, Answer::Welcome(greeting));
            } else {
                self.replicas[at].candidates.push((id, number));
            }
        }
    }

    fn execute(&mut self, at: usize, op: Op) {
        if let Some(range) = modified(&op.ask) {
            let sabotaged = self.options.sabotage == Some(crate::Sabotage::NoIntent);
            if !sabotaged && self.replicas[at].keeper.admit(range) == Admit::Wait {
                self.replicas[at].waiting.push_back(op);
                return self.write_pages(at);
            }
        }
        match &op.ask {
            Ask::Propose(..)
            | Ask::Commit(_)
            | Ask::Mark(_)
            | Ask::CopyBegin
            | Ask::CopyEnd
            | Ask::Expand(_)
            | Ask::Regions(_) => {
                self.control(at, op);
            }
            _ => self.give_to_disk(at, op),
        }
    }

    fn give_to_disk(&mut self, at: usize, mut op: Op) {
        op.mark = self.replicas[at].files.head.mark();
        let delay = self.disk_delay(at);
        let number = self.fresh();
        self.replicas[at].ops.insert(number, op);
        let boot = self.replicas[at].boot;
        self.after(delay, Occurrence::DiskDone { replica: at, boot, op: number });
    }

    /// The disk has done what a request asked for.
    pub fn disk_done(&mut self, at: usize, boot: u64, number: u64) {
        let lies = self.options.sabotage == Some(crate::Sabotage::LyingFlush);
        let replica = &mut self.replicas[at];
        if replica.boot != boot || !replica.up {
            return;
        }
        let Some(op) = replica.ops.remove(&number) else { return };
        let answer = match &op.ask {
            Ask::Read(range) => Answer::Data(replica.read(*range)),
            Ask::Verify(range) => Answer::Check(check(&replica.read(*range))),
            Ask::Flush => {
                if !lies {
                    replica.files.head.sync(op.mark);
                }
                Answer::Done
            }
            _ => match replica.modify(&op.ask) {
                Ok(()) => Answer::Done,
                Err(errno) => Answer::Error(errno),
            },
        };
        if let Some(range) = modified(&op.ask) {
            let (engine, boot) = self.conns.get(&op.conn).map_or((0, 0), |conn| (conn.engine, conn.boot));
            self.note(|| {
                format!(
                    "  replica {at} of {boot} has done {} for {engine}: {answer:?}",
                    describe(&op.ask, range)
                )
            });
        }
        self.answer(op.conn, op.number, answer);
        self.welcome_ready(at);
    }

    fn control(&mut self, at: usize, op: Op) {
        let Some((generation, _)) = self.conns.get(&op.conn).and_then(|conn| conn.place) else { return };
        let replica = &mut self.replicas[at];
        let answer = match &op.ask {
            Ask::Propose(view, basis) => replica.propose(generation, *view, basis),
            Ask::Commit(view) => replica.commit(generation, *view),
            Ask::Mark(mark) => match replica.mark(mark) {
                Ok(None) => Ok(()),
                Ok(Some(ticket)) => {
                    replica.marks.push((op.conn, op.number, ticket));
                    return self.write_pages(at);
                }
                Err(errno) => Err(errno),
            },
            Ask::CopyBegin => replica.copy_begin(),
            Ask::CopyEnd => {
                replica.durable.rebuilding = false;
                Ok(())
            }
            Ask::Expand(size_bytes) => return self.expand_replica(at, &op, *size_bytes),
            Ask::Regions(query) => {
                let page = replica.regions(query);
                return self.answer(op.conn, op.number, Answer::Page(page));
            }
            _ => Ok(()),
        };
        self.answer(op.conn, op.number, answer.map_or_else(Answer::Error, |()| Answer::Done));
    }

    fn write_pages(&mut self, at: usize) {
        let lazy = self.rng.bool();
        loop {
            let number = self.fresh();
            let replica = &mut self.replicas[at];
            let Some(write) = replica.keeper.begin_write(lazy) else { return };
            let (slot, key, page, bytes) = (write.slot, write.key, write.page, write.bytes.to_vec());
            replica.pages.insert(number, (slot, Some(key), page, bytes));
            let boot = replica.boot;
            let delay = self.disk_delay(at);
            self.after(delay, Occurrence::PageDone { replica: at, boot, write: number });
        }
    }

    /// A page of a set of regions is on the disk.
    pub fn page_done(&mut self, at: usize, boot: u64, number: u64) {
        let replica = &mut self.replicas[at];
        if replica.boot != boot || !replica.up {
            return;
        }
        let Some((slot, key, page, bytes)) = replica.pages.remove(&number) else { return };
        if let Some(key) = key {
            replica.write_page(key, page, &bytes);
        }
        replica.keeper.end_write(slot, true);
        self.go_on_waiting(at);
    }

    /// Looks again at what waits for pages.
    fn go_on_waiting(&mut self, at: usize) {
        let replica = &mut self.replicas[at];
        let (done, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut replica.marks)
            .into_iter()
            .partition(|(.., ticket)| replica.keeper.is_durable(ticket));
        replica.marks = rest;
        let waiting = std::mem::take(&mut replica.waiting);
        for (conn, number, _) in done {
            self.answer(conn, number, Answer::Done);
        }
        for op in waiting {
            self.execute(at, op);
        }
        self.write_pages(at);
    }

    /// The volume grows here: the directory first, then the files of the sets, one by one. The process may die in between.
    fn expand_replica(&mut self, at: usize, op: &Op, size_bytes: u64) {
        let is_cut_off = !self.calm && self.rng.u8(..) < 20;
        let left = self.rng.usize(0..3);
        let replica = &mut self.replicas[at];
        if size_bytes > replica.size_bytes {
            replica.size_bytes = size_bytes;
            let grown = replica.keeper.grown(Regions::of(size_bytes));
            let files: Vec<_> = grown.files().collect();
            let done = if is_cut_off { left.min(files.len()) } else { files.len() };
            replica.durable.sets.extend(files.into_iter().take(done));
            for (_, key, ..) in replica.pages.values_mut() {
                *key = None;
            }
            if is_cut_off {
                self.count("expansions cut off");
                return self.kill_replica(at, false);
            }
            replica.keeper.grow(grown);
            replica.map.grow(size_bytes);
            self.note(|| format!("replica {at} has {size_bytes} bytes now"));
        }
        let outcome = match size_bytes < self.replicas[at].size_bytes {
            true => Answer::Error(Errno::INVALID),
            false => Answer::Done,
        };
        self.answer(op.conn, op.number, outcome);
        self.go_on_waiting(at);
    }

    /// The process is killed; with `power`, its host is off.
    pub fn kill_replica(&mut self, at: usize, power: bool) {
        if !self.replicas[at].up {
            return;
        }
        self.note(|| format!("replica {at} is killed{}", if power { ", its host has no power" } else { "" }));
        let mut rng = self.rng.fork();
        let replica = &mut self.replicas[at];
        replica.up = false;
        // What the kernel has already been given may happen, or a part of it.
        for op in std::mem::take(&mut replica.ops).into_values() {
            for (block, content) in replica.changes(&op.ask) {
                if rng.bool() {
                    replica.put(block, content);
                }
            }
        }
        for (_, key, page, bytes) in std::mem::take(&mut replica.pages).into_values() {
            let Some(key) = key else { continue };
            match rng.u8(0..3) {
                0 => {}
                1 => replica.write_page(key, page, &bytes),
                _ => replica.write_page(key, page, &bytes[..rng.usize(0..PAGE_BYTES / 512) * 512]),
            }
        }
        replica.waiting.clear();
        replica.marks.clear();
        replica.candidates.clear();
        if power {
            replica.files.head.lose_power(&mut rng);
            replica.durable.power_was_lost = true;
        }
        for conn in std::mem::take(&mut replica.conns) {
            self.end_at_replica(conn);
        }
        if !self.replicas[at].gone {
            let delay = self.rng.u64(5_000..2_500_000);
            let boot = self.fresh();
            self.after(delay, Occurrence::StartReplica { replica: at, boot });
        }
    }

    /// A replica process starts.
    pub fn start_replica(&mut self, at: usize, boot: u64) {
        if !self.replicas[at].up && !self.replicas[at].gone {
            self.note(|| format!("replica {at} starts"));
            self.replicas[at].restart(boot);
        }
    }

    /// Everything loses power at once.
    pub fn cut_power_of_all(&mut self) {
        self.count("power cuts of all");
        for host in 0..self.hosts.len() {
            self.kill_engine(host);
        }
        for at in 0..self.replicas.len() {
            self.kill_replica(at, true);
        }
        // The guest was on one of the hosts.
        let now = self.now;
        self.guest_moves();
        self.settle_forgotten();
        self.checker.power_lost(now);
    }
}

/// A check of some sectors.
fn check(sectors: &[Id]) -> u32 {
    sectors.iter().fold(17, |check, id| check.wrapping_mul(16_777_619) ^ id)
}

impl Replica {
    fn modify(&mut self, ask: &Ask) -> Result<(), Errno> {
        let changes = self.changes(ask);
        if self.errors_to_come > 0 {
            self.errors_to_come -= 1;
            self.failed = true;
            return Err(Errno::IO);
        }
        if self.full
            && changes
                .iter()
                .any(|(block, content)| content.is_some() && self.files.head.get(*block).is_none())
        {
            return Err(Errno::NO_SPACE);
        }
        for (block, content) in changes {
            self.put(block, content);
        }
        if matches!(ask, Ask::Write(_, _, true) | Ask::WriteZeroes(_, true)) {
            self.files.head.sync(usize::MAX);
        }
        Ok(())
    }

    fn propose(
        &mut self,
        generation: shorthorn_types::Generation,
        view: shorthorn_types::View,
        basis: &ReplicaReport,
    ) -> Result<(), Errno> {
        let mut views = self.durable.views.clone();
        views.propose(generation, view, basis).map_err(|_| Errno::NOT_PERMITTED)?;
        let known = self.durable.views.report().clone();
        let new = self.keeper.on_propose(self.id, &known, basis, &view).map_err(|_| Errno::IO)?;
        for set in new {
            self.begin_set(set);
        }
        self.durable.views = views;
        Ok(())
    }

    fn commit(
        &mut self,
        generation: shorthorn_types::Generation,
        view: shorthorn_types::View,
    ) -> Result<(), Errno> {
        self.durable.views.commit(generation, view).map_err(|_| Errno::NOT_PERMITTED)?;
        let ended = self.keeper.on_commit(self.durable.views.report());
        self.end_sets(ended);
        Ok(())
    }

    fn mark(&mut self, mark: &MarkRegions) -> Result<Option<Ticket>, Errno> {
        match self.keeper.mark(mark).map_err(|_| Errno::INVALID)? {
            Marked::Done => {
                self.durable.power_was_lost &= self.keeper.has_lost_cache();
                Ok(None)
            }
            Marked::Wait(ticket) => Ok(Some(ticket)),
            Marked::Begin(new) => {
                self.begin_set(new);
                Ok(None)
            }
            Marked::Remove(replica) => {
                self.end_sets(Members::new([replica]).unwrap_or_default());
                Ok(None)
            }
        }
    }

    fn copy_begin(&mut self) -> Result<(), Errno> {
        self.durable.rebuilding = true;
        let blocks: Vec<u64> =
            (0..self.size_bytes / BLOCK_BYTES).filter(|at| self.files.head.get(*at).is_some()).collect();
        for block in blocks {
            self.put(block, None);
        }
        self.files.head.sync(usize::MAX);
        Ok(())
    }

    fn regions(&self, query: &RegionsQuery) -> RegionsPage {
        let regions = Regions::of(self.size_bytes);
        let (kept, set) = match query.of {
            RegionsOf::Intent => (true, self.keeper.content(SetKey::Intent)),
            RegionsOf::Missed(replica) => {
                let set = self.keeper.content(SetKey::Missed(replica));
                (set.is_some(), set)
            }
            RegionsOf::Allocated => {
                let mut set = RegionSet::empty(regions.count());
                for (block, content) in (0u64..).zip(self.content()) {
                    if content != [0; BLOCK_SECTORS] || self.files.head.get(block).is_some() {
                        let range =
                            ByteRange::new(block * BLOCK_BYTES, BLOCK_BYTES).unwrap_or(ByteRange::EMPTY);
                        set.insert_run(regions.touched(range));
                    }
                }
                (true, Some(set))
            }
        };
        let set = set.unwrap_or_else(|| RegionSet::empty(regions.count()));
        RegionsPage {
            kept,
            runs: set.runs(query.from).map(|run| (run.start, run.end - run.start)).collect(),
            next: None,
        }
    }
}
