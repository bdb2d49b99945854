//! The controller as a daemon.

mod servers;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use shorthorn_controller_core::reconcile::is_urgent;
use shorthorn_metrics::MetricsError;
use shorthorn_pki::address::{AddressError, Listen};
use thiserror::Error;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use self::servers::Servers;
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
use crate::kubernetes::store::{KubeStore, OpenError};
use crate::kubernetes::workloads::ClusterWorkloads;
use crate::kubernetes::{ConnectError, KubernetesConfig, PodsOfLostNodes, SecretKeeper, connect, signer};
use crate::metrics::{ControllerMetrics, Metered, Metrics, Readiness, ReadinessPhase};
use crate::store::{RedbStore, Store, StoreError};
use crate::tls::{Keeper, Tls, TlsError};
use crate::work::{Queue, Worker};

/// The time that the decisions of a new leader wait for the PersistentVolumes of Kubernetes to be listed and
/// recorded. After that they work with the stored claims.
const CLAIMS_LIMIT: Duration = Duration::from_secs(10);
/// The time limit for the last line of the log. The process ends because of a lost lease, and must not wait
/// for a full pipe.
const LOG_LIMIT: Duration = Duration::from_millis(100);

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
    let (gate, mut servers) = (CsiGate::default(), Servers::new());
    let stands_by = matches!(config.store, StoreConfig::Kubernetes(_));
    if let Some(address) = config.csi_listen.as_ref().filter(|_| stands_by) {
        // Before the wait for the lease: sidecars give up on a missing socket.
        servers.serve_csi(address, &gate).await?;
    }
    // What ends one controller too many, or has it wait, before it touches anything else.
    let opened = tokio::select! {
        opened = open(&config.store, &readiness) => opened?,
        Some(ended) = servers.ended() => return ended,
        name = signals.next() => {
            tracing::info!(signal = name, "stopping");
            servers.remove_sockets();
            return Ok(());
        }
    };
    let mut run = Run::new(config, opened, metrics, source, &readiness).await?;
    run.serve(&mut servers, &gate, stands_by).await?;
    run.started(&readiness);
    let result = match run.work(&mut servers, &mut signals).await {
        End::AtOnce(result) => return result,
        End::InOrder(result) => result,
    };
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    // No work has to be completed: the next start continues it.
    servers.stop().await;
    run.release(&mut servers).await;
    result
}

/// The end of the work of a controller.
enum End {
    /// Another controller may start to work within seconds.
    AtOnce(Result<(), ServeError>),
    /// Calls may end, and the lease is released.
    InOrder(Result<(), ServeError>),
}

/// A controller that has opened its store, and may lead.
struct Run {
    config: Config,
    metrics: Metrics,
    source: Arc<ControllerMetrics>,
    store: Arc<dyn Store>,
    tls: Arc<Tls>,
    fleet: Arc<Fleet>,
    queue: Arc<Queue>,
    events: Option<Events>,
    attachments: Option<ClusterAttachments>,
    workloads: Option<ClusterWorkloads>,
    lease: Option<LeaseThread>,
    leads: Option<watch::Sender<bool>>,
    tasks: JoinSet<()>,
}

impl Run {
    /// Opens the CA, and starts the tasks that need no server.
    async fn new(
        config: Config,
        opened: Opened,
        metrics: Metrics,
        source: Arc<ControllerMetrics>,
        readiness: &Arc<Readiness>,
    ) -> Result<Run, ServeError> {
        let Opened { keeper, signer, store, lease, leads, events, attachments, workloads, pods, tasks } =
            opened;
        let (mut lease, mut tasks) = (lease, tasks);
        let store = Arc::new(Metered::new(store, metrics.clone(), Arc::clone(readiness)));
        tasks.spawn(Arc::clone(&store).follow());
        let store: Arc<dyn Store> = store;
        let tls = open_tls(keeper, store.cluster(), &mut lease, &mut tasks).await?;
        let seen = Arc::clone(&store);
        let queue = Arc::new(Queue::with_urgent(move |key| is_urgent(&seen.state(), key)));
        let (kept, credentials) = (Arc::clone(&store), tls.credentials().clone());
        let (nodes, woken) = (&config.nodes, Arc::clone(&queue));
        let fleet = Fleet::with_tls(nodes, kept, woken, metrics.clone(), Some(credentials))?;
        tasks.spawn(Arc::clone(&tls).run(Arc::clone(&fleet)));
        if let Some(client) = signer {
            tasks.spawn(signer::run(client, Arc::clone(&tls)));
        }
        source.show_tls(Arc::clone(&tls));
        source.show(Arc::clone(&store), Arc::clone(&fleet), Arc::clone(&queue));
        if let (Some(pods), Some(events)) = (pods, &events) {
            pods.look_after(&store, &fleet, events, &metrics, &mut tasks);
        }
        Ok(Run {
            config,
            metrics,
            source,
            store,
            tls,
            fleet,
            queue,
            events,
            attachments,
            workloads,
            lease,
            leads,
            tasks,
        })
    }

