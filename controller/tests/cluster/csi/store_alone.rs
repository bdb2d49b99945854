//! The service over a store alone: the tests play the reconcilers.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use kube::client::Body;
use serde_json::Value;
use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::volume_capability::access_mode::Mode;
use shorthorn_controller::agents::Fleet;
use shorthorn_controller::csi::CsiController;
use shorthorn_controller::kubernetes::events::{EventSender, events};
use shorthorn_controller::metrics::Metrics;
use shorthorn_controller::store::{MemoryStore, ObjectStore};
use shorthorn_controller::work::WorkQueue;
use shorthorn_controller_core::Timestamp;
use shorthorn_controller_core::objects::{
    ConditionType, Finding, Metadata, NEXT_ATTACH, Node, NodeSpec, NodeStatus, Object, Volume, VolumeState,
};
use shorthorn_controller_core::reconcile::Settings;
use shorthorn_testkit::waiting::wait_for_async;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::Code;
use tower::service_fn;

use super::{Cases, GIB, with_mode};
use crate::support::cluster::LIMIT;
use crate::support::csi::*;

/// The service over a store in memory, reconciled only by the test.
struct Alone {
    store: Arc<MemoryStore>,
    csi: Caller,
    stop: watch::Sender<bool>,
    _directory: tempfile::TempDir,
}

impl Alone {
    fn start() -> Alone {
        Alone::start_with(None)
    }

    fn start_with(events: Option<EventSender>) -> Alone {
        let store = Arc::new(MemoryStore::new());
        let shared: Arc<dyn ObjectStore> = Arc::<MemoryStore>::clone(&store);
        let fleet = Fleet::new(
            &Default::default(),
            Arc::clone(&shared),
            Arc::new(WorkQueue::new()),
            Metrics::default(),
        )
        .unwrap();
        let (stop, stopping) = watch::channel(false);
        let service = CsiController::new(shared, fleet, stopping, Settings::default(), Metrics::default())
            .with_events(events);
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("csi.sock");
        let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let router = tonic::transport::Server::builder().add_service(service.server());
        tokio::spawn(router.serve_with_incoming(incoming));
        Alone { store, csi: Caller::new(&socket), stop, _directory: directory }
    }

    /// Waits until the volume looks like that.
    async fn until(&self, seen: impl Fn(&Volume) -> bool) -> Volume {
        let mut changes = self.store.changes();
        let look = async {
            loop {
                let volume = self.store.state().volumes.get("v").cloned();
                if let Some(volume) = volume.filter(|volume| seen(volume)) {
                    return volume;
                }
                changes.recv().await.unwrap();
            }
        };
        tokio::time::timeout(LIMIT, look).await.unwrap()
    }

    async fn change(&self, change: impl FnOnce(&mut Volume)) {
        let mut volume = self.store.state().volumes["v"].clone();
        change(&mut volume);
        self.store.put(Object::Volume(volume)).await.unwrap();
    }

    /// Makes a volume of 1 GiB that has its places.
    async fn volume(&self) {
        let mut csi = self.csi.clone();
        let creating = tokio::spawn(async move { csi.create(create("v")).await });
        self.until(|_| true).await;
        self.change(|volume| volume.status.state = VolumeState::Detached).await;
        creating.await.unwrap().unwrap();
    }

    fn expanding(
        &self,
        required_bytes: i64,
    ) -> tokio::task::JoinHandle<Outcome<v1::ControllerExpandVolumeResponse>> {
        let mut csi = self.csi.clone();
        tokio::spawn(async move { csi.expand(expand("v", required_bytes)).await })
    }
}

