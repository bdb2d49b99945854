//! The data thread: one ring, all connections, and the executor.
//!
//! Everything happens in one loop. The loop waits for completions, passes each on to its module, answers
//! finished requests, and serves connections that wait for a slot. Then it writes the pages of region sets,
//! and starts the sends. Requests of all connections are pipelined and answered in the order in which they
//! finish. The loop neither allocates, logs nor locks per request.

mod admission;
mod connections;
mod copying;
mod failure_watch;
mod idle_memory;
mod requests;
mod sets;
mod status_report;
mod sums;

use std::time::Instant;

use shorthorn_control::Publisher;
use shorthorn_replica_core::{Admission, ReplicaFailure};
use shorthorn_ring::{Completion, Ring, Token};
use shorthorn_types::Errno;

use self::connections::Connections;
use self::failure_watch::FailureWatch;
use self::idle_memory::IdleMemory;
use self::status_report::StatusReport;
use crate::connection::{SOURCE_RECEIVE, SOURCE_SEND};
use crate::error::ReplicaError;
use crate::executor::{Executor, OperationResult, SOURCE_DISK};
use crate::limits::{RING_ENTRIES, SILENT_TICKS_MAX, SLOTS, TICK};
use crate::mailbox::{Candidate, Inbox, Message};
use crate::slots::ConnectionSlots;

const SOURCE_WAKE: u8 = 0;
const WAKE_TOKEN: Token = Token { source: SOURCE_WAKE, kind: 0, index: 0, tag: 0 };

/// The data thread: see the module.
///
/// It is composed of parts, as the [`Executor`] is: a part has its own state and rules, and does not know the
/// server. The modules `requests`, `admission`, `sets`, `copying` and `sums` have the methods by topic.
#[derive(Debug)]
pub(crate) struct Server {
    /// See [`Welcome::run`](shorthorn_wire::Welcome::run).
    run: u64,
    ring: Ring,
    inbox: Inbox,
    executor: Executor,
    slots: ConnectionSlots,
    connections: Connections,
    /// The connections by index, and the waiting candidates.
    admission: Admission<u16, Candidate>,
    status: StatusReport,
    finished: Vec<(u16, OperationResult)>,
    /// Slots whose response has gone out.
    sent: Vec<u32>,
    memory: IdleMemory,
    failure: FailureWatch,
    stopping: bool,
}

impl Server {
    /// Creates a server for the current thread, which has to run it.
    ///
    /// # Errors
    /// The kernel has no usable io_uring.
    pub fn new(executor: Executor, inbox: Inbox, publisher: Publisher) -> Result<Server, ReplicaError> {
        let ring =
            Ring::new(RING_ENTRIES).map_err(|source| ReplicaError::system("set up io_uring", source))?;
        let run = getrandom::u64()
            .map_err(|error| ReplicaError::system("draw a number", std::io::Error::other(error)))?;
        Ok(Server {
            run,
            ring,
            inbox,
            executor,
            slots: ConnectionSlots::new(),
            connections: Connections::new(),
            admission: Admission::default(),
            status: StatusReport::new(publisher),
            finished: Vec::with_capacity(SLOTS),
            sent: Vec::with_capacity(SLOTS),
            memory: IdleMemory::default(),
            failure: FailureWatch::default(),
            stopping: false,
        })
    }

    /// Serves until it is stopped; leaves the directory clean.
    ///
    /// # Errors
    /// The ring fails, the directory cannot be closed, or the replica has failed: see [`ReplicaFailure`].
    pub fn run(mut self) -> Result<(), ReplicaError> {
        let mut completions = Vec::with_capacity(RING_ENTRIES as usize * 4);
        let mut last_tick = Instant::now();
        self.inbox.arm(&mut self.ring, WAKE_TOKEN);
        while !(self.stopping && self.is_quiet()) {
            if let Some(failure) = self.ends_by() {
                return Err(failure);
            }
            let ticks = self.needs_ticks();
            let sums = self.executor.sums_pause().filter(|_| !self.stopping);
            let timeout = [ticks.then_some(TICK), sums].into_iter().flatten().min();
            self.ring
                .wait(timeout, &mut completions)
                .map_err(|source| ReplicaError::system("wait for io_uring", source))?;
            for completion in completions.drain(..) {
                self.dispatch(completion);
            }
            self.answer();
            self.executor.write_pages(&mut self.ring);
            if !self.stopping {
                self.executor.sum(&mut self.ring);
            }
            self.advance_connections();
            if ticks && last_tick.elapsed() >= TICK {
                last_tick = Instant::now();
                self.tick();
            }
        }
        self.executor.close()?;
        Ok(())
    }

