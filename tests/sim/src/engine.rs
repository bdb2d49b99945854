//! The state of an engine process, and of its host.

use std::collections::BTreeMap;

use shorthorn_checker::Id;
use shorthorn_core::{EngineCore, FlightLimits, PeerIndex, SlotId};
use shorthorn_types::limits::BLOCK_BYTES;
use shorthorn_types::{ByteRange, Errno, Generation, Members, ReplicaId, ReplicaReport, View};

use crate::net::ConnId;
use crate::occurrence::Occurrence;

/// Slots of the frontend.
pub const DEPTH: u16 = 16;
/// Slots for copies.
pub const COPY_SLOTS: u16 = 4;
/// The largest request of the core: a piece of a copy or of a scrub.
const BUFFER_SECTORS: usize = 2048;
/// The largest request of the guest.
const REQUEST_SECTORS: usize = 128;
/// The silence after which a replica has failed.
pub const REPLICA_TIMEOUT_MS: u64 = 1000;
/// The time of silence after which a replica has failed, even if the others cannot continue without it.
pub const LATE_LIMIT_MS: u64 = 4000;
/// Little, so that requests wait for it.
pub const FLIGHT_LIMITS: FlightLimits = FlightLimits { bytes: 256 << 10, requests: 12 };

/// The state that a host keeps from one engine process to the next.
#[derive(Debug, Default)]
pub struct HostState {
    /// The generation that was used last: of the state file.
    pub generation: Generation,
    /// The newest grant that was received: of the state file.
    pub granted: Option<View>,
    /// The newest grant when the volume was attached here: of the spec.
    pub granted_before: Option<View>,
    /// The process that runs.
    pub engine: Option<u64>,
    /// True if the guest has used a device of this attachment here.
    pub was_live: bool,
    /// True if writes of that guest may be lost: the engine answers its every request with an error.
    pub lost_writes: bool,
    /// By how much its clock has leapt ahead.
    pub clock_ms: u64,
}

/// The state of a replica in an engine process.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    pub replica: ReplicaId,
    /// True if members and core know all that it has missed.
    pub is_complete: bool,
    /// The last view of this engine that it was in.
    pub last_view: Option<View>,
    /// The run of its process that the engine knows.
    pub run: Option<u64>,
    /// The volume is not to have it any more.
    pub is_given_up: bool,
    /// True if the rebuild task is in an attempt.
    pub has_rebuild_task: bool,
}

/// The control connection to a replica.
#[derive(Clone, Copy, Debug, Default)]
pub struct ControlConnection {
    pub conn: Option<ConnId>,
    /// True if the control connection is in use.
    pub is_busy: bool,
}

/// The state of a request about which a sabotaged shell has lied to the core.
#[derive(Debug, Default)]
pub struct Lie {
    /// Replicas that have not really answered yet.
    pub waits_for: Vec<PeerIndex>,
    /// The result of the core.
    pub outcome: Option<Result<(), Errno>>,
    /// The real error of a replica.
    pub error: Option<Errno>,
}

/// The scrubs that an engine was sent.
#[derive(Debug, Default)]
pub struct OrderedScrubs {
    /// The number of the last one.
    pub number: u64,
    /// True if any of them repairs.
    pub may_repair: bool,
    /// True if the last one was stopped.
    pub is_stopped: bool,
    /// The range of the check that had begun when it was stopped.
    pub last_check: Option<ByteRange>,
}

/// Returns true if the engine has each read compared with checksums.
pub fn verifies_reads(engine: u64) -> bool {
    engine % 2 == 1
}

/// An engine process.
#[derive(Debug)]
pub struct EngineProc {
    pub host: usize,
    pub generation: Generation,
    /// The size of the volume that the engine has got.
    pub size_bytes: u64,
    /// Once it serves.
    pub core: Option<EngineCore>,
    /// Every replica that it was given, by the index that the core knows.
    pub peers: Vec<Peer>,
    /// The connection of each for requests, by queue.
    pub links: Vec<Vec<Option<ConnId>>>,
    /// The connection of each for the rebuild task.
    pub control_connections: Vec<ControlConnection>,
    /// The requests in the slots of all queues.
    requests: Vec<Vec<Id>>,
    /// The data of the slots for copies.
    copies: Vec<Vec<Id>>,
    /// The newest committed view, as far as its main thread knows.
    pub view: Option<View>,
    /// The view that is proposed and not complete yet.
    pub pending: Option<(View, ReplicaReport)>,
    /// The view that waits for a grant.
    pub wants: Option<(View, ReplicaReport, Members)>,
    /// A grant that was received while the volume was being opened.
    pub was_granted: Option<View>,
    pub begun_us: u64,
    /// True if the process is paused: its events happen later.
    pub paused: bool,
    pub backlog: Vec<Occurrence>,
    /// The time between its end and the next start; 0 for a random time.
    pub restarts_after: u64,
    pub lies: BTreeMap<(u16, u16), Lie>,
    /// The place of the last read of each slot in its buffer, in sectors.
    pub read_to: BTreeMap<(u16, u16), usize>,
    pub scrubs: OrderedScrubs,
    /// The ranges of rot that it reads to copy them unchanged. They were healed, and must not rot meanwhile.
    pub reads_rot: Vec<ByteRange>,
}

