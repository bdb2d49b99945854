//! Compares the rules with the data of some blocks, while requests, failures and rot change it.

use std::ops::Range;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const SECTORS: u64 = BLOCK_BYTES / SECTOR_BYTES;
const BLOCKS: u64 = 2;
const REQUESTS: u8 = 2;
/// The first number of rot; requests write smaller ones.
const ROT: u32 = 1 << 20;

/// The numbers that the sectors of a block hold.
type Data = [u32; 8];

#[derive(Clone, Copy, Debug)]
enum Step {
    /// The disk changes these sectors of a block that no request modifies.
    Rot {
        block: u64,
        sectors: u8,
    },
    /// A read meets the block. If it is rot, the sums of its page are kept, and an engine gets the answer.
    Read {
        block: u64,
    },
    /// The repair of a layer shows the data from before the rot, in a block that no request modifies.
    RepairLayer {
        block: u64,
    },
    /// The blocks are summed, unless they have sums or a request modifies any.
    Sum,
    /// No member has the block, which holds rot: it is recorded as lost.
    Lose {
        block: u64,
    },
    /// A request begins to write new data to these sectors.
    Write {
        request: u8,
        first: u64,
        count: u64,
    },
    /// Such a request for a half of a block begins and succeeds.
    WriteHalf {
        half: u64,
    },
    /// The data of another member, or the rot that all have, is copied to these blocks.
    Copy {
        request: u8,
        block: u64,
        count: u64,
        is_rot: bool,
    },
    /// A request with new data for a block, or with that of another member, finds no space. It begins
    /// nothing.
    Refuse {
        block: u64,
        is_new: bool,
    },
    /// The request is begun once more, after it has waited.
    Again {
        request: u8,
    },
    /// The request reads the blocks that it changes in part.
    Merge {
        request: u8,
    },
    /// The disk has written some blocks of the request.
    Land {
        request: u8,
        blocks: u8,
    },
    End {
        request: u8,
        well: bool,
    },
    /// The process ends, and the next one begins.
    Restart,
}

/// The part of a request that is about one block.
#[derive(Clone, Copy, Debug)]
struct Part {
    block: u64,
    /// The sectors that it changes, a bit for each.
    sectors: u8,
    /// The new numbers of these sectors.
    data: Data,
    /// The data for the whole block, once it is known.
    result: Option<Data>,
    has_landed: bool,
}

#[derive(Clone, Debug)]
struct Request {
    range: ByteRange,
    parts: Vec<Part>,
    /// True if it has neither read nor written anything.
    is_new: bool,
}

#[derive(Clone, Debug)]
struct Block {
    data: Data,
    /// The data of a sound member.
    correct: Data,
    /// The data from before the rot.
    former: Data,
    /// True if a layer has the data, because no request has written any.
    is_below: bool,
    /// True if an engine has decided for data of another member, and it could not be written here.
    is_owed: bool,
    /// The stored sum, if it counts.
    page: Option<u32>,
    /// The rot that the disk records as lost.
    lost: Option<Data>,
    /// True if rot in it has to be known.
    is_followed: bool,
    /// The sectors that requests have written since it rotted, a bit for each.
    written: u8,
    /// The number of requests that have failed since the last one that has not.
    failures: usize,
    /// Two requests modify it at once, or have done so.
    is_tangled: bool,
}

struct Model {
    known: KnownRot<u8>,
    blocks: Vec<Block>,
    requests: BTreeMap<u8, Request>,
    /// The data of each sum: no two have the same.
    sums: BTreeMap<Data, u32>,
    writes: u32,
    rots: u32,
}

fn has_rot(data: &Data) -> bool {
    data.iter().any(|number| *number >= ROT)
}

fn merge(old: Data, new: Data, sectors: u8) -> Data {
    std::array::from_fn(|at| if sectors & 1 << at == 0 { old[at] } else { new[at] })
}

fn place(block: u64) -> usize {
    usize::try_from(block).unwrap()
}

