//! Makes data durable for flushes, and for writes that demand it.

use shorthorn_ring::Ring;
use shorthorn_types::Errno;

use super::Executor;
use super::flush::Flush;
use super::operation::{kind, numbered_token};

impl Executor {
    pub(super) fn flush(&mut self, slot: u16, ring: &mut Ring) {
        match self.flushes.arrive(slot) {
            Flush::Done => self.finish(slot, Ok(())),
            Flush::Start => self.sync(ring),
            Flush::Waits => {}
        }
    }

    fn sync(&mut self, ring: &mut Ring) {
        self.in_flight.began();
        ring.fdatasync(self.head_fd(), numbered_token(kind::SYNC, 0));
    }

    pub(super) fn on_synced(&mut self, result: Result<usize, Errno>, ring: &mut Ring) {
        match result {
            Ok(_) => {
                if self.flushes.ended() {
                    self.sync(ring);
                }
            }
            // Data that was not durable may be lost, and the kernel reports that only once: a repeated sync
            // would succeed without meaning.
            Err(errno) => {
                self.fail(&format!("the data could not be made durable: {errno}"));
                self.flushes.give_up();
            }
        }
        let mut ended = self.flushes.take_ended();
        for slot in ended.drain(..) {
            self.finish(slot, Ok(()));
        }
        self.flushes.give_back_ended(ended);
    }
}
