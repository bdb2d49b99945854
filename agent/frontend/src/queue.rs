use std::io;
use std::os::fd::OwnedFd;

use shorthorn_core::{Operation, Request};
use shorthorn_ring::{Arena, Completion, Ring, TaskWork};
use shorthorn_types::Errno;

/// [`shorthorn_ring::Token::source`] of every completion that belongs to the frontend. Other numbers are the
/// engine's.
pub const SOURCE: u8 = 1;

/// The resources that a queue lends its frontend.
#[derive(Debug)]
pub struct QueueIo<'a> {
    /// The ring of the queue's thread.
    pub ring: &'a mut Ring,
    /// The data of slot N is the first bytes of buffer N. One slot per request in flight.
    pub arena: &'a Arena,
    /// New requests from the frontend. The engine takes them after every call.
    pub requests: &'a mut Vec<Request>,
    /// Requests that the frontend answers with an error itself. The list never gets longer than `requests`,
    /// with one answer for each. The engine takes them after every call.
    pub refusals: &'a mut Vec<RefusedRequest>,
}

/// A request that no volume can do: the frontend has answered it with an error, and the engine does not see
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusedRequest {
    /// The operation; none if a volume does not support it.
    pub operation: Option<Operation>,
    /// The offset of the request, which may lie outside of the volume.
    pub offset_bytes: u64,
    /// The requested length in bytes, which may exceed the limits.
    pub length_bytes: u64,
    /// The answer.
    pub errno: Errno,
}

/// The progress of a queue after [`QueueFrontend::quiesce`].
#[derive(Debug)]
pub enum Quiesced {
    /// The queue has read requests that are not answered yet.
    NotYet,
    /// All requests are answered. The next process gets later requests from the kernel, over a new connection
    /// if any.
    Done,
    /// All requests are answered, and the next process continues to read from this socket, which is at the
    /// start of a request.
    At(OwnedFd),
}

/// The half of a frontend that lives on the thread of one queue. Nothing here may block or allocate once it
/// has started.
pub trait QueueFrontend: Send {
    /// Returns the ring that the queue's thread has to have.
    fn task_work(&self) -> TaskWork {
        TaskWork::Deferred
    }

    /// Starts on the queue's thread: submits the first operations to the ring.
    ///
    /// # Errors
    /// The queue can not be served.
    fn start(&mut self, io: &mut QueueIo<'_>) -> io::Result<()>;

    /// Handles a completion with [`SOURCE`].
    ///
    /// # Errors
    /// Only if the whole queue is of no more use; the loss of a client is not an error.
    fn on_completion(&mut self, io: &mut QueueIo<'_>, completion: Completion) -> io::Result<()>;

    /// Answers the request in `slot`, which the volume has done (or failed). The answer may be held back
    /// until [`QueueFrontend::flush`].
    fn complete(&mut self, io: &mut QueueIo<'_>, slot: u16, outcome: Result<(), Errno>);

    /// Ends a batch: sends the queued replies.
    fn flush(&mut self, io: &mut QueueIo<'_>);

    /// Stops taking requests beyond those read already, because another process is to serve the device.
    fn quiesce(&mut self, io: &mut QueueIo<'_>);

    /// Returns the progress after [`QueueFrontend::quiesce`]: the next process can take over once all read
    /// requests are answered.
    fn quiesced(&self) -> Quiesced;

    /// Returns true if no slot has data in transit from or to the client, so that the slots' memory may be
    /// released. A request may be complete long before its client has taken the answer.
    fn is_idle(&self) -> bool;
}
