//! The output of `--output json` and `--output yaml`. Fields are added, never renamed or removed: scripts
//! rely on them. Named as in Longhorn where the meaning is the same.

use serde::Serialize;
use shorthorn_api::v1;
use shorthorn_types::status::{EnginePhase, MemberMode};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct VolumeView {
    name: String,
    size: u64,
    current_size: u64,
    number_of_replicas: u32,
    frontend: String,
    replica_soft_anti_affinity: bool,
    replica_zone_soft_anti_affinity: bool,
    replica_disk_soft_anti_affinity: bool,
    node_selector: Vec<String>,
    disk_selector: Vec<String>,
    data_locality: String,
    verify_reads: bool,
    #[serde(rename = "nodeID")]
    node_id: String,
    state: String,
    robustness: String,
    #[serde(rename = "currentNodeID")]
    current_node_id: String,
    endpoint: String,
    attach: u64,
    created: String,
    conditions: Vec<ConditionView>,
    engine: Option<EngineView>,
    replicas: Vec<ReplicaView>,
    rebuild_bytes_per_second: u64,
    rebuild_share_percent: u32,
    #[serde(rename = "equalising")]
    resync: Option<CopyView>,
    scrub: Option<ScrubView>,
    salvage: Option<SalvageView>,
    granted: String,
    persistent_volume: String,
    namespace: String,
    persistent_volume_claim: String,
    workloads: Vec<WorkloadView>,
    actual_size: u64,
}

#[derive(Debug, Serialize)]
struct WorkloadView {
    kind: String,
    name: String,
    pod: String,
    phase: String,
}

