//! The CSI driver of `shorthorn-agent serve` and a kubelet, restarted in any order.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::go_client;
use common::kubelet::{Event, Kubelet, register};
use common::node::{connect, pid, start_volume, stop};
use common::{AgentProcess, LIMIT, agent, lives};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::Signal;
use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::node_client::NodeClient;
use shorthorn_api::csi::v1::volume_capability::{AccessMode, AccessType, MountVolume, access_mode};
use shorthorn_api::v1::InstanceKind;
use tempfile::TempDir;
use tonic::Code;
use tonic::transport::Endpoint;

const REGISTRATION: &str = "plugins_registry/shorthorn@csi.shorthorn.io-reg.sock";
const CSI: &str = "plugins/csi.shorthorn.io/csi.sock";

/// A host: an agent may run on it, and a kubelet.
struct Host {
    dir: TempDir,
}

impl Host {
    fn new(csi: &str) -> Host {
        let host = Host { dir: tempfile::tempdir().unwrap() };
        let path = |name: &str| host.dir.path().join(name).display().to_string();
        let config = format!(
            "node_name = \"n1\"\nlisten = [\"unix:{}\"]\nstate_dir = \"{}\"\nruntime_dir = \"{}\"\n\
             device_dir = \"{}\"\ninstances = \"children\"\ncsi = \"{csi}\"\nkubelet_root = \"{}\"\n\
             zone = \"z1\"\n",
            path("sock"),
            path("s"),
            path("r"),
            path("dev"),
            path("kubelet"),
        );
        fs::write(host.config(), config).unwrap();
        host
    }

    fn config(&self) -> PathBuf {
        self.dir.path().join("agent.toml")
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("kubelet")
    }

