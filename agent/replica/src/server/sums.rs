//! Handles sums of snapshots' layers for scrubs: returns, stores and repairs.

use shorthorn_types::Errno;
use shorthorn_wire::{Header, KeepSums, LayerRange, decode_patch};

use super::Server;
use crate::executor::OperationResult;

impl Server {
    /// Begins to read a piece of a layer for a check; [`Server::respond_check`] answers.
    pub(super) fn take_check_layer(&mut self, index: u16, slot: u16, header: &Header) {
        let Some(asked) = self.text::<LayerRange>(index, slot, header) else { return };
        if let Err(error) = self.executor.start_check(slot, &asked, &mut self.ring) {
            self.refuse_text(slot, header, &error);
        }
    }

    /// Answers a check, whose piece of a layer was read, or could not be.
    pub(super) fn respond_check(&mut self, slot: u16, header: &Header, outcome: OperationResult) {
        if self.executor.state().failure().is_some() {
            return self.respond_plainly(slot, header, Err(Errno::IO));
        }
        match self.executor.layer_check(slot, outcome) {
            Some(Ok(check)) => self.respond_text(slot, header, &check),
            Some(Err(error)) => self.refuse_text(slot, header, &error.into()),
            None => self.respond_plainly(slot, header, outcome),
        }
    }

    pub(super) fn take_keep_sums(&mut self, index: u16, slot: u16, header: &Header) {
        let Some(message) = self.text::<KeepSums>(index, slot, header) else { return };
        match self.executor.keep_sums(&message) {
            Ok(()) => self.respond(slot, Ok(())),
            Err(error) => self.refuse_text(slot, header, &error),
        }
    }

    pub(super) fn take_repair_layer(&mut self, index: u16, slot: u16, header: &Header) {
        let mut text = vec![0; header.data_bytes() as usize];
        self.executor.io().payload(slot).copy_to(&mut text);
        let repaired = match decode_patch(header, &text) {
            Ok((patch, data)) => self.executor.repair_layer(&patch, data, &mut self.ring),
            Err(error) => {
                self.free(slot);
                return self.end(index, error);
            }
        };
        match repaired {
            Ok(()) => self.respond(slot, Ok(())),
            Err(error) => self.refuse_text(slot, header, &error),
        }
    }
}
