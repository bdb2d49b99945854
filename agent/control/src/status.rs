use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View, VolumeName};

use crate::spec::{RebuildLimits, ReplicaEndpoint};

/// A request of a client of a control socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProcessCommand {
    /// Requests one status.
    Status,
    /// Requests a status now and one after every change.
    Watch,
    /// Requests the [`IoCounters`] of the device's user. They are zero in a process that is no engine or does
    /// not serve yet.
    Io,
    /// Ends the process and removes the device. All replicas are flushed first, within some seconds.
    Stop,
    /// End and leave the device to the next process, which serves on. Requests in flight are finished first.
    Handover,
    /// The arbiter has granted a view.
    Grant {
        /// The granted view.
        view: View,
    },
    /// Sets the replicas of the volume. A new one is rebuilt. A missing one is given up, unless it is in the
    /// view.
    Replicas {
        /// All of them.
        replicas: Vec<ReplicaEndpoint>,
    },
    /// Compare all members, or stop that.
    Scrub {
        /// The settings of the scrub; none stops it.
        scrub: Option<ScrubCommand>,
    },
    /// Only for a replica: no engine of a lower generation may use it from here on. That it holds shows in
    /// the status.
    Fence {
        /// The lowest generation that may.
        generation: Generation,
    },
    /// Only for a replica: listens for engines of other hosts on this address instead of the former one.
    /// Existing connections continue. The new address shows in the status.
    Listen {
        /// The IP address and the port.
        address: std::net::SocketAddr,
    },
    /// The volume grows: its replicas first, then its device. It never gets smaller.
    Expand {
        /// The new size of the volume in bytes.
        size_bytes: u64,
    },
    /// Other limits for copying from now on.
    Limits {
        /// The limits.
        limits: RebuildLimits,
    },
}

/// The settings of a scrub.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScrubCommand {
    /// The most that is compared; 0: no limit.
    pub bytes_per_s: u64,
    /// True if the scrub makes differing blocks equal to the majority.
    pub repair: bool,
}

/// A view that the engine cannot bring through without the arbiter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantWanted {
    /// The view.
    pub view: View,
    /// The report that the engine honours.
    pub honoured: ReplicaReport,
    /// Replicas that have stored the view: all of its members, and perhaps others of the honoured views.
    pub stored: Members,
}

/// An expansion that the device has not followed yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpansionStatus {
    /// The size that the volume is to have.
    pub size_bytes: u64,
    /// The reason for waiting, for people; empty if the expansion is under way.
    pub message: String,
    /// True if the kernel cannot do it while the device is in use: the next attachment has the new size.
    #[serde(default)]
    pub next_attach: bool,
}

/// The progress of a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyStatus {
    /// The bytes to copy at the beginning, in whole regions, including those counted while the replica was
    /// absent.
    pub total_bytes: u64,
    /// The bytes left to copy.
    pub left_bytes: u64,
    /// The rate in bytes per second.
    pub bytes_per_s: u64,
}

impl CopyStatus {
    /// Returns the completed percentage, 0 to 100.
    #[must_use]
    pub fn percent(&self) -> u64 {
        let done = self.total_bytes.saturating_sub(self.left_bytes);
        done.saturating_mul(100).checked_div(self.total_bytes).unwrap_or(100)
    }

    /// Returns the remaining seconds at this speed; none if the copy makes no progress.
    #[must_use]
    pub fn left_s(&self) -> Option<u64> {
        self.left_bytes.checked_div(self.bytes_per_s)
    }
}

/// The differences between members that verified reads have found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadFindings {
    /// Places where members differed.
    pub found: u64,
    /// The number of differences that were repaired.
    pub repaired: u64,
    /// The last difference, for people.
    pub last: String,
}

impl ReadFindings {
    fn is_empty(&self) -> bool {
        self.found == 0
    }
}

impl EngineStatus {
    /// Counts a difference: for the scrub if one is under way, else for the reads.
    pub fn count_found(&mut self, repaired: bool, last: String) {
        match self.scrub.as_mut().filter(|scrub| scrub.running) {
            Some(scrub) => {
                scrub.found += 1;
                scrub.repaired += u64::from(repaired);
                scrub.last = last;
            }
            None => {
                self.read_findings.found += 1;
                self.read_findings.repaired += u64::from(repaired);
                self.read_findings.last = last;
            }
        }
    }

    /// Changes the scrub that is under way, if any.
    pub fn change_scrub(&mut self, change: impl FnOnce(&mut ScrubStatus)) {
        if let Some(scrub) = self.scrub.as_mut().filter(|scrub| scrub.running) {
            change(scrub);
        }
    }
}

/// The findings of the last or current scrub.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStatus {
    /// The number of the scrub, counted from 1 since the engine has started.
    #[serde(default)]
    pub number: u64,
    /// True if it is under way.
    pub running: bool,
    /// The snapshot that is being compared; empty: the volume is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub snapshot: String,
    /// The position in the snapshot or in the volume.
    pub at_bytes: u64,
    /// Places where members differed.
    pub found: u64,
    /// The number of differences that were repaired.
    pub repaired: u64,
    /// The last difference, for people: the replica, the place, and the reaction.
    pub last: String,
}

impl ScrubStatus {
    /// Ends the scrub before it has compared everything, which `last` says.
    pub fn stop(&mut self) {
        self.running = false;
        let stopped = "stopped before everything was compared";
        self.last =
            if self.last.is_empty() { stopped.to_owned() } else { format!("{}; {stopped}", self.last) };
    }
}

