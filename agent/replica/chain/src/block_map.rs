//! The block map: the file of the chain that holds each block of the volume.
//!
//! The volume is cut into windows of 16 MiB. For each window the map keeps two things, both filled when first
//! needed. For the head, which changes with every write, it has one bit per block. For the layers below,
//! which never change, it has the topmost layer that holds each block. Most windows are uniform and take no
//! memory beyond their entry. The memory of the others is bounded: beyond the limit, windows that were not
//! used lately are forgotten, and probed again when needed.
//!
//! The files themselves are the truth. Forgetting a window is therefore always safe, and the map does so
//! whenever an operation may have failed.

use std::mem::size_of;
use std::ops::Range;

use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;

use crate::extents::{ExtentSource, FileIndex};
use crate::limits::{WINDOW_BLOCKS, WINDOW_BYTES, memory_limit_bytes};
use crate::window::{Bits, BlockOwner, HeadBlocks, ParentBlocks, Window, change_bits};

/// The least that windows may take together, so that a few can always be known at once.
const HEAP_FLOOR_BYTES: usize = 64 << 10;

/// The map of one chain of open files.
#[derive(Debug)]
pub struct BlockMap {
    pub(crate) size_bytes: u64,
    /// The head first, the oldest layer last.
    chain: Vec<FileIndex>,
    windows: Vec<Window>,
    heap_bytes: usize,
    heap_limit_bytes: usize,
    /// The lowered limit in bytes, or the largest value if the limit was not lowered.
    lowered_limit_bytes: usize,
    /// The hand of the clock that chooses the window to forget.
    hand: usize,
    scratch: Box<[BlockOwner; WINDOW_BLOCKS]>,
    pub(crate) can_punch: bool,
}

/// The memory of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapUsage {
    /// The bytes in use.
    pub used_bytes: usize,
    /// The maximum of the bytes in use.
    pub limit_bytes: usize,
}

impl BlockMap {
    /// Creates a map without any knowledge. `chain` is the head first and has at least one file; `can_punch`
    /// says whether holes can be made in the head.
    ///
    /// # Panics
    /// `chain` is empty.
    #[must_use]
    pub fn new(size_bytes: u64, chain: Vec<FileIndex>, can_punch: bool) -> BlockMap {
        assert!(!chain.is_empty(), "a chain has a head");
        let mut map = BlockMap {
            size_bytes,
            chain,
            windows: Vec::new(),
            heap_bytes: 0,
            heap_limit_bytes: 0,
            lowered_limit_bytes: usize::MAX,
            hand: 0,
            scratch: Box::new([None; WINDOW_BLOCKS]),
            can_punch,
        };
        map.set_size(size_bytes);
        map
    }

    /// Returns the index of the file that receives all writes.
    #[must_use]
    pub fn head(&self) -> FileIndex {
        self.chain[0]
    }

    /// Returns true if the head has no layer below. Its holes then read as zeroes, and plans need no
    /// knowledge of them.
    #[must_use]
    pub fn is_head_only(&self) -> bool {
        self.chain.len() == 1
    }

    /// Returns the memory in use.
    #[must_use]
    pub fn usage(&self) -> MapUsage {
        let fixed = self.fixed_bytes();
        MapUsage { used_bytes: fixed + self.heap_bytes, limit_bytes: fixed + self.heap_limit_bytes }
    }

    /// Lowers the memory limit of all windows below the [`memory_limit_bytes`] of
    /// the size. The window in use is always kept.
    pub fn lower_limit(&mut self, heap_bytes: usize) {
        self.lowered_limit_bytes = heap_bytes;
        self.heap_limit_bytes = self.heap_limit_bytes.min(heap_bytes);
        self.make_room(None);
    }

    /// Puts a new, empty head above the old one.
    pub fn push_head(&mut self, head: FileIndex) {
        let old_head = self.head();
        let was_head_only = self.is_head_only();
        for window in &mut self.windows {
            if was_head_only {
                // Nothing was kept about the head while it was alone.
                *window = Window { head: HeadBlocks::Absent, ..Window::default() };
            } else {
                window.push_head(old_head, &mut self.scratch);
            }
        }
        self.chain.insert(0, head);
        self.heap_bytes = self.windows.iter().map(Window::heap_bytes).sum();
        self.make_room(None);
    }