    /// Serves the API and CSI on all configured addresses.
    async fn serve(
        &mut self,
        servers: &mut Servers,
        gate: &CsiGate,
        serves_csi: bool,
    ) -> Result<(), ServeError> {
        let api = self.api(servers.stopping());
        let csi = self.csi(servers.stopping());
        for address in std::iter::once(&self.config.listen).chain(&self.config.forward_listen) {
            servers.serve_api(address, &api, &self.tls).await?;
        }
        if let Some(address) = self.config.tls_listen {
            servers.serve_tls(address, api, &self.tls).await?;
        }
        if let Some(address) = &self.config.csi_listen {
            if !serves_csi {
                servers.serve_csi(address, gate).await?;
            }
            gate.open(csi);
            tracing::info!(csi = %address, "CSI is served");
        }
        Ok(())
    }

    fn api(&mut self, stopping: watch::Receiver<bool>) -> Api {
        let settings = self.config.settings;
        let mut api = Api::new(Arc::clone(&self.store), Arc::clone(&self.fleet), stopping, settings);
        let configuration = format!("{:#?}\n", self.config);
        api = api.with_diagnostics(Diagnostics { source: Arc::clone(&self.source), configuration });
        if let Some(attachments) = self.attachments.take() {
            api = api.with_attachments(Arc::new(attachments));
        }
        if let Some(workloads) = self.workloads.take() {
            api = api.with_workloads(Arc::new(workloads));
        }
        api
    }

    fn csi(&self, stopping: watch::Receiver<bool>) -> CsiController {
        let (store, fleet) = (Arc::clone(&self.store), Arc::clone(&self.fleet));
        let csi = CsiController::new(store, fleet, stopping, self.config.settings, self.metrics.clone());
        csi.with_events(self.events.clone())
    }

    /// Reports that this controller serves.
    fn started(&self, readiness: &Readiness) {
        if let Some(leads) = &self.leads {
            leads.send_replace(true);
        }
        readiness.reached(ReadinessPhase::Leading);
        let config = &self.config;
        tracing::info!(store = %config.store, listen = %config.listen, nodes = config.nodes.len(), "ready");
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    }

    /// Reconciles until a signal, or until this controller cannot continue.
    async fn work(&mut self, servers: &mut Servers, signals: &mut Signals) -> End {
        let (broken_sender, mut broken) = mpsc::channel(1);
        let worker = Worker::new(
            Arc::clone(&self.store),
            Arc::clone(&self.fleet),
            Arc::clone(&self.queue),
            broken_sender,
            self.events.clone(),
            self.config.settings,
            self.metrics.clone(),
        );
        tokio::select! {
            () = worker.run() => End::InOrder(Ok(())),
            () = Arc::clone(&self.fleet).run() => End::InOrder(Ok(())),
            Some(error) = broken.recv() => End::InOrder(Err(error.into())),
            reason = lost(self.lease.as_mut()) => End::AtOnce(Err(ServeError::LeaseLost(reason))),
            Some(ended) = servers.ended() => End::AtOnce(ended),
            name = signals.next() => {
                tracing::info!(signal = name, "stopping");
                End::InOrder(Ok(()))
            }
        }
    }

    /// Lets another controller lead at once. Nothing of this one may act then.
    async fn release(mut self, servers: &mut Servers) {
        if let Some(lease) = self.lease.take() {
            servers.shutdown().await;
            self.tasks.shutdown().await;
            lease.release().await;
        }
    }
}

/// Opens the cluster's CA while this controller has the lease.
async fn open_tls(
    keeper: Arc<dyn Keeper>,
    cluster: &str,
    lease: &mut Option<LeaseThread>,
    tasks: &mut JoinSet<()>,
) -> Result<Arc<Tls>, ServeError> {
    let opened = tokio::select! {
        opened = Tls::open(keeper, cluster) => opened,
        reason = lost(lease.as_mut()) => return Err(ServeError::LeaseLost(reason)),
    };
    match opened {
        Ok(tls) => Ok(tls),
        Err(error) => {
            if let Some(lease) = lease.take() {
                // The next attempt, maybe of another controller, need not wait for the end of this lease.
                tasks.shutdown().await;
                lease.release().await;
            }
            Err(error.into())
        }
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
