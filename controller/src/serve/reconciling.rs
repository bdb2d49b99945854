//! The stored objects, the agents, and the work between them.

use std::collections::BTreeMap;
use std::sync::Arc;

use shorthorn_controller_core::NodeName;
use shorthorn_controller_core::reconcile::{Settings, is_urgent};
use shorthorn_pki::Credentials;
use shorthorn_pki::address::{AddressError, ServerUrl};
use tokio::sync::{mpsc, watch};

use crate::agents::Fleet;
use crate::api::Api;
use crate::csi::CsiController;
use crate::kubernetes::events::EventSender;
use crate::metrics::{ControllerMetrics, Metrics};
use crate::store::{ObjectStore, ObjectStoreError};
use crate::work::{WorkQueue, Worker};

/// The reconcilers with their store, agents and queue, and the services that use the same.
pub(super) struct Reconciling {
    store: Arc<dyn ObjectStore>,
    fleet: Arc<Fleet>,
    queue: Arc<WorkQueue>,
    settings: Settings,
    metrics: Metrics,
    /// None: people see nothing but the log.
    events: Option<EventSender>,
}

impl Reconciling {
    /// Creates the fleet of `nodes`; nothing is connected yet.
    ///
    /// # Errors
    /// [`AddressError`] for a URL that can never work.
    pub(super) fn new(
        store: Arc<dyn ObjectStore>,
        nodes: &BTreeMap<NodeName, ServerUrl>,
        credentials: Option<Credentials>,
        settings: Settings,
        metrics: &Metrics,
    ) -> Result<Reconciling, AddressError> {
        let seen = Arc::clone(&store);
        let queue = Arc::new(WorkQueue::with_urgent(move |key| is_urgent(&seen.state(), key)));
        let (kept, woken) = (Arc::clone(&store), Arc::clone(&queue));
        let fleet = Fleet::with_tls(nodes, kept, woken, metrics.clone(), credentials)?;
        Ok(Reconciling { store, fleet, queue, settings, metrics: metrics.clone(), events: None })
    }

    /// Sets the recipient of events on objects.
    pub(super) fn with_events(self, events: Option<EventSender>) -> Reconciling {
        Reconciling { events, ..self }
    }

    pub(super) fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    pub(super) fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    /// Shows objects, agents and queue as metrics.
    pub(super) fn show(&self, source: &ControllerMetrics) {
        source.show(Arc::clone(&self.store), Arc::clone(&self.fleet), Arc::clone(&self.queue));
    }

    /// Returns the API, whose streams end once `stopping` is true.
    pub(super) fn api(&self, stopping: watch::Receiver<bool>) -> Api {
        Api::new(Arc::clone(&self.store), Arc::clone(&self.fleet), stopping, self.settings)
    }

    /// Returns the service of CSI, whose waits end once `stopping` is true.
    pub(super) fn csi(&self, stopping: watch::Receiver<bool>) -> CsiController {
        let (store, fleet) = (Arc::clone(&self.store), Arc::clone(&self.fleet));
        let csi = CsiController::new(store, fleet, stopping, self.settings, self.metrics.clone());
        csi.with_events(self.events.clone())
    }

    /// Follows the agents and reconciles, until it is dropped or the store breaks.
    ///
    /// # Errors
    /// The error of the store.
    pub(super) async fn run(&self) -> Result<(), ObjectStoreError> {
        let (broken_sender, mut broken) = mpsc::channel(1);
        let worker = Worker::new(
            Arc::clone(&self.store),
            Arc::clone(&self.fleet),
            Arc::clone(&self.queue),
            broken_sender,
            self.events.clone(),
            self.settings,
            self.metrics.clone(),
        );
        tokio::select! {
            () = worker.run() => Ok(()),
            () = Arc::clone(&self.fleet).run() => Ok(()),
            Some(error) = broken.recv() => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_controller_core::objects::{Key, Kind};

    use super::*;
    use crate::store::MemoryStore;
    use crate::store::failing::FailingStore;

    fn reconciling(store: impl ObjectStore) -> Reconciling {
        let url = "unix:///nonexistent/agent.sock".parse().unwrap();
        let nodes = BTreeMap::from([("a".parse().unwrap(), url)]);
        Reconciling::new(Arc::new(store), &nodes, None, Settings::default(), &Metrics::default()).unwrap()
    }

    #[tokio::test]
    async fn nodes_of_the_configuration_get_objects() {
        let reconciling = reconciling(MemoryStore::new());
        let mut changes = reconciling.store().changes();
        tokio::select! {
            ended = reconciling.run() => panic!("{ended:?}"),
            key = changes.recv() => assert_eq!(key.unwrap(), Key::new(Kind::Node, "a")),
        }
    }

    #[tokio::test]
    async fn a_broken_store_ends_the_work() {
        let ended = reconciling(FailingStore::full()).run().await;
        assert!(matches!(ended, Err(ObjectStoreError::Write { .. })), "{ended:?}");
    }
}
