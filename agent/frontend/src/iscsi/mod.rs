//! The frontend `iscsi`: a SCSI disk of the kernel's iSCSI initiator, for kernels with neither ublk nor NBD.
//!
//! The disk's target is a tgtd of the volume alone, on a loopback address of its own. The target's disk is a
//! file that the engine serves over FUSE (`channel`, `queue`, `protocol`). `commands` are the command lines
//! of tgt and open-iscsi, `host` runs them, `target` has the process tgtd, and `session` finds the disk in
//! sysfs.
//!
//! **No request fails when an engine ends.** tgtd has a copy of the descriptor of the FUSE file, so its
//! requests wait. The next engine kills it, removes the file, and recreates both. The initiator connects
//! again and sends all its requests again. An engine that ends in order hands the descriptor over instead:
//! then the initiator notices nothing.

mod channel;
mod commands;
mod host;
mod protocol;
mod queue;
mod session;
mod support;
mod target;
mod tools;

use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use shorthorn_types::VolumeName;

use crate::first_read::{self, first_read};
use crate::host::Host;
use crate::nbd::read_once;
use crate::node::remove_node_first;
use crate::node::{self, DeviceEvents, DeviceNumber};
use crate::{
    Device, DeviceRecord, FrontendError, FrontendKind, FrontendSpec, Prepared, QueueFrontend, QueueSocket,
    wait,
};

use self::channel::Channel;
use self::commands::{Portal, Target};
use self::queue::{FileState, FuseQueue};
use self::session::IscsiSession;
use self::target::{ProcessHandle, TargetFiles, TargetServer};

pub use self::commands::IscsiIdentity;
pub(crate) use self::support::support;
pub use self::tools::{IscsidState, iscsid};

/// The time limit of one call of iscsiadm: it may start iscsid first.
const CALL_LIMIT: Duration = Duration::from_secs(60);
/// The time limit for the initiator to connect again. It tries every three seconds. Several tries may fail
/// until the new target listens on a busy host.
const RECONNECT_LIMIT: Duration = Duration::from_secs(60);
/// The time limit for kernel and udev to show a disk, and for the kernel to read its size. The scan of a new
/// session waits for scans of other sessions, and udev for its queue of events.
const DISK_LIMIT: Duration = Duration::from_secs(60);
/// The time limit for an attribute of a disk. The kernel writes an attribute from memory, but may have to
/// wait for a scan of the disk.
const ATTRIBUTE_LIMIT: Duration = Duration::from_secs(10);
/// The time limit for a new disk to answer a first read. The read waits for the connection, which the
/// initiator makes within [`RECONNECT_LIMIT`].
const ALIVE_LIMIT: Duration = Duration::from_secs(60);
/// The time limit for the disk of a dead engine to answer a read, which would show that it is not dead. A
/// live engine answers within milliseconds, and a start after a death waits for this.
const DEAD_LIMIT: Duration = Duration::from_secs(2);
/// The number of loopback addresses that are tried for a new target.
const PORTALS_TRIED: usize = 64;

/// Mounts the volume's file, or takes it over from the last engine. Target and disk come with
/// [`Device::go_live`].
///
/// # Errors
/// The host has no iSCSI, or the volume has a disk that another process serves.
pub fn prepare_iscsi(
    spec: &FrontendSpec,
    identity: IscsiIdentity,
    handed_over: Vec<QueueSocket>,
) -> Result<Prepared, FrontendError> {
    support(true)
        .map(drop)
        .map_err(|reason| FrontendError::Unsupported { frontend: FrontendKind::Iscsi, reason })?;
    let files = TargetFiles::new(spec.socket_path.with_extension("iscsi"))
        .map_err(|source| system(format!("make the iSCSI target of {}", spec.volume), source))?;
    if spec.previous.is_none() {
        // Requests that wait there are of another attachment.
        remove_iscsi_leftovers(&spec.volume, &spec.device_dir)?;
    }
    let (channel, adopted) = match take_over(spec, &files, handed_over)? {
        Some((channel, process)) => (channel, Some(process)),
        None => (replace_mount(&spec.volume, &files)?, None),
    };
    let portal = choose_portal(spec)?;
    let fuse = channel.share().map_err(|source| system("share the FUSE file with tgtd", source))?;
    let old = spec.previous.as_ref();
    let record = DeviceRecord {
        kind: FrontendKind::Iscsi,
        kernel_id: Some(portal.0.into()),
        queues: 1,
        depth: old.map_or(spec.depth, |old| old.depth).max(1),
    };
    let file = Arc::new(FileState {
        size_bytes: AtomicU64::new(spec.size_bytes),
        is_closed: AtomicBool::new(false),
    });
    let queue: Box<dyn QueueFrontend> = Box::new(FuseQueue::new(channel, Arc::clone(&file), record.depth));
    let target = Target { volume: spec.volume.clone(), portal, identity };
    let device = IscsiDevice {
        device_dir: spec.device_dir.clone(),
        record,
        file,
        server: Arc::new(TargetServer::new(target, Host::here(), files, fuse)),
        adopted,
        refuses_requests: spec.refuses_requests,
        number: None,
    };
    Ok(Prepared { queues: vec![queue], device: Box::new(device) })
}

