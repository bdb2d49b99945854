//! Three hosts and an API server with the installed objects.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shorthorn_tests::apiserver::{ApiServer, NAMESPACE};
use shorthorn_tests::claims::claim_path;
use shorthorn_tests::hosts::{Hosts, agent_url, name};
use shorthorn_tests::{Guest, GuestOptions, install, until};

use crate::{LIMIT, Pod, VOLUME};

pub struct Cluster {
    // Dropped before the API server: the controller ends first.
    pub hosts: Hosts,
    pub api: ApiServer,
    pub folder: tempfile::TempDir,
}

impl Cluster {
    /// Starts three hosts, and an API server with the installed objects.
    pub fn start() -> Result<Cluster> {
        let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
        let api = ApiServer::start(&folder.path().join("api"))?;
        install(&api)?;
        let kubeconfig = api.kubeconfig()?.display().to_string();
        let store = ["--kubernetes", "--kubeconfig", &kubeconfig].map(str::to_owned).to_vec();
        // The Node object has the address of the last agent.
        let node = json!({
            "apiVersion": "shorthorn.io/v1alpha1",
            "kind": "Node",
            "metadata": { "name": name(2) },
            "spec": { "address": agent_url(folder.path(), 2) },
        });
        api.ok("POST", &ApiServer::path("nodes"), Some(&node))?;
        let hosts = Hosts::start_with_store(folder.path(), 3, 2, store)?;
        Ok(Cluster { hosts, api, folder })
    }

    /// Creates a volume from a hand-written document, like kubectl apply.
    pub fn make_volume(&self) -> Result<()> {
        let volume = json!({
            "apiVersion": "shorthorn.io/v1alpha1",
            "kind": "Volume",
            "metadata": { "name": VOLUME, "labels": { "team": "a" } },
            "spec": { "size": "67108864", "frontend": "socket" },
        });
        self.api.ok("POST", &ApiServer::path("volumes"), Some(&volume)).map(drop)
    }

    pub fn want_on(&self, node: Value) -> Result<()> {
        let path = ApiServer::path(&format!("volumes/{VOLUME}"));
        self.api.ok("PATCH", &path, Some(&json!({ "spec": { "nodeID": node } }))).map(drop)
    }

    pub fn until_state(&self, state: &str) -> Result<Value> {
        until(&format!("volume that is {state}"), LIMIT, || {
            let volume = self.api.get(&format!("volumes/{VOLUME}"))?.context("the volume is not there")?;
            ensure!(volume["status"]["state"] == state, "{volume:#}");
            Ok(Some(volume))
        })
    }

    pub fn events(&self) -> Result<Vec<Value>> {
        let path = format!("/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events");
        Ok(self.api.ok("GET", &path, None)?["items"].as_array().cloned().unwrap_or_default())
    }

    /// Waits until the volume has exactly these events, in that order.
    pub fn until_event(&self, volume: &Value, reasons: &[&str]) -> Result<()> {
        until("events that tell the story", LIMIT, || {
            let mut events: Vec<Value> = self
                .events()?
                .into_iter()
                .filter(|event| event["regarding"]["uid"] == volume["metadata"]["uid"])
                .collect();
            events.sort_by_key(|event| event["eventTime"].as_str().unwrap_or_default().to_owned());
            let recorded: Vec<&str> = events.iter().filter_map(|event| event["reason"].as_str()).collect();
            ensure!(recorded == reasons, "{events:#?}");
            let kinds = events.iter().map(|event| &event["regarding"]["kind"]);
            ensure!(kinds.into_iter().all(|kind| kind == "Volume"), "{events:#?}");
            Ok(Some(()))
        })
    }

    /// Registers a machine like kubelet, whose agent has registered the driver; or changes its address.
    pub fn register(&self, name: &str, address: &str) -> Result<()> {
        let machine = json!({ "apiVersion": "v1", "kind": "Node", "metadata": {
            "name": name, "labels": { "topology.kubernetes.io/zone": "rack-1" } } });
        if self.api.call("POST", "/api/v1/nodes", Some(&machine))?.code == 201 {
            let driver = json!({ "name": "csi.shorthorn.io", "nodeID": name, "topologyKeys": [] });
            let node = json!({ "apiVersion": "storage.k8s.io/v1", "kind": "CSINode",
                "metadata": { "name": name }, "spec": { "drivers": [driver] } });
            self.api.ok("POST", "/apis/storage.k8s.io/v1/csinodes", Some(&node))?;
        }
        let addresses =
            json!([{ "type": "Hostname", "address": name }, { "type": "InternalIP", "address": address }]);
        let status = json!({ "status": { "addresses": addresses } });
        self.api.ok("PATCH", &format!("/api/v1/nodes/{name}/status"), Some(&status)).map(drop)
    }

