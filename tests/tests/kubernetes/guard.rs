//! The deletion guard on a real API server, as packaging/deploy has it.

use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shorthorn_testkit::docs;
use shorthorn_tests::apiserver::{ApiServer, NAMESPACE};
use shorthorn_tests::{install, until};

use crate::LIMIT;

const GUARD: &str = "packaging/deploy/deletion-guard.yaml";
const API: &str = "/apis/admissionregistration.k8s.io/v1";
/// The kinds of the guard. Kubernetes has them in version 1 of that API since 1.30.
const KINDS: [&str; 2] = ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"];

/// Debian's API server is 1.20, which knows neither kind, so that no field of the guard can be tried on it.
/// Only the tests in `controller/src/kubernetes/guard.rs` have tried them, by a library. With a later API
/// server, this test tries the guard itself.
#[test]
fn the_guard_refuses_on_a_server_that_has_policies() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let api = ApiServer::start(&folder.path().join("api"))?;
    install(&api)?;
    let known = kinds(&api)?;
    let version = api.ok("GET", "/version", None)?;
    let minor: u32 = version["minor"].as_str().unwrap_or_default().trim_end_matches('+').parse()?;
    println!("Kubernetes 1.{minor}");
    if minor < 30 {
        ensure!(KINDS.iter().all(|kind| !known.contains(&(*kind).to_owned())), "{known:?}");
        return Ok(());
    }
    guard(&api)?;
    a_volume_that_kubernetes_needs_is_refused(&api)?;
    while_there_are_volumes_the_installation_stays(&api)
}

/// Returns the kinds that the API server has in version 1 of its API for admission.
fn kinds(api: &ApiServer) -> Result<Vec<String>> {
    let resources = api.ok("GET", API, None)?["resources"].clone();
    let resources = resources.as_array().context("no list of resources")?;
    Ok(resources.iter().filter_map(|one| Some(one["kind"].as_str()?.to_owned())).collect())
}

/// Makes the objects of the guard.
fn guard(api: &ApiServer) -> Result<()> {
    let text = fs::read_to_string(docs::root().join(GUARD))?;
    api.apply(&text)?;
    let path = format!("{API}/validatingadmissionpolicies/volumes.shorthorn.io");
    until("policy that was checked", LIMIT, || {
        let policy = api.ok("GET", &path, None)?;
        let warnings = &policy["status"]["typeChecking"]["expressionWarnings"];
        ensure!(policy["status"]["observedGeneration"].is_u64() && warnings.is_null(), "{policy:#}");
        Ok(Some(()))
    })
}

fn a_volume_that_kubernetes_needs_is_refused(api: &ApiServer) -> Result<()> {
    let volume = json!({ "apiVersion": "shorthorn.io/v1alpha1", "kind": "Volume", "metadata": { "name": "v" },
        "spec": { "size": "67108864", "frontend": "socket", "nodeID": "n0" } });
    api.ok("POST", &ApiServer::path("volumes"), Some(&volume))?;
    let status = json!({ "status": { "persistentVolume": "pvc-1" } });
    api.ok("PATCH", &ApiServer::path("volumes/v/status"), Some(&status))?;
    let nowhere = json!({ "spec": { "nodeID": null } });
    let detach = ("PATCH", ApiServer::path("volumes/v"), Some(nowhere));
    refused(api, &detach, "is PersistentVolume pvc-1, which is attached to node n0")?;
    let elsewhere = json!({ "spec": { "nodeID": "n1" } });
    refused(api, &("PATCH", ApiServer::path("volumes/v"), Some(elsewhere)), "volume detach --force")?;
    refused(api, &("DELETE", ApiServer::path("volumes/v"), None), "is PersistentVolume pvc-1")?;
    // As kubectl delete shv --all: each object, or the collection.
    refused(api, &("DELETE", ApiServer::path("volumes"), None), "is PersistentVolume pvc-1")?;
    let labels = json!({ "metadata": { "labels": { "team": "a" } } });
    api.ok("PATCH", &ApiServer::path("volumes/v"), Some(&labels)).map(drop)
}

fn while_there_are_volumes_the_installation_stays(api: &ApiServer) -> Result<()> {
    for kind in ["volumes", "engines", "replicas", "nodes"] {
        let path = format!("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{kind}.shorthorn.io");
        refused(api, &("DELETE", path, None), "volume v is there")?;
    }
    refused(api, &("DELETE", format!("/api/v1/namespaces/{NAMESPACE}"), None), "volume v is there")?;
    let other = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "other" } });
    api.ok("POST", "/api/v1/namespaces", Some(&other))?;
    api.ok("DELETE", "/api/v1/namespaces/other", None).map(drop)
}

/// Makes a call that the guard has to refuse with this message. A new policy counts after a moment.
fn refused(
    api: &ApiServer,
    (method, path, body): &(&str, String, Option<Value>),
    message: &str,
) -> Result<()> {
    // A dry run changes nothing while the guard is not in force yet.
    let path = format!("{path}?dryRun=All");
    until("refusal", LIMIT, || {
        let answer = api.call(method, &path, body.as_ref())?;
        let told = answer.body["message"].as_str().unwrap_or_default();
        ensure!(answer.code == 403 && told.contains(message), "{method} {path}: {} {told}", answer.code);
        Ok(Some(()))
    })
}
