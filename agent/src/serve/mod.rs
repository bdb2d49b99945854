//! `shorthorn-agent serve`: the agent of a node.
//!
//! I/O does not depend on the state of the agent. Spec files list the instances that should run; systemd, or
//! pid files and control sockets, show the running ones. So the agent may end at any moment, and the next one
//! continues.
//!
//! After a restart of the host, the agent starts neither engines nor replicas. An engine needs a new number
//! of its attachment, which only the controller can issue, and the controller decides which replicas have to
//! run. Their spec files still exist, and the agent lists them as stopped.

mod claim;
pub mod config;
mod csi;
mod devices;
mod directories;
mod discovery;
mod disks;
mod error;
mod frontends;
mod host_warnings;
mod instance;
mod leaders;
pub mod listen;
pub mod longhorn;
mod metrics;
mod moving;
pub mod network;
pub mod paths;
mod salvage;
mod service;
pub mod tls;
mod trash;

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use shorthorn_api::v1;
use shorthorn_api::v1::node_server::NodeServer;
use shorthorn_api::v1::node_tls_server::NodeTlsServer;
use shorthorn_pki::AccessLayer;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::transport::Server;

use crate::pid_file::PidFile;
use claim::{ClaimedService, NodeClaim};
use config::{Config, InstancesChoice};
pub use csi::KubeletRoots;
use discovery::Discovery;
use disks::Disks;
pub use disks::{add_offline as add_disk_offline, disk_state, known_offline as known_disks, missing_mount};
use error::NodeError;
use host_warnings::HostWarnings;
use instance::{Backend, Children, Hub, InstancePaths, Systemd, Table};
use leaders::Leaders;
use listen::ListenAddress;
use metrics::{AgentMetrics, MetricsInputs};
use moving::AddressFollower;
use network::DataNetwork;
use service::NodeService;
use tls::{NodeTls, TlsService};

/// The maximum size of a request. The largest valid one, for an engine with eight replicas, has a few KiB.
const REQUEST_MAX_BYTES: usize = 256 << 10;
/// The maximum size of a trust list, which has up to 16384 serial numbers.
const TRUST_MAX_BYTES: usize = 2 << 20;
/// The interval of searching for old state of engines. Each state file has some hundred bytes.
const ENGINE_STATES_EVERY: Duration = Duration::from_hours(1);
/// The maximum number of concurrent calls of one client.
const CALLS_MAX: usize = 64;
/// The interval of keepalives. The connection of a client that does not answer ends after twice this, and so
/// do its watches. The watches of a dead client cost memory only.
const KEEPALIVE: Duration = Duration::from_secs(20);
/// The time limit of calls in progress when the agent stops. They are safe to repeat.
const DRAIN_LIMIT: Duration = Duration::from_secs(3);
/// The time limit of the first check of new disks. A later check prepares the remaining ones.
const PREPARE_LIMIT: Duration = Duration::from_secs(5);

/// The examinations of this host that the node API offers.
#[derive(Clone, Copy, Debug)]
pub struct Examinations {
    /// Returns the findings of `shorthorn-agent check` that only have to be read.
    pub warnings: fn(&Config) -> Vec<String>,
    /// Returns the block devices of this host.
    pub devices: fn() -> anyhow::Result<Vec<v1::DiscoveredDevice>>,
}

/// Runs the agent until SIGTERM or SIGINT.
pub fn serve(config: Config, examinations: Examinations) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(run(config, examinations))
}

/// Removes the old state of engines now and then, until the agent stops.
async fn keep_engine_states_few(hub: Arc<instance::Hub>, mut stopping: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(ENGINE_STATES_EVERY) => {}
            _ = stopping.wait_for(|stopping| *stopping) => return,
        }
        if let Err(error) = hub.remove_old_engine_states().await {
            tracing::warn!("old state of engines is not removed: {error}");
        }
    }
}

/// Starts the tasks that run until the agent stops.
fn spawn_background_tasks(
    config: &Config,
    hub: &Arc<Hub>,
    network: DataNetwork,
    last: Option<IpAddr>,
    disks: &Arc<Disks>,
    tls: &Arc<NodeTls>,
    stopping: &watch::Receiver<bool>,
) {
    tokio::spawn(keep_engine_states_few(Arc::clone(hub), stopping.clone()));
    tokio::spawn(Arc::clone(hub.table()).follow_program(stopping.clone()));
    let addresses = AddressFollower::new(network, Arc::clone(hub), last);
    tokio::spawn(addresses.follow(stopping.clone()));
    let limits = trash::TrashLimits::of(config);
    tokio::spawn(disks::keep_swept(Arc::clone(disks), limits, stopping.clone()));
    if config.listens_with_tls() {
        let choice = config.kubelet_kubeconfig.clone();
        tokio::spawn(tls::keep_enrolled(Arc::clone(tls), choice, stopping.clone()));
    }
}

