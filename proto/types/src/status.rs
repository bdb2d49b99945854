//! Status of an engine and of its replicas. Engine, agent and controller share these types.
//!
//! The serialised forms are the lines of the control sockets. `shorthorn-api` has the conversion to and from
//! the messages of node.proto beside them.

mod enums;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{Generation, Members, ReplicaId, ReplicaReport, View, VolumeName, generation};

pub use enums::{
    CheckOutcome, CurrentState, DataLocality, DataLocalityError, DesireState, DeviceState, Frontend,
    Robustness, RollOverPhase, UnknownFrontend, VolumeState,
};

/// The progress of an engine from its start to its service.
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
    /// The phase is one of a later version: the engine exists, and nothing follows from its phase.
    #[serde(other)]
    Unknown,
}

impl EnginePhase {
    /// All phases of this version.
    const KNOWN: [EnginePhase; 5] = [
        EnginePhase::Starting,
        EnginePhase::Serving,
        EnginePhase::Frozen,
        EnginePhase::Stopping,
        EnginePhase::Stopped,
    ];

    /// Returns the word that is stored and shown.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            EnginePhase::Starting => "starting",
            EnginePhase::Serving => "serving",
            EnginePhase::Frozen => "frozen",
            EnginePhase::Stopping => "stopping",
            EnginePhase::Stopped => "stopped",
            EnginePhase::Unknown => "unknown",
        }
    }

    /// Returns the phase with that word; none for the empty word, with which no phase is reported.
    #[must_use]
    pub fn of_word(word: &str) -> Option<EnginePhase> {
        let known = EnginePhase::KNOWN.into_iter().find(|phase| phase.as_str() == word);
        known.or_else(|| (!word.is_empty()).then_some(EnginePhase::Unknown))
    }
}

/// The relation of a replica to the view of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberMode {
    /// The replica is in the view: it has every acknowledged write.
    Member,
    /// The replica has left the view, or was never reached.
    Failed,
    /// The replica is being rebuilt: it gets the missing data, and every new write.
    Rebuilding,
    /// The replica is being opened. Words of later versions mean this too: such a replica is not a member.
    #[serde(other)]
    Connecting,
}

impl MemberMode {
    /// Every mode, for metrics and schemas.
    pub const ALL: [MemberMode; 4] =
        [MemberMode::Member, MemberMode::Failed, MemberMode::Connecting, MemberMode::Rebuilding];

    /// Returns the word that is stored and shown.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            MemberMode::Member => "member",
            MemberMode::Failed => "failed",
            MemberMode::Connecting => "connecting",
            MemberMode::Rebuilding => "rebuilding",
        }
    }

    /// Returns the mode with that word; an unknown one is not a member.
    #[must_use]
    pub fn of_word(word: &str) -> MemberMode {
        let known = MemberMode::ALL.into_iter().find(|mode| mode.as_str() == word);
        known.unwrap_or(MemberMode::Connecting)
    }

    /// Returns true if requests wait for a replica in that mode, if its status has these two fields.
    ///
    /// Release 0.1.0 does not report `awaited`. It reports a message of a member only during such a wait.
    #[must_use]
    pub fn is_awaited(self, awaited: Option<bool>, message: &str) -> bool {
        self == MemberMode::Member && awaited.unwrap_or(!message.is_empty())
    }
}

/// The progress of a copy: a rebuild of a replica, or a resync of the members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyStatus {
    /// The bytes to copy at the beginning, in whole regions, including those counted while the replica was
    /// absent.
    pub total_bytes: u64,
    /// The bytes that are not copied yet.
    pub left_bytes: u64,
    /// The rate in bytes per second.
    pub bytes_per_s: u64,
}

impl CopyStatus {
    /// Returns the completed percentage, 0 to 100.
    #[must_use]
    pub fn percent(&self) -> u64 {
        let done = u128::from(self.total_bytes.saturating_sub(self.left_bytes)) * 100;
        done.checked_div(self.total_bytes.into()).map_or(100, |percent| u64::try_from(percent).unwrap_or(100))
    }

    /// Returns the remaining seconds at this speed; none if the copy makes no progress.
    #[must_use]
    pub fn left_s(&self) -> Option<u64> {
        self.left_bytes.checked_div(self.bytes_per_s)
    }
}

/// The findings of the last or current scrub.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStatus {
    /// The number of the scrub, counted from 1 since the engine has started; none: not reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<u64>,
    /// True if it is under way.
    pub running: bool,
    /// The snapshot that is being compared; none: the volume is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// The position in the snapshot or in the volume.
    pub at_bytes: u64,
    /// Places where members differed.
    pub found: u64,
    /// The number of differences that were repaired.
    pub repaired: u64,
    /// The last difference, for people: the replica, the place, and the reaction. None: no difference was
    /// found.
    #[serde(with = "crate::optional::text")]
    pub last: Option<String>,
}