    /// Grows the map to `size_bytes`. No layer has data in the new part.
    pub fn grow(&mut self, size_bytes: u64) {
        debug_assert!(size_bytes >= self.size_bytes, "a volume only grows");
        self.set_size(size_bytes);
        self.make_room(None);
    }

    /// Folds the layer `child` into its parent: the data of `child` belongs to `parent` now, and `child`
    /// leaves the chain. Neither is the head.
    pub fn fold(&mut self, child: FileIndex, parent: FileIndex) {
        debug_assert!(child != self.head() && parent != self.head());
        self.chain.retain(|file| *file != child);
        for window in &mut self.windows {
            window.parents.replace(child, parent);
        }
    }

    /// Records that the head now holds every block that `range` touches.
    pub fn written(&mut self, range: ByteRange) {
        if self.is_head_only() {
            return;
        }
        self.change_head(range.grown_to_blocks(), HeadBlocks::insert);
    }

    /// Records that the head no longer holds the whole blocks inside `range`.
    pub fn punched(&mut self, range: ByteRange) {
        if self.is_head_only() {
            return;
        }
        self.change_head(range.shrunk_to_blocks(), HeadBlocks::remove);
    }

    /// Forgets the head's data in `range`: the range is probed again before the next use.
    pub fn forget(&mut self, range: ByteRange) {
        if range.is_empty() {
            return;
        }
        for index in window_of(range.offset())..=window_of(range.end() - 1) {
            if let Some(window) = self.windows.get_mut(index) {
                self.heap_bytes -= window.head.heap_bytes();
                window.head = HeadBlocks::Unknown;
            }
        }
    }

    fn change_head(&mut self, range: ByteRange, change: fn(&mut HeadBlocks, Range<usize>)) {
        let mut offset = range.offset();
        while offset < range.end() {
            let index = window_of(offset);
            let end = range.end().min((index as u64 + 1) * WINDOW_BYTES);
            let Some(window) = self.windows.get_mut(index) else { return };
            let before = window.head.heap_bytes();
            change(&mut window.head, block_in_window(offset)..block_in_window(end - 1) + 1);
            self.heap_bytes = self.heap_bytes + window.head.heap_bytes() - before;
            self.make_room(Some(index));
            offset = end;
        }
    }

    /// Returns the file that holds the block at `offset`, which may be the head, and the end of the run of
    /// blocks with that owner. The end is at most that of the window.
    pub(crate) fn owner_at<S: ExtentSource>(
        &mut self,
        offset: u64,
        source: &mut S,
    ) -> Result<(BlockOwner, u64), S::Error> {
        let (index, block) = (window_of(offset), block_in_window(offset));
        if self.is_head_only() {
            return Ok((Some(self.head()), offset_of(index, WINDOW_BLOCKS)));
        }
        let (present, head_end) = self.run_in_window(
            index,
            source,
            |window| window.head.run_at(block),
            |map, source| {
                map.windows[index].head = map.probe_head(index, source)?;
                Ok(())
            },
        )?;
        if present {
            return Ok((Some(self.head()), offset_of(index, head_end)));
        }
        let (owner, parents_end) = self.parent_run(index, block, source)?;
        Ok((owner, offset_of(index, head_end.min(parents_end))))
    }

    /// Returns the layer below the head that holds the block at `offset`, and the end of the run of blocks
    /// with that owner. The end is at most that of the window.
    pub(crate) fn parent_at<S: ExtentSource>(
        &mut self,
        offset: u64,
        source: &mut S,
    ) -> Result<(BlockOwner, u64), S::Error> {
        let (index, block) = (window_of(offset), block_in_window(offset));
        if self.is_head_only() {
            return Ok((None, offset_of(index, WINDOW_BLOCKS)));
        }
        let (owner, end) = self.parent_run(index, block, source)?;
        Ok((owner, offset_of(index, end)))
    }

    /// Returns the run at `block` of the layers below the head: see [`BlockMap::run_in_window`].
    fn parent_run<S: ExtentSource>(
        &mut self,
        index: usize,
        block: usize,
        source: &mut S,
    ) -> Result<(BlockOwner, usize), S::Error> {
        self.run_in_window(
            index,
            source,
            |window| window.parents.run_at(block),
            |map, source| {
                map.windows[index].parents = map.probe_parents(index, source)?;
                Ok(())
            },
        )
    }