    /// Returns the failure by which the process ends now. The directory is left alone.
    fn ends_by(&self) -> Option<ReplicaError> {
        let failure = self.executor.state().failure().filter(|_| !self.stopping && self.is_quiet())?;
        let ReplicaFailure { message, in_a_row, .. } = failure;
        let ends = self.failure.ends_by(failure);
        ends.then(|| ReplicaError::Failed { message: message.clone(), in_a_row: *in_a_row })
    }

    fn is_quiet(&self) -> bool {
        self.executor.is_idle() && self.connections.is_empty()
    }

    fn needs_ticks(&self) -> bool {
        self.memory.needs_ticks() || self.failure.has_failed() || !self.connections.is_empty()
    }

    fn dispatch(&mut self, completion: Completion) {
        let index = completion.token.index;
        match completion.token.source {
            SOURCE_DISK => self.executor.on_completion(completion, &mut self.ring),
            SOURCE_RECEIVE => self.on_received(index, completion),
            SOURCE_SEND => self.on_sent(index, completion),
            _ => self.on_wake(),
        }
    }

    fn on_wake(&mut self) {
        self.inbox.arm(&mut self.ring, WAKE_TOKEN);
        while let Some(message) = self.inbox.next() {
            match message {
                Message::Candidate(queue_id, candidate) => self.admit(queue_id, *candidate),
                Message::Fence(generation) => self.fence(generation),
                Message::Stop => self.stop(),
            }
        }
    }

    /// Stops without answering the requests in flight. Engines then treat the replica as failed, and it is
    /// about to end anyway.
    fn stop(&mut self) {
        tracing::info!("stopping");
        self.stopping = true;
        for (queue_id, candidate) in self.admission.take_candidates().collect::<Vec<_>>() {
            self.refuse(queue_id, candidate, Errno::SHUTDOWN, "the replica is being stopped".to_owned());
        }
        for index in self.connections.indices() {
            self.end(index, "the replica is being stopped");
        }
    }

    /// Gives the connection up. It is removed when all of its operations have ended; see
    /// [`Server::advance_connections`].
    fn end(&mut self, index: u16, why: impl std::fmt::Display) {
        let queue_id = self.admission.queue_id(index);
        let Some(connection) = self.connections.open(index) else { return };
        connection.end();
        let (generation, queue) = queue_id.map(|queue_id| (queue_id.generation, queue_id.queue)).unzip();
        let generation = generation.map(tracing::field::display);
        tracing::info!(generation, queue, peer = connection.peer(), "connection closed: {why}");
        self.slots.forget(index);
    }

    /// Removes ended connections, admits the candidates that waited for them, and starts the sends.
    fn advance_connections(&mut self) {
        let mut removed = false;
        for index in self.connections.indices() {
            removed |= self.remove_ended(index);
        }
        if removed {
            self.welcome_ready();
        }
        self.connections.flush(&mut self.ring);
        if self.executor.state().failure().is_some() && !self.failure.has_failed() {
            self.failure.failed(Instant::now());
            self.publish_failure();
        }
    }

    /// Removes the connection if it is over and nothing of it is in flight any more.
    fn remove_ended(&mut self, index: u16) -> bool {
        let Some(connection) = self.connections.get(index) else { return false };
        if !connection.give_up_slots(&mut self.sent) {
            return false;
        }
        self.free_sent();
        if self.slots.held(index) > 0 {
            return false;
        }
        self.connections.remove(index);
        self.admission.gone(index);
        true
    }

    /// Frees the slots in `sent`.
    fn free_sent(&mut self) {
        for owner in self.sent.drain(..) {
            let slot = u16::try_from(owner).unwrap_or(u16::MAX);
            self.executor.free(slot);
            self.slots.give(slot);
        }
    }

    fn tick(&mut self) {
        for index in self.connections.indices() {
            let waits = self.slots.is_waiting(index);
            let Some(connection) = self.connections.get(index) else { continue };
            // A connection that waits for a slot is not read, so it does not count as silent.
            if connection.tick() >= SILENT_TICKS_MAX && !waits {
                self.end(index, "the engine was silent for too long");
            }
        }
        self.executor.write_stale_pages(&mut self.ring);
        self.executor.release_unused_sums();
        if self.memory.tick(self.slots.is_idle()) {
            self.executor.release_memory();
        }
        self.look_at_failure();
    }

    /// Records a failure that could not be recorded, and reports when earlier ones do not count any more.
    fn look_at_failure(&mut self) {
        if self.executor.state().has_served_long() && self.failure.forgive() {
            self.status.forgiven();
        }
        // Only without a connected engine: the disk may hang, and engines need their answers.
        if self.failure.has_failed()
            && self.is_quiet()
            && self.executor.change(|state, disk| state.retry_record(disk))
        {
            tracing::warn!("recorded that data may be gone");
            self.failure.failed(Instant::now());
            self.publish_failure();
        }
    }

    fn publish_failure(&mut self) {
        if let Some(failure) = self.executor.state().failure() {
            self.status.failure(failure);
        }
    }
}
