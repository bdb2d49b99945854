//! The chart: the verdict of Helm, the rendered objects, and that alerts and panels use metrics that exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::{admissionregistration, apps, core, networking, policy, rbac, storage};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use shorthorn_testkit::docs;

const TREE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
/// The values that enable all parts that are off by default.
const EVERYTHING: [&str; 7] = [
    AGENTS,
    "metrics.serviceMonitor.enabled=true",
    "metrics.agents.enabled=true",
    "metrics.rules.enabled=true",
    "metrics.dashboard.enabled=true",
    "networkPolicy.egress.enabled=true",
    "tls.listener.enabled=true",
];

/// The value that runs the agent as pods.
const AGENTS: &str = "agent.daemonset.enabled=true";

#[test]
fn helm_finds_no_fault() -> Result<()> {
    for options in [vec![], EVERYTHING.to_vec()] {
        let mut command = helm("lint")?;
        command.arg("--strict").arg(chart());
        for option in options {
            command.args(["--set", option]);
        }
        succeeds(&mut command)?;
    }
    Ok(())
}

#[test]
fn the_files_of_deploy_match_the_chart() -> Result<()> {
    succeeds(Command::new(chart().join("render")).arg("--check"))?;
    Ok(())
}

/// The objects that kubectl applies are those of Helm and the namespace.
#[test]
fn kustomize_lists_every_object() -> Result<()> {
    let mut kustomize = Command::new(tools()?.join("kubectl"));
    let mut by_kustomize = objects(&succeeds(kustomize.arg("kustomize").arg(tree("packaging/deploy")))?);
    ensure!(by_kustomize.remove("Namespace/shorthorn-system"), "{by_kustomize:?}");
    let by_helm = objects(&template(&[])?);
    ensure!(by_kustomize == by_helm, "kustomize: {by_kustomize:#?}\nhelm: {by_helm:#?}");
    Ok(())
}

#[test]
fn kustomize_has_the_agent_in_a_namespace_of_its_own() -> Result<()> {
    let mut kustomize = Command::new(tools()?.join("kubectl"));
    let made = succeeds(kustomize.arg("kustomize").arg(tree("packaging/deploy/agent")))?;
    let mut by_kustomize = objects(&made);
    ensure!(by_kustomize.remove("Namespace/shorthorn-agents"), "{by_kustomize:?}");
    let (with, without) = (objects(&template(&[AGENTS])?), objects(&template(&[])?));
    let by_helm: BTreeSet<_> = with.difference(&without).cloned().collect();
    ensure!(by_kustomize == by_helm, "kustomize: {by_kustomize:#?}\nhelm: {by_helm:#?}");
    ensure!(made.contains("pod-security.kubernetes.io/enforce: privileged\n"), "{made}");
    Ok(())
}

/// The pod is the host, except for its image: a volume of the host would keep copies of mounts.
#[test]
fn the_pod_of_the_agent_has_the_host_and_no_volume_of_it() -> Result<()> {
    let made = template(&[AGENTS])?;
    let pods: Vec<_> = made.split("\n---\n").filter(|text| text.contains("\nkind: DaemonSet\n")).collect();
    let [pod] = pods[..] else { anyhow::bail!("{} DaemonSets", pods.len()) };
    for line in
        ["hostPID: true", "hostNetwork: true", "privileged: true", "automountServiceAccountToken: false"]
    {
        ensure!(pod.lines().any(|found| found.trim() == line), "{line} is missing: {pod}");
    }
    ensure!(!pod.contains("hostPath"), "{pod}");
    ensure!(pod.contains("type: RollingUpdate\n    rollingUpdate:\n      maxUnavailable: 1\n"), "{pod}");
    let manual = template(&[AGENTS, "agent.daemonset.updateStrategy=OnDelete"])?;
    ensure!(manual.contains("type: OnDelete\n  selector:"), "Kubernetes refuses other fields with OnDelete");
    Ok(())
}

