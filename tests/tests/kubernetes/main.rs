//! Volumes as custom resources of a real Kubernetes API server. The controller, agents, engines and replicas
//! are real too. The controller is signed in as its service account with the roles of packaging/deploy.

mod backup;
mod cluster;
mod definitions;
mod deletion_guard;
mod documented;
mod newer;
mod pages;
mod rules;
mod uninstall;

use std::path::PathBuf;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::controller_client::ControllerClient;
use shorthorn_api::csi::v1::identity_client::IdentityClient;
use shorthorn_tests::apiserver::{ApiServer, NAMESPACE};
use shorthorn_tests::hosts::name;
use shorthorn_tests::{Caller, Provisioner, compare_exports, under_load, until, until_whole};
use tonic::{Code, Status};

use cluster::Cluster;

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(120);
const VOLUME: &str = "v";
/// The maximum number of calls to the API server for an attach, without events.
const CALLS_MAX: usize = 12;
/// The time after which the steps of an attach are stored, too.
const QUIET_START: Duration = Duration::from_secs(5);
/// The number of times that a controller is killed.
const KILLS: u32 = 3;
/// The time limit for binding a claim after the death of the leading controller.
const BOUND_LIMIT: Duration = Duration::from_secs(20);
/// The time limit of a CSI call.
const CALL_LIMIT: Duration = Duration::from_secs(15);

/// Made, attached, written to, detached and deleted as kubectl does it. While it is attached the API server
/// is killed, and others write to the objects.
#[test]
fn a_volume_lives_in_kubernetes() -> Result<()> {
    let mut cluster = Cluster::start()?;
    cluster.make_volume()?;
    let volume = cluster.until_state("detached")?;
    ensure!(volume["spec"]["numberOfReplicas"] == 3, "{volume:#}");
    ensure!(volume["metadata"]["finalizers"] == json!(["shorthorn.io/data"]), "{volume:#}");
    it_is_attached_with_few_calls(&cluster)?;
    let guest = cluster.guest()?;
    let ((), guest) = under_load(guest, |load| {
        cluster.api.kill()?;
        load.wait_for_answers(500, LIMIT)?;
        cluster.api.start_server()?;
        load.wait_for_answers(200, LIMIT).map(drop)
    })?;
    // It may have ended: without an API server it cannot know that it leads.
    cluster.hosts.keep_controller()?;
    println!("{:?}", guest.counts());
    drop(guest);

    // Fields of other writers stay in the object.
    let path = ApiServer::path(&format!("volumes/{VOLUME}"));
    let notes = json!({ "metadata": { "annotations": { "note": "mine" } } });
    cluster.api.ok("PATCH", &path, Some(&notes))?;
    let directories = cluster.hosts.directories(VOLUME)?;
    cluster.want_on(Value::Null)?;
    let volume = cluster.until_state("detached")?;
    ensure!(volume["metadata"]["annotations"]["note"] == "mine", "{volume:#}");
    ensure!(volume["metadata"]["labels"]["team"] == "a", "{volume:#}");
    compare_exports(&directories, cluster.folder.path())?;
    cluster.api.ok("DELETE", &path, None)?;
    cluster.until_gone()?;
    the_leader_is_found(&cluster)
}

/// Attaches the volume. The API server gets few calls for it, and the events tell the story.
fn it_is_attached_with_few_calls(cluster: &Cluster) -> Result<()> {
    let before = cluster.api.controller_calls()?.len();
    let start = Instant::now();
    cluster.want_on(name(0).into())?;
    cluster.until_state("attached")?;
    let took = start.elapsed();
    until_whole(&cluster.hosts.engine_control(0, VOLUME), LIMIT)?;
    cluster.until_healthy()?;
    let volume = cluster.api.get(&format!("volumes/{VOLUME}"))?.context("the volume is not there")?;
    let display = &volume["status"]["display"];
    ensure!(display["replicas"] == "3/3" && display["size"] == "0.07Gi", "{volume:#}");
    let settled = volume["status"]["conditions"].as_array().context("no conditions")?.iter();
    let settled = settled.map(|condition| (&condition["observedGeneration"], &condition["reason"]));
    for (generation, reason) in settled {
        ensure!(*generation == volume["metadata"]["generation"] && reason.is_string(), "{volume:#}");
    }
    let story = ["Scheduled", "Detached", "Attaching", "EngineStarted", "Attached", "Healthy"];
    cluster.until_event(&volume, &story)?;
    let calls = &cluster.api.controller_calls()?[before..];
    let (events, calls): (Vec<&String>, Vec<&String>) =
        calls.iter().partition(|call| call.split(' ').nth(1) == Some("events"));
    let lines: Vec<&str> = calls.iter().map(|call| call.as_str()).collect();
    println!(
        "attached after {took:?} with {} calls and {} events:\n{}",
        calls.len(),
        events.len(),
        lines.join("\n")
    );
    // The steps of a start that takes long are stored, and that is right.
    ensure!(took >= QUIET_START || calls.len() <= CALLS_MAX, "{} calls: {lines:#?}", calls.len());
    Ok(())
}

