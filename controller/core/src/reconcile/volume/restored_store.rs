//! Detects a store that is older than the volume, because it was restored from a backup.
//!
//! A replica then refuses engines up to a number that this store has not issued yet. The controller draws the
//! next number above that one. The grants of the arbiter since the backup are lost too. So the arbiter grants
//! nothing until an engine has started from more than half of its replicas without a grant
//! ([`shorthorn_views::Arbiter::renewed`]).
//!
//! The difference is invisible if every reachable replica was absent since the backup. An engine that starts
//! from them alone needs a grant if they are half. Only then may a grant to the other half since the backup
//! be unknown here.

use super::VolumeReconciler;
use crate::objects::{Finding, VolumeState};
use crate::reconcile::START_CHECK;

impl VolumeReconciler<'_> {
    /// Draws a number above those in use if the stored one is not. Returns true if this run ends with that.
    pub(super) fn renew_stale_attach(&mut self) -> bool {
        let Some(attach) = self.stored.status.attach else { return false };
        let Some(refused) = self.objects.refused_attach() else { return false };
        let is_used = match self.stored.status.state {
            VolumeState::Attaching => refused > attach || (refused == attach && self.is_unused()),
            VolumeState::Attached | VolumeState::Detaching => refused > attach,
            VolumeState::Creating | VolumeState::Detached | VolumeState::Deleting => false,
        };
        if !is_used {
            return false;
        }
        let next = self.draw_attach();
        // The volume may have been attached elsewhere since the backup. Only the device of the engine that
        // has used this number, or of a later one, continues.
        self.status.attached_since_at_least(refused);
        if self.stored.status.state == VolumeState::Attached {
            self.enter(VolumeState::Attaching);
        }
        let message = self.mark_stale(refused, next);
        self.set_settled(Finding::wrong("RecordStale", message));
        true
    }

    /// Has the arbiter grant nothing if a replica knows a newer attachment than the store when a detached
    /// volume is attached as `next`. That number is above it, and hides the difference from then on.
    pub(super) fn mark_stale_before(&mut self, next: u64) {
        if let Some(refused) =
            self.objects.refused_attach().filter(|refused| self.stored.status.attach < Some(*refused))
        {
            self.mark_stale(refused, next);
        }
    }

    /// Has the arbiter grant nothing until an engine of attachment `next` or a later one serves. Returns the
    /// reason.
    fn mark_stale(&mut self, refused: u64, next: u64) -> String {
        self.status.mark_arbiter_stale(next);
        let known = self.stored.status.attach.unwrap_or_default();
        let message = format!(
            "a replica was opened for attachment {refused}, and the store knows of {known} only: it was \
             restored from a backup. The next attachment is {next}; the arbiter grants no view until more \
             than half of the replicas serve that attachment"
        );
        self.actions.emit(true, "RecordStale", message.clone());
        message
    }

    /// Returns true if nothing that this controller has asked for can have shown the number of the attachment
    /// to a replica.
    fn is_unused(&self) -> bool {
        let status = &self.stored.status;
        let is_launched = self.objects.engine().is_some_and(|engine| engine.spec.attach >= status.attach);
        let is_salvaged =
            status.salvage.as_ref().is_some_and(|salvage| Some(salvage.attach) == status.attach);
        !is_launched && !is_salvaged
    }

    /// Renews the record: the arbiter grants again once the engine serves that was started since its record
    /// is known to be stale.
    pub(super) fn renew_record(&mut self) {
        if self.stored.status.arbiter.stale_since().is_none() {
            return;
        }
        let renewed = self.objects.served_view().and_then(|view| self.stored.status.arbiter.renewed(view));
        match renewed {
            Some(arbiter) => {
                let view = arbiter.granted().map(|view| view.to_string()).unwrap_or_default();
                self.status.renew_arbiter(arbiter);
                let message = format!("view {view} is served by more than half: the arbiter grants again");
                self.actions.emit(false, "RecordRenewed", message);
            }
            None => self.actions.again_after(START_CHECK),
        }
    }
}
