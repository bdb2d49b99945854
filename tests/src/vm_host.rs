use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use shorthorn_vmkit::{DataDisk, FileSystem, Kernel, Output, RunningCommand, Vm, VmOptions};

use crate::{binary, until};

/// Far more than anything takes.
const LIMIT: Duration = Duration::from_secs(60);
/// The name that the machine has as a node.
pub const NODE: &str = "node1";

/// A virtual machine with the programs and units installed as a package would, agent and controller running.
#[derive(Debug)]
pub struct VmHost {
    /// The machine.
    pub vm: Vm,
}

impl VmHost {
    /// Starts a machine with a data disk on /var/lib/longhorn and installs everything.
    ///
    /// # Errors
    /// The machine does not start, or agent or controller do not: their logs are in the error.
    pub fn start(options: VmOptions) -> Result<VmHost> {
        let host = VmHost::bare(options)?;
        host.start_daemons()?;
        Ok(host)
    }

    /// Starts a machine with everything installed and no daemon running.
    ///
    /// # Errors
    /// The machine does not start.
    pub fn bare(options: VmOptions) -> Result<VmHost> {
        let host = VmHost { vm: Vm::start(options)? };
        host.install()?;
        Ok(host)
    }

    /// Returns the options for most tests: a machine with `kernel` and a data disk with ext4.
    pub fn options(kernel: Kernel) -> VmOptions {
        // Emulation is slow: a second on hardware takes ten here.
        VmOptions::new(kernel)
            .data_disk(DataDisk::new(4096, FileSystem::Ext4))
            .command_limit(Duration::from_secs(120))
    }

    fn install(&self) -> Result<()> {
        let mut files: Vec<(PathBuf, String, u32)> = Vec::new();
        for program in ["shorthorn-agent", "shorthorn-controller", "shorthornctl"] {
            files.push((binary(program)?, format!("/usr/bin/{program}"), 0o755));
        }
        let systemd = Path::new(env!("CARGO_MANIFEST_DIR")).join("../systemd");
        for (folder, target) in [
            ("system", "/usr/lib/systemd/system"),
            ("system/kubepods.slice.d", "/usr/lib/systemd/system/kubepods.slice.d"),
            ("system/var-lib-kubelet-pods-.mount.d", "/usr/lib/systemd/system/var-lib-kubelet-pods-.mount.d"),
            ("tmpfiles.d", "/usr/lib/tmpfiles.d"),
            ("modules-load.d", "/usr/lib/modules-load.d"),
            ("modprobe.d", "/usr/lib/modprobe.d"),
            ("udev/rules.d", "/usr/lib/udev/rules.d"),
        ] {
            files.extend(files_in(&systemd.join(folder), target)?);
        }
        let borrowed: Vec<(&Path, &str, u32)> =
            files.iter().map(|(host, guest, mode)| (host.as_path(), guest.as_str(), *mode)).collect();
        self.vm.push(&borrowed)
    }

    fn start_daemons(&self) -> Result<()> {
        // Emulated processors are slow: a replica that needs longer than the default is not dead there.
        self.vm.sh(&format!(
            "mkdir -p /etc/shorthorn && printf 'node_name = \"{NODE}\"\\nreplica_timeout_ms = 60000\\n' \
             > /etc/shorthorn/agent.toml && \
             echo 'SHORTHORN_CONTROLLER_ARGS=--node {NODE}=unix:///run/shorthorn/agent.sock' \
             > /etc/shorthorn/controller.env && \
             systemd-tmpfiles --create shorthorn.conf && systemctl daemon-reload && udevadm control --reload"
        ))?;
        let started = self.vm.run("systemctl start shorthorn-agent shorthorn-controller")?;
        if !started.success() {
            bail!("agent and controller do not start:\n{}\n{}", started.text(), self.journal());
        }
        // The controller is ready before it knows the agent.
        until("disk", LIMIT, || self.ctl(&format!("disk add {NODE} /var/lib/longhorn")).map(Some)).map(drop)
    }

    /// Runs shorthornctl; its standard output.
    ///
    /// # Errors
    /// It fails; the log of all units is in the error.
    pub fn ctl(&self, arguments: &str) -> Result<String> {
        let output = self.vm.run(&format!("shorthornctl {arguments}"))?;
        if !output.success() {
            bail!("shorthornctl {arguments}:\n{}\n{}", output.text(), self.journal());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Returns the output of shorthornctl for a volume.
    ///
    /// # Errors
    /// The volume does not exist.
    pub fn inspect(&self, volume: &str) -> Result<Value> {
        let text = self.ctl(&format!("--output json volume inspect {volume}"))?;
        serde_json::from_str(&text).with_context(|| format!("reading {text}"))
    }

    /// Kills the main process of a unit as the kernel would.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill(&self, unit: &str) -> Result<()> {
        self.sh(&format!(
            "pid=$(systemctl show --property MainPID --value '{unit}'); test \"$pid\" -gt 1 && kill -9 \
             \"$pid\""
        ))
        .map(drop)
    }

    /// Returns the units of the replicas of `volume`, in the order of their names.
    ///
    /// # Errors
    /// systemd does not answer.
    pub fn replica_units(&self, volume: &str) -> Result<Vec<String>> {
        let list = "systemctl list-units --plain --no-legend --state=active";
        let text = self.sh(&format!("{list} 'shorthorn-replica@{volume}*'"))?;
        Ok(text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
    }

    /// Runs a script with `set -e`; its standard output.
    ///
    /// # Errors
    /// It fails; the log of all units is in the error.
    pub fn sh(&self, script: &str) -> Result<String> {
        self.vm.sh(script).with_context(|| self.journal())
    }

    /// Starts a command without waiting for it.
    ///
    /// # Errors
    /// The machine does not answer.
    pub fn spawn(&self, command: &str) -> Result<RunningCommand> {
        self.vm.spawn(command)
    }

    /// Waits for a command started with [`VmHost::spawn`].
    ///
    /// # Errors
    /// It fails; the log of all units is in the error.
    pub fn finish(&self, running: RunningCommand, limit: Duration) -> Result<Output> {
        let output = running.wait(limit).with_context(|| self.journal())?;
        if !output.success() {
            bail!("{}\n{}", output.text(), self.journal());
        }
        Ok(output)
    }

    /// Returns the log of the units and of the kernel.
    #[must_use]
    pub fn journal(&self) -> String {
        let command =
            "journalctl --no-pager --lines 120 --output short-monotonic; systemctl --failed --no-legend";
        match self.vm.run(command) {
            Ok(output) => output.text(),
            Err(error) => format!("no journal: {error:#}"),
        }
    }
}

fn files_in(folder: &Path, target: &str) -> Result<Vec<(PathBuf, String, u32)>> {
    let mut found = Vec::new();
    if !folder.is_dir() {
        return Ok(found);
    }
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            let name = entry.file_name().into_string().ok().context("a file name that is not UTF-8")?;
            found.push((entry.path(), format!("{target}/{name}"), 0o644));
        }
    }
    Ok(found)
}