impl Block {
    /// The request with this part has ended. `is_reported`: an engine knew of rot in the block.
    fn ended(&mut self, part: Part, well: bool, is_reported: bool) {
        let is_same_rot = part.result.is_some_and(|data| Some(data) == self.lost);
        let is_whole = part.sectors == u8::MAX && !is_same_rot;
        let is_decision = !well && is_reported && is_whole;
        if is_decision || part.has_landed && !is_same_rot {
            self.correct = merge(self.correct, part.data, part.sectors);
        }
        self.is_owed = is_decision || self.is_owed && !(well && is_whole);
        self.failures = if well || is_decision { 0 } else { self.failures } + u32::from(!well) as usize;
        if is_decision {
            self.written = 0;
        }
        if part.has_landed && !is_same_rot {
            self.written |= part.sectors;
        } else if part.sectors == u8::MAX {
            // A copy of the former data forgets the results of merges.
            self.written = 0;
        }
        if self.is_tangled || self.failures > FAILED_MAX {
            self.written = 0;
        }
    }
}

impl Model {
    /// All blocks are sound and summed.
    fn new() -> Model {
        let block = |number: u32| {
            let data = [number; 8];
            let lost = None;
            let (is_followed, is_tangled) = (true, false);
            Block {
                data,
                correct: data,
                former: data,
                is_below: true,
                is_owed: false,
                page: None,
                lost,
                is_followed,
                written: u8::MAX,
                failures: 0,
                is_tangled,
            }
        };
        let mut model = Model {
            known: KnownRot::default(),
            blocks: (1..=2).map(block).collect(),
            requests: BTreeMap::new(),
            sums: BTreeMap::new(),
            writes: 10,
            rots: ROT,
        };
        model.sum();
        model
    }

    fn sum_of(&mut self, data: Data) -> u32 {
        let next = u32::try_from(self.sums.len()).unwrap() + 1;
        *self.sums.entry(data).or_insert(next)
    }

    fn found(&mut self, block: u64) -> u32 {
        self.sum_of(self.blocks[place(block)].data)
    }

    fn looks_rotten(&mut self, block: u64) -> bool {
        let (found, page) = (self.found(block), self.blocks[place(block)].page);
        self.known.is_rotten(block, found).unwrap_or_else(|| page.is_some_and(|sum| sum != found))
    }

