//! Between the messages of node.proto and the types of the decisions.

use std::collections::BTreeMap;

use shorthorn_api::v1;
use shorthorn_controller_core::dead_mounts::DeadMount;
use shorthorn_controller_core::objects::{
    ExpansionStatus, FrontendStatus, MemberMode, MemberStatus, RebuildLimits,
};
use shorthorn_controller_core::observed::{
    AgentInfo, CopyView, Detail, DiskView, EngineView, GrantWanted, Instance, InstanceKey, InstanceKind,
    InstanceState, ReplicaView, ScrubView,
};
use shorthorn_controller_core::orphans::{self, Directory};
use shorthorn_controller_core::salvage::Inspection;
use shorthorn_controller_core::undelete::{Holds, Trashed};
use shorthorn_controller_core::{AgentCall, NodeName, ReplicaTarget};
use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View, ViewId, VolumeName};

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
        zone: info.zone,
        frontends: frontends.collect(),
        max_volumes: info.max_volumes,
        feature_level: info.feature_level,
        dead_mounts: info
            .dead_mounts
            .into_iter()
            .map(|mount| DeadMount { volume: mount.volume, pod_uid: mount.pod_uid })
            .collect(),
        warnings: info.warnings,
    }
}

pub(super) fn disk(disk: v1::Disk) -> (String, DiskView) {
    let view = DiskView {
        uuid: disk.uuid,
        filesystem: disk.filesystem,
        total_bytes: disk.total_bytes,
        // The content of the trash is deleted as soon as the disk needs its space.
        available_bytes: disk.available_bytes.saturating_add(disk.trash_bytes),
        problem: disk.problem,
    };
    (disk.path, view)
}

/// Converts an instance; none for a kind that this controller does not know, because a newer agent may have
/// more.
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
            (InstanceKind::Engine, Detail::Engine(Box::new(engine(status))))
        }
        (v1::InstanceKind::Engine, _) => (InstanceKind::Engine, Detail::Engine(Box::default())),
        (v1::InstanceKind::Replica, Some(v1::instance::Detail::Replica(status))) => {
            (InstanceKind::Replica, Detail::Replica(replica(status)))
        }
        (v1::InstanceKind::Replica, _) => (InstanceKind::Replica, Detail::Replica(ReplicaView::default())),
        (v1::InstanceKind::Unspecified, _) => return None,
    };
    let key = InstanceKey { kind, name: instance.name };
    Some((key, Instance { state, message: instance.message, detail }))
}

fn engine(status: v1::EngineStatus) -> EngineView {
    let copies = status.members.iter().filter_map(|member| {
        let copy = member.copy.as_ref().map(copy)?;
        Some((member.replica_id.parse().ok()?, copy))
    });
    let copies: BTreeMap<ReplicaId, CopyView> = copies.collect();
    let member = |member: v1::EngineMember| {
        let mode = match member.mode.as_str() {
            "member" => MemberMode::Member,
            "failed" => MemberMode::Failed,
            "rebuilding" => MemberMode::Rebuilding,
            _ => MemberMode::Connecting,
        };
        let away_since_ms = member.away_since_ms;
        Some((member.replica_id.parse().ok()?, MemberStatus { mode, message: member.message, away_since_ms }))
    };
    EngineView {
        // The generation may come later than the number itself.
        attach: if status.attach == 0 { attach_of(&status.generation) } else { status.attach },
        phase: status.phase,
        generation: status.generation,
        view: status.view,
        frontend: status.frontend,
        endpoint: status.endpoint,
        size_bytes: status.size_bytes,
        lost_writes: status.lost_writes,
        damaged_ranges: status.members.iter().map(|member| member.times_rot_copied).sum(),
        version: status.version,
        expansion: status.expansion.map(|expansion| ExpansionStatus {
            message: expansion.message,
            next_attach: expansion.next_attach,
        }),
        members: status.members.into_iter().filter_map(member).collect(),
        copies,
        resync: status.resync.as_ref().map(copy),
        scrub: status.scrub.map(|scrub| {
            Box::new(ScrubView {
                running: scrub.running,
                at_bytes: scrub.at_bytes,
                found: scrub.found,
                repaired: scrub.repaired,
                last: scrub.last,
                snapshot: scrub.snapshot,
            })
        }),
        grant_wanted: status.grant_wanted.and_then(grant_wanted).map(Box::new),
    }
}

