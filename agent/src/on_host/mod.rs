//! `shorthorn-agent serve-on-host`: the agent in a container, for hosts on which nothing can be installed.
//!
//! The rule: a container supplies the program and its settings. The host supplies all else: files, devices,
//! mounts, sockets, systemd, and every program that the agent, an engine or a replica runs. These are mount,
//! umount, blkid, wipefs, blockdev, modprobe, ping, systemctl and systemd-run; mkfs, fsck, tune2fs,
//! resize2fs, xfs_admin and xfs_growfs; tgtd, tgtadm and iscsiadm.
//!
//! Only this module knows of the container. It enters the mount namespace of process 1, copies the program
//! and its units to the host, and executes `serve` of the copy. The process keeps its id, its control group
//! and its output: the container lives as long as the agent. Engines and replicas are units of the host,
//! which continue without the container. Without systemd they are processes of the container, and end with
//! it.
//!
//! The container needs no mount of the host. A copy of a volume's mount in a container would keep the volume
//! in use after its unmount.

pub mod files;
pub mod settings;

use std::convert::Infallible;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};
use nix::sched::{CloneFlags, setns};
use nix::sys::stat::{Mode, umask};

use crate::cli::ServeOnHostArgs;
use crate::serve::config::Config;
use crate::serve::paths::absolute;
use files::HostFiles;
use settings::NodeSettings;

/// The program of this process, also after its file was replaced.
const OWN_PROGRAM: &str = "/proc/self/exe";
/// The path of the program on a host that has the package.
const PACKAGED_PROGRAM: &str = "usr/bin/shorthorn-agent";
/// The settings on the host. The package has them in /etc, which may be read-only here.
const SETTINGS: &str = "run/shorthorn/agent.toml";
/// The search path of programs on a host.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Becomes the agent of the host; returns only with an error.
pub fn serve_on_host(args: &ServeOnHostArgs) -> anyhow::Result<Infallible> {
    let given = match &args.config {
        Some(file) => fs::read_to_string(file).with_context(|| file.display().to_string())?,
        None => String::new(),
    };
    let node = NodeSettings {
        writer: "serve-on-host at its start",
        name: args.node_name.as_deref(),
        address: args.address,
        port: args.port,
        metrics_port: args.metrics_port,
    };
    let settings = settings::complete(&given, &node)?;
    let host_settings = Path::new("/").join(SETTINGS);
    Config::parse(&host_settings, &settings)?;
    let programs = absolute(args.programs.clone()).map_err(anyhow::Error::msg).context("--programs")?;
    let program = fs::read(OWN_PROGRAM).context(OWN_PROGRAM)?;
    enter_host()?;
    // As in the unit of the package: state has secrets.
    umask(Mode::from_bits_truncate(0o077));
    let copy = install(Path::new("/"), &programs, &program, &settings, systemctl)?;
    let error = Command::new(&copy).arg("serve").arg("--config").arg(&host_settings).env("PATH", PATH).exec();
    Err(error).with_context(|| copy.display().to_string())
}

/// Moves this process to the mount namespace of process 1.
fn enter_host() -> anyhow::Result<()> {
    let namespace = |process: &str, kind: &str| {
        let path = format!("/proc/{process}/ns/{kind}");
        fs::read_link(&path).with_context(|| format!("{path}: the container has to be privileged"))
    };
    ensure!(
        namespace("1", "mnt")? != namespace("self", "mnt")?,
        "process 1 has the mounts of this process: run `serve` on a host, and set hostPID for a pod"
    );
    ensure!(namespace("1", "net")? == namespace("self", "net")?, "set hostNetwork for the pod");
    let mounts = File::open("/proc/1/ns/mnt").context("/proc/1/ns/mnt")?;
    setns(mounts, CloneFlags::CLONE_NEWNS)
        .context("entering the mounts of the host: the container has to be privileged")
}

