use std::time::Duration;

use shorthorn_types::ReplicaId;

use super::{Reachability, VolumeReconciler, reachability};
use crate::NodeName;
use crate::objects::{
    ConditionType, DataState, DesireState, Engine, Finding, Metadata, Replica, ReplicaSpec,
    StoredReplicaStatus, VolumeState,
};
use crate::reconcile::{Context, SPACE_CHECK, waiting_volumes};
use crate::scheduler::{self, Placement, PlacementRefusal, PlacementRequest};

/// The reason of the conditions of a volume that has no place for a replica.
const NO_PLACE: &str = "NoPlace";
/// The message of a volume whose undeletion was interrupted.
const UNDELETING: &str = "the volume is being restored from the trash; if that does not complete, run \
                          shorthornctl volume undelete again";

impl VolumeReconciler<'_> {
    /// Makes the engine object and gives every replica a place.
    pub(super) fn create(&mut self) {
        if self.waits_for_name() || self.waits_for_unknown() {
            return;
        }
        if self.objects.engine().is_none() {
            self.actions.write(Engine::of_new(self.stored, self.context.now));
        }
        let wanted = self.stored.spec.number_of_replicas;
        let created = self.stored.metadata.creation_timestamp;
        let was_before = |replica: &&Replica| {
            replica.status.data == DataState::Present || replica.metadata.creation_timestamp < created
        };
        if self.objects.replicas().iter().any(was_before) {
            // The replica existed before the volume: it is being undeleted, and the rest of it is about to be
            // stored.
            self.set_settled(Finding::wrong("Undeleting", UNDELETING));
            return;
        }
        let missing = (wanted as usize).saturating_sub(self.objects.replicas().len());
        if missing > 0 && !self.schedule_replicas(wanted) {
            return;
        }
        if self.objects.engine().is_some() {
            let members = self.objects.replicas().iter().map(|replica| replica.spec.replica_id);
            // A replica whose creation was not answered, and was repeated, may be one too many.
            self.status.set_first_members(members.take(wanted as usize).collect());
            let nodes: Vec<&str> =
                self.objects.replicas().iter().map(|replica| replica.spec.node_id.as_str()).collect();
            let nodes = nodes.join(", ");
            if missing == 0 {
                self.status.set(ConditionType::Scheduled, Finding::Well);
                let message = format!("{wanted} replicas are placed: on {nodes}");
                self.actions.emit(false, "Scheduled", message);
            } else {
                let placed = self.objects.replicas().len();
                let message = format!(
                    "{placed} of {wanted} replicas are placed: on {nodes}; the others are created once the \
                     volume is attached and they can be scheduled"
                );
                self.actions.emit(true, "ScheduledDegraded", message);
            }
            self.set_settled(Finding::Well);
            self.set_health_unknown();
            self.enter(VolumeState::Detached);
        }
    }

    /// Returns true if this volume cannot have an engine before the one that an earlier volume of the name
    /// has left behind is gone.
    pub(super) fn waits_for_name(&mut self) -> bool {
        let waits = self.objects.has_engine_of_earlier_volume();
        if waits {
            let message = "an engine of a deleted volume of this name is stopped first, when its node is \
                           back or given up";
            self.set_settled(Finding::wrong("NameInUse", message));
        }
        waits
    }

    /// Returns true if the volume continues with the placed replicas.
    fn schedule_replicas(&mut self, wanted: u32) -> bool {
        let request = PlacementRequest::of(self.stored, self.context.settings.scheduling);
        let present = u32::try_from(self.objects.replicas().len()).unwrap_or(u32::MAX);
        let Context { cluster, agents, random, .. } = *self.context;
        // The ids of the replicas use the first numbers.
        let last = random[random.len() - 1];
        match scheduler::place(cluster, agents, self.stored, &request, (present, wanted), last) {
            Ok(placements) => self.write_scheduled(placements),
            Err(refusal) => {
                if let Some(wait) = self.nodes_may_come() {
                    self.check_places_after(wait);
                    self.set_settled(self.refused(ConditionType::Settled, "WaitingForNodes", &refusal));
                    return false;
                }
                if self.context.settings.degraded_creation && refusal.placed > 0 {
                    return self.schedule_some(&request, present, &refusal);
                }
                self.report_unschedulable(&refusal);
                self.set_settled(self.refused(ConditionType::Settled, NO_PLACE, &refusal));
            }
        }
        false
    }

    /// Places as many replicas as possible. Returns true if no further replica has a place. That others have
    /// none is stored only then: while the volume is being created it would mean that the volume cannot be.
    fn schedule_some(
        &mut self,
        request: &PlacementRequest,
        present: u32,
        refusal: &PlacementRefusal,
    ) -> bool {
        if refusal.placed == present {
            let finding = self.refused(ConditionType::Scheduled, NO_PLACE, refusal);
            self.status.set(ConditionType::Scheduled, finding);
            return true;
        }
        let mut nodes = scheduler::candidates(self.context.cluster, self.context.agents, self.stored);
        if let Ok(placements) = scheduler::schedule(request, &mut nodes, present, refusal.placed) {
            self.write_scheduled(placements);
        }
        false
    }

    fn write_scheduled(&mut self, placements: Vec<Placement>) {
        let random = self.context.random;
        for (placement, random) in placements.into_iter().zip(random) {
            self.write_replica(placement, ReplicaId::from_random(random), DesireState::Stopped);
        }
    }

    /// Checks again after that time, or later if many volumes wait. An event that may open a place comes
    /// first.
    pub(super) fn check_places_after(&mut self, least: Duration) {
        self.actions.again_after(waiting_volumes::check_after(self.context.cluster, least));
    }

    pub(super) fn report_unschedulable(&mut self, refusal: &PlacementRefusal) {
        if refusal.waits_for_space() {
            self.check_places_after(SPACE_CHECK);
        }
        let scheduled = self.stored.status.conditions.get(ConditionType::Scheduled);
        if scheduled.is_none_or(|scheduled| !refusal.is_described_by(&scheduled.message)) {
            self.actions.emit(true, NO_PLACE, refusal.to_string());
        }
        let finding = self.refused(ConditionType::Scheduled, NO_PLACE, refusal);
        self.status.set(ConditionType::Scheduled, finding);
    }

    /// Returns the finding of a refusal. A stored text stays if only sizes differ. With many waiting volumes,
    /// each change of free space would be a write for each.
    fn refused(&self, kind: ConditionType, reason: &'static str, refusal: &PlacementRefusal) -> Finding {
        let stored = self.stored.status.conditions.get(kind);
        let same = stored.filter(|stored| refusal.is_described_by(&stored.message));
        Finding::wrong(reason, same.map_or_else(|| refusal.to_string(), |stored| stored.message.clone()))
    }

    /// Returns the time that recently unreachable nodes may still take, which are all nodes when the
    /// controller starts: no place is refused before.
    pub(super) fn nodes_may_come(&self) -> Option<Duration> {
        let left = |node: &NodeName| match reachability(self.context, node) {
            Reachability::Uncertain(left) => Some(left),
            Reachability::Reachable(_) | Reachability::Unreachable(_) => None,
        };
        self.context.agents.by_node().keys().filter_map(left).max()
    }

    pub(super) fn write_replica(
        &mut self,
        placement: Placement,
        replica_id: ReplicaId,
        desire_state: DesireState,
    ) {
        let spec = &self.stored.spec;
        let name = ReplicaSpec::instance_name(&spec.volume_name, replica_id);
        self.actions.write(Replica {
            metadata: Metadata::new(name, self.context.now),
            spec: ReplicaSpec {
                volume_name: spec.volume_name.clone(),
                volume_size: spec.size,
                replica_id,
                node_id: placement.node,
                disk_path: placement.disk_path,
                disk_id: placement.disk_uuid,
                desire_state,
                eviction_requested: false,
            },
            status: StoredReplicaStatus::default(),
        });
    }
}
