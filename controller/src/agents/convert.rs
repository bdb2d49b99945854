//! Between the messages of node.proto and the types of the decisions.

use shorthorn_controller_core::objects::{FrontendStatus, MemberMode, MemberStatus};
use shorthorn_controller_core::observed::{
    AgentInfo, Detail, DiskView, EngineView, Instance, InstanceKey, InstanceKind, InstanceState, ReplicaView,
};
use shorthorn_controller_core::{AgentCall, ReplicaTarget};
use shorthorn_proto::v1;
use shorthorn_types::ReplicaId;

pub(super) fn info(info: v1::NodeInfo) -> AgentInfo {
    let frontends = info.frontends.into_iter().map(|frontend| FrontendStatus {
        name: frontend.name,
        usable: frontend.usable,
        reason: frontend.reason,
    });
    AgentInfo {
        name: info.name,
        version: info.version,
        data_address: info.data_address,
        frontends: frontends.collect(),
    }
}

pub(super) fn disk(disk: v1::Disk) -> (String, DiskView) {
    let view = DiskView {
        uuid: disk.uuid,
        filesystem: disk.filesystem,
        total_bytes: disk.total_bytes,
        available_bytes: disk.available_bytes,
        problem: disk.problem,
    };
    (disk.path, view)
}

/// None for what this controller does not know; a newer agent may show more.
pub(super) fn instance(instance: v1::Instance) -> Option<(InstanceKey, Instance)> {
    let state = match instance.state() {
        v1::InstanceState::Starting => InstanceState::Starting,
        v1::InstanceState::Running => InstanceState::Running,
        v1::InstanceState::Stopping => InstanceState::Stopping,
        v1::InstanceState::Stopped => InstanceState::Stopped,
        v1::InstanceState::Error | v1::InstanceState::Unspecified => InstanceState::Error,
    };
    let (kind, detail) = match (instance.kind(), instance.detail) {
        (v1::InstanceKind::Engine, Some(v1::instance::Detail::Engine(status))) => {
            (InstanceKind::Engine, Detail::Engine(engine(status)))
        }
        (v1::InstanceKind::Engine, _) => (InstanceKind::Engine, Detail::Engine(EngineView::default())),
        (v1::InstanceKind::Replica, Some(v1::instance::Detail::Replica(status))) => {
            let view = ReplicaView { addresses: status.addresses, allocated_bytes: status.allocated_bytes };
            (InstanceKind::Replica, Detail::Replica(view))
        }
        (v1::InstanceKind::Replica, _) => (InstanceKind::Replica, Detail::Replica(ReplicaView::default())),
        (v1::InstanceKind::Unspecified, _) => return None,
    };
    let key = InstanceKey { kind, name: instance.name };
    Some((key, Instance { state, message: instance.message, detail }))
}

fn engine(status: v1::EngineStatus) -> EngineView {
    let member = |member: v1::EngineMember| {
        let mode = match member.mode.as_str() {
            "member" => MemberMode::Member,
            "failed" => MemberMode::Failed,
            _ => MemberMode::Connecting,
        };
        Some((member.replica_id.parse().ok()?, MemberStatus { mode, message: member.message }))
    };
    // The generation is `<attach>.<restart>`, and is there later than the number itself.
    let served = status.generation.split_once('.').and_then(|(attach, _)| attach.parse().ok());
    EngineView {
        attach: if status.attach == 0 { served.unwrap_or(0) } else { status.attach },
        phase: status.phase,
        generation: status.generation,
        view: status.view,
        frontend: status.frontend,
        endpoint: status.endpoint,
        members: status.members.into_iter().filter_map(member).collect(),
    }
}

/// A call as the message that node.proto has for it.
pub(super) enum Message {
    StartReplica(v1::StartReplicaRequest),
    StartEngine(v1::StartEngineRequest),
    StopInstance(v1::StopInstanceRequest),
    DeleteReplica(v1::DeleteReplicaRequest),
}

pub(super) fn message(call: &AgentCall) -> Message {
    match call {
        AgentCall::StartReplica {
            volume,
            replica_id,
            disk_path,
            size_bytes,
            first_members,
            secret,
            create,
        } => Message::StartReplica(v1::StartReplicaRequest {
            volume: volume.to_string(),
            replica_id: replica_id.to_string(),
            disk_path: disk_path.clone(),
            size_bytes: *size_bytes,
            first_members: first_members.iter().map(ToString::to_string).collect(),
            secret: secret.bytes().to_vec(),
            create: *create,
        }),
        AgentCall::StartEngine { volume, size_bytes, attach, replicas, frontend, secret } => {
            Message::StartEngine(v1::StartEngineRequest {
                volume: volume.to_string(),
                size_bytes: *size_bytes,
                attach: *attach,
                replicas: replicas.iter().map(|(id, target)| replica_address(*id, target)).collect(),
                frontend: frontend.to_string(),
                secret: secret.bytes().to_vec(),
            })
        }
        AgentCall::StopInstance { instance, attach } => Message::StopInstance(v1::StopInstanceRequest {
            kind: match instance.kind {
                InstanceKind::Engine => v1::InstanceKind::Engine,
                InstanceKind::Replica => v1::InstanceKind::Replica,
            }
            .into(),
            name: instance.name.clone(),
            attach: *attach,
        }),
        AgentCall::DeleteReplica { disk_path, volume, replica_id } => {
            Message::DeleteReplica(v1::DeleteReplicaRequest {
                disk_path: disk_path.clone(),
                volume: volume.to_string(),
                replica_id: replica_id.to_string(),
            })
        }
    }
}

fn replica_address(id: ReplicaId, target: &ReplicaTarget) -> v1::ReplicaAddress {
    v1::ReplicaAddress {
        replica_id: id.to_string(),
        addresses: target.addresses.clone(),
        local: target.local,
    }
}