#[test]
fn the_settings_of_the_agent_reach_its_pods() -> Result<()> {
    let config = "agent.daemonset.config=[log]\nlevel = \"debug\"\n";
    let (usual, changed) =
        (template(&[AGENTS])?, template(&[AGENTS, config, "metrics.agents.enabled=true"])?);
    let text = "agent.toml: |\n    disks = [\"/var/lib/longhorn\"]\n    [log]\n    level = \"debug\"\n";
    ensure!(changed.contains(text), "{changed}");
    ensure!(changed.contains("- --metrics-port=9511\n") && !usual.contains("--metrics-port"), "{changed}");
    let sum =
        |made: &str| made.lines().find(|line| line.contains("shorthorn.io/settings: ")).map(str::to_owned);
    ensure!(sum(&usual).is_some() && sum(&usual) != sum(&changed), "pods keep the former settings");
    Ok(())
}

/// Guard pods are of the image that a user names in one place.
#[test]
fn kustomize_gives_guard_pods_the_image_of_the_controller() -> Result<()> {
    let dir = tempfile::tempdir()?;
    for entry in fs::read_dir(tree("packaging/deploy"))? {
        let path = entry?.path();
        if path.is_file() {
            fs::copy(&path, dir.path().join(path.file_name().context("a file without a name")?))?;
        }
    }
    let file = dir.path().join("kustomization.yaml");
    let text =
        fs::read_to_string(&file)?.replace("newName: shorthorn-controller", "newName: registry.test/s");
    fs::write(&file, text)?;
    let made = succeeds(Command::new(tools()?.join("kubectl")).arg("kustomize").arg(dir.path()))?;
    let image = format!("registry.test/s:{}", env!("CARGO_PKG_VERSION"));
    ensure!(made.contains(&format!("image: {image}\n")), "no container has the image {image}");
    ensure!(made.contains(&format!("value: {image}\n")), "guard pods do not have the image {image}");
    Ok(())
}

#[test]
fn the_chart_has_the_version_of_the_programs() -> Result<()> {
    let text = fs::read_to_string(chart().join("Chart.yaml"))?;
    for line in ["version: ", "appVersion: \""] {
        let line = format!("\n{line}{}", env!("CARGO_PKG_VERSION"));
        ensure!(text.contains(&line), "Chart.yaml lacks {line:?}");
    }
    Ok(())
}

/// The types of Kubernetes 1.33 keep each field of each object. Not examined: whether a field is missing, and
/// whether a value is one of those that a field permits.
#[test]
fn kubernetes_knows_every_field() -> Result<()> {
    let kubectl = |folder: &str| {
        let mut kustomize = Command::new(tools()?.join("kubectl"));
        succeeds(kustomize.arg("kustomize").arg(tree(folder)))
    };
    let mut kinds = BTreeSet::new();
    for documents in [
        template(&[])?,
        template(&EVERYTHING)?,
        kubectl("packaging/deploy")?,
        kubectl("packaging/deploy/agent")?,
    ] {
        let objects: Vec<Value> = serde_saphyr::from_multiple(&documents)?;
        for object in objects.iter().filter(|object| !object.is_null()) {
            let (kind, name) = (&object["kind"], &object["metadata"]["name"]);
            examine(object).with_context(|| format!("{kind} {name}"))?;
            kinds.insert(kind.as_str().unwrap_or_default().to_owned());
        }
    }
    for kind in ["Deployment", "DaemonSet", "CustomResourceDefinition", "ServiceMonitor", "PrometheusRule"] {
        ensure!(kinds.contains(kind), "no {kind} in {kinds:?}");
    }
    Ok(())
}

