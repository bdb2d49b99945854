//! The images of controller and agent: packaging/image/build, from the programs of the tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shorthorn_tests::stripped_programs;

const BUILD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/image/build");
const CONTROLLER: &str = "shorthorn-controller";
const AGENT: &str = "shorthorn-agent";

#[test]
fn two_builds_are_equal_and_the_programs_run_with_nothing_but_the_image() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (first, second) = (dir.path().join("first.tar"), dir.path().join("second.tar"));
    let digest = build(CONTROLLER, &first)?;
    ensure!(digest == build(CONTROLLER, &second)?, "the digests of two builds differ");
    ensure!(fs::read(&first)? == fs::read(&second)?, "the archives of two builds differ");

    let (config, root) = opened(&first, &digest, dir.path())?;
    ensure!(config["User"] == "65532:65532", "{config}");
    ensure!(config["Entrypoint"][0] == "/usr/bin/shorthorn-controller", "{config}");
    let version = env!("CARGO_PKG_VERSION");
    for program in ["shorthorn-controller", "shorthornctl", "kubectl-shorthorn"] {
        let printed = in_root(&root, &[&format!("/usr/bin/{program}"), "--version"])?;
        ensure!(printed.trim().ends_with(version), "{program} --version: {printed}");
    }
    let writable = run(Command::new("find").arg(&root).args(["-type", "f", "-perm", "/022"]))?;
    ensure!(writable.stdout.is_empty(), "{}", String::from_utf8_lossy(&writable.stdout));
    let contents = json(&root.join("usr/share/sbom/shorthorn-controller.cdx.json"))?;
    let listed = ["shorthorn-controller", "shorthornctl", "tonic", "libc6", "ca-certificates"];
    check_contents(&contents, &listed, &["shorthorn-tests", "proptest", "shorthorn-engine"])
}

#[test]
fn the_image_of_the_agent_has_the_agent_alone() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let archive = dir.path().join("agent.tar");
    let digest = build(AGENT, &archive)?;
    let (config, root) = opened(&archive, &digest, dir.path())?;
    ensure!(config["User"] == "0:0", "{config}");
    ensure!(config["Entrypoint"][0] == "/usr/bin/shorthorn-agent", "{config}");
    let printed = in_root(&root, &["/usr/bin/shorthorn-agent", "--version"])?;
    ensure!(printed.trim() == format!("shorthorn-agent {}", env!("CARGO_PKG_VERSION")), "{printed}");
    let programs: Vec<_> = fs::read_dir(root.join("usr/bin"))?.collect();
    ensure!(programs.len() == 1, "{programs:?}: tools are of the host");
    let contents = json(&root.join("usr/share/sbom/shorthorn-agent.cdx.json"))?;
    let foreign = ["shorthorn-controller", "proptest", "ca-certificates"];
    check_contents(&contents, &["shorthorn-agent", "shorthorn-engine", "libc6"], &foreign)
}

/// Returns the configuration of an image, and the directory of its files in `dir`.
fn opened(archive: &Path, digest: &str, dir: &Path) -> Result<(Value, PathBuf)> {
    let layout = unpacked(archive, &dir.join("layout"))?;
    let index = json(&layout.join("index.json"))?;
    ensure!(index["manifests"][0]["digest"] == digest, "{index}");
    let manifest = json(&blob(&layout, digest))?;
    let config = json(&blob(&layout, text(&manifest["config"]["digest"])?))?;
    let layer = blob(&layout, text(&manifest["layers"][0]["digest"])?);
    Ok((config["config"].clone(), unpacked(&layer, &dir.join("root"))?))
}

/// Checks that the parts of an image are listed, and others are not.
fn check_contents(contents: &Value, listed: &[&str], foreign: &[&str]) -> Result<()> {
    ensure!(contents["bomFormat"] == "CycloneDX", "{contents:.200}");
    let components = contents["components"].as_array().context("no components")?;
    let names: Vec<&str> = components.iter().filter_map(|component| component["name"].as_str()).collect();
    for name in listed {
        ensure!(names.contains(name), "{name} is not in the list of contents");
    }
    for name in foreign {
        ensure!(!names.contains(name), "{name} is in the list of contents");
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
fn build(image: &str, archive: &Path) -> Result<String> {
    let names: &[&str] = if image == CONTROLLER { &[CONTROLLER, "shorthornctl"] } else { &[image] };
    let programs = stripped_programs(archive.parent().context("no folder")?, names)?;
    let mut command = Command::new(BUILD);
    command
        .env("SOURCE_DATE_EPOCH", "1700000000")
        .arg("--programs")
        .arg(programs)
        .args(["--image", image])
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
