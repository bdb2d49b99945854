use std::collections::VecDeque;

use shorthorn_store::{Store, StoreError, ZeroStep};
use shorthorn_types::ByteRange;
use shorthorn_types::limits::BLOCK_BYTES;

use crate::limits::{BLOCK_BYTES_USIZE, SLOTS, ZERO_JOBS_MAX, ZERO_PLAN_BYTES, ZERO_WRITE_BYTES};

/// The running discards and writes of zeroes, and those that wait for one of them to end.
#[derive(Debug)]
pub(super) struct ZeroJobs {
    jobs: [ZeroJob; ZERO_JOBS_MAX],
    queue: VecDeque<u16>,
}

/// A discard or write of zeroes. It is planned in bounded pieces, and does one step at a time.
#[derive(Debug, Default)]
pub(super) struct ZeroJob {
    slot: Option<u16>,
    /// The part that is not planned yet.
    rest: Option<ByteRange>,
    /// The plan of the current piece, of which the first `next` steps are begun.
    steps: Vec<ZeroStep>,
    next: usize,
    /// The rest of a step that is too long to be done at once.
    writing: Option<ByteRange>,
    /// The running step.
    current: Option<ZeroStep>,
    /// True if the layers have changed since the running step has begun.
    is_void: bool,
}

/// The next action of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ZeroingAction {
    /// Execute this; a write of zeroes is at most [`ZERO_WRITE_BYTES`] long.
    Step(ZeroStep),
    /// Plan this range: see [`ZeroJob::plan`].
    Plan(ByteRange),
    /// The job is complete.
    Done,
}

impl ZeroJobs {
    pub fn new() -> ZeroJobs {
        let steps = usize::try_from(ZERO_PLAN_BYTES).unwrap_or(0) / BLOCK_BYTES_USIZE + 2;
        let job = || ZeroJob { steps: Vec::with_capacity(steps), ..ZeroJob::default() };
        ZeroJobs { jobs: std::array::from_fn(|_| job()), queue: VecDeque::with_capacity(SLOTS) }
    }

    /// Returns a job for the request in `slot`, or none: then it is queued.
    pub fn begin(&mut self, slot: u16, range: ByteRange) -> Option<u8> {
        let free = self.jobs.iter().position(|job| job.slot.is_none());
        let Some(index) = free else {
            self.queue.push_back(slot);
            return None;
        };
        let job = &mut self.jobs[index];
        job.steps.clear();
        *job = ZeroJob {
            slot: Some(slot),
            rest: Some(range),
            steps: std::mem::take(&mut job.steps),
            ..ZeroJob::default()
        };
        u8::try_from(index).ok()
    }

    pub fn job(&mut self, index: u8) -> &mut ZeroJob {
        &mut self.jobs[usize::from(index)]
    }

    /// A layer has changed under the blocks that the kernel reads.
    pub fn void_reads(&mut self) {
        self.jobs.iter_mut().for_each(|job| job.is_void = true);
    }

    /// Makes the job free for other requests.
    pub fn end(&mut self, index: u8) {
        self.job(index).slot = None;
    }

    /// Returns the request that has waited longest, if there is a job for it now.
    pub fn next_waiting(&mut self) -> Option<u16> {
        let free = self.jobs.iter().any(|job| job.slot.is_none());
        if free { self.queue.pop_front() } else { None }
    }
}

impl ZeroJob {
    /// Returns the slot of the request; none if the job is free.
    pub fn slot(&self) -> Option<u16> {
        self.slot
    }

    /// Returns the running step.
    pub fn current(&self) -> Option<ZeroStep> {
        self.current
    }

    /// Records that a step is begun.
    pub fn begin(&mut self, step: ZeroStep) {
        (self.current, self.is_void) = (Some(step), false);
    }

    /// Returns true if the running step may have read a block from a layer that has changed meanwhile.
    pub fn is_void(&self) -> bool {
        self.is_void
    }

    /// Plans a piece: a discard, or a write of zeroes.
    ///
    /// # Errors
    /// The file system cannot list the extents of a layer.
    pub fn plan(&mut self, piece: ByteRange, discards: bool, store: &mut Store) -> Result<(), StoreError> {
        match discards {
            true => store.plan_discard(piece, &mut self.steps),
            false => store.plan_write_zeroes(piece, &mut self.steps),
        }
    }