#[test]
fn an_unknown_field_or_a_value_of_another_type_is_found() -> Result<()> {
    let object = |api_version: &str, kind: &str, spec: Value| {
        let metadata = json!({ "name": "a" });
        json!({ "apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec })
    };
    let service = |port: Value| object("v1", "Service", json!({ "ports": [port] }));
    examine(&service(json!({ "port": 80, "targetPort": "api" })))?;
    let monitor = |endpoint: Value| {
        object("monitoring.coreos.com/v1", "ServiceMonitor", json!({ "endpoints": [endpoint] }))
    };
    examine(&monitor(json!({ "port": "metrics", "interval": "30s" })))?;
    for (object, message) in [
        (service(json!({ "port": 80, "tragetPort": "api" })), ".spec.ports[0].tragetPort is lost"),
        (service(json!({ "port": "80" })), "expected i32"),
        (object("v1", "Servlce", json!({})), "no type"),
        (object("v2", "Service", json!({})), "no type"),
        (monitor(json!({ "prot": "metrics" })), ".spec.endpoints[0].prot is unknown"),
        (monitor(json!({ "port": 9510 })), ".spec.endpoints[0].port is not text"),
        (monitor(json!({ "interval": "half a minute" })), "is not a duration"),
    ] {
        let found = examine(&object).err().context(message)?;
        ensure!(format!("{found:#}").contains(message), "{found:#}, not {message}");
    }
    Ok(())
}

#[test]
fn the_definitions_stay_when_the_chart_is_uninstalled() -> Result<()> {
    let made = template(&[])?;
    let definitions: Vec<_> =
        made.split("\n---\n").filter(|text| text.contains("kind: CustomResourceDefinition\n")).collect();
    ensure!(definitions.len() == 4, "{} definitions", definitions.len());
    for definition in definitions {
        let (metadata, _) = definition.split_once("\nspec:\n").context("no spec")?;
        ensure!(metadata.contains("helm.sh/resource-policy: keep"), "{metadata}");
    }
    Ok(())
}

#[test]
fn the_right_to_end_pods_is_removed_with_its_purposes() -> Result<()> {
    const ROLE: &str = "ClusterRole/shorthorn-lost-pods";
    let keep = "controller.podsOfLostNodes=keep";
    let leave = "controller.autoDeletePodWhenVolumeDetachedUnexpectedly=false";
    ensure!(objects(&template(&[keep])?).contains(ROLE), "the role is missing");
    ensure!(objects(&template(&[leave])?).contains(ROLE), "the role is missing");
    ensure!(!objects(&template(&[keep, leave])?).contains(ROLE), "the role is there without a purpose");
    Ok(())
}

#[test]
fn another_namespace_is_used_everywhere() -> Result<()> {
    let mut command = helm("template")?;
    command.args(["s", "--namespace", "storage"]).arg(chart());
    for option in EVERYTHING {
        command.args(["--set", option]);
    }
    let made = succeeds(&mut command)?;
    ensure!(
        made.contains("system:serviceaccount:storage:shorthorn-controller"),
        "the guard names another account"
    );
    let lines = made.lines().filter(|line| line.contains("shorthorn-system"));
    // Alerts tell a person to look in the usual namespace.
    let lines: Vec<_> = lines.filter(|line| !line.trim_start().starts_with("runbook:")).collect();
    ensure!(lines.is_empty(), "{lines:#?}");
    Ok(())
}

#[test]
fn unknown_and_impossible_values_are_refused() -> Result<()> {
    for value in [
        "controler.replicas=3",
        "controller.replicas=0",
        "controller.podsOfLostNodes=perhaps",
        "storageClasses[0].parameters=none",
        "sidecars.attacher.extraArgs[0]=--leader-election",
        "image.digest=sha256:1",
        "agent.daemonset.updateStrategy=Recreate",
        "agent.daemonset.programDirectory=/opt/%n",
        "agent.daemonset.disks[0]=longhorn",
    ] {
        let output = helm("template")?.arg("s").arg(chart()).args(["--set", value]).output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success() && error.contains("schema"), "{value}: {error}");
    }
    Ok(())
}

#[test]
fn alerts_and_panels_use_metrics_that_exist() -> Result<()> {
    let page = fs::read_to_string(tree("docs/metrics.md"))?;
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let mut known = BTreeSet::new();
    for row in rows {
        let (name, rest) = row.split_once('`').context("a row without a name")?;
        known.insert(name.to_owned());
        if rest.starts_with(" | histogram |") {
            known.extend(["_bucket", "_sum", "_count"].map(|part| format!("{name}{part}")));
        }
    }
    ensure!(known.len() > 40, "only {} metrics are documented", known.len());
    let mut used = BTreeSet::new();
    for (file, mark) in [("alerts.yaml", "expr: "), ("dashboard.json", "\"expr\": ")] {
        let text = fs::read_to_string(chart().join("files").join(file))?;
        let expressions = text.lines().filter_map(|line| line.trim_start().strip_prefix(mark));
        let words: Vec<_> = expressions.flat_map(metrics_of).collect();
        ensure!(words.len() > 10, "{file} uses {} metrics", words.len());
        used.extend(words);
    }
    let unknown: Vec<_> = used.difference(&known).collect();
    ensure!(unknown.is_empty(), "docs/metrics.md does not have {unknown:?}");
    Ok(())
}

/// An alert of the chart.
#[derive(Default)]
struct Alert {
    name: String,
    expression: String,
    lasts: String,
    severity: String,
    description: String,
    runbook: String,
}

/// Returns the alerts of the chart, in order.
fn alerts() -> Result<Vec<Alert>> {
    let text = fs::read_to_string(chart().join("files/alerts.yaml"))?;
    let mut alerts = Vec::<Alert>::new();
    for line in text.lines() {
        let Some((key, value)) = line.trim_start().trim_start_matches("- ").split_once(": ") else {
            continue;
        };
        let value = value.trim_matches('"').to_owned();
        if key == "alert" {
            alerts.push(Alert { name: value, ..Alert::default() });
            continue;
        }
        let Some(alert) = alerts.last_mut() else { continue };
        match key {
            "expr" => alert.expression = value,
            "for" => alert.lasts = value,
            "labels" => value.trim_matches(['{', '}', ' ']).clone_into(&mut alert.severity),
            "description" => alert.description = value,
            "runbook" => {
                alert.runbook =
                    value.replace("{{ $labels.volume }}", "NAME").replace("{{ $labels.replica }}", "NAME")
            }
            _ => {}
        }
    }
    Ok(alerts)
}

#[test]
fn the_documentation_has_each_alert() -> Result<()> {
    let mut rows = Vec::new();
    for alert in alerts()? {
        let severity = alert.severity.strip_prefix("severity: ").context("an alert has only a severity")?;
        let filled =
            [&alert.expression, &alert.description, &alert.runbook].iter().all(|text| !text.is_empty());
        ensure!(filled, "alert {} lacks a part", alert.name);
        let lasts = if alert.lasts.is_empty() { "at once" } else { &alert.lasts };
        rows.push(vec![
            format!("`{}`", alert.name),
            severity.to_owned(),
            format!("`{}`", alert.expression),
            lasts.to_owned(),
            alert.description,
            alert.runbook,
        ]);
    }
    ensure!(rows.len() > 10, "only {} alerts", rows.len());
    let head = ["Alert", "Severity", "Expression", "Lasts", "Meaning", "First look"];
    docs::check_generated("docs/reference/alerts.md", "alerts", &docs::table(&head, &rows));
    Ok(())
}

/// The chart refuses a value that it does not know, and so does this test if a page sets one.
#[test]
fn values_of_the_documentation_exist() -> Result<()> {
    let mut values = BTreeSet::new();
    for page in docs::pages() {
        for words in page.code().iter().flat_map(|code| docs::simple_commands(&code.text)) {
            if words.first().is_some_and(|word| word == "helm") {
                let set = words.windows(2).filter(|pair| pair[0] == "--set");
                values.extend(set.map(|pair| pair[1].replace("REGISTRY", "registry.test")));
            }
        }
    }
    ensure!(values.len() > 4, "only {values:?}");
    template(&values.iter().map(String::as_str).collect::<Vec<_>>())?;
    Ok(())
}

/// Checks an object against the type of its kind.
fn examine(object: &Value) -> Result<()> {
    let text = |field: &str| object[field].as_str().with_context(|| format!("no {field}"));
    match (text("apiVersion")?, text("kind")?) {
        ("v1", "Namespace") => keeps::<core::v1::Namespace>(object),
        ("v1", "ServiceAccount") => keeps::<core::v1::ServiceAccount>(object),
        ("v1", "ConfigMap") => keeps::<core::v1::ConfigMap>(object),
        ("v1", "Service") => keeps::<core::v1::Service>(object),
        ("apps/v1", "Deployment") => keeps::<apps::v1::Deployment>(object),
        ("apps/v1", "DaemonSet") => keeps::<apps::v1::DaemonSet>(object),
        ("policy/v1", "PodDisruptionBudget") => keeps::<policy::v1::PodDisruptionBudget>(object),
        ("networking.k8s.io/v1", "NetworkPolicy") => keeps::<networking::v1::NetworkPolicy>(object),
        ("rbac.authorization.k8s.io/v1", "Role") => keeps::<rbac::v1::Role>(object),
        ("rbac.authorization.k8s.io/v1", "RoleBinding") => keeps::<rbac::v1::RoleBinding>(object),
        ("rbac.authorization.k8s.io/v1", "ClusterRole") => keeps::<rbac::v1::ClusterRole>(object),
        ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding") => {
            keeps::<rbac::v1::ClusterRoleBinding>(object)
        }
        ("storage.k8s.io/v1", "CSIDriver") => keeps::<storage::v1::CSIDriver>(object),
        ("storage.k8s.io/v1", "StorageClass") => keeps::<storage::v1::StorageClass>(object),
        ("apiextensions.k8s.io/v1", "CustomResourceDefinition") => keeps::<CustomResourceDefinition>(object),
        ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy") => {
            keeps::<admissionregistration::v1::ValidatingAdmissionPolicy>(object)
        }
        ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding") => {
            keeps::<admissionregistration::v1::ValidatingAdmissionPolicyBinding>(object)
        }
        ("monitoring.coreos.com/v1", "ServiceMonitor") => fits(object, &SERVICE_MONITOR),
        ("monitoring.coreos.com/v1", "PrometheusRule") => fits(object, &PROMETHEUS_RULE),
        ("monitoring.coreos.com/v1alpha1", "ScrapeConfig") => fits(object, &SCRAPE_CONFIG),
        (api_version, kind) => bail!("no type for {api_version} {kind}: add it to this test"),
    }
}

