//! The ublk device of a volume: makes it or takes it over, starts, resizes and stops it.
//!
//! A device begins with ADD_DEV and SET_PARAMS in [`prepare_ublk`]. START_DEV follows in [`Device::go_live`],
//! and at the end STOP_DEV and DEL_DEV in [`Device::stop`].

use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use shorthorn_types::VolumeName;
use shorthorn_types::limits::{BLOCK_BYTES, MAX_IO_BYTES, MAX_ZERO_BYTES, SECTOR_BYTES};

use super::abi::{self, DeviceInfo, ParamBasic, ParamDiscard, Params};
use super::control::ControlDevice;
use super::fetching::Fetching;
use super::queue::UblkQueue;
use super::{
    COMMAND_LIMIT, REQUIRED_FEATURES, START_LIMIT, STOP_LIMIT, delete, during, mark, recovery, unless_gone,
    unsupported,
};
use crate::modules::CONTROL_PATH;
use crate::node::{DeviceEvents, DeviceNumber};
use crate::{
    Device, DeviceRecord, FrontendError, FrontendKind, FrontendSpec, Prepared, QueueFrontend, kernel_release,
    modules, node, wait,
};

/// sysfs and udev follow within milliseconds; a busy udev takes longer.
const UDEV_LIMIT: Duration = Duration::from_secs(10);
/// devtmpfs makes the node of the character device before ADD_DEV ends; udev alone needs a moment.
const NODE_LIMIT: Duration = Duration::from_secs(2);

/// Makes a ublk device, or takes over the one of `spec.previous` after its process died.
///
/// The device may have fewer queues than requested: the driver gives no more than the number of processors. A
/// device that is taken over has the queues and the depth with which it was made. [`Device::record`] has the
/// numbers.
///
/// # Errors
/// [`FrontendError::Unsupported`] if the kernel does not support it; else the obstacle.
pub fn prepare_ublk(spec: &FrontendSpec) -> Result<Prepared, FrontendError> {
    if let Some(reason) = kernel_release::ublk_deny_reason(&kernel_release::release()) {
        return Err(unsupported(reason));
    }
    modules::load_ublk().map_err(|missing| unsupported(missing.to_string()))?;
    let mut control = ControlDevice::open().map_err(during(format!("open {CONTROL_PATH}")))?;
    let previous = match &spec.previous {
        Some(DeviceRecord { kind: FrontendKind::Ublk, kernel_id: Some(id), .. }) => {
            recovery::take_over(&mut control, *id, &spec.volume)?
        }
        _ => None,
    };
    let recovered = previous.is_some();
    let info = match previous {
        Some(info) => info,
        None => {
            recovery::clear(&mut control, &spec.volume, &spec.device_dir)?;
            add(&mut control, spec)?
        }
    };
    assemble(spec, info, recovered, control)
}

/// Runs ADD_DEV: the driver chooses the number and returns the granted parameters.
fn add(control: &mut ControlDevice, spec: &FrontendSpec) -> Result<DeviceInfo, FrontendError> {
    let required = REQUIRED_FEATURES.iter().fold(0, |bits, (bit, _)| bits | bit);
    let features =
        control.features(COMMAND_LIMIT).map_err(during("ask the ublk driver for its features".into()))?;
    let wanted = DeviceInfo {
        queues: spec.queues,
        depth: spec.depth,
        // As much as one request to a replica carries: a larger one would be split, a smaller one would make
        // more of them. Buffers that are not used up to there cost no memory.
        max_io_bytes: MAX_IO_BYTES,
        id: u32::MAX,
        flags: required | (features & abi::F_UPDATE_SIZE),
        server_flags: recovery::identity(&spec.volume),
        ..DeviceInfo::default()
    };
    let action = format!("make a ublk device of {} queues with {} tags", spec.queues, spec.depth);
    let info = control.add(wanted, START_LIMIT).map_err(during(action))?;
    let missing: Vec<&str> =
        REQUIRED_FEATURES.iter().filter(|(bit, _)| info.flags & bit == 0).map(|(_, name)| *name).collect();
    if missing.is_empty() {
        return Ok(info);
    }
    delete(control, info.id, &spec.device_dir)?;
    Err(unsupported(format!("the driver grants no {}; use Linux 6.5 or later, as root", missing.join(", "))))
}

