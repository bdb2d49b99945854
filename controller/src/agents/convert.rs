//! Between the messages of node.proto and the types of the decisions.

use std::collections::BTreeMap;

use shorthorn_api::{level, nonempty, nonzero, report, v1};
use shorthorn_controller_core::objects::{Frontend, FrontendStatus, RebuildLimits};
use shorthorn_controller_core::observed::{
    AgentInfo, DeadMount, Detail, Instance, InstanceKey, InstanceKind, InstanceState, ObservedDisk,
    ObservedEngine, ObservedReplica,
};
use shorthorn_controller_core::orphans::{self, FoundDirectory};
use shorthorn_controller_core::salvage::Inspection;
use shorthorn_controller_core::undelete::{DataAge, Trashed};
use shorthorn_controller_core::{AgentCall, NodeName, ReplicaTarget, StartEngine, StartReplica};
use shorthorn_types::{ReplicaId, VolumeName};

pub(super) fn info(info: v1::NodeInfo) -> AgentInfo {
    let frontends = info.frontends.into_iter().map(|frontend| FrontendStatus {
        name: frontend.known_frontend().unwrap_or(Frontend::Unknown),
        usable: frontend.usable,
        reason: frontend.reason,
    });
    AgentInfo {
        name: info.name,
        version: info.version,
        data_address: nonempty(info.data_address),
        zone: nonempty(info.zone),
        frontends: frontends.collect(),
        max_volumes: Some(info.max_volumes).filter(|max_volumes| *max_volumes > 0),
        feature_level: info.feature_level,
        dead_mounts: info
            .dead_mounts
            .into_iter()
            .map(|mount| DeadMount { volume: mount.volume, pod_uid: mount.pod_uid })
            .collect(),
        warnings: info.warnings,
    }
}

pub(super) fn disk(disk: v1::Disk) -> (String, ObservedDisk) {
    let observed = ObservedDisk {
        uuid: nonempty(disk.uuid),
        filesystem: disk.filesystem,
        total_bytes: disk.total_bytes,
        // The content of the trash is deleted as soon as the disk needs its space.
        available_bytes: disk.available_bytes.saturating_add(disk.trash_bytes),
        problem: nonempty(disk.problem),
    };
    (disk.path, observed)
}

/// Returns the message of an agent's answer, without the fields that NodeDetail and NodeObject have.
pub(crate) fn rest_of_info(info: &AgentInfo) -> v1::NodeInfo {
    // All fields: the compiler finds one that is forgotten.
    let AgentInfo {
        name: _,
        version: _,
        data_address: _,
        zone: _,
        frontends: _,
        max_volumes: _,
        feature_level: _,
        warnings: _,
        dead_mounts,
    } = info.clone();
    let dead = |DeadMount { volume, pod_uid }| v1::DeadMount { volume, pod_uid };
    v1::NodeInfo { dead_mounts: dead_mounts.into_iter().map(dead).collect(), ..v1::NodeInfo::default() }
}

/// Returns the message of an observed disk, without the fields that NodeDisk has.
pub(crate) fn rest_of_disk(disk: &ObservedDisk) -> v1::Disk {
    // All fields: the compiler finds one that is forgotten.
    let ObservedDisk { uuid: _, filesystem, total_bytes: _, available_bytes: _, problem: _ } = disk.clone();
    v1::Disk { filesystem, ..v1::Disk::default() }
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
            (InstanceKind::Replica, Detail::Replica(status.into()))
        }
        (v1::InstanceKind::Replica, _) => {
            (InstanceKind::Replica, Detail::Replica(ObservedReplica::default()))
        }
        (v1::InstanceKind::Unspecified, _) => return None,
    };
    let key = InstanceKey { kind, name: instance.name };
    Some((key, Instance { state, message: nonempty(instance.message), detail }))
}

fn engine(status: v1::EngineStatus) -> ObservedEngine {
    let generation = status.known_generation();
    ObservedEngine {
        // The generation may come later than the number itself.
        attach: nonzero(status.attach).or_else(|| generation.map(|generation| generation.attach)),
        size_bytes: nonzero(status.size_bytes),
        needs_upgrade: status.needs_upgrade,
        reported: status.reported(),
    }
}

fn of_limits(limits: RebuildLimits) -> v1::RebuildLimits {
    let RebuildLimits { bytes_per_s, share_percent } = limits;
    v1::RebuildLimits { bytes_per_s: bytes_per_s.unwrap_or_default(), share_percent }
}

