//! The CSI driver of this node: its two sockets, in the directories of kubelet.
//!
//! kubelet removes a driver whose registration socket is gone, so neither socket is removed when the agent
//! ends. If systemd holds them, they even continue to listen. CSI is served before the registration, because
//! kubelet calls it as soon as it has seen that.

mod root;
mod sockets;
mod volumes;
mod watch;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use shorthorn_csi::{DRIVER_NAME, IdentityService};
use shorthorn_csi_node::{CsiNodeService, DeadMounts, NodeOptions, RegistrationService};
use shorthorn_types::MAX_LABEL_BYTES;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch as channel};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::transport::server::Router;

use crate::serve::config::{Config, CsiChoice};
use crate::serve::instance::Hub;
use crate::serve::{CALLS_MAX, KEEPALIVE};
use root::Finder;
pub use root::Finder as KubeletRoots;
pub use sockets::Inherited;
use sockets::Socket;
use volumes::Attached;
use watch::DirectoryWatch;

/// The kernel reports when a directory or a socket appears or disappears. No event reports that a kubelet is
/// started with a directory of its own: this is the interval of looking for one.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);
/// The pause after a change or failure, in which related changes may follow.
const DEBOUNCE: Duration = Duration::from_millis(200);
const RETRY: Duration = Duration::from_secs(5);

/// The CSI driver with its two sockets.
pub struct CsiDriver {
    config: Arc<Config>,
    finder: Finder,
    inherited: Inherited,
    volumes: Arc<Attached>,
    state: Arc<DriverState>,
}

/// The state of the registration with kubelet.
#[derive(Debug, Default)]
pub struct DriverState {
    /// True if kubelet has registered it, as far as kubelet has said.
    pub registered: Arc<AtomicBool>,
    /// Dead mounts of pods that kubelet knows of.
    pub dead_mounts: Arc<DeadMounts>,
    /// The reason why the driver cannot serve kubelet; none if it can, or kubelet is absent.
    problem: Mutex<Option<String>>,
}

impl DriverState {
    fn is(&self, problem: Option<String>) {
        *self.problem.lock().unwrap_or_else(PoisonError::into_inner) = problem;
    }

