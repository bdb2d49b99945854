//! Comparing the members, a piece at a time, and repairing those that differ from the majority.

use shorthorn_types::ByteRange;
use shorthorn_types::limits::{BLOCK_BYTES, MAX_MEMBERS};

use crate::bucket::Bucket;
use crate::copy::piece_at;
use crate::event::{CopyLimits, ScrubConfig};
use crate::membership::{PeerIndex, PeerMask};
use crate::scrub_result::{ReplicaSums, ScrubResult, VolumeCheck, compare_sums};

/// A scrub that is under way. Everything before its position was compared; one piece is looked at at a time.
#[derive(Debug)]
pub(crate) struct Scrub {
    repairs: bool,
    bucket: Bucket,
    next_bytes: u64,
    /// The offset up to which the scrub reads single blocks, because a member holds rot in some of them.
    narrow_until_bytes: u64,
}

/// The next step of a scrub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScrubStep {
    /// Compare the members in this range. The scrub records the range as compared.
    Compare(ByteRange),
    /// Wait until the limit permits more.
    Wait,
    /// The whole volume was compared.
    End,
}

impl Scrub {
    pub fn new(config: ScrubConfig) -> Scrub {
        let limits = CopyLimits { bytes_per_s: config.bytes_per_s, share_percent: 100 };
        Scrub { repairs: config.repair, bucket: Bucket::new(limits), next_bytes: 0, narrow_until_bytes: 0 }
    }

    /// Returns true if the scrub repairs blocks that differ from the majority.
    pub fn repairs(&self) -> bool {
        self.repairs
    }

    /// Returns the position before which everything was compared.
    pub fn at_bytes(&self) -> u64 {
        self.next_bytes
    }

    pub fn refill(&mut self, now_ms: u64) {
        self.bucket.refill(now_ms);
    }

    /// Takes the next step in a volume of `size_bytes`.
    pub fn next_step(&mut self, size_bytes: u64) -> ScrubStep {
        let left = ByteRange::new(self.next_bytes, size_bytes.saturating_sub(self.next_bytes));
        let Some(left) = left.ok().filter(|left| !left.is_empty()) else { return ScrubStep::End };
        let range = match self.next_bytes < self.narrow_until_bytes {
            true => ByteRange::new(left.offset(), BLOCK_BYTES.min(left.length())).unwrap_or(left),
            false => piece_at(left, left.offset()),
        };
        if !self.bucket.take(range.length()) {
            return ScrubStep::Wait;
        }
        self.next_bytes = range.end();
        ScrubStep::Compare(range)
    }

    /// Makes the scrub compare the range again, block by block, unless it has started over since.
    pub fn read_single_blocks(&mut self, range: ByteRange) {
        if self.next_bytes == range.end() {
            (self.next_bytes, self.narrow_until_bytes) = (range.offset(), range.end());
        }
    }
}

/// Returns the result on the checks of one range: the majority of the members not in `rotten` decides. A
/// member that knows of its rot counts like one that cannot read.
pub(crate) fn scrub_result_of(
    checks: &[Option<VolumeCheck>; MAX_MEMBERS],
    rotten: PeerMask,
    members: PeerMask,
) -> ScrubResult {
    let member = |peer: PeerIndex| match checks[usize::from(peer)] {
        _ if rotten.has(peer) => Some((peer, ReplicaSums::default())),
        check => Some((peer, ReplicaSums::of_volume(check?))),
    };
    compare_sums(&members.iter().filter_map(member).collect::<Vec<_>>())
}

/// Returns the set of these replicas.
pub(crate) fn mask(peers: &[PeerIndex]) -> PeerMask {
    peers.iter().copied().map(PeerMask::one).fold(PeerMask::NONE, PeerMask::with)
}

/// The maximum number of ranges that wait for their comparison. Further ones are found again when they are
/// read again.
const SCRUB_CANDIDATES_MAX: usize = 64;