impl From<v1::Workload> for WorkloadView {
    fn from(workload: v1::Workload) -> WorkloadView {
        let v1::Workload { kind, name, pod, phase } = workload;
        WorkloadView { kind, name, pod, phase }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct CopyView {
    total_bytes: u64,
    left_bytes: u64,
    bytes_per_second: u64,
}

impl From<v1::CopyStatus> for CopyView {
    fn from(copy: v1::CopyStatus) -> CopyView {
        CopyView {
            total_bytes: copy.total_bytes,
            left_bytes: copy.left_bytes,
            bytes_per_second: copy.bytes_per_s,
        }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ScrubView {
    running: bool,
    snapshot: String,
    at_bytes: u64,
    found: u64,
    repaired: u64,
    last: String,
}

impl From<v1::ScrubStatus> for ScrubView {
    fn from(scrub: v1::ScrubStatus) -> ScrubView {
        let v1::ScrubStatus { running, at_bytes, found, repaired, last, snapshot } = scrub;
        ScrubView { running, snapshot, at_bytes, found, repaired, last }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SalvageView {
    #[serde(rename = "replicaID")]
    replica_id: String,
    attach: u64,
    decided: String,
    by: String,
    reason: String,
    losses: String,
    done: bool,
}

impl From<v1::Salvage> for SalvageView {
    fn from(salvage: v1::Salvage) -> SalvageView {
        let v1::Salvage { replica_id, attach, decided, by, reason, losses, done } = salvage;
        SalvageView { replica_id, attach, decided, by, reason, losses, done }
    }
}

/// The explanation of a volume's state.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ExplanationView {
    healthy: bool,
    sentences: Vec<String>,
    hints: Vec<String>,
}

impl From<v1::Explanation> for ExplanationView {
    fn from(why: v1::Explanation) -> ExplanationView {
        ExplanationView { healthy: why.healthy, sentences: why.sentences, hints: why.hints }
    }
}

/// A directory in the trash of a disk.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct TrashView {
    pub(super) volume: String,
    #[serde(rename = "replicaID")]
    pub(super) replica_id: String,
    #[serde(rename = "nodeID")]
    pub(super) node: String,
    pub(super) disk_path: String,
    pub(super) allocated_bytes: u64,
    pub(super) deleted: String,
    pub(super) expires: String,
    pub(super) with_volume: bool,
    pub(super) problem: String,
}

impl From<v1::VolumeTrash> for TrashView {
    fn from(trash: v1::VolumeTrash) -> TrashView {
        let v1::VolumeTrash { node, replica, with_volume } = trash;
        let v1::TrashedReplica {
            volume,
            replica_id,
            disk_path,
            allocated_bytes,
            deleted_ms,
            expires_ms,
            problem,
            disk_uuid: _,
            record: _,
            generation: _,
            committed: _,
            proposed: _,
            restored: _,
        } = replica.unwrap_or_default();
        let (deleted, expires) = (time_of(deleted_ms), time_of(expires_ms));
        TrashView {
            volume,
            replica_id,
            node,
            disk_path,
            allocated_bytes,
            deleted,
            expires,
            with_volume,
            problem,
        }
    }
}

/// A directory that belongs to no volume.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct OrphanView {
    #[serde(rename = "nodeID")]
    pub(super) node: String,
    pub(super) disk_path: String,
    #[serde(rename = "diskUUID")]
    pub(super) disk_uuid: String,
    pub(super) name: String,
}

impl From<v1::Orphan> for OrphanView {
    fn from(orphan: v1::Orphan) -> OrphanView {
        let v1::Orphan { node, disk_path, disk_uuid, name } = orphan;
        OrphanView { node, disk_path, disk_uuid, name }
    }
}

/// Formats a time by RFC 3339, to the second; empty if absent.
fn time_of(ms: u64) -> String {
    let seconds = i64::try_from(ms / 1000).ok().filter(|_| ms > 0);
    let time = seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    time.map(|time| time.to_string()).unwrap_or_default()
}

/// The result of an engine's upgrade.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct UpgradeView {
    pause_ms: u64,
    old_pid: i32,
    new_pid: i32,
}

impl From<&v1::UpgradeEngineResponse> for UpgradeView {
    fn from(upgraded: &v1::UpgradeEngineResponse) -> UpgradeView {
        UpgradeView { pause_ms: upgraded.pause_ms, old_pid: upgraded.old_pid, new_pid: upgraded.new_pid }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct MembershipView {
    attach: u64,
    restart: u32,
    nonce: u64,
    number: u32,
    members: Vec<String>,
}

impl From<v1::View> for MembershipView {
    fn from(view: v1::View) -> MembershipView {
        let v1::View { attach, restart, nonce, number, members } = view;
        MembershipView { attach, restart, nonce, number, members }
    }
}

/// The content of a replica, and the losses with it as the only one.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct InspectionView {
    #[serde(rename = "replicaID")]
    replica_id: String,
    #[serde(rename = "nodeID")]
    node_id: String,
    error: String,
    possible: bool,
    losses: Vec<String>,
    missing: bool,
    running: bool,
    rebuilding: bool,
    dirty: bool,
    lost_cache: bool,
    generation: String,
    committed: Option<MembershipView>,
    proposed: Vec<MembershipView>,
    allocated_bytes: u64,
    modified_ms: u64,
    problems: Vec<String>,
}

impl From<v1::InspectedReplica> for InspectionView {
    fn from(replica: v1::InspectedReplica) -> InspectionView {
        let found = replica.inspection.unwrap_or_default();
        InspectionView {
            replica_id: replica.replica_id,
            node_id: replica.node,
            error: replica.error,
            possible: replica.possible,
            losses: replica.losses,
            missing: found.missing,
            running: found.running,
            rebuilding: found.rebuilding,
            dirty: found.dirty,
            lost_cache: found.lost_cache,
            generation: found.generation,
            committed: found.committed.map(Into::into),
            proposed: found.proposed.into_iter().map(Into::into).collect(),
            allocated_bytes: found.allocated_bytes,
            modified_ms: found.modified_ms,
            problems: found.problems,
        }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ConditionView {
    #[serde(rename = "type")]
    kind: String,
    status: bool,
    reason: String,
    message: String,
    last_transition_time: String,
    observed_generation: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct EngineView {
    #[serde(rename = "nodeID")]
    node_id: String,
    desire_state: String,
    current_state: String,
    phase: &'static str,
    view: String,
    frontend: String,
    message: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ReplicaView {
    name: String,
    volume: String,
    #[serde(rename = "replicaID")]
    replica_id: String,
    #[serde(rename = "nodeID")]
    node_id: String,
    disk_path: String,
    desire_state: String,
    current_state: String,
    mode: &'static str,
    allocated_bytes: u64,
    message: String,
    copy: Option<CopyView>,
    away_since_ms: u64,
    deleting: bool,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodeView {
    name: String,
    address: String,
    version: String,
    frontends: Vec<String>,
    allow_scheduling: bool,
    eviction_requested: bool,
    deleting: bool,
    machine_cordoned: bool,
    tags: Vec<String>,
    zone: String,
    conditions: Vec<ConditionView>,
    disks: Vec<DiskView>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DrainView {
    eviction_requested: bool,
    left: Vec<DrainLeftView>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DrainLeftView {
    volume: String,
    replica: String,
    held: bool,
    message: String,
}

impl From<v1::Drain> for DrainView {
    fn from(drain: v1::Drain) -> DrainView {
        let left = drain.left.into_iter().map(Into::into).collect();
        DrainView { eviction_requested: drain.eviction_requested, left }
    }
}

impl From<v1::DrainLeft> for DrainLeftView {
    fn from(left: v1::DrainLeft) -> DrainLeftView {
        DrainLeftView { volume: left.volume, replica: left.replica, held: left.held, message: left.message }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RebalanceView {
    begun: usize,
    moves: Vec<MoveView>,
    under_way: Vec<DrainLeftView>,
    left_out: Vec<LeftOutView>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct MoveView {
    volume: String,
    replica: String,
    from_node: String,
    from_disk: String,
    to_node: String,
    to_disk: String,
    gain: String,
    begun: bool,
}

#[derive(Debug, Serialize)]
struct LeftOutView {
    volumes: u32,
    reason: String,
}

impl RebalanceView {
    /// Converts the answer. `begun`: how many moves have begun since the command was given.
    pub(super) fn of(answer: v1::RebalanceResponse, begun: usize) -> RebalanceView {
        let moves = answer.moves.into_iter().map(|found| MoveView {
            volume: found.volume,
            replica: found.replica,
            from_node: found.from_node,
            from_disk: found.from_disk,
            to_node: found.to_node,
            to_disk: found.to_disk,
            gain: found.gain,
            begun: found.begun,
        });
        let left_out = answer.left_out.into_iter();
        RebalanceView {
            begun,
            moves: moves.collect(),
            under_way: answer.under_way.into_iter().map(Into::into).collect(),
            left_out: left_out.map(|out| LeftOutView { volumes: out.volumes, reason: out.reason }).collect(),
        }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DiskView {
    path: String,
    #[serde(rename = "diskUUID")]
    disk_uuid: String,
    allow_scheduling: bool,
    eviction_requested: bool,
    storage_maximum: u64,
    storage_available: u64,
    storage_reserved: u64,
    storage_scheduled: u64,
    tags: Vec<String>,
    problem: String,
}

impl From<v1::Volume> for VolumeView {
    fn from(volume: v1::Volume) -> VolumeView {
        let (namespace, claim) = volume.claim.split_once('/').unwrap_or_default();
        VolumeView {
            name: volume.name,
            size: volume.size_bytes,
            current_size: volume.current_size_bytes,
            number_of_replicas: volume.number_of_replicas,
            frontend: volume.frontend,
            replica_soft_anti_affinity: volume.replica_soft_anti_affinity,
            replica_zone_soft_anti_affinity: volume.replica_zone_soft_anti_affinity,
            replica_disk_soft_anti_affinity: volume.replica_disk_soft_anti_affinity,
            node_selector: volume.node_selector,
            disk_selector: volume.disk_selector,
            data_locality: volume.data_locality,
            verify_reads: volume.verify_reads,
            node_id: volume.node,
            state: volume.state,
            robustness: volume.robustness,
            current_node_id: volume.current_node,
            endpoint: volume.endpoint,
            attach: volume.attach,
            created: volume.created,
            conditions: volume.conditions.into_iter().map(Into::into).collect(),
            engine: volume.engine.map(Into::into),
            replicas: volume.replicas.into_iter().map(Into::into).collect(),
            rebuild_bytes_per_second: volume.rebuild.map(|limits| limits.bytes_per_s).unwrap_or_default(),
            rebuild_share_percent: volume.rebuild.map(|limits| limits.share_percent).unwrap_or_default(),
            resync: volume.resync.map(Into::into),
            scrub: volume.scrub.map(Into::into),
            salvage: volume.salvage.map(Into::into),
            granted: volume.granted,
            persistent_volume: volume.persistent_volume,
            namespace: namespace.to_owned(),
            persistent_volume_claim: claim.to_owned(),
            workloads: volume.workloads.into_iter().map(Into::into).collect(),
            actual_size: volume.actual_size_bytes,
        }
    }
}

impl From<v1::Condition> for ConditionView {
    fn from(condition: v1::Condition) -> ConditionView {
        ConditionView {
            kind: condition.r#type,
            status: condition.status,
            reason: condition.reason,
            message: condition.message,
            last_transition_time: condition.last_transition,
            observed_generation: condition.observed_generation,
        }
    }
}

impl From<v1::Engine> for EngineView {
    fn from(engine: v1::Engine) -> EngineView {
        let phase = engine.known_phase().map_or("", EnginePhase::as_str);
        EngineView {
            node_id: engine.node,
            desire_state: engine.desire_state,
            current_state: engine.current_state,
            phase,
            view: engine.view,
            frontend: engine.frontend,
            message: engine.message,
        }
    }
}

impl From<v1::Replica> for ReplicaView {
    fn from(replica: v1::Replica) -> ReplicaView {
        let mode = replica.shown_mode().map_or("", MemberMode::as_str);
        ReplicaView {
            name: replica.name,
            volume: replica.volume,
            replica_id: replica.replica_id,
            node_id: replica.node,
            disk_path: replica.disk_path,
            desire_state: replica.desire_state,
            current_state: replica.current_state,
            mode,
            allocated_bytes: replica.allocated_bytes,
            message: replica.message,
            copy: replica.copy.map(Into::into),
            away_since_ms: replica.away_since_ms,
            deleting: replica.deleting,
        }
    }
}

impl From<v1::NodeObject> for NodeView {
    fn from(node: v1::NodeObject) -> NodeView {
        NodeView {
            name: node.name,
            address: node.address,
            version: node.version,
            frontends: node.frontends,
            allow_scheduling: node.allow_scheduling,
            eviction_requested: node.eviction_requested,
            deleting: node.deleting,
            machine_cordoned: node.machine_cordoned,
            tags: node.tags,
            zone: node.zone,
            conditions: node.conditions.into_iter().map(Into::into).collect(),
            disks: node.disks.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<v1::NodeDisk> for DiskView {
    fn from(disk: v1::NodeDisk) -> DiskView {
        DiskView {
            path: disk.path,
            disk_uuid: disk.uuid,
            allow_scheduling: disk.allow_scheduling,
            eviction_requested: disk.eviction_requested,
            storage_maximum: disk.total_bytes,
            storage_available: disk.available_bytes,
            storage_reserved: disk.reserved_bytes,
            storage_scheduled: disk.scheduled_bytes,
            tags: disk.tags,
            problem: disk.problem,
        }
    }
}
