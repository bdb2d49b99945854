//! The frontend `nbd`: a block device /dev/nbdN of the kernel's NBD driver, served over a pair of Unix
//! sockets for each queue, without a handshake.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use shorthorn_ring::Completion;
use shorthorn_types::limits::{MAX_IO_BYTES, SECTOR_BYTES};
use shorthorn_types::{Errno, VolumeName};

use super::connection::{ConnectionContext, FirstPhase};
use super::driver_link::{self, OwnedDevice};
use super::export::Export;
use super::netlink::NewDevice;
use super::protocol::transmission_flags;
use super::service::NbdConnections;
use super::sysfs;
use crate::first_read::{self, first_read};
use crate::node::remove_node_first;
use crate::node::{self, DeviceEvents, DeviceNumber};
use crate::{
    Device, DeviceRecord, FrontendError, FrontendKind, FrontendSpec, Prepared, QueueFrontend, QueueIo,
    QueueSocket, Quiesced, kernel_release, modules, wait,
};

/// The time-out for devices with several queues. After this many seconds without an answer the kernel gives
/// up the connection and sends its requests again on another one. It repeats a sent request in no other case.
/// So requests in flight wait this long when an engine died; an engine that ends in order hands its sockets
/// over instead. The time is longer than most pauses of a living engine, which loses its connection by that.
const REQUEST_TIMEOUT_S: u64 = 15;
/// For devices with one queue: the driver gives up no connection for time. When the timer of a request runs
/// out, it sends the request again if the socket was replaced since. Otherwise it restarts the timer
/// (`nbd_xmit_timeout` in drivers/block/nbd.c, Linux 5.8 and later; with several sockets it does not come
/// there).
const NO_TIMEOUT: u64 = 0;
/// The timer that the driver gives the requests of a device with [`NO_TIMEOUT`].
const DEFAULT_TIMER_MS: u32 = 30_000;
/// The timer that they get instead: the wait of requests after the next engine has started. The block layer
/// rounds it up by a second. Each time it runs out, the driver logs a line ("Possible stuck request") without
/// a limit. At 2 s, the driver logs at most one line in 2 s for each of the volume's 128 requests while the
/// volume stands still.
const REQUEST_TIMER_MS: u32 = 2000;
/// The time limit in the kernel for a new request while its device has no connection. The kernel cannot tell
/// an engine that does not come back from one that waits for its replicas. That may take as long as a site is
/// down: a week is longer. Detaching the volume fails the requests at any time. Requests that a dead engine
/// has read fail only by that: see [`NO_TIMEOUT`].
const DEAD_CONNECTION_TIMEOUT_S: u64 = 7 * 24 * 3600;
/// The maximum number of connections of a queue: a living one, and broken ones with requests in progress.
/// Such requests remain if the volume has stopped for longer than the kernel waits.
const CONNECTIONS: u16 = 4;
/// The time limit for kernel and udev to show a new device. They need milliseconds, and a udev with a long
/// queue of events needs seconds.
const UDEV_LIMIT: Duration = Duration::from_secs(10);
/// The time limit for a new device to answer a first read. It is longer than the longer time-out, so that a
/// connection that broke meanwhile is replaced before.
const ALIVE_LIMIT: Duration = Duration::from_secs(REQUEST_TIMEOUT_S + 15);
/// The time limit for the device of a dead engine to answer a read, which would show that it is not dead. A
/// live engine answers within milliseconds, and a start after a death waits for this.
const DEAD_LIMIT: Duration = Duration::from_secs(2);
/// The time limit for the removal of a disconnected device. The driver removes it at once, but udev or
/// another program may hold it open for a look.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// Makes a queue for each of the sockets that were handed over, and a socket pair for each of the other
/// queues. The device itself comes, or comes back, with [`Device::go_live`].
///
/// # Errors
/// The kernel has no NBD, or the volume has a device that another process serves.
pub fn prepare_nbd(spec: &FrontendSpec, handed_over: Vec<QueueSocket>) -> Result<Prepared, FrontendError> {
    modules::load_nbd().map_err(|missing| FrontendError::Unsupported {
        frontend: FrontendKind::Nbd,
        reason: missing.to_string(),
    })?;
    if let Some(partitions) = modules::nbd_partitions_max().filter(|max| *max > 0) {
        let remedy = modules::NBD_PARTITIONS_REMEDY;
        tracing::warn!(
            volume = %spec.volume, partitions, "the kernel reads partition tables of NBD devices; {remedy}"
        );
    }
    let backend = backend_of(&spec.volume);
    let recovered = recover_or_clear(spec, &backend)?;
    let old = spec.previous.as_ref().filter(|_| recovered.is_some());
    let record = DeviceRecord {
        kind: FrontendKind::Nbd,
        kernel_id: recovered,
        queues: old.map_or(spec.queues, |old| old.queues).max(1),
        depth: old.map_or(spec.depth, |old| old.depth).max(CONNECTIONS),
    };
    let export = Export::new(spec.volume.clone(), spec.size_bytes);
    let closed = Arc::new(AtomicBool::new(false));
    let (sender, broken) = mpsc::channel();
    let (mut queues, mut kernel_ends): (Vec<Box<dyn QueueFrontend>>, _) = (Vec::new(), Vec::new());
    let handed_over = if recovered.is_some() { handed_over } else { Vec::new() };
    let mut handed_over = driver_link::living(handed_over, record.queues);
    let taken = handed_over.iter().flatten().count();
    if recovered.is_some() {
        tracing::info!(
            volume = %spec.volume, taken, queues = record.queues,
            "nbd: continuing with the sockets of the last engine"
        );
    }
    for socket in &mut handed_over {
        let ours = match socket.take() {
            Some(socket) => socket,
            None => {
                let (ours, kernels) = driver_link::pair()
                    .map_err(|source| system("make the sockets of an NBD queue", source))?;
                kernel_ends.push(kernels);
                ours
            }
        };
        let shared = ConnectionContext::new(Arc::clone(&export), record.depth, CONNECTIONS);
        queues.push(Box::new(KernelQueue::new(ours, shared, sender.clone(), Arc::clone(&closed))));
    }
    let device = NbdDevice {
        volume: spec.volume.clone(),
        device_dir: spec.device_dir.clone(),
        export,
        backend,
        record,
        kernel_ends,
        broken: Some(broken),
        closed,
        refuses_requests: spec.refuses_requests,
        number: None,
    };
    Ok(Prepared { queues, device: Box::new(device) })
}

