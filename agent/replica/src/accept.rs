//! The listening sockets, and the threads that open connections.

use std::fs;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use shorthorn_ring::{bind_tcp, set_up_tcp};
use tracing::Span;

use crate::error::ReplicaError;
use crate::handshake::{Proven, ReplicaIdentity, handshake};
use crate::handshakes::{EngineHandshakes, Origin};
use crate::limits::{HANDSHAKE_TIMEOUT, SMALL_STACK_BYTES};
use crate::mailbox::{Candidate, Mailbox, Message};

/// The pause before the next try if the process has no descriptor or memory left. Connections that wait stay
/// in the backlog of the socket.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// The sockets on which engines find this replica.
#[derive(Debug)]
pub(crate) struct Listeners {
    unix: UnixListener,
    path: PathBuf,
    tcp: Option<TcpListener>,
}

impl Listeners {
    /// Binds the Unix socket at `path`, readable by its owner only, and the TCP address, if any. Replaces the
    /// socket of an earlier process.
    ///
    /// # Errors
    /// [`ReplicaError::Listen`] names the address.
    pub fn bind(path: &Path, address: Option<SocketAddr>) -> Result<Listeners, ReplicaError> {
        let unix = bind_unix(path)
            .map_err(|source| ReplicaError::Listen { address: format!("unix:{}", path.display()), source })?;
        let tcp = address.map(listen_on).transpose()?;
        Ok(Listeners { unix, path: path.to_owned(), tcp })
    }

    /// Listens on another TCP address instead of the former one.
    ///
    /// # Errors
    /// [`ReplicaError::Listen`] names the address. The former one stays.
    fn move_to(&mut self, address: SocketAddr) -> Result<(), ReplicaError> {
        let now = self.tcp.as_ref().and_then(|tcp| tcp.local_addr().ok());
        if now != Some(address) {
            self.tcp = Some(listen_on(address)?);
        }
        Ok(())
    }

    /// Returns the addresses of this replica in the form of an engine's spec.
    pub fn addresses(&self) -> Vec<String> {
        let tcp = self.tcp.as_ref().and_then(|tcp| tcp.local_addr().ok());
        let unix = format!("unix:{}", self.path.display());
        [unix].into_iter().chain(tcp.map(|address| format!("tcp:{address}"))).collect()
    }
}

impl Drop for Listeners {
    fn drop(&mut self) {
        // Another process may have removed it before: then nothing is left to do.
        let _ = fs::remove_file(&self.path);
    }
}

/// Listens on exactly this address, so that engines of other hosts reach the replica at no other one.
fn listen_on(address: SocketAddr) -> Result<TcpListener, ReplicaError> {
    bind_tcp(address)
        .and_then(|tcp| tcp.set_nonblocking(true).map(|()| tcp))
        .map_err(|source| ReplicaError::Listen { address: format!("tcp:{address}"), source })
}

fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => fs::remove_file(path)?,
        Ok(_) => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "something that is not a socket is there",
            ));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The TCP address that the accepting thread has to move to, and the event that wakes this thread.
#[derive(Debug)]
pub(crate) struct NextAddress {
    wanted: Mutex<Option<SocketAddr>>,
    event: EventFd,
}

impl NextAddress {
    /// # Errors
    /// No descriptor is available.
    pub fn new() -> Result<Arc<NextAddress>, ReplicaError> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| ReplicaError::system("make an eventfd", errno))?;
        Ok(Arc::new(NextAddress { wanted: Mutex::new(None), event }))
    }

    /// Makes the accepting thread listen on `address` instead of the former one.
    pub fn set(&self, address: SocketAddr) {
        *self.wanted.lock().unwrap_or_else(PoisonError::into_inner) = Some(address);
        self.wake();
    }

    fn take(&self) -> Option<SocketAddr> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn wake(&self) {
        // It fails only if the counter is full: then the thread is awake.
        let _ = self.event.write(1);
    }
}

/// Publishes the addresses of the replica after a change.
type Publish = dyn Fn(Vec<String>) + Send;

/// The thread that takes connections.
#[derive(Debug)]
pub(crate) struct Acceptor {
    thread: JoinHandle<()>,
    shared: Arc<AcceptorState>,
}

/// The state that the accepting thread and the handshakes share.
#[derive(Debug)]
struct AcceptorState {
    identity: ReplicaIdentity,
    data: Mailbox,
    span: Span,
    /// Wakes the accepting thread: a handshake has ended, the address changes, or everything ends.
    next: Arc<NextAddress>,
    handshakes: Mutex<EngineHandshakes<UnixStream>>,
    stopping: AtomicUsize,
}

impl Acceptor {
    /// Accepts connections on `listeners`, and sends engines that have proven their identity to the data
    /// thread. Follows `next`, and gives `publish` the addresses after each change.
    ///
    /// # Errors
    /// No thread is available for it.
    pub fn start(
        listeners: Listeners,
        (identity, data, span): (ReplicaIdentity, Mailbox, Span),
        next: Arc<NextAddress>,
        publish: Box<Publish>,
    ) -> Result<Acceptor, ReplicaError> {
        let (handshakes, stopping) = (Mutex::new(EngineHandshakes::new()), AtomicUsize::new(0));
        let shared = Arc::new(AcceptorState { identity, data, span, next, handshakes, stopping });
        let served = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("accept".into())
            .stack_size(SMALL_STACK_BYTES)
            .spawn(move || accept(listeners, &served, publish.as_ref()))
            .map_err(|source| ReplicaError::system("start a thread", source))?;
        Ok(Acceptor { thread, shared })
    }