#[tokio::test]
async fn an_expansion_ends_when_the_current_size_has_grown() {
    let mut alone = Alone::start();
    alone.volume().await;
    let answer = alone.csi.expand(expand("v", GIB)).await.unwrap();
    assert_eq!((answer.capacity_bytes, answer.node_expansion_required), (GIB, true));
    for (capability, node) in [(Some(file_system("xfs")), true), (None, true), (Some(block()), false)] {
        let has = alone.until(|_| true).await.current_size_bytes();
        let wanted = has + 4096;
        let request = v1::ControllerExpandVolumeRequest {
            capacity_range: range(i64::try_from(wanted - 1).unwrap(), 0),
            volume_capability: capability,
            ..expand("v", 0)
        };
        let mut csi = alone.csi.clone();
        let growing = tokio::spawn(async move { csi.expand(request).await });
        let volume = alone.until(|volume| volume.spec.size == wanted).await;
        assert_eq!(volume.current_size_bytes(), has);
        assert!(!growing.is_finished());
        // Half of the way is not enough.
        alone.change(|volume| volume.status.current_size = Some(wanted - 1)).await;
        alone.change(|volume| volume.status.current_size = Some(wanted)).await;
        let answer = growing.await.unwrap().unwrap();
        assert_eq!(answer.capacity_bytes, i64::try_from(wanted).unwrap());
        assert_eq!(answer.node_expansion_required, node);
    }
    let mut table = Cases::default();
    let with = |capacity_range| v1::ControllerExpandVolumeRequest { capacity_range, ..expand("v", 0) };
    let many = Some(with_mode(Mode::MultiNodeMultiWriter));
    let invalid = Code::InvalidArgument;
    for (what, request, code, words) in [
        ("nothing", v1::ControllerExpandVolumeRequest::default(), invalid, "volume_id"),
        ("no range", with(None), invalid, "capacity_range is missing"),
        ("an empty range", with(range(0, 0)), invalid, "capacity_range is missing"),
        ("a negative size", with(range(-1, 0)), invalid, "-1"),
        ("a limit below", with(range(2, 1)), Code::OutOfRange, "limit"),
        ("smaller", with(range(4096, 4096)), Code::OutOfRange, "cannot become smaller"),
        ("too large", with(range((1 << 44) + 1, 0)), Code::OutOfRange, "largest"),
        (
            "many nodes",
            v1::ControllerExpandVolumeRequest { volume_capability: many, ..expand("v", GIB) },
            invalid,
            "one node",
        ),
        ("no such volume", expand("w", GIB), Code::NotFound, "no volume w"),
        ("less than there is", expand("v", 1), Code::Ok, ""),
    ] {
        table.expect(what, alone.csi.expand(request).await, code, words);
    }
    table.done();
}

#[tokio::test]
async fn a_volume_that_cannot_grow_in_use_grows_later_and_can_be_unpublished() {
    let alone = Alone::start();
    alone.volume().await;
    let growing = alone.expanding(2 * GIB);
    alone.until(|volume| volume.spec.size > 1 << 30).await;
    // A caller that waits for a size does not block others.
    let mut csi = alone.csi.clone();
    assert_eq!(csi.unpublish("v", "a").await, Ok(()));
    assert!(!growing.is_finished());
    alone
        .change(|volume| {
            volume.status.state = VolumeState::Attached;
            let waits = Finding::wrong(NEXT_ATTACH, "when it is attached again");
            volume.status.conditions.set(ConditionType::Expanded, waits, Timestamp::now());
        })
        .await;
    let block = v1::ControllerExpandVolumeRequest {
        volume_capability: Some(with_mode(Mode::SingleNodeWriter)),
        ..expand("v", 2 * GIB)
    };
    for answer in [growing.await.unwrap(), csi.expand(expand("v", 2 * GIB)).await, csi.expand(block).await] {
        let answer = answer.unwrap();
        assert_eq!((answer.capacity_bytes, answer.node_expansion_required), (2 * GIB, true));
    }
}

#[tokio::test]
async fn one_call_at_a_time_for_each_volume() {
    let alone = Alone::start();
    alone.volume().await;
    let mut csi = alone.csi.clone();
    alone.change(|volume| volume.status.state = VolumeState::Creating).await;
    let creating = tokio::spawn(async move { csi.create(create("v")).await });
    let mut csi = alone.csi.clone();
    let closed = async || match code(&csi.unpublish("v", "a").await) {
        Code::Aborted => Ok(()),
        other => Err(other),
    };
    wait_for_async("the gate is closed", LIMIT, closed).await;
    let answers = [
        csi.create(create("v")).await.map(drop),
        csi.expand(expand("v", 2 * GIB)).await.map(drop),
        csi.publish(publish("v", "a")).await,
        csi.unpublish("v", "a").await,
        csi.delete("v").await,
    ];
    for answer in answers {
        let (code, text) = answer.unwrap_err();
        assert!(code == Code::Aborted && text.contains("under way"), "{code:?}: {text}");
    }
    // Other volumes do not wait for it, nor do read-only calls.
    assert_eq!(csi.delete("w").await, Ok(()));
    assert_eq!(csi.ids().await, ["v"]);
    // The call of a caller that disconnects ends too.
    creating.abort();
    alone.change(|volume| volume.status.state = VolumeState::Detached).await;
    let open = async || match code(&csi.unpublish("v", "a").await) {
        Code::Aborted => Err(()),
        _ => Ok(()),
    };
    wait_for_async("the gate is open again", LIMIT, open).await;
    // So does one whose time is over.
    let mut hasty = Caller { timeout: Duration::from_millis(200), ..csi.clone() };
    let (code, text) = hasty.expand(expand("v", 2 * GIB)).await.unwrap_err();
    assert!(code == Code::DeadlineExceeded && text.contains("volume v is detached"), "{code:?}: {text}");
    alone.change(|volume| volume.status.current_size = Some(2 << 30)).await;
    csi.expand(expand("v", 2 * GIB)).await.unwrap();
}