    pub fn next(&mut self) -> ZeroingAction {
        if let Some(range) = self.writing.take() {
            return ZeroingAction::Step(self.write(range));
        }
        if let Some(step) = self.steps.get(self.next).copied() {
            self.next += 1;
            return ZeroingAction::Step(match step {
                ZeroStep::WriteZeroes(range) => self.write(range),
                step => step,
            });
        }
        self.plan_next()
    }

    /// Zeroes are written over `blocks` next.
    pub fn write_out(&mut self, blocks: ByteRange) {
        debug_assert!(self.writing.is_none(), "a step that was begun is all there is to do");
        self.writing = Some(blocks);
    }

    /// Returns the first part of a write of zeroes, and keeps the rest for the next steps.
    fn write(&mut self, range: ByteRange) -> ZeroStep {
        let (now, later) = range.split_at(range.offset() + ZERO_WRITE_BYTES);
        self.writing = later;
        ZeroStep::WriteZeroes(now)
    }

    fn plan_next(&mut self) -> ZeroingAction {
        self.steps.clear();
        self.next = 0;
        let Some(rest) = self.rest.take() else { return ZeroingAction::Done };
        // Pieces end at blocks, so that no block is in two of them.
        let end = (rest.offset() + ZERO_PLAN_BYTES) / BLOCK_BYTES * BLOCK_BYTES;
        let (piece, later) = rest.split_at(end);
        self.rest = later;
        ZeroingAction::Plan(piece)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::executor::tests::new_store;

    fn range(offset: u64, length: u64) -> ByteRange {
        ByteRange::new(offset, length).unwrap()
    }

    #[test]
    fn more_than_the_jobs_wait_their_turn() {
        let mut jobs = ZeroJobs::new();
        let begun: Vec<_> = (0..6).map(|slot| jobs.begin(slot, range(0, 4096))).collect();
        assert_eq!(begun, [Some(0), Some(1), Some(2), Some(3), None, None]);
        assert_eq!(jobs.next_waiting(), None);
        jobs.end(2);
        assert_eq!(jobs.next_waiting(), Some(4));
        assert_eq!(jobs.begin(4, range(0, 4096)), Some(2));
        jobs.end(0);
        assert_eq!(jobs.next_waiting(), Some(5));
        assert_eq!(jobs.next_waiting(), None);
    }

    #[test]
    fn a_discard_leaves_parts_of_blocks_as_they_are() {
        let temp = tempfile::tempdir().unwrap();
        let (mut store, ..) = new_store(&temp.path().join("replica"));
        store.write_at(&[7; 16384], 0, true).unwrap();
        let (whole, edge) = (range(4096, 8192), range(12288, 4096));
        for (discards, expected) in [(true, vec![whole]), (false, vec![edge, whole])] {
            let mut jobs = ZeroJobs::new();
            let index = jobs.begin(7, range(4096, 8704)).unwrap();
            let job = jobs.job(index);
            let ZeroingAction::Plan(piece) = job.next() else { panic!("nothing is planned yet") };
            job.plan(piece, discards, &mut store).unwrap();
            let mut steps = Vec::new();
            while let ZeroingAction::Step(step) = job.next() {
                steps.push(step.blocks());
            }
            assert_eq!(steps, expected, "{discards}");
        }
    }

    proptest! {
        #[test]
        fn pieces_cover_the_range_once(sector in 0u64..100_000, sectors in 1u64..=65536) {
            let whole = range(sector * 512, sectors * 512);
            let mut jobs = ZeroJobs::new();
            let index = jobs.begin(7, whole).unwrap();
            let job = jobs.job(index);
            let (mut planned, mut written) = (whole.offset(), whole.offset());
            loop {
                match job.next() {
                    ZeroingAction::Plan(piece) => {
                        prop_assert_eq!(piece.offset(), planned);
                        prop_assert!(piece.length() <= ZERO_PLAN_BYTES && !piece.is_empty());
                        planned = piece.end();
                        prop_assert!(planned % BLOCK_BYTES == 0 || planned == whole.end());
                        job.steps.push(ZeroStep::WriteZeroes(piece));
                    }
                    ZeroingAction::Step(ZeroStep::WriteZeroes(part)) => {
                        prop_assert_eq!(part.offset(), written);
                        prop_assert!(part.length() <= ZERO_WRITE_BYTES && !part.is_empty());
                        written = part.end();
                    }
                    ZeroingAction::Step(step) => prop_assert!(false, "{:?}", step),
                    ZeroingAction::Done => break,
                }
            }
            prop_assert_eq!((planned, written), (whole.end(), whole.end()));
        }
    }
}
