//! The controller as a daemon.
//!
//! [`serve`] puts the parts together. `open` waits for the lease and gets the store, and `LeaderTasks` holds
//! the lease and the tasks of a leader. `Reconciling` works, and `Servers` listens.

mod in_kubernetes;
mod leader_tasks;
mod open;
mod reconciling;
mod servers;
mod signals;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use shorthorn_metrics::MetricsError;
use shorthorn_pki::address::{AddressError, Listen};
use thiserror::Error;

use self::in_kubernetes::InKubernetes;
use self::leader_tasks::LeaderTasks;
use self::open::{OpenedStore, open};
use self::reconciling::Reconciling;
use self::servers::Servers;
use self::signals::Signals;
use crate::api::Diagnostics;
use crate::config::{Config, DEFAULT_METRICS, StoreConfig};
use crate::kubernetes::ApiServerError;
use crate::kubernetes::store::StoreOpenError;
use crate::metrics::{ControllerMetrics, Metered, Metrics, ReadinessPhase};
use crate::store::{ObjectStore, ObjectStoreError};
use crate::tls::{CaError, CaStorage, Tls};

/// The reason why the controller cannot run, or had to end.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The store cannot be opened, or broke.
    #[error(transparent)]
    Store(#[from] ObjectStoreError),
    /// The API server cannot be reached.
    #[error(transparent)]
    Connect(#[from] ApiServerError),
    /// The objects of Kubernetes cannot be used.
    #[error(transparent)]
    Kubernetes(#[from] StoreOpenError),
    /// Another controller works now, or may.
    #[error("lost leadership: {0}")]
    LeaseLost(String),
    /// The thread of the lease cannot be started.
    #[error("cannot start the thread that renews the lease: {0}")]
    Lease(io::Error),
    /// The operating system gives no random numbers.
    #[error("cannot get random numbers for the name of this controller: {0}")]
    Random(#[from] getrandom::Error),
    /// The cluster's CA cannot be used.
    #[error(transparent)]
    Tls(#[from] CaError),
    /// The address of the API with TLS is taken, or not ours to take.
    #[error("cannot listen on {0}: {1}; choose another --tls-listen")]
    TlsListen(SocketAddr, io::Error),
    /// A node has an address that can never work.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The address of the API is taken, or not ours to take.
    #[error("cannot listen on {0}: {1}; choose another --listen or --csi-listen")]
    Listen(Listen, io::Error),
    /// Another controller answers there.
    #[error("another controller listens on unix://{0}: stop it, or choose another --listen or --csi-listen")]
    ListenTaken(PathBuf),
    /// The address of metrics and health cannot be used.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// Signals cannot be handled.
    #[error("cannot handle signals: {0}")]
    Signal(io::Error),
    /// The API broke.
    #[error("the API server ended: {0}")]
    Api(#[from] tonic::transport::Error),
}

/// Runs the controller until it is stopped.
///
/// # Errors
/// [`ServeError`] if it cannot start or continue.
pub async fn serve(config: Config) -> Result<(), ServeError> {
    let mut signals = Signals::new().map_err(ServeError::Signal)?;
    let source = ControllerMetrics::new(Metrics::default(), Arc::default());
    let shown: Arc<dyn shorthorn_metrics::MetricsSource> = Arc::<ControllerMetrics>::clone(&source);
    let _metrics = shorthorn_metrics::start(config.metrics_listen, DEFAULT_METRICS, shown).await?;
    let mut servers = Servers::new();
    let stands_by = matches!(config.store, StoreConfig::Kubernetes(_));
    if let Some(address) = config.csi_listen.as_ref().filter(|_| stands_by) {
        // Before the wait for the lease: sidecars give up on a missing socket.
        servers.serve_csi(address).await?;
    }
    // If another controller runs already, this one ends or waits here, before it touches anything else.
    let opened = tokio::select! {
        opened = open(&config.store, source.readiness()) => opened?,
        Some(ended) = servers.ended() => return ended,
        name = signals.next() => {
            tracing::info!(signal = name, "stopping");
            servers.remove_sockets();
            return Ok(());
        }
    };
    let mut controller = ControllerDaemon::new(config, opened, source).await?;
    controller.serve(&mut servers).await?;
    controller.started();
    let result = match controller.work(&mut servers, &mut signals).await {
        ServeEnd::AtOnce(result) => return result,
        ServeEnd::InOrder(result) => result,
    };
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    // No work has to be completed: the next start continues it.
    servers.stop().await;
    controller.release(servers).await;
    result
}

/// The end of the work of a controller.
enum ServeEnd {
    /// Another controller may start to work within seconds.
    AtOnce(Result<(), ServeError>),
    /// Calls may end, and the lease is released.
    InOrder(Result<(), ServeError>),
}

/// A controller that has opened its store, and may lead.
struct ControllerDaemon {
    config: Config,
    source: Arc<ControllerMetrics>,
    reconciling: Reconciling,
    tls: Arc<Tls>,
    /// None outside of Kubernetes.
    kubernetes: Option<InKubernetes>,
    tasks: LeaderTasks,
}

impl ControllerDaemon {
    /// Opens the CA, and starts the tasks that need no server.
    async fn new(
        config: Config,
        opened: OpenedStore,
        source: Arc<ControllerMetrics>,
    ) -> Result<ControllerDaemon, ServeError> {
        let OpenedStore { ca_storage, store, mut tasks, kubernetes } = opened;
        let (metrics, readiness) = (source.metrics(), Arc::clone(source.readiness()));
        let store = Arc::new(Metered::new(store, metrics.clone(), readiness));
        tasks.spawn(Arc::clone(&store).follow());
        let (tls, mut tasks) = open_tls(ca_storage, store.cluster(), tasks).await?;
        let (nodes, credentials) = (&config.nodes, Some(tls.credentials().clone()));
        let events = kubernetes.as_ref().map(|kubernetes| kubernetes.events().clone());
        let reconciling =
            Reconciling::new(store, nodes, credentials, config.settings, metrics)?.with_events(events);
        tasks.spawn(Arc::clone(&tls).run(Arc::clone(reconciling.fleet())));
        source.show_tls(Arc::clone(&tls));
        reconciling.show(&source);
        if let Some(kubernetes) = &kubernetes {
            kubernetes.sign(&tls, &mut tasks);
            kubernetes.look_after_pods(&reconciling, metrics, &mut tasks);
        }
        Ok(ControllerDaemon { config, source, reconciling, tls, kubernetes, tasks })
    }

    /// Serves the API and CSI on all configured addresses.
    async fn serve(&self, servers: &mut Servers) -> Result<(), ServeError> {
        let config = &self.config;
        let configuration = format!("{config:#?}\n");
        let diagnostics = Diagnostics { source: Arc::clone(&self.source), configuration };
        let mut api = self.reconciling.api(servers.stopping()).with_diagnostics(diagnostics);
        if let Some(kubernetes) = &self.kubernetes {
            api = kubernetes.extend(api);
        }
        for address in std::iter::once(&config.listen).chain(&config.forward_listen) {
            servers.serve_api(address, &api, &self.tls).await?;
        }
        if let Some(address) = config.tls_listen {
            servers.serve_tls(address, api, &self.tls).await?;
        }
        if let Some(address) = &config.csi_listen {
            servers.serve_csi(address).await?;
            servers.open_csi(self.reconciling.csi(servers.stopping()));
            tracing::info!(csi = %address, "CSI is served");
        }
        Ok(())
    }

    /// Reports that this controller serves.
    fn started(&self) {
        self.tasks.announce();
        self.source.readiness().reached(ReadinessPhase::Leading);
        let config = &self.config;
        tracing::info!(store = %config.store, listen = %config.listen, nodes = config.nodes.len(), "ready");
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    }

    /// Reconciles until a signal, or until this controller cannot continue.
    async fn work(&mut self, servers: &mut Servers, signals: &mut Signals) -> ServeEnd {
        tokio::select! {
            result = self.reconciling.run() => ServeEnd::InOrder(result.map_err(ServeError::Store)),
            error = self.tasks.lost() => ServeEnd::AtOnce(Err(error)),
            Some(ended) = servers.ended() => ServeEnd::AtOnce(ended),
            name = signals.next() => {
                tracing::info!(signal = name, "stopping");
                ServeEnd::InOrder(Ok(()))
            }
        }
    }

    /// Lets another controller lead at once. Nothing of this one may act then.
    async fn release(self, servers: Servers) {
        servers.shutdown().await;
        self.tasks.release().await;
    }
}

/// Opens the cluster's CA while this controller has the lease.
async fn open_tls(
    ca_storage: Arc<dyn CaStorage>,
    cluster: &str,
    mut tasks: LeaderTasks,
) -> Result<(Arc<Tls>, LeaderTasks), ServeError> {
    match tasks.during(Tls::open(ca_storage, cluster)).await? {
        Ok(tls) => Ok((tls, tasks)),
        Err(error) => {
            // The next attempt, maybe of another controller, need not wait for the end of this lease.
            tasks.release().await;
            Err(error.into())
        }
    }
}
