use std::sync::Mutex;

use http::Method;
use http::request::Parts;
use serde_json::{Value, json};
use shorthorn_controller_core::Timestamp;
use shorthorn_controller_core::lost_node_pods::Namespaced;
use shorthorn_controller_core::objects::Secret;
use shorthorn_controller_core::observed::{AgentInfo, AgentLink, ObservedAgent};
use shorthorn_controller_core::requests::CreateVolume;
use tokio::sync::mpsc;

use super::*;
use crate::kubernetes::events::events;
use crate::kubernetes::fake_api::{FakeApi, fake_client};
use crate::metrics::Metrics;
use crate::store::MemoryStore;
use crate::work::WorkQueue;

/// Pods of an API server, which it deletes as kubelets take time to end them.
struct FakePods {
    pods: Mutex<Vec<Value>>,
    /// The deletions: name of the pod, and the request.
    deletions: Mutex<Vec<(String, Value)>>,
    /// The machines whose pods were listed.
    listed: Mutex<Vec<String>>,
    /// Gets the events: reason, and kind and name of the object.
    events: mpsc::UnboundedSender<(String, String)>,
}

impl FakeApi for FakePods {
    async fn answer(&self, head: &Parts, body: &[u8]) -> (u16, Value) {
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        let path = head.uri.path();
        let mut pods = self.pods.lock().unwrap();
        match head.method {
            Method::GET => {
                let query = head.uri.query().unwrap();
                let machine = query.split("nodeName%3D").nth(1).unwrap().split('&').next().unwrap();
                self.listed.lock().unwrap().push(machine.to_owned());
                let there: Vec<&Value> =
                    pods.iter().filter(|pod| pod["spec"]["nodeName"] == machine).collect();
                let metadata = json!({ "resourceVersion": "1" });
                (200, json!({ "kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": there }))
            }
            Method::DELETE => {
                let name = path.strip_prefix("/api/v1/namespaces/n/pods/").unwrap();
                self.deletions.lock().unwrap().push((name.to_owned(), body));
                let pod = pods.iter_mut().find(|pod| pod["metadata"]["name"] == name).unwrap();
                pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
                (200, pod.clone())
            }
            _ => {
                let about = &body["regarding"];
                let about =
                    format!("{} {}", about["kind"].as_str().unwrap(), about["name"].as_str().unwrap());
                self.events.send((body["reason"].as_str().unwrap().to_owned(), about)).unwrap();
                (201, body)
            }
        }
    }
}

/// Returns a pod whose containers run; its uid begins with `uid-`.
fn pod(name: &str, machine: &str, has_controller: bool) -> Value {
    let mut metadata = json!({ "namespace": "n", "name": name, "uid": format!("uid-{name}") });
    if has_controller {
        let owner = json!({ "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "s", "uid": "uid-s",
            "controller": true });
        metadata["ownerReferences"] = json!([owner]);
    }
    let spec = json!({ "nodeName": machine, "containers": [] });
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec,
        "status": { "phase": "Running" } })
}

/// Returns an agent that says that the devices of these pods are gone under them.
fn agent(is_synced: bool, dead: &[(&str, &str)]) -> ObservedAgent {
    let mount = |(volume, pod): &(&str, &str)| DeadMount {
        volume: (*volume).to_owned(),
        pod_uid: format!("uid-{pod}"),
    };
    let mut agent = ObservedAgent::new("http://x:1", Timestamp::UNIX_EPOCH);
    let dead_mounts = dead.iter().map(mount).collect();
    agent.info = Some(AgentInfo { dead_mounts, ..AgentInfo::default() });
    if is_synced {
        agent.link = AgentLink::Synced;
    }
    agent
}

async fn store() -> Arc<dyn ObjectStore> {
    let store = MemoryStore::new();
    let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 30, ..CreateVolume::default() };
    let mut volume = wanted.sketch(Secret::new([1; 32]), Timestamp::UNIX_EPOCH).unwrap();
    volume.metadata.uid = Some("uid-v".to_owned());
    store.put(volume.into()).await.unwrap();
    Arc::new(store)
}

/// Three machines, of whose agents that of m3 is out of reach. On m1, the device is gone under two pods, and
/// it was gone under a former pod of the name `new`.
async fn restager(client: Client, events: EventSender) -> Restager {
    let (store, queue) = (store().await, Arc::new(WorkQueue::new()));
    let fleet = Fleet::new(&Default::default(), Arc::clone(&store), queue, Metrics::default()).unwrap();
    fleet.insert_observed("a", agent(true, &[("v", "owned"), ("w", "bare"), ("u", "former")]));
    fleet.insert_observed("b", agent(true, &[]));
    fleet.insert_observed("c", agent(false, &[("z", "unseen")]));
    let machines = Machines::with_drivers(&[("m1", "a"), ("m2", "b"), ("m3", "c")]);
    Restager::new(client, machines, store, fleet, events)
}

#[tokio::test]
async fn the_pod_whose_device_is_gone_is_ended_and_no_other_one() {
    let (sender, mut recorded) = mpsc::unbounded_channel();
    let pods = vec![
        pod("owned", "m1", true),
        pod("bare", "m1", false),
        pod("well", "m1", true),
        pod("new", "m1", true),
        pod("other", "m2", true),
        pod("unseen", "m3", true),
    ];
    let (deletions, listed) = Default::default();
    let api = Arc::new(FakePods { pods: Mutex::new(pods), deletions, listed, events: sender });
    let (events, recorder) = events(fake_client(&api), "n", "me");
    let recording = tokio::spawn(recorder.run());
    let (restager, mut reported) = (restager(fake_client(&api), events.clone()).await, BTreeSet::new());
    for _ in 0..2 {
        restager.round(&mut reported).await.unwrap();
    }

    let deletions = api.deletions.lock().unwrap().clone();
    let [(name, request)] = deletions.as_slice() else { panic!("{deletions:?}") };
    assert_eq!((name.as_str(), &request["preconditions"]["uid"]), ("owned", &json!("uid-owned")));
    assert_eq!(request["gracePeriodSeconds"], Value::Null, "it ends like by kubectl delete pod");
    assert_eq!(*api.listed.lock().unwrap(), ["m1", "m1"]);
    // Events keep their order: nothing comes twice before the last one.
    let about = Namespaced { namespace: "n".to_owned(), name: "end".to_owned() };
    let last = Event { about, warning: false, reason: "End", message: String::new() };
    events.record_of_pod(last, "uid-end");
    let wanted = [
        ("PodEnded", "Pod owned"),
        ("PodEnded", "Volume v"),
        ("PodNotEnded", "Pod bare"),
        ("End", "Pod end"),
    ];
    for wanted in wanted {
        let (reason, about) = recorded.recv().await.unwrap();
        assert_eq!((reason.as_str(), about.as_str()), wanted);
    }
    recording.abort();
}
