//! The known state of one window of the volume, in as few bytes as possible.

use std::mem::size_of;
use std::ops::Range;

use crate::extents::FileIndex;
use crate::limits::WINDOW_BLOCKS;

const WORD_BITS: usize = 64;

/// A bit for each block of a window.
pub(crate) type Bits = [u64; WINDOW_BLOCKS / WORD_BITS];

/// The topmost file that holds a block, if any does.
pub(crate) type BlockOwner = Option<FileIndex>;

/// The approximate overhead of the allocator for each allocation, in bytes.
const ALLOCATION_BYTES: usize = 16;

/// The blocks of a window that the head holds.
#[derive(Debug, Default)]
pub(crate) enum HeadBlocks {
    #[default]
    Unknown,
    Absent,
    Present,
    Mixed(Box<Bits>),
}

/// The topmost layer below the head that holds each block of a window. It never changes while the chain stays
/// the same.
#[derive(Debug, Default)]
pub(crate) enum ParentBlocks {
    #[default]
    Unknown,
    Uniform(BlockOwner),
    Runs(Box<[BlockRun]>),
    Dense(Box<[BlockOwner; WINDOW_BLOCKS]>),
}

/// A run of blocks with one owner; it ends where the next begins.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockRun {
    start: u16,
    owner: BlockOwner,
}

#[derive(Debug, Default)]
pub(crate) struct Window {
    pub head: HeadBlocks,
    pub parents: ParentBlocks,
    /// Used since the clock's hand last came by.
    pub referenced: bool,
}

impl Window {
    pub fn heap_bytes(&self) -> usize {
        self.head.heap_bytes() + self.parents.heap_bytes()
    }

    /// Frees the memory beyond the window itself.
    pub fn evict(&mut self) {
        if self.head.heap_bytes() > 0 {
            self.head = HeadBlocks::Unknown;
        }
        if self.parents.heap_bytes() > 0 {
            self.parents = ParentBlocks::Unknown;
        }
    }

    /// Makes the head a layer below a new, empty head.
    pub fn push_head(&mut self, old_head: FileIndex, scratch: &mut [BlockOwner; WINDOW_BLOCKS]) {
        let head = std::mem::replace(&mut self.head, HeadBlocks::Absent);
        match head {
            HeadBlocks::Absent => {}
            HeadBlocks::Present => self.parents = ParentBlocks::Uniform(Some(old_head)),
            HeadBlocks::Unknown => self.parents = ParentBlocks::Unknown,
            HeadBlocks::Mixed(_) if matches!(self.parents, ParentBlocks::Unknown) => {}
            HeadBlocks::Mixed(bits) => {
                let mut block = 0;
                while block < WINDOW_BLOCKS {
                    let (owner, end) = self.parents.run_at(block).unwrap_or((None, WINDOW_BLOCKS));
                    scratch[block..end].fill(owner);
                    block = end;
                }
                for_each_set_run(&bits, |run| scratch[run].fill(Some(old_head)));
                self.parents = ParentBlocks::compress(scratch);
            }
        }
    }
}

impl HeadBlocks {
    pub fn from_bits(bits: &Bits) -> HeadBlocks {
        if bits.iter().all(|word| *word == 0) {
            HeadBlocks::Absent
        } else if bits.iter().all(|word| *word == u64::MAX) {
            HeadBlocks::Present
        } else {
            HeadBlocks::Mixed(Box::new(*bits))
        }
    }

    pub fn heap_bytes(&self) -> usize {
        match self {
            HeadBlocks::Mixed(_) => size_of::<Bits>() + ALLOCATION_BYTES,
            _ => 0,
        }
    }

    /// Returns whether the head holds `block`, and where the run of such blocks ends. `None`: not known.
    pub fn run_at(&self, block: usize) -> Option<(bool, usize)> {
        match self {
            HeadBlocks::Unknown => None,
            HeadBlocks::Absent => Some((false, WINDOW_BLOCKS)),
            HeadBlocks::Present => Some((true, WINDOW_BLOCKS)),
            HeadBlocks::Mixed(bits) => Some(bit_run_at(bits, block)),
        }
    }

