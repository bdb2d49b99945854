//! Templates: machines that were booted, saved while they ran, and are cloned.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::agent::{Agent, GuestCommand};
use crate::cache;
use crate::console::ConsoleLog;
use crate::disk::create_overlay;
use crate::image::Image;
use crate::kernel::{Accelerator, Kernel};
use crate::machine::{Hardware, Memory, hardware_arguments};
use crate::qemu::{Files, Qemu};

/// Longest cold boot: some 15 s alone, several times that on a busy machine.
pub const BOOT_LIMIT: Duration = Duration::from_secs(180);

/// Raised when templates made by older code cannot be used any more.
const FORMAT: u32 = 1;

/// The commands that prepare every clone: they load the modules for hot-plugged disks and mounts, and write
/// back the changes of this boot.
const WARM_UP: &str = "modprobe -a sd_mod xfs && udevadm settle && sync";

/// A saved machine in the cache.
#[derive(Debug, Clone)]
pub struct Template {
    dir: PathBuf,
}

impl Template {
    /// Opens the template for that hardware; bakes it first if need be.
    pub fn open(image: &Image, hardware: Hardware) -> Result<Self> {
        let dir = image.dir().join("templates").join(key(image, hardware));
        let template = Self { dir };
        if template.is_complete() {
            return Ok(template);
        }
        let parent = image.dir().join("templates");
        fs::create_dir_all(&parent).with_context(|| format!("cannot create {}", parent.display()))?;
        let lock = cache::lock_file(&parent.join(".lock"))?;
        lock.lock().context("cannot lock the templates")?;
        if !template.is_complete() {
            bake(image, hardware, &template.dir)
                .with_context(|| format!("cannot bake {}", template.dir.display()))?;
        }
        Ok(template)
    }

    /// Returns the file that is the guest's memory.
    pub(crate) fn memory(&self) -> PathBuf {
        self.dir.join("memory")
    }

    /// Returns the file with the state of the machine, apart from memory and disk.
    pub(crate) fn state(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// Returns the root disk as it was when the machine was saved.
    pub(crate) fn root_disk(&self) -> PathBuf {
        self.dir.join("root.qcow2")
    }

    fn is_complete(&self) -> bool {
        // The folder is renamed into place when all is written.
        self.dir.exists()
    }
}

/// The kernels of the templates that the tests and benchmarks use. True means that virtual time counts
/// instructions.
const STANDARD: [(Kernel, bool); 4] =
    [(Kernel::Ublk, false), (Kernel::Nbd, false), (Kernel::Newest, false), (Kernel::Ublk, true)];

/// Bakes the templates that the tests and benchmarks use, or only that of one kernel.
pub fn prepare(image: &Image, only: Option<Kernel>, mut progress: impl FnMut(&str)) -> Result<()> {
    let chosen: Vec<(Kernel, bool)> = match only {
        Some(kernel) => vec![(kernel, false)],
        None => STANDARD.to_vec(),
    };
    for (kernel, icount) in chosen {
        let started = Instant::now();
        Template::open(image, standard_hardware(image, kernel, icount))?;
        let clock = if icount { " with icount" } else { "" };
        progress(&format!("template {kernel}{clock}: {:.1} s", started.elapsed().as_secs_f32()));
    }
    Ok(())
}

/// Returns the hardware of a VM that asks for nothing special.
pub fn standard_hardware(image: &Image, kernel: Kernel, icount: bool) -> Hardware {
    // Instructions can be counted only if they are emulated.
    let accelerator = if icount { Accelerator::Tcg } else { image.accelerator() };
    Hardware { kernel, accelerator, vcpus: 2, memory_mib: 2048, icount }
}

fn key(image: &Image, hardware: Hardware) -> String {
    let mut hasher = DefaultHasher::new();
    FORMAT.hash(&mut hasher);
    WARM_UP.hash(&mut hasher);
    hardware_arguments(hardware, image).hash(&mut hasher);
    if hardware.accelerator == Accelerator::Kvm {
        // The guest has seen the features of this very CPU.
        fs::read_to_string("/proc/cpuinfo")
            .unwrap_or_default()
            .lines()
            .filter(|line| line.starts_with("model name") || line.starts_with("flags"))
            .take(2)
            .for_each(|line| line.hash(&mut hasher));
    }
    let Hardware { kernel, accelerator, vcpus, memory_mib, icount } = hardware;
    let accelerator = if icount { "icount" } else { accelerator.name() };
    format!("{kernel}-{accelerator}-{vcpus}cpu-{memory_mib}m-{:016x}", hasher.finish())
}

fn bake(image: &Image, hardware: Hardware, target: &Path) -> Result<()> {
    let partial = target.with_extension(format!("partial-{}", process::id()));
    remove_partials(target)?;
    fs::create_dir(&partial).with_context(|| format!("cannot create {}", partial.display()))?;
    let template = Template { dir: partial.clone() };
    let root_disk = template.root_disk();
    create_overlay(&image.root_disk(), "raw", &root_disk)?;

    let console = Arc::new(ConsoleLog::create(&format!("bake-{}-{}", hardware.kernel, process::id()))?);
    let files = Files { dir: &partial, console: console.path(), root_overlay: &root_disk, lan: None };
    let memory = Memory::Baked(template.memory());
    let mut qemu = Qemu::start(image, hardware, memory, &files)?;
    let agent = Agent::new(qemu.agent_port()?, Arc::clone(&console));
    qemu.resume()?;
    wait_booted(&agent)?;
    let output = GuestCommand::new(agent.clone(), &["/bin/bash", "-c", WARM_UP], BOOT_LIMIT).run()?;
    if !output.success() {
        bail!("{WARM_UP}: {output}\n{}", console.failure());
    }
    drop(agent);
    qemu.save(&template.state())?;
    fs::rename(&partial, target).with_context(|| format!("cannot create {}", target.display()))
}

/// Removes the remains of killed bakes; the caller holds the lock.
fn remove_partials(target: &Path) -> Result<()> {
    let Some(parent) = target.parent() else { return Ok(()) };
    for entry in fs::read_dir(parent)? {
        let path = entry?.path();
        if path.to_string_lossy().contains(".partial-") {
            fs::remove_dir_all(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// Waits until systemd has started everything it starts at boot.
pub fn wait_booted(agent: &Agent) -> Result<()> {
    let deadline = Instant::now() + BOOT_LIMIT;
    agent.wait_ready(deadline)?;
    let argv = ["systemctl", "is-system-running", "--wait"];
    // Its status lists failed units, which a test has to judge.
    GuestCommand::new(agent.clone(), &argv, deadline.saturating_duration_since(Instant::now()))
        .run()
        .map(drop)
}
