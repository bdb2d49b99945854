//! The state of the guest: a file system's worth of requests on the device.

use fastrand::Rng;
use shorthorn_checker::{Id, Micros};
use shorthorn_core::{Operation, SlotId};
use shorthorn_types::{ByteRange, Members, ReplicaId};

use crate::engine::DEPTH;
use crate::script::Script;

/// A request that is not done.
#[derive(Clone, Debug)]
pub struct Outstanding {
    pub operation: Operation,
    pub range: ByteRange,
    /// The id that a write stores in every sector.
    pub id: Id,
    pub submitted: Micros,
}

/// A program at the device of an engine that was isolated.
#[derive(Debug)]
pub struct Watcher {
    pub engine: u64,
    /// The slot that no request of the guest has.
    pub slot: SlotId,
    /// The range and the time of the read that is not answered.
    pub read: Option<(ByteRange, Micros)>,
    pub reads: u32,
    pub rng: Rng,
}

impl Watcher {
    /// Returns the time of the read that is not answered.
    pub fn asked(&self) -> Option<Micros> {
        self.read.map(|(_, asked)| asked)
    }
}

/// The guest, and the device that it uses.
#[derive(Debug)]
pub struct Guest {
    /// The replicas of the volume as the controller wants them.
    pub replicas: Vec<ReplicaId>,
    /// The replicas with which the volume was made.
    pub first_members: Members,
    /// Size of the volume.
    pub size_bytes: u64,
    pub slots: Vec<Option<Outstanding>>,
    /// The engine process that serves the device.
    pub engine: Option<u64>,
    pub next_id: Id,
    /// Requests that were completed.
    pub done: u64,
    /// No new requests.
    pub resting: bool,
    /// Requests to make at most.
    pub budget: u64,
    pub rng: Rng,
}

impl Guest {
    /// Creates a guest of a volume. The script has the number of queues of its engines.
    pub fn new(replicas: Vec<ReplicaId>, size_bytes: u64, first_id: Id, script: &Script) -> Guest {
        let slots = vec![None; usize::from(DEPTH) * usize::from(script.queues.max(1))];
        Guest {
            first_members: Members::new(replicas.iter().copied()).unwrap_or_default(),
            replicas,
            size_bytes,
            slots,
            engine: None,
            next_id: first_id,
            done: 0,
            resting: false,
            budget: script.requests,
            rng: Rng::with_seed(script.seed ^ 0x0067_7565_7374),
        }
    }
}

/// Converts bytes to indexes of sectors.
pub fn sectors(range: ByteRange) -> std::ops::Range<usize> {
    let sector = |bytes: u64| usize::try_from(bytes / 512).unwrap_or(usize::MAX);
    sector(range.offset())..sector(range.end())
}