/// The status of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
#[allow(clippy::large_enum_variant)] // a process has one of it
pub enum Status {
    /// The status of an engine.
    Engine(EngineStatus),
    /// The status of a replica.
    Replica(ReplicaStatus),
}

/// The requests that an engine has served since its process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoCounters {
    /// Reads.
    pub read: IoCounter,
    /// Writes.
    pub write: IoCounter,
    /// Flushes.
    pub flush: IoCounter,
    /// Discards and zeroes.
    pub discard: IoCounter,
    /// Requests that no volume can do, which were answered with an error and are counted nowhere else.
    #[serde(default)]
    pub refused: u64,
}

/// The served requests of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoCounter {
    /// Requests that were completed.
    pub operations: u64,
    /// The bytes of the successful requests.
    pub bytes: u64,
    /// The number of requests that ended with an error.
    pub failed: u64,
    /// The sum of the durations, from the arrival of a request at the engine until its completion.
    pub duration_us: u64,
}

impl IoCounter {
    /// Returns the sum of both.
    #[must_use]
    pub const fn plus(self, other: IoCounter) -> IoCounter {
        IoCounter {
            operations: self.operations.wrapping_add(other.operations),
            bytes: self.bytes.wrapping_add(other.bytes),
            failed: self.failed.wrapping_add(other.failed),
            duration_us: self.duration_us.wrapping_add(other.duration_us),
        }
    }
}

/// The phase of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EnginePhase {
    /// The engine opens replicas and creates its device.
    Starting,
    /// The engine serves the device.
    Serving,
    /// The engine has no quorum: requests wait.
    Frozen,
    /// The engine removes its device.
    Stopping,
    /// The engine has learned of a higher generation, or cannot continue; `message` has the reason.
    Stopped,
}

/// State of one engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStatus {
    /// The volume.
    pub volume: VolumeName,
    /// The process.
    pub pid: u32,
    /// The phase of the engine.
    pub phase: EnginePhase,
    /// The reason for people; empty if all is well.
    pub message: String,
    /// The generation of the engine.
    pub generation: Generation,
    /// The current view, once there is one.
    pub view: Option<View>,
    /// Every replica that it was given.
    pub members: Vec<MemberStatus>,
    /// ublk, nbd or socket, once it is chosen.
    pub frontend: Option<String>,
    /// The path `/dev/longhorn/<volume>`, or that of the socket, once it exists.
    pub endpoint: Option<PathBuf>,
    /// The number of the device that this process serves, like 259:3; none of a socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The size of the device as its user sees it.
    pub size_bytes: u64,
    /// True if writes may be lost that the user of the device believes stored. Every request fails until the
    /// volume is detached.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost_writes: bool,
    /// The pending part of an expansion, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expansion: Option<ExpansionStatus>,
    /// The view that waits for the arbiter's grant: requests wait, or the start does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant_wanted: Option<GrantWanted>,
    /// Regions that are made equal after an unclean stop, while there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "equalising")]
    pub resync: Option<CopyStatus>,
    /// The last or current scrub, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub: Option<ScrubStatus>,
    /// The differences that reads have found while no scrub was under way.
    #[serde(default, skip_serializing_if = "ReadFindings::is_empty")]
    pub read_findings: ReadFindings,
    /// The version of the program that the process runs; empty for a program that does not report it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
}

/// The state of a replica in the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberMode {
    /// The replica is being opened.
    Connecting,
    /// The replica is in the view.
    Member,
    /// The replica is being rebuilt.
    Rebuilding,
    /// The replica has failed, or was never reached.
    Failed,
}

/// State of one replica as its engine sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// The id of the replica.
    pub replica: ReplicaId,
    /// The address in use, or the first one.
    pub address: String,
    /// The state of the replica.
    pub mode: MemberMode,
    /// The reason why the replica is not a member, or why requests wait for a member. Empty: all is well.
    pub message: String,
    /// The number of times that requests had to wait for the replica, because it was late and the others
    /// could not continue without it.
    #[serde(default)]
    pub times_awaited: u64,
    /// The number of times that the replica, as the source of a copy, held rot according to its sums.
    #[serde(default)]
    pub times_rotten: u64,
    /// The number of times that such rot was copied unchanged, because no other member had the data.
    #[serde(default)]
    pub times_rot_copied: u64,
    /// The time since which the replica is not a member, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub away_since_ms: Option<u64>,
    /// The progress of the rebuild, if one runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<CopyStatus>,
}

/// State of one replica process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaStatus {
    /// The volume.
    pub volume: VolumeName,
    /// The id of the replica.
    pub replica: ReplicaId,
    /// The process.
    pub pid: u32,
    /// True if it takes connections.
    pub serving: bool,
    /// True if it has failed: it answers everything with an error until its process ends.
    #[serde(default)]
    pub failed: bool,
    /// The number of failures in a row, including earlier processes.
    #[serde(default)]
    pub failures: u32,
    /// The reason for people; empty if all is well.
    pub message: String,
    /// `unix:<path>` and `tcp:<ip>:<port>`.
    pub addresses: Vec<String>,
    /// Size of the volume.
    pub size_bytes: u64,
    /// Bytes on the disk, when this was last looked at.
    pub allocated_bytes: u64,
    /// The generation that holds it.
    pub generation: Generation,
    /// The views that it knows, no older than the generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub views: Option<ReplicaReport>,
    /// The directory of the replica.
    pub directory: PathBuf,
}
