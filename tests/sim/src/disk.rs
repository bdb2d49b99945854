//! A disk that keeps synced data, and loses or reorders the rest in a power loss.

use std::collections::BTreeMap;

use fastrand::Rng;
use shorthorn_chain::{ExtentSource, FileIndex};
use shorthorn_checker::{Id, ROT, ROT_AGAIN, has_rot, is_rot};
use shorthorn_types::ByteRange;
use shorthorn_types::limits::{BLOCK_BYTES, SECTOR_BYTES};

use crate::script::Layout;

/// Sectors of a block.
pub const BLOCK_SECTORS: usize = (BLOCK_BYTES / SECTOR_BYTES) as usize;

/// A block: for each sector the write that it shows.
pub type Block = [Id; BLOCK_SECTORS];

/// Sectors of a file; holes have no entry.
#[derive(Clone, Debug, Default)]
pub struct SparseFile {
    /// The content as the process reads it.
    now: Blocks,
    /// The content after a power loss, except for `unsynced`.
    durable: Blocks,
    /// Changes since the last sync, in order.
    unsynced: Vec<(u64, Option<Block>)>,
    /// The number of changes before the sync.
    synced: usize,
}

/// The placeholder for a block whose change is durable before earlier ones.
const PASSED_OVER: u64 = u64::MAX;

/// The content of a file, block by block; a missing one is a hole.
#[derive(Clone, Debug, Default)]
struct Blocks(Vec<Option<Block>>);

impl Blocks {
    fn get(&self, block: u64) -> Option<Block> {
        self.0.get(index(block)).copied().flatten()
    }

    fn set(&mut self, block: u64, content: Option<Block>) {
        let at = index(block);
        if self.0.len() <= at {
            self.0.resize(at + 1, None);
        }
        self.0[at] = content;
    }
}

fn index(block: u64) -> usize {
    usize::try_from(block).unwrap_or(usize::MAX)
}

impl SparseFile {
    /// Returns the block, unless it is a hole.
    pub fn get(&self, block: u64) -> Option<Block> {
        self.now.get(block)
    }

    /// Returns true if there are holes only.
    pub fn is_empty(&self) -> bool {
        self.now.0.iter().all(Option::is_none)
    }

    /// Writes a block, or makes a hole.
    pub fn set(&mut self, block: u64, content: Option<Block>) {
        self.now.set(block, content);
        self.unsynced.push((block, content));
    }

    /// Replaces a block of the disk.
    pub fn replace(&mut self, block: u64, content: Option<Block>) {
        self.now.set(block, content);
        self.replace_durable(block, content);
    }

    /// Replaces the content of a block after a power loss.
    fn replace_durable(&mut self, block: u64, content: Option<Block>) {
        self.durable.set(block, content);
        // Blocks that rot was merged into are not written any more.
        let is_rotten = |changed: &Option<Block>| changed.is_some_and(|sectors| has_rot(&sectors));
        let changes = self.unsynced.iter_mut().filter(|(of, changed)| *of == block && is_rotten(changed));
        changes.for_each(|(_, changed)| *changed = content);
    }

    /// Returns true if all changes of the block are durable.
    fn is_final(&self, block: u64) -> bool {
        self.unsynced.iter().all(|(changed, _)| *changed != block && *changed != PASSED_OVER)
    }

    /// Returns the number of changes so far: a sync that begins now covers them.
    pub fn mark(&self) -> usize {
        self.synced + self.unsynced.len()
    }

    /// Makes all changes up to `mark` durable.
    pub fn sync(&mut self, mark: usize) {
        let count = mark.saturating_sub(self.synced).min(self.unsynced.len());
        self.synced += count;
        for (block, content) in self.unsynced.drain(..count) {
            if block != PASSED_OVER {
                self.durable.set(block, content);
            }
        }
    }

    /// Makes exactly the changes of these blocks durable.
    pub fn sync_blocks(&mut self, blocks: &[u64]) {
        for (block, content) in self.unsynced.iter_mut().filter(|(block, _)| blocks.contains(block)) {
            self.durable.set(*block, *content);
            *block = PASSED_OVER;
        }
    }

