//! Taking a volume off its node.
//!
//! A volume is detached as soon as its engine is stopped or fenced. From then on that engine can acknowledge
//! no write, and the volume may be attached elsewhere. Its replicas are stopped after that, so that a hanging
//! one does not delay that. An engine whose device is in use is not stopped. Its volume is repaired like an
//! attached one, and is attached again if it is wanted there again.

use super::{Reachability, VolumeReconciler, reachability};
use crate::AgentCall;
use crate::objects::{
    CurrentState, DesireState, Engine, EnginePhase, EngineSpec, Finding, Key, Kind, Metadata,
    REPLICAS_STOPPING, Replica, Robustness, StoredEngineStatus, Volume, VolumeState,
};
use crate::reconcile::{Context, engine};

/// Returns true if no engine of the volume can write any more, so that the data of a deleted volume may be
/// removed.
pub(in crate::reconcile) fn engine_is_over(context: &Context<'_>, volume: &Volume) -> bool {
    let stored = context.cluster.engines.get(&volume.metadata.name);
    if context.cluster.unknown(&Key::new(Kind::Engine, &volume.metadata.name)).is_some() {
        return false;
    }
    let Some(engine) = stored.filter(|engine| !engine::is_left_behind(context, engine)) else { return true };
    // The record that an engine on a node that is given up is not waited for is stored first (`abandon`).
    engine.spec.desire_state == DesireState::Stopped
        && (engine.status.current_state == CurrentState::Stopped
            || volume.status.is_fenced(engine.spec.attach)
            || is_abandoned(volume, engine))
}

/// Returns true if the store records that the engine is not waited for any more.
fn is_abandoned(volume: &Volume, engine: &Engine) -> bool {
    volume.is_deleting() && volume.status.is_abandoned(engine.spec.attach)
}

