//! The engine as [`shorthorn_recovery`] drives it, to rebuild a replica.

use std::sync::mpsc;
use std::time::Duration;

use shorthorn_core::{EngineCore, Outputs, PeerIndex};
use shorthorn_recovery::{Address, OTHER_RUN, PendingView, ServingEngine, Source};
use shorthorn_types::ReplicaId;
use shorthorn_wire::{CopyState, LayerList, Welcome};

use super::task::{RebuildError, RebuildTask};
use crate::connection::ConnectError;
use crate::context::control_link::ControlLink;
use crate::context::{EngineContext, PeerContext};
use crate::events::RebuildProgress;

/// The time limit for a queue to take over a connection. A queue does that in its next iteration, which
/// it begins at least every second.
const INSTALL_LIMIT: Duration = Duration::from_secs(5);

impl ServingEngine for EngineContext {
    type Error = ConnectError;
    type Control<'a> = ControlLink<'a>;

    fn peers(&self) -> Vec<(PeerIndex, shorthorn_recovery::KnownPeer)> {
        let known = |peer: PeerContext| shorthorn_recovery::KnownPeer {
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
        self.connector.size_bytes()
    }

    fn pending_view(&self) -> Option<PendingView> {
        self.shared.pending_view()
    }

    fn is_disconnected(&self, peer: PeerIndex) -> bool {
        self.shared.is_disconnected(peer)
    }

    fn read_core<R>(&self, at: impl FnOnce(&EngineCore) -> R) -> Option<R> {
        Some(self.shared.read_core(at))
    }

    fn decide<R>(&self, act: impl FnOnce(&mut EngineCore, &mut Outputs) -> R) -> Option<R> {
        Some(self.shared.decide(act))
    }

    fn control(&self, to: Address) -> ControlLink<'_> {
        ControlLink { context: self, to }
    }

    async fn open_control(&self, to: Address) -> Result<Welcome, ConnectError> {
        self.renew_control(to)
    }
}

impl shorthorn_recovery::ReplicaRebuild for RebuildTask {
    type Engine = EngineContext;

    fn engine(&self) -> &EngineContext {
        &self.context
    }

    fn peer(&self) -> PeerIndex {
        self.peer
    }

    fn has_to_end(&self) -> bool {
        self.check_commands().is_err()
    }

    async fn copy_snapshots(
        &self,
        target: Address,
        source: Source,
        others: &[Source],
        layers: &LayerList,
        state: &CopyState,
    ) -> Result<(), RebuildError> {
        self.copy_layers(target, source, others, layers, state)
    }

    async fn connect_queues(&self, replica: ReplicaId, run: u64) -> Result<u64, RebuildError> {
        let context = &self.context;
        let size_bytes = context.connector.size_bytes();
        let peer = context.known_peer(self.peer).filter(|peer| peer.endpoint.replica == replica);
        let Some(peer) = peer else { return Err(RebuildError::Ended) };
        let (installed, acknowledged) = mpsc::sync_channel(usize::from(context.queues));
        for queue in 0..context.queues {
            let (connection, welcome) = context
                .connector
                .connect(&peer.endpoint, queue)
                .map_err(RebuildError::while_doing("connecting a queue"))?;
            if welcome.run != run {
                return Err(RebuildError::NotYet(OTHER_RUN));
            }
            let ready = connection.into_ready().map_err(|source| RebuildError::Failed {
                doing: "connecting a queue",
                error: ConnectError::Io { action: "set up the socket".to_owned(), source },
            })?;
            context.shared.connect(queue, self.peer, ready, installed.clone());
        }
        for _ in 0..context.queues {
            acknowledged
                .recv_timeout(INSTALL_LIMIT)
                .map_err(|_| RebuildError::NotYet("a queue does not take its connection"))?;
        }
        Ok(size_bytes)
    }

    fn report_restored(&self, kept: Option<u32>, sent: u32) {
        let (volume, replica) = (&self.context.connector.volume, self.replica());
        tracing::error!(%volume, replica, ?kept, sent, "a replica lacks stored state: its disk was restored \
         to an older state; rebuilding it");
    }

    fn report_rebuilding(&self, missing_bytes: u64, is_copy: bool) {
        self.report(RebuildProgress::Rebuilding { missing_bytes, is_copy });
    }
}
