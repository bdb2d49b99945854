//! The commands of kubectl on pages for users, as each page has them and in its order. Neither kubelet nor
//! scheduler runs: the test takes their part.

use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use shorthorn_testkit::docs::{Script, blocks_read_by};
use shorthorn_tests::apiserver::NAMESPACE;
use shorthorn_tests::hosts::name;
use shorthorn_tests::{ensure_has, until_whole};

use crate::cluster::Cluster;
use crate::documented::Documented;
use crate::{LIMIT, VOLUME};

const TEST: &str = "tests/tests/kubernetes/pages.rs";
const INSTALL: &str = "docs/install.md";
const LOST_NODE: &str = "docs/lost-node.md";
const MAINTENANCE: &str = "docs/maintenance.md";
const TROUBLESHOOTING: &str = "docs/troubleshooting.md";
const POD: &str = "/api/v1/namespaces/default/pods/writer";

#[test]
fn the_commands_of_kubectl_work_as_documented() -> Result<()> {
    let mut cluster = Cluster::start()?;
    guard_pods_have_an_image(&mut cluster)?;
    for host in 0..3 {
        cluster.register(&name(host), &format!("192.0.2.{}", host + 1))?;
    }
    cluster.make_volume()?;
    cluster.want_on(name(0).into())?;
    cluster.until_state("attached")?;
    until_whole(&cluster.hosts.engine_control(0, VOLUME), LIMIT)?;
    cluster.until_healthy()?;

    maintenance(&cluster)?;
    installation(&cluster)?;
    troubleshooting(&cluster)?;
    lost_node(&cluster)
}

/// Starts the controller with the flag that the chart gives.
fn guard_pods_have_an_image(cluster: &mut Cluster) -> Result<()> {
    cluster.hosts.stop_controller()?;
    let listen = format!("unix://{}/guard.sock", cluster.folder.path().display());
    let controller = cluster.hosts.controller_command(&listen)?.args(["--guard-image", "none:1"]).spawn()?;
    cluster.hosts.take_controller(controller, &listen)
}

fn page(cluster: &Cluster, page: &str) -> Result<Documented> {
    Documented::new(cluster, Script::read(page, TEST)?)
}

/// Drains a node, which comes back. Another one has to wait for it meanwhile.
fn maintenance(cluster: &Cluster) -> Result<()> {
    let mut page = page(cluster, MAINTENANCE)?;
    page.script.set("NODE", &name(1));
    page.kubectl_succeeds("drain NODE")?;
    cluster.until_guard_pods(&[0, 2])?;
    page.script.leave_out("reboot", "this is not a machine")?;
    page.kubectl_succeeds("uncordon NODE")?;
    cluster.until_guard_pods(&[])?;

    let cordoned = json!({ "spec": { "unschedulable": true } });
    cluster.api.ok("PATCH", &format!("/api/v1/nodes/{}", name(1)), Some(&cordoned))?;
    cluster.until_guard_pods(&[0, 2])?;
    page.script.set("NODE", &name(2));
    let printed = page.kubectl_succeeds("describe pod shorthorn-guard-NODE")?;
    ensure_has(&printed, &["shorthorn-guard-n2", "volume v"])?;
    let words = page.script.next("shorthornctl node can-reboot NODE")?;
    let words: Vec<&str> = words.iter().skip(1).map(String::as_str).collect();
    let printed = cluster.hosts.refused(&words)?;
    ensure_has(&printed, &["node n1, which was cordoned in Kubernetes before"])?;
    page.script.finish()
}

/// The pods are guard pods here.
fn installation(cluster: &Cluster) -> Result<()> {
    const NO_POD: &str =
        "the controller is not a pod here; controller/tests/cluster/laptop.rs connects through one";
    let mut page = page(cluster, INSTALL)?;
    let printed = page.kubectl_succeeds("get pods")?;
    ensure_has(&printed, &["shorthorn-guard-n2"])?;
    page.script.leave_out("shorthornctl --kubeconfig", NO_POD)?;
    page.script.leave_out("shorthornctl --kubeconfig", NO_POD)?;

    let [pod] = &blocks_read_by(INSTALL, TEST)?[..] else { anyhow::bail!("several blocks") };
    let file = cluster.folder.path().join("pod.yaml");
    fs::write(&file, &pod.text)?;
    page.script.set("pod.yaml", &file.display().to_string());
    // The controllers of accounts do not run either.
    let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "default" } });
    cluster.api.call("POST", "/api/v1/namespaces/default/serviceaccounts", Some(&account))?;
    page.kubectl_succeeds("apply -f pod.yaml")?;
    let claim = "/api/v1/namespaces/default/persistentvolumeclaims/data";
    let class = cluster.api.ok("GET", claim, None)?["spec"]["storageClassName"].clone();
    let class = class.as_str().context("no StorageClass")?.to_owned();
    let class = format!("/apis/storage.k8s.io/v1/storageclasses/{class}");
    ensure!(cluster.api.find(&class)?.is_some(), "{class} is not installed");
    // As kubelet reports it.
    let runs =
        json!({ "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] } });
    cluster.api.ok("PATCH", &format!("{POD}/status"), Some(&runs))?;
    page.kubectl_succeeds("wait --for=condition=Ready pod/writer")?;
    let printed = page.kubectl_succeeds("get shv")?;
    ensure_has(
        &printed,
        &["STATE", "ROBUSTNESS", "REPLICAS", "NODE", VOLUME, "attached", "healthy", "3/3", "n0"],
    )?;
    page.script.leave_out("cat /data/log", "the pod does not run")?;
    page.script.finish()
}

fn troubleshooting(cluster: &Cluster) -> Result<()> {
    let mut page = page(cluster, TROUBLESHOOTING)?;
    page.script.set("POD", "writer");
    page.script.set("CLAIM", "data");
    page.script.set("NAME", VOLUME);
    ensure_has(&page.kubectl_succeeds("describe pod POD")?, &["writer", "Events"])?;
    ensure_has(&page.kubectl_succeeds("describe pvc CLAIM")?, &["StorageClass:", "shorthorn", "Events"])?;
    let printed = page.kubectl_succeeds("get shv,she,shr,shn")?;
    ensure_has(
        &printed,
        &["volume.shorthorn.io/v", "engine.shorthorn.io/", "replica.shorthorn.io/", "node.shorthorn.io/n0"],
    )?;
    let printed = page.kubectl_succeeds("describe shv NAME")?;
    ensure_has(&printed, &["Robustness", "EngineStarted", "Attached"])?;
    page.script.next("kubectl logs -n shorthorn-system deploy/shorthorn-controller")?;
    let deployment = format!("/apis/apps/v1/namespaces/{NAMESPACE}/deployments/shorthorn-controller");
    ensure!(cluster.api.find(&deployment)?.is_some(), "no Deployment has that name");
    page.script.finish()
}

/// Removes a machine from the cluster. tests/tests/pages/lost_node.rs gives a node up.
fn lost_node(cluster: &Cluster) -> Result<()> {
    let mut page = page(cluster, LOST_NODE)?;
    page.script.set("NODE", &name(1));
    page.kubectl_succeeds("delete node NODE")?;
    ensure!(cluster.api.find(&format!("/api/v1/nodes/{}", name(1)))?.is_none(), "the Node stays");
    page.script.finish()
}
