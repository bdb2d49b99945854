//! The controller as a daemon.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use shorthorn_api::v1::controller_server::ControllerServer;
use shorthorn_controller_core::reconcile::is_urgent;
use shorthorn_csi::{DRIVER_NAME, Identity};
use shorthorn_metrics::MetricsError;
use shorthorn_pki::address::{AddressError, Listen};
use shorthorn_pki::{AccessLayer, ClientAuth, Limits};
use thiserror::Error;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tonic::transport::Server;
use tonic::transport::server::Router;

use crate::agents::Fleet;
use crate::api::{Api, Diagnostics};
use crate::config::{Config, DEFAULT_METRICS, StoreConfig};
use crate::csi::{CsiController, CsiGate};
use crate::kubernetes::attachments::ClusterAttachments;
use crate::kubernetes::claims::record_claims;
use crate::kubernetes::discover::{Machines, discover};
use crate::kubernetes::events::{Events, events};
use crate::kubernetes::guard_pods::GuardPods;
use crate::kubernetes::leader_pod;
use crate::kubernetes::lease_thread::{END_LIMIT, LeaseThread};
use crate::kubernetes::lost_node_pods::PodForceDeleter;
use crate::kubernetes::restage::Restager;
use crate::kubernetes::workloads::ClusterWorkloads;
use crate::kubernetes::{ConnectError, KubernetesConfig, PodsOfLostNodes, connect};
use crate::metrics::{ControllerMetrics, Metered, Metrics, Readiness, ReadinessPhase};
use crate::store::kubernetes::OpenError;
use crate::store::{KubeStore, RedbStore, Store, StoreError};
use crate::tls::{Keeper, SecretKeeper, Tls, TlsApi, TlsError, signer};
use crate::work::{Queue, Worker};

/// The time limit for running calls after the controller was stopped.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// The interval of probes of a silent connection, and the time limit of the answer.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// The time that the decisions of a new leader wait for the PersistentVolumes of Kubernetes to be listed and
/// recorded.
const CLAIMS_LIMIT: Duration = Duration::from_secs(10);
/// The time limit for the last line of the log.
const LOG_LIMIT: Duration = Duration::from_millis(100);
/// The most calls of one sidecar at once; more wait.
const CSI_CALLS_MAX: usize = 256;
/// The most calls of one connection with TLS at once; more wait. A stranger may send requests of 64 KiB.
const TLS_CALLS_MAX: usize = 64;