impl ScrubStatus {
    /// Ends the scrub before it has compared everything, which `last` says.
    pub fn stop(&mut self) {
        self.running = false;
        let stopped = "stopped before everything was compared";
        self.last = Some(match self.last.take() {
            Some(last) => format!("{last}; {stopped}"),
            None => stopped.to_owned(),
        });
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

/// An expansion that the device has not followed yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpansionStatus {
    /// The size that the volume is to have.
    pub size_bytes: u64,
    /// The reason for waiting, for people; none if the expansion is under way.
    #[serde(with = "crate::optional::text")]
    pub message: Option<String>,
    /// True if the kernel cannot do it while the device is in use: the next attachment has the new size.
    #[serde(default)]
    pub next_attach: bool,
}

/// A view that the engine cannot bring through without the arbiter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantWanted {
    /// The view that needs a grant.
    pub view: View,
    /// The report that the engine honours.
    pub honoured: ReplicaReport,
    /// Replicas that have stored the view: all of its members, and perhaps others of the honoured views.
    pub stored: Members,
}

/// State of one engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStatus {
    /// See `volume` in the spec of the process.
    pub volume: VolumeName,
    /// The process; none in the status that an agent reports, which has it beside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The progress of the process; a new phase is reported at once.
    pub phase: EnginePhase,
    /// The reason for people; empty without a problem.
    pub message: String,
    /// The generation that the process has taken.
    pub generation: Generation,
    /// The current view, once there is one.
    pub view: Option<View>,
    /// Every replica that it was given.
    pub members: Vec<MemberStatus>,
    /// The frontend in use, once it is chosen; never [`Frontend::Auto`].
    pub frontend: Option<Frontend>,
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
    /// The progress of the resync after an unclean stop, while one is under way.
    // The key of the control socket, which programs of other versions read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "equalising")]
    pub resync: Option<CopyStatus>,
    /// The last or current scrub, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub: Option<ScrubStatus>,
    /// The differences that reads have found while no scrub was under way, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_findings: Option<ReadFindings>,
    /// The version of the program that the process runs; none for a program that does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

impl EngineStatus {
    /// Returns the status of an engine that has just begun, without any finding.
    #[must_use]
    pub const fn starting(volume: VolumeName, generation: Generation, size_bytes: u64) -> EngineStatus {
        EngineStatus {
            volume,
            pid: None,
            phase: EnginePhase::Starting,
            message: String::new(),
            generation,
            view: None,
            members: Vec::new(),
            frontend: None,
            endpoint: None,
            device: None,
            size_bytes,
            lost_writes: false,
            expansion: None,
            grant_wanted: None,
            resync: None,
            scrub: None,
            read_findings: None,
            version: None,
        }
    }

    /// Returns the state of that replica; none if the engine was not given it.
    #[must_use]
    pub fn member(&self, replica: ReplicaId) -> Option<&MemberStatus> {
        self.members.iter().find(|member| member.replica == replica)
    }

    /// Returns the number of times that the engine has met damaged data without a sound copy on any replica.
    #[must_use]
    pub fn damaged_ranges(&self) -> u64 {
        self.members.iter().map(|member| member.times_rot_copied).sum()
    }

    /// Counts a difference: for the scrub if one is under way, else for the reads.
    pub fn count_found(&mut self, repaired: bool, last: String) {
        match self.scrub.as_mut().filter(|scrub| scrub.running) {
            Some(scrub) => {
                scrub.found += 1;
                scrub.repaired += u64::from(repaired);
                scrub.last = Some(last);
            }
            None => {
                let read = self.read_findings.get_or_insert_default();
                read.found += 1;
                read.repaired += u64::from(repaired);
                read.last = last;
            }
        }
    }

    /// Ends the scrub that is under way: it has compared the whole volume of that size. So its findings
    /// replace those of earlier reads.
    pub fn complete_scrub(&mut self, size_bytes: u64) {
        if let Some(scrub) = self.scrub.as_mut().filter(|scrub| scrub.running) {
            (scrub.running, scrub.at_bytes) = (false, size_bytes);
            self.read_findings = None;
        }
    }

    /// Changes the scrub that is under way, if any.
    pub fn change_scrub(&mut self, change: impl FnOnce(&mut ScrubStatus)) {
        if let Some(scrub) = self.scrub.as_mut().filter(|scrub| scrub.running) {
            change(scrub);
        }
    }
}

/// State of one replica as its engine sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Identity of the replica in views.
    pub replica: ReplicaId,
    /// The address in use, or the first one.
    pub address: String,
    /// The state of the replica.
    pub mode: MemberMode,
    /// The reason why the replica is not a member, or why requests wait for a member. Empty: no problem.
    pub message: String,
    /// True if requests wait for the replica, because it is late and the other members cannot continue
    /// without it. None: the engine is of release 0.1.0; see [`MemberStatus::is_awaited`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub awaited: Option<bool>,
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
    /// True if the replica itself has ended a rebuild since it left: its disk was full, it was late, or it
    /// answered with an error.
    #[serde(default)]
    pub rebuild_failed: bool,
    /// The progress of the rebuild, if one runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<CopyStatus>,
}