/// Tests that shorthornctl finds the leader by its Lease, with the rights of the controller, and asks for a
/// port of its pod. No kubelet forwards one here: controller/tests/cluster/laptop.rs has a stand-in for that.
fn the_leader_is_found(cluster: &Cluster) -> Result<()> {
    let kubeconfig = cluster.api.kubeconfig()?.display().to_string();
    let list = ["--kubeconfig", &kubeconfig, "volume", "list"];
    let refusal = cluster.hosts.refused(&list)?;
    ensure!(refusal.contains("which is not a pod in namespace"), "{refusal}");
    let leases = format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/shorthorn-controller");
    let lease = cluster.api.ok("GET", &leases, None)?;
    let holder = lease["spec"]["holderIdentity"].as_str().context("no controller leads")?;
    let host = holder.rsplit_once('-').context("no identity of a controller")?.0;
    let container = json!({ "name": "controller", "image": "none",
        "ports": [{ "name": "api", "containerPort": 9521 }] });
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": host },
        "spec": { "containers": [container] } });
    let pods = format!("/api/v1/namespaces/{NAMESPACE}/pods");
    cluster.api.ok("POST", &pods, Some(&pod))?;
    let refusal = cluster.hosts.refused(&list)?;
    ensure!(
        refusal.contains(&format!("port 9521 of pod {host}")) && !refusal.contains("forbidden"),
        "{refusal}"
    );
    cluster.api.ok("DELETE", &format!("{pods}/{host}"), None).map(drop)
}

