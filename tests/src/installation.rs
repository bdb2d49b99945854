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

/// Files with objects or rules that this API server is too old for, and the list of the files.
const LEFT_OUT: [&str; 4] =
    ["crds.yaml", "deletion-guard.yaml", "kustomization.yaml", "poddisruptionbudget.yaml"];

/// Installs the files of packaging/deploy that this API server knows, and the definitions without CEL rules.
///
/// # Errors
/// The API server refuses something.
pub fn install(api: &ApiServer) -> Result<()> {
    let mut files: Vec<_> = fs::read_dir(DEPLOY)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.sort_by_key(|path| (!path.ends_with("namespace.yaml"), path.clone()));
    // The folders are of parts that an installation may have: the agent in a container.
    let applied = |path: &PathBuf| path.is_file() && !LEFT_OUT.iter().any(|name| path.ends_with(name));
    for file in files.into_iter().filter(applied) {
        api.apply(&fs::read_to_string(&file)?).with_context(|| file.display().to_string())?;
    }
    let crds = Command::new(binary("shorthorn-controller")?).args(["crds", "--without-rules"]).output()?;
    ensure!(crds.status.success(), "{}", String::from_utf8_lossy(&crds.stderr));
    api.apply(&String::from_utf8(crds.stdout)?)?;
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
