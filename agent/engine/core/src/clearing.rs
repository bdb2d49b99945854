//! Clears regions from the durable sets after every member has flushed. Write intent is cleared when a region
//! was not written for a while. Out-of-sync regions are cleared once they are copied to their replica. Before
//! its end the engine runs a final clearing: it clears all that it can once, without waiting for regions to
//! become cold.
//!
//! Between the flush and the clearing every member stores three stamps: see [`shorthorn_types::is_current`].
//! If a disk is restored to a state before the flush, the engine sees that by the stamp. The intent sets do
//! not record the missing regions of such a disk any more.

use crate::membership::{PeerIndex, PeerMask};

/// While at most [`CoreConfig::intent_keep_bytes`](crate::CoreConfig) are dirty, cycles are rarer by this
/// factor. A region that is written from time to time thus stays dirty, and is not marked for each write.
const CALM_INTERVALS: u64 = 12;

/// The number of new stamps after a flush. The first may equal the last one of an earlier engine, which some
/// members have stored and this engine does not know. A member that is restored to a state before the flush
/// is two behind even so. The same holds if only members that lack the last stamp are left.
const STAMPS_PER_CYCLE: u32 = 3;

/// The cycle that is under way, and its steps: a flush, the stamps, and one mark after another that clears
/// regions.
///
/// The step of marks follows only on a durable flush and on stamps that all members have stored. A member
/// that fails meanwhile stops the stamps: no new one is sent before all members have stored the newest
/// one.
#[derive(Debug)]
pub(crate) struct Clearing {
    phase: ClearingPhase,
    final_clearing: FinalClearing,
    /// The interval in milliseconds; none: regions are cleared only by the final cycle.
    interval_ms: Option<u64>,
    keep_bytes: u64,
    started_at_ms: u64,
    /// Replicas that were sent the flush and have not failed since.
    flushed: PeerMask,
    /// The set that the outstanding mark clears.
    of: ClearedSet,
    /// The newest stamp that any replica was sent.
    stamp: u32,
    /// True if all members have stored that stamp.
    is_level: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClearingPhase {
    Resting,
    WantsFlush,
    Flushing,
    /// The number of new stamps to send.
    Stamping(u32),
    Marking,
}

/// The state of the cycle that clears all that it can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FinalClearing {
    No,
    /// The cycle begins when the current one has ended.
    Wanted,
    UnderWay,
}

/// A durable set of regions that a mark clears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClearedSet {
    Intent,
    /// The members' out-of-sync set of this replica.
    OutOfSyncOf(PeerIndex),
}

/// The next step of the stamps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StampStep {
    /// No stamp is due.
    Nothing,
    /// The newest stamp has to be sent to all that are connected.
    Send,
    /// All of them have stored the last one of the cycle: the marks follow.
    AllStored,
}

impl Clearing {
    /// Starts with a cycle that has nothing to clear. All members store the newest stamp at once, so that a
    /// member that has lost its own stamp has one again.
    pub fn new(interval_ms: Option<u64>, keep_bytes: u64, stamp: u32) -> Clearing {
        Clearing {
            phase: ClearingPhase::Stamping(0),
            final_clearing: FinalClearing::No,
            interval_ms,
            keep_bytes,
            started_at_ms: 0,
            flushed: PeerMask::NONE,
            of: ClearedSet::Intent,
            stamp,
            is_level: false,
        }
    }

    /// Returns the newest stamp that any replica was sent.
    pub fn stamp(&self) -> u32 {
        self.stamp
    }

    /// Returns a stamp that no replica is current with before the end of the next cycle.
    pub fn unreached_stamp(&self) -> u32 {
        self.stamp.saturating_add(2)
    }

    /// Returns true if regions are cleared before the end of the engine.
    pub fn is_enabled(&self) -> bool {
        self.interval_ms.is_some()
    }

    /// Requests a cycle that clears as many regions as possible, to start soon.
    pub fn want_final(&mut self) {
        self.final_clearing = FinalClearing::Wanted;
    }

    /// Returns true if the last cycle has succeeded.
    pub fn is_resting(&self) -> bool {
        self.phase == ClearingPhase::Resting
    }

