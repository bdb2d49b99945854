//! The connection as [`shorthorn_recovery`] uses it.

use std::time::{Duration, Instant};

use shorthorn_recovery::{LinkError, ReplicaLink};
use shorthorn_types::{Errno, Generation, MarkRegions, RegionsOf, View};
use shorthorn_wire::{
    CopyEnd, CopyState, ExpandReplica, ExtentsPage, ExtentsQuery, LayerList, Opcode, RegionsPage,
    RegionsQuery, ReplicaReport, ViewMessage,
};

use super::{ConnectError, ReplicaConnection};

/// The time limit for all pages of a set of regions together, at most some hundred. A replica answers each
/// page from memory.
const SET_LIMIT: Duration = Duration::from_secs(60);
/// The same for the regions that have data. The replica asks its file system for them, and a disk that is
/// busy has to be read for that. Each page has to bring something new, and the rebuild task looks between
/// pages whether it has to end.
const ALLOCATED_LIMIT: Duration = Duration::from_secs(3600);

impl LinkError for ConnectError {
    fn deposed_by(&self) -> Option<Generation> {
        match self {
            ConnectError::Deposed { holder, .. } => Some(*holder),
            _ => None,
        }
    }

    fn is_refusal(&self) -> bool {
        matches!(self, ConnectError::Refused { .. })
    }

    fn is_rot(&self) -> bool {
        matches!(self, ConnectError::Refused { errno: Errno::ROTTEN, .. })
    }

    fn is_invalid(&self) -> bool {
        matches!(self, ConnectError::Refused { errno: Errno::INVALID, .. })
    }
}

/// Each of these blocks until the answer has arrived, or its time is over.
impl ReplicaLink for ReplicaConnection {
    type Error = ConnectError;

    async fn propose(&mut self, view: View, honoured: &ReplicaReport) -> Result<(), ConnectError> {
        self.exchange_text(Opcode::Propose, &ViewMessage { view, basis: honoured.clone() })
    }

    async fn commit(&mut self, view: View, honoured: &ReplicaReport) -> Result<(), ConnectError> {
        self.exchange_text(Opcode::Commit, &ViewMessage { view, basis: honoured.clone() })
    }

    async fn expand(&mut self, size_bytes: u64) -> Result<(), ConnectError> {
        self.exchange_text(Opcode::Expand, &ExpandReplica { size_bytes })
    }

    async fn regions_page(&mut self, query: RegionsQuery) -> Result<RegionsPage, ConnectError> {
        if query.from == 0 || self.pages_deadline.is_none() {
            let limit = if query.of == RegionsOf::Allocated { ALLOCATED_LIMIT } else { SET_LIMIT };
            self.pages_deadline = Some(Instant::now() + limit);
        }
        let page = self.within(self.pages_deadline, |connection| connection.ask(Opcode::Regions, &query));
        let page: RegionsPage = page?;
        page.check(&query)?;
        Ok(page)
    }

    async fn mark(&mut self, change: &MarkRegions) -> Result<(), ConnectError> {
        self.exchange_text(Opcode::Mark, change)
    }

    async fn layers(&mut self, volume_bytes: impl FnOnce() -> u64) -> Result<LayerList, ConnectError> {
        self.list_layers(volume_bytes)
    }

    async fn extents(
        &mut self,
        query: ExtentsQuery,
        layer_bytes: impl FnOnce() -> u64,
    ) -> Result<ExtentsPage, ConnectError> {
        self.list_extents(query, layer_bytes)
    }

    async fn copy_begin(&mut self, layers: &LayerList) -> Result<CopyState, ConnectError> {
        self.ask(Opcode::CopyBegin, layers)
    }

    async fn copy_end(&mut self) -> Result<(), ConnectError> {
        self.exchange_text(Opcode::CopyEnd, &CopyEnd { layer: None })
    }
}