fn system(action: impl Into<String>, source: io::Error) -> FrontendError {
    FrontendError::System { action: action.into(), source }
}

/// Adds the state of iscsid to an error, because only iscsid connects sessions.
fn hinted(source: io::Error) -> io::Error {
    io::Error::new(source.kind(), format!("{source}{}", tools::hint(iscsid())))
}

fn portal_of(record: &DeviceRecord) -> Option<Portal> {
    record.kernel_id.and_then(|index| u16::try_from(index).ok()).map(Portal)
}

/// Returns the address of the volume's session. Without a session it is one on which nothing listens, and of
/// no other session: the target of another volume may just be replaced. If two volumes take the same at the
/// same time, the tgtd of the second fails, and its next engine chooses again.
fn choose_portal(spec: &FrontendSpec) -> Result<Portal, FrontendError> {
    let volume = &spec.volume;
    let failed = |source| system(format!("look for the iSCSI session of {volume}"), source);
    let session = IscsiSession::find(volume).map_err(failed)?;
    let previous = spec.previous.as_ref().and_then(portal_of);
    if let (Some(portal), Some(_)) = (previous, session) {
        return Ok(portal);
    }
    let taken = session::addresses().map_err(failed)?;
    let mut portal = previous.unwrap_or_else(|| Portal::first(volume));
    for _ in 0..PORTALS_TRIED {
        let is_taken = taken.contains(&portal.ip().to_string());
        if !is_taken && TcpListener::bind(portal.address()).is_ok() {
            return Ok(portal);
        }
        portal = portal.next();
    }
    let source = io::Error::from(io::ErrorKind::AddrInUse);
    Err(system(format!("find a loopback address for the iSCSI target of {volume}"), source))
}

/// Takes over the file of the last engine if that has handed it over and its target still works. A target of
/// another size is replaced: the volume may have grown since, and tgtd reads the size only when it opens the
/// file.
fn take_over(
    spec: &FrontendSpec,
    files: &TargetFiles,
    handed_over: Vec<QueueSocket>,
) -> Result<Option<(Channel, ProcessHandle)>, FrontendError> {
    let channel = handed_over.into_iter().next().and_then(|handed| Channel::adopt(handed.socket));
    let (Some(channel), true) = (channel, spec.previous.is_some()) else { return Ok(None) };
    let failed = |source| system(format!("look for the iSCSI target of {}", spec.volume), source);
    let process = files.process().map_err(failed)?;
    let Some(session) = IscsiSession::find(&spec.volume).map_err(failed)? else { return Ok(None) };
    let shown = session.size_bytes().map_err(failed)?;
    if !is_current(shown, spec.size_bytes) {
        tracing::info!(
            volume = %spec.volume, shown, size_bytes = spec.size_bytes,
            "iscsi: replacing the target, which has another size than the volume"
        );
        return Ok(None);
    }
    Ok(process.map(|process| (channel, process)))
}

/// Returns true if a target whose disk has the size `shown` can be used for a volume of `size_bytes`. If the
/// kernel has not found the disk yet, it reads the size from the target later.
fn is_current(shown: Option<u64>, size_bytes: u64) -> bool {
    shown.is_none_or(|shown| shown == size_bytes)
}

/// Removes the file of a dead engine with the tgtd that waits for it, and mounts a new one.
fn replace_mount(volume: &VolumeName, files: &TargetFiles) -> Result<Channel, FrontendError> {
    target::remove(files)
        .map_err(|source| system(format!("remove the iSCSI target that {volume} had before"), source))?;
    let disk = files.disk();
    channel::make_mount_point(&disk)
        .and_then(|()| Channel::mount(volume, &disk))
        .map_err(|source| system(format!("mount the FUSE file {}", disk.display()), source))
}