/// Sets the parameters of a new device and makes the two halves of the frontend.
fn assemble(
    spec: &FrontendSpec,
    info: DeviceInfo,
    recovered: bool,
    mut control: ControlDevice,
) -> Result<Prepared, FrontendError> {
    let set = if recovered {
        Ok(()) // They are kept, and setting them again is refused (EACCES).
    } else {
        control.set_params(info.id, params(spec.size_bytes, info.max_io_bytes), COMMAND_LIMIT)
    };
    let opened = set
        .map_err(during(format!("set the parameters of ublk device {}", info.id)))
        .and_then(|()| open_character_device(info.id));
    let character_device = match opened {
        Ok(opened) => Arc::new(opened),
        Err(error) => {
            if !recovered && let Err(second) = delete(&mut control, info.id, &spec.device_dir) {
                tracing::warn!(%second, "a ublk device that could not be set up was not removed");
            }
            return Err(error);
        }
    };
    let size_bytes = Arc::new(AtomicU64::new(spec.size_bytes));
    let fetching = Arc::new(Fetching::default());
    let queue = |number| {
        UblkQueue::new(
            Arc::clone(&character_device),
            number,
            info.depth,
            info.max_io_bytes,
            Arc::clone(&size_bytes),
            Arc::clone(&fetching),
        )
    };
    let queues = (0..info.queues).map(|number| Box::new(queue(number)) as Box<dyn QueueFrontend>).collect();
    let device = UblkDevice {
        control,
        volume: spec.volume.clone(),
        device_dir: spec.device_dir.clone(),
        info,
        recovered,
        size_bytes,
        fetching,
        character_device: Some(character_device),
        number: None,
    };
    Ok(Prepared { queues, device: Box::new(device) })
}

/// Returns the parameters of the device for the block layer.
fn params(size_bytes: u64, max_io_bytes: u32) -> Params {
    let sectors = |bytes: u32| u32::try_from(u64::from(bytes) / SECTOR_BYTES).unwrap_or(u32::MAX);
    let block = u32::try_from(BLOCK_BYTES).unwrap_or(4096);
    let block_shift = u8::try_from(BLOCK_BYTES.ilog2()).unwrap_or(12);
    Params {
        length_bytes: u32::try_from(offset_of!(Params, pad)).unwrap_or(0),
        types: abi::PARAM_TYPE_BASIC | abi::PARAM_TYPE_DISCARD,
        basic: ParamBasic {
            attributes: abi::ATTR_VOLATILE_CACHE | abi::ATTR_FUA,
            logical_block_shift: u8::try_from(SECTOR_BYTES.ilog2()).unwrap_or(9),
            physical_block_shift: block_shift,
            // The physical block: any aligned size does. More would look like the geometry of a RAID to mkfs.
            io_opt_shift: block_shift,
            io_min_shift: block_shift,
            max_sectors: sectors(max_io_bytes),
            device_sectors: size_bytes / SECTOR_BYTES,
            ..ParamBasic::default()
        },
        discard: ParamDiscard {
            granularity: block,
            max_discard_sectors: sectors(MAX_ZERO_BYTES),
            max_write_zeroes_sectors: sectors(MAX_ZERO_BYTES),
            max_discard_segments: 1, // the driver takes no more
            ..ParamDiscard::default()
        },
        pad: 0,
    }
}