fn replica(status: v1::ReplicaStatus) -> ReplicaView {
    ReplicaView {
        addresses: status.addresses,
        allocated_bytes: status.allocated_bytes,
        directory: status.directory,
        attach: attach_of(&status.generation),
        views: report(status.committed, status.proposed).map(Box::new),
    }
}

/// Returns the attachment in a generation `<attach>.<restart>`, whatever follows; 0 if it has none.
fn attach_of(generation: &str) -> u64 {
    generation.split_once('.').and_then(|(attach, _)| attach.parse().ok()).unwrap_or(0)
}

/// Converts a report; none if a view is missing or invalid here: the others allow no conclusion then.
fn report(committed: Option<v1::View>, proposed: Vec<v1::View>) -> Option<ReplicaReport> {
    let proposed = proposed.into_iter().map(view).collect::<Option<_>>()?;
    Some(ReplicaReport { committed: view(committed?)?, proposed })
}

fn copy(copy: &v1::CopyStatus) -> CopyView {
    CopyView { total_bytes: copy.total_bytes, left_bytes: copy.left_bytes, bytes_per_s: copy.bytes_per_s }
}

/// Converts a view; none for an invalid one, which cannot be granted.
fn view(view: v1::View) -> Option<View> {
    let generation = Generation::new(view.attach, view.restart).of_nonce(view.nonce);
    let id = ViewId { generation, number: view.number };
    Some(View { id, members: members(&view.members)? })
}

fn members(ids: &[String]) -> Option<Members> {
    let ids: Vec<ReplicaId> = ids.iter().map(|id| id.parse().ok()).collect::<Option<_>>()?;
    Members::new(ids).ok()
}

fn grant_wanted(wanted: v1::GrantWanted) -> Option<GrantWanted> {
    let target = view(wanted.view?)?;
    // An engine that does not report who has stored the view asks once all its members have.
    let stored = if wanted.stored.is_empty() { target.members } else { members(&wanted.stored)? };
    Some(GrantWanted { view: target, honoured: report(wanted.committed, wanted.proposed)?, stored })
}

fn of_view(view: &View) -> v1::View {
    v1::View {
        attach: view.id.generation.attach,
        restart: view.id.generation.restart,
        nonce: view.id.generation.nonce,
        number: view.id.number,
        members: view.members.iter().map(|id| id.to_string()).collect(),
    }
}

fn of_limits(limits: RebuildLimits) -> v1::RebuildLimits {
    v1::RebuildLimits { bytes_per_s: limits.bytes_per_s, share_percent: limits.share_percent }
}

/// Converts an agent's findings in the directory of a replica.
pub(crate) fn inspection(found: &v1::ReplicaInspection) -> Inspection {
    Inspection {
        usable: found.usable && !found.missing,
        report: report(found.committed.clone(), found.proposed.clone()),
        dirty: found.dirty,
        rebuilding: found.rebuilding,
        lost_cache: found.lost_cache,
    }
}

/// Returns the level of features that an agent needs for a call. A new call or field adds its own.
pub(super) const fn level_of(call: &AgentCall) -> u32 {
    match call {
        AgentCall::StartReplica { .. }
        | AgentCall::StartEngine { .. }
        | AgentCall::Grant { .. }
        | AgentCall::UpdateReplicas { .. }
        | AgentCall::SetRebuildLimits { .. }
        | AgentCall::FenceReplica { .. }
        | AgentCall::ExpandEngine { .. }
        | AgentCall::SalvageReplica { .. }
        | AgentCall::StopInstance { .. }
        | AgentCall::DeleteReplica { .. } => 0,
    }
}

