use std::time::Duration;

use super::{
    Context, GIVE_UP_CHECK, Reachability, START_CHECK, UNREACHABLE_AFTER, has_lost_location, is_given_up,
    quiet_left, reachability, remaining, volume,
};
use crate::objects::{
    CurrentState, DataState, DesireState, Key, Kind, MemberMode, MemberRecord, Replica, StoredReplicaStatus,
    Volume, VolumeState,
};
use crate::observed::{Detail, Instance, InstanceKey, InstanceState, ObservedAgent};
use crate::undelete::DeletionRecord;
use crate::{Action, AgentCall, Decision, StartReplica, Timestamp};

pub(super) fn reconcile(context: &Context<'_>, name: &str) -> Decision {
    let Some(replica) = context.cluster.replicas.get(name) else { return Decision::nothing() };
    if replica.metadata.is_deleting() {
        return delete(context, replica);
    }
    see(context, replica, replica.spec.desire_state)
}

fn see(context: &Context<'_>, replica: &Replica, desire_state: DesireState) -> Decision {
    match reachability(context, &replica.spec.node_id) {
        Reachability::Uncertain(wait) => Decision { requeue_after: Some(wait), ..Decision::nothing() },
        Reachability::Unreachable(reason) => mark_unreachable(context, replica, reason),
        Reachability::Reachable(agent) => match desire_state {
            DesireState::Running => run(context, replica, agent),
            DesireState::Stopped => stop(context, replica, agent),
        },
    }
}

fn instance_of(replica: &Replica) -> InstanceKey {
    InstanceKey::replica(&replica.spec.volume_name, replica.spec.replica_id)
}

/// Writes the status if it differs from the stored one.
fn write_status(decision: &mut Decision, replica: &Replica, status: StoredReplicaStatus) {
    if status != replica.status {
        decision.write(Replica { status, ..replica.clone() });
    }
}

fn mark_unreachable(context: &Context<'_>, replica: &Replica, reason: String) -> Decision {
    let mut decision = Decision::nothing();
    let mut status = wanted_status(context, replica);
    let is_stopped_as_desired =
        replica.spec.desire_state == DesireState::Stopped && status.current_state == CurrentState::Stopped;
    if !is_stopped_as_desired {
        status.current_state = CurrentState::Unknown;
        status.addresses.clear();
        status.message = reason;
    }
    write_status(&mut decision, replica, status);
    decision
}

fn run(context: &Context<'_>, replica: &Replica, agent: &ObservedAgent) -> Decision {
    if replica.status.stop_first {
        return stop_first(replica, agent);
    }
    let key = instance_of(replica);
    let mut decision = Decision::nothing();
    let mut status = wanted_status(context, replica);
    let found = agent.instances.get(&key).filter(|instance| instance.state != InstanceState::Stopped);
    match found {
        Some(instance) => take_over(&mut status, instance),
        None => {
            let failure = agent.failures.get(&key).map(|failure| &failure.message);
            let failed = failure.is_some();
            status.current_state = if failed { CurrentState::Error } else { CurrentState::Starting };
            status.message = failure.cloned().unwrap_or_default();
            status.addresses.clear();
        }
    }
    let create = status.data != DataState::Present;
    store_changed(context, replica, status, &mut decision);
    // The desired state is stored: a process and a directory may exist from here on, whatever the status
    // says.
    if found.is_none() {
        start(context, replica, create, &mut decision);
    }
    decision
}

/// Stops the process that a replica may have had before its undeletion, because no engine of its volume could
/// authenticate to it. The object is stored after the call, as a record of this.
fn stop_first(replica: &Replica, agent: &ObservedAgent) -> Decision {
    let mut decision = Decision::nothing();
    let key = instance_of(replica);
    let failure = agent.failures.get(&key).map(|failure| &failure.message);
    let mut status = StoredReplicaStatus {
        current_state: if failure.is_some() { CurrentState::Error } else { CurrentState::Starting },
        message: failure.cloned().unwrap_or_default(),
        addresses: Vec::new(),
        ..replica.status.clone()
    };
    if failure.is_some() && status != replica.status {
        // The status is stored first. Its change causes the next run, which tries again.
        write_status(&mut decision, replica, status);
        return decision;
    }
    decision.call(&replica.spec.node_id, AgentCall::StopInstance { instance: key, attach: None });
    status = StoredReplicaStatus {
        stop_first: false,
        current_state: CurrentState::Starting,
        message: String::new(),
        ..status
    };
    write_status(&mut decision, replica, status);
    decision
}