    /// Records that the head now holds `blocks`.
    pub fn insert(&mut self, blocks: Range<usize>) {
        match self {
            HeadBlocks::Unknown | HeadBlocks::Present => {}
            HeadBlocks::Absent if blocks.len() == WINDOW_BLOCKS => *self = HeadBlocks::Present,
            HeadBlocks::Absent => {
                let mut bits = Box::new([0; WINDOW_BLOCKS / WORD_BITS]);
                change_bits(&mut bits, blocks, true);
                *self = HeadBlocks::Mixed(bits);
            }
            HeadBlocks::Mixed(bits) => {
                let first_word = blocks.start / WORD_BITS;
                change_bits(bits, blocks, true);
                if bits[first_word] == u64::MAX && bits.iter().all(|word| *word == u64::MAX) {
                    *self = HeadBlocks::Present;
                }
            }
        }
    }

    /// Records that the head no longer holds `blocks`.
    pub fn remove(&mut self, blocks: Range<usize>) {
        match self {
            HeadBlocks::Unknown | HeadBlocks::Absent => {}
            HeadBlocks::Present if blocks.len() == WINDOW_BLOCKS => *self = HeadBlocks::Absent,
            HeadBlocks::Present => {
                let mut bits = Box::new([u64::MAX; WINDOW_BLOCKS / WORD_BITS]);
                change_bits(&mut bits, blocks, false);
                *self = HeadBlocks::Mixed(bits);
            }
            HeadBlocks::Mixed(bits) => {
                let first_word = blocks.start / WORD_BITS;
                change_bits(bits, blocks, false);
                if bits[first_word] == 0 && bits.iter().all(|word| *word == 0) {
                    *self = HeadBlocks::Absent;
                }
            }
        }
    }
}

impl ParentBlocks {
    pub fn compress(owners: &[BlockOwner; WINDOW_BLOCKS]) -> ParentBlocks {
        let starts = || (0..WINDOW_BLOCKS).filter(|&block| block == 0 || owners[block] != owners[block - 1]);
        let runs = starts().count();
        if runs == 1 {
            ParentBlocks::Uniform(owners[0])
        } else if runs * size_of::<BlockRun>() < size_of::<[BlockOwner; WINDOW_BLOCKS]>() {
            // A block's number within its window fits 16 bits.
            #[allow(clippy::cast_possible_truncation)]
            let run = |block: usize| BlockRun { start: block as u16, owner: owners[block] };
            ParentBlocks::Runs(starts().map(run).collect())
        } else {
            ParentBlocks::Dense(Box::new(*owners))
        }
    }

    pub fn heap_bytes(&self) -> usize {
        match self {
            ParentBlocks::Unknown | ParentBlocks::Uniform(_) => 0,
            ParentBlocks::Runs(runs) => runs.len() * size_of::<BlockRun>() + ALLOCATION_BYTES,
            ParentBlocks::Dense(_) => size_of::<[BlockOwner; WINDOW_BLOCKS]>() + ALLOCATION_BYTES,
        }
    }

    /// Returns the file that holds `block`, and the end of the run of blocks with that owner. `None`: not
    /// known.
    pub fn run_at(&self, block: usize) -> Option<(BlockOwner, usize)> {
        match self {
            ParentBlocks::Unknown => None,
            ParentBlocks::Uniform(owner) => Some((*owner, WINDOW_BLOCKS)),
            ParentBlocks::Runs(runs) => {
                let next = runs.partition_point(|run| usize::from(run.start) <= block);
                let end = runs.get(next).map_or(WINDOW_BLOCKS, |run| usize::from(run.start));
                Some((runs[next - 1].owner, end))
            }
            ParentBlocks::Dense(owners) => {
                let owner = owners[block];
                let length = owners[block..].iter().take_while(|other| **other == owner).count();
                Some((owner, block + length))
            }
        }
    }

    /// Puts `new` in place of `old` wherever that is the owner.
    pub fn replace(&mut self, old: FileIndex, new: FileIndex) {
        let change = |owner: &mut BlockOwner| {
            if *owner == Some(old) {
                *owner = Some(new);
            }
        };
        match self {
            ParentBlocks::Unknown => {}
            ParentBlocks::Uniform(owner) => change(owner),
            ParentBlocks::Runs(runs) => runs.iter_mut().for_each(|run| change(&mut run.owner)),
            ParentBlocks::Dense(owners) => owners.iter_mut().for_each(change),
        }
    }
}

