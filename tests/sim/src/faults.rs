//! The faults that a script can have, with all of their choices.

use serde::{Deserialize, Serialize};

/// A fault, with all of its choices. A `victim` is the number of a replica, modulo how many there are by
/// then; a `pick` likewise of the open connections.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "fault", rename_all = "kebab-case")]
#[allow(missing_docs)] // of the fields: the lines above each variant name them
pub enum Fault {
    /// A replica process is killed, and with `power` its kernel too.
    KillReplica { victim: usize, power: bool, for_us: u64 },
    /// The engine process is killed. Its sent messages arrive up to `lingers_us` later.
    KillEngine { lingers_us: u64, for_us: u64 },
    /// The engine process is asked to leave the device to the next one: it clears the write intents before it
    /// ends.
    HandOver { for_us: u64 },
    /// The volume is attached to another host, without a message to the old one.
    AttachElsewhere,
    /// A host and a replica do not reach each other for a while, in one direction or both.
    Partition { host: usize, victim: usize, to_replica: bool, to_engine: bool, for_us: u64 },
    /// The messages of a connection vanish without an error. The replica notices after a while.
    HalfOpen { pick: u64, for_us: u64 },
    /// A connection breaks; a part of its messages in flight is lost.
    BreakConnection { pick: u64 },
    /// The controller is away for a while.
    StopController { for_us: u64 },
    /// All hosts lose power at once.
    CutPowerOfAll,
    /// The disk of a replica is full for a while; with `pages` also for the sets of regions.
    FillDisk { victim: usize, partial: bool, pages: bool, for_us: u64 },
    /// A disk reports errors; with `partial` some blocks of a modification have changed all the same. A
    /// replica that ends by that is started again after `for_us`.
    BreakDisk { victim: usize, what: FaultyOperation, times: u32, partial: bool, for_us: u64 },
    /// For a while the process of a replica lies. It welcomes engines, and reads and writes.
    Lie { victim: usize, at: LieAt, for_us: u64 },
    /// A disk takes up to `by_us` longer for a while; its process answers as ever.
    SlowDisk { victim: usize, by_us: u64, for_us: u64 },
    /// The engine process is stopped, and then has everything to do at once.
    PauseEngine { tick_first: bool, for_us: u64 },
    /// The engine is paused, and the volume is attached elsewhere. Until `longer_us` after the pause, the
    /// host and the replica `keeps` reach each other alone.
    Isolate { keeps: usize, tick_first: bool, for_us: u64, longer_us: u64 },
    /// A replica process is stopped, and then has everything to do at once.
    PauseReplica { victim: usize, for_us: u64 },
    /// The clock of a host leaps ahead.
    ClockJump { host: usize, by_ms: u64 },
    /// A replica is given up while all is well, and a new one takes its place.
    Replace { victim: usize },
    /// A replica is gone for good, at the worst of times.
    Destroy {
        victim: usize,
        #[serde(default, skip_serializing_if = "Replacement::is_at_once")]
        replacement: Replacement,
    },
    /// A replica that was given up comes back under its number, like that of an undeleted volume.
    Return { victim: usize, for_us: u64 },
    /// The volume is to be larger: no fault, but it meets them all.
    Expand { blocks: u64 },
    /// A replica process is killed, and its sets of regions are damaged.
    RotSets { victim: usize, for_us: u64 },
    /// A replica's disk changes up to `blocks` blocks by itself. With `vanish`, they become holes. If it
    /// strikes `anywhere`, it also changes blocks that hold rot already, or have a sum only because of rot
    /// beside them. Blocks of the head above a snapshot vanish, too.
    RotBlocks {
        victim: usize,
        blocks: u64,
        #[serde(default)]
        vanish: bool,
        #[serde(default)]
        anywhere: bool,
    },
    /// A scrub repairs the snapshot of a replica for a while, beside requests.
    ScrubSnapshot { victim: usize, for_us: u64 },
    /// A scrub compares the volume at `bytes_per_s`, and is stopped after a while. Without `repair`,
    /// it only reports differences.
    Scrub { repair: bool, bytes_per_s: u64, for_us: u64 },
    /// A replica process is killed, and another program opens the directory.
    OtherProgram { victim: usize, for_us: u64 },
    /// A host loses its engine's state file.
    LoseState { host: usize },
    /// The controller's store is copied.
    SaveController,
    /// The controller's store is the copy again.
    RestoreController,
    /// A replica's disk is copied.
    SaveDisk { victim: usize },
    /// A replica's disk is the copy again.
    RestoreDisk { victim: usize, for_us: u64 },
}

/// The order in which the controller replaces replicas that are gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replacement {
    /// The engine is given the new replica instead of the other one.
    #[default]
    AtOnce,
    /// The engine is given the new replica first, and the other one is given up when all others are members.
    NewFirst,
    /// The other one is given up, and the engine gets the new replica later.
    OldFirst,
}

impl Replacement {
    fn is_at_once(&self) -> bool {
        *self == Replacement::AtOnce
    }
}