    fn modifies(&self, block: u64) -> impl Iterator<Item = u8> + use<'_> {
        let is_its = move |request: &Request| request.parts.iter().any(|part| part.block == block);
        self.requests.iter().filter(move |(_, request)| is_its(request)).map(|(number, _)| *number)
    }

    fn is_idle(&self, block: u64) -> bool {
        self.modifies(block).next().is_none()
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Rot { block, sectors } if self.is_idle(block) => {
                self.rots += 1;
                let found = &mut self.blocks[place(block)];
                if !has_rot(&found.data) {
                    found.former = found.data;
                }
                found.data = merge(found.data, [self.rots; 8], sectors);
                found.written = 0;
            }
            Step::RepairLayer { block } if self.is_idle(block) => {
                let found = &mut self.blocks[place(block)];
                if found.lost.is_none() && found.is_below && has_rot(&found.data) {
                    (found.data, found.written) = (found.former, 0);
                }
            }
            Step::Read { block } if self.looks_rotten(block) => {
                let counts = (0..).zip(&self.blocks).filter_map(|(at, block)| Some((at, block.page?)));
                assert!(self.known.keep(0, counts));
                self.known.reported(block);
            }
            Step::Sum if self.requests.is_empty() && self.blocks[0].page.is_none() => self.sum(),
            Step::Lose { block } if self.is_idle(block) && self.looks_rotten(block) => {
                self.known.keep_lost([block]);
                let found = &mut self.blocks[place(block)];
                found.lost = Some(found.data);
                (found.is_followed, found.written, found.failures) = (true, 0, 0);
            }
            Step::Write { request, first, count } => self.write(request, first, count),
            Step::WriteHalf { half } => {
                self.write(REQUESTS, half * SECTORS / 2, SECTORS / 2);
                self.end(REQUESTS, true);
            }
            Step::Copy { request, block, count, is_rot } => self.copy(request, block, count, is_rot),
            Step::Refuse { block, is_new } => self.refuse(block, is_new),
            Step::Again { request } => self.again(request),
            Step::Merge { request } => self.merge(request),
            Step::Land { request, blocks } => self.land(request, blocks),
            Step::End { request, well } => self.end(request, well),
            Step::Restart => self.restart(),
            _ => {}
        }
    }

    fn sum(&mut self) {
        for block in 0..BLOCKS {
            let found = self.found(block);
            let stored = self.known.sum_to_store(block, found);
            self.known.summed(block, found);
            let found = &mut self.blocks[place(block)];
            found.page = Some(stored);
            found.is_followed |= !has_rot(&found.data);
        }
    }

    /// Requests overlap in pairs at most, and only while neither has read anything.
    fn may_begin(&self, request: u8, mut blocks: Range<u64>) -> bool {
        let is_free = |block: u64| {
            let mut others = self.modifies(block);
            let is_first = others.next().is_none_or(|other| self.requests[&other].is_new);
            is_first && others.next().is_none() && !self.blocks[place(block)].is_tangled
        };
        !self.requests.contains_key(&request) && blocks.end <= BLOCKS && blocks.all(is_free)
    }

    fn write(&mut self, request: u8, first: u64, count: u64) {
        let sectors = first..first + count;
        let blocks = sectors.start / SECTORS..sectors.end.div_ceil(SECTORS);
        if !self.may_begin(request, blocks.clone()) {
            return;
        }
        self.writes += 1;
        let part = |block: u64| {
            let is_in = |sector: &u64| sectors.contains(&(block * SECTORS + sector));
            let part = (0..SECTORS).filter(is_in).fold(0, |part, sector| part | 1 << sector);
            (block, part, [self.writes; 8])
        };
        let parts = blocks.map(part).collect();
        let range = ByteRange::new(first * SECTOR_BYTES, count * SECTOR_BYTES).unwrap();
        self.begin(request, range, parts);
    }

    fn copy(&mut self, request: u8, block: u64, count: u64, is_rot: bool) {
        let blocks = block..block + count;
        if !self.may_begin(request, blocks.clone()) {
            return;
        }
        let part = |block: u64| {
            let Block { correct, lost, .. } = self.blocks[place(block)];
            (block, u8::MAX, lost.filter(|_| is_rot).unwrap_or(correct))
        };
        let parts = blocks.map(part).collect();
        self.begin(request, ByteRange::new(block * BLOCK_BYTES, count * BLOCK_BYTES).unwrap(), parts);
    }

    fn refuse(&mut self, block: u64, is_new: bool) {
        self.writes += u32::from(is_new);
        let data = if is_new { [self.writes; 8] } else { self.blocks[place(block)].correct };
        let sum = self.sum_of(data);
        let is_decision = self.known.is_reported(block) && self.is_idle(block);
        self.known.refused(block, After::Sum(sum));
        let found = &mut self.blocks[place(block)];
        if is_decision {
            (found.correct, found.is_owed) = (data, true);
            (found.written, found.failures) = (0, 0);
        }
    }

    fn begin(&mut self, request: u8, range: ByteRange, parts: Vec<(u64, u8, Data)>) {
        let is_repair = parts.iter().all(|(block, sectors, data)| {
            let sum = self.sum_of(*data);
            let is_whole = *sectors == u8::MAX && self.blocks[place(*block)].page.is_some();
            is_whole && self.known.is_repaired_by(*block, request, sum)
        });
        for (at, block) in (0..).zip(&mut self.blocks).filter(|_| !is_repair) {
            block.is_followed &= block.page.is_none() || self.known.has(at);
            block.page = None;
        }
        for (block, ..) in &parts {
            let is_tangled = !self.is_idle(*block);
            let found = &mut self.blocks[place(*block)];
            found.is_tangled = is_tangled;
            if is_tangled {
                (found.is_followed, found.written) = (found.lost.is_some(), 0);
                found.is_owed = false;
            }
        }
        let part = |(block, sectors, data): (u64, u8, Data)| {
            let result = Some(data).filter(|_| sectors == u8::MAX);
            Part { block, sectors, data, result, has_landed: false }
        };
        let parts = parts.into_iter().map(part).collect();
        self.requests.insert(request, Request { range, parts, is_new: true });
        self.modified(request);
    }

    fn modified(&mut self, request: u8) {
        for part in self.requests[&request].parts.clone() {
            let after = match part.result {
                None => After::Unmerged,
                result if result == self.blocks[place(part.block)].lost => After::Rot,
                Some(data) => After::Sum(self.sum_of(data)),
            };
            self.known.modified(request, part.block, after);
        }
    }

    fn again(&mut self, request: u8) {
        let Some(found) = self.requests.get(&request).filter(|found| found.is_new) else { return };
        if found.parts.iter().all(|part| !self.blocks[place(part.block)].is_tangled) {
            self.modified(request);
        }
    }

    fn merge(&mut self, request: u8) {
        let Some(mut found) = self.requests.remove(&request) else { return };
        found.is_new = false;
        for part in found.parts.iter_mut().filter(|part| part.result.is_none()) {
            let before = self.blocks[place(part.block)].data;
            let after = merge(before, part.data, part.sectors);
            let sums = (self.sum_of(before), self.sum_of(after));
            if self.known.awaits(request) {
                self.known.merged(request, found.range, part.block, sums);
            }
            part.result = Some(after);
        }
        self.requests.insert(request, found);
    }

    fn land(&mut self, request: u8, blocks: u8) {
        let Some(found) = self.requests.get_mut(&request) else { return };
        found.is_new = false;
        let merged: Vec<(u64, u32)> = self.known.merged_by(request).collect();
        for part in found.parts.iter_mut().filter(|part| blocks & 1 << part.block != 0) {
            if let Some(data) = part.result {
                let Block { lost, is_tangled, .. } = self.blocks[place(part.block)];
                if lost.is_some() && lost != Some(data) && has_rot(&data) && !is_tangled {
                    let sum = self.sums.get(&data).copied().unwrap();
                    assert!(merged.contains(&(part.block, sum)), "a merge is recorded before it is written");
                }
                let block = &mut self.blocks[place(part.block)];
                (block.data, block.is_below) = (data, false);
                if block.lost == part.result {
                    block.written = 0;
                }
                part.has_landed = true;
            }
        }
    }

    fn end(&mut self, request: u8, well: bool) {
        if well {
            self.merge(request);
            self.land(request, u8::MAX);
            self.check();
        }
        let Some(Request { parts, .. }) = self.requests.remove(&request) else { return };
        if well {
            // That is durable before the answer.
            for block in self.known.cured_by(request).collect::<Vec<_>>() {
                assert!(!has_rot(&self.blocks[place(block)].data), "block {block} is not cured");
                self.blocks[place(block)].lost = None;
            }
        }
        let known = parts.iter().map(|part| self.known.blocks.get(&part.block));
        let were: Vec<(bool, bool)> =
            known.map(|known| (known.is_some(), known.is_some_and(|known| known.is_reported))).collect();
        self.known.ended(request, well);
        for (part, (was_known, is_reported)) in parts.into_iter().zip(were) {
            let (is_idle, is_known) = (self.is_idle(part.block), self.known.has(part.block));
            let (found, page) = (self.found(part.block), self.blocks[place(part.block)].page);
            assert!(!well || page.is_none_or(|sum| sum == found), "the sum of block {} is stale", part.block);
            let block = &mut self.blocks[place(part.block)];
            block.ended(part, well, is_reported);
            if block.is_tangled {
                block.is_tangled = !is_idle;
            } else if was_known && !is_known {
                assert!(well || block.failures > FAILED_MAX, "block {} is forgotten", part.block);
                // If it holds rot, that is a mistake.
                block.is_followed &= well && has_rot(&block.data);
            }
        }
    }

    fn restart(&mut self) {
        self.requests.clear();
        self.known.forget_sums([]);
        let lost = (0..).zip(&self.blocks).filter(|(_, block)| block.lost.is_some());
        self.known.keep_lost(lost.map(|(at, _)| at));
        for block in &mut self.blocks {
            block.is_followed &= block.lost.is_some() || block.page.is_some();
            (block.written, block.failures, block.is_tangled) = (0, 0, false);
            block.is_owed &= block.page.is_some() && block.page == self.sums.get(&block.correct).copied();
        }
    }

    fn check(&mut self) {
        for block in 0..BLOCKS {
            let looks_rotten = self.looks_rotten(block);
            let Block { data, correct, lost, is_owed, is_followed, written, .. } = &self.blocks[place(block)];
            let is_stale = *is_owed && data != correct && self.is_idle(block);
            assert!(!is_stale || !is_followed || looks_rotten, "block {block} is stale: {data:?}");
            assert!(!has_rot(data) || !is_followed || looks_rotten, "block {block} holds rot: {data:?}");
            assert!(*written != u8::MAX || !looks_rotten, "block {block} is sound: {data:?}");
            assert_eq!(self.known.is_lost(block), lost.is_some(), "block {block}");
        }
        let changing = self.known.blocks.values().filter(|known| known.change.is_some());
        assert_eq!(self.known.under_way, changing.count());
        assert_eq!(self.known.lost, self.blocks.iter().filter(|block| block.lost.is_some()).count());
        assert!(!self.requests.is_empty() || self.known.under_way == 0);
    }
}

