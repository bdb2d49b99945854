//! Handles views and the sets of regions that belong to them. Storing them waits for the disk, and blocks all
//! requests. That is acceptable: views change when a replica has failed, and then most requests wait already.

use shorthorn_regions::SetKey;
use shorthorn_types::limits::MAX_VOLUME_BYTES;
use shorthorn_types::{MarkRegions, Regions, RegionsOf};
use shorthorn_wire::{ExpandReplica, Header, Opcode, RegionsPage, RegionsQuery, ViewMessage};

use super::Server;
use crate::error::ReplicaError;

impl Server {
    /// Stores a proposed view, or the mark that one is committed.
    pub(super) fn take_view(&mut self, index: u16, slot: u16, header: &Header) {
        let Some(message) = self.text::<ViewMessage>(index, slot, header) else { return };
        let generation = self.generation_of(index);
        let ViewMessage { view, basis } = &message;
        let stored = self.executor.change(|state, disk| match header.opcode {
            Opcode::Propose => state.propose(disk, generation, *view, basis),
            _ => state.commit(disk, generation, *view),
        });
        match stored {
            Ok(()) => {
                tracing::info!(view = %message.view, "{:?}", header.opcode);
                self.publish_views();
                self.respond(slot, Ok(()));
            }
            Err(error) => self.refuse_text(slot, header, &error),
        }
    }

    /// Makes the replica larger. Requests in flight continue.
    pub(super) fn take_expand(&mut self, index: u16, slot: u16, header: &Header) {
        let Some(ExpandReplica { size_bytes }) = self.text(index, slot, header) else { return };
        let before_bytes = self.executor.size_bytes();
        if let Err(error) = self.executor.expand(size_bytes, &mut self.ring) {
            return self.refuse_text(slot, header, &error);
        }
        if size_bytes != before_bytes {
            tracing::info!(before_bytes, size_bytes, "the volume has grown");
            self.status.size(size_bytes);
        }
        self.respond(slot, Ok(()));
    }

    /// Changes a set of regions.
    pub(super) fn take_mark(&mut self, index: u16, slot: u16, header: &Header) {
        let Some(mark) = self.text::<MarkRegions>(index, slot, header) else { return };
        if let Some(size_bytes) = mark.size_bytes.filter(|size_bytes| *size_bytes > MAX_VOLUME_BYTES) {
            return self.refuse_text(slot, header, &ReplicaError::TooLarge(size_bytes));
        }
        match self.executor.mark(slot, &mark) {
            Ok(true) => self.respond(slot, Ok(())),
            Ok(false) => {}
            Err(error) => self.refuse_text(slot, header, &error),
        }
    }

    /// Answers with some of the regions of a set.
    pub(super) fn take_regions(&mut self, index: u16, slot: u16, header: &Header) {
        let Some(query) = self.text::<RegionsQuery>(index, slot, header) else { return };
        let regions = match query.size_bytes {
            None => self.executor.state().intent_log().regions(),
            // Places in the regions of a much larger volume would overflow.
            Some(size_bytes) if size_bytes > MAX_VOLUME_BYTES => {
                return self.refuse_text(slot, header, &ReplicaError::TooLarge(size_bytes));
            }
            Some(size_bytes) => Regions::of(size_bytes),
        };
        let kept = |key| {
            let page = self.executor.state().intent_log().page_for(key, query.from, regions);
            page.map_or(RegionsPage::NONE, |page| RegionsPage {
                kept: true,
                runs: page.runs,
                next: page.next,
                stamp: page.stamp,
            })
        };
        let page = match query.of {
            RegionsOf::Intent => Ok(kept(SetKey::Intent)),
            RegionsOf::OutOfSync(replica) => Ok(kept(SetKey::OutOfSync(replica))),
            RegionsOf::Allocated => self
                .executor
                .allocated(regions, query.from)
                .map(|(runs, next)| RegionsPage { kept: true, runs, next, stamp: 0 }),
        };
        match page {
            Ok(page) => self.respond_text(slot, header, &page),
            Err(error) => self.refuse_text(slot, header, &error.into()),
        }
    }
}
