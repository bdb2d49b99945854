//! The deletion guard on a real API server, as packaging/deploy has it.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shorthorn_tests::apiserver::{ApiServer, NAMESPACE};
use shorthorn_tests::hosts::name;
use shorthorn_tests::{install, until};

use crate::cluster::Cluster;
use crate::{LIMIT, VOLUME};

const API: &str = "/apis/admissionregistration.k8s.io/v1";
/// The kinds of the guard. Kubernetes has them in version 1 of that API since 1.30.
const KINDS: [&str; 2] = ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"];
const POLICIES: [&str; 3] = ["volumes.shorthorn.io", "attachments.shorthorn.io", "installation.shorthorn.io"];
/// The controller of Kubernetes that checks the types of the expressions.
const TYPE_CHECK: &str = "validatingadmissionpolicy-status-controller";
/// The field manager of the controller's changes.
const FIELD_MANAGER: &str = "shorthorn-controller";

/// Debian's API server is 1.20, which knows neither kind, so this test cannot run on it. There, only tests in
/// `controller/src/kubernetes/deletion_guard.rs` try the expressions, by a library. With a later API server,
/// which `SHORTHORN_APISERVER_DIR` names, this test tries the guard itself.
#[test]
fn the_guard_refuses_on_a_server_that_has_policies() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let mut api = ApiServer::start(&folder.path().join("api"))?;
    install(&api)?;
    let known = kinds(&api)?;
    if !api.has_policies() {
        println!("cannot run: Kubernetes 1.{} has no admission policies", api.minor());
        ensure!(KINDS.iter().all(|kind| !known.contains(&(*kind).to_owned())), "{known:?}");
        return Ok(());
    }
    api.start_controllers(&[TYPE_CHECK])?;
    POLICIES.iter().try_for_each(|policy| has_no_type_errors(&api, policy))?;
    a_volume_that_kubernetes_needs_is_refused(&api)?;
    nothing_is_refused_without_need(&api)?;
    an_attached_volume_is_not_deleted(&api)?;
    while_there_are_volumes_the_installation_stays(&api)?;
    the_controller_may_do_both(&api)?;
    without_volumes_the_installation_can_be_deleted(&api)
}

/// The last replica of a volume stays until another one is complete. This needs no policy.
#[test]
fn a_deleted_replica_object_keeps_the_last_data() -> Result<()> {
    let cluster = Cluster::start()?;
    let volume = volume(VOLUME, &json!({ "numberOfReplicas": 1 }));
    cluster.api.ok("POST", &ApiServer::path("volumes"), Some(&volume))?;
    cluster.want_on(name(0).into())?;
    cluster.until_state("attached")?;
    let before = cluster.api.names("replicas")?;
    let [replica] = &before[..] else { anyhow::bail!("{before:?}") };
    let data = cluster.hosts.directories(VOLUME)?;
    ensure!(data.len() == 1, "{data:?}");
    let path = ApiServer::path(&format!("replicas/{replica}"));
    cluster.api.ok("DELETE", &path, None)?;
    until("another complete replica", LIMIT, || {
        let others = cluster.api.names("replicas")?;
        let left = cluster.hosts.directories(VOLUME)?;
        ensure!(!left.is_empty(), "the data is gone, and {others:?} are left");
        ensure!(others.len() == 1 && !others.contains(replica) && left.len() == 1, "{others:?}: {left:?}");
        Ok(Some(()))
    })?;
    cluster.until_healthy()
}

/// Returns the kinds that the API server has in version 1 of its API for admission.
fn kinds(api: &ApiServer) -> Result<Vec<String>> {
    let resources = api.ok("GET", API, None)?["resources"].clone();
    let resources = resources.as_array().context("no list of resources")?;
    Ok(resources.iter().filter_map(|one| Some(one["kind"].as_str()?.to_owned())).collect())
}

