//! Definitions of an earlier release, with objects in them, become those of this release.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shorthorn_testkit::docs;
use shorthorn_tests::apiserver::ApiServer;
use shorthorn_tests::hosts::name;
use shorthorn_tests::{compare_exports, definitions, under_load, until, until_whole};

use crate::cluster::Cluster;
use crate::{LIMIT, VOLUME};

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const KINDS: [&str; 4] = ["volumes", "engines", "replicas", "nodes"];
/// Fields that the definitions of the earlier release lack. The controller sets the first two.
const LATER: [(&str, &str, &str); 6] = [
    ("volumes", "status", "display"),
    ("nodes", "status", "frontends"),
    ("engines", "status", "needsUpgrade"),
    ("volumes", "spec", "encryptInTransit"),
    ("replicas", "status", "rebind"),
    ("nodes", "spec", "discovered"),
];
const SET_BY_CONTROLLER: usize = 2;
/// A word that the earlier release does not know.
const LATER_FRONTEND: &str = "iscsi";

#[test]
fn definitions_are_upgraded_with_the_objects_in_them() -> Result<()> {
    let mut cluster = Cluster::start()?;
    cluster.make_volume()?;
    attached(&cluster)?;
    under_load(cluster.guest()?, |load| load.wait_for_answers(200, LIMIT).map(drop))?;
    detached(&cluster)?;
    cluster.hosts.stop_controller()?;
    let of_this_release = objects(&cluster)?;
    for (kind, part, field) in &LATER[..SET_BY_CONTROLLER] {
        let set = of_this_release.iter().any(|object| has(object, kind, part, field));
        ensure!(set, "no object of {kind} has {part}.{field}");
    }

    make_older(&cluster)?;
    let older = objects(&cluster)?;
    let refusal = cluster.refuses_to_start()?;
    let is_named = LATER.iter().any(|(_, part, field)| refusal.contains(&format!(".{part}.{field}")));
    ensure!(
        is_named && refusal.contains("first run shorthorn-controller crds | kubectl apply -f -"),
        "{refusal}"
    );

    apply_definitions(&cluster)?;
    let newer = objects(&cluster)?;
    ensure!(newer.len() == older.len(), "{} objects became {}", older.len(), newer.len());
    for (older, newer) in older.iter().zip(&newer) {
        is_kept(older, newer).with_context(|| format!("{older:#} became {newer:#}"))?;
        let later = LATER.iter().find(|(kind, part, field)| has(newer, kind, part, field));
        ensure!(later.is_none(), "the API server had kept {later:?}: {newer:#}");
    }

    cluster.hosts.start_controller()?;
    attached(&cluster)?;
    detached(&cluster)?;
    for (kind, part, field) in &LATER[..SET_BY_CONTROLLER] {
        until("field of this release", LIMIT, || {
            let objects = objects(&cluster)?;
            ensure!(objects.iter().any(|object| has(object, kind, part, field)), "{objects:#?}");
            Ok(Some(()))
        })?;
    }
    let after = objects(&cluster)?;
    for (older, after) in older.iter().zip(&after) {
        let uids = (&older["metadata"]["uid"], &after["metadata"]["uid"]);
        ensure!(uids.0 == uids.1, "{older:#} was replaced by {after:#}");
    }
    compare_exports(&cluster.hosts.directories(VOLUME)?, cluster.folder.path()).map(drop)
}

/// Attaches the volume, until all its replicas are members.
fn attached(cluster: &Cluster) -> Result<()> {
    cluster.want_on(name(0).into())?;
    cluster.until_state("attached")?;
    until_whole(&cluster.hosts.engine_control(0, VOLUME), LIMIT)?;
    cluster.until_healthy()
}

fn detached(cluster: &Cluster) -> Result<()> {
    cluster.want_on(Value::Null)?;
    cluster.until_state("detached").map(drop)
}

/// Returns all objects, in the order of their kinds and names.
fn objects(cluster: &Cluster) -> Result<Vec<Value>> {
    let mut objects = Vec::new();
    for kind in KINDS {
        let list = cluster.api.ok("GET", &ApiServer::path(kind), None)?;
        objects.extend(list["items"].as_array().cloned().context("no list")?);
    }
    ensure!(objects.len() >= 1 + 1 + 3 + 3, "{objects:#?}");
    Ok(objects)
}

