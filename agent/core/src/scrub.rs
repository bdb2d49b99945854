//! Comparing the members, a piece at a time, and making those equal to the majority that differ.

use shorthorn_types::limits::MAX_MEMBERS;
use shorthorn_types::{ByteRange, Errno};

use crate::bucket::Bucket;
use crate::engine::EngineCore;
use crate::event::{CopyLimits, Output, Outputs, ScrubConfig};
use crate::job::{Check, Copy, Job, Why, piece_at};
use crate::membership::{PeerIndex, PeerMask};
use crate::request::Operation;
use crate::slot::SlotId;

/// A scrub that is under way. One piece is looked at at a time.
#[derive(Debug)]
pub(crate) struct Scrub {
    repair: bool,
    bucket: Bucket,
    next_bytes: u64,
}

impl Scrub {
    fn new(config: ScrubConfig) -> Scrub {
        let limits = CopyLimits { bytes_per_s: config.bytes_per_s, share_percent: 100 };
        Scrub { repair: config.repair, bucket: Bucket::new(limits), next_bytes: 0 }
    }

    /// Everything before was looked at.
    pub fn at_bytes(&self) -> u64 {
        self.next_bytes
    }

    pub fn refill(&mut self, now_ms: u64) {
        self.bucket.refill(now_ms);
    }
}

/// What the checks of one range say.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Equal,
    /// More than half of at least three agree; these do not.
    Odd {
        odd: PeerMask,
        sources: PeerMask,
    },
    /// There is no telling who is right.
    Torn(PeerMask),
}

fn judge(sums: &[Option<u32>; MAX_MEMBERS], members: PeerMask) -> Verdict {
    let sum = |peer: PeerIndex| sums[usize::from(peer)];
    let with = |wanted: u32| {
        let same = members.iter().filter(|peer| sum(*peer) == Some(wanted));
        same.map(PeerMask::one).fold(PeerMask::NONE, PeerMask::with)
    };
    let known = members.iter().filter(|peer| sum(*peer).is_some());
    let known = known.map(PeerMask::one).fold(PeerMask::NONE, PeerMask::with);
    let largest = known.iter().filter_map(sum).map(with).max_by_key(|same| same.iter().count());
    let Some(sources) = largest.filter(|same| *same != known) else { return Verdict::Equal };
    match (sources.iter().count(), known.iter().count()) {
        (most, all) if all >= 3 && 2 * most > all => Verdict::Odd { odd: known.without(sources), sources },
        _ => Verdict::Torn(known),
    }
}

impl EngineCore {
    pub(crate) fn set_scrub(&mut self, config: Option<ScrubConfig>) {
        self.scrub = config.map(Scrub::new);
        self.wake = true;
    }

    /// Starts with the next piece, once the one before is done.
    pub(crate) fn start_check(&mut self, id: SlotId, out: &mut Outputs) -> bool {
        if self.jobs.is_checking() {
            return false;
        }
        let Some(last) = self.regions.count().checked_sub(1) else { return false };
        let size_bytes = self.regions.range(last).end();
        let Some(scrub) = &mut self.scrub else { return false };
        let left = size_bytes.saturating_sub(scrub.next_bytes);
        let Some(left) = ByteRange::new(scrub.next_bytes, left).ok().filter(|left| !left.is_empty()) else {
            self.scrub = None;
            out.push(Output::ScrubDone);
            return false;
        };
        let range = piece_at(left, left.offset());
        if !scrub.bucket.take(range.length()) {
            return false;
        }
        scrub.next_bytes = range.end();
        self.take_slot(id, Job::Check(Check { range, sums: [None; MAX_MEMBERS] }));
        if self.ranges.enter(id, range, true) {
            self.advance(id, out);
        }
        true
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
            Err(errno) => self.copy_failed(peer, id, errno, out),
            Ok(sum) => {
                check.sums[usize::from(peer)] = Some(sum);
                if self.answered_by(peer, id) {
                    self.advance(id, out);
                }
            }
        }
    }

    /// Everybody has told the check, or has left.
    pub(crate) fn compare(&mut self, id: SlotId, out: &mut Outputs) {
        let members = self.membership.answering();
        let is_unreadable = self.slots.at(id).error.is_some();
        let wants_repair = self.scrub.as_ref().is_some_and(|scrub| scrub.repair);
        let Some(Job::Check(check)) = self.job(id) else { return };
        let range = check.range;
        let verdict = if is_unreadable { Verdict::Torn(members) } else { judge(&check.sums, members) };
        match verdict {
            Verdict::Odd { odd, sources } if wants_repair => {
                return self.repair(id, range, odd, sources, out);
            }
            Verdict::Odd { odd, .. } | Verdict::Torn(odd) => {
                out.push(Output::ScrubFound { range, odd: odd.iter().collect(), repaired: false });
            }
            Verdict::Equal => {}
        }
        self.free_slot(id, out);
    }

    /// The piece keeps its place in the range table. Nobody outside the view is sent the copy.
    fn repair(&mut self, id: SlotId, range: ByteRange, odd: PeerMask, sources: PeerMask, out: &mut Outputs) {
        let touched = self.regions.touched(range);
        for absent in self.absent.iter_mut().flatten() {
            absent.missed.insert_run(touched.clone());
        }
        self.joins.start_over();
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
        out.push(Output::ScrubFound { range, odd: odd.iter().collect(), repaired: !left.is_empty() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(sums: &[Option<u32>]) -> Verdict {
        let mut all = [None; MAX_MEMBERS];
        all[..sums.len()].copy_from_slice(sums);
        let members = (0..).take(sums.len()).map(PeerMask::one).fold(PeerMask::NONE, PeerMask::with);
        judge(&all, members)
    }

    #[test]
    fn a_majority_is_right() {
        assert_eq!(verdict(&[Some(1), Some(1)]), Verdict::Equal);
        assert_eq!(verdict(&[Some(1)]), Verdict::Equal);
        assert_eq!(verdict(&[None, Some(1), None]), Verdict::Equal);
        let all = |count: u8| (0..count).map(PeerMask::one).fold(PeerMask::NONE, PeerMask::with);
        assert_eq!(verdict(&[Some(1), Some(2)]), Verdict::Torn(all(2)));
        assert_eq!(verdict(&[Some(1), Some(2), Some(3)]), Verdict::Torn(all(3)));
        assert_eq!(verdict(&[Some(1), Some(1), Some(2), Some(2)]), Verdict::Torn(all(4)));
        let odd = PeerMask::one(1);
        let sources = all(3).without(odd);
        assert_eq!(verdict(&[Some(1), Some(2), Some(1)]), Verdict::Odd { odd, sources });
    }
}