/// Returns the device to recover. A device that is not to be recovered and has no server is removed: its
/// requests are of another attachment.
fn recover_or_clear(spec: &FrontendSpec, backend: &str) -> Result<Option<u32>, FrontendError> {
    let found = sysfs::find(backend).map_err(|source| {
        system(format!("look for the NBD device of {} in /sys/block", spec.volume), source)
    })?;
    if let Some(previous) = &spec.previous {
        // Without a number, the engine died after it had asked for the device and before it could store it.
        let recovered = found.iter().copied().find(|index| previous.kernel_id.is_none_or(|id| id == *index));
        if recovered.is_some() {
            return Ok(recovered);
        }
        tracing::warn!(volume = %spec.volume, ?previous, "nbd: the device is gone; creating a new one");
    }
    for index in found {
        clear(&spec.volume, &spec.device_dir, index)?;
    }
    Ok(None)
}

/// Removes every NBD device that a dead engine of `volume` left behind. Requests that wait there fail.
/// Returns the number of devices.
///
/// # Errors
/// [`FrontendError::Refused`] if a living process serves one.
pub fn remove_nbd_leftovers(volume: &VolumeName, device_dir: &Path) -> Result<usize, FrontendError> {
    let found = sysfs::find(&backend_of(volume))
        .map_err(|source| system(format!("look for the NBD device of {volume} in /sys/block"), source))?;
    for index in &found {
        clear(volume, device_dir, *index)?;
    }
    Ok(found.len())
}

/// Returns the identifier with which the kernel's device names its volume.
fn backend_of(volume: &VolumeName) -> String {
    format!("shorthorn:{volume}")
}

/// Returns true if the number is that of an NBD device which belongs to another volume. After another program
/// has disconnected a device, the driver gives its number to the next one, and the node of the former volume
/// leads there.
#[must_use]
pub fn is_nbd_of_other_volume(number: DeviceNumber, volume: &VolumeName) -> bool {
    sysfs::backend_of_number(Path::new("/sys/dev/block"), number)
        .is_some_and(|backend| backend != backend_of(volume))
}

