//! The state that a replica keeps beside the data, and the order in which its changes become durable.

use std::time::Duration;

use shorthorn_regions::{Marked, NewSet, SetKey, Ticket, WriteIntentLog};
use shorthorn_types::{Generation, MarkRegions, ReplicaId, ReplicaReport, View};
use shorthorn_views::{Fence, ReplicaViews};

use crate::durable_step::{Denied, Disk, DurableStep, StepError, is_final};
use crate::failure::{FAILURES_FORGIVEN_AFTER, RecordOutcome, ReplicaFailure};

/// The state that a replica keeps beside the data. The memory equals the disk, except after a failed step.
///
/// A step that has failed for lack of space or memory has changed nothing. After any other error the content
/// of the disk is unknown. The replica has failed, and the shell answers every request with an error until
/// the process ends: see [`ReplicaFailure`].
#[derive(Debug)]
pub struct ReplicaState {
    pub(crate) me: ReplicaId,
    pub(crate) views: ReplicaViews,
    pub(crate) intent_log: WriteIntentLog,
    /// The disk says that data may be gone.
    pub(crate) is_loss_recorded: bool,
    /// The record for Longhorn that the replica has left a view.
    pub(crate) left_record: LeftRecord,
    /// The number of earlier failures in a row.
    pub(crate) failures: u32,
    pub(crate) failure: Option<ReplicaFailure>,
}

/// The record on the disk that says to Longhorn that the replica has left a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeftRecord {
    /// The disk has no such record.
    Absent,
    /// The removal of the record has failed, perhaps only at its end: the record may be there or not.
    Unknown,
    /// The disk has the record.
    Present,
}

impl ReplicaState {
    /// Returns the identity of this replica in views.
    #[must_use]
    pub fn me(&self) -> ReplicaId {
        self.me
    }

    /// Returns the committed and the proposed view, as stored.
    #[must_use]
    pub fn views(&self) -> &ReplicaViews {
        &self.views
    }

    /// Returns the sets of regions.
    #[must_use]
    pub fn intent_log(&self) -> &WriteIntentLog {
        &self.intent_log
    }

    /// Returns the sets of regions, for requests, pages and an expansion.
    pub fn intent_log_mut(&mut self) -> &mut WriteIntentLog {
        &mut self.intent_log
    }

    /// Returns the failure after which the replica serves nothing, if any.
    #[must_use]
    pub fn failure(&self) -> Option<&ReplicaFailure> {
        self.failure.as_ref()
    }

    /// The time for which this process has served, by a clock that does not jump.
    pub fn served_for(&mut self, time: Duration) {
        if time >= FAILURES_FORGIVEN_AFTER {
            self.failures = 0;
        }
    }

    /// Stops serving after a failure. Before the caller learns of it, a record on the disk says that the
    /// data may lack acknowledged writes.
    ///
    /// A failed fdatasync means this, and so does a failed write. If the write was to be durable it is an
    /// fdatasync too, and otherwise the content of the head there is unknown. The same holds for failures
    /// beside the data, of a page of regions or a document. The disk, or the journal of its file system,
    /// reports a loss only once, to the first caller, and the affected data is unknown. A false alarm costs a
    /// copy of the regions written lately.
    ///
    /// If even the record fails, the process must not end ([`ReplicaFailure::pause_before_end`]).
    pub fn fail<D: Disk>(&mut self, disk: &mut D, message: String) {
        if self.failure.is_none() {
            let in_a_row = self.failures.saturating_add(1);
            let recorded = disk.record_failure(in_a_row);
            self.is_loss_recorded = true;
            self.failure = Some(ReplicaFailure { message, in_a_row, recorded, is_asked_for: false });
        }
    }

    /// Tries the record of a failure once more that could not be made durable. Whether it is durable now and
    /// was not before.
    pub fn retry_record<D: Disk>(&mut self, disk: &mut D) -> bool {
        let Some(failure) = self.failure.as_mut().filter(|failure| failure.recorded == RecordOutcome::Not)
        else {
            return false;
        };
        failure.recorded = disk.record_failure(failure.in_a_row);
        failure.recorded != RecordOutcome::Not
    }

    /// Handles the request of an engine of `generation` to a failed replica. The engine that has used it may
    /// leave it out, but an engine that starts may need it. Returns true if the process ends sooner for that.
    pub fn asked_by(&mut self, generation: Generation) -> bool {
        let is_newer = generation > self.views.generation();
        let Some(failure) = self.failure.as_mut().filter(|failure| is_newer && !failure.is_asked_for) else {
            return false;
        };
        failure.is_asked_for = true;
        true
    }

