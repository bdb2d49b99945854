//! The CEL rules of the definitions, on an API server that knows them.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shorthorn_tests::apiserver::ApiServer;
use shorthorn_tests::install;

/// Debian's API server, 1.20, drops these rules, so this test cannot run on it.
#[test]
fn the_rules_of_the_definitions_refuse() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let api = ApiServer::start(&folder.path().join("api"))?;
    if !api.has_policies() {
        println!("cannot run: Kubernetes 1.{} gets definitions without rules", api.minor());
        return Ok(());
    }
    install(&api)?;
    invalid_volumes_are_refused(&api)?;
    fixed_fields_are_kept(&api)?;
    an_engine_and_a_replica_stay(&api)
}

fn object(kind: &str, name: &str, spec: &Value) -> Value {
    json!({ "apiVersion": "shorthorn.io/v1alpha1", "kind": kind, "metadata": { "name": name }, "spec": spec })
}

/// Tests new volumes.
pub fn invalid_volumes_are_refused(api: &ApiServer) -> Result<()> {
    for (name, spec, message) in [
        ("v", json!({ "size": "5000" }), "multiple of 4096"),
        ("v", json!({ "size": "0" }), "multiple of 4096"),
        ("v", json!({ "size": "17592186048512" }), "multiple of 4096"),
        ("a.b", json!({ "size": "4096" }), "at most 63 lower-case letters"),
        ("v", json!({ "size": "4096", "volumeName": "w" }), "must be the name of the object"),
    ] {
        refused(api, "POST", &ApiServer::path("volumes"), &object("Volume", name, &spec), message)?;
    }
    Ok(())
}

fn fixed_fields_are_kept(api: &ApiServer) -> Result<()> {
    let spec = json!({ "size": "67108864", "frontend": "socket" });
    api.ok("POST", &ApiServer::path("volumes"), Some(&object("Volume", "v", &spec)))?;
    let path = ApiServer::path("volumes/v");
    for (change, message) in [
        (json!({ "frontend": "nbd" }), "the frontend of a volume cannot be changed"),
        (json!({ "size": "4096" }), "a volume can grow, not shrink"),
        (json!({ "encryptInTransit": true }), "encryptInTransit of a volume cannot be changed"),
    ] {
        refused(api, "PATCH", &path, &json!({ "spec": change }), message)?;
    }
    let allowed = json!({ "spec": { "size": "134217728", "encryptInTransit": false, "nodeID": "n0" } });
    api.ok("PATCH", &path, Some(&allowed)).map(drop)
}

fn an_engine_and_a_replica_stay(api: &ApiServer) -> Result<()> {
    let engine = json!({ "volumeName": "v", "volumeSize": "4096", "desireState": "running", "attach": 2,
        "frontend": "socket" });
    api.ok("POST", &ApiServer::path("engines"), Some(&object("Engine", "v", &engine)))?;
    let path = ApiServer::path("engines/v");
    let moved = json!({ "spec": { "volumeName": "w" } });
    refused(api, "PATCH", &path, &moved, "the volume of an engine cannot be changed")?;
    refused(api, "PATCH", &path, &json!({ "spec": { "attach": 1 } }), "cannot be reduced")?;
    api.ok("PATCH", &path, Some(&json!({ "spec": { "attach": 3, "nodeID": "n1" } })))?;

    let replica = json!({ "volumeName": "v", "volumeSize": "4096", "replicaID": "0123abcd", "nodeID": "n0",
        "diskPath": "/d", "diskID": "d", "desireState": "running" });
    api.ok("POST", &ApiServer::path("replicas"), Some(&object("Replica", "v-0123abcd", &replica)))?;
    let path = ApiServer::path("replicas/v-0123abcd");
    for change in [
        json!({ "volumeName": "w" }),
        json!({ "replicaID": "0123abce" }),
        json!({ "nodeID": "n1" }),
        json!({ "diskPath": "/e" }),
    ] {
        refused(api, "PATCH", &path, &json!({ "spec": change }), "a replica cannot move")?;
    }
    let allowed = json!({ "spec": { "desireState": "stopped", "evictionRequested": true } });
    api.ok("PATCH", &path, Some(&allowed)).map(drop)
}

fn refused(api: &ApiServer, method: &str, path: &str, body: &Value, message: &str) -> Result<()> {
    let answer = api.call(method, path, Some(body))?;
    let refusal = answer.body["message"].as_str().unwrap_or_default();
    ensure!(
        answer.code == 422 && refusal.contains(message),
        "{method} {path} {body}: {} {refusal}",
        answer.code
    );
    Ok(())
}
