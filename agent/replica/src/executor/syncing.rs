//! Makes data durable for flushes, and for writes that demand it.

use shorthorn_ring::Ring;
use shorthorn_types::Errno;

use super::Executor;
use super::flush::Flush;

impl Executor {
    pub(super) fn flush(&mut self, slot: u16, ring: &mut Ring) {
        match self.flushes.arrive(slot) {
            Flush::Done => self.finish(slot, Ok(())),
            Flush::Start => self.io.sync(&self.store, ring),
            Flush::Waits => {}
        }
    }

    pub(super) fn on_synced(&mut self, result: Result<usize, Errno>, ring: &mut Ring) {
        match result {
            Ok(_) => {
                if self.flushes.ended() {
                    self.io.sync(&self.store, ring);
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
