//! Tests pods of a lost node, with a real API server, a real controller as its service account, and real
//! engines and replicas. No kubelet and none of Kubernetes' own controllers runs, so the controller has
//! removed all removed objects.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::node_client::NodeClient;
use shorthorn_tests::Caller;
use shorthorn_tests::apiserver::{ApiServer, CONTROLLER, NAMESPACE};
use shorthorn_tests::claims::{attachment_path, claim_path, set_finalizer, volume_path};
use shorthorn_tests::hosts::{Hosts, name};
use shorthorn_tests::{install, until, until_whole};

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(120);
/// Longer than until an agent counts as unreachable, and the controller has decided.
const QUIET: Duration = Duration::from_secs(16);
const OURS: &str = "csi.shorthorn.io";
const OTHERS: &str = "disks.example";
const ATTACHER_FINALIZER: &str = "external-attacher/csi-shorthorn-io";
/// The grace period of pods that need not end soon.
const LONG_S: u32 = 3600;

struct Cluster {
    // Dropped before the API server: the controller ends first.
    hosts: Hosts,
    api: ApiServer,
    folder: tempfile::TempDir,
}

impl Cluster {
    fn start() -> Result<Cluster> {
        let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
        let api = ApiServer::start(&folder.path().join("api"))?;
        install(&api)?;
        // The controller must do its work here without the roles of the sidecars beside it.
        let bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
        for sidecar in ["provisioner", "attacher", "resizer"] {
            api.ok("DELETE", &format!("{bindings}/shorthorn-csi-{sidecar}"), None)?;
        }
        let kubeconfig = api.kubeconfig()?.display().to_string();
        let store = ["--kubernetes", "--kubeconfig", &kubeconfig].map(str::to_owned).to_vec();
        let hosts = Hosts::start_with_store(folder.path(), 3, 3, store)?;
        Ok(Cluster { hosts, api, folder })
    }

    /// Makes the machine in Kubernetes, whose agent has registered the driver.
    fn register(&self, node: &str) -> Result<()> {
        let machine = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": node } });
        self.api.ok("POST", "/api/v1/nodes", Some(&machine))?;
        let driver = json!({ "name": OURS, "nodeID": node, "topologyKeys": [] });
        let drivers = json!({ "apiVersion": "storage.k8s.io/v1", "kind": "CSINode",
            "metadata": { "name": node }, "spec": { "drivers": [driver] } });
        self.api.ok("POST", "/apis/storage.k8s.io/v1/csinodes", Some(&drivers)).map(drop)
    }

    /// Sets the Ready condition of the kubelet there: True, False or Unknown.
    fn say_ready(&self, node: &str, ready: &str) -> Result<()> {
        let condition = json!({ "type": "Ready", "status": ready });
        let status = json!({ "status": { "conditions": [condition] } });
        self.api.ok("PATCH", &format!("/api/v1/nodes/{node}/status"), Some(&status)).map(drop)
    }

    /// Makes a volume with a device on a node, and the objects that Kubernetes makes of it: claim,
    /// PersistentVolume, attachment.
    fn volume(&self, volume: &str, node: &str) -> Result<()> {
        let object = json!({
            "apiVersion": "shorthorn.io/v1alpha1",
            "kind": "Volume",
            "metadata": { "name": volume },
            "spec": { "size": "67108864", "frontend": "socket", "nodeID": node },
        });
        self.api.ok("POST", &ApiServer::path("volumes"), Some(&object))?;
        self.claim(volume, OURS, node)
    }

