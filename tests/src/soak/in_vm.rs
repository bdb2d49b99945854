//! The same in a virtual machine, with a device of its kernel.

use std::time::Duration;

use anyhow::{Context, Result};
use shorthorn_vmkit::Kernel;

use crate::{VmHost, binary};

/// What the hosts of a volume need beside the programs.
const MODULES: &str = "modprobe -a loop veth bridge && { modprobe ublk_drv || modprobe nbd; }";

/// Runs shorthorn-soak with these arguments in a new machine; returns what it printed, and whether it has passed.
///
/// # Errors
/// The machine does not start, or the program does not end within `limit`.
pub fn run_in_vm(kernel: Kernel, arguments: &[String], limit: Duration) -> Result<(String, bool)> {
    let host = VmHost::bare(VmHost::options(kernel).command_limit(limit))?;
    host.vm.push(&[(binary("shorthorn-soak")?, "/usr/bin/shorthorn-soak", 0o755)])?;
    host.vm.sh(MODULES).context("loading modules")?;
    let line = arguments.join(" ");
    let told = host.vm.run(&format!(
        "SHORTHORN_BIN_DIR=/usr/bin shorthorn-soak {line} --dir /var/lib/longhorn 2>&1; code=$?; \
         [ $code = 0 ] || tail -n 40 /var/lib/longhorn/soak*/v*/engine.log; exit $code"
    ))?;
    Ok((told.text(), told.success()))
}
