//! The label of the pod whose controller leads. The Service of the API with TLS selects it: a controller that
//! stands by is ready too, and does not serve that API.
//!
//! A controller ends as a process when it loses the Lease, and its container starts again in the same pod. So
//! each controller removes the label of its own pod first. A new leader removes it from the pods of leaders
//! that did not come back. While it leads, it checks the labels of all pods: anybody may change them.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use shorthorn_kube::{CallError, bounded, is_code};
use tokio::sync::watch;

/// The label; a pod that does not lead lacks it.
pub const LEADER_LABEL: &str = "shorthorn.io/leader";
/// The wait after a call that has failed.
const RETRY: Duration = Duration::from_secs(5);
/// The time between two checks of a leader.
const CHECK_EVERY: Duration = Duration::from_secs(30);

/// Sets the label of this controller's pod once `leads` is true, and removes it before. Ends with the sender,
/// or runs until it is dropped. A controller outside of a pod has nothing to label.
pub async fn run(client: Client, namespace: String, pod: String, mut leads: watch::Receiver<bool>) {
    let pods: Api<Pod> = Api::namespaced(client, &namespace);
    let mut was_well = true;
    loop {
        let is_leader = *leads.borrow_and_update();
        let applied = apply(&pods, &pod, is_leader).await;
        match &applied {
            Ok(()) => {
                let changed = leads.changed();
                let ended = if is_leader {
                    tokio::time::timeout(CHECK_EVERY, changed).await.is_ok_and(|changed| changed.is_err())
                } else {
                    changed.await.is_err()
                };
                if ended {
                    return;
                }
            }
            Err(error) => {
                if was_well {
                    tracing::warn!(
                        %error,
                        pod,
                        "the label {LEADER_LABEL} of the pods is not set; check that rbac.yaml is applied"
                    );
                }
                tokio::time::sleep(RETRY).await;
            }
        }
        was_well = applied.is_ok();
    }
}

async fn apply(pods: &Api<Pod>, pod: &str, is_leader: bool) -> Result<(), CallError> {
    if !is_leader {
        return set(pods, pod, Value::Null).await;
    }
    let labelled = bounded(pods.list(&ListParams::default().labels(LEADER_LABEL))).await?;
    let is_named = |found: &Pod| found.metadata.name.as_deref() == Some(pod);
    let label = |found: &Pod| found.metadata.labels.as_ref()?.get(LEADER_LABEL).cloned();
    let is_true = |found: &Pod| label(found).as_deref() == Some("true");
    if !labelled.items.iter().any(|found| is_named(found) && is_true(found)) {
        set(pods, pod, json!("true")).await?;
    }
    for other in labelled.items.iter().filter(|found| !is_named(found)) {
        set(pods, other.metadata.name.as_deref().unwrap_or_default(), Value::Null).await?;
    }
    Ok(())
}

async fn set(pods: &Api<Pod>, pod: &str, value: Value) -> Result<(), CallError> {
    let change = json!({ "metadata": { "labels": { LEADER_LABEL: value } } });
    match bounded(pods.patch(pod, &PatchParams::default(), &Patch::Merge(change))).await {
        Err(error) if is_code(&error, 404) => Ok(()),
        changed => changed.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    use http::Method;
    use http::request::Parts;

    use super::*;
    use crate::kubernetes::fake_api::{FakeApi, fake_client};

    /// The value of the label of each pod.
    #[derive(Default)]
    struct Pods {
        labels: Mutex<BTreeMap<String, Option<String>>>,
        /// The number of calls to refuse.
        refused: Mutex<u32>,
        /// The number of calls that were not refused.
        calls: Mutex<u32>,
    }

    impl FakeApi for Pods {
        async fn answer(&self, head: &Parts, body: &[u8]) -> (u16, Value) {
            let refusal = |code: u16| (code, json!({ "kind": "Status", "status": "Failure", "code": code }));
            let mut refused = self.refused.lock().unwrap();
            if *refused > 0 {
                *refused -= 1;
                return refusal(503);
            }
            let mut labels = self.labels.lock().unwrap();
            *self.calls.lock().unwrap() += 1;
            let pod = |name: &str, label: &Option<String>| {
                json!(
                    { "metadata": { "name": name, "labels": { LEADER_LABEL: label } } }
                )
            };
            if head.method == Method::GET {
                let labelled = labels.iter().filter(|(_, label)| label.is_some());
                let items: Vec<Value> = labelled.map(|(name, label)| pod(name, label)).collect();
                return (
                    200,
                    json!({ "apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items }),
                );
            }
            let name = head.uri.path().rsplit('/').next().unwrap();
            let Some(label) = labels.get_mut(name) else { return refusal(404) };
            let change: Value = serde_json::from_slice(body).unwrap();
            *label = change["metadata"]["labels"][LEADER_LABEL].as_str().map(str::to_owned);
            (200, pod(name, label))
        }
    }

    impl Pods {
        fn leaders(&self) -> Vec<String> {
            let labels = self.labels.lock().unwrap();
            let leaders = labels.iter().filter(|(_, label)| label.as_deref() == Some("true"));
            leaders.map(|(name, _)| name.clone()).collect()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_leader_restores_a_changed_label() {
        let pods = Arc::<Pods>::default();
        *pods.labels.lock().unwrap() = ["a", "b"].map(|name| (name.to_owned(), None)).into();
        let (_leads, leading) = watch::channel(true);
        let a = tokio::spawn(run(fake_client(&pods), "n".to_owned(), "a".to_owned(), leading));
        until(&pods, &["a"]).await;
        for (name, label) in [("a", None), ("a", Some("false")), ("b", Some("true"))] {
            pods.labels.lock().unwrap().insert(name.to_owned(), label.map(str::to_owned));
            until(&pods, &["a"]).await;
        }
        // Nothing is written while nothing differs.
        let before = *pods.calls.lock().unwrap();
        tokio::time::sleep(CHECK_EVERY * 10).await;
        let calls = *pods.calls.lock().unwrap() - before;
        assert!((9..=11).contains(&calls), "{calls} calls");
        a.abort();
    }

    async fn until(pods: &Pods, leaders: &[&str]) {
        for _ in 0..1000 {
            if pods.leaders() == leaders {
                return;
            }
            // The clock is simulated: this lets the other tasks run.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("{:?} lead, not {leaders:?}", pods.leaders());
    }

    #[tokio::test(start_paused = true)]
    async fn the_label_follows_the_leader() {
        let pods = Arc::<Pods>::default();
        let label = |name: &str| (name.to_owned(), Some("true".to_owned()));
        // Pod a led when its container ended; the node of pod c is gone.
        *pods.labels.lock().unwrap() = [label("a"), ("b".to_owned(), None), label("c")].into();
        *pods.refused.lock().unwrap() = 1;
        let (leads, leading) = watch::channel(false);
        let a = tokio::spawn(run(fake_client(&pods), "n".to_owned(), "a".to_owned(), leading));
        until(&pods, &["c"]).await;
        *pods.refused.lock().unwrap() = 2;
        leads.send_replace(true);
        until(&pods, &["a"]).await;
        drop(leads);
        a.await.unwrap();
        // A controller outside of a pod.
        let (_leads, leading) = watch::channel(true);
        let other = tokio::spawn(run(fake_client(&pods), "n".to_owned(), "laptop".to_owned(), leading));
        until(&pods, &[]).await;
        other.abort();
    }
}
