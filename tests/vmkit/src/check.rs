//! Checks the abilities of every template.

use std::time::Instant;

use anyhow::{Result, bail, ensure};

use crate::image::Image;
use crate::kernel::Kernel;
use crate::vm::{Vm, VmOptions};

/// Starts a VM with that kernel and checks its properties. Returns a line about it.
pub fn check_template(kernel: Kernel) -> Result<String> {
    let started = Instant::now();
    let vm = Vm::start(VmOptions::new(kernel))?;
    let uname = vm.sh("uname -r")?;
    let ready = started.elapsed();

    let expected = Image::open()?.kernel_version(kernel)?;
    ensure!(uname == expected, "the guest runs kernel {uname}, not {expected}");
    let state = vm.run("systemctl is-system-running")?.text();
    if state.trim() != "running" {
        let failed = vm.run("systemctl --failed --no-legend")?.text();
        bail!("systemd is {}, not running: {}", state.trim(), failed.trim());
    }

    let has_ublk = loads(&vm, "ublk_drv", "/dev/ublk-control")?;
    let has_nbd = loads(&vm, "nbd", "/dev/nbd0")?;
    ensure!(
        has_ublk == kernel.has_ublk(),
        "a VM for {kernel} {} ublk",
        if has_ublk { "has" } else { "has no" }
    );
    ensure!(has_nbd == kernel.has_nbd(), "a VM for {kernel} {} NBD", if has_nbd { "has" } else { "has no" });
    Ok(format!(
        "{kernel}: kernel {uname}, systemd running, ublk {has_ublk}, nbd {has_nbd}, \
         first command after {:.1} s",
        ready.as_secs_f32()
    ))
}

fn loads(vm: &Vm, module: &str, device: &str) -> Result<bool> {
    let output = vm.run(&format!("modprobe {module} && udevadm settle && test -e {device}"))?;
    Ok(output.success())
}