    /// Returns true if a cycle is wanted, or if it is time for one.
    pub fn is_due(&self, now_ms: u64, dirty_bytes: u64, is_rebuilding: bool) -> bool {
        // The progress of a rebuilding replica is recorded with a cycle too.
        let is_calm = dirty_bytes <= self.keep_bytes && !is_rebuilding;
        let intervals = if is_calm { CALM_INTERVALS } else { 1 };
        let is_over = |interval_ms: u64| now_ms >= self.started_at_ms + interval_ms * intervals;
        self.final_clearing == FinalClearing::Wanted || self.interval_ms.is_some_and(is_over)
    }

    /// Starts a cycle. Returns true if the cycle has to clear as many regions as possible.
    pub fn start_cycle(&mut self, now_ms: u64) -> bool {
        self.started_at_ms = now_ms;
        let is_final = self.final_clearing == FinalClearing::Wanted;
        if is_final {
            self.final_clearing = FinalClearing::UnderWay;
        }
        is_final
    }

    /// Continues the cycle with a flush.
    pub fn want_flush(&mut self) {
        self.phase = ClearingPhase::WantsFlush;
    }

    /// Returns true if a flush has to be sent, and records it as sent to the replicas in `to`.
    pub fn take_flush(&mut self, to: PeerMask) -> bool {
        let wants = self.phase == ClearingPhase::WantsFlush;
        if wants {
            (self.phase, self.flushed) = (ClearingPhase::Flushing, to);
        }
        wants
    }

    /// Continues after every replica has answered the flush.
    pub fn flush_answered(&mut self, is_durable: bool) {
        self.phase =
            if is_durable { ClearingPhase::Stamping(STAMPS_PER_CYCLE) } else { ClearingPhase::Resting };
    }

    /// Returns the replicas that were sent the flush and have not failed since.
    pub fn flushed(&self) -> PeerMask {
        self.flushed
    }

    /// Takes the next step of the stamps, after the last one was answered by all.
    pub fn next_stamp(&mut self, has_receivers: bool) -> StampStep {
        let ClearingPhase::Stamping(left) = self.phase else { return StampStep::Nothing };
        if !has_receivers {
            self.phase = ClearingPhase::Resting;
            return StampStep::Nothing;
        }
        if !self.is_level {
            self.is_level = true;
        } else if left == 0 {
            self.phase = ClearingPhase::Marking;
            return StampStep::AllStored;
        } else {
            self.stamp = self.stamp.saturating_add(1);
            self.phase = ClearingPhase::Stamping(left - 1);
        }
        StampStep::Send
    }

    /// Returns true if the next mark has to be sent after the last one was answered by all.
    pub fn is_marking(&self) -> bool {
        self.phase == ClearingPhase::Marking
    }

    /// Records the set that the next mark clears.
    pub fn mark(&mut self, of: ClearedSet) {
        self.of = of;
    }

    /// Returns the set that the last mark has cleared. None after a stamp.
    pub fn marked(&mut self) -> Option<ClearedSet> {
        (self.phase == ClearingPhase::Marking).then(|| std::mem::replace(&mut self.of, ClearedSet::Intent))
    }

    /// Ends the cycle.
    pub fn rest(&mut self) {
        self.phase = ClearingPhase::Resting;
    }

    /// Returns true once, at the end of a cycle that clears all that it can, or at its failure.
    pub fn take_final_end(&mut self) -> bool {
        let is_over = self.final_clearing == FinalClearing::UnderWay && self.is_resting();
        if is_over {
            self.final_clearing = FinalClearing::No;
        }
        is_over
    }