/// Writes the status of a wanted replica, if it has changed. Two things wait for the next write. The first is
/// that the replica is being started, for a while. The second is that one of the first replicas is in the
/// view, because it counts as a member until something else is stored.
fn store_changed(
    context: &Context<'_>,
    replica: &Replica,
    status: StoredReplicaStatus,
    decision: &mut Decision,
) {
    let stored = &replica.status;
    let volume = context.cluster.volumes.get(replica.spec.volume_name.as_str());
    let mut changed = status.clone();
    let left = quiet_left(context, volume);
    let is_start =
        stored.current_state == CurrentState::Stopped && status.current_state == CurrentState::Starting;
    if is_start && !left.is_zero() {
        (changed.current_state, changed.data) = (stored.current_state, stored.data);
        decision.again_after(left);
    }
    let is_first =
        volume.is_some_and(|volume| volume.status.first_members.contains(&replica.spec.replica_id));
    if is_first && stored.failed_at.is_none() {
        changed.healthy_at = stored.healthy_at;
    }
    if changed != *stored {
        decision.write(Replica { status, ..replica.clone() });
    }
}

/// Copies the status of a process.
fn take_over(status: &mut StoredReplicaStatus, instance: &Instance) {
    status.message = instance.message.clone().unwrap_or_default();
    status.addresses.clear();
    status.current_state = match instance.state {
        InstanceState::Starting => CurrentState::Starting,
        InstanceState::Running => CurrentState::Running,
        InstanceState::Stopping | InstanceState::Stopped => CurrentState::Stopping,
        InstanceState::Error => CurrentState::Error,
    };
    if let (InstanceState::Running, Detail::Replica(shown)) = (instance.state, &instance.detail) {
        status.addresses.clone_from(&shown.addresses);
        status.data = DataState::Present;
    }
}

fn start(context: &Context<'_>, replica: &Replica, create: bool, decision: &mut Decision) {
    let spec = &replica.spec;
    let Some(volume) = context.cluster.volumes.get(spec.volume_name.as_str()) else { return };
    let call = StartReplica {
        volume: spec.volume_name.clone(),
        replica_id: spec.replica_id,
        disk_path: spec.disk_path.clone(),
        disk_uuid: spec.disk_uuid(),
        size_bytes: spec.volume_size,
        first_members: volume.status.first_members.clone(),
        secret: volume.spec.secret.clone(),
        create,
        rebind: replica.status.rebind,
        encrypt_in_transit: volume.spec.encrypt_in_transit,
    };
    decision.call(&spec.node_id, AgentCall::StartReplica(call));
    decision.again_after(START_CHECK);
}

fn stop(context: &Context<'_>, replica: &Replica, agent: &ObservedAgent) -> Decision {
    let key = instance_of(replica);
    let mut decision = Decision::nothing();
    let shown = agent.instances.get(&key).is_some_and(|instance| instance.state != InstanceState::Stopped);
    let mut status = with_membership(context, replica);
    let stopped = status.current_state == CurrentState::Stopped;
    let failure = agent.failures.get(&key).map(|failure| &failure.message);
    if let Some(failure) = failure.filter(|failure| !stopped && **failure != status.message) {
        // The status is stored first. Its change causes the next run, which tries again.
        status.message.clone_from(failure);
        write_status(&mut decision, replica, status);
        return decision;
    }
    if shown || !stopped || status.stop_first {
        decision.call(&replica.spec.node_id, AgentCall::StopInstance { instance: key, attach: None });
    }
    status.current_state = CurrentState::Stopped;
    status.stop_first = false;
    status.addresses.clear();
    status.message.clear();
    write_status(&mut decision, replica, status);
    decision
}

/// Returns the status with the engine's last report on this replica. If the replica is wanted, a directory
/// may exist.
fn wanted_status(context: &Context<'_>, replica: &Replica) -> StoredReplicaStatus {
    let mut status = with_membership(context, replica);
    if replica.spec.desire_state == DesireState::Running && status.data == DataState::None {
        status.data = DataState::Requested;
    }
    status
}

