use serde::{Deserialize, Serialize};
use shorthorn_types::status::{EngineStatus, ReplicaStatus};
use shorthorn_types::{Generation, View};

use crate::spec::{RebuildLimits, ReplicaEndpoint};

/// A request of a client of a control socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProcessCommand {
    /// Requests one status.
    Status,
    /// Requests a status now and one after every change.
    Watch,
    /// Requests the [`IoCounters`] of the device's user. They are zero in a process that is not an engine or
    /// does not serve yet.
    Io,
    /// Ends the process and removes the device. All replicas are flushed first, within some seconds.
    Stop,
    /// Ends, and leaves the device to the next process, which continues to serve. Requests in flight are
    /// finished first.
    Handover,
    /// The arbiter has granted a view.
    Grant {
        /// The granted view.
        view: View,
    },
    /// Sets the replicas of the volume. A new one is rebuilt. A missing one is given up, unless it is in the
    /// view.
    Replicas {
        /// The complete list, which replaces the former one.
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
        /// The lowest generation that may use the replica.
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
        /// The new limits, which replace all former ones.
        limits: RebuildLimits,
    },
}

/// The settings of a scrub.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScrubCommand {
    /// The maximum number of bytes compared per second; none: no limit.
    #[serde(with = "shorthorn_types::optional::number")]
    pub bytes_per_s: Option<u64>,
    /// True if the scrub repairs blocks that differ from the majority.
    pub repair: bool,
}

/// The answer of an engine or replica process about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
#[allow(clippy::large_enum_variant)] // a process has one of it
pub enum ProcessStatus {
    /// Answer of an engine process.
    Engine(EngineStatus),
    /// Answer of a replica process.
    Replica(ReplicaStatus),
}

/// The requests that an engine has served since its process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoCounters {
    /// Reads of the frontend; reads of copies and scrubs do not count.
    pub read: IoCounter,
    /// Writes of the frontend; writes of copies do not count.
    pub write: IoCounter,
    /// Flushes of the frontend, without those that the engine makes by itself.
    pub flush: IoCounter,
    /// Discards and requests to write zeroes.
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
    /// Returns a counter with the sums of both.
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
