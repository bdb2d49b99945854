//! State that the threads of an engine share: the core, and a mailbox for each queue.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::{Sender, SyncSender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use shorthorn_control::GrantWanted;
use shorthorn_core::{EngineCore, Event, Output, Outputs, PeerIndex};
use shorthorn_recovery::PendingView;
use shorthorn_ring::Waker;
use shorthorn_types::limits::{MAX_MEMBERS, MAX_QUEUES};
use shorthorn_types::{ReplicaReport, View};

use crate::connection::ReadyConnection;
use crate::events::MainEvent;

/// A message in the mailbox of a queue thread.
#[derive(Debug)]
pub enum QueueMessage {
    /// An output of the core to perform.
    Do(Output),
    /// A new connection to a replica. The queue sends to `installed` once it has the connection.
    Connect { peer: PeerIndex, ready: ReadyConnection, installed: SyncSender<()> },
}

/// The core, shared by all threads. With one queue, which is the default, the lock is hardly ever contended;
/// with several it is held for some hundred nanoseconds per batch.
#[derive(Debug)]
pub struct SharedCore {
    core: Mutex<EngineCore>,
    mailboxes: Vec<Mailbox>,
    pending: Mutex<Option<PendingView>>,
    /// For each replica, the queues with a connection to it, as bits.
    connected: [AtomicU8; MAX_MEMBERS],
    events: Sender<MainEvent>,
    stop: AtomicBool,
    drain: AtomicBool,
    start_ms: u64,
}

// One bit for each queue.
const _: () = assert!(MAX_QUEUES <= 8);

#[derive(Debug)]
struct Mailbox {
    messages: Mutex<Vec<QueueMessage>>,
    waker: Waker,
}

impl SharedCore {
    /// Shares the core of a volume that the engine began to open at `begun_ms` of [`boot_time_ms`]. A pause
    /// since then counts.
    pub fn new(core: EngineCore, wakers: Vec<Waker>, events: Sender<MainEvent>, begun_ms: u64) -> SharedCore {
        let mailbox = |waker| Mailbox { messages: Mutex::new(Vec::new()), waker };
        SharedCore {
            core: Mutex::new(core),
            mailboxes: wakers.into_iter().map(mailbox).collect(),
            pending: Mutex::new(None),
            connected: Default::default(),
            events,
            stop: AtomicBool::new(false),
            drain: AtomicBool::new(false),
            start_ms: begun_ms,
        }
    }

    /// Milliseconds since the engine began to open the volume. A suspension of the host counts.
    pub fn now_ms(&self) -> u64 {
        boot_time_ms().saturating_sub(self.start_ms)
    }

    /// Gives `events` to the core. Appends the outputs for `queue` to `mine`, and delivers the rest to the
    /// other queues and the main thread.
    pub fn apply(&self, queue: u16, events: &mut Vec<Event>, scratch: &mut Outputs, mine: &mut Outputs) {
        let mut core = lock(&self.core);
        core.runs_at(self.now_ms());
        for event in events.drain(..) {
            core.apply(event, scratch);
        }
        let woken = self.distribute(scratch, Some((queue, mine)));
        drop(core);
        self.wake(woken);
    }

    /// Lets another thread use the core. The queues perform the outputs.
    pub fn decide<R>(&self, act: impl FnOnce(&mut EngineCore, &mut Outputs) -> R) -> R {
        let mut outputs = Outputs::new();
        let mut core = lock(&self.core);
        core.runs_at(self.now_ms());
        let result = act(&mut core, &mut outputs);
        let woken = self.distribute(&mut outputs, None);
        drop(core);
        self.wake(woken);
        result
    }

    /// Lets another thread send the core an event.
    pub fn send_to_core(&self, event: Event) {
        self.decide(|core, outputs| core.apply(event, outputs));
    }

    /// Gives another thread read access to the core.
    pub fn read_core<R>(&self, at: impl FnOnce(&EngineCore) -> R) -> R {
        at(&lock(&self.core))
    }

    /// Delivers outputs to the threads that perform them, and returns the queues to wake. The core is locked
    /// meanwhile, so that every thread gets its outputs in order.
    fn distribute(&self, outputs: &mut Outputs, mut mine: Option<(u16, &mut Outputs)>) -> u8 {
        let mut woken = 0;
        for output in outputs.drain(..) {
            let to = match &output {
                Output::Send { slot, .. } | Output::Complete { slot, .. } => Some(slot.queue),
                Output::Failed(failure) => Some(failure.slot.queue),
                Output::Mark { .. } | Output::Commit { .. } => Some(0),
                Output::Propose { view, honoured, .. } => {
                    self.set_pending(**view, honoured);
                    Some(0)
                }
                Output::Ping { queue, .. } => Some(*queue),
                Output::Drop { .. } => None,
                _ => {
                    self.report(output);
                    continue;
                }
            };
            if let Output::Drop { peer, reason, cause } = &output {
                self.send_event(MainEvent::Dropped { peer: *peer, reason: reason.clone(), cause: *cause });
            }
            match to {
                Some(queue) => woken |= self.hand_over(queue, output, &mut mine),
                None => {
                    for queue in (0..self.mailboxes.len()).filter_map(|at| u16::try_from(at).ok()) {
                        woken |= self.hand_over(queue, output.clone(), &mut mine);
                    }
                }
            }
        }
        woken
    }