/// Opens /dev/ublkcN; only one process can have it open.
fn open_character_device(id: u32) -> Result<OwnedFd, FrontendError> {
    let path = format!("/dev/ublkc{id}");
    let opened = wait::until(NODE_LIMIT, || match File::options().read(true).write(true).open(&path) {
        Ok(file) => Ok(Some(file.into())),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EBUSY)) => Ok(None),
        Err(error) => Err(error),
    });
    opened
        .and_then(|opened| opened.ok_or_else(|| wait::timed_out(NODE_LIMIT)))
        .map_err(during(format!("open {path} (missing, or open in another process)")))
}

/// The control half of the frontend.
struct UblkDevice {
    control: ControlDevice,
    volume: VolumeName,
    device_dir: PathBuf,
    info: DeviceInfo,
    /// True if an earlier process has started it.
    recovered: bool,
    /// Shared with the queues.
    size_bytes: Arc<AtomicU64>,
    /// Shared with the queues.
    fetching: Arc<Fetching>,
    /// Shared with the queues; given up by [`Device::stop`].
    character_device: Option<Arc<OwnedFd>>,
    /// Known once it is live.
    number: Option<DeviceNumber>,
}

impl UblkDevice {
    fn kernel_name(&self) -> String {
        format!("ublkb{}", self.info.id)
    }

    fn kernel_path(&self) -> PathBuf {
        Path::new("/dev").join(self.kernel_name())
    }

    /// Lets requests come, from now on or again.
    fn start(&mut self) -> Result<(), FrontendError> {
        let (command, verb) = match self.recovered {
            true => (abi::CMD_END_USER_RECOVERY, "resume"),
            false => (abi::CMD_START_DEV, "start"),
        };
        let pid = u64::from(process::id());
        let has_failed = || self.fetching.failure().is_some();
        let deadline = Instant::now() + START_LIMIT;
        let started = loop {
            let rest = deadline.saturating_duration_since(Instant::now());
            match self.control.run_unless(command, self.info.id, pid, rest, has_failed) {
                // The driver waits for the queues first, and that wait ends when this process is stopped
                // for a moment. Nothing has changed by then.
                Err(error) if error.raw_os_error() == Some(libc::EINTR) && !rest.is_zero() => {}
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    break Err(wait::timed_out(START_LIMIT));
                }
                started => break started,
            }
        };
        started.map_err(|source| self.not_started(verb, source))
    }

    /// Returns an error with the reason why a start waits.
    fn not_started(&self, verb: &str, source: io::Error) -> FrontendError {
        let action = format!("{verb} the device {} of {}", self.kernel_name(), self.volume);
        if let Some(failure) = self.fetching.failure() {
            return FrontendError::Refused { action, reason: failure.to_owned() };
        }
        let (fetched, queues) = (self.fetching.queues(), self.info.queues);
        if source.kind() == io::ErrorKind::TimedOut && fetched < queues {
            let hint = format!(
                ": the driver waits for all queues, and {fetched} of {queues} have fetched their tags. The \
                 thread of another queue hangs or has ended: see the log of this process"
            );
            return FrontendError::System { action: action + &hint, source };
        }
        during(action)(source)
    }

    /// Returns the size that its last process gave a device that was taken over. The volume may have grown
    /// since.
    fn catch_up(&mut self) -> Result<u64, FrontendError> {
        let wanted = self.size_bytes.load(Ordering::Relaxed);
        let name = self.kernel_name();
        let size = node::disk_size(&name).map_err(during(format!("look for the size of {name}")))?;
        match size {
            Some(size) if self.recovered && size != wanted => match self.resize(wanted) {
                Ok(()) => Ok(wanted),
                Err(error) => {
                    tracing::warn!(%error, volume = %self.volume, size, "the device keeps its size");
                    Ok(size)
                }
            },
            _ => Ok(wanted),
        }
    }
}

impl Device for UblkDevice {
    fn record(&self) -> DeviceRecord {
        DeviceRecord {
            kind: FrontendKind::Ublk,
            kernel_id: Some(self.info.id),
            queues: self.info.queues,
            depth: self.info.depth,
        }
    }

