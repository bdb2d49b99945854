//! Expanding a volume that is served: the replicas first, each durably, then the core.

use shorthorn_core::{Event, PeerIndex, PeerState};
use shorthorn_types::ReplicaId;

use crate::replica_link::ReplicaLink;
use crate::serving::{Address, ServingEngine};

/// A replica has not grown.
#[derive(Debug)]
pub struct NotGrown<E> {
    /// The replica that keeps its old size.
    pub replica: ReplicaId,
    /// The error of the replica.
    pub error: E,
}

/// Has every replica that is connected grow to the size of the volume, and then the core.
///
/// A replica that is connected meanwhile is asked in its handshake; if that was before the engine learned
/// of the expansion, [`crate::rebuild()`] refuses it. So when none is left to ask, all have grown that the
/// core will ever send anything.
///
/// # Errors
/// The first replica that has not grown. The core is as before.
pub async fn grow_replicas<E: ServingEngine>(engine: &E) -> Result<(), NotGrown<E::Error>> {
    let size_bytes = engine.size_bytes();
    let mut grown: Vec<Address> = Vec::new();
    loop {
        let left = engine.decide(|core, outputs| {
            let is_connected = |index: PeerIndex| {
                matches!(core.membership().state(index), PeerState::Member | PeerState::Rebuilding)
            };
            let connected = engine.peers().into_iter().filter(|(index, _)| is_connected(*index));
            let connected = connected.map(|(index, peer)| Address { peer: index, replica: peer.replica });
            let left: Vec<Address> = connected.filter(|address| !grown.contains(address)).collect();
            if left.is_empty() {
                core.apply(Event::Expand { size_bytes }, outputs);
            }
            left
        });
        let Some(left) = left.filter(|left| !left.is_empty()) else { return Ok(()) };
        for to in left {
            let grows = engine.control(to).expand(size_bytes).await;
            grows.map_err(|error| NotGrown { replica: to.replica, error })?;
            grown.push(to);
        }
    }
}