    /// Loses the power: some of the unsynced changes stay, in any order of blocks.
    pub fn lose_power(&mut self, rng: &mut Rng) {
        let mut lost: BTreeMap<u64, bool> = BTreeMap::new();
        let unsynced = std::mem::take(&mut self.unsynced);
        self.synced += unsynced.len();
        for (block, content) in unsynced.into_iter().filter(|(block, _)| *block != PASSED_OVER) {
            // Of one block the changes come in order: once one is lost, those after it are.
            let lost = lost.entry(block).or_insert(false);
            *lost |= rng.bool();
            if !*lost {
                self.durable.set(block, content);
            }
        }
        self.now = self.durable.clone();
    }
}

/// The files of a replica's chain: the head, and a snapshot below it.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// Slot 0: the head.
    pub head: SparseFile,
    /// Slot 1: the snapshot.
    pub snapshot: SparseFile,
    /// Blocks that the disk has changed by itself, and that a reader sees.
    pub rot: BTreeMap<u64, Rotten>,
    /// Blocks of the snapshot that the disk has lost, with their data, and that requests have made zeroes of.
    covered: BTreeMap<u64, Block>,
    /// Blocks of the head that a repair gives their former data, with the rot. A loss of power may bring that
    /// back.
    repaired: BTreeMap<u64, (Rotten, Block)>,
    /// The number of blocks whose content from before their rot was restored.
    heals: u64,
    /// True if the head has got a block that was owed to it.
    has_grown: bool,
}

/// A block that the disk has changed by itself.
#[derive(Clone, Copy, Debug)]
pub struct Rotten {
    /// The content before.
    was: Block,
    /// True if the block is in the snapshot, else it is in the head.
    is_below: bool,
    /// True if no member had the block when the replica was made, which its disk records.
    is_lost: bool,
    /// True if an engine has got the answer that the block holds rot.
    is_reported: bool,
    /// The data that an engine has decided for, if it could not be written: that of another member.
    owed: Option<Block>,
    /// True if a repair shows the data from before the rot, and that is not the right one. A reader sees
    /// [`ROT`] with the sum of that data.
    shows_former: bool,
    /// True if the replica process has met the rot, or other rot in the same page of sums.
    is_met: bool,
    /// True if a request has merged a part of the block with the rot. The sum beside it is that of the data
    /// from before the request.
    is_merged: bool,
}

impl Rotten {
    fn new(was: Block, is_below: bool) -> Rotten {
        let (is_lost, is_reported, owed, shows_former) = (false, false, None, false);
        Rotten { was, is_below, is_lost, is_reported, owed, shows_former, is_met: false, is_merged: false }
    }

    /// Returns the right data.
    fn right(&self) -> Block {
        self.owed.unwrap_or(self.was)
    }
}

impl Files {
    /// The head.
    pub const HEAD: u8 = 0;
    /// The snapshot.
    pub const SNAPSHOT: u8 = 1;

    /// Returns the same data in another layout.
    pub fn laid_out(mut self, layout: Layout, blocks: u64) -> Files {
        for block in 0..blocks {
            let below = self.snapshot.get(block);
            if layout.is_flat && below.is_some() {
                self.head.set(block, below);
            } else if layout.has_zeroes && below.is_none() && block % 3 == 0 {
                self.head.set(block, Some(Block::default()));
            }
        }
        if layout.is_flat {
            self.snapshot = SparseFile::default();
        }
        self.head.sync(usize::MAX);
        self
    }

    /// Changes a block by rot, in the file where a reader sees it; if it `vanishes`, a hole takes its place.
    /// Returns false if the block has no data, or the rot would not stay.
    pub fn rot(&mut self, block: u64, vanishes: bool) -> bool {
        let is_below = self.head.get(block).is_none();
        let found = if is_below { self.snapshot.get(block) } else { self.head.get(block) };
        let Some(was) = found.filter(|_| self.head.is_final(block)) else {
            return false;
        };
        let below = self.snapshot.get(block).filter(|_| !is_below).unwrap_or_default();
        if self.rot.contains_key(&block) || vanishes && below == was {
            return false;
        }
        let content = Some([ROT; BLOCK_SECTORS]).filter(|_| !vanishes);
        self.file_with(is_below).replace(block, content);
        self.rot.insert(block, Rotten::new(was, is_below));
        true
    }