    pub fn until_node_spec(&self, name: &str, is_so: impl Fn(&Value) -> bool) -> Result<()> {
        until("node as it should be", LIMIT, || {
            let node = self.api.get(&format!("nodes/{name}"))?.context("the node is not there")?;
            ensure!(is_so(&node["spec"]), "{node:#}");
            Ok(Some(()))
        })
    }

    /// Returns the message of a controller that has to end at its start.
    pub fn refuses_to_start(&self) -> Result<String> {
        let listen = format!("unix://{}/refused.sock", self.folder.path().display());
        let output = self.hosts.controller_command(&listen)?.output()?;
        ensure!(!output.status.success(), "it runs");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Returns the names of guard pods, and those of their budgets.
    pub fn guard_pods(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        let budgets = format!("apis/{}/namespaces", self.disruption_api());
        for path in ["api/v1/namespaces", &budgets] {
            let kind = if path.starts_with("apis") { "poddisruptionbudgets" } else { "pods" };
            let list = self.api.ok("GET", &format!("/{path}/{NAMESPACE}/{kind}"), None)?;
            let items = list["items"].as_array().cloned().unwrap_or_default();
            let all = items.iter().filter_map(|item| item["metadata"]["name"].as_str());
            // The installation has one of its own for the controllers.
            names.extend(all.filter(|name| name.starts_with("shorthorn-guard-")).map(str::to_owned));
        }
        Ok(names)
    }

    /// Returns the API of evictions and budgets. Kubernetes 1.20 has only the beta version, 1.25 removed it.
    pub fn disruption_api(&self) -> &'static str {
        if self.api.has_policies() { "policy/v1" } else { "policy/v1beta1" }
    }

    /// Waits until these hosts have a guard pod with its budget, and no others.
    pub fn until_guard_pods(&self, hosts: &[usize]) -> Result<()> {
        let names: Vec<String> =
            hosts.iter().map(|host| format!("shorthorn-guard-{}", name(*host))).collect();
        let wanted = [names.clone(), names].concat();
        until("guard pods", LIMIT, || {
            let found = self.guard_pods()?;
            ensure!(found == wanted, "{found:?}, not {wanted:?}");
            Ok(Some(()))
        })
    }

    pub fn until_healthy(&self) -> Result<()> {
        until("volume that is healthy", LIMIT, || {
            let volume = self.api.get(&format!("volumes/{VOLUME}"))?.context("the volume is not there")?;
            ensure!(volume["status"]["robustness"] == "healthy", "{volume:#}");
            Ok(Some(()))
        })
    }

    pub fn until_gone(&self) -> Result<()> {
        until("end of the volume", LIMIT, || {
            for kind in ["volumes", "engines", "replicas"] {
                let left = self.api.names(kind)?;
                ensure!(left.is_empty(), "{kind}: {left:?}");
            }
            Ok(Some(()))
        })?;
        let left = self.hosts.directories(VOLUME)?;
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    }

    /// Starts a controller as in the deployment, with its two sockets: that of the API and that of CSI.
    pub fn pod(&self, name: &str) -> Result<Pod> {
        let socket = |kind: &str| self.folder.path().join(format!("{name}.{kind}"));
        let listen = format!("unix://{}", socket("ctl").display());
        let csi = socket("csi");
        let csi_listen = format!("unix://{}", csi.display());
        let child = self.hosts.controller_command(&listen)?.args(["--csi-listen", &csi_listen]).spawn()?;
        Ok(Pod { child, csi })
    }

    /// Makes a claim whose first pod the scheduler has put on the first host.
    pub fn claim(&self, claim: &str) -> Result<()> {
        let claim = json!({
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {
                "name": claim,
                "annotations": { "volume.kubernetes.io/selected-node": name(0) },
            },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": "shorthorn",
                "resources": { "requests": { "storage": "67108864" } },
            },
        });
        let claims = "/api/v1/namespaces/default/persistentvolumeclaims";
        self.api.ok("POST", claims, Some(&claim)).map(drop)
    }

    pub fn until_bound(&self, claim: &str) -> Result<()> {
        until("claim that is bound", LIMIT, || {
            let claim = self.api.ok("GET", &claim_path(claim), None)?;
            ensure!(claim["status"]["phase"] == "Bound", "{claim:#}");
            Ok(Some(()))
        })
    }

    pub fn guest(&self) -> Result<Guest> {
        let seed = fastrand::u64(..);
        println!("seed of the load: {seed}");
        let options = GuestOptions { sectors: 8192, ..GuestOptions::new(seed) };
        Ok(Guest::new(self.hosts.client(0, VOLUME)?, options))
    }
}
