//! Runs copies in the slots behind those of queue 0: starts them, advances each, and chooses the next one.

use shorthorn_types::{ByteRange, Errno};

use super::EngineCore;
use crate::copy::{CopyAction, CopyReason, NoSource};
use crate::event::{Output, Outputs, ZeroBlocks};
use crate::job::{FlushFor, Job};
use crate::membership::{PeerIndex, PeerMask};
use crate::request::Operation;
use crate::slot::SlotId;

impl EngineCore {
    /// Gives work to the copy slots that are free, most urgent first.
    pub(super) fn start_jobs(&mut self, out: &mut Outputs) {
        if let Some(id) = self.jobs.free_for_resync() {
            self.start_resync(id, out);
        }
        while let Some(id) = self.jobs.free() {
            if !self.start_next(id, out) {
                return;
            }
        }
    }

    fn start_next(&mut self, id: SlotId, out: &mut Outputs) -> bool {
        if self.clearing.take_flush(self.membership.connected()) {
            self.start_flush(id, FlushFor::Clearing, out);
        } else if self.rebuilds.take_flush(id) {
            self.start_flush(id, FlushFor::Rebuilding, out);
        } else if self.resync.is_under_way() {
            // Until that is done, the contents of the members are not known.
            return self.start_region_resync(id, out);
        } else if self.absent.any_misses(self.membership.rebuilding()) {
            return !self.size.is_changing_regions() && self.start_rebuild_copy(id, out);
        } else {
            return self.start_check(id, out);
        }
        true
    }

    /// Gives the slot a job, which is not ready yet.
    pub(super) fn take_slot(&mut self, id: SlotId, job: Job) {
        let Some(place) = self.job(id) else { return };
        *place = job;
        self.slots.begin_job(id);
    }

    /// Ends the job in the slot and wakes the requests that waited for its range.
    pub(super) fn free_slot(&mut self, id: SlotId, out: &mut Outputs) {
        self.take_slot(id, Job::Idle);
        self.slots.end_job(id);
        self.wake.work();
        self.leave_range(id, out);
    }

    fn start_flush(&mut self, id: SlotId, why: FlushFor, out: &mut Outputs) {
        self.take_slot(id, Job::Flush(why));
        self.send(id, Operation::Flush, ByteRange::EMPTY, 0, self.membership.connected(), out);
    }

    /// Continues the job when it is ready, or when all replicas that it was sent to have answered.
    pub(super) fn advance(&mut self, id: SlotId, out: &mut Outputs) {
        let was_sent = self.slots.at(id).is_active();
        match self.job(id) {
            Some(Job::Copy(_)) => self.advance_copy(id, out),
            Some(Job::Check(_)) if was_sent => self.compare(id, out),
            Some(Job::Check(_)) => self.send_check(id, out),
            Some(Job::Flush(why)) => {
                let why = *why;
                let is_durable = self.slots.at(id).error().is_none();
                self.free_slot(id, out);
                match why {
                    FlushFor::Clearing => self.clearing.flush_answered(is_durable),
                    FlushFor::Rebuilding => self.rebuild_flushed(id, is_durable, out),
                }
            }
            Some(Job::Idle) | None => {}
        }
    }

    fn advance_copy(&mut self, id: SlotId, out: &mut Outputs) {
        if self.is_paused() {
            return self.defer(id);
        }
        let Some(Job::Copy(copy)) = self.job(id) else { return };
        match copy.next_action() {
            CopyAction::Read => self.read_piece(id, out),
            CopyAction::Write { operation, range, buffer_offset, to } => {
                self.send(id, operation, range, buffer_offset, to, out);
            }
            CopyAction::End => self.end_copy(id, out),
        }
    }

