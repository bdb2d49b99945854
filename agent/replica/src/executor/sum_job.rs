//! The range of regions that is being summed, and the sums made so far.

use shorthorn_store::SumPage;
use shorthorn_types::ByteRange;

use super::block::number_in_page;
use super::operation::OperationResult;

/// See the module.
#[derive(Debug)]
pub(super) struct SumJob {
    range: Option<SumRange>,
    /// The sums that the job has made.
    fresh: SumPage,
    /// Known blocks that the job has read, and their sums. If these become durable, their places are free.
    read_back: Vec<(u64, u32)>,
}

/// Regions that are being summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SumRange {
    /// The start of the remaining part, in bytes.
    pub at_bytes: u64,
    pub end_bytes: u64,
    /// Bytes of the range that are already in the buffer.
    pub read_bytes: u64,
    pub step: SummingStep,
    /// True if the result is not needed any more.
    pub is_void: bool,
    /// True if some blocks could not be read.
    pub is_unreadable: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SummingStep {
    /// The next piece is to be read.
    Next,
    /// A piece is being read.
    Reading,
    /// The read has ended, well or with an error.
    Read(OperationResult),
    /// The sums of a page are made: that has to be here.
    Page { number: u64 },
    /// The sums are being written.
    Writing,
}

impl SumRange {
    /// Returns true if the kernel has an operation of the range.
    pub fn is_in_ring(&self) -> bool {
        matches!(self.step, SummingStep::Reading | SummingStep::Writing)
    }
}

impl SumJob {
    pub fn new() -> SumJob {
        SumJob { range: None, fresh: SumPage::unknown(), read_back: Vec::new() }
    }

    /// Begins to sum the regions of `bytes`.
    pub fn begin(&mut self, bytes: ByteRange) {
        self.fresh.clear();
        self.read_back.clear();
        let (at_bytes, end_bytes) = (bytes.offset(), bytes.end());
        let (step, is_void, is_unreadable) = (SummingStep::Next, false, false);
        self.range = Some(SumRange { at_bytes, end_bytes, read_bytes: 0, step, is_void, is_unreadable });
    }

    /// Returns the range that is being summed, if any.
    pub fn range(&self) -> Option<SumRange> {
        self.range
    }

    /// Returns true without a range, or if the range is not needed any more.
    pub fn is_void(&self) -> bool {
        self.range.is_none_or(|range| range.is_void)
    }

    /// Drops the range as soon as its operation has ended: its data has changed.
    pub fn void(&mut self) {
        if let Some(range) = &mut self.range {
            range.is_void = true;
        }
    }

    /// Continues without the piece, which could not be read.
    pub fn skip_unreadable(&mut self) {
        if let Some(range) = &mut self.range {
            (range.step, range.is_unreadable) = (SummingStep::Next, true);
        }
    }

    /// Ends the range.
    pub fn end(&mut self) {
        self.range = None;
    }

    pub fn set_step(&mut self, step: SummingStep) {
        if let Some(range) = &mut self.range {
            range.step = step;
        }
    }

    /// Starts the read of a piece.
    pub fn read(&mut self, piece: ByteRange) {
        if let Some(range) = &mut self.range {
            range.at_bytes = piece.end();
            range.read_bytes += piece.length();
            range.step = SummingStep::Reading;
        }
    }

    /// Starts to store the sums of page `number`, which ends at `end_bytes`.
    pub fn store(&mut self, number: u64, end_bytes: u64) {
        if let Some(range) = &mut self.range {
            range.at_bytes = end_bytes;
            range.step = SummingStep::Page { number };
        }
    }

    /// Records the sum of a block that was read.
    pub fn add(&mut self, block: ByteRange, sum: u32) {
        self.fresh.set(number_in_page(block), sum);
    }

    /// Returns the sum that was made for the block at this place of the page, if any.
    pub fn sum(&self, place: usize) -> Option<u32> {
        self.fresh.sum(place)
    }

    /// Forgets the sums, which are being written.
    pub fn clear(&mut self) {
        self.fresh.clear();
    }

    /// Records that a known block was read back.
    pub fn add_known(&mut self, block: u64, sum: u32) {
        self.read_back.push((block, sum));
    }

    /// Takes the known blocks that were read back. The list comes back by [`SumJob::give_back_known`].
    pub fn take_known(&mut self) -> Vec<(u64, u32)> {
        std::mem::take(&mut self.read_back)
    }

    pub fn give_back_known(&mut self, known: Vec<(u64, u32)>) {
        debug_assert!(known.is_empty());
        self.read_back = known;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(offset: u64, length: u64) -> ByteRange {
        ByteRange::new(offset, length).unwrap()
    }

    #[test]
    fn a_range_reads_its_pieces_and_stores_their_sums() {
        let mut job = SumJob::new();
        assert!(job.is_void(), "nothing is summed");
        job.begin(range(0, 8192));
        job.read(range(0, 8192));
        assert!(job.range().unwrap().is_in_ring());
        job.set_step(SummingStep::Read(Ok(())));
        job.add(range(4096, 4096), 9);
        job.store(0, 8192);
        let summed = job.range().unwrap();
        assert_eq!((summed.at_bytes, summed.end_bytes, summed.read_bytes), (8192, 8192, 8192));
        assert_eq!((summed.step, summed.is_in_ring()), (SummingStep::Page { number: 0 }, false));
        assert_eq!((job.sum(0), job.sum(1)), (None, Some(9)));
        job.clear();
        assert_eq!(job.sum(1), None);
    }

    #[test]
    fn a_new_range_has_nothing_of_the_last_one() {
        let mut job = SumJob::new();
        job.begin(range(0, 4096));
        job.add(range(0, 4096), 9);
        job.add_known(3, 9);
        job.void();
        assert!(job.is_void() && job.range().is_some());
        job.end();
        job.begin(range(4096, 4096));
        assert!(!job.is_void() && job.sum(0).is_none() && job.take_known().is_empty());
    }
}
