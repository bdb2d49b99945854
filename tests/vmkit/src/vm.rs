//! A virtual machine of a test.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::agent::{Agent, GuestCommand, Output, RunningCommand};
use crate::cache::RunDir;
use crate::console::ConsoleLog;
use crate::disk::{DataDisk, Disk, Durability, create_overlay, guest_path};
use crate::image::Image;
use crate::kernel::Kernel;
use crate::lan::Lan;
use crate::machine::{Hardware, Memory};
use crate::pack;
use crate::qemu::{Files, Qemu};
use crate::template::{BOOT_LIMIT, Template, standard_hardware, wait_booted};

/// The default time limit of a command.
const COMMAND_LIMIT: Duration = Duration::from_secs(120);

/// The guest's address on the network that only the harness reaches it by.
pub const HOST_SIDE: &str = "10.0.2.15";

/// The time limit for a clone to answer.
const CLONE_LIMIT: Duration = Duration::from_secs(60);

/// The options of a VM.
#[derive(Debug, Clone)]
#[must_use = "options do nothing until a VM is started with them"]
pub struct VmOptions {
    kernel: Kernel,
    name: String,
    data_disk: Option<DataDisk>,
    lan: Option<Lan>,
    icount: bool,
    vcpus: Option<u32>,
    memory_mib: Option<u32>,
    cold: bool,
    command_limit: Duration,
}

impl VmOptions {
    /// Returns the defaults: two CPUs, 2 GiB of memory, no data disk, no network but the harness's.
    pub fn new(kernel: Kernel) -> Self {
        Self {
            kernel,
            name: kernel.name().to_owned(),
            data_disk: None,
            lan: None,
            icount: false,
            vcpus: None,
            memory_mib: None,
            cold: false,
            command_limit: COMMAND_LIMIT,
        }
    }

    /// Sets the host name in the guest, also part of the names of its logs.
    pub fn name(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    /// Adds a disk for the test's data.
    pub fn data_disk(mut self, disk: DataDisk) -> Self {
        self.data_disk = Some(disk);
        self
    }

    /// Joins a network between VMs.
    pub fn lan(mut self, lan: &Lan) -> Self {
        self.lan = Some(lan.clone());
        self
    }

    /// Makes virtual time count instructions, so that measurements repeat.
    pub fn icount(mut self) -> Self {
        self.icount = true;
        self
    }

    /// Sets another number of CPUs; a template for it is baked at its first use.
    pub fn vcpus(mut self, vcpus: u32) -> Self {
        self.vcpus = Some(vcpus);
        self
    }

    /// Sets another amount of memory; a template for it is baked at its first use.
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = Some(memory_mib);
        self
    }

    /// Boots instead of cloning a template.
    pub fn cold(mut self) -> Self {
        self.cold = true;
        self
    }

    /// Sets the time limit of commands that set none themselves.
    pub fn command_limit(mut self, limit: Duration) -> Self {
        self.command_limit = limit;
        self
    }

    fn hardware(&self, image: &Image) -> Hardware {
        let standard = standard_hardware(image, self.kernel, self.icount);
        Hardware {
            vcpus: self.vcpus.unwrap_or(standard.vcpus),
            memory_mib: self.memory_mib.unwrap_or(standard.memory_mib),
            ..standard
        }
    }
}

/// A running virtual machine, ended and removed with this value.
#[derive(Debug)]
pub struct Vm {
    // Dropped in this order: the process before the folder it writes to.
    qemu: Option<Mutex<Qemu>>,
    agent: Agent,
    options: VmOptions,
    image: Image,
    data_disk: Option<Disk>,
    machine_id: String,
    lan_host: Option<u8>,
    next_pack: AtomicU32,
    dir: RunDir,
    console: Arc<ConsoleLog>,
}

impl Vm {
    /// Starts a VM and waits until it takes commands.
    pub fn start(options: VmOptions) -> Result<Self> {
        let image = Image::open()?;
        let hardware = options.hardware(&image);
        let dir = RunDir::create(&options.name)?;
        let console = Arc::new(ConsoleLog::create(&dir.name())?);
        let data_disk = options.data_disk.as_ref().map(|disk| disk.create(dir.path())).transpose()?;
        let mut vm = Self {
            qemu: None,
            agent: Agent::off(Arc::clone(&console)),
            image,
            data_disk,
            machine_id: random_machine_id()?,
            lan_host: options.lan.as_ref().map(Lan::join),
            next_pack: AtomicU32::new(0),
            options,
            dir,
            console,
        };
        if vm.options.cold {
            create_overlay(&vm.image.root_disk(), "raw", &vm.root_overlay())?;
            vm.boot()?;
        } else {
            let template = Template::open(&vm.image, hardware)?;
            create_overlay(&template.root_disk(), "qcow2", &vm.root_overlay())?;
            vm.clone_template(&template)?;
        }
        Ok(vm)
    }

