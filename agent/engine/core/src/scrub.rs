//! Comparing the members, a piece at a time, and making those equal to the majority that differ.

use shorthorn_types::limits::{BLOCK_BYTES, MAX_MEMBERS};
use shorthorn_types::{ByteRange, Errno};

use crate::bucket::Bucket;
use crate::engine::EngineCore;
use crate::event::{CopyLimits, Output, Outputs, ScrubConfig};
use crate::job::{Check, Copy, Job, Why, piece_at};
use crate::membership::{PeerIndex, PeerMask};
use crate::ranges::Access;
use crate::request::Operation;
use crate::scrub_result::{ReplicaChecksums, ScrubResult, compare_checksums};
use crate::slot::SlotId;

/// A scrub that is under way. One piece is looked at at a time.
#[derive(Debug)]
pub(crate) struct Scrub {
    repair: bool,
    bucket: Bucket,
    next_bytes: u64,
    /// The offset up to which the scrub reads single blocks, because a member holds rot in some of them.
    narrow_until_bytes: u64,
}

impl Scrub {
    fn new(config: ScrubConfig) -> Scrub {
        let limits = CopyLimits { bytes_per_s: config.bytes_per_s, share_percent: 100 };
        Scrub { repair: config.repair, bucket: Bucket::new(limits), next_bytes: 0, narrow_until_bytes: 0 }
    }

    /// Returns the position before which everything was compared.
    pub fn at_bytes(&self) -> u64 {
        self.next_bytes
    }

    pub fn refill(&mut self, now_ms: u64) {
        self.bucket.refill(now_ms);
    }
}

/// Returns the result on the checks of one range: the majority of the members not in `rotten` decides. A
/// member that knows of its rot counts like one that cannot read.
fn scrub_result_of(sums: &[Option<u32>; MAX_MEMBERS], rotten: PeerMask, members: PeerMask) -> ScrubResult {
    let member = |peer: PeerIndex| match sums[usize::from(peer)] {
        _ if rotten.has(peer) => Some((peer, ReplicaChecksums::default())),
        sum => Some((peer, ReplicaChecksums::of_volume(sum?))),
    };
    compare_checksums(&members.iter().filter_map(member).collect::<Vec<_>>())
}

fn mask(peers: &[PeerIndex]) -> PeerMask {
    peers.iter().copied().map(PeerMask::one).fold(PeerMask::NONE, PeerMask::with)
}

/// The maximum number of ranges that wait for their comparison. Further ones are found again when they are
/// read again.
const SUSPECTS_MAX: usize = 64;

/// Ranges in which a read has found rot.
#[derive(Debug, Default)]
pub(crate) struct Suspects {
    ranges: Vec<ByteRange>,
    /// The block that is being compared or repaired.
    current: Option<ByteRange>,
    /// Blocks that could not be repaired. Reads of them do not trigger or report a check again; a scrub does.
    hopeless: Vec<ByteRange>,
}

impl Suspects {
    /// Adds a range. Returns true if it is to be compared, and was not before.
    pub fn add(&mut self, range: ByteRange) -> bool {
        let is_known = |known: &ByteRange| known.overlaps(range);
        if self.ranges.len() >= SUSPECTS_MAX
            || self.ranges.iter().chain(&self.current).chain(&self.hopeless).any(is_known)
        {
            return false;
        }
        self.ranges.push(range);
        true
    }

    fn give_up(&mut self, block: ByteRange) {
        if self.hopeless.len() >= SUSPECTS_MAX {
            self.hopeless.remove(0);
        }
        self.hopeless.push(block);
    }

