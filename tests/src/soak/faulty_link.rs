//! The link between an engine and one replica, forwarded by a process of its own. It can be cut in each
//! direction, be slowed down, and damage its data.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, setns};

/// The time limit of a connection to the replica, which waits while the link is cut.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Between two looks for a connection. The socket does not block, so that its thread sees the end of the
/// link.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// The maximum bytes that are carried at once.
const CHUNK_BYTES: usize = 64 << 10;
/// The first bytes of a frame (`shorthorn_wire`).
const FRAME_MAGIC: &[u8] = b"SHRN";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkDirection {
    ToReplica,
    FromReplica,
}

/// A link, gone when dropped.
#[derive(Debug)]
pub(super) struct FaultyLink {
    shared: Arc<SharedLink>,
}

#[derive(Debug, Default)]
struct SharedLink {
    state: Mutex<ForwarderState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ForwarderState {
    is_gone: bool,
    /// True if a frame was sent to the replica in clear.
    has_seen_clear: bool,
    /// By [`LinkDirection`].
    directions: [DirectionState; 2],
    delay: Duration,
    connections: Vec<(TcpStream, TcpStream)>,
}

#[derive(Debug, Default)]
struct DirectionState {
    is_cut: bool,
    /// The choice for the next chunk that is damaged.
    damage: Option<u64>,
}

impl FaultyLink {
    /// Starts a link from `at`, in the network whose file is `network`, to the replica at `replica`.
    ///
    /// # Errors
    /// The network cannot be entered, or the address is in use.
    pub fn start(network: &Path, at: SocketAddr, replica: SocketAddr) -> Result<FaultyLink> {
        let network = File::open(network).with_context(|| format!("opening {}", network.display()))?;
        let shared: Arc<SharedLink> = Arc::default();
        let forwarder = Arc::clone(&shared);
        let (sender, started) = std::sync::mpsc::channel();
        thread::spawn(move || {
            let entered = setns(network, CloneFlags::CLONE_NEWNET).context("entering a network namespace");
            let listener = entered.and_then(|()| {
                let listener = TcpListener::bind(at).with_context(|| format!("listening on {at}"))?;
                listener.set_nonblocking(true)?;
                Ok(listener)
            });
            match listener {
                Ok(listener) => {
                    // The starter waits for it.
                    let _ = sender.send(Ok(()));
                    forwarder.accept(&listener, replica);
                }
                Err(error) => drop(sender.send(Err(error))),
            }
        });
        match started.recv() {
            Ok(Ok(())) => Ok(FaultyLink { shared }),
            Ok(Err(error)) => Err(error),
            Err(_) => bail!("the thread of a link has ended"),
        }
    }

    /// Returns true if a frame was sent to the replica in clear.
    pub fn has_seen_clear(&self) -> bool {
        self.shared.lock().has_seen_clear
    }

    /// Stops or resumes carrying data in that direction; no connection ends.
    pub fn cut(&self, direction: LinkDirection, is_cut: bool) {
        self.shared.lock().directions[direction as usize].is_cut = is_cut;
        self.shared.changed.notify_all();
    }

    /// Delays all data by this time, piece by piece.
    pub fn delay(&self, time: Duration) {
        self.shared.lock().delay = time;
    }

    /// Damages the next data in that direction, as `choice` says.
    pub fn damage(&self, direction: LinkDirection, choice: u64) {
        self.shared.lock().directions[direction as usize].damage = Some(choice);
    }

    /// Returns true if the next chunk in that direction is going to be damaged.
    pub fn is_to_damage(&self, direction: LinkDirection) -> bool {
        self.shared.lock().directions[direction as usize].damage.is_some()
    }

    /// Cancels the damage that has not happened yet.
    pub fn spare(&self, direction: LinkDirection) {
        self.shared.lock().directions[direction as usize].damage = None;
    }

