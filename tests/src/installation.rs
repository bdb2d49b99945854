//! The objects that an administrator installs in Kubernetes.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::apiserver::ApiServer;
use crate::{binary, until};

const LIMIT: Duration = Duration::from_secs(120);
const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/deploy");

/// The list of the files, and the definitions, which are made here.
const LEFT_OUT: [&str; 2] = ["crds.yaml", "kustomization.yaml"];
/// Files with objects that Debian's API server is too old for.
const NEW: [&str; 2] = ["deletion-guard.yaml", "poddisruptionbudget.yaml"];

/// Installs the files of packaging/deploy that this API server knows. If it is new enough for them, the
/// definitions have their CEL rules, and the deletion guard is in force.
///
/// # Errors
/// The API server refuses something.
pub fn install(api: &ApiServer) -> Result<()> {
    let mut files: Vec<_> = fs::read_dir(DEPLOY)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.sort_by_key(|path| (!path.ends_with("namespace.yaml"), path.clone()));
    // The folders are of parts that an installation may have: the agent in a container.
    let left_out: &[&str] = if api.has_policies() { &[] } else { &NEW };
    let applied =
        |path: &PathBuf| path.is_file() && !LEFT_OUT.iter().chain(left_out).any(|name| path.ends_with(name));
    for file in files.into_iter().filter(applied) {
        api.apply(&fs::read_to_string(&file)?).with_context(|| file.display().to_string())?;
    }
    api.apply(&definitions(api)?)?;
    are_established(api)
}

/// Waits until Kubernetes serves all definitions.
///
/// # Errors
/// A definition is not established in time.
pub fn are_established(api: &ApiServer) -> Result<()> {
    for kind in ["volumes", "engines", "replicas", "nodes"] {
        let path = format!("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{kind}.shorthorn.io");
        until("definition that is established", LIMIT, || {
            let definition = api.ok("GET", &path, None)?;
            let conditions = definition["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let holds =
                |wanted: &str| conditions.iter().any(|one| one["type"] == wanted && one["status"] == "True");
            ensure!(holds("Established") && !holds("NonStructuralSchema"), "{definition:#}");
            Ok(Some(()))
        })?;
    }
    Ok(())
}

/// Returns the definitions as this API server takes them: with CEL rules if it knows these.
///
/// # Errors
/// The controller prints none.
pub fn definitions(api: &ApiServer) -> Result<String> {
    let mut command = Command::new(binary("shorthorn-controller")?);
    command.arg("crds");
    if !api.has_policies() {
        command.arg("--without-rules");
    }
    let made = command.output()?;
    ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Ok(String::from_utf8(made.stdout)?)
}