    /// Runs a bash command to its end.
    pub fn run(&self, command: &str) -> Result<Output> {
        self.command(command).run()
    }

    /// Runs a bash script that must succeed, and returns its standard output without
    /// the last line break. The script ends at the first command that fails.
    pub fn sh(&self, script: &str) -> Result<String> {
        let argv = ["/bin/bash", "-e", "-o", "pipefail", "-c", script];
        let output = self.command_argv(&argv).run()?;
        if !output.success() {
            bail!("`{script}` failed in {}: {output}\n{}", self.options.name, self.console.failure());
        }
        Ok(output.text().trim_end_matches('\n').to_owned())
    }

    /// Starts a bash command in the background.
    pub fn spawn(&self, command: &str) -> Result<RunningCommand> {
        self.command(command).spawn()
    }

    /// Returns a bash command, to be run with more choices than [`Vm::run`] gives.
    pub fn command(&self, command: &str) -> GuestCommand {
        self.command_argv(&["/bin/bash", "-c", command])
    }

    /// Returns a program with its arguments, without a shell.
    pub fn command_argv(&self, argv: &[&str]) -> GuestCommand {
        GuestCommand::new(self.agent.clone(), argv, self.options.command_limit)
    }

    /// Copies files (host path, guest path, mode) into the guest. Folders are copied
    /// with all that is in them, and their files keep their modes.
    pub fn push<P: AsRef<Path>>(&self, files: &[(P, &str, u32)]) -> Result<()> {
        let number = self.next_pack.fetch_add(1, Ordering::Relaxed);
        let serial = format!("pack{number}");
        let path = self.dir.path().join(&serial);
        let entries = pack::write(files, &path)?;
        let disk = Disk { serial, path, durability: Durability::HostCache, read_only: true };
        self.with_qemu(|qemu| qemu.plug(&disk))?;
        self.agent
            .request(
                &json!({ "op": "unpack", "serial": disk.serial, "files": entries }),
                self.options.command_limit,
            )
            .with_context(|| format!("cannot copy files into {}", self.options.name))?;
        self.with_qemu(|qemu| qemu.unplug(&disk))?;
        fs::remove_file(&disk.path).with_context(|| format!("cannot remove {}", disk.path.display()))
    }

