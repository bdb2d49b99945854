//! A blocking connection to a replica, with time limits. The engine opens replicas, sends queries and copies
//! over it.
//!
//! It carries no requests of a frontend. After the handshake it can become the connection of a queue.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use shorthorn_control::Secret;
use shorthorn_recovery::OTHER_RUN;
use shorthorn_ring::set_up_tcp;
use shorthorn_types::{Errno, Generation};
use shorthorn_wire::{
    BadPage, Challenge, CopyEnd, EngineClaim, ExtentsPage, ExtentsQuery, Flags, FrameError, HEADER_BYTES,
    Header, Hello, KeepSums, LayerCheck, LayerList, LayerPatch, LayerRange, Nonce, Opcode, ProvenWelcome,
    Refusal, Session, Unproven, Welcome, decode_text, encode_patch, encode_text,
};
use thiserror::Error;

/// Room for whole requests in the socket, so that large ones are not sent piecemeal; the system may give
/// less.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;

/// The reason why a replica could not be opened or has refused a request.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The text is not an address.
    #[error("{0:?} is not an address: use unix:<path> or tcp:<ip>:<port>")]
    Address(String),
    /// The volume no longer has the replica.
    #[error("the replica was given up")]
    GivenUp,
    /// The replica runs in another process than the one whose answers the engine has used.
    #[error("{OTHER_RUN}")]
    OtherRun,
    /// The connection cannot be encrypted.
    #[error(transparent)]
    Encryption(#[from] EncryptionError),
    /// The connection cannot be made or broke.
    #[error("{action}: {source}")]
    Io { action: String, source: io::Error },
    /// The peer does not speak the protocol.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The peer has sent an impossible page.
    #[error(transparent)]
    Page(#[from] BadPage),
    /// The peer has not proven that it has the volume's secret. It counts as a replica that does not answer.
    #[error(transparent)]
    Unproven(#[from] Unproven),
    /// The peer has sent a frame that does not fit the current step.
    #[error("unexpected {0}")]
    Unexpected(Header),
    /// A newer engine holds the replica.
    #[error("{message}")]
    Deposed {
        /// The generation of the newer engine.
        holder: Generation,
        message: String,
    },
    /// The replica refuses this engine, or this request.
    #[error("{message} ({errno})")]
    Refused {
        message: String,
        /// The errno of the answer.
        errno: Errno,
    },
}

impl ConnectError {
    /// Returns true if a retry cannot succeed soon, because the operator has to change something first.
    pub fn is_lasting(&self) -> bool {
        const MISTAKEN: [i32; 3] = [nix::libc::ENXIO, nix::libc::EACCES, nix::libc::EINVAL];
        match self {
            ConnectError::Address(_) => true,
            ConnectError::Frame(error) => matches!(error, FrameError::Version(_) | FrameError::Magic(_)),
            ConnectError::Refused { errno, .. } => MISTAKEN.contains(&errno.raw()),
            ConnectError::Io { .. }
            | ConnectError::GivenUp
            | ConnectError::OtherRun
            | ConnectError::Page(_)
            // An attacker in the network must not keep the engine from the replica for long.
            | ConnectError::Unproven(_)
            | ConnectError::Encryption(_)
            | ConnectError::Unexpected(_)
            | ConnectError::Deposed { .. } => false,
        }
    }

    /// Returns true if the replica is reachable and has answered with an error or nonsense.
    pub fn is_of_replica(&self) -> bool {
        match self {
            ConnectError::Frame(_)
            | ConnectError::Page(_)
            | ConnectError::Unexpected(_)
            | ConnectError::Refused { .. } => true,
            ConnectError::Address(_)
            | ConnectError::GivenUp
            | ConnectError::OtherRun
            | ConnectError::Io { .. }
            | ConnectError::Unproven(_)
            | ConnectError::Encryption(_)
            | ConnectError::Deposed { .. } => false,
        }
    }
}

/// The socket of a replica that has taken this engine and proven itself.
#[derive(Debug)]
pub struct ReadyConnection {
    pub socket: OwnedFd,
    pub session: Session,
}

/// A blocking connection.
#[derive(Debug)]
pub struct ReplicaConnection {
    stream: ReplicaSocket,
    /// True if it has to be encrypted before the hello.
    is_to_encrypt: bool,
    /// The time limit of each step; none for no limit.
    timeout: Option<Duration>,
    /// The deadline of the exchange to which the next steps belong.
    deadline: Option<Instant>,
    /// The deadline for all pages of the set of regions that is being read.
    pages_deadline: Option<Instant>,
    /// Makes and reads the headers of frames. None before the welcome.
    session: Option<Session>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepDirection {
    In,
    Out,
}

#[derive(Debug)]
enum ReplicaSocket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// Connects with a limit. If a listener's process takes no connection, connect waits without a limit once the
/// backlog is full. A limit for sending on the socket prevents that: unix_stream_connect of
/// net/unix/af_unix.c.
fn connect_unix(path: &str, timeout: Duration) -> io::Result<UnixStream> {
    let stream =
        UnixStream::from(socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?);
    stream.set_write_timeout(Some(timeout))?;
    connect(stream.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(stream)
}

impl ReplicaConnection {
    /// Connects to `unix:<path>` or `tcp:<ip>:<port>`; `timeout` holds for this and every later step.
    pub fn open(address: &str, timeout: Duration) -> Result<ReplicaConnection, ConnectError> {
        let io = |source| ConnectError::Io { action: format!("connect to {address}"), source };
        if let Some(path) = address.strip_prefix("unix:") {
            let stream = connect_unix(path, timeout).map_err(io)?;
            // The system's limit may be lower: then requests are sent in more pieces.
            let _ = setsockopt(&stream, sockopt::SndBuf, &SOCKET_BUFFER_BYTES);
            return ReplicaConnection::new(ReplicaSocket::Unix(stream), timeout).map_err(io);
        }
        let tcp: Option<SocketAddr> = address.strip_prefix("tcp:").and_then(|rest| rest.parse().ok());
        let socket = tcp.ok_or_else(|| ConnectError::Address(address.to_owned()))?;
        let stream = TcpStream::connect_timeout(&socket, timeout).map_err(io)?;
        set_up_tcp(&stream).map_err(io)?;
        ReplicaConnection::new(ReplicaSocket::Tcp(stream), timeout).map_err(io)
    }

    fn new(stream: ReplicaSocket, timeout: Duration) -> io::Result<ReplicaConnection> {
        let (deadline, pages_deadline, session) = Default::default();
        let mut connection = ReplicaConnection {
            stream,
            is_to_encrypt: false,
            timeout: None,
            deadline,
            pages_deadline,
            session,
        };
        connection.set_timeout(Some(timeout))?;
        Ok(connection)
    }

    /// Sets the time limit of every later step; none for no limit.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.timeout = timeout;
        self.set_direction_timeout(StepDirection::In, timeout)?;
        self.set_direction_timeout(StepDirection::Out, timeout)
    }

    fn set_direction_timeout(&self, direction: StepDirection, timeout: Option<Duration>) -> io::Result<()> {
        match (&self.stream, direction) {
            (ReplicaSocket::Unix(stream), StepDirection::In) => stream.set_read_timeout(timeout),
            (ReplicaSocket::Unix(stream), StepDirection::Out) => stream.set_write_timeout(timeout),
            (ReplicaSocket::Tcp(stream), StepDirection::In) => stream.set_read_timeout(timeout),
            (ReplicaSocket::Tcp(stream), StepDirection::Out) => stream.set_write_timeout(timeout),
        }
    }

    /// Sets when the exchange has to have ended that begins now, with all of its steps; none: it has ended.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// Does a part of the exchange that has a deadline of its own.
    fn within<T>(&mut self, deadline: Option<Instant>, act: impl FnOnce(&mut ReplicaConnection) -> T) -> T {
        let before = self.deadline;
        self.deadline = before.into_iter().chain(deadline).min();
        let result = act(self);
        self.deadline = before;
        result
    }

    /// Fills `data`, within the time that a step may take, even if the peer sends only a byte now and then.
    fn read_all(&mut self, data: &mut [u8]) -> io::Result<()> {
        let (length, mut rest) = (data.len(), data);
        self.step(StepDirection::In, length, |connection| {
            let count = connection.read(rest)?;
            rest = &mut std::mem::take(&mut rest)[count..];
            Ok(count)
        })
    }

    /// Sends `data`, within the time that a step may take, even if the peer reads only a byte now and then.
    fn write_all_in_time(&mut self, data: &[u8]) -> io::Result<()> {
        let mut rest = data;
        self.step(StepDirection::Out, data.len(), |connection| {
            let count = connection.write(rest)?;
            rest = &rest[count..];
            Ok(count)
        })
    }

    /// Calls `act` until all bytes of a step have arrived.
    fn step(
        &mut self,
        direction: StepDirection,
        length_bytes: usize,
        mut act: impl FnMut(&mut ReplicaConnection) -> io::Result<usize>,
    ) -> io::Result<()> {
        let step_end = self.timeout.map(|timeout| Instant::now() + timeout);
        let end = step_end.into_iter().chain(self.deadline).min();
        let (mut done, mut is_short) = (0, false);
        while done < length_bytes {
            // The socket has the time of a whole step, unless the exchange ends sooner.
            if let Some(end) = end.filter(|_| done > 0 || self.deadline.is_some()) {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                self.set_direction_timeout(direction, Some(left))?;
                is_short = true;
            }
            match act(self) {
                Ok(0) if direction == StepDirection::In => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if is_short { self.set_direction_timeout(direction, self.timeout) } else { Ok(()) }
    }

    /// Sends the hello. When it answers, the replica has fenced every older engine, and has proven that it
    /// has the secret.
    pub fn handshake(&mut self, claim: EngineClaim, secret: &Secret) -> Result<Welcome, ConnectError> {
        let challenge: Challenge = self.receive(Opcode::Challenge)?;
        if self.is_to_encrypt {
            self.encrypt(&challenge, secret)?;
        }
        let nonce = draw_nonce()?;
        let session = Session::of_engine(secret, challenge.nonce, nonce, &claim);
        self.send_text(Opcode::Hello, &Hello::new(claim, nonce, &challenge, secret))?;
        let (header, text) = self.receive_answer(Opcode::Hello)?;
        header.outcome().map_err(|errno| refusal(&header, &text, errno, &session))?;
        let proven: ProvenWelcome = decode_text(&header, &text)?;
        let welcome = session.take_welcome(&proven)?;
        welcome.check()?;
        self.session = Some(session);
        Ok(welcome)
    }

    /// Sends a PING, and waits for the answer. The replica keeps the connection open for another minute.
    pub fn ping(&mut self) -> Result<(), ConnectError> {
        self.send(&Header::request(Opcode::Ping, 0, 0, 0), &[])?;
        self.receive_frame(Opcode::Ping).map(drop)
    }

    /// Lists the layers of the replica. `volume_bytes` is asked after the answer has arrived.
    pub fn list_layers(&mut self, volume_bytes: impl FnOnce() -> u64) -> Result<LayerList, ConnectError> {
        self.send(&Header::request(Opcode::Layers, 0, 0, 0), &[])?;
        let list: LayerList = self.receive(Opcode::Layers)?;
        list.check(volume_bytes())?;
        Ok(list)
    }

    /// Lists the extents of a layer, a page at a time. `layer_bytes` is asked after the answer has arrived.
    pub fn list_extents(
        &mut self,
        query: ExtentsQuery,
        layer_bytes: impl FnOnce() -> u64,
    ) -> Result<ExtentsPage, ConnectError> {
        let page: ExtentsPage = self.ask(Opcode::Extents, &query)?;
        page.check(&query, layer_bytes())?;
        Ok(page)
    }

    /// Fills `data` from `offset_bytes` of one layer. With [`Flags::CHECKED`] in `flags`, rot is an error.
    /// Returns true if checksums then confirm each block.
    pub fn read_layer(
        &mut self,
        layer: u32,
        offset_bytes: u64,
        data: &mut [u8],
        flags: Flags,
    ) -> Result<bool, ConnectError> {
        let mut request = layer_request(Opcode::ReadLayer, layer, offset_bytes, data);
        request.flags = flags;
        self.send(&request, &[])?;
        let header = self.receive_header(Opcode::ReadLayer)?;
        self.judge(&header, &[])?;
        if header.data_bytes() as usize != data.len() {
            return Err(ConnectError::Unexpected(header));
        }
        self.read_all(data).map_err(broken)?;
        header.check_data(crc32c::crc32c(data))?;
        Ok(header.flags.has(Flags::CHECKED))
    }

    /// Writes `data` to `offset_bytes` of one layer of a replica that is being copied to.
    pub fn write_layer(
        &mut self,
        layer: u32,
        offset_bytes: u64,
        data: &[u8],
        flags: Flags,
    ) -> Result<(), ConnectError> {
        let mut request = layer_request(Opcode::WriteLayer, layer, offset_bytes, data);
        request.flags = flags;
        request.data_check = crc32c::crc32c(data);
        self.send(&request, &[])?;
        self.write_all_in_time(data).map_err(broken)?;
        self.receive_frame(Opcode::WriteLayer).map(drop)
    }

    /// Ends the copy of one layer.
    pub fn layer_copy_end(&mut self, layer: u32) -> Result<(), ConnectError> {
        self.exchange_text(Opcode::CopyEnd, &CopyEnd { layer: Some(layer) })
    }

    /// Returns the check of a piece of a snapshot's layer.
    pub fn check_layer(&mut self, piece: &LayerRange) -> Result<LayerCheck, ConnectError> {
        let check: LayerCheck = self.ask(Opcode::CheckLayer, piece)?;
        check.check()?;
        Ok(check)
    }

    /// Has the replica keep sums of a snapshot's layer.
    pub fn keep_sums(&mut self, sums: &KeepSums) -> Result<(), ConnectError> {
        self.exchange_text(Opcode::KeepSums, sums)
    }

    /// Repairs a piece of a snapshot's layer.
    pub fn repair_layer(&mut self, patch: &LayerPatch, data: &[u8]) -> Result<(), ConnectError> {
        let (header, text) = encode_patch(0, patch, data);
        self.send(&header, &text)?;
        self.receive_frame(Opcode::RepairLayer).map(drop)
    }

    /// Returns the socket, ready for a ring, with the nonces that prove that an answer is the replica's.
    ///
    /// # Errors
    /// The error of the system; also if the handshake is not done.
    pub fn into_ready(mut self) -> io::Result<ReadyConnection> {
        self.set_timeout(None)?;
        let session = self.session.ok_or(io::ErrorKind::NotConnected)?;
        let socket = match self.stream {
            ReplicaSocket::Unix(stream) => stream.into(),
            ReplicaSocket::Tcp(stream) => stream.into(),
        };
        Ok(ReadyConnection { socket, session })
    }

    /// Sends a request with a text, and returns the text of the answer.
    fn ask<T: DeserializeOwned>(&mut self, opcode: Opcode, text: &impl Serialize) -> Result<T, ConnectError> {
        self.send_text(opcode, text)?;
        self.receive(opcode)
    }

    /// Sends a request with a text, and ignores the content of its answer.
    fn exchange_text(&mut self, opcode: Opcode, text: &impl Serialize) -> Result<(), ConnectError> {
        self.send_text(opcode, text)?;
        self.receive_frame(opcode).map(drop)
    }

    fn send_text(&mut self, opcode: Opcode, text: &impl Serialize) -> Result<(), ConnectError> {
        let (header, bytes) = encode_text(Header::request(opcode, 0, 0, 0), text);
        self.send(&header, &bytes)
    }

    fn send(&mut self, header: &Header, data: &[u8]) -> Result<(), ConnectError> {
        let header = match &mut self.session {
            Some(session) => session.encode(header),
            None => header.encode(),
        };
        self.write_all_in_time(&[&header[..], data].concat()).map_err(broken)
    }

    fn receive<T: DeserializeOwned>(&mut self, opcode: Opcode) -> Result<T, ConnectError> {
        let (header, bytes) = self.receive_frame(opcode)?;
        Ok(decode_text(&header, &bytes)?)
    }

    fn receive_frame(&mut self, opcode: Opcode) -> Result<(Header, Vec<u8>), ConnectError> {
        let (header, text) = self.receive_answer(opcode)?;
        self.judge(&header, &text)?;
        Ok((header, text))
    }

    /// Returns an error unless the replica has done the request.
    fn judge(&self, header: &Header, text: &[u8]) -> Result<(), ConnectError> {
        let Err(errno) = header.outcome() else { return Ok(()) };
        match &self.session {
            Some(session) => Err(refusal(header, text, errno, session)),
            // Before the hello, the replica has nothing to refuse.
            None => Err(ConnectError::Unexpected(*header)),
        }
    }

    /// Receives a frame with its text, of any opcode.
    fn receive_answer(&mut self, opcode: Opcode) -> Result<(Header, Vec<u8>), ConnectError> {
        let header = self.receive_header(opcode)?;
        let mut text = vec![0; header.data_bytes() as usize];
        self.read_all(&mut text).map_err(broken)?;
        Ok((header, text))
    }

    fn receive_header(&mut self, opcode: Opcode) -> Result<Header, ConnectError> {
        let mut bytes = [0; HEADER_BYTES];
        self.read_all(&mut bytes).map_err(broken)?;
        let header = match &mut self.session {
            Some(session) => session.decode(&bytes).inspect(|_| session.advance())?,
            None => Header::decode(&bytes)?,
        };
        if header.opcode == opcode { Ok(header) } else { Err(ConnectError::Unexpected(header)) }
    }
}

/// Polls a future of [`shorthorn_recovery`] once. Its connections block, so it is ready at once.
pub fn finish<T>(steps: impl Future<Output = T>) -> T {
    match pin!(steps).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => unreachable!("a step waits although connections block"),
    }
}

fn layer_request(opcode: Opcode, layer: u32, offset_bytes: u64, data: &[u8]) -> Header {
    let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
    let mut request = Header::request(opcode, 0, offset_bytes, length);
    request.status = i32::try_from(layer).unwrap_or(i32::MAX);
    request
}

fn broken(source: io::Error) -> ConnectError {
    let action = match source.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "no answer in time",
        io::ErrorKind::UnexpectedEof => "the replica closed the connection",
        _ => "the connection broke",
    };
    ConnectError::Io { action: action.to_owned(), source }
}

/// Converts a refusal, with or without a text, to an error. A refusal that names a newer engine counts only
/// with the proof that `session` requires.
pub fn refusal(header: &Header, text: &[u8], errno: Errno, session: &Session) -> ConnectError {
    let Ok(Refusal { message, holder }) = decode_text::<Refusal>(header, text) else {
        return ConnectError::Refused { message: format!("the replica refuses {:?}", header.opcode), errno };
    };
    let Some(holder) = holder else { return ConnectError::Refused { message, errno } };
    match session.take_holder(&holder) {
        Ok(holder) => ConnectError::Deposed { holder, message },
        Err(unproven) => unproven.into(),
    }
}

fn draw_nonce() -> Result<Nonce, ConnectError> {
    let mut random = [0; 32];
    getrandom::fill(&mut random).map_err(|error| ConnectError::Io {
        action: "draw a nonce".to_owned(),
        source: io::Error::other(error),
    })?;
    Ok(Nonce::new(random))
}

impl Read for ReplicaConnection {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match &mut self.stream {
            ReplicaSocket::Unix(stream) => stream.read(buf),
            ReplicaSocket::Tcp(stream) => stream.read(buf),
        }
    }
}

impl Write for ReplicaConnection {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match &mut self.stream {
            ReplicaSocket::Unix(stream) => stream.write(buf),
            ReplicaSocket::Tcp(stream) => stream.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

mod encryption;
mod replica_link;

pub use encryption::EncryptionError;

#[cfg(test)]
mod tests;