    /// Changes a block that holds rot once more, so that it shows none of its former sectors. Returns false
    /// if it holds none, or the new rot would not stay.
    pub fn rot_again(&mut self, block: u64) -> bool {
        let Some(rotten) = self.rot.get(&block).copied() else { return false };
        let stays = self.head.is_final(block) && !rotten.is_lost && !rotten.shows_former;
        let found = self.file_with(rotten.is_below).get(block);
        let Some(found) = found.filter(|_| stays) else { return false };
        let content = if found.contains(&ROT_AGAIN) { ROT } else { ROT_AGAIN };
        self.file_with(rotten.is_below).replace(block, Some([content; BLOCK_SECTORS]));
        true
    }

    /// Returns the blocks that have vanished from the head.
    pub fn vanished_from_head(&self) -> impl Iterator<Item = u64> {
        let in_head = self.rot.iter().filter(|(_, rotten)| !rotten.is_below);
        in_head.map(|(block, _)| *block).filter(|block| self.has_vanished(*block))
    }

    /// Records that the replica has met the rot of the block.
    pub fn meet(&mut self, block: u64) {
        if let Some(rotten) = self.rot.get_mut(&block) {
            rotten.is_met = true;
        }
    }

    /// Records that the process does not know any rot.
    pub fn meet_none(&mut self) {
        self.rot.values_mut().for_each(|rotten| rotten.is_met = false);
    }

    /// Returns true if the replica has met the rot of the block.
    pub fn is_met(&self, block: u64) -> bool {
        self.rot.get(&block).is_some_and(|rotten| rotten.is_met)
    }

    /// Returns true if a request has merged a part of the block with its rot.
    pub fn is_merged_with_rot(&self, block: u64) -> bool {
        self.rot.get(&block).is_some_and(|rotten| rotten.is_merged)
    }

    /// Returns true if a hole is in the place of the block.
    pub fn has_vanished(&self, block: u64) -> bool {
        let file = |is_below: bool| if is_below { &self.snapshot } else { &self.head };
        self.rot.get(&block).is_some_and(|rotten| file(rotten.is_below).get(block).is_none())
    }

    /// Returns the blocks of the snapshot that the disk has lost, and no request has covered.
    pub fn vanished(&self) -> impl Iterator<Item = u64> {
        self.rot_below().map(|(block, _)| block).filter(|block| self.has_vanished(*block))
    }

    /// A request has made a hole over the block, or given it other data. If the disk has lost the block of
    /// the snapshot, the hole is all that it needed to make.
    pub fn cover(&mut self, block: u64) {
        let has_vanished = self.has_vanished(block);
        if let Some(rotten) = self.rot.remove(&block).filter(|rotten| rotten.is_below && has_vanished) {
            self.covered.insert(block, rotten.was);
        }
    }

    /// Returns the blocks that requests have made zeroes of, although the disk had lost them.
    pub fn covered(&self) -> impl Iterator<Item = u64> {
        self.covered.keys().copied()
    }

    /// Returns the data of a block of the snapshot that the disk has lost.
    pub fn vanished_below(&self, block: u64) -> Option<Block> {
        let rotten = self.rot.get(&block).filter(|rotten| rotten.is_below && self.has_vanished(block));
        self.covered.get(&block).copied().or_else(|| rotten.map(|rotten| rotten.was))
    }

    /// Writes zeroes to the head in a block that the disk has lost. If an engine has decided for other data,
    /// it is as rotten as before.
    pub fn keep_zeroes(&mut self, block: u64) {
        match self.rot.get_mut(&block) {
            Some(rotten) => {
                rotten.is_below = false;
                let was = rotten.was;
                self.head.replace(block, Some([ROT; BLOCK_SECTORS]));
                self.snapshot.replace(block, Some(was));
            }
            None => self.head.set(block, Some(Block::default())),
        }
        self.head.sync(usize::MAX);
        self.has_grown = true;
    }

    /// Lets no repair uncover a block: a full copy does not find blocks of a snapshot that its source lacks.
    pub fn copy_covered(&mut self) {
        for block in std::mem::take(&mut self.covered).into_keys() {
            if self.head.get(block).is_none() {
                self.head.replace(block, Some(Block::default()));
                self.has_grown = true;
            }
        }
    }