impl EngineProc {
    /// Returns a process that has begun to start, without replicas.
    pub fn new(
        host: usize,
        generation: Generation,
        size_bytes: u64,
        queues: u16,
        begun_us: u64,
    ) -> EngineProc {
        let slots = usize::from(queues) * usize::from(DEPTH);
        EngineProc {
            host,
            generation,
            size_bytes,
            core: None,
            peers: Vec::new(),
            links: Vec::new(),
            control_connections: Vec::new(),
            requests: vec![vec![0; REQUEST_SECTORS]; slots],
            copies: vec![vec![0; BUFFER_SECTORS]; usize::from(COPY_SLOTS)],
            view: None,
            pending: None,
            wants: None,
            was_granted: None,
            begun_us,
            paused: false,
            backlog: Vec::new(),
            restarts_after: 0,
            lies: BTreeMap::new(),
            read_to: BTreeMap::new(),
            scrubs: OrderedScrubs::default(),
            reads_rot: Vec::new(),
        }
    }

    /// Returns the data of the request in this slot, one write id per sector.
    pub fn buffer(&mut self, id: SlotId) -> &mut Vec<Id> {
        match id.slot.checked_sub(DEPTH) {
            Some(copy) => &mut self.copies[usize::from(copy)],
            None => &mut self.requests[usize::from(id.queue) * usize::from(DEPTH) + usize::from(id.slot)],
        }
    }

    /// Returns the index of a replica that was not given up.
    pub fn index_of(&self, replica: ReplicaId) -> Option<usize> {
        self.peers.iter().position(|peer| peer.replica == replica && !peer.is_given_up)
    }

    /// Adds a replica, at an index that is free.
    pub fn add(&mut self, replica: ReplicaId) -> Option<usize> {
        let peer = Peer {
            replica,
            is_complete: false,
            last_view: None,
            run: None,
            is_given_up: false,
            has_rebuild_task: false,
        };
        let is_free = |at: &usize| {
            let peer = &self.peers[*at];
            peer.is_given_up && !peer.has_rebuild_task && self.is_disconnected(*at)
        };
        if let Some(at) = (0..self.peers.len()).find(is_free) {
            self.peers[at] = peer;
            return Some(at);
        }
        if self.peers.len() >= shorthorn_types::limits::MAX_MEMBERS {
            return None;
        }
        let queues = self.requests.len() / usize::from(DEPTH);
        self.peers.push(peer);
        self.links.push(vec![None; queues]);
        self.control_connections.push(ControlConnection::default());
        Some(self.peers.len() - 1)
    }

    /// Has these replicas, and no others, before anything is connected.
    pub fn set_replicas(&mut self, replicas: &[ReplicaId]) {
        if self.peers.iter().map(|peer| &peer.replica).eq(replicas) {
            return;
        }
        (self.peers, self.links, self.control_connections) = (Vec::new(), Vec::new(), Vec::new());
        for replica in replicas {
            self.add(*replica);
        }
    }

    /// Returns true if no queue has a connection to the replica.
    pub fn is_disconnected(&self, peer: usize) -> bool {
        self.links[peer].iter().all(Option::is_none)
    }

    /// Returns the replica and the queue of a connection.
    pub fn link_of(&self, conn: ConnId) -> Option<(usize, u16)> {
        self.links.iter().enumerate().find_map(|(peer, links)| {
            let queue = links.iter().position(|link| *link == Some(conn))?;
            Some((peer, u16::try_from(queue).unwrap_or(u16::MAX)))
        })
    }
}

/// Converts an index of simulated replicas to that of the core.
pub fn index(peer: usize) -> PeerIndex {
    u8::try_from(peer).unwrap_or(u8::MAX)
}

const _: () = assert!(BUFFER_SECTORS as u64 * 512 >= shorthorn_types::REGION_BYTES_MIN);
const _: () = assert!(BLOCK_BYTES == 4096);
