//! Between the messages of node.proto and the types of the simulated agent.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::str::FromStr;

use shorthorn_api::v1;
use shorthorn_controller_core::ReplicaTarget;
use shorthorn_controller_core::observed::{Detail, Instance, InstanceKey, InstanceKind, InstanceState};
use shorthorn_types::{Generation, ReplicaId};

/// Reads a name or an id of the controller.
pub fn parsed<T: FromStr<Err: Debug>>(text: &str) -> T {
    text.parse().unwrap_or_else(|error| panic!("the controller sends {text:?}: {error:?}"))
}

pub fn targets(replicas: &[v1::ReplicaAddress]) -> BTreeMap<ReplicaId, ReplicaTarget> {
    let target = |replica: &v1::ReplicaAddress| {
        let target = ReplicaTarget { addresses: replica.addresses.clone(), local: replica.local };
        (parsed(&replica.replica_id), target)
    };
    replicas.iter().map(target).collect()
}

/// Returns a message with only the kind and the name of an instance.
pub fn name(key: &InstanceKey) -> v1::Instance {
    let kind = match key.kind {
        InstanceKind::Engine => v1::InstanceKind::Engine,
        InstanceKind::Replica => v1::InstanceKind::Replica,
    };
    v1::Instance { kind: kind.into(), name: key.name.clone(), ..v1::Instance::default() }
}

pub fn instance(key: &InstanceKey, instance: &Instance) -> v1::Instance {
    let state = match instance.state {
        InstanceState::Starting => v1::InstanceState::Starting,
        InstanceState::Running => v1::InstanceState::Running,
        InstanceState::Stopping => v1::InstanceState::Stopping,
        InstanceState::Stopped => v1::InstanceState::Stopped,
        InstanceState::Error => v1::InstanceState::Error,
    };
    let detail = match &instance.detail {
        Detail::Engine(engine) => v1::instance::Detail::Engine(v1::EngineStatus {
            attach: engine.attach.unwrap_or_default(),
            size_bytes: engine.size_bytes.unwrap_or_default(),
            needs_upgrade: engine.needs_upgrade,
            ..engine.reported.as_ref().map(v1::EngineStatus::from).unwrap_or_default()
        }),
        Detail::Replica(replica) => v1::instance::Detail::Replica(v1::ReplicaStatus {
            addresses: replica.addresses.clone(),
            allocated_bytes: replica.allocated_bytes,
            directory: replica.directory.clone().unwrap_or_default(),
            generation: replica.attach.map(|attach| Generation::new(attach, 0).into()),
            committed: replica.views.as_ref().map(|views| (&views.committed).into()),
            ..v1::ReplicaStatus::default()
        }),
    };
    v1::Instance {
        state: state.into(),
        message: instance.message.clone().unwrap_or_default(),
        pid: 1,
        detail: Some(detail),
        ..name(key)
    }
}