/// Copies program, units and settings to the host whose root directory is `root`. Returns the copy of the
/// program.
///
/// systemd reads the units again, and running ones keep their processes. The targets of the order become
/// active without a wait: an instance of an earlier agent that is starting may hold them up.
fn install(
    root: &Path,
    programs: &Path,
    program: &[u8],
    settings: &str,
    mut systemctl: impl FnMut(&[&str]) -> anyhow::Result<()>,
) -> anyhow::Result<PathBuf> {
    if root.join(PACKAGED_PROGRAM).exists() {
        bail!(
            "/{PACKAGED_PROGRAM} is on this host: keep the DaemonSet off this node by its label, or remove \
             the package shorthorn-agent"
        );
    }
    // The same test as sd_booted(3), before anything below that directory is made.
    let has_systemd = root.join("run/systemd/system").is_dir();
    let files = HostFiles::in_root(root);
    files.make_directories()?;
    let copy = root.join(programs.strip_prefix("/").unwrap_or(programs)).join("shorthorn-agent");
    files::put_program(&copy, program)?;
    files.put_rules()?;
    files::put(&root.join(SETTINGS), settings.as_bytes(), 0o600)?;
    if has_systemd {
        files.put_units(&copy)?;
        files.put_generator(&copy, SETTINGS)?;
        systemctl(&["daemon-reload"])?;
        systemctl(&["start", "--no-block", files::ORDER_TARGET])?;
    }
    Ok(copy)
}

/// Runs systemctl of the host.
fn systemctl(arguments: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("systemctl")
        .args(arguments)
        .env("PATH", PATH)
        .stdin(Stdio::null())
        .output()
        .context("systemctl")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let call = arguments.join(" ");
    ensure!(output.status.success(), "systemctl {call}: {}: {}", output.status, said.trim());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_systemctl(arguments: &[&str]) -> anyhow::Result<()> {
        bail!("systemctl was called: {arguments:?}")
    }

    #[test]
    fn a_host_with_systemd_has_the_targets_of_the_order_before_the_first_instance() {
        let root = tempfile::tempdir().unwrap();
        let units = root.path().join("run/systemd/system");
        fs::create_dir_all(&units).unwrap();
        let program = fs::read("/bin/true").unwrap();
        let mut calls = Vec::new();
        let target = units.join("shorthorn-order.target");
        let systemctl = |arguments: &[&str]| {
            calls.push(arguments.join(" "));
            ensure!(target.exists(), "not yet written");
            Ok(())
        };
        let copy = install(root.path(), Path::new("/bin"), &program, "", systemctl).unwrap();
        assert_eq!(calls, ["daemon-reload", "start --no-block shorthorn-order.target"]);
        assert!(copy.with_file_name("shorthorn-generator").exists());
    }

    #[test]
    fn a_host_without_systemd_gets_the_program_and_no_units() {
        let root = tempfile::tempdir().unwrap();
        let program = fs::read("/bin/true").unwrap();
        let programs = Path::new("/var/lib/shorthorn/bin");
        let copy = install(root.path(), programs, &program, "queues = 2\n", no_systemctl).unwrap();
        assert_eq!(copy, root.path().join("var/lib/shorthorn/bin/shorthorn-agent"));
        assert_eq!(fs::read(&copy).unwrap(), program);
        assert_eq!(fs::read_to_string(root.path().join(SETTINGS)).unwrap(), "queues = 2\n");
        assert!(!root.path().join("run/systemd").exists(), "a program would take systemd for running");
    }

    #[test]
    fn a_host_with_the_package_is_left_alone() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("usr/bin")).unwrap();
        fs::write(root.path().join(PACKAGED_PROGRAM), "").unwrap();
        let error = install(root.path(), Path::new("/p"), b"", "", no_systemctl).unwrap_err().to_string();
        assert!(error.contains("remove the package"), "{error}");
        assert!(!root.path().join("p").exists() && !root.path().join("run").exists());
    }
}