/// Sets or clears the bits of `blocks`.
pub(crate) fn change_bits(bits: &mut Bits, blocks: Range<usize>, set: bool) {
    let mut block = blocks.start;
    while block < blocks.end {
        let (word, bit) = (block / WORD_BITS, block % WORD_BITS);
        let count = (WORD_BITS - bit).min(blocks.end - block);
        let mask = (u64::MAX >> (WORD_BITS - count)) << bit;
        if set {
            bits[word] |= mask;
        } else {
            bits[word] &= !mask;
        }
        block += count;
    }
}

/// Returns whether the bit of `block` is set, and where the run of equal bits ends.
fn bit_run_at(bits: &Bits, block: usize) -> (bool, usize) {
    let (mut word, bit) = (block / WORD_BITS, block % WORD_BITS);
    let value = bits[word] >> bit & 1 == 1;
    // Turned so that the run is of ones, and the bits before `block` count as part of it.
    let flip = if value { 0 } else { u64::MAX };
    let mut ones = (bits[word] ^ flip) | !(u64::MAX << bit);
    while ones == u64::MAX {
        word += 1;
        if word == bits.len() {
            return (value, WINDOW_BLOCKS);
        }
        ones = bits[word] ^ flip;
    }
    (value, word * WORD_BITS + ones.trailing_ones() as usize)
}

fn for_each_set_run(bits: &Bits, mut each: impl FnMut(Range<usize>)) {
    let mut block = 0;
    while block < WINDOW_BLOCKS {
        let (set, end) = bit_run_at(bits, block);
        if set {
            each(block..end);
        }
        block = end;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_window_takes_little_space() {
        assert!(size_of::<Window>() <= 48, "{}", size_of::<Window>());
        assert_eq!(size_of::<BlockOwner>(), 1);
        assert_eq!(size_of::<BlockRun>(), 4);
    }

    proptest! {
        #[test]
        fn bits_behave_like_a_list_of_flags(
            changes in prop::collection::vec((0..WINDOW_BLOCKS, 1..400usize, any::<bool>()), 0..40),
            whole in prop::option::of(any::<bool>()),
        ) {
            let mut blocks = HeadBlocks::Absent;
            let mut model = vec![false; WINDOW_BLOCKS];
            let everything = whole.map(|set| (0, WINDOW_BLOCKS, set));
            for (start, length, set) in changes.into_iter().chain(everything) {
                let range = start..(start + length).min(WINDOW_BLOCKS);
                model[range.clone()].fill(set);
                if set { blocks.insert(range) } else { blocks.remove(range) }
            }
            let mut end = WINDOW_BLOCKS;
            for block in (0..WINDOW_BLOCKS).rev() {
                if block + 1 < WINDOW_BLOCKS && model[block] != model[block + 1] {
                    end = block + 1;
                }
                prop_assert_eq!(blocks.run_at(block), Some((model[block], end)));
            }
            let uniform = model.iter().all(|set| *set == model[0]);
            prop_assert_eq!(uniform, !matches!(blocks, HeadBlocks::Mixed(_)));
        }

        #[test]
        fn owners_behave_like_a_list(runs in prop::collection::vec((0u8..5, 1..64usize), 1..600)) {
            let mut owners = [None; WINDOW_BLOCKS];
            let mut at = 0;
            for (slot, length) in runs {
                let end = (at + length).min(WINDOW_BLOCKS);
                owners[at..end].fill(slot.checked_sub(1).and_then(FileIndex::new));
                at = end;
            }
            let parents = ParentBlocks::compress(&owners);
            let mut end = WINDOW_BLOCKS;
            for block in (0..WINDOW_BLOCKS).rev() {
                if block + 1 < WINDOW_BLOCKS && owners[block] != owners[block + 1] {
                    end = block + 1;
                }
                prop_assert_eq!(parents.run_at(block), Some((owners[block], end)));
            }
        }
    }
}
