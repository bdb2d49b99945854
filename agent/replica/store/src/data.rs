//! Reading and writing: the plans, and the same done at once.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use nix::fcntl::{FallocateFlags, fallocate};
use shorthorn_chain::{BlockSource, EdgeBlock, FileIndex, ReadSegment, WritePlan, ZeroStep};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, RangeError};

use crate::error::StoreError;
use crate::files::signed;
use crate::store::{CHUNK_BYTES, Store};

type Result<T> = std::result::Result<T, StoreError>;

impl Store {
    /// Appends the pieces of a read of `range`, in order and without gaps.
    ///
    /// # Errors
    /// The range is outside of the volume, or the file system cannot list its extents.
    pub fn plan_read(&mut self, range: ByteRange, segments: &mut Vec<ReadSegment>) -> Result<()> {
        Ok(self.map.plan_read(range, &mut self.files, segments)?)
    }

    /// Plans a write of `range`. No other write to [`WritePlan::blocks`] may be in flight between
    /// the plan and [`Store::written`].
    ///
    /// # Errors
    /// As [`Store::plan_read`]; [`StoreError::ReadOnly`].
    pub fn plan_write(&mut self, range: ByteRange) -> Result<WritePlan> {
        self.check_writable()?;
        self.check_sums_follow()?;
        Ok(self.map.plan_write(range, &mut self.files)?)
    }

    /// Appends the steps of a discard of `range` to the head: its whole blocks read as zeroes then, and the
    /// rest does not change. A discard may need space, see [`shorthorn_chain::BlockMap::plan_discard`].
    ///
    /// # Errors
    /// As [`Store::plan_write`].
    pub fn plan_discard(&mut self, range: ByteRange, steps: &mut Vec<ZeroStep>) -> Result<()> {
        self.check_writable()?;
        self.check_sums_follow()?;
        Ok(self.map.plan_discard(range, &mut self.files, steps)?)
    }

    /// Appends the steps that make `range` read as zeroes. Holes are made with FALLOC_FL_PUNCH_HOLE |
    /// FALLOC_FL_KEEP_SIZE and nothing else: other kinds of zeroing leave extents that count as holes.
    ///
    /// # Errors
    /// As [`Store::plan_write`].
    pub fn plan_write_zeroes(&mut self, range: ByteRange, steps: &mut Vec<ZeroStep>) -> Result<()> {
        self.check_writable()?;
        self.check_sums_follow()?;
        Ok(self.map.plan_write_zeroes(range, &mut self.files, steps)?)
    }

    /// Completes a write to the head: every block that `range` touches is in it now. Also after
    /// [`ZeroStep::WriteZeroes`] and [`ZeroStep::Merge`].
    pub fn written(&mut self, range: ByteRange) {
        self.map.written(range);
    }

    /// Completes [`ZeroStep::Punch`]: the blocks of `range` are no longer in the head. If the punch is
    /// refused, [`ZeroStep::written_instead`] has the steps to take.
    pub fn punched(&mut self, range: ByteRange) {
        self.map.punched(range);
    }

    /// Handles a failed write or punch: the head's data there is looked up again. Its allocated but unwritten
    /// blocks become holes before the head becomes a snapshot or the directory is closed.
    pub fn write_failed(&mut self, range: ByteRange) {
        self.map.forget(range);
        self.suspect(range);
    }

    /// Reads `buffer.len()` bytes at `offset_bytes`, both multiples of 512.
    ///
    /// # Errors
    /// A range that the volume does not have, or an I/O error.
    pub fn read_at(&mut self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        let range = self.checked(offset_bytes, buffer.len())?;
        let mut rest = buffer;
        let mut segments = Vec::new();
        for chunk in chunks(range) {
            let (part, after) = rest.split_at_mut(length_of(chunk));
            rest = after;
            segments.clear();
            self.plan_read(chunk.grown_to_blocks(), &mut segments)?;
            for segment in &segments {
                self.read_segment(*segment, chunk, part)?;
            }
        }
        Ok(())
    }