/// Returns the status with the engine's last report on this replica.
fn with_membership(context: &Context<'_>, replica: &Replica) -> StoredReplicaStatus {
    let mut status = replica.status.clone();
    let owner = context.cluster.volumes.get(replica.spec.volume_name.as_str());
    if owner.is_some_and(|volume| {
        volume.status.first_members.contains(&replica.spec.replica_id) || volume.status.attach.is_some()
    }) {
        // Its undeletion is complete: the volume is stored with all that the record has.
        status.undeletion_record = None;
    }
    let engine = context.cluster.engines.get(replica.spec.volume_name.as_str());
    let Some(engine) = engine.filter(|engine| engine.status.is_serving()) else { return status };
    let member = engine.status.replica_mode_map.get(&replica.spec.replica_id);
    let mode = member.map(|member| member.mode);
    if mode == Some(MemberMode::Member) {
        // It has proven the secret of the volume to the engine.
        (status.lost_since, status.rebind) = (None, false);
        if status.failed_at.take().is_some() || status.healthy_at.is_none() {
            status.healthy_at = Some(context.now);
        }
        return status;
    }
    // The engine serves, so a replica that is not a member of its view has left it, or was never in one.
    let away_since = member.and_then(|member| away_since(member, context.now)).unwrap_or(context.now);
    if mode == Some(MemberMode::Rebuilding) {
        // A replica that ends its own rebuilds is lost from the first of them on, or none would replace it.
        if !member.is_some_and(|member| member.rebuild_failed) {
            status.lost_since = None;
        }
    } else if status.lost_since.is_none() {
        // A replica that was being rebuilt since it left has not been lost for all that time.
        let since = if status.failed_at.is_none() { away_since } else { context.now };
        status.lost_since = Some(since);
    }
    status.failed_at.get_or_insert(away_since);
    status
}

/// Returns the time since which a replica is absent according to the engine. It is never in the future,
/// whatever the clock of its node is.
fn away_since(member: &MemberRecord, now: Timestamp) -> Option<Timestamp> {
    let since_ms = i64::try_from(member.away_since_ms?).ok()?;
    Timestamp::from_millisecond(since_ms).ok().map(|since| since.min(now))
}

/// Returns true if the volume does without this replica: others have everything, and the engine does not know
/// it any more.
fn is_replaced(context: &Context<'_>, volume: &Volume, replica: &Replica) -> bool {
    let engine = context.cluster.engines.get(replica.spec.volume_name.as_str());
    engine.is_some_and(|engine| volume::may_go(context, volume, engine, replica))
}

fn delete(context: &Context<'_>, replica: &Replica) -> Decision {
    let owner = Key::new(Kind::Volume, replica.spec.volume_name.as_str());
    if let Some(message) = context.cluster.unknown(&owner) {
        // No object shows whether the volume needs the data.
        let mut decision = Decision::nothing();
        write_status(&mut decision, replica, StoredReplicaStatus { message, ..replica.status.clone() });
        // A change of the volume wakes its own replicas, and not those that it has left behind.
        decision.again_after(GIVE_UP_CHECK);
        return decision;
    }
    if let Some(record) = &replica.status.deletion_record {
        return remove(context, replica, record.clone(), None);
    }
    // A volume is removed after its last replica, except for those that it leaves behind; so it exists.
    let Some(volume) = context.cluster.volumes.get(replica.spec.volume_name.as_str()) else {
        return Decision::nothing();
    };
    // Data is deleted once it is stored that the deletion has begun, and no PersistentVolume holds it any
    // more. Both objects may have been deleted: an engine that still runs may have written to no other
    // replica.
    let has_begun = volume.is_deleting() && volume.status.state == VolumeState::Deleting;
    let with_volume = has_begun && volume::engine_is_over(context, volume);
    if !with_volume && !is_replaced(context, volume, replica) {
        // A deleted replica stays in use until the volume is served without it.
        return see(context, replica, replica.spec.desire_state);
    }
    let mut record = DeletionRecord::of(volume, replica, with_volume);
    if record.is_empty() {
        // The volume is only half undeleted: the kept record still describes it.
        record = replica.status.undeletion_record.clone().unwrap_or_default();
    }
    remove(context, replica, record, Some((volume, with_volume)))
}

