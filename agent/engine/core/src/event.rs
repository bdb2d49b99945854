//! Events (inputs) and outputs of the core.

use std::num::NonZeroU64;

use shorthorn_types::{ByteRange, Errno, MarkRegions, Members, RegionSet, ReplicaReport, View, ViewId};

use crate::cause::FailedRequest;
use crate::membership::{PeerConfig, PeerIndex};
use crate::request::{Operation, Request};
use crate::scrub_result::VolumeCheck;
use crate::slot::SlotId;

/// The configuration from which an engine core is made.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// Hardware queues of the device, and connections to each replica, from 1.
    pub queues: u16,
    /// The number of slots of each queue.
    pub depth: u16,
    /// Every replica of the engine's spec, at most [`shorthorn_types::limits::MAX_MEMBERS`].
    pub peers: Vec<PeerConfig>,
    /// The engine's first view, which is committed.
    pub view: View,
    /// The time without an answer after which a replica is dropped if the others can continue without it. The
    /// table in the description of `replica_timeouts` has all limits.
    pub replica_timeout_ms: u64,
    /// The time without an answer after which a replica is dropped, unless it answers PING and the others
    /// cannot continue without it.
    pub late_limit_ms: u64,
    /// The limits of requests that the replicas have at once.
    pub flight_limits: FlightLimits,
    /// Size of the volume.
    pub size_bytes: u64,
    /// Regions in which the members may differ. They are resynced before they are served, from any member:
    /// all members hold every acknowledged write.
    pub dirty: RegionSet,
    /// For each of `peers`: dirty regions that it has not modified, like most members. They are resynced from
    /// such a member: another one may hold rot that was being repaired. Empty if no such region is known.
    pub resync_sources: Vec<RegionSet>,
    /// The out-of-sync set of each of `peers`, as far as known. Empty for members.
    pub out_of_sync: Vec<RegionSet>,
    /// The newest stamp that any member was sent: see [`shorthorn_types::is_current`].
    pub stamp: u32,
    /// For each of `peers`: the newest stamp that it was sent before it left. The values of members are
    /// ignored.
    pub out_of_sync_stamps: Vec<Option<u32>>,
    /// The number of slots that queue 0 has beyond `depth`, for copies and checks, with a buffer of
    /// [`MAX_IO_BYTES`](shorthorn_types::limits::MAX_IO_BYTES) each. At least two; the last one is reserved
    /// for copies that failed requests wait for.
    pub copy_slots: u16,
    /// The limits of the speed of copies.
    pub copy_limits: CopyLimits,
    /// The minimum time for which a region stays dirty after its last write. None: regions stay dirty until
    /// [`Event::ClearAll`], and regions copied to rebuilding replicas stay in the members' out-of-sync sets
    /// as well.
    pub intent_interval_ms: Option<u64>,
    /// The limit up to which regions that are written now and then stay dirty for longer. It bounds the bytes
    /// that may differ after a crash.
    pub intent_keep_bytes: u64,
    /// True if a replica compares each read of the frontend with its sums. If it holds rot there, another
    /// member answers the read.
    pub verify_reads: bool,
    /// True if the core answers every frontend request with [`Errno::IO`] at once, because writes may be lost
    /// that were reported as stored.
    pub refuses_requests: bool,
}

/// The limits of frontend requests that the replicas have at once, separately for reads and for all others.
/// Further requests wait in the core. The time of a request begins when it is sent, and a PING waits behind
/// at most that many bytes in a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlightLimits {
    /// The maximum number of bytes; a larger request is sent alone.
    pub bytes: u64,
    /// The maximum number of requests, at least one.
    pub requests: usize,
}

/// The share of the volume's speed that copies may take. Regions that a request waits for are copied at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyLimits {
    /// The most that is copied; none: no limit.
    pub bytes_per_s: Option<NonZeroU64>,
    /// The maximum percentage of copies in all bytes that move while the frontend is busy, 1 to 100.
    pub share_percent: u8,
}

/// The settings of a scrub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubConfig {
    /// The most that is compared; none: no limit.
    pub bytes_per_s: Option<NonZeroU64>,
    /// True if the scrub repairs blocks that differ from the majority.
    pub repair: bool,
}

/// Blocks of [`BLOCK_BYTES`](shorthorn_types::limits::BLOCK_BYTES) of a slot's buffer that are all zeroes:
/// bit n % 64 of word n / 64.
pub type ZeroBlocks = [u64; 4];

