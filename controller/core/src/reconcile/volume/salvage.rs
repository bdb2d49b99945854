//! Carries out the operator's decision that the data of one replica is the volume.

use super::VolumeReconciler;
use crate::AgentCall;
use crate::objects::{
    ConditionType, CurrentState, DesireState, Finding, Replica, Salvage, StoredReplicaStatus,
};
use crate::observed::InstanceKey;

impl VolumeReconciler<'_> {
    /// Stops the engine and then the replica, and sends the replica the decision. Then the volume continues
    /// as it was wanted.
    pub(super) fn salvage(&mut self) {
        let Some(salvage) = self.stored.status.pending_salvage().cloned() else { return };
        if !self.engine_stopped() {
            return;
        }
        if self.stored.spec.node_id.is_none() && self.stops_others(&salvage) {
            return;
        }
        let mut replicas = self.objects.replicas().iter().copied();
        let chosen = replicas.find(|replica| replica.spec.replica_id == salvage.replica_id);
        let Some(chosen) = chosen else {
            let message =
                format!("replica {} no longer exists: salvage with another one", salvage.replica_id);
            self.set_settled(Finding::wrong("SalvageImpossible", message));
            return;
        };
        if chosen.spec.desire_state != DesireState::Stopped {
            self.want_replica(chosen, DesireState::Stopped);
        } else if chosen.status.current_state == CurrentState::Stopped {
            // All others have to count as failed when the replica has the decision.
            if !self.waits_for_unknown() {
                self.send_salvage(chosen, &salvage);
            }
            return;
        }
        let (name, node) = (&chosen.metadata.name, &chosen.spec.node_id);
        let said = if chosen.status.message.is_empty() {
            "the replica is being \
             stopped"
        } else {
            &chosen.status.message
        };
        let message =
            format!("replica {name} on {node} is about to become the only data of the volume: {said}");
        self.set_settled(Finding::wrong("Salvaging", message));
    }

    /// Stops the other replicas in the background if the volume is not wanted; returns false if they are
    /// being stopped already.
    fn stops_others(&mut self, salvage: &Salvage) -> bool {
        let is_other = |replica: &&Replica| {
            replica.spec.replica_id != salvage.replica_id && replica.spec.desire_state == DesireState::Running
        };
        let others: Vec<&Replica> = self.objects.replicas().iter().copied().filter(is_other).collect();
        for replica in &others {
            self.want_replica(replica, DesireState::Stopped);
        }
        !others.is_empty()
    }

    fn send_salvage(&mut self, chosen: &Replica, salvage: &Salvage) {
        let key = InstanceKey::replica(&self.stored.spec.volume_name, salvage.replica_id);
        let agent = self.context.agents.get(&chosen.spec.node_id);
        if let Some(failure) = agent.and_then(|agent| agent.failures.get(&key)) {
            let settled_condition = self.stored.status.conditions.get(ConditionType::Settled);
            if settled_condition.is_none_or(|settled_condition| settled_condition.message != failure.message)
            {
                // The status is stored first. Its change causes the next run, which tries again.
                self.set_settled(Finding::wrong("Salvaging", failure.message.clone()));
                return;
            }
        }
        self.actions.call(
            &chosen.spec.node_id,
            AgentCall::SalvageReplica {
                disk_path: chosen.spec.disk_path.clone(),
                disk_uuid: chosen.spec.disk_uuid(),
                volume: self.stored.spec.volume_name.clone(),
                replica_id: salvage.replica_id,
                attach: salvage.attach,
            },
        );
        // For the start of an engine, the chosen one has everything now, and the others nothing that counts.
        for replica in self.objects.replicas() {
            let is_chosen = replica.spec.replica_id == salvage.replica_id;
            let failed_at =
                if is_chosen { None } else { replica.status.failed_at.or(Some(self.context.now)) };
            if failed_at != replica.status.failed_at {
                let status = StoredReplicaStatus { failed_at, ..replica.status.clone() };
                self.actions.write(Replica { status, ..(*replica).clone() });
            }
        }
        self.status.complete_salvage();
        self.set_settled(Finding::Well);
        let message = format!(
            "replica {} on {} is now the only data of the volume, as {} decided ({}); {}",
            chosen.metadata.name, chosen.spec.node_id, salvage.by, salvage.reason, salvage.losses
        );
        self.actions.emit(true, "Salvaged", message);
    }
}