/// Has the data deleted, and then removes the object. `volume` is absent if it is gone; its flag is true if
/// the volume is being deleted too.
fn remove(
    context: &Context<'_>,
    replica: &Replica,
    record: String,
    volume: Option<(&Volume, bool)>,
) -> Decision {
    let mut decision = Decision::nothing();
    let remove =
        Action::Remove(Key::new(Kind::Replica, &replica.metadata.name), replica.metadata.resource_version);
    if replica.was_never_started() {
        decision.actions.push(remove);
        return decision;
    }
    let key = instance_of(replica);
    let trouble = match reachability(context, &replica.spec.node_id) {
        reachability if has_lost_location(context, replica) => {
            let about = volume.map(|_| Key::new(Kind::Volume, replica.spec.volume_name.as_str()));
            let about = about.unwrap_or_else(|| Key::new(Kind::Replica, &replica.metadata.name));
            decision.emit(about, true, "ReplicaForgotten", forgotten(context, replica));
            decision.actions.push(remove);
            if let Reachability::Reachable(_) = reachability {
                // Afterwards: the removal does not wait for a process whose disk hangs.
                decision.call(&replica.spec.node_id, AgentCall::StopInstance { instance: key, attach: None });
            }
            return decision;
        }
        Reachability::Uncertain(wait) => {
            decision.again_after(wait);
            return decision;
        }
        Reachability::Unreachable(reason) => Some((reason, Duration::ZERO)),
        Reachability::Reachable(agent) => {
            let stray = stray_engine(context, replica, &record, agent);
            if let Some((instance, attach)) = stray.clone() {
                decision.call(&replica.spec.node_id, AgentCall::StopInstance { instance, attach });
            }
            ask_for_deletion(&mut decision, replica, &record);
            decision.actions.push(remove);
            // A failed call is repeated for as long as the controller waits for an unreachable node.
            let since = volume.and_then(|(volume, _)| volume.metadata.deletion_timestamp);
            let left = since.map_or(Duration::ZERO, |since| remaining(since, UNREACHABLE_AFTER, context.now));
            obstacle(agent, &key, stray.map(|(instance, _)| instance)).map(|failure| (failure, left))
        }
    };
    let Some((message, left)) = trouble else { return decision };
    if !left.is_zero() {
        decision.again_after(left);
    }
    // A volume that is being deleted does not wait for the replica.
    let is_left =
        replica.is_left_behind() || left.is_zero() && volume.is_some_and(|(_, with_volume)| with_volume);
    let status =
        StoredReplicaStatus { message, deletion_record: is_left.then_some(record), ..replica.status.clone() };
    if status != replica.status {
        // The status is stored first. Its change causes the next run, which tries again.
        decision = Decision::nothing();
        write_status(&mut decision, replica, status);
    }
    decision
}

/// Returns the obstacle to the deletion of the data: the error of the last call, if that was of a deletion.
fn obstacle(agent: &ObservedAgent, replica: &InstanceKey, stray: Option<InstanceKey>) -> Option<String> {
    if let Some(failure) = stray.and_then(|engine| agent.failures.get(&engine)) {
        return Some(format!(
            "an engine of its deleted volume is still there, and is stopped first: {}",
            failure.message
        ));
    }
    let failure = agent.failures.get(replica)?;
    matches!(failure.call, "StopInstance" | "DeleteReplica").then(|| failure.message.clone())
}

/// Returns an engine that still exists on the node of a replica that was left behind, and the number of its
/// volume's last attachment. No other object knows of it, if the volume has been elsewhere since. It is
/// fenced. An engine of a new volume of the name is left alone.
fn stray_engine(
    context: &Context<'_>,
    replica: &Replica,
    record: &str,
    agent: &ObservedAgent,
) -> Option<(InstanceKey, Option<u64>)> {
    let instance = InstanceKey::engine(&replica.spec.volume_name);
    let has_no_volume = !context.cluster.volumes.contains_key(replica.spec.volume_name.as_str());
    let is_stray = replica.is_left_behind() && has_no_volume && agent.instances.contains_key(&instance);
    let record: DeletionRecord = serde_json::from_str(record).ok().filter(|_| is_stray)?;
    Some((instance, record.attach))
}

fn ask_for_deletion(decision: &mut Decision, replica: &Replica, record: &str) {
    let (spec, instance) = (&replica.spec, instance_of(replica));
    decision.call(&spec.node_id, AgentCall::StopInstance { instance, attach: None });
    let call = AgentCall::DeleteReplica {
        disk_path: spec.disk_path.clone(),
        disk_uuid: spec.disk_uuid(),
        volume: spec.volume_name.clone(),
        replica_id: spec.replica_id,
        record: record.to_owned(),
    };
    decision.call(&spec.node_id, call);
}

fn forgotten(context: &Context<'_>, replica: &Replica) -> String {
    let (name, node, disk) = (&replica.metadata.name, &replica.spec.node_id, &replica.spec.disk_path);
    if is_given_up(context, node) {
        return format!("the object of replica {name} is deleted: node {node} with its data was given up");
    }
    format!("the object of replica {name} is deleted: disk {disk} of node {node} with its data was given up")
}
