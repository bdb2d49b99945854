//! The parts that a leader in Kubernetes has besides those of every controller.

use std::sync::Arc;

use super::leader_tasks::LeaderTasks;
use super::reconciling::Reconciling;
use crate::api::Api;
use crate::kubernetes::attachments::ClusterAttachments;
use crate::kubernetes::discover::Machines;
use crate::kubernetes::events::EventSender;
use crate::kubernetes::lost_node_pods::PodForceDeleter;
use crate::kubernetes::restage::Restager;
use crate::kubernetes::workloads::ClusterWorkloads;
use crate::kubernetes::{KubernetesConfig, PodsOfLostNodes, signer};
use crate::metrics::Metrics;
use crate::tls::Tls;

/// The connection to the API server, and the machines and events of its cluster.
pub(super) struct InKubernetes {
    client: kube::Client,
    machines: Arc<Machines>,
    events: EventSender,
    /// True if the pods of lost nodes are released.
    force_deletes: bool,
    /// True if those are ended whose device is gone.
    restages: bool,
}

impl InKubernetes {
    pub(super) fn new(
        client: kube::Client,
        machines: Arc<Machines>,
        events: EventSender,
        config: &KubernetesConfig,
    ) -> InKubernetes {
        let force_deletes = config.pods_of_lost_nodes == PodsOfLostNodes::Delete;
        InKubernetes { client, machines, events, force_deletes, restages: config.ends_pods_without_device }
    }

    pub(super) fn events(&self) -> &EventSender {
        &self.events
    }

    /// Has a task answer requests for certificates.
    pub(super) fn sign(&self, tls: &Arc<Tls>, tasks: &mut LeaderTasks) {
        tasks.spawn(signer::run(self.client.clone(), Arc::clone(tls)));
    }

    /// Has tasks end the pods that are to be ended.
    pub(super) fn look_after_pods(
        &self,
        reconciling: &Reconciling,
        metrics: &Metrics,
        tasks: &mut LeaderTasks,
    ) {
        let of = || {
            let (store, fleet) = (Arc::clone(reconciling.store()), Arc::clone(reconciling.fleet()));
            (self.client.clone(), Arc::clone(&self.machines), store, fleet, self.events.clone())
        };
        if self.force_deletes {
            let (client, known, store, fleet, events) = of();
            tasks.spawn(PodForceDeleter::new(client, known, store, fleet, events, metrics.clone()).run());
        }
        if self.restages {
            let (client, known, store, fleet, events) = of();
            tasks.spawn(Restager::new(client, known, store, fleet, events).run());
        }
    }

    /// Returns the API with the attachments and the users of volumes in this cluster.
    pub(super) fn extend(&self, api: Api) -> Api {
        let attachments = ClusterAttachments::new(self.client.clone());
        let workloads = ClusterWorkloads::new(self.client.clone());
        api.with_attachments(Arc::new(attachments)).with_workloads(Arc::new(workloads))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::convert::Infallible;

    use http::{Request, Response};
    use kube::client::Body;
    use shorthorn_controller_core::reconcile::Settings;
    use tower::service_fn;

    use super::*;
    use crate::kubernetes::NodeDrainPolicy;
    use crate::kubernetes::events::events;
    use crate::store::MemoryStore;

    fn cluster(pods_of_lost_nodes: PodsOfLostNodes, ends_pods_without_device: bool) -> InKubernetes {
        let config = KubernetesConfig {
            namespace: "n".to_owned(),
            kubeconfig: None,
            agent_port: 1,
            pods_of_lost_nodes,
            ends_pods_without_device,
            node_drain_policy: NodeDrainPolicy::AlwaysAllow,
            guard_image: None,
        };
        let refused = |_: Request<Body>| async {
            Ok::<_, Infallible>(Response::builder().status(503).body(Body::empty()).unwrap())
        };
        let client = kube::Client::new(service_fn(refused), "n");
        let (events, _recorder) = events(client.clone(), "n", "me");
        InKubernetes::new(client, Machines::new(), events, &config)
    }

    #[tokio::test]
    async fn only_configured_tasks_end_pods() {
        let (nodes, metrics) = (BTreeMap::new(), Metrics::default());
        let reconciling =
            Reconciling::new(Arc::new(MemoryStore::new()), &nodes, None, Settings::default(), &metrics)
                .unwrap();
        for (lost, ends, expected) in [
            (PodsOfLostNodes::Keep, false, 0),
            (PodsOfLostNodes::Keep, true, 1),
            (PodsOfLostNodes::Delete, false, 1),
            (PodsOfLostNodes::Delete, true, 2),
        ] {
            let mut tasks = LeaderTasks::alone();
            cluster(lost, ends).look_after_pods(&reconciling, &metrics, &mut tasks);
            assert_eq!(tasks.count(), expected, "{lost:?}, {ends}");
        }
    }
}
