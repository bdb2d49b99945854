//! Sends Kubernetes events, which people see with their volume.
//!
//! No caller waits for them. Events pass through a bounded queue to one task; if the API server is slower
//! than the events, they are dropped and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event as KubernetesEvent;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;
use shorthorn_controller_core::event_correlator::{About, Correlation, EventCorrelator};
use shorthorn_controller_core::lost_node_pods::Namespaced;
use shorthorn_controller_core::objects::Key;
use shorthorn_controller_core::{Event, Timestamp};
use shorthorn_kube::{FIELD_MANAGER, bounded, kind_name, resource};
use tokio::sync::{mpsc, oneshot};

/// The maximum number of queued events.
const QUEUE_MAX: usize = 256;
/// The time limit of [`EventSender::flush`]. The next leader waits as long.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);
/// The longest text of an event, in bytes; an API server takes no longer one.
const NOTE_BYTES_MAX: usize = 1024;
/// The reporter in events.
const REPORTER: &str = "shorthorn.io/controller";
/// The action in events, which API servers require.
const ACTION: &str = "Reconcile";

/// Queues events for the task that writes them to the API server.
#[derive(Clone, Debug)]
pub struct EventSender {
    sender: mpsc::Sender<QueuedEvent>,
    dropped: Arc<AtomicU64>,
}

/// An event with the uid of the object that it is about, or a barrier in the queue.
#[derive(Debug)]
enum QueuedEvent {
    /// About one of our objects, with its uid if it is known.
    Object(Event, Option<String>),
    /// About a pod.
    Pod(Event<Namespaced>, String),
    /// All events before this barrier are sent or dropped when the receiver gets an answer.
    Flush(oneshot::Sender<()>),
}

/// The task that sends events to the API server.
pub struct EventRecorder {
    client: Client,
    namespace: String,
    instance: String,
    receiver: mpsc::Receiver<QueuedEvent>,
    objects: EventCorrelator,
    pods: EventCorrelator<Namespaced>,
    dropped: Arc<AtomicU64>,
    dropped_before: u64,
}

impl std::fmt::Debug for EventRecorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventRecorder").field("instance", &self.instance).finish_non_exhaustive()
    }
}

/// Creates both ends; `instance` is the name of this controller.
#[must_use]
pub fn events(client: Client, namespace: &str, instance: &str) -> (EventSender, EventRecorder) {
    let (sender, receiver) = mpsc::channel(QUEUE_MAX);
    let dropped = Arc::new(AtomicU64::new(0));
    let recorder = EventRecorder {
        client,
        namespace: namespace.to_owned(),
        instance: instance.to_owned(),
        receiver,
        objects: EventCorrelator::default(),
        pods: EventCorrelator::default(),
        dropped: Arc::clone(&dropped),
        dropped_before: 0,
    };
    (EventSender { sender, dropped }, recorder)
}

impl EventSender {
    /// Sends the event soon, about the object with that uid; drops it if too many wait already.
    pub fn record(&self, event: &Event, uid: Option<&str>) {
        self.send(QueuedEvent::Object(event.clone(), uid.map(str::to_owned)));
    }

    /// Sends an event like [`EventSender::record`], about a pod.
    pub fn record_of_pod(&self, event: Event<Namespaced>, uid: &str) {
        self.send(QueuedEvent::Pod(event, uid.to_owned()));
    }

