//! The thread of one queue: a ring, the frontend's half of the queue, and a link to each replica.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use shorthorn_core::{Event, Operation, Output, Outputs, PeerIndex, Request, SlotId};
use shorthorn_frontend::{QueueFrontend, QueueIo, Quiesced, RefusedRequest};
use shorthorn_ring::{Arena, Completion, Ring, Token, WakeReceiver, protect_thread};
use shorthorn_types::ByteRange;

use crate::connection::ReadyConnection;
use crate::counters::RequestMeter;
use crate::error::EngineError;
use crate::events::MainEvent;
use crate::failures::{DeviceError, Limiter};
use crate::queue_link::{self, Notice, QueueLink};
use crate::shared_core::{QueueMessage, SharedCore};

const WAKE: Token = Token { source: 3, kind: 0, index: 0, tag: 0 };
/// The interval of the core's ticks while requests are in flight. The core needs four a second to notice late
/// replicas in time.
const TICK_BUSY: Duration = Duration::from_millis(250);
/// The interval while nothing is in flight. PINGs and the clearing of regions need no more.
const TICK_IDLE: Duration = Duration::from_millis(1000);
/// The interval while the last requests are being answered. Each tick adds to the pause that the user of the
/// device sees.
const TICK_DRAINING: Duration = Duration::from_millis(1);
/// The memory that a slot keeps when the queue is idle, in bytes.
const SLOT_KEEP_BYTES: usize = 16 << 10;

/// The state of a queue thread.
pub struct Queue {
    pub index: u16,
    /// The number of slots of the frontend.
    pub depth: u16,
    /// A buffer for every slot, those for copies behind them.
    pub arena: Arena,
    pub wake: WakeReceiver,
    /// The links, with a place for every possible replica.
    pub links: Vec<QueueLink>,
    pub frontend: Box<dyn QueueFrontend>,
    pub shared: Arc<SharedCore>,
    pub meter: RequestMeter,
}

/// A new connection to a replica.
struct Arrival {
    peer: PeerIndex,
    ready: Option<ReadyConnection>,
    installed: SyncSender<()>,
}

/// Takes the messages of other threads. A replica that is dropped loses its connections that arrived before,
/// too. A connection that is installed after the drop would stay without use, and prevent a rebuild.
fn take_messages(messages: &mut Vec<QueueMessage>, outputs: &mut Outputs, arriving: &mut Vec<Arrival>) {
    for message in messages.drain(..) {
        match message {
            QueueMessage::Do(output) => {
                if let Output::Drop { peer, .. } = &output {
                    arriving.retain(|arrival| arrival.peer != *peer);
                }
                outputs.push(output);
            }
            QueueMessage::Connect { peer, ready, installed } => {
                arriving.push(Arrival { peer, ready: Some(ready), installed });
            }
        }
    }
}

/// The progress of a drain, before the queue is left to the next process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Drain {
    /// The frontend takes requests.
    NotRequested,
    /// The frontend takes no more requests, and some are unfinished.
    Parking,
    /// No request was unfinished at the end of the last iteration.
    Quiet,
    /// The main thread knows that all requests are answered.
    Reported,
}

/// A queue and its ring, which belongs to the thread.
struct RunningQueue {
    queue: Queue,
    ring: Ring,
    completions: Vec<Completion>,
    requests: Vec<Request>,
    refusals: Vec<RefusedRequest>,
    events: Vec<Event>,
    scratch: Outputs,
    outputs: Outputs,
    messages: Vec<QueueMessage>,
    /// Connections that wait for the last one of their replica to be gone.
    arriving: Vec<Arrival>,
    /// True if a connection may be gone since the core got the last event.
    links_closed: bool,
    drain: Drain,
    /// True if large requests have touched the arena since it was trimmed.
    has_grown_buffer: bool,
    /// True if nothing has happened in the iteration before this one.
    was_idle: bool,
    /// The limiter of log lines about errors that reach the user of the device.
    limiter: Limiter,
}

impl Queue {
    /// Serves until [`SharedCore::stop`]; reports to the main thread if that is not possible.
    pub fn serve(self) {
        let (shared, index) = (Arc::clone(&self.shared), self.index);
        if let Err(error) = self.try_serve() {
            shared.send_event(MainEvent::QueueFailed { queue: index, reason: error.to_string() });
        }
    }

