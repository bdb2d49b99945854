//! A stand-in for kubelet's watcher of plugins. It searches the directory of registrations when it starts,
//! and then follows it by inotify. It asks each socket for its identity, calls the driver, and reports
//! the registration to it.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use shorthorn_api::csi::v1::NodeGetInfoRequest;
use shorthorn_api::csi::v1::node_client::NodeClient;
use shorthorn_api::pluginregistration::registration_client::RegistrationClient;
use shorthorn_api::pluginregistration::{InfoRequest, RegistrationStatus};
use tonic::transport::{Channel, Endpoint};

use super::LIMIT;

/// The interval at which kubelet compares its desired and actual state.
const RECONCILE_MS: u16 = 1000;
const DIAL_LIMIT: Duration = Duration::from_secs(10);
const GET_INFO_LIMIT: Duration = Duration::from_secs(1);

/// An action of kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A driver was registered.
    Registered { driver: String, endpoint: PathBuf, node: String, topology: BTreeMap<String, String> },
    /// The socket of a driver is gone.
    Deregistered(PathBuf),
}

/// A kubelet that runs; it ends when this is dropped.
pub struct Kubelet {
    events: Receiver<Event>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Kubelet {
    pub fn start(root: &Path) -> Kubelet {
        let registry = root.join("plugins_registry");
        fs::create_dir_all(&registry).unwrap();
        let (sender, events) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || follow(&registry, &sender, &stopped));
        Kubelet { events, stop, thread: Some(thread) }
    }

    /// Waits for the next action.
    pub fn event(&self) -> Event {
        self.events.recv_timeout(LIMIT).expect("kubelet does something")
    }

    /// Returns the node of the driver that it registers next.
    pub fn registers(&self) -> String {
        loop {
            match self.event() {
                Event::Registered { node, .. } => return node,
                Event::Deregistered(_) => {}
            }
        }
    }

    /// Returns all actions that no test has taken yet.
    pub fn done(&self) -> Vec<Event> {
        self.events.try_iter().collect()
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn follow(registry: &Path, events: &Sender<Event>, stop: &AtomicBool) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let watch = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).unwrap();
    watch.add_watch(registry, AddWatchFlags::IN_ALL_EVENTS).unwrap();
    let mut registered = BTreeMap::new();
    while !stop.load(Ordering::Relaxed) {
        let found = sockets(registry);
        let gone: Vec<PathBuf> =
            registered.keys().filter(|path| !found.contains_key(*path)).cloned().collect();
        for path in gone {
            registered.remove(&path);
            let _ = events.send(Event::Deregistered(path));
        }
        for (path, inode) in found {
            if registered.get(&path) == Some(&inode) {
                continue;
            }
            // Failures are retried.
            if let Ok(event) = runtime.block_on(register(&path)) {
                registered.insert(path, inode);
                let _ = events.send(event);
            }
        }
        let _ = poll(&mut [PollFd::new(watch.as_fd(), PollFlags::POLLIN)], RECONCILE_MS);
        let _ = watch.read_events();
    }
}

fn sockets(registry: &Path) -> BTreeMap<PathBuf, u64> {
    let entries = fs::read_dir(registry).into_iter().flatten().flatten();
    let visible = entries.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.'));
    let of = |entry: fs::DirEntry| {
        let meta = entry.metadata().ok().filter(|meta| meta.file_type().is_socket())?;
        Some((entry.path(), meta.ino()))
    };
    visible.filter_map(of).collect()
}

async fn dial(path: &Path) -> anyhow::Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("unix://{}", path.display()))?;
    Ok(endpoint.connect_timeout(DIAL_LIMIT).connect().await?)
}

pub async fn register(path: &Path) -> anyhow::Result<Event> {
    let mut plugin = RegistrationClient::new(dial(path).await?);
    let info = tokio::time::timeout(GET_INFO_LIMIT, plugin.get_info(InfoRequest {})).await??.into_inner();
    anyhow::ensure!(info.r#type == "CSIPlugin" && info.supported_versions == ["1.0.0"], "{info:?}");
    let endpoint = PathBuf::from(&info.endpoint);
    let mut driver = NodeClient::new(dial(&endpoint).await?);
    let node = driver.node_get_info(NodeGetInfoRequest {}).await?.into_inner();
    let status = RegistrationStatus { plugin_registered: true, error: String::new() };
    plugin.notify_registration_status(status).await?;
    let topology = node.accessible_topology.unwrap_or_default().segments.into_iter().collect();
    Ok(Event::Registered { driver: info.name, endpoint, node: node.node_id, topology })
}
