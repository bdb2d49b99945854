//! The objects of a cluster on an API server in this process: the pages that a new leader reads.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{Request, Response};
use kube::Client;
use kube::client::Body;
use serde::Serialize;
use serde_json::{Value, json};
use shorthorn_controller::kubernetes::events::events;
use shorthorn_controller::kubernetes::store::{FINGERPRINT_ANNOTATION, KubeStore};
use shorthorn_controller::store::{ObjectStore, RedbStore};
use shorthorn_controller_core::ClusterState;
use shorthorn_controller_core::objects::{Kind, Metadata, ResourceVersion};
use shorthorn_kube::crds::{self, Rules};
use shorthorn_kube::{GROUP, KINDS, VERSION, kind_name, plural};
use tower::service_fn;

/// Objects of a page, as the controller requests them.
const PAGE_OBJECTS: usize = 2000;
const NAMESPACE: &str = "shorthorn-system";
/// The fingerprint of the key below.
const FINGERPRINT: &str = "31189c92b1c69dab";

/// The answers, each in the form in which it is sent.
struct Answers {
    definitions: BTreeMap<String, Vec<u8>>,
    /// The pages of each kind by its plural.
    pages: BTreeMap<String, Vec<Vec<u8>>>,
    /// The pages of the metadata of volumes.
    metadata: Vec<Vec<u8>>,
}

/// Reads all objects of the store at `path` as a controller in Kubernetes does. Returns their number, and the
/// time.
pub async fn read_all(path: &Path) -> (usize, Duration) {
    let answers = {
        let store = RedbStore::open(path).unwrap();
        let state = store.state();
        Arc::new(Answers::of(&state))
    };
    let service = service_fn(move |request: Request<Body>| {
        let answers = Arc::clone(&answers);
        async move { Ok::<_, Infallible>(answers.answer(&request)) }
    });
    let client = Client::new(service, NAMESPACE);
    let (events, _) = events(client.clone(), NAMESPACE, "bench");
    let begun = Instant::now();
    let store = KubeStore::open(client, NAMESPACE, events).await.unwrap();
    let took = begun.elapsed();
    let state = store.state();
    let count = state.nodes.len() + state.replicas.len() + state.engines.len() + state.volumes.len();
    (count, took)
}

impl Answers {
    fn of(state: &ClusterState) -> Answers {
        let definition = |kind: Kind| {
            (
                crds::definition_name(kind),
                serde_json::to_vec(&crds::definition(kind, Rules::Included)).unwrap(),
            )
        };
        let nodes =
            state.nodes.values().map(|node| object(Kind::Node, &node.metadata, &node.spec, &node.status));
        let replicas = state.replicas.values();
        let replicas = replicas.map(|one| object(Kind::Replica, &one.metadata, &one.spec, &one.status));
        let engines = state.engines.values();
        let engines = engines.map(|one| object(Kind::Engine, &one.metadata, &one.spec, &one.status));
        let volumes = state.volumes.values();
        let volumes = volumes.map(|one| object(Kind::Volume, &one.metadata, &one.spec, &one.status));
        let volumes: Vec<Value> = volumes.collect();
        let partial = |volume: &Value| {
            json!({ "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
                "metadata": volume["metadata"] })
        };
        Answers {
            metadata: pages(Kind::Volume, volumes.iter().map(partial)),
            definitions: KINDS.into_iter().map(definition).collect(),
            pages: [
                (plural(Kind::Node), pages(Kind::Node, nodes)),
                (plural(Kind::Replica), pages(Kind::Replica, replicas)),
                (plural(Kind::Engine), pages(Kind::Engine, engines)),
                (plural(Kind::Volume), pages(Kind::Volume, volumes.into_iter())),
            ]
            .into(),
        }
    }

    fn answer(&self, request: &Request<Body>) -> Response<Body> {
        let (path, query) = (request.uri().path(), request.uri().query().unwrap_or_default());
        let name = path.rsplit('/').next().unwrap_or_default();
        let body = if path.contains("/customresourcedefinitions/") {
            self.definitions[name].clone()
        } else if path.contains("/secrets/") {
            serde_json::to_vec(&secret()).unwrap()
        } else if query.contains("watch=") {
            Vec::new()
        } else {
            let accepted = request.headers().get("accept").and_then(|value| value.to_str().ok());
            let is_partial = accepted.is_some_and(|value| value.contains("PartialObjectMetadata"));
            let page = query.split('&').find_map(|part| part.strip_prefix("continue="));
            let pages = if is_partial { &self.metadata } else { &self.pages[name] };
            pages[page.map_or(0, |page| page.parse::<usize>().unwrap())].clone()
        };
        Response::builder().status(200).body(Body::from(body)).unwrap()
    }
}

/// The Secret with the key: zeroes.
fn secret() -> Value {
    let metadata = json!({ "name": "shorthorn-volume-key", "finalizers": ["shorthorn.io/volume-key"] });
    let key = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": { "key": key } })
}

fn object(kind: Kind, known: &Metadata, spec: &impl Serialize, status: &impl Serialize) -> Value {
    let mut spec = serde_json::to_value(spec).unwrap();
    spec.as_object_mut().unwrap().remove("secret");
    let mut metadata = json!({
        "name": known.name,
        "namespace": NAMESPACE,
        "uid": known.uid.as_deref().unwrap_or_default(),
        "resourceVersion": known.resource_version.map_or(0, ResourceVersion::get).to_string(),
        "generation": known.generation.unwrap_or_default(),
        "creationTimestamp": known.creation_timestamp,
        "finalizers": ["shorthorn.io/data"],
        // An API server adds as much at least.
        "managedFields": [{ "manager": "shorthorn-controller", "operation": "Update",
            "apiVersion": format!("{GROUP}/{VERSION}"), "fieldsType": "FieldsV1", "fieldsV1": {} }],
    });
    if kind == Kind::Volume {
        metadata["annotations"] = json!({ FINGERPRINT_ANNOTATION: FINGERPRINT });
    }
    let (api_version, kind) = (format!("{GROUP}/{VERSION}"), kind_name(kind));
    json!({ "apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec,
        "status": serde_json::to_value(status).unwrap() })
}

fn pages(kind: Kind, objects: impl Iterator<Item = Value>) -> Vec<Vec<u8>> {
    let objects: Vec<Value> = objects.collect();
    let chunks: Vec<&[Value]> = match objects.is_empty() {
        true => vec![&[]],
        false => objects.chunks(PAGE_OBJECTS).collect(),
    };
    let last = chunks.len() - 1;
    let page = |(at, items): (usize, &&[Value])| {
        let next = (at < last).then(|| (at + 1).to_string());
        let metadata = json!({ "resourceVersion": "9000000000", "continue": next });
        let kind = format!("{}List", kind_name(kind));
        let api_version = format!("{GROUP}/{VERSION}");
        serde_json::to_vec(
            &json!({ "apiVersion": api_version, "kind": kind, "metadata": metadata, "items": items }),
        )
        .unwrap()
    };
    chunks.iter().enumerate().map(page).collect()
}
