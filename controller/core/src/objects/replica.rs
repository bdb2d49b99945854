use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use shorthorn_types::{ReplicaId, VolumeName};

use super::{CurrentState, DesireState, Metadata};
use crate::{NodeName, Timestamp, schema};

/// One copy of a volume's data; named `<volume>-<replica id>`, as its directory and its process are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replica {
    /// Name, version and dates.
    pub metadata: Metadata,
    /// Where it is and whether it should run.
    pub spec: ReplicaSpec,
    /// What the replica's reconciler saw.
    #[serde(default)]
    pub status: ReplicaStatus,
}

/// Where a replica is and whether it should run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "self.volumeName == oldSelf.volumeName && self.replicaID == oldSelf.replicaID \
             && self.nodeID == oldSelf.nodeID && self.diskPath == oldSelf.diskPath",
    "message": "a replica stays where it is: of its spec only desireState and evictionRequested can be changed",
}]))]
pub struct ReplicaSpec {
    /// Whose data it holds.
    #[schemars(with = "schema::VolumeName")]
    pub volume_name: VolumeName,
    /// In bytes.
    #[serde(with = "super::quoted")]
    #[schemars(with = "schema::Quoted")]
    pub volume_size: u64,
    /// Its identity, never used again.
    #[serde(rename = "replicaID")]
    #[schemars(with = "schema::ReplicaId")]
    pub replica_id: ReplicaId,
    /// The node that it is on, for good.
    #[serde(rename = "nodeID")]
    pub node_id: NodeName,
    /// The disk that it is on, for good.
    pub disk_path: String,
    /// The identity of that disk when the replica was placed there.
    #[serde(rename = "diskID")]
    pub disk_id: String,
    /// Whether its process should run.
    #[serde(deserialize_with = "super::later::word")]
    pub desire_state: DesireState,
    /// Whether another one is to take its place where that is better; else the controller takes this back.
    #[serde(default)]
    pub eviction_requested: bool,
}

/// What is known of a replica.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaStatus {
    /// Whether a process is there.
    #[serde(deserialize_with = "super::later::word")]
    pub current_state: CurrentState,
    /// Whether there is a directory.
    #[serde(deserialize_with = "super::later::word")]
    pub data: DataState,
    /// Where its process serves, while it does.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// What is wrong.
    #[serde(default)]
    pub message: String,
    /// When it was last seen to become a member of the engine's view. Of one that the volume was created with, noted with
    /// the next change: such a one counts as a member until it is known to have left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::Time>")]
    pub healthy_at: Option<Timestamp>,
    /// When it left the view; none while it is, as far as known, in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::Time>")]
    pub failed_at: Option<Timestamp>,
    /// Since when the engine serves without it and does not bring it up either.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<schema::Time>")]
    pub lost_since: Option<Timestamp>,
    /// Its volume is deleted, and only its data is left, on a node or a disk that could not be reached: it
    /// is deleted when that is back, and this is kept with it in the trash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deletion_record: Option<String>,
    /// The deletion record of a replica that an undeletion has taken back, until the volume is stored with
    /// it: the only record, if all replicas were left behind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub undeletion_record: Option<String>,
    /// A process of it may run with the secret of an earlier life of its volume: no engine is told of it before one that was
    /// started since. Set by an undeletion.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stop_first: bool,
    /// Its directory may belong to the secret that its volume had before its undeletion. The next start gives the directory
    /// to the present secret. Set by an undeletion, until the replica is a member.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rebind: bool,
}

/// Whether a replica has a directory on its disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DataState {
    /// No call that could have made it was ever sent, unless the replica is wanted to run.
    #[default]
    None,
    /// It may be there; no engine has used it.
    Requested,
    /// It was seen. Missing from now on means that data was lost, and it is never made anew.
    Present,
}

impl Replica {
    /// Whether it is what is left of a volume that is deleted: no volume has it any more.
    #[must_use]
    pub const fn is_left_behind(&self) -> bool {
        self.status.deletion_record.is_some()
    }

    /// Whether no call that starts it was ever sent. One that was wanted may have been started, whatever its status says.
    #[must_use]
    pub fn was_never_started(&self) -> bool {
        self.spec.desire_state == DesireState::Stopped
            && self.status.current_state == CurrentState::Stopped
            && self.status.data == DataState::None
    }
}

impl ReplicaSpec {
    /// The name that the object, the directory and the process have.
    #[must_use]
    pub fn instance_name(volume: &VolumeName, id: ReplicaId) -> String {
        format!("{volume}-{id}")
    }
}
