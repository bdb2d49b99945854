use shorthorn_types::limits::{BLOCK_BYTES, MAX_IO_BYTES, MAX_MEMBERS};
use shorthorn_types::{ByteRange, Regions};

use crate::event::ZeroBlocks;
use crate::membership::PeerMask;
use crate::slot::SlotId;

/// The job of a copy slot.
#[derive(Clone, Debug)]
pub(crate) enum Job {
    Idle,
    Flush(FlushFor),
    Copy(Copy),
    Check(Check),
}

/// The reason of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlushFor {
    /// Regions are to be cleared.
    Clearing,
    /// A replica is to become a member.
    Rebuilding,
}

/// The reason of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// Resyncs a region in which the members may differ. Requests for the region wait meanwhile.
    Resync { region: u32 },
    /// Replicas that are being rebuilt miss the region. The copy has its range in the range table.
    Rebuild { region: u32 },
    /// A scrub has found these to differ. The copy has its range in the range table.
    Repair { odd: PeerMask, sources: PeerMask },
    /// A request has found no space on `sources`. It keeps its range in the range table meanwhile.
    Failed {
        request: SlotId,
        sources: PeerMask,
        /// Members that had no space for the data of another one, and became the source themselves.
        tried: PeerMask,
    },
}

/// A range is made equal on some replicas, a piece at a time: read from one, written to the others.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    pub why: Why,
    /// All of it.
    pub range: ByteRange,
    /// The part whose turn it is, at most [`MAX_IO_BYTES`].
    pub piece: ByteRange,
    /// Replicas that get the copy. Failed ones are removed at once.
    pub targets: PeerMask,
    /// The targets at the beginning, but for those that have failed: the source of one piece is a target of
    /// another.
    pub all: PeerMask,
    /// Members that have said that they hold rot in the piece. They get it from a sound one.
    pub rotten: PeerMask,
    /// Replicas that get the piece: targets, and members that hold rot there.
    pub to: PeerMask,
    /// True if all possible sources of the piece hold rot there: it is copied unchanged.
    pub is_unchecked: bool,
    pub step: CopyStep,
    /// Blocks of zeroes in the piece that need not be sent.
    pub zeroes: ZeroBlocks,
    /// True if the piece is read again, from another source, after all replicas have answered.
    pub starts_over: bool,
    /// For how long requests have waited for this copy because each replica had not answered.
    pub held_up_ms: [u64; MAX_MEMBERS],
}

/// The next step for the piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyStep {
    /// The piece has to be read, or read again if its source has failed.
    Read,
    /// The piece is in the buffer and written up to this offset.
    Write { at_bytes: u64 },
}

impl Copy {
    pub fn new(why: Why, range: ByteRange, targets: PeerMask) -> Copy {
        Copy {
            why,
            range,
            piece: piece_at(range, range.offset()),
            targets,
            all: targets,
            rotten: PeerMask::NONE,
            to: PeerMask::NONE,
            is_unchecked: false,
            step: CopyStep::Read,
            zeroes: [0; 4],
            starts_over: false,
            held_up_ms: [0; MAX_MEMBERS],
        }
    }

    /// Returns true if the source has to compare what it reads with its sums. If a request has just failed
    /// there, the source compares only with known rot: both the data of the request and the former data are
    /// sound.
    pub fn is_checked(&self) -> bool {
        !self.is_unchecked
    }

    /// Returns the next part of the piece that is all zeroes or all to be sent, and whether it is zeroes.
    pub fn next_run(&self) -> Option<(ByteRange, bool)> {
        let CopyStep::Write { at_bytes } = self.step else { return None };
        let end = self.piece.length();
        if at_bytes >= end {
            return None;
        }
        let is_zero = |at: u64| {
            let block = usize::try_from(at / BLOCK_BYTES).unwrap_or(usize::MAX);
            self.zeroes.get(block / 64).is_some_and(|word| word >> (block % 64) & 1 == 1)
        };
        let kind = is_zero(at_bytes);
        let mut to = at_bytes;
        while to < end && is_zero(to) == kind {
            to += BLOCK_BYTES;
        }
        Some((part(self.piece.offset() + at_bytes, to.min(end) - at_bytes), kind))
    }

    /// Advances to the next piece. Returns false at the end.
    pub fn next_piece(&mut self) -> bool {
        if self.piece.end() >= self.range.end() {
            return false;
        }
        self.piece = piece_at(self.range, self.piece.end());
        self.step = CopyStep::Read;
        (self.rotten, self.is_unchecked) = (PeerMask::NONE, false);
        true
    }

    /// Narrows the piece to its first block; the others follow. Returns false if the piece is a single block
    /// already.
    pub fn narrow(&mut self) -> bool {
        if self.piece.length() <= BLOCK_BYTES {
            return false;
        }
        self.piece = part(self.piece.offset(), BLOCK_BYTES);
        self.rotten = PeerMask::NONE;
        true
    }
}

/// Members are asked for the check of a range.
#[derive(Clone, Debug)]
pub(crate) struct Check {
    pub range: ByteRange,
    pub sums: [Option<u32>; MAX_MEMBERS],
    /// True if the job makes differing blocks equal to the correct ones.
    pub repairs: bool,
    /// Members that know that they hold something else than was stored there.
    pub rotten: PeerMask,
}