    fn claim(&self, volume: &str, driver: &str, node: &str) -> Result<()> {
        let size = json!({ "storage": "67108864" });
        let claim = json!({ "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": { "name": volume },
            "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": size },
                "storageClassName": "", "volumeName": volume } });
        let claims = "/api/v1/namespaces/default/persistentvolumeclaims";
        let claim = self.api.ok("POST", claims, Some(&claim))?;
        let persistent = json!({ "apiVersion": "v1", "kind": "PersistentVolume",
            "metadata": { "name": volume },
            "spec": { "accessModes": ["ReadWriteOnce"], "capacity": size,
                "claimRef": { "namespace": "default", "name": volume, "uid": claim["metadata"]["uid"] },
                "csi": { "driver": driver, "volumeHandle": volume } } });
        self.api.ok("POST", "/api/v1/persistentvolumes", Some(&persistent))?;
        self.api.ok("PATCH", &format!("{}/status", claim_path(volume)), Some(&bound()))?;
        self.api.ok("PATCH", &format!("{}/status", volume_path(volume)), Some(&bound()))?;
        let attachment = json!({ "apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttachment",
            "metadata": { "name": attachment_name(volume), "finalizers": [ATTACHER_FINALIZER] },
            "spec": { "attacher": driver, "nodeName": node, "source": { "persistentVolumeName": volume } } });
        self.api.ok("POST", "/apis/storage.k8s.io/v1/volumeattachments", Some(&attachment)).map(drop)
    }

    /// Makes a pod of that node that uses these claims; `metadata` has more of it.
    fn pod(&self, pod: &str, node: &str, claims: &[&str], metadata: &Value) -> Result<()> {
        let volumes: Vec<Value> = claims
            .iter()
            .map(|claim| json!({ "name": claim, "persistentVolumeClaim": { "claimName": claim } }))
            .collect();
        let mut object = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": pod },
            "spec": { "nodeName": node, "volumes": volumes,
                "containers": [{ "name": "main", "image": "none" }] } });
        for (key, value) in metadata.as_object().into_iter().flatten() {
            object["metadata"][key] = value.clone();
        }
        self.api.ok("POST", "/api/v1/namespaces/default/pods", Some(&object)).map(drop)
    }

    /// Deletes a pod with a grace period, as Kubernetes does after the loss of its node.
    fn evict(&self, pod: &str, grace_s: u32) -> Result<()> {
        let grace = json!({ "gracePeriodSeconds": grace_s });
        let answer = self.api.ok("DELETE", &pod_path(pod), Some(&grace))?;
        ensure!(answer["metadata"]["deletionTimestamp"].is_string(), "{answer:#}");
        Ok(())
    }

    fn until_gone(&self, path: &str) -> Result<()> {
        until("end of an object", LIMIT, || {
            let found = self.api.find(path)?;
            ensure!(found.is_none(), "{found:#?}");
            Ok(Some(()))
        })
    }

    fn is_deleting(&self, volume: &str) -> Result<bool> {
        let attachment = self.api.ok("GET", &attachment_path(&attachment_name(volume)), None)?;
        Ok(attachment["metadata"]["deletionTimestamp"].is_string())
    }

    /// Returns the foreign objects that the controller has deleted so far.
    fn deletions(&self) -> Result<Vec<String>> {
        let calls = self.api.controller_calls()?;
        let others = |call: &String| call.starts_with("delete pods") || call.starts_with("delete volumeatt");
        Ok(calls.into_iter().filter(others).collect())
    }

    /// Waits long enough for a controller that would delete something.
    fn ensure_quiet(&self, what: &str) -> Result<()> {
        std::thread::sleep(QUIET);
        let deleted = self.deletions()?;
        ensure!(deleted.is_empty(), "{what}: {deleted:?}");
        println!("nothing is deleted: {what}");
        Ok(())
    }

    /// Returns the reasons of the events about an object.
    fn reasons_of(&self, namespace: &str, kind: &str, name: &str) -> Result<Vec<String>> {
        let path = format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events");
        let list = self.api.ok("GET", &path, None)?;
        let events = list["items"].as_array().cloned().unwrap_or_default();
        let ours = events
            .iter()
            .filter(|event| event["regarding"]["kind"] == kind && event["regarding"]["name"] == name);
        Ok(ours.filter_map(|event| event["reason"].as_str().map(str::to_owned)).collect())
    }

    fn until_event(&self, namespace: &str, kind: &str, name: &str, reason: &str) -> Result<()> {
        until("event", LIMIT, || {
            let reasons = self.reasons_of(namespace, kind, name)?;
            ensure!(reasons.iter().any(|one| one == reason), "{reasons:?}");
            Ok(Some(()))
        })
    }

    /// Starts the agent of a host again, with CSI. Returns the directory of its kubelet.
    fn serve_csi(&mut self, host: usize) -> Result<PathBuf> {
        let folder = self.folder.path().join(name(host));
        let (file, root) = (folder.join("agent.toml"), folder.join("k"));
        let csi = format!("csi = \"on\"\nkubelet_root = \"{}\"", root.display());
        let config = fs::read_to_string(&file)?.replace("csi = \"off\"", &csi);
        ensure!(config.contains(&csi), "the agent has another configuration: {config}");
        fs::write(&file, config)?;
        self.hosts.kill_agent(host)?;
        self.hosts.start_agent(host)?;
        Ok(root)
    }

    /// Replaces the running controller by one with one more flag.
    fn replace_controller(&mut self, tag: &str, flags: &[&str]) -> Result<()> {
        self.hosts.kill_controller()?;
        let listen = format!("unix://{}/{tag}.sock", self.folder.path().display());
        let controller = self.hosts.controller_command(&listen)?.args(flags).spawn()?;
        self.hosts.take_controller(controller, &listen)
    }

    fn until_volume(&self, volume: &str, what: &str, is_so: impl Fn(&Value) -> bool) -> Result<()> {
        until(what, LIMIT, || {
            let volume = self.api.get(&format!("volumes/{volume}"))?.context("the volume is not there")?;
            ensure!(is_so(&volume["status"]), "{volume:#}");
            Ok(Some(()))
        })
    }
}

