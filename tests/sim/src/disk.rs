//! A disk that keeps what was synced, and loses or reorders the rest when the power goes.

use std::collections::BTreeMap;

use fastrand::Rng;
use shorthorn_chain::{ExtentSource, FileIndex};
use shorthorn_types::ByteRange;
use shorthorn_types::limits::{BLOCK_BYTES, SECTOR_BYTES};

use crate::checker::Id;

/// Sectors of a block.
pub const BLOCK_SECTORS: usize = (BLOCK_BYTES / SECTOR_BYTES) as usize;

/// A block: for each sector the write that it shows.
pub type Block = [Id; BLOCK_SECTORS];

/// One sparse file.
#[derive(Clone, Debug, Default)]
pub struct SparseFile {
    /// As the process reads it; a missing block is a hole.
    now: BTreeMap<u64, Block>,
    /// As it is after the power was lost, but for `unsynced`.
    durable: BTreeMap<u64, Block>,
    /// Changes since the last sync, in order.
    unsynced: Vec<(u64, Option<Block>)>,
}

impl SparseFile {
    /// The block, unless there is a hole.
    pub fn get(&self, block: u64) -> Option<Block> {
        self.now.get(&block).copied()
    }

    /// Writes a block, or makes a hole.
    pub fn set(&mut self, block: u64, content: Option<Block>) {
        apply(&mut self.now, block, content);
        self.unsynced.push((block, content));
    }

    /// How many changes there are that a sync that begins now covers.
    pub fn mark(&self) -> usize {
        self.unsynced.len()
    }

    /// The first `count` changes are durable.
    pub fn sync(&mut self, count: usize) {
        for (block, content) in self.unsynced.drain(..count.min(self.unsynced.len())) {
            apply(&mut self.durable, block, content);
        }
    }

    /// The power is gone: of the unsynced changes some are there, in any order of blocks.
    pub fn lose_power(&mut self, rng: &mut Rng) {
        let mut lost: BTreeMap<u64, bool> = BTreeMap::new();
        for (block, content) in std::mem::take(&mut self.unsynced) {
            // Of one block the changes come in order: once one is lost, those after it are.
            let lost = lost.entry(block).or_insert(false);
            *lost |= rng.bool();
            if !*lost {
                apply(&mut self.durable, block, content);
            }
        }
        self.now = self.durable.clone();
    }
}

fn apply(blocks: &mut BTreeMap<u64, Block>, block: u64, content: Option<Block>) {
    match content {
        Some(content) => blocks.insert(block, content),
        None => blocks.remove(&block),
    };
}

/// The files of a replica's chain: the head, and a snapshot below it.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// Slot 0: the head.
    pub head: SparseFile,
    /// Slot 1: the snapshot.
    pub snapshot: SparseFile,
}

impl Files {
    /// The head.
    pub const HEAD: u8 = 0;
    /// The snapshot.
    pub const SNAPSHOT: u8 = 1;

    /// The file of an index.
    pub fn file(&self, index: FileIndex) -> &SparseFile {
        if index.slot() == usize::from(Files::HEAD) { &self.head } else { &self.snapshot }
    }

    /// What the volume reads as.
    pub fn content(&self, blocks: u64) -> Vec<Block> {
        (0..blocks)
            .map(|block| self.head.get(block).or_else(|| self.snapshot.get(block)).unwrap_or_default())
            .collect()
    }
}

impl ExtentSource for Files {
    type Error = std::convert::Infallible;

    fn data_extents(
        &mut self,
        file: FileIndex,
        range: ByteRange,
        found: &mut dyn FnMut(ByteRange),
    ) -> Result<(), Self::Error> {
        let blocks = range.offset() / BLOCK_BYTES..range.end().div_ceil(BLOCK_BYTES);
        for (block, _) in self.file(file).now.range(blocks) {
            if let Ok(extent) = ByteRange::new(block * BLOCK_BYTES, BLOCK_BYTES) {
                found(extent);
            }
        }
        Ok(())
    }
}
