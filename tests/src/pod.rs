//! A container of the agent on a machine without a container runtime. The image that packaging/image/build
//! has written runs as the manifest of the DaemonSet runs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{VmHost, stripped_programs};

const BUILD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/image/build");
/// The directory of the image in the machine, and of the settings that the container sees in /settings.
const ROOT: &str = "/root/image";
const SETTINGS: &str = "/root/settings";
/// Starts a program as a container runtime does, with a mount namespace of its own. The image is the root
/// directory there, and nothing of the host is mounted but the settings. Propagation is that of Kubernetes'
/// default. 155 is pivot_root(2).
const RUN: &str = r#"
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)
CLONE_NEWNS, MS_RDONLY, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 0x20000, 1, 0x1000, 0x4000, 0x40000, 2
root = b"/root/image"
call("unshare", CLONE_NEWNS)
call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
call("mount", root, root, None, MS_BIND, None)
call("mount", b"proc", root + b"/proc", b"proc", 0, None)
call("mount", b"/root/settings", root + b"/settings", None, MS_BIND, None)
os.chdir(root)
call("syscall", 155, b".", b".")
call("umount2", b".", MNT_DETACH)
os.chdir("/")
os.execve("/usr/bin/shorthorn-agent", ["shorthorn-agent"] + sys.argv[1:], {"PATH": "/usr/bin"})
"#;

/// Puts the image of the agent on the machine, with the settings that all pods get.
///
/// # Errors
/// The image cannot be built.
pub fn push_agent_image(host: &VmHost, settings: &str) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let layer = layer(dir.path())?;
    let (program, file) = (dir.path().join("run.py"), dir.path().join("agent.toml"));
    fs::write(&program, RUN)?;
    fs::write(&file, settings)?;
    let settings = format!("{SETTINGS}/agent.toml");
    host.vm.push(&[
        (layer.as_path(), "/root/layer.tar", 0o644),
        (program.as_path(), "/root/run.py", 0o644),
        (file.as_path(), settings.as_str(), 0o644),
    ])?;
    host.sh(&format!(
        "mkdir {ROOT} && tar --extract --file /root/layer.tar --directory {ROOT} && \
         rm /root/layer.tar && mkdir {ROOT}/proc {ROOT}/settings"
    ))
    .map(drop)
}

/// Builds the image, and returns its only layer, decompressed: emulated processors are slow at that.
fn layer(dir: &Path) -> Result<PathBuf> {
    let programs = stripped_programs(dir, &["shorthorn-agent"])?;
    let archive = dir.join("agent.tar");
    let mut build = Command::new(BUILD);
    build.args(["--image", "shorthorn-agent", "--programs"]).arg(&programs).arg("--output").arg(&archive);
    let built = build.output().context("packaging/image/build")?;
    ensure!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let digest = String::from_utf8(built.stdout)?;
    let unpacked = Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(dir).status()?;
    ensure!(unpacked.success(), "tar: {unpacked}");
    let blob = |digest: &str| dir.join("blobs").join(digest.trim().replace(':', "/"));
    let manifest: Value = serde_json::from_slice(&fs::read(blob(&digest))?)?;
    let layer = blob(manifest["layers"][0]["digest"].as_str().context("no layer")?);
    let tar = dir.join("layer.tar");
    let mut gzip = Command::new("gzip");
    gzip.args(["--decompress", "--stdout"]).arg(&layer);
    let unpacked = gzip.stdout(fs::File::create(&tar)?).status().context("running gzip")?;
    ensure!(unpacked.success(), "gzip: {unpacked}");
    Ok(tar)
}

/// Starts a container of the agent; `name` is the unit that stands for its control group.
///
/// # Errors
/// systemd refuses it.
pub fn start_agent_pod(host: &VmHost, name: &str, node: &str) -> Result<()> {
    host.sh(&format!(
        "systemd-run --quiet --collect --unit={name} --slice=kubepods.slice \
         python3 /root/run.py serve-on-host --config=/settings/agent.toml --node-name={node} \
         --address=127.0.0.1"
    ))
    .map(drop)
}

/// Kills all processes of a container, as a runtime does after the grace period.
///
/// # Errors
/// One of them lives on.
pub fn kill_agent_pod(host: &VmHost, name: &str) -> Result<()> {
    host.sh(&format!(
        "group=/sys/fs/cgroup$(systemctl show --property ControlGroup --value {name}); \
         grep -q . $group/cgroup.procs; systemctl kill --signal=KILL {name}; \
         for i in $(seq 600); do test -e $group || exit 0; sleep 0.1; done; exit 1"
    ))
    .map(drop)
}
