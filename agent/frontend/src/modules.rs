//! Kernel modules of frontends: loads them, and explains how to get one that is missing.

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::host::Host;
use crate::wait;

/// The control device of the ublk driver.
pub(crate) const CONTROL_PATH: &str = "/dev/ublk-control";
/// The time limit of loading a module, which takes milliseconds unless it hangs.
const MODPROBE_LIMIT: Duration = Duration::from_secs(10);
/// devtmpfs makes nodes before the module has loaded; udev alone needs a moment.
const NODE_LIMIT: Duration = Duration::from_secs(2);
const UBLK_MODULE: &str = "ublk_drv";
pub(crate) const NBD_MODULE: &str = "nbd";
/// The number of partitions of a device that the driver NBD reads. It is fixed when the driver is loaded.
const NBD_PARTITIONS: &str = "/sys/module/nbd/parameters/max_part";
/// The way to a driver NBD that reads no partition tables.
pub const NBD_PARTITIONS_REMEDY: &str = "modprobe -r nbd && modprobe nbd max_part=0 # if no NBD device is in \
                                         use; a driver in the kernel itself needs nbd.max_part=0 on its \
                                         command line";

/// Loads the ublk driver unless it is loaded.
pub(crate) fn load_ublk() -> Result<(), MissingModule> {
    let node = Path::new(CONTROL_PATH);
    if node.exists() {
        return Ok(());
    }
    load(UBLK_MODULE)?;
    let seen = wait::until(NODE_LIMIT, || Ok::<_, ()>(node.exists().then_some(())));
    if seen == Ok(Some(())) {
        return Ok(());
    }
    Err(MissingModule {
        module: UBLK_MODULE,
        reason: format!("module loaded, but {CONTROL_PATH} does not exist"),
    })
}

/// Loads the NBD driver unless it is loaded.
pub(crate) fn load_nbd() -> Result<(), MissingModule> {
    if is_loaded(NBD_MODULE) { Ok(()) } else { load(NBD_MODULE) }
}

/// Returns the number of partitions that the kernel of this host reads of an NBD device. None if the driver
/// is not loaded.
#[must_use]
pub fn nbd_partitions_max() -> Option<u32> {
    std::fs::read_to_string(NBD_PARTITIONS).ok()?.trim().parse().ok()
}

/// A kernel module is missing.
#[derive(Debug, thiserror::Error)]
#[error("cannot load the kernel module {module}: {reason}; {}", remedy(.module))]
pub(crate) struct MissingModule {
    module: &'static str,
    reason: String,
}

fn remedy(module: &str) -> &'static str {
    match module {
        UBLK_MODULE => {
            "use Linux 6.5 or later with CONFIG_BLK_DEV_UBLK (Debian 12: a kernel of \
             bookworm-backports; Ubuntu: linux-modules-extra of this kernel)"
        }
        NBD_MODULE => "use a kernel with CONFIG_BLK_DEV_NBD (Ubuntu: linux-modules-extra of this kernel)",
        _ => "iSCSI needs a kernel with CONFIG_ISCSI_TCP and CONFIG_FUSE_FS",
    }
}

/// Returns true if the running kernel has the module.
pub(crate) fn is_loaded(module: &str) -> bool {
    Path::new("/sys/module").join(module).exists()
}

fn load(module: &'static str) -> Result<(), MissingModule> {
    modprobe(module, &[])
}

/// Runs modprobe on the host, within a limit.
pub(crate) fn modprobe(module: &'static str, options: &'static [&'static str]) -> Result<(), MissingModule> {
    let missing = |reason: String| MissingModule { module, reason };
    let output = wait::within(MODPROBE_LIMIT, move || {
        Host::here().command("modprobe").args(options).arg(module).stdin(Stdio::null()).output()
    });
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.trim();
            Err(missing(if said.is_empty() {
                format!("modprobe: {}", output.status)
            } else {
                said.to_owned()
            }))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(missing("no modprobe (package kmod)".into()))
        }
        Err(error) => Err(missing(format!("modprobe: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_module_is_named_with_a_remedy() {
        let text = load("no-such-module").unwrap_err().to_string();
        assert!(text.contains("kernel module no-such-module"), "{text}");
        let missing = MissingModule { module: UBLK_MODULE, reason: "not found".into() };
        assert!(missing.to_string().contains("CONFIG_BLK_DEV_UBLK"), "{missing}");
    }
}
