use std::collections::BTreeMap;

use shorthorn_types::ReplicaId;

use super::replace::most_needed;
use super::{VolumeReconciler, health, remaining};
use crate::objects::{
    CurrentState, DataState, DesireState, Engine, EnginePhase, EngineSpec, Finding, Replica, ReplicaSpec,
    Robustness, StoredReplicaStatus, VolumeState,
};
use crate::reconcile::{ENGINE_RETRY, REPLICA_WAIT};
use crate::{NodeName, ReplicaTarget};

impl VolumeReconciler<'_> {
    /// Draws the number of the attachment. This run stores it, and nothing is started before the next one.
    pub(super) fn begin_attach(&mut self, node: NodeName) {
        if self.waits_for_name() {
            return;
        }
        if self.objects.engine().is_none() {
            // It was undeleted while the engine that it had before was removed.
            self.actions.write(Engine::of_new(self.stored, self.context.now));
        }
        self.status.set_node(node);
        self.enter(VolumeState::Attaching);
        let next = self.draw_attach();
        self.mark_stale_before(next);
        self.status.begin_stay();
        self.set_settled(Finding::wrong("Attaching", "the replicas are being started, and then the engine"));
    }

    /// Draws a number above all that any reachable process knows, because the store may be older than the
    /// volume, and above that of its engine. Returns it.
    pub(super) fn draw_attach(&mut self) -> u64 {
        self.status.draw_attach(self.objects.known_attach())
    }

    /// Starts the replicas, then the engine, then the device.
    pub(super) fn attach(&mut self) {
        self.want_replicas(DesireState::Running);
        let Some(engine) = self.objects.engine() else {
            self.make_engine();
            return;
        };
        if engine.spec.attach < self.stored.status.attach {
            self.launch(engine);
            return;
        }
        if self.replace_lost_engine(engine) {
            return;
        }
        let status = &engine.status;
        // The status of an older engine says nothing about this one.
        let current = status.seen_attach == engine.spec.attach;
        if let Some(endpoint) = status.endpoint.as_ref().filter(|_| current && status.is_serving()) {
            let node = engine.spec.node_id.as_ref().map_or("", NodeName::as_str);
            let message = format!("the engine serves on node {node}: {endpoint}");
            self.actions.emit(false, "EngineStarted", message);
            self.enter(VolumeState::Attached);
            self.maintain_attached();
            return;
        }
        if current {
            // The engine may wait for a replica that returns at another address.
            let replicas = self.objects.replicas().to_vec();
            self.send_replica_addresses(engine, &replicas);
        }
        let frozen = current && status.phase == Some(EnginePhase::Frozen) && !self.is_being_granted();
        if status.current_state == CurrentState::Error || frozen {
            let (robustness, finding) = health::attached(self.stored, engine, self.objects.replicas());
            self.set_health(robustness, finding.clone());
            self.set_settled(finding);
        } else {
            let finding = match status.current_state {
                CurrentState::Unknown => Finding::wrong("NodeUnreachable", status.problem()),
                _ => Finding::wrong("EngineStarting", "the engine is being started"),
            };
            self.set_settled_of_start(finding);
        }
    }

    /// Makes the engine object of a volume that has lost it on its way to a node. The volume had left the
    /// object behind before its undeletion, and it was removed when its process had stopped. Nothing may have
    /// the number that was drawn for it.
    fn make_engine(&mut self) {
        if self.waits_for_name() {
            return;
        }
        self.actions.write(Engine::of_new(self.stored, self.context.now));
        self.draw_attach();
    }

    /// Hands the engine this attachment, once enough replicas run.
    fn launch(&mut self, engine: &Engine) {
        let Some(node) = self.stored.status.current_node_id.clone() else { return };
        let left = match self.stored.status.attach_started_at {
            Some(start) => remaining(start, REPLICA_WAIT, self.context.now),
            None => REPLICA_WAIT,
        };
        let first_members = &self.stored.status.first_members;
        // An engine that never existed needs no fence.
        let node_was_lost = engine.spec.attach.is_some() && self.objects.is_fenced(engine);
        let unknown = self.context.cluster.unknown_members_of(&self.stored.metadata.name).collect();
        match health::readiness(self.objects.replicas(), unknown, first_members, &node, left, node_was_lost) {
            health::StartReadiness::Ready(targets) => {
                self.write_launch(engine, node, targets);
                self.set_settled_of_start(Finding::wrong("EngineStarting", "the engine is being started"));
            }
            health::StartReadiness::Wait(left, missing) => {
                self.actions.again_after(left);
                self.set_settled_of_start(Finding::wrong(
                    "WaitingForReplicas",
                    format!("waiting for replicas: {missing}"),
                ));
            }
            health::StartReadiness::TooFew(message) => {
                let finding = Finding::wrong("TooFewReplicas", message);
                self.set_health(Robustness::Faulted, finding.clone());
                self.set_settled(finding);
            }
        }
    }

    fn write_launch(
        &mut self,
        engine: &Engine,
        node: NodeName,
        mut targets: BTreeMap<ReplicaId, ReplicaTarget>,
    ) {
        let moves = engine.spec.node_id.as_ref() != Some(&node);
        let stopped = engine.spec.desire_state == DesireState::Stopped
            && (engine.status.current_state == CurrentState::Stopped || self.objects.is_fenced(engine));
        // An engine that may still write on another node is stopped or fenced there first: detaching does
        // that.
        if moves && !stopped {
            self.enter(VolumeState::Detaching);
            return;
        }
        let running = self.objects.replicas().iter().copied();
        let running = running.filter(|replica| targets.contains_key(&replica.spec.replica_id));
        let needed: Vec<ReplicaId> =
            most_needed(engine, running).into_iter().map(|replica| replica.spec.replica_id).collect();
        targets.retain(|id, _| needed.contains(id));
        let spec = EngineSpec {
            node_id: Some(node),
            desire_state: DesireState::Running,
            attach: self.stored.status.attach,
            map_revision: engine.spec.map_revision + 1,
            replica_address_map: targets,
            ..engine.spec.clone()
        };
        self.actions.write(Engine { spec, ..engine.clone() });
    }

    /// Draws a new number if the engine of this attachment is gone for good. Returns true if it was lost.
    fn replace_lost_engine(&mut self, engine: &Engine) -> bool {
        if engine.status.lost_attach < self.stored.status.attach {
            return false;
        }
        let finding = health::engine_trouble(engine);
        let left = match self.stored.status.attach_started_at {
            Some(start) => remaining(start, ENGINE_RETRY, self.context.now),
            None => std::time::Duration::ZERO,
        };
        // An engine that is restarted at once is not a problem yet.
        let robustness = if left.is_zero() { Robustness::Unknown } else { Robustness::Faulted };
        self.set_health(robustness, finding.clone());
        self.set_settled(finding);
        self.enter(VolumeState::Attaching);
        if left.is_zero() {
            self.draw_attach();
            self.actions.emit(true, "EngineLost", format!("{}; attaching again", engine.status.problem()));
        } else {
            self.actions.again_after(left);
        }
        true
    }

    /// Keeps an attached volume's robustness up to date.
    pub(super) fn maintain_attached(&mut self) {
        let Some(engine) = self.objects.engine() else { return };
        if self.replace_lost_engine(engine) {
            return;
        }
        self.report_health(engine);
        self.set_settled(Finding::Well);
        self.keep_replicas(engine);
    }

    /// Records the robustness of a volume whose engine runs.
    pub(super) fn report_health(&mut self, engine: &Engine) {
        if engine.status.phase == Some(EnginePhase::Frozen) && self.is_being_granted() {
            return;
        }
        let (robustness, finding) = health::attached(self.stored, engine, self.objects.replicas());
        if let Some((reason, message)) = health::new_loss(self.stored, &finding) {
            self.actions.emit(true, reason, message);
        }
        self.set_health(robustness, finding);
    }

    /// Writes the desired state of the replicas if it differs.
    pub(super) fn want_replicas(&mut self, desire_state: DesireState) {
        let replicas = self.objects.replicas().to_vec();
        for replica in replicas {
            self.want_replica(replica, desire_state);
        }
    }

    pub(super) fn want_replica(&mut self, replica: &Replica, desire_state: DesireState) {
        if replica.spec.desire_state == desire_state {
            return;
        }
        let is_unseen = replica.status.current_state == CurrentState::Stopped;
        if desire_state == DesireState::Stopped && is_unseen {
            // The replica was started, so it may run, although no agent has reported it yet. The new desired
            // state must not hide that.
            let data = match replica.status.data {
                DataState::None => DataState::Requested,
                known => known,
            };
            let status =
                StoredReplicaStatus { current_state: CurrentState::Starting, data, ..replica.status.clone() };
            self.actions.write(Replica { status, ..replica.clone() });
            return;
        }
        let spec = ReplicaSpec { desire_state, ..replica.spec.clone() };
        self.actions.write(Replica { spec, ..replica.clone() });
    }
}
