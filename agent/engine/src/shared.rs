//! What the queue threads share: the core, and a mailbox for each queue.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use shorthorn_core::{EngineCore, Event, Output, Outputs, PeerIndex};
use shorthorn_ring::Waker;
use shorthorn_types::{Generation, View};

/// What the main thread wants to know.
#[derive(Debug)]
pub enum News {
    /// A signal or a client asks the process to end.
    Stop,
    /// The view has changed.
    View(View),
    /// A replica has failed.
    Dropped { peer: PeerIndex, reason: String },
    /// There is no quorum any more.
    Frozen(String),
    /// A newer engine holds the volume.
    Deposed { holder: Generation },
    /// A queue cannot go on.
    QueueFailed { queue: u16, reason: String },
}

/// One core for all queues. With one queue, which is the default, the lock is never contended; with several
/// it is held for some hundred nanoseconds per batch.
#[derive(Debug)]
pub struct Shared {
    core: Mutex<EngineCore>,
    mailboxes: Vec<Mailbox>,
    news: Sender<News>,
    stop: AtomicBool,
    start: Instant,
}

#[derive(Debug)]
struct Mailbox {
    outputs: Mutex<Outputs>,
    waker: Waker,
}

impl Shared {
    pub fn new(core: EngineCore, wakers: Vec<Waker>, news: Sender<News>) -> Shared {
        let mailbox = |waker| Mailbox { outputs: Mutex::new(Vec::new()), waker };
        Shared {
            core: Mutex::new(core),
            mailboxes: wakers.into_iter().map(mailbox).collect(),
            news,
            stop: AtomicBool::new(false),
            start: Instant::now(),
        }
    }

    /// Milliseconds since the engine has started to serve.
    pub fn now_ms(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Gives `events` to the core; what `queue` has to do is appended to `mine`, the rest goes to the other
    /// queues and to the main thread. Returns how many requests are unfinished.
    pub fn apply(&self, queue: u16, events: &mut Vec<Event>, scratch: &mut Outputs, mine: &mut Outputs) {
        {
            let mut core = lock(&self.core);
            for event in events.drain(..) {
                core.apply(event, scratch);
            }
        }
        for output in scratch.drain(..) {
            match owner(&output) {
                Owner::Queue(other) if other == queue => mine.push(output),
                Owner::Queue(other) => self.post(other, output),
                Owner::Every => {
                    for other in (0..self.mailboxes.len()).filter_map(|at| u16::try_from(at).ok()) {
                        if other != queue {
                            self.post(other, output.clone());
                        }
                    }
                    if let Output::Drop { peer, reason } = &output {
                        self.tell(News::Dropped { peer: *peer, reason: reason.clone() });
                    }
                    mine.push(output);
                }
                Owner::Main => match output {
                    Output::ViewChanged { view } => self.tell(News::View(view)),
                    Output::Frozen { reason } => self.tell(News::Frozen(reason)),
                    _ => {}
                },
            }
        }
    }

    /// Whether any request is unfinished.
    pub fn is_busy(&self) -> bool {
        lock(&self.core).unfinished() > 0
    }

    fn post(&self, queue: u16, output: Output) {
        if let Some(mailbox) = self.mailboxes.get(usize::from(queue)) {
            lock(&mailbox.outputs).push(output);
            mailbox.waker.wake();
        }
    }

    /// Takes what other queues have left for `queue`.
    pub fn take_mail(&self, queue: u16, mine: &mut Outputs) {
        if let Some(mailbox) = self.mailboxes.get(usize::from(queue)) {
            mine.append(&mut lock(&mailbox.outputs));
        }
    }

    /// Tells the main thread.
    pub fn tell(&self, news: News) {
        // The main thread has gone only where the process is ending.
        let _ = self.news.send(news);
    }

    /// Ends the queue threads.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        for mailbox in &self.mailboxes {
            mailbox.waker.wake();
        }
    }

    /// Whether the queue threads have to end.
    pub fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

enum Owner {
    Queue(u16),
    Every,
    Main,
}

fn owner(output: &Output) -> Owner {
    match output {
        Output::Send { slot, .. } | Output::Complete { slot, .. } => Owner::Queue(slot.queue),
        Output::Propose { .. } | Output::Commit { .. } => Owner::Queue(0),
        // A replica closes a connection that is silent for long: every queue has to be heard.
        Output::Ping { .. } | Output::Drop { .. } => Owner::Every,
        Output::ViewChanged { .. } | Output::Frozen { .. } => Owner::Main,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A thread that panics takes the process with it: nobody ever sees what it left behind.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