    /// Fences older engines for an engine of `generation` that opens the replica, or for the controller. The
    /// generation is stored before any connection is admitted or closed.
    ///
    /// # Errors
    /// It is fenced itself, or a step has failed.
    pub fn fence<D: Disk>(&mut self, disk: &mut D, generation: Generation) -> Result<Fence, D::Error> {
        let mut next = self.views.clone();
        let fence = next.fence(generation).map_err(Denied::from)?;
        self.save_views(disk, next)?;
        if fence == Fence::Raised {
            self.intent_log.opened();
        }
        Ok(fence)
    }

    /// Fences older engines for the connection of a queue. An engine that rebuilds the replica connects queue
    /// 0 anew before it sends any set.
    ///
    /// # Errors
    /// The errors of [`ReplicaState::fence`].
    pub fn hello<D: Disk>(
        &mut self,
        disk: &mut D,
        generation: Generation,
        queue: u16,
    ) -> Result<Fence, D::Error> {
        let fence = self.fence(disk, generation)?;
        if queue == 0 {
            self.intent_log.opened();
        }
        Ok(fence)
    }

    /// Stores a view that an engine proposes. If the view lacks this replica, the record of that is stored
    /// first. If it makes this replica a member, its incomplete sets of other replicas end. Then the sets of
    /// replicas outside `view` begin, and then the view is stored. After a crash in between, a record or a
    /// set is superfluous, which does no harm. The reverse order could leave a view without the set that the
    /// replica promises with it, and modifications would not be counted. Longhorn would also treat a replica
    /// as complete that knows that it has left. A refused view begins no set.
    ///
    /// # Errors
    /// It is refused, or a step has failed. Sets that have begun by then are kept.
    pub fn propose<D: Disk>(
        &mut self,
        disk: &mut D,
        generation: Generation,
        view: View,
        basis: &ReplicaReport,
    ) -> Result<(), D::Error> {
        let mut next = self.views.clone();
        next.propose(generation, view, basis).map_err(Denied::from)?;
        for replica in self.intent_log.incomplete(self.me, basis).iter() {
            self.end_set(disk, replica)?;
        }
        let new =
            self.intent_log.on_propose(self.me, self.views.report(), basis, &view).map_err(Denied::from)?;
        self.record_left(disk, &next)?;
        for set in new {
            self.begin_set(disk, set)?;
        }
        self.save_views(disk, next)
    }

    /// Commits a view. The sets of replicas that are members again end after it is stored, because they may
    /// be needed until then. A set that cannot be removed for lack of space is kept, which does no harm. The
    /// record that this replica has left is kept in the same case. Only a committed view removes it, never a
    /// start.
    ///
    /// # Errors
    /// It is refused, or a step has failed.
    pub fn commit<D: Disk>(
        &mut self,
        disk: &mut D,
        generation: Generation,
        view: View,
    ) -> Result<(), D::Error> {
        let mut next = self.views.clone();
        next.commit(generation, view).map_err(Denied::from)?;
        self.record_left(disk, &next)?;
        self.save_views(disk, next)?;
        let ended = self.end_sets_of_members(disk);
        let ended = ended.and_then(|()| self.record_member(disk));
        match ended {
            Err(error) if is_final(error.errno()) => Err(error),
            _ => Ok(()),
        }
    }

    /// Changes a set for an engine. Returns a ticket: the answer has to wait until the change is durable.
    ///
    /// # Errors
    /// It is refused, or a step has failed; the set is as before.
    pub fn mark<D: Disk>(&mut self, disk: &mut D, mark: &MarkRegions) -> Result<Option<Ticket>, D::Error> {
        match self.intent_log.mark(mark).map_err(Denied::from)? {
            Marked::Wait(ticket) => return Ok(Some(ticket)),
            Marked::Done => {}
            Marked::Begin(set) => self.begin_set(disk, set)?,
            Marked::Remove(replica) => self.end_set(disk, replica)?,
        }
        self.record_made_up_for(disk)?;
        Ok(None)
    }

    /// Returns an error unless the replica's data may be discarded. That requires that no view that may count
    /// has the replica as a member, or that the replica has no data to lose. A replica that is being rebuilt
    /// lacks data, and becomes a member only afterwards. No request may be in flight then, because it would
    /// use files that are replaced.
    ///
    /// # Errors
    /// [`Denied`]: the data may not be discarded, or not now.
    pub fn check_may_discard(
        &self,
        is_rebuilding: bool,
        holds_data: bool,
        is_busy: bool,
    ) -> Result<(), Denied> {
        let is_member = self.views.report().views().any(|view| view.members.contains(self.me));
        if !is_rebuilding && holds_data && is_member {
            return Err(Denied::IsMember(self.me));
        }
        if is_busy { Err(Denied::Busy) } else { Ok(()) }
    }

