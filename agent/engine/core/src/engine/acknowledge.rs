//! The acknowledgement of requests of the frontend, after the replicas have answered.

use shorthorn_types::Errno;

use super::EngineCore;
use crate::cause::{Blamed, Cause, FailedRequest};
use crate::event::{Output, Outputs};
use crate::request::Operation;
use crate::slot::SlotId;

impl EngineCore {
    /// Finishes a request that every replica has answered.
    pub(super) fn finish(&mut self, id: SlotId, out: &mut Outputs) {
        let slot = self.slots.at(id);
        match slot.error() {
            Some(errno) => self.failed_alone(id, errno, out),
            None if slot.no_space().is_empty() => self.complete(id, Ok(()), out),
            None => self.found_no_space(id, out),
        }
    }

    /// Handles the failure of the last member. If a rebuilt replica has done the request and has become a
    /// member since, the failed one is not the last any more and leaves.
    fn failed_alone(&mut self, id: SlotId, errno: Errno, out: &mut Outputs) {
        let in_view = self.membership.in_view();
        let members = self.membership.answering();
        let slot = self.slots.at_mut(id);
        if slot.sent().and(members).without(slot.erred()).is_empty() {
            return self.fail(id, errno, out);
        }
        let erred = slot.erred().and(in_view);
        slot.clear_error();
        slot.wait_until_left(erred);
        if erred.is_empty() {
            return self.finish(id, out);
        }
        let what = format!("{:?} of {}: {errno}", slot.operation(), slot.range());
        for peer in erred.iter() {
            self.lose(peer, what.clone(), out);
        }
    }

    /// Fails a request that the members have not done. Replicas that are being rebuilt and have done it
    /// differ from them now.
    pub(super) fn fail(&mut self, id: SlotId, errno: Errno, out: &mut Outputs) {
        let slot = *self.slots.at(id);
        if slot.operation().modifies() {
            for peer in slot.sent().and(self.membership.rebuilding()).iter() {
                self.lose(peer, format!("completed a request that the last member cannot do: {errno}"), out);
            }
        }
        self.complete(id, Err(errno), out);
    }

    /// Completes a request: the frontend gets its outcome, and requests that wait for its range continue.
    pub(super) fn complete(&mut self, id: SlotId, outcome: Result<(), Errno>, out: &mut Outputs) {
        let slot = self.slots.close(id);
        let (operation, range) = (slot.operation(), slot.range());
        if let Err(errno) = outcome {
            // Only the last member can have an error beside a lack of space.
            let cause = match slot.error() {
                Some(_) => Cause::Replicas(Blamed(slot.erred())),
                None if !slot.rotten().is_empty() => Cause::Rot(Blamed(slot.rotten())),
                None => Cause::Replicas(Blamed(slot.no_space())),
            };
            out.push(Output::Failed(FailedRequest { slot: id, operation, range, errno, cause }));
        }
        out.push(Output::Complete { slot: id, outcome });
        self.wake.all_if(self.flights.land(&slot));
        if operation == Operation::Flush {
            return;
        }
        if matches!(operation, Operation::Read | Operation::Write { .. }) {
            self.bucket.moved(range.length());
        }
        self.leave_range(id, out);
    }
}
