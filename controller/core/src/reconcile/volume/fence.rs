//! Detaches a volume from a node that does not answer.
//!
//! The engine may still run there and cannot be stopped, so its replicas have to refuse it. First the
//! controller issues and stores a new attachment number: from then on the arbiter grants the old engine
//! nothing. Then every reachable replica gets that number. An engine with a lower number is fenced when a new
//! engine could start from the replicas that have stored the number (`shorthorn_views::basis`). These are a
//! quorum of every view that the old engine may have. It can thus neither acknowledge a write nor commit
//! another view. With fewer replicas the volume waits for its replicas or its node.

use shorthorn_types::{Generation, ReplicaId, ReplicaReport};
use shorthorn_views::{basis, forgets, knows_no_engine};

use super::VolumeReconciler;
use crate::AgentCall;
use crate::objects::{DesireState, Engine, Finding, Replica};
use crate::observed::{Detail, InstanceKey, InstanceState, ObservedReplica};
use crate::reconcile::{Reachability, START_CHECK, reachability};

impl VolumeReconciler<'_> {
    /// Returns true if no engine of this attachment, or of an older one, can acknowledge a write any more.
    pub(super) fn is_fenced(&self, engine: &Engine) -> bool {
        self.stored.status.is_fenced(engine.spec.attach)
    }

    /// Fences the engine, one step per run. `trouble` is the reason why it cannot be stopped.
    pub(super) fn fence(&mut self, engine: &Engine, trouble: &str) {
        if self.stored.status.attach <= engine.spec.attach {
            self.draw_attach();
            self.wait_for_fence(trouble, "the replicas are being fenced");
            return;
        }
        self.want_replicas(DesireState::Running);
        let reports = self.fenced_reports();
        let arbiter = &self.stored.status.arbiter;
        // The grant for a salvage ends all earlier views only once the replica is the volume: until then the
        // old engine may have a majority. Its own grant is not remembered any more.
        let is_salvaging = self.stored.status.pending_salvage().is_some();
        let granted = arbiter.granted().filter(|_| !is_salvaging);
        match basis(&reports, granted) {
            // Half may have continued without the others by a forgotten grant.
            Ok(found) if found.needs_grant && (is_salvaging || arbiter.stale_since().is_some()) => {
                self.send_fence();
                self.wait_for_fence(trouble, "more than half of its replicas have to refuse its engine");
                self.decision.again_after(START_CHECK);
            }
            Ok(_) => {
                self.next.status.fenced_attach = Some(engine.spec.attach);
                let message = format!("{trouble}; {} of its replicas refuse its engine now", reports.len());
                self.decision.emit(self.key(), true, "EngineFenced", message);
                self.wait_for_fence(trouble, "the engine is fenced");
            }
            Err(lacking) => {
                self.send_fence();
                self.wait_for_fence(
                    trouble,
                    &format!("to keep it from writing, more replicas are needed: {lacking}"),
                );
                self.decision.again_after(START_CHECK);
            }
        }
    }

    /// Returns the reports of the replicas that refuse every engine but the next. A replica that has lost its
    /// directory is not asked, because it has lost its records.
    fn fenced_reports(&self) -> Vec<(ReplicaId, ReplicaReport)> {
        let attach = self.stored.status.attach;
        let of = |replica: &&Replica| {
            let shown = self.observed_replica(replica).filter(|shown| shown.attach >= Some(attach))?;
            Some((replica.spec.replica_id, (**shown.views.as_ref()?).clone()))
        };
        let mut reports: Vec<_> = self.replicas.iter().filter_map(of).collect();
        let Some(newest) = reports.iter().map(|(_, report)| report.committed).max_by_key(|view| view.id)
        else {
            return reports;
        };
        let was_served = self.engine.is_some_and(|engine| engine.status.served_attach > 0)
            || self.replicas.iter().any(|replica| replica.status.healthy_at.is_some());
        let all_know = was_served || newest.id.generation != Generation::NEVER;
        let is_forgetful = |id: ReplicaId, report: &ReplicaReport| {
            forgets(id, report, newest) || (all_know && knows_no_engine(report))
        };
        reports.retain(|(id, report)| !is_forgetful(*id, report));
        reports
    }

    fn send_fence(&mut self) {
        let attach = self.stored.status.attach;
        for replica in self.replicas.clone() {
            if self.observed_replica(replica).is_some_and(|shown| shown.attach < Some(attach)) {
                let (volume, replica_id) = (replica.spec.volume_name.clone(), replica.spec.replica_id);
                let call = AgentCall::FenceReplica { volume, replica_id, attach };
                self.calls_after_store.push((replica.spec.node_id.clone(), call));
            }
        }
    }

    /// Returns the observed process of the replica, if it runs and its node answers.
    pub(super) fn observed_replica(&self, replica: &Replica) -> Option<&ObservedReplica> {
        let Reachability::Reachable(agent) = reachability(self.context, &replica.spec.node_id) else {
            return None;
        };
        let key = InstanceKey::replica(&replica.spec.volume_name, replica.spec.replica_id);
        let instance =
            agent.instances.get(&key).filter(|instance| instance.state == InstanceState::Running)?;
        match &instance.detail {
            Detail::Replica(shown) => Some(shown),
            Detail::Engine(_) => None,
        }
    }

    fn wait_for_fence(&mut self, trouble: &str, message: &str) {
        let message = format!("the engine cannot be stopped: {trouble}; {message}");
        self.set_settled(Finding::wrong("NodeUnreachable", message));
    }
}

#[cfg(test)]
mod tests;
