//! Converts objects to the messages of controller.proto, which have no fields for secrets.

use shorthorn_api::v1;
use shorthorn_controller_core::objects::{
    Condition, Conditions, DataLocality, Engine, MemberRecord, Node, Replica, Salvage, Volume,
};
use shorthorn_controller_core::observed::{Agents, Detail, InstanceKey, MemberStatus, ObservedEngine};
use shorthorn_controller_core::requests::RequestError;
use shorthorn_controller_core::{ClusterState, Labels, NodeName};
use shorthorn_types::ReplicaId;

use crate::agents::convert;

/// Parses the data locality of a request, if it has one.
pub(super) fn data_locality(word: Option<String>) -> Result<Option<DataLocality>, RequestError> {
    Ok(word.map(|word| word.parse()).transpose()?)
}

fn text(node: Option<&NodeName>) -> String {
    node.map(ToString::to_string).unwrap_or_default()
}

fn texts(labels: &Labels) -> Vec<String> {
    labels.iter().map(ToString::to_string).collect()
}

pub(super) fn volume(cluster: &ClusterState, agents: &Agents, volume: &Volume) -> v1::Volume {
    let (spec, status) = (&volume.spec, &volume.status);
    let engine_object = cluster.engines.get(&volume.metadata.name);
    let attached = status.state == shorthorn_controller_core::objects::VolumeState::Attached;
    let endpoint = engine_object.filter(|_| attached).and_then(|engine| engine.status.endpoint.clone());
    let replicas = cluster.replicas_of(&spec.volume_name).map(|object| replica(cluster, agents, object));
    let shown = engine_object.and_then(|engine| shown_of(agents, engine)?.reported.as_ref());
    v1::Volume {
        name: volume.metadata.name.clone(),
        size_bytes: spec.size,
        current_size_bytes: volume.current_size_bytes(),
        number_of_replicas: spec.number_of_replicas,
        node: text(spec.node_id.as_ref()),
        current_node: text(status.current_node_id.as_ref()),
        endpoint: endpoint.unwrap_or_default(),
        attach: status.attach.unwrap_or_default(),
        conditions: conditions(&status.conditions),
        replicas: replicas.collect(),
        engine: engine_object.map(|object| engine(object).with_reported(shown)),
        created: volume.metadata.creation_timestamp.to_string(),
        replica_soft_anti_affinity: spec.replica_soft_anti_affinity,
        rebuild: Some(v1::RebuildLimits {
            bytes_per_s: spec.rebuild.bytes_per_s.unwrap_or_default(),
            share_percent: spec.rebuild.share_percent,
        }),
        resync: shown.and_then(|shown| shown.resync).map(Into::into),
        scrub: shown.and_then(|shown| shown.scrub.clone()).map(Into::into),
        salvage: status.salvage.as_ref().map(salvage),
        replica_zone_soft_anti_affinity: spec.replica_zone_soft_anti_affinity,
        replica_disk_soft_anti_affinity: spec.replica_disk_soft_anti_affinity,
        node_selector: texts(&spec.node_selector),
        disk_selector: texts(&spec.disk_selector),
        verify_reads: spec.verify_reads,
        encrypt_in_transit: spec.encrypt_in_transit,
        persistent_volume: status.persistent_volume.clone().unwrap_or_default(),
        claim: status.claim.clone().unwrap_or_default(),
        actual_size_bytes: status.actual_size.unwrap_or_default(),
        workloads: Vec::new(),
        ..v1::Volume::default()
    }
    .with_state(status.state)
    .with_robustness(status.robustness)
    .with_frontend(spec.frontend)
    .with_data_locality(spec.data_locality)
    .with_granted(status.arbiter.granted())
}

/// Returns the observed engine of the current attachment.
fn shown_of<'a>(agents: &'a Agents, engine: &Engine) -> Option<&'a ObservedEngine> {
    let agent = agents.get(engine.spec.node_id.as_ref()?)?;
    match &agent.instances.get(&InstanceKey::engine(&engine.spec.volume_name))?.detail {
        Detail::Engine(shown) if shown.is_of(engine.spec.attach) => Some(shown),
        _ => None,
    }
}

fn salvage(salvage: &Salvage) -> v1::Salvage {
    v1::Salvage {
        replica_id: salvage.replica_id.to_string(),
        attach: salvage.attach,
        decided: salvage.decided_at.to_string(),
        by: salvage.by.clone(),
        reason: salvage.reason.clone(),
        losses: salvage.losses.clone(),
        done: salvage.done,
    }
}

fn conditions(conditions: &Conditions) -> Vec<v1::Condition> {
    let one = |condition: &Condition| v1::Condition {
        r#type: condition.kind.as_str().to_owned(),
        status: condition.status,
        reason: condition.reason.clone(),
        message: condition.message.clone(),
        last_transition: condition.last_transition_time.to_string(),
        observed_generation: condition.observed_generation.unwrap_or_default(),
    };
    conditions.iter().map(one).collect()
}

