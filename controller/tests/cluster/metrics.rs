//! Tests the metrics and the health of the controller.

use std::process::Stdio;

use crate::support::cluster::{Cluster, LIMIT};
use crate::support::csi::{Caller, create, publish};
use shorthorn_testkit::metrics::{get, own_address, samples, value};
use shorthorn_testkit::waiting::wait_for_async;
use tokio::process::{Child, Command};

/// Asks again until it is answered with that.
async fn until_answered(address: std::net::SocketAddr, path: &str, status: u16, text: &str) {
    wait_for_async(&format!("{path} answers {status} with {text:?}"), LIMIT, async || {
        let answer = get(address, path);
        let is_wanted = answer.as_ref().is_ok_and(|(code, body)| *code == status && body.contains(text));
        if is_wanted { Ok(()) } else { Err(answer) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_calls_and_writes_are_counted() {
    let mut cluster = Cluster::start(&["a", "b", "c"]).await;
    let address = cluster.metrics;
    assert_eq!(get(address, "/healthz").unwrap(), (200, "ok\n".to_owned()));
    assert_eq!(get(address, "/readyz").unwrap(), (200, "ready\n".to_owned()));
    let mut csi = Caller::new(&cluster.path("csi.sock"));
    csi.create(create("pvc-1")).await.unwrap();
    csi.publish(publish("pvc-1", "a")).await.unwrap();
    csi.publish(publish("pvc-2", "a")).await.unwrap_err();
    cluster.until("pvc-1", "healthy", |shown| shown["robustness"] == "healthy").await;
    // The agent shows the engine before it answers the call that has started it, which may be made twice.
    let started = "shorthorn_controller_agent_calls_total{method=\"StartEngine\",code=\"Ok\"} ";
    until_answered(address, "/metrics", 200, started).await;
    let (status, text) = get(address, "/metrics").unwrap();
    assert_eq!(status, 200);
    let shown = samples(&text);
    let is =
        |series: &str, wanted: f64| assert_eq!(value(&shown, series), Some(wanted), "{series} in {text}");
    is("shorthorn_volumes{state=\"attached\",robustness=\"healthy\"}", 1.0);
    is("shorthorn_replicas{state=\"running\"}", 3.0);
    is("shorthorn_engines{state=\"running\"}", 1.0);
    is("shorthorn_nodes{ready=\"true\"}", 3.0);
    is("shorthorn_controller_agents{connected=\"true\"}", 3.0);
    is("shorthorn_controller_leader", 1.0);
    is("shorthorn_controller_csi_calls_total{method=\"ControllerPublishVolume\",code=\"Ok\"}", 1.0);
    is("shorthorn_controller_csi_calls_total{method=\"ControllerPublishVolume\",code=\"NotFound\"}", 1.0);
    is("shorthorn_controller_csi_call_duration_seconds_count{method=\"ControllerPublishVolume\"}", 2.0);
    let writes = "shorthorn_controller_store_writes_total{kind=\"volume\",operation=\"put\",result=\"ok\"}";
    assert!(value(&shown, writes).is_some_and(|writes| writes >= 3.0), "{text}");
    let runs = "shorthorn_controller_reconcile_duration_seconds_count{kind=\"volume\"}";
    assert!(value(&shown, runs).is_some_and(|runs| runs >= 1.0), "{text}");
    cluster.stop_agent(2);
    let lost = "shorthorn_controller_agents{connected=\"false\"} 1\n";
    until_answered(address, "/metrics", 200, lost).await;
    cluster.check();
}

/// Starts a controller whose objects are on an API server that does not run.
fn away(directory: &std::path::Path, metrics: std::net::SocketAddr) -> Child {
    let kubeconfig = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
        clusters: [{ name: c, cluster: { server: \"http://127.0.0.1:9\" } }]\n\
        users: [{ name: u, user: {} }]\ncontexts: [{ name: c, context: { cluster: c, user: u } }]\n";
    std::fs::write(directory.join("kubeconfig"), kubeconfig).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_shorthorn-controller"));
    command.args(["serve", "--kubernetes", "--kubeconfig"]).arg(directory.join("kubeconfig"));
    command.arg("--listen").arg(format!("unix://{}", directory.join("controller.sock").display()));
    command.args(["--metrics-listen", &metrics.to_string()]);
    command.stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true).spawn().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_without_its_api_server_lives_and_is_not_ready() {
    let (directory, address) = (tempfile::tempdir().unwrap(), own_address());
    let mut controller = away(directory.path(), address);
    until_answered(address, "/readyz", 503, "cannot be reached").await;
    assert_eq!(get(address, "/healthz").unwrap().0, 200);
    let text = get(address, "/metrics").unwrap().1;
    assert_eq!(value(&samples(&text), "shorthorn_controller_leader"), Some(0.0), "{text}");
    controller.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configured_address_must_be_free() {
    let directory = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind(own_address()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_shorthorn-controller"));
    command.arg("serve").arg("--store").arg(directory.path().join("store.redb"));
    command.args(["--metrics-listen", &taken.local_addr().unwrap().to_string()]);
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await.unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("metrics_listen"), "{error}");
}
