//! The real controller, with its store and sockets in memory.

use std::fmt::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use shorthorn_api::csi::v1 as csi;
use shorthorn_api::csi::v1::controller_client::ControllerClient as CsiClient;
use shorthorn_api::csi::v1::volume_capability::access_mode::Mode;
use shorthorn_api::csi::v1::volume_capability::{AccessMode, AccessType, MountVolume};
use shorthorn_api::v1::controller_client::ControllerClient;
use shorthorn_testkit::metrics::{get, own_address, samples, value};
use tonic::transport::{Channel, Endpoint};

use super::agent::FakeAgent;

/// Far more than any step takes.
pub const LIMIT: Duration = Duration::from_secs(1800);
pub const POLL: Duration = Duration::from_millis(200);

/// Killed with this.
pub struct Controller {
    folder: tempfile::TempDir,
    metrics: SocketAddr,
    process: Child,
    api: ControllerClient<Channel>,
    csi: CsiClient<Channel>,
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The metrics at one time.
pub struct MetricsSample(Vec<(String, f64)>);

impl MetricsSample {
    pub fn value(&self, series: &str) -> Option<f64> {
        value(&self.0, series)
    }

    pub fn sum(&self, family: &str) -> f64 {
        self.0.iter().filter(|(name, _)| name.starts_with(family)).map(|(_, value)| value).sum()
    }
}

impl Controller {
    pub fn start(agents: &[FakeAgent]) -> Controller {
        let memory = Path::new("/dev/shm");
        let place = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let folder = tempfile::tempdir_in(place).unwrap();
        let mut config = String::from("[nodes]\n");
        for agent in agents {
            let socket = folder.path().join(&agent.name);
            writeln!(config, "{} = \"unix://{}\"", agent.name, socket.display()).unwrap();
        }
        std::fs::write(folder.path().join("controller.toml"), config).unwrap();
        let metrics = own_address();
        let process = run(folder.path(), metrics);
        let api = ControllerClient::new(channel(&api_socket(folder.path())));
        let csi = CsiClient::new(channel(&csi_socket(folder.path())));
        Controller { folder, metrics, process, api, csi }
    }

    pub fn agent_socket(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Ends the process. Returns the path of its store.
    pub fn end(&mut self) -> PathBuf {
        self.kill();
        store(self.folder.path())
    }

    pub fn restart(&mut self) {
        self.kill();
        self.process = run(self.folder.path(), self.metrics);
    }

    pub fn api(&self) -> ControllerClient<Channel> {
        self.api.clone()
    }

    pub fn csi(&self) -> CsiClient<Channel> {
        self.csi.clone()
    }

    pub async fn read_metrics(&self) -> Option<MetricsSample> {
        let metrics = self.metrics;
        let answer = tokio::task::spawn_blocking(move || get(metrics, "/metrics")).await.unwrap();
        answer.ok().filter(|(status, _)| *status == 200).map(|(_, text)| MetricsSample(samples(&text)))
    }

    /// Waits until the metrics look like that.
    pub async fn until(&self, what: &str, seen: impl Fn(&MetricsSample) -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !self.read_metrics().await.is_some_and(|shown| seen(&shown)) {
            assert!(Instant::now() < deadline, "never {what}");
            tokio::time::sleep(POLL).await;
        }
    }
}

fn run(folder: &Path, metrics: SocketAddr) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shorthorn-controller"));
    command.arg("serve").arg("--config").arg(folder.join("controller.toml"));
    command.arg("--store").arg(store(folder));
    command.arg("--listen").arg(format!("unix://{}", api_socket(folder).display()));
    command.arg("--csi-listen").arg(format!("unix://{}", csi_socket(folder).display()));
    command.args(["--metrics-listen", &metrics.to_string(), "--log", "error"]);
    command.stdin(Stdio::null()).spawn().unwrap()
}

fn store(folder: &Path) -> PathBuf {
    folder.join("store.redb")
}

fn api_socket(folder: &Path) -> PathBuf {
    folder.join("controller.sock")
}

fn csi_socket(folder: &Path) -> PathBuf {
    folder.join("csi.sock")
}

fn channel(socket: &Path) -> Channel {
    Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap().connect_lazy()
}

fn file_system() -> csi::VolumeCapability {
    let mount = MountVolume { fs_type: "ext4".to_owned(), ..MountVolume::default() };
    let access_mode = Some(AccessMode { mode: Mode::SingleNodeWriter.into() });
    csi::VolumeCapability { access_type: Some(AccessType::Mount(mount)), access_mode }
}

pub fn create(name: &str) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(csi::CapacityRange { required_bytes: 1 << 30, limit_bytes: 0 }),
        volume_capabilities: vec![file_system()],
        ..csi::CreateVolumeRequest::default()
    }
}

pub fn publish(volume: &str, node: &str) -> csi::ControllerPublishVolumeRequest {
    csi::ControllerPublishVolumeRequest {
        volume_id: volume.to_owned(),
        node_id: node.to_owned(),
        volume_capability: Some(file_system()),
        ..csi::ControllerPublishVolumeRequest::default()
    }
}

pub fn unpublish(volume: &str, node: &str) -> csi::ControllerUnpublishVolumeRequest {
    csi::ControllerUnpublishVolumeRequest {
        volume_id: volume.to_owned(),
        node_id: node.to_owned(),
        ..csi::ControllerUnpublishVolumeRequest::default()
    }
}
