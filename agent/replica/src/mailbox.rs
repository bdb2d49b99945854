//! Messages of other threads to the data thread.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Receiver, Sender};

use shorthorn_replica_core::QueueId;
use shorthorn_ring::{Ring, Token, WakeReceiver, Waker};
use shorthorn_types::Generation;
use shorthorn_wire::{Header, Session};

/// A message to the data thread.
#[derive(Debug)]
pub(crate) enum Message {
    /// An engine has proven its identity, for this engine and queue.
    Candidate(QueueId, Box<Candidate>),
    /// A command to refuse every engine of a lower generation from now on.
    Fence(Generation),
    /// End.
    Stop,
}

/// An engine that has sent its hello and waits for the answer.
#[derive(Debug)]
pub(crate) struct Candidate {
    /// The connection.
    pub socket: OwnedFd,
    /// The hello, which is still to be answered.
    pub hello: Header,
    /// Proves the answer, and makes and reads all frames after it.
    pub session: Session,
    /// The origin of the connection, for logs.
    pub peer: String,
}

/// The sending end: every thread has its own.
#[derive(Clone, Debug)]
pub(crate) struct Mailbox {
    messages: Sender<Message>,
    waker: Waker,
}

/// The end of the data thread.
#[derive(Debug)]
pub(crate) struct Inbox {
    messages: Receiver<Message>,
    wake: WakeReceiver,
}

impl Mailbox {
    /// Creates both ends. The memory behind them is never released, so call this once.
    ///
    /// # Errors
    /// The error of eventfd or mmap.
    pub fn new() -> io::Result<(Mailbox, Inbox)> {
        let (wake, waker) = WakeReceiver::new()?;
        let (sender, messages) = mpsc::channel();
        Ok((Mailbox { messages: sender, waker }, Inbox { messages, wake }))
    }

    /// Sends a message to the data thread. Returns false if it is gone, and the process ends.
    pub fn send(&self, message: Message) -> bool {
        let is_sent = self.messages.send(message).is_ok();
        if is_sent {
            self.waker.wake();
        }
        is_sent
    }
}

impl Inbox {
    /// Asks the ring for a completion with `token` when there is a message; again after every one.
    pub fn arm(&self, ring: &mut Ring, token: Token) {
        self.wake.arm(ring, token);
    }

    /// Takes the next message, if any.
    pub fn next(&self) -> Option<Message> {
        self.messages.try_recv().ok()
    }
}
