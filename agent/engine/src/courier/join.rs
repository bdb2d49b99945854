//! The engine as [`shorthorn_recovery`] drives it, to bring a replica back.

use std::sync::mpsc;
use std::time::Duration;

use shorthorn_core::{EngineCore, Outputs, PeerIndex};
use shorthorn_recovery::{Address, OTHER_RUN, PendingView, ServingEngine, Source};
use shorthorn_types::ReplicaId;
use shorthorn_wire::{CopyState, LayerList, Welcome};

use crate::connection::ConnectError;
use crate::courier::lines::ControlLine;
use crate::courier::{Courier, Desk, Told, Trouble};

/// The time limit for a queue to take over a connection.
const INSTALL_LIMIT: Duration = Duration::from_secs(5);

impl ServingEngine for Desk {
    type Error = ConnectError;
    type Line<'a> = ControlLine<'a>;

    fn peers(&self) -> Vec<(PeerIndex, shorthorn_recovery::Peer)> {
        let known = |peer: crate::courier::Peer| shorthorn_recovery::Peer {
            replica: peer.endpoint.replica,
            is_local: peer.endpoint.local,
            is_complete: peer.is_complete,
            last_view: peer.last_view,
        };
        self.known_peers().into_iter().map(|(index, peer)| (index, known(peer))).collect()
    }

    fn set_complete(&self, of: Address, is_complete: bool) {
        self.update(of.peer, |peer| {
            if peer.endpoint.replica == of.replica {
                peer.is_complete = is_complete;
            }
        });
    }

    fn size_bytes(&self) -> u64 {
        self.greeter.size_bytes()
    }

    fn pending_view(&self) -> Option<PendingView> {
        self.shared.pending_view()
    }

    fn is_disconnected(&self, peer: PeerIndex) -> bool {
        self.shared.is_disconnected(peer)
    }

    fn look<R>(&self, at: impl FnOnce(&EngineCore) -> R) -> Option<R> {
        Some(self.shared.look(at))
    }

    fn decide<R>(&self, act: impl FnOnce(&mut EngineCore, &mut Outputs) -> R) -> Option<R> {
        Some(self.shared.decide(act))
    }

    fn line(&self, to: Address) -> ControlLine<'_> {
        ControlLine { desk: self, to }
    }

    async fn open_line(&self, to: Address) -> Result<Welcome, ConnectError> {
        self.renew_line(to)
    }
}

impl shorthorn_recovery::Courier for Courier {
    type Engine = Desk;

    fn engine(&self) -> &Desk {
        &self.desk
    }

    fn peer(&self) -> PeerIndex {
        self.peer
    }

    fn has_to_end(&self) -> bool {
        self.look_up().is_err()
    }

    async fn copy_snapshots(
        &self,
        target: Address,
        source: Source,
        others: &[Source],
        layers: &LayerList,
        state: &CopyState,
    ) -> Result<(), Trouble> {
        self.copy_layers(target, source, others, layers, state)
    }

    async fn connect_queues(&self, replica: ReplicaId, run: u64) -> Result<u64, Trouble> {
        let desk = &self.desk;
        let size_bytes = desk.greeter.size_bytes();
        let peer = desk.known_peer(self.peer).filter(|peer| peer.endpoint.replica == replica);
        let Some(peer) = peer else { return Err(Trouble::Ended) };
        let (installed, acknowledged) = mpsc::sync_channel(usize::from(desk.queues));
        for queue in 0..desk.queues {
            let (connection, welcome) = desk
                .greeter
                .greet(&peer.endpoint, queue)
                .map_err(Trouble::while_doing("connecting a queue"))?;
            if welcome.run != run {
                return Err(Trouble::NotYet(OTHER_RUN));
            }
            let greeted = connection.into_greeted().map_err(|source| Trouble::Failed {
                doing: "connecting a queue",
                error: ConnectError::Io { action: "set up the socket".to_owned(), source },
            })?;
            desk.shared.connect(queue, self.peer, greeted, installed.clone());
        }
        for _ in 0..desk.queues {
            acknowledged
                .recv_timeout(INSTALL_LIMIT)
                .map_err(|_| Trouble::NotYet("a queue does not take its connection"))?;
        }
        Ok(size_bytes)
    }

    fn is_restored(&self, kept: Option<u32>, sent: u32) {
        let (volume, replica) = (&self.desk.greeter.volume, self.replica());
        tracing::error!(%volume, replica, ?kept, sent, "a replica lacks stored state: its disk was restored \
         to an older state; rebuilding it");
    }

    fn is_joining(&self, missing_bytes: u64, is_copy: bool) {
        self.tell(Told::Joining { missing_bytes, is_copy });
    }
}
