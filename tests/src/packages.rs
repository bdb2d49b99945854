use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::binary;

/// The programs that have packages.
const PROGRAMS: [&str; 3] = ["shorthorn-agent", "shorthorn-controller", "shorthornctl"];

/// Builds packages of the programs under test with packaging/build, quickly: uncompressed, and without the
/// licence texts of dependencies.
///
/// # Errors
/// The script fails; its output is in the error.
pub fn build_packages(output: &Path, arguments: &[&str]) -> Result<()> {
    let agent = binary("shorthorn-agent")?;
    build_packages_of(agent.parent().context("a program without a folder")?, output, arguments)
}

/// Builds packages of the programs in a folder like [`build_packages`].
///
/// # Errors
/// The script fails; its output is in the error.
pub fn build_packages_of(programs: &Path, output: &Path, arguments: &[&str]) -> Result<()> {
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

/// Has `build` write packages to a folder below the target directory, and returns the folder. A folder of an
/// earlier run is deleted: a static temporary directory would stay after each run.
///
/// # Errors
/// The folder cannot be made, or the error of `build`; as text, for a static.
pub fn in_target(folder: &str, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf, String> {
    let make = || -> Result<PathBuf> {
        let folder = PathBuf::from(folder);
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => fs::create_dir_all(&folder)?,
        }
        build(&folder)?;
        Ok(folder)
    };
    make().map_err(|error| format!("{folder}: {error:#}"))
}

/// Makes another build of all programs in a folder in `dir`, which it returns: equal, but for a section that
/// is not loaded.
///
/// # Errors
/// A program is not built, or binutils are not installed.
pub fn other_build(dir: &Path) -> Result<PathBuf> {
    let folder = stripped_programs(dir, &PROGRAMS)?;
    let section = dir.join("section");
    fs::write(&section, "another build")?;
    for name in PROGRAMS {
        let mut objcopy = Command::new("objcopy");
        objcopy.arg("--add-section").arg(format!(".shorthorn.build={}", section.display()));
        let added = objcopy.arg(folder.join(name)).output().context("running objcopy")?;
        ensure!(added.status.success(), "objcopy {name}: {}", String::from_utf8_lossy(&added.stderr));
    }
    Ok(folder)
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