/// The reason why the controller cannot run, or had to end.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The store cannot be opened, or broke.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The API server cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The objects of Kubernetes cannot be used.
    #[error(transparent)]
    Kubernetes(#[from] OpenError),
    /// Another controller works now, or may.
    #[error("lost leadership: {0}")]
    LeaseLost(String),
    /// The thread of the lease cannot be started.
    #[error("cannot start the thread that renews the lease: {0}")]
    Lease(io::Error),
    /// The operating system gives no random numbers.
    #[error("no random numbers for a name of this controller: {0}")]
    Random(#[from] getrandom::Error),
    /// The cluster's CA cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
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
    let (metrics, readiness) = (Metrics::default(), Arc::<Readiness>::default());
    let source = ControllerMetrics::new(metrics.clone(), Arc::clone(&readiness));
    let shown: Arc<dyn shorthorn_metrics::MetricsSource> = Arc::<ControllerMetrics>::clone(&source);
    let _metrics = shorthorn_metrics::start(config.metrics_listen, DEFAULT_METRICS, shown).await?;
    let (stop, stopping) = watch::channel(false);
    let (gate, mut servers) = (CsiGate::default(), JoinSet::new());
    let stands_by = matches!(config.store, StoreConfig::Kubernetes(_));
    if let Some(address) = config.csi_listen.as_ref().filter(|_| stands_by) {
        // Before the wait for the lease: sidecars give up on a missing socket.
        servers.spawn(listen(address.clone(), csi_router(&gate), &stopping).await?);
    }
    // What ends one controller too many, or has it wait, before it touches anything else.
    let opened = tokio::select! {
        opened = open(&config.store, &readiness) => opened?,
        Some(ended) = servers.join_next() => return ended.unwrap_or(Ok(())).map_err(ServeError::Api),
        name = signals.next() => {
            tracing::info!(signal = name, "stopping");
            remove_socket(config.csi_listen.as_ref());
            return Ok(());
        }
    };
    let Opened { keeper, signer, store, mut lease, leads, events, attachments, workloads, pods, mut tasks } =
        opened;
    let store = Arc::new(Metered::new(store, metrics.clone(), Arc::clone(&readiness)));
    tasks.spawn(Arc::clone(&store).follow());
    let store: Arc<dyn Store> = store;
    let opened = tokio::select! {
        opened = Tls::open(keeper, store.cluster()) => opened,
        reason = lost(lease.as_mut()) => return Err(ServeError::LeaseLost(reason)),
    };
    let tls = match opened {
        Ok(tls) => tls,
        Err(error) => {
            if let Some(lease) = lease {
                // The next attempt, maybe of another controller, need not wait for the end of this lease.
                tasks.shutdown().await;
                lease.release().await;
            }
            return Err(error.into());
        }
    };
    let seen = Arc::clone(&store);
    let queue = Arc::new(Queue::with_urgent(move |key| is_urgent(&seen.state(), key)));
    let (kept, credentials) = (Arc::clone(&store), tls.credentials().clone());
    let fleet = Fleet::with_tls(&config.nodes, kept, Arc::clone(&queue), metrics.clone(), Some(credentials))?;
    tasks.spawn(Arc::clone(&tls).run(Arc::clone(&fleet)));
    if let Some(client) = signer {
        tasks.spawn(signer::run(client, Arc::clone(&tls)));
    }
    source.show_tls(Arc::clone(&tls));
    source.show(Arc::clone(&store), Arc::clone(&fleet), Arc::clone(&queue));
    if let (Some(pods), Some(events)) = (pods, events.clone()) {
        pods.look_after(&store, &fleet, &events, &metrics, &mut tasks);
    }
    let (broken_sender, mut broken) = mpsc::channel(1);
    let settings = config.settings;
    let worker = Worker::new(
        Arc::clone(&store),
        Arc::clone(&fleet),
        queue,
        broken_sender,
        events.clone(),
        settings,
        metrics.clone(),
    );
    let mut api = Api::new(Arc::clone(&store), Arc::clone(&fleet), stopping.clone(), settings);
    api = api.with_diagnostics(Diagnostics { source, configuration: format!("{config:#?}\n") });
    if let Some(attachments) = attachments {
        api = api.with_attachments(Arc::new(attachments));
    }
    if let Some(workloads) = workloads {
        api = api.with_workloads(Arc::new(workloads));
    }
    let csi = CsiController::new(store, Arc::clone(&fleet), stopping.clone(), settings, metrics)
        .with_events(events);
    for address in std::iter::once(&config.listen).chain(&config.forward_listen) {
        let tls_api = TlsApi::new(Arc::clone(&tls)).server();
        let api = server().add_service(ControllerServer::new(api.clone())).add_service(tls_api);
        servers.spawn(listen(address.clone(), api, &stopping).await?);
    }
    if let Some(address) = config.tls_listen {
        servers.spawn(listen_tls(address, api.clone(), &tls, &stopping).await?);
    }
    if let Some(address) = &config.csi_listen {
        if !stands_by {
            servers.spawn(listen(address.clone(), csi_router(&gate), &stopping).await?);
        }
        gate.open(csi);
        tracing::info!(csi = %address, "CSI is served");
    }

    if let Some(leads) = &leads {
        leads.send_replace(true);
    }
    readiness.reached(ReadinessPhase::Leading);
    tracing::info!(store = %config.store, listen = %config.listen, nodes = config.nodes.len(), "ready");
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    let result = tokio::select! {
        () = worker.run() => Ok(()),
        () = fleet.run() => Ok(()),
        Some(error) = broken.recv() => Err(error.into()),
        // At once: another one may start to work within seconds.
        reason = lost(lease.as_mut()) => return Err(ServeError::LeaseLost(reason)),
        Some(ended) = servers.join_next() => return ended.unwrap_or(Ok(())).map_err(ServeError::Api),
        name = signals.next() => {
            tracing::info!(signal = name, "stopping");
            Ok(())
        }
    };
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    // No work has to be completed: the next start continues it.
    let _ = stop.send(true);
    let ended = async { while servers.join_next().await.is_some() {} };
    if tokio::time::timeout(STOP_LIMIT, ended).await.is_err() {
        tracing::warn!("clients keep their connections open; exiting anyway");
    }
    remove_socket(Some(&config.listen));
    remove_socket(config.forward_listen.as_ref());
    remove_socket(config.csi_listen.as_ref());
    if let Some(lease) = lease {
        // Nothing may act once another controller can lead.
        servers.shutdown().await;
        tasks.shutdown().await;
        lease.release().await;
    }
    result
}

fn remove_socket(address: Option<&Listen>) {
    if let Some(Listen::Unix(path)) = address {
        let _ = std::fs::remove_file(path);
    }
}

/// The store, and the parts for Kubernetes that belong to it.
struct Opened {
    /// The place for the CA.
    keeper: Arc<dyn Keeper>,
    /// The API server with requests for certificates; none: without Kubernetes.
    signer: Option<kube::Client>,
    store: Arc<dyn Store>,
    lease: Option<LeaseThread>,
    /// Notified once this controller serves as the leader.
    leads: Option<watch::Sender<bool>>,
    events: Option<Events>,
    attachments: Option<ClusterAttachments>,
    workloads: Option<ClusterWorkloads>,
    /// The connections to pods; none outside of Kubernetes.
    pods: Option<Pods>,
    /// The tasks, which end when this is dropped.
    tasks: JoinSet<()>,
}

/// The connections to pods.
struct Pods {
    client: kube::Client,
    known: Arc<Machines>,
    /// True if the pods of lost nodes are released.
    force_deletes: bool,
    /// True if those are ended whose device is gone.
    restages: bool,
}

impl Pods {
    /// Has tasks end the pods that are to be ended.
    fn look_after(
        self,
        store: &Arc<dyn Store>,
        fleet: &Arc<Fleet>,
        events: &Events,
        metrics: &Metrics,
        tasks: &mut JoinSet<()>,
    ) {
        let of = || (self.client.clone(), Arc::clone(&self.known), Arc::clone(store), Arc::clone(fleet));
        if self.force_deletes {
            let (client, known, store, fleet) = of();
            let force_deleter =
                PodForceDeleter::new(client, known, store, fleet, events.clone(), metrics.clone());
            tasks.spawn(force_deleter.run());
        }
        if self.restages {
            let (client, known, store, fleet) = of();
            tasks.spawn(Restager::new(client, known, store, fleet, events.clone()).run());
        }
    }
}

/// Opens the store; with Kubernetes once this controller leads.
async fn open(config: &StoreConfig, readiness: &Readiness) -> Result<Opened, ServeError> {
    match config {
        StoreConfig::File(path) => {
            let store = Arc::new(RedbStore::open(path)?);
            Ok(Opened {
                keeper: store.keeper(),
                signer: None,
                store,
                lease: None,
                leads: None,
                events: None,
                attachments: None,
                workloads: None,
                pods: None,
                tasks: JoinSet::new(),
            })
        }
        StoreConfig::Kubernetes(config) => lead(config, readiness).await,
    }
}

async fn lead(config: &KubernetesConfig, readiness: &Readiness) -> Result<Opened, ServeError> {
    let client = connect(config).await?;
    let status = "waiting for the lease".to_owned();
    // Standing by is all that can be asked of it for now.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Status(&status), sd_notify::NotifyState::Ready]);
    let host = host();
    let identity = format!("{host}-{:08x}", getrandom::u32()?);
    let mut tasks = JoinSet::new();
    let (leads, leading) = watch::channel(false);
    // The name of a pod is the name of its host.
    tasks.spawn(leader_pod::run(client.clone(), config.namespace.clone(), host, leading));
    let looked = |error: Option<String>| match error {
        None => readiness.reached(ReadinessPhase::StandingBy),
        error => readiness.heard(error),
    };
    let mut lease = LeaseThread::start(config, identity.clone(), end).map_err(ServeError::Lease)?;
    let leader = lease.acquired(looked).await.map_err(ServeError::LeaseLost)?;
    readiness.reached(ReadinessPhase::Opening);
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Status("leading")]);
    let (events, recorder) = events(client.clone(), &config.namespace, &identity);
    tasks.spawn(recorder.run());
    let opened = tokio::select! {
        opened = KubeStore::open(client.clone(), &config.namespace, events.clone()) => opened,
        reason = lease.lost() => return Err(ServeError::LeaseLost(reason)),
    };
    let store: Arc<dyn Store> = match opened {
        Ok(store) => Arc::new(store.led_by(leader)),
        Err(error) => {
            // Nothing was begun, and the next attempt need not wait for the end of this lease.
            lease.release().await;
            return Err(error.into());
        }
    };
    let known = Machines::new();
    tasks.spawn(discover(client.clone(), Arc::clone(&known), Arc::clone(&store), config.agent_port));
    let (first, recorded) = oneshot::channel();
    tasks.spawn(record_claims(client.clone(), Arc::clone(&store), first));
    // Objects that were deleted without a leader are judged by the current needs of Kubernetes, not by the
    // notes of an earlier controller.
    tokio::select! {
        recorded = tokio::time::timeout(CLAIMS_LIMIT, recorded) => if recorded.is_err() {
            tracing::warn!("PersistentVolumes are not listed yet; continuing with the stored claims");
        },
        reason = lease.lost() => return Err(ServeError::LeaseLost(reason)),
    }
    let (machines, kept, image) = (Arc::clone(&known), Arc::clone(&store), config.guards());
    let guards = GuardPods::new(client.clone(), &config.namespace, image, machines, kept, events.clone());
    tasks.spawn(guards.run());
    let attachments = Some(ClusterAttachments::new(client.clone()));
    let workloads = Some(ClusterWorkloads::new(client.clone()));
    let force_deletes = config.pods_of_lost_nodes == PodsOfLostNodes::Delete;
    let keeper: Arc<dyn Keeper> = Arc::new(SecretKeeper::new(client.clone(), &config.namespace));
    let signer = Some(client.clone());
    let pods = Some(Pods { client, known, force_deletes, restages: config.ends_pods_without_device });
    let (lease, events) = (Some(lease), Some(events));
    let leads = Some(leads);
    Ok(Opened { keeper, signer, store, lease, leads, events, attachments, workloads, pods, tasks })
}