    /// Returns the content of a file in the guest.
    pub fn pull(&self, guest_path: &str) -> Result<Vec<u8>> {
        let output = self.command_argv(&["cat", "--", guest_path]).run()?;
        if !output.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            bail!("cannot read {guest_path} in {}: {}", self.options.name, stderr.trim());
        }
        Ok(output.stdout)
    }

    /// Has the host's loopback lead to the guest: its `host_port` to the guest's `guest_port` on
    /// [`HOST_SIDE`]. It lasts until the machine is off.
    pub fn forward(&self, host_port: u16, guest_port: u16) -> Result<()> {
        self.with_qemu(|qemu| qemu.forward(host_port, guest_port))
    }

    /// Ends the machine like a power cut: the guest gets no notice, and the data disk behaves by its
    /// [`Durability`]. See [`Vm::cold_start`].
    pub fn power_cut(&mut self) -> Result<()> {
        let result = match self.qemu.take() {
            Some(qemu) => qemu.into_inner().unwrap_or_else(PoisonError::into_inner).kill(),
            None => bail!("{} is off", self.options.name),
        };
        self.agent.disconnect_all();
        self.agent = Agent::off(Arc::clone(&self.console));
        result
    }

    /// Boots the machine again with its disks after a power cut.
    pub fn cold_start(&mut self) -> Result<()> {
        if self.qemu.is_some() {
            bail!("{} is running", self.options.name);
        }
        self.boot()
    }

    /// Resets the machine without a shutdown of the guest, and waits until it has booted.
    pub fn crash_reboot(&mut self) -> Result<()> {
        self.with_qemu(Qemu::reset)?;
        self.agent.disconnect_all();
        self.wait_booted()?;
        self.identify()
    }

    /// Shuts the guest down in order and boots it again. The test fails unless it is down after `limit`.
    pub fn orderly_reboot(&mut self, limit: Duration) -> Result<()> {
        self.with_qemu(|qemu| {
            qemu.forget_resets();
            Ok(())
        })?;
        // The guest's agent ends with the others, perhaps before it has answered.
        let _ = self.run("systemctl reboot --no-block");
        self.with_qemu(|qemu| qemu.wait_reset(limit)).with_context(|| {
            format!("{} does not shut down\n{}", self.options.name, self.console.failure())
        })?;
        self.agent.disconnect_all();
        self.wait_booted()?;
        self.identify()
    }

    /// Returns the host name in the guest.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// Returns the guest's address on the network between VMs.
    pub fn lan_address(&self) -> Option<String> {
        self.lan_host.map(Lan::address)
    }

    /// Returns the file with the guest's kernel and boot messages. It is kept after a failure.
    pub fn console_log(&self) -> &Path {
        self.console.path()
    }

    pub(crate) fn agent(&self) -> &Agent {
        &self.agent
    }

    fn root_overlay(&self) -> PathBuf {
        self.dir.path().join("root.qcow2")
    }

    fn with_qemu<T>(&self, action: impl FnOnce(&mut Qemu) -> Result<T>) -> Result<T> {
        let Some(qemu) = &self.qemu else { bail!("{} is off", self.options.name) };
        // The protocol is in step between calls, even if a caller panicked.
        action(&mut qemu.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn start_qemu(&self, memory: Memory) -> Result<Qemu> {
        let files = Files {
            dir: self.dir.path(),
            console: self.console.path(),
            root_overlay: &self.root_overlay(),
            lan: self.options.lan.as_ref(),
        };
        Qemu::start(&self.image, self.options.hardware(&self.image), memory, &files)
    }

    fn clone_template(&mut self, template: &Template) -> Result<()> {
        let mut qemu = self.start_qemu(Memory::Cloned(template.memory()))?;
        qemu.load(&template.state())?;
        if let Some(disk) = &self.data_disk {
            qemu.plug(disk)?;
        }
        qemu.resume()?;
        self.connect(qemu)?;
        self.identify()
    }

    fn boot(&mut self) -> Result<()> {
        let mut qemu = self.start_qemu(Memory::Anonymous)?;
        if let Some(disk) = &self.data_disk {
            qemu.plug(disk)?;
        }
        qemu.resume()?;
        self.connect(qemu)?;
        self.wait_booted()?;
        self.identify()
    }

    fn wait_booted(&self) -> Result<()> {
        wait_booted(&self.agent).or_else(|error| {
            let state = self.with_qemu(|qemu| Ok(qemu.describe()))?;
            Err(error.context(state))
        })
    }

    fn connect(&mut self, mut qemu: Qemu) -> Result<()> {
        self.agent = Agent::new(qemu.agent_port()?, Arc::clone(&self.console));
        self.qemu = Some(Mutex::new(qemu));
        Ok(())
    }

    /// Sets the guest's identity and mounts its data disk.
    fn identify(&self) -> Result<()> {
        let time = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .context("the clock is before 1970")?
            .as_secs_f64();
        let lan = self.lan_host.map(|host| {
            json!({ "mac": format!("52:54:00:05:41:{host:02x}"),
                    "address": format!("{}/24", Lan::address(host)) })
        });
        let request = json!({
            "op": "identify",
            "hostname": self.options.name,
            "machine_id": self.machine_id,
            "time": time,
            "lan": lan,
            "disk": self.mount_request(),
        });
        let limit = if self.options.cold { BOOT_LIMIT } else { CLONE_LIMIT };
        self.agent.request(&request, limit).with_context(|| format!("cannot set up {}", self.options.name))
    }

    fn mount_request(&self) -> Option<Value> {
        let disk = self.options.data_disk.as_ref()?;
        let serial = &self.data_disk.as_ref()?.serial;
        Some(json!({
            "serial": serial,
            "device": guest_path(serial),
            "type": disk.file_system.map(|file_system| file_system.name()),
            "mount_point": disk.mount_point,
        }))
    }
}

fn random_machine_id() -> Result<String> {
    let path = "/proc/sys/kernel/random/uuid";
    let uuid = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    Ok(uuid.trim().replace('-', ""))
}
