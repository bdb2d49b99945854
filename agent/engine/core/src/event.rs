//! Events (inputs) and outputs of the core.

use shorthorn_types::{ByteRange, Errno, MarkRegions, Members, RegionSet, ReplicaReport, View, ViewId};

use crate::cause::Failure;
use crate::membership::{PeerConfig, PeerIndex};
use crate::request::{Operation, Request};
use crate::slot::SlotId;

/// What an engine core is made with.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// How many queues.
    pub queues: u16,
    /// How many slots each has.
    pub depth: u16,
    /// Every replica that the engine was given, at most [`shorthorn_types::limits::MAX_MEMBERS`].
    pub peers: Vec<PeerConfig>,
    /// The engine's first view, through already.
    pub view: View,
    /// A replica that does not answer for so long is dropped if the others can go on without it: the table in the description of
    /// `patience` has all limits.
    pub replica_timeout_ms: u64,
    /// A replica that does not answer for so long is dropped, unless it answers PING and the others cannot go on without it.
    pub late_limit_ms: u64,
    /// How much may be with the replicas at once.
    pub flight_limits: FlightLimits,
    /// Size of the volume.
    pub size_bytes: u64,
    /// Where the members may differ: made equal before it is served. To any of them: all of them hold every
    /// acknowledged write.
    pub dirty: RegionSet,
    /// For each of `peers`: what it is known to have missed. Of members it is empty.
    pub missed: Vec<RegionSet>,
    /// The newest stamp that any member was sent: see [`shorthorn_types::is_current`].
    pub stamp: u32,
    /// For each of `peers`: the newest stamp that it was sent before it left. Of members it does not count.
    pub missed_stamps: Vec<u32>,
    /// How many slots queue 0 has beyond `depth`, with a buffer of [`MAX_IO_BYTES`](shorthorn_types::limits::MAX_IO_BYTES)
    /// each, for copies and checks; at least two. The last one is kept for what failed requests wait for.
    pub copy_slots: u16,
    /// How fast regions may be copied.
    pub copy_limits: CopyLimits,
    /// How long a region stays dirty after the last write, at least. 0: until [`Event::Settle`]; then what joining
    /// replicas have got is not cleared from the members' account either.
    pub intent_interval_ms: u64,
    /// While no more than that may differ after a crash, what is written now and then stays noted for longer.
    pub intent_keep_bytes: u64,
    /// Whether a replica compares each read of the frontend with its sums. If it holds rot there, another member answers the read.
    pub verify_reads: bool,
    /// Every request of the frontend is answered with [`Errno::IO`] at once: what its user was told is stored may be gone.
    pub refuses_requests: bool,
}

/// How much of the frontend's requests may be with the replicas at once, of reads and of all others each. More waits in the core: its
/// time begins when it is sent, and a PING never stands behind more than that in a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlightLimits {
    /// Data; a larger request is sent alone.
    pub bytes: u64,
    /// Requests, at least one.
    pub requests: usize,
}

/// How much copying may take of the volume's speed. Regions that a request waits for are copied at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyLimits {
    /// The most that is copied; 0: no limit.
    pub bytes_per_s: u64,
    /// The most that copying may take of the bytes that move while the frontend is busy, 1 to 100.
    pub share_percent: u8,
}

/// How a scrub goes about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubConfig {
    /// The most that is compared; 0: no limit.
    pub bytes_per_s: u64,
    /// Whether what differs is made equal to the majority.
    pub repair: bool,
}