/// Waits until Kubernetes has checked the expressions of a policy, and found no fault.
fn has_no_type_errors(api: &ApiServer, policy: &str) -> Result<()> {
    let path = format!("{API}/validatingadmissionpolicies/{policy}");
    until("policy that was checked", LIMIT, || {
        let policy = api.ok("GET", &path, None)?;
        let warnings = &policy["status"]["typeChecking"]["expressionWarnings"];
        ensure!(policy["status"]["observedGeneration"].is_u64() && warnings.is_null(), "{policy:#}");
        Ok(Some(()))
    })
}

fn volume(name: &str, spec: &Value) -> Value {
    let mut volume = json!({ "apiVersion": "shorthorn.io/v1alpha1", "kind": "Volume",
        "metadata": { "name": name }, "spec": { "size": "67108864", "frontend": "socket" } });
    for (field, value) in spec.as_object().into_iter().flatten() {
        volume["spec"][field] = value.clone();
    }
    volume
}

fn set_status(api: &ApiServer, name: &str, status: &Value) -> Result<()> {
    let mut all = json!({ "state": "attached", "robustness": "healthy", "attach": 1 });
    for (field, value) in status.as_object().into_iter().flatten() {
        all[field] = value.clone();
    }
    let path = ApiServer::path(&format!("volumes/{name}/status"));
    api.ok("PATCH", &path, Some(&json!({ "status": all }))).map(drop)
}

/// Tests volumes without a PersistentVolume: kubectl attaches, detaches and deletes them.
fn nothing_is_refused_without_need(api: &ApiServer) -> Result<()> {
    let path = ApiServer::path("volumes/plain");
    api.ok("POST", &ApiServer::path("volumes"), Some(&volume("plain", &json!({}))))?;
    for node in [json!("n0"), json!("n1"), Value::Null] {
        api.ok("PATCH", &path, Some(&json!({ "spec": { "nodeID": node } })))?;
    }
    api.ok("DELETE", &path, None).map(drop)
}

fn a_volume_that_kubernetes_needs_is_refused(api: &ApiServer) -> Result<()> {
    api.ok("POST", &ApiServer::path("volumes"), Some(&volume("v", &json!({ "nodeID": "n0" }))))?;
    set_status(api, "v", &json!({ "persistentVolume": "pvc-1" }))?;
    let path = ApiServer::path("volumes/v");
    let (nowhere, elsewhere) = (json!({ "spec": { "nodeID": null } }), json!({ "spec": { "nodeID": "n1" } }));
    let refusal = "is PersistentVolume pvc-1, which is attached to node n0";
    refused(api, ("PATCH", &path, Some(&nowhere)), refusal)?;
    refused(api, ("PATCH", &path, Some(&elsewhere)), "volume detach --force")?;
    let mut replaced = api.ok("GET", &path, None)?;
    replaced["spec"]["nodeID"] = "n1".into();
    refused(api, ("PUT", &path, Some(&replaced)), refusal)?;
    refused(api, ("DELETE", &path, None), "is PersistentVolume pvc-1")?;
    // As kubectl delete shv --all: each object, or the collection.
    refused(api, ("DELETE", &ApiServer::path("volumes"), None), "is PersistentVolume pvc-1")?;
    let others = json!({ "metadata": { "labels": { "team": "a" } }, "spec": { "size": "134217728" } });
    api.ok("PATCH", &path, Some(&others))?;
    // The refusals do not depend on a dry run.
    for (method, body) in [("DELETE", None), ("PATCH", Some(&nowhere))] {
        let answer = api.call(method, &path, body)?;
        ensure!(answer.code == 403, "{answer:?}");
    }
    Ok(())
}