#[tokio::test]
async fn calls_do_not_wait_for_deleted_volumes_or_a_stopping_controller() {
    let mut alone = Alone::start();
    let mut csi = alone.csi.clone();
    let creating = tokio::spawn(async move { csi.create(create("v")).await });
    let volume = alone.until(|_| true).await;
    alone
        .store
        .remove(&Object::Volume(volume.clone()).key(), volume.metadata.resource_version)
        .await
        .unwrap();
    assert_eq!(code(&creating.await.unwrap()), Code::Aborted);
    alone.volume().await;
    let growing = alone.expanding(2 * GIB);
    alone.until(|volume| volume.spec.size > 1 << 30).await;
    alone.stop.send(true).unwrap();
    assert_eq!(code(&growing.await.unwrap()), Code::Unavailable);
    // A completed one is answered all the same.
    assert_eq!(code(&alone.csi.expand(expand("v", 2 * GIB)).await), Code::Unavailable);
    assert_eq!(alone.csi.expand(expand("v", GIB)).await.unwrap().capacity_bytes, GIB);
}

/// The limit is that of NodeGetInfo for kubelet, whose own count can be wrong.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_takes_no_more_volumes_than_its_agent_allows() {
    let alone = Alone::start();
    let status = NodeStatus { max_volumes: Some(1), ..NodeStatus::default() };
    let node = Node { metadata: Metadata::new("a", Timestamp::now()), spec: NodeSpec::default(), status };
    alone.store.put(Object::Node(node)).await.unwrap();
    alone.volume().await;
    let volume = alone.until(|_| true).await;
    let mut other = Volume { metadata: Metadata::new("w", Timestamp::now()), ..volume };
    other.spec.volume_name = "w".parse().unwrap();
    other.spec.csi_name = Some("w".to_owned());
    alone.store.put(Object::Volume(other)).await.unwrap();
    // Two at once: one of them gets the place, and waits for its reconcilers.
    let (mut one, mut two) = (alone.csi.clone(), alone.csi.clone());
    let refused = tokio::select! {
        answer = async { one.publish(publish("v", "a")).await } => answer,
        answer = async { two.publish(publish("w", "a")).await } => answer,
    };
    let (code, text) = refused.unwrap_err();
    assert!(code == Code::ResourceExhausted && text.contains("max_volumes"), "{code:?}: {text}");
    let cluster = alone.store.state();
    let wanted = cluster.volumes.values().filter(|volume| volume.spec.node_id.is_some()).count();
    assert_eq!(wanted, 1);
}

/// Parameters of Longhorn's StorageClasses without an effect are accepted. The event has their names.
#[tokio::test]
async fn ignored_parameters_are_in_an_event_of_the_volume() {
    let (sender, mut recorded) = mpsc::unbounded_channel();
    let service = service_fn(move |request: Request<Body>| {
        let sender = sender.clone();
        async move {
            let body = request.into_body().collect_bytes().await.unwrap();
            sender.send(serde_json::from_slice::<Value>(&body).unwrap()).unwrap();
            Ok::<_, Infallible>(Response::builder().status(201).body(Body::from(body.to_vec())).unwrap())
        }
    });
    let (events, recorder) = events(kube::Client::new(service, "n"), "n", "me");
    let recording = tokio::spawn(recorder.run());
    let mut alone = Alone::start_with(Some(events));
    // No event comes of a request without such parameters.
    alone.volume().await;
    let parameters =
        [("staleReplicaTimeout", "30"), ("numberOfReplicas", "3"), ("disableRevisionCounter", "true")];
    let parameters = parameters.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    alone.csi.create(v1::CreateVolumeRequest { parameters, ..create("v") }).await.unwrap();
    let event = tokio::time::timeout(LIMIT, recorded.recv()).await.unwrap().unwrap();
    assert_eq!((&event["reason"], &event["type"]), (&"ParametersIgnored".into(), &"Normal".into()));
    let about = &event["regarding"];
    assert_eq!((&about["kind"], &about["name"]), (&"Volume".into(), &"v".into()));
    let note = event["note"].as_str().unwrap();
    let ignored = "of the StorageClass: disableRevisionCounter: \"true\", staleReplicaTimeout: \"30\"";
    assert!(note.ends_with(ignored), "{note}");
    recording.abort();
}