    fn file_with(&mut self, is_below: bool) -> &mut SparseFile {
        if is_below { &mut self.snapshot } else { &mut self.head }
    }

    /// Returns the rotten blocks of the snapshot, and their former data.
    pub fn rot_below(&self) -> impl Iterator<Item = (u64, Block)> {
        self.rot.iter().filter(|(_, rotten)| rotten.is_below).map(|(block, rotten)| (*block, rotten.was))
    }

    /// Copies rot to a block of the snapshot, because no member has the former data.
    pub fn is_lost(&mut self, block: u64, was: Block) {
        self.snapshot.replace(block, Some([ROT; BLOCK_SECTORS]));
        self.rot.insert(block, Rotten { is_lost: true, ..Rotten::new(was, true) });
    }

    /// Returns the number of blocks that were healed so far.
    pub const fn heals(&self) -> u64 {
        self.heals
    }

    /// Restores the right content of a block with rot.
    pub fn heal(&mut self, block: u64) {
        let Some(rotten) = self.rot.remove(&block) else { return };
        self.heals += 1;
        self.file_with(rotten.is_below).replace(block, Some(rotten.was));
        if rotten.owed.is_some() {
            self.head.replace(block, rotten.owed);
            self.has_grown = true;
        }
    }

    /// Returns true if the head has got a block by [`Files::heal`] since the last call.
    pub fn has_grown(&mut self) -> bool {
        std::mem::take(&mut self.has_grown)
    }

    /// Repairs a block of the snapshot. If the engine has decided for other data, it is as rotten as before.
    pub fn repair_below(&mut self, block: u64) {
        if let Some(was) = self.covered.remove(&block) {
            self.snapshot.replace(block, Some(was));
            self.has_grown = true;
        }
        match self.rot.get_mut(&block) {
            Some(rotten) if !rotten.is_below => {}
            Some(rotten) if rotten.owed.is_some() => rotten.shows_former = true,
            _ => self.heal(block),
        }
    }

    /// Returns the data from before the rot if a reader sees that.
    pub fn shown_former(&self, block: u64) -> Option<Block> {
        self.rot.get(&block).filter(|rotten| rotten.shows_former).map(|rotten| rotten.was)
    }

    /// Records that an engine gets the answer that the block holds rot.
    pub fn report(&mut self, block: u64) {
        if let Some(rotten) = self.rot.get_mut(&block) {
            rotten.is_reported = true;
        }
    }

    /// An engine has decided for this data of a block of which it knows that it holds rot, and it was not
    /// written.
    pub fn owe(&mut self, block: u64, data: Block) {
        if let Some(rotten) = self.rot.get_mut(&block).filter(|rotten| rotten.is_reported) {
            rotten.owed = Some(data).filter(|data| *data != rotten.was);
            rotten.is_reported = false;
        }
        if self.rot.get(&block).is_some_and(|rotten| rotten.owed.is_none() && rotten.shows_former) {
            self.heal(block);
        }
    }

    /// A request has made `range` zeroes, and has changed no part of the blocks that have vanished.
    pub fn owe_zeroes(&mut self, range: ByteRange) {
        let blocks = range.offset() / BLOCK_BYTES..range.end().div_ceil(BLOCK_BYTES);
        let vanished: Vec<u64> = blocks.filter(|block| self.has_vanished(*block)).collect();
        for block in vanished {
            let Some(rotten) = self.rot.get_mut(&block) else { continue };
            let mut right = rotten.right();
            for (sector, id) in (block * BLOCK_SECTORS as u64..).zip(&mut right) {
                if sector * SECTOR_BYTES >= range.offset() && (sector + 1) * SECTOR_BYTES <= range.end() {
                    *id = 0;
                }
            }
            rotten.owed = Some(right).filter(|right| *right != rotten.was);
        }
    }

