//! Plans: the file operations of a read, a write, a discard or a write of zeroes.
//!
//! Plans are values; nothing here does I/O beyond asking the caller's [`ExtentSource`] about windows that the
//! map does not know yet. The caller executes a plan and then reports to the map with `written`, `punched` or
//! `forget`. Requests that overlap in a 4 KiB block must not be in flight together. A plan is right only
//! until the next change of the same blocks.

use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, Errno, RangeError};
use thiserror::Error;

use crate::block_map::BlockMap;
use crate::extents::{ExtentSource, FileIndex};

/// The place of a block's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockSource {
    /// Nowhere: it reads as zeroes.
    Zero,
    /// In this file, at the same offset as in the volume.
    File(FileIndex),
}

/// A piece of a read. The pieces of one read are in order and cover its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadSegment {
    /// The place of the bytes.
    pub source: BlockSource,
    /// The range of the volume and of the file.
    pub range: ByteRange,
}

/// A block of which only a part changes: read it from `source`, put `part` in, write it to the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EdgeBlock {
    /// The whole block of 4096 bytes.
    pub block: ByteRange,
    /// The bytes inside it that change.
    pub part: ByteRange,
    /// The current place of the other bytes of the block.
    pub source: BlockSource,
}

/// The plan of a write. All data is written to the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WritePlan {
    /// The block in which the write begins, or which holds all of it, if not from its start to its end.
    pub first: Option<EdgeBlock>,
    /// The blocks that the write covers whole.
    pub whole: Option<ByteRange>,
    /// The block in which the write ends, if not at its end.
    pub last: Option<EdgeBlock>,
}

impl WritePlan {
    /// Returns the blocks that the write reads or changes. No other write to them may be in flight.
    #[must_use]
    pub fn blocks(&self) -> ByteRange {
        let ranges = [self.first.map(|edge| edge.block), self.whole, self.last.map(|edge| edge.block)];
        let start = ranges.iter().flatten().map(|range| range.offset()).min().unwrap_or(0);
        let end = ranges.iter().flatten().map(|range| range.end()).max().unwrap_or(0);
        span(start, end)
    }
}

/// A piece of a discard or of a write of zeroes. All of it happens in the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroStep {
    /// Make a hole of these whole blocks; nothing lies below them.
    Punch(ByteRange),
    /// Write zeroes over these whole blocks, because a hole would show the layers below. (An unwritten extent
    /// does not help, because it counts as a hole.)
    WriteZeroes(ByteRange),
    /// Put zeroes into a part of a block.
    Merge(EdgeBlock),
}

impl ZeroStep {
    /// Returns the blocks that change.
    #[must_use]
    pub fn blocks(self) -> ByteRange {
        match self {
            ZeroStep::Punch(blocks) | ZeroStep::WriteZeroes(blocks) => blocks,
            ZeroStep::Merge(edge) => edge.block,
        }
    }

    /// Returns the blocks to write zeroes over because the file system has refused this step with `errno`. It
    /// makes no holes after all, or has no space for the extent that a hole cuts in two. (Allocated blocks
    /// always have the space to be overwritten.)
    #[must_use]
    pub fn written_instead(self, errno: Errno) -> Option<ByteRange> {
        match self {
            ZeroStep::Punch(blocks) if matches!(errno, Errno::NOT_SUPPORTED | Errno::NO_SPACE) => {
                Some(blocks)
            }
            _ => None,
        }
    }
}

/// The reason why nothing was planned.
#[derive(Debug, Error)]
pub enum PlanError<E> {
    /// The volume cannot serve the range.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The extents of a file could not be read.
    #[error("cannot determine the data of the layers")]
    Source(E),
}

impl BlockMap {
    /// Appends the pieces of a read of `range` to `segments`.
    ///
    /// # Errors
    /// [`PlanError`]; `segments` may then hold a part of the plan.
    pub fn plan_read<S: ExtentSource>(
        &mut self,
        range: ByteRange,
        source: &mut S,
        segments: &mut Vec<ReadSegment>,
    ) -> Result<(), PlanError<S::Error>> {
        let range = range.check(self.size_bytes)?;
        if self.is_head_only() {
            segments.push(ReadSegment { source: BlockSource::File(self.head()), range });
            return Ok(());
        }
        let first = segments.len();
        let mut offset = range.offset();
        while offset < range.end() {
            let (owner, run_end) = self.owner_at(offset, source).map_err(PlanError::Source)?;
            let found = owner.map_or(BlockSource::Zero, BlockSource::File);
            let end = run_end.min(range.end());
            match segments[first..].last_mut() {
                Some(last) if last.source == found => last.range = span(last.range.offset(), end),
                _ => segments.push(ReadSegment { source: found, range: span(offset, end) }),
            }
            offset = end;
        }
        Ok(())
    }