/// Ranges in which a read has found rot. One block of them at a time is compared and repaired.
#[derive(Debug, Default)]
pub(crate) struct ScrubCandidates {
    ranges: Vec<ByteRange>,
    /// The block that is being compared or repaired.
    current: Option<ByteRange>,
    /// Blocks that could not be repaired. Reads of them do not trigger or report a check again; a scrub does.
    hopeless: Vec<ByteRange>,
}

impl ScrubCandidates {
    /// Adds a range. Returns true if the range has to be compared and was not in the list before.
    pub fn add(&mut self, range: ByteRange) -> bool {
        let is_known = |known: &ByteRange| known.overlaps(range);
        if self.ranges.len() >= SCRUB_CANDIDATES_MAX
            || self.ranges.iter().chain(&self.current).chain(&self.hopeless).any(is_known)
        {
            return false;
        }
        self.ranges.push(range);
        true
    }

    /// Ends the comparison and repair of the current block, if any. A hopeless one could not be repaired.
    pub fn end_check(&mut self, is_hopeless: bool) {
        let Some(block) = self.current.take().filter(|_| is_hopeless) else { return };
        if self.hopeless.len() >= SCRUB_CANDIDATES_MAX {
            self.hopeless.remove(0);
        }
        self.hopeless.push(block);
    }

    /// Forgets which blocks could not be repaired: repaired blocks may rot again.
    pub fn forget_hopeless(&mut self) {
        self.hopeless.clear();
    }