fn step() -> impl Strategy<Value = Step> {
    let write = |(request, first, count): (u8, u64, u64)| {
        let count = count.min(BLOCKS * SECTORS - first);
        Step::Write { request, first, count }
    };
    // Halves of blocks become whole ones sooner than other parts.
    let halves = (0..REQUESTS, 0..2 * BLOCKS, 1..=4_u64).prop_map(|(request, first, count)| {
        let half = SECTORS / 2;
        (request, first * half, count * half)
    });
    let copy = (0..REQUESTS, 0..BLOCKS, 1..=2_u64, any::<bool>());
    prop_oneof![
        4 => (0..BLOCKS, 1..=u8::MAX).prop_map(|(block, sectors)| Step::Rot { block, sectors }),
        4 => (0..BLOCKS).prop_map(|block| Step::Read { block }),
        3 => (0..BLOCKS).prop_map(|block| Step::RepairLayer { block }),
        1 => Just(Step::Sum),
        2 => (0..BLOCKS).prop_map(|block| Step::Lose { block }),
        2 => halves.prop_map(write),
        2 => (0..REQUESTS, 0..BLOCKS * SECTORS, 1..=2 * SECTORS).prop_map(write),
        8 => (0..2 * BLOCKS).prop_map(|half| Step::WriteHalf { half }),
        2 => copy.prop_map(|(request, block, count, is_rot)| Step::Copy { request, block, count, is_rot }),
        2 => (0..BLOCKS, any::<bool>()).prop_map(|(block, is_new)| Step::Refuse { block, is_new }),
        1 => (0..REQUESTS).prop_map(|request| Step::Again { request }),
        2 => (0..REQUESTS).prop_map(|request| Step::Merge { request }),
        3 => (0..REQUESTS, any::<u8>()).prop_map(|(request, blocks)| Step::Land { request, blocks }),
        20 => (0..REQUESTS, any::<bool>()).prop_map(|(request, well)| Step::End { request, well }),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    /// A lost block is rot until all of it has other data.
    #[test]
    fn rot_that_is_known_never_looks_sound_and_new_data_never_looks_rotten(steps in vec(step(), 1..100)) {
        let mut model = Model::new();
        for step in steps {
            model.step(step);
            model.check();
        }
        (0..REQUESTS).for_each(|request| model.end(request, true));
        model.check();
        prop_assert_eq!(model.known.under_way, 0);
    }
}
