//! What a process does step by step (opening a volume, bringing a replica up) is written as async functions. They are polled
//! after every event; there is no other reason for them to go on.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// A task, and the engine process that it dies with.
struct Task {
    owner: u64,
    future: Pin<Box<dyn Future<Output = ()>>>,
}

/// The tasks that are not done.
#[derive(Default)]
pub struct Tasks {
    running: Vec<Task>,
}

impl std::fmt::Debug for Tasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tasks").field("running", &self.running.len()).finish()
    }
}

impl Tasks {
    /// Adds a task of the engine process `owner`.
    pub fn spawn(&mut self, owner: u64, future: impl Future<Output = ()> + 'static) {
        self.running.push(Task { owner, future: Box::pin(future) });
    }

    /// Gives every task a turn; those of processes that are not alive any more are dropped.
    pub fn poll(&mut self, is_alive: impl Fn(u64) -> bool) {
        let mut context = Context::from_waker(Waker::noop());
        self.running.retain_mut(|task| {
            is_alive(task.owner) && task.future.as_mut().poll(&mut context) == Poll::Pending
        });
    }
}

/// Waits until `ready` gives something.
pub async fn until<T>(mut ready: impl FnMut() -> Option<T>) -> T {
    std::future::poll_fn(move |_| ready().map_or(Poll::Pending, Poll::Ready)).await
}