/// Converts an agent's findings in the directory of a replica.
pub(crate) fn inspection(found: &v1::ReplicaInspection) -> Inspection {
    Inspection {
        usable: found.usable && !found.missing,
        report: report(found.committed.clone(), found.proposed.clone()).ok(),
        dirty: found.dirty,
        rebuilding: found.rebuilding,
        lost_cache: found.lost_cache,
    }
}

/// Returns the level of features that an agent needs for a call. A new call or field adds its own, if an
/// agent that ignores the field would lose data or break a promise.
///
/// A start needs no level for the identity of its disk, because a start destroys nothing. So the volumes of
/// a cluster start while its agents are upgraded.
pub(super) fn level_of(call: &AgentCall) -> u32 {
    match call {
        AgentCall::StartReplica(StartReplica { encrypt_in_transit, rebind, .. }) => {
            highest([(*encrypt_in_transit, level::ENCRYPTION), (*rebind, level::REBINDING)])
        }
        AgentCall::StartEngine(StartEngine { encrypt_in_transit, .. }) => {
            highest([(*encrypt_in_transit, level::ENCRYPTION)])
        }
        AgentCall::SalvageReplica { disk_uuid, .. } => highest([(disk_uuid.is_some(), level::DISK_IDENTITY)]),
        // Without the trash the data is gone at once, whether there is a record or not.
        AgentCall::DeleteReplica { disk_uuid, .. } => {
            highest([(true, level::TRASH), (disk_uuid.is_some(), level::DISK_IDENTITY)])
        }
        AgentCall::Grant { .. }
        | AgentCall::UpdateReplicas { .. }
        | AgentCall::SetRebuildLimits { .. }
        | AgentCall::FenceReplica { .. }
        | AgentCall::ExpandEngine { .. }
        | AgentCall::StopInstance { .. }
        // An agent that does not know the flag refuses as without it.
        | AgentCall::ForceStopEngine { .. } => 0,
    }
}

/// Returns the highest level of the fields that are used; 0 if none is.
fn highest<const COUNT: usize>(fields: [(bool, u32); COUNT]) -> u32 {
    let used = fields.into_iter().filter(|(is_used, _)| *is_used);
    used.map(|(_, level)| level).max().unwrap_or(0)
}

