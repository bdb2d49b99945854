//! The frontend `socket`: NBD on a Unix socket, for qemu, libnbd and other clients. Needs no kernel driver
//! and no privilege.

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno as Error;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, Backlog, Shutdown, SockFlag, SockType, UnixAddr, bind, connect, listen, shutdown, socket,
};
use shorthorn_ring::{Completion, Token, WakeReceiver, Waker};
use shorthorn_types::Errno;

use super::connection::{ConnectionContext, FirstPhase};
use super::export::Export;
use super::service::NbdConnections;
use crate::{
    Device, DeviceRecord, FrontendError, FrontendKind, FrontendSpec, Prepared, QueueFrontend, QueueIo,
    Quiesced, SOURCE,
};

/// The maximum number of clients of one queue. Each takes 64 KiB of buffer, and a slot that no other one can
/// have.
const CLIENTS_MAX: u16 = 16;
/// The number of slots per client at most, so that most slots are common.
const SLOTS_PER_CLIENT: u16 = 4;
/// Clients that wait to be accepted.
const BACKLOG: i32 = 128;
/// The time limit of a negotiation while another client waits. Clients that follow the protocol need
/// milliseconds, on a busy host a second or two.
const NEGOTIATION_LIMIT: Duration = Duration::from_secs(10);
/// The time for which a new server waits for the kernel to close the socket of a dead one. The kernel frees
/// the memory of the dead process first.
const DEAD_LIMIT: Duration = Duration::from_secs(2);
/// The time for which [`Device::stop`] waits for the answers to requests in progress. Requests that wait for
/// a replica for longer are sent again to the next engine.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// [`Token::kind`] of an accepted client; 1 and 2 are the connections'.
const ACCEPTED: u8 = 3;
/// [`Token::kind`] of a call from the main thread.
const WOKEN: u8 = 4;
/// [`Token::kind`] of the report that a client waits to be accepted.
const WAITING: u8 = 5;
/// [`Token::kind`] of the timer of the oldest negotiation.
const DUE: u8 = 6;

/// Makes the socket, under a temporary name, and a queue for each of its threads.
///
/// # Errors
/// The path is taken by something else than a dead socket, or can not be made.
pub fn prepare_socket(spec: &FrontendSpec) -> Result<Prepared, FrontendError> {
    refuse_taken_path(&spec.socket_path)?;
    let staging = staging_path(&spec.socket_path);
    let listener = Arc::new(listen_at(&staging)?);
    let export = Export::new(spec.volume.clone(), spec.size_bytes);
    let clients = Arc::new(Clients::default());
    let stopping = Arc::new(AtomicBool::new(false));
    let depth = spec.depth.max(1);
    let connections = (depth / SLOTS_PER_CLIENT).clamp(1, CLIENTS_MAX);
    let mut queues: Vec<Box<dyn QueueFrontend>> = Vec::new();
    let mut wakers = Vec::new();
    for _ in 0..spec.queues.max(1) {
        let (wake, waker) =
            WakeReceiver::new().map_err(|source| system("making an eventfd for an NBD queue", source))?;
        wakers.push(waker);
        queues.push(Box::new(SocketQueue {
            listener: Arc::clone(&listener),
            accepting: false,
            watching: false,
            making_room: false,
            service: NbdConnections::new(
                ConnectionContext::new(Arc::clone(&export), depth, connections),
                connections,
            ),
            wake,
            stopping: Arc::clone(&stopping),
            clients: Arc::clone(&clients),
            counted: 0,
        }));
    }
    let record =
        DeviceRecord { kind: FrontendKind::Socket, kernel_id: None, queues: spec.queues.max(1), depth };
    let device = SocketDevice {
        path: spec.socket_path.clone(),
        staging: Some(staging),
        inode: None,
        listener,
        export,
        wakers,
        stopping,
        clients,
        record,
    };
    Ok(Prepared { queues, device: Box::new(device) })
}

/// The number of clients over all queues.
#[derive(Debug, Default)]
struct Clients {
    count: Mutex<usize>,
    changed: Condvar,
}

impl Clients {
    fn set(&self, change: impl FnOnce(usize) -> usize) {
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        *count = change(*count);
        self.changed.notify_all();
    }

