//! Takes over, or removes, the devices of a process that has ended.
//!
//! The driver keeps them. When the process of a started device dies, the driver notices once all its
//! descriptors are closed. It sets the device QUIESCED: requests wait, without a limit. Then a new process
//! continues (START_USER_RECOVERY, fetch all tags, END_USER_RECOVERY), or the device is stopped and the
//! requests fail.
//!
//! The driver of Linux 6.7 to 6.14 notices the end of a process by its rings (`ublk_uring_cmd_cancel_fn` and
//! `ublk_timeout` in drivers/block/ublk_drv.c). Their closing cancels the commands that wait for requests. If
//! a queue has none of them because every tag is at the process, the timer of a request has to run out first.
//! That takes 30 s by default: see [`notice_deaths_soon`]. Earlier drivers look for dead processes every few
//! seconds; later ones act when the character device is closed.
//!
//! **A thread of a queue ends before its ring is closed.** When the driver cancels, it takes back the
//! requests that it has delivered, once. io_uring (`io_move_task_work_from_local` in 6.12) makes the owner of
//! the ring run the deliveries that wait. If that thread still lives, they are delivered after the
//! cancellation. They are not taken back, and the driver waits for them without a limit, holding the lock
//! that STOP_DEV needs too. If the thread has ended, a kernel thread runs them and gives the requests back.
//! So a process that leaves a device never closes a ring (`Ring::leave_open`): the kernel does it when the
//! process has ended, as after `kill -9`.
//!
//! Known gap: the kernel closes the rings when the last thread has ended. A thread that waits in the kernel
//! for the device itself cannot end, and its process keeps the device. Such waits are STOP_DEV, or the flush
//! before it, while replicas do not answer.
//!
//! Numbers of devices are given again, so a number alone says nothing after a restart of the host. Every
//! device carries the identity of its volume in the field that the driver keeps for its server.
//!
//! Known gap (before Linux 6.15): the new process may die as well. That may be after a queue has mapped its
//! descriptors and before all of its tags were fetched. Then the driver takes no third process, and the
//! device can only be stopped. That is why a queue maps and fetches in one step, and why this is the last
//! step of a starting engine. The third process reports it: see `fetching.rs`.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use shorthorn_types::VolumeName;

use super::abi::{self, DeviceInfo};
use super::control::ControlDevice;
use super::{COMMAND_LIMIT, STOP_LIMIT, delete, during, stuck, unless_gone};
use crate::node::remove_node_first;
use crate::{FrontendError, kernel_release, modules, node, queue_attribute, wait};

/// The time limit for the descriptors of a dead process to be closed. Its memory has to be freed first, and
/// its I/O on a slow disk has to end. The limit is longer than the block layer's default timer of requests.
const DEAD_SERVER_LIMIT: Duration = Duration::from_secs(45);
/// The interval in which the driver checks whether the process of an unanswered request is dead. The block
/// layer rounds it up by a second.
const REQUEST_TIMER_MS: u32 = 1000;
/// The directory in which the driver lists its devices.
const CLASS: &str = "/sys/class/ublk-char";

/// Returns the mark of a device of `volume`: FNV-1a, 64 bits, of its name behind a prefix of Shorthorn.
pub(super) fn identity(volume: &VolumeName) -> u64 {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    let bytes = b"shorthorn/".iter().chain(volume.as_str().as_bytes());
    bytes.fold(BASIS, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME))
}

/// Prepares device `id` of `volume` for this process. None if it cannot be taken over: the device is gone,
/// belongs to another volume, or was never started.
pub(super) fn take_over(
    control: &mut ControlDevice,
    id: u32,
    volume: &VolumeName,
) -> Result<Option<DeviceInfo>, FrontendError> {
    let (mut server_pid, mut reason) = (0, "");
    let taken = wait::until(DEAD_SERVER_LIMIT, || {
        let info = control.info(id, COMMAND_LIMIT)?.filter(|info| info.server_flags == identity(volume));
        let Some(info) = info.filter(|info| info.state != abi::STATE_DEAD) else { return Ok(Some(None)) };
        if info.state != abi::STATE_QUIESCED {
            // The driver has not noticed yet, or the process lives.
            (server_pid, reason) =
                (info.server_pid, if info.server_pid > 0 { STILL_LIVE } else { STILL_OPEN });
            return Ok(None);
        }
        match control.run(abi::CMD_START_USER_RECOVERY, id, 0, COMMAND_LIMIT) {
            Ok(()) => Ok(Some(Some(info))),
            Err(error) => match error.raw_os_error() {
                Some(libc::EBUSY) => {
                    (server_pid, reason) = (info.server_pid, STILL_OPEN);
                    Ok(None)
                }
                // This was done before, by a process that died before it fetched a tag.
                Some(libc::EINVAL) => Ok(Some(Some(info))),
                _ => Err(error),
            },
        }
    });
    if matches!(taken, Ok(None)) {
        stuck::log(id, volume, server_pid);
    }
    taken
        .and_then(|taken| taken.ok_or_else(|| wait::timed_out(DEAD_SERVER_LIMIT)))
        .map_err(during(format!("take over ublkb{id} of {volume} from {}{reason}", server(server_pid))))
}

const STILL_LIVE: &str =
    ": the driver still waits for it (state LIVE; see the lines with \"stuck device\" in the log)";
const STILL_OPEN: &str = ": the character device is still open, or the io_uring has not ended; see the lines \
                          with \"stuck device\" in the log";