    /// Performs a step; an error that is final fails the replica.
    pub(crate) fn perform<D: Disk>(&mut self, disk: &mut D, step: DurableStep<'_>) -> Result<(), D::Error> {
        let done = disk.perform(step);
        if let Err(error) = &done
            && is_final(error.errno())
        {
            self.fail(disk, describe(step, error));
        }
        done
    }

    /// Stores the views if they are different; until then they stay as they are.
    fn save_views<D: Disk>(&mut self, disk: &mut D, next: ReplicaViews) -> Result<(), D::Error> {
        if next != self.views {
            self.perform(disk, DurableStep::SaveViews(&next))?;
            self.views = next;
        }
        Ok(())
    }

    /// Begins a set. Its file is made first: a set that counts is on the disk.
    fn begin_set<D: Disk>(&mut self, disk: &mut D, set: NewSet) -> Result<(), D::Error> {
        self.perform(disk, DurableStep::MakeSet(SetKey::OutOfSync(set.replica()), &set.file()))?;
        self.intent_log.keep(set);
        Ok(())
    }

    /// Ends a set. Its file is removed first: a file that is found later must not lack writes of the
    /// meantime.
    fn end_set<D: Disk>(&mut self, disk: &mut D, replica: ReplicaId) -> Result<(), D::Error> {
        self.perform(disk, DurableStep::RemoveSet(SetKey::OutOfSync(replica)))?;
        self.intent_log.forget(replica);
        Ok(())
    }

    /// Ends the sets of replicas that are members in all views that may count.
    pub(crate) fn end_sets_of_members<D: Disk>(&mut self, disk: &mut D) -> Result<(), D::Error> {
        let ended = self.intent_log.on_commit(self.views.report());
        ended.iter().try_for_each(|replica| self.end_set(disk, replica))
    }

    /// Records for Longhorn that a view in `views` lacks the replica. Any will do: which of them counts is
    /// not for Longhorn to find out.
    pub(crate) fn record_left<D: Disk>(
        &mut self,
        disk: &mut D,
        views: &ReplicaViews,
    ) -> Result<(), D::Error> {
        if self.left_record != LeftRecord::Present && !is_in_all(self.me, views) {
            self.perform(disk, DurableStep::RecordLeft)?;
            self.left_record = LeftRecord::Present;
        }
        Ok(())
    }

    /// Takes that back if all views that may count have the replica.
    fn record_member<D: Disk>(&mut self, disk: &mut D) -> Result<(), D::Error> {
        if self.left_record != LeftRecord::Absent && is_in_all(self.me, &self.views) {
            // If only the end of the step fails, the record is gone: the next view without the replica has it
            // made once more.
            self.left_record = LeftRecord::Unknown;
            self.perform(disk, DurableStep::RecordMember)?;
            self.left_record = LeftRecord::Absent;
        }
        Ok(())
    }

    /// Removes the record when no data is missing any more. Without space for that, the removal is repeated
    /// after the next mark.
    pub(crate) fn record_made_up_for<D: Disk>(&mut self, disk: &mut D) -> Result<(), D::Error> {
        if !self.is_loss_recorded || self.intent_log.has_lost_cache() {
            return Ok(());
        }
        match self.perform(disk, DurableStep::RecordMadeUpFor) {
            Ok(()) => self.is_loss_recorded = false,
            Err(error) if is_final(error.errno()) => return Err(error),
            Err(_) => {}
        }
        Ok(())
    }
}

/// Returns true if all views that may count have the replica as a member.
fn is_in_all(me: ReplicaId, views: &ReplicaViews) -> bool {
    views.report().views().all(|view| view.members.contains(me))
}

fn describe(step: DurableStep<'_>, error: &impl StepError) -> String {
    match step {
        DurableStep::SaveViews(_) => format!("the state of the replica could not be saved: {error}"),
        DurableStep::MakeSet(key, _) => format!("the set of regions '{key}' could not be begun: {error}"),
        DurableStep::RemoveSet(key) => format!("the set of regions '{key}' could not be removed: {error}"),
        DurableStep::RecordMadeUpFor => {
            format!("the recovery of lost data could not be recorded: {error}")
        }
        DurableStep::RecordLeft | DurableStep::RecordMember => {
            format!("whether the replica has left its view could not be recorded in volume.meta: {error}")
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