    /// Overwrites a block with `content`, which may have rot of it. The disk holds that, or after a loss of
    /// power the data from before the rot. Blocks that rot was merged into stay rotten. A request may have
    /// read rot before it was repaired; `is_lost` is true if the disk records the block as lost then.
    pub fn overwrite_rot(&mut self, block: u64, content: &Block, is_lost: bool) {
        let known = self.rot.get(&block).copied();
        let is_reported = known.is_some_and(|rotten| rotten.is_reported);
        let (was, is_lost) = match known {
            Some(rotten @ Rotten { is_below: true, .. }) => {
                // From now on it lies below the head.
                self.rot.remove(&block);
                self.heals += 1;
                self.snapshot.replace(block, Some(rotten.was));
                if rotten.owed.is_some() {
                    // If a loss of power undoes the request, the head has what the snapshot lacks.
                    self.head.replace_durable(block, rotten.owed);
                }
                (rotten.right(), rotten.is_lost)
            }
            Some(rotten) => {
                if !self.stays_until_sync(block, rotten, content) {
                    self.head.replace_durable(block, Some(rotten.right()));
                }
                self.rot.remove(&block);
                (rotten.right(), rotten.is_lost)
            }
            None => {
                let found = self.head.get(block).or_else(|| self.snapshot.get(block));
                (found.unwrap_or_default(), is_lost)
            }
        };
        if has_rot(content) {
            let mut merged = *content;
            let rotten = merged.iter_mut().zip(was).filter(|(sector, _)| is_rot(**sector));
            rotten.for_each(|(sector, was)| *sector = was);
            self.rot.insert(
                block,
                Rotten { is_lost, is_reported, is_merged: true, ..Rotten::new(merged, false) },
            );
        }
    }

    /// Returns true if `content` repairs a block of the head. Its rot then stays on the disk until a sync.
    fn stays_until_sync(&mut self, block: u64, rotten: Rotten, content: &Block) -> bool {
        let is_plain = rotten.owed.is_none() && !rotten.is_lost && !rotten.is_merged && !rotten.shows_former;
        let found = self.head.get(block).filter(|_| is_plain && self.head.is_final(block));
        let Some(found) = found.filter(|_| *content == rotten.was) else { return false };
        self.repaired.insert(block, (Rotten::new(rotten.was, false), found));
        true
    }

    /// Loses the power, and returns the blocks in which repaired rot is back.
    pub fn lose_power(&mut self, rng: &mut Rng) -> Vec<u64> {
        self.head.lose_power(rng);
        let mut back = Vec::new();
        for (block, (rotten, found)) in std::mem::take(&mut self.repaired) {
            if self.head.get(block) == Some(found) && !self.rot.contains_key(&block) {
                self.rot.insert(block, rotten);
                back.push(block);
            }
        }
        back
    }

    /// Heals all blocks, with the lost ones if these are given up too.
    pub fn heal_all(&mut self, with_lost: bool) {
        let is_healed = |(_, rotten): &(&u64, &Rotten)| with_lost || !rotten.is_lost;
        let rotten: Vec<u64> = self.rot.iter().filter(is_healed).map(|(block, _)| *block).collect();
        rotten.into_iter().for_each(|block| self.heal(block));
    }

    /// Returns the lost blocks that hold rot.
    pub fn lost(&self) -> impl Iterator<Item = u64> {
        self.rot.iter().filter(|(_, rotten)| rotten.is_lost).map(|(block, _)| *block)
    }

    /// Returns true if the block was lost when the replica was made, and holds rot.
    pub fn has_lost(&self, block: u64) -> bool {
        self.rot.get(&block).is_some_and(|rotten| rotten.is_lost)
    }

    /// Drops the head, with its rot.
    pub fn drop_head(&mut self) {
        self.head = SparseFile::default();
        self.repaired.clear();
        self.rot.retain(|_, rotten| rotten.is_below);
    }

    /// Returns the head or the snapshot.
    pub fn file(&self, index: FileIndex) -> &SparseFile {
        if index.slot() == usize::from(Files::HEAD) { &self.head } else { &self.snapshot }
    }

    /// Returns true if the file has the block.
    pub fn holds(&self, block: u64) -> bool {
        self.head.get(block).is_some() || self.snapshot.get(block).is_some()
    }

    /// Returns the content of the volume.
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
        for block in blocks.filter(|block| self.file(file).get(*block).is_some()) {
            if let Ok(extent) = ByteRange::new(block * BLOCK_BYTES, BLOCK_BYTES) {
                found(extent);
            }
        }
        Ok(())
    }
}
