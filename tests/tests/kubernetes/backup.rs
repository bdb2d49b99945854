//! The backup of the key of all volumes, its loss and its restore, by the commands of docs/backup.md.

use std::fs::{self, File};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shorthorn_testkit::docs::Script;
use shorthorn_tests::apiserver::NAMESPACE;
use shorthorn_tests::hosts::name;
use shorthorn_tests::{until, until_whole};

use crate::cluster::Cluster;
use crate::documented::Documented;
use crate::{LIMIT, VOLUME};

const PAGE: &str = "docs/backup.md";
const FILE: &str = "shorthorn-volume-key.base64";

#[test]
fn a_lost_key_is_restored_as_documented() -> Result<()> {
    let mut cluster = Cluster::start()?;
    cluster.make_volume()?;
    cluster.until_state("detached")?;
    let script = Script::read(PAGE, "tests/tests/kubernetes/backup.rs")?;
    let mut page = Documented::new(&cluster, script)?;
    let key = page.kubectl_succeeds("get secret shorthorn-volume-key")?;
    fs::write(cluster.folder.path().join(FILE), &key)?;
    let authority = page.kubectl_succeeds("get secret shorthorn-ca")?;
    ensure!(authority.contains("kind: Secret") && authority.contains("data:"), "{authority}");

    let secret = format!("/api/v1/namespaces/{NAMESPACE}/secrets/shorthorn-volume-key");
    cluster.api.ok("DELETE", &secret, None)?;
    cluster.api.ok("PATCH", &secret, Some(&json!({ "metadata": { "finalizers": null } })))?;
    cluster.hosts.stop_controller()?;
    let refusal = cluster.refuses_to_start()?;
    ensure!(refusal.contains("is lost, and 1 volumes need it"), "{refusal}");
    the_key_is_restored(&cluster, &mut page)?;
    let restored = cluster.api.ok("GET", &secret, None)?;
    ensure!(restored["data"]["key"] == key.trim(), "another key: {restored:#}");
    page.kubectl_succeeds("rollout restart deployment/shorthorn-controller")?;
    // No kubelet starts it here.
    cluster.hosts.start_controller()?;
    cluster.want_on(name(0).into())?;
    cluster.until_state("attached")?;
    until_whole(&cluster.hosts.engine_control(0, VOLUME), LIMIT)?;

    // A deletion by mistake: the Secret stays readable until its finalizer is removed.
    until("finalizer of the restored key", LIMIT, || {
        let secret = cluster.api.ok("GET", &secret, None)?;
        Ok(secret["metadata"]["finalizers"].is_array().then_some(()))
    })?;
    cluster.api.ok("DELETE", &secret, None)?;
    ensure!(cluster.api.ok("GET", &secret, None)?["data"]["key"] == key.trim(), "it is not readable");
    page.kubectl_succeeds("patch secret shorthorn-volume-key")?;
    ensure!(cluster.api.find(&secret)?.is_none(), "the Secret stays");
    the_volume_is_detached(&cluster)?;
    page.script.finish()
}

/// Runs the pipe of the page: base64 into kubectl.
fn the_key_is_restored(cluster: &Cluster, page: &mut Documented) -> Result<()> {
    let words = page.script.next("base64 -d")?;
    let mut decoding = Command::new(&words[0]);
    decoding.args(&words[1..]).current_dir(cluster.folder.path()).stdout(Stdio::piped());
    let mut decoding = decoding.spawn().context("starting base64")?;
    let key = decoding.stdout.take().context("no standard output")?;
    let mut create = page.command("create secret generic shorthorn-volume-key")?;
    let log = cluster.folder.path().join("create.log");
    let status = create.stdin(key).stderr(File::create(&log)?).status()?;
    ensure!(status.success(), "{}", fs::read_to_string(&log)?);
    ensure!(decoding.wait()?.success(), "base64 does not decode the key");
    Ok(())
}

fn the_volume_is_detached(cluster: &Cluster) -> Result<()> {
    cluster.want_on(Value::Null)?;
    cluster.until_state("detached").map(drop)
}