/// Returns the name of the host or the pod.
fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// Returns the reason when the lease is lost; never returns without a lease.
async fn lost(lease: Option<&mut LeaseThread>) -> String {
    match lease {
        Some(lease) => lease.lost().await,
        None => std::future::pending().await,
    }
}

/// Ends the process, which hangs, as another controller may work by now.
#[expect(clippy::exit, reason = "the threads that could end it in order do not run")]
fn end() {
    // A log that blocks does not delay the end.
    std::thread::spawn(|| {
        tracing::error!("the lease is lost, and the controller did not end within {} s", END_LIMIT.as_secs());
    });
    std::thread::sleep(LOG_LIMIT);
    std::process::exit(1);
}

type Serving = std::pin::Pin<Box<dyn Future<Output = Result<(), tonic::transport::Error>> + Send>>;

fn server() -> Server {
    Server::builder().http2_keepalive_interval(Some(KEEPALIVE)).http2_keepalive_timeout(Some(KEEPALIVE))
}

fn csi_router(gate: &CsiGate) -> Router {
    let identity = Identity::new(DRIVER_NAME, env!("CARGO_PKG_VERSION")).ready_while(gate.ready());
    let mut server = server().concurrency_limit_per_connection(CSI_CALLS_MAX);
    server.add_service(identity.server()).add_service(gate.clone())
}