/// Removes the disk and the target that a dead engine of `volume` left behind. Requests that wait there fail.
///
/// # Errors
/// [`FrontendError::Refused`] if a living process serves it.
pub fn remove_iscsi_leftovers(volume: &VolumeName, device_dir: &Path) -> Result<(), FrontendError> {
    let action = || format!("remove the old iSCSI disk of {volume}");
    let failed = |source| system(action(), source);
    let session = IscsiSession::find(volume).map_err(failed)?;
    let mounted = channel::mounted(volume).map_err(failed)?;
    if session.is_none() && mounted.is_none() {
        return Ok(());
    }
    let disk = session.as_ref().and_then(IscsiSession::disk);
    if let Some(disk) = &disk {
        let is_alive = session.as_ref().is_some_and(IscsiSession::is_logged_in)
            && read_once(device_path(disk), DEAD_LIMIT).is_ok();
        if is_alive {
            let reason = "another process serves it; stop that process first".to_owned();
            return Err(FrontendError::Refused { action: action(), reason });
        }
        tracing::warn!(%volume, disk, "iscsi: removing an old disk");
    }
    let number = match &disk {
        Some(disk) => node::disk_number(disk).map_err(failed)?,
        None => None,
    };
    remove_node_first(device_dir, volume, number, || {
        if let Some(session) = &session {
            session.give_up().map_err(failed)?;
        }
        if let Some(mounted) = &mounted {
            let files = TargetFiles::of_mount(mounted);
            target::remove(&files).map_err(failed)?;
            files.remove();
        }
        end_session(&Host::here(), volume)
    })
}

/// Ends the session of `volume`, with its disk, and removes its settings.
fn end_session(host: &Host, volume: &VolumeName) -> Result<(), FrontendError> {
    host.run(&commands::log_out(volume), &[], CALL_LIMIT)?;
    host.run(&commands::forget(volume), &[], CALL_LIMIT)?;
    let gone =
        wait::until(DISK_LIMIT, || Ok::<_, io::Error>(IscsiSession::find(volume)?.is_none().then_some(())));
    gone.and_then(|gone| gone.ok_or_else(|| wait::timed_out(DISK_LIMIT)))
        .map_err(|source| system(format!("end the iSCSI session of {volume}"), source))
}

fn device_path(disk: &str) -> PathBuf {
    Path::new("/dev").join(disk)
}

/// The disk.
#[derive(Debug)]
struct IscsiDevice {
    device_dir: PathBuf,
    record: DeviceRecord,
    file: Arc<FileState>,
    server: Arc<TargetServer>,
    /// The tgtd of the last engine, if it is used on.
    adopted: Option<ProcessHandle>,
    /// See [`FrontendSpec::refuses_requests`].
    refuses_requests: bool,
    number: Option<DeviceNumber>,
}

impl IscsiDevice {
    fn volume(&self) -> &VolumeName {
        &self.server.target.volume
    }

    /// Returns the size of the volume, which its disk may not have yet.
    fn volume_bytes(&self) -> u64 {
        self.file.size_bytes.load(Ordering::Relaxed)
    }

    fn failed(&self, action: &str, source: io::Error) -> FrontendError {
        system(format!("{action} the iSCSI disk of {}", self.volume()), source)
    }

    /// Makes the session, or waits until it has a connection again. Returns the events since before a new
    /// one.
    fn connect(&self) -> Result<Option<DeviceEvents>, FrontendError> {
        let session = IscsiSession::find(self.volume()).map_err(|source| self.failed("look for", source))?;
        if let Some(session) = session {
            session.wait(RECONNECT_LIMIT).map_err(|source| self.failed("reconnect", hinted(source)))?;
            return Ok(None);
        }
        let events = DeviceEvents::listen();
        for call in self.server.target.log_in() {
            self.server.host.run(&call, &[], CALL_LIMIT)?;
        }
        Ok(Some(events))
    }

    /// Waits until the kernel knows the size of the volume.
    fn catch_up(&self, session: &IscsiSession, disk: &str) -> Result<(), FrontendError> {
        let size_bytes = self.volume_bytes();
        let mut rescan: Option<Child> = None;
        let seen = wait::until(DISK_LIMIT, || {
            if session::has_size(disk, size_bytes)? {
                return Ok(Some(()));
            }
            let is_over =
                rescan.as_mut().map_or(Ok(true), |child| child.try_wait().map(|ended| ended.is_some()))?;
            if is_over {
                rescan = Some(self.write("1", session.rescan()?)?);
            }
            Ok(None)
        });
        if let Some(child) = rescan {
            target::reap(child);
        }
        seen.and_then(|seen| seen.ok_or_else(|| wait::timed_out(DISK_LIMIT)))
            .map_err(|source| self.failed("see the size of", source))
    }