/// Several controllers, of which one works. It is killed at some point of an attach or a detach, and the next
/// one takes over, while others write to the objects.
#[test]
fn controllers_take_over_from_each_other() -> Result<()> {
    let seed = std::env::var("SHORTHORN_SEED").map_or_else(|_| Ok(fastrand::u64(..)), |text| text.parse())?;
    println!("SHORTHORN_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut cluster = Cluster::start()?;
    cluster.make_volume()?;
    cluster.until_state("detached")?;
    for round in 0..KILLS {
        let listen = format!("unix://{}/ctl{round}.sock", cluster.folder.path().display());
        let standby = cluster.hosts.controller_command(&listen)?.spawn()?;
        let is_attach = round % 2 == 0;
        let calls = cluster.api.controller_calls()?.len() + random.usize(0..20);
        cluster.want_on(if is_attach { name(0).into() } else { Value::Null })?;
        until("controller that is at work", LIMIT, || {
            let notes = json!({ "metadata": { "annotations": { "round": random.u32(..).to_string() } } });
            cluster.api.ok("PATCH", &ApiServer::path(&format!("volumes/{VOLUME}")), Some(&notes))?;
            let state =
                cluster.api.get(&format!("volumes/{VOLUME}"))?.context("gone")?["status"]["state"].clone();
            let is_done = state == if is_attach { "attached" } else { "detached" };
            Ok((is_done || cluster.api.controller_calls()?.len() >= calls).then_some(()))
        })?;
        cluster.hosts.kill_controller()?;
        let start = Instant::now();
        cluster.hosts.take_controller(standby, &listen)?;
        println!("the next controller answers {:?} after the kill", start.elapsed());
        cluster.until_state(if is_attach { "attached" } else { "detached" })?;
        if is_attach {
            until_whole(&cluster.hosts.engine_control(0, VOLUME), LIMIT)?;
        }
    }
    cluster.api.ok("DELETE", &ApiServer::path(&format!("volumes/{VOLUME}")), None)?;
    cluster.until_gone()
}

/// The Shorthorn part of a pod of the deployment; killed with SIGKILL when dropped.
struct Pod {
    child: Child,
    csi: PathBuf,
}

impl Drop for Pod {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Beside a controller that stands by a sidecar waits, and it takes over as soon as its controller does.
#[test]
fn a_claim_is_bound_soon_after_the_leader_dies() -> Result<()> {
    let mut cluster = Cluster::start()?;
    cluster.api.start_controller_manager()?;
    for host in 0..3 {
        cluster.register(&name(host), &format!("192.0.2.{}", host + 1))?;
    }
    cluster.hosts.stop_controller()?;
    let leader = cluster.pod("a")?;
    until("controller that leads", LIMIT, || Ok(ready(&leader)?.then_some(())))?;
    let standby = cluster.pod("b")?;
    until("answers of the controller that stands by", LIMIT, || stands_by(&standby).map(Some))?;

    let beside_leader = Provisioner::new(&cluster.api, leader.csi.clone());
    let beside_standby = Provisioner::new(&cluster.api, standby.csi.clone());
    let containers = [&beside_leader, &beside_standby];
    thread::scope(|scope| {
        for container in containers {
            scope.spawn(|| container.run());
        }
        let result = the_leader_dies(&cluster, leader, containers);
        containers.into_iter().for_each(Provisioner::stop);
        result
    })
}

fn the_leader_dies(
    cluster: &Cluster,
    leader: Pod,
    [beside_leader, beside_standby]: [&Provisioner; 2],
) -> Result<()> {
    cluster.claim("first")?;
    cluster.until_bound("first")?;
    ensure!(beside_leader.is_ready() && !beside_standby.is_ready(), "the wrong sidecar works");
    drop(leader);
    let died = Instant::now();
    // As kubelet does.
    let again = cluster.pod("a")?;
    cluster.claim("second")?;
    cluster.until_bound("second")?;
    let took = died.elapsed();
    println!("a claim is bound {took:?} after the death of the leader");
    ensure!(took <= BOUND_LIMIT, "a claim is bound only after {took:?}");
    // The controller that stood by takes over, unless a busy machine delays it: then the new one is as early.
    let leads_again = ready(&again)?;
    let is_right = beside_leader.is_ready() == leads_again && beside_standby.is_ready() != leads_again;
    ensure!(is_right, "the wrong sidecar works: the controller that was started again leads: {leads_again}");
    let ends = [beside_leader.ends(), beside_standby.ends()];
    ensure!(ends == [1, 0], "the sidecars have ended {ends:?} times");
    Ok(())
}

/// Returns the answer of a pod's controller to Probe.
fn ready(pod: &Pod) -> Result<bool> {
    let csi = Caller::unix(&pod.csi)?;
    let probe = csi.call(v1::ProbeRequest {}, CALL_LIMIT, async |channel, request| {
        IdentityClient::new(channel).probe(request).await
    })?;
    probe.ready.context("an answer that says nothing")
}

/// Checks that a controller stands by: Probe says so, and other calls are refused.
fn stands_by(pod: &Pod) -> Result<()> {
    ensure!(!ready(pod)?, "it is ready");
    let csi = Caller::unix(&pod.csi)?;
    let info = csi.call(v1::GetPluginInfoRequest {}, CALL_LIMIT, async |channel, request| {
        IdentityClient::new(channel).get_plugin_info(request).await
    });
    let asked = csi.call(v1::ListVolumesRequest::default(), CALL_LIMIT, async |channel, request| {
        ControllerClient::new(channel).list_volumes(request).await
    });
    for answer in [info.map(drop), asked.map(drop)] {
        let Err(error) = answer else { bail!("it works although it stands by") };
        let status = error.downcast_ref::<Status>().context("no answer of a server")?;
        ensure!(status.code() == Code::Unavailable && status.message().contains("stands by"), "{status}");
    }
    Ok(())
}

/// A node is found if the driver is registered there. Its address follows the machine until a user sets it.
#[test]
fn nodes_are_found_and_others_are_reported() -> Result<()> {
    let mut cluster = Cluster::start()?;
    cluster.register("m1", "192.0.2.1")?;
    cluster.register("m2", "2001:db8::2")?;
    cluster.until_node_spec("m1", |spec| spec["address"] == "http://192.0.2.1:9501")?;
    cluster.until_node_spec("m2", |spec| {
        spec["address"] == "http://[2001:db8::2]:9501" && spec["discovered"]["zone"] == "rack-1"
    })?;
    cluster.register("m1", "192.0.2.3")?;
    cluster.until_node_spec("m1", |spec| spec["address"] == "http://192.0.2.3:9501")?;
    let by_hand = json!({ "spec": { "address": "http://192.0.2.9:1" } });
    cluster.api.ok("PATCH", &ApiServer::path("nodes/m1"), Some(&by_hand))?;
    cluster.register("m1", "192.0.2.4")?;
    cluster.until_node_spec("m1", |spec| spec["discovered"]["address"] == "http://192.0.2.4:9501")?;
    cluster.until_node_spec("m1", |spec| spec["address"] == "http://192.0.2.9:1")?;

    a_volume_that_cannot_be_says_why(&cluster)?;
    a_lost_key_is_not_replaced(&mut cluster)?;
    a_drain_waits_for_volumes(&mut cluster)
}

/// Tests that a node that volumes in use need has a pod that cannot be evicted. The first of several cordoned
/// nodes is released.
fn a_drain_waits_for_volumes(cluster: &mut Cluster) -> Result<()> {
    cluster.hosts.stop_controller()?;
    let listen = format!("unix://{}/guard.sock", cluster.folder.path().display());
    let controller = cluster.hosts.controller_command(&listen)?.args(["--guard-image", "none:1"]).spawn()?;
    cluster.hosts.take_controller(controller, &listen)?;
    for host in 0..3 {
        cluster.register(&name(host), &format!("192.0.2.{}", host + 1))?;
    }
    cluster.until_healthy()?;
    let cordon = |cluster: &Cluster, host: usize, is_so: bool| {
        let spec = json!({ "spec": { "unschedulable": is_so } });
        cluster.api.ok("PATCH", &format!("/api/v1/nodes/{}", name(host)), Some(&spec)).map(drop)
    };
    ensure!(cluster.guard_pods()?.is_empty(), "{:?}", cluster.guard_pods()?);
    cordon(cluster, 1, true)?;
    cluster.until_guard_pods(&[0, 2])?;
    let refusal = cluster.hosts.refused(&["node", "can-reboot", &name(2)])?;
    ensure!(refusal.contains("node n1, which was cordoned in Kubernetes before"), "{refusal}");
    cluster.hosts.ctl(&["node", "can-reboot", &name(1)])?;
    a_guard_is_not_evicted(cluster, 2)?;

    cordon(cluster, 1, false)?;
    cluster.until_guard_pods(&[])?;
    cordon(cluster, 0, true)?;
    cluster.until_guard_pods(&[1, 2])?;
    // Without an image, or with another policy, there should be none.
    cluster.hosts.stop_controller()?;
    cluster.hosts.start_controller()?;
    cluster.until_guard_pods(&[])
}

/// Asks like kubectl drain, once a kubelet has reported that the pod runs.
fn a_guard_is_not_evicted(cluster: &Cluster, host: usize) -> Result<()> {
    let guard_pod = format!("shorthorn-guard-{}", name(host));
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{guard_pod}");
    let pod = cluster.api.ok("GET", &path, None)?;
    ensure!(
        pod["spec"]["nodeName"] == name(host) && pod["spec"]["containers"][0]["image"] == "none:1",
        "{pod:#}"
    );
    let holds = pod["metadata"]["annotations"]["shorthorn.io/holds"].as_str().unwrap_or_default();
    ensure!(holds.starts_with("volume v: 1 of the 3 replicas"), "{pod:#}");
    let runs =
        json!({ "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] } });
    cluster.api.ok("PATCH", &format!("{path}/status"), Some(&runs))?;
    let eviction = json!({ "apiVersion": cluster.disruption_api(), "kind": "Eviction",
        "metadata": { "name": guard_pod, "namespace": NAMESPACE } });
    let answer = cluster.api.call("POST", &format!("{path}/eviction"), Some(&eviction))?;
    ensure!(answer.code == 429, "{answer:?}");
    Ok(())
}

/// Tests that a controller does not start without the key of its volumes, nor with another one; with the
/// right one it does.
fn a_lost_key_is_not_replaced(cluster: &mut Cluster) -> Result<()> {
    let secrets = format!("/api/v1/namespaces/{NAMESPACE}/secrets");
    let path = format!("{secrets}/shorthorn-volume-key");
    cluster.make_volume()?;
    let volume = cluster.until_state("detached")?;
    let fingerprint = volume["metadata"]["annotations"]["shorthorn.io/key-fingerprint"].clone();
    ensure!(fingerprint.is_string(), "{volume:#}");
    let secret = cluster.api.ok("GET", &path, None)?;
    let delete = |cluster: &Cluster| {
        cluster.api.ok("DELETE", &path, None)?;
        let kept = cluster.api.find(&path)?.context("nothing keeps the Secret")?;
        ensure!(kept["metadata"]["deletionTimestamp"].is_string(), "{kept:#}");
        cluster.api.ok("PATCH", &path, Some(&json!({ "metadata": { "finalizers": null } })))?;
        ensure!(cluster.api.find(&path)?.is_none(), "the Secret stays");
        anyhow::Ok(())
    };
    let make = |cluster: &Cluster, key: &Value| {
        let secret = json!({ "apiVersion": "v1", "kind": "Secret", "immutable": true,
            "metadata": { "name": "shorthorn-volume-key" }, "data": { "key": key } });
        cluster.api.ok("POST", &secrets, Some(&secret)).map(drop)
    };
    delete(cluster)?;
    cluster.hosts.stop_controller()?;
    let refusal = cluster.refuses_to_start()?;
    let fingerprint = fingerprint.as_str().unwrap_or_default();
    ensure!(refusal.contains("is lost, and 1 volumes need it") && refusal.contains(fingerprint), "{refusal}");
    ensure!(cluster.api.find(&path)?.is_none(), "another key is made");
    make(cluster, &"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=".into())?;
    let refusal = cluster.refuses_to_start()?;
    ensure!(refusal.contains(&format!("need the key {fingerprint}")), "{refusal}");
    // Another key gets no finalizer that would keep it.
    cluster.api.ok("DELETE", &path, None)?;
    until("end of the wrong key", LIMIT, || Ok(cluster.api.find(&path)?.is_none().then_some(())))?;
    make(cluster, &secret["data"]["key"])?;
    cluster.hosts.start_controller()?;
    cluster.want_on(name(0).into())?;
    cluster.until_state("attached")?;
    until_whole(&cluster.hosts.engine_control(0, VOLUME), LIMIT).map(drop)
}

/// Tests a volume of an impossible size. The controller refuses it, unless the API server knows CEL rules.
fn a_volume_that_cannot_be_says_why(cluster: &Cluster) -> Result<()> {
    if cluster.api.has_policies() {
        rules::invalid_volumes_are_refused(&cluster.api)?;
        cluster.make_volume()?;
        cluster.until_state("detached")?;
        repeated_events_are_counted(cluster)?;
        cluster.api.ok("DELETE", &ApiServer::path(&format!("volumes/{VOLUME}")), None)?;
        return cluster.until_gone();
    }
    let volume = json!({
        "apiVersion": "shorthorn.io/v1alpha1",
        "kind": "Volume",
        "metadata": { "name": VOLUME },
        "spec": { "size": "5000", "frontend": "socket" },
    });
    cluster.api.ok("POST", &ApiServer::path("volumes"), Some(&volume))?;
    let accepted = |volume: &Value| {
        let conditions = volume["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.into_iter().find(|condition| condition["type"] == "Accepted").unwrap_or_default()
    };
    let path = format!("volumes/{VOLUME}");
    let volume = until("volume that is refused", LIMIT, || {
        let volume = cluster.api.get(&path)?.context("the volume is not there")?;
        let message = accepted(&volume)["message"].as_str().unwrap_or_default().to_owned();
        ensure!(message.contains("multiple of 4096") && accepted(&volume)["status"] == "False", "{volume:#}");
        Ok(Some(volume))
    })?;
    ensure!(volume["metadata"]["finalizers"].is_null(), "{volume:#}");
    cluster.until_event(&volume, &["InvalidSpec"])?;
    let corrected = json!({ "spec": { "size": "67108864" } });
    cluster.api.ok("PATCH", &ApiServer::path(&path), Some(&corrected))?;
    let volume = cluster.until_state("detached")?;
    ensure!(accepted(&volume)["status"] == "True", "{volume:#}");
    cluster.until_event(&volume, &["InvalidSpec", "Scheduled", "Detached"])?;
    repeated_events_are_counted(cluster)?;
    cluster.api.ok("DELETE", &ApiServer::path(&path), None)?;
    cluster.until_gone()
}

/// Tests that two attachments to one node make one event of each kind, with a count.
fn repeated_events_are_counted(cluster: &Cluster) -> Result<()> {
    for _ in 0..2 {
        cluster.want_on(name(0).into())?;
        cluster.until_state("attached")?;
        cluster.want_on(Value::Null)?;
        cluster.until_state("detached")?;
    }
    until("event that was counted", LIMIT, || {
        let attached: Vec<Value> =
            cluster.events()?.into_iter().filter(|event| event["reason"] == "Attached").collect();
        ensure!(attached.len() == 1 && attached[0]["series"]["count"] == 2, "{attached:#?}");
        Ok(Some(()))
    })
}