/// Describes the process of a device. From Linux 6.15 on, a driver that knows of the end of a process forgets
/// its number. It keeps the state LIVE until the character device is closed.
fn server(pid: i32) -> String {
    if pid > 0 {
        format!("process {pid}, which must have ended")
    } else {
        "a process that has ended".to_owned()
    }
}

/// Sets the timer of requests, by which the driver notices the death of a process that has every tag of a
/// queue.
pub(super) fn notice_deaths_soon(kernel_name: &str) {
    if needs_timer(&kernel_release::release()) {
        let consequence = "requests may wait 30 s after this process has died";
        queue_attribute::lower(kernel_name, "io_timeout", REQUEST_TIMER_MS, consequence);
    }
}

/// Returns true if the driver of this kernel notices some deaths by the timer of requests only.
fn needs_timer(release: &str) -> bool {
    matches!(kernel_release::version(release), [Some(6), Some(7..=14), _])
}

/// Stops and deletes every device of `volume`, each after its node in `device_dir`: the remains of an engine
/// that does not come back. Requests that wait there fail. Returns the number of devices.
///
/// # Errors
/// [`FrontendError::Refused`] if a living process serves one.
pub fn remove_leftovers(volume: &VolumeName, device_dir: &Path) -> Result<usize, FrontendError> {
    let mut control = match ControlDevice::open() {
        // No driver, no devices.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        opened => opened.map_err(during(format!("open {}", modules::CONTROL_PATH)))?,
    };
    clear(&mut control, volume, device_dir)
}

/// Runs [`remove_leftovers`] with an open control device.
pub(super) fn clear(
    control: &mut ControlDevice,
    volume: &VolumeName,
    device_dir: &Path,
) -> Result<usize, FrontendError> {
    let action = || format!("look for ublk devices that were left behind for {volume}");
    let mut removed = 0;
    for id in devices().map_err(during(action()))? {
        let ours = |info: &DeviceInfo| info.server_flags == identity(volume);
        let Some(info) = control.info(id, COMMAND_LIMIT).map_err(during(action()))?.filter(ours) else {
            continue;
        };
        let gone = wait::until(DEAD_SERVER_LIMIT, || {
            let state = control.info(id, COMMAND_LIMIT)?.map_or(abi::STATE_DEAD, |info| info.state);
            Ok((state != abi::STATE_LIVE).then_some(()))
        });
        if gone.map_err(during(action()))?.is_none() {
            let reason = match info.server_pid {
                pid @ 1.. => format!("process {pid} serves ublkb{id} of that volume; stop it first"),
                _ => format!(
                    "another process has ublkc{id} of that volume open; find it with fuser /dev/ublkc{id}"
                ),
            };
            return Err(FrontendError::Refused { action: action(), reason });
        }
        tracing::info!(%volume, id, state = info.state, "removing a ublk device that was left behind");
        let number = node::disk_number(&format!("ublkb{id}")).map_err(during(action()))?;
        remove_node_first(device_dir, volume, number, || {
            let stopped = control.run(abi::CMD_STOP_DEV, id, 0, STOP_LIMIT);
            unless_gone(stopped).map_err(during(format!("stop ublkb{id}, left behind for {volume}")))?;
            delete(control, id, device_dir)
        })?;
        removed += 1;
    }
    Ok(removed)
}

/// Returns the numbers of all ublk devices of this host.
fn devices() -> io::Result<Vec<u32>> {
    let entries = match fs::read_dir(CLASS) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut ids = Vec::new();
    for entry in entries {
        ids.extend(entry?.file_name().to_str().and_then(parse_name));
    }
    Ok(ids)
}

/// Returns N of `ublkcN`.
fn parse_name(name: &str) -> Option<u32> {
    name.strip_prefix("ublkc")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_identity_never_changes() {
        let name = |text| VolumeName::new(text).unwrap();
        // Devices outlive upgrades of this program.
        assert_eq!(identity(&name("pvc-1")), 0x2c50_3fb2_4f1e_d972);
        assert_ne!(identity(&name("pvc-1")), identity(&name("pvc-2")));
    }

    #[test]
    fn kernels_that_need_the_timer() {
        for release in ["6.7", "6.8.0-45-generic", "6.12.117+deb12-cloud-amd64", "6.14.0-37-generic"] {
            assert!(needs_timer(release), "{release}");
        }
        for release in
            ["6.5.13", "6.6.122", "6.15-rc3", "6.18.6", "7.0.1", "5.14.0-503.el9.x86_64", "", "linux"]
        {
            assert!(!needs_timer(release), "{release}");
        }
    }

    #[test]
    fn a_process_that_has_ended_has_no_number() {
        assert_eq!(server(12), "process 12, which must have ended");
        assert_eq!(server(-1), "a process that has ended");
    }

    #[test]
    fn names_of_character_devices() {
        assert_eq!(parse_name("ublkc0"), Some(0));
        assert_eq!(parse_name("ublkc4711"), Some(4711));
        for other in ["ublkb0", "ublkc", "ublkc-1", "ublkc1x"] {
            assert_eq!(parse_name(other), None, "{other}");
        }
    }

    #[test]
    fn a_host_without_the_driver_has_no_devices() {
        if !fs::exists(CLASS).unwrap() {
            assert_eq!(devices().unwrap(), Vec::<u32>::new());
        }
    }
}
