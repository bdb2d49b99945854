use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use shorthorn_types::{Generation, ReplicaId, View, VolumeName};

/// What a client of a control socket asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Command {
    /// One status.
    Status,
    /// One status now and one after every change.
    Watch,
    /// End as on SIGTERM.
    Stop,
}

/// What a process tells of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Status {
    /// It is an engine.
    Engine(EngineStatus),
    /// It is a replica.
    Replica(ReplicaStatus),
}

/// How far an engine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EnginePhase {
    /// It opens replicas and brings up its device.
    Starting,
    /// It serves.
    Serving,
    /// It has no quorum: requests wait.
    Frozen,
    /// It takes its device away.
    Stopping,
    /// It was told of a higher generation, or cannot go on; `message` says why.
    Stopped,
}

/// State of one engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStatus {
    /// The volume.
    pub volume: VolumeName,
    /// The process.
    pub pid: u32,
    /// How far it is.
    pub phase: EnginePhase,
    /// Why, for people; empty where all is well.
    pub message: String,
    /// Its generation.
    pub generation: Generation,
    /// The current view, once there is one.
    pub view: Option<View>,
    /// Every replica that it was given.
    pub members: Vec<MemberStatus>,
    /// ublk, nbd or socket, once it is chosen.
    pub frontend: Option<String>,
    /// /dev/longhorn/<volume>, or the path of the socket, once it is there.
    pub endpoint: Option<PathBuf>,
    /// Size of the volume.
    pub size_bytes: u64,
}

/// How a replica stands with the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberMode {
    /// It is being opened.
    Connecting,
    /// It is in the view.
    Member,
    /// It is not: it has failed, or was never reached.
    Failed,
}

/// State of one replica as its engine sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Which replica.
    pub replica: ReplicaId,
    /// The address in use, or the first one.
    pub address: String,
    /// How it stands.
    pub mode: MemberMode,
    /// Why it is not a member; empty where it is.
    pub message: String,
}

/// State of one replica process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaStatus {
    /// The volume.
    pub volume: VolumeName,
    /// Which replica.
    pub replica: ReplicaId,
    /// The process.
    pub pid: u32,
    /// Whether it takes connections.
    pub serving: bool,
    /// Why not, for people; empty where all is well.
    pub message: String,
    /// `unix:<path>` and `tcp:<ip>:<port>`.
    pub addresses: Vec<String>,
    /// Size of the volume.
    pub size_bytes: u64,
    /// Bytes on the disk, when this was last looked at.
    pub allocated_bytes: u64,
    /// The generation that holds it.
    pub generation: Generation,
    /// Its directory.
    pub directory: PathBuf,
}