    fn send(&self, queued: QueuedEvent) {
        if self.sender.try_send(queued).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until all events so far are sent or dropped, for a limited time.
    pub async fn flush(&self) {
        let (sender, flushed) = oneshot::channel();
        let flush = async {
            if self.sender.send(QueuedEvent::Flush(sender)).await.is_ok() {
                // An error: the recorder is gone, and its events with it.
                let _ = flushed.await;
            }
        };
        if tokio::time::timeout(FLUSH_LIMIT, flush).await.is_err() {
            tracing::warn!(
                limit_s = FLUSH_LIMIT.as_secs(),
                "the last events are not recorded in Kubernetes; the log has all of them"
            );
        }
    }

    /// Returns the number of events that were dropped.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

impl EventRecorder {
    /// Sends the queued events, until it is dropped.
    pub async fn run(mut self) {
        while let Some(queued) = self.receiver.recv().await {
            self.warn_of_dropped();
            self.publish(queued).await;
        }
        // No event can be sent any more; the caller of this ends by itself.
        std::future::pending().await
    }

    async fn publish(&mut self, queued: QueuedEvent) {
        let now = Timestamp::now();
        match queued {
            QueuedEvent::Object(event, uid) => {
                let correlation = self.objects.take(&event, now);
                let about = self.of_object(&event.about, uid);
                self.carry_out(correlation, &event, about, now).await;
            }
            QueuedEvent::Pod(event, uid) => {
                let correlation = self.pods.take(&event, now);
                let about = of_pod(&event.about, uid);
                self.carry_out(correlation, &event, about, now).await;
            }
            QueuedEvent::Flush(sender) => {
                // An error: the time of the flush is over.
                let _ = sender.send(());
            }
        }
    }

    async fn carry_out<A: About>(
        &self,
        correlation: Correlation,
        event: &Event<A>,
        about: ObjectReference,
        now: Timestamp,
    ) {
        let namespace = about.namespace.clone().unwrap_or_else(|| self.namespace.clone());
        let api: Api<KubernetesEvent> = Api::namespaced(self.client.clone(), &namespace);
        let done = match correlation {
            Correlation::New(name) => {
                let new = self.new_event(event, about, name, now);
                bounded(api.create(&PostParams::default(), &new)).await.map(drop)
            }
            Correlation::Repeated(name, count) => {
                let series = json!({ "series": { "count": count, "lastObservedTime": MicroTime(now) } });
                let parameters =
                    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
                bounded(api.patch(&name, &parameters, &Patch::Merge(series))).await.map(drop)
            }
            Correlation::Counted => return,
            Correlation::RateLimited => {
                self.dropped.fetch_add(1, Ordering::Relaxed);
                return;
            }
        };
        if let Err(error) = done {
            // It is in the log already, and the next one may get through.
            self.dropped.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(about = event.about.name(), reason = event.reason, %error, "an event was not \
             recorded");
        }
    }

    fn of_object(&self, about: &Key, uid: Option<String>) -> ObjectReference {
        ObjectReference {
            api_version: Some(resource(about.kind).api_version),
            kind: Some(kind_name(about.kind).to_owned()),
            namespace: Some(self.namespace.clone()),
            name: Some(about.name.clone()),
            uid,
            ..ObjectReference::default()
        }
    }

    fn new_event<A>(
        &self,
        event: &Event<A>,
        about: ObjectReference,
        name: String,
        now: Timestamp,
    ) -> KubernetesEvent {
        KubernetesEvent {
            metadata: ObjectMeta {
                name: Some(name),
                namespace: about.namespace.clone(),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(now)),
            type_: Some(if event.warning { "Warning" } else { "Normal" }.to_owned()),
            reason: Some(event.reason.to_owned()),
            action: Some(ACTION.to_owned()),
            note: Some(cut(&event.message)),
            regarding: Some(about),
            reporting_controller: Some(REPORTER.to_owned()),
            reporting_instance: Some(self.instance.clone()),
            ..KubernetesEvent::default()
        }
    }

    fn warn_of_dropped(&mut self) {
        let dropped = self.dropped.load(Ordering::Relaxed);
        if dropped > self.dropped_before {
            let more = dropped - self.dropped_before;
            tracing::warn!(
                more,
                dropped,
                "events were dropped and not recorded in Kubernetes; the log has \
             all of them"
            );
            self.dropped_before = dropped;
        }
    }
}

fn of_pod(about: &Namespaced, uid: String) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(about.namespace.clone()),
        name: Some(about.name.clone()),
        uid: Some(uid),
        ..ObjectReference::default()
    }
}

/// Returns the text, cut to the maximum length.
fn cut(text: &str) -> String {
    const MORE: &str = "...";
    if text.len() <= NOTE_BYTES_MAX {
        return text.to_owned();
    }
    let mut end = NOTE_BYTES_MAX - MORE.len();
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{MORE}", &text[..end])
}

#[cfg(test)]
mod tests {
    use shorthorn_controller_core::objects::Kind;

    use super::*;

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(cut("short"), "short");
        let long = cut(&"é".repeat(NOTE_BYTES_MAX));
        assert!(long.len() <= NOTE_BYTES_MAX && long.ends_with("é..."), "{}", long.len());
    }

    fn unreachable() -> Client {
        Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap()
    }

    fn attached() -> Event {
        let about = Key::new(Kind::Volume, "v");
        Event { about, warning: false, reason: "Attached", message: String::new() }
    }

    #[tokio::test]
    async fn too_many_events_are_dropped_and_counted() {
        let (events, recorder) = events(unreachable(), "n", "me");
        for _ in 0..QUEUE_MAX + 3 {
            events.record(&attached(), Some("uid"));
        }
        assert_eq!(events.dropped(), 3);
        drop(recorder);
        events.record(&attached(), Some("uid"));
        assert_eq!(events.dropped(), 4);
    }

    #[tokio::test]
    async fn a_flush_ends_after_the_events_before_it() {
        let (events, recorder) = events(unreachable(), "n", "me");
        events.record(&attached(), Some("uid"));
        tokio::select! {
            () = recorder.run() => panic!("it ended"),
            () = events.flush() => assert_eq!(events.dropped(), 1, "its call has failed"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_flush_does_not_wait_for_a_recorder_without_end() {
        let (events, recorder) = events(unreachable(), "n", "me");
        events.record(&attached(), Some("uid"));
        let started = tokio::time::Instant::now();
        events.flush().await;
        assert_eq!(started.elapsed().as_secs(), FLUSH_LIMIT.as_secs());
        drop(recorder);
        events.flush().await;
        assert_eq!(
            started.elapsed().as_secs(),
            FLUSH_LIMIT.as_secs(),
            "a recorder that is gone records nothing"
        );
    }
}