/// Checks that the type keeps each field of the object.
fn keeps<T: DeserializeOwned + Serialize>(object: &Value) -> Result<()> {
    let typed: T = serde_json::from_value(object.clone())?;
    compare(object, &serde_json::to_value(typed)?, "")
}

fn compare(given: &Value, kept: &Value, path: &str) -> Result<()> {
    match (given, kept) {
        (Value::Object(given), Value::Object(kept)) => given.iter().try_for_each(|(key, value)| {
            let path = format!("{path}.{key}");
            let kept = kept.get(key).with_context(|| format!("{path} is lost"))?;
            compare(value, kept, &path)
        }),
        (Value::Array(given), Value::Array(kept)) => {
            ensure!(given.len() == kept.len(), "{path} has {} of {} values", kept.len(), given.len());
            let mut pairs = given.iter().zip(kept).enumerate();
            pairs.try_for_each(|(index, (given, kept))| compare(given, kept, &format!("{path}[{index}]")))
        }
        _ => {
            // The types have bounds of schemas as floating-point numbers.
            let is_equal = given == kept || (kept.is_f64() && given.as_f64() == kept.as_f64());
            ensure!(is_equal, "{path} is {given}, and {kept} is left of it");
            Ok(())
        }
    }
}

/// The part of a type of the Prometheus operator that the chart may use, after the operator's reference of
/// its API.
enum Shape {
    Text,
    /// A duration of Prometheus in one unit.
    Duration,
    Labels,
    Selector,
    List(&'static Shape),
    Fields(&'static [(&'static str, Shape)]),
}

