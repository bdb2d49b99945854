//! Connections between engine processes and replica processes.

use std::rc::Rc;

use shorthorn_types::{ByteRange, Errno, Generation, MarkRegions, ReplicaReport, View};
use shorthorn_wire::{RegionsPage, RegionsQuery};

use crate::checker::Id;

/// Which connection; never used again.
pub type ConnId = u64;

/// What an engine asks a replica. The sectors of data are ids of writes.
#[derive(Clone, Debug)]
pub enum Ask {
    /// First of all: which engine, and which queue.
    Hello(Generation, u16),
    /// Data.
    Read(ByteRange),
    /// Data, and whether it has to be durable.
    Write(ByteRange, Rc<[Id]>, bool),
    /// Make durable.
    Flush,
    /// Of no more use.
    Discard(ByteRange),
    /// Zeroes, and whether they have to be durable.
    WriteZeroes(ByteRange, bool),
    /// A check of what is there.
    Verify(ByteRange),
    /// Are you there?
    Ping,
    /// A proposed view, and what it honours.
    Propose(View, ReplicaReport),
    /// A view is through.
    Commit(View),
    /// A page of a set of regions.
    Regions(RegionsQuery),
    /// Change a set of regions.
    Mark(MarkRegions),
    /// Become a copy: an empty head over the snapshot that all replicas of the volume have.
    CopyBegin,
    /// The copy is whole.
    CopyEnd,
    /// The volume has grown to this size.
    Expand(u64),
}

/// What a replica tells an engine that it takes.
#[derive(Clone, Debug)]
pub struct Greeting {
    /// Its views.
    pub report: ReplicaReport,
    /// Whether it may have lost what was not flushed.
    pub lost_cache: bool,
    /// Whether it lacks data.
    pub rebuilding: bool,
    /// The size that it has.
    pub size_bytes: u64,
}

/// What a replica answers.
#[derive(Clone, Debug)]
pub enum Answer {
    /// Done.
    Done,
    /// To a hello.
    Welcome(Greeting),
    /// To a read.
    Data(Vec<Id>),
    /// To a verify.
    Check(u32),
    /// To a question for regions.
    Page(RegionsPage),
    /// Something went wrong.
    Error(Errno),
    /// A newer engine holds the replica.
    Deposed(Generation),
}

/// A message on its way.
#[derive(Clone, Debug)]
pub enum Message {
    /// To the replica: number of the request, and what it is.
    Ask(u64, Ask),
    /// To the engine: number of the request, and the answer.
    Answer(u64, Answer),
    /// The other end has closed.
    Close,
}

/// One connection: in order, each direction for itself.
#[derive(Debug)]
pub struct Conn {
    /// The engine process.
    pub engine: u64,
    /// Index of the replica in the world.
    pub replica: usize,
    /// Start of the replica process that took it.
    pub boot: u64,
    /// Whether the engine's end is open.
    pub engine_open: bool,
    /// Whether the replica's end is open.
    pub replica_open: bool,
    /// When the last message to the replica arrives: later ones arrive later.
    pub last_to_replica: u64,
    /// When the last message to the engine arrives.
    pub last_to_engine: u64,
    /// Which engine and queue, once the replica has taken it.
    pub place: Option<(Generation, u16)>,
}