    /// Ends all connections.
    pub fn close(&self) {
        for (engine, replica) in self.shared.lock().connections.drain(..) {
            end(&engine, &replica);
        }
    }
}

impl Drop for FaultyLink {
    fn drop(&mut self) {
        self.shared.lock().is_gone = true;
        self.shared.changed.notify_all();
        self.close();
    }
}

fn end(engine: &TcpStream, replica: &TcpStream) {
    for stream in [engine, replica] {
        // It may have ended by itself.
        let _ = stream.shutdown(Shutdown::Both);
    }
}

impl SharedLink {
    fn lock(&self) -> MutexGuard<'_, ForwarderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: Arc<Self>, listener: &TcpListener, replica: SocketAddr) {
        while !self.lock().is_gone {
            match listener.accept() {
                Ok((engine, _)) => {
                    let link = Arc::clone(&self);
                    // A failed connection ends, which notifies its client.
                    thread::spawn(move || link.carry(engine, replica).is_ok());
                }
                Err(_) => thread::sleep(ACCEPT_PAUSE),
            }
        }
    }

    fn carry(self: Arc<Self>, engine: TcpStream, replica: SocketAddr) -> io::Result<()> {
        engine.set_nonblocking(false)?;
        engine.set_nodelay(true)?;
        self.wait_until_open(LinkDirection::ToReplica)?;
        let replica = TcpStream::connect_timeout(&replica, CONNECT_LIMIT)?;
        replica.set_nodelay(true)?;
        self.lock().connections.push((engine.try_clone()?, replica.try_clone()?));
        let back = (replica.try_clone()?, engine.try_clone()?);
        let link = Arc::clone(&self);
        let other = thread::spawn(move || link.forward(LinkDirection::FromReplica, &back.0, &back.1));
        self.forward(LinkDirection::ToReplica, &engine, &replica);
        // Nothing is left to be done if the other direction has panicked.
        let _ = other.join();
        self.lock().connections.retain(|(known, _)| known.peer_addr().is_ok());
        Ok(())
    }

    /// Carries everything in one direction until the connection ends, and then ends it for both.
    fn forward(&self, direction: LinkDirection, mut from: &TcpStream, mut to: &TcpStream) {
        let mut chunk = vec![0; CHUNK_BYTES];
        while let Ok(length) = from.read(&mut chunk) {
            self.record_clear_frame(direction, &chunk[..length]);
            // The end of a connection does not pass either.
            let Ok(pieces) =
                self.wait_until_open(direction).map(|()| self.pieces(direction, &mut chunk[..length]))
            else {
                break;
            };
            if length == 0 || pieces.iter().any(|piece| to.write_all(&chunk[piece.clone()]).is_err()) {
                break;
            }
        }
        end(from, to);
    }

    /// Records a chunk that begins with the header of a frame: encrypted ones begin with that of a record.
    fn record_clear_frame(&self, direction: LinkDirection, chunk: &[u8]) {
        if direction == LinkDirection::ToReplica && chunk.starts_with(FRAME_MAGIC) {
            self.lock().has_seen_clear = true;
        }
    }

    fn wait_until_open(&self, direction: LinkDirection) -> io::Result<()> {
        let closed =
            |state: &mut ForwarderState| state.directions[direction as usize].is_cut && !state.is_gone;
        let state = self.changed.wait_while(self.lock(), closed).unwrap_or_else(PoisonError::into_inner);
        let (is_gone, delay) = (state.is_gone, state.delay);
        drop(state);
        // The delay of a slow link is the fault itself.
        thread::sleep(delay);
        if is_gone { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(()) }
    }

    /// Returns the pieces of a chunk to send, which may be damaged.
    fn pieces(&self, direction: LinkDirection, chunk: &mut [u8]) -> Vec<std::ops::Range<usize>> {
        let whole = 0..chunk.len();
        let direction = &mut self.lock().directions[direction as usize];
        let Some(choice) = (if chunk.is_empty() { None } else { direction.damage.take() }) else {
            return vec![whole];
        };
        let at = usize::try_from(choice >> 16).unwrap_or(0) % chunk.len();
        match choice % 8 {
            // There twice.
            0 => vec![whole.clone(), whole],
            // Missing in part, or all of it.
            1 => vec![0..at, chunk.len().min(at + 24)..chunk.len()],
            2 => vec![],
            // One bit.
            _ => {
                chunk[at] ^= 1 << (choice >> 8 & 7);
                vec![whole]
            }
        }
    }
}
