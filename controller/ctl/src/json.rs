//! The output of `--output json` and `--output yaml`. Fields are added, never renamed or removed: scripts
//! rely on them. Named as in Longhorn if the meaning is the same.

use serde::Serialize;
use shorthorn_api::v1;
use shorthorn_types::status::EnginePhase;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct VolumeOutput {
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
    encrypt_in_transit: bool,
    #[serde(rename = "nodeID")]
    node_id: String,
    state: String,
    robustness: String,
    #[serde(rename = "currentNodeID")]
    current_node_id: String,
    endpoint: String,
    attach: u64,
    created: String,
    conditions: Vec<v1::Condition>,
    engine: Option<EngineOutput>,
    replicas: Vec<ReplicaOutput>,
    rebuild_bytes_per_second: u64,
    rebuild_share_percent: u32,
    resync: Option<v1::CopyStatus>,
    scrub: Option<v1::ScrubStatus>,
    salvage: Option<v1::Salvage>,
    granted: String,
    persistent_volume: String,
    namespace: String,
    persistent_volume_claim: String,
    workloads: Vec<v1::Workload>,
    actual_size: u64,
}

/// A directory in the trash of a disk.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct TrashOutput {
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

impl From<v1::VolumeTrash> for TrashOutput {
    fn from(trash: v1::VolumeTrash) -> TrashOutput {
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
            generation_text: _,
            generation: _,
            committed: _,
            proposed: _,
            restored: _,
        } = replica.unwrap_or_default();
        let (deleted, expires) = (time_of(deleted_ms), time_of(expires_ms));
        TrashOutput {
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

/// Formats a time by RFC 3339, to the second; empty if absent.
fn time_of(ms: u64) -> String {
    let seconds = i64::try_from(ms / 1000).ok().filter(|_| ms > 0);
    let time = seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    time.map(|time| time.to_string()).unwrap_or_default()
}

/// The content of a replica, and the losses with it as the only one.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct InspectionOutput {
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
    committed: Option<v1::View>,
    proposed: Vec<v1::View>,
    allocated_bytes: u64,
    modified_ms: u64,
    problems: Vec<String>,
}

impl From<v1::InspectedReplica> for InspectionOutput {
    fn from(replica: v1::InspectedReplica) -> InspectionOutput {
        let found = replica.inspection.unwrap_or_default();
        InspectionOutput {
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
            generation: found.shown_generation(),
            committed: found.committed,
            proposed: found.proposed,
            allocated_bytes: found.allocated_bytes,
            modified_ms: found.modified_ms,
            problems: found.problems,
        }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct EngineOutput {
    #[serde(rename = "nodeID")]
    node_id: String,
    desire_state: String,
    current_state: String,
    phase: &'static str,
    view: String,
    frontend: String,
    message: String,
    /// Null if the programs are not compared yet.
    needs_upgrade: Option<bool>,
    /// The printed fields of the status that it reports.
    #[serde(flatten)]
    status: v1::EngineStatus,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ReplicaOutput {
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
    /// The printed fields of its state in the engine.
    #[serde(flatten)]
    member: v1::EngineMember,
    deleting: bool,
    /// The printed fields of the status of its process.
    #[serde(flatten)]
    status: v1::ReplicaStatus,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RebalanceOutput {
    begun: usize,
    moves: Vec<v1::ReplicaMove>,
    under_way: Vec<v1::DrainLeft>,
    left_out: Vec<v1::LeftOut>,
}

impl RebalanceOutput {
    /// Converts the answer. `begun`: the number of moves since the command was given.
    pub(super) fn of(answer: v1::RebalanceResponse, begun: usize) -> RebalanceOutput {
        let v1::RebalanceResponse { moves, under_way, left_out } = answer;
        RebalanceOutput { begun, moves, under_way, left_out }
    }
}

impl From<v1::Volume> for VolumeOutput {
    fn from(volume: v1::Volume) -> VolumeOutput {
        let (namespace, claim) = volume.claim.split_once('/').unwrap_or_default();
        let granted = volume.shown_granted();
        let state = volume.shown_state().to_owned();
        let robustness = volume.shown_robustness().to_owned();
        let frontend = volume.shown_frontend().to_owned();
        let data_locality = volume.shown_data_locality().to_owned();
        VolumeOutput {
            name: volume.name,
            size: volume.size_bytes,
            current_size: volume.current_size_bytes,
            number_of_replicas: volume.number_of_replicas,
            frontend,
            replica_soft_anti_affinity: volume.replica_soft_anti_affinity,
            replica_zone_soft_anti_affinity: volume.replica_zone_soft_anti_affinity,
            replica_disk_soft_anti_affinity: volume.replica_disk_soft_anti_affinity,
            node_selector: volume.node_selector,
            disk_selector: volume.disk_selector,
            data_locality,
            verify_reads: volume.verify_reads,
            encrypt_in_transit: volume.encrypt_in_transit,
            node_id: volume.node,
            state,
            robustness,
            current_node_id: volume.current_node,
            endpoint: volume.endpoint,
            attach: volume.attach,
            created: volume.created,
            conditions: volume.conditions,
            engine: volume.engine.map(Into::into),
            replicas: volume.replicas.into_iter().map(Into::into).collect(),
            rebuild_bytes_per_second: volume.rebuild.map(|limits| limits.bytes_per_s).unwrap_or_default(),
            rebuild_share_percent: volume.rebuild.map(|limits| limits.share_percent).unwrap_or_default(),
            resync: volume.resync,
            scrub: volume.scrub,
            salvage: volume.salvage,
            granted,
            persistent_volume: volume.persistent_volume,
            namespace: namespace.to_owned(),
            persistent_volume_claim: claim.to_owned(),
            workloads: volume.workloads,
            actual_size: volume.actual_size_bytes,
        }
    }
}

impl From<v1::Engine> for EngineOutput {
    fn from(engine: v1::Engine) -> EngineOutput {
        let phase = engine.known_phase().map_or("", EnginePhase::as_str);
        let view = engine.shown_view();
        let frontend = engine.shown_frontend().to_owned();
        EngineOutput {
            desire_state: engine.shown_desire_state().to_owned(),
            current_state: engine.shown_current_state().to_owned(),
            node_id: engine.node,
            phase,
            view,
            frontend,
            message: engine.message,
            needs_upgrade: engine.needs_upgrade,
            status: engine.status.unwrap_or_default(),
        }
    }
}

impl From<v1::Replica> for ReplicaOutput {
    fn from(replica: v1::Replica) -> ReplicaOutput {
        let member = replica.known_member();
        let mode = member.as_ref().map_or("", |member| member.known_mode().as_str());
        ReplicaOutput {
            desire_state: replica.shown_desire_state().to_owned(),
            current_state: replica.shown_current_state().to_owned(),
            name: replica.name,
            volume: replica.volume,
            replica_id: replica.replica_id,
            node_id: replica.node,
            disk_path: replica.disk_path,
            mode,
            allocated_bytes: replica.allocated_bytes,
            message: replica.message,
            member: member.unwrap_or_default(),
            deleting: replica.deleting,
            status: replica.status.unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_types::ReplicaId;
    use shorthorn_types::status::{CopyStatus, MemberMode, MemberStatus};

    use super::*;

    fn has_keys(message: impl Serialize, expected: &str) {
        let printed = serde_json::to_value(message).unwrap();
        for key in expected.split(' ') {
            assert!(printed.get(key).is_some(), "{key} is missing: {printed}");
        }
    }

    /// New keys may be added, and none may be lost: scripts rely on them.
    #[test]
    fn messages_that_are_printed_keep_their_keys() {
        let condition = "lastTransitionTime message observedGeneration reason status type";
        has_keys(v1::Condition::default(), condition);
        has_keys(v1::CopyStatus::default(), "bytesPerSecond leftBytes totalBytes");
        has_keys(v1::Drain::default(), "evictionRequested left");
        has_keys(v1::DrainLeft::default(), "held message replica volume");
        has_keys(v1::Explanation::default(), "healthy hints sentences");
        has_keys(v1::LeftOut::default(), "reason volumes");
        let disk = "allowScheduling diskUUID evictionRequested path problem storageAvailable storageMaximum \
                    storageReserved storageScheduled tags";
        has_keys(v1::NodeDisk::default(), disk);
        let node = "address allowScheduling conditions deleting disks evictionRequested frontends \
                    machineCordoned name tags version zone";
        has_keys(v1::NodeObject::default(), node);
        has_keys(v1::Orphan::default(), "diskPath diskUUID name nodeID");
        let moved = "begun fromDisk fromNode gain replica toDisk toNode volume";
        has_keys(v1::ReplicaMove::default(), moved);
        has_keys(v1::Salvage::default(), "attach by decided done losses reason replicaID");
        has_keys(v1::ScrubStatus::default(), "atBytes found last repaired running snapshot");
        has_keys(v1::UpgradeEngineResponse::default(), "alreadyCurrent newPid oldPid pauseMs");
        has_keys(v1::View::default(), "attach members nonce number restart");
        has_keys(v1::Workload::default(), "kind name phase pod");
    }

    #[test]
    fn phases_and_modes_are_words() {
        let engine = EngineOutput::from(v1::Engine::default().with_phase(EnginePhase::Frozen));
        assert_eq!(engine.phase, "frozen");
        // A controller of release 0.1.0 has words only.
        let (replica_id, mode_word) = ("00000001".to_owned(), "failed".to_owned());
        let replica = v1::Replica { replica_id, mode_word, ..v1::Replica::default() };
        assert_eq!(ReplicaOutput::from(replica).mode, "failed");
        assert_eq!(ReplicaOutput::from(v1::Replica::default()).mode, "", "it is not attached");
    }

    #[test]
    fn an_engine_is_printed_with_its_keys_in_their_order() {
        let status = Some(v1::EngineStatus { version: "9".to_owned(), ..v1::EngineStatus::default() });
        let engine = v1::Engine { node: "n".to_owned(), status, ..v1::Engine::default() };
        let keys = concat!(
            r#"{"nodeID":"n","desireState":"","currentState":"","phase":"","view":"","frontend":"","#,
            r#""message":"","needsUpgrade":null}"#
        );
        assert_eq!(serde_json::to_string(&EngineOutput::from(engine)).unwrap(), keys);
    }

    #[test]
    fn a_replica_is_printed_with_its_keys_in_their_order() {
        let copy = CopyStatus { total_bytes: 4, left_bytes: 1, bytes_per_s: 2 };
        let member = MemberStatus {
            copy: Some(copy),
            away_since_ms: Some(7),
            times_awaited: 3,
            ..MemberStatus::of(ReplicaId::from_random(1), MemberMode::Rebuilding)
        };
        let printed = |replica| {
            let text = serde_json::to_string(&ReplicaOutput::from(replica)).unwrap();
            text.split_once(r#""mode":"#).unwrap().1.to_owned()
        };
        assert_eq!(
            printed(v1::Replica::default().with_member(&member)),
            concat!(
                r#""rebuilding","allocatedBytes":0,"message":"","#,
                r#""copy":{"totalBytes":4,"leftBytes":1,"bytesPerSecond":2},"awaySinceMs":7,"#,
                r#""rebuildFailed":false,"deleting":false}"#
            )
        );
        let detached = concat!(
            r#""","allocatedBytes":0,"message":"","copy":null,"awaySinceMs":0,"#,
            r#""rebuildFailed":false,"deleting":false}"#
        );
        assert_eq!(printed(v1::Replica::default()), detached);
    }
}
