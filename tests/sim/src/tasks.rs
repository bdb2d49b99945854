//! Runs the step-by-step work of a process (opening a volume, rebuilding a replica), which is written as
//! async functions. They are polled only after their process was woken.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// A running task.
pub type TaskFuture = Pin<Box<dyn Future<Output = ()>>>;

/// The tasks of the engine processes that there are.
#[derive(Default)]
pub struct Tasks {
    running: Vec<(u64, TaskFuture)>,
}

impl std::fmt::Debug for Tasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tasks").field("running", &self.running.len()).finish()
    }
}

impl Tasks {
    /// Adds a task of the engine process `owner`.
    pub fn spawn(&mut self, owner: u64, future: impl Future<Output = ()> + 'static) {
        self.running.push((owner, Box::pin(future)));
    }

    /// Gives the tasks of `owner` a turn.
    pub fn poll(&mut self, owner: u64) {
        let mut context = Context::from_waker(Waker::noop());
        self.running
            .retain_mut(|(of, task)| *of != owner || task.as_mut().poll(&mut context) == Poll::Pending);
    }

    /// Drops the tasks of a process that is gone.
    pub fn drop_those_of(&mut self, owner: u64) {
        self.running.retain(|(of, _)| *of != owner);
    }
}

/// Waits until `ready` gives something.
pub async fn until<T>(mut ready: impl FnMut() -> Option<T>) -> T {
    std::future::poll_fn(move |_| ready().map_or(Poll::Pending, Poll::Ready)).await
}

/// Runs all of them side by side until every one has ended. Their results come in the same order.
pub async fn all<T, F: Future<Output = T> + Unpin>(mut all: Vec<F>) -> Vec<T> {
    let mut results: Vec<Option<T>> = all.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, result) in all.iter_mut().zip(&mut results).filter(|(_, result)| result.is_none()) {
            if let Poll::Ready(value) = Pin::new(future).poll(context) {
                *result = Some(value);
            }
        }
        if results.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    results.into_iter().flatten().collect()
}
