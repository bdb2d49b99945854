//! The whole story in a cluster: a real API server with Kubernetes' own controllers of volumes, and the
//! controller as its service account. Two nodes have real kernels, systemd, the socket units and ublk.
//! Stand-ins for the sidecars and for kubelet make the calls of those.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};
use shorthorn_csi::DRIVER_NAME;
use shorthorn_tests::apiserver::ApiServer;
use shorthorn_tests::claims::{Persistent, attachment_of, attachment_path, claim_path};
use shorthorn_tests::{ClusterNode, Kubelet, Mounted, Sidecars, binary, install, until};
use shorthorn_vmkit::Lan;

/// Far more than anything takes, also on a busy machine.
const LIMIT: Duration = Duration::from_secs(180);
const CLASS: &str = "two-replicas";
const MIB: u64 = 1 << 20;
const SIZE_BYTES: u64 = 128 * MIB;
const GROWN_BYTES: u64 = 192 * MIB;
/// The number of lines of the controller's log to show after a failure.
const LOG_LINES: usize = 100;
/// A controller is killed after fewer than this number of its calls to the API server.
const CALLS_MAX: usize = 4;

/// The controller as a process of this host, whose place a deployment has in a cluster.
struct Controller {
    dir: PathBuf,
    kubeconfig: PathBuf,
    child: Option<Child>,
}

impl Controller {
    fn start(dir: &Path, api: &ApiServer) -> Result<Controller> {
        let mut controller = Controller { dir: dir.to_owned(), kubeconfig: api.kubeconfig()?, child: None };
        controller.spawn()?;
        Ok(controller)
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("csi.sock")
    }

    fn spawn(&mut self) -> Result<()> {
        let log = File::options().create(true).append(true).open(self.dir.join("controller.log"))?;
        let mut command = Command::new(binary("shorthorn-controller")?);
        command.args(["serve", "--kubernetes", "--kubeconfig"]).arg(&self.kubeconfig);
        for (flag, name) in [("--listen", "ctl.sock"), ("--csi-listen", "csi.sock")] {
            command.args([flag, &format!("unix://{}", self.dir.join(name).display())]);
        }
        command.stdin(Stdio::null()).stderr(log);
        self.child = Some(command.spawn().context("starting the controller")?);
        Ok(())
    }

    /// Kills it with SIGKILL, and starts another one in its place.
    fn die_and_continue(&mut self) -> Result<()> {
        self.end()?;
        self.spawn()
    }