    fn read_piece(&mut self, id: SlotId, out: &mut Outputs) {
        let Some(Job::Copy(copy)) = self.job(id) else { return };
        let (why, range, rotten, reported) = (copy.why(), copy.range(), copy.rotten(), copy.reported());
        let touched = self.size.regions().touched(range);
        if self.intent.is_clearing(touched.clone()) {
            return self.defer(id); // the copy modifies it
        }
        self.intent.touch(touched);
        let source = self.source_of(why, rotten, reported);
        if source.is_none() && !rotten.is_empty() && self.all_sources_rotten(id, out) {
            return self.read_piece(id, out);
        }
        let members = self.membership.answering();
        let alike = source.map_or(PeerMask::NONE, |source| self.alike(why, source));
        let Some(Job::Copy(copy)) = self.job(id) else { return };
        let Some(operation) = copy.read_from(source, members, alike) else { return self.end_copy(id, out) };
        let piece = copy.piece();
        let from = source.map_or(PeerMask::NONE, PeerMask::one);
        self.send(id, operation, piece, 0, from, out);
    }

    /// Returns the replica to read a piece from, if the replicas in `rotten` hold rot in it, and those in
    /// `reported` near it.
    fn source_of(&mut self, why: CopyReason, rotten: PeerMask, reported: PeerMask) -> Option<PeerIndex> {
        let sound = self.membership.answering().without(rotten);
        let preferred = match why {
            CopyReason::Resync { region } => {
                let sources = self.resync.sources(region).and(sound);
                // A member that has modified the region may hold more rot, without checksums there.
                let best =
                    [sources, sound.without(reported), sound].into_iter().find(|best| !best.is_empty());
                self.membership.nearest(best.unwrap_or(sound))
            }
            // A member that has reported rot has checksums of the other blocks. It also has to report the
            // block that it has lost, to receive that one.
            CopyReason::Rebuild { .. } => self
                .membership
                .nearest(reported.and(sound))
                .or_else(|| self.membership.reader(self.timeouts.slow(), rotten)),
            CopyReason::Repair { sources, .. } => return sources.and(sound).first(),
            CopyReason::Failed { sources, .. } => sources.and(sound).first(),
        };
        preferred.filter(|peer| sound.has(*peer)).or_else(|| sound.first())
    }

    /// Returns the members that hold the same as the source, because neither of them has modified the
    /// region. A copy would put the region into their write intent. If that resync is interrupted too, the
    /// next engine could not distinguish them from a member that was being repaired.
    fn alike(&self, why: CopyReason, source: PeerIndex) -> PeerMask {
        let CopyReason::Resync { region } = why else { return PeerMask::NONE };
        let sources = self.resync.sources(region);
        if sources.has(source) { sources } else { PeerMask::NONE }
    }

    /// Handles rot in all possible sources of the piece. True if there is something to read again. Data that
    /// every member has lost is reported.
    fn all_sources_rotten(&mut self, id: SlotId, out: &mut Outputs) -> bool {
        let Some(Job::Copy(copy)) = self.job(id) else { return false };
        match copy.all_sources_rotten() {
            NoSource::GivenUp => false,
            NoSource::Unchecked => {
                let (why, range, reported) = (copy.why(), copy.piece(), copy.reported());
                if let Some(peer) = self.source_of(why, PeerMask::NONE, reported) {
                    out.push(Output::RotFound { peer, range, is_copied: true });
                }
                true
            }
        }
    }

    /// Handles the answer of `peer` that its data differs from the stored data, if it was asked for that.
    /// Another member supplies the piece of a copy, to `peer` too. A check treats `peer` as
    /// unreadable.
    pub(super) fn take_rot(&mut self, peer: PeerIndex, id: SlotId, out: &mut Outputs) -> bool {
        match self.job(id) {
            Some(Job::Copy(copy)) if copy.expects_rot() => {
                if let Some(range) = copy.found_rot(peer) {
                    out.push(Output::RotFound { peer, range, is_copied: false });
                }
            }
            Some(Job::Check(check)) => check.rotten = check.rotten.with(PeerMask::one(peer)),
            _ => return false,
        }
        if self.slots.at_mut(id).answered_by(peer) {
            self.advance(id, out);
        }
        true
    }

