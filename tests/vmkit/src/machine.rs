//! The virtual hardware: one fixed machine, described to QEMU.
//!
//! A saved machine can be loaded only into the same hardware. One description serves for baking a template,
//! for cloning it and for booting cold. Parts that differ between VMs (disks, files) are plugged in later.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use crate::image::Image;
use crate::kernel::{Accelerator, Kernel};
use crate::lan::Lan;

/// The port the guest's agent listens on.
const AGENT_PORT: u16 = 5407;

/// The bus that disks are plugged into while the machine runs.
pub const DISK_BUS: &str = "disks.0";

/// The name QEMU gives the port forwarding on its command line and in its tables.
pub const CONTROL_NETWORK: &str = "control";

/// The properties that two VMs must share to use one template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hardware {
    pub kernel: Kernel,
    pub accelerator: Accelerator,
    pub vcpus: u32,
    pub memory_mib: u32,
    /// Virtual time counts instructions: timings repeat, on any host under any load.
    pub icount: bool,
}

/// The storage of the guest's memory.
#[derive(Debug)]
pub enum Memory {
    /// A file that the machine writes to: the template being baked.
    Baked(PathBuf),
    /// The template's file, private to this machine page by page once written.
    Cloned(PathBuf),
    /// No file: a machine that boots cold.
    Anonymous,
}

/// The parameters of a QEMU process.
#[derive(Debug)]
pub struct Machine<'a> {
    pub hardware: Hardware,
    pub image: &'a Image,
    pub memory: Memory,
    pub root_overlay: &'a Path,
    pub console: &'a Path,
    pub qmp: RawFd,
    pub lan: Option<&'a Lan>,
}

impl Machine<'_> {
    /// Returns the arguments that start it: stopped, or waiting for the template's state.
    pub fn arguments(&self) -> Vec<OsString> {
        let mut arguments = hardware_arguments(self.hardware, self.image);
        let mut add = |name: &str, value: String| {
            arguments.push(name.into());
            arguments.push(value.into());
        };
        let memory_mib = self.hardware.memory_mib;
        let backed_by = |path: &Path, share: &str| {
            let path = escape(path);
            format!("memory-backend-file,id=ram,size={memory_mib}M,mem-path={path},share={share}")
        };
        match &self.memory {
            Memory::Baked(path) => add("-object", backed_by(path, "on")),
            Memory::Cloned(path) => {
                add("-object", backed_by(path, "off"));
                add("-incoming", "defer".to_owned());
            }
            Memory::Anonymous => {
                add("-object", format!("memory-backend-ram,id=ram,size={memory_mib}M"));
            }
        }
        // The caller lets it run when all disks are plugged in.
        if !matches!(self.memory, Memory::Cloned(_)) {
            add("-S", String::new());
        }
        // No flush reaches the host's disk: the root disk lives as long as its VM, and
        // it survives QEMU's death in the host's page cache.
        add(
            "-blockdev",
            serde_json::json!({
                "driver": "qcow2", "node-name": "root",
                "cache": { "no-flush": true },
                "file": { "driver": "file", "filename": self.root_overlay },
            })
            .to_string(),
        );
        add("-chardev", format!("file,id=console,append=on,path={}", escape(self.console)));
        add("-chardev", format!("socket,id=qmp,fd={}", self.qmp));
        add(
            "-netdev",
            match self.lan {
                Some(lan) => lan.netdev("lan"),
                None => "hubport,id=lan,hubid=0".to_owned(),
            },
        );
        arguments.retain(|argument| !argument.is_empty());
        arguments
    }
}

/// The default model with the instructions for CRC-32C: emulating the table takes longer.
const TCG_CPU: &str = "qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt";

/// Returns the part of the command line that a template's key is made of: no path in it depends on the VM.
pub fn hardware_arguments(hardware: Hardware, image: &Image) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = Vec::new();
    let mut add = |name: &str, value: &str| {
        arguments.push(name.into());
        arguments.push(value.into());
    };
    add("-machine", "q35,memory-backend=ram");
    add("-m", &format!("{}M", hardware.memory_mib));
    add("-smp", &hardware.vcpus.to_string());
    match (hardware.accelerator, hardware.icount) {
        (Accelerator::Kvm, _) => {
            add("-accel", "kvm");
            add("-cpu", "host");
        }
        (Accelerator::Tcg, false) => {
            add("-accel", "tcg,thread=multi");
            add("-cpu", TCG_CPU);
        }
        (Accelerator::Tcg, true) => {
            add("-accel", "tcg,thread=single");
            // A nanosecond of virtual time per instruction, of both processors together.
            add("-icount", "shift=0");
        }
    }
    // Reseeds the random generator of a clone.
    add("-device", "vmgenid,guid=auto");
    add("-device", "virtio-blk-pci,drive=root,addr=3");
    add("-device", "virtio-scsi-pci,id=disks,addr=4");
    // Nothing gets out of the guest; the host reaches its agent on a port that the
    // kernel chooses.
    add("-netdev", &format!("user,id={CONTROL_NETWORK},restrict=on,hostfwd=tcp:127.0.0.1:0-:{AGENT_PORT}"));
    add("-device", "virtio-net-pci,netdev=control,addr=5,mac=52:54:00:05:40:70,romfile=");
    add("-device", "virtio-net-pci,netdev=lan,addr=6,mac=52:54:00:05:40:71,romfile=");
    add("-serial", "chardev:console");
    add("-mon", "chardev=qmp,mode=control");
    for flag in ["-nodefaults", "-no-user-config"] {
        add(flag, "");
    }
    add("-display", "none");
    add("-append", &command_line(hardware.kernel));
    let kernel = image.kernel_dir(hardware.kernel);
    arguments.push("-kernel".into());
    arguments.push(kernel.join("vmlinuz").into());
    arguments.push("-initrd".into());
    arguments.push(kernel.join("initramfs.gz").into());
    arguments
}

fn command_line(kernel: Kernel) -> String {
    // Without predictable names the two network cards are eth0 and eth1.
    let mut line = "console=ttyS0 loglevel=5 systemd.show_status=auto net.ifnames=0".to_owned();
    // Emulated CPUs are safe from the attacks, and pay for the defences.
    line += " mitigations=off";
    // Linux 6.1 takes emulated TSCs for unsynchronised. Each other clock is a device, which costs three times
    // as much to read.
    line += " tsc=reliable";
    line += kernel.blacklist();
    line
}

/// Escapes commas: QEMU ends an option at a comma; two commas stand for one.
fn escape(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}
