//! The removal from a cluster: the commands of docs/uninstall.md, as the page has them and in its order.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shorthorn_testkit::docs::{self, Script};
use shorthorn_tests::apiserver::{ApiServer, NAMESPACE};
use shorthorn_tests::claims::volume_path;
use shorthorn_tests::hosts::name;
use shorthorn_tests::until;

use crate::cluster::Cluster;
use crate::documented::Documented;
use crate::{LIMIT, VOLUME};

const PAGE: &str = "docs/uninstall.md";
/// The first heading after the removal from a cluster.
const END: &str = "\n## Nodes without the package\n";
/// The programs of the page that run against a cluster.
const PROGRAMS: [&str; 3] = ["kubectl", "helm", "shorthornctl"];
/// The volume that is deleted in its step; the other one stays.
const DELETED: &str = "w";
/// The controllers of Kubernetes that complete deletions.
const CONTROLLERS: [&str; 3] = ["namespace", "persistentvolume-binder", "pv-protection"];
/// Kinds that an API server without policies is too old for.
const TOO_NEW: [&str; 3] =
    ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "PodDisruptionBudget"];

/// Reads the commands in the sentences of the page.
fn read() -> Result<Script> {
    let page = docs::pages().into_iter().find(|page| page.path.ends_with(PAGE)).context(PAGE)?;
    let (text, _) = page.text.split_once(END).context("the heading has another name")?;
    let page = docs::Page { text: text.to_owned(), ..page };
    let commands = page.code().into_iter().flat_map(|code| docs::simple_commands(&code.text));
    let of_cluster = |words: &Vec<String>| words.len() > 1 && PROGRAMS.contains(&words[0].as_str());
    Ok(Script::new(PAGE, commands.filter(of_cluster)))
}

/// Runs the next command, which may fail for the kinds that an API server without policies does not know, and
/// only for them.
fn kubectl_as_far_as_possible(page: &mut Documented, cluster: &Cluster, start: &str) -> Result<()> {
    let output = page.kubectl(start)?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let is_harmless = |line: &str| {
        line.is_empty()
            || line.starts_with("ensure CRDs are installed first")
            || !cluster.api.has_policies()
                && line.contains("no matches for kind")
                && TOO_NEW.iter().any(|kind| line.contains(kind))
            || line.starts_with("Warning: ")
    };
    let wrong: Vec<&str> = stderr.lines().filter(|line| !is_harmless(line)).collect();
    ensure!(wrong.is_empty(), "{start}: {stderr}");
    Ok(())
}

/// Helm does not run here, because the chart needs a later API server. tests/tests/chart.rs checks its
/// values.
#[test]
fn the_documented_removal_leaves_nothing() -> Result<()> {
    let mut cluster = Cluster::start()?;
    cluster.api.start_controllers(&CONTROLLERS)?;
    let mut page = Documented::new(&cluster, read()?)?;
    cluster.make_volume()?;
    let deleted = json!({
        "apiVersion": "shorthorn.io/v1alpha1",
        "kind": "Volume",
        "metadata": { "name": DELETED },
        "spec": { "size": "67108864", "frontend": "socket" },
    });
    cluster.api.ok("POST", &ApiServer::path("volumes"), Some(&deleted))?;
    // Replicas have their directories from the first attachment on.
    cluster.want_on(name(0).into())?;
    cluster.until_state("attached")?;
    cluster.want_on(Value::Null)?;
    cluster.until_state("detached")?;
    the_volumes_are_deleted(&cluster, &mut page)?;

    page.script.next("helm upgrade shorthorn packaging/chart")?;
    kubectl_as_far_as_possible(&mut page, &cluster, "delete -f packaging/deploy/deletion-guard.yaml")?;
    // Without its guard this API server deletes the volume with the definitions, and waits for its data.
    ensure!(!cluster.hosts.directories(VOLUME)?.is_empty(), "the volume has no data");
    page.kubectl_succeeds("delete crd volumes.shorthorn.io")?;
    let left = cluster.hosts.directories(VOLUME)?;
    ensure!(left.is_empty(), "the definition is gone before the data: {left:?}");
    page.kubectl_succeeds("delete -f packaging/deploy/crds.yaml")?;
    let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    ensure!(names(&cluster.api, definitions)?.is_empty(), "definitions are left");

    page.script.next("helm uninstall shorthorn")?;
    kubectl_as_far_as_possible(&mut page, &cluster, "delete -k packaging/deploy")?;
    for path in [
        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
        "/apis/storage.k8s.io/v1/storageclasses",
        "/apis/storage.k8s.io/v1/csidrivers",
    ] {
        let left: Vec<String> =
            names(&cluster.api, path)?.into_iter().filter(|name| name.contains("shorthorn")).collect();
        ensure!(left.is_empty(), "{path}: {left:?}");
    }
    // No kubelet ends it here.
    cluster.hosts.kill_controller()?;
    the_namespace_is_deleted_with_its_secrets(&cluster, &mut page)?;
    page.script.finish()
}

