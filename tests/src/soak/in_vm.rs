//! The same in a virtual machine, with a device of its kernel.

use std::time::Duration;

use anyhow::{Context, Result};
use shorthorn_vmkit::{Kernel, print_output};

use crate::{VmHost, binary};

/// Loads the modules that the hosts of a volume need besides the programs.
const MODULES: &str = "modprobe -a loop veth bridge tls && { modprobe ublk_drv || modprobe nbd; }";

/// The number of lines to show of the logs and the kernel after a failed run.
const LOG_LINES: u32 = 200;

/// Runs shorthorn-soak with these arguments in a new machine, and prints its output meanwhile; returns
/// whether it has passed. If not, the ends of the logs of engines and kernel follow: the machine is gone
/// after that.
///
/// # Errors
/// The machine does not start, or the program does not end within `limit`.
pub fn run_in_vm(kernel: Kernel, arguments: &[String], limit: Duration) -> Result<bool> {
    let host = VmHost::bare(VmHost::options(kernel))?;
    host.vm.push(&[(binary("shorthorn-soak")?, "/usr/bin/shorthorn-soak", 0o755)])?;
    host.vm.sh(MODULES).context("loading modules")?;
    let line = arguments.join(" ");
    let script = format!(
        "uname -r; SHORTHORN_BIN_DIR=/usr/bin shorthorn-soak {line} --dir /var/lib/longhorn 2>&1; code=$?; [ \
         $code = 0 ] || {{ tail -n {LOG_LINES} /var/lib/longhorn/soak*/v*/*.log; dmesg | tail -n \
         {LOG_LINES}; }}; exit $code"
    );
    Ok(host.vm.command(&script).limit(limit).run_streaming(print_output)?.success())
}
