//! Detaches a volume from a node that does not answer.
//!
//! The engine may still run there and cannot be stopped, so its replicas have to refuse it. First the
//! controller issues and stores a new attachment number: from then on the arbiter grants the old engine
//! nothing. Then every reachable replica gets that number. An engine with a lower number is fenced when a new
//! engine could start from the replicas that have stored the number (`shorthorn_views::basis`). These are a
//! quorum of every view that the old engine may have. It can thus neither acknowledge a write nor commit
//! another view. With fewer replicas the volume waits for its replicas or its node. If the operator gives
//! that node up and salvages the volume, the engine counts as fenced without them.

use shorthorn_views::basis;

use super::VolumeReconciler;
use crate::AgentCall;
use crate::objects::{DesireState, Engine, Finding};
use crate::reconcile::START_CHECK;

impl VolumeReconciler<'_> {
    /// Fences the engine, one step per run. `trouble` is the reason why it cannot be stopped.
    pub(super) fn fence(&mut self, engine: &Engine, trouble: &str) {
        if self.stored.status.attach <= engine.spec.attach {
            self.draw_attach();
            self.wait_for_fence(trouble, "the replicas are being fenced");
            return;
        }
        if self.objects.is_given_up_for_salvage(engine) {
            self.status.set_fenced(engine.spec.attach);
            let message = format!("{trouble}; the node is given up, and the volume is salvaged without it");
            self.actions.emit(true, "EngineGivenUp", message);
            self.wait_for_fence(trouble, "the node is given up");
            return;
        }
        self.want_replicas(DesireState::Running);
        let number = self.fence_number(engine);
        let reports = self.objects.fenced_reports(number);
        let arbiter = &self.stored.status.arbiter;
        // The grant for a salvage ends all earlier views only once the replica is the volume: until then the
        // old engine may have a majority. Its own grant is not remembered any more.
        let is_salvaging = self.stored.status.pending_salvage().is_some();
        let granted = arbiter.granted().filter(|_| !is_salvaging);
        match basis(&reports, granted) {
            // Half may have continued without the others by a forgotten grant.
            Ok(found) if found.needs_grant && (is_salvaging || arbiter.stale_since().is_some()) => {
                self.send_fence(number);
                self.wait_for_fence(trouble, "more than half of its replicas have to refuse its engine");
                self.actions.again_after(START_CHECK);
            }
            Ok(_) => {
                self.status.set_fenced(engine.spec.attach);
                let message = format!("{trouble}; {} of its replicas refuse its engine now", reports.len());
                self.actions.emit(true, "EngineFenced", message);
                self.wait_for_fence(trouble, "the engine is fenced");
            }
            Err(lacking) => {
                self.send_fence(number);
                self.wait_for_fence(
                    trouble,
                    &format!("to keep it from writing, more replicas are needed: {lacking}"),
                );
                self.actions.again_after(START_CHECK);
            }
        }
    }

    /// Returns the number that fences the engine: that of the volume, or the number below that of a salvage
    /// that waits. The agent of the chosen replica refuses a decision whose number the replica knows already.
    /// A salvage of an older version has drawn only its own number.
    fn fence_number(&self, engine: &Engine) -> Option<u64> {
        let salvage = self.stored.status.pending_salvage();
        let below = salvage.and_then(|salvage| salvage.attach.checked_sub(1));
        below.filter(|below| Some(*below) > engine.spec.attach).or(self.stored.status.attach)
    }

    fn send_fence(&mut self, number: Option<u64>) {
        let Some(attach) = number else { return };
        let replicas = self.objects.replicas().to_vec();
        for replica in replicas {
            if self.objects.observed_replica(replica).is_some_and(|shown| shown.attach < Some(attach)) {
                let (volume, replica_id) = (replica.spec.volume_name.clone(), replica.spec.replica_id);
                let call = AgentCall::FenceReplica { volume, replica_id, attach };
                self.actions.call_after_store(replica.spec.node_id.clone(), call);
            }
        }
    }

    fn wait_for_fence(&mut self, trouble: &str, message: &str) {
        let message = format!("the engine cannot be stopped: {trouble}; {message}");
        self.set_settled(Finding::wrong("NodeUnreachable", message));
    }
}

#[cfg(test)]
mod tests;