    fn end(&mut self) -> Result<()> {
        let mut child = self.child.take().context("the controller does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    fn log(&self) -> String {
        let log = std::fs::read_to_string(self.dir.join("controller.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().rev().take(LOG_LINES).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// An API server with everything installed, and the two nodes.
struct Cluster {
    nodes: [ClusterNode; 2],
    controller: Controller,
    api: ApiServer,
    // Last: the files of all of them.
    _folder: tempfile::TempDir,
}

impl Cluster {
    fn start() -> Result<Cluster> {
        let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
        let lan = Lan::new()?;
        let (nodes, api) = thread::scope(|scope| {
            let nodes = ["a", "b"].map(|name| scope.spawn(|| ClusterNode::start(name, &lan)));
            let api = start_api(&folder.path().join("api"));
            let [a, b] = nodes.map(|node| node.join().map_err(|_| anyhow!("a node's thread has panicked")));
            anyhow::Ok(([a??, b??], api?))
        })?;
        for node in &nodes {
            let object = json!({
                "apiVersion": "shorthorn.io/v1alpha1",
                "kind": "Node",
                "metadata": { "name": node.name() },
                "spec": { "address": node.agent_url() },
            });
            api.ok("POST", &ApiServer::path("nodes"), Some(&object))?;
            Kubelet::of(&api, node).join()?;
        }
        let controller = Controller::start(folder.path(), &api)?;
        let cluster = Cluster { nodes, controller, api, _folder: folder };
        for node in &cluster.nodes {
            cluster.ctl(&["disk", "add", node.name(), "/var/lib/longhorn"])?;
        }
        Ok(cluster)
    }

    /// Runs shorthornctl, which works as soon as the controller and the agents do.
    fn ctl(&self, arguments: &[&str]) -> Result<()> {
        let server = format!("unix://{}", self.controller.dir.join("ctl.sock").display());
        until("answer to shorthornctl", LIMIT, || {
            let mut command = Command::new(binary("shorthornctl")?);
            let output =
                command.env("SHORTHORN_SERVER", &server).args(arguments).stdin(Stdio::null()).output()?;
            ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
            Ok(Some(()))
        })
    }

    fn sidecars(&self) -> Result<Sidecars<'_>> {
        Sidecars::new(&self.api, &self.controller.socket())
    }

    fn kubelet(&self, node: usize) -> Kubelet<'_> {
        Kubelet::of(&self.api, &self.nodes[node])
    }

    /// Makes a claim whose first pod the scheduler has put on that node.
    fn claim(&self, name: &str, node: usize) -> Result<()> {
        let claim = json!({
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {
                "name": name,
                "annotations": { "volume.kubernetes.io/selected-node": self.nodes[node].name() },
            },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": CLASS,
                "resources": { "requests": { "storage": SIZE_BYTES.to_string() } },
            },
        });
        self.api.ok("POST", claims(), Some(&claim)).map(drop)
    }

    fn until_bound(&self, claim: &str) -> Result<()> {
        until("claim that is bound", LIMIT, || {
            let claim = self.api.ok("GET", &claim_path(claim), None)?;
            ensure!(claim["status"]["phase"] == "Bound", "{claim:#}");
            Ok(Some(()))
        })
    }

    /// Makes a pod that the scheduler has put on that node.
    fn pod(&self, name: &str, claim: &str, node: usize) -> Result<Value> {
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": name },
            "spec": {
                "nodeName": self.nodes[node].name(),
                "containers": [{
                    "name": "main",
                    "image": "none",
                    "volumeMounts": [{ "name": "data", "mountPath": "/data" }],
                }],
                "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": claim } }],
            },
        });
        self.api.ok("POST", pods(), Some(&pod))
    }

    /// Deletes an ended pod like kubelet.
    fn delete_pod(&self, name: &str) -> Result<()> {
        let now = json!({ "gracePeriodSeconds": 0 });
        self.api.ok("DELETE", &format!("{}/{name}", pods()), Some(&now)).map(drop)
    }

    /// Deletes a pod as Kubernetes does after the loss of its node, where no kubelet notices.
    fn evict_pod(&self, name: &str) -> Result<()> {
        let soon = json!({ "gracePeriodSeconds": 1 });
        self.api.ok("DELETE", &format!("{}/{name}", pods()), Some(&soon)).map(drop)
    }

    fn until_pod_gone(&self, name: &str) -> Result<()> {
        let path = format!("{}/{name}", pods());
        until("end of the pod", LIMIT, || Ok(self.api.find(&path)?.is_none().then_some(())))
    }

    /// Makes the attachment of the attach-detach controller.
    fn attachment(&self, volume: &str, node: usize) -> Result<Value> {
        until("attachment", LIMIT, || attachment_of(&self.api, volume, self.nodes[node].name()))
    }

    fn until_detached(&self, attachment: &Value) -> Result<()> {
        let path = attachment_path(attachment["metadata"]["name"].as_str().context("no name")?);
        until("end of the attachment", LIMIT, || Ok(self.api.find(&path)?.is_none().then_some(())))
    }

    fn until_healthy(&self, volume: &str) -> Result<()> {
        let handle = Persistent::read(&self.api, volume)?.handle;
        until("volume that is healthy", LIMIT, || {
            let volume = self.api.get(&format!("volumes/{handle}"))?.context("the volume is not there")?;
            ensure!(volume["status"]["robustness"] == "healthy", "{volume:#}");
            Ok(Some(()))
        })
    }

    /// Runs a pod on a node that has its volume.
    fn run_pod(&self, name: &str, claim: &str, volume: &str, node: usize) -> Result<(Value, Mounted)> {
        let pod = self.pod(name, claim, node)?;
        self.kubelet(node).expect(volume)?;
        let attachment = self.attachment(volume, node)?;
        self.sidecars()?.attach(&attachment)?;
        Ok((attachment, self.kubelet(node).mount(&pod, volume)?))
    }

    /// Ends a pod, and the presence of its volume there.
    fn end_pod(&self, name: &str, attachment: &Value, mounted: &Mounted, node: usize) -> Result<()> {
        self.kubelet(node).unmount(mounted)?;
        self.delete_pod(name)?;
        self.sidecars()?.detach(attachment)?;
        self.until_detached(attachment)
    }

    fn sh(&self, node: usize, script: &str) -> Result<String> {
        self.nodes[node].host.sh(script)
    }

    /// Does something with the sidecars, while the controller is killed after some of its calls and started
    /// again.
    fn with_kill<T: Send>(
        &mut self,
        what: &str,
        random: &mut fastrand::Rng,
        act: impl FnOnce(&Sidecars) -> Result<T> + Send,
    ) -> Result<T> {
        let sidecars = Sidecars::new(&self.api, &self.controller.socket())?;
        let (api, controller) = (&self.api, &mut self.controller);
        let calls = random.usize(0..CALLS_MAX);
        let before = api.controller_calls()?.len();
        let start = Instant::now();
        let (done, log) = thread::scope(|scope| {
            let acting = scope.spawn(|| act(&sidecars));
            until("controller that is at work", LIMIT, || {
                Ok((acting.is_finished() || api.controller_calls()?.len() >= before + calls).then_some(()))
            })?;
            let in_time = !acting.is_finished();
            controller.die_and_continue()?;
            println!("{what}: controller killed after {calls} calls, before the end: {in_time}");
            let done = acting.join().map_err(|_| anyhow!("the thread of the sidecars has panicked"))?;
            anyhow::Ok((done, controller.log()))
        })?;
        println!("{what}: done after {:?}", start.elapsed());
        done.with_context(|| format!("{what}; the controller says:\n{log}"))
    }
}

