//! The images of controller and agent: packaging/image/build, from the programs of the tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use shorthorn_testkit::free_port;
use shorthorn_tests::{signal, stripped_programs, until};

const BUILD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/image/build");
const CONTROLLER: &str = "shorthorn-controller";
const AGENT: &str = "shorthorn-agent";
const LIMIT: Duration = Duration::from_secs(60);
/// Runs a program as a pod does that has `readOnlyRootFilesystem` and a volume at /run/shorthorn: in the root
/// directory $1, as user and group $2.
const RUN: &str = r#"set -e
mount --bind "$1" "$1"
mount -t tmpfs -o "mode=0700,uid=${2%:*},gid=${2#*:}" none "$1/run/shorthorn"
mount -o remount,bind,ro "$1"
root=$1 user=$2
shift 2
exec chroot --userspec="$user" --groups= "$root" "$@"
"#;

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

/// A process in a root directory; killed when dropped.
struct Container(Child);

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_controller_serves_on_a_read_only_root_as_the_user_of_its_image() -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), "mounts need root");
    let dir = tempfile::tempdir()?;
    let archive = dir.path().join("controller.tar");
    let digest = build(CONTROLLER, &archive)?;
    let (config, root) = opened(&archive, &digest, dir.path())?;
    let (user, program) = (text(&config["User"])?, text(&config["Entrypoint"][0])?);
    let api = "unix:///run/shorthorn/controller.sock";
    let metrics = format!("127.0.0.1:{}", free_port()?);
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", RUN, "sh"]).arg(&root).args([user, program, "serve"]);
    command.args(["--store", "/run/shorthorn/controller.redb", "--listen", api]);
    command.args(["--csi-listen", "unix:///run/shorthorn/csi.sock", "--metrics-listen", &metrics]);
    // Nothing of this process's environment.
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").stdin(Stdio::null());
    let mut container = Container(command.spawn().context("starting unshare")?);
    until("controller that is ready", LIMIT, || {
        let ended = container.0.try_wait()?;
        ensure!(ended.is_none(), "the controller has ended: {ended:?}");
        run(Command::new("curl").args(["--silent", "--fail", &format!("http://{metrics}/readyz")])).map(Some)
    })?;
    let pid = container.0.id();
    runs_with_no_rights(pid, user)?;

    // The pods of the deployment have no other way in: the command line of the image, in the same container.
    let ids = user.split_once(':').context("no group")?;
    let inside = |words: &[&str]| {
        let mut command = Command::new("nsenter");
        command.args([
            "--target",
            &pid.to_string(),
            "--mount",
            "--root",
            "--setuid",
            ids.0,
            "--setgid",
            ids.1,
        ]);
        command.args(["--", "/usr/bin/shorthornctl", "--server", api]).args(words);
        command.output().context("starting nsenter")
    };
    let created = inside(&["volume", "create", "v1", "--size", "32MiB"])?;
    let answer = String::from_utf8(created.stderr)?;
    ensure!(answer.contains("0 of 3 replicas have a place; no nodes"), "{answer}");
    let listed = inside(&["volume", "list"])?;
    let volumes = String::from_utf8(listed.stdout)?;
    ensure!(listed.status.success() && volumes.contains("v1"), "the store has no volume: {volumes}");
    signal(i32::try_from(pid)?, Signal::SIGTERM)?;
    let status = container.0.wait()?;
    ensure!(status.success(), "after SIGTERM: {status}");
    Ok(())
}

/// Checks that a process is that user without any capability, and can write to no file system but the mounted
/// volume.
fn runs_with_no_rights(pid: u32, user: &str) -> Result<()> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let (uid, gid) = user.split_once(':').context("no group")?;
    let has = |name: &str, value: &str| {
        let field = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        ensure!(!field.is_empty() && field.split_whitespace().all(|one| one == value), "{name}{field}");
        Ok(())
    };
    has("Uid:", uid)?;
    has("Gid:", gid)?;
    has("CapEff:", "0000000000000000")?;
    // Fields: id, parent, device, root, mount point, options. The paths are those in the process's root.
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
    let options = |point: &str| {
        let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        mounts.find(|fields| fields.get(4) == Some(&point)).and_then(|fields| fields.get(5).copied())
    };
    let (root, volume) = (options("/"), options("/run/shorthorn"));
    ensure!(root.is_some_and(|options| options.starts_with("ro,")), "the root has {root:?}: {mounts}");
    ensure!(volume.is_some_and(|options| options.starts_with("rw,")), "the volume has {volume:?}: {mounts}");
    Ok(())
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
    ensure!(digest.len() == "sha256:".len() + 64, "{digest:?} is not a digest");
    Ok(digest)
}

fn blob(layout: &Path, digest: &str) -> PathBuf {
    layout.join("blobs").join(digest.replace(':', "/"))
}

fn text(value: &Value) -> Result<&str> {
    value.as_str().with_context(|| format!("{value} is not text"))
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