    /// Has the kernel write zeroes like other data. With WRITE SAME, for zeroes that must take space, tgtd
    /// would write each sector by itself.
    fn write_zeroes_as_data(&self, session: &IscsiSession) {
        let set = || -> io::Result<()> {
            if session.has_no_write_same()? {
                return Ok(());
            }
            target::reap(self.write("0", session.write_same_limit()?)?);
            let is_set = || Ok::<_, io::Error>(session.has_no_write_same()?.then_some(()));
            wait::until(ATTRIBUTE_LIMIT, is_set)?.ok_or_else(|| wait::timed_out(ATTRIBUTE_LIMIT))
        };
        if let Err(error) = set() {
            let volume = self.volume();
            tracing::warn!(%volume, %error, "WRITE SAME cannot be turned off: writing zeroes is slow");
        }
    }

    /// Writes an attribute of the disk. The writer waits for requests of the disk, and cannot be killed
    /// meanwhile. It is therefore neither this process nor one that its unit waits for: they would wait for
    /// each other.
    fn write(&self, value: &str, attribute: PathBuf) -> io::Result<Child> {
        let mut shell = self.server.host.daemon("Shorthorn sets an attribute of an iSCSI disk", "/bin/sh");
        shell.args(["-c", r#"echo "$1" >"$0""#]).arg(attribute).arg(value);
        shell.stdin(Stdio::null()).stdout(Stdio::null()).spawn()
    }
}

impl Device for IscsiDevice {
    fn record(&self) -> DeviceRecord {
        self.record.clone()
    }

    fn go_live(&mut self) -> Result<PathBuf, FrontendError> {
        match self.adopted.take() {
            Some(process) => self.server.adopt(process),
            None => self.server.start()?,
        }
        self.server.watch().map_err(|source| self.failed("start a thread for", source))?;
        let events = self.connect()?;
        let (session, disk) = session::wait_for_disk(self.volume(), DISK_LIMIT)
            .map_err(|source| self.failed("find", source))?;
        self.catch_up(&session, &disk)?;
        let number = node::wait_until_ready(&disk, self.volume_bytes(), events.as_ref(), DISK_LIMIT)?;
        session.let_requests_wait().map_err(|source| self.failed("set the timer of", source))?;
        self.write_zeroes_as_data(&session);
        let path = node::publish(&self.device_dir, self.volume(), number)?;
        self.number = Some(number);
        // If the session continues, the queue serves already, and its requests may need the main thread.
        if events.is_some() && !self.refuses_requests {
            // Its disk stays, and answers the reader only when the next engine serves.
            let reader = self.server.host.daemon("Shorthorn reads a new iSCSI disk", first_read::PROGRAM);
            first_read(reader, &path, ALIVE_LIMIT)
                .map_err(|source| self.failed("read the first sector of", source))?;
        }
        Ok(path)
    }

    fn number(&self) -> Option<DeviceNumber> {
        self.number
    }

    fn size_bytes(&self) -> u64 {
        let session = IscsiSession::find(self.volume()).ok().flatten();
        let shown = session.and_then(|session| session.size_bytes().ok().flatten());
        shown.unwrap_or_else(|| self.volume_bytes())
    }

    /// Announces the size. tgtd reads it only when it opens the file, so a new one is started, and requests
    /// wait until the initiator has connected to it.
    fn resize(&mut self, size_bytes: u64) -> Result<(), FrontendError> {
        self.file.size_bytes.store(size_bytes, Ordering::Relaxed);
        self.server.restart()?;
        let (session, disk) = session::wait_for_disk(self.volume(), DISK_LIMIT)
            .map_err(|source| self.failed("find", source))?;
        session.wait(RECONNECT_LIMIT).map_err(|source| self.failed("reconnect", hinted(source)))?;
        self.catch_up(&session, &disk)
    }

    fn in_use(&self) -> Option<String> {
        self.number.and_then(|_| node::in_use(&self.device_dir.join(self.volume().as_str())))
    }

    fn ends_with_host(&self) -> bool {
        self.server.host.is_shutting_down() && self.in_use().is_none()
    }

    fn stop(&mut self) -> Result<(), FrontendError> {
        if let Some(number) = self.number {
            node::remove(&self.device_dir, self.volume(), number)?;
            if let Some(disk) =
                IscsiSession::find(self.volume()).ok().flatten().and_then(|session| session.disk())
            {
                node::write_back(self.volume(), device_path(&disk));
            }
            // Not before: a stop that is tried again must not skip this.
            self.number = None;
        }
        // The kernel flushes the disk meanwhile: the queue still serves.
        end_session(&self.server.host, self.volume())?;
        self.file.is_closed.store(true, Ordering::Release);
        self.server.stop()?;
        self.server.files.remove();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_of_another_size_is_replaced() {
        assert!(is_current(Some(1 << 20), 1 << 20));
        assert!(!is_current(Some(1 << 20), 2 << 20), "tgtd does not learn the new size");
        assert!(is_current(None, 1 << 20), "the disk is not found yet");
    }
}
