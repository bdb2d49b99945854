//! Ends pods whose device is gone, so that their volumes are staged again (`controller_core::dead_mounts`
//! decides which).
//!
//! Agents say every 30 s which mounts are dead, and less often with more than 2,400 nodes. Pods are read only
//! of nodes that have some, and each deletion names the pod that it means.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod as KubePod;
use kube::Client;
use kube::api::{Api, ListParams};
use shorthorn_controller_core::dead_mounts;
use shorthorn_controller_core::lost_node_pods::Pod;
use shorthorn_controller_core::objects::{Key, Kind};
use shorthorn_controller_core::observed::DeadMount;
use shorthorn_controller_core::{Event, NodeName};
use shorthorn_kube::{CallError, bounded};

use super::discover::Machines;
use super::events::EventSender;
use super::list_watch::list;
use super::lost_node_pods::{deleted, exactly, read};
use crate::agents::Fleet;
use crate::backoff::backoff;
use crate::store::ObjectStore;

/// The interval at which the observed agents are examined.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Reasons of events.
const ENDED: &str = "PodEnded";
const NOT_ENDED: &str = "PodNotEnded";

/// The shared state of the restager.
pub struct Restager {
    client: Client,
    machines: Arc<Machines>,
    store: Arc<dyn ObjectStore>,
    fleet: Arc<Fleet>,
    events: EventSender,
}

impl std::fmt::Debug for Restager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Restager").finish_non_exhaustive()
    }
}

impl Restager {
    /// Creates a restager.
    #[must_use]
    pub fn new(
        client: Client,
        machines: Arc<Machines>,
        store: Arc<dyn ObjectStore>,
        fleet: Arc<Fleet>,
        events: EventSender,
    ) -> Restager {
        Restager { client, machines, store, fleet, events }
    }

    /// Looks after the pods of all nodes, until it is dropped.
    pub async fn run(self) {
        let mut failures = 0;
        // The reported pods.
        let mut reported = BTreeSet::new();
        loop {
            let wait = match self.round(&mut reported).await {
                Ok(()) => {
                    failures = 0;
                    LOOK_EVERY
                }
                Err(error) => {
                    failures += 1;
                    tracing::warn!(%error, "pods whose device is gone are not ended");
                    LOOK_EVERY.max(backoff(failures))
                }
            };
            tokio::time::sleep(wait).await;
        }
    }

    async fn round(&self, reported: &mut BTreeSet<String>) -> Result<(), CallError> {
        let nodes = dead_mounts::nodes(&self.fleet.agents());
        let is_dead =
            |uid: &String| nodes.iter().any(|(_, mounts)| mounts.iter().any(|mount| mount.pod_uid == *uid));
        reported.retain(is_dead);
        let Some(kubernetes) = self.machines.kubernetes().filter(|_| !nodes.is_empty()) else {
            return Ok(());
        };
        for (node, mounts) in &nodes {
            let machines = kubernetes.drivers.iter().filter(|(_, driver)| driver.as_str() == node.as_str());
            for (machine, _) in machines {
                self.look_at(machine, node, mounts, reported).await?;
            }
        }
        Ok(())
    }

    async fn look_at(
        &self,
        machine: &str,
        node: &NodeName,
        mounts: &[DeadMount],
        reported: &mut BTreeSet<String>,
    ) -> Result<(), CallError> {
        let api: Api<KubePod> = Api::all(self.client.clone());
        let there = ListParams::default().fields(&format!("spec.nodeName={machine}"));
        let (pods, _) = list(&api, there, |pod| read::pod(&pod)).await?;
        let plan = dead_mounts::plan(mounts, &pods);
        for (pod, volumes) in plan.end {
            let api: Api<KubePod> = Api::namespaced(self.client.clone(), &pod.name.namespace);
            if deleted(bounded(api.delete(&pod.name.name, &exactly(&pod.uid))).await)? {
                self.record_end(node, &pod, &volumes);
            }
        }
        for (pod, volumes) in plan.report {
            if reported.insert(pod.uid.clone()) {
                let message = format!(
                    "the device of volume {} is gone, and no controller would re-create the pod: delete it \
                     and create it again",
                    volumes.join(", ")
                );
                tracing::warn!(pod = %pod.name, "{message}");
                let event = Event { about: pod.name, warning: true, reason: NOT_ENDED, message };
                self.events.record_of_pod(event, &pod.uid);
            }
        }
        Ok(())
    }

    fn record_end(&self, node: &NodeName, pod: &Pod, volumes: &[String]) {
        let message = format!(
            "the device of volume {} is gone: deleting the pod, so that the volume is staged again",
            volumes.join(", ")
        );
        tracing::warn!(%node, pod = %pod.name, "{message}");
        let event = Event { about: pod.name.clone(), warning: true, reason: ENDED, message };
        self.events.record_of_pod(event, &pod.uid);
        let cluster = self.store.state();
        for volume in volumes {
            let about = Key::new(Kind::Volume, volume);
            let message = format!("pod {} on node {node} is ended, because its device is gone", pod.name);
            if let Some(uid) = cluster.uid(&about) {
                self.events.record(&Event { about, warning: true, reason: ENDED, message }, Some(uid));
            }
        }
    }
}

#[cfg(test)]
mod tests;
