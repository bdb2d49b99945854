//! shorthornctl on a laptop: through an API server to the pod that leads. The API server is a stand-in, and
//! the controller behind the forwarded port is the real one.

use std::io::Read;
use std::path::Path;
use std::process::Output;

use crate::support::apiserver::StandIn;
use crate::support::cluster::Cluster;
use serde_json::{Value, json};
use shorthorn_testkit::binary;
use tokio::process::Command;

const NAMESPACE: &str = "shorthorn-system";
const POD: &str = "shorthorn-controller-5d4f8c-abcde";

struct Laptop {
    cluster: Cluster,
    api: StandIn,
}

impl Laptop {
    async fn new() -> Laptop {
        let cluster = Cluster::start(&["a"]).await;
        let api = StandIn::start(cluster.forward).await;
        std::fs::write(cluster.path("kubeconfig"), api.kubeconfig()).unwrap();
        let laptop = Laptop { cluster, api };
        laptop.lead(&format!("{POD}-0a1b2c3d"));
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": POD, "namespace": NAMESPACE },
            "spec": { "containers": [{ "name": "controller",
                "ports": [{ "name": "api", "containerPort": laptop.cluster.forward.port() }] }] },
        });
        laptop.api.put(&format!("/api/v1/namespaces/{NAMESPACE}/pods/{POD}"), pod);
        laptop
    }

    fn lead(&self, holder: &str) {
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": { "name": "shorthorn-controller", "namespace": NAMESPACE },
            "spec": { "holderIdentity": holder },
        });
        let path = format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/shorthorn-controller");
        self.api.put(&path, lease);
    }

    async fn run(&self, program: &Path, words: &[&str]) -> Output {
        let mut command = Command::new(program);
        command.args(words).env("KUBECONFIG", self.cluster.path("kubeconfig"));
        command.env_remove("SHORTHORN_SERVER").current_dir(self.cluster.directory.path());
        tokio::time::timeout(crate::support::cluster::LIMIT, command.output()).await.unwrap().unwrap()
    }

    async fn ctl(&self, words: &[&str]) -> Output {
        let kubeconfig = self.cluster.path("kubeconfig").display().to_string();
        let words: Vec<&str> = ["--kubeconfig", &kubeconfig].iter().chain(words).copied().collect();
        self.run(&binary("shorthornctl").unwrap(), &words).await
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_reach_the_pod_that_leads_through_a_port_forward() {
    let laptop = Laptop::new().await;
    let created = laptop.ctl(&["volume", "create", "v", "--size", "1GiB", "--replicas", "1"]).await;
    assert!(created.status.success(), "{}", text(&created));
    // As kubectl starts its plugins, without any flag.
    let plugin = laptop.cluster.path("kubectl-shorthorn");
    std::os::unix::fs::symlink(binary("shorthornctl").unwrap(), &plugin).unwrap();
    let listed = laptop.run(&plugin, &["volume", "list", "-o", "name"]).await;
    assert_eq!(text(&listed), "volume/v\n");
    assert_eq!(*laptop.api.forwarded.lock().unwrap(), [POD, POD]);

    // Another leader, which is not a pod; then none.
    laptop.lead("laptop-of-bob-0a1b2c3d");
    let refused = laptop.ctl(&["volume", "list"]).await;
    assert!(
        refused.status.code() == Some(5) && text(&refused).contains("which is not a pod"),
        "{}",
        text(&refused)
    );
    laptop.lead("");
    let refused = laptop.ctl(&["volume", "list"]).await;
    assert!(text(&refused).contains("no controller leads"), "{}", text(&refused));
    let doctor = laptop.ctl(&["doctor", "-o", "json"]).await;
    let checks: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    assert_eq!((&checks[0]["name"], &checks[0]["outcome"]), (&"lease".into(), &"failed".into()));
    assert_eq!(doctor.status.code(), Some(6));
    laptop.cluster.check();
}

const SECRET: &str = "hunter2OfTheCluster";

/// Makes objects with a secret in every possible place.
fn plant(api: &StandIn) {
    let list = |items: Value| json!({ "apiVersion": "v1", "kind": "List", "metadata": {}, "items": items });
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": POD, "namespace": NAMESPACE, "annotations": {
            "kubectl.kubernetes.io/last-applied-configuration": format!("{{\"p\":\"{SECRET}\"}}") } },
        "spec": { "containers": [{ "name": "controller", "args": [format!("--token={SECRET}")],
            "env": [{ "name": "DB_PASSWORD", "value": SECRET }] }] },
        "status": { "containerStatuses": [{ "name": "controller", "ready": true, "restartCount": 0,
            "image": "i", "imageID": "i" }] },
    });
    api.put(&format!("/api/v1/namespaces/{NAMESPACE}/pods"), list(json!([pod])));
    let log = format!("ready\nAuthorization: Bearer {SECRET}\n");
    api.put(&format!("/api/v1/namespaces/{NAMESPACE}/pods/{POD}/log"), Value::String(log));
    let event = json!({ "metadata": { "name": "e" }, "note": format!("password={SECRET} was refused") });
    api.put(&format!("/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events"), list(json!([event])));
    let volume = json!({ "metadata": { "name": "p" }, "spec": { "csi": { "driver": "csi.shorthorn.io",
        "volumeHandle": "v", "volumeAttributes": { "apiToken": SECRET } } } });
    api.put("/api/v1/persistentvolumes", list(json!([volume])));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_support_bundle_has_everything_but_secrets() {
    let laptop = Laptop::new().await;
    plant(&laptop.api);
    laptop.ctl(&["volume", "create", "v", "--size", "1GiB", "--replicas", "1"]).await;
    let written = laptop.ctl(&["support-bundle", "b.tar.gz"]).await;
    assert!(written.status.success(), "{}", text(&written));
    assert!(text(&written).contains("agents do not hand them out"), "{}", text(&written));
    let file = std::fs::File::open(laptop.cluster.path("b.tar.gz")).unwrap();
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(file));
    let mut files = std::collections::BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().components().skip(1).collect::<std::path::PathBuf>();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        files.insert(path.display().to_string(), text);
    }
    for (name, words) in [
        ("status.txt", "Volumes"),
        ("doctor.txt", "agents answer"),
        ("controller/volumes.json", "\"name\": \"v\""),
        ("controller/nodes.json", "/var/lib/longhorn"),
        ("controller/metrics.txt", "shorthorn_controller_leader"),
        ("controller/configuration.txt", "rebuilds_per_node"),
        ("kubernetes/pods.json", POD),
        ("kubernetes/events.json", "was refused"),
        ("kubernetes/persistentvolumes.json", "csi.shorthorn.io"),
        (&format!("logs/{POD}.controller.log"), "ready"),
        ("missing.json", "storageclasses"),
    ] {
        let found = files.get(name).unwrap_or_else(|| panic!("{name} in {:?}", files.keys()));
        assert!(found.contains(words), "{words} in {name}: {found}");
    }
    for (name, text) in &files {
        assert!(!text.contains(SECRET), "{name} has a secret: {text}");
    }
    let again = laptop.ctl(&["support-bundle", "b.tar.gz"]).await;
    assert!(!again.status.success() && text(&again).contains("exists"), "{}", text(&again));
}
