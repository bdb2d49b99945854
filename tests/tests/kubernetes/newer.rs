//! The commands of docs/install.md on an API server that knows all objects of an installation.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shorthorn_testkit::docs;
use shorthorn_tests::apiserver::{ApiServer, NAMESPACE};
use shorthorn_tests::are_established;

/// The parts of the chart that are off by default, without those of Prometheus' operator.
const MORE: [&str; 4] = [
    "agent.daemonset.enabled=true",
    "metrics.dashboard.enabled=true",
    "networkPolicy.egress.enabled=true",
    "tls.listener.enabled=true",
];
const POLICIES: &str = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies";

struct Tools {
    folder: PathBuf,
    home: PathBuf,
    kubeconfig: PathBuf,
}

impl Tools {
    fn of(api: &ApiServer, home: &Path) -> Result<Tools> {
        let tools = Command::new(docs::root().join("packaging/chart/tools")).output()?;
        ensure!(tools.status.success(), "{}", String::from_utf8_lossy(&tools.stderr));
        let folder = PathBuf::from(String::from_utf8(tools.stdout)?.trim_end());
        Ok(Tools { folder, home: home.to_owned(), kubeconfig: api.admin_kubeconfig()? })
    }

    /// Runs helm or kubectl in the repository, and returns everything that it prints.
    fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(self.folder.join(program));
        command.args(arguments).current_dir(docs::root());
        // For its cache.
        command.env("KUBECONFIG", &self.kubeconfig).env("HOME", &self.home);
        let output = command.output().with_context(|| format!("starting {program}"))?;
        let printed = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        let printed = printed.concat();
        ensure!(output.status.success(), "{program} {arguments:?}: {}\n{printed}", output.status);
        Ok(printed)
    }
}

/// Returns an API server on which a whole installation can be tried. Debian's 1.20 knows neither the policies
/// nor the budget, and Helm refuses it for the chart.
fn start(folder: &Path) -> Result<Option<ApiServer>> {
    let api = ApiServer::start(&folder.join("api"))?;
    if !api.has_policies() {
        println!("cannot run: Kubernetes 1.{} is too old for the chart", api.minor());
    }
    Ok(api.has_policies().then_some(api))
}

fn is_installed(api: &ApiServer) -> Result<()> {
    are_established(api)?;
    for policy in ["volumes", "attachments", "installation"] {
        api.ok("GET", &format!("{POLICIES}/{policy}.shorthorn.io"), None)?;
    }
    let deployment = format!("/apis/apps/v1/namespaces/{NAMESPACE}/deployments/shorthorn-controller");
    api.ok("GET", &deployment, None).map(drop)
}

/// Fails at a warning too: of a field that is deprecated or not known, or a pod that the namespace forbids.
fn without_warning(printed: &str) -> Result<()> {
    ensure!(!printed.to_lowercase().contains("warning"), "{printed}");
    Ok(())
}

#[test]
fn kubectl_installs_twice_without_a_warning() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let Some(api) = start(folder.path())? else { return Ok(()) };
    let tools = Tools::of(&api, folder.path())?;
    without_warning(&tools.run("kubectl", &["apply", "--validate=strict", "-k", "packaging/deploy"])?)?;
    is_installed(&api)?;
    without_warning(&tools.run("kubectl", &["apply", "--validate=strict", "-k", "packaging/deploy"])?)?;
    let guard = api.ok("GET", POLICIES, None)?["items"].clone();
    let is_first = |policy: &Value| policy["metadata"]["generation"] == 1;
    ensure!(
        guard.as_array().is_some_and(|all| all.iter().all(is_first)),
        "the deletion guard changed: {guard:#}"
    );
    without_warning(&tools.run("kubectl", &["apply", "--validate=strict", "-k", "packaging/deploy/agent"])?)
}

#[test]
fn helm_installs_upgrades_and_removes() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
    let Some(api) = start(folder.path())? else { return Ok(()) };
    let tools = Tools::of(&api, folder.path())?;
    let release = ["shorthorn", "packaging/chart", "--namespace", NAMESPACE];
    let install = [&["upgrade", "--install"][..], &release, &["--create-namespace"]].concat();
    without_warning(&tools.run("helm", &install)?)?;
    is_installed(&api)?;
    let volume = json!({ "apiVersion": "shorthorn.io/v1alpha1", "kind": "Volume", "metadata": { "name": "v" },
        "spec": { "size": "67108864" } });
    api.ok("POST", &ApiServer::path("volumes"), Some(&volume))?;
    let mut upgrade = [&["upgrade"][..], &release, &["--reset-then-reuse-values"]].concat();
    let start = upgrade.len();
    for value in MORE {
        upgrade.extend(["--set", value]);
    }
    without_warning(&tools.run("helm", &upgrade)?)?;
    is_installed(&api)?;
    upgrade.truncate(start);
    upgrade.extend(["--set", "deletionGuard.enabled=false"]);
    tools.run("helm", &upgrade)?;
    ensure!(api.find(&format!("{POLICIES}/volumes.shorthorn.io"))?.is_none(), "the guard stays");
    tools.run("helm", &["uninstall", "shorthorn", "-n", NAMESPACE])?;
    ensure!(api.names("volumes")? == ["v"], "the chart deletes the volume");
    Ok(())
}
