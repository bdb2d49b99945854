//! The frontend ublk: /dev/ublkbN, a block device whose requests this process serves.
//!
//! device.rs makes, starts and stops the device. Every queue fetches its tags on its own thread. A process
//! that ends without a stop leaves the device behind with its requests waiting. The next one takes it over
//! (recovery.rs). Nothing here deletes a device in a destructor.
//!
//! Interface: `linux/ublk_cmd.h`, `Documentation/block/ublk.rst`; Linux 6.5 or later.

mod abi;
mod control;
mod device;
mod fetching;
mod mark;
mod privilege;
mod queue;
mod recovery;
mod stuck;

use std::io;
use std::path::Path;
use std::time::Duration;

use control::ControlDevice;

use crate::{FrontendError, FrontendKind};

pub use device::prepare_ublk;
pub use recovery::remove_leftovers;

/// The required features of the driver, with their names.
pub(crate) const REQUIRED_FEATURES: [(u64, &str); 3] = [
    (abi::F_USER_RECOVERY, "recovery (UBLK_F_USER_RECOVERY)"),
    (abi::F_USER_RECOVERY_REISSUE, "repetition of requests after a recovery (UBLK_F_USER_RECOVERY_REISSUE)"),
    (abi::F_CMD_IOCTL_ENCODE, "encoded commands (UBLK_F_CMD_IOCTL_ENCODE)"),
];

/// Commands that only change state in the driver: milliseconds, or a driver that hangs.
const COMMAND_LIMIT: Duration = Duration::from_secs(10);
/// START_DEV makes the block device, and udev may open it before the command is over.
const START_LIMIT: Duration = Duration::from_secs(30);
/// STOP_DEV waits for the requests in flight, which end by the time-outs of the replicas.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// Returns the features of the driver of this kernel, as bits `UBLK_F_*`.
pub(crate) fn features(limit: Duration) -> io::Result<u64> {
    ControlDevice::open()?.features(limit)
}

/// Deletes a device that has no block device any more, and before that its mark: the number is free at once.
fn delete(control: &mut ControlDevice, id: u32, device_dir: &Path) -> Result<(), FrontendError> {
    mark::remove(device_dir, id)
        .map_err(during(format!("remove {}", mark::path(device_dir, id).display())))?;
    let deleted = match control.run(abi::CMD_DEL_DEV_ASYNC, id, 0, COMMAND_LIMIT) {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            // Before Linux 6.7. It waits until the queues, whose tags have all ended, have closed the device.
            control.run(abi::CMD_DEL_DEV, id, 0, COMMAND_LIMIT)
        }
        other => other,
    };
    unless_gone(deleted).map_err(during(format!("delete ublk device {id}")))
}

/// Ignores the error that a device does not exist, because that is the aim of its deletion.
fn unless_gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        other => other,
    }
}

fn unsupported(reason: String) -> FrontendError {
    FrontendError::Unsupported { frontend: FrontendKind::Ublk, reason }
}

/// Makes an error that names the failed action, and explains answers of the driver that say little.
fn during(action: String) -> impl FnOnce(io::Error) -> FrontendError {
    move |source| {
        let hint = match source.raw_os_error() {
            None if source.kind() == io::ErrorKind::TimedOut => {
                " (if the kernel log shows a crash in ublk_drv: use another kernel, or the frontend nbd)"
            }
            // Linux before 6.15 counts the devices of root as well.
            Some(libc::EACCES) => {
                " (see /sys/module/ublk_drv/parameters/ublks_max, the maximum number of devices)"
            }
            Some(libc::EPERM) => " (it needs the capability CAP_SYS_ADMIN)",
            _ => "",
        };
        FrontendError::System { action: action + hint, source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait;

    #[test]
    fn a_hanging_command_names_the_kernel_log() {
        let error = during("make a ublk device".into())(wait::timed_out(START_LIMIT)).to_string();
        assert!(error.contains("no answer within 30s") && error.contains("kernel log"), "{error}");
        let error =
            during("make a ublk device".into())(io::Error::from_raw_os_error(libc::ENOMEM)).to_string();
        assert!(!error.contains("kernel log"), "{error}");
    }
}
