//! Having a member keep the sums of a layer, page by page as they are found.

use shorthorn_core::PeerIndex;
use shorthorn_wire::{EMPTY_SUM, KeepSums};

use crate::connection::ConnectError;
use crate::context::EngineContext;

/// The sums that one member is to keep of one layer. It keeps none of them before it has all.
#[derive(Debug)]
pub struct SumWriter {
    peer: PeerIndex,
    page: KeepSums,
    has_failed: bool,
}

impl SumWriter {
    pub fn new(peer: PeerIndex, image: &str) -> SumWriter {
        let page = KeepSums {
            image: image.to_owned(),
            is_first: true,
            is_last: false,
            first_piece: 0,
            sums: Vec::new(),
        };
        SumWriter { peer, page, has_failed: false }
    }

    /// Returns the member that keeps the sums.
    pub fn peer(&self) -> PeerIndex {
        self.peer
    }

    /// Adds the sum of one more piece, if it is known. The pieces between it and the last one have no blocks.
    pub fn put(&mut self, context: &EngineContext, piece: u64, sum: Option<u32>) {
        // A layer with more pieces than numbers has no sums.
        let Ok(piece) = u32::try_from(piece) else { return };
        let follows = self.page.first_piece as usize + self.page.sums.len() == piece as usize;
        if !follows || self.page.sums.len() == KeepSums::SUMS_MAX {
            self.send(context);
        }
        if self.page.sums.is_empty() {
            if sum == Some(EMPTY_SUM) {
                return;
            }
            self.page.first_piece = piece;
        }
        // In the message 0 is a sum that is not known.
        self.page.sums.push(sum.unwrap_or_default());
    }

    /// Completes the sums: from now on the member keeps them.
    pub fn finish(mut self, context: &EngineContext) {
        self.page.is_last = true;
        self.send(context);
    }

    fn send(&mut self, context: &EngineContext) {
        if self.page.sums.is_empty() && !self.page.is_last {
            return;
        }
        if !self.has_failed
            && let Err(error) = context.with_control_of(self.peer, |control| control.keep_sums(&self.page))
        {
            self.failed(context, &error);
        }
        self.page.is_first = false;
        self.page.sums.clear();
    }

    /// Handles a failure to store the sums. The member keeps its former sums, and the next scrub tries again.
    fn failed(&mut self, context: &EngineContext, error: &ConnectError) {
        self.has_failed = true;
        let replica =
            context.known_peer(self.peer).map(|peer| peer.endpoint.replica.to_string()).unwrap_or_default();
        let (volume, image) = (&context.connector.volume, &self.page.image);
        tracing::warn!(%volume, replica, image, %error, "a replica does not keep the sums of a snapshot");
    }
}
