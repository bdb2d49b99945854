//! The rpm packages in a root directory with the programs of this machine: their scripts by themselves, and
//! installation, upgrade, downgrade and removal by rpm. systemctl, systemd-tmpfiles and udevadm only record
//! their calls there. Dependencies are not checked, because the packages of this machine may be Debian's.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use shorthorn_tests::{build_packages, in_target};

const OLD: &str = "0.0.1";
const NEW: &str = "0.0.2";
const AGENT: &str = "shorthorn-agent";
const CONTROLLER: &str = "shorthorn-controller";
const TMPFILES: &str = "systemd-tmpfiles --create shorthorn.conf";
const RELOAD: &str = "systemctl daemon-reload";
const UDEV: &str = "udevadm control --reload";
const PRESET: &str = "systemctl --quiet preset shorthorn-agent.service";
const PRESET_SOCKETS: &str =
    "systemctl --quiet preset shorthorn-agent-csi.socket shorthorn-agent-registration.socket";
const DISABLE: &str = "systemctl --quiet --no-reload disable shorthorn-agent.service \
     shorthorn-agent-csi.socket shorthorn-agent-registration.socket shorthorn-pods.service";
const STOP: &str = "systemctl stop shorthorn-agent-registration.socket shorthorn-agent-csi.socket \
     shorthorn-agent.service";
const RESTART: &str = "systemctl try-restart shorthorn-agent.service";
const CONTROLLER_PRESET: &str = "systemctl --quiet preset shorthorn-controller.service";
const CONTROLLER_DISABLE: &str = "systemctl --quiet --no-reload disable shorthorn-controller.service";
const CONTROLLER_STOP: &str = "systemctl stop shorthorn-controller.service";
const CONTROLLER_RESTART: &str = "systemctl try-restart shorthorn-controller.service";
/// The mark of a volume that is attached to the host.
const ATTACHED: &str = "var/lib/shorthorn/instances/engine/v1.json";
const REGISTRATION: &str = "var/lib/kubelet/plugins_registry/shorthorn@csi.shorthorn.io-reg.sock";

/// Makes the root directory, prints a line, and keeps it until its input ends.
const ROOT: &str = r#"set -e
mount -t tmpfs none "$PWD" && cd "$PWD"
mkdir upper work root && cd root
mkdir -p usr etc/shorthorn var/lib dev run/systemd/system sys tmp
for folder in bin sbin lib lib64; do [ ! -e /$folder ] || ln -s usr/$folder $folder; done
mount -t overlay -o lowerdir=/usr,upperdir=../upper,workdir=../work none usr
touch dev/null && mount --bind /dev/null dev/null
for program in systemctl systemd-tmpfiles udevadm; do
    rm -f usr/bin/$program
    printf '#!/bin/sh\necho "%s $*" >>/calls\n' $program >usr/bin/$program
    chmod 755 usr/bin/$program
done
touch calls
echo ready
exec cat >/dev/null
"#;

/// Returns the packages of both versions, built once for all tests of this file.
fn packages() -> Result<&'static Path> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = FOLDER.get_or_init(|| {
        let options = ["--format", "rpm", "--package", AGENT, "--package", CONTROLLER];
        let build = |folder: &Path| {
            let versions = [OLD, NEW].into_iter();
            versions
                .map(|version| [&["--version", version], &options[..]].concat())
                .try_for_each(|arguments| build_packages(folder, &arguments))
        };
        in_target(concat!(env!("CARGO_TARGET_TMPDIR"), "/packages-rpm"), build)
    });
    built.as_deref().map_err(|error| anyhow::anyhow!("{error}"))
}

fn file(package: &str, version: &str) -> Result<PathBuf> {
    let start = format!("{package}-{version}-");
    for entry in fs::read_dir(packages()?)? {
        let path = entry?.path();
        if path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(&start)) {
            return Ok(path);
        }
    }
    anyhow::bail!("no rpm of {package} {version}")
}

