use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::binary;

/// Builds packages of the programs under test with packaging/build, quickly: uncompressed, and without the
/// licence texts of dependencies.
///
/// # Errors
/// The script fails; its output is in the error.
pub fn build_packages(output: &Path, arguments: &[&str]) -> Result<()> {
    let agent = binary("shorthorn-agent")?;
    let programs = agent.parent().context("a program without a folder")?;
    let built = Command::new(project().join("packaging/build"))
        .args(["--programs".as_ref(), programs, "--output".as_ref(), output])
        .args(arguments)
        .env("SHORTHORN_COMPRESSION", "none")
        .env("SHORTHORN_NOTICES", "none")
        .output()
        .context("running packaging/build")?;
    let errors = String::from_utf8_lossy(&built.stderr);
    ensure!(built.status.success(), "packaging/build: {}\n{errors}", built.status);
    Ok(())
}

/// Returns the tree of the project.
#[must_use]
pub fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}
