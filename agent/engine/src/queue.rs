//! The thread of one queue: a ring, the frontend's half of the queue, and a link to each replica.

use std::sync::Arc;
use std::time::Duration;

use shorthorn_core::{Event, Operation, Output, Outputs, Request};
use shorthorn_frontend::{QueueFrontend, QueueIo};
use shorthorn_ring::{Arena, Completion, Ring, Token, Wake, protect_thread};

use crate::error::EngineError;
use crate::link::{self, Link, Notice};
use crate::shared::{News, Shared};

const WAKE: Token = Token { source: 3, kind: 0, index: 0, tag: 0 };
/// How often the core is told the time while requests are in flight, and while none are.
const TICK_BUSY: Duration = Duration::from_millis(250);
const TICK_IDLE: Duration = Duration::from_millis(1000);
/// What a slot keeps of its memory when the queue is idle.
const SLOT_KEEP_BYTES: usize = 16 << 10;

/// What a queue thread is made of.
pub struct Queue {
    pub index: u16,
    pub depth: u16,
    pub arena: Arena,
    pub wake: Wake,
    pub links: Vec<Link>,
    pub frontend: Box<dyn QueueFrontend>,
    pub shared: Arc<Shared>,
}

/// A queue and its ring, which belongs to the thread.
struct Running {
    queue: Queue,
    ring: Ring,
    completions: Vec<Completion>,
    requests: Vec<Request>,
    events: Vec<Event>,
    scratch: Outputs,
    outputs: Outputs,
    /// Whether large requests have touched the arena since it was trimmed.
    is_swollen: bool,
}

impl Queue {
    /// Serves until [`Shared::stop`]; tells the main thread where that is not possible.
    pub fn serve(self) {
        let (shared, index) = (Arc::clone(&self.shared), self.index);
        if let Err(error) = self.try_serve() {
            shared.tell(News::QueueFailed { queue: index, reason: error.to_string() });
        }
    }

    fn try_serve(self) -> Result<(), EngineError> {
        let report = protect_thread();
        for (what, failed) in [("PR_SET_IO_FLUSHER", report.io_flusher), ("mlockall", report.memory_lock)] {
            if let Some(error) = failed {
                tracing::warn!(queue = self.index, %error, "{what} failed: the volume may stall when memory runs out");
            }
        }
        let links = u32::try_from(self.links.len()).unwrap_or(u32::MAX);
        let entries = (u32::from(self.depth) + 4 * links + 16).next_power_of_two();
        let room = usize::from(self.depth) * 4;
        let mut running = Running {
            ring: Ring::new(entries).map_err(EngineError::system("io_uring"))?,
            queue: self,
            completions: Vec::with_capacity(room),
            requests: Vec::with_capacity(room),
            events: Vec::with_capacity(room),
            scratch: Vec::with_capacity(room),
            outputs: Vec::with_capacity(room),
            is_swollen: false,
        };
        running.start()?;
        while !running.queue.shared.is_stopping() {
            running.turn()?;
        }
        Ok(())
    }
}

impl Running {
    fn start(&mut self) -> Result<(), EngineError> {
        self.queue.wake.arm(&mut self.ring, WAKE);
        for link in &mut self.queue.links {
            link.start(&mut self.ring);
        }
        let mut io = QueueIo { ring: &mut self.ring, arena: &self.queue.arena, requests: &mut self.requests };
        self.queue.frontend.start(&mut io).map_err(EngineError::system("starting the frontend's queue"))
    }

    /// One turn: wait, take what has happened, let the core decide, do what it says, send.
    fn turn(&mut self) -> Result<(), EngineError> {
        let is_idle = self.completions.is_empty() && !self.queue.shared.is_busy();
        if is_idle && self.is_swollen {
            self.trim();
        }
        let tick = if is_idle { TICK_IDLE } else { TICK_BUSY };
        self.completions.clear();
        self.ring.wait(Some(tick), &mut self.completions).map_err(EngineError::system("io_uring_enter"))?;
        for at in 0..self.completions.len() {
            self.dispatch(self.completions[at])?;
        }
        if self.queue.index == 0 {
            self.events.push(Event::Tick { now_ms: self.queue.shared.now_ms() });
        }
        self.decide();
        let mut io = QueueIo { ring: &mut self.ring, arena: &self.queue.arena, requests: &mut self.requests };
        self.queue.frontend.flush(&mut io);
        for link in &mut self.queue.links {
            link.flush(&mut self.ring);
        }
        Ok(())
    }