/// Opens the disks. New ones are prepared before the agent is ready, unless one hangs. So the check of
/// `setup` does not wait for a controller that asks for them.
async fn open_disks(config: &Config) -> anyhow::Result<Arc<Disks>> {
    let disks = Arc::new(Disks::open(&config.disks, &config.state_dir)?);
    let new = Arc::clone(&disks);
    let prepared = tokio::task::spawn_blocking(move || new.prepare_new());
    if tokio::time::timeout(PREPARE_LIMIT, prepared).await.is_err() {
        tracing::warn!(limit_s = PREPARE_LIMIT.as_secs(), "a disk hangs: the agent starts without it");
    }
    Ok(disks)
}

/// Finds the data address. Returns the one of an earlier agent too.
async fn data_network(config: &Config, paths: &InstancePaths) -> (DataNetwork, Option<IpAddr>) {
    let last = instance::last_data_address(paths);
    (DataNetwork::start(config.data.clone(), last).await, last)
}

async fn run(config: Config, examinations: Examinations) -> anyhow::Result<()> {
    let inherited = csi::Inherited::take().context("sockets of systemd")?;
    let source = AgentMetrics::new();
    let shown: Arc<dyn shorthorn_metrics::MetricsSource> = Arc::<AgentMetrics>::clone(&source);
    let _metrics = shorthorn_metrics::start(config.metrics_listen, config::DEFAULT_METRICS, shown).await?;
    let paths = InstancePaths::prepare(&config.state_dir, &config.runtime_dir)?;
    let _alone = PidFile::lock(&config.state_dir.join("agent.pid")).context("another agent runs")?;
    paths.remove_old_engine_states(SystemTime::now())?;
    devices::remove_stale(&config.device_dir);
    let disks = open_disks(&config).await?;
    let claim = Arc::new(NodeClaim::open(&config.state_dir)?);
    for warning in longhorn::warnings(Path::new(longhorn::PROC), &config.device_dir, &disks.paths()) {
        tracing::warn!("{warning}");
    }
    let table = Table::new();
    let (backend, lost) = backend(&config, &paths, &table).await?;
    let (network, last) = data_network(&config, &paths).await;
    let hub = Hub::start(config.data_ports.clone(), network.address(), paths, table, backend).await?;
    let incoming = listen::bind(&config.listen).await?;
    let tls = NodeTls::open(&config.tls_dir, &config.node_name);
    let over_tls = tls::bind(addresses_with_tls(&config), &tls).await?;
    let (stop, stopping) = watch::channel(false);
    let config = Arc::new(config);
    let driver = csi::CsiDriver::prepare(&config, &hub, inherited)?;
    let driver_state = driver.as_ref().map(csi::CsiDriver::state);
    let driver = driver.map(|driver| tokio::spawn(driver.run(stopping.clone())));
    spawn_background_tasks(&config, &hub, network, last, &disks, &tls, &stopping);
    source.show(MetricsInputs {
        table: Arc::clone(hub.table()),
        disks: Arc::clone(&disks),
        device_dir: config.device_dir.clone(),
        driver: driver_state.clone(),
        tls: config.listens_with_tls().then(|| Arc::clone(&tls)),
    });
    let service = NodeService {
        config,
        hub,
        disks,
        frontends: Arc::default(),
        discovery: Arc::new(Discovery::new(examinations.devices)),
        host_warnings: Arc::new(HostWarnings::new(examinations.warnings)),
        claim,
        driver: driver_state,
        stopping: stopping.clone(),
    };
    tracing::info!(node = service.config.node_name.as_str(), version = env!("CARGO_PKG_VERSION"), "ready");
    sd_notify::notify(&[sd_notify::NotifyState::Ready])?;

    let server = serve_node(service, TlsService(tls), (incoming, over_tls), stopping);
    let mut server = std::pin::pin!(server);
    let ended = tokio::select! {
        served = &mut server => return served.context("the node API cannot be served"),
        signal = stop_signal() => signal,
        () = lost => Err(anyhow::anyhow!("the connection to systemd is lost")),
    };
    tracing::info!("stopping; engines and replicas continue");
    stop.send_replace(true);
    drain(server, driver).await;
    ended
}

