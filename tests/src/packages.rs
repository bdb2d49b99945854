use std::fs;
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

/// Copies the programs `names` without their symbols, as releases have them, to a folder in `dir`.
///
/// Returns that folder. The symbols are most of the bytes that an image or a machine would pack and unpack.
///
/// # Errors
/// A program is not built, or strip is not installed.
pub fn stripped_programs(dir: &Path, names: &[&str]) -> Result<PathBuf> {
    let folder = dir.join("programs");
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    for name in names {
        let stripped = Command::new("strip").arg("-o").arg(folder.join(name)).arg(binary(name)?).output();
        let stripped = stripped.context("running strip: install the package binutils")?;
        ensure!(stripped.status.success(), "strip {name}: {}", String::from_utf8_lossy(&stripped.stderr));
    }
    Ok(folder)
}

/// Returns the tree of the project.
#[must_use]
pub fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}
