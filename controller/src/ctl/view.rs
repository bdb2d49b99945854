//! What `--output json` and `--output yaml` show. Fields are added, never renamed or removed: scripts
//! rely on them. Named as in Longhorn where the meaning is the same.

use serde::Serialize;
use shorthorn_proto::v1;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct VolumeView {
    name: String,
    size: u64,
    number_of_replicas: u32,
    frontend: String,
    replica_soft_anti_affinity: bool,
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
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct EngineView {
    #[serde(rename = "nodeID")]
    node_id: String,
    desire_state: String,
    current_state: String,
    phase: String,
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
    mode: String,
    allocated_bytes: u64,
    message: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodeView {
    name: String,
    address: String,
    version: String,
    frontends: Vec<String>,
    conditions: Vec<ConditionView>,
    disks: Vec<DiskView>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DiskView {
    path: String,
    #[serde(rename = "diskUUID")]
    disk_uuid: String,
    allow_scheduling: bool,
    storage_maximum: u64,
    storage_available: u64,
    storage_reserved: u64,
    storage_scheduled: u64,
    problem: String,
}

impl From<v1::Volume> for VolumeView {
    fn from(volume: v1::Volume) -> VolumeView {
        VolumeView {
            name: volume.name,
            size: volume.size_bytes,
            number_of_replicas: volume.number_of_replicas,
            frontend: volume.frontend,
            replica_soft_anti_affinity: volume.replica_soft_anti_affinity,
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
        }
    }
}

impl From<v1::Engine> for EngineView {
    fn from(engine: v1::Engine) -> EngineView {
        EngineView {
            node_id: engine.node,
            desire_state: engine.desire_state,
            current_state: engine.current_state,
            phase: engine.phase,
            view: engine.view,
            frontend: engine.frontend,
            message: engine.message,
        }
    }
}

impl From<v1::Replica> for ReplicaView {
    fn from(replica: v1::Replica) -> ReplicaView {
        ReplicaView {
            name: replica.name,
            volume: replica.volume,
            replica_id: replica.replica_id,
            node_id: replica.node,
            disk_path: replica.disk_path,
            desire_state: replica.desire_state,
            current_state: replica.current_state,
            mode: replica.mode,
            allocated_bytes: replica.allocated_bytes,
            message: replica.message,
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
            storage_maximum: disk.total_bytes,
            storage_available: disk.available_bytes,
            storage_reserved: disk.reserved_bytes,
            storage_scheduled: disk.scheduled_bytes,
            problem: disk.problem,
        }
    }
}
