//! The interface of a serving engine for the tasks that rebuild its replicas.

use shorthorn_core::{EngineCore, Outputs, PeerIndex};
use shorthorn_types::{Regions, ReplicaId, ReplicaReport, View};
use shorthorn_wire::Welcome;

use crate::replica_link::{LinkError, ReplicaLink};

/// The knowledge of one replica that is kept beside the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownPeer {
    /// Identity in views.
    pub replica: ReplicaId,
    /// True if it is on the host of the engine.
    pub is_local: bool,
    /// True if members and core know all that it has missed.
    pub is_complete: bool,
    /// The last view of this engine that the replica was in and has stored.
    pub last_view: Option<View>,
}

/// The number and the id of a replica. After the volume has given it up, another replica may get its number,
/// or it may come back with another number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The index of the replica in the engine.
    pub peer: PeerIndex,
    /// The identity in views at the time of the message.
    pub replica: ReplicaId,
}

/// A view that was proposed and is not complete yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingView {
    /// The proposed view.
    pub view: View,
    /// The views that it honours.
    pub honoured: ReplicaReport,
}

/// The process while it serves. The number of a replica that was given up is free for another one only after
/// its rebuild task has ended. By then no queue has a connection to the former replica.
pub trait ServingEngine {
    /// The reason why a replica has not done a request.
    type Error: LinkError;
    /// See [`ServingEngine::control`].
    type Control<'a>: ReplicaLink<Error = Self::Error>
    where
        Self: 'a;

    /// Returns all replicas that the volume is to have, with their numbers.
    fn peers(&self) -> Vec<(PeerIndex, KnownPeer)>;

    /// Records whether members and core know all that a replica has missed, if the volume still has it.
    fn set_complete(&self, of: Address, is_complete: bool);

    /// Returns the size of the volume: every replica with a handshake from now on grows to it first.
    fn size_bytes(&self) -> u64;

    /// Returns the pending view, if any.
    fn pending_view(&self) -> Option<PendingView>;

    /// Returns true if no queue has a connection to the replica.
    fn is_disconnected(&self, peer: PeerIndex) -> bool;

    /// Reads the core; none if the process is ending.
    fn read_core<R>(&self, at: impl FnOnce(&EngineCore) -> R) -> Option<R>;

    /// Changes the core atomically and has its outputs performed. None if the process is ending. `act` may
    /// ask the engine for its peers and its size.
    fn decide<R>(&self, act: impl FnOnce(&mut EngineCore, &mut Outputs) -> R) -> Option<R>;

    /// Returns the control connection to a replica, which is made when it is used first, and closed when a
    /// request over it fails. After the volume has given the replica up every request fails.
    fn control(&self, to: Address) -> Self::Control<'_>;

    /// Makes a new control connection to a replica, which closes the last one. It calls
    /// [`crate::forget_in_vain`].
    async fn open_control(&self, to: Address) -> Result<Welcome, Self::Error>;

    /// Returns replica number `peer`, unless it was given up.
    fn peer(&self, peer: PeerIndex) -> Option<KnownPeer> {
        self.peers().into_iter().find(|(index, _)| *index == peer).map(|(_, peer)| peer)
    }

    /// Returns a replica with its number, unless it was given up.
    fn find(&self, replica: ReplicaId) -> Option<(PeerIndex, KnownPeer)> {
        self.peers().into_iter().find(|(_, peer)| peer.replica == replica)
    }

    /// Returns the division of the volume.
    fn regions(&self) -> Regions {
        Regions::of(self.size_bytes())
    }
}

/// Returns the replicas in the view with their numbers, those on this host first.
pub fn members(engine: &impl ServingEngine) -> Option<Vec<(PeerIndex, KnownPeer)>> {
    let view = engine.read_core(|core| core.membership().view())?;
    let mut members = engine.peers();
    members.retain(|(_, peer)| view.members.contains(peer.replica));
    members.sort_by_key(|(_, peer)| !peer.is_local);
    Some(members)
}
