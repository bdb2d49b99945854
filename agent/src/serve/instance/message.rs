//! Instances as the node API shows them.

use shorthorn_api::v1::{self, InstanceState, instance::Detail};
use shorthorn_control::{EnginePhase, EngineSpec, ProcessStatus, ReplicaPhase, ReplicaSpec};

use crate::serve::instance::{InstanceProcess, ProcessPhase, Spec};

/// Combines the states of the process and of the control socket of an instance.
pub fn instance(spec: &Spec, process: &InstanceProcess, status: Option<&ProcessStatus>) -> v1::Instance {
    let id = spec.id();
    let (inside, reported) = match status {
        Some(ProcessStatus::Engine(engine)) => (engine_state(engine.phase), engine.message.as_str()),
        Some(ProcessStatus::Replica(replica)) => (replica_state(replica.phase), replica.message.as_str()),
        None => (InstanceState::Starting, ""),
    };
    let state = match process.phase {
        ProcessPhase::Stopped => InstanceState::Stopped,
        ProcessPhase::Starting => InstanceState::Starting,
        ProcessPhase::Running => inside,
        ProcessPhase::Stopping => InstanceState::Stopping,
        ProcessPhase::Failed => InstanceState::Error,
    };
    let message = process.message.as_deref().unwrap_or(reported);
    v1::Instance {
        kind: id.kind().into(),
        name: id.name(),
        state: state.into(),
        message: message.to_owned(),
        pid: process.pid.unwrap_or_default(),
        detail: Some(match spec {
            Spec::Engine(spec) => Detail::Engine(engine(spec, status)),
            Spec::Replica(spec) => Detail::Replica(replica(spec, status)),
        }),
    }
}

fn engine_state(phase: EnginePhase) -> InstanceState {
    match phase {
        // A phase of a later version may be one before it serves.
        EnginePhase::Starting | EnginePhase::Unknown => InstanceState::Starting,
        EnginePhase::Serving | EnginePhase::Frozen => InstanceState::Running,
        EnginePhase::Stopping => InstanceState::Stopping,
        EnginePhase::Stopped => InstanceState::Error,
    }
}

fn replica_state(phase: ReplicaPhase) -> InstanceState {
    match phase {
        ReplicaPhase::Closed => InstanceState::Starting,
        ReplicaPhase::Serving => InstanceState::Running,
        ReplicaPhase::Failed => InstanceState::Error,
    }
}

fn engine(spec: &EngineSpec, status: Option<&ProcessStatus>) -> v1::EngineStatus {
    let Some(ProcessStatus::Engine(status)) = status else {
        return v1::EngineStatus {
            volume: spec.volume.to_string(),
            size_bytes: spec.size_bytes,
            attach: spec.attach,
            ..v1::EngineStatus::default()
        };
    };
    v1::EngineStatus { attach: spec.attach, ..status.into() }
}

fn replica(spec: &ReplicaSpec, status: Option<&ProcessStatus>) -> v1::ReplicaStatus {
    let Some(ProcessStatus::Replica(status)) = status else {
        return v1::ReplicaStatus {
            volume: spec.volume.to_string(),
            replica_id: spec.replica.to_string(),
            size_bytes: spec.size_bytes,
            directory: spec.directory.display().to_string(),
            ..v1::ReplicaStatus::default()
        };
    };
    status.into()
}