    /// Returns the next block of them, of a volume of that size: of two members each may be wrong in another
    /// one.
    fn next_block(&mut self, size_bytes: u64) -> Option<ByteRange> {
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

impl EngineCore {
    pub(crate) fn set_scrub(&mut self, config: Option<ScrubConfig>) {
        self.scrub = config.map(Scrub::new);
        // Repaired blocks may rot again.
        self.suspects.hopeless.clear();
        self.wake.work();
    }

    /// Starts with the next piece, once the one before is done.
    pub(crate) fn start_check(&mut self, id: SlotId, out: &mut Outputs) -> bool {
        if self.jobs.is_checking() {
            return false;
        }
        let Some(last) = self.regions.count().checked_sub(1) else { return false };
        let size_bytes = self.regions.range(last).end();
        if let Some(block) = self.suspects.next_block(size_bytes) {
            self.check(id, block, true, out);
            return true;
        }
        let Some(scrub) = &mut self.scrub else { return false };
        let left = size_bytes.saturating_sub(scrub.next_bytes);
        let Some(left) = ByteRange::new(scrub.next_bytes, left).ok().filter(|left| !left.is_empty()) else {
            self.scrub = None;
            out.push(Output::ScrubDone);
            return false;
        };
        let range = match scrub.next_bytes < scrub.narrow_until_bytes {
            true => ByteRange::new(left.offset(), BLOCK_BYTES.min(left.length())).unwrap_or(left),
            false => piece_at(left, left.offset()),
        };
        if !scrub.bucket.take(range.length()) {
            return false;
        }
        scrub.next_bytes = range.end();
        let repairs = scrub.repair;
        self.check(id, range, repairs, out);
        true
    }

    fn check(&mut self, id: SlotId, range: ByteRange, repairs: bool, out: &mut Outputs) {
        let check = Check { range, sums: [None; MAX_MEMBERS], repairs, rotten: PeerMask::NONE };
        self.take_slot(id, Job::Check(check));
        if self.turns.enter(id, range, Access::Modify) {
            self.advance(id, out);
        }
    }

    pub(crate) fn send_check(&mut self, id: SlotId, out: &mut Outputs) {
        if self.is_paused() {
            return self.hold(id);
        }
        let members = self.membership.answering();
        let Some(Job::Check(check)) = self.job(id) else { return };
        let range = check.range;
        self.send(id, Operation::Verify, range, 0, members, out);
    }

    pub(crate) fn verified(
        &mut self,
        peer: PeerIndex,
        id: SlotId,
        outcome: Result<u32, Errno>,
        out: &mut Outputs,
    ) {
        if !self.expects(peer, id, out) {
            return;
        }
        let Some(Job::Check(check)) = self.job(id) else {
            return self.lose(peer, format!("{id:?} is not about a check"), out);
        };
        match outcome {
            Err(Errno::ROTTEN) => {
                self.take_rot(peer, id, out);
            }
            Err(errno) => self.copy_failed(peer, id, errno, out),
            Ok(sum) => {
                check.sums[usize::from(peer)] = Some(sum);
                if self.slots.at_mut(id).answered_by(peer) {
                    self.advance(id, out);
                }
            }
        }
    }

    /// Compares the checks of a range after every member has answered or left.
    pub(crate) fn compare(&mut self, id: SlotId, out: &mut Outputs) {
        let members = self.membership.answering();
        let is_unreadable = self.slots.at(id).error.is_some();
        let suspect = self.suspects.current.take();
        let Some(Job::Check(check)) = self.job(id) else { return };
        let (range, rotten, wants_repair) = (check.range, check.rotten, check.repairs);
        let scrub_result = match is_unreadable {
            true => ScrubResult::Torn(members.iter().collect()),
            false => scrub_result_of(&check.sums, rotten, members),
        };
        // In other blocks the sound one may be wrong.
        if !rotten.is_empty() && range.length() > BLOCK_BYTES && self.looks_closer(range) {
            return self.free_slot(id, out);
        }
        match scrub_result {
            ScrubResult::Odd { odd, sources } if wants_repair => {
                self.suspects.current = suspect;
                return self.repair(id, range, mask(&odd), mask(&sources), out);
            }
            ScrubResult::Odd { odd, .. } | ScrubResult::Torn(odd) => {
                suspect.into_iter().for_each(|block| self.suspects.give_up(block));
                out.push(Output::ScrubFound { range, odd, repaired: false });
            }
            // The comparison covers only the data that a reader sees.
            ScrubResult::Equal | ScrubResult::LookFurther => {}
        }
        self.free_slot(id, out);
    }

    /// Makes the scrub compare the range again, block by block. False if it has ended or begun anew.
    fn looks_closer(&mut self, range: ByteRange) -> bool {
        let Some(scrub) = self.scrub.as_mut().filter(|scrub| scrub.next_bytes == range.end()) else {
            return false;
        };
        (scrub.next_bytes, scrub.narrow_until_bytes) = (range.offset(), range.end());
        true
    }

    /// Repairs the piece, which keeps its place in the range table. Replicas outside the view do not get the
    /// copy.
    fn repair(&mut self, id: SlotId, range: ByteRange, odd: PeerMask, sources: PeerMask, out: &mut Outputs) {
        let touched = self.regions.touched(range);
        for absent in self.absent.iter_mut().flatten() {
            absent.out_of_sync.insert_run(touched.clone());
        }
        self.rebuilds.start_over();
        self.take_slot(id, Job::Copy(Copy::new(Why::Repair { odd, sources }, range, odd)));
        self.advance(id, out);
    }

    pub(crate) fn range_is_repaired(
        &mut self,
        range: ByteRange,
        odd: PeerMask,
        left: PeerMask,
        out: &mut Outputs,
    ) {
        // A member that had no space for its repair is still a member.
        let is_left_odd = !odd.and(self.membership.answering()).without(left).is_empty();
        let repaired = !left.is_empty() && !is_left_odd;
        let suspect = self.suspects.current.take();
        if !repaired {
            suspect.into_iter().for_each(|block| self.suspects.give_up(block));
        }
        out.push(Output::ScrubFound { range, odd: odd.iter().collect(), repaired });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_not_answered_does_not_count() {
        let mut sums = [None; MAX_MEMBERS];
        (sums[1], sums[2], sums[3]) = (Some(1), Some(2), Some(1));
        let members = mask(&[0, 1, 2, 3]);
        let scrub_result = |members| scrub_result_of(&sums, PeerMask::NONE, members);
        assert_eq!(scrub_result(members), ScrubResult::Odd { odd: vec![2], sources: vec![1, 3] });
        assert_eq!(scrub_result(mask(&[0, 1])), ScrubResult::Equal);
        assert_eq!(scrub_result(mask(&[0, 1, 2])), ScrubResult::Torn(vec![1, 2]), "the third has left");
    }

    #[test]
    fn of_two_the_one_that_holds_rot_is_wrong() {
        let mut sums = [None; MAX_MEMBERS];
        sums[1] = Some(1);
        let scrub_result = |rotten, members| scrub_result_of(&sums, mask(rotten), mask(members));
        assert_eq!(scrub_result(&[0], &[0, 1]), ScrubResult::Odd { odd: vec![0], sources: vec![1] });
        assert_eq!(scrub_result(&[0, 2], &[0, 1, 2]), ScrubResult::Odd { odd: vec![0, 2], sources: vec![1] });
        assert_eq!(scrub_result(&[0, 2], &[0, 2]), ScrubResult::Torn(vec![0, 2]), "there is no sound one");
    }
}
