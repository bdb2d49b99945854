//! The queue of objects to reconcile.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shorthorn_controller_core::objects::Key;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::backoff::backoff;

/// The objects to reconcile. Each is handed out once for all that has changed before, and never again before
/// the run over it has ended. So the queue is as long as the store at most. Urgent ones come first.
#[derive(Default)]
pub struct WorkQueue {
    state: Mutex<QueueState>,
    wake: Notify,
    /// A place for a replica may have opened.
    opened: Notify,
    is_urgent: Option<Box<IsUrgent>>,
}

/// Returns true if a run over an object is urgent now.
type IsUrgent = dyn Fn(&Key) -> bool + Send + Sync;

#[derive(Debug, Default)]
struct QueueState {
    urgent: VecDeque<Key>,
    /// An object that has become urgent since it was added keeps its place here, and is passed over.
    ready: VecDeque<Key>,
    /// The objects in `ready`.
    in_ready: HashSet<Key>,
    /// The queued objects, and whether each is urgent.
    queued: HashMap<Key, bool>,
    /// The objects of running reconcilers.
    active: HashSet<Key>,
    /// Objects that changed while their reconciler was running.
    again: HashSet<Key>,
    timers: BTreeSet<(Instant, Key)>,
    timer_of: HashMap<Key, Instant>,
    failures: HashMap<Key, u32>,
}

/// The result of a run over an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOutcome {
    /// The run is complete. The object runs again after that time, if given.
    Done(Option<Duration>),
    /// The run has failed. It is repeated with growing pauses.
    Failed,
}

/// The number of objects in each part of the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// Objects that wait for a worker.
    pub ready: usize,
    /// Objects in work.
    pub active: usize,
    /// Objects with a known time of their next run.
    pub timed: usize,
}

impl std::fmt::Debug for WorkQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkQueue").field("state", &self.state).finish_non_exhaustive()
    }
}

impl WorkQueue {
    /// Creates an empty queue, in which no object is urgent.
    #[must_use]
    pub fn new() -> WorkQueue {
        WorkQueue::default()
    }

    /// Creates an empty queue.
    #[must_use]
    pub fn with_urgent(is_urgent: impl Fn(&Key) -> bool + Send + Sync + 'static) -> WorkQueue {
        WorkQueue { is_urgent: Some(Box::new(is_urgent)), ..WorkQueue::default() }
    }

    fn is_urgent(&self, key: &Key) -> bool {
        self.is_urgent.as_ref().is_some_and(|is_urgent| is_urgent(key))
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of objects in each part.
    pub fn depth(&self) -> Depth {
        let state = self.state();
        Depth { ready: state.queued.len(), active: state.active.len(), timed: state.timers.len() }
    }

    /// Has the objects looked at soon.
    pub fn add(&self, keys: impl IntoIterator<Item = Key>) {
        // Before the lock is taken: the cluster state has one of its own.
        let keys: Vec<(Key, bool)> = keys
            .into_iter()
            .map(|key| {
                let is_urgent = self.is_urgent(&key);
                (key, is_urgent)
            })
            .collect();
        let mut state = self.state();
        for (key, is_urgent) in keys {
            state.add(key, is_urgent);
        }
        drop(state);
        self.wake.notify_one();
    }

    /// Has the volumes looked at that wait for places, a few at a time.
    pub fn open_places(&self) {
        self.opened.notify_one();
    }

    /// Waits until a place may have opened. For one caller only.
    pub(super) async fn places_opened(&self) {
        self.opened.notified().await;
    }

    /// Returns the next object, or the next urgent one; waits until one is ready. For one caller only.
    pub async fn next(&self, only_urgent: bool) -> Key {
        loop {
            let due = self.state().take_due(Instant::now());
            if !due.is_empty() {
                self.add(due);
            }
            let deadline = {
                let mut state = self.state();
                if let Some(key) = state.take(only_urgent) {
                    return key;
                }
                state.timers.first().map(|(deadline, _)| *deadline)
            };
            let timer = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            // A notification that came since the lock was released is kept for us.
            tokio::select! {
                () = self.wake.notified() => {}
                () = timer => {}
            }
        }
    }

    /// Ends the run over `key`.
    pub fn done(&self, key: &Key, outcome: RunOutcome) {
        let mut state = self.state();
        state.active.remove(key);
        let wait = match outcome {
            RunOutcome::Done(wait) => {
                state.failures.remove(key);
                wait
            }
            RunOutcome::Failed => {
                let failures = state.failures.entry(key.clone()).or_default();
                *failures = failures.saturating_add(1);
                Some(backoff(*failures))
            }
        };
        let is_again = state.again.remove(key);
        if !is_again && let Some(wait) = wait {
            state.set_timer(key, Instant::now() + wait);
        }
        drop(state);
        if is_again {
            self.add([key.clone()]);
        }
        self.wake.notify_one();
    }
}

impl QueueState {
    fn add(&mut self, key: Key, is_urgent: bool) {
        if self.active.contains(&key) {
            self.again.insert(key);
            return;
        }
        match self.queued.get_mut(&key) {
            Some(was_urgent) if *was_urgent || !is_urgent => {}
            Some(was_urgent) => {
                *was_urgent = true;
                self.urgent.push_back(key);
            }
            None => {
                self.queued.insert(key.clone(), is_urgent);
                if is_urgent {
                    self.urgent.push_back(key);
                } else if self.in_ready.insert(key.clone()) {
                    self.ready.push_back(key);
                }
            }
        }
    }