/// An input of the core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A frontend submits a request.
    Submit {
        /// The queue of the frontend, from 0.
        queue: u16,
        /// The kind of the request and its range.
        request: Request,
    },
    /// A replica has answered a request. The data of a read is in the slot's buffer.
    Reply {
        /// The replica that has answered.
        peer: PeerIndex,
        /// The slot of [`Output::Send`].
        slot: SlotId,
        /// The errno of the replica if it has failed the request.
        outcome: Result<(), Errno>,
    },
    /// A replica has answered a PING.
    Pong {
        /// The replica that has answered.
        peer: PeerIndex,
        /// The queue of [`Output::Ping`].
        queue: u16,
        /// The free space of the replica's disk, in MiB; none if it is unknown.
        free_mib: Option<u32>,
    },
    /// A replica has answered a PING with an error: it has failed for good, and answers every request with an
    /// error.
    PingFailed {
        /// The replica that has failed.
        peer: PeerIndex,
        /// The queue of [`Output::Ping`].
        queue: u16,
        /// The errno of its answer.
        errno: Errno,
    },
    /// A replica has answered a proposal.
    ViewStored {
        /// The replica that has answered.
        peer: PeerIndex,
        /// The id in the [`Output::Propose`] that this answers.
        view: ViewId,
    },
    /// The arbiter has granted a view.
    Granted {
        /// The view of [`Output::AskGrant`].
        view: ViewId,
    },
    /// A replica outside the view was found: the core counts the regions that it misses from now on. Its
    /// index is the next one, or that of a known replica outside the view.
    Track {
        /// The index that the replica has from now on.
        peer: PeerIndex,
        /// The identity of the replica, and its place: on this host or on another.
        config: PeerConfig,
    },
    /// A tracked replica is connected on every queue. It has the data of the members except for `missing` and
    /// the regions counted meanwhile. The core rebuilds it and makes it a member.
    Rebuild {
        /// The tracked replica.
        peer: PeerIndex,
        /// Regions that the replica lacks besides the counted ones.
        missing: Box<RegionSet>,
    },
    /// The full copy of a replica has ended, and the replica may become a member: see
    /// [`crate::EngineCore::start_full_copy`].
    CopyEnded {
        /// The replica that may become a member.
        peer: PeerIndex,
    },
    /// A replica that is not in the view is given up: the core forgets it. Connections to it are dropped.
    Forget {
        /// The replica that is given up.
        peer: PeerIndex,
    },
    /// A replica has answered [`Output::Mark`].
    Marked {
        /// The replica that has answered.
        peer: PeerIndex,
        /// The number in the [`Output::Mark`] that this answers.
        mark: u32,
    },
    /// A successful answer, like [`Event::Reply`], to the read of a copy slot, with the results of examining
    /// the data.
    CopyRead {
        /// The replica that was read.
        peer: PeerIndex,
        /// A copy slot, whose buffer has the data.
        slot: SlotId,
        /// Blocks that need not be sent.
        zeroes: ZeroBlocks,
    },
    /// A replica has answered [`Operation::Verify`].
    Verified {
        /// The replica that has answered.
        peer: PeerIndex,
        /// The slot of the comparison.
        slot: SlotId,
        /// The data of the range as the replica reads it.
        outcome: Result<VolumeCheck, Errno>,
    },
    /// A command to start a scrub from the beginning, or to stop the scrub.
    Scrub(Option<ScrubConfig>),
    /// The engine is about to end: it flushes, and clears the write intent once as far as possible, however
    /// new it is. [`Output::ClearedAll`] follows, unless the view keeps changing. Requests continue, and
    /// their modifications meanwhile stay dirty.
    ClearAll,
    /// The volume grows to this size; every replica that is connected has. [`Output::Expanded`] follows. A
    /// replica that becomes a member from here on has grown too.
    Expand {
        /// The size in bytes; a size below the current one is ignored.
        size_bytes: u64,
    },
    /// The limits of copies have changed.
    SetCopyLimits(CopyLimits),
    /// A connection to a replica is lost, or its data cannot be trusted.
    Lost {
        /// The replica, which counts as failed.
        peer: PeerIndex,
        /// The reason, for people.
        reason: String,
    },
    /// The answer to [`Output::Drop`]: no data of this replica is read into or sent from the buffers of
    /// `queue` any more.
    Closed {
        /// The replica that has no connection of this queue any more.
        peer: PeerIndex,
        /// The queue that has closed its connection, from 0.
        queue: u16,
    },
    /// The clock advances. The shell sends this at least four times a second while requests are in flight.
    Tick {
        /// Milliseconds since any fixed point. A step of more than a second is treated as one second, because
        /// the process was paused.
        now_ms: u64,
    },
}

impl Event {
    /// Returns the replica that has sent this event, and its queue.
    pub(crate) fn answered_by(&self) -> Option<(PeerIndex, u16)> {
        match self {
            Event::Reply { peer, slot, .. }
            | Event::CopyRead { peer, slot, .. }
            | Event::Verified { peer, slot, .. } => Some((*peer, slot.queue)),
            Event::Pong { peer, queue, .. } => Some((*peer, *queue)),
            // These are asked over the first connection.
            Event::Marked { peer, .. } | Event::ViewStored { peer, .. } => Some((*peer, 0)),
            _ => None,
        }
    }
}

// Every request moves some of them between the parts. Views are large and change rarely, so they are boxed.
const _: () = assert!(size_of::<Output>() <= 96);

/// The reason why connections to a replica are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropCause {
    /// The replica was connected and has not answered in time.
    Late,
    /// The connection broke.
    Broken,
    /// The replica answered a request with an error.
    Failed,
    /// The replica's disk has no space.
    Full,
    /// The replica was neither a member nor a rebuilding replica, so no request waited for it.
    Unused,
}

