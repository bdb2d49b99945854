//! The lease of this controller, and the tasks that act while it has the lease.

use async_trait::async_trait;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::ServeError;
use crate::kubernetes::events::EventSender;
use crate::kubernetes::lease_thread::LeaseThread;

/// Receives the outcome of each call before the lease is held: an error, or none.
pub(super) type Looked<'a> = &'a (dyn Fn(Option<String>) + Sync);

/// The lease of a leader.
#[async_trait]
pub(super) trait Lease: Send {
    /// Waits until this controller has the lease, and returns its number as a leader.
    async fn acquired(&mut self, looked: Looked<'_>) -> Result<Option<u64>, String>;

    /// Returns the reason once the lease is lost.
    async fn lost(&mut self) -> String;

    /// Gives the lease back, so that the next controller need not wait.
    async fn release(self: Box<Self>);
}

#[async_trait]
impl Lease for LeaseThread {
    async fn acquired(&mut self, looked: Looked<'_>) -> Result<Option<u64>, String> {
        LeaseThread::acquired(self, looked).await
    }

    async fn lost(&mut self) -> String {
        LeaseThread::lost(self).await
    }

    async fn release(self: Box<Self>) {
        LeaseThread::release(*self).await;
    }
}

/// The tasks of a controller that leads, and its lease. The tasks end before the lease is released: another
/// controller may act from then on.
pub(super) struct LeaderTasks {
    /// None: the store has one controller at a time.
    lease: Option<Box<dyn Lease>>,
    /// True once this controller serves as the leader.
    serves: watch::Sender<bool>,
    /// The tasks, which end when this is dropped.
    tasks: JoinSet<()>,
    /// The events, which one of the tasks sends; none outside of Kubernetes.
    events: Option<EventSender>,
}

impl LeaderTasks {
    /// Returns those of a controller whose store has one controller at a time.
    pub(super) fn alone() -> LeaderTasks {
        LeaderTasks { lease: None, serves: watch::Sender::new(false), tasks: JoinSet::new(), events: None }
    }

    /// Returns those of a controller that needs the lease.
    pub(super) fn with_lease(lease: impl Lease + 'static) -> LeaderTasks {
        LeaderTasks { lease: Some(Box::new(lease)), ..LeaderTasks::alone() }
    }

    /// Waits until this controller has its lease, and returns its number as a leader.
    ///
    /// # Errors
    /// [`ServeError::LeaseLost`].
    pub(super) async fn acquired(&mut self, looked: Looked<'_>) -> Result<Option<u64>, ServeError> {
        match &mut self.lease {
            Some(lease) => lease.acquired(looked).await.map_err(ServeError::LeaseLost),
            None => Ok(None),
        }
    }

    /// Returns the flag that is true once this controller serves as the leader.
    pub(super) fn serves(&self) -> watch::Receiver<bool> {
        self.serves.subscribe()
    }

    /// Notifies the tasks that this controller serves as the leader.
    pub(super) fn announce(&self) {
        self.serves.send_replace(true);
    }

    /// Starts a task that acts for the leader.
    pub(super) fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Has the release wait until the task that sends these events has sent all of them.
    pub(super) fn flush_at_release(&mut self, events: EventSender) {
        self.events = Some(events);
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.tasks.len()
    }

    /// Returns the error once the lease is lost; never returns without a lease.
    pub(super) async fn lost(&mut self) -> ServeError {
        match &mut self.lease {
            Some(lease) => ServeError::LeaseLost(lease.lost().await),
            None => std::future::pending().await,
        }
    }

    /// Returns the result of `work`, unless the lease is lost before.
    ///
    /// # Errors
    /// [`ServeError::LeaseLost`].
    pub(super) async fn during<T>(&mut self, work: impl Future<Output = T>) -> Result<T, ServeError> {
        tokio::select! {
            done = work => Ok(done),
            error = self.lost() => Err(error),
        }
    }

