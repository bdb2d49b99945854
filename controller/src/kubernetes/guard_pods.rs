//! Makes guard pods and their budgets, and removes them (`controller_core::reboot::guard_pods` decides
//! which).
//!
//! Changes only wake the task; each round changes the existing guard pods to the wanted ones. Volumes are
//! examined one by one, as they change. The Node object owns both objects, and they are deleted with it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::ApiResource;
use kube::{Client, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use shorthorn_controller_core::Event;
use shorthorn_controller_core::objects::{Key, Kind};
use shorthorn_controller_core::reboot::Needed;
use shorthorn_controller_core::reboot::guard_pods::{
    self, ExistingGuardPod, GuardPodPlan, Unneeded, WantedGuardPod,
};
use shorthorn_kube::{CallError, bounded, is_code};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::time::Instant;

use super::discover::Machines;
use super::events::EventSender;
use super::reflector::Reflector;
use super::{GROUP, VERSION, kind_name};
use crate::backoff::backoff;
use crate::store::ObjectStore;

/// The time for which changes are gathered before they are examined.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// The time before a pod that has ended by itself is recreated, because a kubelet may refuse each one at
/// once.
const AGAIN: Duration = Duration::from_secs(30);
/// The label of both with the uid of the Node object.
const NODE_LABEL: &str = "shorthorn.io/guards-node";
/// The annotation of a pod with the reasons for which the node is needed.
const HOLDS_ANNOTATION: &str = "shorthorn.io/holds";
/// The label by which others can select guard pods, as kured does.
const APP_LABEL: &str = "app.kubernetes.io/name";
/// The value of the label.
const APP_NAME: &str = "shorthorn-guard";
/// The user that the process is; any one but root would do.
const USER: u32 = 65532;
/// The API group of budgets.
const POLICY: &str = "policy";

/// Makes and removes guard pods.
pub struct GuardPods {
    client: Client,
    namespace: String,
    /// None: no guard pods should exist.
    image: Option<String>,
    machines: Arc<Machines>,
    store: Arc<dyn ObjectStore>,
    events: EventSender,
}

impl std::fmt::Debug for GuardPods {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuardPods").field("image", &self.image).finish_non_exhaustive()
    }
}

/// Both kinds of objects, as the API server has them.
struct GuardPodObjects {
    pods: Api<Pod>,
    budgets: Api<DynamicObject>,
    budget: ApiResource,
    known_pods: Reflector<ExistingGuardPod>,
    known_budgets: Reflector<String>,
}

/// The earlier rounds, as far as later ones need them.
struct History {
    begun: Instant,
    /// The time at which each pod that had ended was deleted, by its name.
    ended: BTreeMap<String, Instant>,
    unneeded: Unneeded,
}

impl GuardPods {
    /// Manages guard pods in `namespace`, with `image`; without an image, existing ones are removed.
    #[must_use]
    pub fn new(
        client: Client,
        namespace: &str,
        image: Option<&str>,
        machines: Arc<Machines>,
        store: Arc<dyn ObjectStore>,
        events: EventSender,
    ) -> GuardPods {
        let (namespace, image) = (namespace.to_owned(), image.map(str::to_owned));
        GuardPods { client, namespace, image, machines, store, events }
    }

    /// Keeps them right, until it is dropped.
    pub async fn run(self) {
        let budget = budget_resource(&self.client).await;
        let objects = GuardPodObjects {
            pods: Api::namespaced(self.client.clone(), &self.namespace),
            budgets: Api::namespaced_with(self.client.clone(), &self.namespace, &budget),
            budget,
            known_pods: Reflector::new(),
            known_budgets: Reflector::new(),
        };
        tokio::join!(
            objects.known_pods.follow(objects.pods.clone(), parse_pod),
            objects.known_budgets.follow(objects.budgets.clone(), guarded_node),
            self.keep(&objects),
        );
    }