const SERVICE_MONITOR: Shape = Shape::Fields(&[
    ("selector", Shape::Selector),
    (
        "endpoints",
        Shape::List(&Shape::Fields(&[
            ("port", Shape::Text),
            ("path", Shape::Text),
            ("interval", Shape::Duration),
            ("scrapeTimeout", Shape::Duration),
        ])),
    ),
]);
const PROMETHEUS_RULE: Shape = Shape::Fields(&[(
    "groups",
    Shape::List(&Shape::Fields(&[
        ("name", Shape::Text),
        ("interval", Shape::Duration),
        (
            "rules",
            Shape::List(&Shape::Fields(&[
                ("alert", Shape::Text),
                ("expr", Shape::Text),
                ("for", Shape::Duration),
                ("labels", Shape::Labels),
                ("annotations", Shape::Labels),
            ])),
        ),
    ])),
)]);
const SCRAPE_CONFIG: Shape = Shape::Fields(&[
    ("jobName", Shape::Text),
    ("scrapeInterval", Shape::Duration),
    ("kubernetesSDConfigs", Shape::List(&Shape::Fields(&[("role", Shape::Text)]))),
    (
        "relabelings",
        Shape::List(&Shape::Fields(&[
            ("sourceLabels", Shape::List(&Shape::Text)),
            ("regex", Shape::Text),
            ("replacement", Shape::Text),
            ("targetLabel", Shape::Text),
            ("action", Shape::Text),
        ])),
    ),
]);