    /// Ends the tasks, and lets another controller lead at once. Queued events are sent before, as long as
    /// that does not take too long: no later controller would send them.
    pub(super) async fn release(mut self) {
        if let Some(lease) = self.lease.take() {
            if let Some(events) = self.events.take() {
                events.flush().await;
            }
            self.tasks.shutdown().await;
            lease.release().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use shorthorn_controller_core::Event;
    use shorthorn_controller_core::objects::{Key, Kind};

    use super::*;
    use crate::kubernetes::events::events;

    /// A lease that this controller has until the test takes it. Its release records whether the task has
    /// ended before.
    struct FakeLease {
        taken: watch::Receiver<bool>,
        task: Arc<()>,
        was_alone: watch::Sender<Option<bool>>,
    }

    #[async_trait]
    impl Lease for FakeLease {
        async fn acquired(&mut self, looked: Looked<'_>) -> Result<Option<u64>, String> {
            looked(Some("no route".to_owned()));
            if *self.taken.borrow() { Err("another leads".to_owned()) } else { Ok(Some(7)) }
        }

        async fn lost(&mut self) -> String {
            let _ = self.taken.wait_for(|taken| *taken).await;
            "another leads".to_owned()
        }

        async fn release(self: Box<Self>) {
            self.was_alone.send_replace(Some(Arc::strong_count(&self.task) == 2));
        }
    }

    /// The hands of a test on a lease.
    struct Hands {
        take: watch::Sender<bool>,
        task: Arc<()>,
        was_alone: watch::Receiver<Option<bool>>,
    }

    fn leader() -> (LeaderTasks, Hands) {
        let (take, taken) = watch::channel(false);
        let (released, was_alone) = watch::channel(None);
        let task = Arc::new(());
        let lease = FakeLease { taken, task: Arc::clone(&task), was_alone: released };
        (LeaderTasks::with_lease(lease), Hands { take, task, was_alone })
    }

    #[tokio::test]
    async fn the_tasks_end_before_the_lease_is_released() {
        let (mut leader, hands) = leader();
        let (held, serves) = (Arc::clone(&hands.task), leader.serves());
        leader.spawn(async move {
            std::future::pending::<()>().await;
            drop(held);
        });
        assert!(!*serves.borrow());
        leader.announce();
        assert!(*serves.borrow());
        leader.release().await;
        assert_eq!(*hands.was_alone.borrow(), Some(true));
    }

    #[tokio::test]
    async fn queued_events_are_sent_before_the_tasks_end() {
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let (events, recorder) = events(config.try_into().unwrap(), "n", "me");
        let (mut leader, hands) = leader();
        leader.spawn(recorder.run());
        leader.flush_at_release(events.clone());
        let about = Key::new(Kind::Volume, "v");
        let event = Event { about, warning: true, reason: "InvalidSpec", message: String::new() };
        events.record(&event, Some("uid"));
        leader.release().await;
        assert_eq!(events.dropped(), 1, "its call has failed");
        assert!(hands.was_alone.borrow().is_some());
    }

    #[tokio::test]
    async fn work_ends_with_the_lease() {
        let (mut leader, hands) = leader();
        let (sender, heard) = std::sync::mpsc::channel();
        assert_eq!(leader.acquired(&|error| sender.send(error).unwrap()).await.unwrap(), Some(7));
        assert_eq!(heard.try_recv().unwrap().as_deref(), Some("no route"));
        assert_eq!(leader.during(async { 3 }).await.unwrap(), 3);
        hands.take.send_replace(true);
        let ended = leader.during(std::future::pending::<()>()).await;
        assert!(
            matches!(&ended, Err(ServeError::LeaseLost(reason)) if reason == "another leads"),
            "{ended:?}"
        );
        let refused = leader.acquired(&|_| {}).await;
        assert!(matches!(refused, Err(ServeError::LeaseLost(_))));
        drop(leader);
        assert_eq!(*hands.was_alone.borrow(), None, "a lost lease is not given back");
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_for_one_controller_has_no_lease_to_lose() {
        let mut alone = LeaderTasks::alone();
        assert_eq!(alone.acquired(&|_| {}).await.unwrap(), None);
        assert!(tokio::time::timeout(Duration::from_secs(60), alone.lost()).await.is_err());
        assert_eq!(alone.during(async { 3 }).await.unwrap(), 3);
        alone.release().await;
    }
}