/// A call as the message that node.proto has for it.
pub(super) enum AgentRequest {
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

const fn kind_of(kind: InstanceKind) -> v1::InstanceKind {
    match kind {
        InstanceKind::Engine => v1::InstanceKind::Engine,
        InstanceKind::Replica => v1::InstanceKind::Replica,
    }
}

fn start_replica(start: &StartReplica) -> v1::StartReplicaRequest {
    v1::StartReplicaRequest {
        volume: start.volume.to_string(),
        replica_id: start.replica_id.to_string(),
        disk_path: start.disk_path.clone(),
        disk_uuid: start.disk_uuid.clone().unwrap_or_default(),
        size_bytes: start.size_bytes,
        first_members: start.first_members.iter().map(ToString::to_string).collect(),
        secret: start.secret.bytes().to_vec(),
        create: start.create,
        rebind: start.rebind,
        encrypt_in_transit: start.encrypt_in_transit,
    }
}

fn start_engine(start: &StartEngine) -> v1::StartEngineRequest {
    v1::StartEngineRequest {
        volume: start.volume.to_string(),
        size_bytes: start.size_bytes,
        attach: start.attach,
        replicas: addresses(&start.replicas),
        secret: start.secret.bytes().to_vec(),
        granted: start.granted.as_deref().map(Into::into),
        rebuild: Some(of_limits(start.rebuild)),
        revision: start.revision,
        continues: start.continues.unwrap_or_default(),
        verify_reads: start.verify_reads,
        encrypt_in_transit: start.encrypt_in_transit,
        ..v1::StartEngineRequest::default()
    }
    .with_frontend(start.frontend)
}

pub(super) fn message(call: &AgentCall) -> AgentRequest {
    match call {
        AgentCall::StartReplica(start) => AgentRequest::StartReplica(start_replica(start)),
        AgentCall::StartEngine(start) => AgentRequest::StartEngine(start_engine(start)),
        AgentCall::Grant { volume, attach, view } => AgentRequest::Grant(v1::GrantRequest {
            volume: volume.to_string(),
            attach: *attach,
            view: Some((&**view).into()),
        }),
        AgentCall::UpdateReplicas { volume, attach, replicas, revision } => {
            AgentRequest::UpdateReplicas(v1::UpdateReplicasRequest {
                volume: volume.to_string(),
                attach: *attach,
                replicas: addresses(replicas),
                revision: *revision,
            })
        }
        AgentCall::SetRebuildLimits { volume, attach, limits } => {
            AgentRequest::SetRebuildLimits(v1::SetRebuildLimitsRequest {
                volume: volume.to_string(),
                attach: *attach,
                limits: Some(of_limits(*limits)),
            })
        }
        AgentCall::FenceReplica { volume, replica_id, attach } => {
            AgentRequest::FenceReplica(v1::FenceReplicaRequest {
                volume: volume.to_string(),
                replica_id: replica_id.to_string(),
                attach: *attach,
            })
        }
        AgentCall::ExpandEngine { volume, attach, size_bytes } => {
            let (volume, attach, size_bytes) = (volume.to_string(), *attach, *size_bytes);
            AgentRequest::ExpandEngine(v1::ExpandEngineRequest { volume, attach, size_bytes })
        }
        AgentCall::SalvageReplica { disk_path, disk_uuid, volume, replica_id, attach } => {
            AgentRequest::SalvageReplica(v1::SalvageReplicaRequest {
                disk_path: disk_path.clone(),
                disk_uuid: disk_uuid.clone().unwrap_or_default(),
                volume: volume.to_string(),
                replica_id: replica_id.to_string(),
                attach: *attach,
            })
        }
        AgentCall::StopInstance { instance, attach } => stop_instance(instance, *attach, false),
        AgentCall::ForceStopEngine { volume, attach } => {
            stop_instance(&InstanceKey::engine(volume), *attach, true)
        }
        AgentCall::DeleteReplica { disk_path, disk_uuid, volume, replica_id, record } => {
            AgentRequest::DeleteReplica(v1::DeleteReplicaRequest {
                disk_path: disk_path.clone(),
                volume: volume.to_string(),
                replica_id: replica_id.to_string(),
                disk_uuid: disk_uuid.clone().unwrap_or_default(),
                record: record.clone(),
            })
        }
    }
}

fn stop_instance(instance: &InstanceKey, attach: Option<u64>, force: bool) -> AgentRequest {
    AgentRequest::StopInstance(v1::StopInstanceRequest {
        kind: kind_of(instance.kind).into(),
        name: instance.name.clone(),
        attach: attach.unwrap_or_default(),
        force,
    })
}

/// Converts a directory in the trash; none if this controller does not know its kind.
pub(crate) fn trashed(node: &NodeName, trashed: &v1::TrashedReplica) -> Option<Trashed> {
    Some(Trashed {
        node: node.clone(),
        disk_path: trashed.disk_path.clone(),
        disk_uuid: nonempty(trashed.disk_uuid.clone()),
        volume: VolumeName::new(&trashed.volume).ok()?,
        replica_id: trashed.replica_id.parse().ok()?,
        deleted_ms: trashed.deleted_ms,
        data_age: data_age(trashed),
        restored: trashed.restored,
        record: trashed.known_record().and_then(|record| serde_json::from_str(record).ok()),
    })
}

/// Returns the directories of replicas on these disks.
pub(super) fn directories(node: &NodeName, disks: Vec<v1::Disk>) -> Vec<FoundDirectory> {
    let of_disk = |disk: v1::Disk| {
        let (path, uuid) = (disk.path, nonempty(disk.uuid));
        let directory = move |name: String| {
            let (volume, replica_id) = orphans::parse(&name)?;
            let (disk_path, disk_uuid) = (path.clone(), uuid.clone());
            Some(FoundDirectory { node: node.clone(), disk_path, disk_uuid, volume, replica_id })
        };
        disk.replicas.into_iter().filter_map(directory)
    };
    disks.into_iter().flat_map(of_disk).collect()
}

/// Returns the age of the data of a directory in the trash.
fn data_age(trashed: &v1::TrashedReplica) -> DataAge {
    let report = report(trashed.committed.clone(), trashed.proposed.clone()).ok();
    DataAge {
        committed: report.as_ref().map(|report| report.committed.id),
        proposed: report.and_then(|report| report.proposed.iter().map(|view| view.id).max()),
        attach: trashed.known_generation().map(|generation| generation.attach),
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

/// Makes the request to take a directory out of the trash.
pub(super) fn restore_request(trashed: &Trashed) -> v1::RestoreReplicaRequest {
    v1::RestoreReplicaRequest {
        disk_path: trashed.disk_path.clone(),
        volume: trashed.volume.to_string(),
        replica_id: trashed.replica_id.to_string(),
        deleted_ms: trashed.deleted_ms,
        disk_uuid: trashed.disk_uuid.clone().unwrap_or_default(),
    }
}

/// Makes the request to delete a directory in the trash. It names the directory like the request to restore.
pub(super) fn remove_trash_request(trashed: &Trashed) -> v1::RemoveTrashRequest {
    let v1::RestoreReplicaRequest { disk_path, volume, replica_id, deleted_ms, disk_uuid } =
        restore_request(trashed);
    v1::RemoveTrashRequest { disk_path, volume, replica_id, deleted_ms, disk_uuid }
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
    use shorthorn_controller_core::objects::{EnginePhase, MemberMode, SECRET_BYTES, Secret};

    use super::*;

    fn start_replica_with(rebind: bool, encrypt_in_transit: bool) -> AgentCall {
        AgentCall::StartReplica(StartReplica {
            volume: "v1".parse().unwrap(),
            replica_id: ReplicaId::from_random(1),
            disk_path: "/d".to_owned(),
            disk_uuid: Some("e3c8".to_owned()),
            size_bytes: 4096,
            first_members: Vec::new(),
            secret: Secret::new([1; SECRET_BYTES]),
            create: true,
            rebind,
            encrypt_in_transit,
        })
    }

    #[test]
    fn both_requests_about_the_trash_name_the_same_directory() {
        let trashed = Trashed {
            node: "n".parse().unwrap(),
            disk_path: "/d".to_owned(),
            disk_uuid: Some("e3c8".to_owned()),
            volume: "v1".parse().unwrap(),
            replica_id: ReplicaId::from_random(1),
            deleted_ms: 7,
            data_age: DataAge::default(),
            restored: false,
            record: None,
        };
        let (disk_path, disk_uuid, volume) = ("/d".to_owned(), "e3c8".to_owned(), "v1".to_owned());
        let (replica_id, deleted_ms) = (trashed.replica_id.to_string(), 7);
        let removed = v1::RemoveTrashRequest { disk_path, volume, replica_id, deleted_ms, disk_uuid };
        assert_eq!(remove_trash_request(&trashed), removed);
        let v1::RemoveTrashRequest { disk_path, volume, replica_id, deleted_ms, disk_uuid } = removed;
        let restored = v1::RestoreReplicaRequest { disk_path, volume, replica_id, deleted_ms, disk_uuid };
        assert_eq!(restore_request(&trashed), restored);
    }

    #[test]
    fn encryption_needs_its_level() {
        let replica = |encrypt_in_transit| start_replica_with(false, encrypt_in_transit);
        assert_eq!([level_of(&replica(false)), level_of(&replica(true))], [0, level::ENCRYPTION]);
        let AgentRequest::StartReplica(request) = message(&replica(true)) else { panic!("another message") };
        assert!(request.encrypt_in_transit);
        let engine = |encrypt_in_transit| {
            AgentCall::StartEngine(StartEngine {
                volume: "v1".parse().unwrap(),
                size_bytes: 4096,
                attach: 1,
                replicas: BTreeMap::new(),
                frontend: Frontend::Auto,
                secret: Secret::new([1; SECRET_BYTES]),
                granted: None,
                rebuild: RebuildLimits::default(),
                revision: 1,
                continues: None,
                verify_reads: false,
                encrypt_in_transit,
            })
        };
        assert_eq!([level_of(&engine(false)), level_of(&engine(true))], [0, level::ENCRYPTION]);
        let AgentRequest::StartEngine(request) = message(&engine(true)) else { panic!("another message") };
        assert!(request.encrypt_in_transit);
    }

    #[test]
    fn rebinding_needs_its_level() {
        let rebound = start_replica_with(true, false);
        assert_eq!(level_of(&rebound), level::REBINDING);
        let AgentRequest::StartReplica(request) = message(&rebound) else { panic!("another message") };
        assert!(request.rebind);
    }

    #[test]
    fn a_deletion_needs_the_trash_with_a_record_and_without() {
        let delete = |record: &str| AgentCall::DeleteReplica {
            disk_path: "/d".to_owned(),
            disk_uuid: None,
            volume: "v1".parse().unwrap(),
            replica_id: ReplicaId::from_random(1),
            record: record.to_owned(),
        };
        assert_eq!([level_of(&delete("{}")), level_of(&delete(""))], [level::TRASH, level::TRASH]);
        let AgentRequest::DeleteReplica(request) = message(&delete("{}")) else { panic!("another message") };
        assert_eq!(request.record, "{}");
    }

    #[test]
    fn a_change_of_data_on_a_known_disk_needs_the_identity_of_disks() {
        let salvage = |disk_uuid: Option<&str>| AgentCall::SalvageReplica {
            disk_path: "/d".to_owned(),
            disk_uuid: disk_uuid.map(str::to_owned),
            volume: "v1".parse().unwrap(),
            replica_id: ReplicaId::from_random(1),
            attach: 1,
        };
        assert_eq!([level_of(&salvage(None)), level_of(&salvage(Some("e3c8")))], [0, level::DISK_IDENTITY]);
        let AgentRequest::SalvageReplica(request) = message(&salvage(Some("e3c8"))) else {
            panic!("another message")
        };
        assert_eq!(request.disk_uuid, "e3c8");
        let delete = AgentCall::DeleteReplica {
            disk_path: "/d".to_owned(),
            disk_uuid: Some("e3c8".to_owned()),
            volume: "v1".parse().unwrap(),
            replica_id: ReplicaId::from_random(1),
            record: String::new(),
        };
        assert!(level_of(&delete) >= level::DISK_IDENTITY);
    }

    #[test]
    fn only_a_forced_stop_ends_an_engine_whose_device_is_in_use() {
        let volume: VolumeName = "v1".parse().unwrap();
        let (instance, attach) = (InstanceKey::engine(&volume), Some(3));
        let plain = message(&AgentCall::StopInstance { instance, attach });
        let forced = AgentCall::ForceStopEngine { volume, attach };
        assert_eq!(level_of(&forced), 0, "an older agent refuses it as without the flag");
        let (AgentRequest::StopInstance(plain), AgentRequest::StopInstance(forced)) =
            (plain, message(&forced))
        else {
            panic!("other messages")
        };
        assert!(!plain.force);
        assert_eq!(forced, v1::StopInstanceRequest { force: true, ..plain });
    }

    #[test]
    fn unknown_values_of_a_newer_engine_do_not_hide_the_rest() {
        let member = |id: &str, mode| v1::EngineMember {
            replica_id: id.to_owned(),
            mode,
            ..v1::EngineMember::default()
        };
        let rebuilding = v1::MemberMode::Rebuilding.into();
        let members = vec![member("00000001", rebuilding), member("00000002", 99), member("?", rebuilding)];
        let generation = Some(v1::Generation { attach: 3, restart: 0, nonce: 0 });
        let volume = "v".to_owned();
        let status = v1::EngineStatus {
            volume,
            attach: 3,
            generation,
            phase: 99,
            members,
            ..v1::EngineStatus::default()
        };
        let shown = engine(status);
        assert_eq!((shown.attach, shown.phase()), (Some(3), Some(EnginePhase::Unknown)));
        let modes: Vec<MemberMode> =
            shown.reported.unwrap().members.into_iter().map(|member| member.mode).collect();
        assert_eq!(modes, [MemberMode::Rebuilding, MemberMode::Connecting]);
    }

    #[test]
    fn the_rest_of_a_node_and_of_a_disk_is_passed_on() {
        let mount = v1::DeadMount { volume: "v".to_owned(), pod_uid: "p".to_owned() };
        let node = v1::NodeInfo { dead_mounts: vec![mount], ..v1::NodeInfo::default() };
        let shown = v1::NodeInfo { name: "a".to_owned(), max_volumes: 3, ..node.clone() };
        assert_eq!(rest_of_info(&info(shown)), node);
        let filesystem = v1::Disk { filesystem: "xfs".to_owned(), ..v1::Disk::default() };
        let (path, observed) = disk(v1::Disk { path: "/d".to_owned(), trash_bytes: 1, ..filesystem.clone() });
        assert_eq!((path.as_str(), rest_of_disk(&observed)), ("/d", filesystem));
    }

    #[test]
    fn an_unreported_attachment_is_that_of_the_generation() {
        let text = v1::EngineStatus { generation_text: "4.1".to_owned(), ..v1::EngineStatus::default() };
        assert_eq!(engine(text.clone()).attach, Some(4));
        assert_eq!(engine(v1::EngineStatus { attach: 5, ..text }).attach, Some(5));
        assert_eq!(engine(v1::EngineStatus::default()).attach, None);
    }
}