/// Returns the part of `range` from `start` on that fits one buffer.
pub(crate) fn piece_at(range: ByteRange, start: u64) -> ByteRange {
    part(start, (range.end() - start).min(u64::from(MAX_IO_BYTES)))
}

fn part(start: u64, length: u64) -> ByteRange {
    ByteRange::new(start, length).unwrap_or(ByteRange::EMPTY)
}

/// The jobs of all copy slots.
#[derive(Debug)]
pub(crate) struct Jobs {
    jobs: Vec<(SlotId, Job)>,
}

impl Jobs {
    pub fn new(slots: impl Iterator<Item = SlotId>) -> Jobs {
        Jobs { jobs: slots.map(|slot| (slot, Job::Idle)).collect() }
    }

    pub fn at(&mut self, index: usize) -> &mut Job {
        &mut self.jobs[index].1
    }

    /// Returns a slot for anything but a resync, for which the last one is reserved. Copies that wait for the
    /// range of a failed request must not block its resync.
    pub fn free(&self) -> Option<SlotId> {
        let others = self.jobs.len().saturating_sub(1);
        self.jobs[..others].iter().find(|(_, job)| matches!(job, Job::Idle)).map(|(slot, _)| *slot)
    }

    /// Returns the slot for resyncs.
    pub fn free_for_resync(&self) -> Option<SlotId> {
        self.jobs.last().filter(|(_, job)| matches!(job, Job::Idle)).map(|(slot, _)| *slot)
    }

    /// Returns the copies to replicas that are rebuilt, and their slots.
    pub fn rebuilds(&mut self) -> impl Iterator<Item = (SlotId, &mut Copy)> {
        self.jobs.iter_mut().filter_map(|(slot, job)| match job {
            Job::Copy(copy) if matches!(copy.why, Why::Rebuild { .. }) => Some((*slot, copy)),
            _ => None,
        })
    }

    pub fn copies(&self) -> impl Iterator<Item = &Copy> {
        self.jobs.iter().filter_map(|(_, job)| match job {
            Job::Copy(copy) => Some(copy),
            _ => None,
        })
    }

    pub fn is_checking(&self) -> bool {
        let is_scrub = |job: &Job| match job {
            Job::Check(_) => true,
            Job::Copy(copy) => matches!(copy.why, Why::Repair { .. }),
            Job::Idle | Job::Flush(_) => false,
        };
        self.jobs.iter().any(|(_, job)| is_scrub(job))
    }

    /// Returns true if the region is being copied.
    pub fn has(&self, why: Why) -> bool {
        self.copies().any(|copy| copy.why == why)
    }

    /// Drops `lost` from all copies.
    pub fn forget(&mut self, lost: PeerMask) {
        for (_, job) in &mut self.jobs {
            if let Job::Copy(copy) = job {
                copy.targets = copy.targets.without(lost);
                copy.all = copy.all.without(lost);
                copy.to = copy.to.without(lost);
                copy.rotten = copy.rotten.without(lost);
            }
        }
    }

    /// Returns the regions that are being copied or compared.
    pub fn touched(&self, regions: Regions) -> impl Iterator<Item = std::ops::Range<u32>> {
        self.jobs.iter().filter_map(move |(_, job)| match job {
            Job::Copy(copy) => Some(regions.touched(copy.range)),
            Job::Check(check) => Some(regions.touched(check.range)),
            Job::Idle | Job::Flush(_) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(length: u64, zeroes: ZeroBlocks) -> Copy {
        let mut copy = Copy::new(Why::Rebuild { region: 0 }, part(8 << 20, length), PeerMask::one(1));
        copy.zeroes = zeroes;
        copy
    }

    fn runs(copy: &mut Copy) -> Vec<(u64, u64, bool)> {
        let mut runs = Vec::new();
        copy.step = CopyStep::Write { at_bytes: 0 };
        while let Some((run, zero)) = copy.next_run() {
            runs.push((run.offset() - copy.piece.offset(), run.length(), zero));
            copy.step = CopyStep::Write { at_bytes: run.end() - copy.piece.offset() };
        }
        runs
    }

    #[test]
    fn zeroes_and_data_go_in_runs() {
        assert_eq!(runs(&mut copy(64 << 10, [0; 4])), [(0, 64 << 10, false)]);
        assert_eq!(runs(&mut copy(64 << 10, [u64::MAX; 4])), [(0, 64 << 10, true)]);
        let mixed = runs(&mut copy(16 << 10, [0b0110, 0, 0, 0]));
        assert_eq!(mixed, [(0, 4096, false), (4096, 8192, true), (12288, 4096, false)]);
        let short = runs(&mut copy(4096 + 512, [0b10, 0, 0, 0]));
        assert_eq!(short, [(0, 4096, false), (4096, 512, true)], "the end of the volume");
    }

    #[test]
    fn a_large_region_goes_in_pieces() {
        let mut copy = copy((2 << 20) + 4096, [0; 4]);
        let mut lengths = vec![copy.piece.length()];
        while copy.next_piece() {
            assert_eq!(copy.step, CopyStep::Read);
            lengths.push(copy.piece.length());
        }
        assert_eq!(lengths, [1 << 20, 1 << 20, 4096]);
    }
}