/// Removes the remains of an attachment without a record.
fn clear(volume: &VolumeName, device_dir: &Path, index: u32) -> Result<(), FrontendError> {
    let path = Path::new("/dev").join(sysfs::name(index));
    let action = || format!("remove {}, the old NBD device of {volume}", path.display());
    let refuse = |reason: String| Err(FrontendError::Refused { action: action(), reason });
    match sysfs::read_once(path.clone(), DEAD_LIMIT) {
        Ok(()) => return refuse("another process serves it; stop that process first".into()),
        Err(error) => {
            tracing::warn!(%volume, index, %error, "nbd: removing an old device")
        }
    }
    let number = sysfs::number(index).map_err(|source| system(action(), source))?;
    remove_node_first(device_dir, volume, Some(number), || {
        disconnect(index, &backend_of(volume)).map_err(|source| system(action(), source))
    })
}

/// Disconnects device `index` of `backend` and waits until it is gone. Does nothing if the number is not that
/// device's any more: another program may have disconnected it, and another volume may have got the number.
/// The driver compares no identifier when it disconnects a device.
fn disconnect(index: u32, backend: &str) -> io::Result<()> {
    if !sysfs::has_backend(index, backend)? {
        return Ok(());
    }
    driver_link::call(move |driver| driver.disconnect(index))?;
    let gone = wait::until(STOP_LIMIT, || {
        let is_gone = !sysfs::is_connected(index) || !sysfs::has_backend(index, backend)?;
        Ok::<_, io::Error>(is_gone.then_some(()))
    })?;
    gone.ok_or_else(|| {
        let text = "the device is disconnected but open in another process; it is removed when that process \
         closes it";
        io::Error::new(io::ErrorKind::TimedOut, text)
    })
}

/// Returns the request time-out of a device with the given number of sockets. See [`NO_TIMEOUT`].
fn request_timeout_s(sockets: usize) -> u64 {
    if sockets == 1 { NO_TIMEOUT } else { REQUEST_TIMEOUT_S }
}

fn system(action: impl Into<String>, source: io::Error) -> FrontendError {
    FrontendError::System { action: action.into(), source }
}

/// A queue: one hardware queue of the kernel's device.
#[derive(Debug)]
struct KernelQueue {
    service: NbdConnections,
    first: Option<u16>,
    /// True if the connection broke and no new one was offered.
    broken: bool,
    /// True if another process is to serve the device.
    is_quiesced: bool,
    /// Takes the kernel's ends of new pairs to the thread that reconnects them.
    sender: Sender<OwnedFd>,
    closed: Arc<AtomicBool>,
}

impl KernelQueue {
    /// Creates the queue that serves the kernel's requests on one socket.
    fn new(
        socket: OwnedFd,
        shared: ConnectionContext,
        sender: Sender<OwnedFd>,
        closed: Arc<AtomicBool>,
    ) -> KernelQueue {
        let mut service = NbdConnections::new(shared, CONNECTIONS);
        let first = service.add(socket, FirstPhase::Transmission);
        KernelQueue { service, first, broken: false, is_quiesced: false, sender, closed }
    }

    /// Makes a new connection after one broke. This is the one thing here that allocates; it happens after a
    /// failure only.
    fn reconnect(&mut self, io: &mut QueueIo<'_>) {
        self.broken |= self.service.take_lost();
        let is_closed = self.is_quiesced || self.closed.load(Ordering::Acquire);
        if !self.broken || !self.service.has_room() || is_closed {
            return;
        }
        let (ours, kernels) = match driver_link::pair() {
            Ok(pair) => pair,
            Err(error) => {
                tracing::error!(%error, "nbd: cannot make sockets for a new connection");
                return;
            }
        };
        // Without that thread the device is gone, and needs no repair.
        if self.sender.send(kernels).is_ok()
            && let Some(id) = self.service.add(ours, FirstPhase::Transmission)
        {
            self.service.start(io, id);
        }
        self.broken = false;
    }
}

impl QueueFrontend for KernelQueue {
    fn start(&mut self, io: &mut QueueIo<'_>) -> io::Result<()> {
        if let Some(first) = self.first.take() {
            self.service.start(io, first);
        }
        Ok(())
    }