impl MemberStatus {
    /// Returns a replica in that mode without further data.
    #[must_use]
    pub const fn of(replica: ReplicaId, mode: MemberMode) -> MemberStatus {
        MemberStatus {
            replica,
            address: String::new(),
            mode,
            message: String::new(),
            awaited: Some(false),
            times_awaited: 0,
            times_rotten: 0,
            times_rot_copied: 0,
            away_since_ms: None,
            rebuild_failed: false,
            copy: None,
        }
    }

    /// Returns true if requests wait for the replica.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        self.mode.is_awaited(self.awaited, &self.message)
    }

    /// Reports that the replica does not come back yet, for `reason`. An attempt to rebuild the replica has
    /// ended, if one was under way.
    pub fn rebuild_waits(&mut self, reason: String) {
        // Nothing is copied during the pause, so the status shows the reason.
        (self.message, self.copy) = (reason, None);
        if self.mode == MemberMode::Rebuilding {
            self.mode = MemberMode::Failed;
        }
    }

    /// Reports that the replica is a member again.
    pub fn rebuilt(&mut self) {
        self.mode = MemberMode::Member;
        self.message.clear();
        (self.away_since_ms, self.copy, self.rebuild_failed) = (None, None, false);
    }

    /// Reports that requests wait for a member. A repeated report has a new message, and counts once.
    pub fn begin_wait(&mut self, message: String) {
        if self.mode == MemberMode::Member {
            self.times_awaited += u64::from(!self.is_awaited());
            (self.awaited, self.message) = (Some(true), message);
        }
    }

    /// Reports that requests do not wait for the member any more.
    pub fn end_wait(&mut self) {
        if self.is_awaited() {
            self.message.clear();
        }
        self.awaited = Some(false);
    }
}

/// The phase of a replica process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaPhase {
    /// The process does not take connections yet, or not any more.
    Closed,
    /// The process takes connections.
    Serving,
    /// The replica has failed: it answers everything with an error until its process ends.
    Failed,
}

/// State of one replica process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaStatus {
    /// See `volume` in the spec of the process.
    pub volume: VolumeName,
    /// Identity of the replica in views.
    pub replica: ReplicaId,
    /// The process id.
    pub pid: u32,
    /// The phase of the process.
    #[serde(flatten, with = "phase_flags")]
    pub phase: ReplicaPhase,
    /// The number of failures in a row, including earlier processes.
    #[serde(default)]
    pub failures: u32,
    /// The reason for people; empty without a problem.
    pub message: String,
    /// `unix:<path>` and `tcp:<ip>:<port>`.
    pub addresses: Vec<String>,
    /// Size of the volume.
    pub size_bytes: u64,
    /// Bytes on the disk, when this was last looked at.
    pub allocated_bytes: u64,
    /// The generation that holds it; none: no engine has opened it.
    #[serde(with = "generation::or_never")]
    pub generation: Option<Generation>,
    /// The views that it knows, no older than the generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub views: Option<ReplicaReport>,
    /// The directory with the chain and the state of the replica.
    pub directory: PathBuf,
}

/// The part of a replica's status that its agent passes on to the controller.
///
/// The agent adds the directory, and shows it before the replica has reported a status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedReplica {
    /// The addresses of its server.
    pub addresses: Vec<String>,
    /// The allocated bytes of its directory.
    pub allocated_bytes: u64,
    /// The directory, if it is reported.
    pub directory: Option<String>,
    /// The attachment whose engine holds it: those of older ones are refused. None: no engine ever did, or it
    /// does not report one.
    pub attach: Option<u64>,
    /// The views that it knows, no older than that.
    pub views: Option<Box<ReplicaReport>>,
}

/// The phase of a replica as the two flags of the control socket.
mod phase_flags {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::ReplicaPhase;

    #[derive(Serialize, Deserialize)]
    struct Flags {
        serving: bool,
        #[serde(default)]
        failed: bool,
    }

    pub(super) fn serialize<S: Serializer>(phase: &ReplicaPhase, serializer: S) -> Result<S::Ok, S::Error> {
        let flags =
            Flags { serving: *phase == ReplicaPhase::Serving, failed: *phase == ReplicaPhase::Failed };
        flags.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ReplicaPhase, D::Error> {
        Ok(match Flags::deserialize(deserializer)? {
            Flags { serving: true, .. } => ReplicaPhase::Serving,
            Flags { failed: true, .. } => ReplicaPhase::Failed,
            Flags { .. } => ReplicaPhase::Closed,
        })
    }
}
