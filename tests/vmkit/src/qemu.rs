//! A running QEMU process and the link to it.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};

use crate::disk::Disk;
use crate::image::Image;
use crate::kernel::QEMU;
use crate::lan::Lan;
use crate::machine::{CONTROL_NETWORK, Hardware, Machine, Memory};
use crate::process::{spawn_tied, wait_at_most};
use crate::qmp::Qmp;

/// Longest wait for a saved machine to be written or read.
const STATE_LIMIT: Duration = Duration::from_secs(120);
/// The time limit for a QEMU process to end.
const EXIT_LIMIT: Duration = Duration::from_secs(30);

/// The files that a QEMU process needs besides the hardware.
#[derive(Debug)]
pub struct Files<'a> {
    /// The folder for its messages.
    pub dir: &'a Path,
    pub console: &'a Path,
    pub root_overlay: &'a Path,
    pub lan: Option<&'a Lan>,
}

/// A virtual machine's process, killed with this value.
#[derive(Debug)]
pub struct Qemu {
    child: Child,
    qmp: Qmp,
    log: PathBuf,
}

impl Qemu {
    /// Starts the process. The guest does not run yet.
    pub fn start(image: &Image, hardware: Hardware, memory: Memory, files: &Files<'_>) -> Result<Self> {
        let (ours, theirs) = UnixStream::pair().context("cannot make a socket pair")?;
        let theirs = OwnedFd::from(theirs);
        let machine = Machine {
            hardware,
            image,
            memory,
            root_overlay: files.root_overlay,
            console: files.console,
            qmp: theirs.as_raw_fd(),
            lan: files.lan,
        };
        let log = files.dir.join("qemu.log");
        let messages = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let mut command = Command::new(QEMU);
        command
            .args(machine.arguments())
            .stdin(Stdio::null())
            .stdout(messages.try_clone().context("cannot duplicate a descriptor")?)
            .stderr(messages);
        let child = spawn_tied(command, theirs).with_context(|| format!("cannot run {QEMU}"))?;
        let mut child = ChildGuard(Some(child));
        let qmp = Qmp::connect(ours).map_err(|error| with_log(error, &log))?;
        let child = child.0.take().context("the process was taken before")?;
        Ok(Self { child, qmp, log })
    }