/// Steps 1 and 2. A volume that a PersistentVolume needs is not deleted before that.
fn the_volumes_are_deleted(cluster: &Cluster, page: &mut Documented) -> Result<()> {
    let size = json!({ "storage": "67108864" });
    let persistent = json!({ "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": "kept" },
        "spec": { "accessModes": ["ReadWriteOnce"], "capacity": size,
            "persistentVolumeReclaimPolicy": "Retain", "storageClassName": "",
            "csi": { "driver": "csi.shorthorn.io", "volumeHandle": DELETED } } });
    cluster.api.ok("POST", "/api/v1/persistentvolumes", Some(&persistent))?;
    until("record of the PersistentVolume", LIMIT, || {
        let volume = cluster.api.get(&format!("volumes/{DELETED}"))?.context("the volume is not there")?;
        ensure!(volume["status"]["persistentVolume"] == "kept", "{volume:#}");
        Ok(Some(()))
    })?;
    let refusal = cluster.hosts.refused(&["volume", "delete", DELETED, "--yes"])?;
    ensure!(refusal.contains("kept"), "{refusal}");
    page.script.set("NAME", "kept");
    page.kubectl_succeeds("delete pv NAME")?;
    page.script.set("NAME", DELETED);
    ensure!(cluster.api.find(&volume_path("kept"))?.is_none(), "the PersistentVolume stays");

    let list = page.script.next("shorthornctl volume list")?;
    let list: Vec<&str> = list.iter().skip(1).map(String::as_str).collect();
    let printed = cluster.hosts.ctl(&list)?;
    ensure!(printed.contains(DELETED) && printed.contains(VOLUME), "{printed}");
    page.script.next("shorthornctl volume delete NAME")?;
    cluster.hosts.ctl(&["volume", "delete", DELETED, "--yes"])?;
    until("end of the volume", LIMIT, || {
        let left = cluster.hosts.directories(DELETED)?;
        ensure!(cluster.api.names("volumes")? == [VOLUME] && left.is_empty(), "{left:?}");
        Ok(Some(()))
    })
}

/// Step 6. The namespace is being deleted, and the Secrets hold it until their finalizers are removed.
fn the_namespace_is_deleted_with_its_secrets(cluster: &Cluster, page: &mut Documented) -> Result<()> {
    let secrets = format!("/api/v1/namespaces/{NAMESPACE}/secrets");
    until("namespace that only Secrets are left in", LIMIT, || {
        let list = cluster.api.ok("GET", &secrets, None)?;
        let items = list["items"].as_array().cloned().unwrap_or_default();
        let are_held = items.iter().all(|secret| secret["metadata"]["deletionTimestamp"].is_string());
        ensure!(are_held && items.len() == 2, "{items:#?}");
        Ok(Some(()))
    })?;
    page.kubectl_succeeds("patch secret shorthorn-volume-key shorthorn-ca")?;
    page.kubectl_succeeds("delete namespace shorthorn-system")?;
    let namespace = cluster.api.find(&format!("/api/v1/namespaces/{NAMESPACE}"))?;
    ensure!(namespace.is_none(), "{namespace:#?}");
    Ok(())
}

/// Returns the names of all objects at a path.
fn names(api: &ApiServer, path: &str) -> Result<Vec<String>> {
    let list = api.ok("GET", path, None)?;
    let items = list["items"].as_array().context("no list")?;
    Ok(items.iter().filter_map(|item| Some(item["metadata"]["name"].as_str()?.to_owned())).collect())
}