fn bound() -> Value {
    json!({ "status": { "phase": "Bound" } })
}

fn attachment_name(volume: &str) -> String {
    format!("csi-{volume}")
}

fn pod_path(pod: &str) -> String {
    format!("/api/v1/namespaces/default/pods/{pod}")
}

/// A pod leaves a lost node, and its volume with it, only if every sign permits it.
#[test]
fn pods_of_a_lost_node_are_force_deleted() -> Result<()> {
    let mut cluster = Cluster::start()?;
    let lost = name(0);
    for host in 0..3 {
        cluster.register(&name(host))?;
        cluster.say_ready(&name(host), "True")?;
    }
    for volume in ["one", "two"] {
        cluster.volume(volume, &lost)?;
        until_whole(&cluster.hosts.engine_control(0, volume), LIMIT)?;
        cluster.until_volume(volume, "volume that is attached", |status| status["state"] == "attached")?;
    }
    cluster.claim("foreign", OTHERS, &lost)?;
    pods(&cluster, &lost)?;

    cluster.ensure_quiet("the node is well")?;
    cluster.say_ready(&lost, "Unknown")?;
    cluster.ensure_quiet("its agent is reachable")?;
    cluster.say_ready(&lost, "True")?;
    cluster.hosts.kill_agent(0)?;
    cluster.ensure_quiet("its kubelet is well")?;
    cluster.replace_controller("keep", &["--pods-of-lost-nodes", "keep"])?;
    cluster.say_ready(&lost, "Unknown")?;
    cluster.ensure_quiet("the administrator wants to keep them")?;

    cluster.replace_controller("delete", &[])?;
    cluster.until_gone(&pod_path("force-deleted"))?;
    until("attachment that is being deleted", LIMIT, || Ok(cluster.is_deleting("one")?.then_some(())))?;
    other_pods_stay(&cluster)?;
    the_last_pods_go(&cluster, &lost)?;
    the_volume_is_free(&cluster)?;
    a_role_that_is_missing_breaks_nothing(&cluster, &lost)
}

