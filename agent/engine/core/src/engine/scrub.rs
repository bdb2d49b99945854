//! Compares and repairs ranges in copy slots, for a scrub or after a read that has found rot: see
//! [`crate::scrub`].

use shorthorn_types::limits::{BLOCK_BYTES, MAX_MEMBERS};
use shorthorn_types::{ByteRange, Errno};

use super::EngineCore;
use crate::copy::{Copy, CopyReason};
use crate::event::{Output, Outputs, ScrubConfig};
use crate::job::{Job, RangeCheck};
use crate::membership::{PeerIndex, PeerMask};
use crate::ranges::RangeAccess;
use crate::request::Operation;
use crate::scrub::{Scrub, ScrubStep, mask, scrub_result_of};
use crate::scrub_result::{ScrubResult, VolumeCheck};
use crate::slot::SlotId;

impl EngineCore {
    pub(super) fn set_scrub(&mut self, config: Option<ScrubConfig>) {
        self.scrub = config.map(Scrub::new);
        self.scrub_candidates.forget_hopeless();
        self.wake.work();
    }

    /// Starts with the next piece, once the one before is done.
    pub(super) fn start_check(&mut self, id: SlotId, out: &mut Outputs) -> bool {
        if self.jobs.is_checking() {
            return false;
        }
        let size_bytes = self.size.regions().size_bytes();
        if size_bytes == 0 {
            return false;
        }
        if let Some(block) = self.scrub_candidates.next_block(size_bytes) {
            self.check(id, block, true, out);
            return true;
        }
        let Some(scrub) = &mut self.scrub else { return false };
        let repairs = scrub.repairs();
        match scrub.next_step(size_bytes) {
            ScrubStep::Compare(range) => self.check(id, range, repairs, out),
            ScrubStep::Wait => return false,
            ScrubStep::End => {
                self.scrub = None;
                out.push(Output::ScrubDone);
                return false;
            }
        }
        true
    }

    fn check(&mut self, id: SlotId, range: ByteRange, repairs: bool, out: &mut Outputs) {
        let check = RangeCheck { range, checks: [None; MAX_MEMBERS], repairs, rotten: PeerMask::NONE };
        self.take_slot(id, Job::Check(check));
        if self.dispatch.enter(id, range, RangeAccess::Modify) {
            self.advance(id, out);
        }
    }

    pub(super) fn send_check(&mut self, id: SlotId, out: &mut Outputs) {
        if self.is_paused() {
            return self.defer(id);
        }
        let members = self.membership.answering();
        let Some(Job::Check(check)) = self.job(id) else { return };
        let range = check.range;
        self.send(id, Operation::Verify, range, 0, members, out);
    }

    pub(super) fn verified(
        &mut self,
        peer: PeerIndex,
        id: SlotId,
        outcome: Result<VolumeCheck, Errno>,
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
            Ok(answer) => {
                check.checks[usize::from(peer)] = Some(answer);
                if self.slots.at_mut(id).answered_by(peer) {
                    self.advance(id, out);
                }
            }
        }
    }

    /// Compares the checks of a range after every member has answered or left.
    pub(super) fn compare(&mut self, id: SlotId, out: &mut Outputs) {
        let members = self.membership.answering();
        let is_unreadable = self.slots.at(id).error().is_some();
        let Some(Job::Check(check)) = self.job(id) else { return };
        let (range, rotten, wants_repair) = (check.range, check.rotten, check.repairs);
        let answers = check.checks.iter().flatten().count();
        let scrub_result = match is_unreadable {
            true => ScrubResult::Undecided(members.iter().collect()),
            false => scrub_result_of(&check.checks, rotten, members),
        };
        // If no source has checksums of all of the piece, one of the minority may have them of some blocks.
        let is_confirmed =
            |peer: &PeerIndex| check.checks[usize::from(*peer)].is_some_and(|answer| answer.is_confirmed);
        let needs_blocks = match &scrub_result {
            ScrubResult::Odd { sources, .. } => !sources.iter().any(is_confirmed),
            ScrubResult::Undecided(_) => !is_unreadable,
            ScrubResult::Equal | ScrubResult::CompareShownData => false,
        };
        let may_outvote = wants_repair && answers >= 3 && needs_blocks;
        // In other blocks the sound one may be wrong. That holds also if the scrub has ended or started over.
        if (!rotten.is_empty() || may_outvote) && range.length() > BLOCK_BYTES {
            if let Some(scrub) = &mut self.scrub {
                scrub.read_single_blocks(range);
            }
            return self.free_slot(id, out);
        }
        match scrub_result {
            ScrubResult::Odd { odd, sources } if wants_repair => {
                return self.repair(id, range, mask(&odd), mask(&sources), out);
            }
            ScrubResult::Odd { odd, .. } | ScrubResult::Undecided(odd) => {
                self.scrub_candidates.end_check(true);
                out.push(Output::ScrubFound { range, odd, repaired: false });
            }
            // The comparison covers only the data that a reader sees.
            ScrubResult::Equal | ScrubResult::CompareShownData => self.scrub_candidates.end_check(false),
        }
        self.free_slot(id, out);
    }

    /// Repairs the piece, which keeps its place in the range table. Replicas outside the view do not get the
    /// copy.
    fn repair(&mut self, id: SlotId, range: ByteRange, odd: PeerMask, sources: PeerMask, out: &mut Outputs) {
        let touched = self.size.regions().touched(range);
        self.absent.miss(&touched);
        self.restart_finish();
        self.take_slot(id, Job::Copy(Copy::new(CopyReason::Repair { odd, sources }, range, odd)));
        self.advance(id, out);
    }

    pub(super) fn range_is_repaired(
        &mut self,
        range: ByteRange,
        odd: PeerMask,
        left: PeerMask,
        out: &mut Outputs,
    ) {
        // A member that had no space for its repair is still a member.
        let is_left_odd = !odd.and(self.membership.answering()).without(left).is_empty();
        let repaired = !left.is_empty() && !is_left_odd;
        // All that differed have been replaced by other replicas.
        let is_outdated = odd.is_empty();
        self.scrub_candidates.end_check(!repaired && !is_outdated);
        if !is_outdated {
            out.push(Output::ScrubFound { range, odd: odd.iter().collect(), repaired });
        }
    }
}