/// Binds the address, and returns the server.
async fn listen(
    listen: Listen,
    router: Router,
    stopping: &watch::Receiver<bool>,
) -> Result<Serving, ServeError> {
    let mut stopping = stopping.clone();
    let stopped = async move {
        // An error means that the sender is gone, and with it the controller.
        let _ = stopping.wait_for(|stopping| *stopping).await;
    };
    match &listen {
        Listen::Unix(path) => {
            let listener = bind(path).await?;
            let incoming = UnixListenerStream::new(listener);
            Ok(Box::pin(router.serve_with_incoming_shutdown(incoming, stopped)))
        }
        Listen::Tcp(address) => {
            let listener = TcpListener::bind(address).await;
            let listener = listener.map_err(|error| ServeError::Listen(listen.clone(), error))?;
            let incoming = TcpListenerStream::new(listener);
            Ok(Box::pin(router.serve_with_incoming_shutdown(incoming, stopped)))
        }
    }
}

/// Serves the API with mutual TLS. The layer refuses each method that the role of the caller may not call.
async fn listen_tls(
    address: SocketAddr,
    api: Api,
    tls: &Arc<Tls>,
    stopping: &watch::Receiver<bool>,
) -> Result<Serving, ServeError> {
    let failed = |error| ServeError::TlsListen(address, error);
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let (auth, limits) = (ClientAuth::Optional, Limits::default());
    let incoming = shorthorn_pki::incoming(listener, tls.credentials(), auth, limits);
    let incoming = incoming.map_err(|error| failed(io::Error::other(error)))?;
    let mut stopping = stopping.clone();
    let stopped = async move {
        let _ = stopping.wait_for(|stopping| *stopping).await;
    };
    let router = server()
        .concurrency_limit_per_connection(TLS_CALLS_MAX)
        .layer(AccessLayer)
        .add_service(ControllerServer::new(api))
        .add_service(TlsApi::new(Arc::clone(tls)).server());
    tracing::info!(%address, "the API is served with TLS");
    Ok(Box::pin(router.serve_with_incoming_shutdown(incoming, stopped)))
}

/// Listens on a socket in the file system; takes over one that a killed controller left.
async fn bind(path: &Path) -> Result<UnixListener, ServeError> {
    let failed = |error| ServeError::Listen(Listen::Unix(path.to_owned()), error);
    if UnixStream::connect(path).await.is_ok() {
        return Err(ServeError::ListenTaken(path.to_owned()));
    }
    if std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket()) {
        std::fs::remove_file(path).map_err(failed)?;
    }
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
