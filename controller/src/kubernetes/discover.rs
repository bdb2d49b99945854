//! Makes Node objects for the machines of a Kubernetes cluster that have an agent, and keeps their addresses
//! right.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node as KubeNode;
use k8s_openapi::api::storage::v1::CSINode;
use kube::{Api, Client};
use shorthorn_controller_core::discovery::{self, KubernetesCluster, NotFound};
use shorthorn_controller_core::objects::{Kind, Node};
use shorthorn_controller_core::{ClusterState, Timestamp};
use shorthorn_csi::DRIVER_NAME;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;

use super::reflector::Reflector;
use crate::backoff::wait_after;
use crate::store::{ChangeError, ObjectStore, change};

/// The relevant state of the machines in Kubernetes, kept up to date by [`discover`].
#[derive(Debug)]
pub struct Machines {
    machines: Reflector<discovery::Machine>,
    drivers: Reflector<String>,
}

/// Wakes a task after changes of [`Machines`].
#[derive(Debug)]
pub struct MachineChanges {
    machines: watch::Receiver<()>,
    drivers: watch::Receiver<()>,
}

impl Machines {
    /// Creates an empty state.
    #[must_use]
    pub fn new() -> Arc<Machines> {
        Arc::new(Machines { machines: Reflector::new(), drivers: Reflector::new() })
    }

    /// Returns the whole cluster, once it is known.
    #[must_use]
    pub fn kubernetes(&self) -> Option<KubernetesCluster> {
        Some(KubernetesCluster { machines: self.machines.all()?, drivers: self.drivers.all()? })
    }

    /// Returns a cluster whose machines have these nodes.
    #[cfg(test)]
    pub(super) fn with_drivers(drivers: &[(&str, &str)]) -> Arc<Machines> {
        let machines = Machines::new();
        let named = drivers.iter().map(|(machine, node)| ((*machine).to_owned(), (*node).to_owned()));
        machines.machines.replace(std::collections::BTreeMap::new());
        machines.drivers.replace(named.collect());
        machines
    }

    /// Subscribes to later changes.
    #[must_use]
    pub fn changes(&self) -> MachineChanges {
        MachineChanges { machines: self.machines.changes(), drivers: self.drivers.changes() }
    }
}

impl MachineChanges {
    /// Waits for the next change.
    pub async fn next(&mut self) {
        let changed = tokio::select! {
            changed = self.machines.changed() => changed,
            changed = self.drivers.changed() => changed,
        };
        if changed.is_err() {
            // The followed store is gone, and with it the controller.
            std::future::pending::<()>().await;
        }
    }
}

/// Keeps `known` and the Node objects up to date, until it is dropped. Agents answer at `port` of their
/// machines.
pub async fn discover(client: Client, known: Arc<Machines>, store: Arc<dyn ObjectStore>, port: u16) {
    tokio::join!(
        known.machines.follow(Api::all(client.clone()), machine),
        known.drivers.follow(Api::all(client), driver),
        record(&known, store.as_ref(), port),
    );
}

fn machine(node: &KubeNode) -> Option<discovery::Machine> {
    let labels = node.metadata.labels.clone().unwrap_or_default();
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let pairs = addresses.map(|address| (address.type_.as_str(), address.address.as_str()));
    let is_cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false);
    Some(discovery::Machine {
        is_ready: is_ready(node),
        is_cordoned,
        ..discovery::Machine::of(&labels, pairs)
    })
}

/// Returns true if Kubernetes reports that the kubelet of the machine is ready.
pub(super) fn is_ready(node: &KubeNode) -> bool {
    let mut conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Returns the name that Shorthorn's driver has there.
fn driver(node: &CSINode) -> Option<String> {
    let ours = node.spec.drivers.iter().find(|driver| driver.name == DRIVER_NAME);
    ours.map(|driver| driver.node_id.clone())
}

async fn record(known: &Machines, store: &dyn ObjectStore, port: u16) {
    let (mut changes, mut found) = (store.changes(), known.changes());
    let mut reported = Vec::new();
    let mut failures = 0;
    loop {
        if let Some(kubernetes) = known.kubernetes() {
            failures = match record_all(store, &kubernetes, port, &mut reported).await {
                Ok(()) => 0,
                Err(error) => {
                    tracing::warn!(?error, "a node that was found is not recorded");
                    failures + 1
                }
            };
        }
        tokio::select! {
            () = found.next() => {}
            () = node_changed(&mut changes) => {}
            () = wait_after(failures) => {}
        }
    }
}

/// Waits for a change of one of the controller's Node objects, because a deleted one is created again.
async fn node_changed(changes: &mut Receiver<shorthorn_controller_core::objects::Key>) {
    loop {
        match changes.recv().await {
            Ok(key) if key.kind != Kind::Node => {}
            Ok(_) | Err(RecvError::Lagged(_)) => return,
            // The store is gone, and with it the controller.
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}

async fn record_all(
    store: &dyn ObjectStore,
    kubernetes: &KubernetesCluster,
    port: u16,
    reported: &mut Vec<NotFound>,
) -> Result<(), ChangeError<std::convert::Infallible>> {
    let (found, not_found) = discovery::agents(kubernetes, port, Timestamp::now());
    for problem in not_found.iter().filter(|problem| !reported.contains(problem)) {
        tracing::warn!("{problem}");
    }
    *reported = not_found;
    for (name, discovered) in found {
        let recorded =
            |cluster: &ClusterState| Ok(discovery::recorded(cluster, &name, &discovered, Timestamp::now()));
        change::<Node, _>(store, recorded).await?;
    }
    Ok(())
}