    /// Returns the next block of them, of a volume of that size: of two members each may be wrong in another
    /// one.
    pub fn next_block(&mut self, size_bytes: u64) -> Option<ByteRange> {
        let first = self.ranges.first_mut()?;
        let end = first.end().min(size_bytes);
        let block =
            ByteRange::new(first.offset(), BLOCK_BYTES.min(end.saturating_sub(first.offset()))).ok()?;
        match ByteRange::new(block.end(), end.saturating_sub(block.end())) {
            Ok(rest) if !rest.is_empty() => *first = rest,
            _ => drop(self.ranges.remove(0)),
        }
        self.current = Some(block).filter(|block| !block.is_empty());
        self.current
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;

    fn range(first_block: u64, blocks: u64) -> ByteRange {
        ByteRange::new(first_block * BLOCK_BYTES, blocks * BLOCK_BYTES).unwrap()
    }

    fn scrub(bytes_per_s: u64) -> Scrub {
        Scrub::new(ScrubConfig { bytes_per_s: NonZeroU64::new(bytes_per_s), repair: true })
    }

    #[test]
    fn members_without_an_answer_do_not_count() {
        let mut sums = [None; MAX_MEMBERS];
        let check = |sum| Some(VolumeCheck::unconfirmed(sum));
        (sums[1], sums[2], sums[3]) = (check(1), check(2), check(1));
        let members = mask(&[0, 1, 2, 3]);
        let scrub_result = |members| scrub_result_of(&sums, PeerMask::NONE, members);
        assert_eq!(scrub_result(members), ScrubResult::Odd { odd: vec![2], sources: vec![1, 3] });
        assert_eq!(scrub_result(mask(&[0, 1])), ScrubResult::Equal);
        assert_eq!(scrub_result(mask(&[0, 1, 2])), ScrubResult::Undecided(vec![1, 2]), "the third has left");
    }

    #[test]
    fn of_two_the_one_that_holds_rot_is_wrong() {
        let mut sums = [None; MAX_MEMBERS];
        sums[1] = Some(VolumeCheck::unconfirmed(1));
        let scrub_result = |rotten, members| scrub_result_of(&sums, mask(rotten), mask(members));
        assert_eq!(scrub_result(&[0], &[0, 1]), ScrubResult::Odd { odd: vec![0], sources: vec![1] });
        assert_eq!(scrub_result(&[0, 2], &[0, 1, 2]), ScrubResult::Odd { odd: vec![0, 2], sources: vec![1] });
        assert_eq!(scrub_result(&[0, 2], &[0, 2]), ScrubResult::Undecided(vec![0, 2]), "no copy is sound");
    }

    #[test]
    fn a_scrub_compares_piece_after_piece_up_to_the_end() {
        let (mut scrub, size_bytes) = (scrub(0), (2 << 20) + 4096);
        assert!(scrub.repairs());
        for piece in [range(0, 256), range(256, 256), range(512, 1)] {
            assert_eq!(scrub.next_step(size_bytes), ScrubStep::Compare(piece));
            assert_eq!(scrub.at_bytes(), piece.end());
        }
        assert_eq!(scrub.next_step(size_bytes), ScrubStep::End);
        assert_eq!(
            scrub.next_step(size_bytes + 512),
            ScrubStep::Compare(ByteRange::new(size_bytes, 512).unwrap())
        );
    }

    #[test]
    fn a_closer_look_compares_each_block_of_the_piece_and_no_other() {
        let mut scrub = scrub(0);
        assert_eq!(scrub.next_step(3 << 20), ScrubStep::Compare(range(0, 256)));
        scrub.read_single_blocks(range(0, 128));
        assert_eq!(scrub.at_bytes(), range(0, 256).end(), "it is elsewhere");
        scrub.read_single_blocks(range(0, 256));
        for block in 0..256 {
            assert_eq!(scrub.next_step(3 << 20), ScrubStep::Compare(range(block, 1)));
        }
        assert_eq!(scrub.next_step(3 << 20), ScrubStep::Compare(range(256, 256)));
    }

    #[test]
    fn the_limit_makes_a_scrub_wait_at_its_position() {
        let mut scrub = scrub(1 << 20);
        assert_eq!(scrub.next_step(8 << 20), ScrubStep::Compare(range(0, 256)));
        assert_eq!((scrub.next_step(8 << 20), scrub.at_bytes()), (ScrubStep::Wait, 1 << 20));
        scrub.refill(1000);
        assert_eq!(scrub.next_step(8 << 20), ScrubStep::Compare(range(256, 256)));
    }

    #[test]
    fn candidates_are_compared_block_by_block_up_to_the_end_of_the_volume() {
        let mut candidates = ScrubCandidates::default();
        assert!(candidates.add(range(1, 2)) && !candidates.add(range(2, 1)), "it is known");
        assert_eq!(candidates.next_block(2 * BLOCK_BYTES + 512), Some(range(1, 1)));
        assert!(!candidates.add(range(1, 1)), "it is being compared");
        candidates.end_check(false);
        let short = ByteRange::new(2 * BLOCK_BYTES, 512).unwrap();
        assert_eq!(candidates.next_block(2 * BLOCK_BYTES + 512), Some(short));
        candidates.end_check(false);
        assert_eq!(candidates.next_block(2 * BLOCK_BYTES + 512), None);
        assert!(candidates.add(range(1, 1)), "it may have rotted again");
    }

    #[test]
    fn hopeless_blocks_are_compared_again_after_the_next_scrub_only() {
        let mut candidates = ScrubCandidates::default();
        for block in 0..=SCRUB_CANDIDATES_MAX as u64 {
            assert!(candidates.add(range(block, 1)) && candidates.next_block(1 << 30).is_some());
            candidates.end_check(true);
        }
        assert!(!candidates.add(range(1, 1)) && candidates.add(range(0, 1)), "the oldest is forgotten");
        candidates.forget_hopeless();
        assert!(candidates.add(range(1, 1)));
    }

    #[test]
    fn further_candidates_are_found_again_when_they_are_read_again() {
        let mut candidates = ScrubCandidates::default();
        assert!((0..SCRUB_CANDIDATES_MAX as u64).all(|block| candidates.add(range(block, 1))));
        assert!(!candidates.add(range(1000, 1)));
        assert!(candidates.next_block(1 << 30).is_some() && candidates.add(range(1000, 1)));
    }
}
