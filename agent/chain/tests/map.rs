//! The block map and its plans against layers that are kept as plain lists, with so little memory
//! that windows are forgotten all the time.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // helpers count as no tests to clippy

use std::convert::Infallible;

use proptest::prelude::*;
use shorthorn_chain::{
    BlockMap, BlockSource, ByteRange, ExtentSource, FileIndex, ReadSegment, WINDOW_BYTES, ZeroStep,
    memory_limit_bytes,
};

const BLOCK: u64 = 4096;
/// Two windows and a half.
const BLOCKS: u64 = 4096 * 5 / 2;

/// Layers by slot: what each block holds.
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
                // As a file system with smaller blocks might say it: the ends are holes, for they were zeroes.
                found(ByteRange::new(at * BLOCK + 512, (run - at) * BLOCK - 1024).unwrap());
            }
            at = run;
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u64),
    Discard(u64, u64),
    WriteZeroes(u64, u64),
    Forget(u64, u64),
    Read(u64, u64),
    Snapshot,
    Fold(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let range = || {
        let length = prop_oneof![4 => 1..40u64, 1 => 1..5000u64 * 8, 1 => Just(4096 * 8)];
        (0..BLOCKS * 8, length, any::<bool>()).prop_map(|(start, length, aligned)| {
            let start = if aligned { start / 8 * 8 } else { start };
            (start, length.min(BLOCKS * 8 - start))
        })
    };
    prop_oneof![
        8 => range().prop_map(|(start, length)| Step::Write(start, length)),
        3 => range().prop_map(|(start, length)| Step::Discard(start, length)),
        3 => range().prop_map(|(start, length)| Step::WriteZeroes(start, length)),
        1 => range().prop_map(|(start, length)| Step::Forget(start, length)),
        4 => range().prop_map(|(start, length)| Step::Read(start, length)),
        2 => Just(Step::Snapshot),
        1 => (0..8usize).prop_map(Step::Fold),
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

    /// What a block reads as, and the layer that has it.
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

    fn perform(&mut self, step: Step) {
        let bytes = |start: u64, length: u64| ByteRange::new(start * 512, length * 512).unwrap();
        match step {
            Step::Write(start, length) => self.write(bytes(start, length)),
            Step::Discard(start, length) => self.discard(bytes(start, length)),
            Step::WriteZeroes(start, length) => self.write_zeroes(bytes(start, length)),
            Step::Forget(start, length) => self.map.forget(bytes(start, length)),
            Step::Read(start, length) => self.read(bytes(start, length)),
            Step::Snapshot if self.chain.len() < 8 => {
                let head = FileIndex::new(u8::try_from(self.layers.slots.len()).unwrap()).unwrap();
                self.layers.slots.push(vec![None; BLOCKS as usize]);
                self.chain.insert(0, head);
                self.map.push_head(head);
            }
            Step::Fold(at) if self.chain.len() > 2 => {
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
            Step::Snapshot | Step::Fold(_) => {}
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
        let mut punched = 0;
        for step in steps {
            let ZeroStep::Punch(hole) = step else { panic!("{step:?}") };
            assert_eq!(hole.grown_to_blocks(), hole);
            for block in hole.offset() / BLOCK..hole.end() / BLOCK {
                assert!(!self.has_parent(block), "a discard brings block {block} of a parent back");
            }
            punched += hole.length();
            self.set(hole, None);
            self.map.punched(hole);
        }
        let whole = range.shrunk_to_blocks();
        let free =
            (whole.offset() / BLOCK..whole.end() / BLOCK).filter(|&block| !self.has_parent(block)).count();
        assert_eq!(punched, if self.can_punch { free as u64 * BLOCK } else { 0 });
    }

    fn write_zeroes(&mut self, range: ByteRange) {
        let mut steps = Vec::new();
        self.map.plan_write_zeroes(range, &mut self.layers, &mut steps).unwrap();
        const ZEROES: u32 = u32::MAX;
        for step in steps {
            match step {
                ZeroStep::Punch(hole) => {
                    assert!(self.can_punch);
                    self.set(hole, None);
                    self.map.punched(hole);
                }
                ZeroStep::WriteZeroes(blocks) => {
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
        let whole = range.shrunk_to_blocks();
        for block in whole.offset() / BLOCK..whole.end() / BLOCK {
            assert!(matches!(self.truth(block), None | Some((_, ZEROES))), "block {block} is not zero");
        }
    }
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