    fn count(&self) -> usize {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no client is left; returns the number of those left at the limit.
    fn wait_for_none(&self, limit: Duration) -> usize {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(count, limit, |count| *count > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// The clients of one queue.
#[derive(Debug)]
struct SocketQueue {
    /// All queues accept from it; the kernel wakes them in turn.
    listener: Arc<OwnedFd>,
    accepting: bool,
    /// True if a completion of [`WAITING`] or [`DUE`] will come.
    watching: bool,
    /// True if a client was ended whose place is not free yet.
    making_room: bool,
    service: NbdConnections,
    wake: WakeReceiver,
    stopping: Arc<AtomicBool>,
    clients: Arc<Clients>,
    /// The number of this queue's clients in `clients`.
    counted: u16,
}

impl SocketQueue {
    fn token(kind: u8) -> Token {
        Token { source: SOURCE, kind, index: 0, tag: 0 }
    }

    /// Requests the next client if a place is free. Other clients meanwhile wait, or connect to another
    /// queue. If a client without an export could make room, asks whether another one waits.
    fn accept(&mut self, io: &mut QueueIo<'_>) {
        if self.stopping.load(Ordering::Acquire) {
            return;
        }
        if self.service.has_room() {
            self.making_room = false;
            if !self.accepting {
                io.ring.accept(self.listener.as_raw_fd(), Self::token(ACCEPTED));
                self.accepting = true;
            }
        } else if !self.watching && !self.making_room && self.service.oldest_negotiation().is_some() {
            io.ring.readable(self.listener.as_raw_fd(), Self::token(WAITING));
            self.watching = true;
        }
    }

    /// Makes room for a waiting client: ends the oldest negotiation if that has taken long enough, or sets
    /// the timer.
    fn make_room(&mut self, io: &mut QueueIo<'_>) {
        self.watching = false;
        let is_waiting = || is_readable(&self.listener) && !self.stopping.load(Ordering::Acquire);
        if self.service.has_room() || self.making_room || !is_waiting() {
            return;
        }
        let Some((id, since)) = self.service.oldest_negotiation() else { return };
        let left = NEGOTIATION_LIMIT.saturating_sub(since.elapsed());
        if left.is_zero() {
            self.making_room = true;
            self.service.end_negotiation(io, id);
        } else {
            io.ring.timer(left, Self::token(DUE));
            self.watching = true;
        }
    }

    fn on_accepted(&mut self, io: &mut QueueIo<'_>, completion: Completion) {
        self.accepting = false;
        if completion.result < 0 {
            let error = Error::from_raw(-completion.result);
            if self.stopping.load(Ordering::Acquire) {
                return;
            }
            tracing::warn!(%error, "an NBD client could not be accepted");
            // Out of descriptors or memory: asking again at once would fail again at once. The next event of
            // this queue asks again.
            if !matches!(error, Error::EMFILE | Error::ENFILE | Error::ENOMEM | Error::ENOBUFS) {
                self.accept(io);
            }
            return;
        }
        // SAFETY: the descriptor is the result of an accept: new, and without another owner.
        let fd = unsafe { OwnedFd::from_raw_fd(completion.result) };
        if !self.stopping.load(Ordering::Acquire)
            && let Some(id) = self.service.add(fd, FirstPhase::Negotiate)
        {
            self.service.start(io, id);
        }
        self.accept(io);
    }

    /// Updates the count after anything that may have changed the number of clients.
    fn count(&mut self, io: &mut QueueIo<'_>) {
        let (open, counted) = (self.service.open(), self.counted);
        if open != counted {
            self.counted = open;
            self.clients.set(|count| count + usize::from(open) - usize::from(counted));
            self.accept(io);
        }
    }
}

impl QueueFrontend for SocketQueue {
    fn start(&mut self, io: &mut QueueIo<'_>) -> io::Result<()> {
        self.wake.arm(io.ring, Self::token(WOKEN));
        self.accept(io);
        Ok(())
    }

    fn on_completion(&mut self, io: &mut QueueIo<'_>, completion: Completion) -> io::Result<()> {
        match completion.token.kind {
            ACCEPTED => self.on_accepted(io, completion),
            WAITING | DUE => {
                self.make_room(io);
                self.accept(io);
            }
            WOKEN => {
                // Only stop() calls.
                self.service.leave(io);
                self.wake.arm(io.ring, Self::token(WOKEN));
            }
            _ => {
                self.service.on_completion(io, completion);
                self.accept(io);
            }
        }
        self.count(io);
        Ok(())
    }

    fn complete(&mut self, io: &mut QueueIo<'_>, slot: u16, outcome: Result<(), Errno>) {
        self.service.complete(io, slot, outcome);
        self.count(io);
    }

    fn flush(&mut self, io: &mut QueueIo<'_>) {
        self.service.flush(io);
    }

    fn quiesce(&mut self, io: &mut QueueIo<'_>) {
        // Clients of a socket connect again: their connections end with the process.
        self.service.quiesce(io);
    }

    fn quiesced(&self) -> Quiesced {
        match self.service.quiesced() {
            Quiesced::NotYet => Quiesced::NotYet,
            Quiesced::Done | Quiesced::At(_) => Quiesced::Done,
        }
    }

    fn is_idle(&self) -> bool {
        self.service.is_idle()
    }
}

/// The socket's name, and the way to all queues.
#[derive(Debug)]
struct SocketDevice {
    path: PathBuf,
    /// The path of the socket before it is live.
    staging: Option<PathBuf>,
    /// Device and inode number of the live socket, so that no other is removed.
    inode: Option<(u64, u64)>,
    listener: Arc<OwnedFd>,
    export: Arc<Export>,
    wakers: Vec<Waker>,
    stopping: Arc<AtomicBool>,
    clients: Arc<Clients>,
    record: DeviceRecord,
}

impl Device for SocketDevice {
    fn record(&self) -> DeviceRecord {
        self.record.clone()
    }

    fn go_live(&mut self) -> Result<PathBuf, FrontendError> {
        if let Some(staging) = self.staging.take() {
            let action = || format!("giving the NBD socket its name {}", self.path.display());
            fs::rename(&staging, &self.path).map_err(|source| system(action(), source))?;
            self.inode = inode_of(&self.path);
        }
        Ok(self.path.clone())
    }

    fn size_bytes(&self) -> u64 {
        self.export.size_bytes()
    }

    /// New clients see the new size; NBD cannot notify the others.
    fn resize(&mut self, size_bytes: u64) -> Result<(), FrontendError> {
        self.export.grow(size_bytes);
        Ok(())
    }

    fn in_use(&self) -> Option<String> {
        match self.clients.count() {
            0 => None,
            1 => Some(format!("1 NBD client of {}", self.path.display())),
            count => Some(format!("{count} NBD clients of {}", self.path.display())),
        }
    }

    fn stop(&mut self) -> Result<(), FrontendError> {
        self.remove_name()?;
        self.stopping.store(true, Ordering::Release);
        // Ends the queues' accepts. It fails if that was done before.
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
        for waker in &self.wakers {
            waker.wake();
        }
        match self.clients.wait_for_none(STOP_LIMIT) {
            0 => Ok(()),
            left => Err(system(
                format!(
                    "waiting {STOP_LIMIT:?} for the requests of {left} clients of {}",
                    self.path.display()
                ),
                io::ErrorKind::TimedOut.into(),
            )),
        }
    }
}

impl SocketDevice {
    fn remove_name(&mut self) -> Result<(), FrontendError> {
        let ours = self.inode.take().is_some_and(|inode| inode_of(&self.path) == Some(inode));
        let path = self.staging.take().or_else(|| ours.then(|| self.path.clone()));
        let Some(path) = path else { return Ok(()) };
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(system(format!("removing the NBD socket {}", path.display()), source))
            }
            _ => Ok(()),
        }
    }
}

fn system(action: impl Into<String>, source: io::Error) -> FrontendError {
    FrontendError::System { action: action.into(), source }
}

fn inode_of(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

fn staging_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Returns a listening socket of mode 0600 at `path`, and replaces an existing file.
fn listen_at(path: &Path) -> Result<OwnedFd, FrontendError> {
    let make = || {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        // No client can connect before listen.
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        listen(&fd, Backlog::new(BACKLOG)?)?;
        Ok(fd)
    };
    make().map_err(|source: io::Error| {
        let hint = match source.raw_os_error() {
            Some(libc::ENAMETOOLONG) => " (at most 107 bytes: choose a shorter directory)",
            _ => "",
        };
        system(format!("making the NBD socket {}{hint}", path.display()), source)
    })
}

/// Returns an error if the path has a live server, or is not a socket. The socket of a dead process is not an
/// obstacle.
fn refuse_taken_path(path: &Path) -> Result<(), FrontendError> {
    let taken = |what: &str| {
        let action = format!("taking {} for the NBD socket: {what}", path.display());
        Err(system(action, io::ErrorKind::AddrInUse.into()))
    };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(system(format!("looking at {}", path.display()), error)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return taken("the path is not a socket; move the file away");
        }
        Ok(_) => {}
    }
    let deadline = Instant::now() + DEAD_LIMIT;
    loop {
        match connect_to(path).and_then(|client| is_served(&client, deadline)) {
            Ok(false) => {}
            Ok(true) | Err(Error::EAGAIN) => {
                return taken("another process serves it; stop that process first");
            }
            Err(Error::ECONNREFUSED | Error::ENOENT) => return Ok(()),
            Err(error) => return Err(system(format!("connecting to {}", path.display()), error.into())),
        }
    }
}

/// Returns true if a client waits at a listening socket.
fn is_readable(listener: &OwnedFd) -> bool {
    let mut asked = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    poll(&mut asked, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

fn connect_to(path: &Path) -> Result<OwnedFd, Error> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let client = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(client.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(client)
}

/// Returns whether the server of `client` lives. A server that was killed still listens while the kernel ends
/// its ring: it sends no greeting, and the kernel soon closes the connection. A server that does neither
/// until `deadline` counts as alive.
fn is_served(client: &OwnedFd, deadline: Instant) -> Result<bool, Error> {
    let left = deadline.saturating_duration_since(Instant::now());
    let mut asked = [PollFd::new(client.as_fd(), PollFlags::POLLIN)];
    poll(&mut asked, PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO))?;
    let is_closed = asked[0].revents().is_some_and(|found| found.contains(PollFlags::POLLHUP));
    Ok(!is_closed || left.is_zero())
}
