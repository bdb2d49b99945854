//! Simulated connections as [`shorthorn_recovery::ReplicaLink`].

use shorthorn_recovery::{Address, LinkError, ReplicaLink, SizeMismatch};
use shorthorn_types::{Errno, Generation, MarkRegions, ReplicaReport, View};
use shorthorn_wire::{CopyState, ExtentsPage, ExtentsQuery, LayerList, RegionsPage, RegionsQuery};

use super::{CALL_TIMEOUT_US, EngineHandle};
use crate::Sabotage;
use crate::net::{Ask, ConnId, ReplicaAnswer, SnapshotLayer};

/// The reason why a replica has not done a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallError {
    /// A newer engine holds it.
    Deposed(Generation),
    /// The replica has answered with an error.
    Refused(Errno),
    /// The connection broke, or no answer came in time.
    Broken,
}

impl std::fmt::Display for CallError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?}")
    }
}

impl EngineHandle {
    fn has(&self, sabotage: Sabotage) -> bool {
        self.sim.borrow().options.sabotage == Some(sabotage)
    }
}

impl LinkError for CallError {
    fn deposed_by(&self) -> Option<Generation> {
        match self {
            CallError::Deposed(holder) => Some(*holder),
            _ => None,
        }
    }

    fn is_refusal(&self) -> bool {
        matches!(self, CallError::Refused(_))
    }

    fn is_rot(&self) -> bool {
        matches!(self, CallError::Refused(Errno::ROTTEN))
    }

    fn is_invalid(&self) -> bool {
        matches!(self, CallError::Refused(Errno::INVALID))
    }
}

impl From<SizeMismatch<CallError>> for CallError {
    fn from(mismatch: SizeMismatch<CallError>) -> CallError {
        match mismatch {
            SizeMismatch::TooLarge { .. } => CallError::Refused(Errno::INVALID),
            SizeMismatch::NotGrown(error) => error,
        }
    }
}

/// A way to ask a replica.
pub trait Asks {
    /// Asks, and waits for the answer.
    async fn ask(&self, ask: Ask) -> Result<ReplicaAnswer, CallError>;

    /// Returns true if this part of the rules is left out.
    fn has(&self, sabotage: Sabotage) -> bool;
}

/// A connection that is closed when it is dropped.
pub struct Wire {
    pub process: EngineHandle,
    pub conn: ConnId,
}

impl Wire {
    /// Returns the connection, which stays open.
    pub fn into_conn(mut self) -> ConnId {
        std::mem::replace(&mut self.conn, ConnId::MAX)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.process.close(self.conn);
    }
}

impl Asks for Wire {
    async fn ask(&self, ask: Ask) -> Result<ReplicaAnswer, CallError> {
        self.process.call(self.conn, ask, CALL_TIMEOUT_US).await
    }

    fn has(&self, sabotage: Sabotage) -> bool {
        self.process.has(sabotage)
    }
}

/// The control connection to a replica.
pub struct ControlLink<'a> {
    pub process: &'a EngineHandle,
    pub to: Address,
}

impl Asks for ControlLink<'_> {
    async fn ask(&self, ask: Ask) -> Result<ReplicaAnswer, CallError> {
        self.process.with_line(self.to, ask).await
    }

    fn has(&self, sabotage: Sabotage) -> bool {
        self.process.has(sabotage)
    }
}

/// Requests and answers over either of them.
pub struct Via<T>(pub T);

impl<T: Asks> Via<T> {
    async fn done(&self, ask: Ask) -> Result<(), CallError> {
        match self.0.ask(ask).await? {
            ReplicaAnswer::Done | ReplicaAnswer::Pong { .. } => Ok(()),
            _ => Err(CallError::Broken),
        }
    }
}

impl<T: Asks> ReplicaLink for Via<T> {
    type Error = CallError;

    async fn propose(&mut self, view: View, honoured: &ReplicaReport) -> Result<(), CallError> {
        self.done(Ask::Propose(view, honoured.clone())).await
    }

    async fn commit(&mut self, view: View, _: &ReplicaReport) -> Result<(), CallError> {
        self.done(Ask::Commit(view)).await
    }

    async fn expand(&mut self, size_bytes: u64) -> Result<(), CallError> {
        self.done(Ask::Expand(size_bytes)).await
    }

    async fn regions_page(&mut self, query: RegionsQuery) -> Result<RegionsPage, CallError> {
        match self.0.ask(Ask::Regions(query)).await? {
            ReplicaAnswer::Page(page) => page.check(&query).map(|()| page).map_err(|_| CallError::Broken),
            _ => Err(CallError::Broken),
        }
    }

    async fn mark(&mut self, change: &MarkRegions) -> Result<(), CallError> {
        self.done(Ask::Mark(change.clone())).await
    }

    async fn layers(&mut self, volume_bytes: impl FnOnce() -> u64) -> Result<LayerList, CallError> {
        match self.0.ask(Ask::Layers).await? {
            ReplicaAnswer::Layers(list) if self.0.has(Sabotage::UncheckedLists) => Ok(list),
            ReplicaAnswer::Layers(list) => {
                list.check(volume_bytes()).map(|()| list).map_err(|_| CallError::Broken)
            }
            _ => Err(CallError::Broken),
        }
    }

    async fn extents(
        &mut self,
        query: ExtentsQuery,
        layer_bytes: impl FnOnce() -> u64,
    ) -> Result<ExtentsPage, CallError> {
        match self.0.ask(Ask::HeadExtents(query.from_bytes)).await? {
            ReplicaAnswer::Extents(page) => {
                page.check(&query, layer_bytes()).map(|()| page).map_err(|_| CallError::Broken)
            }
            _ => Err(CallError::Broken),
        }
    }

    async fn copy_begin(&mut self, layers: &LayerList) -> Result<CopyState, CallError> {
        let begun = self.0.ask(Ask::CopyBegin(layers.clone())).await?;
        let ReplicaAnswer::Copying { is_snapshot_done } = begun else { return Err(CallError::Broken) };
        let snapshot = SnapshotLayer::of(layers).map(|_| is_snapshot_done);
        Ok(CopyState { done: snapshot.into_iter().chain([false]).collect() })
    }

    async fn copy_end(&mut self) -> Result<(), CallError> {
        self.done(Ask::CopyEnd).await
    }
}