    fn at(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    fn agent(&self) -> AgentProcess {
        AgentProcess::start(agent().arg("serve").arg("--config").arg(self.config()))
    }

    fn kubelet(&self) -> Kubelet {
        Kubelet::start(&self.root())
    }
}

fn inode(path: &Path) -> u64 {
    fs::metadata(path).unwrap().ino()
}

#[test]
fn a_kubelet_that_comes_later_is_waited_for() {
    let host = Host::new("auto");
    let agent = host.agent();
    agent.wait_for_log("the CSI driver waits for it");
    assert!(!host.root().exists(), "the directory is kubelet's to make");
    let kubelet = host.kubelet();
    let topology = [("topology.shorthorn.io/node", "n1"), ("topology.shorthorn.io/zone", "z1")];
    let wanted = Event::Registered {
        driver: "csi.shorthorn.io".into(),
        endpoint: host.at(CSI),
        node: "n1".into(),
        topology: topology.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
    };
    assert_eq!(kubelet.event(), wanted);
    for name in [CSI, REGISTRATION] {
        assert_eq!(fs::metadata(host.at(name)).unwrap().mode() & 0o777, 0o600, "for root alone");
    }
    agent.wait_for_log("kubelet has registered the driver");
}

#[test]
fn agent_and_kubelet_restart_in_any_order() {
    let host = Host::new("on");
    let mut agent = host.agent();
    agent.wait_for_log("CSI is served");
    // kubelet starts after the agent, ends, and starts again: the agent does nothing for it.
    let kubelet = host.kubelet();
    assert_eq!(kubelet.registers(), "n1");
    drop(kubelet);
    let kubelet = host.kubelet();
    assert_eq!(kubelet.registers(), "n1");
    // The agent ends: its sockets stay, so kubelet keeps the driver.
    agent.signal(Signal::SIGTERM);
    assert!(agent.ended().success());
    assert!(host.at(CSI).exists() && host.at(REGISTRATION).exists());
    assert!(kubelet.done().is_empty());
    // The next one is registered in its place, and so is one after a kill.
    agent = host.agent();
    assert_eq!(kubelet.registers(), "n1");
    drop(agent); // SIGKILL
    let agent = host.agent();
    assert_eq!(kubelet.registers(), "n1");
    // Both at once, kubelet first: it finds the socket of the ended agent, and tries until the next one
    // exists.
    drop(kubelet);
    drop(agent);
    let kubelet = host.kubelet();
    let _agent = host.agent();
    assert_eq!(kubelet.registers(), "n1");
    assert!(kubelet.done().iter().all(|event| !matches!(event, Event::Deregistered(_))));
}

#[test]
fn removed_sockets_are_recreated() {
    let host = Host::new("auto");
    let kubelet = host.kubelet();
    let agent = host.agent();
    assert_eq!(kubelet.registers(), "n1");
    let before = inode(&host.at(REGISTRATION));
    fs::remove_file(host.at(REGISTRATION)).unwrap();
    assert_eq!(kubelet.registers(), "n1");
    assert!(inode(&host.at(REGISTRATION)) != before || host.at(REGISTRATION).exists());
    // The node is reset: all data of kubelet is gone, and comes back later.
    drop(kubelet);
    fs::remove_dir_all(host.root()).unwrap();
    agent.wait_for_log("the CSI driver waits for it");
    let kubelet = host.kubelet();
    assert_eq!(kubelet.registers(), "n1");
}

#[test]
fn a_registration_by_kubelet_itself_is_answered() {
    let host = Host::new("on");
    let agent = host.agent();
    agent.wait_for_log("CSI is served");
    let info = go_client::call(&host.at(REGISTRATION), "/pluginregistration.Registration/GetInfo");
    let info = String::from_utf8_lossy(&info);
    assert!(info.contains("CSIPlugin") && info.contains("csi.shorthorn.io"), "{info:?}");
}

/// Returns an agent that gets its sockets as systemd passes them.
fn agent_with(host: &Host, listeners: [&UnixListener; 2]) -> AgentProcess {
    let passed = listeners.map(|listener| listener.try_clone().unwrap());
    for listener in &passed {
        fcntl(listener, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
    }
    let program = agent().get_program().to_owned();
    let script = r#"exec 3<&"$1" 4<&"$2"; shift 2; LISTEN_PID=$$ exec "$@""#;
    let mut command = Command::new("bash");
    command.args(["-c", script, "bash"]).args(passed.each_ref().map(|fd| fd.as_raw_fd().to_string()));
    command.arg(program).arg("serve").arg("--config").arg(host.config());
    command.env_remove("SHORTHORN_LOG").env_remove("NOTIFY_SOCKET");
    command.env("LISTEN_FDS", "2").env("LISTEN_FDNAMES", "csi:registration");
    AgentProcess::start(&mut command)
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_of_systemd_outlive_the_agent() {
    let host = Host::new("auto");
    for name in [CSI, REGISTRATION] {
        fs::create_dir_all(host.at(name).parent().unwrap()).unwrap();
    }
    let [csi, registration] = [CSI, REGISTRATION].map(|name| UnixListener::bind(host.at(name)).unwrap());
    let before = [CSI, REGISTRATION].map(|name| inode(&host.at(name)));
    let first = agent_with(&host, [&csi, &registration]);
    let kubelet = host.kubelet();
    let node = tokio::task::block_in_place(|| kubelet.registers());
    assert_eq!(node, "n1");
    drop(first); // SIGKILL
    // No service exists yet, and the call waits: it is neither refused nor forgotten.
    let endpoint = Endpoint::from_shared(format!("unix://{}", host.at(CSI).display())).unwrap();
    let call = tokio::spawn(async move {
        let mut client = NodeClient::new(endpoint.connect().await?);
        Ok::<_, anyhow::Error>(client.node_get_info(v1::NodeGetInfoRequest {}).await?.into_inner().node_id)
    });
    let second = agent_with(&host, [&csi, &registration]);
    let answered = tokio::time::timeout(LIMIT, call).await.unwrap().unwrap().unwrap();
    assert_eq!(answered, "n1");
    assert_eq!([CSI, REGISTRATION].map(|name| inode(&host.at(name))), before, "the sockets are the same");
    assert!(kubelet.done().is_empty(), "kubelet has seen nothing of all that");
    let again = register(&host.at(REGISTRATION)).await.unwrap();
    assert!(matches!(again, Event::Registered { .. }));
    drop(second);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_without_an_engine_is_not_found() {
    let host = Host::new("on");
    let agent = host.agent();
    agent.wait_for_log("CSI is served");
    let endpoint = Endpoint::from_shared(format!("unix://{}", host.at(CSI).display())).unwrap();
    let mut client = NodeClient::new(endpoint.timeout(LIMIT).connect().await.unwrap());
    let request = v1::NodeGetVolumeStatsRequest {
        volume_id: "v1".into(),
        volume_path: "/tmp".into(),
        staging_target_path: String::new(),
    };
    let error = client.node_get_volume_stats(request).await.unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::NotFound, "volume v1 is not attached to this node"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_has_no_device_yet_is_asked_for_again() {
    let host = Host::new("on");
    let agent = host.agent();
    agent.wait_for_log("CSI is served");
    let disk = host.dir.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let mut node = connect(&host.dir.path().join("sock")).await.unwrap();
    let engine = start_volume(&disk, "socket", &mut node).await;
    let endpoint = Endpoint::from_shared(format!("unix://{}", host.at(CSI).display())).unwrap();
    let mut client = NodeClient::new(endpoint.timeout(LIMIT).connect().await.unwrap());
    let request = v1::NodeStageVolumeRequest {
        volume_id: "v1".into(),
        staging_target_path: host.root().display().to_string(),
        volume_capability: Some(v1::VolumeCapability {
            access_type: Some(AccessType::Mount(MountVolume::default())),
            access_mode: Some(AccessMode { mode: access_mode::Mode::SingleNodeWriter.into() }),
        }),
        ..v1::NodeStageVolumeRequest::default()
    };
    let answer = client.node_stage_volume(request).await;
    // First the processes, which would outlive a test that fails.
    for (kind, name) in [
        (InstanceKind::Engine, "v1"),
        (InstanceKind::Replica, "v1-0000000a"),
        (InstanceKind::Replica, "v1-0000000b"),
    ] {
        node.stop_instance(stop(kind, name, 0)).await.unwrap();
    }
    assert!(!lives(pid(&engine)));
    let error = answer.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("has no device at this moment"), "{error:?}");
}

#[test]
fn csi_off_creates_no_sockets() {
    let host = Host::new("off");
    fs::create_dir(host.root()).unwrap();
    let agent = host.agent();
    agent.wait_for_log(": ready node=");
    assert_eq!(fs::read_dir(host.root()).unwrap().count(), 0);
}
