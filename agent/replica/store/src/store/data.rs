//! Reading and writing: the plans, and the same done at once.

use shorthorn_chain::{FileIndex, ReadSegment, WritePlan, ZeroStep};
use shorthorn_types::{ByteRange, RangeError};

use crate::error::StoreError;
use crate::image::{chunks, length_of};
use crate::store::Store;

type Result<T> = std::result::Result<T, StoreError>;

impl Store {
    /// Appends the pieces of a read of `range`, in order and without gaps.
    ///
    /// # Errors
    /// The range is outside of the volume, or the file system cannot list its extents.
    pub fn plan_read(&mut self, range: ByteRange, segments: &mut Vec<ReadSegment>) -> Result<()> {
        self.image.plan_read(range, segments)
    }

    /// Plans a write of `range`. No other write to [`WritePlan::blocks`] may be in flight between
    /// the plan and [`Store::written`].
    ///
    /// # Errors
    /// As [`Store::plan_read`]; [`StoreError::ReadOnly`].
    pub fn plan_write(&mut self, range: ByteRange) -> Result<WritePlan> {
        self.medium.check_writable()?;
        self.check_sums_follow()?;
        self.image.plan_write(range)
    }

    /// Appends the steps of a discard of `range` to the head: its whole blocks read as zeroes then, and the
    /// rest does not change. A discard may need space, see [`shorthorn_chain::BlockMap::plan_discard`].
    ///
    /// # Errors
    /// As [`Store::plan_write`].
    pub fn plan_discard(&mut self, range: ByteRange, steps: &mut Vec<ZeroStep>) -> Result<()> {
        self.medium.check_writable()?;
        self.check_sums_follow()?;
        self.image.plan_discard(range, steps)
    }

    /// Appends the steps that make `range` read as zeroes. Holes are made with FALLOC_FL_PUNCH_HOLE |
    /// FALLOC_FL_KEEP_SIZE and nothing else: other kinds of zeroing leave extents that count as holes.
    ///
    /// # Errors
    /// As [`Store::plan_write`].
    pub fn plan_write_zeroes(&mut self, range: ByteRange, steps: &mut Vec<ZeroStep>) -> Result<()> {
        self.medium.check_writable()?;
        self.check_sums_follow()?;
        self.image.plan_write_zeroes(range, steps)
    }

    /// Completes a write to the head: every block that `range` touches is in it now. Also after
    /// [`ZeroStep::WriteZeroes`] and [`ZeroStep::Merge`].
    pub fn written(&mut self, range: ByteRange) {
        self.image.written(range);
    }

    /// Completes [`ZeroStep::Punch`]: the blocks of `range` are no longer in the head. If the punch is
    /// refused, [`ZeroStep::written_instead`] has the steps to take.
    pub fn punched(&mut self, range: ByteRange) {
        self.image.punched(range);
    }

    /// Handles a failed write or punch: the head's data there is looked up again. Its allocated but unwritten
    /// blocks become holes before the head becomes a snapshot or the directory is closed.
    pub fn write_failed(&mut self, range: ByteRange) {
        self.image.forget(range);
        self.unverified.add(range);
    }

    /// Reads `buffer.len()` bytes at `offset_bytes`, both multiples of 512.
    ///
    /// # Errors
    /// A range that the volume does not have, or an I/O error.
    pub fn read_at(&mut self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        let range = self.checked(offset_bytes, buffer.len())?;
        self.image.read_at(range, buffer)
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
            let result = self.image.write_chunk(plan, chunk, part);
            match result {
                Ok(()) => self.written(chunk),
                Err(_) => self.write_failed(chunk),
            }
            result?;
        }
        if fua { self.flush() } else { Ok(()) }
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
            let mut result = self.image.zero_step(step);
            if let Err(error) = &result
                && let Some(blocks) = step.written_instead(error.errno())
            {
                step = ZeroStep::WriteZeroes(blocks);
                result = self.image.zero_step(step);
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

    /// Checks that `runs` of a snapshot's layer can be repaired in `range`, and returns its file. The volume
    /// may have grown since the snapshot, so that the layer ends inside the range, or before it.
    ///
    /// # Errors
    /// The layer does not exist, or does not have the runs, or the store cannot change it now.
    pub fn check_repair(&mut self, image: &str, range: ByteRange, runs: &[ByteRange]) -> Result<FileIndex> {
        self.medium.check_writable()?;
        let index = self.snapshot_layers().check_repair(image, range, runs)?;
        self.check_sums_follow()?;
        Ok(index)
    }

    /// Repairs a snapshot's layer in `range`: writes the blocks of `runs`, which are inside it, and no
    /// others. `data` has their contents back to back. Durable on return. Waits for the disk.
    ///
    /// A read that was planned before and has not ended may see the former data, the new data, or zeroes if a
    /// block is removed. A lower layer may have the data of that block: so the caller plans such reads again.
    /// Plans made before are void afterwards.
    ///
    /// # Errors
    /// The layer does not exist, or does not have the runs, or an I/O error: the range may then hold some of
    /// both.
    pub fn repair_layer(
        &mut self,
        image: &str,
        range: ByteRange,
        runs: &[ByteRange],
        data: &[u8],
    ) -> Result<()> {
        let index = self.check_repair(image, range, runs)?;
        self.image.repair_layer(&self.medium, (image, index), range, runs, data)
    }

    /// Makes everything written so far durable. (The layers below the head are durable always.)
    ///
    /// # Errors
    /// [`StoreError::NotDurable`]: writes since the last successful flush may be lost.
    pub fn flush(&mut self) -> Result<()> {
        let synced = self.image.sync_head();
        self.recording_loss(synced)
    }

    fn checked(&self, offset_bytes: u64, length: usize) -> std::result::Result<ByteRange, RangeError> {
        ByteRange::new(offset_bytes, length as u64)?.check(self.size_bytes())
    }
}
