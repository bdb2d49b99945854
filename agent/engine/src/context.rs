//! The state that the threads beside the queues share: the replicas of the volume, and the connections that
//! carry no request of a frontend.

mod control_connections;
pub mod control_link;
mod snapshot_use;

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use shorthorn_control::ReplicaEndpoint;
use shorthorn_core::PeerIndex;
use shorthorn_types::View;
use shorthorn_types::limits::MAX_MEMBERS;

use crate::connector::ReplicaConnector;
use crate::shared_core::{SharedCore, lock};
use control_connections::ControlConnections;
use snapshot_use::SnapshotUse;

/// The state that the rebuild tasks of an engine share.
#[derive(Debug)]
pub struct EngineContext {
    pub connector: ReplicaConnector,
    pub queues: u16,
    pub shared: Arc<SharedCore>,
    peers: Mutex<Vec<Option<PeerContext>>>,
    control_connections: ControlConnections,
    pub snapshot_use: SnapshotUse,
    /// True if the rebuild task of each number has not ended.
    rebuild_tasks: [AtomicBool; MAX_MEMBERS],
    /// The most that is copied in a second; 0: no limit. Only [`EngineContext::limit`] and
    /// [`EngineContext::bytes_per_s`] convert that.
    bytes_per_s: AtomicU64,
    begun: Instant,
}

/// The known state of one replica.
#[derive(Clone, Debug)]
pub struct PeerContext {
    pub endpoint: ReplicaEndpoint,
    /// True if members and core know all that it has missed.
    pub is_complete: bool,
    /// False if it was added while this engine serves, and has not been in a view yet.
    pub was_in_view: bool,
    /// The last view of this engine that the replica was in and has stored.
    pub last_view: Option<View>,
    /// The run of its process that the engine knows: see [`Welcome::run`](shorthorn_wire::Welcome::run).
    pub run: Option<u64>,
}

impl EngineContext {
    pub fn new(
        connector: ReplicaConnector,
        queues: u16,
        shared: Arc<SharedCore>,
        peers: Vec<PeerContext>,
    ) -> EngineContext {
        let mut all: Vec<Option<PeerContext>> = peers.into_iter().map(Some).collect();
        all.resize(MAX_MEMBERS, None);
        EngineContext {
            connector,
            queues,
            shared,
            peers: Mutex::new(all),
            control_connections: ControlConnections::default(),
            snapshot_use: SnapshotUse::default(),
            rebuild_tasks: Default::default(),
            bytes_per_s: AtomicU64::new(0),
            begun: Instant::now(),
        }
    }

    /// Returns replica number `peer`, unless it was given up.
    pub fn known_peer(&self, peer: PeerIndex) -> Option<PeerContext> {
        lock(&self.peers).get(usize::from(peer)).cloned().flatten()
    }

    /// Returns all replicas with their numbers.
    pub fn known_peers(&self) -> Vec<(PeerIndex, PeerContext)> {
        let peers = lock(&self.peers);
        (0..).zip(peers.iter()).filter_map(|(index, peer)| Some((index, peer.clone()?))).collect()
    }

    /// Changes the known state of a peer if it is still a replica of the volume.
    pub fn update(&self, peer: PeerIndex, change: impl FnOnce(&mut PeerContext)) {
        if let Some(Some(peer)) = lock(&self.peers).get_mut(usize::from(peer)) {
            change(peer);
        }
    }

    /// Sets or removes replica number `peer`.
    pub fn set(&self, index: PeerIndex, peer: Option<PeerContext>) {
        if let Some(entry) = lock(&self.peers).get_mut(usize::from(index)) {
            *entry = peer;
        }
    }

    /// Returns true if a new replica may get the number. The former replica was given up, its rebuild task
    /// has ended, and no queue has a connection to it. Else that rebuild task could give the new one
    /// connections of the last one.
    pub fn is_free(&self, peer: PeerIndex) -> bool {
        let rebuild_task = self.rebuild_tasks.get(usize::from(peer));
        self.known_peer(peer).is_none()
            && rebuild_task.is_some_and(|is_running| !is_running.load(Ordering::Acquire))
            && self.shared.is_disconnected(peer)
    }

    /// Records that the rebuild task of replica number `peer` has started or ended.
    pub fn set_running(&self, peer: PeerIndex, is_running: bool) {
        if let Some(rebuild_task) = self.rebuild_tasks.get(usize::from(peer)) {
            rebuild_task.store(is_running, Ordering::Release);
        }
    }

    /// Returns the time since the engine has begun to serve.
    pub fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Limits the speed of copies from now on.
    pub fn limit(&self, bytes_per_s: Option<NonZeroU64>) {
        self.bytes_per_s.store(bytes_per_s.map_or(0, NonZeroU64::get), Ordering::Relaxed);
    }

    /// Returns the most that is copied in a second; none: no limit.
    pub fn bytes_per_s(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.bytes_per_s.load(Ordering::Relaxed))
    }

    /// Returns the numbers of the replicas in the view, those on this host first.
    pub fn members(&self) -> Vec<PeerIndex> {
        let members = shorthorn_recovery::members(self).unwrap_or_default();
        members.into_iter().map(|(index, _)| index).collect()
    }
}
