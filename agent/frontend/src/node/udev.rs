//! Events of block devices: those that udevd has handled, or without udevd those of the kernel.
//!
//! The database of udev says nothing about the event that just happened. A number is reused, and a device
//! that exists before its volume (nbd0) has a record from that time. An event that arrives after the monitor
//! was opened is new.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use udev::{Device, DeviceType, Event, EventType, MonitorBuilder, MonitorSocket};

use super::DeviceNumber;

/// The socket of udevd. libudev asks the same file whether udevd runs.
const CONTROL: &str = "/run/udev/control";
/// The interval of looking without an event: the queue of a monitor may overflow and lose one.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// The interval of looking if no monitor can be opened.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Returns true if udevd runs. Containers and initial RAM disks have none.
#[must_use]
pub fn has_udev() -> bool {
    Path::new(CONTROL).exists()
}

/// Receives all events of block devices from now on.
pub struct DeviceEvents {
    /// None if no monitor can be opened: then the caller polls.
    monitor: Option<MonitorSocket>,
    has_udev: bool,
}

impl std::fmt::Debug for DeviceEvents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceEvents").field("has_udev", &self.has_udev).finish_non_exhaustive()
    }
}

impl DeviceEvents {
    /// Opens the monitor. Without udevd, as in containers and initial RAM disks, it is that of the kernel.
    #[must_use]
    pub fn listen() -> DeviceEvents {
        let has_udev = has_udev();
        let builder = if has_udev { MonitorBuilder::new() } else { MonitorBuilder::new_kernel() };
        let monitor =
            builder.and_then(|builder| builder.match_subsystem("block")).and_then(MonitorBuilder::listen);
        if let Err(error) = &monitor {
            tracing::warn!(
                %error,
                "cannot receive events of block devices: polling every {POLL_INTERVAL:?} instead"
            );
        }
        DeviceEvents { monitor: monitor.ok(), has_udev }
    }

    /// Returns true if udevd handles the events, and false if no process does.
    pub(super) fn has_udev(&self) -> bool {
        self.has_udev
    }

    /// Waits for an event of the disk `name`, at most for `limit`. Returns true if udevd has handled an event
    /// of this disk; `sequence` is the kernel's `diskseq` of the disk.
    pub(super) fn next(&self, name: &str, sequence: Option<&str>, limit: Duration) -> bool {
        let Some(monitor) = &self.monitor else {
            thread::sleep(limit.min(POLL_INTERVAL));
            return false;
        };
        let timeout = PollTimeout::try_from(limit.min(LOOK_INTERVAL)).unwrap_or(PollTimeout::ZERO);
        // An error is an interruption by a signal: the caller repeats the check.
        let _ = poll(&mut [PollFd::new(monitor.as_fd(), PollFlags::POLLIN)], timeout);
        let heard = monitor.iter().any(|event| is_of(&event, name, sequence));
        heard && self.has_udev
    }
}

/// Returns true if the event is of this disk, and not of an earlier one of the same name: its end may be
/// reported late.
fn is_of(event: &Event, name: &str, sequence: Option<&str>) -> bool {
    event.sysname() == OsStr::new(name)
        && event.event_type() != EventType::Remove
        && match (event.property_value("DISKSEQ"), sequence) {
            (Some(of_event), Some(sequence)) => of_event == OsStr::new(sequence),
            // Linux before 5.15.
            _ => true,
        }
}

/// Returns true if udev's database has a record of the device, of whatever time.
pub(super) fn is_recorded(device: DeviceNumber) -> bool {
    Device::from_devnum(DeviceType::Block, device.raw()).is_ok_and(|device| device.is_initialized())
}

/// Returns a property from udev's database; none without a record of the device.
#[must_use]
pub fn property(device: DeviceNumber, key: &str) -> Option<String> {
    let device = Device::from_devnum(DeviceType::Block, device.raw()).ok()?;
    device.property_value(key).map(|value| value.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_wait_without_an_event_ends() {
        for events in [DeviceEvents::listen(), DeviceEvents { monitor: None, has_udev: true }] {
            let begin = Instant::now();
            assert!(!events.next("no-such-disk", None, Duration::from_millis(30)));
            assert!(begin.elapsed() < Duration::from_secs(60));
        }
    }

    #[test]
    fn a_device_that_does_not_exist_has_no_record() {
        let device = DeviceNumber { major: 4095, minor: 1 };
        assert!(!is_recorded(device));
        assert_eq!(property(device, "ID_SERIAL_SHORT"), None);
    }
}