    /// Runs a command of QEMU's machine protocol.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.qmp.execute(command, arguments).map_err(|error| with_log(error, &self.log))
    }

    /// Returns if the process runs or how it ended, with its messages.
    pub fn describe(&mut self) -> String {
        let state = match self.child.try_wait() {
            Ok(Some(status)) => format!("QEMU has ended: {status}"),
            Ok(None) => "QEMU runs".to_owned(),
            Err(error) => format!("the state of QEMU is unknown: {error}"),
        };
        let messages = fs::read_to_string(&self.log).unwrap_or_default();
        if messages.trim().is_empty() { state } else { format!("{state}: {}", messages.trim()) }
    }

    /// Lets the guest run.
    pub fn resume(&mut self) -> Result<()> {
        self.execute("cont", json!({})).map(drop)
    }

    /// Returns the host's port behind which the guest's agent listens.
    pub fn agent_port(&mut self) -> Result<u16> {
        let table = self.execute("human-monitor-command", json!({ "command-line": "info usernet" }))?;
        // Protocol[State], descriptor, source address, source port, destination, …
        table
            .as_str()
            .and_then(|text| text.lines().find(|line| line.contains("HOST_FORWARD")))
            .and_then(|line| line.split_whitespace().nth(3)?.parse().ok())
            .ok_or_else(|| anyhow!("no forwarded port on {CONTROL_NETWORK}: {table}"))
    }

    /// Forwards a port of the host's loopback to one of the guest's.
    pub fn forward(&mut self, host_port: u16, guest_port: u16) -> Result<()> {
        let line = format!("hostfwd_add {CONTROL_NETWORK} tcp:127.0.0.1:{host_port}-:{guest_port}");
        let answer = self.execute("human-monitor-command", json!({ "command-line": line }))?;
        match answer.as_str().unwrap_or_default().trim() {
            "" => Ok(()),
            answer => Err(anyhow!("cannot forward port {host_port}: {answer}")),
        }
    }

    /// Writes the machine's state, except its memory, to a file, and ends the process.
    pub fn save(mut self, state: &Path) -> Result<()> {
        self.execute("stop", json!({}))?;
        self.migration_capabilities()?;
        self.execute("migrate", json!({ "uri": uri(state) }))?;
        self.wait_migration()?;
        self.execute("quit", json!({}))?;
        wait_at_most(&mut self.child, EXIT_LIMIT)?.context("QEMU does not end")?;
        Ok(())
    }

    /// Loads a saved state. The guest continues there once it is resumed.
    pub fn load(&mut self, state: &Path) -> Result<()> {
        self.migration_capabilities()?;
        self.execute("migrate-incoming", json!({ "uri": uri(state) }))?;
        self.wait_migration()
    }

    /// Plugs a disk in.
    pub fn plug(&mut self, disk: &Disk) -> Result<()> {
        self.execute("blockdev-add", disk.blockdev())?;
        self.execute("device_add", disk.device()).map(drop)
    }

    /// Pulls a disk out.
    pub fn unplug(&mut self, disk: &Disk) -> Result<()> {
        self.execute("device_del", json!({ "id": disk.device()["id"] }))?;
        let deadline = Instant::now() + EXIT_LIMIT;
        self.qmp.wait_event(&["DEVICE_DELETED"], deadline)?;
        self.execute("blockdev-del", json!({ "node-name": disk.serial })).map(drop)
    }

    /// Resets the machine, as its reset button would.
    pub fn reset(&mut self) -> Result<()> {
        self.qmp.clear_events();
        self.execute("system_reset", json!({}))?;
        self.qmp.wait_event(&["RESET"], Instant::now() + EXIT_LIMIT).map(drop)
    }

    /// Forgets the resets that there were.
    pub fn forget_resets(&mut self) {
        self.qmp.clear_events();
    }

    /// Waits until the guest has reset the machine by itself.
    pub fn wait_reset(&mut self, limit: Duration) -> Result<()> {
        self.qmp.wait_event(&["RESET"], Instant::now() + limit).map(drop)
    }

    /// Ends the process at once.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().context("cannot kill QEMU")?;
        wait_at_most(&mut self.child, EXIT_LIMIT)?.context("QEMU does not end")?;
        Ok(())
    }

    fn migration_capabilities(&mut self) -> Result<()> {
        // The memory is a file that both sides map: it is not part of the state.
        let capabilities =
            ["x-ignore-shared", "events"].map(|name| json!({ "capability": name, "state": true }));
        self.execute("migrate-set-capabilities", json!({ "capabilities": capabilities })).map(drop)
    }

    fn wait_migration(&mut self) -> Result<()> {
        let deadline = Instant::now() + STATE_LIMIT;
        loop {
            let event =
                self.qmp.wait_event(&["MIGRATION"], deadline).map_err(|error| with_log(error, &self.log))?;
            match event["data"]["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed") => {
                    return Err(with_log(anyhow!("QEMU could not move the state"), &self.log));
                }
                _ => {}
            }
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // It may have ended already, and an error has no recipient.
        let _ = self.kill();
    }
}

/// Kills a child that was started for nothing.
struct ChildGuard(Option<Child>);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn uri(path: &Path) -> String {
    format!("file:{}", path.display())
}

fn with_log(error: anyhow::Error, log: &Path) -> anyhow::Error {
    let messages = fs::read_to_string(log).unwrap_or_default();
    match messages.trim() {
        "" => error,
        messages => error.context(format!("QEMU said: {messages}")),
    }
}