    /// Handles the failure of `peer`. A flush that it answers after its return belongs to a later cycle.
    /// If `peer` is a member, the engine sends no new stamp before all members have stored the newest one.
    /// Returns true if the outstanding mark is a stamp, which has to be abandoned.
    pub fn forget(&mut self, peer: PeerIndex, is_member: bool) -> bool {
        self.flushed = self.flushed.without(PeerMask::one(peer));
        if !is_member {
            return false;
        }
        self.is_level = false;
        let is_stamping = matches!(self.phase, ClearingPhase::Stamping(_));
        if is_stamping {
            self.phase = ClearingPhase::Resting;
        }
        is_stamping
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL_MS: u64 = 1000;
    const MEMBER: PeerIndex = 1;

    /// Returns a clearing whose members have stored the first stamp.
    fn level() -> Clearing {
        let mut clearing = Clearing::new(Some(INTERVAL_MS), 4096, 7);
        assert_eq!(clearing.next_stamp(true), StampStep::Send);
        assert_eq!(clearing.next_stamp(true), StampStep::AllStored);
        assert_eq!(clearing.stamp(), 7, "the first stamp is not new");
        clearing.rest();
        clearing
    }

    fn flush(clearing: &mut Clearing) {
        clearing.want_flush();
        assert!(clearing.take_flush(PeerMask::one(MEMBER)) && !clearing.take_flush(PeerMask::NONE));
    }

    #[test]
    fn marks_follow_a_flush_and_three_stamps() {
        let mut clearing = level();
        flush(&mut clearing);
        assert_eq!(clearing.next_stamp(true), StampStep::Nothing, "the flush is not answered");
        clearing.flush_answered(true);
        for stamp in 8..11 {
            assert_eq!((clearing.next_stamp(true), clearing.stamp()), (StampStep::Send, stamp));
            assert_eq!((clearing.is_marking(), clearing.marked()), (false, None));
        }
        assert_eq!(clearing.next_stamp(true), StampStep::AllStored);
        clearing.mark(ClearedSet::OutOfSyncOf(2));
        assert_eq!(clearing.marked(), Some(ClearedSet::OutOfSyncOf(2)));
        assert!(clearing.is_marking() && !clearing.is_resting());
    }

    #[test]
    fn a_flush_that_is_not_durable_clears_nothing() {
        let mut clearing = level();
        flush(&mut clearing);
        clearing.flush_answered(false);
        assert_eq!((clearing.next_stamp(true), clearing.is_resting()), (StampStep::Nothing, true));
    }

    #[test]
    fn a_lost_member_ends_the_stamps_and_all_store_the_newest_first() {
        let mut clearing = level();
        flush(&mut clearing);
        clearing.flush_answered(true);
        assert_eq!((clearing.next_stamp(true), clearing.stamp()), (StampStep::Send, 8));
        assert!(!clearing.forget(0, false), "the loss of a rebuilding replica stops no stamp");
        assert!(clearing.forget(MEMBER, true));
        assert!(clearing.is_resting() && clearing.flushed().is_empty());
        flush(&mut clearing);
        clearing.flush_answered(true);
        assert_eq!((clearing.next_stamp(true), clearing.stamp()), (StampStep::Send, 8), "again");
        assert_eq!((clearing.next_stamp(true), clearing.stamp()), (StampStep::Send, 9));
        assert_eq!(clearing.next_stamp(false), StampStep::Nothing, "all have left");
        assert!(clearing.is_resting());
    }

    #[test]
    fn a_loss_during_the_marks_stops_none_of_them() {
        let mut clearing = Clearing::new(Some(INTERVAL_MS), 0, 0);
        clearing.next_stamp(true);
        clearing.next_stamp(true);
        assert!(!clearing.forget(MEMBER, true) && clearing.is_marking());
    }

    #[test]
    fn cycles_are_rarer_while_little_is_dirty() {
        let mut clearing = level();
        assert!(!clearing.start_cycle(500));
        assert!(!clearing.is_due(1499, 8192, false) && clearing.is_due(1500, 8192, false));
        assert!(!clearing.is_due(12_499, 4096, false) && clearing.is_due(12_500, 4096, false));
        assert!(clearing.is_due(1500, 0, true), "a rebuild makes progress that is to be recorded");
        let never = Clearing::new(None, 0, 0);
        assert!(!never.is_enabled() && !never.is_due(u64::MAX, 8192, true));
    }

    #[test]
    fn the_final_cycle_is_due_at_once_and_ends_once() {
        let mut clearing = Clearing::new(None, 0, 0);
        clearing.rest();
        clearing.want_final();
        assert!(clearing.is_due(0, 0, false) && !clearing.take_final_end());
        assert!(clearing.start_cycle(0));
        flush(&mut clearing);
        assert!(!clearing.take_final_end() && !clearing.is_due(0, 0, false));
        clearing.flush_answered(false);
        assert!(clearing.take_final_end() && !clearing.take_final_end());
    }
}