impl VolumeReconciler<'_> {
    pub(super) fn detach(&mut self) {
        if !self.engine_stopped() {
            self.repair_while_detaching();
            return;
        }
        let is_wanted = self.stored.spec.node_id.is_some();
        self.status.leave_node();
        self.enter(VolumeState::Detached);
        self.set_health_unknown();
        if is_wanted {
            // The next engine needs the replicas at once.
            self.set_settled(Finding::wrong(
                "Attaching",
                "the volume is about to be attached to another node",
            ));
        } else {
            self.stop_replicas();
        }
    }

    /// Stops the replicas of a detached volume that is wanted nowhere, in the background.
    pub(super) fn stop_replicas(&mut self) {
        self.want_replicas(DesireState::Stopped);
        // A replica whose node is out of reach is stopped when that is back; generations keep it harmless.
        let stopped = |replica: &&Replica| {
            replica.spec.desire_state == DesireState::Stopped
                && matches!(replica.status.current_state, CurrentState::Stopped | CurrentState::Unknown)
        };
        if !self.objects.replicas().iter().all(stopped) {
            let message = format!("the replicas are being stopped{}", self.objects.replica_messages());
            self.set_settled(Finding::wrong(REPLICAS_STOPPING, message));
            return;
        }
        if !self.waits_for_unknown() {
            self.set_settled(Finding::Well);
        }
    }

    /// Keeps the volume attached if it is wanted there again and its engine still exists. An engine of the
    /// current attachment continues unchanged. A stop under way may still end it: then it is lost, like any
    /// engine that ends by itself. If a newer number was drawn meanwhile, the next engine takes the device
    /// over. Returns false if the detach has to be completed first.
    pub(super) fn keep_attached(&mut self) -> bool {
        let status = &self.stored.status;
        let Some(engine) =
            self.objects.engine().filter(|engine| engine.spec.node_id == status.current_node_id)
        else {
            return false;
        };
        let reachability = engine.spec.node_id.as_ref().map(|node| reachability(self.context, node));
        let Some(Reachability::Reachable(agent)) = reachability else { return false };
        let Some((_, shown)) = engine::living(engine, agent) else { return false };
        let (seen, lost) = (engine.status.seen_attach, engine.status.lost_attach);
        let is_current = engine.spec.attach == status.attach;
        let is_known = seen == engine.spec.attach && lost < engine.spec.attach;
        if status.pending_salvage().is_some()
            || engine.status.current_state == CurrentState::Stopped
            || (is_current && !is_known)
        {
            return false;
        }
        if is_current && engine.spec.desire_state != DesireState::Running {
            let spec = EngineSpec { desire_state: DesireState::Running, ..engine.spec.clone() };
            self.actions.write(Engine { spec, ..engine.clone() });
        }
        if !is_current {
            // Replicas may have got the number that was drawn to fence it.
            self.draw_attach();
        }
        let serves = is_current && shown.phase() == Some(EnginePhase::Serving);
        self.enter(if serves { VolumeState::Attached } else { VolumeState::Attaching });
        self.set_settled(Finding::wrong(
            "Attaching",
            "the volume is wanted on this node again, and its engine \
         continues",
        ));
        true
    }

    /// Repairs the volume while requests continue for as long as the engine cannot be stopped.
    fn repair_while_detaching(&mut self) {
        let Some(engine) =
            self.objects.engine().filter(|engine| engine.spec.desire_state == DesireState::Stopped)
        else {
            return;
        };
        if engine.status.current_state == CurrentState::Unknown {
            let finding = Finding::wrong("NodeUnreachable", engine.status.problem());
            self.set_health(Robustness::Unknown, finding);
            return;
        }
        let is_current = engine.spec.attach == self.stored.status.attach
            && engine.status.seen_attach == engine.spec.attach;
        if engine.status.stop_refused.is_none() || !is_current {
            return;
        }
        self.report_health(engine);
        self.keep_replicas(engine);
        self.pass_on_addresses(engine);
    }

    /// Sends the addresses of the replicas to an engine that is being stopped, because its own reconciler is
    /// busy with the stop.
    fn pass_on_addresses(&mut self, engine: &Engine) {
        let (Some(node), Some(attach)) = (engine.spec.node_id.clone(), engine.spec.attach) else { return };
        let revision = engine.spec.map_revision;
        if engine.status.map_revision == revision {
            return;
        }
        let (volume, replicas) = (engine.spec.volume_name.clone(), engine.spec.replica_address_map.clone());
        self.actions.call_after_store(node, AgentCall::UpdateReplicas { volume, attach, replicas, revision });
        let status = StoredEngineStatus { map_revision: revision, ..engine.status.clone() };
        self.actions.write_engine_after_store(Engine { status, ..engine.clone() });
    }

    /// Returns true if no relevant engine runs; requests the stop of one that may run.
    pub(super) fn engine_stopped(&mut self) -> bool {
        let Some(engine) = self.objects.engine() else { return true };
        if engine.spec.desire_state != DesireState::Stopped {
            let spec = EngineSpec { desire_state: DesireState::Stopped, ..engine.spec.clone() };
            self.actions.write(Engine { spec, ..engine.clone() });
        } else if engine.status.current_state == CurrentState::Stopped
            || self.objects.is_fenced(engine)
            || is_abandoned(self.stored, engine)
        {
            return true;
        } else if self.objects.is_on_lost_node(engine) {
            self.abandon(engine);
            return false;
        }
        let finding = match (engine.status.current_state, &engine.status.stop_refused) {
            (CurrentState::Unknown, _) => {
                self.fence(engine, engine.status.problem());
                return false;
            }
            (_, Some(refused)) => {
                Finding::wrong("EngineNotStopped", format!("the engine cannot be stopped yet: {refused}"))
            }
            _ => Finding::wrong("Detaching", "the engine is being stopped"),
        };
        self.set_settled(finding);
        false
    }

    /// Records that an engine on a node that is given up is not waited for, before the first replica is
    /// removed. If the node comes back in the middle of that, the engine is stopped like a fenced one. The
    /// arbiter grants it nothing any more.
    fn abandon(&mut self, engine: &Engine) {
        self.draw_attach();
        self.status.set_abandoned(engine.spec.attach);
        self.set_settled(Finding::wrong(
            "Deleting",
            "the engine is on a node that is given up, and is not waited for",
        ));
    }

    /// Stops all processes, then deletes the replicas with their data, and then the objects.
    pub(super) fn tear_down(&mut self) {
        self.enter(VolumeState::Deleting);
        if !self.engine_stopped() {
            self.repair_while_detaching();
            return;
        }
        if self.waits_for_unknown() {
            return;
        }
        if !self.objects.replicas().is_empty() {
            self.delete_replicas();
            return;
        }
        let left = self.context.cluster.left_behind(&self.stored.spec.volume_name);
        let left: Vec<String> =
            left.map(|replica| format!("{} on {}", replica.metadata.name, replica.spec.node_id)).collect();
        // An engine that is only fenced is still a process on its node: its object stays until that is
        // stopped.
        if let Some(engine) =
            self.objects.engine().filter(|engine| engine.status.current_state != CurrentState::Stopped)
            && !self.objects.is_on_lost_node(engine)
        {
            if !engine.metadata.is_deleting() {
                self.set_settled(Finding::wrong(
                    "Deleting",
                    "the engine is fenced, and will be stopped when its node is back",
                ));
                let metadata =
                    Metadata { deletion_timestamp: Some(self.context.now), ..engine.metadata.clone() };
                self.actions.write(Engine { metadata, ..engine.clone() });
                return;
            }
            self.objects.leave_engine_behind();
        }
        if !left.is_empty() {
            let message = format!("volume is deleted, except for unreachable replicas: {}", left.join(", "));
            self.actions.emit(true, "LeftBehind", message);
        }
        // The volume is removed last: while it exists, the next run finds the rest.
        let key = |kind| Key::new(kind, &self.stored.metadata.name);
        if let Some(engine) = self.objects.engine() {
            let version = engine.metadata.resource_version;
            self.actions.remove(key(Kind::Engine), version);
        }
        self.actions.remove(key(Kind::Volume), self.stored.metadata.resource_version);
        self.status.discard();
    }

    /// Writes nothing else: a store may take a deletion and other changes by calls of their own.
    pub(super) fn ask_for_deletion(&mut self, replica: &Replica) {
        if replica.metadata.is_deleting() {
            return;
        }
        let metadata = Metadata { deletion_timestamp: Some(self.context.now), ..replica.metadata.clone() };
        self.actions.write(Replica { metadata, ..replica.clone() });
    }

    fn delete_replicas(&mut self) {
        let replicas = self.objects.replicas().to_vec();
        for replica in replicas {
            self.ask_for_deletion(replica);
        }
        let message = format!("the data of the replicas is being deleted{}", self.objects.replica_messages());
        self.set_settled(Finding::wrong("Deleting", message));
    }
}