    /// Reads the part of a segment of whole blocks that lies in `wanted` into its place in `buffer`.
    fn read_segment(&mut self, segment: ReadSegment, wanted: ByteRange, buffer: &mut [u8]) -> Result<()> {
        let start = segment.range.offset().max(wanted.offset());
        let end = segment.range.end().min(wanted.end());
        let target = &mut buffer[index(start - wanted.offset())..index(end - wanted.offset())];
        let BlockSource::File(file) = segment.source else {
            target.fill(0);
            return Ok(());
        };
        let bytes = &mut self.scratch.as_mut_slice()[..length_of(segment.range)];
        read_blocks(self.files.get(file), bytes, segment.range.offset())
            .map_err(|error| data_error("read", &self.files, file, error))?;
        let skip = index(start - segment.range.offset());
        target.copy_from_slice(&bytes[skip..skip + target.len()]);
        Ok(())
    }

    /// Writes `data` at `offset_bytes`, both multiples of 512; with `fua` it is durable on return.
    ///
    /// # Errors
    /// The range is outside of the volume, or an I/O error; after one, each sector of the range holds the old
    /// data or the new.
    pub fn write_at(&mut self, data: &[u8], offset_bytes: u64, fua: bool) -> Result<()> {
        let range = self.checked(offset_bytes, data.len())?;
        let mut rest = data;
        for chunk in chunks(range) {
            let (part, after) = rest.split_at(length_of(chunk));
            rest = after;
            let plan = self.plan_write(chunk)?;
            let result = self.write_chunk(plan, chunk, part);
            match result {
                Ok(()) => self.written(chunk),
                Err(_) => self.write_failed(chunk),
            }
            result?;
        }
        if fua { self.flush() } else { Ok(()) }
    }

    fn write_chunk(&mut self, plan: WritePlan, chunk: ByteRange, data: &[u8]) -> Result<()> {
        let part = |range: ByteRange| &data[index(range.offset() - chunk.offset())..][..length_of(range)];
        for edge in [plan.first, plan.last].into_iter().flatten() {
            self.merge(edge, |target| target.copy_from_slice(part(edge.part)))?;
        }
        if let Some(whole) = plan.whole {
            let head = self.head();
            let bytes = &mut self.scratch.as_mut_slice()[..length_of(whole)];
            bytes.copy_from_slice(part(whole));
            self.files
                .get(head)
                .write_all_at(bytes, whole.offset())
                .map_err(|error| data_error("write", &self.files, head, error))?;
        }
        Ok(())
    }

    /// Reads a block, lets `change` change the part of it, and writes it to the head.
    fn merge(&mut self, edge: EdgeBlock, change: impl FnOnce(&mut [u8])) -> Result<()> {
        let head = self.head();
        let block = &mut self.scratch.as_mut_slice()[..length_of(edge.block)];
        match edge.source {
            BlockSource::Zero => block.fill(0),
            BlockSource::File(file) => read_blocks(self.files.get(file), block, edge.block.offset())
                .map_err(|error| data_error("read", &self.files, file, error))?,
        }
        let start = index(edge.part.offset() - edge.block.offset());
        change(&mut block[start..start + length_of(edge.part)]);
        self.files
            .get(head)
            .write_all_at(block, edge.block.offset())
            .map_err(|error| data_error("write", &self.files, head, error))
    }

    /// Discards a range: its whole blocks read as zeroes afterwards, and the rest is as it was.
    ///
    /// # Errors
    /// The errors of [`Store::write_at`], also if zeroes over data of lower layers have no space.
    pub fn discard(&mut self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        let range = ByteRange::new(offset_bytes, length_bytes)?;
        let mut steps = Vec::new();
        self.plan_discard(range, &mut steps)?;
        self.zero(&steps)
    }

    /// Makes a range read as zeroes; with `fua` it is durable on return.
    ///
    /// # Errors
    /// As [`Store::write_at`].
    pub fn write_zeroes(&mut self, offset_bytes: u64, length_bytes: u64, fua: bool) -> Result<()> {
        let range = ByteRange::new(offset_bytes, length_bytes)?;
        let mut steps = Vec::new();
        self.plan_write_zeroes(range, &mut steps)?;
        self.zero(&steps)?;
        if fua { self.flush() } else { Ok(()) }
    }