    fn try_serve(self) -> Result<(), EngineError> {
        let report = protect_thread();
        for (what, failed) in [("PR_SET_IO_FLUSHER", report.io_flusher), ("mlockall", report.memory_lock)] {
            if let Some(error) = failed {
                tracing::warn!(
                    queue = self.index,
                    %error,
                    "{what} failed: the volume may stall when memory runs out"
                );
            }
        }
        let links = u32::try_from(self.links.len()).unwrap_or(u32::MAX);
        let slots = self.arena.slots();
        let entries = (u32::try_from(slots).unwrap_or(u32::MAX) + 4 * links + 16).next_power_of_two();
        let room = slots * 4;
        let mut running = RunningQueue {
            ring: Ring::with(entries, self.frontend.task_work()).map_err(EngineError::system("io_uring"))?,
            queue: self,
            completions: Vec::with_capacity(room),
            requests: Vec::with_capacity(room),
            refusals: Vec::with_capacity(room),
            events: Vec::with_capacity(room),
            scratch: Vec::with_capacity(room),
            outputs: Vec::with_capacity(room),
            messages: Vec::new(),
            arriving: Vec::new(),
            links_closed: false,
            drain: Drain::NotRequested,
            has_grown_buffer: false,
            was_idle: false,
            limiter: Limiter::default(),
        };
        let served = running.serve();
        let unreported = running.limiter.end();
        running.report(unreported);
        if served.is_err() || running.queue.shared.is_draining() {
            // The kernel has requests of the device in this ring: the next process gets them.
            running.ring.leave_open();
        }
        served
    }
}

impl RunningQueue {
    fn serve(&mut self) -> Result<(), EngineError> {
        self.start()?;
        while !self.queue.shared.is_stopping() {
            self.run_once()?;
        }
        Ok(())
    }

    fn start(&mut self) -> Result<(), EngineError> {
        self.queue.wake.arm(&mut self.ring, WAKE);
        for link in &mut self.queue.links {
            link.start(&mut self.ring);
        }
        self.with_frontend(|frontend, io| frontend.start(io))
            .map_err(EngineError::system("starting the frontend's queue"))
    }