fn claims() -> &'static str {
    "/api/v1/namespaces/default/persistentvolumeclaims"
}

fn pods() -> &'static str {
    "/api/v1/namespaces/default/pods"
}

fn start_api(dir: &Path) -> Result<ApiServer> {
    let mut api = ApiServer::start(dir)?;
    install(&api)?;
    let class = json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": { "name": CLASS },
        "provisioner": DRIVER_NAME,
        "parameters": { "numberOfReplicas": "2" },
        "reclaimPolicy": "Delete",
        "allowVolumeExpansion": true,
        "volumeBindingMode": "WaitForFirstConsumer",
    });
    api.ok("POST", "/apis/storage.k8s.io/v1/storageclasses", Some(&class))?;
    api.start_controller_manager()?;
    Ok(api)
}

#[test]
fn a_claim_lives_through_everything() -> Result<()> {
    let seed = std::env::var("SHORTHORN_SEED").map_or_else(|_| Ok(fastrand::u64(..)), |text| text.parse())?;
    println!("SHORTHORN_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let start = Instant::now();
    let mut cluster = Cluster::start()?;
    println!("the cluster is there after {:?}", start.elapsed());
    let result = story(&mut cluster, &mut random);
    println!("all of it took {:?}", start.elapsed());
    result.with_context(|| cluster.controller.log())
}

fn story(cluster: &mut Cluster, random: &mut fastrand::Rng) -> Result<()> {
    let volume = provisioned(cluster)?;
    used_and_grown(cluster, &volume)?;
    the_controller_dies_at_every_step(cluster, random)?;
    a_node_is_lost(cluster, &volume)?;
    nothing_is_left(cluster)
}

/// Makes the claim and the volume.
fn provisioned(cluster: &Cluster) -> Result<String> {
    let start = Instant::now();
    cluster.claim("data", 0)?;
    let volume = cluster.sidecars()?.provision("data")?;
    cluster.until_bound("data")?;
    println!("bound after {:?}", start.elapsed());
    Ok(volume)
}

/// Tests that a pod writes, its volume is made larger, and the next pod of the claim has the room.
fn used_and_grown(cluster: &Cluster, volume: &str) -> Result<()> {
    let pod = cluster.pod("first", "data", 0)?;
    cluster.kubelet(0).expect(volume)?;
    let attachment = cluster.attachment(volume, 0)?;
    let (calls, start) = (cluster.api.controller_calls()?.len(), Instant::now());
    cluster.sidecars()?.attach(&attachment)?;
    let (took, calls) = (start.elapsed(), cluster.api.controller_calls()?.split_off(calls));
    println!("attached after {took:?} with {} calls:\n{}", calls.len(), calls.join("\n"));
    let handle = Persistent::read(&cluster.api, volume)?.handle;
    ensure!(cluster.sidecars()?.published_on(&handle)? == ["a"], "the volume is listed elsewhere");

    let start = Instant::now();
    let mounted = cluster.kubelet(0).mount(&pod, volume)?;
    println!("mounted after {:?}", start.elapsed());
    let path = mounted.path();
    cluster.sh(
        0,
        &format!("findmnt --noheadings --types ext4 --output SOURCE {path} | grep -q '^/dev/longhorn/'"),
    )?;
    cluster.sh(
        0,
        &format!("readlink /sys/dev/block/$(stat --format %Hr:%Lr /dev/longhorn/{handle}) | grep ublkb"),
    )?;
    cluster.sh(
        0,
        &format!("head -c 8M /dev/urandom > {path}/file && sync && cd {path} && sha256sum file > sum"),
    )?;
    let (total, used) = cluster.kubelet(0).stats(&mounted)?;
    ensure!(total > 64 << 20 && total < 128 << 20 && used >= 8 << 20, "{used} of {total} bytes are used");

    let larger = json!({ "spec": { "resources": { "requests": { "storage": GROWN_BYTES.to_string() } } } });
    cluster.api.ok("PATCH", &claim_path("data"), Some(&larger))?;
    // The driver of this kernel cannot change the size of a device in use. The resizer is done, and the node
    // reports its reason for waiting until the volume is staged again.
    cluster.sidecars()?.resize("data")?;
    let refused = cluster.kubelet(0).expand(&mounted, "data");
    let refused = format!("{:?}", refused.err().context("the device has grown while it is in use")?);
    ensure!(refused.contains("attach the volume again"), "{refused}");
    // The next pod of the claim is on the same node, so the attachment stays.
    let second = cluster.pod("second", "data", 0)?;
    cluster.kubelet(0).unmount(&mounted)?;
    cluster.delete_pod("first")?;
    cluster.kubelet(0).expect(volume)?;
    let mounted = cluster.kubelet(0).mount(&second, volume)?;
    cluster.kubelet(0).expand(&mounted, "data")?;
    let (total, _) = cluster.kubelet(0).stats(&mounted)?;
    ensure!(total > 128 << 20, "the file system has {total} bytes");
    cluster
        .sh(0, &format!("cd {} && sha256sum --check --quiet sum && touch second && sync", mounted.path()))?;
    Ok(())
}

/// Tests the life of another claim, with a kill of the controller in each part of it.
fn the_controller_dies_at_every_step(cluster: &mut Cluster, random: &mut fastrand::Rng) -> Result<()> {
    cluster.claim("other", 1)?;
    let volume = cluster.with_kill("provisioning", random, |sidecars| sidecars.provision("other"))?;
    cluster.until_bound("other")?;
    let pod = cluster.pod("other", "other", 1)?;
    cluster.kubelet(1).expect(&volume)?;
    let attachment = cluster.attachment(&volume, 1)?;
    cluster.with_kill("attach", random, |sidecars| sidecars.attach(&attachment))?;
    let mounted = cluster.kubelet(1).mount(&pod, &volume)?;
    cluster.sh(1, &format!("echo data > {0}/file && sync && grep data {0}/file", mounted.path()))?;
    cluster.kubelet(1).unmount(&mounted)?;
    cluster.delete_pod("other")?;
    cluster.with_kill("detach", random, |sidecars| sidecars.detach(&attachment))?;
    cluster.until_detached(&attachment)?;
    cluster.api.ok("DELETE", &claim_path("other"), None)?;
    cluster.with_kill("deletion", random, |sidecars| sidecars.delete(&volume))?;
    ensure!(cluster.api.names("volumes")?.len() == 1, "{:?}", cluster.api.names("volumes")?);
    Ok(())
}

/// Tests that the node with the volume loses its power. The volume moves to the other one with all written
/// data, and the old engine cannot write any more. The node is used again when it is back.
fn a_node_is_lost(cluster: &mut Cluster, volume: &str) -> Result<()> {
    let pod = cluster.api.ok("GET", &format!("{}/second", pods()), None)?;
    let attachment = cluster.attachment(volume, 0)?;
    let old = cluster.kubelet(0).mounted(&pod, volume)?;
    cluster.nodes[0].lose()?;
    let start = Instant::now();
    cluster.evict_pod("second")?;
    cluster.until_pod_gone("second")?;
    println!("the pod is released after {:?}", start.elapsed());
    // Kubernetes itself leaves the attachment for minutes to a node that may use the volume.
    cluster.sidecars()?.detach(&attachment)?;
    cluster.until_detached(&attachment)?;
    println!("the old engine is fenced after {:?}", start.elapsed());
    let (attachment, mounted) = cluster.run_pod("third", "data", volume, 1)?;
    println!("the volume is on the other node after {:?}", start.elapsed());
    let path = mounted.path();
    cluster.sh(
        1,
        &format!("cd {path} && sha256sum --check --quiet sum && test -e second && touch third && sync"),
    )?;

    cluster.nodes[0].boot_again()?;
    cluster.kubelet(0).join()?;
    // kubelet finds the directories of a pod that is gone.
    cluster.kubelet(0).unmount(&old)?;
    cluster.until_healthy(volume)?;
    println!("healthy again after {:?}", start.elapsed());
    cluster.sh(1, &format!("cd {path} && sha256sum --check --quiet sum"))?;
    cluster.end_pod("third", &attachment, &mounted, 1)?;
    cluster.api.ok("DELETE", &claim_path("data"), None)?;
    cluster.sidecars()?.delete(volume)
}

fn nothing_is_left(cluster: &Cluster) -> Result<()> {
    for kind in ["volumes", "engines", "replicas"] {
        let left = cluster.api.names(kind)?;
        ensure!(left.is_empty(), "{kind}: {left:?}");
    }
    for node in [0, 1] {
        for dir in [
            "/var/lib/longhorn/replicas",
            "/dev/longhorn",
            "/var/lib/kubelet/plugins/kubernetes.io/csi/csi.shorthorn.io",
        ] {
            // The trash has a hidden name.
            let left = cluster.sh(node, &format!("ls {dir}"))?;
            ensure!(left.is_empty(), "{dir} of {}: {left}", cluster.nodes[node].name());
        }
        for (what, script) in [
            ("mounts", "grep -e longhorn/ -e globalmount -e kubernetes.io /proc/self/mounts || true"),
            ("devices", "ls /sys/block | grep ublkb || true"),
            (
                "units",
                "systemctl list-units --all --plain --no-legend 'shorthorn-engine@*' 'shorthorn-replica@*'",
            ),
            ("files", "find /var/lib/shorthorn/instances -type f; find /var/lib/kubelet/pods -name mount"),
        ] {
            let left = cluster.sh(node, script)?;
            ensure!(left.trim().is_empty(), "{what} of {}: {left}", cluster.nodes[node].name());
        }
    }
    Ok(())
}