/// Waits for the calls that are under way. Disconnected callers call again.
async fn drain(server: impl Future, driver: Option<JoinHandle<()>>) {
    let drained = async {
        let _ = server.await;
        if let Some(driver) = driver {
            let _ = driver.await;
        }
    };
    let _ = tokio::time::timeout(DRAIN_LIMIT, drained).await;
}

/// Serves the node API until the agent stops: on addresses of this host without TLS, and on others over TLS.
async fn serve_node(
    service: NodeService,
    certificates: TlsService,
    (incoming, over_tls): (listen::PlainIncoming, tls::TlsIncoming),
    stopping: watch::Receiver<bool>,
) -> Result<(), tonic::transport::Error> {
    let claim = Arc::clone(&service.claim);
    let leaders = Arc::<Leaders>::default();
    let node = NodeServer::new(service).max_decoding_message_size(REQUEST_MAX_BYTES);
    let node = ClaimedService::new(node, Arc::clone(&claim), Arc::clone(&leaders));
    let certificates = NodeTlsServer::new(certificates).max_decoding_message_size(TRUST_MAX_BYTES);
    let certificates = ClaimedService::new(certificates, claim, leaders);
    // Each with a server of its own: only those that come over TLS have a certificate to check.
    let plain = server()
        .add_service(node.clone())
        .add_service(certificates.clone())
        .serve_with_incoming_shutdown(incoming, until_stopping(stopping.clone()));
    let checked = server()
        .layer(AccessLayer)
        .add_service(node)
        .add_service(certificates)
        .serve_with_incoming_shutdown(over_tls, until_stopping(stopping));
    tokio::try_join!(plain, checked).map(drop)
}

fn server() -> Server {
    Server::builder().concurrency_limit_per_connection(CALLS_MAX).http2_keepalive_interval(Some(KEEPALIVE))
}

async fn until_stopping(mut stopping: watch::Receiver<bool>) {
    let _ = stopping.wait_for(|stopping| *stopping).await;
}

fn addresses_with_tls(config: &Config) -> Vec<SocketAddr> {
    let with_tls = |address: &ListenAddress| match address {
        ListenAddress::Tls(address) => Some(*address),
        _ => None,
    };
    config.listen.iter().filter_map(with_tls).collect()
}

async fn stop_signal() -> anyhow::Result<()> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Ok(())
}

/// Returns true if systemd is PID 1; the same test as sd_booted(3).
pub fn has_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// Returns the problem of instances that end with an agent that systemd or a container runs; None if they
/// outlive the agent. systemd and a container runtime end the whole control group of the agent.
pub fn children_end(instances: InstancesChoice, has_systemd: bool) -> Option<&'static str> {
    let end = has_systemd && instances == InstancesChoice::Children;
    end.then_some(
        "instances is \"children\" on a host with systemd: each restart and upgrade of the agent kills all \
         engines and replicas here",
    )
}

/// Returns the manager of the instances, and a future that ends when the agent can no longer observe them.
async fn backend(
    config: &Config,
    paths: &InstancePaths,
    table: &Arc<Table>,
) -> anyhow::Result<(Box<dyn Backend>, std::pin::Pin<Box<dyn Future<Output = ()> + Send>>)> {
    let systemd = match config.instances {
        InstancesChoice::Systemd => true,
        InstancesChoice::Children => false,
        InstancesChoice::Auto => has_systemd(),
    };
    if systemd {
        let systemd = Systemd::connect(paths.clone(), Arc::clone(table)).await?;
        let connection = systemd.connection().clone();
        tracing::info!("instances are units of systemd");
        return Ok((Box::new(systemd), Box::pin(async move { connection.closed().await })));
    }
    tracing::info!("instances are processes of the agent");
    if let Some(problem) = children_end(config.instances, has_systemd()) {
        tracing::warn!("{problem}: set instances = \"auto\" in agent.toml while no volume is attached");
    }
    let children = Children::new(paths.clone(), Arc::clone(table))?;
    Ok((Box::new(children), Box::pin(std::future::pending())))
}

/// Runs work that may wait for a disk on a thread for that.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, NodeError> + Send + 'static,
) -> Result<T, NodeError> {
    tokio::task::spawn_blocking(work).await.map_err(NodeError::lost)?
}