    fn take(&mut self, only_urgent: bool) -> Option<Key> {
        let key = match self.urgent.pop_front() {
            Some(key) => key,
            None if only_urgent => return None,
            None => self.take_ready()?,
        };
        self.queued.remove(&key);
        // The run that begins now decides again when to look again.
        if let Some(deadline) = self.timer_of.remove(&key) {
            self.timers.remove(&(deadline, key.clone()));
        }
        self.active.insert(key.clone());
        Some(key)
    }

    fn take_ready(&mut self) -> Option<Key> {
        while let Some(key) = self.ready.pop_front() {
            self.in_ready.remove(&key);
            if self.queued.get(&key) == Some(&false) {
                return Some(key);
            }
        }
        None
    }

    fn set_timer(&mut self, key: &Key, deadline: Instant) {
        if let Some(older) = self.timer_of.insert(key.clone(), deadline) {
            self.timers.remove(&(older, key.clone()));
        }
        self.timers.insert((deadline, key.clone()));
    }

    fn take_due(&mut self, now: Instant) -> Vec<Key> {
        let mut due = Vec::new();
        while let Some((deadline, _)) = self.timers.first()
            && *deadline <= now
        {
            let Some((_, key)) = self.timers.pop_first() else { break };
            self.timer_of.remove(&key);
            due.push(key);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use shorthorn_controller_core::objects::Kind;

    use super::*;

    fn key(name: &str) -> Key {
        Key::new(Kind::Volume, name)
    }

    #[tokio::test(start_paused = true)]
    async fn hands_each_object_out_once_at_a_time() {
        let queue = WorkQueue::new();
        queue.add([key("a"), key("a"), key("b")]);
        assert_eq!(queue.depth(), Depth { ready: 2, active: 0, timed: 0 });
        assert_eq!(queue.next(false).await, key("a"));
        queue.add([key("a"), key("a")]);
        assert_eq!(queue.next(false).await, key("b"));
        assert!(tokio::time::timeout(Duration::from_secs(60), queue.next(false)).await.is_err());
        assert_eq!(queue.depth(), Depth { ready: 0, active: 2, timed: 0 });
        queue.done(&key("a"), RunOutcome::Done(None));
        assert_eq!(queue.next(false).await, key("a"));
        queue.done(&key("a"), RunOutcome::Done(None));
        queue.done(&key("b"), RunOutcome::Done(None));
        assert!(tokio::time::timeout(Duration::from_secs(60), queue.next(false)).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn hands_urgent_objects_out_first_and_beyond_the_others() {
        let is_urgent = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&is_urgent);
        let queue = WorkQueue::with_urgent(move |key| key.name == "u" || seen.load(Ordering::Relaxed));
        queue.add([key("a"), key("b"), key("u")]);
        assert_eq!(queue.next(true).await, key("u"));
        // It becomes urgent while it waits, and is handed out once.
        is_urgent.store(true, Ordering::Relaxed);
        queue.add([key("b")]);
        assert_eq!(queue.depth(), Depth { ready: 2, active: 1, timed: 0 });
        assert_eq!(queue.next(true).await, key("b"));
        is_urgent.store(false, Ordering::Relaxed);
        assert!(tokio::time::timeout(Duration::from_secs(60), queue.next(true)).await.is_err());
        assert_eq!(queue.next(false).await, key("a"));
        // Its first place in the other lane does not count for later changes.
        queue.done(&key("b"), RunOutcome::Done(None));
        queue.add([key("b")]);
        assert_eq!(queue.next(false).await, key("b"));
        assert!(tokio::time::timeout(Duration::from_secs(60), queue.next(false)).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn requeues_on_request_and_backs_off_after_failures() {
        let queue = WorkQueue::new();
        queue.add([key("a")]);
        let mut waits = Vec::new();
        for outcome in
            [RunOutcome::Done(Some(Duration::from_secs(3))), RunOutcome::Failed, RunOutcome::Failed]
        {
            let taken = queue.next(false).await;
            let start = Instant::now();
            queue.done(&taken, outcome);
            let again = queue.next(false).await;
            waits.push(start.elapsed().as_millis());
            queue.done(&again, outcome);
        }
        // Each outcome is given twice; the waits between are those after its first.
        assert!((3000..3010).contains(&waits[0]) && (50..60).contains(&waits[1]), "{waits:?}");
        assert!((200..210).contains(&waits[2]), "{waits:?}");
    }
}