    /// Gives `output` to `queue`; returns the queue as a bit if it has to be woken for that.
    fn hand_over(&self, queue: u16, output: Output, mine: &mut Option<(u16, &mut Outputs)>) -> u8 {
        match mine {
            Some((me, outputs)) if *me == queue => {
                outputs.push(output);
                0
            }
            _ => match self.mailboxes.get(usize::from(queue)) {
                Some(mailbox) => {
                    lock(&mailbox.messages).push(QueueMessage::Do(output));
                    1 << queue
                }
                None => 0,
            },
        }
    }

    fn wake(&self, queues: u8) {
        for (at, mailbox) in self.mailboxes.iter().enumerate() {
            if queues & (1 << at) != 0 {
                mailbox.waker.wake();
            }
        }
    }

    /// Sends an output that is for the main thread.
    fn report(&self, output: Output) {
        self.send_event(match output {
            Output::ViewChanged { view } => {
                *lock(&self.pending) = None;
                MainEvent::View(*view)
            }
            Output::AskGrant { view, honoured, stored } => {
                let wanted = GrantWanted { view: *view, honoured: *honoured, stored: *stored };
                MainEvent::AskGrant { wanted: Box::new(wanted) }
            }
            Output::Rebuilt { peer } => MainEvent::Rebuilt { peer },
            Output::Awaited { peer, late_ms, is_silent } => MainEvent::Awaited { peer, late_ms, is_silent },
            Output::Prompt { peer } => MainEvent::Prompt { peer },
            Output::Resynced => MainEvent::Resynced,
            Output::ClearedAll => MainEvent::ClearedAll,
            Output::Expanded { size_bytes } => MainEvent::Expanded { size_bytes },
            Output::ScrubFound { range, odd, repaired } => MainEvent::ScrubFound { range, odd, repaired },
            Output::RotFound { peer, range, is_copied } => MainEvent::RotFound { peer, range, is_copied },
            Output::ScrubDone => MainEvent::ScrubDone,
            Output::Frozen { reason } => MainEvent::Frozen(reason),
            _ => return,
        });
    }

    fn set_pending(&self, view: View, honoured: &ReplicaReport) {
        let mut pending = lock(&self.pending);
        if pending.as_ref().is_none_or(|known| known.view.id < view.id) {
            *pending = Some(PendingView { view, honoured: honoured.clone() });
            self.send_event(MainEvent::Proposed);
        }
    }

    /// Returns the pending view, if any.
    pub fn pending_view(&self) -> Option<PendingView> {
        lock(&self.pending).clone()
    }

    /// Returns true if any request of a frontend is unfinished.
    pub fn has_requests(&self) -> bool {
        lock(&self.core).unfinished() > 0
    }

    /// Takes the messages that others have left for `queue`.
    pub fn take_messages(&self, queue: u16, mine: &mut Vec<QueueMessage>) {
        if let Some(mailbox) = self.mailboxes.get(usize::from(queue)) {
            mine.append(&mut lock(&mailbox.messages));
        }
    }

    /// Gives a queue a connection to a replica that has none there.
    pub fn connect(&self, queue: u16, peer: PeerIndex, ready: ReadyConnection, installed: SyncSender<()>) {
        if let Some(mailbox) = self.mailboxes.get(usize::from(queue)) {
            lock(&mailbox.messages).push(QueueMessage::Connect { peer, ready, installed });
            mailbox.waker.wake();
        }
    }

    /// Records that a queue has gained or lost its connection to a replica. The core already has all messages
    /// of the lost one.
    pub fn set_connected(&self, queue: u16, peer: PeerIndex, is_connected: bool) {
        let Some(queues) = self.connected.get(usize::from(peer)) else { return };
        if is_connected {
            queues.fetch_or(1 << queue, Ordering::AcqRel);
        } else {
            queues.fetch_and(!(1 << queue), Ordering::AcqRel);
        }
    }

    /// Returns true if no queue has a connection to the replica.
    pub fn is_disconnected(&self, peer: PeerIndex) -> bool {
        self.connected.get(usize::from(peer)).is_none_or(|queues| queues.load(Ordering::Acquire) == 0)
    }

    /// Sends an event to the main thread.
    pub fn send_event(&self, event: MainEvent) {
        // The main thread is gone only if the process is ending.
        let _ = self.events.send(event);
    }

    /// Ends the queue threads.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake(u8::MAX);
    }

    /// Returns true if the queue threads have to end.
    pub fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Makes the queues take no more requests, and each send [`MainEvent::Drained`] when all are answered.
    pub fn drain(&self) {
        self.drain.store(true, Ordering::Release);
        self.wake(u8::MAX);
    }

    /// Returns true if no more requests are to be taken.
    pub fn is_draining(&self) -> bool {
        self.drain.load(Ordering::Acquire)
    }
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A thread that panics ends the process: no other thread sees its state.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the milliseconds since the host was booted, with those for which it was suspended.
pub fn boot_time_ms() -> u64 {
    // Every supported kernel has the first clock.
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).or_else(|_| clock_gettime(ClockId::CLOCK_MONOTONIC));
    let now = now.map_or(Duration::ZERO, Duration::from);
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
