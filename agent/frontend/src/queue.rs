use std::io;
use std::os::fd::OwnedFd;

use shorthorn_core::{Operation, Request};
use shorthorn_ring::{Arena, Completion, Ring, TaskWork};
use shorthorn_types::Errno;

/// [`shorthorn_ring::Token::source`] of every completion that belongs to the frontend. Other numbers are the engine's.
pub const SOURCE: u8 = 1;

/// What a queue lends its frontend.
#[derive(Debug)]
pub struct QueueIo<'a> {
    /// The ring of the queue's thread.
    pub ring: &'a mut Ring,
    /// The data of slot N is the first bytes of buffer N. One slot per request in flight.
    pub arena: &'a Arena,
    /// Where the frontend puts new requests. The engine takes them after every call.
    pub requests: &'a mut Vec<Request>,
    /// Where the frontend notes each request that it answers with an error itself: it has one answer for each, so this gets
    /// no longer than `requests`. The engine takes them after every call.
    pub refusals: &'a mut Vec<Refusal>,
}

/// A request that no volume can do: the frontend has answered it with an error, and the engine does not see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The operation; none: one that a volume does not have.
    pub operation: Option<Operation>,
    /// Where. It need not be a place in the volume.
    pub offset_bytes: u64,
    /// How much.
    pub length_bytes: u64,
    /// The answer.
    pub errno: Errno,
}

/// How far a queue is that was told to [`QueueFrontend::park`].
#[derive(Debug)]
pub enum Parked {
    /// It has read something that is not answered yet.
    NotYet,
    /// Nothing is left. The next process gets the requests that come from now on from the kernel, over a new connection
    /// where there is one.
    Done,
    /// Nothing is left, and the next process is to read on from this socket, which is at the start of a request.
    At(OwnedFd),
}

/// The half of a frontend that lives on the thread of one queue. Nothing here may block or allocate once it
/// has started.
pub trait QueueFrontend: Send {
    /// The ring that the queue's thread has to have.
    fn task_work(&self) -> TaskWork {
        TaskWork::Deferred
    }

    /// First call on the queue's thread: asks the ring for what it waits for.
    ///
    /// # Errors
    /// The queue can not be served.
    fn start(&mut self, io: &mut QueueIo<'_>) -> io::Result<()>;

    /// A completion with [`SOURCE`].
    ///
    /// # Errors
    /// Only where the whole queue is of no more use; the loss of a client is not an error.
    fn on_completion(&mut self, io: &mut QueueIo<'_>, completion: Completion) -> io::Result<()>;

    /// The volume has done the request in `slot` (or failed): answers it. The answer may be held back until
    /// [`QueueFrontend::flush`].
    fn complete(&mut self, io: &mut QueueIo<'_>, slot: u16, outcome: Result<(), Errno>);

    /// End of a batch: sends what was held back.
    fn flush(&mut self, io: &mut QueueIo<'_>);

    /// Takes no more requests than those that it has read already: another process is to serve the device.
    fn park(&mut self, io: &mut QueueIo<'_>);

    /// Whether the next process can take over, after [`QueueFrontend::park`]: what was read is answered.
    fn parked(&self) -> Parked;

    /// Whether no slot has data that is on its way from the client, or to it: their memory may be given back. A request
    /// may be complete long before its client has taken the answer.
    fn is_idle(&self) -> bool;
}
