//! The block map and its plans against layers that are kept as plain lists, with so little memory
//! that windows are forgotten all the time.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // clippy does not count helpers as tests

use std::convert::Infallible;

use proptest::prelude::*;
use shorthorn_chain::{
    BlockMap, BlockSource, ByteRange, ExtentSource, FileIndex, ReadSegment, WINDOW_BYTES, ZeroStep,
    memory_limit_bytes,
};

const BLOCK: u64 = 4096;
/// Two windows and a half.
const BLOCKS: u64 = 4096 * 5 / 2;
/// The value of a block of zeroes that takes space.
const ZEROES: u32 = u32::MAX;

/// The content of each block, by the slot of the layer.
#[derive(Default)]
struct Layers {
    slots: Vec<Vec<Option<u32>>>,
    probes: usize,
}

impl ExtentSource for Layers {
    type Error = Infallible;

    fn data_extents(
        &mut self,
        file: FileIndex,
        range: ByteRange,
        found: &mut dyn FnMut(ByteRange),
    ) -> Result<(), Infallible> {
        self.probes += 1;
        let blocks = &self.slots[file.slot()];
        let mut at = range.offset() / BLOCK;
        let end = (range.end() / BLOCK).min(blocks.len() as u64);
        while at < end {
            let data = blocks[at as usize].is_some();
            let run = (at..end).find(|&block| blocks[block as usize].is_some() != data).unwrap_or(end);
            if data {
                // As a file system with smaller blocks might say it: the ends are holes, for they were
                // zeroes.
                found(ByteRange::new(at * BLOCK + 512, (run - at) * BLOCK - 1024).unwrap());
            }
            at = run;
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum FileStep {
    Write(u64, u64),
    Discard(u64, u64),
    WriteZeroes(u64, u64),
    Forget(u64, u64),
    Read(u64, u64),
    Snapshot,
    Fold(usize),
}

fn step() -> impl Strategy<Value = FileStep> {
    let range = || {
        let length = prop_oneof![4 => 1..40u64, 1 => 1..5000u64 * 8, 1 => Just(4096 * 8)];
        (0..BLOCKS * 8, length, any::<bool>()).prop_map(|(start, length, aligned)| {
            let start = if aligned { start / 8 * 8 } else { start };
            (start, length.min(BLOCKS * 8 - start))
        })
    };
    prop_oneof![
        8 => range().prop_map(|(start, length)| FileStep::Write(start, length)),
        3 => range().prop_map(|(start, length)| FileStep::Discard(start, length)),
        3 => range().prop_map(|(start, length)| FileStep::WriteZeroes(start, length)),
        1 => range().prop_map(|(start, length)| FileStep::Forget(start, length)),
        4 => range().prop_map(|(start, length)| FileStep::Read(start, length)),
        2 => Just(FileStep::Snapshot),
        1 => (0..8usize).prop_map(FileStep::Fold),
    ]
}

struct Run {
    layers: Layers,
    chain: Vec<FileIndex>,
    map: BlockMap,
    values: u32,
    can_punch: bool,
}

impl Run {
    fn new(can_punch: bool, limit_bytes: usize) -> Run {
        let layers = Layers { slots: vec![vec![None; BLOCKS as usize]], probes: 0 };
        let chain = vec![FileIndex::new(0).unwrap()];
        let mut map = BlockMap::new(BLOCKS * BLOCK, chain.clone(), can_punch);
        map.lower_limit(limit_bytes);
        Run { layers, chain, map, values: 0, can_punch }
    }

    /// Returns the value that a block reads as, and its layer.
    fn truth(&self, block: u64) -> Option<(FileIndex, u32)> {
        let held =
            |file: &FileIndex| self.layers.slots[file.slot()][block as usize].map(|value| (*file, value));
        self.chain.iter().find_map(held)
    }

    fn has_parent(&self, block: u64) -> bool {
        self.chain[1..].iter().any(|file| self.layers.slots[file.slot()][block as usize].is_some())
    }

    fn set(&mut self, range: ByteRange, value: Option<u32>) {
        assert_eq!(range.grown_to_blocks(), range);
        let head = self.chain[0].slot();
        for block in range.offset() / BLOCK..range.end() / BLOCK {
            self.layers.slots[head][block as usize] = value;
        }
    }

    fn perform(&mut self, step: FileStep) {
        let bytes = |start: u64, length: u64| ByteRange::new(start * 512, length * 512).unwrap();
        match step {
            FileStep::Write(start, length) => self.write(bytes(start, length)),
            FileStep::Discard(start, length) => self.discard(bytes(start, length)),
            FileStep::WriteZeroes(start, length) => self.write_zeroes(bytes(start, length)),
            FileStep::Forget(start, length) => self.map.forget(bytes(start, length)),
            FileStep::Read(start, length) => self.read(bytes(start, length)),
            FileStep::Snapshot if self.chain.len() < 8 => {
                let head = FileIndex::new(u8::try_from(self.layers.slots.len()).unwrap()).unwrap();
                self.layers.slots.push(vec![None; BLOCKS as usize]);
                self.chain.insert(0, head);
                self.map.push_head(head);
            }
            FileStep::Fold(at) if self.chain.len() > 2 => {
                let at = 1 + at % (self.chain.len() - 2);
                let (child, parent) = (self.chain[at], self.chain[at + 1]);
                for block in 0..BLOCKS as usize {
                    let upper = self.layers.slots[child.slot()][block];
                    let lower = &mut self.layers.slots[parent.slot()][block];
                    *lower = upper.or(*lower);
                }
                self.chain.remove(at);
                self.map.fold(child, parent);
            }
            FileStep::Snapshot | FileStep::Fold(_) => {}
        }
        let usage = self.map.usage();
        // The window in use may be kept beyond the limit.
        assert!(usage.used_bytes <= usage.limit_bytes + 5000, "{usage:?}");
    }

    fn write(&mut self, range: ByteRange) {
        let plan = self.map.plan_write(range, &mut self.layers).unwrap();
        assert_eq!(plan.blocks(), range.grown_to_blocks());
        let parts = [plan.first.map(|edge| edge.part), plan.whole, plan.last.map(|edge| edge.part)];
        let mut at = range.offset();
        for part in parts.into_iter().flatten() {
            assert_eq!(part.offset(), at);
            at = part.end();
        }
        assert_eq!(at, range.end());
        for edge in [plan.first, plan.last].into_iter().flatten() {
            assert!(edge.part.length() < BLOCK && edge.block == edge.part.grown_to_blocks());
            self.check_source(edge.source, edge.block.offset() / BLOCK);
        }
        self.values += 1;
        self.set(range.grown_to_blocks(), Some(self.values));
        self.map.written(range);
    }

    fn check_source(&self, source: BlockSource, block: u64) {
        match (source, self.truth(block)) {
            (BlockSource::Zero, None) => {}
            // A hole of a head that is alone reads as zeroes by itself.
            (BlockSource::File(file), None) => assert!(self.chain == [file], "block {block}"),
            (BlockSource::File(file), Some((owner, _))) => assert_eq!(file, owner, "block {block}"),
            (BlockSource::Zero, Some(owner)) => panic!("block {block} is in {owner:?}, not nowhere"),
        }
    }

    fn read(&mut self, range: ByteRange) {
        let mut segments: Vec<ReadSegment> = Vec::new();
        self.map.plan_read(range, &mut self.layers, &mut segments).unwrap();
        let mut at = range.offset();
        for (number, segment) in segments.iter().enumerate() {
            assert_eq!(segment.range.offset(), at);
            at = segment.range.end();
            for block in segment.range.offset() / BLOCK..segment.range.end().div_ceil(BLOCK) {
                self.check_source(segment.source, block);
            }
            assert!(
                number == 0 || segments[number - 1].source != segment.source,
                "segments that should be one"
            );
        }
        assert_eq!(at, range.end());
    }

    fn discard(&mut self, range: ByteRange) {
        let mut steps = Vec::new();
        self.map.plan_discard(range, &mut self.layers, &mut steps).unwrap();
        assert!(!steps.iter().any(|step| matches!(step, ZeroStep::Merge(_))), "{steps:?}");
        self.zero(range.shrunk_to_blocks(), steps);
    }

    fn write_zeroes(&mut self, range: ByteRange) {
        let mut steps = Vec::new();
        self.map.plan_write_zeroes(range, &mut self.layers, &mut steps).unwrap();
        self.zero(range, steps);
    }

    /// Executes `steps`, which make `range` read as zeroes and change nothing else.
    fn zero(&mut self, range: ByteRange, steps: Vec<ZeroStep>) {
        for step in steps {
            match step {
                ZeroStep::Punch(hole) => {
                    assert!(self.can_punch && hole.shrunk_to_blocks() == hole && contains(range, hole));
                    self.set(hole, None);
                    self.map.punched(hole);
                }
                ZeroStep::WriteZeroes(blocks) => {
                    assert!(contains(range, blocks));
                    self.set(blocks, Some(ZEROES));
                    self.map.written(blocks);
                }
                ZeroStep::Merge(edge) => {
                    assert!(edge.part.length() < BLOCK);
                    assert!(edge.part.offset() == range.offset() || edge.part.end() == range.end());
                    self.check_source(edge.source, edge.block.offset() / BLOCK);
                    self.values += 1;
                    self.set(edge.block, Some(self.values));
                    self.map.written(edge.block);
                }
            }
        }
        for block in numbers(range.shrunk_to_blocks()) {
            assert!(matches!(self.truth(block), None | Some((_, ZEROES))), "block {block} is not zero");
            let is_hole = self.layers.slots[self.chain[0].slot()][block as usize].is_none();
            let may_be_one = self.can_punch && !self.has_parent(block);
            assert_eq!(
                is_hole, may_be_one,
                "block {block}: a hole takes no space, if it shows nothing older"
            );
        }
    }
}

fn contains(range: ByteRange, part: ByteRange) -> bool {
    range.offset() <= part.offset() && part.end() <= range.end()
}

fn numbers(blocks: ByteRange) -> std::ops::Range<u64> {
    blocks.offset() / BLOCK..blocks.end() / BLOCK
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn plans_are_right(steps in prop::collection::vec(step(), 1..60), can_punch in prop::bool::weighted(0.8),
        limit_bytes in prop::sample::select(vec![100, 6000, 20_000])) {
        let mut run = Run::new(can_punch, limit_bytes);
        for step in steps {
            run.perform(step);
        }
        run.read(ByteRange::new(0, BLOCKS * BLOCK).unwrap());
    }
}

/// Blocks whose layout is drawn, half of them in the first window, half in the second.
const DRAWN: u64 = 48;
const FIRST_DRAWN: u64 = 4096 - DRAWN / 2;

/// The value that a block reads as (0 for zeroes), and the histories by which several members have come to
/// hold it.
#[derive(Clone, Debug)]
struct Drawn {
    value: u32,
    layouts: [Layout; 4],
}

#[derive(Clone, Debug)]
struct Layout {
    /// The index of the layer that has the block.
    owner: usize,
    /// True if zeroes were written, or copied as written data.
    keeps_zeroes: bool,
    /// The layers below the owner have something else.
    hides_older: bool,
}

impl Layout {
    /// Returns the content of the layers, the head first, for a block that reads as `value`.
    fn layers(&self, value: u32, count: usize) -> Vec<Option<u32>> {
        const OLDER: u32 = 77;
        let mut held = vec![None; count];
        if value != 0 || self.keeps_zeroes {
            let owner = self.owner % count;
            held[owner] = Some(if value == 0 { ZEROES } else { value });
            held[owner + 1..].fill(self.hides_older.then_some(OLDER));
        }
        held
    }
}

/// Returns a member whose blocks are laid out as the `number`th of each of `drawn`.
fn member(drawn: &[Drawn], number: usize, layers: usize, can_punch: bool) -> Run {
    let mut run = Run::new(can_punch, usize::MAX);
    while run.chain.len() < layers {
        run.perform(FileStep::Snapshot);
    }
    for (block, Drawn { value, layouts }) in (FIRST_DRAWN..).zip(drawn) {
        for (file, content) in run.chain.iter().zip(layouts[number].layers(*value, layers)) {
            run.layers.slots[file.slot()][block as usize] = content;
        }
    }
    run
}

fn drawn() -> impl Strategy<Value = Vec<Drawn>> {
    let value = prop_oneof![Just(0u32), 1..9u32];
    let layout = (0..3usize, any::<bool>(), any::<bool>())
        .prop_map(|(owner, keeps_zeroes, hides_older)| Layout { owner, keeps_zeroes, hides_older });
    let block = (value, prop::array::uniform4(layout)).prop_map(|(value, layouts)| Drawn { value, layouts });
    prop::collection::vec(block, DRAWN as usize)
}

proptest! {
    /// Members that read the same may hold it differently. Zeroes are copied to a new one as holes, and file
    /// systems that cannot punch are given zeroes to write.
    #[test]
    fn a_discard_leaves_all_members_reading_the_same(drawn in drawn(), layers in 1..4usize,
        (first, count) in (0..DRAWN * 8, 1..DRAWN * 8)) {
        let count = count.min(DRAWN * 8 - first);
        let range = ByteRange::new(FIRST_DRAWN * BLOCK + first * 512, count * 512).unwrap();
        let whole = numbers(range.shrunk_to_blocks());
        for (number, can_punch) in [(0, true), (1, true), (2, false), (3, false)] {
            let mut run = member(&drawn, number, layers, can_punch);
            run.discard(range);
            for (block, drawn) in (FIRST_DRAWN..).zip(&drawn) {
                let found = run.truth(block).map_or(0, |(_, value)| if value == ZEROES { 0 } else { value });
                let expected = if whole.contains(&block) { 0 } else { drawn.value };
                prop_assert_eq!(found, expected, "block {} of member {}", block, number);
            }
        }
    }
}

/// Every block of a different layer than its neighbours: nothing can be kept in few bytes.
struct Worst {
    layers: u64,
}

impl ExtentSource for Worst {
    type Error = Infallible;

    fn data_extents(
        &mut self,
        file: FileIndex,
        range: ByteRange,
        found: &mut dyn FnMut(ByteRange),
    ) -> Result<(), Infallible> {
        let first = range.offset() / BLOCK;
        let skip = (file.slot() as u64 + self.layers - first % self.layers) % self.layers;
        for block in (first + skip..range.end() / BLOCK).step_by(usize::try_from(self.layers).unwrap()) {
            found(ByteRange::new(block * BLOCK, BLOCK).unwrap());
        }
        Ok(())
    }
}

#[test]
fn the_worst_layout_stays_within_its_memory() {
    const SIZE_BYTES: u64 = 64 << 30;
    let chain: Vec<_> = (0..50).filter_map(FileIndex::new).collect();
    let mut source = Worst { layers: 50 };
    let mut map = BlockMap::new(SIZE_BYTES, chain, true);
    let mut segments = Vec::new();
    for window in 0..SIZE_BYTES / WINDOW_BYTES {
        segments.clear();
        let block = window * WINDOW_BYTES / BLOCK + 7;
        map.plan_read(ByteRange::new(block * BLOCK, 4 * BLOCK).unwrap(), &mut source, &mut segments).unwrap();
        let slots: Vec<_> = segments
            .iter()
            .map(|segment| match segment.source {
                BlockSource::File(file) => file.slot() as u64,
                BlockSource::Zero => panic!(),
            })
            .collect();
        assert_eq!(slots, (block..block + 4).map(|block| block % 50).collect::<Vec<_>>());
        map.written(ByteRange::new(block * BLOCK, BLOCK).unwrap());
        assert!(map.usage().used_bytes as u64 <= memory_limit_bytes(SIZE_BYTES), "{:?}", map.usage());
    }
    assert_eq!(memory_limit_bytes(1 << 40), 32 << 20);
}