/// An operation that a disk fails, or an answer in which its process lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultyOperation {
    /// Writes, discards and zeroes.
    Write,
    /// Flushes.
    Flush,
    /// Reads of the volume.
    Read,
    /// Checks.
    Verify,
    /// Reads of single blocks of a snapshot: an error, a broken connection, or no answer.
    SnapshotBlock,
    /// The state with the views of the replica.
    State,
    /// Pages of sets of regions.
    Page,
    /// The record that data may be gone, once the replica has failed by something else.
    #[serde(rename = "note")]
    LossRecord,
    /// No operation lies, but the process answers with an error after all is done.
    Answer,
    /// No operation lies, but the process answers with impossible regions.
    Regions,
    /// No operation lies, but the process answers with impossible extents.
    Extents,
}

/// The requests to which a lying process answers with an error or nonsense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LieAt {
    /// Proposed views.
    Proposals,
    /// Questions for the data of a member that is copied.
    Source,
    /// Some blocks of the snapshot, other ones on each disk, cannot be read.
    Blocks,
}

impl FaultyOperation {
    /// Returns the name under which an error is counted.
    pub fn name(self) -> &'static str {
        match self {
            FaultyOperation::Write => "error: write",
            FaultyOperation::Flush => "error: flush",
            FaultyOperation::Read => "error: read",
            FaultyOperation::Verify => "error: verify",
            FaultyOperation::SnapshotBlock => "error: block of a snapshot",
            FaultyOperation::State => "error: state",
            FaultyOperation::Page => "error: page",
            FaultyOperation::LossRecord => "error: loss record",
            FaultyOperation::Answer => "lie: an error where all is done",
            FaultyOperation::Regions => "lie: regions that cannot be",
            FaultyOperation::Extents => "lie: extents that cannot be",
        }
    }
}

/// The faults to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum FaultKind {
    KillReplica,
    CutPower,
    KillEngine,
    HandOver,
    AttachElsewhere,
    Partition,
    OneWay,
    HalfOpen,
    BreakConnection,
    StopController,
    CutPowerOfAll,
    FillDisk,
    BreakWrite,
    BreakFlush,
    BreakRead,
    BreakVerify,
    BreakState,
    BreakPage,
    BreakLossRecord,
    LieInAnswer,
    LieInRegions,
    LieInExtents,
    LieAtProposals,
    LieAsSource,
    UnreadBlocks,
    SlowDisk,
    PauseEngine,
    PauseReplica,
    ClockJump,
    Replace,
    Destroy,
    Return,
    Expand,
    RotSets,
    RotBlocks,
    RotUnderCopy,
    RotUnderScrub,
    OtherProgram,
    LoseState,
    RestoreController,
    RestoreDisk,
}

impl Fault {
    /// Returns the name under which it is counted.
    pub fn name(&self) -> &'static str {
        match self {
            Fault::KillReplica { power: false, .. } => "fault: kill replica",
            Fault::KillReplica { .. } => "fault: cut power of replica",
            Fault::KillEngine { lingers_us: 0, .. } => "fault: kill engine",
            Fault::KillEngine { .. } => "fault: kill engine, messages linger",
            Fault::HandOver { .. } => "fault: hand over",
            Fault::AttachElsewhere => "fault: attach elsewhere",
            Fault::Partition { to_replica: true, to_engine: true, .. } => "fault: partition",
            Fault::Partition { .. } => "fault: one-way partition",
            Fault::HalfOpen { .. } => "fault: half-open connection",
            Fault::BreakConnection { .. } => "fault: break connection",
            Fault::StopController { .. } => "fault: stop controller",
            Fault::CutPowerOfAll => "fault: cut power of all",
            Fault::FillDisk { .. } => "fault: fill disk",
            Fault::BreakDisk { .. } => "fault: break disk",
            Fault::SlowDisk { .. } => "fault: slow disk",
            Fault::Lie { at: LieAt::Proposals, .. } => "fault: lie at proposals",
            Fault::Lie { at: LieAt::Source, .. } => "fault: lie as source",
            Fault::Lie { at: LieAt::Blocks, .. } => "fault: blocks that cannot be read",
            Fault::PauseEngine { .. } => "fault: pause engine",
            Fault::Isolate { .. } => "fault: isolate engine",
            Fault::PauseReplica { .. } => "fault: pause replica",
            Fault::ClockJump { .. } => "fault: clock jumps",
            Fault::Replace { .. } => "fault: replace replica",
            Fault::Destroy { .. } => "fault: destroy replica",
            Fault::Return { .. } => "fault: a lost replica returns",
            Fault::Expand { .. } => "fault: expand",
            Fault::RotSets { .. } => "fault: rot sets",
            Fault::RotBlocks { anywhere: true, vanish: false, .. } => "fault: rot anywhere",
            Fault::RotBlocks { anywhere: true, .. } => "fault: blocks vanish anywhere",
            Fault::RotBlocks { vanish: false, .. } => "fault: rot blocks",
            Fault::RotBlocks { .. } => "fault: blocks vanish",
            Fault::ScrubSnapshot { .. } => "fault: scrub of a snapshot",
            Fault::Scrub { repair: true, .. } => "fault: scrub",
            Fault::Scrub { .. } => "fault: scrub that only reports",
            Fault::OtherProgram { .. } => "fault: another program",
            Fault::LoseState { .. } => "fault: lose state file",
            Fault::SaveController => "fault: save controller",
            Fault::RestoreController => "fault: restore controller",
            Fault::SaveDisk { .. } => "fault: save disk",
            Fault::RestoreDisk { .. } => "fault: restore disk",
        }
    }
}