    /// Plans a write of `range`.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn plan_write<S: ExtentSource>(
        &mut self,
        range: ByteRange,
        source: &mut S,
    ) -> Result<WritePlan, PlanError<S::Error>> {
        let range = range.check(self.size_bytes)?;
        let (first, whole, last) = split(range);
        Ok(WritePlan {
            first: self.edge(first, source).map_err(PlanError::Source)?,
            whole,
            last: self.edge(last, source).map_err(PlanError::Source)?,
        })
    }

    /// Appends the steps of a discard of `range` to `steps`. Every whole block of it reads as zeroes then,
    /// and a block of which it covers only a part does not change. So all members read the same after it,
    /// with any layers, and whether or not their file systems can punch.
    ///
    /// A discard may need space: zeroes are written over data of lower layers, and if holes cannot be made.
    ///
    /// # Errors
    /// [`PlanError`]; `steps` may then hold a part of the plan.
    pub fn plan_discard<S: ExtentSource>(
        &mut self,
        range: ByteRange,
        source: &mut S,
        steps: &mut Vec<ZeroStep>,
    ) -> Result<(), PlanError<S::Error>> {
        let whole = range.check(self.size_bytes)?.shrunk_to_blocks();
        self.plan_zero_blocks(whole, source, steps)
    }

    /// Appends the steps that make `range` read as zeroes to `steps`.
    ///
    /// # Errors
    /// [`PlanError`]; `steps` may then hold a part of the plan.
    pub fn plan_write_zeroes<S: ExtentSource>(
        &mut self,
        range: ByteRange,
        source: &mut S,
        steps: &mut Vec<ZeroStep>,
    ) -> Result<(), PlanError<S::Error>> {
        let range = range.check(self.size_bytes)?;
        let (first, whole, last) = split(range);
        for part in [first, last] {
            let edge = self.edge(part, source).map_err(PlanError::Source)?;
            steps.extend(edge.filter(|edge| edge.source != BlockSource::Zero).map(ZeroStep::Merge));
        }
        let Some(whole) = whole else { return Ok(()) };
        self.plan_zero_blocks(whole, source, steps)
    }

    /// Appends the steps that make the whole blocks of `blocks` read as zeroes. They are holes if no layer
    /// below has data there and the file system can make holes.
    fn plan_zero_blocks<S: ExtentSource>(
        &mut self,
        blocks: ByteRange,
        source: &mut S,
        steps: &mut Vec<ZeroStep>,
    ) -> Result<(), PlanError<S::Error>> {
        let mut offset = blocks.offset();
        while offset < blocks.end() {
            let (owner, run_end) = self.parent_at(offset, source).map_err(PlanError::Source)?;
            let end = run_end.min(blocks.end());
            let punches = self.can_punch && owner.is_none();
            let step = if punches { ZeroStep::Punch } else { ZeroStep::WriteZeroes };
            push(steps, step(span(offset, end)));
            offset = end;
        }
        Ok(())
    }

    fn edge<S: ExtentSource>(
        &mut self,
        part: Option<ByteRange>,
        source: &mut S,
    ) -> Result<Option<EdgeBlock>, S::Error> {
        let Some(part) = part else { return Ok(None) };
        let block = part.grown_to_blocks();
        let (owner, _) = self.owner_at(block.offset(), source)?;
        Ok(Some(EdgeBlock { block, part, source: owner.map_or(BlockSource::Zero, BlockSource::File) }))
    }
}

/// Returns the part before the first whole block, the whole blocks, and the part after the last one. A range
/// inside one block is all "before".
fn split(range: ByteRange) -> (Option<ByteRange>, Option<ByteRange>, Option<ByteRange>) {
    let first_end = range.offset().next_multiple_of(BLOCK_BYTES).min(range.end());
    let last_start = (range.end() / BLOCK_BYTES * BLOCK_BYTES).max(first_end);
    let part = |start, end| (start < end).then(|| span(start, end));
    (part(range.offset(), first_end), part(first_end, last_start), part(last_start, range.end()))
}

/// Appends `step`, joined with the last one if that is the same and ends at its beginning.
fn push(steps: &mut Vec<ZeroStep>, step: ZeroStep) {
    match (steps.last_mut(), step) {
        (Some(ZeroStep::Punch(last)), ZeroStep::Punch(next))
        | (Some(ZeroStep::WriteZeroes(last)), ZeroStep::WriteZeroes(next))
            if last.end() == next.offset() =>
        {
            *last = span(last.offset(), next.end());
        }
        _ => steps.push(step),
    }
}

fn span(start: u64, end: u64) -> ByteRange {
    ByteRange::new(start, end - start).expect("the end of a span does not overflow")
}