/// A call as the message that node.proto has for it.
pub(super) enum Message {
    StartReplica(v1::StartReplicaRequest),
    StartEngine(v1::StartEngineRequest),
    Grant(v1::GrantRequest),
    UpdateReplicas(v1::UpdateReplicasRequest),
    SetRebuildLimits(v1::SetRebuildLimitsRequest),
    FenceReplica(v1::FenceReplicaRequest),
    ExpandEngine(v1::ExpandEngineRequest),
    SalvageReplica(v1::SalvageReplicaRequest),
    StopInstance(v1::StopInstanceRequest),
    DeleteReplica(v1::DeleteReplicaRequest),
}

pub(super) fn message(call: &AgentCall) -> Message {
    match call {
        AgentCall::StartReplica {
            volume,
            replica_id,
            disk_path,
            disk_uuid,
            size_bytes,
            first_members,
            secret,
            create,
            rebind,
        } => Message::StartReplica(v1::StartReplicaRequest {
            volume: volume.to_string(),
            replica_id: replica_id.to_string(),
            disk_path: disk_path.clone(),
            disk_uuid: disk_uuid.clone(),
            size_bytes: *size_bytes,
            first_members: first_members.iter().map(ToString::to_string).collect(),
            secret: secret.bytes().to_vec(),
            create: *create,
            rebind: *rebind,
        }),
        AgentCall::StartEngine {
            volume,
            size_bytes,
            attach,
            replicas,
            frontend,
            secret,
            granted,
            rebuild,
            revision,
            continues,
            verify_reads,
        } => Message::StartEngine(v1::StartEngineRequest {
            volume: volume.to_string(),
            size_bytes: *size_bytes,
            attach: *attach,
            replicas: addresses(replicas),
            frontend: frontend.to_string(),
            secret: secret.bytes().to_vec(),
            granted: granted.as_deref().map(of_view),
            rebuild: Some(of_limits(*rebuild)),
            revision: *revision,
            continues: *continues,
            verify_reads: *verify_reads,
        }),
        AgentCall::Grant { volume, attach, view } => Message::Grant(v1::GrantRequest {
            volume: volume.to_string(),
            attach: *attach,
            view: Some(of_view(view)),
        }),
        AgentCall::UpdateReplicas { volume, attach, replicas, revision } => {
            Message::UpdateReplicas(v1::UpdateReplicasRequest {
                volume: volume.to_string(),
                attach: *attach,
                replicas: addresses(replicas),
                revision: *revision,
            })
        }
        AgentCall::SetRebuildLimits { volume, attach, limits } => {
            Message::SetRebuildLimits(v1::SetRebuildLimitsRequest {
                volume: volume.to_string(),
                attach: *attach,
                limits: Some(of_limits(*limits)),
            })
        }
        AgentCall::FenceReplica { volume, replica_id, attach } => {
            Message::FenceReplica(v1::FenceReplicaRequest {
                volume: volume.to_string(),
                replica_id: replica_id.to_string(),
                attach: *attach,
            })
        }
        AgentCall::ExpandEngine { volume, attach, size_bytes } => {
            let (volume, attach, size_bytes) = (volume.to_string(), *attach, *size_bytes);
            Message::ExpandEngine(v1::ExpandEngineRequest { volume, attach, size_bytes })
        }
        AgentCall::SalvageReplica { disk_path, disk_uuid, volume, replica_id, attach } => {
            Message::SalvageReplica(v1::SalvageReplicaRequest {
                disk_path: disk_path.clone(),
                disk_uuid: disk_uuid.clone(),
                volume: volume.to_string(),
                replica_id: replica_id.to_string(),
                attach: *attach,
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
        AgentCall::DeleteReplica { disk_path, disk_uuid, volume, replica_id, record } => {
            Message::DeleteReplica(v1::DeleteReplicaRequest {
                disk_path: disk_path.clone(),
                volume: volume.to_string(),
                replica_id: replica_id.to_string(),
                disk_uuid: disk_uuid.clone(),
                record: record.clone(),
            })
        }
    }
}

/// Converts a directory in the trash; none if this controller does not know its kind.
pub(crate) fn trashed(node: &NodeName, trashed: &v1::TrashedReplica) -> Option<Trashed> {
    Some(Trashed {
        node: node.clone(),
        disk_path: trashed.disk_path.clone(),
        disk_uuid: trashed.disk_uuid.clone(),
        volume: VolumeName::new(&trashed.volume).ok()?,
        replica_id: trashed.replica_id.parse().ok()?,
        deleted_ms: trashed.deleted_ms,
        holds: holds(trashed),
        restored: trashed.restored,
        record: serde_json::from_str(&trashed.record).ok().filter(|_| trashed.problem.is_empty()),
    })
}

/// Returns the directories of replicas on these disks.
pub(super) fn directories(node: &NodeName, disks: Vec<v1::Disk>) -> Vec<Directory> {
    let of_disk = |disk: v1::Disk| {
        let (path, uuid) = (disk.path, disk.uuid);
        let directory = move |name: String| {
            let (volume, replica_id) = orphans::parse(&name)?;
            let (disk_path, disk_uuid) = (path.clone(), uuid.clone());
            Some(Directory { node: node.clone(), disk_path, disk_uuid, volume, replica_id })
        };
        disk.replicas.into_iter().filter_map(directory)
    };
    disks.into_iter().flat_map(of_disk).collect()
}

/// Returns the age of the data of a directory in the trash.
fn holds(trashed: &v1::TrashedReplica) -> Holds {
    let report = report(trashed.committed.clone(), trashed.proposed.clone());
    Holds {
        committed: report.as_ref().map(|report| report.committed.id),
        proposed: report.and_then(|report| report.proposed.iter().map(|view| view.id).max()),
        attach: attach_of(&trashed.generation),
    }
}

/// Makes the request for the content of a replica's directory.
pub(super) fn inspect_request(
    volume: &VolumeName,
    replica: ReplicaId,
    disk_path: &str,
) -> v1::InspectReplicaRequest {
    v1::InspectReplicaRequest {
        disk_path: disk_path.to_owned(),
        volume: volume.to_string(),
        replica_id: replica.to_string(),
    }
}

fn addresses(replicas: &BTreeMap<ReplicaId, ReplicaTarget>) -> Vec<v1::ReplicaAddress> {
    replicas.iter().map(|(id, target)| replica_address(*id, target)).collect()
}

fn replica_address(id: ReplicaId, target: &ReplicaTarget) -> v1::ReplicaAddress {
    v1::ReplicaAddress {
        replica_id: id.to_string(),
        addresses: target.addresses.clone(),
        local: target.local,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(ids: &[&str]) -> v1::View {
        let members = ids.iter().map(ToString::to_string).collect();
        v1::View { attach: 1, restart: 2, nonce: 4, number: 3, members }
    }

    #[test]
    fn what_a_newer_engine_says_is_taken_as_far_as_it_is_known() {
        let member = |mode: &str| v1::EngineMember {
            replica_id: "00000001".to_owned(),
            mode: mode.to_owned(),
            ..v1::EngineMember::default()
        };
        let mode = |member| {
            let status = v1::EngineStatus { members: vec![member], ..v1::EngineStatus::default() };
            engine(status).members.into_values().next().unwrap().mode
        };
        assert_eq!(mode(member("rebuilding")), MemberMode::Rebuilding);
        assert_eq!(mode(member("levitating")), MemberMode::Connecting);
    }

    #[test]
    fn a_grant_is_wanted_with_all_that_it_needs_or_not_at_all() {
        let whole = v1::GrantWanted {
            view: Some(said(&["00000001"])),
            committed: Some(said(&["00000001", "00000002"])),
            ..v1::GrantWanted::default()
        };
        let wanted = grant_wanted(whole.clone()).unwrap();
        assert_eq!(wanted.stored, wanted.view.members);
        assert_eq!(of_view(&wanted.view), said(&["00000001"]));
        let stored = vec!["00000001".to_owned(), "00000003".to_owned()];
        assert_eq!(grant_wanted(v1::GrantWanted { stored, ..whole.clone() }).unwrap().stored.len(), 2);
        for broken in [
            v1::GrantWanted { view: None, ..whole.clone() },
            v1::GrantWanted { committed: None, ..whole.clone() },
            v1::GrantWanted { view: Some(said(&["x"])), ..whole.clone() },
            v1::GrantWanted { proposed: vec![said(&["y"])], ..whole },
        ] {
            assert_eq!(grant_wanted(broken), None);
        }
    }
}