    fn with_frontend<T>(&mut self, act: impl FnOnce(&mut dyn QueueFrontend, &mut QueueIo<'_>) -> T) -> T {
        let RunningQueue { queue, ring, requests, refusals, .. } = self;
        let mut io = QueueIo { ring, arena: &queue.arena, requests, refusals };
        act(queue.frontend.as_mut(), &mut io)
    }

    /// Runs one iteration: waits, collects the events, lets the core decide, performs its outputs, and sends.
    fn run_once(&mut self) -> Result<(), EngineError> {
        let is_idle = self.completions.is_empty() && !self.queue.shared.has_requests();
        // The kernel gets the answers of the last iteration only now.
        if is_idle && self.was_idle && self.has_grown_buffer {
            self.trim();
        }
        self.was_idle = is_idle;
        let tick = match (self.queue.shared.is_draining(), is_idle) {
            // Does not wait, so that the kernel gets the last answers at once.
            _ if self.drain == Drain::Quiet => Duration::ZERO,
            (true, _) => TICK_DRAINING,
            (false, true) => TICK_IDLE,
            (false, false) => TICK_BUSY,
        };
        self.completions.clear();
        self.ring.wait(Some(tick), &mut self.completions).map_err(EngineError::system("io_uring_enter"))?;
        for at in 0..self.completions.len() {
            self.dispatch(self.completions[at])?;
        }
        if self.queue.index == 0 {
            self.events.push(Event::Tick { now_ms: self.queue.shared.now_ms() });
        }
        if self.queue.shared.is_draining() && self.drain == Drain::NotRequested {
            self.drain = Drain::Parking;
            self.with_frontend(|frontend, io| frontend.quiesce(io));
        }
        self.decide();
        if !self.arriving.is_empty() {
            self.install();
        }
        self.with_frontend(|frontend, io| frontend.flush(io));
        self.report_refusals();
        for link in &mut self.queue.links {
            link.flush(&mut self.ring);
        }
        if self.queue.shared.is_draining() {
            self.report_when_drained();
        }
        Ok(())
    }

    /// Reports requests that the frontend has refused in this iteration, and the number of errors that an
    /// interval has left out.
    fn report_refusals(&mut self) {
        if self.refusals.is_empty() && !self.limiter.is_active() {
            return;
        }
        let now = Instant::now();
        self.queue.meter.refused(self.refusals.len());
        for at in 0..self.refusals.len() {
            self.record_error(DeviceError::Refused(self.refusals[at]), now);
        }
        self.refusals.clear();
        let unreported = self.limiter.end_if_over(now);
        self.report(unreported);
    }

    fn record_error(&mut self, error: DeviceError, now: Instant) {
        let error = self.limiter.admits(now).then_some(error);
        self.report(error);
    }

    fn report(&self, error: Option<DeviceError>) {
        if let Some(error) = error {
            self.queue.shared.send_event(MainEvent::DeviceError(error));
        }
    }

    fn dispatch(&mut self, completion: Completion) -> Result<(), EngineError> {
        let RunningQueue { queue, ring, requests, refusals, .. } = self;
        let Queue { arena, links, frontend, shared, wake, index, .. } = queue;
        match completion.token.source {
            shorthorn_frontend::SOURCE => {
                let mut io = QueueIo { ring, arena, requests, refusals };
                frontend
                    .on_completion(&mut io, completion)
                    .map_err(EngineError::system("the frontend's queue"))?;
            }
            queue_link::SOURCE => {
                let peer = usize::from(queue_link::peer_of(completion.token));
                let Some(link) = links.get_mut(peer) else { return Ok(()) };
                let notice = link.on_completion(completion, ring, arena, &mut self.events);
                if let Some(Notice::Deposed { holder }) = notice {
                    shared.send_event(MainEvent::Deposed { holder });
                }
                if let Some(closed) = link.take_closed() {
                    self.events.push(closed);
                    self.links_closed = true;
                }
            }
            _ => {
                wake.arm(ring, WAKE);
                shared.take_messages(*index, &mut self.messages);
                take_messages(&mut self.messages, &mut self.outputs, &mut self.arriving);
            }
        }
        Ok(())
    }

    /// Takes new connections of replicas whose last one is gone, once the core knows that.
    fn install(&mut self) {
        let Queue { links, shared, index, .. } = &mut self.queue;
        for arrival in &mut self.arriving {
            let Some(link) = links.get_mut(usize::from(arrival.peer)).filter(|link| link.is_absent()) else {
                continue;
            };
            if let Some(ready) = arrival.ready.take()
                && link.connect(ready)
            {
                link.start(&mut self.ring);
                shared.set_connected(*index, arrival.peer, true);
                // The waiting rebuild task gives up after a while: then the core never learns to use the
                // connection.
                let _ = arrival.installed.try_send(());
            }
        }
        self.arriving.retain(|arrival| arrival.ready.is_some());
    }

    /// Reports the answer of the last request to the main thread, once no more requests are taken. The
    /// answers are out one iteration later, because the next wait submits them.
    fn report_when_drained(&mut self) {
        if matches!(self.drain, Drain::NotRequested | Drain::Reported) {
            return;
        }
        let socket = match self.queue.frontend.quiesced() {
            Quiesced::NotYet => {
                self.drain = Drain::Parking;
                return;
            }
            Quiesced::Done => None,
            Quiesced::At(socket) => Some(socket),
        };
        self.drain = match (self.queue.shared.has_requests(), self.drain) {
            (true, _) => Drain::Parking,
            (false, Drain::Quiet) => {
                self.queue.shared.send_event(MainEvent::Drained { queue: self.queue.index, socket });
                Drain::Reported
            }
            (false, _) => Drain::Quiet,
        };
    }

    /// Passes events to the core and performs its outputs, until no more follow.
    fn decide(&mut self) {
        loop {
            if !self.requests.is_empty() {
                self.queue.meter.begin(&self.requests, Instant::now());
            }
            let submit = |request| Event::Submit { queue: self.queue.index, request };
            self.events.extend(self.requests.drain(..).map(submit));
            if !self.events.is_empty() {
                self.queue.shared.apply(
                    self.queue.index,
                    &mut self.events,
                    &mut self.scratch,
                    &mut self.outputs,
                );
                self.record_closed();
            }
            if self.outputs.is_empty() && self.requests.is_empty() && self.events.is_empty() {
                return;
            }
            self.perform();
        }
    }

    /// Reports every closed connection to the core, which may then use new ones.
    fn record_closed(&mut self) {
        if std::mem::take(&mut self.links_closed) {
            for (link, peer) in self.queue.links.iter().zip(0..) {
                if link.is_absent() {
                    self.queue.shared.set_connected(self.queue.index, peer, false);
                }
            }
        }
    }

    fn perform(&mut self) {
        // The same data is sent to every member: its check is computed once.
        let mut checked = None;
        // The time of completion of all requests that are completed in this iteration.
        let mut now = None;
        let mut outputs = std::mem::take(&mut self.outputs);
        for output in outputs.drain(..) {
            match output {
                Output::Send { peer, slot, operation, range, buffer_offset } => {
                    self.send(peer, slot, operation, range, buffer_offset, &mut checked);
                }
                Output::Complete { slot, outcome } => {
                    checked = None;
                    let now = *now.get_or_insert_with(Instant::now);
                    self.queue.meter.end(slot.slot, outcome.is_ok(), now);
                    self.with_frontend(|frontend, io| frontend.complete(io, slot.slot, outcome));
                }
                Output::Failed(failure) => {
                    self.record_error(DeviceError::Failed(failure), *now.get_or_insert_with(Instant::now));
                }
                Output::Ping { peer, .. } => self.with_link(peer, QueueLink::ping),
                Output::Propose { peer, view, honoured } => {
                    self.with_link(peer, |link, events| link.propose(*view, *honoured, events));
                }
                Output::Commit { peer, view } => {
                    self.with_link(peer, |link, events| link.commit(*view, events));
                }
                Output::Mark { peer, mark, change } => {
                    self.with_link(peer, |link, events| link.mark(mark, &change, events));
                }
                Output::Drop { peer, .. } => {
                    self.with_link(peer, |link, events| {
                        link.close();
                        events.extend(link.take_closed());
                    });
                    self.links_closed = true;
                }
                _ => {}
            }
        }
        // It keeps its memory.
        self.outputs = outputs;
    }

    fn with_link(&mut self, peer: PeerIndex, act: impl FnOnce(&mut QueueLink, &mut Vec<Event>)) {
        if let Some(link) = self.queue.links.get_mut(usize::from(peer)) {
            act(link, &mut self.events);
        }
    }

    fn send(
        &mut self,
        peer: PeerIndex,
        slot: SlotId,
        operation: Operation,
        range: ByteRange,
        buffer_offset: u32,
        checked: &mut Option<((SlotId, ByteRange), u32)>,
    ) {
        let Some(link) = self.queue.links.get_mut(usize::from(peer)) else { return };
        let length = match operation {
            Operation::Read | Operation::CheckedRead | Operation::Write { .. } | Operation::WriteRot => {
                usize::try_from(range.length()).unwrap_or(usize::MAX)
            }
            _ => 0,
        };
        self.has_grown_buffer |= length > SLOT_KEEP_BYTES;
        let data = self.queue.arena.buf(usize::from(slot.slot)).part(buffer_offset as usize, length);
        let data_check = match (operation, *checked) {
            (Operation::Write { .. } | Operation::WriteRot, Some((known, check)))
                if known == (slot, range) =>
            {
                check
            }
            (Operation::Write { .. } | Operation::WriteRot, _) => {
                let check = data.crc32c();
                *checked = Some(((slot, range), check));
                check
            }
            _ => 0,
        };
        link.send(slot, operation, range, (data, buffer_offset), data_check, &mut self.events);
    }

    /// Returns the memory of large requests to the kernel, unless a client is slow to read an answer or to
    /// send data. Keeps the memory of copies, because a copy may wait for a replica.
    fn trim(&mut self) {
        let queue = self.queue.index;
        if !self.queue.frontend.is_idle() {
            return tracing::debug!(queue, "keeping memory: data of a client is in transit");
        }
        tracing::debug!(queue, "memory of large requests is released");
        for slot in 0..usize::from(self.queue.depth) {
            self.queue.arena.release_pages(slot, SLOT_KEEP_BYTES);
        }
        self.has_grown_buffer = false;
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::sync_channel;

    use shorthorn_core::DropCause;

    use super::*;
    use crate::queue_link::tests::ready;

    fn dropped(peer: PeerIndex) -> QueueMessage {
        QueueMessage::Do(Output::Drop { peer, reason: "test".to_owned(), cause: DropCause::Unused })
    }

    #[test]
    fn a_drop_closes_the_connections_that_arrived_before_it() {
        let (mut outputs, mut arriving) = (Vec::new(), Vec::new());
        let mut remote = Vec::new();
        let mut connect = |peer| {
            let (local, other) = UnixStream::pair().unwrap();
            remote.push(other);
            QueueMessage::Connect { peer, ready: ready(local), installed: sync_channel(1).0 }
        };
        let mut messages = vec![connect(0), connect(1), dropped(1), connect(1)];
        take_messages(&mut messages, &mut outputs, &mut arriving);
        assert_eq!(arriving.iter().map(|arrival| arrival.peer).collect::<Vec<_>>(), [0, 1]);
        assert_eq!((outputs.len(), messages.len()), (1, 0));
        assert_eq!(remote[1].read(&mut [0]).unwrap(), 0, "it is closed");
        remote[2].set_nonblocking(true).unwrap();
        assert!(remote[2].read(&mut [0]).is_err(), "the one after the drop is open");
    }
}