    fn zero(&mut self, steps: &[ZeroStep]) -> Result<()> {
        for step in steps {
            let mut step = *step;
            let mut result = self.zero_step(step);
            if let Err(error) = &result
                && let Some(blocks) = step.written_instead(error.errno())
            {
                step = ZeroStep::WriteZeroes(blocks);
                result = self.zero_step(step);
            }
            match (&result, step) {
                (Ok(()), ZeroStep::Punch(blocks)) => self.punched(blocks),
                (Ok(()), _) => self.written(step.blocks()),
                (Err(_), _) => self.write_failed(step.blocks()),
            }
            result?;
        }
        Ok(())
    }

    fn zero_step(&mut self, step: ZeroStep) -> Result<()> {
        match step {
            ZeroStep::Punch(blocks) => self.punch(blocks),
            ZeroStep::WriteZeroes(blocks) => self.write_zero_blocks(blocks),
            ZeroStep::Merge(edge) => self.merge(edge, |part| part.fill(0)),
        }
    }

    fn punch(&mut self, range: ByteRange) -> Result<()> {
        let how = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let head = self.head();
        fallocate(self.files.get(head).as_fd(), how, signed(range.offset()), signed(range.length()))
            .map_err(|errno| data_error("make a hole in", &self.files, head, errno.into()))
    }

    fn write_zero_blocks(&mut self, range: ByteRange) -> Result<()> {
        let head = self.head();
        for chunk in chunks(range) {
            let zeroes = &mut self.scratch.as_mut_slice()[..length_of(chunk)];
            zeroes.fill(0);
            self.files
                .get(head)
                .write_all_at(zeroes, chunk.offset())
                .map_err(|error| data_error("write", &self.files, head, error))?;
        }
        Ok(())
    }

    /// Makes everything written so far durable. (The layers below the head are durable always.)
    ///
    /// # Errors
    /// [`StoreError::NotDurable`]: what was written since the last successful flush may be lost.
    pub fn flush(&mut self) -> Result<()> {
        let head = self.head();
        let synced = self.files.get(head).sync_data();
        let synced = synced.map_err(|error| data_error("sync", &self.files, head, error).not_durable());
        self.noting_loss(synced)
    }

    fn checked(&self, offset_bytes: u64, length: usize) -> std::result::Result<ByteRange, RangeError> {
        ByteRange::new(offset_bytes, length as u64)?.check(self.size_bytes())
    }
}

/// Reads whole blocks. The part beyond the end of a file reads as zeroes, because a layer may be smaller than
/// the volume. A block can extend beyond the end only if the file ends inside it.
fn read_blocks(file: &File, bytes: &mut [u8], offset: u64) -> std::io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], offset + filled as u64) {
            Ok(0) => {
                bytes[filled..].fill(0);
                return Ok(());
            }
            Ok(count) => filled += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns a range in pieces that fit the scratch buffer and, but for its ends, begin and end with a block.
fn chunks(range: ByteRange) -> impl Iterator<Item = ByteRange> {
    let step = CHUNK_BYTES as u64 - BLOCK_BYTES;
    let mut offset = range.offset();
    std::iter::from_fn(move || {
        let end = (offset / BLOCK_BYTES * BLOCK_BYTES).saturating_add(step).min(range.end());
        let chunk =
            ByteRange::new(offset, end.saturating_sub(offset)).ok().filter(|chunk| !chunk.is_empty())?;
        offset = end;
        Some(chunk)
    })
}

fn data_error(
    action: &'static str,
    files: &crate::files::Files,
    file: FileIndex,
    error: std::io::Error,
) -> StoreError {
    StoreError::io(action, files.name(file).map_or("a layer", |name| name.as_str()), error)
}

/// Returns the length of a range that lies in a buffer.
fn length_of(range: ByteRange) -> usize {
    index(range.length())
}

/// Returns a distance inside a buffer, which always fits.
#[allow(clippy::cast_possible_truncation)]
fn index(distance: u64) -> usize {
    distance as usize
}
