use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use shorthorn_types::{ReplicaId, VolumeName};

use super::unknown_words::OpenEnum;
use super::{CurrentState, DesireState, Metadata};
use crate::{NodeName, Timestamp, schema};

/// A copy of a volume's data. Its name, and that of its directory and its process, is
/// `<volume>-<replica id>`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replica {
    /// Name, version and dates.
    pub metadata: Metadata,
    /// The place and the desired state.
    pub spec: ReplicaSpec,
    /// The observed state, written by the reconciler of the replica.
    #[serde(default)]
    pub status: StoredReplicaStatus,
}

/// The place and the desired state of a replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "self.volumeName == oldSelf.volumeName && self.replicaID == oldSelf.replicaID \
             && self.nodeID == oldSelf.nodeID && self.diskPath == oldSelf.diskPath",
    "message": "a replica cannot move: of its spec only desireState and evictionRequested can be \
                changed",
}]))]
pub struct ReplicaSpec {
    /// Name of the Volume object that the replica belongs to.
    #[schemars(with = "schema::VolumeName")]
    pub volume_name: VolumeName,
    /// In bytes.
    #[serde(with = "super::quoted")]
    #[schemars(with = "schema::Quoted")]
    pub volume_size: u64,
    /// The id of the replica, never used again.
    #[serde(rename = "replicaID")]
    #[schemars(with = "schema::ReplicaId")]
    pub replica_id: ReplicaId,
    /// The node that it is on, for good.
    #[serde(rename = "nodeID")]
    #[schemars(with = "schema::NodeName")]
    pub node_id: NodeName,
    /// The disk that it is on, for good.
    pub disk_path: String,
    /// The identity of that disk when the replica was placed there.
    #[serde(rename = "diskID")]
    pub disk_id: String,
    /// The desired state of the process.
    #[serde(deserialize_with = "super::unknown_words::word")]
    #[schemars(with = "schema::DesireState")]
    pub desire_state: DesireState,
    /// True to move the replica if a better place exists; else the controller resets this.
    #[serde(default)]
    pub eviction_requested: bool,
}

/// The known state of a replica.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StoredReplicaStatus {
    /// The observed state of the process.
    #[serde(deserialize_with = "super::unknown_words::word")]
    #[schemars(with = "schema::CurrentState")]
    pub current_state: CurrentState,
    /// The observed state of the directory.
    #[serde(deserialize_with = "super::unknown_words::word")]
    pub data: DataState,
    /// The addresses of the running process.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// The problem, for people; empty if none.
    #[serde(default)]
    pub message: String,
    /// The time at which it was last seen to become a member of the engine's view. A replica from the
    /// volume's creation has it after the next change. Until then it counts as a member unless it has left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::Time>")]
    pub healthy_at: Option<Timestamp>,
    /// The time at which it left the view; none while it is in the view, as far as known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::Time>")]
    pub failed_at: Option<Timestamp>,
    /// The time since which the engine serves without it and does not rebuild it either.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::Time>")]
    pub lost_since: Option<Timestamp>,
    /// The record of a deleted volume whose data is still on an unreachable node or disk. The data is deleted
    /// when that is back, and this record is kept with it in the trash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deletion_record: Option<String>,
    /// The deletion record of a replica that an undeletion has taken back, until the volume is stored with
    /// it. No other record exists if all replicas were left behind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub undeletion_record: Option<String>,
    /// True if a process of the replica may run with the secret of an earlier life of its volume. Engines get
    /// the address of a process only if it was started after the undeletion. An undeletion sets this field,
    /// and the controller clears it when it has stopped the process.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stop_first: bool,
    /// True if the replica's directory may belong to the secret that its volume had before its undeletion.
    /// The next start gives the directory to the present secret. An undeletion sets this field, and the
    /// controller clears it when the replica is a member.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rebind: bool,
}

/// The state of a replica's directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DataState {
    /// No call that could have made it was ever sent, unless the replica is wanted to run.
    #[default]
    None,
    /// The directory may exist; no engine has used it.
    Requested,
    /// The directory was seen. If it is missing later, data was lost, and it is never recreated.
    Present,
}

impl OpenEnum for DataState {
    /// A replica that may have data is never recreated.
    const UNKNOWN: DataState = DataState::Present;
}

impl Replica {
    /// Returns true if the replica is left of a deleted volume, and belongs to no volume any more.
    #[must_use]
    pub const fn is_left_behind(&self) -> bool {
        self.status.deletion_record.is_some()
    }

    /// Returns true if no call that starts the replica was ever sent. A wanted one may have been started,
    /// whatever its status says.
    #[must_use]
    pub fn was_never_started(&self) -> bool {
        self.spec.desire_state == DesireState::Stopped
            && self.status.current_state == CurrentState::Stopped
            && self.status.data == DataState::None
    }
}

impl ReplicaSpec {
    /// Returns the name that the object, the directory and the process have.
    #[must_use]
    pub fn instance_name(volume: &VolumeName, id: ReplicaId) -> String {
        format!("{volume}-{id}")
    }

    /// Returns the identity of its disk; none if that was not known when the replica was placed there.
    #[must_use]
    pub fn disk_uuid(&self) -> Option<String> {
        (!self.disk_id.is_empty()).then(|| self.disk_id.clone())
    }
}