/// Checks the metadata of an object, and its spec against the shape.
fn fits(object: &Value, spec: &Shape) -> Result<()> {
    compare(
        &object["metadata"],
        &serde_json::to_value(ObjectMeta::deserialize(&object["metadata"])?)?,
        ".metadata",
    )?;
    let keys = object.as_object().context("no object")?.keys();
    let other: Vec<_> =
        keys.filter(|key| !["apiVersion", "kind", "metadata", "spec"].contains(&key.as_str())).collect();
    ensure!(other.is_empty(), "{other:?} are unknown");
    has_shape(&object["spec"], spec, ".spec")
}

fn has_shape(value: &Value, shape: &Shape, path: &str) -> Result<()> {
    match shape {
        Shape::Text => ensure!(value.is_string(), "{path} is not text: {value}"),
        Shape::Duration => {
            let number = value.as_str().and_then(|text| text.strip_suffix(['s', 'm', 'h', 'd']));
            let is_one = number.is_some_and(|number| number.parse::<u32>().is_ok());
            ensure!(is_one, "{path} is not a duration: {value}");
        }
        Shape::Labels => {
            let labels = value.as_object().with_context(|| format!("{path} are no labels: {value}"))?;
            ensure!(labels.values().all(Value::is_string), "{path} has a value that is not text: {value}");
        }
        Shape::Selector => {
            compare(value, &serde_json::to_value(LabelSelector::deserialize(value)?)?, path)?;
        }
        Shape::List(of) => {
            let values = value.as_array().with_context(|| format!("{path} is not a list: {value}"))?;
            for (index, value) in values.iter().enumerate() {
                has_shape(value, of, &format!("{path}[{index}]"))?;
            }
        }
        Shape::Fields(fields) => {
            let values = value.as_object().with_context(|| format!("{path} is not an object: {value}"))?;
            for (key, value) in values {
                let path = format!("{path}.{key}");
                let known = fields.iter().find(|(name, _)| name == key);
                let (_, shape) = known.with_context(|| format!("{path} is unknown"))?;
                has_shape(value, shape, &path)?;
            }
        }
    }
    Ok(())
}

/// Returns the words of an expression that are names of metrics.
fn metrics_of(expression: &str) -> impl Iterator<Item = String> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("shorthorn_") || word.starts_with("process_")).map(str::to_owned)
}

fn tree(path: &str) -> PathBuf {
    Path::new(TREE).join(path)
}

fn chart() -> PathBuf {
    tree("packaging/chart")
}

/// Returns the folder of helm and kubectl.
fn tools() -> Result<PathBuf> {
    Ok(PathBuf::from(succeeds(&mut Command::new(chart().join("tools")))?.trim()))
}

fn helm(verb: &str) -> Result<Command> {
    let mut command = Command::new(tools()?.join("helm"));
    command.arg(verb);
    Ok(command)
}

fn template(values: &[&str]) -> Result<String> {
    let mut command = helm("template")?;
    command.args(["shorthorn", "--namespace", "shorthorn-system"]).arg(chart());
    for value in values {
        command.args(["--set", value]);
    }
    succeeds(&mut command)
}

/// Returns every object of a file of YAML documents, as kind and name.
fn objects(documents: &str) -> BTreeSet<String> {
    let field = |document: &str, start: &str| {
        let value = document.lines().find_map(|line| line.strip_prefix(start));
        value.map(|value| value.trim_matches('"').to_owned())
    };
    let pairs = documents.split("---\n").filter_map(|document| {
        let (_, metadata) = document.split_once("\nmetadata:\n")?;
        Some(format!("{}/{}", field(document, "kind: ")?, field(metadata, "  name: ")?))
    });
    pairs.collect()
}

/// Returns the standard output of a command that has to work.
fn succeeds(command: &mut Command) -> Result<String> {
    let Output { status, stdout, stderr } =
        command.output().with_context(|| format!("starting {command:?}"))?;
    let (printed, error) = (String::from_utf8(stdout)?, String::from_utf8_lossy(&stderr));
    ensure!(status.success(), "{command:?}: {status}\n{error}\n{printed}");
    Ok(printed)
}