    fn on_completion(&mut self, io: &mut QueueIo<'_>, completion: Completion) -> io::Result<()> {
        self.service.on_completion(io, completion);
        self.reconnect(io);
        Ok(())
    }

    fn complete(&mut self, io: &mut QueueIo<'_>, slot: u16, outcome: Result<(), Errno>) {
        self.service.complete(io, slot, outcome);
        self.reconnect(io);
    }

    fn flush(&mut self, io: &mut QueueIo<'_>) {
        self.service.flush(io);
    }

    fn quiesce(&mut self, io: &mut QueueIo<'_>) {
        self.is_quiesced = true;
        self.service.quiesce(io);
    }

    fn quiesced(&self) -> Quiesced {
        self.service.quiesced()
    }

    fn is_idle(&self) -> bool {
        self.service.is_idle()
    }
}

/// The kernel's device.
#[derive(Debug)]
struct NbdDevice {
    volume: VolumeName,
    device_dir: PathBuf,
    export: Arc<Export>,
    backend: String,
    record: DeviceRecord,
    /// The sockets for the kernel, until it has taken them.
    kernel_ends: Vec<OwnedFd>,
    /// The broken connections, until the reconnecting thread has taken the receiver.
    broken: Option<Receiver<OwnedFd>>,
    /// No connection needs a new socket any more.
    closed: Arc<AtomicBool>,
    /// See [`FrontendSpec::refuses_requests`].
    refuses_requests: bool,
    number: Option<DeviceNumber>,
}

impl Device for NbdDevice {
    /// Returns the record. The number of a new device is known after [`Device::go_live`] only. An engine that
    /// dies before it has recorded it finds the device by its identifier.
    fn record(&self) -> DeviceRecord {
        self.record.clone()
    }

    fn go_live(&mut self) -> Result<PathBuf, FrontendError> {
        let (index, new) = match self.record.kernel_id {
            Some(index) => (index, false),
            None => (self.connect()?, true),
        };
        self.record.kernel_id = Some(index);
        let mut events = new.then(DeviceEvents::listen);
        if let Err(error) = sysfs::announce(index) {
            tracing::warn!(
                index, %error, "nbd: cannot announce the device to udev: its rules may not have matched"
            );
            events = None;
        }
        let path = self.connect_device(index, new, events.as_ref());
        if path.is_err() && new {
            self.closed.store(true, Ordering::Release);
            let number = self.number.take();
            let removed = remove_node_first(&self.device_dir, &self.volume, number, || {
                disconnect(index, &self.backend)
                    .map_err(|source| system(format!("disconnect {}", sysfs::name(index)), source))
            });
            if let Err(error) = removed {
                tracing::warn!(index, %error, "nbd: cannot remove a device that did not start");
            }
            self.record.kernel_id = None;
        }
        path
    }

    fn number(&self) -> Option<DeviceNumber> {
        self.number
    }

    fn size_bytes(&self) -> u64 {
        let shown =
            self.record.kernel_id.and_then(|index| node::disk_size(&sysfs::name(index)).ok().flatten());
        shown.unwrap_or_else(|| self.export.size_bytes())
    }

    fn resize(&mut self, size_bytes: u64) -> Result<(), FrontendError> {
        if let Some(reason) = kernel_release::nbd_resize_deny_reason(&kernel_release::release()) {
            return Err(FrontendError::Unsupported { frontend: FrontendKind::Nbd, reason });
        }
        // Ours first: the kernel may use the new bytes before the call is over.
        self.export.grow(size_bytes);
        let Some(index) = self.record.kernel_id else { return Ok(()) };
        let backend = self.backend.clone();
        driver_link::call(move |driver| driver.resize(index, &backend, size_bytes))
            .map_err(|source| system(format!("resize {} to {size_bytes} bytes", sysfs::name(index)), source))
    }

    fn in_use(&self) -> Option<String> {
        // The users of a number that another volume has are not ours.
        let is_lost = self.is_there().is_ok_and(|is_there| !is_there);
        self.number.filter(|_| !is_lost)?;
        node::in_use(&self.device_dir.join(self.volume.as_str()))
    }