fn engine(engine: &Engine) -> v1::Engine {
    v1::Engine {
        node: text(engine.spec.node_id.as_ref()),
        message: engine.status.problem().to_owned(),
        needs_upgrade: engine.status.needs_upgrade,
        ..v1::Engine::default()
    }
    .with_desire_state(engine.spec.desire_state)
    .with_current_state(engine.status.current_state)
    .with_frontend(engine.status.frontend)
    .with_phase(engine.status.phase)
    .with_view(engine.status.view)
}

pub(super) fn replica(cluster: &ClusterState, agents: &Agents, replica: &Replica) -> v1::Replica {
    let (spec, status) = (&replica.spec, &replica.status);
    let engine = cluster.engines.get(spec.volume_name.as_str());
    let member = engine.and_then(|engine| engine.status.replica_mode_map.get(&spec.replica_id));
    let said = member.map(|member| &member.message).filter(|_| status.message.is_empty());
    let key = InstanceKey::replica(&spec.volume_name, spec.replica_id);
    let instance = agents.get(&spec.node_id).and_then(|agent| agent.instances.get(&key));
    let mut shown = v1::Replica {
        name: replica.metadata.name.clone(),
        volume: spec.volume_name.to_string(),
        replica_id: spec.replica_id.to_string(),
        node: spec.node_id.to_string(),
        disk_path: spec.disk_path.clone(),
        message: said.unwrap_or(&status.message).clone(),
        deleting: replica.metadata.is_deleting(),
        ..v1::Replica::default()
    }
    .with_desire_state(spec.desire_state)
    .with_current_state(status.current_state);
    if let Some(Detail::Replica(observed)) = instance.map(|instance| &instance.detail) {
        shown = shown.with_observed(observed);
    }
    match member {
        Some(member) => shown.with_member(&whole(member, spec.replica_id, engine, agents)),
        None => shown,
    }
}

/// Returns the status of a member: the stored record, and the rest from its engine, if that is seen.
fn whole(record: &MemberRecord, id: ReplicaId, engine: Option<&Engine>, agents: &Agents) -> MemberStatus {
    let seen = engine.and_then(|engine| shown_of(agents, engine)?.reported.as_ref()?.member(id).cloned());
    record.with_rest_of(seen.unwrap_or_else(|| MemberStatus::of(id, record.mode)))
}

pub(super) fn node(cluster: &ClusterState, agents: &Agents, node: &Node) -> v1::NodeObject {
    let usable = node.status.frontends.iter().filter(|frontend| frontend.usable);
    v1::NodeObject {
        name: node.metadata.name.clone(),
        address: node.spec.address.clone(),
        conditions: conditions(&node.status.conditions),
        disks: node.spec.disks.keys().map(|path| disk(cluster, agents, node, path)).collect(),
        version: node.status.version.clone(),
        allow_scheduling: node.spec.allow_scheduling,
        eviction_requested: node.spec.eviction_requested,
        tags: texts(&node.spec.tags),
        zone: node.zone().map(ToString::to_string).unwrap_or_default(),
        frontends: usable.map(|frontend| frontend.name.to_string()).collect(),
        deleting: node.metadata.is_deleting(),
        machine_cordoned: node.is_machine_cordoned(),
    }
}

fn disk(cluster: &ClusterState, agents: &Agents, node: &Node, path: &String) -> v1::NodeDisk {
    let name = &node.metadata.name;
    let spec = node.spec.disks.get(path);
    let stored = node.status.disk_status.get(path);
    let seen = NodeName::new(name).ok().and_then(|name| agents.get(&name)?.disks.get(path));
    let scheduled = cluster.replicas.scheduled_on(name).and_then(|disks| disks.get(path));
    let scheduled = scheduled.map_or(0, |scheduled| scheduled.bytes);
    let problem = match (seen, stored) {
        _ if spec.is_some_and(|spec| spec.lost) => Some("disk is given up (disk remove --lost)".to_owned()),
        (Some(seen), _) => seen.problem.clone(),
        (None, Some(stored)) => stored.problem.clone(),
        (None, None) => None,
    };
    v1::NodeDisk {
        path: path.clone(),
        uuid: stored.map(|stored| stored.disk_uuid.clone()).unwrap_or_default(),
        allow_scheduling: spec.is_some_and(|spec| spec.allow_scheduling),
        total_bytes: seen
            .map_or_else(|| stored.map_or(0, |stored| stored.storage_maximum), |seen| seen.total_bytes),
        available_bytes: seen.map_or(0, |seen| seen.available_bytes),
        scheduled_bytes: u64::try_from(scheduled).unwrap_or(u64::MAX),
        tags: spec.map(|spec| texts(&spec.tags)).unwrap_or_default(),
        problem: problem.unwrap_or_default(),
        reserved_bytes: spec.map_or(0, |spec| spec.storage_reserved),
        eviction_requested: spec.is_some_and(|spec| spec.eviction_requested),
        disk: seen.map(convert::rest_of_disk),
    }
}