    /// Returns the reason why the driver cannot be served, if any.
    pub fn problem(&self) -> Option<String> {
        self.problem.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Name of the registration socket.
///
/// The '@' is required. kubelet (v1.36, `pluginmanager/operationexecutor`) dials the bare path, and gRPC for
/// Go sends that as `:authority`, with `%2F` for each slash. The HTTP library here refuses a '%' in the name
/// of a host and answers with PROTOCOL_ERROR. It accepts one in the part before an '@', which would be a
/// user. Go leaves the '@' unchanged.
const REGISTRATION_SOCKET: &str = "shorthorn@csi.shorthorn.io-reg.sock";

/// The paths on which kubelet searches for drivers.
struct Paths {
    csi: PathBuf,
    registration: PathBuf,
}

impl Paths {
    fn in_root(root: &Path) -> Paths {
        Paths {
            csi: root.join("plugins").join(DRIVER_NAME).join("csi.sock"),
            registration: root.join("plugins_registry").join(REGISTRATION_SOCKET),
        }
    }
}

impl CsiDriver {
    /// Prepares the configured driver; none if it is disabled.
    ///
    /// # Errors
    /// It is wanted, and cannot be.
    pub fn prepare(
        config: &Arc<Config>,
        hub: &Arc<Hub>,
        inherited: Inherited,
    ) -> anyhow::Result<Option<CsiDriver>> {
        let name = config.node_name.as_str();
        let problem = (name.len() > MAX_LABEL_BYTES).then(|| {
            format!(
                "node name {name:?} has more than {MAX_LABEL_BYTES} characters: it cannot be a \
                 topology label"
            )
        });
        match (config.csi, problem) {
            (CsiChoice::Off, _) => return Ok(None),
            (CsiChoice::On, Some(problem)) => anyhow::bail!("csi: {problem}"),
            (CsiChoice::Auto, Some(problem)) => {
                tracing::error!("no CSI driver: {problem}");
                return Ok(None);
            }
            (_, None) => {}
        }
        let volumes = Arc::new(Attached::new(Arc::clone(hub), config.device_dir.clone()));
        let finder = Finder::new(config.kubelet_root.clone());
        let state = Arc::default();
        Ok(Some(CsiDriver { config: Arc::clone(config), finder, inherited, volumes, state }))
    }

    /// Returns the state of the registration, which is kept up to date.
    pub fn state(&self) -> Arc<DriverState> {
        Arc::clone(&self.state)
    }

    /// Serves wherever kubelet is, until the agent stops and the calls that are under way then are answered.
    pub async fn run(self, stopping: channel::Receiver<bool>) {
        let mut stop = stopping.clone();
        let (alive, mut ended) = mpsc::channel(1);
        let stopping = Stopping { stopping, alive };
        let serve = async {
            let mut waits = false;
            loop {
                // Watched before it is looked at, so that nothing happens unseen in between.
                let change = PathChange::of(&self.finder.candidates());
                let Some(root) = self.root() else {
                    if !waits {
                        tracing::info!("no kubelet on this host yet: the CSI driver waits for it");
                    }
                    waits = true;
                    self.state.is(None);
                    self.state.registered.store(false, Ordering::Relaxed);
                    change.comes().await;
                    continue;
                };
                waits = false;
                if let Err(error) = self.serve_in(&root, &stopping).await {
                    tracing::error!(
                        root = %root.display(),
                        "the CSI driver cannot be served; trying again: {error:#}"
                    );
                    self.state.is(Some(format!("{error:#}")));
                    tokio::time::sleep(RETRY).await;
                }
            }
        };
        tokio::select! {
            () = serve => {}
            _ = stop.wait_for(|stopping| *stopping) => {}
        }
        drop(stopping);
        let _ = ended.recv().await;
    }

    fn root(&self) -> Option<PathBuf> {
        match self.config.csi {
            // The directory is made if it is missing.
            CsiChoice::On => Some(self.finder.find().unwrap_or_else(|| self.finder.first_candidate())),
            _ => self.finder.find(),
        }
    }

    /// Serves in `root` until the sockets are gone, or kubelet is somewhere else.
    async fn serve_in(&self, root: &Path, stopping: &Stopping) -> anyhow::Result<()> {
        let paths = Paths::in_root(root);
        let csi = self.inherited.csi_at(&paths.csi).map_or_else(|| Socket::bind(&paths.csi), Ok);
        let csi = csi.with_context(|| paths.csi.display().to_string())?;
        let (listener, csi) = csi.split();
        let _csi = ServingTask::start(self.csi(root), listener, stopping);
        let registration = self.inherited.registration_at(&paths.registration);
        let registration = registration.map_or_else(|| Socket::bind(&paths.registration), Ok);
        let registration = registration.with_context(|| paths.registration.display().to_string())?;
        let (listener, registration) = registration.split();
        let service =
            RegistrationService::new(DRIVER_NAME, &paths.csi, Arc::clone(&self.state.registered)).server();
        let _registration = ServingTask::start(server().add_service(service), listener, stopping);
        tracing::info!(
            csi = %paths.csi.display(),
            registration = %paths.registration.display(),
            "CSI is served"
        );
        self.state.is(None);
        loop {
            let change = PathChange::of(&[&paths.csi, &paths.registration].map(Clone::clone));
            if !csi.is_there() || !registration.is_there() {
                tracing::warn!(
                    root = %root.display(),
                    "a socket of the CSI driver was removed: creating it again"
                );
                return Ok(());
            }
            if self.finder.find().is_some_and(|now| now != root) {
                tracing::warn!(root = %root.display(), "kubelet has another directory now");
                return Ok(());
            }
            change.comes().await;
        }
    }

    fn csi(&self, root: &Path) -> Router {
        let options = NodeOptions {
            node_id: self.config.node_name.to_string(),
            zone: self.config.zone.clone().map(String::from),
            max_volumes: self.config.max_volumes,
            roots: vec![root.to_owned()],
        };
        let (volumes, dead_mounts) = (Arc::clone(&self.volumes), Arc::clone(&self.state.dead_mounts));
        server()
            .add_service(IdentityService::new(DRIVER_NAME, env!("CARGO_PKG_VERSION")).server())
            .add_service(CsiNodeService::new(volumes, options).with_dead_mounts(dead_mounts).server())
    }
}

/// A possible change at some paths.
struct PathChange(Option<DirectoryWatch>);

impl PathChange {
    fn of(paths: &[PathBuf]) -> PathChange {
        let watch = DirectoryWatch::over(paths);
        let failed = |error: &std::io::Error| {
            tracing::warn!("directories cannot be watched; they are checked periodically: {error}");
        };
        PathChange(watch.inspect_err(failed).ok())
    }

    /// Returns when it has, or after a while.
    async fn comes(self) {
        let changed = async {
            match self.0 {
                Some(watch) => watch.changed().await,
                None => std::future::pending().await,
            }
        };
        if tokio::time::timeout(LOOK_INTERVAL, changed).await.is_ok() {
            tokio::time::sleep(DEBOUNCE).await;
        }
    }
}

fn server() -> Server {
    Server::builder().concurrency_limit_per_connection(CALLS_MAX).http2_keepalive_interval(Some(KEEPALIVE))
}

/// The signals for stopping: servers learn that the agent stops, and the agent that they have ended.
#[derive(Clone)]
struct Stopping {
    stopping: channel::Receiver<bool>,
    /// A channel without messages, which is closed when the last server is gone.
    alive: mpsc::Sender<()>,
}

/// A server that ends when this is dropped; when the agent stops, after the calls that are under way.
struct ServingTask {
    task: JoinHandle<()>,
    stopping: channel::Receiver<bool>,
}

impl ServingTask {
    fn start(router: Router, listener: UnixListener, stopping: &Stopping) -> ServingTask {
        let Stopping { stopping, alive } = stopping.clone();
        let mut stop = stopping.clone();
        let stopped = async move {
            let _ = stop.wait_for(|stopping| *stopping).await;
        };
        let served = router.serve_with_incoming_shutdown(UnixListenerStream::new(listener), stopped);
        let task = tokio::spawn(async move {
            let _alive = alive;
            if let Err(error) = served.await {
                tracing::error!("a CSI socket is no longer served: {error}");
            }
        });
        ServingTask { task, stopping }
    }
}

impl Drop for ServingTask {
    fn drop(&mut self) {
        if !*self.stopping.borrow() {
            self.task.abort();
        }
    }
}