/// Blocks of [`BLOCK_BYTES`](shorthorn_types::limits::BLOCK_BYTES) of a slot's buffer that are all zeroes: bit n % 64 of word n / 64.
pub type ZeroBlocks = [u64; 4];

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A frontend submits a request.
    Submit {
        /// On which queue.
        queue: u16,
        /// The request.
        request: Request,
    },
    /// A replica has answered what it was sent; the data of a read is in the slot's buffer.
    Reply {
        /// Which replica.
        peer: PeerIndex,
        /// Whose request.
        slot: SlotId,
        /// How it went.
        outcome: Result<(), Errno>,
    },
    /// A replica has answered a PING.
    Pong {
        /// Which replica.
        peer: PeerIndex,
        /// Over the connection of this queue.
        queue: u16,
        /// How much space its disk has left, in MiB; 0 if it does not know.
        free_mib: u32,
    },
    /// A replica has answered a PING with an error: it has failed for good, and answers every request with an error.
    PingFailed {
        /// Which replica.
        peer: PeerIndex,
        /// Over the connection of this queue.
        queue: u16,
        /// The errno of its answer.
        errno: Errno,
    },
    /// A replica has answered a proposal.
    ViewStored {
        /// Which replica.
        peer: PeerIndex,
        /// The view that it has stored.
        view: ViewId,
    },
    /// The arbiter has granted a view.
    Granted {
        /// Which one.
        view: ViewId,
    },
    /// There is a replica that is not in the view: what it misses is counted from now on. Its index is the
    /// next one, or one that is known and not in the view.
    Track {
        /// Its index.
        peer: PeerIndex,
        /// Which replica.
        config: PeerConfig,
    },
    /// A tracked replica is connected on every queue and has what the members have, `missing` and what was counted
    /// aside: it is to be brought up, and to become a member then.
    Join {
        /// Which replica.
        peer: PeerIndex,
        /// What it lacks beside what was counted.
        missing: Box<RegionSet>,
    },
    /// A replica that joins does not count as being rebuilt any more: see [`crate::EngineCore::is_in_copy`].
    CopyEnded {
        /// Which replica.
        peer: PeerIndex,
    },
    /// A replica that is not in the view is given up: it counts no more. Connections to it are dropped.
    Forget {
        /// Which replica.
        peer: PeerIndex,
    },
    /// A replica has answered [`Output::Mark`].
    Marked {
        /// Which replica.
        peer: PeerIndex,
        /// The number of the mark.
        mark: u32,
    },
    /// As [`Event::Reply`] to the read of a copy slot that went well, with what a look at the data has shown.
    CopyRead {
        /// Which replica.
        peer: PeerIndex,
        /// The slot.
        slot: SlotId,
        /// Blocks that need not be sent.
        zeroes: ZeroBlocks,
    },
    /// A replica has answered [`Operation::Verify`].
    Verified {
        /// Which replica.
        peer: PeerIndex,
        /// The slot.
        slot: SlotId,
        /// CRC-32C of the range as the replica reads it.
        outcome: Result<u32, Errno>,
    },
    /// Start to compare all members from the beginning, or stop that.
    Scrub(Option<ScrubConfig>),
    /// The engine is about to end: whatever can be is to be flushed and cleared from the write intent once, however
    /// new it is. [`Output::Settled`] follows, unless the view stays unsettled. Requests go on; what is modified
    /// meanwhile stays dirty.
    Settle,
    /// The volume grows to this size; every replica that is connected has. [`Output::Expanded`] follows. A replica that
    /// joins from here on has grown too.
    Expand {
        /// In bytes; less than it has changes nothing.
        size_bytes: u64,
    },
    /// Other limits from now on.
    SetCopyLimits(CopyLimits),
    /// A connection to a replica is lost, or what came over it cannot be trusted.
    Lost {
        /// Which replica.
        peer: PeerIndex,
        /// Why.
        reason: String,
    },
    /// After [`Output::Drop`]: nothing is read into or sent from the buffers of `queue` for this replica any more.
    Closed {
        /// Which replica.
        peer: PeerIndex,
        /// Which queue.
        queue: u16,
    },
    /// Time passes; at least four times a second while requests are in flight.
    Tick {
        /// Milliseconds since any fixed point. Of a step of more than a second one second counts: the process was paused.
        now_ms: u64,
    },
}