    /// Stops accepting connections, and waits for the thread.
    pub fn stop(self) {
        self.shared.stopping.store(1, Ordering::Release);
        self.shared.wake();
        let _ = self.thread.join();
    }
}

impl AcceptorState {
    fn wake(&self) {
        self.next.wake();
    }

    fn handshakes(&self) -> MutexGuard<'_, EngineHandshakes<UnixStream>> {
        // Nothing in there panics between two changes.
        self.handshakes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn accept(mut listeners: Listeners, shared: &Arc<AcceptorState>, publish: &Publish) {
    let _in = shared.span.enter();
    while shared.stopping.load(Ordering::Acquire) == 0 {
        let full = shared.handshakes().is_full();
        if let Err(error) = wait(&listeners, shared, full) {
            tracing::warn!(%error, "waiting for connections failed");
            thread::sleep(ACCEPT_PAUSE);
        }
        let _ = shared.next.event.read();
        if let Some(address) = shared.next.take() {
            match listeners.move_to(address) {
                Ok(()) => tracing::info!(%address, "listening for engines of other hosts"),
                Err(error) => {
                    tracing::warn!("cannot listen on the new address, keeping the former address: {error}")
                }
            }
            publish(listeners.addresses());
        }
        if !full && let Err(error) = accept_one(&listeners, shared) {
            tracing::warn!(%error, "a connection could not be accepted");
            thread::sleep(ACCEPT_PAUSE); // the next try would fail the same way at once
        }
    }
}

/// Waits for a connection or the event; when `full`, for the event only.
fn wait(listeners: &Listeners, shared: &AcceptorState, full: bool) -> nix::Result<()> {
    let on = |fd| PollFd::new(fd, PollFlags::POLLIN);
    let mut fds = vec![on(shared.next.event.as_fd())];
    if !full {
        fds.push(on(listeners.unix.as_fd()));
        fds.extend(listeners.tcp.as_ref().map(|tcp| on(tcp.as_fd())));
    }
    match poll(&mut fds, PollTimeout::NONE) {
        Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// Takes at most one connection of each listener.
fn accept_one(listeners: &Listeners, shared: &Arc<AcceptorState>) -> io::Result<()> {
    if let Some((socket, _)) = unless_nothing(listeners.unix.accept())? {
        open(socket, Origin::Local, "unix".to_owned(), shared)?;
    }
    let Some(tcp) = &listeners.tcp else { return Ok(()) };
    if let Some((socket, peer)) = unless_nothing(tcp.accept())? {
        set_up_tcp(&socket)?;
        // The calls are the same for every kind of stream socket.
        let socket = UnixStream::from(OwnedFd::from(socket));
        open(socket, Origin::Remote(peer.ip()), format!("tcp:{peer}"), shared)?;
    }
    Ok(())
}

fn unless_nothing<T>(accepted: io::Result<T>) -> io::Result<Option<T>> {
    match accepted {
        Ok(accepted) => Ok(Some(accepted)),
        Err(error) => match error.kind() {
            // No connection is waiting, or it is gone again.
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {
                Ok(None)
            }
            _ => Err(error),
        },
    }
}

/// Opens the connection on a thread of its own.
fn open(socket: UnixStream, origin: Origin, peer: String, shared: &Arc<AcceptorState>) -> io::Result<()> {
    let (id, evicted) = shared.handshakes().begin(origin, socket.try_clone()?);
    if let Some(evicted) = evicted {
        // Its thread finds the end of the connection. It fails only if the peer has ended it already.
        let _ = evicted.shutdown(Shutdown::Both);
    }
    let handshake = Arc::clone(shared);
    let thread =
        thread::Builder::new().name("handshake".into()).stack_size(SMALL_STACK_BYTES).spawn(move || {
            let _in = handshake.span.enter();
            let opened = open_here(&socket, origin, &handshake);
            handshake.handshakes().end(id);
            handshake.wake();
            match opened {
                Ok(Proven { header, queue_id, session }) => {
                    let candidate = Candidate { socket: socket.into(), hello: header, session, peer };
                    // If the data thread is gone, the process ends, and the socket with it.
                    let _ = handshake.data.send(Message::Candidate(queue_id, Box::new(candidate)));
                }
                Err(error) => tracing::warn!(peer, %error, "connection refused"),
            }
        });
    if thread.is_err() {
        shared.handshakes().end(id);
    }
    thread.map(drop)
}

/// Identifies the peer of a new connection. The data thread answers the hello.
fn open_here(
    socket: &UnixStream,
    origin: Origin,
    shared: &AcceptorState,
) -> Result<Proven, Box<dyn std::error::Error>> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce)?;
    let opened = handshake(socket, origin, &shared.identity, nonce, HANDSHAKE_TIMEOUT)?;
    socket.set_read_timeout(None)?;
    socket.set_write_timeout(None)?;
    Ok(opened)
}