/// A root directory in a mount namespace of its own.
struct Host {
    unshare: Child,
    root: PathBuf,
    _folder: tempfile::TempDir,
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

impl Host {
    fn start() -> Result<Host> {
        ensure!(nix::unistd::geteuid().is_root(), "mounts need root");
        let folder = tempfile::tempdir()?;
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", ROOT]).current_dir(folder.path());
        command.env("PWD", folder.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let unshare = command.spawn().context("starting unshare")?;
        let mut host = Host { unshare, root: folder.path().join("root"), _folder: folder };
        let mut line = String::new();
        BufReader::new(host.unshare.stdout.take().context("a pipe")?).read_line(&mut line)?;
        ensure!(line == "ready\n", "the root directory cannot be made: {line}");
        Ok(host)
    }

    /// Returns the path of a file of the root directory for this process.
    fn path(&self, name: &str) -> PathBuf {
        let root = format!("/proc/{}/root{}", self.unshare.id(), self.root.display());
        Path::new(&root).join(name)
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.path(name);
        fs::create_dir_all(path.parent().context("no folder")?)?;
        fs::write(&path, text).with_context(|| format!("writing {name}"))
    }

    fn remove(&self, name: &str) -> Result<()> {
        fs::remove_file(self.path(name)).with_context(|| format!("removing {name}"))
    }

    /// Returns a program of this machine that sees the mounts of the root directory.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.unshare.id())).arg(program);
        command.stdin(Stdio::null()).current_dir("/");
        command
    }

    fn rpm(&self) -> Command {
        let mut command = self.command("rpm");
        command.arg("--root").arg(&self.root).args(["--dbpath", "/rpmdb", "--nodeps", "--nosignature"]);
        command
    }

    fn query(&self, package: &str) -> Result<String> {
        let mut command = self.command("rpm");
        command.arg("--root").arg(&self.root).args(["--dbpath", "/rpmdb", "-q", package]);
        Ok(String::from_utf8(command.output()?.stdout)?)
    }

    /// Runs a script of a package like rpm, with the number of its packages that remain.
    fn scriptlet(&self, package: &str, script: &str, count: u32) -> Result<Output> {
        let query = Command::new("rpm")
            .args(["-qp", "--qf", &format!("%{{{script}}}")])
            .arg(file(package, OLD)?)
            .output()?;
        let text = String::from_utf8(query.stdout)?;
        ensure!(text.len() > 20, "{package} has no {script}");
        let mut command = self.command("chroot");
        let count = count.to_string();
        command.arg(&self.root).args(["/bin/sh", "-c", text.as_str(), script, count.as_str()]);
        Ok(command.output()?)
    }

    /// Returns the recorded calls since the last time.
    fn calls(&self) -> Result<Vec<String>> {
        let calls = fs::read_to_string(self.path("calls"))?;
        fs::write(self.path("calls"), "")?;
        Ok(calls.lines().map(str::to_owned).collect())
    }

