use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shorthorn_controller_core::objects::Key;
use tokio::sync::Notify;
use tokio::time::Instant;

/// The first wait after a failure.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
/// The longest wait after repeated failures.
const BACKOFF_MAX: Duration = Duration::from_secs(10);

/// The objects that are to be looked at. Each is in it at most once, so it is as long as the store at
/// most; an object is never handed out again before the run over it has ended.
#[derive(Debug, Default)]
pub struct Queue {
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct State {
    ready: VecDeque<Key>,
    /// What is in `ready`.
    queued: HashSet<Key>,
    /// What is being worked on.
    active: HashSet<Key>,
    /// What changed while it was being worked on.
    again: HashSet<Key>,
    timers: BTreeSet<(Instant, Key)>,
    timer_of: HashMap<Key, Instant>,
    failures: HashMap<Key, u32>,
}

/// How a run over an object ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything was done; look again after that time, where one is given.
    Done(Option<Duration>),
    /// Something failed; try again, ever later.
    Failed,
}

/// How many objects are in which part of the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// They wait for a worker.
    pub ready: usize,
    /// They are being worked on.
    pub active: usize,
    /// They are looked at again at a time that is known.
    pub timed: usize,
}

impl Queue {
    /// An empty queue.
    #[must_use]
    pub fn new() -> Queue {
        Queue::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many objects are in which part of it.
    pub fn depth(&self) -> Depth {
        let state = self.state();
        Depth { ready: state.ready.len(), active: state.active.len(), timed: state.timers.len() }
    }

    /// Has the objects looked at soon.
    pub fn add(&self, keys: impl IntoIterator<Item = Key>) {
        let mut state = self.state();
        for key in keys {
            state.add(key);
        }
        drop(state);
        self.wake.notify_one();
    }

    /// The next object; waits until there is one. For one caller only.
    pub async fn next(&self) -> Key {
        loop {
            let deadline = {
                let mut state = self.state();
                state.move_due(Instant::now());
                if let Some(key) = state.take() {
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

    /// The run over `key` has ended.
    pub fn done(&self, key: &Key, outcome: Outcome) {
        let mut state = self.state();
        state.active.remove(key);
        let wait = match outcome {
            Outcome::Done(wait) => {
                state.failures.remove(key);
                wait
            }
            Outcome::Failed => {
                let failures = state.failures.entry(key.clone()).or_default();
                *failures = failures.saturating_add(1);
                Some(backoff(*failures))
            }
        };
        if state.again.remove(key) {
            state.add(key.clone());
        } else if let Some(wait) = wait {
            state.set_timer(key, Instant::now() + wait);
        }
        drop(state);
        self.wake.notify_one();
    }
}

impl State {
    fn add(&mut self, key: Key) {
        if self.active.contains(&key) {
            self.again.insert(key);
        } else if self.queued.insert(key.clone()) {
            self.ready.push_back(key);
        }
    }

    fn take(&mut self) -> Option<Key> {
        let key = self.ready.pop_front()?;
        self.queued.remove(&key);
        // The run that begins now decides anew when to look again.
        if let Some(deadline) = self.timer_of.remove(&key) {
            self.timers.remove(&(deadline, key.clone()));
        }
        self.active.insert(key.clone());
        Some(key)
    }

    fn set_timer(&mut self, key: &Key, deadline: Instant) {
        if let Some(older) = self.timer_of.insert(key.clone(), deadline) {
            self.timers.remove(&(older, key.clone()));
        }
        self.timers.insert((deadline, key.clone()));
    }

    fn move_due(&mut self, now: Instant) {
        while let Some((deadline, _)) = self.timers.first()
            && *deadline <= now
        {
            let Some((_, key)) = self.timers.pop_first() else { return };
            self.timer_of.remove(&key);
            self.add(key);
        }
    }
}

/// The wait before the try after that many failures.
pub(crate) fn backoff(failures: u32) -> Duration {
    let factor = 1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
    BACKOFF_MIN.saturating_mul(factor).min(BACKOFF_MAX)
}

#[cfg(test)]
mod tests {
    use shorthorn_controller_core::objects::Kind;

    use super::*;

    fn key(name: &str) -> Key {
        Key::new(Kind::Volume, name)
    }

    #[tokio::test(start_paused = true)]
    async fn hands_each_object_out_once_at_a_time() {
        let queue = Queue::new();
        queue.add([key("a"), key("a"), key("b")]);
        assert_eq!(queue.depth(), Depth { ready: 2, active: 0, timed: 0 });
        assert_eq!(queue.next().await, key("a"));
        queue.add([key("a"), key("a")]);
        assert_eq!(queue.next().await, key("b"));
        assert!(tokio::time::timeout(Duration::from_secs(60), queue.next()).await.is_err());
        assert_eq!(queue.depth(), Depth { ready: 0, active: 2, timed: 0 });
        queue.done(&key("a"), Outcome::Done(None));
        assert_eq!(queue.next().await, key("a"));
        queue.done(&key("a"), Outcome::Done(None));
        queue.done(&key("b"), Outcome::Done(None));
        assert!(tokio::time::timeout(Duration::from_secs(60), queue.next()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn looks_again_when_asked_to_and_backs_off_after_failures() {
        let queue = Queue::new();
        queue.add([key("a")]);
        let mut waits = Vec::new();
        for outcome in [Outcome::Done(Some(Duration::from_secs(3))), Outcome::Failed, Outcome::Failed] {
            let taken = queue.next().await;
            let start = Instant::now();
            queue.done(&taken, outcome);
            let again = queue.next().await;
            waits.push(start.elapsed().as_millis());
            queue.done(&again, outcome);
        }
        // Each outcome is given twice; the waits between are those after its first.
        assert!((3000..3010).contains(&waits[0]) && (50..60).contains(&waits[1]), "{waits:?}");
        assert!((200..210).contains(&waits[2]), "{waits:?}");
        assert_eq!(backoff(u32::MAX), BACKOFF_MAX);
    }
}