/// Returns true if the object is of that kind and has the field.
fn has(object: &Value, kind: &str, part: &str, field: &str) -> bool {
    let is_kind = object["kind"].as_str().is_some_and(|one| format!("{}s", one.to_lowercase()) == kind);
    is_kind && !object[part][field].is_null()
}

/// Installs definitions without the later fields, and has all objects stored by them: the API server drops
/// the fields.
fn make_older(cluster: &Cluster) -> Result<()> {
    for kind in KINDS {
        let path = format!("{DEFINITIONS}/{kind}.shorthorn.io");
        let mut definition = cluster.api.ok("GET", &path, None)?;
        definition["metadata"]["annotations"]["shorthorn.io/schema-hash"] = "0000000000000000".into();
        let schema = &mut definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        // A rule may read a field of this release.
        remove_rules(schema);
        let schema = &mut schema["properties"];
        for (_, part, field) in LATER.iter().filter(|(of, _, _)| *of == kind) {
            let fields = schema[part]["properties"].as_object_mut().context("no properties")?;
            ensure!(fields.remove(*field).is_some(), "{kind} have no {part}.{field}");
        }
        if kind == "volumes" {
            let words = schema["spec"]["properties"]["frontend"]["enum"].as_array_mut().context("no enum")?;
            words.retain(|word| *word != LATER_FRONTEND);
        }
        cluster.api.ok("PUT", &path, Some(&definition))?;
    }
    until("objects without the later fields", LIMIT, || {
        let objects = objects(cluster)?;
        let later = LATER
            .iter()
            .find(|(kind, part, field)| objects.iter().any(|object| has(object, kind, part, field)));
        ensure!(later.is_none(), "{later:?} are left");
        Ok(Some(()))
    })?;
    for kind in KINDS {
        for name in cluster.api.names(kind)? {
            let stored = json!({ "metadata": { "annotations": { "stored": "by an earlier release" } } });
            cluster.api.ok("PATCH", &ApiServer::path(&format!("{kind}/{name}")), Some(&stored))?;
        }
    }
    Ok(())
}

/// Removes all CEL rules of a schema.
fn remove_rules(schema: &mut Value) {
    if let Some(parts) = schema.as_object_mut() {
        parts.remove("x-kubernetes-validations");
        parts.values_mut().for_each(remove_rules);
    }
}

/// Applies the definitions of this release as the error of the controller says, and waits until the API
/// server works by them.
fn apply_definitions(cluster: &Cluster) -> Result<()> {
    let made = definitions(&cluster.api)?;
    let tools = Command::new(docs::root().join("packaging/chart/tools")).output()?;
    ensure!(tools.status.success(), "{}", String::from_utf8_lossy(&tools.stderr));
    let tools = PathBuf::from(String::from_utf8(tools.stdout)?.trim_end());
    let mut kubectl = Command::new(tools.join("kubectl"));
    kubectl.args(["apply", "-f", "-"]).env("KUBECONFIG", cluster.api.admin_kubeconfig()?);
    // For its cache.
    kubectl.env("HOME", cluster.folder.path());
    let mut kubectl = kubectl.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    kubectl.stdin.take().context("a pipe")?.write_all(made.as_bytes())?;
    let applied = kubectl.wait_with_output()?;
    ensure!(applied.status.success(), "kubectl apply: {}", String::from_utf8_lossy(&applied.stderr));
    until("API server that keeps the later fields", LIMIT, || {
        let path = format!("{}?dryRun=All", ApiServer::path(&format!("volumes/{VOLUME}")));
        let later = json!({ "spec": { "encryptInTransit": false } });
        let volume = cluster.api.ok("PATCH", &path, Some(&later))?;
        ensure!(volume["spec"]["encryptInTransit"] == false, "{volume:#}");
        Ok(Some(()))
    })
}

/// Checks that an object has all that it had. Defaults may be new.
fn is_kept(older: &Value, newer: &Value) -> Result<()> {
    match (older, newer) {
        (Value::Object(older), Value::Object(newer)) => {
            for (field, value) in older.iter().filter(|(field, _)| *field != "managedFields") {
                let kept = newer.get(field).with_context(|| format!("without {field}"))?;
                is_kept(value, kept).with_context(|| field.clone())?;
            }
            Ok(())
        }
        _ => {
            ensure!(older == newer, "{older} became {newer}");
            Ok(())
        }
    }
}
