//! Finds the users of the claims of volumes. Pods are listed on demand, without a watch.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};

/// The maximum number of pods in one request.
const PAGE: u32 = 500;
/// The longest that all of them may take. A user waits for the answer, which is useful without them.
const LIMIT: Duration = Duration::from_secs(15);
/// The number of namespaces above which all pods are listed at once.
const NAMESPACES_MAX: usize = 20;
/// The label of a Deployment's pods; the name of their ReplicaSet is that of the Deployment with its value.
const HASH_LABEL: &str = "pod-template-hash";

/// A pod that uses a claim, and whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// The kind: Deployment, StatefulSet, …, or Pod for a pod without an owner.
    pub kind: String,
    /// Name in the namespace of the pod.
    pub name: String,
    /// Name of the pod in its namespace.
    pub pod: String,
    /// Pending, Running, Succeeded, Failed.
    pub phase: String,
}

/// A source of the users of claims.
#[async_trait]
pub trait Workloads: Send + Sync {
    /// Returns the users of each of these claims, which are named NAMESPACE/NAME.
    ///
    /// # Errors
    /// The reason why that is unknown, for people.
    async fn of(&self, claims: &BTreeSet<String>) -> Result<BTreeMap<String, Vec<Workload>>, String>;
}

/// Reads pods and their owners from the API server.
#[derive(Clone)]
pub struct ClusterWorkloads(Client);

impl std::fmt::Debug for ClusterWorkloads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClusterWorkloads").finish_non_exhaustive()
    }
}

impl ClusterWorkloads {
    /// Returns the workloads of the cluster behind `client`.
    #[must_use]
    pub fn new(client: Client) -> ClusterWorkloads {
        ClusterWorkloads(client)
    }

    async fn find(&self, claims: &BTreeSet<String>) -> kube::Result<BTreeMap<String, Vec<Workload>>> {
        let namespaces: BTreeSet<&str> = claims.iter().filter_map(|claim| claim.split('/').next()).collect();
        let mut found = BTreeMap::new();
        if namespaces.len() > NAMESPACES_MAX {
            self.search(&Api::all(self.0.clone()), claims, &mut found).await?;
            return Ok(found);
        }
        for namespace in namespaces {
            self.search(&Api::namespaced(self.0.clone(), namespace), claims, &mut found).await?;
        }
        Ok(found)
    }

    async fn search(
        &self,
        pods: &Api<Pod>,
        claims: &BTreeSet<String>,
        found: &mut BTreeMap<String, Vec<Workload>>,
    ) -> kube::Result<()> {
        let mut page = ListParams::default().limit(PAGE);
        loop {
            let list = pods.list(&page).await?;
            for pod in &list.items {
                for claim in claims_of(pod).filter(|claim| claims.contains(claim)) {
                    found.entry(claim).or_default().push(workload(pod));
                }
            }
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page = ListParams::default().limit(PAGE).continue_token(&token),
                None => return Ok(()),
            }
        }
    }
}

#[async_trait]
impl Workloads for ClusterWorkloads {
    async fn of(&self, claims: &BTreeSet<String>) -> Result<BTreeMap<String, Vec<Workload>>, String> {
        match tokio::time::timeout(LIMIT, self.find(claims)).await {
            Ok(found) => found.map_err(|error| error.to_string()),
            Err(_) => Err(format!("the API server has not listed the pods within {} s", LIMIT.as_secs())),
        }
    }
}

/// Returns the claims that a pod uses, as NAMESPACE/NAME.
fn claims_of(pod: &Pod) -> impl Iterator<Item = String> {
    let namespace = pod.namespace().unwrap_or_default();
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes.filter_map(move |volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
        (Some(claim), _) => Some(format!("{namespace}/{}", claim.claim_name)),
        // Made for this pod, under this name.
        (None, Some(_)) => Some(format!("{namespace}/{}-{}", pod.name_any(), volume.name)),
        (None, None) => None,
    })
}

fn workload(pod: &Pod) -> Workload {
    let name = pod.name_any();
    let owner = pod.owner_references().iter().find(|owner| owner.controller == Some(true));
    let (kind, owner) = match owner {
        None => ("Pod".to_owned(), name.clone()),
        Some(owner) => {
            let hash = pod.labels().get(HASH_LABEL).map(|hash| format!("-{hash}"));
            let deployment = hash.and_then(|hash| owner.name.strip_suffix(&hash).map(str::to_owned));
            match deployment.filter(|_| owner.kind == "ReplicaSet") {
                Some(deployment) => ("Deployment".to_owned(), deployment),
                None => (owner.kind.clone(), owner.name.clone()),
            }
        }
    };
    let phase = pod.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
    Workload { kind, name: owner, pod: name, phase }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(metadata: Value, volumes: Value) -> Pod {
        let mut pod = json!({
            "metadata": { "namespace": "shop", "name": "web-0" },
            "spec": { "containers": [], "volumes": volumes },
            "status": { "phase": "Running" },
        });
        if let (Some(all), Value::Object(more)) = (pod["metadata"].as_object_mut(), metadata) {
            all.extend(more);
        }
        serde_json::from_value(pod).unwrap()
    }

    fn owned_by(kind: &str, name: &str, labels: Value) -> Workload {
        let owner =
            json!([{ "apiVersion": "apps/v1", "kind": kind, "name": name, "uid": "u", "controller": true }]);
        workload(&pod(json!({ "ownerReferences": owner, "labels": labels }), json!([])))
    }

    #[test]
    fn a_pod_is_of_the_workload_that_people_have_made() {
        let of = |workload: Workload| format!("{}/{}", workload.kind, workload.name);
        assert_eq!(of(owned_by("StatefulSet", "web", json!({}))), "StatefulSet/web");
        let hash = json!({ "pod-template-hash": "5d4f8c" });
        assert_eq!(of(owned_by("ReplicaSet", "web-5d4f8c", hash.clone())), "Deployment/web");
        assert_eq!(of(owned_by("ReplicaSet", "alone", hash)), "ReplicaSet/alone");
        let alone = workload(&pod(json!({}), json!([])));
        assert_eq!((alone.phase.clone(), of(alone)), ("Running".to_owned(), "Pod/web-0".to_owned()));
    }

    #[test]
    fn claims_are_those_that_are_named_and_those_that_are_made_for_the_pod() {
        let volumes = json!([
            { "name": "data", "persistentVolumeClaim": { "claimName": "orders" } },
            { "name": "scratch", "ephemeral": { "volumeClaimTemplate": { "spec": {} } } },
            { "name": "config", "configMap": { "name": "c" } },
        ]);
        let found: Vec<String> = claims_of(&pod(json!({}), volumes)).collect();
        assert_eq!(found, ["shop/orders", "shop/web-0-scratch"]);
    }
}