    /// Returns the run that `known` finds in a window. If the window does not know it, `load` queries the
    /// files and puts the answer into the window.
    fn run_in_window<S: ExtentSource, R>(
        &mut self,
        index: usize,
        source: &mut S,
        known: impl Fn(&Window) -> Option<R>,
        load: impl Fn(&mut BlockMap, &mut S) -> Result<(), S::Error>,
    ) -> Result<R, S::Error> {
        self.windows[index].referenced = true;
        loop {
            if let Some(run) = known(&self.windows[index]) {
                return Ok(run);
            }
            let before = self.windows[index].heap_bytes();
            load(self, source)?;
            self.heap_bytes += self.windows[index].heap_bytes() - before;
            self.make_room(Some(index));
        }
    }

    fn probe_head<S: ExtentSource>(&mut self, index: usize, source: &mut S) -> Result<HeadBlocks, S::Error> {
        let mut bits: Bits = [0; WINDOW_BLOCKS / 64];
        source.data_extents(self.head(), self.window_range(index), &mut |extent| {
            if let Some(blocks) = blocks_touched(index, extent) {
                change_bits(&mut bits, blocks, true);
            }
        })?;
        Ok(HeadBlocks::from_bits(&bits))
    }

    fn probe_parents<S: ExtentSource>(
        &mut self,
        index: usize,
        source: &mut S,
    ) -> Result<ParentBlocks, S::Error> {
        let range = self.window_range(index);
        let mut missing = range.length() / BLOCK_BYTES;
        let owners = &mut self.scratch;
        owners.fill(None);
        for &file in &self.chain[1..] {
            source.data_extents(file, range, &mut |extent| {
                let Some(blocks) = blocks_touched(index, extent) else { return };
                for owner in owners[blocks].iter_mut().filter(|owner| owner.is_none()) {
                    *owner = Some(file);
                    missing -= 1;
                }
            })?;
            if missing == 0 {
                break;
            }
        }
        Ok(ParentBlocks::compress(owners))
    }

    fn window_range(&self, index: usize) -> ByteRange {
        let start = index as u64 * WINDOW_BYTES;
        let length = WINDOW_BYTES.min(self.size_bytes - start);
        ByteRange::new(start, length).expect("a window lies inside the volume")
    }

    fn set_size(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes;
        let windows =
            usize::try_from(size_bytes.div_ceil(WINDOW_BYTES)).expect("the map fits the address space");
        self.windows.resize_with(windows, Window::default);
        let limit = usize::try_from(memory_limit_bytes(size_bytes)).unwrap_or(usize::MAX);
        self.heap_limit_bytes =
            limit.saturating_sub(self.fixed_bytes()).max(HEAP_FLOOR_BYTES).min(self.lowered_limit_bytes);
    }

    fn fixed_bytes(&self) -> usize {
        self.windows.len() * size_of::<Window>() + size_of::<[BlockOwner; WINDOW_BLOCKS]>()
    }

    /// Forgets windows until the memory is within its limit. The hand of a clock passes over `keep` and the
    /// windows used since its last round, and takes the rest.
    fn make_room(&mut self, keep: Option<usize>) {
        // Twice round clears every mark and then takes everything; more would never help.
        let mut turns = 2 * self.windows.len();
        while self.heap_bytes > self.heap_limit_bytes && turns > 0 {
            turns -= 1;
            let index = self.hand;
            self.hand = (self.hand + 1) % self.windows.len();
            let window = &mut self.windows[index];
            if Some(index) == keep || std::mem::take(&mut window.referenced) {
                continue;
            }
            self.heap_bytes -= window.heap_bytes();
            window.evict();
        }
    }
}

fn window_of(offset: u64) -> usize {
    usize::try_from(offset / WINDOW_BYTES).expect("the map fits the address space")
}

// The remainder is less than WINDOW_BLOCKS.
#[allow(clippy::cast_possible_truncation)]
fn block_in_window(offset: u64) -> usize {
    (offset % WINDOW_BYTES / BLOCK_BYTES) as usize
}

fn offset_of(window: usize, block: usize) -> u64 {
    window as u64 * WINDOW_BYTES + block as u64 * BLOCK_BYTES
}

/// Returns the blocks of the window that `extent` touches.
fn blocks_touched(window: usize, extent: ByteRange) -> Option<Range<usize>> {
    let start = extent.offset().max(offset_of(window, 0));
    let end = extent.end().min(offset_of(window, WINDOW_BLOCKS));
    (start < end).then(|| block_in_window(start)..block_in_window(end - 1) + 1)
}
