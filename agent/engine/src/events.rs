//! Events for the main thread, and the reports in them. All threads send them, so this module uses no
//! module of a thread.

use std::os::fd::OwnedFd;

use shorthorn_control::{GrantWanted, ProcessCommand};
use shorthorn_core::{DropCause, PeerIndex};
use shorthorn_types::{ByteRange, Generation, View};

use crate::failures::DeviceError;

/// An event for the main thread.
#[derive(Debug)]
pub enum MainEvent {
    /// SIGTERM or SIGINT.
    Terminate,
    /// A client of the control socket has sent a command.
    ControlCommand(ProcessCommand),
    /// Another view was proposed to the members.
    Proposed,
    /// The view has changed.
    View(View),
    /// A replica has failed.
    Dropped { peer: PeerIndex, reason: String, cause: DropCause },
    /// A member is late, and the volume waits for it.
    Awaited { peer: PeerIndex, late_ms: u64, is_silent: bool },
    /// The member has answered in time again.
    Prompt { peer: PeerIndex },
    /// A view needs the arbiter's grant.
    AskGrant { wanted: Box<GrantWanted> },
    /// A rebuilt replica is in the view.
    Rebuilt { peer: PeerIndex },
    /// The members are equal everywhere.
    Resynced,
    /// The core has the new size.
    Expanded { size_bytes: u64 },
    /// An expansion reports its progress.
    Expansion(ExpansionProgress),
    /// The members have flushed, and every region without requests is cleared from their write intent.
    ClearedAll,
    /// A scrub has found members that differ.
    ScrubFound { range: ByteRange, odd: Vec<PeerIndex>, repaired: bool },
    /// A member does not hold the data that was stored on it.
    RotFound { peer: PeerIndex, range: ByteRange, is_copied: bool },
    /// A scrub has compared the whole volume.
    ScrubDone,
    /// The scrub of the snapshots with this number reports.
    Snapshots { scrub: u64, progress: ScrubProgress },
    /// A rebuild task reports on its replica.
    Rebuild { peer: PeerIndex, progress: RebuildProgress },
    /// The engine has lost its quorum.
    Frozen(String),
    /// A newer engine holds the volume.
    Deposed { holder: Generation },
    /// The user of the device received an error.
    DeviceError(DeviceError),
    /// A queue cannot continue.
    QueueFailed { queue: u16, reason: String },
    /// A queue that was to finish its requests has answered all of them. The next process continues with its
    /// socket, if any.
    Drained { queue: u16, socket: Option<OwnedFd> },
}

/// A report of an expansion.
#[derive(Debug)]
pub enum ExpansionProgress {
    /// The expansion waits, for this reason.
    Waiting(String),
    /// The device has this size.
    Resized { size_bytes: u64 },
    /// The device cannot be resized while it is in use, and why.
    NextAttach(String),
}

/// A report of a rebuild task on its replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RebuildProgress {
    /// The replica does not come back yet. `is_of_replica`: it has ended a rebuild by an error.
    Waiting { reason: String, is_of_replica: bool },
    /// Snapshot layers are being copied to it; bytes in all, and left.
    Copying { total_bytes: u64, left_bytes: u64 },
    /// The core copies the rest. `is_copy`: the replica receives a full copy, and has not kept its data.
    Rebuilding { missing_bytes: u64, is_copy: bool },
}

/// A report of the scrub of snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScrubProgress {
    /// The current position of the scrub.
    At { snapshot: String, offset_bytes: u64 },
    /// Members differ.
    Found(ScrubFinding),
    /// The scrub has ended. `incomplete` has the reason if it did not compare everything.
    Ended { incomplete: Option<String> },
}

/// A place where members differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrubFinding {
    pub snapshot: String,
    pub range: ByteRange,
    /// Members with wrong data, or all members if the right one is not known.
    pub odd: Vec<PeerIndex>,
    pub done: Done,
}

/// The outcome of a repair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Done {
    /// The range was copied from this member, and reads the same as there.
    Repaired { from: PeerIndex },
    /// No repair was requested.
    Reported,
    /// The range was not changed, because the right data is not known.
    Undecided,
    /// The repair failed.
    Failed(String),
}

/// The way in which a start or serving ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Stops for good and removes the device.
    Stop,
    /// Stops for a next process, which continues if the frontend supports that.
    Terminate,
}
