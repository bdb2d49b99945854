use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};

/// The path of one of the project's programs, built with the `fast` profile.
///
/// `SHORTHORN_BIN_DIR` names the folder where make has built them; without it they are built here, once.
///
/// # Errors
/// It cannot be built, or there is no such program.
pub fn binary(name: &str) -> Result<PathBuf> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| find_or_build().map_err(|error| format!("{error:#}")));
    let path = match folder {
        Ok(folder) => folder.join(name),
        Err(error) => bail!("{error}"),
    };
    if !path.is_file() {
        bail!("{} is not there: run `make build`", path.display());
    }
    Ok(path)
}

fn find_or_build() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("SHORTHORN_BIN_DIR") {
        return Ok(folder.into());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the tests have no parent folder")?;
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--quiet", "--profile", "fast", "--workspace", "--bins"])
        .current_dir(root)
        .status()
        .context("running cargo")?;
    if !status.success() {
        bail!("building the programs failed: {status}");
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    Ok(target.join("fast"))
}
