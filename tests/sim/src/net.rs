//! Connections between engine processes and replica processes.

use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use shorthorn_checker::Id;
use shorthorn_types::{ByteRange, Errno, Generation, MarkRegions, ReplicaReport, View};
use shorthorn_wire::{ExtentsPage, LayerList, RegionsPage, RegionsQuery, Welcome};

use crate::disk::{Block, SparseFile};

/// The id of a connection; never used again.
pub type ConnId = u64;

/// A snapshot as the list of layers names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotLayer {
    /// The attachment of the salvage that found it incomplete; 0: none has.
    pub salvaged: u64,
}

impl SnapshotLayer {
    /// Returns the snapshot below the head, if the list has one.
    pub fn of(list: &LayerList) -> Option<SnapshotLayer> {
        let (_, snapshots) = list.layers.split_last()?;
        Some(SnapshotLayer { salvaged: snapshots.first()?.meta.parse().ok()? })
    }
}

/// A request of an engine to a replica. The sectors of data are ids of writes.
#[derive(Clone, Debug)]
pub enum Ask {
    /// First of all: which engine, and which queue.
    Hello(Generation, u16),
    /// Data.
    Read(ByteRange),
    /// Data, unless it is known to be rotten.
    CheckedRead(ByteRange),
    /// Data, and whether it has to be durable.
    Write(ByteRange, Rc<[Id]>, bool),
    /// Make durable.
    Flush,
    /// Makes the range zeroes and frees its space.
    Discard(ByteRange),
    /// Zeroes, and whether they have to be durable.
    WriteZeroes(ByteRange, bool),
    /// A check of the stored data.
    Verify(ByteRange),
    /// Are you there?
    Ping,
    /// A proposed view, and the report that it honours.
    Propose(View, ReplicaReport),
    /// A view is committed.
    Commit(View),
    /// A page of a set of regions.
    Regions(RegionsQuery),
    /// Change a set of regions.
    Mark(MarkRegions),
    /// Requests the list of layers.
    Layers,
    /// From where on does the head have data?
    HeadExtents(u64),
    /// Become a copy of a replica with these layers: an empty head, over a snapshot if that one has one.
    CopyBegin(LayerList),
    /// The snapshot, for a copy of these blocks.
    ReadSnapshot(Range<u64>),
    /// A block of the snapshot in which another one holds rot.
    ReadSnapshotBlock(u64),
    /// Blocks of the snapshot, as the other replica has them, and those that all have lost.
    CopySnapshot(Rc<SparseFile>, Range<u64>, Vec<RottenBlock>),
    /// The snapshot is whole.
    SnapshotEnd,
    /// The copy is whole.
    CopyEnd,
    /// The volume has grown to this size.
    Expand(u64),
}

/// A block that holds rot, and its former data, which only the simulation knows.
pub type RottenBlock = (u64, Block);

#[derive(Clone, Debug)]
pub enum ReplicaAnswer {
    /// The request is done, without data.
    Done,
    /// To a PING: the space on the disk.
    Pong { free_mib: u32 },
    /// To a hello.
    Welcome(Box<Welcome>),
    /// To a read.
    Data(Vec<Id>),
    /// To a verify.
    Check(u32),
    /// To a question for regions.
    Page(RegionsPage),
    /// The answer to a question for layers.
    Layers(LayerList),
    /// To the beginning of a copy: whether the snapshot is there already.
    Copying { is_snapshot_done: bool },
    /// To a read of the snapshot: that, and the blocks that the replica knows to be rotten.
    Snapshot(Rc<SparseFile>, Vec<RottenBlock>),
    /// To a read of one of its blocks; none if the replica has no data there.
    SnapshotBlock(Option<Box<Block>>),
    /// To a question for extents.
    Extents(ExtentsPage),
    /// The request has failed.
    Error(Errno),
    /// A newer engine holds the replica.
    Deposed(Generation),
}

/// A message on its way.
#[derive(Clone, Debug)]
pub enum NetMessage {
    /// A request to the replica, with its number.
    Ask(u64, Box<Ask>),
    /// To the engine: number of the request, and the answer.
    Answer(u64, Box<ReplicaAnswer>),
    /// The other end has closed.
    Close,
}

/// The messages from one end of a connection to the other.
#[derive(Debug, Default)]
pub struct Direction {
    /// The arrival time of the last message: later ones arrive later.
    pub last_us: u64,
    /// The number of sent messages.
    pub sent: u64,
    /// The number of these that have arrived, or are held back.
    pub arrived: u64,
    /// From this one on they are lost.
    pub lost_from: Option<u64>,
    /// Messages that are held back, in order.
    pub held: VecDeque<NetMessage>,
}

/// A connection: it keeps the order in each direction.
#[derive(Debug)]
pub struct Conn {
    /// The engine process.
    pub engine: u64,
    /// The host of that process.
    pub host: usize,
    /// Index of the replica in the simulation.
    pub replica: usize,
    /// Start of the replica process that took it.
    pub boot: u64,
    /// True if the engine's end is open.
    pub engine_open: bool,
    /// True if the replica's end is open.
    pub replica_open: bool,
    /// True if nothing arrives any more, at either end.
    pub is_dead: bool,
    /// From the engine.
    pub to_replica: Direction,
    /// The messages to the engine that are in flight.
    pub to_engine: Direction,
    /// The engine and queue, once the replica has admitted the connection.
    pub place: Option<(Generation, u16)>,
}

impl Conn {
    /// Returns the messages of one direction.
    pub fn direction(&mut self, to_replica: bool) -> &mut Direction {
        if to_replica { &mut self.to_replica } else { &mut self.to_engine }
    }

    /// Returns true if anything is held back.
    pub fn holds_any(&self) -> bool {
        !self.to_replica.held.is_empty() || !self.to_engine.held.is_empty()
    }
}

/// The connections whose messages a cut holds back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutScope {
    /// The connections between a host and a replica.
    Pair(usize, usize),
    /// The connections of one engine process.
    Engine(u64),
}

/// Messages are held back until it is repaired.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// To repair this one and no other.
    pub id: u64,
    /// The affected connections.
    pub scope: CutScope,
    /// True for the messages to the replica.
    pub to_replica: bool,
    /// True for the messages to the engine.
    pub to_engine: bool,
}

impl Cut {
    /// Returns true if it holds back messages of `conn` in this direction.
    pub fn holds(&self, conn: &Conn, to_replica: bool) -> bool {
        let is_direction = if to_replica { self.to_replica } else { self.to_engine };
        is_direction
            && match self.scope {
                CutScope::Pair(host, replica) => (host, replica) == (conn.host, conn.replica),
                CutScope::Engine(engine) => engine == conn.engine,
            }
    }
}
