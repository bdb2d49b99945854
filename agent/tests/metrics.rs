//! Tests the metrics and the health of the agent.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::net::SocketAddr;
use std::time::Instant;

use common::node::{REPLICAS, SIZE, connect, endpoint, start_volume, stop, wait_for};
use common::{AgentProcess, LIMIT, agent};
use shorthorn_api::v1::InstanceKind;
use shorthorn_control::MemberMode;
use shorthorn_testkit::metrics::{get, own_address, samples, value};
use shorthorn_testkit::nbd::Nbd;
use tempfile::TempDir;

fn start(dir: &TempDir, metrics: SocketAddr, more: &str) -> AgentProcess {
    let path = |name: &str| dir.path().join(name).display().to_string();
    let config = format!(
        "node_name = \"n1\"\nlisten = [\"unix:{}\"]\nstate_dir = \"{}\"\nruntime_dir = \"{}\"\n\
         device_dir = \"{}\"\ninstances = \"children\"\nmetrics_listen = \"{metrics}\"\n{more}\n",
        path("sock"),
        path("s"),
        path("r"),
        path("dev")
    );
    fs::write(dir.path().join("agent.toml"), config).unwrap();
    AgentProcess::start(agent().arg("serve").arg("--config").arg(dir.path().join("agent.toml")))
}

#[tokio::test]
async fn volumes_disks_and_io_are_counted() {
    let (dir, address) = (tempfile::tempdir().unwrap(), own_address());
    let disk = dir.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let agent = start(&dir, address, "csi = \"off\"");
    agent.wait_for_log(": ready node=");
    assert_eq!(get(address, "/healthz").unwrap(), (200, "ok\n".to_owned()));
    assert_eq!(get(address, "/readyz").unwrap(), (200, "ready\n".to_owned()));
    let mut client = connect(&dir.path().join("sock")).await.unwrap();
    let engine = start_volume(&disk, "socket", &mut client).await;
    let whole = |instance: &shorthorn_api::v1::Instance| match &instance.detail {
        Some(shorthorn_api::v1::instance::Detail::Engine(engine)) => {
            engine.members.iter().all(|member| member.known_mode() == MemberMode::Member)
        }
        _ => false,
    };
    wait_for(&mut client, "v1", whole).await;
    let mut nbd = Nbd::connect(&endpoint(&engine), "v1").unwrap();
    nbd.write(0, &[7; 8192]).unwrap();
    nbd.write(1 << 20, &[8; 4096]).unwrap();
    assert_eq!(nbd.read(0, 4096).unwrap(), [7; 4096]);
    let (status, text) = get(address, "/metrics").unwrap();
    assert_eq!(status, 200);
    let shown = samples(&text);
    let is =
        |series: &str, wanted: f64| assert_eq!(value(&shown, series), Some(wanted), "{series} in {text}");
    is("shorthorn_agent_engines{state=\"running\"}", 1.0);
    is("shorthorn_agent_replicas{state=\"running\"}", 2.0);
    #[allow(clippy::cast_precision_loss, reason = "it is a small number")]
    is("shorthorn_volume_size_bytes{volume=\"v1\"}", SIZE as f64);
    is("shorthorn_volume_frozen{volume=\"v1\"}", 0.0);
    is("shorthorn_volume_replicas{volume=\"v1\",mode=\"member\"}", 2.0);
    is("shorthorn_volume_operations_total{volume=\"v1\",operation=\"write\"}", 2.0);
    is("shorthorn_volume_bytes_total{volume=\"v1\",operation=\"write\"}", 12288.0);
    is("shorthorn_volume_operations_total{volume=\"v1\",operation=\"read\"}", 1.0);
    is("shorthorn_volume_operations_total{volume=\"v1\",operation=\"flush\"}", 0.0);
    let took = "shorthorn_volume_operation_seconds_total{volume=\"v1\",operation=\"write\"}";
    assert!(value(&shown, took).is_some_and(|took| took > 0.0), "{text}");
    let path = disk.display();
    is(&format!("shorthorn_disk_usable{{disk=\"{path}\"}}"), 1.0);
    is(&format!("shorthorn_disk_replicas{{disk=\"{path}\"}}"), 2.0);
    let free = value(&shown, &format!("shorthorn_disk_available_bytes{{disk=\"{path}\"}}"));
    let size = value(&shown, &format!("shorthorn_disk_size_bytes{{disk=\"{path}\"}}"));
    assert!(free.zip(size).is_some_and(|(free, size)| 0.0 < free && free < size), "{text}");
    drop(nbd);
    client.stop_instance(stop(InstanceKind::Engine, "v1", 1)).await.unwrap();
    for id in REPLICAS {
        client.stop_instance(stop(InstanceKind::Replica, &format!("v1-{id}"), 0)).await.unwrap();
    }
}

#[test]
fn an_agent_whose_csi_driver_cannot_be_served_is_not_ready() {
    let (dir, address) = (tempfile::tempdir().unwrap(), own_address());
    let root = dir.path().join("kubelet");
    fs::create_dir(&root).unwrap();
    fs::write(root.join("plugins"), "no directory").unwrap();
    let agent = start(&dir, address, &format!("csi = \"on\"\nkubelet_root = \"{}\"", root.display()));
    agent.wait_for_log(": ready node=");
    let deadline = Instant::now() + LIMIT;
    loop {
        let (status, text) = get(address, "/readyz").unwrap();
        if status == 503 && text.contains("the CSI driver cannot be served") {
            break;
        }
        assert!(Instant::now() < deadline, "{status} {text}");
        std::thread::yield_now();
    }
    assert_eq!(get(address, "/healthz").unwrap().0, 200);
    let metrics = get(address, "/metrics").unwrap().1;
    assert_eq!(value(&samples(&metrics), "shorthorn_agent_csi_registered"), Some(0.0), "{metrics}");
}
