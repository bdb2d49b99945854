//! Instances as the node API shows them.

use shorthorn_api::v1::{self, InstanceState, instance::Detail};
use shorthorn_control::{EnginePhase, EngineSpec, MemberMode, ReplicaSpec, Status};

use crate::serve::instance::{Process, ProcessPhase, Spec};
use crate::serve::messages;

/// Combines the states of the process and of the control socket of an instance.
pub fn instance(spec: &Spec, process: &Process, status: Option<&Status>) -> v1::Instance {
    let id = spec.id();
    let (inside, told) = match status {
        Some(Status::Engine(engine)) => (engine_state(engine.phase), engine.message.as_str()),
        Some(Status::Replica(replica)) if replica.serving => {
            (InstanceState::Running, replica.message.as_str())
        }
        Some(Status::Replica(replica)) if replica.failed => (InstanceState::Error, replica.message.as_str()),
        Some(Status::Replica(replica)) => (InstanceState::Starting, replica.message.as_str()),
        None => (InstanceState::Starting, ""),
    };
    let state = match process.phase {
        ProcessPhase::Stopped => InstanceState::Stopped,
        ProcessPhase::Starting => InstanceState::Starting,
        ProcessPhase::Running => inside,
        ProcessPhase::Stopping => InstanceState::Stopping,
        ProcessPhase::Failed => InstanceState::Error,
    };
    let message = if process.message.is_empty() { told } else { &process.message };
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
        EnginePhase::Starting => InstanceState::Starting,
        EnginePhase::Serving | EnginePhase::Frozen => InstanceState::Running,
        EnginePhase::Stopping => InstanceState::Stopping,
        EnginePhase::Stopped => InstanceState::Error,
    }
}

fn engine(spec: &EngineSpec, status: Option<&Status>) -> v1::EngineStatus {
    let mut shown = v1::EngineStatus {
        volume: spec.volume.to_string(),
        size_bytes: spec.size_bytes,
        attach: spec.attach,
        ..v1::EngineStatus::default()
    };
    let Some(Status::Engine(status)) = status else { return shown };
    shown.phase = match status.phase {
        EnginePhase::Starting => "starting",
        EnginePhase::Serving => "serving",
        EnginePhase::Frozen => "frozen",
        EnginePhase::Stopping => "stopping",
        EnginePhase::Stopped => "stopped",
    }
    .to_owned();
    shown.generation = status.generation.to_string();
    shown.view = status.view.map(|view| view.to_string()).unwrap_or_default();
    shown.frontend = status.frontend.clone().unwrap_or_default();
    shown.endpoint = status.endpoint.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    shown.device = status.device.clone().unwrap_or_default();
    shown.size_bytes = status.size_bytes;
    shown.lost_writes = status.lost_writes;
    shown.version.clone_from(&status.version);
    let member = |member: &shorthorn_control::MemberStatus| v1::EngineMember {
        replica_id: member.replica.to_string(),
        address: member.address.clone(),
        mode: mode(member.mode).to_owned(),
        message: member.message.clone(),
        away_since_ms: member.away_since_ms.unwrap_or_default(),
        times_awaited: member.times_awaited,
        times_rotten: member.times_rotten,
        times_rot_copied: member.times_rot_copied,
        copy: member.copy.as_ref().map(messages::of_copy),
    };
    shown.members = status.members.iter().map(member).collect();
    shown.grant_wanted = status.grant_wanted.as_ref().map(messages::of_grant_wanted);
    shown.resync = status.resync.as_ref().map(messages::of_copy);
    shown.scrub = status.scrub.as_ref().map(messages::of_scrub);
    shown.expansion = status.expansion.as_ref().map(messages::of_expansion);
    shown
}

fn mode(mode: MemberMode) -> &'static str {
    match mode {
        MemberMode::Connecting => "connecting",
        MemberMode::Member => "member",
        MemberMode::Rebuilding => "rebuilding",
        MemberMode::Failed => "failed",
    }
}

fn replica(spec: &ReplicaSpec, status: Option<&Status>) -> v1::ReplicaStatus {
    let mut shown = v1::ReplicaStatus {
        volume: spec.volume.to_string(),
        replica_id: spec.replica.to_string(),
        size_bytes: spec.size_bytes,
        directory: spec.directory.display().to_string(),
        ..v1::ReplicaStatus::default()
    };
    let Some(Status::Replica(status)) = status else { return shown };
    shown.addresses.clone_from(&status.addresses);
    shown.size_bytes = status.size_bytes;
    shown.allocated_bytes = status.allocated_bytes;
    shown.failures = status.failures;
    shown.generation = status.generation.to_string();
    if let Some(views) = &status.views {
        shown.committed = Some(messages::of_view(&views.committed));
        shown.proposed = views.proposed.iter().map(messages::of_view).collect();
    }
    shown
}
