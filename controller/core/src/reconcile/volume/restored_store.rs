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

use shorthorn_types::View;

use super::VolumeReconciler;
use crate::objects::{Finding, Replica, VolumeState};
use crate::observed::{Detail, InstanceKey};
use crate::reconcile::START_CHECK;

impl VolumeReconciler<'_> {
    /// Returns the newest attachment that any reachable process of the volume knows.
    pub(super) fn reported_attach(&self) -> Option<u64> {
        let volume = &self.stored.spec.volume_name;
        let key = InstanceKey::engine(volume);
        let agents = self.context.agents.with_engine(volume).map(|(_, agent)| agent);
        let engines = agents.filter(|agent| agent.is_synced()).filter_map(|agent| {
            match &agent.instances.get(&key)?.detail {
                Detail::Engine(engine) => engine.attach,
                Detail::Replica(_) => None,
            }
        });
        engines.chain(self.refused_attach()).max()
    }

    /// Returns the newest attachment that has opened a replica in reach. An engine may be of another volume
    /// of this name, a replica is not.
    fn refused_attach(&self) -> Option<u64> {
        let attach = |replica: &&Replica| self.observed_replica(replica)?.attach;
        self.replicas.iter().filter_map(attach).max()
    }

    /// Draws a number above those in use if the stored one is not. Returns true if this run ends with that.
    pub(super) fn renew_stale_attach(&mut self) -> bool {
        let attach = self.stored.status.attach;
        let Some(refused) = self.refused_attach() else { return false };
        let is_used = match self.stored.status.state {
            VolumeState::Attaching => refused > attach || (refused == attach && self.is_unused()),
            VolumeState::Attached | VolumeState::Detaching => refused > attach,
            VolumeState::Creating | VolumeState::Detached | VolumeState::Deleting => false,
        };
        if !is_used {
            return false;
        }
        self.draw_attach();
        let status = &mut self.next.status;
        status.arbiter = status.arbiter.stale(status.attach);
        let next = status.attach;
        if self.stored.status.state == VolumeState::Attached {
            self.enter(VolumeState::Attaching);
        }
        let message = format!(
            "a replica was opened for attachment {refused}, and the store knows of {attach} only: it was \
             restored from a backup. The next attachment is {next}; nothing is granted until it is served by \
             more than half of the replicas"
        );
        self.decision.emit(self.key(), true, "RecordStale", message.clone());
        self.set_settled(Finding::wrong("RecordStale", message));
        true
    }

    /// Returns true if nothing that this controller has asked for can have shown the number of the attachment
    /// to a replica.
    fn is_unused(&self) -> bool {
        let status = &self.stored.status;
        let is_launched = self.engine.is_some_and(|engine| engine.spec.attach >= status.attach);
        let is_salvaged = status.salvage.as_ref().is_some_and(|salvage| salvage.attach == status.attach);
        !is_launched && !is_salvaged
    }

    /// Renews the record: the arbiter grants again once the engine serves that was started since its record
    /// is known to be stale.
    pub(super) fn renew_record(&mut self) {
        if self.stored.status.arbiter.stale_since().is_none() {
            return;
        }
        let renewed = self.served_view().and_then(|view| self.stored.status.arbiter.renewed(view));
        match renewed {
            Some(arbiter) => {
                let view = arbiter.granted().map(|view| view.to_string()).unwrap_or_default();
                self.next.status.arbiter = arbiter;
                let message = format!("view {view} is served by more than half: the arbiter grants again");
                self.decision.emit(self.key(), false, "RecordRenewed", message);
            }
            None => self.decision.again_after(START_CHECK),
        }
    }

    /// Returns the newest view that the engine of this attachment has committed, as a replica that has stored
    /// it reports.
    pub(super) fn served_view(&self) -> Option<View> {
        let attach = self.stored.status.attach;
        let engine = self.engine.filter(|engine| {
            let current = engine.spec.attach == attach && engine.status.seen_attach == attach;
            current && engine.status.is_serving()
        })?;
        let reports =
            self.replicas.iter().filter_map(|replica| self.observed_replica(replica)?.views.as_ref());
        let committed = reports.map(|report| report.committed);
        let own = committed.filter(|view| Some(view.id.generation) == engine.status.generation);
        own.max_by_key(|view| view.id)
    }
}