    /// Ends a copy, because everything was copied or no target is left.
    fn end_copy(&mut self, id: SlotId, out: &mut Outputs) {
        let Some(Job::Copy(copy)) = self.job(id) else { return };
        let (why, range, targets) = (copy.why(), copy.range(), copy.targets());
        if !targets.is_empty() {
            self.jobs.copied(range.length());
        }
        match why {
            CopyReason::Resync { region } => self.region_resynced(region),
            CopyReason::Rebuild { region } => self.region_rebuilt(region, range, targets),
            CopyReason::Repair { odd, .. } => self.range_is_repaired(range, odd, targets, out),
            CopyReason::Failed { request, .. } => self.range_resynced(request, out),
        }
        self.free_slot(id, out);
    }

    /// Handles an answer like [`EngineCore::reply`], for a copy slot.
    pub(super) fn copy_reply(
        &mut self,
        peer: PeerIndex,
        id: SlotId,
        outcome: Result<(), Errno>,
        out: &mut Outputs,
    ) {
        if let Err(errno) = outcome {
            if errno == Errno::ROTTEN && self.take_rot(peer, id, out) {
                return;
            }
            return self.copy_failed(peer, id, errno, out);
        }
        if let Some(Job::Copy(copy)) = self.job(id) {
            copy.piece_read([0; 4]);
        }
        if self.slots.at_mut(id).answered_by(peer) {
            self.advance(id, out);
        }
    }

    pub(super) fn copy_read(&mut self, peer: PeerIndex, id: SlotId, zeroes: ZeroBlocks, out: &mut Outputs) {
        if !self.expects(peer, id, out) {
            return;
        }
        let was_read = match self.job(id) {
            Some(Job::Copy(copy)) => copy.piece_read(zeroes),
            _ => false,
        };
        if !was_read {
            return self.lose(peer, format!("{id:?} does not read for a copy"), out);
        }
        if self.slots.at_mut(id).answered_by(peer) {
            self.advance(id, out);
        }
    }

    fn leaves_rot(&mut self, peer: PeerIndex, id: SlotId) -> bool {
        let Some(Job::Copy(copy)) = self.job(id) else { return false };
        copy.leaves_rot(peer)
    }

    /// Handles the failure of a replica to do the operation of a copy slot. The replica leaves. The last
    /// member stays, and the replicas that depend on it for a copy do not become members.
    pub(super) fn copy_failed(&mut self, peer: PeerIndex, id: SlotId, errno: Errno, out: &mut Outputs) {
        let members = self.membership.answering();
        // If it leaves rot, it stays, and its block differs from the others: it knows that, and a scrub finds
        // it.
        if errno == Errno::NO_SPACE && (self.leaves_rot(peer, id) || self.becomes_source(peer, id)) {
            if self.slots.at_mut(id).answered_by(peer) {
                self.advance(id, out);
            }
            return;
        }
        if !(members.has(peer) && members.is_one()) {
            // Its answer stays pending until it is closed.
            return match errno {
                Errno::NO_SPACE => self.lose_full(peer, "no space left".to_owned(), out),
                errno => self.lose_failed(peer, format!("copying: {errno}"), out),
            };
        }
        self.slots.at_mut(id).record_error(peer, errno);
        if let Some(Job::Copy(copy)) = self.job(id) {
            let (why, piece, targets) = (copy.why(), copy.piece(), copy.cancel());
            if matches!(why, CopyReason::Rebuild { .. } | CopyReason::Failed { .. }) {
                let member = self.membership.replica(peer).map(|id| format!(" ({id})")).unwrap_or_default();
                for target in targets.iter() {
                    let reason = format!("the last member{member} cannot read {piece}: {errno}");
                    self.lose(target, reason, out);
                }
            }
        }
        if self.slots.at_mut(id).answered_by(peer) {
            self.advance(id, out);
        }
    }
}