/// Creates a pod that is to be force deleted, and one of each kind that is not, all of them on the volume
/// `two`.
fn pods(cluster: &Cluster, node: &str) -> Result<()> {
    let owner =
        json!({ "apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "1", "controller": true });
    let nothing = json!({});
    let table: [(&str, &[&str], Value, Option<u32>); 6] = [
        ("force-deleted", &["one"], nothing.clone(), Some(1)),
        ("other-driver", &["two", "foreign"], nothing.clone(), Some(1)),
        ("daemon", &["two"], json!({ "ownerReferences": [owner] }), Some(1)),
        ("time-left", &["two"], nothing.clone(), Some(LONG_S)),
        ("not-deleted", &["two"], nothing.clone(), None),
        ("without-volume", &[], nothing, Some(1)),
    ];
    for (pod, claims, metadata, grace_s) in table {
        cluster.pod(pod, node, claims, &metadata)?;
        if let Some(grace_s) = grace_s {
            cluster.evict(pod, grace_s)?;
        }
    }
    Ok(())
}

fn other_pods_stay(cluster: &Cluster) -> Result<()> {
    cluster.until_event("default", "Pod", "force-deleted", "PodForceDeleted")?;
    cluster.until_event(NAMESPACE, "Volume", "one", "PodForceDeleted")?;
    cluster.until_event(NAMESPACE, "Volume", "one", "AttachmentDeleted")?;
    cluster.until_event("default", "Pod", "other-driver", "PodNotForceDeleted")?;
    // A deletion that does not happen sends no event.
    std::thread::sleep(QUIET);
    for pod in ["other-driver", "daemon", "time-left", "not-deleted", "without-volume"] {
        ensure!(cluster.api.find(&pod_path(pod))?.is_some(), "pod {pod} is gone");
    }
    ensure!(!cluster.is_deleting("two")?, "the attachment of a running pod is deleted");
    ensure!(!cluster.is_deleting("foreign")?, "the attachment of another driver is deleted");
    let deleted = cluster.deletions()?;
    ensure!(deleted == ["delete pods force-deleted", "delete volumeattachments csi-one"], "{deleted:?}");
    Ok(())
}

/// Tests that changes by other clients are noticed at once: a pod is deleted, and an administrator ends the
/// rest by force.
fn the_last_pods_go(cluster: &Cluster, node: &str) -> Result<()> {
    cluster.evict("not-deleted", 1)?;
    cluster.until_gone(&pod_path("not-deleted"))?;
    ensure!(!cluster.is_deleting("two")?, "the attachment of a running pod is deleted");
    for pod in ["other-driver", "daemon", "time-left"] {
        cluster.api.ok("DELETE", &pod_path(pod), Some(&json!({ "gracePeriodSeconds": 0 })))?;
    }
    until("attachment that is being deleted", LIMIT, || Ok(cluster.is_deleting("two")?.then_some(())))?;
    ensure!(!cluster.is_deleting("foreign")?, "the attachment of another driver of {node} is deleted");
    Ok(())
}

/// Does the work of external-attacher: the volume is fenced there, and free.
fn the_volume_is_free(cluster: &Cluster) -> Result<()> {
    let nowhere = json!({ "spec": { "nodeID": null } });
    cluster.api.ok("PATCH", &ApiServer::path("volumes/one"), Some(&nowhere))?;
    cluster.until_volume("one", "volume that is free", |status| {
        status["state"] == "detached" && status["fencedAttach"].as_u64() > Some(0)
    })?;
    let path = attachment_path(&attachment_name("one"));
    set_finalizer(&cluster.api, &path, ATTACHER_FINALIZER, false)?;
    cluster.until_gone(&path)
}

/// Tests that without the right to delete pods they stay, and everything else continues.
fn a_role_that_is_missing_breaks_nothing(cluster: &Cluster, node: &str) -> Result<()> {
    let role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/shorthorn-lost-pods";
    let mut rules = cluster.api.ok("GET", role, None)?["rules"].clone();
    for rule in rules.as_array_mut().context("no rules")? {
        if rule["resources"] == json!(["pods"]) {
            rule["verbs"] = json!(["get"]);
        }
    }
    cluster.api.ok("PATCH", role, Some(&json!({ "rules": rules })))?;
    cluster.pod("forbidden", node, &["two"], &json!({}))?;
    cluster.evict("forbidden", 1)?;
    let start = cluster.deletions()?.len();
    until("deletion that is refused", LIMIT, || Ok((cluster.deletions()?.len() > start).then_some(())))?;
    ensure!(cluster.api.find(&pod_path("forbidden"))?.is_some(), "{CONTROLLER} may delete pods");
    cluster.api.ok(
        "PATCH",
        &ApiServer::path("volumes/one"),
        Some(&json!({ "spec": { "nodeID": name(1) } })),
    )?;
    cluster.until_volume("one", "volume on another node", |status| {
        status["state"] == "attached" && status["currentNodeID"] == name(1)
    })
}

/// A loop device, and the mount of its node, as kubelet makes it for a pod that uses a device. Both are
/// removed when this is dropped.
struct Published {
    device: String,
    target: PathBuf,
    content: PathBuf,
}

impl Published {
    fn at(target: PathBuf, content: PathBuf) -> Result<Published> {
        fs::create_dir_all(target.parent().context("no directory")?)?;
        fs::write(&target, "")?;
        fs::File::create(&content)?.set_len(1 << 20)?;
        let shown = run(Command::new("losetup").args(["--find", "--show"]).arg(&content))?;
        let published = Published { device: shown.trim().to_owned(), target, content };
        run(Command::new("mount").arg("--bind").arg(&published.device).arg(&published.target))?;
        Ok(published)
    }

    /// Makes the device one without a server: it stays, with a size of 0, as one of NBD does.
    fn die(&self) -> Result<()> {
        fs::File::options().write(true).open(&self.content)?.set_len(0)?;
        run(Command::new("losetup").args(["--set-capacity", &self.device])).map(drop)
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.target).status();
        let _ = Command::new("losetup").args(["-d", &self.device]).status();
    }
}

fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// Asks the agent for the condition of a volume, as kubelet does.
fn condition(csi: &Caller, volume: &str, path: &Path) -> Result<v1::VolumeCondition> {
    let request = v1::NodeGetVolumeStatsRequest {
        volume_id: volume.to_owned(),
        volume_path: path.display().to_string(),
        staging_target_path: String::new(),
    };
    let answer = csi.call(request, LIMIT, async |channel, request| {
        NodeClient::new(channel).node_get_volume_stats(request).await
    })?;
    answer.volume_condition.context("no condition")
}

/// The engine of a volume is gone for good under a pod. Kubelet's question finds out, and the controller ends
/// the pod, so that its volume is staged again. Needs root and loop devices.
#[test]
fn a_pod_whose_device_is_dead_is_ended() -> Result<()> {
    let mut cluster = Cluster::start()?;
    let node = name(0);
    cluster.register(&node)?;
    cluster.say_ready(&node, "True")?;
    cluster.volume("dead", &node)?;
    cluster.until_volume("dead", "volume that is attached", |status| status["state"] == "attached")?;
    let owner =
        json!({ "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "1", "controller": true });
    cluster.pod("user", &node, &["dead"], &json!({ "ownerReferences": [owner] }))?;
    cluster.pod("bystander", &node, &["dead"], &json!({ "ownerReferences": [owner] }))?;
    let pod = cluster.api.ok("GET", &pod_path("user"), None)?;
    let uid = pod["metadata"]["uid"].as_str().context("no uid")?;
    let root = cluster.serve_csi(0)?;
    let target = root.join("plugins/kubernetes.io/csi/volumeDevices/publish/dead").join(uid);
    let published = Published::at(target.clone(), cluster.folder.path().join("content"))?;
    let csi = Caller::unix(&root.join("plugins/csi.shorthorn.io/csi.sock"))?;

    let nowhere = json!({ "spec": { "nodeID": null } });
    cluster.api.ok("PATCH", &ApiServer::path("volumes/dead"), Some(&nowhere))?;
    cluster.until_volume("dead", "volume without an engine", |status| status["state"] == "detached")?;
    // A living device is of another volume.
    until("answer about a living device", LIMIT, || {
        let reported = format!("{:?}", condition(&csi, "dead", &target));
        ensure!(reported.contains("not attached to this node"), "{reported}");
        Ok(Some(()))
    })?;
    published.die()?;
    let reported = condition(&csi, "dead", &target)?;
    ensure!(reported.abnormal && reported.message.contains("is gone"), "{reported:?}");
    cluster.until_event("default", "Pod", "user", "PodEnded")?;
    let deleted = cluster.deletions()?;
    ensure!(deleted == ["delete pods user"], "{deleted:?}");
    cluster.until_event(NAMESPACE, "Volume", "dead", "PodEnded")
}