/// An output of the core, which the shell carries out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send the request to a replica.
    Send {
        /// The replica that gets the request.
        peer: PeerIndex,
        /// The slot has the data of a write, or takes that of a read.
        slot: SlotId,
        /// The operation, without data: the slot's buffer has it.
        operation: Operation,
        /// The range of the operation; empty for a flush.
        range: ByteRange,
        /// The offset of the data in the slot's buffer. It is 0 except for parts of a copy.
        buffer_offset: u32,
    },
    /// Complete the request of the frontend. The slot is free.
    Complete {
        /// The slot of [`Event::Submit`].
        slot: SlotId,
        /// The result for the frontend.
        outcome: Result<(), Errno>,
    },
    /// For people: why the next [`Output::Complete`] of this slot has an error.
    Failed(FailedRequest),
    /// Send a PING.
    Ping {
        /// The replica that has to answer with [`Event::Pong`].
        peer: PeerIndex,
        /// The queue over whose connection the PING is sent.
        queue: u16,
    },
    /// Send a proposed view.
    Propose {
        /// The replica that has to answer with [`Event::ViewStored`].
        peer: PeerIndex,
        /// The proposed view, with the number that it would get.
        view: Box<View>,
        /// The report that the replica honours.
        honoured: Box<ReplicaReport>,
    },
    /// Report to a replica that the view is committed.
    Commit {
        /// A replica that answers the engine, in the view or not.
        peer: PeerIndex,
        /// The view that members and quorums have stored.
        view: Box<View>,
    },
    /// Ask the arbiter to grant a view; requests wait for [`Event::Granted`].
    AskGrant {
        /// The view that lacks a quorum without a grant.
        view: Box<View>,
        /// The report that the replica honours.
        honoured: Box<ReplicaReport>,
        /// The members that have stored the view.
        stored: Box<Members>,
    },
    /// Have a replica change one of its sets of regions.
    Mark {
        /// The replica that has to answer with [`Event::Marked`].
        peer: PeerIndex,
        /// Number to be given back in [`Event::Marked`].
        mark: u32,
        /// The set, the action and the regions.
        change: MarkRegions,
    },
    /// The resync is complete: the members are equal everywhere, and no request waits for it.
    Resynced,
    /// All is cleared that could be after [`Event::ClearAll`].
    ClearedAll,
    /// The volume has this size: requests for all of it are accepted.
    Expanded {
        /// The new size of the volume in bytes.
        size_bytes: u64,
    },
    /// A rebuilt replica is in the view.
    Rebuilt {
        /// The new member.
        peer: PeerIndex,
    },
    /// A scrub has found members that differ.
    ScrubFound {
        /// The compared range, in bytes of the volume.
        range: ByteRange,
        /// The replicas that differ from the majority, or all members if no majority exists.
        odd: Vec<PeerIndex>,
        /// True if the scrub has repaired them.
        repaired: bool,
    },
    /// The checksums of a member show that its data differs from the data that was stored.
    RotFound {
        /// The member with the rot.
        peer: PeerIndex,
        /// The range that contains the rot.
        range: ByteRange,
        /// True if no other member could supply the block, so that it was copied unchanged. Otherwise it is
        /// repaired from a sound copy.
        is_copied: bool,
    },
    /// A scrub has seen every byte of the volume.
    ScrubDone,
    /// Close every connection to a replica that has failed; [`Event::Closed`] follows for each queue.
    Drop {
        /// The replica that the core does not use any more.
        peer: PeerIndex,
        /// The reason, for people.
        reason: String,
        /// The kind of the reason.
        cause: DropCause,
    },
    /// A member is late, and the volume waits for it, because the others cannot continue without it. The core
    /// reports this once, and again if `is_silent` changes.
    Awaited {
        /// The member that is late.
        peer: PeerIndex,
        /// The time for which it has owed the answer.
        late_ms: u64,
        /// True if it does not answer PING either.
        is_silent: bool,
    },
    /// A member that was [awaited](Output::Awaited) has answered.
    Prompt {
        /// The member that has answered.
        peer: PeerIndex,
    },
    /// A proposed view is committed and in use now.
    ViewChanged {
        /// The committed view.
        view: Box<View>,
    },
    /// The engine has lost its quorum and does not complete requests any more. It has to start again.
    Frozen {
        /// The reason, for people.
        reason: String,
    },
}

/// The progress of copies and comparisons, in bytes of regions, whether allocated or not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopyProgress {
    /// The rest of the resync after an unclean stop.
    pub resync_left_bytes: u64,
    /// Replicas that are being rebuilt, with the number of bytes left.
    pub rebuilds: Vec<(PeerIndex, u64)>,
    /// The bytes copied since the engine has started, for any reason.
    pub copied_bytes: u64,
    /// The position of the running scrub, or none.
    pub scrub_at_bytes: Option<u64>,
    /// Bytes in which the members may differ if any of them crashed now.
    pub dirty_bytes: u64,
}

/// The buffer of the core's outputs. It keeps its memory from call to call.
pub type Outputs = Vec<Output>;