impl Event {
    /// The replica that has said something by this, and over the connection of which queue.
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

// Every request has some of them, which are moved from hand to hand. Views are large and change rarely: boxed.
const _: () = assert!(size_of::<Output>() <= 96);

/// Why connections to a replica are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropCause {
    /// It was connected and has not answered in time.
    Late,
    /// Its connection broke, or its answer was an error.
    Broken,
    /// Its disk has no space.
    Full,
    /// It was neither a member nor about to join: nothing has waited for it.
    Unused,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send the request to a replica.
    Send {
        /// Which replica.
        peer: PeerIndex,
        /// The slot has the data of a write, or takes that of a read.
        slot: SlotId,
        /// What to send.
        operation: Operation,
        /// About which bytes.
        range: ByteRange,
        /// Where in the slot's buffer their data is, or goes: 0 but for parts of a copy.
        buffer_offset: u32,
    },
    /// Tell the frontend that its request is done. The slot is free.
    Complete {
        /// Whose request.
        slot: SlotId,
        /// How it went.
        outcome: Result<(), Errno>,
    },
    /// For people: why the next [`Output::Complete`] of this slot has an error.
    Failed(Failure),
    /// Send a PING.
    Ping {
        /// To which replica.
        peer: PeerIndex,
        /// Over the connection of this queue.
        queue: u16,
    },
    /// Send a proposed view.
    Propose {
        /// To which replica.
        peer: PeerIndex,
        /// The view.
        view: Box<View>,
        /// What it honours.
        honoured: Box<ReplicaReport>,
    },
    /// Tell a replica that the view is through.
    Commit {
        /// Which replica.
        peer: PeerIndex,
        /// The view.
        view: Box<View>,
    },
    /// Ask the arbiter to grant a view; requests wait for [`Event::Granted`].
    AskGrant {
        /// The view.
        view: Box<View>,
        /// What it honours.
        honoured: Box<ReplicaReport>,
        /// Who has stored it.
        stored: Box<Members>,
    },
    /// Have a replica change one of its sets of regions.
    Mark {
        /// Which replica.
        peer: PeerIndex,
        /// Number to be given back in [`Event::Marked`].
        mark: u32,
        /// What to change.
        change: MarkRegions,
    },
    /// The members are equal everywhere: nothing waits for that any more.
    Equalised,
    /// All is cleared that could be after [`Event::Settle`].
    Settled,
    /// The volume has this size: requests may come for all of it.
    Expanded {
        /// In bytes.
        size_bytes: u64,
    },
    /// A replica that was brought up is in the view.
    Joined {
        /// Which one.
        peer: PeerIndex,
    },
    /// The members do not read the same.
    ScrubFound {
        /// Where.
        range: ByteRange,
        /// The replicas that differ from the majority; all members where there is none.
        odd: Vec<PeerIndex>,
        /// Whether they have been made equal to the majority.
        repaired: bool,
    },
    /// A member does not hold what was stored on it, as its sums say.
    RotFound {
        /// Which replica.
        peer: PeerIndex,
        /// Where, or somewhere in it.
        range: ByteRange,
        /// No other member could give it, and it was copied as it is. Else it is made equal to a sound one.
        is_copied: bool,
    },
    /// A scrub has seen every byte of the volume.
    ScrubDone,
    /// Close every connection to a replica that has failed; [`Event::Closed`] follows for each queue.
    Drop {
        /// Which replica.
        peer: PeerIndex,
        /// Why, for people.
        reason: String,
        /// Of which kind that is.
        cause: DropCause,
    },
    /// A member is late, and the volume waits for it, because the others cannot go on without it. Once, and again if `is_silent` changes.
    Awaited {
        /// Which replica.
        peer: PeerIndex,
        /// For how long it has owed the answer.
        late_ms: u64,
        /// Whether it does not answer PING either.
        is_silent: bool,
    },
    /// A member that was [awaited](Output::Awaited) has answered.
    Prompt {
        /// Which replica.
        peer: PeerIndex,
    },
    /// The view has changed.
    ViewChanged {
        /// To this.
        view: Box<View>,
    },
    /// No quorum is left: nothing is acknowledged or read any more. The engine has to start again.
    Frozen {
        /// Why, for people.
        reason: String,
    },
}

/// What is being copied or compared, and how far that is. Bytes of regions, whether allocated or not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopyProgress {
    /// Left to make equal after an unclean stop.
    pub equalise_left_bytes: u64,
    /// Replicas that are being brought up, and how many bytes of theirs are left.
    pub joins: Vec<(PeerIndex, u64)>,
    /// Copied since the engine has started, for whatever reason.
    pub copied_bytes: u64,
    /// Where a scrub is, if one is under way.
    pub scrub_at_bytes: Option<u64>,
    /// Where the members may differ if any of them crashed now.
    pub dirty_bytes: u64,
}

/// Where the core puts its outputs. Keeps its memory from call to call.
pub type Outputs = Vec<Output>;