fn an_attached_volume_is_not_deleted(api: &ApiServer) -> Result<()> {
    api.ok("POST", &ApiServer::path("volumes"), Some(&volume("wanted", &json!({ "nodeID": "n0" }))))?;
    api.ok("POST", &ApiServer::path("volumes"), Some(&volume("there", &json!({}))))?;
    set_status(api, "there", &json!({ "currentNodeID": "n0" }))?;
    for name in ["wanted", "there"] {
        let path = ApiServer::path(&format!("volumes/{name}"));
        refused(api, ("DELETE", &path, None), &format!("volume {name} is attached: detach it first"))?;
    }
    let path = ApiServer::path("volumes/wanted");
    api.ok("PATCH", &path, Some(&json!({ "spec": { "nodeID": null } })))?;
    api.ok("DELETE", &path, None)?;
    set_status(api, "there", &json!({ "state": "detached", "currentNodeID": null }))?;
    api.ok("DELETE", &ApiServer::path("volumes/there"), None).map(drop)
}

fn while_there_are_volumes_the_installation_stays(api: &ApiServer) -> Result<()> {
    let namespace = format!("/api/v1/namespaces/{NAMESPACE}");
    for path in KINDS_OF_OURS.map(definition_path).iter().chain([&namespace]) {
        refused(api, ("DELETE", path, None), "volume v is there")?;
    }
    let all = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    refused(api, ("DELETE", all, None), "volume v is there")?;
    let other = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "other" } });
    api.ok("POST", "/api/v1/namespaces", Some(&other))?;
    api.ok("DELETE", "/api/v1/namespaces/other", None).map(drop)
}

/// Tests the two exemptions: the service account of the controller, and a controller that runs elsewhere,
/// whose changes name their client. A deletion names none.
fn the_controller_may_do_both(api: &ApiServer) -> Result<()> {
    let path = ApiServer::path("volumes/v");
    let managed = format!("{path}?fieldManager={FIELD_MANAGER}");
    let at = |node: &str| json!({ "spec": { "nodeID": node } });
    let other = format!("{path}?fieldManager={FIELD_MANAGER}-2");
    refused(api, ("PATCH", &other, Some(&at("n1"))), "which is attached to node n0")?;
    api.ok("PATCH", &managed, Some(&at("n1")))?;
    refused(api, ("PATCH", &path, Some(&at("n0"))), "which is attached to node n1")?;
    let answer = api.call_as_controller("PATCH", &path, Some(&at("n2")))?;
    ensure!(answer.code == 200 && answer.body["spec"]["nodeID"] == "n2", "{answer:?}");
    refused(api, ("DELETE", &managed, None), "is PersistentVolume pvc-1")?;
    let answer = api.call_as_controller("DELETE", &path, None)?;
    ensure!(answer.code == 200, "{answer:?}");
    ensure!(api.find(&path)?.is_none(), "the volume stays");
    Ok(())
}

fn without_volumes_the_installation_can_be_deleted(api: &ApiServer) -> Result<()> {
    // The volumes come last: without their definition the policy has no parameters.
    for kind in KINDS_OF_OURS {
        until("deletion that is not refused", LIMIT, || {
            let answer = api.call("DELETE", &definition_path(kind), None)?;
            ensure!(answer.code == 200, "{kind}: {answer:?}");
            Ok(Some(()))
        })?;
    }
    Ok(())
}

/// Shorthorn's kinds, that of the guard's parameters last.
const KINDS_OF_OURS: [&str; 4] = ["engines", "replicas", "nodes", "volumes"];

fn definition_path(kind: &str) -> String {
    format!("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{kind}.shorthorn.io")
}

/// Makes a call that the guard has to refuse with this message. A new policy counts after a moment.
fn refused(api: &ApiServer, (method, path, body): (&str, &str, Option<&Value>), message: &str) -> Result<()> {
    // A dry run changes nothing while the guard is not in force yet.
    let path = format!("{path}{}dryRun=All", if path.contains('?') { '&' } else { '?' });
    until("refusal", LIMIT, || {
        let answer = api.call(method, &path, body)?;
        let found = answer.body["message"].as_str().unwrap_or_default();
        ensure!(answer.code == 403 && found.contains(message), "{method} {path}: {} {found}", answer.code);
        Ok(Some(()))
    })
}