    fn go_live(&mut self) -> Result<PathBuf, FrontendError> {
        // A device that is taken over has no new event.
        let events = (!self.recovered).then(DeviceEvents::listen);
        // Before udev sees the disk; again for one that an earlier version has left.
        let marked = mark::write(&self.device_dir, self.info.id, &self.volume);
        marked.map_err(during(format!("mark {} as a volume", self.kernel_name())))?;
        self.start()?;
        if !self.recovered {
            recovery::notice_deaths_soon(&self.kernel_name());
        }
        let size_bytes = self.catch_up()?;
        let number = node::wait_until_ready(&self.kernel_name(), size_bytes, events.as_ref(), UDEV_LIMIT)?;
        self.number = Some(number);
        let endpoint = node::publish(&self.device_dir, &self.volume, number)?;
        if self.recovered {
            // Its first process has set the timer, unless it has died before that. The requests that waited
            // are being served now, so a child process may look.
            recovery::notice_deaths_soon(&self.kernel_name());
        }
        Ok(endpoint)
    }

    fn number(&self) -> Option<DeviceNumber> {
        self.number
    }

    fn size_bytes(&self) -> u64 {
        let shown = node::disk_size(&self.kernel_name()).ok().flatten();
        shown.unwrap_or_else(|| self.size_bytes.load(Ordering::Relaxed))
    }

    fn resize(&mut self, size_bytes: u64) -> Result<(), FrontendError> {
        if self.info.flags & abi::F_UPDATE_SIZE == 0 {
            return Err(unsupported(format!(
                "the driver of kernel {} cannot resize a device in use; detach the volume and attach it \
                 again, or use Linux 6.16 or later",
                kernel_release::release()
            )));
        }
        let action = format!("resize {} of {} to {size_bytes} bytes", self.kernel_name(), self.volume);
        let current = self.size_bytes.load(Ordering::Relaxed);
        if size_bytes < current || !size_bytes.is_multiple_of(SECTOR_BYTES) {
            let reason = format!("a device of {current} bytes only grows, by whole sectors");
            return Err(FrontendError::Refused { action, reason });
        }
        // First, so that the queues know the size by the time that requests come.
        self.size_bytes.store(size_bytes, Ordering::Relaxed);
        self.control
            .run(abi::CMD_UPDATE_SIZE, self.info.id, size_bytes / SECTOR_BYTES, COMMAND_LIMIT)
            .map_err(during(action))?;
        node::wait_until_ready(&self.kernel_name(), size_bytes, None, UDEV_LIMIT).map(drop)
    }

    fn in_use(&self) -> Option<String> {
        node::in_use(&self.kernel_path())
    }

    fn stop(&mut self) -> Result<(), FrontendError> {
        if let Some(number) = self.number {
            node::remove(&self.device_dir, &self.volume, number)?;
            node::write_back(&self.volume, self.kernel_path());
        }
        let stopped = self.control.run(abi::CMD_STOP_DEV, self.info.id, 0, STOP_LIMIT);
        unless_gone(stopped).map_err(during(format!(
            "stop the device {} of {}",
            self.kernel_name(),
            self.volume
        )))?;
        self.number = None;
        self.character_device = None;
        delete(&mut self.control, self.info.id, &self.device_dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_those_that_the_driver_accepts() {
        let params = params(1 << 30, MAX_IO_BYTES);
        assert_eq!(params.length_bytes, 60, "the two sets without the padding");
        assert_eq!(params.types, 3);
        assert_eq!(params.basic.attributes, 0b1100);
        assert_eq!((params.basic.logical_block_shift, params.basic.physical_block_shift), (9, 12));
        assert_eq!((params.basic.max_sectors, params.basic.device_sectors), (2048, 1 << 21));
        assert_eq!((params.discard.granularity, params.discard.max_discard_segments), (4096, 1));
        assert_eq!(params.discard.max_discard_sectors, 65536);
        assert_eq!(params.discard.max_write_zeroes_sectors, 65536);
    }
}
