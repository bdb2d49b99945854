//! The image of the controller: packaging/image/build, from the programs of the tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shorthorn_tests::binary;

const BUILD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/image/build");
const CONTROLLER: &str = "/usr/bin/shorthorn-controller";

#[test]
fn two_builds_are_equal_and_the_programs_run_with_nothing_but_the_image() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (first, second) = (dir.path().join("first.tar"), dir.path().join("second.tar"));
    let digest = build(&first)?;
    ensure!(digest == build(&second)?, "the digests of two builds differ");
    ensure!(fs::read(&first)? == fs::read(&second)?, "the archives of two builds differ");

    let layout = unpacked(&first, &dir.path().join("layout"))?;
    let manifest = json(&blob(&layout, &digest))?;
    let config = json(&blob(&layout, text(&manifest["config"]["digest"])?))?;
    ensure!(config["config"]["User"] == "65532:65532", "{config}");
    ensure!(config["config"]["Entrypoint"][0] == CONTROLLER, "{config}");
    let index = json(&layout.join("index.json"))?;
    ensure!(index["manifests"][0]["digest"] == digest, "{index}");

    let layer = blob(&layout, text(&manifest["layers"][0]["digest"])?);
    let root = unpacked(&layer, &dir.path().join("root"))?;
    let version = env!("CARGO_PKG_VERSION");
    for program in ["shorthorn-controller", "shorthornctl", "kubectl-shorthorn"] {
        let printed = in_root(&root, &[&format!("/usr/bin/{program}"), "--version"])?;
        ensure!(printed.trim().ends_with(version), "{program} --version: {printed}");
    }
    let writable = run(Command::new("find").arg(&root).args(["-type", "f", "-perm", "/022"]))?;
    ensure!(writable.stdout.is_empty(), "{}", String::from_utf8_lossy(&writable.stdout));
    check_contents(&json(&root.join("usr/share/sbom/shorthorn-controller.cdx.json"))?)?;
    Ok(())
}

/// Checks that the crates of the controller are listed, and those of its tests are not.
fn check_contents(contents: &Value) -> Result<()> {
    ensure!(contents["bomFormat"] == "CycloneDX", "{contents:.200}");
    let components = contents["components"].as_array().context("no components")?;
    let names: Vec<&str> = components.iter().filter_map(|component| component["name"].as_str()).collect();
    for name in ["shorthorn-controller", "shorthornctl", "tonic", "libc6", "ca-certificates"] {
        ensure!(names.contains(&name), "{name} is not in the list of contents");
    }
    for name in ["shorthorn-tests", "proptest", "shorthorn-engine"] {
        ensure!(!names.contains(&name), "{name} is in the list of contents");
    }
    let has_purl =
        |component: &Value| component["purl"].as_str().is_some_and(|purl| purl.starts_with("pkg:"));
    let without: Vec<_> = components.iter().filter(|component| !has_purl(component)).collect();
    ensure!(without.is_empty(), "without a package URL: {without:?}");
    Ok(())
}

#[test]
fn a_missing_program_is_named_with_the_remedy() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let output = Command::new(BUILD)
        .arg("--programs")
        .arg(dir.path())
        .arg("--output")
        .arg(dir.path().join("image.tar"))
        .output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success() && error.contains("shorthorn-controller is missing"), "{error}");
    ensure!(error.contains("make image"), "{error}");
    Ok(())
}

/// Returns the digest that the script prints.
fn build(archive: &Path) -> Result<String> {
    let programs = binary("shorthorn-controller")?;
    let programs = programs.parent().context("the program has no folder")?;
    let mut command = Command::new(BUILD);
    command
        .env("SOURCE_DATE_EPOCH", "1700000000")
        .arg("--programs")
        .arg(programs)
        .arg("--output")
        .arg(archive);
    let digest = String::from_utf8(run(&mut command)?.stdout)?.trim().to_owned();
    ensure!(digest.len() == "sha256:".len() + 64, "{digest:?} is no digest");
    Ok(digest)
}

fn blob(layout: &Path, digest: &str) -> PathBuf {
    layout.join("blobs").join(digest.replace(':', "/"))
}

fn text(value: &Value) -> Result<&str> {
    value.as_str().with_context(|| format!("{value} is no text"))
}

fn json(path: &Path) -> Result<Value> {
    let text = fs::read(path).with_context(|| path.display().to_string())?;
    Ok(serde_json::from_slice(&text)?)
}

fn unpacked(archive: &Path, to: &Path) -> Result<PathBuf> {
    fs::create_dir(to)?;
    run(Command::new("tar").arg("--extract").arg("--file").arg(archive).arg("--directory").arg(to))?;
    Ok(to.to_owned())
}

/// Returns the output of a program that sees only `root`. A user namespace gives an ordinary user the right
/// to do that.
fn in_root(root: &Path, words: &[&str]) -> Result<String> {
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--root"]).arg(root).args(words);
    Ok(String::from_utf8(run(&mut command)?.stdout)?)
}

fn run(command: &mut Command) -> Result<Output> {
    let output = command.output().with_context(|| format!("starting {command:?}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}: {error}", output.status);
    Ok(output)
}