    fn stop(&mut self) -> Result<(), FrontendError> {
        if let Some(number) = self.number {
            node::remove(&self.device_dir, &self.volume, number)?;
            if self.is_there()?
                && let Some(index) = self.record.kernel_id
            {
                node::write_back(&self.volume, Path::new("/dev").join(sysfs::name(index)));
            }
            // Not before: a stop that is tried again must not skip this.
            self.number = None;
        }
        self.closed.store(true, Ordering::Release);
        self.kernel_ends.clear();
        let Some(index) = self.record.kernel_id else { return Ok(()) };
        disconnect(index, &self.backend)
            .map_err(|source| system(format!("disconnect {}", sysfs::name(index)), source))
    }
}

impl NbdDevice {
    /// Returns true if the kernel's device still exists and is ours. If another program has disconnected it,
    /// its number may belong to another volume.
    fn is_there(&self) -> Result<bool, FrontendError> {
        let Some(index) = self.record.kernel_id else { return Ok(false) };
        sysfs::has_backend(index, &self.backend)
            .map_err(|source| system(format!("read the identifier of {}", sysfs::name(index)), source))
    }

    /// Makes a new device.
    fn connect(&mut self) -> Result<u32, FrontendError> {
        let sockets = std::mem::take(&mut self.kernel_ends);
        let (size_bytes, backend) = (self.export.size_bytes(), self.backend.clone());
        let connected = driver_link::call(move |driver| {
            driver.connect(&NewDevice {
                size_bytes,
                block_bytes: SECTOR_BYTES,
                server_flags: transmission_flags::ALL.into(),
                timeout_s: request_timeout_s(sockets.len()),
                dead_connection_timeout_s: DEAD_CONNECTION_TIMEOUT_S,
                backend: &backend,
                sockets: &sockets,
            })
        });
        connected.map_err(|source| system(format!("make an NBD device for {}", self.volume), source))
    }

    fn connect_device(
        &mut self,
        index: u32,
        new: bool,
        events: Option<&DeviceEvents>,
    ) -> Result<PathBuf, FrontendError> {
        let name = sysfs::name(index);
        let device = OwnedDevice { index, backend: self.backend.clone() };
        for socket in std::mem::take(&mut self.kernel_ends) {
            device.reconnect(&socket).map_err(|source| system(format!("reconnect {name}"), source))?;
        }
        if let Some(broken) = self.broken.take() {
            driver_link::spawn_reconnect(device, broken, Arc::clone(&self.closed))
                .map_err(|source| system("start the thread that repairs NBD connections", source))?;
        }
        let size_bytes = if new { self.export.size_bytes() } else { self.catch_up(&name)? };
        let number = node::wait_until_ready(&name, size_bytes, events, UDEV_LIMIT)?;
        // Of the size of a slot. Others work as well.
        sysfs::limit_requests(index, MAX_IO_BYTES);
        if self.record.queues == 1 {
            sysfs::set_request_timer(index, DEFAULT_TIMER_MS, REQUEST_TIMER_MS);
        }
        let path = node::publish(&self.device_dir, &self.volume, number)?;
        self.number = Some(number);
        // The queues of a recovered device serve already, and their requests may need the main thread.
        if new && !self.refuses_requests {
            first_read(Command::new(first_read::PROGRAM), &path, ALIVE_LIMIT)
                .map_err(|source| system(format!("read the first sector of {name}"), source))?;
        }
        Ok(path)
    }

    /// Adjusts the size of the device, because the volume may have grown while the device had no server.
    /// Returns the size that the device has then.
    fn catch_up(&mut self, name: &str) -> Result<u64, FrontendError> {
        let wanted = self.export.size_bytes();
        let size =
            node::disk_size(name).map_err(|source| system(format!("read the size of {name}"), source))?;
        match size {
            Some(size) if size != wanted => match self.resize(wanted) {
                Ok(()) => Ok(wanted),
                Err(error @ FrontendError::Unsupported { .. }) => {
                    tracing::warn!(%error, volume = %self.volume, size, "the device keeps its size");
                    Ok(size)
                }
                Err(error) => Err(error),
            },
            _ => Ok(wanted),
        }
    }
}

#[cfg(test)]
#[path = "kernel_tests.rs"]
mod tests;