    async fn keep(&self, objects: &GuardPodObjects) {
        let (mut changes, mut machines) = (self.store.changes(), self.machines.changes());
        let (mut pods, mut budgets) = (objects.known_pods.changes(), objects.known_budgets.changes());
        let mut needed = Needed::default();
        needed.look_at_all(&self.store.state());
        let mut history =
            History { begun: Instant::now(), ended: BTreeMap::new(), unneeded: Unneeded::default() };
        let mut failures = 0;
        loop {
            let again = match self.round(objects, &needed, &mut history).await {
                Ok(again) => {
                    failures = 0;
                    again
                }
                Err(error) => {
                    failures += 1;
                    tracing::warn!(
                        %error,
                        "guard pods could not be updated: a drain may not wait for volumes"
                    );
                    Some(backoff(failures))
                }
            };
            let wait = async {
                match again {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
            };
            let mut keys = Vec::new();
            tokio::select! {
                key = changes.recv() => match key {
                    Ok(key) => keys.push(key),
                    Err(RecvError::Lagged(_)) => needed.look_at_all(&self.store.state()),
                    // The store is gone, and with it the controller.
                    Err(RecvError::Closed) => return,
                },
                () = machines.next() => {}
                changed = pods.changed() => if changed.is_err() { return },
                changed = budgets.changed() => if changed.is_err() { return },
                () = wait => {}
            }
            tokio::time::sleep(DEBOUNCE).await;
            self.catch_up(&mut needed, keys, &mut changes);
        }
    }

    /// Looks again at the volumes of these changes, and of all changes that are still in the channel.
    fn catch_up(&self, needed: &mut Needed, mut keys: Vec<Key>, changes: &mut Receiver<Key>) {
        let mut all = false;
        loop {
            match changes.try_recv() {
                Ok(key) => keys.push(key),
                Err(TryRecvError::Lagged(_)) => all = true,
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        let cluster = self.store.state();
        if all {
            return needed.look_at_all(&cluster);
        }
        let nodes = keys.iter().filter(|key| key.kind == Kind::Node);
        nodes.for_each(|node| needed.look_at_node(&cluster, &node.name));
        let volumes: BTreeSet<&str> = keys.iter().filter_map(volume_of).collect();
        volumes.into_iter().for_each(|volume| needed.look_at(&cluster, volume));
    }

    /// Changes the existing guard pods to the wanted ones; returns the time of the next round without a
    /// change.
    async fn round(
        &self,
        objects: &GuardPodObjects,
        needed: &Needed,
        history: &mut History,
    ) -> Result<Option<Duration>, CallError> {
        let (Some(kubernetes), Some(pods), Some(budgets)) =
            (self.machines.kubernetes(), objects.known_pods.all(), objects.known_budgets.all())
        else {
            return Ok(None);
        };
        let wanted = match self.image {
            Some(_) => guard_pods::wanted(&self.store.state(), &kubernetes, needed),
            None => BTreeMap::new(),
        };
        let History { begun, ended, unneeded } = history;
        ended.retain(|_, at| at.elapsed() < AGAIN);
        let mut plan = guard_pods::plan(&wanted, &pods, &budgets);
        // Without an image, none shall exist.
        let next = self.image.as_ref().and_then(|_| unneeded.delay(&mut plan, &wanted, begun.elapsed()));
        plan.make_pod.retain(|(name, _)| !ended.contains_key(name));
        for (name, guard_pod) in &plan.make_budget {
            self.make_budget(objects, name, guard_pod).await?;
        }
        for (name, guard_pod) in &plan.make_pod {
            if self.make_pod(objects, name, guard_pod).await? {
                self.record(guard_pod);
            }
        }
        self.clean(objects, &plan).await?;
        let has_ended = |name: &&String| pods.get(*name).is_some_and(|pod| pod.has_ended);
        ended.extend(plan.delete_pod.iter().filter(has_ended).map(|name| (name.clone(), Instant::now())));
        Ok((!ended.is_empty()).then_some(AGAIN).into_iter().chain(next).min())
    }

    async fn clean(&self, objects: &GuardPodObjects, plan: &GuardPodPlan) -> Result<(), CallError> {
        for (name, message) in &plan.report {
            let holds = json!({ "metadata": { "annotations": { HOLDS_ANNOTATION: message } } });
            let (parameters, holds) = (PatchParams::default(), Patch::Merge(holds));
            unless_code(bounded(objects.pods.patch(name, &parameters, &holds)).await, 404)?;
        }
        for name in &plan.delete_pod {
            // The pod has no work to interrupt, and its kubelet may be unreachable.
            let now = DeleteParams::default().grace_period(0);
            unless_code(bounded(objects.pods.delete(name, &now)).await, 404)?;
            tracing::info!(pod = name, "deleted a guard pod");
        }
        for name in &plan.delete_budget {
            unless_code(bounded(objects.budgets.delete(name, &DeleteParams::default())).await, 404)?;
        }
        Ok(())
    }

    async fn make_budget(
        &self,
        objects: &GuardPodObjects,
        name: &str,
        guard_pod: &WantedGuardPod,
    ) -> Result<(), CallError> {
        let object = object(&budget(&objects.budget, name, guard_pod))?;
        unless_code(bounded(objects.budgets.create(&PostParams::default(), &object)).await, 409)
    }

    /// Makes a pod. Returns false if one of that name exists already.
    async fn make_pod(
        &self,
        objects: &GuardPodObjects,
        name: &str,
        guard_pod: &WantedGuardPod,
    ) -> Result<bool, CallError> {
        let image = self.image.as_deref().unwrap_or_default();
        let pod: Pod = object(&pod(image, name, guard_pod))?;
        match bounded(objects.pods.create(&PostParams::default(), &pod)).await {
            Ok(_) => {
                tracing::info!(node = guard_pod.node, holds = guard_pod.message, "created a guard pod");
                Ok(true)
            }
            Err(error) if is_code(&error, 409) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn record(&self, guard_pod: &WantedGuardPod) {
        let about = Key::new(Kind::Node, &guard_pod.node);
        let message = format!("kubectl drain waits for volumes that need this node: {}", guard_pod.message);
        self.events
            .record(&Event { about, warning: false, reason: "DrainWaits", message }, Some(&guard_pod.uid));
    }
}

/// Returns the volume that the object is about; a node is about none.
fn volume_of(key: &Key) -> Option<&str> {
    match key.kind {
        Kind::Volume | Kind::Engine => Some(&key.name),
        // VOLUME-REPLICA
        Kind::Replica => key.name.rsplit_once('-').map(|(volume, _)| volume),
        Kind::Node => None,
    }
}

/// Returns the resource of budgets: API servers before 1.21 have no version 1 of them.
async fn budget_resource(client: &Client) -> ApiResource {
    let mut failures = 0;
    let version = loop {
        match bounded(client.list_api_groups()).await {
            Ok(groups) => {
                let policy = groups.groups.into_iter().find(|group| group.name == POLICY);
                let mut versions = policy.into_iter().flat_map(|group| group.versions);
                break if versions.any(|version| version.version == "v1") { "v1" } else { "v1beta1" };
            }
            Err(error) => {
                failures += 1;
                tracing::warn!(%error, "the versions of PodDisruptionBudget are not known");
                tokio::time::sleep(backoff(failures)).await;
            }
        }
    };
    ApiResource {
        group: POLICY.to_owned(),
        version: version.to_owned(),
        api_version: format!("{POLICY}/{version}"),
        kind: "PodDisruptionBudget".to_owned(),
        plural: "poddisruptionbudgets".to_owned(),
    }
}

/// Parses an object.
fn object<T: DeserializeOwned>(value: &Value) -> Result<T, CallError> {
    T::deserialize(value).map_err(|error| kube::Error::SerdeError(error).into())
}

fn metadata(name: &str, guard_pod: &WantedGuardPod) -> Value {
    // A controller of its own kind: kubectl drain refuses to end pods that have none.
    let owner = json!({ "apiVersion": format!("{GROUP}/{VERSION}"), "kind": kind_name(Kind::Node),
        "name": guard_pod.node, "uid": guard_pod.uid, "controller": true });
    json!({
        "name": name,
        "labels": { APP_LABEL: APP_NAME, NODE_LABEL: guard_pod.uid },
        "annotations": { HOLDS_ANNOTATION: guard_pod.message },
        "ownerReferences": [owner],
    })
}

/// Makes a budget that requires one of one pods, which therefore is never evicted.
fn budget(resource: &ApiResource, name: &str, guard_pod: &WantedGuardPod) -> Value {
    json!({
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": metadata(name, guard_pod),
        "spec": { "minAvailable": 1, "selector": { "matchLabels": { NODE_LABEL: guard_pod.uid } } },
    })
}

/// Makes a pod that is bound to its machine without the scheduler, which uses no cordoned ones. The pod
/// tolerates every taint.
fn pod(image: &str, name: &str, guard_pod: &WantedGuardPod) -> Value {
    let container = json!({
        "name": "guard",
        "image": image,
        "command": ["/usr/bin/shorthorn-controller", "pause"],
        "resources": { "requests": { "cpu": "1m", "memory": "8Mi" } },
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": { "drop": ["ALL"] },
        },
    });
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(name, guard_pod),
        "spec": {
            "nodeName": guard_pod.machine,
            "tolerations": [{ "operator": "Exists" }],
            "priorityClassName": "system-node-critical",
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": true,
                "runAsUser": USER,
                "runAsGroup": USER,
                "seccompProfile": { "type": "RuntimeDefault" },
            },
            "containers": [container],
        },
    })
}

/// Parses a guard pod; none if it is another pod.
fn parse_pod(pod: &Pod) -> Option<ExistingGuardPod> {
    let uid = pod.labels().get(NODE_LABEL)?.clone();
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    Some(ExistingGuardPod {
        uid,
        machine: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
        message: pod.annotations().get(HOLDS_ANNOTATION).cloned().unwrap_or_default(),
        has_ended: matches!(phase, Some("Succeeded" | "Failed")),
        is_deleting: pod.metadata.deletion_timestamp.is_some(),
    })
}

/// Returns the node of a guard pod's budget; none if it is another budget.
fn guarded_node(budget: &DynamicObject) -> Option<String> {
    budget.labels().get(NODE_LABEL).cloned()
}

/// Accepts an answer with that status as success: the state is already the wanted one.
fn unless_code<T>(result: Result<T, CallError>, code: u16) -> Result<(), CallError> {
    match result {
        Err(error) if !is_code(&error, code) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard_pod() -> WantedGuardPod {
        let word = str::to_owned;
        WantedGuardPod { node: word("a"), uid: word("u"), machine: word("m"), message: word("volume v: why") }
    }

    #[test]
    fn a_pod_that_was_made_is_found_again() {
        let made: Pod = object(&pod("image:1", "g", &guard_pod())).unwrap();
        let found = parse_pod(&made).unwrap();
        let WantedGuardPod { uid, machine, message, .. } = guard_pod();
        assert_eq!(found, ExistingGuardPod { uid, machine, message, ..ExistingGuardPod::default() });
        assert!(parse_pod(&Pod::default()).is_none());
        let owner = &made.metadata.owner_references.unwrap()[0];
        assert!(owner.kind == "Node" && owner.controller == Some(true), "{owner:?}");
    }

    #[test]
    fn the_budget_is_that_of_the_pod() {
        let resource = ApiResource::erase::<k8s_openapi::api::policy::v1::PodDisruptionBudget>(&());
        let made: DynamicObject = object(&budget(&resource, "g", &guard_pod())).unwrap();
        assert_eq!(guarded_node(&made).as_deref(), Some("u"));
        let labels = &pod("image:1", "g", &guard_pod())["metadata"]["labels"];
        let selected = &made.data["spec"]["selector"]["matchLabels"];
        assert_eq!(labels[NODE_LABEL], selected[NODE_LABEL]);
    }

    #[test]
    fn a_change_of_a_replica_is_one_of_its_volume() {
        let of = |kind, name| volume_of(&Key::new(kind, name)).map(str::to_owned);
        assert_eq!(of(Kind::Replica, "pvc-1-8rqh2w91").as_deref(), Some("pvc-1"));
        assert_eq!(of(Kind::Engine, "pvc-1").as_deref(), Some("pvc-1"));
        assert_eq!(of(Kind::Node, "pvc-1"), None);
    }
}