    fn dispatch(&mut self, completion: Completion) -> Result<(), EngineError> {
        let Queue { arena, links, frontend, shared, wake, index, .. } = &mut self.queue;
        match completion.token.source {
            shorthorn_frontend::SOURCE => {
                let mut io = QueueIo { ring: &mut self.ring, arena, requests: &mut self.requests };
                frontend
                    .on_completion(&mut io, completion)
                    .map_err(EngineError::system("the frontend's queue"))?;
            }
            link::SOURCE => {
                let peer = usize::from(link::peer_of(completion.token));
                let Some(link) = links.get_mut(peer) else { return Ok(()) };
                let notice = link.on_completion(completion, &mut self.ring, arena, &mut self.events);
                if let Some(Notice::Deposed { holder }) = notice {
                    shared.tell(News::Deposed { holder });
                }
                self.events.extend(link.take_closed());
            }
            _ => {
                wake.arm(&mut self.ring, WAKE);
                shared.take_mail(*index, &mut self.outputs);
            }
        }
        Ok(())
    }

    /// Passes events to the core and does what it says, until nothing more follows.
    fn decide(&mut self) {
        loop {
            let submit = |request| Event::Submit { queue: self.queue.index, request };
            self.events.extend(self.requests.drain(..).map(submit));
            if !self.events.is_empty() {
                self.queue.shared.apply(
                    self.queue.index,
                    &mut self.events,
                    &mut self.scratch,
                    &mut self.outputs,
                );
            }
            if self.outputs.is_empty() && self.requests.is_empty() && self.events.is_empty() {
                return;
            }
            self.perform();
        }
    }

    fn perform(&mut self) {
        let Queue { arena, links, frontend, .. } = &mut self.queue;
        // The same data goes to every member: its check is computed once.
        let mut checked = None;
        for output in self.outputs.drain(..) {
            match output {
                Output::Send { peer, slot, operation, range } => {
                    let Some(link) = links.get_mut(usize::from(peer)) else { continue };
                    let data_check = match operation {
                        Operation::Write { .. } => match checked {
                            Some((known, check)) if known == slot => check,
                            _ => {
                                let length = usize::try_from(range.length()).unwrap_or(usize::MAX);
                                self.is_swollen |= length > SLOT_KEEP_BYTES;
                                let check = arena.buf(usize::from(slot.slot)).part(0, length).crc32c();
                                checked = Some((slot, check));
                                check
                            }
                        },
                        _ => {
                            self.is_swollen |= range.length() > SLOT_KEEP_BYTES as u64;
                            0
                        }
                    };
                    link.send(slot, operation, range, data_check, arena, &mut self.events);
                }
                Output::Complete { slot, outcome } => {
                    checked = None;
                    let mut io = QueueIo { ring: &mut self.ring, arena, requests: &mut self.requests };
                    frontend.complete(&mut io, slot.slot, outcome);
                }
                Output::Ping { peer } => {
                    let Some(link) = links.get_mut(usize::from(peer)) else { continue };
                    link.ping(&mut self.events);
                }
                Output::Propose { peer, view, honoured } => {
                    let Some(link) = links.get_mut(usize::from(peer)) else { continue };
                    link.propose(view, honoured, &mut self.events);
                }
                Output::Commit { peer, view } => {
                    let Some(link) = links.get_mut(usize::from(peer)) else { continue };
                    link.commit(view, &mut self.events);
                }
                Output::Drop { peer, .. } => {
                    let Some(link) = links.get_mut(usize::from(peer)) else { continue };
                    link.close();
                    self.events.extend(link.take_closed());
                }
                Output::ViewChanged { .. } | Output::Frozen { .. } => {}
            }
        }
    }

    /// Gives the memory of large requests back.
    fn trim(&mut self) {
        for slot in 0..self.queue.arena.slots() {
            self.queue.arena.release_pages(slot, SLOT_KEEP_BYTES);
        }
        self.is_swollen = false;
    }
}