    fn ensure_calls(&self, expected: &[&str], place: &str) -> Result<()> {
        let calls = self.calls()?;
        ensure!(calls == expected, "{place}: {calls:#?}, not {expected:#?}");
        Ok(())
    }
}

fn succeeded(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("starting {command:?}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    // A script that fails after the transaction is a warning for rpm.
    ensure!(output.status.success() && !errors.contains("scriptlet failed"), "{command:?}: {errors}");
    Ok(errors.into_owned())
}

/// The calls of a script with 0, 1 and 2, on a host where systemd runs.
type Calls = (&'static str, &'static str, [&'static [&'static str]; 3]);

const UPDATED: &[&str] = &[TMPFILES, RELOAD, UDEV];
const RESTARTED: &[&str] = &[RELOAD, UDEV, RESTART];
const CALLS: [Calls; 6] = [
    (AGENT, "POSTIN", [UPDATED, &[TMPFILES, RELOAD, UDEV, PRESET, PRESET_SOCKETS], UPDATED]),
    (AGENT, "PREUN", [&[DISABLE, STOP], &[], &[]]),
    (AGENT, "POSTUN", [&[RELOAD, UDEV], RESTARTED, RESTARTED]),
    (CONTROLLER, "POSTIN", [&[RELOAD], &[RELOAD, CONTROLLER_PRESET], &[RELOAD]]),
    (CONTROLLER, "PREUN", [&[CONTROLLER_DISABLE, CONTROLLER_STOP], &[], &[]]),
    (CONTROLLER, "POSTUN", [&[RELOAD], &[RELOAD, CONTROLLER_RESTART], &[RELOAD, CONTROLLER_RESTART]]),
];

#[test]
fn each_script_does_its_part_of_an_installation_upgrade_or_removal() -> Result<()> {
    let host = Host::start()?;
    for (package, script, expected) in CALLS {
        for (count, expected) in (0..).zip(expected) {
            let place = format!("{script} {count} of {package}");
            let output = host.scriptlet(package, script, count)?;
            ensure!(output.status.success() && output.stderr.is_empty(), "{place}: {output:?}");
            host.ensure_calls(expected, &place)?;
        }
    }
    host.write("etc/shorthorn/agent.toml", "csi = \"off\"\n")?;
    host.scriptlet(AGENT, "POSTIN", 1)?;
    host.ensure_calls(&[TMPFILES, RELOAD, UDEV, PRESET], "without CSI")?;
    // In an image that is being built, systemd does not run.
    fs::remove_dir(host.path("run/systemd/system"))?;
    for (package, script, expected) in CALLS {
        for (count, expected) in (0..).zip(expected) {
            let output = host.scriptlet(package, script, count)?;
            ensure!(output.status.success() && output.stderr.is_empty(), "{script} {count}: {output:?}");
            let of_files = |call: &&str| call.contains("--create") || call.contains("--quiet");
            let expected: Vec<&str> =
                expected.iter().copied().filter(of_files).filter(|call| *call != PRESET_SOCKETS).collect();
            host.ensure_calls(&expected, &format!("{script} {count} of {package} without systemd"))?;
        }
    }
    Ok(())
}

#[test]
fn the_script_before_a_removal_refuses_while_the_host_is_needed() -> Result<()> {
    let host = Host::start()?;
    let replica = "var/lib/shorthorn/instances/replica/v2-0000000a.json";
    let mark = "dev/longhorn/.ublkb0";
    for (needed, text, message) in [
        (ATTACHED, "{}", "volumes are attached to this host: v1 "),
        (replica, "{}", "run on this host: v2-0000000a "),
        (mark, "v3\n", "volumes are attached to this host: v3 "),
    ] {
        host.write(needed, text)?;
        let refused = host.scriptlet(AGENT, "PREUN", 0)?;
        let errors = String::from_utf8_lossy(&refused.stderr);
        ensure!(refused.status.code() == Some(1) && errors.contains(message), "{refused:?}");
        host.ensure_calls(&[], "after a refusal")?;
        for count in [1, 2] {
            let upgrade = host.scriptlet(AGENT, "PREUN", count)?;
            ensure!(upgrade.status.success(), "an upgrade is refused: {upgrade:?}");
        }
        host.remove(needed)?;
    }
    ensure!(host.scriptlet(AGENT, "PREUN", 0)?.status.success(), "nothing needs the host any more");
    host.ensure_calls(&[DISABLE, STOP], "after the end of all volumes")
}

#[test]
fn rpm_installs_upgrades_downgrades_and_erases_with_the_scripts() -> Result<()> {
    let host = Host::start()?;
    succeeded(host.rpm().arg("--install").arg(file(AGENT, OLD)?))?;
    host.ensure_calls(&[TMPFILES, RELOAD, UDEV, PRESET, PRESET_SOCKETS], "installation of the agent")?;
    succeeded(host.rpm().arg("--install").arg(file(CONTROLLER, OLD)?))?;
    host.ensure_calls(&[RELOAD, CONTROLLER_PRESET], "installation of the controller")?;

    let settings = "node_name = \"n1\"\n";
    host.write("etc/shorthorn/agent.toml", settings)?;
    host.write(ATTACHED, "{}")?;
    for version in [NEW, OLD] {
        succeeded(host.rpm().args(["--upgrade", "--oldpackage"]).arg(file(AGENT, version)?))?;
        // One restart, of the agent only: the volume stays attached.
        host.ensure_calls(&[UPDATED, RESTARTED].concat(), &format!("change to {version}"))?;
        succeeded(host.rpm().args(["--upgrade", "--oldpackage"]).arg(file(CONTROLLER, version)?))?;
        host.ensure_calls(&[RELOAD, RELOAD, CONTROLLER_RESTART], &format!("change to {version}"))?;
        for package in [AGENT, CONTROLLER] {
            let installed = host.query(package)?;
            ensure!(installed.starts_with(&format!("{package}-{version}-1.")), "{installed}");
        }
        ensure!(fs::read_to_string(host.path("etc/shorthorn/agent.toml"))? == settings, "settings are lost");
    }

    host.write(REGISTRATION, "")?;
    let refused = host.rpm().args(["--erase", AGENT]).output()?;
    let errors = String::from_utf8_lossy(&refused.stderr);
    ensure!(!refused.status.success() && errors.contains("are attached to this host: v1"), "{refused:?}");
    host.ensure_calls(&[], "after a refusal")?;
    ensure!(
        host.query(AGENT)?.starts_with(AGENT) && host.path("usr/bin/shorthorn-agent").exists(),
        "removed"
    );
    ensure!(host.path(REGISTRATION).exists(), "kubelet has lost the driver of a volume");
    erased(&host, settings)
}

/// Erases the packages after the last volume. The data and the changed settings stay.
fn erased(host: &Host, settings: &str) -> Result<()> {
    host.remove(ATTACHED)?;
    let data = ["var/lib/longhorn/replicas/v1-1/volume-head-000.img", "var/lib/shorthorn/controller.redb"];
    for name in data {
        host.write(name, "data")?;
    }
    succeeded(host.rpm().args(["--erase", AGENT, CONTROLLER]))?;
    let calls = host.calls()?;
    for expected in [DISABLE, STOP, CONTROLLER_DISABLE, CONTROLLER_STOP, RELOAD, UDEV] {
        ensure!(calls.iter().any(|call| call == expected), "{expected} is not in {calls:#?}");
    }
    ensure!(!calls.iter().any(|call| call.contains("restart")), "{calls:#?}");
    for gone in ["usr/bin/shorthorn-agent", "usr/bin/shorthorn-controller", REGISTRATION] {
        ensure!(!host.path(gone).exists(), "{gone} is left");
    }
    for name in data {
        ensure!(fs::read_to_string(host.path(name))? == "data", "{name} is gone");
    }
    let saved = fs::read_to_string(host.path("etc/shorthorn/agent.toml.rpmsave"))?;
    ensure!(saved == settings, "{saved}");
    Ok(())
}

#[test]
fn the_units_of_a_daemonset_do_not_replace_those_of_the_package() -> Result<()> {
    let host = Host::start()?;
    let unit = "run/systemd/system/shorthorn-engine@.service";
    for (name, text) in [("run/shorthorn/agent.toml", ""), (unit, "[Service]\n")] {
        host.write(name, text)?;
    }
    succeeded(host.rpm().arg("--install").arg(file(AGENT, OLD)?))?;
    ensure!(!host.path(unit).exists(), "systemd still reads the unit of the DaemonSet");
    Ok(())
}

#[test]
fn a_removal_by_force_is_possible() -> Result<()> {
    let host = Host::start()?;
    succeeded(host.rpm().arg("--install").arg(file(AGENT, OLD)?))?;
    host.calls()?;
    host.write(ATTACHED, "{}")?;
    let printed = succeeded(host.rpm().args(["--erase", AGENT]).env("SHORTHORN_FORCE_REMOVE", "1"))?;
    ensure!(printed.contains("SHORTHORN_FORCE_REMOVE=1: removing the package"), "{printed}");
    ensure!(!host.path("usr/bin/shorthorn-agent").exists(), "the program is left");
    host.ensure_calls(&[DISABLE, STOP, RELOAD, UDEV], "removal by force")
}
